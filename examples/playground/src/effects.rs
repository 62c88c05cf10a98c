//! The executions of the handlers, counted independently of the responses.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
    process,
    sync::{Mutex, PoisonError},
};

use axum::http::Method;
use serde::Serialize;
use tower_idempotency::IdempotencyKey;

/// Counts executions, and writes each to the file if there is one.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    executions: Mutex<Executions>,
    file: Option<File>,
}

/// The number of executions, in total and by path.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Executions {
    total: u64,
    paths: BTreeMap<String, u64>,
}

impl Effects {
    /// Also appends a line for each execution to the file at `path`.
    pub(crate) fn in_file(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(Self {
            executions: Mutex::default(),
            file: Some(file),
        })
    }

    /// Counts an execution that begins. Returns its number, from 1.
    pub(crate) fn begin(
        &self,
        method: &Method,
        path: &str,
        key: Option<&IdempotencyKey>,
    ) -> io::Result<u64> {
        let n = {
            let mut executions = self
                .executions
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            executions.total += 1;
            *executions.paths.entry(path.to_owned()).or_default() += 1;
            executions.total
        };
        if let Some(mut file) = self.file.as_ref() {
            let key = key.map_or("-", IdempotencyKey::as_str);
            let line = format!("{} {n} {method} {path} {key}\n", process::id());
            // A single write to a file opened for appending keeps the lines of several processes separate. A written line
            // survives a kill of the process.
            file.write_all(line.as_bytes())?;
        }
        Ok(n)
    }

    pub(crate) fn executions(&self) -> Executions {
        let executions = self.executions.lock();
        executions.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use std::{env, fs, path::PathBuf, thread};

    use super::*;

    /// A new directory, which is removed when this is dropped.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new() -> Self {
            let name = |n| format!("playground-effects-{}-{n}", process::id());
            // A process with the same id may have left a directory, or may use one in another container.
            let mut paths = (0..1000).map(|n| env::temp_dir().join(name(n)));
            let path = paths.find(|path| fs::create_dir(path).is_ok());
            Self(path.expect("a directory for throwaway files"))
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn lines_of_several_writers_never_mix() {
        let scratch = Scratch::new();
        let path = scratch.0.join("effects");
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let effects = Effects::in_file(&path).unwrap();
                    for _ in 0..100 {
                        effects.begin(&Method::POST, "/orders", None).unwrap();
                    }
                });
            }
        });
        let text = fs::read_to_string(&path).unwrap();
        let mut lines: Vec<_> = text.lines().collect();
        lines.sort_unstable();
        let mut expected: Vec<_> = (0..800)
            .map(|i| format!("{} {} POST /orders -", process::id(), i % 100 + 1))
            .collect();
        expected.sort_unstable();
        assert_eq!(lines, expected);
    }
}
