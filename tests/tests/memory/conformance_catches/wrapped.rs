//! A correct store behind a layer that changes its calls and replies. The suite detects each change.

use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;
use tower_idempotency::{
    conformance::Subject,
    inspect::{
        Abilities, EntryDetails, Inspect, InspectError, Page, Query, Resolution, ResolveOutcome,
        Seen, State, Summary,
    },
    store::{
        Acquired, Claim, KeyId, LeaseRef, MemoryStore, ScopeDigest, Store, StoreError, Token, Ttl,
    },
};

use super::fails_case;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    Nothing,
    ScopeIsPartOfId,
    ShortestNeverEnds,
    ChunksInTextOrder,
    RecordKeepsTail,
    RenewBelievesGeneration,
    CompleteBelievesGeneration,
    ResolveNeedsToken,
    FreeReleases,
    RetryKeepsExpiry,
    DeletedRecordIsFound,
    RenewRestartsAge,
    RenewLeavesIndex,
}

struct Wrapped {
    store: MemoryStore,
    flaw: Flaw,
    history: Mutex<History>,
}

/// The calls so far.
#[derive(Default)]
struct History {
    /// The last record of each entry.
    records: HashMap<KeyId, Bytes>,
    /// The generation that each token was granted.
    generations: HashMap<Token, u64>,
    /// The entries that were released last.
    released: HashSet<KeyId>,
    /// The last replay of each entry.
    replays: HashMap<KeyId, Acquired>,
    /// The last renewal of each entry.
    renewals: HashMap<KeyId, Instant>,
    /// The entries that were orphans before a renewal.
    revived: HashSet<KeyId>,
}

impl Wrapped {
    fn subject(flaw: Flaw) -> Subject<Self> {
        let subject = Subject::new(Self {
            store: MemoryStore::new().with_details(),
            flaw,
            history: Mutex::default(),
        });
        subject.with_inspector()
    }

    fn id(&self, id: KeyId, scope: Option<ScopeDigest>) -> KeyId {
        let mut bytes = *id.as_bytes();
        if let Some(scope) = scope
            && self.flaw == Flaw::ScopeIsPartOfId
        {
            for (byte, scope) in bytes.iter_mut().zip(scope.as_bytes()) {
                *byte ^= scope;
            }
        }
        KeyId::from_bytes(bytes)
    }

    fn lease(&self, lease: &LeaseRef) -> LeaseRef {
        let mut lease = *lease;
        lease.id = self.id(lease.id, lease.scope);
        lease
    }

    /// Returns the duration that is stored.
    fn ttl(&self, ttl: Ttl) -> Ttl {
        if ttl == Ttl::MIN && self.flaw == Flaw::ShortestNeverEnds {
            Ttl::MAX
        } else {
            ttl
        }
    }

    /// Fails if the flaw compares the generation, and the token was granted another one.
    fn check_generation(&self, lease: &LeaseRef, flaw: Flaw) -> Result<(), StoreError> {
        let history = self.history.lock().unwrap();
        let granted = history.generations.get(&lease.token);
        if self.flaw == flaw && granted.is_some_and(|granted| *granted != lease.generation) {
            return Err(StoreError::LeaseLost);
        }
        Ok(())
    }

    /// Returns the record that is stored: the new one, followed by the rest of a longer one.
    fn stored_record(&self, id: KeyId, record: Bytes) -> Bytes {
        if self.flaw != Flaw::RecordKeepsTail {
            return record;
        }
        let mut history = self.history.lock().unwrap();
        let earlier = history.records.insert(id, record.clone());
        let tail = earlier.as_deref().and_then(|it| it.get(record.len()..));
        [&*record, tail.unwrap_or_default()].concat().into()
    }
}

/// Returns the chunks of the record in the order of their numbers as text: 10 comes before 2.
fn in_text_order(record: &Bytes) -> Bytes {
    let chunks = record.chunks(64 * 1024).enumerate();
    let mut chunks: Vec<_> = chunks.map(|(n, chunk)| (n.to_string(), chunk)).collect();
    chunks.sort();
    let chunks: Vec<&[u8]> = chunks.into_iter().map(|(_, chunk)| chunk).collect();
    chunks.concat().into()
}

impl Store for Wrapped {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let mut claim = claim.clone();
        claim.id = self.id(claim.id, claim.scope);
        claim.lease = self.ttl(claim.lease);
        let mut acquired = self.store.acquire(&claim).await?;
        let mut history = self.history.lock().unwrap();
        if let Acquired::Granted { generation, .. } = &acquired {
            history.generations.insert(claim.token, *generation);
            history.released.remove(&claim.id);
        }
        if let Acquired::Completed { record, .. } = &mut acquired {
            if self.flaw == Flaw::ChunksInTextOrder {
                *record = in_text_order(record);
            }
            history.replays.insert(claim.id, acquired.clone());
        }
        Ok(acquired)
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        let lease = self.lease(lease);
        self.check_generation(&lease, Flaw::RenewBelievesGeneration)?;
        let before = self.store.get(&lease.id).await.unwrap();
        self.store.renew(&lease, self.ttl(ttl)).await?;
        let mut history = self.history.lock().unwrap();
        history.renewals.insert(lease.id, Instant::now());
        if before.is_some_and(|details| details.entry.state() == State::Orphaned) {
            history.revived.insert(lease.id);
        }
        Ok(())
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let lease = self.lease(lease);
        self.check_generation(&lease, Flaw::CompleteBelievesGeneration)?;
        let record = self.stored_record(lease.id, record);
        let retention = self.ttl(retention);
        self.store.complete(&lease, record, retention).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let lease = self.lease(lease);
        self.history.lock().unwrap().released.insert(lease.id);
        self.store.release(&lease).await
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        self.store.wait_for_change(id, within).await;
    }

    fn find_completed(&self, id: &KeyId) -> Option<Acquired> {
        if self.flaw != Flaw::DeletedRecordIsFound {
            return None;
        }
        self.history.lock().unwrap().replays.get(id).cloned()
    }
}

