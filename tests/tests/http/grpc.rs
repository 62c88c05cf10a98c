//! gRPC calls without a server: one layer for HTTP and gRPC, counters, warnings, and handlers that break the rules of gRPC.
//!
//! The tests with the server and the client of tonic are those of `examples/grpc`.

use std::time::Duration;

use axum::{
    Extension, Router,
    body::Body,
    extract::Request,
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Version};
use http_body_util::BodyExt;
use tests::{
    Effects, Scripted, Step, app, creating,
    observed::{counted, observed},
    send,
};
use tower::ServiceExt;
use tower_idempotency::{
    Enforcement, GrpcMethods, IdempotencyLayer, KeyScope, Lease, MemoryStore, MissingKey,
    NeedsAttention, OrphanPolicy, Ttl,
    inspect::{Inspect, Resolution},
    transaction::LeaseExt,
};

const PAY: &str = "/payments.v1.Payments/Pay";
const MESSAGE: &str = "\0\0\0\0\x02\x10\x05";

fn layer() -> IdempotencyLayer {
    let methods = GrpcMethods::only([PAY]).expect("a valid path");
    IdempotencyLayer::new(MemoryStore::new()).with_grpc(methods)
}

fn call(path: &str, key: Option<&str>, body: impl Into<Body>) -> Request {
    let mut req = Request::post(path)
        .version(Version::HTTP_2)
        .header("content-type", "application/grpc");
    if let Some(key) = key {
        req = req.header("idempotency-key", key);
    }
    req.body(body.into()).expect("a valid request")
}

fn status(code: &str) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", code.parse().expect("a value"));
    trailers.insert("x-sum", "7".parse().expect("a value"));
    trailers
}

