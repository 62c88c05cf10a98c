//! Several clients of one server.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use bytes::Bytes;

use crate::{
    inspect::{
        Abilities, EntryDetails, Inspect, InspectError, Page, Query, Resolution, ResolveOutcome,
        Seen, Summary,
    },
    store::{Acquired, CheckError, Claim, KeyId, LeaseRef, Store, StoreError, Ttl},
};

/// Several clients of one server, as several processes have them. Each call uses the next client in turn.
///
/// With one client, the suite passes a store whose calls are atomic only within a process, such as one that locks a mutex. It
/// also passes a store that wakes only the waiters of its own process. With two clients, the cases about races and about
/// waiters fail.
///
/// # Examples
///
/// ```
/// use tower_idempotency::{
///     conformance::{Case, Processes, Subject},
///     store::MemoryStore,
/// };
///
/// let subject = async || {
///     let first = MemoryStore::new();
///     // For a store on a server, connect a second time instead.
///     let second = first.clone();
///     Subject::new(Processes::new([first, second]))
/// };
/// Case::named("one_of_32_concurrent_claims_is_granted").run(true, subject, |_| None);
/// ```
#[derive(Debug)]
pub struct Processes<S> {
    stores: Vec<S>,
    calls: AtomicUsize,
}

impl<S> Processes<S> {
    /// Creates a store that passes each call to the next of these.
    ///
    /// # Panics
    ///
    /// If there is no store.
    #[must_use]
    pub fn new(stores: impl IntoIterator<Item = S>) -> Self {
        let stores: Vec<S> = stores.into_iter().collect();
        assert!(!stores.is_empty(), "expected at least one store");
        Self {
            stores,
            calls: AtomicUsize::new(0),
        }
    }

    fn next(&self) -> &S {
        let call = self.calls.fetch_add(1, Relaxed);
        &self.stores[call % self.stores.len()]
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store> Store for Processes<S> {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        self.next().acquire(claim).await
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.next().renew(lease, ttl).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        self.next().complete(lease, record, retention).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.next().release(lease).await
    }

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        self.next().wait_for_change(id, timeout).await;
    }

    fn find_completed(&self, id: &KeyId) -> Option<Acquired> {
        self.next().find_completed(id)
    }

    async fn check(&self) -> Result<(), CheckError> {
        self.next().check().await
    }

    fn compress_above(&self) -> usize {
        self.next().compress_above()
    }
}

/// Passes each call to the next client. A page token of one client must be valid for the others.
///
/// Clients that serve records from their memory, such as [`Tiered`](crate::Tiered), can fail: a deletion reaches the memory of
/// one process only.
#[deny(clippy::missing_trait_methods)]
impl<S: Inspect> Inspect for Processes<S> {
    fn abilities(&self) -> Abilities {
        self.next().abilities()
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        self.next().list(query).await
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        self.next().get(id).await
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        self.next().summary(limit).await
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        self.next().resolve(seen, resolution).await
    }

    async fn purge(&self, batch: u32) -> Result<u64, InspectError> {
        self.next().purge(batch).await
    }
}
