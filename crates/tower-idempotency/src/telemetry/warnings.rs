//! Warnings that an outage or a wrong setting would repeat for each request.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use crate::{retry::WarningLimit, store::KeyId};

/// Warnings of a layer. Each is limited to one per interval.
pub(crate) struct Warnings {
    anonymous: AtomicBool,
    grpc_unprotected: AtomicBool,
    orphaned: WarningLimit,
    principal_changed: WarningLimit,
    principal_missing: WarningLimit,
    unprotected: WarningLimit,
}

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

impl Default for Warnings {
    fn default() -> Self {
        Self {
            anonymous: AtomicBool::new(false),
            grpc_unprotected: AtomicBool::new(false),
            orphaned: WarningLimit::new(SECOND),
            principal_changed: WarningLimit::new(MINUTE),
            principal_missing: WarningLimit::new(MINUTE),
            unprotected: WarningLimit::new(SECOND),
        }
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
