//! Events and counters for operators: one event for every path of a request, and one counter with the feature `metrics`.
//!
//! No label and no field carries a key, a principal or a fingerprint. Events name an entry by eight hexadecimal digits of
//! its id; labels never do. [`metrics`](crate::metrics) describes and registers the counters.
//!
//! A panic of the recorder has no effect on the request, nor has a panic of the subscriber at an event. Spans are not guarded.

#[cfg(feature = "metrics")]
use std::sync::OnceLock;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::SystemTime,
};

use http::StatusCode;

#[cfg(feature = "grpc")]
use crate::grpc::Side;
use crate::{
    error::ErrorKind,
    layer_name::LayerName,
    record::{ExecutionTrace, NeedsAttention, TombstoneReason},
    store::KeyId,
};

// Counts an event of a layer. The last argument is the name of the layer, which becomes the label `layer`.
macro_rules! count {
    ($name:literal, $layer:expr) => {{
        #[cfg(feature = "metrics")]
        {
            debug_assert!(crate::metrics::is_registered($name, None), $name);
            crate::panics::catch_report_panic(|| {
                let counter = match $layer.keys() {
                    None => metrics::counter!($name),
                    Some(keys) => keys.counter($name, "", ""),
                };
                counter.increment(1);
            });
        }
        #[cfg(not(feature = "metrics"))]
        let _ = &$layer;
    }};
    // The counter of a literal allocates nothing.
    ($name:literal, $label:literal => $value:literal, $layer:expr) => {{
        #[cfg(feature = "metrics")]
        {
            let label = Some(($label, $value));
            debug_assert!(crate::metrics::is_registered($name, label), "{} {}", $name, $value);
            crate::panics::catch_report_panic(|| {
                let counter = match $layer.keys() {
                    None => metrics::counter!($name, $label => $value),
                    Some(keys) => keys.counter($name, $label, $value),
                };
                counter.increment(1);
            });
        }
        #[cfg(not(feature = "metrics"))]
        let _ = &$layer;
    }};
    ($name:literal, $label:literal => $value:expr, $layer:expr) => {{
        #[cfg(feature = "metrics")]
        {
            let value = $value;
            debug_assert!(
                crate::metrics::is_registered($name, Some(($label, &*value))),
                "{} {value}",
                $name
            );
            crate::panics::catch_report_panic(|| {
                let counter = match $layer.keys() {
                    None => metrics::counter!($name, $label => value),
                    Some(keys) => keys.counter($name, $label, &value),
                };
                counter.increment(1);
            });
        }
        #[cfg(not(feature = "metrics"))]
        let _ = &$layer;
    }};
}

// Records a sample of a histogram of a layer, with the same labels.
macro_rules! observe {
    ($name:literal, $value:expr, $layer:expr) => {{
        #[cfg(feature = "metrics")]
        crate::panics::catch_report_panic(|| {
            let histogram = match $layer.keys() {
                None => metrics::histogram!($name),
                Some(keys) => keys.histogram($name, "", ""),
            };
            histogram.record($value);
        });
        #[cfg(not(feature = "metrics"))]
        let _ = ($value, &$layer);
    }};
    ($name:literal, $value:expr, $label:literal => $label_value:expr, $layer:expr) => {{
        #[cfg(feature = "metrics")]
        crate::panics::catch_report_panic(|| {
            let histogram = match $layer.keys() {
                None => metrics::histogram!($name, $label => $label_value),
                Some(keys) => keys.histogram($name, $label, $label_value),
            };
            histogram.record($value);
        });
        #[cfg(not(feature = "metrics"))]
        let _ = ($value, $label_value, &$layer);
    }};
}

// Logs an event at this level.
macro_rules! log {
    ($level:ident, $($event:tt)+) => {
        crate::panics::catch_report_panic(|| tracing::$level!($($event)+))
    };
}

// Logs an event about an entry at this level, with the number of its occurrences since the last line at this level. Logs it
// at `debug`, without a number, if the limit of the event admits no line now.
macro_rules! log_limited {
    ($level:ident, $warnings:ident.$limit:ident, $event:literal, %$id:ident $(, $($field:tt)+)?) => {{
        let layer = $warnings.layer().as_str();
        match $warnings.$limit.count() {
            Some(count) => log!($level, %$id, layer, $($($field)+,)? count, $event),
            None => log!(debug, %$id, layer, $($($field)+,)? $event),
        }
    }};
}

mod observed;
mod outcome;
mod warning_limit;
mod warnings;

pub(crate) use self::observed::{
    Coverage, Observed, enforcement_changed, observed, observed_at, observed_difference,
    unsafe_request,
};
pub(crate) use self::outcome::{record_outcome, set_rejected, set_replayed};
pub(crate) use self::warnings::{UncountedEvents, Warnings, report_rest};

/// Registers the metrics when a layer is created, and again at its first request: the recorder may be installed in between.
pub(crate) struct Registration {
    #[cfg(feature = "metrics")]
    at_request: OnceLock<()>,
}

