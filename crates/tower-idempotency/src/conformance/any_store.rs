//! Type-erased store.

use std::{fmt, time::Duration};

use bytes::Bytes;

use crate::store::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl, erased::ErasedStore};

/// Store of any type, so that the cases are compiled once for all stores.
pub struct AnyStore(Box<dyn ErasedStore>);

impl AnyStore {
    pub(super) fn new(store: impl Store) -> Self {
        Self(Box::new(store))
    }
}

impl fmt::Debug for AnyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyStore").finish_non_exhaustive()
    }
}

impl Store for AnyStore {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        self.0.acquire(claim).await
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

    fn find_completed(&self, id: &KeyId) -> Option<Acquired> {
        self.0.find_completed(id)
    }
}
