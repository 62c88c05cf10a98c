//! Data on the server that its readers can see.

use axum::{Router, http::header, routing::post};
use bytes::Bytes;
use http::HeaderValue;
use tests::{
    secrets::{assert_only_digests_stored, needs_attention},
    send,
    servers::redis::RedisServer,
};
use tower_idempotency::IdempotencyLayer;

use crate::faults::node::connect;

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

// F-185
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_holds_no_secret_in_clear() {
    let server = RedisServer::start(&[]);
    let layer = IdempotencyLayer::new(connect(&server.url()).await);
    let attention = post(async || needs_attention());
    assert_only_digests_stored(layer, attention, async || everything(&server)).await;
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