impl Inspect for Wrapped {
    fn abilities(&self) -> Abilities {
        self.store.abilities()
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        let mut page = self.store.list(query).await?;
        if self.flaw == Flaw::RenewLeavesIndex && query.state() == State::InProgress {
            let history = self.history.lock().unwrap();
            page.entries
                .retain(|entry| !history.revived.contains(entry.id()));
        }
        Ok(page)
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        let mut found = self.store.get(id).await?;
        let renewed = self.history.lock().unwrap().renewals.get(id).copied();
        if let (Some(details), Some(renewed)) = (&mut found, renewed)
            && self.flaw == Flaw::RenewRestartsAge
        {
            details.entry.age = renewed.elapsed();
        }
        Ok(found)
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        self.store.summary(limit).await
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        let is_released = self.history.lock().unwrap().released.contains(seen.id());
        if is_released && self.flaw == Flaw::ResolveNeedsToken {
            let found = self.store.get(seen.id()).await?;
            let entry = found.map(|details| Box::new(details.entry));
            return Ok(ResolveOutcome::Changed(entry));
        }
        let is_free = matches!(resolution, Resolution::Free);
        if is_released && is_free && self.flaw == Flaw::FreeReleases {
            return Ok(ResolveOutcome::Applied(None));
        }
        let mut outcome = self.store.resolve(seen, resolution).await?;
        if let ResolveOutcome::Applied(Some(entry)) = &mut outcome
            && self.flaw == Flaw::RetryKeepsExpiry
            && matches!(resolution, Resolution::Retry)
        {
            let longest = Ttl::MAX.as_duration();
            entry.expires = entry.expires.map(|expires| expires + longest);
        }
        Ok(outcome)
    }

    async fn purge(&self, batch: u32) -> Result<u64, InspectError> {
        self.store.purge(batch).await
    }
}

/// Asserts that each case fails on the flawed store, and passes on the same store without the flaw.
fn assert_detected(flaw: Flaw, cases: &[&str]) {
    for case in cases {
        let flawed = Wrapped::subject(flaw);
        assert!(fails_case(flawed, case), "{flaw:?}: {case} passes");
        let flawless = Wrapped::subject(Flaw::Nothing);
        assert!(!fails_case(flawless, case), "{case} fails");
    }
}

#[test]
fn scope_in_id_is_detected() {
    assert_detected(Flaw::ScopeIsPartOfId, &["scope_changes_no_reply"]);
}

#[test]
fn shortest_duration_without_end_is_detected() {
    assert_detected(Flaw::ShortestNeverEnds, &["shortest_durations_end"]);
}

#[test]
fn wrong_order_of_chunks_is_detected() {
    let cases = ["large_record_is_stored_or_rejected_for_size"];
    assert_detected(Flaw::ChunksInTextOrder, &cases);
}

#[test]
fn tail_of_longer_record_is_detected() {
    let cases = [
        "record_is_absent_after_retention",
        "complete_of_expired_entry_stores_record",
    ];
    assert_detected(Flaw::RecordKeepsTail, &cases);
}

#[test]
fn trust_in_generation_of_caller_is_detected() {
    let cases = ["replaced_token_cannot_renew_or_complete"];
    assert_detected(Flaw::RenewBelievesGeneration, &cases);
    assert_detected(Flaw::CompleteBelievesGeneration, &cases);
}

#[test]
fn unresolved_released_takeover_is_detected() {
    let cases = ["released_takeover_can_be_resolved"];
    assert_detected(Flaw::ResolveNeedsToken, &cases);
    assert_detected(Flaw::FreeReleases, &cases);
}

#[test]
fn retry_with_expiry_of_record_is_detected() {
    assert_detected(Flaw::RetryKeepsExpiry, &["retried_entry_is_taken_over"]);
}

#[test]
fn replay_of_deleted_record_is_detected() {
    assert_detected(Flaw::DeletedRecordIsFound, &["deleted_record_frees_key"]);
}

#[test]
fn renewal_that_restarts_age_is_detected() {
    let cases = ["age_counts_from_beginning_of_state"];
    assert_detected(Flaw::RenewRestartsAge, &cases);
}

#[test]
fn renewal_that_leaves_index_is_detected() {
    let cases = ["moved_entry_is_listed_in_new_state_alone"];
    assert_detected(Flaw::RenewLeavesIndex, &cases);
}
