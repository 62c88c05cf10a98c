//! Private object-safe counterpart of [`Store`], so that the layer has no type parameter for the store.

use std::{future::Future, pin::Pin, time::Duration};

use bytes::Bytes;

use super::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl};

type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

pub(crate) trait ErasedStore: Send + Sync {
    fn acquire<'a>(&'a self, claim: &'a Claim) -> StoreFuture<'a, Result<Acquired, StoreError>>;
    fn renew<'a>(
        &'a self,
        lease: &'a LeaseRef,
        ttl: Ttl,
    ) -> StoreFuture<'a, Result<(), StoreError>>;
    fn complete<'a>(
        &'a self,
        lease: &'a LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> StoreFuture<'a, Result<(), StoreError>>;
    fn release<'a>(&'a self, lease: &'a LeaseRef) -> StoreFuture<'a, Result<(), StoreError>>;
    fn wait_for_change<'a>(&'a self, id: &'a KeyId, timeout: Duration) -> StoreFuture<'a, ()>;
    fn find_completed(&self, id: &KeyId) -> Option<Acquired>;
}

impl<S: Store> ErasedStore for S {
    fn acquire<'a>(&'a self, claim: &'a Claim) -> StoreFuture<'a, Result<Acquired, StoreError>> {
        Box::pin(Store::acquire(self, claim))
    }

    fn renew<'a>(
        &'a self,
        lease: &'a LeaseRef,
        ttl: Ttl,
    ) -> StoreFuture<'a, Result<(), StoreError>> {
        Box::pin(Store::renew(self, lease, ttl))
    }

    fn complete<'a>(
        &'a self,
        lease: &'a LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> StoreFuture<'a, Result<(), StoreError>> {
        Box::pin(Store::complete(self, lease, record, retention))
    }

    fn release<'a>(&'a self, lease: &'a LeaseRef) -> StoreFuture<'a, Result<(), StoreError>> {
        Box::pin(Store::release(self, lease))
    }

    fn wait_for_change<'a>(&'a self, id: &'a KeyId, timeout: Duration) -> StoreFuture<'a, ()> {
        Box::pin(Store::wait_for_change(self, id, timeout))
    }

    fn find_completed(&self, id: &KeyId) -> Option<Acquired> {
        Store::find_completed(self, id)
    }
}
