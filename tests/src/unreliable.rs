//! A memory store that fails as it is told, and counts what it is asked.

use std::{
    future::pending,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tower_idempotency::store::{
    Acquired, Claim, KeyId, LeaseRef, MemoryStore, Store, StoreError, Token, Ttl,
};

/// A store method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// [`Store::acquire`].
    Acquire,
    /// [`Store::renew`].
    Renew,
    /// [`Store::complete`].
    Complete,
    /// [`Store::release`].
    Release,
}

/// How a call goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing happens, and the caller is told that it failed.
    Before,
    /// It happens, and the caller is told that it failed: the reply was lost.
    After,
    /// Nothing happens, and nobody answers.
    Hang,
    /// Nothing happens, and the caller is told that it lost the lease.
    LeaseLost,
}

/// A [`MemoryStore`] that fails as it is told. Clones are one store.
#[derive(Clone, Debug, Default)]
pub struct Unreliable(Arc<State>);

type Garble = fn(Bytes) -> Bytes;

#[derive(Debug, Default)]
struct State {
    store: MemoryStore,
    operations: [Script; 4],
    tokens: Mutex<Vec<Token>>,
    garbled: Mutex<Option<Garble>>,
}

#[derive(Debug, Default)]
struct Script {
    calls: AtomicU64,
    // The fault and how many calls it lasts.
    fault: Mutex<Option<(Fault, u64)>>,
}

impl Unreliable {
    /// On top of this store.
    #[must_use]
    pub fn over(store: MemoryStore) -> Self {
        Self(Arc::new(State {
            store,
            ..State::default()
        }))
    }

    /// Every call goes wrong until [`recover`](Self::recover).
    pub fn fail(&self, operation: Operation, fault: Fault) {
        self.fail_next(u64::MAX, operation, fault);
    }

    /// The next calls go wrong.
    pub fn fail_next(&self, calls: u64, operation: Operation, fault: Fault) {
        *lock(&self.script(operation).fault) = Some((fault, calls));
    }

    /// Nothing goes wrong any more.
    pub fn recover(&self) {
        for script in &self.0.operations {
            *lock(&script.fault) = None;
        }
    }

    /// Gives out records as `garble` leaves them.
    pub fn garble(&self, garble: fn(Bytes) -> Bytes) {
        *lock(&self.0.garbled) = Some(garble);
    }

    /// How often it was called, whatever came of it.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> u64 {
        self.script(operation).calls.load(Ordering::SeqCst)
    }

    /// How often it was called in all.
    #[must_use]
    pub fn all_calls(&self) -> u64 {
        let calls = |script: &Script| script.calls.load(Ordering::SeqCst);
        self.0.operations.iter().map(calls).sum()
    }

    /// The tokens of all acquires, in order.
    #[must_use]
    pub fn tokens(&self) -> Vec<Token> {
        lock(&self.0.tokens).clone()
    }

    /// The store underneath.
    pub fn memory(&self) -> MemoryStore {
        self.0.store.clone()
    }

    fn script(&self, operation: Operation) -> &Script {
        &self.0.operations[operation as usize]
    }

    async fn call<T>(
        &self,
        operation: Operation,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let script = self.script(operation);
        script.calls.fetch_add(1, Ordering::SeqCst);
        let fault = {
            let mut fault = lock(&script.fault);
            let now = fault.map(|(fault, _)| fault);
            *fault = fault.and_then(|(fault, left)| Some((fault, left.checked_sub(1)?)));
            if fault.is_some_and(|(_, left)| left == 0) {
                *fault = None;
            }
            now
        };
        match fault {
            None => call.await,
            Some(Fault::Before) => Err(StoreError::backend("connection refused")),
            Some(Fault::After) => {
                call.await?;
                Err(StoreError::backend("connection reset"))
            }
            Some(Fault::Hang) => pending().await,
            Some(Fault::LeaseLost) => Err(StoreError::LeaseLost),
        }
    }
}

impl Store for Unreliable {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        lock(&self.0.tokens).push(claim.token);
        let acquired = self
            .call(Operation::Acquire, self.0.store.acquire(claim))
            .await?;
        Ok(match (acquired, *lock(&self.0.garbled)) {
            (
                Acquired::Completed {
                    fingerprint,
                    record,
                },
                Some(garble),
            ) => Acquired::Completed {
                fingerprint,
                record: garble(record),
            },
            (acquired, _) => acquired,
        })
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.call(Operation::Renew, self.0.store.renew(lease, ttl))
            .await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let call = self.0.store.complete(lease, record, retention);
        self.call(Operation::Complete, call).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.call(Operation::Release, self.0.store.release(lease))
            .await
    }

    async fn changed(&self, id: &KeyId, within: Duration) {
        self.0.store.changed(id, within).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics with it")
}
