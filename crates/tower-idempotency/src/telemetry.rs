//! Events and counters for operators: one event for every path of a request, and one counter with the feature `metrics`.
//!
//! No label and no field carries a key, a principal or a fingerprint. Events name an entry by eight hexadecimal digits of
//! its id; labels never do. [`metrics`](crate::metrics) describes and registers the counters.

#[cfg(feature = "metrics")]
use std::sync::OnceLock;
use std::{
    fmt::Display,
    time::{Duration, SystemTime},
};

use http::StatusCode;

#[cfg(feature = "grpc")]
use crate::grpc::{GrpcMethods, Side};
use crate::{
    error::ErrorKind,
    record::{ExecutionTrace, NeedsAttention, TombstoneReason},
    retry::WarningLimit,
    store::{KeyId, StoreError},
};

macro_rules! count {
    ($name:literal) => {
        #[cfg(feature = "metrics")]
        {
            debug_assert!(crate::metrics::is_registered($name, None), $name);
            metrics::counter!($name).increment(1);
        }
    };
    ($name:literal, $label:literal => $value:expr) => {
        #[cfg(feature = "metrics")]
        {
            let value = $value;
            debug_assert!(
                crate::metrics::is_registered($name, Some(($label, &*value))),
                "{} {value}",
                $name
            );
            metrics::counter!($name, $label => value).increment(1);
        }
    };
}

macro_rules! observe {
    ($name:literal, $value:expr $(, $label:literal => $label_value:expr)*) => {
        #[cfg(feature = "metrics")]
        metrics::histogram!($name $(, $label => $label_value)*).record($value);
        #[cfg(not(feature = "metrics"))]
        let _ = ($value, $($label_value,)*);
    };
}

mod observed;
mod outcome;
mod warnings;

pub(crate) use self::observed::{
    Coverage, Key, Observed, enforcement_changed, observed, observed_at, observed_difference,
    unsafe_request,
};
pub(crate) use self::outcome::{record_outcome, set_rejected, set_replayed};
pub(crate) use self::warnings::{Warnings, report_rest};

/// Registers the metrics when a layer is created, and again at its first request: the recorder may be installed in between.
pub(crate) struct Registration {
    #[cfg(feature = "metrics")]
    at_request: OnceLock<()>,
}

impl Registration {
    pub(crate) fn new() -> Self {
        #[cfg(feature = "metrics")]
        crate::metrics::register();
        Self {
            #[cfg(feature = "metrics")]
            at_request: OnceLock::new(),
        }
    }

    /// Registers the metrics at the first call. Any other call is one atomic load.
    pub(crate) fn at_request(&self) {
        #[cfg(feature = "metrics")]
        self.at_request.get_or_init(crate::metrics::register);
    }
}

pub(crate) fn granted(warnings: &Warnings, id: &KeyId, generation: u64, takeover: bool) {
    count!("idempotency_granted_total");
    if takeover {
        warnings.took_over(id, generation);
    } else {
        tracing::debug!(%id, "lease granted");
    }
}

/// Records the trace of the execution in the span of the retry, and returns its ID.
fn execution_trace_id(trace: Option<&ExecutionTrace>) -> Option<&str> {
    let trace_id = trace?.trace_id();
    tracing::Span::current().record("execution_trace_id", trace_id);
    Some(trace_id)
}

/// Reports a replay. `trace` is that of the execution that produced the record.
pub(crate) fn replayed(
    id: &KeyId,
    recorded_at: Option<SystemTime>,
    trace: Option<&ExecutionTrace>,
) {
    let execution_trace_id = execution_trace_id(trace);
    // Only subscribers evaluate `age`, so a replay without them saves a reading of the clock.
    tracing::debug!(
        %id,
        age = recorded_at
            .and_then(|at| at.elapsed().ok())
            .map(tracing::field::debug),
        execution_trace_id,
        "replayed"
    );
    count!("idempotency_replayed_total");
}

/// Counts an acquire that found a record: in the `tier` of the process, or in the `store`.
#[cfg(feature = "tiered")]
pub(crate) fn tier_replay(source: &'static str) {
    #[cfg(not(feature = "metrics"))]
    let _ = source;
    count!("idempotency_tier_replays_total", "source" => source);
}

