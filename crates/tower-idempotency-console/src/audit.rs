//! The audit log: two JSON lines for each change, the intent before it and the outcome after it.
//!
//! A program that changes an entry follows one rule: no audit line, no change. [`AuditLog::begin`] writes the intent and
//! waits until it is on the disk. [`AuditedChange::finish`] writes the outcome. The console and the tool `idempotency` write
//! the same lines, so they can share a file.
//!
//! ```
//! use serde_json::json;
//! use tower_idempotency_console::audit::{AuditLog, Intent, change_id};
//!
//! # fn main() -> std::io::Result<()> {
//! # let path = std::env::temp_dir().join(format!("audit-example-{}", std::process::id()));
//! let log = AuditLog::new(&path);
//! let change = log.begin(&Intent {
//!     change: &change_id(),
//!     store: "postgres",
//!     actor: "alice",
//!     source: "console",
//!     decision: "retry",
//!     reason: "ticket 17",
//!     id: Some("6f1c0a2b"),
//!     before: &json!({"state": "orphaned"}),
//! })?;
//! // The change is made here.
//! change.finish("applied", json!({"state": "orphaned", "retry_allowed": true}))?;
//!
//! let lines = log.recent(10)?;
//! assert_eq!(lines[0]["outcome"], "applied");
//! assert_eq!(lines[1]["line"], "intent");
//! assert_eq!(lines[1]["change"], lines[0]["change"]);
//! # std::fs::remove_file(&path)
//! # }
//! ```
//!
//! # Members of a line
//!
//! | member | contents |
//! |---|---|
//! | `at` | time, RFC 3339 |
//! | `line` | `intent` or `outcome` |
//! | `change` | ID of the change, which its two lines have in common |
//! | `store` | name of the store, without a password |
//! | `actor` | the operator |
//! | `source` | `cli`, `console` or `api` |
//! | `what` | the decision, such as `retry`, or `purge` |
//! | `why` | the reason |
//! | `id` | ID of the entry, or `null` for a purge |
//! | `before` | the entry before, with the reason and the trace of its record |
//! | `outcome` | `applied`, `changed`, or a text that begins with `unknown` or `failed`; in the outcome line |
//! | `after` | the entry after, or `null`; in the outcome line |
//!
//! A line contains no key, no principal and no response. The reason of an entry is text of the service. Characters that a
//! terminal obeys are escaped.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    hash::{BuildHasher as _, RandomState},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};
use tower_idempotency::inspect::{InspectError, InspectErrorKind};

use crate::describe::{json_text, time};

/// A file to which audit lines are appended. Its functions block the thread.
///
/// A missing file is created, readable for the user of the process only. Several processes may append to one file. The file
/// is opened for each change, so it can be rotated by renaming it.
#[derive(Clone, Debug)]
pub struct AuditLog {
    path: PathBuf,
}

/// The intent to change an entry.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::exhaustive_structs,
    reason = "a program that audits a change must set each member"
)]
pub struct Intent<'a> {
    /// ID of the change, from [`change_id`].
    pub change: &'a str,
    /// Name of the store, without a password.
    pub store: &'a str,
    /// The operator.
    pub actor: &'a str,
    /// The program: `cli`, `console` or `api`.
    pub source: &'a str,
    /// The decision, such as `retry`.
    pub decision: &'a str,
    /// The reason that the operator gave.
    pub reason: &'a str,
    /// ID of the entry, if the change is about one entry.
    pub id: Option<&'a str>,
    /// The entry before the change.
    pub before: &'a Value,
}

impl Intent<'_> {
    /// Returns the line that comes before the change, for a log that is not a file.
    #[must_use]
    pub fn to_line(&self) -> Value {
        json!({
            "at": time(SystemTime::now()),
            "line": "intent",
            "change": self.change,
            "store": self.store,
            "actor": self.actor,
            "source": self.source,
            "what": self.decision,
            "why": self.reason,
            "id": self.id,
            "before": self.before,
        })
    }
}

