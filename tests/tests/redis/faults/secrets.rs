//! Data on the server that its readers can see.

use axum::{Router, body::Body, http::header, routing::post};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode};
use tests::{barrier::Barrier, send, servers::redis::RedisServer};
use tower_idempotency::IdempotencyLayer;

use crate::faults::node::connect;

const KEY: &str = "raw-key-8e03978e";
const TOKEN: &str = "raw-token-40d5c1";
const BODY: &str = "raw-body-43dd77";
const QUERY: &str = "raw-query-bc9310";
const COOKIE: &str = "raw-cookie-1f00";

fn request(path: &str, key: &str) -> Request<Body> {
    let req = Request::post(format!("{path}?code={QUERY}"))
        .header("idempotency-key", key)
        .header("authorization", format!("Bearer {TOKEN}"))
        .header("cookie", format!("sid={COOKIE}"))
        .body(Body::from(format!("{{\"card\":\"{BODY}\"}}")));
    req.expect("a valid request")
}

/// Returns all data on the server.
fn everything(server: &RedisServer) -> Vec<u8> {
    let mut all = Vec::new();
    let keys = server.list(&["KEYS", "*"]);
    assert!(!keys.is_empty());
    for key in keys {
        let is_index = key.contains(&b'~');
        let read: &[&[u8]] = match is_index {
            true => &[b"ZRANGE", &key, b"0", b"-1"],
            false => &[b"HGETALL", &key],
        };
        for part in server.list(read) {
            all.extend(part);
            all.push(b'\n');
        }
        all.extend(key);
        all.push(b'\n');
    }
    all
}

fn contains(all: &[u8], secret: &str) -> bool {
    all.windows(secret.len())
        .any(|part| part == secret.as_bytes())
}

// F-185
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_holds_no_secret_in_clear() {
    let server = RedisServer::start(&[]);
    let layer = IdempotencyLayer::new(connect(&server.url()).await);
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let orders = async || (StatusCode::CREATED, "the response of orders");
    let slow = async move || {
        held.pass().await;
        "slow"
    };
    let app = Router::new()
        .route("/orders", post(orders))
        .route("/slow", post(slow))
        .layer(layer);
    send(&app, request("/orders", KEY)).await;
    assert!(send(&app, request("/orders", KEY)).await.is_replay());
    send(&app, request("/orders", &format!("\"{KEY}-2\""))).await;
    let running = tokio::spawn({
        let app = app.clone();
        async move { send(&app, request("/slow", &format!("{KEY}-3"))).await }
    });
    barrier.arrival().await;
    assert_hidden(&server);
    barrier.open_for_good();
    assert_eq!(running.await.unwrap().text(), "slow");
    assert_hidden(&server);
}

fn assert_hidden(server: &RedisServer) {
    let all = everything(server);
    for secret in [KEY, TOKEN, BODY, QUERY, COOKIE, "Bearer", "raw-"] {
        assert!(!contains(&all, secret), "{secret} is on the server");
    }
    // The response is stored in the clear by design, for operators and for replays.
    assert!(contains(&all, "the response of orders"));
}

// F-138
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replay_preserves_every_byte_value() {
    let server = RedisServer::start(&[]);
    let all: Bytes = (0..=255).cycle().take(70_001).collect::<Vec<u8>>().into();
    let response = all.clone();
    let handler = async move || {
        let latin = HeaderValue::from_bytes(b"caf\xe9").unwrap();
        ([(header::ETAG, latin)], response)
    };
    let layer = IdempotencyLayer::new(connect(&server.url()).await).with_compression_above(1 << 30);
    let app = Router::new().route("/", post(handler)).layer(layer);
    let first = send(&app, tests::post("/", "k", all.clone())).await;
    let replay = send(&app, tests::post("/", "k", all.clone())).await;
    assert!(replay.is_replay());
    assert_eq!((&replay.body, &first.body), (&all, &all));
    assert_eq!(replay.headers["etag"].as_bytes(), b"caf\xe9");
}
