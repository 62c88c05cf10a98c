//! Rejections of calls and items, for which the layer renders no response.

use std::{convert::Infallible, time::Duration};

use axum::body::Body;
use http::{Request, Response};
use tests::observed::counted;
use tower_idempotency::{
    Error, ErrorKind, IdempotencyLayer, Lease, MemoryStore,
    conformance::{Fault, FaultInjector},
    items::{Item, ItemResult},
    run_once::WorkError,
    store::{Claim, Fingerprint, KeyId},
};

async fn run_items(layer: &IdempotencyLayer, keys: &[&str]) -> Vec<ErrorKind> {
    let head = Request::post("/batch").header("authorization", "Bearer 1");
    let (head, ()) = head.body(()).expect("a valid request").into_parts();
    let items = layer.items(&head).expect("a principal");
    let batch = keys.iter().map(|key| Item::new(*key, "pay", 7)).collect();
    let pay = async |cents: u8, _lease: Lease| Ok::<_, WorkError<Infallible>>(cents);
    let results: Vec<ItemResult<u8, Infallible>> =
        items.run(batch, pay).await.expect("a small batch");
    let errors = results.iter().filter_map(ItemResult::error);
    errors.map(Error::kind).collect()
}

/// Calls `run_once` and `take_over`, and runs two items. Returns their errors.
async fn reject_each(layer: &IdempotencyLayer) -> Vec<ErrorKind> {
    let work = async |_lease: Lease| Ok::<_, WorkError<Infallible>>(1);
    let once = layer.run_once("k", "", work).await;
    let (id, fingerprint) = ([1; 32], [2; 32]);
    let claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes(fingerprint));
    let again = async |_lease: Lease| Ok::<_, Infallible>(Response::new(Body::empty()));
    let taken = layer.take_over(claim.expect("a token"), again).await;
    let mut kinds = vec![
        once.expect_err("a rejection").kind(),
        taken.expect_err("a rejection").kind(),
    ];
    kinds.extend(run_items(layer, &["a", "b"]).await);
    kinds
}

// S-878
#[test]
fn rejections_without_response_are_counted() {
    let metrics = counted(async {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        assert!(layer.drain(Duration::from_secs(1)).await);
        assert_eq!(reject_each(&layer).await, [ErrorKind::Draining; 4]);
    });
    assert_eq!(metrics["idempotency_refused_total{code=draining}"], 4.0);
    let metrics = counted(async {
        let store = FaultInjector::new(MemoryStore::new());
        store.set_fault_for_all(&Fault::CallLost);
        let layer = IdempotencyLayer::new(store);
        assert_eq!(reject_each(&layer).await, [ErrorKind::StoreUnavailable; 4]);
    });
    let refused = metrics["idempotency_refused_total{code=store-unavailable}"];
    assert_eq!(refused, 4.0);
}

// S-878
#[test]
fn malformed_item_key_is_counted() {
    let metrics = counted(async {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let rejected = run_items(&layer, &["", "a"]).await;
        assert_eq!(rejected, [ErrorKind::MalformedKey]);
    });
    let refused = metrics["idempotency_refused_total{code=malformed-key}"];
    assert_eq!(refused, 1.0);
}
