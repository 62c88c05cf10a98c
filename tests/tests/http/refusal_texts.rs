//! The sentence of each refusal, in one list. A client reads it, so a change of a text shows in this file.

use std::{num::NonZeroU32, time::Duration};

use axum::{
    body::{Body, Bytes},
    response::{IntoResponse, Response},
};
use http::{HeaderValue, Method, Request, StatusCode};
use serde_json::Value;
use tests::{Scripted, Step, TestResponse, app, created, creating, post, send};
use tower_idempotency::{
    ConfigError, Enforcement, ErrorKind, GrpcMethods, IdempotencyLayer, JsonFingerprint, KeyReuse,
    KeyScope, KeySyntax, Lease, MemoryStore, MissingKey, NeedsAttention, Principal, Rollout, Ttl,
    conformance::FaultInjector,
    inspect::{IdPrefix, PageToken, Seen, State},
    store::KeyId,
    transaction::LeaseExt,
};

use super::errors::{KINDS, refusal};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

fn order() -> Request<Body> {
    post("/orders", "k", "order")
}

fn request_with(header: &'static str, values: &[&'static str]) -> Request<Body> {
    let mut req = order();
    req.headers_mut().remove(header);
    for value in values {
        let value = HeaderValue::from_static(value);
        req.headers_mut().append(header, value);
    }
    req
}

/// Returns the status, the code and the sentence.
fn line(name: &str, response: &TestResponse) -> String {
    let problem: Value = serde_json::from_slice(&response.body).expect("a problem");
    let detail = problem["detail"].as_str().expect("a sentence");
    let code = response.code();
    format!("{} {code} ({name}): {detail}", response.status.as_u16())
}

/// Returns the response to `req` after that to each request in `before`.
async fn last<F, R>(
    layer: IdempotencyLayer,
    before: Vec<Request<Body>>,
    req: Request<Body>,
    handler: impl Fn(Request<Body>) -> F + Clone + Send + Sync + 'static,
) -> TestResponse
where
    F: Future<Output = R> + Send + 'static,
    R: IntoResponse + 'static,
{
    let (app, _) = app(layer, move |_, req| handler(req));
    for req in before {
        send(&app, req).await;
    }
    send(&app, req).await
}

async fn paid(_: Request<Body>) -> StatusCode {
    StatusCode::CREATED
}

async fn open_transaction(req: Request<Body>) -> StatusCode {
    let lease = req.extensions().get::<Lease>().expect("a lease");
    drop(lease.open_transaction());
    StatusCode::CREATED
}

async fn needing_attention(_: Request<Body>) -> Response {
    let mut res = StatusCode::BAD_GATEWAY.into_response();
    res.extensions_mut()
        .insert(NeedsAttention::new("refund-failed"));
    res
}

async fn streaming(_: Request<Body>) -> Response {
    let steps = [Step::from("a"), Step::from("b")];
    let body = Body::new(Scripted::new(steps));
    ([("content-type", "text/event-stream")], body).into_response()
}

async fn unreadable() -> TestResponse {
    let store = FaultInjector::new(MemoryStore::new());
    let (app, _) = creating(IdempotencyLayer::new(store.clone()));
    send(&app, order()).await;
    store.rewrite_records(|_| Bytes::new());
    send(&app, order()).await
}