impl Registration {
    pub(crate) fn new() -> Self {
        #[cfg(feature = "metrics")]
        crate::metrics::register_unnamed();
        Self {
            #[cfg(feature = "metrics")]
            at_request: OnceLock::new(),
        }
    }

    /// Registers the metrics at the first call, and those with this name at the first call with it. Any other call is at most
    /// two atomic loads.
    pub(crate) fn at_request(&self, layer: &LayerName) {
        #[cfg(feature = "metrics")]
        crate::panics::catch_report_panic(|| {
            self.at_request
                .get_or_init(crate::metrics::register_unnamed);
            layer.at_request();
        });
        #[cfg(not(feature = "metrics"))]
        let _ = layer;
    }
}

/// Returns the result of a closure of the service. Reports its panic, and then returns `None`.
///
/// For closures that run after the handler had its effect: their panic must not release the key.
pub(crate) fn catch_setting_panic<T>(
    layer: &LayerName,
    setting: &'static str,
    call: impl FnOnce() -> T,
) -> Option<T> {
    // Unwind safe: a result that was not returned is not used, and the closure is shared by reference.
    let result = catch_unwind(AssertUnwindSafe(call));
    if result.is_err() {
        log!(
            error,
            layer = layer.as_str(),
            setting,
            "closure of a setting panicked"
        );
    }
    result.ok()
}

pub(crate) fn granted(warnings: &Warnings, id: &KeyId, generation: u64, takeover: bool) {
    let layer = warnings.layer();
    count!("idempotency_granted_total", layer);
    if takeover {
        warnings.took_over(id, generation);
    } else {
        log!(debug, %id, layer = layer.as_str(), "lease granted");
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
    layer: &LayerName,
    id: &KeyId,
    recorded_at: Option<SystemTime>,
    trace: Option<&ExecutionTrace>,
) {
    let execution_trace_id = execution_trace_id(trace);
    // Only subscribers evaluate `age`, so a replay without them saves a reading of the clock.
    log!(
        debug,
        %id,
        layer = layer.as_str(),
        age = recorded_at
            .and_then(|at| at.elapsed().ok())
            .map(tracing::field::debug),
        execution_trace_id,
        "replayed"
    );
    count!("idempotency_replayed_total", layer);
}

/// Counts an acquire that found a record: in the `tier` of the process, or in the `store`.
#[cfg(feature = "tiered")]
pub(crate) fn tier_replay(source: &'static str) {
    #[cfg(not(feature = "metrics"))]
    let _ = source;
    count!("idempotency_tier_replays_total", "source" => source, LayerName::default());
}

/// Counts records that a tier does not store, or removes before their age has passed.
#[cfg(feature = "tiered")]
pub(crate) fn tier_dropped(reason: &'static str, records: u64) {
    #[cfg(feature = "metrics")]
    crate::panics::catch_report_panic(|| {
        metrics::counter!("idempotency_tier_dropped_total", "reason" => reason).increment(records);
    });
    #[cfg(not(feature = "metrics"))]
    let _ = (reason, records);
}

pub(crate) fn tombstone(
    layer: &LayerName,
    id: &KeyId,
    status: StatusCode,
    reason: TombstoneReason,
    trace: Option<&ExecutionTrace>,
) {
    let execution_trace_id = execution_trace_id(trace);
    log!(debug, %id, layer = layer.as_str(), status = status.as_u16(), ?reason, execution_trace_id, "replay impossible: earlier response was not recorded");
    count!("idempotency_tombstone_replays_total", layer);
}

pub(crate) fn unresolved(
    layer: &LayerName,
    id: &KeyId,
    status: Option<StatusCode>,
    code: &str,
    trace: Option<&ExecutionTrace>,
) {
    let execution_trace_id = execution_trace_id(trace);
    let status = status.map(|status| status.as_u16());
    log!(debug, %id, layer = layer.as_str(), status, code, execution_trace_id, "retry refused: earlier execution needs attention");
    count!("idempotency_unresolved_total", "reason" => code.to_owned(), layer);
}

/// Reports a request with a key that the layer does not cover.
pub(crate) fn passed_through(layer: &LayerName, reason: &'static str) {
    log!(
        debug,
        layer = layer.as_str(),
        reason,
        "request with a key passed through"
    );
    count!("idempotency_passed_through_total", "reason" => reason, layer);
}

/// Reports a call of a protected gRPC method that is a stream on this side. A stream of requests was rejected. A stream of
/// responses reached the client, and is not recorded.
#[cfg(feature = "grpc")]
pub(crate) fn grpc_stream(warnings: &Warnings, side: Side) {
    let (layer, side_name) = (warnings.layer(), side.name());
    if warnings.is_first_grpc_stream(side) {
        log!(
            warn,
            layer = layer.as_str(),
            side = side_name,
            "several messages in a protected gRPC call: the method is a stream, or the client is faulty"
        );
    } else {
        log!(
            debug,
            layer = layer.as_str(),
            side = side_name,
            "several messages in a protected gRPC call"
        );
    }
    count!("idempotency_grpc_streams_total", "side" => side_name, layer);
}

/// Reports a [`NeedsAttention`] that has no effect. This event is its only trace.
pub(crate) fn attention_ignored(layer: &LayerName, id: &KeyId, code: &str, reason: &'static str) {
    log!(warn, %id, layer = layer.as_str(), code, reason, "NeedsAttention ignored");
}

/// Reports a [`NeedsAttention`] in a record that is not stored, or may not be.
pub(crate) fn attention_not_stored(layer: &LayerName, id: &KeyId, record: &[u8]) {
    if let Some(attention) = NeedsAttention::in_record(record) {
        let reason = "record may not be the stored one";
        attention_ignored(layer, id, attention.code(), reason);
    }
}

pub(crate) fn in_progress(layer: &LayerName, id: &KeyId) {
    log!(debug, %id, layer = layer.as_str(), "request in progress");
    count!("idempotency_in_progress_total", layer);
}

pub(crate) fn waiting(layer: &LayerName, id: &KeyId) {
    log!(debug, %id, layer = layer.as_str(), "waiting for the first request");
    count!("idempotency_waiting_total", layer);
}

pub(crate) fn mismatch(layer: &LayerName, id: &KeyId) {
    log!(debug, %id, layer = layer.as_str(), "key was used with another request");
    count!("idempotency_mismatch_total", layer);
}

/// Reports a record, or an entry, that cannot be read. A client may repeat the request without a limit.
pub(crate) fn bad_record(warnings: &Warnings, id: &KeyId, error: &dyn std::fmt::Display) {
    log_limited!(error, warnings.bad_record, "record cannot be read, requests with its key get 503 until it expires", %id, %error);
    count!("idempotency_bad_record_total", warnings.layer());
}

/// Reports a record that was stored.
pub(crate) fn recorded(layer: &LayerName, id: &KeyId, record: &[u8]) {
    Recorded::new(record).report(layer, id);
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
    pub(crate) fn report(&self, layer: &LayerName, id: &KeyId) {
        let bytes = self.bytes;
        log!(debug, %id, layer = layer.as_str(), bytes, "record stored");
        if let Some(attention) = &self.attention {
            let code = attention.code();
            log!(error, %id, layer = layer.as_str(), code, "execution needs attention, retries are refused until an operator resolves it");
            count!("idempotency_needs_attention_total", "reason" => code.to_owned(), layer);
        }
        #[expect(
            clippy::cast_precision_loss,
            reason = "a record is far smaller than 2^52 bytes"
        )]
        let size = bytes as f64;
        observe!("idempotency_record_bytes", size, layer);
    }
}

