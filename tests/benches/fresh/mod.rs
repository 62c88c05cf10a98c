//! Fresh keys: on one store, and on two stores that are compared alternately in one run.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tests::sql::{self, retried};
use tokio::task::JoinSet;
use tower_idempotency::store::{Acquired, Claim, KeyId, Store, Token, Ttl};

/// The record that completes a fresh key.
#[derive(Clone, Copy)]
pub(crate) struct Record {
    pub(crate) bytes: &'static [u8],
    pub(crate) retention: Ttl,
}

/// The number of keys in a comparison.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    /// Number of tasks that complete keys at the same time.
    pub(crate) tasks: u32,
    /// Number of keys that a task completes in a round, one after another.
    pub(crate) each: u32,
    pub(crate) rounds: usize,
}

/// Compares fresh keys on two stores, alternately. Prints the median time of a key on each, and the median ratio of the rounds.
///
/// A side is the store with its name in the output. Returns the number of keys that were completed on each side.
pub(crate) async fn compare_fresh<S: Store + Clone>(
    title: &str,
    sides: [(&str, &S); 2],
    record: Record,
    Size {
        tasks,
        each,
        rounds,
    }: Size,
    target: f64,
) -> u64 {
    // The first round connects.
    for (_, store) in sides {
        complete_many(store, record, tasks, each).await;
    }
    let mut times = [Vec::new(), Vec::new()];
    let mut ratios = Vec::new();
    for round in 0..rounds {
        let mut took = [Duration::ZERO; 2];
        // Each side is the first one in half of the rounds.
        for side in [round % 2, 1 - round % 2] {
            let began = Instant::now();
            complete_many(sides[side].1, record, tasks, each).await;
            took[side] = began.elapsed() / (tasks * each);
            times[side].push(took[side]);
        }
        ratios.push(took[0].as_secs_f64() / took[1].as_secs_f64());
    }
    for times in &mut times {
        times.sort();
    }
    println!(
        "{title}: fresh keys, {tasks} at a time: median {:.1} us {}, {:.1} us {}, {}",
        micros(times[0][times[0].len() / 2]),
        sides[0].0,
        micros(times[1][times[1].len() / 2]),
        sides[1].0,
        median_ratio(ratios, target)
    );
    u64::from(tasks * each) * (rounds as u64 + 1)
}

/// Completes `each` fresh keys in each of several tasks.
pub(crate) async fn complete_many<S: Store + Clone>(
    store: &S,
    record: Record,
    tasks: u32,
    each: u32,
) {
    let mut running = JoinSet::new();
    for _ in 0..tasks {
        let store = store.clone();
        running.spawn(async move {
            for _ in 0..each {
                complete_fresh(&store, &random_claim(), record).await;
            }
        });
    }
    running.join_all().await;
}

/// Acquires and completes a fresh key. Repeats a call that the database cancels, as the layer does.
pub(crate) async fn complete_fresh(store: &impl Store, claim: &Claim, record: Record) {
    let acquired = retried(|| store.acquire(claim)).await;
    let acquired = acquired.expect("the store replies");
    assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
    let lease = claim.lease_ref(1);
    let bytes = Bytes::from_static(record.bytes);
    let completed = retried(|| store.complete(&lease, bytes.clone(), record.retention)).await;
    completed.expect("the store replies");
}

/// Creates a claim whose ID is random in all bytes, like a digest: one of 16 acquires trims the index of Redis.
pub(crate) fn random_claim() -> Claim {
    let mut claim = sql::claim();
    let mut id = [0; 32];
    for half in id.chunks_mut(16) {
        half.copy_from_slice(Token::random().expect("random numbers").as_bytes());
    }
    claim.id = KeyId::from_bytes(id);
    claim
}

/// Returns the median ratio of the pairs, with the verdict on the target.
pub(crate) fn median_ratio(mut ratios: Vec<f64>, target: f64) -> String {
    ratios.sort_by(f64::total_cmp);
    let median = ratios[ratios.len() / 2];
    let verdict = verdict(median <= target);
    format!("median ratio {median:.3}, target {target}: {verdict}")
}

pub(crate) fn verdict(is_reached: bool) -> &'static str {
    if is_reached { "reached" } else { "not reached" }
}

pub(crate) fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}
