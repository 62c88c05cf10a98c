//! Effect and record in one transaction: the interface for stores with transactions, on a ledger in memory.

mod committed;
mod expired;
mod failed;
mod nested;
mod not_committed;
mod records;
mod unfinished;
mod unknown;

use std::{future::Future, time::Duration};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::{Request, StatusCode};
use metrics_util::debugging::DebuggingRecorder;
use tests::{
    Effects, TestResponse, app, created,
    ledger::{Failed, Ledger},
    observed::{read, total},
    post, send,
};
use tower_idempotency::{IdempotencyLayer, Lease, store::StoreError};

/// Returns a service on the ledger. The handler gets the ledger, its lease and the number of its execution.
pub(super) fn bank<H, F>(ledger: &Ledger, handler: H) -> (Router, Effects)
where
    H: FnOnce(Ledger, Lease, u64) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response> + Send + 'static,
{
    behind(IdempotencyLayer::new(ledger.clone()), ledger, handler)
}

pub(super) fn behind<H, F>(
    layer: IdempotencyLayer,
    ledger: &Ledger,
    handler: H,
) -> (Router, Effects)
where
    H: FnOnce(Ledger, Lease, u64) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response> + Send + 'static,
{
    let ledger = ledger.clone();
    app(layer, move |n, req| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        handler.clone()(ledger.clone(), lease, n)
    })
}

/// Charges, and responds with 201.
pub(super) async fn charge(ledger: Ledger, lease: Lease, n: u64) -> Response {
    commit(&ledger, &lease, n, created(n)).await
}

/// Writes a row, and commits it with the response.
pub(super) async fn commit(ledger: &Ledger, lease: &Lease, n: u64, res: Response) -> Response {
    let mut tx = ledger.begin();
    tx.insert(format!("charge {n}"));
    match tx.commit(lease, res).await {
        Ok(res) => res.into_response(),
        Err(Failed::NotRecordable(res)) => (*res).into_response(),
        Err(Failed::Store(error)) => failed(&error),
    }
}

pub(super) fn failed(error: &StoreError) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
}

pub(super) fn order() -> Request<Body> {
    post("/orders", "k", "{}")
}

/// Returns a request whose key the layer derives.
pub(super) fn keyless() -> Request<Body> {
    let req = Request::post("/orders").header("authorization", "a");
    req.body(Body::from("{}")).expect("a request")
}

pub(super) fn leases_lost(recorder: &DebuggingRecorder) -> f64 {
    total(&read(recorder), "idempotency_lease_lost_total")
}

/// Checks that the effect happened once, and that retries get its record without another effect.
pub(super) async fn assert_charged_once(ledger: &Ledger, app: &Router) {
    for _ in 0..2 {
        let retry = send(app, order()).await;
        assert_eq!(retry.status, StatusCode::CREATED);
        assert!(retry.is_replay(), "{retry:?}");
        assert_eq!(retry.text(), "{\"execution\":1}");
    }
    assert_eq!(ledger.rows().await, ["charge 1"]);
}

pub(super) fn first_of(response: &TestResponse) {
    assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
    assert_eq!(response.text(), "{\"execution\":1}");
}

/// Asserts that the outcome is unknown, and that the response is retryable if `later` is set.
pub(super) fn assert_unknown(response: &TestResponse, later: bool) {
    assert_eq!(response.code(), "outcome-unknown", "{response:?}");
    assert_eq!(response.is_retryable(), later, "{response:?}");
    assert_eq!(
        response.header("retry-after").is_some(),
        later,
        "{response:?}"
    );
}

pub(super) const LONG: Duration = Duration::from_secs(600);