/// Returns a random ID for the lines of a change: 16 hexadecimal digits.
#[must_use]
pub fn change_id() -> String {
    let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    // The seed of each `RandomState` is random.
    let random = RandomState::new().hash_one((at.ok(), std::process::id()));
    format!("{random:016x}")
}

/// Returns `true` if a resolution that ended with this error has changed nothing. Its outcome is then `failed`, else
/// `unknown`.
#[must_use]
pub fn changes_nothing(error: &InspectError) -> bool {
    matches!(
        error.kind(),
        InspectErrorKind::Refused
            | InspectErrorKind::WrongState
            | InspectErrorKind::RecordTooLarge { .. }
            | InspectErrorKind::Unsupported
    )
}

/// Changes the line of an intent into the line that comes after the change.
pub fn into_outcome(line: &mut Value, outcome: &str, after: Value) {
    line["at"] = json!(time(SystemTime::now()));
    line["line"] = json!("outcome");
    line["outcome"] = json!(outcome);
    line["after"] = after;
}

/// A change whose intent is in the log. Dropping it leaves the intent alone, which readers show as an unknown outcome.
#[derive(Debug)]
#[must_use = "the log has no outcome until `finish` is called"]
pub struct AuditedChange {
    file: File,
    line: Value,
}

impl AuditLog {
    /// Creates a log in this file. The first line creates the file if it is missing.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the intent, and waits until it is on the disk. The caller changes nothing if this fails.
    ///
    /// # Errors
    ///
    /// The file cannot be opened, written or synchronized.
    pub fn begin(&self, intent: &Intent<'_>) -> io::Result<AuditedChange> {
        // A log that may be appended to need not be readable.
        let file = append().read(true).open(&self.path);
        let file = file.or_else(|_| append().open(&self.path))?;
        let mut change = AuditedChange {
            file,
            line: intent.to_line(),
        };
        change.append()?;
        Ok(change)
    }

    /// Returns up to `limit` of the last lines, the last one first. Reads at most the last 256 KiB of the file.
    ///
    /// A missing file has no lines. A line that is no JSON object is left out, such as one that a full disk cut off.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn recent(&self, limit: usize) -> io::Result<Vec<Value>> {
        self.tail(limit).map(|(lines, _)| lines)
    }

    /// Returns lines like [`recent`](Self::recent), and `true` if these are the lines of the whole file.
    pub(crate) fn tail(&self, limit: usize) -> io::Result<(Vec<Value>, bool)> {
        let metadata = match fs::metadata(&self.path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), true)),
            Err(error) => return Err(error),
        };
        // A device or a pipe cannot be read back. Opening a pipe would wait for a writer.
        if !metadata.is_file() {
            return Ok((Vec::new(), false));
        }
        let mut file = File::open(&self.path)?;
        // Another file, if the log has been rotated meanwhile.
        let metadata = file.metadata()?;
        file.seek(SeekFrom::Start(metadata.len().saturating_sub(TAIL)))?;
        let mut tail = Vec::new();
        file.take(TAIL).read_to_end(&mut tail)?;
        let lines = tail.rsplit(|byte| *byte == b'\n');
        let lines = lines.filter_map(|line| serde_json::from_slice::<Value>(line).ok());
        let lines = lines.filter(Value::is_object).take(limit).collect();
        Ok((lines, metadata.len() <= TAIL))
    }
}

impl AuditedChange {
    /// Writes the outcome. If this fails, the change may have taken effect, and the log shows the intent alone.
    ///
    /// # Errors
    ///
    /// The file cannot be written or synchronized.
    pub fn finish(mut self, outcome: &str, after: Value) -> io::Result<()> {
        into_outcome(&mut self.line, outcome, after);
        self.append()
    }

    /// Appends the line under a lock of the file, so that lines of other processes are not mixed with it.
    fn append(&mut self) -> io::Result<()> {
        self.lock()?;
        let written = self.write();
        self.file.unlock().ok();
        written
    }

    fn write(&mut self) -> io::Result<()> {
        let is_file = self.file.metadata()?.is_file();
        let end = if is_file && self.ends_within_line() {
            "\n"
        } else {
            ""
        };
        let line = format!("{end}{}\n", json_text(&self.line));
        self.file.write_all(line.as_bytes())?;
        // A pipe or a terminal has no disk to wait for.
        if is_file {
            self.file.sync_all()?;
        }
        Ok(())
    }

