//! Memory that the memory store, a tier and unread replays allocate, measured by a counting allocator.
//!
//! The allocator is `peak_alloc`, which adds only two counters to the system allocator. `dhat` would take a backtrace
//! for each of millions of allocations. (The workspace forbids `unsafe`, which a new allocator would need.)

#![expect(clippy::unwrap_used, reason = "tests, their helpers included")]

use std::{
    future::Future,
    pin::pin,
    sync::{Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use peak_alloc::PeakAlloc;
use tests::{
    app, few_or,
    layered::record_of,
    noise,
    wire::{H1, Server},
};
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tower_idempotency::{
    IdempotencyLayer, Tiered,
    store::{
        Acquired, Claim, Fingerprint, KeyId, LeaseRef, MemoryStore, ScopeDigest, Store, StoreError,
        Ttl,
    },
};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The allocator counts for the whole process, so only one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

const DAY: Ttl = Ttl::from_secs(24 * 60 * 60);
const CAP: usize = 100_000_000;
/// Bytes of an empty store: its counters for each group of principals.
const COUNTERS: usize = 32 * 1024;

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the output of a call on the memory store, which never waits.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the memory store replies at once"),
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

/// Replays a record. The record's buffer then becomes a shared one, with a header.
fn replay(store: &MemoryStore, n: usize) {
    let acquired = now(store.acquire(&claim(n))).unwrap();
    assert!(matches!(acquired, Acquired::Completed { .. }));
}

/// Returns the largest allocation since the last call.
fn peak() -> usize {
    let peak = ALLOCATOR.peak_usage();
    ALLOCATOR.reset_peak_usage();
    peak
}

// F-112
/// The keys take twice the cap, or five times the cap with `FULL=1`.
#[test]
fn keys_beyond_cap_stay_within_bound() {
    let _alone = alone();
    let before = ALLOCATOR.current_usage();
    let store = MemoryStore::new().with_max_bytes(CAP);
    let mut leases = Vec::new();
    peak();
    for n in 0..few_or(400_000, 1_000_000) {
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
    assert!(store.bytes() > CAP / 10 * 9, "the store uses its cap");
    for lease in &leases {
        now(store.renew(lease, DAY)).expect("no lease is evicted");
    }
    println!(
        "cap {CAP}: at most {most} bytes allocated, {} entries",
        store.len()
    );
}

/// The memory of many small records is freed when large ones replace them. A new record may exceed the cap, because the
/// caller allocates it before the store evicts other records.
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
            most <= SMALL_CAP + SMALL_CAP / 10 + COUNTERS + len,
            "took {most} bytes at most"
        );
    }
}

/// The memory of 32 entries is freed at once. One of ten entries stays, which keeps that of almost all others.
#[test]
fn scattered_entries_take_half_of_cap_at_most() {
    const SMALL_CAP: usize = 20_000_000;
    const ENTRY_BYTES: usize = 240;
    const LEN: usize = 10;
    let _alone = alone();
    let before = ALLOCATOR.current_usage();
    let store = MemoryStore::new().with_max_bytes(SMALL_CAP);
    peak();
    for n in 0..SMALL_CAP / (ENTRY_BYTES + LEN) {
        if n % 10 == 0 {
            hold(&store, n);
        } else {
            record(&store, n, LEN);
        }
    }
    for n in 0..300 {
        record(&store, 10_000_000 + n, 100_000);
    }
    let most = peak() - before;
    println!("beside scattered entries: at most {most} bytes allocated");
    assert!(
        most <= SMALL_CAP / 2 * 3 + COUNTERS,
        "took {most} bytes at most"
    );
}

#[test]
fn record_overhead_is_at_most_200_bytes() {
    assert_record_overhead(200, |_| {});
}

/// Each shard counts the records of each group of principals.
#[test]
fn record_overhead_of_principals_is_at_most_215() {
    assert_record_overhead(215, |claim| {
        let (scope, _) = claim.id.as_bytes().split_first_chunk().unwrap();
        claim.scope = Some(ScopeDigest::from_bytes(*scope));
    });
}

