//! What the memory store costs. Figures, not assertions: timings on a shared machine prove nothing by themselves.
//!
//! `cargo test --release -p tests --test memory_cost -- --ignored --nocapture --test-threads 1`, for the resident memory
//! with that test's name: what another one gave back would hide what it takes.

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

use std::{
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Instant,
};

use bytes::Bytes;
use tower_idempotency::store::{Acquired, Claim, Fingerprint, KeyId, MemoryStore, Store, Ttl};

const DAY: Ttl = Ttl::from_secs(24 * 60 * 60);

/// No call on the memory store waits.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the memory store answers at once"),
    }
}

/// As a digest would be: all bytes differ.
fn id(n: u64) -> KeyId {
    let mut bytes = [0; 32];
    for (at, chunk) in bytes.chunks_mut(8).enumerate() {
        let mixed = (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ (at as u64) << 32);
        chunk.copy_from_slice(&mixed.to_le_bytes());
    }
    KeyId::from_bytes(bytes)
}

fn claims(numbers: std::ops::Range<u64>) -> Vec<Claim> {
    let fingerprint = Fingerprint::from_bytes([7; 32]);
    numbers
        .map(|n| Claim::new(id(n), fingerprint).unwrap())
        .collect()
}

fn fresh(store: &MemoryStore, claim: &Claim, record: Bytes) {
    let acquired = now(store.acquire(claim)).unwrap();
    assert!(matches!(acquired, Acquired::Granted { generation: 1, .. }));
    now(store.complete(&claim.lease_ref(1), record, DAY)).unwrap();
}

fn fill(store: &MemoryStore, entries: u64) {
    for claim in claims(0..entries) {
        fresh(store, &claim, Bytes::copy_from_slice(&[1; 32]));
    }
}

fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

const ROUND: u64 = 20_000;
const ROUNDS: u64 = 15;

/// Nanoseconds for an acquire and a complete of a fresh key, with a record of 256 bytes that nobody else holds.
fn fresh_cost(store: &MemoryStore, from: u64) -> f64 {
    let rounds = (0..ROUNDS).map(|round| {
        let start = from + round * ROUND;
        let claims = claims(start..start + ROUND);
        let records: Vec<Bytes> = claims.iter().map(|_| vec![1; 256].into()).collect();
        let start = Instant::now();
        for (claim, record) in claims.iter().zip(records) {
            fresh(store, claim, record);
        }
        start.elapsed().as_nanos() as f64 / ROUND as f64
    });
    median(rounds.collect())
}

#[test]
#[ignore = "a measurement"]
fn fresh_keys_on_an_empty_and_on_a_full_store() {
    let roomy = || {
        MemoryStore::new()
            .with_max_entries(10_000_000)
            .with_max_bytes(8 << 30)
    };
    let empty = roomy();
    let at_empty = fresh_cost(&empty, 1 << 40);
    let full = roomy();
    fill(&full, 1_000_000);
    let at_full = fresh_cost(&full, 1 << 40);
    println!(
        "acquire + complete: {at_empty:.0} ns from empty, {at_full:.0} ns on 1,000,000 records, ratio {:.2}",
        at_full / at_empty
    );
    let evicting = MemoryStore::new().with_max_entries(1_000_000);
    fill(&evicting, 1_000_000);
    let at_cap = fresh_cost(&evicting, 1 << 40);
    println!(
        "acquire + complete at the cap of 1,000,000 entries, one evicted each: {at_cap:.0} ns"
    );
}

#[test]
#[ignore = "a measurement"]
fn two_threads_on_fresh_keys() {
    let store = MemoryStore::new();
    std::thread::scope(|scope| {
        let workers = [1u64, 2].map(|worker| {
            let store = &store;
            scope.spawn(move || fresh_cost(store, worker << 40))
        });
        for worker in workers {
            println!(
                "acquire + complete, one of two threads: {:.0} ns",
                worker.join().unwrap()
            );
        }
    });
}

#[test]
#[ignore = "a measurement"]
fn replays_and_refusals() {
    let store = MemoryStore::new();
    fill(&store, 100_000);
    for name in ["first", "second"] {
        let claims = claims(0..100_000);
        let start = Instant::now();
        for claim in &claims {
            assert!(matches!(
                now(store.acquire(claim)),
                Ok(Acquired::Completed { .. })
            ));
        }
        let each = start.elapsed().as_nanos() / 100_000;
        println!("{name} replay: {each} ns");
    }
    let held = claims(1 << 40..(1 << 40) + 1);
    now(store.acquire(&held[0])).unwrap();
    let others: Vec<Claim> = (0..100_000)
        .map(|_| Claim::new(held[0].id, held[0].fingerprint).unwrap())
        .collect();
    let start = Instant::now();
    for claim in &others {
        assert!(matches!(
            now(store.acquire(claim)),
            Ok(Acquired::InProgress { .. })
        ));
    }
    println!("in progress: {} ns", start.elapsed().as_nanos() / 100_000);
}

#[test]
#[ignore = "a measurement"]
fn resident_memory_of_a_million_records() {
    let before = resident();
    let store = MemoryStore::new().with_max_bytes(8 << 30);
    for n in 0..1_000_000 {
        fresh(&store, &claims(n..n + 1)[0], vec![1; 100].into());
    }
    for n in 0..1_000_000 {
        now(store.acquire(&claims(n..n + 1)[0])).unwrap();
    }
    let each = (resident() - before) / 1_000_000 - 100;
    println!(
        "resident: {each} bytes beside each record of 100 bytes, counted as {}",
        { store.bytes() / store.len() - 100 }
    );
}

/// Bytes, from the kernel; pages of 4 KiB.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux tells");
    let pages = statm.split(' ').nth(1).expect("the second field");
    pages.parse::<usize>().expect("a number of pages") * 4096
}
