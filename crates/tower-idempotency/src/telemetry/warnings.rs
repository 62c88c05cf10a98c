//! Warnings that an outage or a wrong setting would repeat for each request or each lease.
//!
//! `NeedsAttention` has no limit: each of its events names an entry that a person has to resolve.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use crate::{retry::WarningLimit, store::KeyId};

/// Warnings of a layer. Each is limited to one per interval.
pub(crate) struct Warnings {
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
    took_over: WarningLimit,
    unprotected: WarningLimit,
    unrecorded: WarningLimit,
}

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

impl Default for Warnings {
    fn default() -> Self {
        Self {
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
            took_over: WarningLimit::new(SECOND),
            unprotected: WarningLimit::new(SECOND),
            unrecorded: WarningLimit::new(SECOND),
        }
    }
}

/// Warnings about requests.
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

    /// Reports a gRPC call with a key that passes through. It is counted with the others that pass through.
    pub(crate) fn grpc_unprotected(&self) {
        if !self.grpc_unprotected.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "gRPC call with a key passed through: no method with its path is protected, set with_grpc"
            );
        }
    }

    /// Reports a retry of an orphan that the layer refuses. A client may repeat it without a limit.
    pub(crate) fn orphaned(&self, id: &KeyId) {
        match self.orphaned.count() {
            Some(count) => {
                tracing::warn!(%id, count, "retry refused: earlier execution ended without an outcome");
            }
            None => {
                tracing::debug!(%id, "retry refused: earlier execution ended without an outcome");
            }
        }
        count!("idempotency_orphaned_total");
    }

    /// Reports a request whose key and content this process saw under another principal.
    pub(crate) fn principal_changed(&self, id: &KeyId) {
        if let Some(count) = self.principal_changed.count() {
            tracing::warn!(%id, count, "same key and content seen under another principal: a retry with a refreshed token executes again");
        }
        count!("idempotency_principal_changed_total");
    }

    /// Reports a request without the principal that the settings require.
    pub(crate) fn principal_missing(&self) {
        if let Some(count) = self.principal_missing.count() {
            tracing::error!(
                count,
                "principal missing: the layer is outside the authentication, requests get 500"
            );
        }
    }

    /// Reports an execution without a lease.
    pub(crate) fn unprotected(&self, id: &KeyId) {
        match self.unprotected.count() {
            Some(count) => {
                tracing::error!(%id, count, "executing without a lease: store failed and StoreFailure allows it");
            }
            None => tracing::debug!(%id, "executing without a lease"),
        }
        count!("idempotency_unprotected_total");
    }
}

/// Warnings about leases. If the store, the service or the process fails, each of many leases has one.
impl Warnings {
    /// Reports an execution that ended, and whose key stays leased.
    pub(crate) fn key_held(&self, id: &KeyId) {
        match self.key_held.count() {
            Some(count) => tracing::warn!(%id, count, "key held until its lease expires"),
            None => tracing::debug!(%id, "key held until its lease expires"),
        }
        count!("idempotency_held_total");
    }

    /// Reports a lease that the store no longer has, or that another process holds.
    pub(crate) fn lease_lost(&self, id: &KeyId) {
        match self.lease_lost.count() {
            Some(count) => {
                tracing::error!(%id, count, "lease lost while the handler was running");
            }
            None => tracing::debug!(%id, "lease lost while the handler was running"),
        }
        count!("idempotency_lease_lost_total");
    }

    /// Reports a failed execution that leaves its key as an orphan.
    pub(crate) fn orphan_left(&self, id: &KeyId, reason: &'static str) {
        match self.orphan_left.count() {
            Some(count) => {
                tracing::warn!(%id, reason, count, "execution failed, its key is an orphan");
            }
            None => tracing::debug!(%id, reason, "execution failed, its key is an orphan"),
        }
        count!("idempotency_failed_total", "reason" => reason);
    }

    /// Reports an execution that takes longer than the settings allow.
    pub(crate) fn overdue(&self, id: &KeyId, age: Duration) {
        match self.overdue.count() {
            Some(count) => tracing::warn!(%id, ?age, count, "execution overdue"),
            None => tracing::debug!(%id, ?age, "execution overdue"),
        }
        count!("idempotency_overdue_total");
    }

    /// Reports a renewal that began late.
    pub(crate) fn renew_late(&self, id: &KeyId) {
        match self.renew_late.count() {
            Some(count) => {
                tracing::warn!(%id, count, "renewal late by more than a third of the lease");
            }
            None => tracing::debug!(%id, "renewal late by more than a third of the lease"),
        }
        count!("idempotency_renew_late_total");
    }

    /// Reports the takeover of an orphan.
    pub(crate) fn took_over(&self, id: &KeyId, generation: u64) {
        match self.took_over.count() {
            Some(count) => {
                tracing::warn!(%id, generation, count, "took over an orphan: earlier execution ended without an outcome");
            }
            None => {
                tracing::debug!(%id, generation, "took over an orphan: earlier execution ended without an outcome");
            }
        }
        count!("idempotency_takeover_total");
    }

    /// Reports a response that was sent but not recorded. Its effect has happened, and no retry gets the response.
    pub(crate) fn unrecorded(&self, id: &KeyId) {
        match self.unrecorded.count() {
            Some(count) => {
                tracing::error!(%id, count, "record of a sent response was never stored, a retry may execute again");
            }
            None => {
                tracing::debug!(%id, "record of a sent response was never stored, a retry may execute again");
            }
        }
        count!("idempotency_unrecorded_total");
    }

    /// Returns the events about leases whose last occurrences no line has counted, with their number.
    ///
    /// Many leases have such an event in one moment, and no later event would count them.
    pub(crate) fn take_rest(&self) -> Vec<(&'static str, u64)> {
        let events = [
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
        ];
        events
            .into_iter()
            .filter_map(|(event, limit)| Some((event, limit.take_rest()?)))
            .collect()
    }
}

/// Logs the result of [`Warnings::take_rest`].
pub(crate) fn report_rest(rest: &[(&'static str, u64)]) {
    for (event, count) in rest {
        tracing::warn!(event, count, "earlier event occurred again");
    }
}
