//! The audit log: two JSON lines for each change, the intent before it and the outcome after it.
//!
//! A program that changes an entry follows one rule: no audit line, no change. [`AuditLog::begin`] writes the intent and
//! waits until it is on the disk. [`AuditedChange::finish`] writes the outcome. The lines are in a file, in a table of a SQL
//! store, or in both. The console and the tool `idempotency` write the same lines, so they can share a log.
//!
//! ```
//! use serde_json::json;
//! use tower_idempotency_console::audit::{AuditLog, Intent, change_id};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
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
//! })
//! .await?;
//! // The change is made here.
//! change.finish("applied", json!({"state": "orphaned", "retry_allowed": true})).await?;
//!
//! let lines = log.recent(10).await?;
//! assert_eq!(lines[0]["outcome"], "applied");
//! assert_eq!(lines[1]["line"], "intent");
//! assert_eq!(lines[1]["change"], lines[0]["change"]);
//! # std::fs::remove_file(&path)?;
//! # Ok(())
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
//! [`begin`](AuditLog::begin) and [`finish`](AuditedChange::finish) also log each change, as the events `change begins` and
//! `change ended` of the target `tower_idempotency::audit`.
//!
//! A line contains no key, no principal and no response. The reason of an entry is text of the service. Characters that a
//! terminal obeys are escaped.

use std::{
    error::Error,
    fmt,
    future::pending,
    hash::{BuildHasher as _, RandomState},
    io,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};
use tokio::task::spawn_blocking;
use tower_idempotency::inspect::{InspectError, InspectErrorKind};
use tower_idempotency_any::AnyStore;

use crate::{
    audit_file::{AuditFile, OpenAuditFile},
    audit_table::AuditTable,
    describe::{json_text, time},
    panics::catch_report_panic,
};

/// A log to which audit lines are appended: a file, a table of a SQL store, or both.
///
/// A missing file is created, readable for the user of the process only. Several processes may append to one file. The file
/// is opened for each change, so it can be rotated by renaming it.
///
/// The name of the table is that of the table of entries and `_audit`. The first line creates the table. Later lines need
/// only the right to insert, and [`recent`](Self::recent) needs the right to select.
#[derive(Clone, Debug)]
pub struct AuditLog {
    file: Option<AuditFile>,
    table: Option<AuditTable>,
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

/// A change whose intent is in the log. Dropping it leaves only the intent, which readers show as an unknown outcome.
#[derive(Debug)]
#[must_use = "the log has no outcome until `finish` is called"]
pub struct AuditedChange {
    file: Option<OpenAuditFile>,
    table: Option<AuditTable>,
    line: Value,
}

/// Error of a log that cannot be written or read. The message has the cause, and contains no password.
#[derive(Debug)]
pub struct AuditError {
    message: String,
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

impl AuditLog {
    /// Creates a log in this file. The first line creates the file if it is missing.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            file: Some(AuditFile { path: path.into() }),
            table: None,
        }
    }

    /// Creates a log in the audit table of a SQL store: an [`AnyStore`], or a store that it can contain.
    ///
    /// # Errors
    ///
    /// The store has no audit table.
    pub fn in_table(store: impl Into<AnyStore>) -> Result<Self, AuditError> {
        let store = store.into();
        if !store.has_audit_table() {
            let name = store.name();
            return Err(AuditError::new(format!(
                "the {name} store has no audit table"
            )));
        }
        let timeout = Duration::from_secs(10);
        Ok(Self {
            file: None,
            table: Some(AuditTable { store, timeout }),
        })
    }

