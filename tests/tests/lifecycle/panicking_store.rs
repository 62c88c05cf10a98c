//! A store that panics.

use std::{
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;
use tower_idempotency::{
    MemoryStore, Ttl,
    conformance::{FaultInjector, Operation},
    store::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError},
};

/// A store that panics in the first calls of an operation. The panic occurs before the call returns a future, or after the
/// effect of the call.
///
/// [`Fault::Panic`](tower_idempotency::conformance::Fault::Panic) panics when the future is polled, before the effect.
pub(crate) struct PanickingStore {
    pub(crate) injector: FaultInjector<MemoryStore>,
    /// Times of all calls of the operation.
    pub(crate) calls: Arc<Mutex<Vec<Instant>>>,
    operation: Operation,
    panics: u64,
    takes_effect: bool,
}

impl PanickingStore {
    /// Creates a store in which the first `panics` calls of the operation panic. They take effect before if `takes_effect`.
    pub(crate) fn new(operation: Operation, panics: u64, takes_effect: bool) -> Self {
        Self {
            injector: FaultInjector::new(MemoryStore::new()),
            calls: Arc::default(),
            operation,
            panics,
            takes_effect,
        }
    }

    fn run<T>(
        &self,
        operation: Operation,
        call: impl Future<Output = T> + Send,
    ) -> impl Future<Output = T> + Send {
        let panics = operation == self.operation && {
            let mut calls = self.calls.lock().expect("no poison");
            calls.push(Instant::now());
            calls.len() as u64 <= self.panics
        };
        assert!(!panics || self.takes_effect, "panic in the call");
        async move {
            let reply = call.await;
            assert!(!panics, "panic after the effect");
            reply
        }
    }
}

impl Store for PanickingStore {
    fn acquire(&self, claim: &Claim) -> impl Future<Output = Result<Acquired, StoreError>> + Send {
        self.run(Operation::Acquire, self.injector.acquire(claim))
    }

    fn renew(
        &self,
        lease: &LeaseRef,
        ttl: Ttl,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        self.run(Operation::Renew, self.injector.renew(lease, ttl))
    }

    fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        self.run(
            Operation::Complete,
            self.injector.complete(lease, record, retention),
        )
    }

    fn release(&self, lease: &LeaseRef) -> impl Future<Output = Result<(), StoreError>> + Send {
        self.run(Operation::Release, self.injector.release(lease))
    }

    fn wait_for_change(&self, id: &KeyId, timeout: Duration) -> impl Future<Output = ()> + Send {
        self.run(
            Operation::WaitForChange,
            self.injector.wait_for_change(id, timeout),
        )
    }
}
