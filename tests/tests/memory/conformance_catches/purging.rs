//! The case about purges detects a store that deletes nothing.

use std::time::Duration;

use bytes::Bytes;
use tower_idempotency::{
    conformance::Subject,
    inspect::{
        Abilities, EntryDetails, Inspect, InspectError, Page, Query, Resolution, ResolveOutcome,
        Seen, Summary,
    },
    store::{Acquired, Claim, KeyId, LeaseRef, MemoryStore, Store, StoreError, Ttl},
};

use super::fails_case;

/// A store that deletes no expired entry in a purge.
struct Unpurged {
    store: MemoryStore,
    abilities: Abilities,
}

impl Unpurged {
    fn with(abilities: Abilities) -> Subject<Self> {
        let store = MemoryStore::new().with_details();
        Subject::new(Self { store, abilities }).with_inspector()
    }
}

impl Store for Unpurged {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        self.store.acquire(claim).await
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.store.renew(lease, ttl).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        self.store.complete(lease, record, retention).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.store.release(lease).await
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        self.store.wait_for_change(id, within).await;
    }
}

impl Inspect for Unpurged {
    fn abilities(&self) -> Abilities {
        self.abilities
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        self.store.list(query).await
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        self.store.get(id).await
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        self.store.summary(limit).await
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        self.store.resolve(seen, resolution).await
    }

    async fn purge(&self, _batch: u32) -> Result<u64, InspectError> {
        Ok(0)
    }
}

#[test]
fn purge_without_effect_is_detected() {
    let case = "purge_deletes_expired_entries_alone";
    assert!(fails_case(Unpurged::with(Abilities::all()), case));
    let abilities = Abilities::all().without_purge();
    assert!(!fails_case(Unpurged::with(abilities), case));
}
