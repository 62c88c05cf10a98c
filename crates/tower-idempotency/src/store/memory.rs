//! placeholder
use super::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl};
use bytes::Bytes;
use std::time::Duration;

/// For one process only.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore;

impl Store for MemoryStore {
    async fn acquire(&self, _claim: &Claim) -> Result<Acquired, StoreError> {
        Err(StoreError::LeaseLost)
    }
    async fn renew(&self, _lease: &LeaseRef, _ttl: Ttl) -> Result<(), StoreError> {
        Err(StoreError::LeaseLost)
    }
    async fn complete(
        &self,
        _lease: &LeaseRef,
        _record: Bytes,
        _retention: Ttl,
    ) -> Result<(), StoreError> {
        Err(StoreError::LeaseLost)
    }
    async fn release(&self, _lease: &LeaseRef) -> Result<(), StoreError> {
        Ok(())
    }
    async fn changed(&self, _id: &KeyId, _within: Duration) {}
}
