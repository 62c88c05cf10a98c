//! Panics, dropped batches, outages and lost leases.

use std::{convert::Infallible, time::Duration};

use tests::barrier::Barrier;
use tokio::time::{Instant, sleep, timeout};
use tower_idempotency::{
    ErrorKind, IdempotencyLayer, Lease, MemoryStore, OrphanPolicy,
    conformance::{Fault, FaultInjector, Operation},
    items::ItemOutcome,
    run_once::WorkError,
    testing::Effects,
};

use super::{head_of, is_replayed, items, layer, numbered, run, statuses};

// S-408
#[tokio::test(start_paused = true)]
async fn panicking_item_leaves_others() {
    let (layer, effects) = (layer(), Effects::new());
    let attempt = async |panics: bool| {
        let effects = effects.clone();
        let work = async move |key: String, _lease| {
            assert!(!panics || key != "b", "the intended panic");
            effects.add(&key);
            Ok::<_, WorkError<Infallible>>(key)
        };
        let items = layer.items(&head_of("alice")).expect("a principal");
        items.run(super::items(&["a", "b", "c"]), work).await
    };
    let results = attempt(true).await.expect("results");
    assert_eq!(statuses(&results), [200, 500, 200]);
    assert!(matches!(results[1].outcome(), ItemOutcome::Panicked));
    assert!(!results[1].is_final());
    assert_eq!(layer.in_flight(), 0);
    let retry = attempt(false).await.expect("results");
    assert_eq!(statuses(&retry), [200; 3]);
    assert_eq!(["a", "b", "c"].map(|key| effects.count(key)), [1, 1, 1]);
}

// S-409
#[tokio::test(start_paused = true)]
async fn dropped_batch_ends_only_running_items() {
    let (layer, effects) = (layer(), Effects::new());
    let slow = |effects: &Effects| {
        let effects = effects.clone();
        async move |key: String, _lease| {
            sleep(Duration::from_secs(5)).await;
            effects.add(&key);
            Ok::<_, WorkError<Infallible>>(key)
        }
    };
    let items = layer.items(&head_of("alice")).expect("a principal");
    let items = items.with_concurrency(3);
    let dropped = items.run(numbered(10), slow(&effects));
    assert!(timeout(Duration::from_secs(1), dropped).await.is_err());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(layer.in_flight(), 3);
    sleep(Duration::from_secs(60)).await;
    assert_eq!((effects.total(), layer.in_flight()), (3, 0));
    let retry = items.run(numbered(10), slow(&effects)).await;
    let retry = retry.expect("results");
    assert_eq!(statuses(&retry), [200; 10]);
    assert_eq!(retry.iter().filter(|result| is_replayed(result)).count(), 3);
    assert_eq!(effects.total(), 10);
}

// S-410
/// A batch of 1,000 items must not wait for the timeout of the store 1,000 times.
#[tokio::test(start_paused = true)]
async fn store_outage_stops_batch() {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = IdempotencyLayer::new(store.clone());
    let effects = Effects::new();
    store.set_script(|op, nth| match op {
        Operation::Acquire if nth > 100 => Fault::HangCall,
        _ => Fault::None,
    });
    let started = Instant::now();
    let results = run(&layer, &effects, numbered(1000))
        .await
        .expect("results");
    assert!(started.elapsed() <= Duration::from_secs(10));
    assert_eq!(
        (effects.total(), store.calls(Operation::Acquire) < 150),
        (100, true)
    );
    let rejected = results.iter().filter(|result| result.status() == 503);
    assert_eq!(rejected.clone().count(), 900);
    for result in rejected {
        assert!(!result.is_final() && result.retry_after().is_some());
    }
    store.set_script(|_, _| Fault::None);
    sleep(Duration::from_secs(60)).await;
    let retry = run(&layer, &effects, numbered(1000)).await;
    assert_eq!(statuses(&retry.expect("results")), [200; 1000]);
    assert_eq!((effects.total(), effects.count("k999")), (1000, 1));
}

/// A record that cannot be read is no outage.
#[tokio::test(start_paused = true)]
async fn unreadable_item_leaves_others() {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = IdempotencyLayer::new(store.clone());
    let effects = Effects::new();
    let first = run(&layer, &effects, items(&["a"])).await;
    assert_eq!(statuses(&first.expect("results")), [200]);
    let items = layer.items(&head_of("alice")).expect("a principal");
    let work = async |key: String, _lease| Ok::<_, WorkError<Infallible>>(key.len());
    let batch = super::items(&["a", "b", "c"]);
    let results = items.with_concurrency(1).run(batch, work).await;
    assert_eq!(statuses(&results.expect("results")), [503, 200, 200]);
}

