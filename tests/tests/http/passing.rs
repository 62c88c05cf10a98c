//! Requests that pass through because of headers that the client sends.

use std::fmt::Write as _;

use axum::{Json, Router, body::Body, extract::Request as AxumRequest, routing::post};
use bytes::Bytes;
use h2::client;
use http::{HeaderValue, Method, Request, StatusCode, Version};
use serde_json::Value;
use tests::{
    Effects, created, creating,
    observed::counted,
    wire::{H1, Server},
};
use tokio::net::TcpStream;
use tower_idempotency::{IdempotencyLayer, KeyScope, MemoryStore, MissingKey};

type Headers = [(&'static str, &'static str)];

const GRPC: &Headers = &[("content-type", "application/grpc")];
const GRPC_PROTO: &Headers = &[("content-type", "Application/gRPC+proto; x=y")];
const GRPC_JSON: &Headers = &[("content-type", "application/grpc+json")];
const UPGRADE: &Headers = &[
    ("connection", "keep-alive, Upgrade"),
    ("upgrade", "example/1"),
];
const UPGRADE_ALONE: &Headers = &[("upgrade", "example/1")];
/// Servers ignore it, because a WebSocket begins with a GET.
const WEBSOCKET: &Headers = &[("connection", "Upgrade"), ("upgrade", "WebSocket")];
const FORMS: [&Headers; 6] = [
    GRPC,
    GRPC_PROTO,
    GRPC_JSON,
    UPGRADE,
    UPGRADE_ALONE,
    WEBSOCKET,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Optional,
    Reject,
    Derive,
    KeyFrom,
}
use Mode::{Derive, KeyFrom, Optional, Reject};

fn layer(mode: Mode) -> IdempotencyLayer {
    layer_at(MemoryStore::new(), mode)
}

fn layer_at(store: MemoryStore, mode: Mode) -> IdempotencyLayer {
    let layer = IdempotencyLayer::new(store);
    match mode {
        Optional => layer,
        Reject => layer.with_missing_key(MissingKey::Reject),
        Derive => layer.with_missing_key(MissingKey::Derive),
        KeyFrom => layer.with_key_from(KeyScope::EachCaller, |head| {
            Some(head.uri.path().to_owned())
        }),
    }
}

/// Returns a service that accepts any body, so that every request has its effect.
fn served(mode: Mode) -> (Router, Effects) {
    let effects = Effects::default();
    (served_by(layer(mode), &effects), effects)
}

fn served_by(layer: IdempotencyLayer, effects: &Effects) -> Router {
    let counted = effects.clone();
    let handler = async move |req: AxumRequest| {
        drop(req);
        created(counted.happen())
    };
    Router::new()
        .route("/orders", post(handler))
        .route_layer(layer)
}

async fn h1(server: &Server, headers: &Headers, key: Option<&str>) -> StatusCode {
    let mut client = H1::connect(server.addr()).await;
    let mut head = "POST /orders HTTP/1.1\r\nhost: test\r\ncontent-length: 2\r\n".to_owned();
    for (name, value) in headers {
        write!(head, "{name}: {value}\r\n").expect("a string");
    }
    if let Some(key) = key {
        write!(head, "idempotency-key: {key}\r\n").expect("a string");
    }
    client.send(format!("{head}\r\n{{}}")).await;
    client.response().await.expect("an answer").status
}

async fn h2(server: &Server, headers: &Headers, key: Option<&str>) -> StatusCode {
    let stream = TcpStream::connect(server.addr()).await.expect("a server");
    let (client, connection) = client::handshake(stream).await.expect("HTTP/2");
    tokio::spawn(connection);
    let mut req = Request::post("http://test/orders");
    for (name, value) in headers {
        req = req.header(*name, *value);
    }
    if let Some(key) = key {
        req = req.header("idempotency-key", key);
    }
    let mut client = client.ready().await.expect("a connection");
    let req = req.body(()).expect("a request");
    let (response, mut body) = client.send_request(req, false).expect("a stream");
    body.send_data(Bytes::from_static(b"{}"), true)
        .expect("a stream");
    response.await.expect("an answer").status()
}

/// Sends a request with a key over a real socket, and asserts that it succeeds.
async fn send_order(server: &Server, version: Version, headers: &Headers) {
    let status = if version == Version::HTTP_2 {
        h2(server, headers, Some("k")).await
    } else {
        h1(server, headers, Some("k")).await
    };
    assert_eq!(status, StatusCode::CREATED, "{headers:?}");
}

/// Returns the executions of two equal requests with a key.
async fn executions(mode: Mode, version: Version, headers: &Headers) -> u64 {
    let (app, effects) = served(mode);
    let server = Server::start(app).await;
    for _ in 0..2 {
        send_order(&server, version, headers).await;
    }
    effects.count()
}

// S-908
#[tokio::test]
async fn only_real_upgrade_and_real_grpc_pass() {
    for headers in FORMS {
        let is_upgrade = headers == UPGRADE;
        let passed = if is_upgrade { 2 } else { 1 };
        assert_eq!(
            executions(Optional, Version::HTTP_11, headers).await,
            passed,
            "{headers:?}"
        );
    }
    for headers in [GRPC, GRPC_PROTO, GRPC_JSON] {
        let passed = if headers == GRPC_JSON { 1 } else { 2 };
        assert_eq!(
            executions(Optional, Version::HTTP_2, headers).await,
            passed,
            "{headers:?}"
        );
    }
}

// S-027
#[tokio::test(start_paused = true)]
async fn grpc_over_http_3_passes() {
    for (version, expected) in [(Version::HTTP_11, 1), (Version::HTTP_3, 2)] {
        let (app, effects) = served(Optional);
        for _ in 0..2 {
            let mut req = tests::post("/orders", "k", "{}");
            *req.version_mut() = version;
            let value = HeaderValue::from_static("application/grpc");
            req.headers_mut().insert("content-type", value);
            tests::send(&app, req).await;
        }
        assert_eq!(effects.count(), expected, "{version:?}");
    }
}

