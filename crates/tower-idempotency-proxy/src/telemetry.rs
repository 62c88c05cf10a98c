//! Events and metrics of the proxy. They contain no key, no principal, no path and no body.
//!
//! A panic of the recorder or of the subscriber ends no listener and changes no response.

use std::{
    collections::HashMap,
    error::Error,
    fmt::Display,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use http::StatusCode;
use metrics::{Counter, Unit, counter, describe_counter, describe_gauge, gauge};
use tokio::time::Instant;

/// Reports a metric to the recorder, or an event to the subscriber. Ignores their panic.
pub(crate) fn catch_report_panic(report: impl FnOnce()) {
    // Unwind safe: a report changes nothing that the proxy reads.
    let _ = catch_unwind(AssertUnwindSafe(report));
}

/// Describes the metrics to the recorder.
pub(crate) fn describe() {
    describe_counter!(
        "idempotency_proxy_requests_total",
        Unit::Count,
        "Requests by route and class of the status of the response; none if the client disconnected before it."
    );
    describe_counter!(
        "idempotency_proxy_unsafe_requests_total",
        Unit::Count,
        "Unsafe requests by route and coverage: keyed, no_key, method, grpc, off."
    );
    describe_counter!(
        "idempotency_proxy_upstream_failures_total",
        Unit::Count,
        "Requests without a response of the upstream, by upstream and reason: unsent, upstream-broken, upstream-timeout."
    );
    describe_counter!(
        "idempotency_proxy_unknown_outcomes_total",
        Unit::Count,
        "Executions with an unknown outcome, by upstream and reason: upstream-broken, upstream-timeout, status."
    );
    describe_counter!(
        "idempotency_proxy_reloads_total",
        Unit::Count,
        "Reloads of the configuration by result: done, rejected."
    );
    describe_gauge!(
        "idempotency_proxy_connections",
        Unit::Count,
        "Open connections of clients."
    );
    catch_report_panic(|| gauge!("idempotency_proxy_connections").set(0.0));
    for result in ["done", "rejected"] {
        catch_report_panic(|| {
            counter!("idempotency_proxy_reloads_total", "result" => result).absolute(0);
        });
    }
}

/// The protection of an unsafe request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Coverage {
    Keyed,
    NoKey,
    /// The preset of the route does not protect the method.
    Method,
    /// gRPC passes through.
    Grpc,
    /// The route does not protect.
    Off,
}

/// The counters of a route. They are created with the route, in the recorder that is installed then.
pub(crate) struct RouteCounters {
    responses: ResponseCounters,
    /// By [`Coverage`].
    unsafe_requests: [Counter; 5],
}

/// The counters of requests, by the class of the status of their response. The last one counts requests without a response.
pub(crate) struct ResponseCounters([Counter; 6]);

/// A request of a route, which is counted when this is dropped.
pub(crate) struct UncountedRequest<'a> {
    counters: &'a ResponseCounters,
    response: Option<StatusCode>,
}

impl UncountedRequest<'_> {
    /// Counts the request by the status of its response.
    pub(crate) fn responded(mut self, status: StatusCode) {
        self.response = Some(status);
    }
}

impl Drop for UncountedRequest<'_> {
    fn drop(&mut self) {
        self.counters.count(self.response);
    }
}

impl RouteCounters {
    /// Creates the counters of a route.
    pub(crate) fn new(route: &str) -> Self {
        Self {
            responses: ResponseCounters::new(route),
            unsafe_requests: ["keyed", "no_key", "method", "grpc", "off"].map(|coverage| {
                counter!("idempotency_proxy_unsafe_requests_total", "route" => route.to_owned(), "coverage" => coverage)
            }),
        }
    }

    /// Counts an unsafe request.
    pub(crate) fn unsafe_request(&self, coverage: Coverage) {
        catch_report_panic(|| self.unsafe_requests[coverage as usize].increment(1));
    }

    /// Begins a request. If the client disconnects before the response, hyper drops the request, and it counts without one.
    pub(crate) fn begin_request(&self) -> UncountedRequest<'_> {
        UncountedRequest {
            counters: &self.responses,
            response: None,
        }
    }
}

impl ResponseCounters {
    /// Creates the counters of a route, or those of requests without a route, whose name is `none`.
    pub(crate) fn new(route: &str) -> Self {
        Self(["1xx", "2xx", "3xx", "4xx", "5xx", "none"].map(|class| {
            counter!("idempotency_proxy_requests_total", "route" => route.to_owned(), "status" => class)
        }))
    }

    /// Counts a response.
    pub(crate) fn responded(&self, status: StatusCode) {
        self.count(Some(status));
    }

