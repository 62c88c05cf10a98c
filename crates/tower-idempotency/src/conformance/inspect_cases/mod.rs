//! The cases of [`Inspect`], grouped by call. The number at the start of a case's documentation is
//! its rule there.
//!
//! The suite selects its own entries by their operation if the store stores operations, and by their ID otherwise.

mod cancellation;
mod leases;
mod lists;
mod moves;
mod pages;
mod races;
mod reads;
mod resolutions;
mod stale;

use std::{collections::HashSet, time::Duration};

use bytes::Bytes;

pub use self::{
    cancellation::*, leases::*, lists::*, moves::*, pages::*, races::*, reads::*, resolutions::*,
    stale::*,
};
use super::{
    Subject,
    cases::{FIRST, SECOND, THIRD},
    subject::{CallOutcome, LONG, random},
};
use crate::{
    inspect::{
        Entry, EntryDetails, IdPrefix, Inspect, Page, Query, Resolution, ResolveOutcome, Seen,
        State,
    },
    record::{Codec, NeedsAttention},
    store::{Claim, KeyId, OrphanPolicy, Store, Ttl},
};

/// The states in which the suite can leave an entry.
const STATES: [State; 4] = [
    State::InProgress,
    State::Orphaned,
    State::NeedsAttention,
    State::Completed,
];

const REFUND_FAILED: NeedsAttention = NeedsAttention::new("refund-failed");
const EXAMINE: NeedsAttention = NeedsAttention::new("examine");

/// Returns a claim on an unused key, with an operation of its own.
fn claim<S: Store>(subject: &Subject<S>) -> Claim {
    let digits = KeyId::from_bytes(random()).to_hex();
    Claim {
        operation: format!("POST /{digits}").into(),
        ..subject.claim()
    }
}

/// Returns claims on unused keys, with one operation.
fn claims<S: Store>(subject: &Subject<S>, count: usize) -> Vec<Claim> {
    let operation = claim(subject).operation;
    let one = || Claim {
        operation: operation.clone(),
        ..subject.claim()
    };
    (0..count).map(|_| one()).collect()
}

/// Brings a new key to this state.
async fn entry_in<S: Store>(subject: &Subject<S>, state: State) -> Claim {
    let claim = claim(subject);
    enter(subject, std::slice::from_ref(&claim), state).await;
    claim
}

/// Brings the keys of the claims to this state.
async fn enter<S: Store>(subject: &Subject<S>, claims: &[Claim], state: State) {
    for claim in claims {
        let lease = match state {
            State::Orphaned => subject.short_lease(),
            _ => LONG,
        };
        let lease = subject
            .hold(&Claim {
                lease,
                ..claim.clone()
            })
            .await;
        let (record, retention) = match state {
            State::InProgress | State::Orphaned => continue,
            State::NeedsAttention => attention_record(&claim.id, &REFUND_FAILED),
            State::Completed | State::Unreadable => (result_record(&claim.id, "paid"), LONG),
        };
        let completed = subject.complete(&lease, &record, retention).await;
        assert_eq!(completed, CallOutcome::Done);
    }
    if state == State::Orphaned {
        subject.outlive_short_lease().await;
    }
}

fn attention_record(id: &KeyId, attention: &NeedsAttention) -> (Bytes, Ttl) {
    let record = Resolution::NeedsAttention(attention.clone()).record(id);
    record.expect("it stores a record")
}

/// Returns the record of a result. Unlike the record of a response, it contains no time: two calls return the same bytes.
fn result_record(id: &KeyId, result: &str) -> Bytes {
    let codec = Codec {
        compress_above: usize::MAX,
        max_inflated: usize::MAX,
    };
    codec.encode_value(id, result.as_bytes())
}

/// Returns the resolution that completes the entry with this result.
fn completion(claim: &Claim, result: &str) -> Resolution {
    Resolution::Complete {
        record: result_record(&claim.id, result),
        retention: LONG,
    }
}

/// Returns one resolution of each kind.
fn every_resolution(claim: &Claim) -> [Resolution; 6] {
    [
        Resolution::Free,
        Resolution::Retry,
        completion(claim, "resolved"),
        Resolution::NeedsAttention(EXAMINE),
        Resolution::BreakLease,
        Resolution::DeleteRecord,
    ]
}

/// Returns a claim of the same request under a policy.
fn claim_under<S: Store>(subject: &Subject<S>, claim: &Claim, orphans: OrphanPolicy) -> Claim {
    Claim {
        orphans,
        ..subject.duplicate(claim)
    }
}

