//! Warnings that an outage or a wrong setting would repeat for each request or each lease.
//!
//! `NeedsAttention` has no limit: each of its events names an entry that a person has to resolve.

use std::{
    fmt::Display,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use crate::{
    layer_name::LayerName,
    retry::WarningLimit,
    store::{KeyId, StoreError},
};

/// Warnings of a layer. Each is limited to one per interval. Clones of the layer share them, unless they have another name.
pub(crate) struct Warnings {
    layer: LayerName,
    anonymous: AtomicBool,
    grpc_unprotected: AtomicBool,
    key_held: WarningLimit,
    lease_lost: WarningLimit,
    orphan_left: WarningLimit,
    orphaned: WarningLimit,
    overdue: WarningLimit,
    principal_changed: WarningLimit,
    principal_missing: WarningLimit,
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
            grpc_unprotected: AtomicBool::new(false),
            key_held: WarningLimit::new(SECOND),
            lease_lost: WarningLimit::new(SECOND),
            orphan_left: WarningLimit::new(SECOND),
            orphaned: WarningLimit::new(SECOND),
            overdue: WarningLimit::new(SECOND),
            principal_changed: WarningLimit::new(MINUTE),
            principal_missing: WarningLimit::new(MINUTE),
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
            tracing::warn!(
                layer = self.layer.as_str(),
                "request without credentials: all such callers share their keys, set a principal"
            );
        }
        count!("idempotency_anonymous_total", self.layer);
    }

    /// Reports a gRPC call with a key that passes through. It is counted with the others that pass through.
    pub(crate) fn grpc_unprotected(&self) {
        if !self.grpc_unprotected.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                layer = self.layer.as_str(),
                "gRPC call with a key passed through: no method with its path is protected, set with_grpc"
            );
        }
    }

    /// Reports a retry of an orphan that the layer refuses. A client may repeat it without a limit.
    pub(crate) fn orphaned(&self, id: &KeyId) {
        let layer = self.layer.as_str();
        match self.orphaned.count() {
            Some(count) => {
                tracing::warn!(%id, layer, count, "retry refused: earlier execution ended without an outcome");
            }
            None => {
                tracing::debug!(%id, layer, "retry refused: earlier execution ended without an outcome");
            }
        }
        count!("idempotency_orphaned_total", self.layer);
    }

    /// Reports a request whose key and content this process saw under another principal.
    pub(crate) fn principal_changed(&self, id: &KeyId) {
        if let Some(count) = self.principal_changed.count() {
            tracing::warn!(%id, layer = self.layer.as_str(), count, "same key and content seen under another principal: a retry with a refreshed token executes again");
        }
        count!("idempotency_principal_changed_total", self.layer);
    }

    /// Reports a request without the principal that the settings require.
    pub(crate) fn principal_missing(&self) {
        if let Some(count) = self.principal_missing.count() {
            tracing::error!(
                layer = self.layer.as_str(),
                count,
                "principal missing: the layer is outside the authentication, requests get 500"
            );
        }
    }

    /// Reports a failed store call. `error` is `None` if the call timed out.
    pub(crate) fn store_call_failed(
        &self,
        operation: &'static str,
        id: &KeyId,
        error: Option<&StoreError>,
    ) {
        let layer = self.layer.as_str();
        let source = error.and_then(std::error::Error::source);
        let source = source.map(tracing::field::display);
        let error: &dyn Display = error.map_or(&"no reply in time", |error| error);
        match self.store_call_failed.count() {
            Some(count) => {
                tracing::warn!(%id, layer, operation, %error, source, count, "store call failed");
            }
            None => tracing::debug!(%id, layer, operation, %error, source, "store call failed"),
        }
        count!("idempotency_store_error_total", "operation" => operation, self.layer);
    }

    /// Reports an execution without a lease.
    pub(crate) fn unprotected(&self, id: &KeyId) {
        let layer = self.layer.as_str();
        match self.unprotected.count() {
            Some(count) => {
                tracing::error!(%id, layer, count, "executing without a lease: store failed and StoreFailure allows it");
            }
            None => tracing::debug!(%id, layer, "executing without a lease"),
        }
        count!("idempotency_unprotected_total", self.layer);
    }
}

