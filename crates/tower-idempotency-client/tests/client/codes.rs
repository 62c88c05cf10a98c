//! Codes in the bodies of responses, and the server that they come from.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{Body, IdempotencyLayer, MemoryStore, Preset};
use tower_idempotency_client::{IdempotencyKeyLayer, Operation, Outcome, Protocol, RetryLayer};

use crate::{
    harness::{Server, post, reply, send, status},
    verdicts::json,
};

/// A handler may send such a code after its effect, or forward that of another service.
#[tokio::test(start_paused = true)]
async fn foreign_code_in_5xx_leaves_outcome_unknown() {
    let problem = [("content-type", "application/problem+json")];
    let foreign = r#"{"type":"https://shop.example/overloaded","code":"overloaded"}"#;
    let after = [("retry-after", "1")];
    for failure in [
        json(503, &[], r#"{"error":{"code":"overloaded"}}"#),
        json(
            500,
            &[],
            r#"{"error":{"type":"api_error","code":"lock_timeout"}}"#,
        ),
        json(
            500,
            &[],
            r#"{"error":{"type":"server_error","code":"draining"}}"#,
        ),
        json(503, &after, r#"{"error":{"code":"store-unavailable"}}"#),
        json(500, &[], r#"{"code":"idempotency_conflict"}"#),
        reply(503, &problem, foreign),
    ] {
        let server = Server::new([failure.clone()]);
        let call = send(&RetryLayer::new(), &server).await;
        assert_eq!(server.take_log().len(), 3, "{failure:?}");
        assert_eq!(call.outcome(), Outcome::Unknown, "{failure:?}");
    }
}

fn handle(_: Request<Body<Full<Bytes>>>) -> Ready<Result<Response<Full<Bytes>>, Infallible>> {
    ready(Ok(Response::default()))
}

/// The client knows the form of a 5xx of each preset. That of idempo has no code.
#[tokio::test(start_paused = true)]
async fn draining_server_of_each_preset_executes_nothing() {
    for (preset, protocol) in [
        (Preset::Recommended, Protocol::TowerIdempotency),
        (Preset::Ietf, Protocol::Ietf),
        (Preset::Stripe, Protocol::Stripe),
        (Preset::Acp, Protocol::Acp),
    ] {
        let server = IdempotencyLayer::with_preset(MemoryStore::new(), preset);
        assert!(server.drain(Duration::from_secs(1)).await);
        let operation = Operation::new();
        let mut req = post("one espresso");
        req.extensions_mut().insert(operation.clone());
        let keys = IdempotencyKeyLayer::new().with_protocol(protocol);
        let client = RetryLayer::new().with_keys(keys);
        let client = client.layer(server.layer(service_fn(handle)));
        let res = client.oneshot(req).await.unwrap();
        assert_eq!(res.status(), 503, "{preset:?}");
        assert_eq!(operation.outcome(), Outcome::NotExecuted, "{preset:?}");
    }
}

/// Gateways label all JSON with one media type.
#[tokio::test(start_paused = true)]
async fn problem_of_layer_counts_as_plain_json() {
    let body = r#"{"type":"urn:tower-idempotency:problem:in-progress","code":"in-progress"}"#;
    let in_progress = json(409, &[("retry-after", "1")], body);
    let server = Server::new([in_progress.clone(), status(201)]);
    let call = send(&RetryLayer::new(), &server).await;
    assert_eq!(
        (call.status(), call.outcome()),
        (Some(201), Outcome::Definite)
    );
    let layer = RetryLayer::new().with_deadline(Duration::from_millis(1));
    let call = send(&layer, &Server::new([in_progress])).await;
    assert_eq!(
        (call.status(), call.outcome()),
        (Some(409), Outcome::Unknown)
    );
}