    /// Appends each line to this file too. Readers of the log then read the file. Default: the table alone.
    ///
    /// If the file or the table cannot be written, nothing is changed.
    #[must_use]
    pub fn with_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.file = Some(AuditFile { path: path.into() });
        self
    }

    /// Sets the longest time of one call for the table. Default: 10 s. A file has no such limit.
    ///
    /// A change makes two calls. If the time is too short, each change fails.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        if let Some(table) = &mut self.table {
            table.timeout = timeout;
        }
        self
    }

    /// Opens the file for writing, and creates it if it is missing. Writes no line, and does not check the table.
    ///
    /// A program calls this when it starts. Otherwise an operator detects an unusable file at the first change.
    ///
    /// # Errors
    ///
    /// The file cannot be opened for writing.
    ///
    /// # Panics
    ///
    /// If the caller is not in a Tokio runtime.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the file may be created.
    pub async fn check(&self) -> Result<(), AuditError> {
        let Some(file) = self.file.clone() else {
            return Ok(());
        };
        let path = file.path.display().to_string();
        let opened = run_blocking(move || file.open_for_append()).await;
        opened.map(drop).map_err(|cause| {
            let message = format!("cannot write the audit log {path}: {cause}");
            AuditError::new(message)
        })
    }

    /// Writes the intent, and waits until it is on the disk. The caller changes nothing if this fails.
    ///
    /// # Errors
    ///
    /// The file cannot be opened, written or synchronized, or the line cannot be appended to the table. The log may have the
    /// intent nevertheless, and then an outcome that begins with `failed`.
    ///
    /// # Panics
    ///
    /// If the caller is not in a Tokio runtime.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the log may have only the intent. The caller changes nothing.
    pub async fn begin(&self, intent: &Intent<'_>) -> Result<AuditedChange, AuditError> {
        self.begin_unless(intent, pending()).await
    }

    /// Writes the intent like [`begin`](Self::begin), unless the program is interrupted. When `interrupted` completes, the call
    /// that appends the intent to the table is cancelled. If the call had begun, the outcome `failed` is appended within the
    /// timeout.
    ///
    /// # Errors
    ///
    /// The errors of [`begin`](Self::begin), and an error if the program is interrupted. Its cause is the output of
    /// `interrupted`.
    ///
    /// # Panics
    ///
    /// If the caller is not in a Tokio runtime.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the log may have only the intent. The caller changes nothing.
    pub async fn begin_unless(
        &self,
        intent: &Intent<'_>,
        interrupted: impl Future<Output = String>,
    ) -> Result<AuditedChange, AuditError> {
        let line = intent.to_line();
        let text = json_text(&line);
        let file = match &self.file {
            Some(file) => Some(open(file, text.clone()).await?),
            None => None,
        };
        let mut change = AuditedChange {
            file,
            table: self.table.clone(),
            line,
        };
        if let Some(table) = &self.table {
            let mut is_sent = false;
            let append = async {
                is_sent = true;
                table.append(&text).await
            };
            let appended = tokio::select! {
                biased;
                cause = interrupted => Err(cause),
                appended = append => appended,
            };
            if let Err(cause) = appended {
                if !is_sent {
                    change.table = None;
                }
                let error = AuditError::new(format!(
                    "cannot write the audit table, so nothing was changed: {cause}"
                ));
                // The file has the intent. The table may have it, although the call failed.
                let outcome = format!("failed: {error}");
                change.write_outcome(&outcome, Value::Null).await.ok();
                return Err(error);
            }
        }
        catch_report_panic(|| {
            tracing::info!(
                target: "tower_idempotency::audit",
                actor = intent.actor,
                source = intent.source,
                what = intent.decision,
                why = intent.reason,
                id = intent.id,
                before = intent.before["state"].as_str(),
                "change begins"
            );
        });
        Ok(change)
    }

    /// Returns up to `limit` of the last lines, the last one first. Reads at most the last 256 KiB of the file, or the last
    /// 400 lines of the table if there is no file.
    ///
    /// A missing file and a missing table have no lines. A line that is no JSON object is left out, such as one that a full
    /// disk cut off.
    ///
    /// # Errors
    ///
    /// The file or the table cannot be read.
    ///
    /// # Panics
    ///
    /// If the caller is not in a Tokio runtime.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, there are no effects.
    pub async fn recent(&self, limit: usize) -> Result<Vec<Value>, AuditError> {
        self.tail(limit).await.map(|(lines, _)| lines)
    }

    /// Returns lines like [`recent`](Self::recent), and `true` if the log has no older ones.
    pub(crate) async fn tail(&self, limit: usize) -> Result<(Vec<Value>, bool), AuditError> {
        match (&self.file, &self.table) {
            (Some(file), _) => {
                let file = file.clone();
                let read = run_blocking(move || file.tail(limit)).await;
                read.map_err(|cause| AuditError::new(format!("cannot read the audit log: {cause}")))
            }
            (None, Some(table)) => table
                .tail(limit)
                .await
                .map_err(|cause| AuditError::new(format!("cannot read the audit table: {cause}"))),
            (None, None) => Ok((Vec::new(), true)),
        }
    }
}

