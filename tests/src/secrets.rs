//! Requests with secrets, and a search for them in the data of a store.

use axum::{
    Extension, Router,
    body::Body,
    response::{IntoResponse, Response},
    routing::{MethodRouter, post},
};
use http::{Request, StatusCode};
use tower_idempotency::{IdempotencyLayer, NeedsAttention, Principal};

use crate::{barrier::Barrier, send};

const KEY: &str = "raw-key-8e03978e";
const TOKEN: &str = "raw-token-40d5c1";
const BODY: &str = "raw-body-43dd77";
const QUERY: &str = "raw-query-bc9310";
const COOKIE: &str = "raw-cookie-1f00";
/// The store must not contain any of these.
const SECRETS: [&str; 7] = [KEY, TOKEN, BODY, QUERY, COOKIE, "Bearer", "raw-"];
/// The responses are stored in the clear by design, for operators and for replays.
const RESPONSE: &str = "the response of orders";
const CODE: &str = "refund-failed";

fn request(path: &str, key: &str) -> Request<Body> {
    let req = Request::post(format!("{path}?code={QUERY}"))
        .header("idempotency-key", key)
        .header("authorization", format!("Bearer {TOKEN}"))
        .header("cookie", format!("sid={COOKIE}"))
        .body(Body::from(format!("{{\"card\":\"{BODY}\"}}")));
    req.expect("a valid request")
}

/// Returns the response of a handler whose execution needs attention.
#[must_use]
pub fn needs_attention() -> Response {
    let attention = NeedsAttention::new(CODE).with_reason("the provider is down");
    (StatusCode::BAD_GATEWAY, Extension(attention)).into_response()
}

/// Checks that the store contains only digests of keys, credentials and bodies. Sends requests with such secrets: one is
/// completed, one needs attention, and one is in progress.
///
/// `attention` is the handler that returns [`needs_attention`], and `read` returns all data of the store. Returns the data
/// at the end.
///
/// # Panics
///
/// Panics if the store contains a secret, or lacks a response.
pub async fn assert_only_digests_stored(
    layer: IdempotencyLayer,
    attention: MethodRouter,
    read: impl AsyncFn() -> Vec<u8>,
) -> Vec<u8> {
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let slow = async move || {
        held.pass().await;
        "slow"
    };
    let both = Principal::authorization().and(Principal::cookie("sid"));
    let layer = layer
        .with_principal(both)
        .with_compression_above(usize::MAX);
    let app = Router::new()
        .route("/orders", post(async || (StatusCode::CREATED, RESPONSE)))
        .route("/refunds", attention)
        .route("/slow", post(slow))
        .layer(layer);

    let first = send(&app, request("/orders", KEY)).await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    assert!(send(&app, request("/orders", KEY)).await.is_replay());
    let refund = send(&app, request("/refunds", &format!("\"{KEY}-2\""))).await;
    assert_eq!(refund.status, StatusCode::BAD_GATEWAY, "{refund:?}");
    let running = tokio::spawn({
        let app = app.clone();
        async move { send(&app, request("/slow", &format!("{KEY}-3"))).await }
    });
    barrier.arrival().await;
    assert_hidden(&read().await);
    barrier.open_for_good();
    assert_eq!(running.await.expect("no panic").text(), "slow");
    let data = read().await;
    assert_hidden(&data);
    data
}

fn assert_hidden(data: &[u8]) {
    for secret in SECRETS {
        assert!(!contains(data, secret), "{secret} is in the store");
    }
    for stored in [RESPONSE, CODE] {
        assert!(contains(data, stored), "{stored} is not in the store");
    }
}

/// Returns `true` if the data has this text, in the clear or in hexadecimal digits.
#[must_use]
pub fn contains(data: &[u8], text: &str) -> bool {
    let digits: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    let forms = [text.to_owned(), digits.to_uppercase(), digits];
    forms
        .iter()
        .any(|form| data.windows(form.len()).any(|part| part == form.as_bytes()))
}
