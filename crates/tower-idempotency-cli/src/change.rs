//! A change and its audit: events, and lines in a file, in a table or in both.

use std::{fs, future::pending, io};

use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tower_idempotency::inspect::InspectError;
use tower_idempotency_console::audit::{AuditedChange, Intent, change_id};

use crate::{
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
    audited: AuditedChange,
    /// `true` once a call has begun.
    has_begun: bool,
}

impl<'a> Change<'a> {
    /// Records the intent. The caller changes nothing if this fails.
    pub(crate) async fn begin(
        context: &'a Context,
        args: &ChangeArgs,
        decision: &str,
        id: Option<&str>,
        before: &Value,
    ) -> Result<Self, Failure> {
        // An environment variable may set the option of the table to false.
        let Some(log) = context.audit_log(args.audit.as_deref(), args.audit_table)? else {
            return Err(Failure::usage(
                "expected --audit FILE or --audit-table, so nothing was changed",
            ));
        };
        let mut signals = Signals::catch()
            .map_err(|error| Failure::failed(format!("cannot catch signals: {error}")))?;
        let change = change_id();
        let intent = Intent {
            change: &change,
            store: &context.store_name,
            actor: &args.actor,
            source: "cli",
            decision,
            reason: &args.reason,
            id,
            before,
        };
        let mut exit = Exit::Failed;
        let interrupted = async {
            let (name, of_signal) = signals.next().await;
            exit = of_signal;
            interrupted_by(name)
        };
        let begun = log.begin_unless(&intent, interrupted).await;
        let audited = begun.map_err(|error| Failure::new(exit, error.to_string()))?;
        Ok(Self {
            context,
            signals,
            audited,
            has_begun: false,
        })
    }

    /// Makes a call of the change, within the timeout of calls. A signal ends it: the store may then execute the call
    /// nevertheless, unless it had not begun.
    pub(crate) async fn call<T>(
        &mut self,
        call: impl Future<Output = Result<T, InspectError>>,
    ) -> Result<T, Failure> {
        let call = self.context.call(call);
        self.run_until_signal(call).await
    }

    /// Makes a call of the change like [`call`](Self::call), but without a timeout.
    pub(crate) async fn long_call<T>(
        &mut self,
        call: impl Future<Output = Result<T, InspectError>>,
    ) -> Result<T, Failure> {
        self.run_until_signal(async { Ok(call.await?) }).await
    }

    /// Makes the call, until the first signal. After an earlier signal, the call does not begin.
    async fn run_until_signal<T>(
        &mut self,
        call: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let has_begun = &mut self.has_begun;
        let call = async {
            *has_begun = true;
            call.await
        };
        let (name, exit) = tokio::select! {
            biased;
            signal = self.signals.next() => signal,
            result = call => return result,
        };
        let failure = Failure::new(exit, interrupted_by(name));
        Err(if self.has_begun {
            failure
        } else {
            failure.unchanged()
        })
    }

    /// Returns the outcome of a change that ended with this failure. Its calls may have changed a part, so the outcome is
    /// `failed` only if no call has begun.
    pub(crate) fn partial_outcome(&self, failure: &Failure) -> String {
        let outcome = if self.has_begun { "unknown" } else { "failed" };
        format!("{outcome}: {failure}")
    }

    /// Records the outcome. If this fails, the change may have taken effect, and the log may show only the intent.
    pub(crate) async fn finish(self, outcome: &str, after: Value) -> Result<(), Failure> {
        let finished = self.audited.finish(outcome, after).await;
        finished.map_err(|error| Failure::failed(error.to_string()))
    }
}

/// The signals that end a process. Once they are caught, they no longer end this one.
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

    /// Waits for the first signal. Returns its name and the exit code.
    async fn next(&mut self) -> (&'static str, Exit) {
        tokio::select! {
            biased;
            () = hangup(&mut self.hangup) => ("SIGHUP", Exit::HungUp),
            _ = self.interrupt.recv() => ("SIGINT", Exit::Interrupted),
            _ = self.terminate.recv() => ("SIGTERM", Exit::Terminated),
        }
    }
}

fn interrupted_by(signal: &str) -> String {
    format!("interrupted by {signal}")
}

/// Returns `true` if the process ignores SIGHUP. With a handler, it would no longer do so.
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
