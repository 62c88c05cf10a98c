//! The lease: its public handle, its state, and the task that renews it.

pub(crate) mod commits;
pub(crate) mod renewer;
pub(crate) mod state;

use std::{fmt, sync::Arc};

use tokio::time::sleep_until;

use crate::{digest::downstream_key, lease::state::LeaseState, store::KeyId};

/// The right to execute a request, as its handler sees it: a request extension, and an extractor with the feature `axum`.
///
/// Clones are handles to the same lease. A drop of a handle does not end the lease. The lease ends with the outcome of the
/// request, or by its expiry.
#[derive(Clone)]
pub struct Lease(pub(crate) Arc<LeaseState>);

impl Lease {
    /// Returns the ID of the entry.
    ///
    /// [`KeyId::to_hex`] returns its 64 digits, which the operators' tool and the console accept. `Display` shows the first
    /// eight, as events, problem bodies and lists do. Log the ID or store it with the effect, so that operators find the
    /// effect that belongs to an entry. It is no secret.
    ///
    /// All executions under one key have the same ID, also after the record has expired. It changes if a deployment changes
    /// the namespace, the secret or the principal.
    ///
    /// ```
    /// # use tower_idempotency::Lease;
    /// # async fn insert_payment(entry: &str) {}
    /// async fn pay(lease: Lease) {
    ///     insert_payment(&lease.key_id().to_hex()).await;
    /// }
    /// ```
    #[must_use]
    pub fn key_id(&self) -> KeyId {
        self.0.reference.id
    }

    /// Returns 1 for the first execution under this key, and a higher number after each takeover.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.reference.generation
    }

    /// Returns `true` if an earlier execution lost its lease without an outcome.
    ///
    /// The effect of that execution may or may not have happened. Check before you repeat it.
    #[must_use]
    pub fn is_takeover(&self) -> bool {
        self.0.grant.takeover
    }

    /// Returns `true` if no other process can be executing this request now, as far as this process knows.
    ///
    /// Check it before an effect that cannot be undone. It narrows the window for a second execution, but does not close it.
    /// Returns `false` once the lease was lost, could not be renewed in time, or ended with the outcome.
    ///
    /// Time is measured with [`Instant`](std::time::Instant). On Linux, that clock stops while the machine is suspended,
    /// for example a laptop or a virtual machine. After a suspension this may return `true` although the lease has expired
    /// at the store. That ends at the local deadline, or when a renewal reports the loss.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.is_held()
    }

    /// Waits until the lease is no longer held: lost, not renewed in time, or ended with the outcome.
    ///
    /// # Cancellation
    ///
    /// Safe to drop at any time.
    pub async fn lost(&self) {
        let state = &*self.0;
        loop {
            let changed = state.changed.notified();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            if !state.is_held() {
                return;
            }
            tokio::select! {
                biased;
                () = changed => {}
                () = sleep_until(state.deadline()) => {}
            }
        }
    }

    /// Derives a key for a call to another service: 64 hexadecimal digits, the same on every execution of this request and
    /// different for every `name`.
    ///
    /// Pass it to a provider that supports idempotency keys. A takeover then does not charge twice. The key changes with the
    /// layer's namespace and secret, and with the principal. A deployment that changes one of them loses the records and the
    /// derived keys alike. The key depends only on the entry's id and fingerprint in the store.
    ///
    /// A provider that records its failures replays the same 5xx on each execution. Do not derive another key then, because
    /// the provider may have charged. Respond with [`NeedsAttention`](crate::NeedsAttention).
    ///
    /// With [`MissingKey::Derive`](crate::MissingKey::Derive), the key also differs for an equal request after the record
    /// has expired, so that an equal order is charged again. A retry after an error response still gets the same key.
    /// Therefore the layer leaves the entry of such an execution as an orphan instead of releasing it. A retry takes the
    /// orphan over, unless the orphan policy refuses. A 4xx of such an execution is recorded, as under a key of the client.
    #[must_use]
    pub fn derive(&self, name: &str) -> String {
        self.0.set_derived();
        downstream_key(&self.0.reference.id, &self.0.reference.fingerprint, name)
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("id", &self.0.reference.id)
            .field("generation", &self.generation())
            .field("takeover", &self.is_takeover())
            .field("held", &self.is_held())
            .finish()
    }
}
