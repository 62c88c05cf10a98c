//! Records of another type than their reader expects.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response};
use tests::{app, creating, send};
use tower_idempotency::{
    Error, ErrorKind, IdempotencyLayer, Lease, MemoryStore,
    conformance::FaultInjector,
    items::Item,
    run_once::{Outcome, WorkError},
};

use crate::{
    observability::{Flow, counted, logged},
    outages::{lines, order, slow},
};

const KEY: &str = "k";

async fn number(_lease: Lease) -> Result<u64, WorkError<Infallible>> {
    Ok(7)
}

async fn text(_lease: Lease) -> Result<String, WorkError<Infallible>> {
    panic!("it must not run")
}

/// Asserts that each of these reads counts, and that one event has the reason.
fn assert_reported(flow: fn() -> Flow, reads: f64, reason: &str) {
    let counted = counted(flow);
    assert_eq!(counted["idempotency_bad_record_total"], reads);
    let log = logged(flow);
    let errors = lines(&log, "ERROR", "record cannot be read");
    assert_eq!(errors.len(), 1, "{log}");
    assert!(errors[0].contains(reason), "{}", errors[0]);
}

/// Reads a recorded number as a text, in two runs.
fn run_of_other_type() -> Flow {
    Box::pin(async {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let first = layer.run_once(KEY, "", number).await;
        assert!(matches!(first, Ok(Outcome::Executed(7))), "{first:?}");
        for _ in 0..2 {
            let error = layer.run_once(KEY, "", text).await;
            let error = error.expect_err("a number is no text");
            assert_eq!(error.kind(), ErrorKind::StoreUnavailable);
        }
        1
    })
}

/// Reads a recorded number as a text, in an item.
fn item_of_other_type() -> Flow {
    Box::pin(async {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let head = Request::post("/batch").header("authorization", "Bearer 1");
        let (head, ()) = head.body(()).expect("a valid request").into_parts();
        let items = layer.items(&head).expect("a principal");
        let batch = || vec![Item::new(KEY, "pay", ())];
        let first = items.run(batch(), |(), lease: Lease| number(lease));
        let first = first.await.expect("a small batch");
        assert_eq!(first[0].value(), Some(&7));
        let retry = items.run(batch(), |(), lease: Lease| text(lease));
        let retry = retry.await.expect("a small batch");
        let kind = retry[0].error().map(Error::kind);
        assert_eq!(kind, Some(ErrorKind::StoreUnavailable));
        1
    })
}

// F-188, S-360
#[test]
fn value_of_other_type_is_bad_record() {
    let reason = "expected a value of another type";
    assert_reported(run_of_other_type, 2.0, reason);
    assert_reported(item_of_other_type, 1.0, reason);
}

/// Returns the record of a response under the ID of the run.
fn response_record(_: Bytes) -> Bytes {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let id = layer.run_once_key_id(KEY);
    layer.encode_response_record(&id, &Response::new(Bytes::new()))
}

/// Returns the record of a value under the ID of the request.
fn value_record(_: Bytes) -> Bytes {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let (head, _) = order(KEY).into_parts();
    let id = layer.key_id(&head, b"").expect("a valid request");
    layer.encode_value_record(&id.expect("a key"), &7)
}

/// Reads the record of a response in a run.
fn run_of_request() -> Flow {
    Box::pin(async {
        let store = FaultInjector::new(MemoryStore::new());
        let layer = IdempotencyLayer::new(store.clone());
        let first = layer.run_once(KEY, "", number).await;
        assert!(matches!(first, Ok(Outcome::Executed(7))), "{first:?}");
        store.rewrite_records(response_record);
        let error = layer.run_once(KEY, "", number).await;
        let error = error.expect_err("a response is no value");
        assert_eq!(error.kind(), ErrorKind::StoreUnavailable);
        1
    })
}

/// Reads the record of a value in two requests.
fn request_of_run() -> Flow {
    Box::pin(async {
        let store = FaultInjector::new(MemoryStore::new());
        let (app, effects) = slow(IdempotencyLayer::new(store.clone()), 0);
        send(&app, order(KEY)).await;
        store.rewrite_records(value_record);
        for _ in 0..2 {
            assert_eq!(send(&app, order(KEY)).await.code(), "store-unavailable");
        }
        assert_eq!(effects.count(), 1);
        effects.count()
    })
}

// F-188
/// An operator has stored the record of the other kind.
#[test]
fn record_of_other_kind_is_bad_record() {
    assert_reported(run_of_request, 1.0, "found that of a response");
    assert_reported(request_of_run, 2.0, "found that of a value");
}

/// Reads a response that a process with higher limits has recorded, in two requests.
fn replay_above(limit: fn(IdempotencyLayer) -> IdempotencyLayer, length: usize) -> Flow {
    Box::pin(async move {
        let layer = IdempotencyLayer::new(MemoryStore::new()).with_response_limit(32 << 20);
        let (second, effects) = creating(limit(layer.clone()));
        let (first, _) = app(layer, move |_, _| async move { "a".repeat(length) });
        assert_eq!(send(&first, order(KEY)).await.body.len(), length);
        for _ in 0..2 {
            let response = send(&second, order(KEY)).await;
            assert_eq!(response.code(), "store-unavailable");
            assert!(!response.is_retryable());
        }
        assert_eq!(effects.count(), 0);
        1
    })
}

/// The first process has a higher limit, as during a deployment or before a rollback.
#[test]
fn record_above_limit_is_bad_record() {
    let buffered = || replay_above(|it| it.with_max_buffered(100_000, 100_000), 100_000);
    assert_reported(buffered, 2.0, "expected a response of at most 75000 bytes");
    let inflated = || replay_above(|it| it.with_response_limit(4 << 20), 17 << 20);
    let reason = "expected an inflated length of at most 16777216 bytes";
    assert_reported(inflated, 2.0, reason);
}