// S-411
#[tokio::test(start_paused = true)]
async fn lost_item_lease_is_not_final() {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Renew, Fault::HangCall);
    let [one, other] = [store.clone(), store.clone()].map(IdempotencyLayer::new);
    let effects = Effects::new();
    let items = one.items(&head_of("alice")).expect("a principal");
    let work = {
        let (other, effects) = (other.clone(), effects.clone());
        async move |key: String, lease: Lease| {
            effects.add(&key);
            if key == "a" {
                tokio::time::advance(Duration::from_secs(16)).await;
                assert!(!lease.is_held());
                let rival = run(&other, &effects, super::items(&["a"])).await;
                assert_eq!(statuses(&rival.expect("results")), [200]);
            }
            Ok::<_, WorkError<Infallible>>("own".to_owned())
        }
    };
    let items = items.with_concurrency(1);
    let results = items.run(super::items(&["a", "b"]), work).await;
    let results = results.expect("results");
    assert_eq!(statuses(&results), [409, 200]);
    assert!(!results[0].is_final());
    let retry = run(&one, &effects, super::items(&["a"])).await;
    let retry = retry.expect("results");
    assert_eq!(retry[0].value(), Some(&"a".to_owned()), "the stored value");
    assert_eq!(effects.count("b"), 1);
}

// S-412
#[tokio::test(start_paused = true)]
async fn refused_orphan_item_is_not_run() {
    let layer = layer().with_orphan_policy(OrphanPolicy::Refuse);
    let effects = Effects::new();
    let items = layer.items(&head_of("alice")).expect("a principal");
    let held = async |_: String, _lease| Err::<String, _>(WorkError::Orphan("no answer"));
    let first = items.run(super::items(&["a"]), held).await;
    assert_eq!(statuses(&first.expect("results")), [500]);
    sleep(Duration::from_secs(20)).await;
    let results = run(&layer, &effects, super::items(&["a", "b"])).await;
    let results = results.expect("results");
    assert_eq!(statuses(&results), [409, 200]);
    let error = results[0].error().expect("an error");
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown);
    let id = items.key_id("a").expect("a valid key");
    assert_eq!(error.entry(), Some(&id), "an operator finds the entry");
    assert!(!results[0].is_final());
    assert_eq!((effects.count("a"), effects.count("b")), (0, 1));
}

// S-415
#[tokio::test(start_paused = true)]
async fn shutdown_rejects_items_that_have_not_begun() {
    let (layer, effects, barrier) = (layer(), Effects::new(), Barrier::closed());
    let running = tokio::spawn({
        let (layer, effects, barrier) = (layer.clone(), effects.clone(), barrier.clone());
        async move {
            let items = layer.items(&head_of("alice")).expect("a principal");
            let work = async move |key: String, _lease: Lease| {
                barrier.pass().await;
                effects.add(&key);
                Ok::<_, WorkError<Infallible>>(key)
            };
            items.with_concurrency(2).run(numbered(5), work).await
        }
    });
    barrier.arrival().await;
    barrier.arrival().await;
    let drained = tokio::spawn({
        let layer = layer.clone();
        async move { layer.drain(Duration::from_secs(30)).await }
    });
    sleep(Duration::from_secs(1)).await;
    barrier.open_for_good();
    assert!(drained.await.expect("no panic"));
    let results = running.await.expect("no panic").expect("results");
    assert_eq!(statuses(&results), [200, 200, 503, 503, 503]);
    assert!(!results[2].is_final());
    assert_eq!(effects.total(), 2);
}

#[tokio::test(start_paused = true)]
async fn unpolled_batch_runs_nothing() {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = IdempotencyLayer::new(store.clone());
    let effects = Effects::new();
    let work = {
        let effects = effects.clone();
        async move |key: String, _lease| {
            effects.add(&key);
            Ok::<_, WorkError<Infallible>>(key)
        }
    };
    let batch = layer.items(&head_of("alice")).expect("a principal");
    drop(batch.run(items(&["a"]), work));
    sleep(Duration::from_secs(1)).await;
    assert_eq!((effects.total(), store.all_calls()), (0, 0));
    let empty = run(&layer, &effects, Vec::new()).await;
    assert!(empty.expect("results").is_empty());
}
