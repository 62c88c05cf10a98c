//! Counters of `Tiered`: the hit rate, and the records that it does not keep.

use std::time::Duration;

use tests::{
    app, creating, noise,
    observed::{self, Metrics},
    post, send,
};
use tokio::time::advance;
use tower_idempotency::{IdempotencyLayer, MemoryStore, Tiered, conformance::FaultInjector};

const FROM_TIER: &str = "idempotency_tier_replays_total{source=tier}";
const FROM_STORE: &str = "idempotency_tier_replays_total{source=store}";
const FULL: &str = "idempotency_tier_dropped_total{reason=full}";
const SIZE: &str = "idempotency_tier_dropped_total{reason=size}";

/// Runs a future on a paused clock. Returns the counters of the tier.
fn counted(future: impl Future<Output = ()>) -> Metrics {
    let mut counted = observed::counted(future);
    counted.retain(|name, _| name.starts_with("idempotency_tier_"));
    counted
}

fn counts(expected: &[(&str, f64)]) -> Metrics {
    let expected = expected.iter();
    expected
        .map(|(name, count)| ((*name).to_owned(), *count))
        .collect()
}

// S-985
#[test]
fn replays_are_counted_by_source() {
    let found = counted(async {
        let tiered = Tiered::new(FaultInjector::new(MemoryStore::new()));
        let (app, _) = creating(IdempotencyLayer::new(tiered));
        for key in ["a", "b"] {
            send(&app, post("/orders", key, "tea")).await;
        }
        for _ in 0..3 {
            assert!(send(&app, post("/orders", "a", "tea")).await.is_replay());
        }
        advance(Duration::from_secs(60)).await;
        assert!(send(&app, post("/orders", "a", "tea")).await.is_replay());
        assert!(send(&app, post("/orders", "a", "tea")).await.is_replay());
    });
    assert_eq!(found, counts(&[(FROM_TIER, 4.0), (FROM_STORE, 1.0)]));
}

#[test]
fn execution_changes_no_tier_counter() {
    let found = counted(async {
        let tiered = Tiered::new(FaultInjector::new(MemoryStore::new()));
        let (app, _) = creating(IdempotencyLayer::new(tiered));
        for key in ["a", "b"] {
            send(&app, post("/orders", key, "tea")).await;
        }
    });
    assert_eq!(found, counts(&[]));
}

// S-986
#[test]
fn dropped_records_are_counted_by_reason() {
    let found = counted(async {
        let tiered = Tiered::new(FaultInjector::new(MemoryStore::new())).with_max_bytes(64 * 1024);
        let (app, _) = app(IdempotencyLayer::new(tiered.clone()), async |n, _| {
            // The eleventh record is above an eighth of the tier. The others fill it, and three are evicted.
            noise(if n == 11 { 8 * 1024 } else { 7 * 1024 })
        });
        for key in 1..=12 {
            send(&app, post("/orders", &key.to_string(), "tea")).await;
        }
        assert_eq!(tiered.len(), 8);
        // The removal of a record that has passed its age is not counted as an eviction.
        advance(Duration::from_secs(60)).await;
        send(&app, post("/orders", "13", "tea")).await;
    });
    assert_eq!(found, counts(&[(FULL, 3.0), (SIZE, 1.0)]));
}
