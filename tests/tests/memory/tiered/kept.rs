//! The records that the tier keeps, and those that it does not.

use tests::barrier::Barrier;
use tokio::task::JoinHandle;
use tower_idempotency::{
    NeedsAttention, OrphanPolicy,
    conformance::{Fault, Operation},
    inspect::{Inspect, Resolution},
};

use super::*;

// F-980
#[tokio::test(start_paused = true)]
async fn own_completion_is_replayed_without_call() {
    let tiered = tiered();
    execute(&tiered, &claim(1), b"tea", HOUR).await;
    for _ in 0..3 {
        assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
    }
    assert_eq!(replay(&second_process(&tiered), 1).await, from_store("tea"));
}

// F-980
#[tokio::test(start_paused = true)]
async fn reported_record_is_replayed_without_call() {
    let tiered = tiered();
    execute(&second_process(&tiered), &claim(1), b"tea", HOUR).await;
    assert_eq!(replay(&tiered, 1).await, from_store("tea"));
    assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
}

#[tokio::test(start_paused = true)]
async fn reply_has_token_fingerprint_and_expiry() {
    let tiered = tiered();
    let first = claim(1);
    execute(&tiered, &first, b"tea", HOUR).await;
    tokio::time::advance(Duration::from_secs(10)).await;
    let other = Claim::new(id(1), Fingerprint::from_bytes([8; 32])).expect("randomness");
    let own = tiered.acquire(&other).await.expect("no fault");
    let reported = tiered.store().acquire(&other).await.expect("no fault");
    assert_eq!(own, reported);
    assert_eq!(tiered.store().calls(Operation::Acquire), 2);
}

// F-981
/// The lease was lost, and another execution completed the entry.
#[tokio::test(start_paused = true)]
async fn refused_completion_is_not_kept() {
    let tiered = tiered();
    let (slow, rival) = (claim(1), claim(1));
    tiered.acquire(&slow).await.expect("no fault");
    tokio::time::advance(Duration::from_secs(20)).await;
    let taken_over = tiered.store().acquire(&rival).await.expect("no fault");
    assert!(matches!(taken_over, Acquired::Granted { .. }));
    let lease = first_completion(slow.lease_ref(1));
    let refused = tiered.complete(&lease, record_of(&id(1), b"slow"), HOUR);
    assert!(matches!(refused.await, Err(StoreError::LeaseLost)));
    assert_eq!(replay(&tiered, 1).await, NONE);

    let lease = rival.lease_ref(2);
    let completed = tiered
        .store()
        .complete(&lease, record_of(&id(1), b"rival"), HOUR);
    completed.await.expect("it holds the lease");
    assert_eq!(replay(&tiered, 1).await, from_store("rival"));
}

