//! Events and counters. No label and no field carries a key.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use crate::{operation::Outcome, verdict::Cause, warning::WarningLimit};

macro_rules! count {
    ($name:literal $(, $label:literal => $value:expr)*) => {
        #[cfg(feature = "metrics")]
        metrics::counter!($name $(, $label => $value)*).increment(1);
    };
}

/// Logs an event of a thread that works for other calls. A panic of the subscriber does not end the thread.
pub(crate) fn log_and_catch_panic(log: impl FnOnce()) {
    // Unwind safe: the closure only reads what it logs.
    let _ = catch_unwind(AssertUnwindSafe(log));
}

/// Describes the counters, and registers them with value 0 and all values of their labels.
#[cfg(feature = "metrics")]
pub(crate) fn register() {
    type Text = &'static str;
    let describe = |name: Text, help: Text, label: Text, values: &[Text]| {
        metrics::describe_counter!(name, metrics::Unit::Count, help);
        if values.is_empty() {
            metrics::counter!(name).increment(0);
        }
        for value in values {
            metrics::counter!(name, label => *value).increment(0);
        }
    };
    let causes = ["not_sent", "transient", "throttled", "in_progress"];
    let outcomes = ["not_executed", "definite", "response_lost", "unknown"];
    describe(
        "idempotency_client_requests_total",
        "Calls. Retries do not count.",
        "",
        &[],
    );
    describe(
        "idempotency_client_retries_total",
        "Attempts after the first one.",
        "cause",
        &causes,
    );
    describe(
        "idempotency_client_budget_spent_total",
        "Retries that the budget did not allow.",
        "cause",
        &causes,
    );
    describe(
        "idempotency_client_outcomes_total",
        "Calls that ended, by their outcome.",
        "outcome",
        &outcomes,
    );
}

/// Reports the end of a call. Literal labels need no allocation.
pub(crate) fn finished(outcome: Outcome) {
    match outcome {
        Outcome::NotExecuted => {
            count!("idempotency_client_outcomes_total", "outcome" => "not_executed");
        }
        Outcome::Definite => {
            count!("idempotency_client_outcomes_total", "outcome" => "definite");
        }
        Outcome::ResponseLost => {
            count!("idempotency_client_outcomes_total", "outcome" => "response_lost");
        }
        Outcome::Unknown => {
            count!("idempotency_client_outcomes_total", "outcome" => "unknown");
        }
    }
}

/// Reports the start of a call.
pub(crate) fn began() {
    count!("idempotency_client_requests_total");
}

/// Reports a retry. The attribute has the name of the OpenTelemetry conventions for HTTP clients. It is also recorded in the
/// current span, if the span has such a field.
pub(crate) fn retrying(resend_count: u32, cause: Cause, delay: Duration) {
    let cause = cause.name();
    tracing::Span::current().record("http.request.resend_count", resend_count);
    tracing::debug!(
        http.request.resend_count = resend_count,
        cause,
        ?delay,
        "sending the request again"
    );
    count!("idempotency_client_retries_total", "cause" => cause);
}

/// Reports a retry that the budget does not allow.
pub(crate) fn budget_spent(cause: Cause) {
    let cause = cause.name();
    tracing::debug!(cause, "retry budget spent, request is not sent again");
    count!("idempotency_client_budget_spent_total", "cause" => cause);
}

/// Reports an operation whose key the server may have deleted. A recovery may find many of them.
pub(crate) fn expired(limit: &WarningLimit) {
    if let Some(count) = limit.count() {
        tracing::warn!(
            count,
            "lifetime of the key ended: if the outcome is unknown, resolve the operation by hand"
        );
    }
}
