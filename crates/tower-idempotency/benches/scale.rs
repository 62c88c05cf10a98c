//! The memory store with 10,000,000 records: pauses, memory, and the time of a fresh key.
//!
//! A pause is the processor time of one poll of a call. Unlike wall time, it excludes other programs and the scheduler, and it
//! includes the page faults of the call.
//!
//! ```sh
//! cargo bench -p tower-idempotency --bench scale
//! ```

use std::{
    fs,
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use axum::{Router, body::Body, http::Request, routing::post};
use bytes::Bytes;
use http_body_util::BodyExt;
use rustix::time::{ClockId, clock_gettime};
use tower::ServiceExt;
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, Ttl,
    inspect::{Inspect, Query, State},
    store::{Acquired, Claim, Fingerprint, KeyId, ScopeDigest, Store, Token},
};

/// The length of each record in bytes.
const LEN: usize = 256;
const PRINCIPALS: u64 = 10_000;
const DAY: Ttl = Ttl::from_secs(24 * 60 * 60);
/// The length of a large record in bytes: that of the largest response by default.
const LARGE: usize = 4 << 20;
/// The number of large records that small ones are evicted for.
const LARGE_FIRST: u64 = 64;
/// The number of whole requests in a round.
const ROUND: usize = 2_000;

/// Returns the processor time of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).expect("a positive time");
    Duration::new(seconds, u32::try_from(time.tv_nsec).expect("nanoseconds"))
}

/// The polls of calls of one kind.
#[derive(Default)]
struct Calls {
    polls: u64,
    longest: Duration,
    longer_than_ms: u64,
}

impl Calls {
    fn measure<T>(&mut self, call: impl Future<Output = T>) -> T {
        let mut call = pin!(call);
        loop {
            let began = processor_time();
            let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            let took = processor_time() - began;
            self.polls += 1;
            self.longest = self.longest.max(took);
            self.longer_than_ms += u64::from(took > Duration::from_millis(1));
            if let Poll::Ready(output) = polled {
                return output;
            }
        }
    }

    fn print(&self, name: &str) {
        println!(
            "{name:36} {:9} polls, longest {:6.0} us, {} over 1 ms",
            self.polls,
            self.longest.as_secs_f64() * 1e6,
            self.longer_than_ms
        );
    }
}

fn wide<const N: usize>(n: u64) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    bytes
}

/// Executes one request of this principal, from its claim to its record. Measures both calls.
fn execute(store: &MemoryStore, calls: &mut Calls, n: u64, principal: u64, record: Bytes) {
    let fingerprint = Fingerprint::from_bytes([7; 32]);
    let mut claim = Claim::new(KeyId::from_bytes(wide(n)), fingerprint).expect("randomness");
    claim.token = Token::from_bytes(wide(n));
    let scope = wide(principal.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    claim.scope = Some(ScopeDigest::from_bytes(scope));
    let acquired = calls.measure(store.acquire(&claim)).expect("capacity");
    assert!(matches!(acquired, Acquired::Granted { .. }));
    let completed = calls.measure(store.complete(&claim.lease_ref(1), record, DAY));
    completed.expect("capacity");
}

/// Returns the memory of this process in bytes.
fn resident() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = pages.split(' ').nth(1).expect("the second member");
    pages.parse::<u64>().expect("a number") * rustix::param::page_size() as u64
}

fn app(store: MemoryStore) -> Router {
    let orders = post(|body: Bytes| async move { body });
    let layer = IdempotencyLayer::new(store);
    Router::new().route("/orders", orders).layer(layer)
}

/// Sends requests with fresh keys, one after another. Returns the time of each.
async fn send(app: &Router, next: &mut u64, requests: usize) -> Duration {
    let body = Bytes::from(vec![b'a'; 1024]);
    let began = Instant::now();
    for _ in 0..requests {
        *next += 1;
        let request = Request::post("/orders").header("idempotency-key", format!("key-{next}"));
        let request = request.body(Body::from(body.clone())).expect("a request");
        let response = app.clone().oneshot(request).await.expect("never fails");
        assert!(response.status().is_success());
        let body = response.into_body().collect().await.expect("a body");
        assert_eq!(body.to_bytes().len(), 1024);
    }
    began.elapsed() / u32::try_from(requests).expect("a small number")
}

