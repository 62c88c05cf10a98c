//! Benchmarks of the memory store alone: nanoseconds for an acquire and a complete under a fresh key.
//!
//! ```sh
//! cargo bench -p tower-idempotency --bench memory
//! ```

use std::{
    future::Future,
    hint::black_box,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Instant,
};

use bytes::Bytes;
use tower_idempotency::{
    MemoryStore, Ttl,
    store::{Acquired, Claim, Fingerprint, KeyId, ScopeDigest, Store, Token},
};

const BATCH: u64 = 100_000;
const ROUNDS: usize = 15;
const DAY: Ttl = Ttl::from_secs(24 * 60 * 60);

/// Returns the output of a call, which never waits.
fn now<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => unreachable!("the memory store never waits"),
    }
}

/// Executes one request, from its claim to its record.
fn execute(store: &MemoryStore, n: u64, scopes: u64, record: &Bytes, retention: Ttl) {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&n.to_le_bytes());
    let mut token = [0; 16];
    token[..8].copy_from_slice(&n.to_le_bytes());
    let mut scope = [0; 16];
    scope[..8].copy_from_slice(
        &(n % scopes)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .to_le_bytes(),
    );
    let mut claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes([7; 32]))
        .expect("the system has randomness");
    claim.token = Token::from_bytes(token);
    claim.scope = Some(ScopeDigest::from_bytes(scope));
    let acquired = now(store.acquire(&claim)).expect("the store has capacity");
    assert!(matches!(acquired, Acquired::Granted { .. }));
    let lease = claim.lease_ref(1);
    let stored = store.complete(&lease, record.clone(), retention);
    now(stored).expect("the store has capacity");
    black_box(store.len());
}

fn main() {
    // Cargo passes this argument to measure. Without it, one round checks that the benchmark runs.
    let measures = std::env::args().any(|argument| argument == "--bench");
    let count = if measures { ROUNDS } else { 1 };
    let small = Bytes::from(vec![1; 256]);
    // Retentions of different lengths arrive out of the order of their expiry.
    let uneven = |n: u64| Ttl::from_secs(3600 + n * 7919 % 3600);
    for (name, full, scopes, retention) in [
        ("room, 1 principal", false, 1, None),
        ("room, 10,000 principals", false, 10_000, None),
        ("room, uneven retention", false, 10_000, Some(())),
        ("full, 1 principal", true, 1, None),
        ("full, 10,000 principals", true, 10_000, None),
        ("full, uneven retention", true, 10_000, Some(())),
    ] {
        let mut rounds = Vec::new();
        for _ in 0..count {
            let store = MemoryStore::new().with_max_bytes(if full { 16 << 20 } else { 1 << 30 });
            let mut next = 0;
            let mut batch = || {
                let started = Instant::now();
                for _ in 0..BATCH {
                    next += 1;
                    let retention = retention.map_or(DAY, |()| uneven(next));
                    execute(&store, next, scopes, &small, retention);
                }
                started.elapsed()
            };
            if full {
                batch();
            }
            #[expect(clippy::cast_precision_loss, reason = "a batch is short")]
            rounds.push(batch().as_nanos() as f64 / BATCH as f64);
        }
        rounds.sort_by(f64::total_cmp);
        println!(
            "{name:26} {:7.0} ns (least {:.0})",
            rounds[count / 2],
            rounds[0]
        );
    }
}
