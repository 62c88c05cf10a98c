//! The audit log: two JSON lines for each change, the intent before it and the outcome after it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    path::Path,
    time::SystemTime,
};

use serde_json::{Value, json};

use crate::{cli::ChangeArgs, failure::Failure, output::time};

/// A change that is recorded in the log.
pub(crate) struct AuditedChange {
    file: File,
    line: Value,
}

impl AuditedChange {
    /// Writes the intent, and waits until it is on the disk. The caller changes nothing if this fails.
    pub(crate) fn begin(
        path: &Path,
        args: &ChangeArgs,
        what: &str,
        id: Option<&str>,
        before: &Value,
    ) -> Result<Self, Failure> {
        let refused = |error: io::Error| {
            Failure::failed(format!(
                "cannot write the audit log {}, so nothing was changed: {error}",
                path.display()
            ))
        };
        let file = open(path).map_err(refused)?;
        let line = intent(args, what, id, before);
        let mut change = Self { file, line };
        change.append().map_err(refused)?;
        Ok(change)
    }

    /// Writes the outcome. If this fails, the change may have taken effect, and the log shows the intent alone.
    pub(crate) fn finish(mut self, outcome: &str, after: Value) -> Result<(), Failure> {
        into_outcome(&mut self.line, outcome, after);
        self.append().map_err(|error| {
            Failure::failed(format!(
                "the outcome is \"{outcome}\", but the audit log cannot be written: {error}"
            ))
        })
    }

    /// Appends the line in one write, so that lines of other processes are not mixed with it.
    fn append(&mut self) -> io::Result<()> {
        let line = format!("{}\n", self.line);
        self.file.write_all(line.as_bytes())?;
        self.file.sync_all()
    }
}

/// Returns the line that comes before the change.
pub(crate) fn intent(args: &ChangeArgs, what: &str, id: Option<&str>, before: &Value) -> Value {
    json!({
        "at": time(SystemTime::now()),
        "line": "intent",
        "actor": args.actor,
        "source": "cli",
        "what": what,
        "why": args.reason,
        "id": id,
        "before": before,
    })
}

/// Makes it the line that comes after the change.
pub(crate) fn into_outcome(line: &mut Value, outcome: &str, after: Value) {
    line["at"] = json!(time(SystemTime::now()));
    line["line"] = json!("outcome");
    line["outcome"] = json!(outcome);
    line["after"] = after;
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}