/// Returns a response of these messages, and a status in the trailers.
fn response(messages: &[&'static str], trailers: Option<HeaderMap>) -> Response {
    let mut steps: Vec<_> = messages
        .iter()
        .map(|message| Step::from(*message))
        .collect();
    steps.extend(trailers.map(Step::Trailers));
    let headers = [("content-type", "application/grpc"), ("x-receipt", "r")];
    (headers, Body::new(Scripted::new(steps))).into_response()
}

/// Returns the code in the trailers or in the headers, and the number of bytes before them.
async fn outcome(app: &Router, req: Request) -> (Option<String>, usize) {
    let Ok(res) = app.clone().oneshot(req).await;
    let (head, body) = res.into_parts();
    let body = body.collect().await.expect("a whole body");
    let trailers = body.trailers().cloned().unwrap_or_default();
    let code = trailers
        .get("grpc-status")
        .or_else(|| head.headers.get("grpc-status"));
    let code = code.map(|code| code.to_str().expect("text").to_owned());
    (code, body.to_bytes().len())
}

async fn code(app: &Router, req: Request) -> String {
    outcome(app, req).await.0.expect("a status")
}

// F-880
#[tokio::test(start_paused = true)]
async fn media_type_of_grpc_does_not_open_http_routes() {
    let effects = Effects::default();
    let counted = effects.clone();
    let handler = async move |req: Request| {
        drop(req);
        counted.happen();
        StatusCode::CREATED
    };
    let required = layer().with_missing_key(MissingKey::Reject);
    let app = Router::new()
        .route("/orders", post(handler.clone()))
        .route("/orders/{id}", post(handler.clone()))
        .layer(required);
    for path in ["/orders", "/orders/7"] {
        let without_key = send(&app, call(path, None, MESSAGE)).await;
        assert_eq!(without_key.status, StatusCode::BAD_REQUEST);
        assert_eq!(without_key.code(), "missing-key");
        for _ in 0..2 {
            let with_key = send(&app, call(path, Some(path), MESSAGE)).await;
            assert_eq!(with_key.status, StatusCode::CREATED);
        }
    }
    assert_eq!(effects.count(), 2);
    // With all methods the request is a gRPC call, and the response is recorded by its status.
    for status in [StatusCode::OK, StatusCode::CREATED, StatusCode::NO_CONTENT] {
        let all = IdempotencyLayer::new(MemoryStore::new()).with_grpc(GrpcMethods::all());
        let (app, effects) = tests::app(all, move |_, _| async move { status });
        for _ in 0..2 {
            let response = send(&app, call("/orders/7/refund", Some("k"), "\0\0\0\0\0")).await;
            assert_eq!(response.status, status);
        }
        assert_eq!(effects.count(), 1, "{status}");
    }
}

/// Operators find the entry of a call by its head.
#[tokio::test(start_paused = true)]
async fn protected_call_has_key_id() {
    let layer = layer();
    let id_of = |req: Request, layer: &IdempotencyLayer| {
        let head = req.into_parts().0;
        layer.key_id(&head, b"").expect("a valid request")
    };
    let protected = id_of(call(PAY, Some("k"), ""), &layer);
    assert!(protected.is_some());
    assert_eq!(
        id_of(call("/payments.v1.Payments/List", Some("k"), ""), &layer),
        None
    );
    let skipping = layer.with_skip(|_| true);
    assert_eq!(id_of(call(PAY, Some("k"), ""), &skipping), None);
}

// F-880
/// Names with capital letters make the path of a route that of a gRPC method.
#[tokio::test(start_paused = true)]
async fn json_of_grpc_does_not_open_capital_routes() {
    let path = "/Orders/Create";
    let methods = || GrpcMethods::only([PAY]).expect("a valid path");
    let layer = || IdempotencyLayer::new(MemoryStore::new()).with_grpc(methods());
    let rejecting = layer().with_missing_key(MissingKey::Reject);
    let deriving = layer().with_missing_key(MissingKey::Derive);
    let naming = layer().with_key_from(KeyScope::EachCaller, |_| Some("k".to_owned()));
    for (layer, expected) in [(rejecting, 0), (deriving, 1), (naming, 1)] {
        for media_type in [
            "application/grpc+json",
            "application/grpc+JSON; charset=utf-8",
            "application/grpc-web+json",
            "application/grpcx",
        ] {
            let (app, effects) = app(layer.clone(), async |_, _| StatusCode::CREATED);
            for _ in 0..2 {
                let mut req = call(path, None, media_type);
                let value = media_type.parse().expect("a media type");
                req.headers_mut().insert("content-type", value);
                send(&app, req).await;
            }
            assert!(effects.count() <= expected, "{media_type}");
        }
        let (app, effects) = app(layer, async |_, _| StatusCode::CREATED);
        send(&app, call(path, None, MESSAGE)).await;
        assert_eq!(effects.count(), 1, "a call of another method passes");
    }
}

// S-897
/// The server would add the trailers to the metadata, and the fingerprint does not contain them.
#[tokio::test(start_paused = true)]
async fn request_trailers_are_rejected() {
    let (app, effects) = app(layer(), async |_, _| {
        response(&[MESSAGE], Some(status("0")))
    });
    let with_trailers = |trailers| {
        let steps = vec![Step::from(MESSAGE), Step::Trailers(trailers)];
        Body::new(Scripted::new(steps))
    };
    let tenant = HeaderMap::from_iter([(
        HeaderName::from_static("x-tenant-id"),
        HeaderValue::from_static("b"),
    )]);
    let rejected = call(PAY, Some("k"), with_trailers(tenant));
    assert_eq!(code(&app, rejected).await, "3");
    assert_eq!(effects.count(), 0);
    let empty = call(PAY, Some("k"), with_trailers(HeaderMap::new()));
    assert_eq!(code(&app, empty).await, "0");
    assert_eq!(effects.count(), 1);
}

// S-898
#[tokio::test(start_paused = true)]
async fn code_decides_before_number_of_lines() {
    let lines = |code: &str| {
        let mut lines = status(code);
        for _ in 0..200 {
            lines.append("x-detail", HeaderValue::from_static("d"));
        }
        lines
    };
    for (code_of_handler, retry) in [("14", "14"), ("0", "9")] {
        for is_in_trailers in [true, false] {
            let (app, effects) = app(layer(), move |_, _| async move {
                if is_in_trailers {
                    return response(&[MESSAGE], Some(lines(code_of_handler)));
                }
                let mut res = response(&[], None);
                res.headers_mut().extend(lines(code_of_handler));
                res
            });
            let first = code(&app, call(PAY, Some("k"), MESSAGE)).await;
            let second = code(&app, call(PAY, Some("k"), MESSAGE)).await;
            assert_eq!((&*first, &*second), (code_of_handler, retry));
            assert_eq!(effects.count(), if retry == "14" { 2 } else { 1 });
        }
    }
}

/// A response without an end after its first message is no stream of several messages.
#[test]
fn stalled_response_is_no_stream() {
    let (app, effects) = app(layer(), async |_, _| {
        let steps = vec![Step::from(MESSAGE), Step::Wait(Duration::from_secs(60))];
        let headers = [("content-type", "application/grpc")];
        (headers, Body::new(Scripted::new(steps))).into_response()
    });
    let metrics = counted(async {
        outcome(&app, call(PAY, Some("k"), MESSAGE)).await;
        assert_eq!(code(&app, call(PAY, Some("k"), MESSAGE)).await, "9");
    });
    assert_eq!(effects.count(), 1);
    let streams = metrics.keys().filter(|name| name.contains("grpc_streams"));
    assert_eq!(streams.count(), 0, "{metrics:?}");
}

// S-880
#[tokio::test(start_paused = true)]
async fn other_methods_pass_although_key_is_required() {
    let required = layer().with_missing_key(MissingKey::Reject);
    let (app, effects) = app(required, async |_, _| {
        response(&[MESSAGE], Some(status("0")))
    });
    for key in [None, Some("k"), Some("k")] {
        let other = call("/payments.v1.Payments/Read", key, MESSAGE);
        assert_eq!(code(&app, other).await, "0");
    }
    assert_eq!(effects.count(), 3);
    assert_eq!(code(&app, call(PAY, None, MESSAGE)).await, "3");
    assert_eq!(effects.count(), 3);
}

// F-881
#[tokio::test(start_paused = true)]
async fn http_requests_keep_their_rules() {
    let (app, effects) = creating(layer());
    for _ in 0..2 {
        let response = send(&app, tests::post(PAY, "k", "{}")).await;
        assert_eq!(response.status, StatusCode::CREATED);
    }
    assert_eq!(effects.count(), 1);
    let other = send(&app, tests::post(PAY, "k", "{ }")).await;
    assert_eq!(
        (other.status, other.code().as_str()),
        (StatusCode::UNPROCESSABLE_ENTITY, "key-reused")
    );
}

// F-882
#[tokio::test(start_paused = true)]
async fn response_without_status_frees_key_or_is_orphan() {
    for (policy, executions, last) in [
        (OrphanPolicy::TakeOver, 2, None),
        (OrphanPolicy::Refuse, 1, Some("9")),
    ] {
        let (app, effects) = app(layer().with_orphan_policy(policy), async |_, _| {
            response(&[MESSAGE], None)
        });
        assert_eq!(
            outcome(&app, call(PAY, Some("k"), MESSAGE)).await,
            (None, 7)
        );
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        let (code, _) = outcome(&app, call(PAY, Some("k"), MESSAGE)).await;
        assert_eq!((code.as_deref(), effects.count()), (last, executions));
    }
}

/// A proxy or a layer inside of this one responds without gRPC.
#[tokio::test(start_paused = true)]
async fn response_without_grpc_is_recorded_by_status() {
    for (status, executions) in [
        (503, 2),
        (429, 2),
        (401, 2),
        (500, 2),
        (400, 1),
        (403, 2),
        (404, 1),
    ] {
        let status = StatusCode::from_u16(status).expect("a status");
        let (app, effects) = app(layer(), move |_, _| async move { status });
        for _ in 0..2 {
            assert_eq!(
                send(&app, call(PAY, Some("k"), MESSAGE)).await.status,
                status
            );
        }
        assert_eq!(effects.count(), executions, "{status}");
    }
}

/// The status of HTTP decides, also if the response cannot be recorded.
#[tokio::test(start_paused = true)]
async fn stream_without_grpc_is_judged_by_status() {
    for (status, executions, retry) in [(503, 2, "503"), (200, 1, "9")] {
        let status = StatusCode::from_u16(status).expect("a status");
        let (app, effects) = app(layer(), move |_, _| async move {
            let headers = [("content-type", "text/event-stream")];
            (status, headers, "data: down\n\n").into_response()
        });
        let first = send(&app, call(PAY, Some("k"), MESSAGE)).await;
        assert_eq!(first.status, status);
        let second = send(&app, call(PAY, Some("k"), MESSAGE)).await;
        let code = second.headers.get("grpc-status");
        let code = code.map_or(second.status.as_str(), |code| code.to_str().expect("text"));
        assert_eq!((code, effects.count()), (retry, executions), "{status}");
    }
}

// S-881
#[tokio::test(start_paused = true)]
async fn replay_has_status_whatever_is_replayed() {
    let layer = layer().with_replayed_headers(|_| false);
    let (app, effects) = app(layer, async |_, _| response(&[MESSAGE], Some(status("5"))));
    for _ in 0..2 {
        let (code, bytes) = outcome(&app, call(PAY, Some("k"), MESSAGE)).await;
        assert_eq!((code.as_deref(), bytes), (Some("5"), 7));
    }
    assert_eq!(effects.count(), 1);
}

// S-881
/// An operator completes an entry that needs attention. The other headers of the layer have their own rule.
#[tokio::test(start_paused = true)]
async fn record_of_operator_has_status_whatever_is_replayed() {
    let store = MemoryStore::new();
    let methods = GrpcMethods::only([PAY]).expect("a valid path");
    let layer = IdempotencyLayer::new(store.clone()).with_grpc(methods);
    let layer = layer.with_replayed_headers(|_| false);
    let (app, effects) = app(layer.clone(), async |_, _| {
        Extension(NeedsAttention::new("no-reply")).into_response()
    });
    send(&app, call(PAY, Some("k"), MESSAGE)).await;
    let (head, ()) = call(PAY, Some("k"), "").map(drop).into_parts();
    let id = layer
        .key_id(&head, b"")
        .expect("a valid key")
        .expect("a key");
    let decided = http::Response::builder()
        .header("content-type", "application/grpc")
        .header("grpc-status", "9")
        .header("x-receipt", "r");
    let decided = decided.body(Bytes::new()).expect("a response");
    let record = layer.encode_response_record(&id, &decided);
    let retention = Ttl::from_secs(60);
    let found = store.get(&id).await.expect("memory does not fail");
    let entry = found.expect("an entry").entry;
    let complete = Resolution::Complete { record, retention };
    let resolved = store.resolve(entry.seen(), &complete).await;
    assert!(resolved.expect("memory does not fail").is_applied());
    let retry = send(&app, call(PAY, Some("k"), MESSAGE)).await;
    assert_eq!(retry.header("grpc-status"), Some("9"), "{retry:?}");
    assert_eq!(retry.header("content-type"), Some("application/grpc"));
    assert_eq!(retry.header("x-receipt"), None);
    assert_eq!(effects.count(), 1);
}

// S-882
#[tokio::test(start_paused = true)]
async fn open_transaction_makes_ok_internal() {
    for (of_handler, expected, executions) in [("0", "13", 2), ("9", "9", 1), ("14", "14", 2)] {
        let (app, effects) = app(layer(), move |_, req| async move {
            let lease = req.extensions().get::<Lease>().expect("a lease");
            std::mem::forget(lease.open_transaction());
            response(&[MESSAGE], Some(status(of_handler)))
        });
        for _ in 0..2 {
            assert_eq!(code(&app, call(PAY, Some("k"), MESSAGE)).await, expected);
        }
        assert_eq!(effects.count(), executions, "{of_handler}");
    }
}

// F-883
#[test]
fn streams_are_counted_and_reported_once() {
    let (metrics, log) = observed("warn", async {
        let (app, effects) = app(layer(), async |_, _| {
            response(&[MESSAGE, MESSAGE], Some(status("0")))
        });
        for key in ["a", "b"] {
            let two = format!("{MESSAGE}{MESSAGE}");
            assert_eq!(code(&app, call(PAY, Some(key), two)).await, "3");
            assert_eq!(
                outcome(&app, call(PAY, Some(key), MESSAGE)).await,
                (Some("0".to_owned()), 14)
            );
            assert_eq!(code(&app, call(PAY, Some(key), MESSAGE)).await, "9");
        }
        assert_eq!(effects.count(), 2);
    });
    let streams = |side| metrics[&format!("idempotency_grpc_streams_total{{side={side}}}")];
    assert_eq!((streams("request"), streams("response")), (2.0, 2.0));
    assert_eq!(metrics["idempotency_refused_total{code=not-unary}"], 2.0);
    assert_eq!(
        metrics["idempotency_tombstones_total{reason=streamed}"],
        2.0
    );
    assert_eq!(
        log.matches("several messages in a protected gRPC call")
            .count(),
        2,
        "{log}"
    );
}

// F-884
#[test]
fn calls_that_pass_are_counted_and_reported_once() {
    let (metrics, log) = observed("warn", async {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let (app, effects) = app(layer, async |_, _| response(&[MESSAGE], Some(status("0"))));
        for _ in 0..3 {
            assert_eq!(code(&app, call(PAY, Some("k"), MESSAGE)).await, "0");
        }
        assert_eq!(effects.count(), 3);
    });
    assert_eq!(
        metrics["idempotency_passed_through_total{reason=grpc}"],
        3.0
    );
    assert_eq!(
        log.matches("gRPC call with a key passed through").count(),
        1,
        "{log}"
    );

    let metrics = counted(async {
        let (app, _) = app(layer(), async |_, _| {
            response(&[MESSAGE], Some(status("0")))
        });
        for key in [None, Some("k")] {
            let read = call("/payments.v1.Payments/Read", key, MESSAGE);
            assert_eq!(code(&app, read).await, "0");
        }
        for key in [None, Some("k")] {
            assert_eq!(code(&app, call(PAY, key, MESSAGE)).await, "0");
        }
    });
    assert_eq!(
        metrics["idempotency_passed_through_total{reason=grpc}"],
        1.0
    );
    assert_eq!(
        metrics["idempotency_unsafe_requests_total{coverage=grpc}"],
        2.0
    );
    assert_eq!(
        metrics["idempotency_unsafe_requests_total{coverage=no_key}"],
        1.0
    );
    assert_eq!(
        metrics["idempotency_unsafe_requests_total{coverage=keyed}"],
        1.0
    );
}

// S-883
#[test]
fn observation_does_not_judge_calls() {
    let metrics = counted(async {
        let layer = layer().with_enforcement(Enforcement::Observe);
        let (app, effects) = app(layer, async |_, _| response(&[MESSAGE], Some(status("0"))));
        for _ in 0..2 {
            assert_eq!(code(&app, call(PAY, Some("k"), MESSAGE)).await, "0");
        }
        assert_eq!(effects.count(), 2);
    });
    assert_eq!(
        metrics["idempotency_observed_total{outcome=not_judged}"],
        2.0
    );
}
