//! The cases about operators detect a store that deletes nothing in a purge, or live entries, and one that counts nothing.

use std::{collections::HashMap, sync::Mutex, time::Duration};

use bytes::Bytes;
use tokio::time::sleep;
use tower_idempotency::{
    conformance::Subject,
    inspect::{
        Abilities, Count, EntryDetails, Inspect, InspectError, Page, Query, Resolution,
        ResolveOutcome, Seen, State, Summary,
    },
    store::{Acquired, Claim, KeyId, LeaseRef, MemoryStore, Store, StoreError, Ttl},
};

use super::fails_case;

/// A store with a flaw in its access for operators.
struct Flawed {
    store: MemoryStore,
    flaw: Flaw,
    abilities: Abilities,
    /// The last lease of each entry.
    leases: Mutex<HashMap<KeyId, LeaseRef>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    Nothing,
    PurgesNothing,
    PurgeIsReadThenDeleted,
    CountsNothing,
    FreeDeletesRenewedLease,
    FreeDeletesLateRecord,
}

impl Flawed {
    fn with(flaw: Flaw, abilities: Abilities) -> Subject<Self> {
        let subject = Subject::new(Self {
            store: MemoryStore::new().with_details(),
            flaw,
            abilities,
            leases: Mutex::default(),
        });
        subject.with_inspector()
    }

    /// Reads which entries have expired, and then deletes these entries without a condition.
    async fn purge_in_two_steps(&self) -> Result<u64, InspectError> {
        let ids: Vec<KeyId> = self.leases.lock().unwrap().keys().copied().collect();
        let mut expired = Vec::new();
        for id in ids {
            if self.store.get(&id).await?.is_none() {
                expired.push(id);
            }
        }
        sleep(Duration::from_millis(2)).await;
        for id in expired {
            let lease = self.leases.lock().unwrap()[&id];
            self.store.release(&lease).await.unwrap();
        }
        Ok(0)
    }

    /// Reads the entry, and then deletes the orphan, or the lease or record that its holder has stored since.
    async fn free_in_two_steps(&self, seen: &Seen) -> Result<ResolveOutcome, InspectError> {
        let before = self.store.get(seen.id()).await?;
        if before.is_none_or(|before| before.entry.seen() != seen) {
            return self.store.resolve(seen, &Resolution::Free).await;
        }
        sleep(Duration::from_millis(2)).await;
        let present = self.store.get(seen.id()).await?;
        let state = present.as_ref().map(|present| present.entry.state());
        match (self.flaw, state, present) {
            (Flaw::FreeDeletesRenewedLease, Some(State::InProgress), _) => {
                let lease = self.leases.lock().unwrap()[seen.id()];
                self.store.release(&lease).await.unwrap();
                Ok(ResolveOutcome::Applied(None))
            }
            (Flaw::FreeDeletesLateRecord, Some(State::Completed), Some(present)) => {
                let late = present.entry.seen();
                self.store.resolve(late, &Resolution::DeleteRecord).await
            }
            _ => self.store.resolve(seen, &Resolution::Free).await,
        }
    }
}

impl Store for Flawed {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let acquired = self.store.acquire(claim).await?;
        if let Acquired::Granted { generation, .. } = acquired {
            let lease = claim.lease_ref(generation);
            self.leases.lock().unwrap().insert(claim.id, lease);
        }
        Ok(acquired)
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

impl Inspect for Flawed {
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
        let mut summary = self.store.summary(limit).await?;
        if self.flaw == Flaw::CountsNothing {
            for &state in State::ALL {
                summary.set(state, Count::new(0, false));
            }
        }
        Ok(summary)
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        match self.flaw {
            Flaw::FreeDeletesRenewedLease | Flaw::FreeDeletesLateRecord
                if *resolution == Resolution::Free =>
            {
                self.free_in_two_steps(seen).await
            }
            _ => self.store.resolve(seen, resolution).await,
        }
    }

    async fn purge(&self, batch: u32) -> Result<u64, InspectError> {
        match self.flaw {
            Flaw::PurgesNothing => Ok(0),
            Flaw::PurgeIsReadThenDeleted => self.purge_in_two_steps().await,
            _ => self.store.purge(batch).await,
        }
    }
}

#[test]
fn purge_without_effect_is_detected() {
    let case = "purge_deletes_expired_entries_alone";
    let flaw = Flaw::PurgesNothing;
    assert!(fails_case(Flawed::with(flaw, Abilities::all()), case));
    let abilities = Abilities::all().without_purge();
    assert!(!fails_case(Flawed::with(flaw, abilities), case));
}

#[test]
fn purge_of_live_entries_is_detected() {
    let case = "concurrent_purge_leaves_new_entries";
    for (flaw, fails) in [(Flaw::Nothing, false), (Flaw::PurgeIsReadThenDeleted, true)] {
        let subject = Flawed::with(flaw, Abilities::all());
        assert_eq!(fails_case(subject, case), fails);
    }
}

#[test]
fn deletion_without_condition_is_detected() {
    for (flaw, fails) in [
        (Flaw::Nothing, false),
        (Flaw::FreeDeletesRenewedLease, true),
        (Flaw::FreeDeletesLateRecord, true),
    ] {
        let subject = Flawed::with(flaw, Abilities::all());
        assert_eq!(
            fails_case(subject, "concurrent_free_and_holder_agree"),
            fails
        );
    }
}

#[test]
fn summary_without_counts_is_detected() {
    for (flaw, fails) in [(Flaw::Nothing, false), (Flaw::CountsNothing, true)] {
        let subject = Flawed::with(flaw, Abilities::all());
        assert_eq!(fails_case(subject, "summary_counts_up_to_limit"), fails);
    }
}
