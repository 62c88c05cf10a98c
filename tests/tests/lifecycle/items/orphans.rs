//! Batches in the work of other leases than that of their request.

use std::{convert::Infallible, time::Duration};

use axum::body::Body;
use http::Response;
use tests::read;
use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, Lease, MemoryStore, TakeOverOutcome,
    run_once::{Outcome, WorkError},
    store::{Claim, Fingerprint, KeyId, Store},
    testing::Effects,
};

use super::{head_of, items, layer, statuses};

/// The credentials of the head were replaced.
#[tokio::test(start_paused = true)]
async fn items_of_item_belong_to_its_caller() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let of_work = layer.clone();
    let nested = async move |caller: String, lease: Lease| {
        let mut head = head_of(&caller);
        head.extensions.insert(lease);
        Ok::<_, WorkError<Infallible>>(of_work.items(&head).is_ok())
    };
    let batch = layer.items(&head_of("alice")).expect("a principal");
    let results = batch.run(items(&["alice", "bob"]), nested).await;
    let results = results.expect("results");
    let nested: Vec<_> = results.iter().map(|it| it.value().copied()).collect();
    assert_eq!(nested, [Some(true), Some(false)]);
}

/// The lease of a takeover has no principal. The head of the batch has one.
#[tokio::test(start_paused = true)]
async fn orphaned_batch_is_executed_again() {
    let (store, effects) = (MemoryStore::new(), Effects::new());
    let layer = IdempotencyLayer::new(store.clone());
    let claim = || {
        let (id, fingerprint) = (KeyId::from_bytes([7; 32]), Fingerprint::from_bytes([7; 32]));
        Claim::new(id, fingerprint).expect("randomness")
    };
    store.acquire(&claim()).await.expect("room");
    sleep(Duration::from_secs(16)).await;
    // The failed item leaves the request an orphan.
    for (expected, generation) in [("[200, 500]", 2), ("[200, 200]", 3)] {
        let (of_work, counted) = (layer.clone(), effects.clone());
        let work = async move |lease: Lease| {
            assert_eq!(lease.generation(), generation);
            let mut head = head_of("alice");
            head.extensions.insert(lease);
            let batch = of_work.items(&head).expect("a principal");
            let pay = async move |key: String, _lease| {
                counted.add(&key);
                if key == "b" && counted.count("b") == 1 {
                    return Err(WorkError::Release("try later"));
                }
                Ok(key)
            };
            let results = batch.run(items(&["a", "b"]), pay).await.expect("results");
            let text = format!("{:?}", statuses(&results));
            Ok::<_, Infallible>(Response::new(Body::from(text)))
        };
        let taken = layer.take_over(claim(), work).await.expect("an answer");
        let TakeOverOutcome::Executed(res) = taken else {
            panic!("expected an execution, found {taken:?}");
        };
        assert_eq!(read(res.map(Body::new)).await.text(), expected);
    }
    let work = async |_| -> Result<Response<Body>, Infallible> { panic!("it must not run") };
    let taken = layer.take_over(claim(), work).await.expect("an answer");
    assert!(matches!(taken, TakeOverOutcome::NoOrphan), "{taken:?}");
    assert_eq!(["a", "b"].map(|key| effects.count(key)), [1, 2]);
}

// S-423
/// A recorded value would hide the item that is left.
#[tokio::test(start_paused = true)]
async fn run_with_unfinished_batch_runs_again() {
    let (layer, effects) = (layer(), Effects::new());
    let run = async || {
        let (of_work, counted) = (layer.clone(), effects.clone());
        let work = async move |lease: Lease| {
            let mut head = head_of("alice");
            head.extensions.insert(lease);
            let batch = of_work.items(&head).expect("a principal");
            let pay = async move |key: String, _lease| {
                counted.add(&key);
                if key == "b" && counted.count("b") == 1 {
                    return Err(WorkError::Release("try later"));
                }
                Ok(key)
            };
            let results = batch.run(items(&["a", "b"]), pay).await.expect("results");
            Ok::<_, WorkError<Infallible>>(statuses(&results))
        };
        let outcome = layer.run_once("file-7", "digest", work).await;
        outcome.expect("an outcome")
    };
    assert_eq!(run().await, Outcome::UnfinishedBatch(vec![200, 500]));
    assert_eq!(run().await, Outcome::Executed(vec![200, 200]));
    assert_eq!(run().await, Outcome::Replayed(vec![200, 200]));
    assert_eq!(["a", "b"].map(|key| effects.count(key)), [1, 2]);
}

// S-423
#[tokio::test(start_paused = true)]
async fn item_with_unfinished_batch_is_not_final() {
    let layer = layer();
    let of_work = layer.clone();
    let nested = async move |caller: String, lease: Lease| {
        let mut head = head_of(&caller);
        head.extensions.insert(lease);
        let batch = of_work.items(&head).expect("a principal");
        let fail = async |_key: String, _lease| Err::<(), _>(WorkError::Release("try later"));
        let results = batch.run(items(&["b"]), fail).await.expect("results");
        Ok::<_, WorkError<Infallible>>(results.len())
    };
    let batch = layer.items(&head_of("alice")).expect("a principal");
    let results = batch.run(items(&["alice"]), nested).await;
    let results = results.expect("results");
    assert_eq!(statuses(&results), [500]);
    assert!(!results[0].is_final());
}