/// Counts records that a tier does not store, or removes before their age has passed.
#[cfg(feature = "tiered")]
pub(crate) fn tier_dropped(reason: &'static str, records: u64) {
    #[cfg(feature = "metrics")]
    metrics::counter!("idempotency_tier_dropped_total", "reason" => reason).increment(records);
    #[cfg(not(feature = "metrics"))]
    let _ = (reason, records);
}

pub(crate) fn tombstone(
    id: &KeyId,
    status: StatusCode,
    reason: TombstoneReason,
    trace: Option<&ExecutionTrace>,
) {
    let execution_trace_id = execution_trace_id(trace);
    tracing::debug!(%id, status = status.as_u16(), ?reason, execution_trace_id, "replay impossible: earlier response was not recorded");
    count!("idempotency_tombstone_replays_total");
}

pub(crate) fn unresolved(
    id: &KeyId,
    status: Option<StatusCode>,
    code: &str,
    trace: Option<&ExecutionTrace>,
) {
    let execution_trace_id = execution_trace_id(trace);
    let status = status.map(|status| status.as_u16());
    tracing::debug!(%id, status, code, execution_trace_id, "retry refused: earlier execution needs attention");
    count!("idempotency_unresolved_total", "reason" => code.to_owned());
}

/// Reports a request with a key that the layer does not cover.
pub(crate) fn passed_through(reason: &'static str) {
    tracing::debug!(reason, "request with a key passed through");
    count!("idempotency_passed_through_total", "reason" => reason);
}

/// Reports a call of a protected gRPC method that is a stream on this side. A stream of requests was rejected. A stream of
/// responses reached the client, and is not recorded.
#[cfg(feature = "grpc")]
pub(crate) fn grpc_stream(methods: &GrpcMethods, side: Side) {
    let side_name = side.name();
    if methods.is_first_stream(side) {
        tracing::warn!(
            side = side_name,
            "several messages in a protected gRPC call: the method is a stream, or the client is faulty"
        );
    } else {
        tracing::debug!(
            side = side_name,
            "several messages in a protected gRPC call"
        );
    }
    count!("idempotency_grpc_streams_total", "side" => side_name);
}

/// Reports a [`NeedsAttention`] that has no effect. This event is its only trace.
pub(crate) fn attention_ignored(id: &KeyId, code: &str, reason: &'static str) {
    tracing::warn!(%id, code, reason, "NeedsAttention ignored");
}

/// Reports a [`NeedsAttention`] in a record that is not stored, or may not be.
pub(crate) fn attention_not_stored(id: &KeyId, record: &[u8]) {
    if let Some(attention) = NeedsAttention::in_record(record) {
        attention_ignored(id, attention.code(), "record may not be the stored one");
    }
}

pub(crate) fn in_progress(id: &KeyId) {
    tracing::debug!(%id, "request in progress");
    count!("idempotency_in_progress_total");
}

pub(crate) fn waiting(id: &KeyId) {
    tracing::debug!(%id, "waiting for the first request");
    count!("idempotency_waiting_total");
}

pub(crate) fn mismatch(id: &KeyId) {
    tracing::debug!(%id, "key was used with another request");
    count!("idempotency_mismatch_total");
}

/// Failed calls of one store: a warning at most once a second, with their number.
pub(crate) struct StoreErrors(WarningLimit);

impl Default for StoreErrors {
    fn default() -> Self {
        Self(WarningLimit::new(Duration::from_secs(1)))
    }
}

impl StoreErrors {
    /// Reports a failed store call. `error` is `None` if the call timed out.
    pub(crate) fn report(&self, operation: &'static str, id: &KeyId, error: Option<&StoreError>) {
        let source = error.and_then(std::error::Error::source);
        let source = source.map(tracing::field::display);
        let error: &dyn Display = error.map_or(&"no reply in time", |error| error);
        match self.0.count() {
            Some(count) => {
                tracing::warn!(%id, operation, %error, source, count, "store call failed");
            }
            None => tracing::debug!(%id, operation, %error, source, "store call failed"),
        }
        count!("idempotency_store_error_total", "operation" => operation);
    }
}

