//! Single deposits.

use std::path::Path;

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode},
};
use embedded::{Bank, app};
use tests::{TestResponse, scratch::Scratch, send};
use tower_idempotency::{IdempotencyLayer, MissingKey};

use crate::totals::Totals;

#[tokio::test]
async fn deposit_is_made_once_and_replayed() {
    let scratch = Scratch::new();
    let file = scratch.file("bank.db");
    let first = deposit(&file, "k").await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    assert_eq!(first.text(), r#"{"balance":500,"deposit":1}"#);
    // This bank was closed and opened again.
    let retry = deposit(&file, "k").await;
    assert!(retry.is_replay(), "{retry:?}");
    assert_eq!(retry.body, first.body);
    let other = deposit(&file, "l").await;
    assert_eq!(other.text(), r#"{"balance":1000,"deposit":2}"#);
    let totals = Totals::open(&file).await;
    assert_eq!(totals.deposits["ann"], 2);
    assert_eq!(totals.balances["ann"], 1000);
}

#[tokio::test]
async fn deposit_without_key_is_refused() {
    let scratch = Scratch::new();
    let app = bank(&scratch.file("bank.db")).await;
    let response = send(&app, request(None)).await;
    assert_eq!(response.status, StatusCode::BAD_REQUEST, "{response:?}");
    let req = Request::get("/accounts/ann").body(Body::empty());
    let response = send(&app, req.expect("a request")).await;
    assert_eq!(response.text(), r#"{"balance":0}"#);
}

/// A client that obeys a 503 would retry without end.
#[tokio::test]
async fn impossible_deposits_are_refused_finally() {
    let scratch = Scratch::new();
    let file = scratch.file("bank.db");
    let app = bank(&file).await;
    let deposits = ["0", "-500", "9223372036854775807"].map(|cents| {
        let deposit = format!(r#""account":"ann","cents":{cents}"#);
        let batch = format!(r#"[{{"key":"1",{deposit}}}]"#);
        [
            ("/deposits", format!("{{{deposit}}}")),
            ("/deposits/batch", batch),
        ]
    });
    for (n, (path, body)) in deposits.into_iter().flatten().enumerate() {
        for is_replay in [false, true] {
            let req = Request::post(path)
                .header("idempotency-key", format!("key-{n}"))
                .header("content-type", "application/json")
                .body(Body::from(body.clone()));
            let response = send(&app, req.expect("a request")).await;
            assert_eq!(response.status, StatusCode::UNPROCESSABLE_ENTITY, "{body}");
            assert_eq!(response.is_replay(), is_replay, "{response:?}");
        }
    }
    assert!(Totals::open(&file).await.deposits.is_empty());
}

async fn deposit(file: &Path, key: &str) -> TestResponse {
    send(&bank(file).await, request(Some(key))).await
}

async fn bank(file: &Path) -> Router {
    let bank = Bank::open(file).await.expect("a file");
    let layer = IdempotencyLayer::new(bank.store.clone()).with_missing_key(MissingKey::Reject);
    app(bank, layer)
}

fn request(key: Option<&str>) -> Request<Body> {
    let mut req = Request::post("/deposits").header("content-type", "application/json");
    if let Some(key) = key {
        req = req.header("idempotency-key", key);
    }
    let req = req.body(r#"{"account":"ann","cents":500}"#.into());
    req.expect("a request")
}