    /// Waits for another process that writes a line, for at most five seconds.
    fn lock(&self) -> io::Result<()> {
        for _ in 0..500 {
            match self.file.try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(10)),
                // A file system without locks.
                Err(TryLockError::Error(_)) => return Ok(()),
            }
        }
        let message = "another process holds the lock of the audit log";
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }

    /// Returns `true` if the last line has no end, because the disk was full in the middle of it.
    fn ends_within_line(&mut self) -> bool {
        let mut last = [0];
        let read = self.file.seek(SeekFrom::End(-1));
        let read = read.and_then(|_| self.file.read_exact(&mut last));
        read.is_ok() && last != *b"\n"
    }
}

/// Returns the options that append to a file. A new file is readable for its owner only. The reasons in the log are for
/// operators, and a user who can open the file can hold its lock.
fn append() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).append(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// Bytes at the end of the file that `recent` reads.
const TAIL: u64 = 256 * 1024;

#[cfg(test)]
mod tests {
    use std::fs;

    use ::tests::scratch::Scratch;

    use super::*;

    fn intent<'a>(reason: &'a str, before: &'a Value) -> Intent<'a> {
        Intent {
            change: "0123456789abcdef",
            store: "memory",
            actor: "alice",
            source: "console",
            decision: "free",
            reason,
            id: Some("id"),
            before,
        }
    }

    #[test]
    fn line_after_partial_line_is_complete() {
        let scratch = Scratch::new();
        let path = scratch.file("log");
        fs::write(&path, "{\"line\":\"intent\",\"wh").unwrap();
        let log = AuditLog::new(&path);
        let change = log.begin(&intent("line\nbreak", &Value::Null)).unwrap();
        change.finish("applied", Value::Null).unwrap();
        let lines = log.recent(10).unwrap();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["outcome"], "applied");
        assert_eq!(lines[1]["why"], "line\nbreak");
    }

    #[test]
    fn lines_of_several_writers_never_mix() {
        let scratch = Scratch::new();
        let path = scratch.file("log");
        let log = AuditLog::new(&path);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..25 {
                        let before = json!("x".repeat(3_000));
                        let change = log.begin(&intent("x", &before)).unwrap();
                        change.finish("applied", Value::Null).unwrap();
                    }
                });
            }
        });
        let text = fs::read_to_string(&path).unwrap();
        let lines = text.lines().map(serde_json::from_str::<Value>);
        assert_eq!(lines.map(Result::unwrap).count(), 400);
    }

    #[test]
    fn recent_reads_only_tail() {
        let scratch = Scratch::new();
        let path = scratch.file("log");
        let line = format!("{{\"n\":\"{}\"}}\n", "x".repeat(1000));
        fs::write(&path, line.repeat(2000)).unwrap();
        let lines = AuditLog::new(&path).recent(usize::MAX).unwrap();
        assert!((200..=262).contains(&lines.len()), "{}", lines.len());
        assert_ne!(change_id(), change_id());
        let missing = AuditLog::new("/no/such/file").recent(1).unwrap();
        assert!(missing.is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn log_is_private_and_pipe_has_no_lines() {
        use std::{os::unix::fs::PermissionsExt as _, process::Command};

        let scratch = Scratch::new();
        let (path, pipe) = (scratch.file("log"), scratch.file("pipe"));
        let change = AuditLog::new(&path).begin(&intent("x", &Value::Null));
        change.unwrap().finish("applied", Value::Null).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // A pipe without a writer would block.
        assert!(
            Command::new("mkfifo")
                .arg(&pipe)
                .status()
                .unwrap()
                .success()
        );
        let lines = AuditLog::new(&pipe).recent(10);
        assert!(lines.unwrap().is_empty());
    }

    #[test]
    fn full_device_is_error() {
        let log = AuditLog::new("/dev/full");
        assert!(log.begin(&intent("x", &Value::Null)).is_err());
    }
}