/// Reports a record that cannot be read. A client may repeat the request without a limit.
pub(crate) fn bad_record(limit: &WarningLimit, id: &KeyId, error: &crate::record::RecordError) {
    match limit.count() {
        Some(count) => {
            tracing::error!(%id, %error, count, "record cannot be read, requests with its key get 503 until it expires");
        }
        None => {
            tracing::debug!(%id, %error, "record cannot be read, requests with its key get 503 until it expires");
        }
    }
    count!("idempotency_bad_record_total");
}

/// Reports a record that was stored.
pub(crate) fn recorded(id: &KeyId, record: &[u8]) {
    Recorded::new(record).report(id);
}

/// The parts of a record that are reported. Created before the record is passed to the store.
pub(crate) struct Recorded {
    bytes: usize,
    attention: Option<NeedsAttention>,
}

impl Recorded {
    pub(crate) fn new(record: &[u8]) -> Self {
        Self {
            bytes: record.len(),
            attention: NeedsAttention::in_record(record),
        }
    }

    /// Reports that the record was stored.
    pub(crate) fn report(&self, id: &KeyId) {
        let bytes = self.bytes;
        tracing::debug!(%id, bytes, "record stored");
        if let Some(attention) = &self.attention {
            let code = attention.code();
            tracing::error!(%id, code, "execution needs attention, retries are refused until an operator resolves it");
            count!("idempotency_needs_attention_total", "reason" => code.to_owned());
        }
        #[expect(
            clippy::cast_precision_loss,
            reason = "a record is far smaller than 2^52 bytes"
        )]
        let size = bytes as f64;
        observe!("idempotency_record_bytes", size);
    }
}

pub(crate) fn tombstone_stored(id: &KeyId, reason: TombstoneReason) {
    tracing::debug!(%id, ?reason, "tombstone created");
    count!("idempotency_tombstones_total", "reason" => match reason {
        TombstoneReason::TooLarge => "too_large",
        TombstoneReason::Streamed => "streamed",
        TombstoneReason::Panicked => "panicked",
    });
}

pub(crate) fn released(id: &KeyId, reason: &'static str) {
    tracing::debug!(%id, reason, "key released");
    count!("idempotency_released_total", "reason" => reason);
}

/// Reports a success that is not recorded, since a transaction of the handler was neither committed nor rolled back.
pub(crate) fn transaction_unfinished(id: &KeyId) {
    tracing::error!(%id, "transaction neither committed nor rolled back, its effect is lost, success is not recorded");
    count!("idempotency_unfinished_transactions_total");
}

pub(crate) fn refused(kind: ErrorKind) {
    tracing::debug!(code = kind.code(), "request rejected");
    count!("idempotency_refused_total", "code" => kind.code());
}

pub(crate) fn detached() {
    tracing::debug!("client disconnected, execution continues in background");
    count!("idempotency_detached_total");
}

pub(crate) fn in_flight(change: f64) {
    #[cfg(feature = "metrics")]
    metrics::gauge!("idempotency_in_flight").increment(change);
    #[cfg(not(feature = "metrics"))]
    let _ = change;
}

/// Measures the time of a handler until it is dropped, also if the handler panics.
pub(crate) struct HandlerTimer(Started);

impl HandlerTimer {
    pub(crate) fn start() -> Self {
        Self(start())
    }
}

impl Drop for HandlerTimer {
    fn drop(&mut self) {
        observe!("idempotency_handler_seconds", self.0.elapsed());
    }
}

pub(crate) fn store_time(operation: &'static str, started: Started) {
    observe!("idempotency_store_seconds", started.elapsed(), "operation" => operation);
}

/// Start of a measured period, for the histograms. Empty without the feature `metrics`, to save the clock reading.
#[derive(Clone, Copy)]
pub(crate) struct Started(#[cfg(feature = "metrics")] tokio::time::Instant);

pub(crate) fn start() -> Started {
    Started(
        #[cfg(feature = "metrics")]
        tokio::time::Instant::now(),
    )
}

impl Started {
    #[cfg(feature = "metrics")]
    fn elapsed(self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }

    #[cfg(not(feature = "metrics"))]
    fn elapsed(self) -> f64 {
        0.0
    }
}