fn assert_record_overhead(limit: usize, adjust: fn(&mut Claim)) {
    const LEN: usize = 100;
    const STEP: usize = 500;
    let _alone = alone();
    let before = ALLOCATOR.current_usage();
    let store = MemoryStore::new();
    let mut worst = (0, 0);
    peak();
    // The number of records doubles more than twice after the first that count, and each table of the store with it.
    for step in 0..few_or(200, 600) {
        for n in step * STEP..(step + 1) * STEP {
            let mut claim = claim(n);
            adjust(&mut claim);
            claim.lease = DAY;
            now(store.acquire(&claim)).unwrap();
            let record = Bytes::from(vec![1; LEN]);
            now(store.complete(&claim.lease_ref(1), record, DAY)).unwrap();
            replay(&store, n);
        }
        let count = (step + 1) * STEP;
        let each = (peak() - before - count * LEN) / count;
        // Below this number, the reserved memory of each shard dominates the result.
        if count >= 20_000 {
            worst = worst.max((each, count));
        }
    }
    println!(
        "at most {} bytes beside each record, at {} records",
        worst.0, worst.1
    );
    assert!(worst.0 <= limit, "{} bytes at {} records", worst.0, worst.1);
    let counted = store.bytes() / store.len() - LEN;
    assert!(counted >= worst.0, "counted as {counted}, took {}", worst.0);
}

/// The store counts owner and operation with the memory that the map needs for them.
#[test]
fn details_are_counted() {
    const LEN: usize = 100;
    const STEP: usize = 1000;
    const OPERATION: &str = "POST /accounts/{account}/payments";
    let _alone = alone();
    let before = ALLOCATOR.current_usage();
    let store = MemoryStore::new().with_details();
    let mut worst = (0, 0);
    peak();
    for step in 0..few_or(100, 200) {
        for n in step * STEP..(step + 1) * STEP {
            let mut claim = claim(n);
            claim.lease = DAY;
            claim.operation = OPERATION.into();
            now(store.acquire(&claim)).unwrap();
            let record = Bytes::from(vec![1; LEN]);
            now(store.complete(&claim.lease_ref(1), record, DAY)).unwrap();
            replay(&store, n);
        }
        let count = (step + 1) * STEP;
        let each = (peak() - before - count * LEN) / count;
        if count >= 20_000 {
            worst = worst.max((each, count));
        }
    }
    let counted = store.bytes() / store.len() - LEN;
    println!(
        "details: counted as {counted}, took {} at {} records",
        worst.0, worst.1
    );
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

// ---- The tier in front of a store ----

/// A store that has no entry and stores nothing, or that has a record for each entry.
struct Backend {
    /// The length of the buffer of each reply. The record is a part of the buffer.
    reply: Option<usize>,
}

impl Store for Backend {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let Some(bytes) = self.reply else {
            return Ok(Acquired::Granted {
                generation: 1,
                takeover: false,
            });
        };
        let buffer =
            Bytes::from([record_of(&claim.id, &[1; 100]).to_vec(), vec![0; bytes]].concat());
        Ok(Acquired::Completed {
            fingerprint: claim.fingerprint,
            record: buffer.slice(..106),
            expires_in: DAY.as_duration(),
            token: Some(claim.token),
        })
    }

    async fn renew(&self, _lease: &LeaseRef, _ttl: Ttl) -> Result<(), StoreError> {
        Ok(())
    }

    async fn complete(&self, _: &LeaseRef, _record: Bytes, _: Ttl) -> Result<(), StoreError> {
        Ok(())
    }

    async fn release(&self, _lease: &LeaseRef) -> Result<(), StoreError> {
        Ok(())
    }

    async fn wait_for_change(&self, _id: &KeyId, _timeout: Duration) {}
}

fn complete(tiered: &Tiered<Backend>, n: usize, len: usize) {
    let claim = claim(n);
    let mut lease = claim.lease_ref(1);
    lease.is_first_completion = true;
    let record = record_of(&claim.id, &vec![1; len]);
    now(tiered.complete(&lease, record, DAY)).unwrap();
}

fn is_in_tier(tiered: &Tiered<Backend>, n: usize) -> bool {
    let acquired = now(tiered.acquire(&claim(n))).unwrap();
    matches!(acquired, Acquired::Completed { .. })
}

// F-987
/// Replays each record, and changes the size of records, so that the memory of many small records must be freed for
/// large ones.
#[test]
fn tier_stays_within_bound() {
    const TIER_CAP: usize = 10_000_000;
    let _alone = alone();
    let before = ALLOCATOR.current_usage();
    let tiered = Tiered::new(Backend { reply: None }).with_max_bytes(TIER_CAP);
    peak();
    for (phase, len) in [0, 100_000, 10, 1_000_000].into_iter().enumerate() {
        let count = 100_000_000 / (len + 2000);
        for n in 0..count {
            let n = phase * 10_000_000 + n;
            complete(&tiered, n, len);
            assert!(is_in_tier(&tiered, n));
        }
        let most = peak() - before;
        println!(
            "records of {len} bytes: at most {most} bytes allocated, {} records, {} counted",
            tiered.len(),
            tiered.bytes()
        );
        assert!(tiered.bytes() <= TIER_CAP);
        assert!(tiered.bytes() > TIER_CAP / 10 * 8, "the store uses its cap");
        // A new record may exceed the cap, in three buffers of this test.
        assert!(most <= TIER_CAP + 3 * len, "took {most} bytes at most");
    }
}