async fn get<S: Store>(subject: &Subject<S>, claim: &Claim) -> Option<EntryDetails> {
    let found = subject.inspector().get(&claim.id).await;
    found.expect("the store replies")
}

/// Reads an entry that must exist.
async fn read<S: Store>(subject: &Subject<S>, claim: &Claim) -> EntryDetails {
    get(subject, claim).await.expect("the entry exists")
}

async fn seen<S: Store>(subject: &Subject<S>, claim: &Claim) -> Seen {
    *read(subject, claim).await.entry.seen()
}

/// Asserts the state of an entry; `None` if it must be absent. Returns the entry.
async fn assert_state<S: Store>(
    subject: &Subject<S>,
    claim: &Claim,
    expected: Option<State>,
) -> Option<Entry> {
    let entry = get(subject, claim).await.map(|details| details.entry);
    assert_eq!(entry.as_ref().map(Entry::state), expected, "{entry:?}");
    entry
}

async fn resolve<S: Store>(
    subject: &Subject<S>,
    seen: &Seen,
    resolution: &Resolution,
) -> ResolveOutcome {
    let outcome = subject.inspector().resolve(seen, resolution).await;
    outcome.expect("the store replies")
}

/// Applies a resolution to the entry in its present state. Returns the entry afterwards.
async fn apply<S: Store>(
    subject: &Subject<S>,
    claim: &Claim,
    resolution: &Resolution,
) -> Option<Entry> {
    let seen = seen(subject, claim).await;
    match resolve(subject, &seen, resolution).await {
        ResolveOutcome::Applied(entry) => entry.map(|entry| *entry),
        ResolveOutcome::Changed(entry) => panic!("{resolution:?} was not applied to {entry:?}"),
    }
}

/// Deletes at most `batch` expired entries. Repeats a purge that fails, for example in a deadlock with a claim of another case.
async fn purge<S: Store>(subject: &Subject<S>, batch: u32) -> u64 {
    const ATTEMPTS: u32 = 8;
    let mut failures = 0;
    loop {
        match subject.inspector().purge(batch).await {
            Ok(deleted) => return deleted,
            Err(error) => {
                failures += 1;
                assert!(failures < ATTEMPTS, "{error:?}");
                subject.wait(1).await;
            }
        }
    }
}

/// Returns the query with the filter that selects the entries of these claims, if the store has their operation.
fn own<S: Store>(subject: &Subject<S>, query: Query, claims: &[Claim]) -> Query {
    match claims.first() {
        Some(claim) if subject.inspector().abilities().has_details() => {
            query.with_operation(claim.operation.clone())
        }
        _ => query,
    }
}

/// Reads one page and checks that it contains no entry twice, and no entry beyond the limit.
async fn page<S: Store>(subject: &Subject<S>, query: &Query) -> Page {
    let page = subject.inspector().list(query).await;
    let page = page.expect("the store replies");
    assert!(page.entries.len() <= usize::from(query.limit()));
    let ids: HashSet<_> = page.entries.iter().map(Entry::id).collect();
    assert_eq!(ids.len(), page.entries.len(), "an entry is twice in a page");
    assert!(page.entries.iter().all(|entry| query.matches(entry)));
    page
}

/// Reads all pages, starting with the page of the query.
async fn all_pages<S: Store>(subject: &Subject<S>, mut query: Query) -> Vec<Entry> {
    let mut entries = Vec::new();
    loop {
        let Page {
            entries: more,
            next,
        } = page(subject, &query).await;
        entries.extend(more);
        match next {
            Some(next) => query = query.with_page(Some(next)),
            None => return entries,
        }
    }
}

/// Returns the entries of these claims in a listing. Entries of other cases are left out.
async fn listed<S: Store>(subject: &Subject<S>, query: Query, claims: &[Claim]) -> Vec<Entry> {
    let ids: HashSet<_> = claims.iter().map(|claim| claim.id).collect();
    let mut entries = all_pages(subject, own(subject, query, claims)).await;
    entries.retain(|entry| ids.contains(entry.id()));
    entries
}

/// Returns the entry of this claim in the listing of a state.
async fn find<S: Store>(subject: &Subject<S>, state: State, claim: &Claim) -> Option<Entry> {
    let query = Query::new(state).with_id_prefix(IdPrefix::from(claim.id));
    listed(subject, query, std::slice::from_ref(claim))
        .await
        .pop()
}

fn can_list<S: Store>(subject: &Subject<S>, state: State) -> bool {
    subject.inspector().abilities().can_list(state)
}

/// Returns the duration minus the rounding error that a backend may have.
fn rounded_down(duration: Duration) -> Duration {
    duration.saturating_sub(Duration::from_millis(2))
}