impl AuditedChange {
    /// Writes the outcome. If this fails, the change may have taken effect, and the log may show only the intent.
    ///
    /// # Errors
    ///
    /// The file cannot be written or synchronized, or the line cannot be appended to the table. Both are written, even if one
    /// of them fails.
    ///
    /// # Panics
    ///
    /// If the caller is not in a Tokio runtime.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the log may show only the intent, and the event may be missing.
    pub async fn finish(mut self, outcome: &str, after: Value) -> Result<(), AuditError> {
        let written = self.write_outcome(outcome, after).await;
        // A subscriber may block its thread or end the process, so the line is written first.
        self.log_end(outcome);
        written
    }

    /// Logs the outcome that the line has.
    fn log_end(&self, outcome: &str) {
        let line = &self.line;
        catch_report_panic(|| {
            tracing::info!(
                target: "tower_idempotency::audit",
                actor = line["actor"].as_str(),
                source = line["source"].as_str(),
                what = line["what"].as_str(),
                why = line["why"].as_str(),
                id = line["id"].as_str(),
                before = line["before"]["state"].as_str(),
                outcome,
                after = state_after(outcome, &line["after"]),
                "change ended"
            );
        });
    }

    /// Adds the outcome to the line, and writes it.
    async fn write_outcome(&mut self, outcome: &str, after: Value) -> Result<(), AuditError> {
        let Self { file, table, line } = self;
        line["at"] = json!(time(SystemTime::now()));
        line["line"] = json!("outcome");
        line["outcome"] = json!(outcome);
        line["after"] = after;
        let text = json_text(line);
        let unwritten = |place: &str, cause: &dyn fmt::Display| {
            AuditError::new(format!(
                "the outcome is \"{outcome}\", but the audit {place} cannot be written: {cause}"
            ))
        };
        // The table is written even if the file cannot be.
        let in_file = match file.take() {
            Some(mut file) => {
                let text = text.clone();
                let written = run_blocking(move || file.append(&text)).await;
                written.map_err(|cause| unwritten("log", &cause))
            }
            None => Ok(()),
        };
        let in_table = match table {
            Some(table) => {
                let written = table.append(&text).await;
                written.map_err(|cause| unwritten("table", &cause))
            }
            None => Ok(()),
        };
        match (in_file, in_table) {
            (Err(file), Err(table)) => Err(AuditError::new(format!("{file}; {table}"))),
            (in_file, in_table) => in_file.and(in_table),
        }
    }
}

impl Intent<'_> {
    fn to_line(self) -> Value {
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

impl AuditError {
    fn new(message: String) -> Self {
        Self { message }
    }
}

impl fmt::Display for AuditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for AuditError {}

/// Opens the file of a log, and appends the intent.
async fn open(file: &AuditFile, intent: String) -> Result<OpenAuditFile, AuditError> {
    let (path, file) = (file.path.display().to_string(), file.clone());
    let opened = run_blocking(move || file.open(&intent)).await;
    opened.map_err(|cause| {
        AuditError::new(format!(
            "cannot write the audit log {path}, so nothing was changed: {cause}"
        ))
    })
}

/// Makes a call that blocks its thread. If the future is dropped, the call continues.
async fn run_blocking<T: Send + 'static>(
    call: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let result = spawn_blocking(call).await;
    result.unwrap_or_else(|error| Err(io::Error::other(error)))
}

/// Returns the state of the entry after the change, or `absent`. Returns `None` if the outcome is unknown, or if the change is
/// not about one entry.
pub(crate) fn state_after<'a>(outcome: &str, after: &'a Value) -> Option<&'a str> {
    match after {
        Value::Null if matches!(outcome, "applied" | "changed") => Some("absent"),
        after => after["state"].as_str(),
    }
}

#[cfg(test)]
mod tests;
