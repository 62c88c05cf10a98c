//! Events and counters. No label and no field carries a key.
//!
//! A panic of the recorder or of the subscriber has no effect on a call, whose response may have arrived.

#[cfg(feature = "metrics")]
use std::sync::OnceLock;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use crate::{operation::Outcome, verdict::Cause, warning::WarningLimit};

macro_rules! count {
    ($name:literal $(, $label:literal => $value:expr)*) => {
        #[cfg(feature = "metrics")]
        catch_report_panic(|| metrics::counter!($name $(, $label => $value)*).increment(1));
    };
}

/// Reports a metric to the recorder, or an event to the subscriber. Ignores their panic.
pub(crate) fn catch_report_panic(report: impl FnOnce()) {
    // Unwind safe: a report changes nothing that the client reads.
    let _ = catch_unwind(AssertUnwindSafe(report));
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

/// Registration of the counters at the first call. A recorder that is installed after the layer was created gets their zeros.
#[derive(Default)]
pub(crate) struct Registration {
    #[cfg(feature = "metrics")]
    at_call: OnceLock<()>,
}

/// Reports the start of a call.
pub(crate) fn began(registration: &Registration) {
    #[cfg(feature = "metrics")]
    catch_report_panic(|| {
        registration.at_call.get_or_init(register);
    });
    #[cfg(not(feature = "metrics"))]
    let _ = registration;
    count!("idempotency_client_requests_total");
}

/// Reports a retry. The attribute has the name of the OpenTelemetry conventions for HTTP clients. It is also recorded in the
/// current span, if the span has such a field.
pub(crate) fn retrying(resend_count: u32, cause: Cause, delay: Duration) {
    let cause = cause.name();
    catch_report_panic(|| {
        tracing::Span::current().record("http.request.resend_count", resend_count);
        tracing::debug!(
            http.request.resend_count = resend_count,
            cause,
            ?delay,
            "sending the request again"
        );
    });
    count!("idempotency_client_retries_total", "cause" => cause);
}

/// Reports a retry that the budget does not allow.
pub(crate) fn budget_spent(cause: Cause) {
    let cause = cause.name();
    catch_report_panic(|| {
        tracing::debug!(cause, "retry budget spent, request is not sent again");
    });
    count!("idempotency_client_budget_spent_total", "cause" => cause);
}

/// Reports an operation whose key the server may have deleted. A recovery may find many of them.
pub(crate) fn expired(limit: &WarningLimit) {
    if let Some(count) = limit.count() {
        catch_report_panic(|| {
            tracing::warn!(
                count,
                "lifetime of the key ended: if the outcome is unknown, resolve the operation by hand"
            );
        });
    }
}