// F-987
#[test]
fn tier_counts_memory_of_record() {
    const LEN: usize = 100;
    const STEP: usize = 500;
    let _alone = alone();
    let before = ALLOCATOR.current_usage();
    let tiered = Tiered::new(Backend { reply: None });
    let (mut worst, mut least) = (0, usize::MAX);
    peak();
    for step in 0..100 {
        for n in step * STEP..(step + 1) * STEP {
            complete(&tiered, n, LEN);
            assert!(is_in_tier(&tiered, n));
        }
        let count = (step + 1) * STEP;
        let each = (peak() - before).div_ceil(count);
        // Below this number, the reserved memory of each group dominates the result.
        if count >= 20_000 {
            worst = worst.max(each);
            least = least.min(each);
        }
    }
    let counted = tiered.bytes() / tiered.len();
    println!("a record of {LEN} bytes takes {least} to {worst} bytes, and counts as {counted}");
    assert!(worst <= counted, "{worst} bytes");
}

// F-987
/// The store replies with records that are parts of larger buffers.
#[test]
fn tier_holds_no_buffer_of_reply() {
    const COUNT: usize = 1000;
    let _alone = alone();
    let before = ALLOCATOR.current_usage();
    let tiered = Tiered::new(Backend {
        reply: Some(64_000),
    });
    for n in 0..COUNT {
        assert!(is_in_tier(&tiered, n));
    }
    let held = ALLOCATOR.current_usage() - before;
    println!(
        "{COUNT} records take {held} bytes, and count as {}",
        tiered.bytes()
    );
    assert_eq!(tiered.len(), COUNT);
    assert!(held < 2 * tiered.bytes(), "{held}");
}

/// Sends requests of clients that read no response. All of them request replays of `records` records of 4 MB, of one
/// caller.
///
/// The clients are in the same process, so their memory counts as well.
fn unread_replays(records: usize, response: fn() -> Vec<u8>) {
    const BOUND: usize = 256 * 1024 * 1024;
    const CLIENTS: usize = 1_000;
    let _alone = alone();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let layer = IdempotencyLayer::new(MemoryStore::new().with_max_bytes(1 << 30))
            .with_max_buffered(BOUND, BOUND);
        let (app, effects) = app(layer, move |_, _| std::future::ready(response()));
        let server = Server::start(app).await;
        let head = |caller: &str, key: usize| {
            format!(
                "POST / HTTP/1.1\r\nhost: test\r\nauthorization: {caller}\r\nidempotency-key: {key}\r\ncontent-length: 0\r\n\r\n"
            )
        };
        let post = async |caller: &str, key| {
            let mut client = H1::connect(server.addr()).await;
            client.send(head(caller, key)).await;
            client.response().await.unwrap()
        };
        for key in 0..records {
            assert_eq!(post("mallory", key).await.body.len(), 4_000_000);
        }
        assert_eq!(post("bob", 0).await.body.len(), 4_000_000);
        let before = ALLOCATOR.current_usage();
        peak();
        let mut clients = Vec::new();
        for n in 0..CLIENTS {
            let mut client = TcpStream::connect(server.addr()).await.unwrap();
            client.write_all(head("mallory", n % records).as_bytes()).await.unwrap();
            client.readable().await.unwrap();
            clients.push(client);
        }
        let most = peak().saturating_sub(before);
        println!("{records} records, {CLIENTS} unread replays: at most {most} bytes more");
        assert!(most < BOUND + 64 * 1024 * 1024, "{most} bytes");
        let replay = post("bob", 0).await;
        assert!(replay.is_replay());
        assert_eq!(effects.count(), records as u64 + 1);
    });
}

// F-954, S-978
#[test]
fn unread_replays_of_one_record_stay_within_bound() {
    // The first record is inflated for each replay. The second one is shared with the store.
    unread_replays(1, || vec![b'x'; 4_000_000]);
    unread_replays(1, || noise(4_000_000));
}

// F-954, S-977
#[test]
fn unread_replays_of_many_records_stay_within_bound() {
    unread_replays(100, || vec![b'x'; 4_000_000]);
}
