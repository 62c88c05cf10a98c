//! A change and its audit: events always, and lines in a file, in a table or in both.

use std::{fs, future::pending, io};

use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tower_idempotency::inspect::InspectError;
use tower_idempotency_console::{
    audit::{change_id, into_outcome},
    describe::json_text,
};

use crate::{
    audit::{self, AuditedChange, SOURCE},
    cli::ChangeArgs,
    context::Context,
    failure::{Exit, Failure},
};

/// A change whose intent is recorded. The caller makes each call of the change with [`call`](Self::call), and then calls
/// [`finish`](Self::finish). From the intent on, SIGHUP, SIGINT and SIGTERM end calls and not the process, so that
/// each intent gets an outcome.
pub(crate) struct Change<'a> {
    context: &'a Context,
    signals: Signals,
    file: Option<AuditedChange>,
    /// The line of the table, if there is one.
    line: Option<Value>,
    actor: &'a str,
    what: &'static str,
    why: &'a str,
    id: Option<String>,
    /// The state of the entry before the change. `None` if the change is not about one entry.
    before: Option<String>,
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
        // An environment variable may set the option of the table to false.
        if args.audit.is_none() && !args.audit_table {
            return Err(Failure::usage(
                "expected --audit FILE or --audit-table, so nothing was changed",
            ));
        }
        if args.audit_table && !context.any.has_audit_table() {
            let message = format!(
                "expected --audit FILE: the {} store has no audit table, so nothing was changed",
                context.name
            );
            return Err(Failure::usage(message));
        }
        let mut signals = Signals::catch()
            .map_err(|error| Failure::failed(format!("cannot catch signals: {error}")))?;
        let names = (&*change_id(), &*context.store_name);
        let intent = audit::intent(args, what, id.as_deref(), before, names);
        let file = match &args.audit {
            Some(path) => Some(AuditedChange::begin(path, &intent)?),
            None => None,
        };
        let mut line = None;
        if args.audit_table {
            let intent = intent.to_line();
            let text = json_text(&intent);
            let appended = context.call(context.any.append_audit_line(&text));
            if let Err(failure) = signals.interrupt(appended).await {
                let message =
                    format!("cannot write the audit table, so nothing was changed: {failure}");
                let outcome = format!("failed: {message}");
                // The table may have the intent nevertheless.
                let mut line = intent;
                into_outcome(&mut line, &outcome, Value::Null);
                let text = json_text(&line);
                let appended = context.call(context.any.append_audit_line(&text));
                appended.await.ok();
                // The file has an intent already.
                if let Some(file) = file {
                    file.finish(&outcome, Value::Null)?;
                }
                return Err(Failure::new(failure.exit(), message));
            }
            line = Some(intent);
        }
        let (actor, why) = (args.actor.as_str(), args.reason.as_str());
        let before = before["state"].as_str().map(str::to_owned);
        tracing::info!(
            target: "tower_idempotency::audit",
            actor,
            source = SOURCE,
            what,
            why,
            id,
            before,
            "change begins"
        );
        Ok(Self {
            context,
            signals,
            file,
            line,
            actor,
            what,
            why,
            id,
            before,
        })
    }

    /// Makes a call of the change, within the timeout of calls. A signal ends it: the store may then execute the call
    /// nevertheless.
    pub(crate) async fn call<T>(
        &mut self,
        call: impl Future<Output = Result<T, InspectError>>,
    ) -> Result<T, Failure> {
        self.signals.interrupt(self.context.call(call)).await
    }

    /// Makes a call of the change like [`call`](Self::call), but without a timeout.
    pub(crate) async fn long_call<T>(
        &mut self,
        call: impl Future<Output = Result<T, InspectError>>,
    ) -> Result<T, Failure> {
        self.signals.interrupt(async { Ok(call.await?) }).await
    }

    /// Records the outcome. If this fails, the change may have taken effect, and the log shows the intent alone.
    pub(crate) async fn finish(self, outcome: &str, after: Value) -> Result<(), Failure> {
        tracing::info!(
            target: "tower_idempotency::audit",
            actor = self.actor,
            source = SOURCE,
            what = self.what,
            why = self.why,
            id = self.id,
            before = self.before,
            outcome,
            after = state_after(outcome, &after),
            "change ended"
        );
        // Both are written, also if one of them fails.
        let written = match self.file {
            Some(file) => file.finish(outcome, after.clone()),
            None => Ok(()),
        };
        if let Some(mut line) = self.line {
            into_outcome(&mut line, outcome, after);
            let text = json_text(&line);
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

/// Returns the state of the entry after the change, or `absent`. Returns `None` if the outcome is unknown, or if the change is
/// not about one entry.
fn state_after<'a>(outcome: &str, after: &'a Value) -> Option<&'a str> {
    match after {
        Value::Null if matches!(outcome, "applied" | "changed") => Some("absent"),
        after => after["state"].as_str(),
    }
}

/// The signals that ask the process to end. They no longer end it once they are caught.
struct Signals {
    /// `None` if the process ignores SIGHUP, as under `nohup`.
    hangup: Option<Signal>,
    interrupt: Signal,
    terminate: Signal,
}

/// Catches SIGHUP. Returns `None` if the process ignores it, as under `nohup`.
pub(crate) fn catch_hangup() -> io::Result<Option<Signal>> {
    if is_hangup_ignored() {
        return Ok(None);
    }
    signal(SignalKind::hangup()).map(Some)
}

/// Waits for SIGHUP. Never returns if it is not caught.
pub(crate) async fn hangup(caught: &mut Option<Signal>) {
    match caught {
        Some(caught) => {
            caught.recv().await;
        }
        None => pending().await,
    }
}

impl Signals {
    fn catch() -> io::Result<Self> {
        Ok(Self {
            hangup: catch_hangup()?,
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Waits for the call, or for the first signal. A signal that came before the call ends it before it begins.
    async fn interrupt<T>(
        &mut self,
        call: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let (name, exit) = tokio::select! {
            biased;
            () = hangup(&mut self.hangup) => ("SIGHUP", Exit::HungUp),
            _ = self.interrupt.recv() => ("SIGINT", Exit::Interrupted),
            _ = self.terminate.recv() => ("SIGTERM", Exit::Terminated),
            result = call => return result,
        };
        Err(Failure::new(exit, format!("interrupted by {name}")))
    }
}

/// Returns `true` if the process ignores SIGHUP. A handler would end that.
///
/// Linux reports the ignored signals as a number in hexadecimal digits. SIGHUP is its lowest bit.
fn is_hangup_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    ignored.is_some_and(|ignored| ignored & 1 == 1)
}