// F-900, S-909
#[tokio::test]
async fn required_key_lets_nothing_pass() {
    for mode in [Reject, Derive, KeyFrom] {
        for headers in FORMS {
            let found = executions(mode, Version::HTTP_11, headers).await;
            assert_eq!(found, 1, "{mode:?} {headers:?}");
        }
        for headers in [GRPC, GRPC_PROTO, GRPC_JSON] {
            let found = executions(mode, Version::HTTP_2, headers).await;
            assert_eq!(found, 1, "{mode:?} {headers:?} over HTTP/2");
        }
    }
    let (app, effects) = served(Reject);
    let server = Server::start(app).await;
    for headers in FORMS {
        assert_eq!(h1(&server, headers, None).await, StatusCode::BAD_REQUEST);
    }
    for headers in [GRPC, GRPC_PROTO, GRPC_JSON] {
        assert_eq!(h2(&server, headers, None).await, StatusCode::BAD_REQUEST);
    }
    assert_eq!(effects.count(), 0);
}

// S-065
/// The two processes share a store, and their settings differ during a deployment.
#[tokio::test]
async fn optional_key_lets_recorded_requests_pass() {
    for mode in [Reject, Derive] {
        for (version, headers, passes) in [
            (Version::HTTP_2, GRPC, true),
            (Version::HTTP_11, UPGRADE, true),
            (Version::HTTP_11, GRPC, false),
        ] {
            let (store, effects) = (MemoryStore::new(), Effects::default());
            let start = async |mode| {
                let layer = layer_at(store.clone(), mode);
                Server::start(served_by(layer, &effects)).await
            };
            let (covering, passing) = (start(mode).await, start(Optional).await);
            let counts = [
                (&covering, 1),
                (&covering, 1),
                (&passing, if passes { 2 } else { 1 }),
            ];
            for (server, count) in counts {
                send_order(server, version, headers).await;
                assert_eq!(effects.count(), count, "{mode:?} {headers:?}");
            }
        }
    }
}

/// Returns a service that extracts JSON.
fn accepting_json() -> (Router, Effects) {
    let effects = Effects::default();
    let counted = effects.clone();
    let handler = async move |Json(_): Json<Value>| created(counted.happen());
    (Router::new().route("/orders", post(handler)), effects)
}

// S-910
#[tokio::test(start_paused = true)]
async fn json_media_types_never_pass() {
    let mut accepted = 0;
    for media_type in [
        "application/json",
        "application/grpc+json",
        "APPLICATION/GRPC+JSON",
        "application/grpc+proto+json; charset=utf-8",
        "application/grpc-web+json",
        "application/grpcx+json",
        "application/grpc ; +json",
    ] {
        let request = || {
            let mut req = tests::post("/orders", "k", "{}");
            *req.version_mut() = Version::HTTP_2;
            let value = HeaderValue::from_static(media_type);
            req.headers_mut().insert("content-type", value);
            req
        };
        let (unprotected, _) = accepting_json();
        let without_layer = tests::send(&unprotected, request()).await;
        let (routes, effects) = accepting_json();
        let app = routes.route_layer(layer(Optional));
        let first = tests::send(&app, request()).await;
        assert_eq!(first.status, without_layer.status, "{media_type}");
        let retry = tests::send(&app, request()).await;
        assert_eq!(retry.status, first.status, "{media_type}");
        if first.status == StatusCode::CREATED {
            accepted += 1;
            assert!(retry.is_replay(), "{media_type}");
            assert_eq!(effects.count(), 1, "{media_type}");
        } else {
            assert_eq!(effects.count(), 0, "{media_type}");
        }
    }
    assert!(accepted >= 2, "{accepted} media types are accepted");
}

// S-911
#[test]
fn passed_requests_with_key_are_counted() {
    let request = |method: Method, version: Version, headers: &Headers| {
        let mut req = tests::post("/orders", "k", "order");
        *req.method_mut() = method;
        *req.version_mut() = version;
        for (name, value) in headers {
            let value = HeaderValue::from_static(value);
            req.headers_mut().insert(*name, value);
        }
        req
    };
    let metrics = counted(async {
        let (app, _) = creating(layer(Optional).with_skip(|head| head.uri.path() == "/skipped"));
        let pass = async |req: Request<Body>| drop(tests::send(&app, req).await);
        pass(request(Method::POST, Version::HTTP_11, UPGRADE)).await;
        pass(request(Method::POST, Version::HTTP_2, GRPC)).await;
        pass(request(Method::CONNECT, Version::HTTP_11, &[])).await;
        pass(request(Method::GET, Version::HTTP_11, &[])).await;
        pass(request(Method::HEAD, Version::HTTP_11, &[])).await;
        pass(tests::post("/skipped", "k", "order")).await;
        let mut keyless = request(Method::GET, Version::HTTP_11, &[]);
        keyless.headers_mut().remove("idempotency-key");
        pass(keyless).await;
        pass(tests::post("/orders", "k", "order")).await;
    });
    let passed = "idempotency_passed_through_total";
    let found: Vec<(&str, f64)> = metrics
        .iter()
        .filter_map(|(name, count)| Some((name.strip_prefix(passed)?, *count)))
        .collect();
    let expected = [
        ("{reason=connect}", 1.0),
        ("{reason=grpc}", 1.0),
        ("{reason=method}", 2.0),
        ("{reason=skip}", 1.0),
        ("{reason=upgrade}", 1.0),
    ];
    assert_eq!(found, expected);
}
