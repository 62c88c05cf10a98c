//! A change and its audit: events always, and lines in a file, in a table or in both.

use serde_json::Value;
use tower_idempotency_console::audit::into_outcome;

use crate::{
    audit::{self, AuditedChange},
    cli::ChangeArgs,
    context::Context,
    failure::Failure,
};

/// A change whose intent is recorded. The caller makes the change, and then calls [`finish`](Self::finish).
pub(crate) struct Change<'a> {
    context: &'a Context,
    file: Option<AuditedChange>,
    /// The line of the table, if there is one.
    line: Option<Value>,
    actor: &'a str,
    what: &'static str,
    id: Option<String>,
}

impl<'a> Change<'a> {
    /// Records the intent. The caller changes nothing if this fails.
    pub(crate) async fn begin(
        context: &'a Context,
        args: &'a ChangeArgs,
        what: &'static str,
        id: Option<String>,
        before: &Value,
    ) -> Result<Self, Failure> {
        if args.audit_table && !context.any.has_audit_table() {
            let message = format!(
                "expected --audit FILE: the {} store has no audit table, so nothing was changed",
                context.name
            );
            return Err(Failure::usage(message));
        }
        let intent = audit::intent(args, what, id.as_deref(), before);
        let file = match &args.audit {
            Some(path) => Some(AuditedChange::begin(path, &intent)?),
            None => None,
        };
        let mut line = None;
        if args.audit_table {
            let intent = intent.to_line();
            let text = intent.to_string();
            let appended = context.any.append_audit_line(&text);
            context.call(appended).await.map_err(|failure| {
                Failure::failed(format!(
                    "cannot write the audit table, so nothing was changed: {failure}"
                ))
            })?;
            line = Some(intent);
        }
        let (actor, why) = (args.actor.as_str(), args.reason.as_str());
        tracing::info!(target: "tower_idempotency::audit", actor, what, id, why, "change begins");
        Ok(Self {
            context,
            file,
            line,
            actor,
            what,
            id,
        })
    }

    /// Records the outcome. If this fails, the change may have taken effect, and the log shows the intent alone.
    pub(crate) async fn finish(self, outcome: &str, after: Value) -> Result<(), Failure> {
        let (actor, what, id) = (self.actor, self.what, self.id);
        tracing::info!(target: "tower_idempotency::audit", actor, what, id, outcome, "change ended");
        // Both are written, also if one of them fails.
        let written = match self.file {
            Some(file) => file.finish(outcome, after.clone()),
            None => Ok(()),
        };
        if let Some(mut line) = self.line {
            into_outcome(&mut line, outcome, after);
            let text = line.to_string();
            let appended = self.context.any.append_audit_line(&text);
            self.context.call(appended).await.map_err(|failure| {
                Failure::failed(format!(
                    "the outcome is \"{outcome}\", but the audit table cannot be written: {failure}"
                ))
            })?;
        }
        written
    }
}