pub(crate) fn tombstone_stored(layer: &LayerName, id: &KeyId, reason: TombstoneReason) {
    log!(debug, %id, layer = layer.as_str(), ?reason, "tombstone created");
    count!("idempotency_tombstones_total", "reason" => reason.name(), layer);
}

pub(crate) fn released(layer: &LayerName, id: &KeyId, reason: &'static str) {
    log!(debug, %id, layer = layer.as_str(), reason, "key released");
    count!("idempotency_released_total", "reason" => reason, layer);
}

/// Reports a success that is not recorded, since a transaction of the handler was neither committed nor rolled back.
pub(crate) fn transaction_unfinished(layer: &LayerName, id: &KeyId) {
    log!(error, %id, layer = layer.as_str(), "transaction neither committed nor rolled back, its effect is lost, success is not recorded");
    count!("idempotency_unfinished_transactions_total", layer);
}

pub(crate) fn refused(layer: &LayerName, kind: ErrorKind) {
    log!(
        debug,
        layer = layer.as_str(),
        code = kind.code(),
        "request rejected"
    );
    count!("idempotency_refused_total", "code" => kind.code(), layer);
}

pub(crate) fn detached(layer: &LayerName) {
    log!(
        debug,
        layer = layer.as_str(),
        "client disconnected, execution continues in background"
    );
    count!("idempotency_detached_total", layer);
}

pub(crate) fn in_flight(layer: &LayerName, change: f64) {
    #[cfg(feature = "metrics")]
    crate::panics::catch_report_panic(|| {
        let gauge = match layer.keys() {
            None => metrics::gauge!("idempotency_in_flight"),
            Some(keys) => keys.gauge("idempotency_in_flight"),
        };
        gauge.increment(change);
    });
    #[cfg(not(feature = "metrics"))]
    let _ = (layer, change);
}

/// Measures the time of a handler until it is dropped, also if the handler panics.
pub(crate) struct HandlerTimer {
    started: Started,
    layer: LayerName,
}

impl HandlerTimer {
    pub(crate) fn start(layer: &LayerName) -> Self {
        Self {
            started: start(),
            layer: layer.clone(),
        }
    }
}

impl Drop for HandlerTimer {
    fn drop(&mut self) {
        let seconds = self.started.elapsed();
        observe!("idempotency_handler_seconds", seconds, self.layer);
    }
}

pub(crate) fn store_time(layer: &LayerName, operation: &'static str, started: Started) {
    observe!("idempotency_store_seconds", started.elapsed(), "operation" => operation, layer);
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