/// Compares fresh keys over the records of `full` with those of an empty store, in turn.
async fn compare(full: &MemoryStore, rounds: usize) {
    let apps = [app(MemoryStore::new()), app(full.clone())];
    let (mut next, mut times) = (0, [const { Vec::new() }; 2]);
    for _ in 0..rounds {
        for (app, times) in apps.iter().zip(&mut times) {
            times.push(send(app, &mut next, ROUND).await);
        }
    }
    let [empty, full] = times.map(|mut times| {
        times.sort();
        times[rounds / 2].as_secs_f64() * 1e6
    });
    println!(
        "fresh key of a whole request: {full:.2} us, {empty:.2} us in an empty store, ratio {:.3}",
        full / empty
    );
}

async fn run(records: u64, rounds: usize) {
    // Room for a tenth more records, and for the largest of them.
    let (most, bytes) = (
        records + records / 10,
        usize::try_from(records).expect("64 bits") * 560,
    );
    let store = MemoryStore::new().with_max_bytes(bytes);
    let store = store.with_max_entries(usize::try_from(most).expect("64 bits"));
    let record = || Bytes::from(vec![1; LEN].into_boxed_slice());

    let (before, mut calls) = (resident(), Calls::default());
    for n in 0..records {
        execute(&store, &mut calls, n, n % PRINCIPALS, record());
    }
    calls.print("grows");
    let beside = (resident() - before) / records - LEN as u64;
    println!("memory beside each record: {beside} bytes");
    compare(&store, rounds).await;

    let (mut next, mut calls) = (records, Calls::default());
    let mut step = || {
        next += 1;
        next
    };
    while (store.len() as u64) < most {
        let n = step();
        execute(&store, &mut calls, n, n % PRINCIPALS, record());
    }
    calls.print("grows to its limit");

    let mut calls = Calls::default();
    for _ in 0..records / 20 {
        let n = step();
        execute(&store, &mut calls, n, n % PRINCIPALS, record());
    }
    calls.print("evicts of any principal");

    let mut calls = Calls::default();
    for _ in 0..records / 20 {
        execute(&store, &mut calls, step(), PRINCIPALS, record());
    }
    calls.print("evicts of the largest principal");

    // The first ones evict records of any principal, until they are more than 1/64 of the store.
    for (name, large) in [
        ("evicts small records for large ones", LARGE_FIRST),
        ("evicts few large records", 256),
    ] {
        let mut calls = Calls::default();
        for _ in 0..large {
            let record = Bytes::from(vec![1; LARGE].into_boxed_slice());
            execute(&store, &mut calls, step(), PRINCIPALS + 1, record);
        }
        calls.print(name);
    }

    let mut calls = Calls::default();
    for state in [State::InProgress, State::Orphaned, State::Completed] {
        for _ in 0..100 {
            calls
                .measure(store.list(&Query::new(state)))
                .expect("a page");
        }
    }
    calls.print("lists 50 entries");
    let mut calls = Calls::default();
    for _ in 0..100 {
        calls.measure(store.summary(1_000)).expect("a summary");
    }
    calls.print("counts up to 1,000 of each state");

    tokio::time::pause();
    tokio::time::advance(DAY.as_duration() * 2).await;
    let mut calls = Calls::default();
    for _ in 0..records / 20 {
        let n = step();
        execute(&store, &mut calls, n, n % PRINCIPALS, record());
    }
    calls.print("removes expired records");
    let mut calls = Calls::default();
    while calls.measure(store.purge(1_000)).expect("never fails") > 0 {}
    calls.print("purges 1,000 expired records");
}

fn main() {
    // Cargo passes this argument to measure. Without it, a small run checks that the benchmark runs.
    let measures = std::env::args().any(|argument| argument == "--bench");
    let (records, rounds) = if measures {
        (10_000_000, 60)
    } else {
        (20_000, 1)
    };
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().build().expect("a runtime");
    runtime.block_on(run(records, rounds));
}