    fn count(&self, response: Option<StatusCode>) {
        let class = response.map_or(6, |status| usize::from(status.as_u16() / 100).clamp(1, 5));
        catch_report_panic(|| self.0[class - 1].increment(1));
    }
}

/// Creates the counters of an upstream, so that they exist before its first failure.
pub(crate) fn register_upstream(upstream: &str) {
    let unknown = ["upstream-broken", "upstream-timeout", "status"];
    for reason in unknown {
        counter!("idempotency_proxy_unknown_outcomes_total", "upstream" => upstream.to_owned(), "reason" => reason)
            .increment(0);
    }
    let failures = ["unsent", "upstream-broken", "upstream-timeout"];
    for reason in failures {
        counter!("idempotency_proxy_upstream_failures_total", "upstream" => upstream.to_owned(), "reason" => reason)
            .increment(0);
    }
}

/// Warnings of an upstream, which repeat for each request while it is down.
#[derive(Default)]
pub(crate) struct UpstreamWarnings {
    failed: WarningLimit,
    unknown: WarningLimit,
}

impl UpstreamWarnings {
    /// Counts the failure of a request. The message of the cause contains no data of the request.
    pub(crate) fn failed(
        &self,
        upstream: &str,
        reason: &str,
        cause: Option<&(dyn Error + Send + Sync + 'static)>,
    ) {
        if let Some(count) = self.failed.count(reason) {
            let cause = cause.map(|cause| error_chain(cause));
            catch_report_panic(|| {
                tracing::warn!(upstream, reason, cause, count, "upstream failed");
            });
        }
        let (upstream, reason) = (upstream.to_owned(), reason.to_owned());
        catch_report_panic(|| {
            counter!("idempotency_proxy_upstream_failures_total", "upstream" => upstream, "reason" => reason).increment(1);
        });
    }

    /// Counts an unknown outcome. An outcome that needs attention occurs once for each key, and is always logged.
    pub(crate) fn outcome_unknown(&self, upstream: &str, reason: &str, needs_attention: bool) {
        let count = if needs_attention {
            Some(1)
        } else {
            self.unknown.count(reason)
        };
        if let Some(count) = count {
            catch_report_panic(|| {
                tracing::error!(
                    upstream,
                    reason,
                    count,
                    "outcome unknown after the request was sent"
                );
            });
        }
        let (upstream, reason) = (upstream.to_owned(), reason.to_owned());
        catch_report_panic(|| {
            counter!("idempotency_proxy_unknown_outcomes_total", "upstream" => upstream, "reason" => reason)
                .increment(1);
        });
    }
}

/// Limits a warning to one per second for each reason, and counts its occurrences.
#[derive(Default)]
pub(crate) struct WarningLimit(Mutex<HashMap<String, WarningState>>);

#[derive(Default)]
struct WarningState {
    last: Option<Instant>,
    /// Occurrences since the last warning.
    count: u64,
}

const WARNING_INTERVAL: Duration = Duration::from_secs(1);

impl WarningLimit {
    /// Counts an occurrence. If a warning is due, returns the number of occurrences since the last one.
    pub(crate) fn count(&self, reason: &str) -> Option<u64> {
        let now = Instant::now();
        let mut states = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let state = states.entry(reason.to_owned()).or_default();
        state.count += 1;
        if state.last.is_some_and(|last| now - last < WARNING_INTERVAL) {
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.count))
    }
}

pub(crate) fn reloaded(error: Option<&dyn std::fmt::Display>) {
    let result = match error {
        None => {
            catch_report_panic(|| tracing::info!("configuration reloaded"));
            "done"
        }
        Some(error) => {
            catch_report_panic(|| {
                tracing::error!(%error, "reload rejected, the old configuration stays");
            });
            "rejected"
        }
    };
    catch_report_panic(|| {
        counter!("idempotency_proxy_reloads_total", "result" => result).increment(1);
    });
}

/// Reports a route whose enforcement has changed.
pub(crate) fn switched(route: impl Display, old: impl Display, new: impl Display) {
    catch_report_panic(|| {
        tracing::warn!(%route, %old, %new, "enforcement of a route changed");
    });
}

/// Counts an open connection until it is dropped.
pub(crate) struct OpenConnectionGauge(());

impl OpenConnectionGauge {
    pub(crate) fn new() -> Self {
        catch_report_panic(|| gauge!("idempotency_proxy_connections").increment(1.0));
        Self(())
    }
}

impl Drop for OpenConnectionGauge {
    fn drop(&mut self) {
        catch_report_panic(|| gauge!("idempotency_proxy_connections").decrement(1.0));
    }
}

fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
