//! Warnings that an outage or a wrong setting would repeat for each request or each lease.
//!
//! `NeedsAttention` has no limit: each of its events names an entry that a person has to resolve.

use std::{
    fmt::Display,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use super::warning_limit::WarningLimit;
#[cfg(feature = "grpc")]
use crate::grpc::Side;
use crate::{
    layer_name::LayerName,
    store::{KeyId, StoreError},
};

/// Warnings of a layer. Each is logged once, or at most once per interval. Clones of the layer share them, unless they have
/// another name.
pub(crate) struct Warnings {
    layer: LayerName,
    anonymous: AtomicBool,
    /// `true` after the warning about a stream on this [`Side`].
    #[cfg(feature = "grpc")]
    grpc_streams: [AtomicBool; 2],
    grpc_unprotected: AtomicBool,
    not_enforced: AtomicBool,
    pub(super) bad_record: WarningLimit,
    batch_without_lease: WarningLimit,
    key_held: WarningLimit,
    lease_lost: WarningLimit,
    orphan_left: WarningLimit,
    orphaned: WarningLimit,
    overdue: WarningLimit,
    principal_changed: WarningLimit,
    principal_missing: WarningLimit,
    record_too_large: WarningLimit,
    renew_late: WarningLimit,
    store_call_failed: WarningLimit,
    took_over: WarningLimit,
    unprotected: WarningLimit,
    unrecorded: WarningLimit,
}

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

impl Default for Warnings {
    fn default() -> Self {
        Self::new(LayerName::default())
    }
}

impl Warnings {
    /// Creates the warnings of a layer with this name.
    pub(crate) fn new(layer: LayerName) -> Self {
        Self {
            layer,
            anonymous: AtomicBool::new(false),
            #[cfg(feature = "grpc")]
            grpc_streams: Default::default(),
            grpc_unprotected: AtomicBool::new(false),
            not_enforced: AtomicBool::new(false),
            bad_record: WarningLimit::new(SECOND),
            batch_without_lease: WarningLimit::new(MINUTE),
            key_held: WarningLimit::new(SECOND),
            lease_lost: WarningLimit::new(SECOND),
            orphan_left: WarningLimit::new(SECOND),
            orphaned: WarningLimit::new(SECOND),
            overdue: WarningLimit::new(SECOND),
            principal_changed: WarningLimit::new(MINUTE),
            principal_missing: WarningLimit::new(MINUTE),
            record_too_large: WarningLimit::new(SECOND),
            renew_late: WarningLimit::new(SECOND),
            store_call_failed: WarningLimit::new(SECOND),
            took_over: WarningLimit::new(SECOND),
            unprotected: WarningLimit::new(SECOND),
            unrecorded: WarningLimit::new(SECOND),
        }
    }

    /// Returns the name of the layer.
    pub(crate) fn layer(&self) -> &LayerName {
        &self.layer
    }
}

/// Warnings about requests.
impl Warnings {
    /// Reports a request with a key and without credentials.
    pub(crate) fn anonymous(&self) {
        if !self.anonymous.swap(true, Ordering::Relaxed) {
            log!(
                warn,
                layer = self.layer.as_str(),
                "request without credentials: all such callers share their keys, set a principal"
            );
        }
        count!("idempotency_anonymous_total", self.layer);
    }

    /// Reports a batch whose request has a key, and whose head has no lease.
    pub(crate) fn batch_without_lease(&self) {
        if let Some(count) = self.batch_without_lease.count() {
            log!(
                warn,
                layer = self.layer.as_str(),
                count,
                "lease missing in the head of a batch: its response is recorded even if items failed"
            );
        }
    }

    /// Returns `true` for the first gRPC stream on this side.
    #[cfg(feature = "grpc")]
    pub(super) fn is_first_grpc_stream(&self, side: Side) -> bool {
        !self.grpc_streams[side as usize].swap(true, Ordering::Relaxed)
    }

    /// Reports a gRPC call with a key that passes through. It is counted with the others that pass through.
    pub(crate) fn grpc_unprotected(&self) {
        if !self.grpc_unprotected.swap(true, Ordering::Relaxed) {
            log!(
                warn,
                layer = self.layer.as_str(),
                "gRPC call with a key passed through: no method with its path is protected, set with_grpc"
            );
        }
    }

    /// Reports a request of a layer that does not enforce all requests.
    pub(crate) fn not_enforced(&self, enforcement: impl Display) {
        if !self.not_enforced.swap(true, Ordering::Relaxed) {
            log!(
                warn,
                layer = self.layer.as_str(),
                %enforcement,
                "layer does not enforce all requests: a request that is not enforced executes on every retry"
            );
        }
    }

    /// Reports a retry of an orphan that the layer refuses. A client may repeat it without a limit.
    pub(crate) fn orphaned(&self, id: &KeyId) {
        log_limited!(warn, self.orphaned, "retry refused: earlier execution ended without an outcome", %id);
        count!("idempotency_orphaned_total", self.layer);
    }

    /// Reports a request whose key and content this process saw under another principal.
    pub(crate) fn principal_changed(&self, id: &KeyId) {
        if let Some(count) = self.principal_changed.count() {
            log!(warn, %id, layer = self.layer.as_str(), count, "same key and content seen under another principal: a retry with a refreshed token executes again");
        }
        count!("idempotency_principal_changed_total", self.layer);
    }

    /// Reports a request without the principal that the settings require.
    pub(crate) fn principal_missing(&self) {
        if let Some(count) = self.principal_missing.count() {
            log!(
                error,
                layer = self.layer.as_str(),
                count,
                "principal missing: the layer is outside the authentication, requests get 500"
            );
        }
    }

    /// Reports a record that is too large for the store. A client may choose the size of each response.
    pub(crate) fn record_too_large(&self, id: &KeyId, bytes: usize, limit: usize) {
        log_limited!(warn, self.record_too_large, "record exceeds the limit of the store", %id, bytes, limit);
    }

    /// Reports a failed store call. `error` is `None` if the call timed out.
    pub(crate) fn store_call_failed(
        &self,
        operation: &'static str,
        id: &KeyId,
        error: Option<&StoreError>,
    ) {
        let source = error.and_then(std::error::Error::source);
        let source = source.map(tracing::field::display);
        let error: &dyn Display = error.map_or(&"no reply in time", |error| error);
        log_limited!(warn, self.store_call_failed, "store call failed", %id, operation, %error, source);
        count!("idempotency_store_error_total", "operation" => operation, self.layer);
    }

    /// Reports an execution without a lease.
    pub(crate) fn unprotected(&self, id: &KeyId) {
        let layer = self.layer.as_str();
        match self.unprotected.count() {
            Some(count) => {
                log!(error, %id, layer, count, "executing without a lease: store failed and StoreFailure allows it");
            }
            None => log!(debug, %id, layer, "executing without a lease"),
        }
        count!("idempotency_unprotected_total", self.layer);
    }
}

/// Warnings about leases. If the store, the service or the process fails, each of many leases has one.
impl Warnings {
    /// Reports an execution that ended, and whose key stays leased.
    pub(crate) fn key_held(&self, id: &KeyId) {
        log_limited!(warn, self.key_held, "key held until its lease expires", %id);
        count!("idempotency_held_total", self.layer);
    }

    /// Reports a lease that the store no longer has, or that another process holds.
    pub(crate) fn lease_lost(&self, id: &KeyId) {
        log_limited!(error, self.lease_lost, "lease lost while the handler was running", %id);
        count!("idempotency_lease_lost_total", self.layer);
    }

    /// Reports a failed execution that leaves its key as an orphan.
    pub(crate) fn orphan_left(&self, id: &KeyId, reason: &'static str) {
        log_limited!(warn, self.orphan_left, "execution failed, its key is an orphan", %id, reason);
        count!("idempotency_failed_total", "reason" => reason, self.layer);
    }

    /// Reports an execution that takes longer than the settings allow.
    pub(crate) fn overdue(&self, id: &KeyId, age: Duration) {
        log_limited!(warn, self.overdue, "execution overdue", %id, ?age);
        count!("idempotency_overdue_total", self.layer);
    }

    /// Reports a renewal that began late.
    pub(crate) fn renew_late(&self, id: &KeyId) {
        log_limited!(warn, self.renew_late, "renewal late by more than a third of the lease", %id);
        count!("idempotency_renew_late_total", self.layer);
    }

    /// Reports the takeover of an orphan.
    pub(crate) fn took_over(&self, id: &KeyId, generation: u64) {
        log_limited!(warn, self.took_over, "took over an orphan: earlier execution ended without an outcome", %id, generation);
        count!("idempotency_takeover_total", self.layer);
    }

    /// Reports a response that was sent but not recorded. Its effect has happened, and no retry gets the response.
    pub(crate) fn unrecorded(&self, id: &KeyId) {
        log_limited!(error, self.unrecorded, "record of a sent response was never stored, a retry may execute again", %id);
        count!("idempotency_unrecorded_total", self.layer);
    }

    /// Returns the events about leases whose last occurrences no line has counted, with their number.
    ///
    /// Many leases have such an event in one moment, and no later event would count them.
    pub(crate) fn take_rest(&self) -> impl Iterator<Item = UncountedEvents> {
        self.take_uncounted(WarningLimit::take_rest)
    }

    /// Returns the events about leases that no line has counted, with their number. Does not wait for further ones.
    pub(crate) fn take_rest_now(&self) -> impl Iterator<Item = UncountedEvents> {
        self.take_uncounted(WarningLimit::take_rest_now)
    }

    fn take_uncounted(
        &self,
        take: fn(&WarningLimit) -> Option<u64>,
    ) -> impl Iterator<Item = UncountedEvents> {
        self.lease_events()
            .into_iter()
            .filter_map(move |(event, limit)| {
                Some(UncountedEvents {
                    layer: self.layer.clone(),
                    event,
                    count: take(limit)?,
                })
            })
    }

    /// Returns `true` if [`take_rest`](Self::take_rest) will return an event, now or later.
    pub(crate) fn has_rest(&self) -> bool {
        let mut events = self.lease_events().into_iter();
        events.any(|(_, limit)| limit.has_rest())
    }

    fn lease_events(&self) -> [(&'static str, &WarningLimit); 7] {
        [
            ("key held until its lease expires", &self.key_held),
            ("lease lost while the handler was running", &self.lease_lost),
            ("execution failed, its key is an orphan", &self.orphan_left),
            ("execution overdue", &self.overdue),
            (
                "renewal late by more than a third of the lease",
                &self.renew_late,
            ),
            (
                "took over an orphan: earlier execution ended without an outcome",
                &self.took_over,
            ),
            (
                "record of a sent response was never stored, a retry may execute again",
                &self.unrecorded,
            ),
        ]
    }
}

/// Events about leases that no line has counted.
pub(crate) struct UncountedEvents {
    layer: LayerName,
    event: &'static str,
    count: u64,
}

/// Logs the result of [`Warnings::take_rest`] or [`Warnings::take_rest_now`].
pub(crate) fn report_rest(rest: &[UncountedEvents]) {
    for UncountedEvents {
        layer,
        event,
        count,
    } in rest
    {
        let layer = layer.as_str();
        log!(warn, layer, event, count, "earlier event occurred again");
    }
}
