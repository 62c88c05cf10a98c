//! Memory that the memory store allocates, measured by a counting allocator.
//!
//! `peak_alloc` counts: it is a few lines around the system allocator and two counters, where `dhat` takes a backtrace
//! for each of millions of allocations. (The workspace forbids `unsafe`, which an allocator of our own would need.)

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

use std::{
    future::Future,
    pin::pin,
    sync::{Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use peak_alloc::PeakAlloc;
use tower_idempotency::store::{
    Acquired, Claim, Fingerprint, KeyId, LeaseRef, MemoryStore, Store, Ttl,
};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The allocator counts for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

const DAY: Ttl = Ttl::from_secs(24 * 60 * 60);
const CAP: usize = 100_000_000;

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// No call on the memory store waits.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the memory store answers at once"),
    }
}

fn claim(n: usize) -> Claim {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    Claim::new(KeyId::from_bytes(bytes), Fingerprint::from_bytes([7; 32])).unwrap()
}

fn hold(store: &MemoryStore, n: usize) -> LeaseRef {
    let mut claim = claim(n);
    claim.lease = DAY;
    let acquired = now(store.acquire(&claim)).unwrap();
    assert!(matches!(acquired, Acquired::Granted { .. }));
    claim.lease_ref(1)
}

fn record(store: &MemoryStore, n: usize, len: usize) {
    let lease = hold(store, n);
    let record = Bytes::from(vec![1; len]);
    now(store.complete(&lease, record, DAY)).unwrap();
}

/// A replay makes the record's buffer shared, which takes a header.
fn replay(store: &MemoryStore, n: usize) {
    let acquired = now(store.acquire(&claim(n))).unwrap();
    assert!(matches!(acquired, Acquired::Completed { .. }));
}

/// The most that was allocated since it was last asked.
fn peak() -> usize {
    let peak = ALLOCATOR.peak_usage();
    ALLOCATOR.reset_peak_usage();
    peak
}

// F-112
#[test]
fn million_keys_stay_within_bound() {
    let _alone = alone();
    let before = ALLOCATOR.current_usage();
    let store = MemoryStore::new().with_max_bytes(CAP);
    let mut leases = Vec::new();
    peak();
    for n in 0..1_000_000 {
        if n % 1000 == 0 {
            leases.push(hold(&store, n));
        } else {
            record(&store, n, n % 700);
            replay(&store, n);
        }
    }
    let most = peak() - before;
    assert!(store.bytes() <= CAP);
    assert!(most <= CAP + CAP / 10, "took {most} bytes at most");
    assert!(store.bytes() > CAP / 10 * 9, "the cap is made use of");
    for lease in &leases {
        now(store.renew(lease, DAY)).expect("no lease makes way");
    }
    println!(
        "cap {CAP}: at most {most} bytes allocated, {} entries",
        store.len()
    );
}

/// The slots that many small records leave behind are given back, not kept beside the large ones.
#[test]
fn record_sizes_change_within_bound() {
    const SMALL_CAP: usize = 20_000_000;
    let _alone = alone();
    let before = ALLOCATOR.current_usage();
    let store = MemoryStore::new().with_max_bytes(SMALL_CAP);
    peak();
    for (phase, len) in [0, 100_000, 10, 2_000_000].into_iter().enumerate() {
        let count = 300_000_000 / (len + 2000);
        for n in 0..count.min(100_000) {
            record(&store, phase * 10_000_000 + n, len);
        }
        let most = peak() - before;
        println!(
            "records of {len} bytes: at most {most} bytes allocated, {} entries",
            store.len()
        );
        assert!(
            most <= SMALL_CAP + SMALL_CAP / 10,
            "took {most} bytes at most"
        );
    }
}

#[test]
fn record_overhead_is_at_most_250_bytes() {
    const LEN: usize = 100;
    const STEP: usize = 500;
    let _alone = alone();
    let before = ALLOCATOR.current_usage();
    let store = MemoryStore::new();
    let mut worst = (0, 0);
    peak();
    for step in 0..600 {
        for n in step * STEP..(step + 1) * STEP {
            record(&store, n, LEN);
            replay(&store, n);
        }
        let count = (step + 1) * STEP;
        let each = (peak() - before - count * LEN) / count;
        // A few thousand records share what every shard holds ready.
        if count >= 20_000 {
            worst = worst.max((each, count));
        }
    }
    println!(
        "at most {} bytes beside each record, at {} records",
        worst.0, worst.1
    );
    assert!(worst.0 <= 250, "{} bytes at {} records", worst.0, worst.1);
    let counted = store.bytes() / store.len() - LEN;
    assert!(counted >= worst.0, "counted as {counted}, took {}", worst.0);
}

#[test]
fn released_and_expired_memory_is_freed() {
    let _alone = alone();
    let before = ALLOCATOR.current_usage();
    let store = MemoryStore::new();
    let leases: Vec<LeaseRef> = (0..100_000).map(|n| hold(&store, n)).collect();
    for lease in &leases {
        now(store.release(lease)).unwrap();
    }
    drop(leases);
    assert_eq!((store.len(), store.bytes()), (0, 0));
    let left = ALLOCATOR.current_usage() - before;
    println!("after 100,000 leases: {left} bytes left");
    assert!(left < 1_500_000, "{left} bytes left");
}
