//! The gRPC client of Google with the retry policy of a service config. It retries by itself, below the code that calls it.

use std::sync::{Arc, atomic::Ordering};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::post,
};
use http::HeaderMap;
use tests::{Scripted, Step};
use tower_idempotency::{GrpcMethods, IdempotencyLayer, MemoryStore, MissingKey};

use super::{Server, python, run_with};

const PAY: &str = "/payments.v1.Payments/Pay";
const UNAVAILABLE: &str = "14";

/// Pays, with a message that is text in place of Protocol Buffers.
async fn pay(State(server): State<Arc<Server>>, body: Bytes) -> Response {
    let effect = server.effects.fetch_add(1, Ordering::Relaxed) + 1;
    if body.ends_with(b"amount=7") {
        server.begun.notify_one();
        server.conflict.acquire().await.expect("open").forget();
    }
    let text = format!("pi_{effect}");
    let length = u32::try_from(text.len()).expect("a short message");
    let message = [&[0], &length.to_be_bytes()[..], text.as_bytes()].concat();
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().expect("a value"));
    let steps = [Step::Data(message.into()), Step::Trailers(trailers)];
    let body = Body::new(Scripted::new(steps));
    ([("content-type", "application/grpc")], body).into_response()
}

/// Notes each response. The first order ends when another request for it got UNAVAILABLE.
async fn observe(State(server): State<Arc<Server>>, req: Request, next: Next) -> Response {
    let res = next.run(req).await;
    let is_replay = res.headers().contains_key("idempotent-replayed");
    let code = res.headers().get("grpc-status");
    let is_in_progress = code.is_some_and(|code| code == UNAVAILABLE);
    let code = code.map_or(0, |code| {
        code.to_str().expect("text").parse().expect("a code")
    });
    server
        .responses
        .lock()
        .expect("no panic")
        .push((code, is_replay));
    if is_in_progress {
        server.conflict.add_permits(1);
    }
    res
}

#[tokio::test(flavor = "multi_thread")]
async fn grpcio_pays_once_by_its_retry_policy() {
    let server = Server::new();
    let methods = GrpcMethods::only([PAY]).expect("a valid path");
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .with_missing_key(MissingKey::Reject)
        .with_retry_after(std::time::Duration::from_millis(200))
        .with_grpc(methods);
    let app = Router::new()
        .route(PAY, post(pay))
        .layer(layer)
        .layer(middleware::from_fn_with_state(server.clone(), observe))
        .with_state(server.clone());
    let lines = run_with(&server, app, python("grpcio_client.py")).await;
    let expected = [
        (0, "pi_1"),
        (0, "pi_2"),
        (0, "pi_3"),
        (3, "IDEMPOTENCY_KEY_REUSED"),
        (3, "IDEMPOTENCY_MISSING_KEY"),
    ];
    let lines: Vec<_> = lines
        .iter()
        .map(|(code, text)| (*code, text.as_str()))
        .collect();
    assert_eq!(lines, expected);
    assert_eq!(server.effects.load(Ordering::Relaxed), 3);
    let responses = server.responses.lock().expect("no panic");
    let replays = responses.iter().filter(|(_, is_replay)| *is_replay).count();
    assert!(
        replays >= 2 && responses.contains(&(14, false)),
        "{responses:?}"
    );
}