// S-296
#[tokio::test(start_paused = true)]
async fn refusals_have_these_texts() {
    let mut lines = Vec::new();
    for (kind, ..) in KINDS {
        let (response, _) = refusal(kind, |layer| layer).await;
        lines.push(line("", &response).replace(" ():", ":"));
    }
    let syntax = |syntax| layer().with_key_syntax(syntax);
    let by_service = |key: Option<&'static str>| {
        layer().with_key_from(KeyScope::EachCaller, move |_| key.map(str::to_owned))
    };
    let rate = |n| NonZeroU32::new(n).expect("not 0");
    let key = "idempotency-key";
    let one = || vec![order()];
    let none = Vec::new;
    let missing = by_service(None).with_missing_key(MissingKey::Reject);
    let session = layer().with_principal(Principal::cookie("session"));
    for (name, layer, before, req) in [
        ("of the service", missing, none(), request_with(key, &[])),
        (
            "two headers",
            layer(),
            none(),
            request_with(key, &["a", "b"]),
        ),
        ("empty", layer(), none(), request_with(key, &[""])),
        (
            "strict",
            syntax(KeySyntax::Strict),
            none(),
            request_with(key, &["a"]),
        ),
        (
            "verbatim",
            syntax(KeySyntax::Verbatim),
            none(),
            request_with(key, &["a b"]),
        ),
        (
            "unquoted",
            syntax(KeySyntax::Unquoted),
            none(),
            request_with(key, &["a\tb"]),
        ),
        (
            "control character",
            by_service(Some("a\n")),
            none(),
            order(),
        ),
        ("short", layer().with_key_length(2..=9), none(), order()),
        ("check", layer().with_key_check(|_| false), none(), order()),
        (
            "two headers of the caller",
            layer(),
            none(),
            request_with("authorization", &["a", "b"]),
        ),
        (
            "two cookies",
            session,
            none(),
            request_with("cookie", &["session=a; session=b"]),
        ),
        ("bytes", layer().with_max_buffered(0, 0), none(), order()),
        (
            "rate",
            layer().with_fresh_key_rate(rate(1), rate(1)),
            one(),
            post("/orders", "k2", "order"),
        ),
        (
            "panicked setting",
            layer().with_recorded_statuses(|_| panic!("a faulty setting")),
            one(),
            order(),
        ),
    ] {
        let response = last(layer, before, req, paid).await;
        lines.push(line(name, &response));
    }
    let response = last(layer(), vec![], order(), open_transaction).await;
    lines.push(line("open transaction", &response));
    let response = last(layer(), one(), order(), needing_attention).await;
    lines.push(line("needs attention", &response));
    let response = last(layer(), one(), order(), streaming).await;
    lines.push(line("streamed", &response));
    lines.push(line("record", &unreadable().await));
    let others = [
        ErrorKind::PrincipalAmbiguous,
        ErrorKind::UnfinishedTransaction,
    ];
    for kind in KINDS.map(|(kind, ..)| kind).into_iter().chain(others) {
        let is_listed = |line: &String| line.contains(&format!(" {}", kind.code()));
        assert!(lines.iter().any(is_listed), "{kind:?}");
    }
    insta::assert_snapshot!(lines.join("\n"));
}

/// Returns the code of gRPC and the sentence.
async fn call(body: impl Into<Body>) -> String {
    call_with(Method::POST, "application/grpc", body).await
}

async fn call_with(method: Method, media_type: &'static str, body: impl Into<Body>) -> String {
    let methods = GrpcMethods::all();
    let (app, effects) = app(layer().with_grpc(methods), async |n, _| created(n));
    let mut req = order();
    *req.version_mut() = http::Version::HTTP_2;
    *req.method_mut() = method;
    *req.body_mut() = body.into();
    let media_type = HeaderValue::from_static(media_type);
    req.headers_mut().insert("content-type", media_type);
    let response = send(&app, req).await;
    assert_eq!(effects.count(), 0);
    let code = response.header("grpc-status").expect("a code");
    let message = response.header("grpc-message").expect("a sentence");
    format!("{code}: {message}")
}

#[tokio::test(start_paused = true)]
async fn refusals_of_grpc_have_these_texts() {
    let trailers = Step::Trailers(http::HeaderMap::from_iter([(
        http::header::SERVER,
        HeaderValue::from_static("a"),
    )]));
    let lines = [
        call("").await,
        call("\0\0\0").await,
        call("\x07\0\0\0\0").await,
        call("\0\0\0\0\0\0\0\0\0\0").await,
        call(Body::new(Scripted::new([
            Step::from("\0\0\0\0\0"),
            trailers,
        ])))
        .await,
        call_with(Method::PUT, "application/grpc", "\0\0\0\0\0").await,
        call_with(Method::POST, "application/grpc-web", "\0\0\0\0\0").await,
    ];
    insta::assert_snapshot!(lines.join("\n"));
}

/// Each setter names the value that it expects.
#[test]
fn setters_have_these_texts() {
    let refused = KeyReuse::Refuse(StatusCode::OK);
    let errors: [ConfigError; 6] = [
        layer().with_secret("short").expect_err("a short secret"),
        layer()
            .with_described_by("https://a/>")
            .expect_err("a bracket"),
        layer().with_key_reuse(refused).expect_err("a success"),
        GrpcMethods::only(["Pay"]).expect_err("no path"),
        JsonFingerprint::new()
            .without(["amount"])
            .expect_err("no pointer"),
        Rollout::new(101, Enforcement::Enforce, Enforcement::Off).expect_err("a share"),
    ];
    let lines = errors.map(|error| error.to_string());
    insta::assert_snapshot!(lines.join("\n"));
}

/// Each type that is parsed names the value that it expects. None quotes a text.
#[test]
fn parsed_values_have_these_texts() {
    let lines = [
        Ttl::try_from(Duration::ZERO).unwrap_err().to_string(),
        Ttl::try_from(Duration::MAX).unwrap_err().to_string(),
        "key".parse::<KeyId>().unwrap_err().to_string(),
        "key".parse::<IdPrefix>().unwrap_err().to_string(),
        "key".parse::<State>().unwrap_err().to_string(),
        "key".parse::<Seen>().unwrap_err().to_string(),
        "key".parse::<PageToken>().unwrap_err().to_string(),
    ];
    insta::assert_snapshot!(lines.join("\n"));
}