/// Warnings about leases. If the store, the service or the process fails, each of many leases has one.
impl Warnings {
    /// Reports an execution that ended, and whose key stays leased.
    pub(crate) fn key_held(&self, id: &KeyId) {
        let layer = self.layer.as_str();
        match self.key_held.count() {
            Some(count) => tracing::warn!(%id, layer, count, "key held until its lease expires"),
            None => tracing::debug!(%id, layer, "key held until its lease expires"),
        }
        count!("idempotency_held_total", self.layer);
    }

    /// Reports a lease that the store no longer has, or that another process holds.
    pub(crate) fn lease_lost(&self, id: &KeyId) {
        let layer = self.layer.as_str();
        match self.lease_lost.count() {
            Some(count) => {
                tracing::error!(%id, layer, count, "lease lost while the handler was running");
            }
            None => tracing::debug!(%id, layer, "lease lost while the handler was running"),
        }
        count!("idempotency_lease_lost_total", self.layer);
    }

    /// Reports a failed execution that leaves its key as an orphan.
    pub(crate) fn orphan_left(&self, id: &KeyId, reason: &'static str) {
        let layer = self.layer.as_str();
        match self.orphan_left.count() {
            Some(count) => {
                tracing::warn!(%id, layer, reason, count, "execution failed, its key is an orphan");
            }
            None => tracing::debug!(%id, layer, reason, "execution failed, its key is an orphan"),
        }
        count!("idempotency_failed_total", "reason" => reason, self.layer);
    }

    /// Reports an execution that takes longer than the settings allow.
    pub(crate) fn overdue(&self, id: &KeyId, age: Duration) {
        let layer = self.layer.as_str();
        match self.overdue.count() {
            Some(count) => tracing::warn!(%id, layer, ?age, count, "execution overdue"),
            None => tracing::debug!(%id, layer, ?age, "execution overdue"),
        }
        count!("idempotency_overdue_total", self.layer);
    }

    /// Reports a renewal that began late.
    pub(crate) fn renew_late(&self, id: &KeyId) {
        let layer = self.layer.as_str();
        match self.renew_late.count() {
            Some(count) => {
                tracing::warn!(%id, layer, count, "renewal late by more than a third of the lease");
            }
            None => tracing::debug!(%id, layer, "renewal late by more than a third of the lease"),
        }
        count!("idempotency_renew_late_total", self.layer);
    }

    /// Reports the takeover of an orphan.
    pub(crate) fn took_over(&self, id: &KeyId, generation: u64) {
        let layer = self.layer.as_str();
        match self.took_over.count() {
            Some(count) => {
                tracing::warn!(%id, layer, generation, count, "took over an orphan: earlier execution ended without an outcome");
            }
            None => {
                tracing::debug!(%id, layer, generation, "took over an orphan: earlier execution ended without an outcome");
            }
        }
        count!("idempotency_takeover_total", self.layer);
    }

    /// Reports a response that was sent but not recorded. Its effect has happened, and no retry gets the response.
    pub(crate) fn unrecorded(&self, id: &KeyId) {
        let layer = self.layer.as_str();
        match self.unrecorded.count() {
            Some(count) => {
                tracing::error!(%id, layer, count, "record of a sent response was never stored, a retry may execute again");
            }
            None => {
                tracing::debug!(%id, layer, "record of a sent response was never stored, a retry may execute again");
            }
        }
        count!("idempotency_unrecorded_total", self.layer);
    }

    /// Returns the events about leases whose last occurrences no line has counted, with their number.
    ///
    /// Many leases have such an event in one moment, and no later event would count them.
    pub(crate) fn take_rest(&self) -> impl Iterator<Item = UncountedEvents> {
        self.lease_events()
            .into_iter()
            .filter_map(|(event, limit)| {
                Some(UncountedEvents {
                    layer: self.layer.clone(),
                    event,
                    count: limit.take_rest()?,
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

/// Logs the result of [`Warnings::take_rest`].
pub(crate) fn report_rest(rest: &[UncountedEvents]) {
    for UncountedEvents {
        layer,
        event,
        count,
    } in rest
    {
        let layer = layer.as_str();
        tracing::warn!(layer, event, count, "earlier event occurred again");
    }
}