// F-981
#[tokio::test(start_paused = true)]
async fn unacknowledged_completion_is_not_kept() {
    for (fault, stored) in [(Fault::ReplyLost, true), (Fault::CallLost, false)] {
        let tiered = tiered();
        let claim = claim(1);
        tiered.acquire(&claim).await.expect("no fault");
        tiered.store().enqueue(Operation::Complete, [fault]);
        let lease = first_completion(claim.lease_ref(1));
        let failed = tiered.complete(&lease, record_of(&id(1), b"tea"), HOUR);
        assert!(failed.await.is_err());
        let expected = if stored { from_store("tea") } else { NONE };
        assert_eq!(replay(&tiered, 1).await, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_completion_is_not_kept() {
    let tiered = tiered();
    let claim = claim(1);
    tiered.acquire(&claim).await.expect("no fault");
    tiered
        .store()
        .enqueue(Operation::Complete, [Fault::HangReply]);
    let lease = first_completion(claim.lease_ref(1));
    let hanging = tiered.complete(&lease, record_of(&id(1), b"tea"), HOUR);
    let cut_off = tokio::time::timeout(Duration::from_secs(2), hanging).await;
    assert!(cut_off.is_err());
    assert_eq!(replay(&tiered, 1).await, from_store("tea"));
}

// F-982
/// The handler has committed another record under the same token. The store accepts the completion and changes nothing.
#[tokio::test(start_paused = true)]
async fn completion_after_commit_is_not_kept() {
    let tiered = tiered();
    let claim = claim(1);
    tiered.acquire(&claim).await.expect("no fault");
    let lease = claim.lease_ref(1);
    let committed = record_of(&id(1), b"committed");
    let commit = tiered.store().complete(&lease, committed, HOUR);
    commit.await.expect("it holds the lease");
    let completed = tiered.complete(&lease, record_of(&id(1), b"completed"), HOUR);
    completed.await.expect("the same token");
    assert_eq!(replay(&tiered, 1).await, from_store("committed"));
}

// F-983
#[tokio::test(start_paused = true)]
async fn record_that_needs_attention_is_not_kept() {
    let attention = NeedsAttention::new("refund-failed");
    let record = attention_record(&id(1), attention.code());
    assert!(NeedsAttention::in_record(&record).is_some());
    assert_not_in_tier(record).await;
}

// F-983
#[tokio::test(start_paused = true)]
async fn unreadable_record_is_not_kept() {
    let good = record_of(&id(1), b"tea");
    let changed = |at: usize, to: u8| {
        let mut bytes = good.to_vec();
        bytes[at] = to;
        Bytes::from(bytes)
    };
    let of_other_key = record_of(&id(2), b"tea");
    let (version, sealed) = (changed(0, 2), changed(1, 4));
    let (damaged, short) = (changed(8, b'x'), good.slice(..5));
    for record in [version, sealed, damaged, short, of_other_key, Bytes::new()] {
        assert_not_in_tier(record).await;
    }
}

/// Asserts that the tier keeps this record of id 1 neither as its own completion nor from a reply.
async fn assert_not_in_tier(record: Bytes) {
    let tiered = tiered();
    let claim = claim(1);
    tiered.acquire(&claim).await.expect("no fault");
    let lease = first_completion(claim.lease_ref(1));
    let completed = tiered.complete(&lease, record.clone(), HOUR);
    completed.await.expect("it holds the lease");
    let before = tiered.store().calls(Operation::Acquire);
    for called in 1..=3 {
        let found = tiered.acquire(&claim).await.expect("no fault");
        assert!(matches!(found, Acquired::Completed { record: found, .. } if found == record));
        assert_eq!(tiered.store().calls(Operation::Acquire), before + called);
    }
    assert!(tiered.is_empty());
}

/// Returns a record of an execution that needs attention, without a reason.
fn attention_record(id: &KeyId, code: &str) -> Bytes {
    let mut rest = vec![u8::try_from(code.len()).expect("a short code")];
    rest.extend_from_slice(code.as_bytes());
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(id.as_bytes());
    hasher.update(&[1, 2]);
    hasher.update(&rest);
    let mut record = vec![1, 2];
    record.extend_from_slice(&hasher.finalize().to_le_bytes());
    record.extend_from_slice(&rest);
    record.into()
}

// F-984
#[tokio::test(start_paused = true)]
async fn entries_without_record_are_always_queried() {
    let tiered = tiered();
    let (holder, other) = (claim(1), claim(1));
    let mut refusing = claim(1);
    refusing.orphans = OrphanPolicy::Refuse;
    let acquire = async |claim: &Claim| tiered.acquire(claim).await.expect("no fault");
    assert!(matches!(acquire(&holder).await, Acquired::Granted { .. }));
    for _ in 0..2 {
        assert!(matches!(acquire(&other).await, Acquired::InProgress { .. }));
    }
    tokio::time::advance(Duration::from_secs(20)).await;
    for _ in 0..2 {
        let orphaned = acquire(&refusing).await;
        assert!(matches!(orphaned, Acquired::Orphaned { .. }));
    }
    tiered
        .release(&holder.lease_ref(1))
        .await
        .expect("no fault");
    assert!(matches!(acquire(&other).await, Acquired::Granted { .. }));
    assert_eq!(tiered.store().calls(Operation::Acquire), 6);
    assert!(tiered.is_empty());
}

#[tokio::test(start_paused = true)]
async fn other_calls_are_forwarded_despite_record() {
    let tiered = tiered();
    let first = claim(1);
    execute(&tiered, &first, b"tea", HOUR).await;
    let lease = first.lease_ref(1);
    assert!(matches!(
        tiered.renew(&lease, HOUR).await,
        Err(StoreError::LeaseLost)
    ));
    tiered
        .release(&lease)
        .await
        .expect("the completion changes nothing");
    let again = tiered.complete(&lease, record_of(&id(1), b"again"), HOUR);
    again.await.expect("the same token");
    tiered.wait_for_change(&id(1), Duration::from_secs(1)).await;
    for operation in [
        Operation::Renew,
        Operation::Release,
        Operation::WaitForChange,
    ] {
        assert_eq!(tiered.store().calls(operation), 1, "{operation:?}");
    }
    assert_eq!(tiered.store().calls(Operation::Complete), 2);
    assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
}

/// A waiter on one process gets the notification of the store.
#[tokio::test(start_paused = true)]
async fn waiter_is_woken_by_store() {
    let tiered = tiered();
    let claim = claim(1);
    tiered.acquire(&claim).await.expect("no fault");
    let waiting = Barrier::closed();
    let waiter = tokio::spawn({
        let (tiered, waiting) = (tiered.clone(), waiting.clone());
        async move {
            let start = tokio::time::Instant::now();
            waiting.open_for_good();
            tiered.wait_for_change(&id(1), HOUR.as_duration()).await;
            start.elapsed()
        }
    });
    waiting.pass().await;
    let lease = first_completion(claim.lease_ref(1));
    let completed = tiered.complete(&lease, record_of(&id(1), b"tea"), HOUR);
    completed.await.expect("it holds the lease");
    let waited = waiter.await.expect("no panic");
    assert_eq!(waited, Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn clones_share_one_tier() {
    let tiered = tiered();
    let clone = tiered.clone();
    execute(&tiered, &claim(1), b"tea", HOUR).await;
    assert_eq!(replay(&clone, 1).await, from_tier("tea"));
    assert_eq!((clone.len(), clone.bytes()), (tiered.len(), tiered.bytes()));
    let _off = clone.with_max_age(Duration::ZERO);
    assert_eq!(replay(&tiered, 1).await, from_store("tea"));
}

// F-986
/// A resolution through a tier removes the record from it, and not from that of another process.
#[tokio::test(start_paused = true)]
async fn record_deleted_through_tier_is_not_served() {
    let tiered = Tiered::new(MemoryStore::new());
    let other = Tiered::new(tiered.store().clone());
    let claim = claim(1);
    execute(&tiered, &claim, b"tea", HOUR).await;
    let is_completed = async |tiered: &Tiered<MemoryStore>| {
        let acquired = tiered.acquire(&claim).await.expect("no fault");
        matches!(acquired, Acquired::Completed { .. })
    };
    assert!(is_completed(&tiered).await && is_completed(&other).await);
    let found = tiered.get(&id(1)).await.expect("no fault");
    let found = found.expect("the entry is stored");
    let resolved = tiered.resolve(found.entry.seen(), &Resolution::DeleteRecord);
    assert!(resolved.await.expect("no fault").is_applied());
    assert!(is_completed(&other).await);
    assert!(!is_completed(&tiered).await);
}

/// Acquires a completed key in a task, which returns `true` if it gets the record. The reply has left the store, and waits at the
/// barrier.
async fn acquire_late(tiered: &Tiered<FaultInjector<MemoryStore>>) -> (Barrier, JoinHandle<bool>) {
    execute(tiered.store(), &claim(1), b"tea", HOUR).await;
    let reply = Barrier::closed();
    let held = Fault::HoldReply(reply.clone().into());
    tiered.store().enqueue(Operation::Acquire, [held]);
    let store = tiered.clone();
    let late = tokio::spawn(async move {
        let acquired = store.acquire(&claim(1)).await;
        matches!(acquired, Ok(Acquired::Completed { .. }))
    });
    reply.arrival().await;
    (reply, late)
}

// F-803
/// A reply that the store sent before the resolution arrives after it.
#[tokio::test(start_paused = true)]
async fn late_reply_does_not_restore_deleted_record() {
    let tiered = Tiered::new(FaultInjector::new(MemoryStore::new()));
    let (reply, late) = acquire_late(&tiered).await;
    tokio::time::advance(Duration::from_millis(1)).await;
    let found = tiered.get(&id(1)).await.expect("no fault");
    let found = found.expect("the entry is stored");
    let resolved = tiered.resolve(found.entry.seen(), &Resolution::DeleteRecord);
    assert!(resolved.await.expect("no fault").is_applied());
    reply.open_for_good();
    assert!(late.await.expect("no panic"));
    assert_eq!(tiered.find_completed(&id(1)), None);

    execute(&tiered, &claim(1), b"coffee", HOUR).await;
    let found = tiered.find_completed(&id(1));
    let coffee = record_of(&id(1), b"coffee");
    assert!(matches!(found, Some(Acquired::Completed { record, .. }) if record == coffee));
}

// F-986
/// Another process deletes a record while its reply is on the way, and the request executes again here.
#[tokio::test(start_paused = true)]
async fn own_completion_replaces_deleted_record() {
    for is_reply_first in [true, false] {
        let tiered = Tiered::new(FaultInjector::new(MemoryStore::new()));
        let (reply, late) = acquire_late(&tiered).await;
        let found = tiered.store().get(&id(1)).await.expect("no fault");
        let found = found.expect("the entry is stored");
        let deletion = Resolution::DeleteRecord;
        let resolved = tiered.store().resolve(found.entry.seen(), &deletion);
        assert!(resolved.await.expect("no fault").is_applied());

        let again = claim(1);
        let granted = tiered.acquire(&again).await.expect("no fault");
        assert!(matches!(granted, Acquired::Granted { .. }));
        tokio::time::advance(Duration::from_millis(1)).await;
        let complete = async || {
            let lease = first_completion(again.lease_ref(1));
            let completed = tiered.complete(&lease, record_of(&id(1), b"coffee"), HOUR);
            completed.await.expect("it holds the lease");
        };
        if !is_reply_first {
            complete().await;
        }
        reply.open_for_good();
        assert!(late.await.expect("no panic"));
        if is_reply_first {
            complete().await;
        }
        let found = tiered.find_completed(&id(1));
        let coffee = record_of(&id(1), b"coffee");
        assert!(matches!(found, Some(Acquired::Completed { record, .. }) if record == coffee));
    }
}
