//! `Tiered` in front of a memory store: the conformance suite, and the rules of the tier.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tests::layered::{Layered, record_of};
use tower_idempotency::{
    MemoryStore, Tiered,
    conformance::{Case, FaultInjector, Operation, Plan, Processes, Subject, every_case},
    store::{Acquired, Claim, Fingerprint, KeyId, LeaseRef, ScopeDigest, Store, StoreError, Ttl},
};

mod bounds;
mod kept;
mod life;

tower_idempotency::conformance_tests! {
    mod suite,
    start_paused = true,
    store = || async { Layered::new(Tiered::new(MemoryStore::new())) },
}

tower_idempotency::inspect_conformance_tests! {
    mod operators,
    start_paused = true,
    store = || async { Tiered::new(MemoryStore::new().with_details()) },
}

/// Runs every case on stores from `store`, on a paused clock unless the case uses several threads.
fn every_case_on<S: Store>(store: impl Fn() -> S) {
    for case in Case::all() {
        println!("{}", case.name());
        case.run(true, async || Subject::new(store()), |_| None);
    }
}

fn lossy(plan: Plan) -> Layered<Tiered<FaultInjector<MemoryStore>>> {
    let store = FaultInjector::new(MemoryStore::new()).with_plan(plan);
    Layered::new(Tiered::new(store))
}

#[test]
fn suite_passes_if_store_loses_calls() {
    every_case_on(|| lossy(Plan::CallsLost));
}

#[test]
fn suite_passes_if_store_loses_replies() {
    every_case_on(|| lossy(Plan::RepliesLost));
}

#[test]
fn suite_passes_if_tier_is_too_small() {
    every_case_on(|| Layered::new(Tiered::new(MemoryStore::new()).with_max_bytes(4000)));
}

#[test]
fn suite_passes_on_two_processes() {
    every_case_on(|| {
        let store = MemoryStore::new();
        let processes = [(); 2].map(|()| Tiered::new(store.clone()));
        Layered::new(Processes::new(processes))
    });
}

/// The suite reads records often enough to notice a wrong one.
#[tokio::test(start_paused = true)]
async fn suite_reads_records_of_tier() {
    let acquires = async |max_age| {
        let store = FaultInjector::new(MemoryStore::new());
        let tiered = Layered::new(Tiered::new(store).with_max_age(max_age));
        let subject = Subject::new(tiered);
        every_case(subject.clone()).await;
        subject.store().inner().store().calls(Operation::Acquire)
    };
    let without = acquires(Duration::ZERO).await;
    let with = acquires(Duration::from_secs(60)).await;
    println!("{without} acquires without the tier, {with} with it");
    assert!(with + 30 < without, "{with} of {without}");
}

const HOUR: Ttl = Ttl::from_secs(3600);
const FINGERPRINT: Fingerprint = Fingerprint::from_bytes([7; 32]);

type Backend = Arc<FaultInjector<MemoryStore>>;

/// Returns a tier in front of a store that counts calls.
fn tiered() -> Tiered<Backend> {
    Tiered::new(Arc::new(FaultInjector::new(MemoryStore::new())))
}

/// Returns another process on the same store.
fn second_process(tiered: &Tiered<Backend>) -> Tiered<Backend> {
    Tiered::new(Arc::clone(tiered.store()))
}

fn id(n: u64) -> KeyId {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    KeyId::from_bytes(bytes)
}

fn claim(n: u64) -> Claim {
    Claim::new(id(n), FINGERPRINT).expect("randomness")
}

fn first_completion(lease: LeaseRef) -> LeaseRef {
    let mut lease = lease;
    lease.is_first_completion = true;
    lease
}

/// Executes the request of a claim: the first completion under its token.
async fn execute<S: Store>(store: &S, claim: &Claim, payload: &[u8], retention: Ttl) {
    let acquired = store.acquire(claim).await.expect("no fault");
    let Acquired::Granted { generation, .. } = acquired else {
        panic!("expected a lease, found {acquired:?}");
    };
    let lease = first_completion(claim.lease_ref(generation));
    let completed = store.complete(&lease, record_of(&claim.id, payload), retention);
    completed.await.expect("no fault");
}

/// Returns the payload of the record and the number of calls that the store got for it. `None` if there is no record.
async fn replay(tiered: &Tiered<Backend>, n: u64) -> (Option<Bytes>, u64) {
    let calls = || tiered.store().calls(Operation::Acquire);
    let before = calls();
    let mut claim = claim(n);
    claim.orphans = tower_idempotency::OrphanPolicy::Refuse;
    let acquired = tiered.acquire(&claim).await.expect("no fault");
    let called = calls() - before;
    match acquired {
        Acquired::Completed {
            record,
            fingerprint,
            ..
        } => {
            assert_eq!(fingerprint, FINGERPRINT);
            (Some(record.slice(6..)), called)
        }
        Acquired::Granted { generation, .. } => {
            let lease = claim.lease_ref(generation);
            tiered.release(&lease).await.expect("no fault");
            (None, called)
        }
        Acquired::InProgress { .. } | Acquired::Orphaned { .. } => (None, called),
    }
}

/// The reply to a replay from the tier.
fn from_tier(payload: &'static str) -> (Option<Bytes>, u64) {
    (Some(Bytes::from(payload)), 0)
}

/// The reply to a replay from the store.
fn from_store(payload: &'static str) -> (Option<Bytes>, u64) {
    (Some(Bytes::from(payload)), 1)
}

/// The reply if the store has no record.
const NONE: (Option<Bytes>, u64) = (None, 1);
