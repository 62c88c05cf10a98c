//! The texts of the errors of `run_once`, of batches and of unreadable records, with their sources. Operators read them.

use std::{
    convert::Infallible,
    error::Error as StdError,
    iter::successors,
    sync::{Arc, Mutex},
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Request, Response, request};
use tests::{app, created, post, send};
use tower_idempotency::{
    IdempotencyLayer, Lease, MemoryStore,
    conformance::{Fault, FaultInjector, Operation},
    items::{Item, Items},
    run_once::WorkError,
};

const KEY: &str = "message-42";

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

fn order() -> Request<Body> {
    let mut req = post("/orders", "k", "order");
    let alice = HeaderValue::from_static("alice");
    req.headers_mut().insert("authorization", alice);
    req
}

fn head() -> request::Parts {
    order().into_parts().0
}

/// Returns the texts of the error and of its sources.
fn texts(error: &(dyn StdError + 'static)) -> String {
    let errors = successors(Some(error), |&error| error.source());
    let texts: Vec<_> = errors.map(ToString::to_string).collect();
    texts.join(" / ")
}

/// Returns the texts of the error of a `run_once` of a number.
async fn run_once_error(layer: &IdempotencyLayer) -> String {
    let work = async |_lease| Ok::<_, WorkError<Infallible>>(7_u32);
    let error = layer.run_once(KEY, "invoice 7", work).await;
    texts(&error.expect_err("an error"))
}

// ---- The store ----

#[tokio::test(start_paused = true)]
async fn failed_store_has_these_texts() {
    let mut lines = Vec::new();
    for fault in [Fault::CallLost, Fault::HangCall, Fault::Panic] {
        let store = FaultInjector::new(MemoryStore::new());
        store.set_fault(Operation::Acquire, fault);
        lines.push(run_once_error(&IdempotencyLayer::new(store)).await);
    }
    insta::assert_snapshot!(lines.join("\n"));
}

// ---- Records ----

/// Returns the record of a response under the ID of the `run_once`.
fn response_record(_: Bytes) -> Bytes {
    let layer = layer();
    let id = layer.run_once_key_id(KEY);
    layer.encode_response_record(&id, &Response::new(Bytes::from("paid")))
}

/// Returns the record of a value under the ID of the request.
fn value_record(_: Bytes) -> Bytes {
    let layer = layer();
    let id = layer.key_id(&head(), b"order").expect("a valid request");
    layer.encode_value_record(&id.expect("a key"), &7)
}

fn empty_record(_: Bytes) -> Bytes {
    Bytes::new()
}

#[tokio::test(start_paused = true)]
async fn unreadable_value_has_these_texts() {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = IdempotencyLayer::new(store.clone());
    let work = async |_lease| Ok::<_, WorkError<Infallible>>("paid".to_owned());
    let _ = layer
        .run_once(KEY, "invoice 7", work)
        .await
        .expect("it runs");
    let mut lines = vec![run_once_error(&layer).await];
    for rewrite in [response_record, empty_record] {
        store.rewrite_records(rewrite);
        lines.push(run_once_error(&layer).await);
    }
    insta::assert_snapshot!(lines.join("\n"));
}

#[tokio::test(start_paused = true)]
async fn unreadable_response_has_these_texts() {
    let store = FaultInjector::new(MemoryStore::new());
    let lines = Arc::new(Mutex::new(Vec::new()));
    let of_layer = Arc::clone(&lines);
    let layer = IdempotencyLayer::new(store.clone()).with_error_response(move |error| {
        of_layer.lock().expect("no panic").push(texts(error));
        Response::new(Bytes::new())
    });
    let (app, effects) = app(layer, async |n, _| created(n));
    send(&app, order()).await;
    for rewrite in [value_record, empty_record] {
        store.rewrite_records(rewrite);
        send(&app, order()).await;
    }
    assert_eq!(effects.count(), 1);
    let lines = lines.lock().expect("no panic").join("\n");
    insta::assert_snapshot!(lines);
}

// ---- Batches ----

/// Returns the texts of the errors in the results of a batch.
async fn batch_errors(items: &Items, keys: &[&str]) -> Vec<String> {
    let batch = keys.iter().map(|key| Item::new(*key, *key, ()));
    let work = async |(), _lease: Lease| Ok::<_, WorkError<Infallible>>("a receipt".to_owned());
    match items.run(batch.collect(), work).await {
        Ok(results) => {
            let errors = results.iter().filter_map(|result| result.error());
            errors.map(|error| texts(error)).collect()
        }
        Err(error) => vec![texts(&error)],
    }
}

#[tokio::test(start_paused = true)]
async fn batches_have_these_texts() {
    let of = |layer: &IdempotencyLayer| layer.items(&head()).expect("a principal");
    let mut lines = batch_errors(&of(&layer()).with_max_items(2), &["a", "b", "c"]).await;

    let layer = layer().with_response_limit(5);
    assert!(batch_errors(&of(&layer), &["a"]).await.is_empty());
    lines.extend(batch_errors(&of(&layer), &["a"]).await);

    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Acquire, Fault::HangCall);
    let items = of(&IdempotencyLayer::new(store)).with_concurrency(1);
    lines.extend(batch_errors(&items, &["a", "b"]).await);

    lines.push(other_principal_error().await);
    insta::assert_snapshot!(lines.join("\n"));
}

/// Returns the text of the error of a batch whose head has lost the credentials of the request.
async fn other_principal_error() -> String {
    let layer = layer();
    let of_handler = layer.clone();
    let (app, _) = app(layer, move |_, req| {
        let layer = of_handler.clone();
        async move {
            let mut head = req.into_parts().0;
            head.headers.remove("authorization");
            texts(&layer.items(&head).expect_err("another principal"))
        }
    });
    send(&app, order()).await.text().to_owned()
}
