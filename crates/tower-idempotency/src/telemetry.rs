//! Events and counters for operators: one event for every path of a request, and one counter with the feature `metrics`.
//!
//! No label and no field carries a key, a principal or a fingerprint. Events name an entry by eight hexadecimal digits of its
//! id; labels never do.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use http::StatusCode;
use tokio::time::Instant;

use crate::{
    error::ErrorKind,
    record::{NeedsAttention, TombstoneReason, Traceparent},
    store::{KeyId, StoreError},
};

macro_rules! count {
    ($name:literal $(, $label:literal => $value:expr)*) => {
        #[cfg(feature = "metrics")]
        metrics::counter!($name $(, $label => $value)*).increment(1);
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

/// Warnings that a layer repeats seldom, however often their cause occurs.
#[derive(Default)]
pub(crate) struct Warnings {
    anonymous: AtomicBool,
    principal_changed: OncePerMinute,
    principal_missing: OncePerMinute,
}

/// Limits a warning to one per minute.
#[derive(Default)]
struct OncePerMinute(Mutex<Option<Instant>>);

impl OncePerMinute {
    /// Returns `true` if the warning was not due in the last minute.
    fn is_due(&self) -> bool {
        let now = Instant::now();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| now - last >= Duration::from_secs(60));
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

impl Warnings {
    /// Reports a request with a key and without credentials.
    pub(crate) fn anonymous(&self) {
        if !self.anonymous.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "request without credentials: all such callers share their keys, set a principal"
            );
        }
        count!("idempotency_anonymous_total");
    }

    /// Reports a request whose key and content this process saw under another principal.
    pub(crate) fn principal_changed(&self, id: &KeyId) {
        if self.principal_changed.is_due() {
            tracing::warn!(%id, "same key and content seen under another principal: a retry with a refreshed token executes again");
        }
        count!("idempotency_principal_changed_total");
    }

    /// Reports a request without the principal that the settings require.
    pub(crate) fn principal_missing(&self) {
        if self.principal_missing.is_due() {
            tracing::error!(
                "principal missing: the layer is outside the authentication, requests get 500"
            );
        }
    }
}

pub(crate) fn granted(id: &KeyId, generation: u64, takeover: bool) {
    count!("idempotency_granted_total");
    if takeover {
        tracing::warn!(%id, generation, "took over an orphan: earlier execution ended without an outcome");
        count!("idempotency_takeover_total");
    } else {
        tracing::debug!(%id, "lease granted");
    }
}

/// Reports a replay. `traceparent` is that of the first execution.
pub(crate) fn replayed(
    id: &KeyId,
    recorded_at: Option<SystemTime>,
    traceparent: Option<&Traceparent>,
) {
    let age = recorded_at
        .and_then(|at| at.elapsed().ok())
        .map(tracing::field::debug);
    let execution = traceparent.map(Traceparent::as_str);
    tracing::debug!(%id, age, execution, "replayed");
    count!("idempotency_replayed_total");
}

pub(crate) fn tombstone(id: &KeyId, status: StatusCode, reason: TombstoneReason) {
    tracing::debug!(%id, status = status.as_u16(), ?reason, "replay impossible: earlier response was not recorded");
    count!("idempotency_tombstone_replays_total");
}

pub(crate) fn unresolved(id: &KeyId, status: Option<StatusCode>, code: &str) {
    let status = status.map(|status| status.as_u16());
    tracing::debug!(%id, status, code, "retry refused: earlier execution needs attention");
    count!("idempotency_unresolved_total", "reason" => code.to_owned());
}

/// Reports a request with a key that the layer does not cover.
pub(crate) fn passed_through(reason: &'static str) {
    tracing::debug!(reason, "request with a key passed through");
    count!("idempotency_passed_through_total", "reason" => reason);
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

pub(crate) fn orphaned(id: &KeyId) {
    tracing::warn!(%id, "retry refused: earlier execution ended without an outcome");
    count!("idempotency_orphaned_total");
}

pub(crate) fn lease_lost(id: &KeyId) {
    tracing::error!(%id, "lease lost while the handler was running");
    count!("idempotency_lease_lost_total");
}

pub(crate) fn renew_late(id: &KeyId) {
    tracing::warn!(%id, "renewal late by more than a third of the lease");
    count!("idempotency_renew_late_total");
}

/// Reports a failed store call. `error` is `None` if the call timed out.
pub(crate) fn store_error(operation: &'static str, id: &KeyId, error: Option<&StoreError>) {
    match error {
        Some(error) => {
            let source = std::error::Error::source(error).map(tracing::field::display);
            tracing::warn!(%id, operation, %error, source, "store call failed");
        }
        None => tracing::warn!(%id, operation, "store call timed out"),
    }
    count!("idempotency_store_error_total", "operation" => operation);
}

pub(crate) fn unprotected(id: &KeyId) {
    tracing::error!(%id, "executing without a lease: store failed and StoreFailure allows it");
    count!("idempotency_unprotected_total");
}

pub(crate) fn bad_record(id: &KeyId, error: &crate::record::RecordError) {
    tracing::error!(%id, %error, "record cannot be read, requests with its key get 503 until it expires");
    count!("idempotency_bad_record_total");
}

pub(crate) fn recorded(id: &KeyId, record: &[u8]) {
    let bytes = record.len();
    tracing::debug!(%id, bytes, "record stored");
    if let Some(attention) = NeedsAttention::in_record(record) {
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

/// Reports a response that was sent but not recorded. Its effect has happened, and no retry gets the response.
pub(crate) fn unrecorded(id: &KeyId) {
    tracing::error!(%id, "record of a sent response was never stored, a retry may execute again");
    count!("idempotency_unrecorded_total");
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

pub(crate) fn key_held(id: &KeyId) {
    tracing::warn!(%id, "key held until its lease expires");
    count!("idempotency_held_total");
}

/// Reports a success that is not recorded, since a transaction of the handler was neither committed nor rolled back.
pub(crate) fn transaction_unfinished(id: &KeyId) {
    tracing::error!(%id, "transaction neither committed nor rolled back, its effect is lost, success is not recorded");
    count!("idempotency_unfinished_transactions_total");
}

/// Reports a failed execution that leaves its key as an orphan.
pub(crate) fn orphan_left(id: &KeyId, reason: &'static str) {
    tracing::warn!(%id, reason, "execution failed, its key is an orphan");
    count!("idempotency_failed_total", "reason" => reason);
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
