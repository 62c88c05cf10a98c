//! The lines of the audit log for changes by this tool. The console writes the same lines.

use std::path::Path;

use serde_json::Value;
use tower_idempotency_console::audit::{self, AuditLog, Intent};

use crate::{cli::ChangeArgs, failure::Failure};

/// The program, in the lines and the events of a change.
pub(crate) const SOURCE: &str = "cli";

/// A change that is recorded in a file.
pub(crate) struct AuditedChange(audit::AuditedChange);

impl AuditedChange {
    /// Writes the intent, and waits until it is on the disk. The caller changes nothing if this fails.
    pub(crate) fn begin(path: &Path, intent: &Intent<'_>) -> Result<Self, Failure> {
        let begun = AuditLog::new(path).begin(intent);
        begun.map(Self).map_err(|error| {
            Failure::failed(format!(
                "cannot write the audit log {}, so nothing was changed: {error}",
                path.display()
            ))
        })
    }

    /// Writes the outcome. If this fails, the change may have taken effect, and the log shows the intent alone.
    pub(crate) fn finish(self, outcome: &str, after: Value) -> Result<(), Failure> {
        self.0.finish(outcome, after).map_err(|error| {
            Failure::failed(format!(
                "the outcome is \"{outcome}\", but the audit log cannot be written: {error}"
            ))
        })
    }
}

/// Returns the intent of a change by an operator.
pub(crate) fn intent<'a>(
    args: &'a ChangeArgs,
    decision: &'a str,
    id: Option<&'a str>,
    before: &'a Value,
    (change, store): (&'a str, &'a str),
) -> Intent<'a> {
    Intent {
        change,
        store,
        actor: &args.actor,
        source: SOURCE,
        decision,
        reason: &args.reason,
        id,
        before,
    }
}
