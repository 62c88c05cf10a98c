//! The time for which the tier serves a record.

use tokio::time::{advance, sleep};
use tower_idempotency::conformance::Fault;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);

fn seconds(n: u64) -> Ttl {
    Ttl::from_secs(n)
}

// F-985
#[tokio::test(start_paused = true)]
async fn own_record_is_not_served_after_expiry() {
    let tiered = tiered();
    execute(&tiered, &claim(1), b"tea", seconds(10)).await;
    advance(10 * SECOND - MILLI).await;
    assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
    advance(MILLI).await;
    assert_eq!(replay(&tiered, 1).await, NONE);

    // The next life of the key.
    execute(&tiered, &claim(1), b"coffee", seconds(10)).await;
    assert_eq!(replay(&tiered, 1).await, from_tier("coffee"));
}

// F-985
#[tokio::test(start_paused = true)]
async fn reported_record_is_not_served_after_expiry() {
    let tiered = tiered();
    execute(tiered.store(), &claim(1), b"tea", seconds(10)).await;
    advance(4 * SECOND).await;
    assert_eq!(replay(&tiered, 1).await, from_store("tea"));
    advance(6 * SECOND - MILLI).await;
    assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
    advance(MILLI).await;
    assert_eq!(replay(&tiered, 1).await, NONE);
}

// F-985
/// Between the time at which the store read the entry and its reply, the record has become older.
#[tokio::test(start_paused = true)]
async fn life_counts_from_before_slow_acquire() {
    let tiered = tiered();
    execute(tiered.store(), &claim(1), b"tea", seconds(20)).await;
    // The store reads the entry after 5 s, and replies after 10 s.
    let slow = Fault::Slow(5 * SECOND);
    tiered.store().enqueue(Operation::Acquire, [slow]);
    assert_eq!(replay(&tiered, 1).await, from_store("tea"));
    advance(5 * SECOND - MILLI).await;
    assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
    advance(MILLI).await;
    assert_eq!(replay(&tiered, 1).await, from_store("tea"));
    advance(5 * SECOND).await;
    assert_eq!(replay(&tiered, 1).await, NONE);
}

// F-985
#[tokio::test(start_paused = true)]
async fn life_counts_from_before_slow_completion() {
    let tiered = tiered();
    let slow = Fault::Slow(5 * SECOND);
    tiered.store().enqueue(Operation::Complete, [slow]);
    // Stored after 5 s and acknowledged after 10 s, so the record expires after 20 s.
    execute(&tiered, &claim(1), b"tea", seconds(15)).await;
    advance(5 * SECOND - MILLI).await;
    assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
    advance(MILLI).await;
    assert_eq!(replay(&tiered, 1).await, from_store("tea"));
    advance(5 * SECOND).await;
    assert_eq!(replay(&tiered, 1).await, NONE);
}

// F-982
/// The retention counts from the first attempt, which took effect. Its reply was lost.
#[tokio::test(start_paused = true)]
async fn repeated_completion_does_not_extend_life() {
    let tiered = tiered();
    let claim = claim(1);
    tiered.acquire(&claim).await.expect("no fault");
    let faults = [Fault::ReplyLost];
    tiered.store().enqueue(Operation::Complete, faults);
    let record = record_of(&id(1), b"tea");
    let lease = first_completion(claim.lease_ref(1));
    let first = tiered.complete(&lease, record.clone(), seconds(10));
    assert!(first.await.is_err());
    sleep(5 * SECOND).await;
    let lease = claim.lease_ref(1);
    let again = tiered.complete(&lease, record, seconds(10));
    again.await.expect("the same token");
    advance(5 * SECOND).await;
    assert_eq!(replay(&tiered, 1).await, NONE);
}

// F-986
#[tokio::test(start_paused = true)]
async fn record_is_served_up_to_maximum_age() {
    let tiered = tiered().with_max_age(30 * SECOND);
    execute(&tiered, &claim(1), b"tea", HOUR).await;
    advance(30 * SECOND - MILLI).await;
    assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
    advance(MILLI).await;
    assert_eq!(replay(&tiered, 1).await, from_store("tea"));
    // The reply of the store starts the age again.
    advance(30 * SECOND - MILLI).await;
    assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
}

#[tokio::test(start_paused = true)]
async fn age_is_60_seconds_by_default() {
    let tiered = tiered();
    execute(&tiered, &claim(1), b"tea", HOUR).await;
    advance(60 * SECOND - MILLI).await;
    assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
    advance(MILLI).await;
    assert_eq!(replay(&tiered, 1).await, from_store("tea"));
}

// F-986
#[tokio::test(start_paused = true)]
async fn lower_age_applies_to_kept_records() {
    let tiered = tiered();
    execute(&tiered, &claim(1), b"tea", HOUR).await;
    advance(10 * SECOND).await;
    let _shorter = tiered.clone().with_max_age(10 * SECOND);
    assert_eq!(replay(&tiered, 1).await, from_store("tea"));
}

// F-986
/// The store may have another record by the time at which the tier is switched on again.
#[tokio::test(start_paused = true)]
async fn records_do_not_outlive_lower_age() {
    for lower in [Duration::ZERO, SECOND] {
        let tiered = tiered();
        execute(&tiered, &claim(1), b"tea", HOUR).await;
        let _lower = tiered.clone().with_max_age(lower);
        assert_eq!((tiered.len(), tiered.bytes()), (0, 0));
        let _higher = tiered.clone().with_max_age(60 * SECOND);
        assert_eq!(replay(&tiered, 1).await, from_store("tea"));
    }
}

// F-986
/// The record of a call from before the lower age may be out of date when its reply arrives.
#[tokio::test(start_paused = true)]
async fn late_reply_is_not_inserted_after_lower_age() {
    let tiered = tiered();
    execute(&tiered, &claim(1), b"tea", HOUR).await;
    let _off = tiered.clone().with_max_age(Duration::ZERO);
    let _on = tiered.clone().with_max_age(60 * SECOND);
    advance(SECOND).await;
    tiered
        .store()
        .set_fault(Operation::Acquire, Fault::Slow(SECOND));
    let late = tokio::spawn({
        let tiered = tiered.clone();
        async move { replay(&tiered, 1).await }
    });
    sleep(SECOND).await;
    let _off = tiered.clone().with_max_age(Duration::ZERO);
    let _on = tiered.clone().with_max_age(60 * SECOND);
    assert_eq!(late.await.expect("no panic"), from_store("tea"));
    tiered.store().clear_faults();
    assert_eq!(replay(&tiered, 1).await, from_store("tea"));
    assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
}

#[tokio::test(start_paused = true)]
async fn age_of_zero_keeps_nothing() {
    let tiered = tiered().with_max_age(Duration::ZERO);
    execute(&tiered, &claim(1), b"tea", HOUR).await;
    for _ in 0..2 {
        assert_eq!(replay(&tiered, 1).await, from_store("tea"));
    }
    assert!(tiered.is_empty());
}

#[tokio::test(start_paused = true)]
async fn longest_times_are_accepted() {
    let tiered = tiered().with_max_age(Duration::MAX);
    execute(&tiered, &claim(1), b"tea", Ttl::MAX).await;
    advance(Duration::from_secs(24 * 60 * 60)).await;
    assert_eq!(replay(&tiered, 1).await, from_tier("tea"));
}
