//! A store that cannot read its completed entries.

use std::time::Duration;

use bytes::Bytes;
use tower_idempotency::{
    MemoryStore,
    conformance::FaultInjector,
    store::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl},
};

/// A store that cannot read its completed entries, as if a later version had written them.
#[derive(Clone, Debug)]
pub struct UnreadableStore(pub FaultInjector<MemoryStore>);

impl Default for UnreadableStore {
    fn default() -> Self {
        Self(FaultInjector::new(MemoryStore::new()))
    }
}

impl Store for UnreadableStore {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        match self.0.acquire(claim).await? {
            Acquired::Completed { .. } => {
                let source = "expected an entry of this version, found something else";
                Err(StoreError::unreadable(source))
            }
            acquired => Ok(acquired),
        }
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.0.renew(lease, ttl).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        self.0.complete(lease, record, retention).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.0.release(lease).await
    }

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        self.0.wait_for_change(id, timeout).await;
    }
}
