//! The format of error responses.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Body, response::IntoResponse};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode};
use serde_json::Value;
use tests::{Effects, Scripted, Step, TestResponse, app, created, creating, post, send};
use tower_idempotency::{
    ErrorKind, IdempotencyLayer, KeyReuse, MemoryStore, MissingKey, OrphanPolicy, Principal, Ttl,
    conformance::{Fault, FaultInjector, Operation},
};

const KEY: &str = "secret-key-8e03978e";
const TOKEN: &str = "Bearer secret-token-40d5";
const BODY: &str = "secret-body-43dd";
const ANSWER: &str = "secret-response-bc93";

fn order() -> Request<Body> {
    let mut req = post("/orders?code=secret-query", KEY, BODY);
    req.headers_mut()
        .insert("authorization", HeaderValue::from_static(TOKEN));
    req
}

struct Extension;

/// Provokes a refusal of this kind, on a layer that `with` configures further. Also returns the number of executions
/// during the refused request.
pub(crate) async fn refusal(
    kind: ErrorKind,
    with: impl Fn(IdempotencyLayer) -> IdempotencyLayer,
) -> (TestResponse, u64) {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = with(IdempotencyLayer::new(store.clone()));
    let answering = |layer| app(layer, async |_, _| ANSWER.into_response());
    let sent = async |(app, effects): (Router, Effects), req| {
        let before = effects.count();
        let response = send(&app, req).await;
        (response, effects.count() - before)
    };
    match kind {
        ErrorKind::MissingKey => {
            let mut req = order();
            req.headers_mut().remove("idempotency-key");
            sent(answering(layer.with_missing_key(MissingKey::Reject)), req).await
        }
        ErrorKind::MalformedKey => {
            let mut req = order();
            let malformed = HeaderValue::from_static("secret-key, and another");
            req.headers_mut().insert("idempotency-key", malformed);
            sent(answering(layer), req).await
        }
        ErrorKind::KeyTooLong => sent(answering(layer.with_key_length(1..=5)), order()).await,
        ErrorKind::BodyTooLarge => sent(answering(layer.with_request_limit(5)), order()).await,
        ErrorKind::BodyTimeout => {
            let mut req = order();
            *req.body_mut() = Body::new(Scripted::new([
                Step::from(BODY),
                Step::Wait(Duration::from_secs(60)),
            ]));
            sent(answering(layer), req).await
        }
        ErrorKind::BodyUnreadable => {
            let mut req = order();
            *req.body_mut() = Body::new(Scripted::new([Step::from(BODY), Step::Fail]));
            sent(answering(layer), req).await
        }
        ErrorKind::PrincipalMissing => {
            let principal = Principal::extension(|_: &Extension| [0_u8]);
            sent(answering(layer.with_principal(principal)), order()).await
        }
        ErrorKind::KeyReused => {
            let app = answering(layer);
            send(&app.0, order()).await;
            let mut other = order();
            *other.body_mut() = Body::from("secret-body-2");
            sent(app, other).await
        }
        ErrorKind::InProgress => {
            store.set_fault(Operation::Complete, Fault::CallLost);
            let app = answering(layer);
            send(&app.0, order()).await;
            sent(app, order()).await
        }
        ErrorKind::OutcomeUnknown => {
            store.set_fault(Operation::Complete, Fault::CallLost);
            let app = answering(layer.with_orphan_policy(OrphanPolicy::Refuse));
            send(&app.0, order()).await;
            tokio::time::sleep(Duration::from_secs(60)).await;
            sent(app, order()).await
        }
        ErrorKind::ResponseNotRetained => {
            let app = answering(layer.with_response_limit(5));
            send(&app.0, order()).await;
            sent(app, order()).await
        }
        ErrorKind::StoreUnavailable => {
            store.set_fault(Operation::Acquire, Fault::CallLost);
            sent(answering(layer), order()).await
        }
        ErrorKind::Overloaded => sent(answering(layer.with_max_in_flight(0)), order()).await,
        ErrorKind::CallerLimit => {
            let app = answering(layer.with_max_in_flight(4));
            for n in 0..3 {
                let app = app.0.clone();
                let mut req = order();
                req.headers_mut().insert("idempotency-key", n.into());
                let body = Scripted::new([Step::Wait(Duration::from_secs(20))]);
                *req.body_mut() = Body::new(body);
                tokio::spawn(async move { send(&app, req).await });
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
            sent(app, order()).await
        }
        ErrorKind::Draining => {
            assert!(layer.drain(Duration::ZERO).await);
            sent(answering(layer), order()).await
        }
        other => panic!("a kind without a test: {other:?}"),
    }
}

/// Kind, status, code, `true` if retryable, and `true` if it has `Retry-After`.
pub(crate) const KINDS: [(ErrorKind, u16, &str, bool, bool); 15] = [
    (ErrorKind::MissingKey, 400, "missing-key", false, false),
    (ErrorKind::MalformedKey, 400, "malformed-key", false, false),
    (ErrorKind::KeyTooLong, 400, "key-too-long", false, false),
    (ErrorKind::BodyTooLarge, 413, "body-too-large", false, false),
    (ErrorKind::BodyTimeout, 408, "body-timeout", true, false),
    (
        ErrorKind::BodyUnreadable,
        400,
        "body-unreadable",
        true,
        false,
    ),
    (
        ErrorKind::PrincipalMissing,
        500,
        "principal-missing",
        false,
        false,
    ),
    (ErrorKind::KeyReused, 422, "key-reused", false, false),
    (ErrorKind::InProgress, 409, "in-progress", true, true),
    (
        ErrorKind::OutcomeUnknown,
        409,
        "outcome-unknown",
        false,
        false,
    ),
    (
        ErrorKind::ResponseNotRetained,
        409,
        "response-not-retained",
        false,
        false,
    ),
    (
        ErrorKind::StoreUnavailable,
        503,
        "store-unavailable",
        true,
        true,
    ),
    (ErrorKind::Overloaded, 503, "overloaded", true, true),
    (ErrorKind::CallerLimit, 429, "caller-limit", true, true),
    (ErrorKind::Draining, 503, "draining", true, true),
];

fn members(response: &TestResponse) -> Vec<String> {
    let problem: serde_json::Map<String, Value> =
        serde_json::from_slice(&response.body).expect("a JSON object");
    let mut members: Vec<_> = problem.keys().cloned().collect();
    members.sort_unstable();
    members
}

// S-296
#[tokio::test(start_paused = true)]
async fn every_refusal_has_stable_code() {
    for (kind, status, code, retryable, retry_after) in KINDS {
        let (response, executed) = refusal(kind, |layer| layer).await;
        assert_eq!(response.status, status, "{code}");
        assert_eq!(executed, 0, "{code}");
        assert_eq!(
            response.header("content-type"),
            Some("application/problem+json"),
            "{code}"
        );
        let problem: Value = serde_json::from_slice(&response.body).expect("JSON");
        assert_eq!(problem["code"], code);
        assert_eq!(problem["status"], status, "{code}");
        assert_eq!(problem["retryable"], retryable, "{code}");
        assert_eq!(
            problem["type"],
            format!("urn:tower-idempotency:problem:{code}")
        );
        assert_eq!(problem["title"], kind.title());
        assert!(
            problem["detail"]
                .as_str()
                .is_some_and(|detail| !detail.is_empty())
        );
        let mut all = vec!["code", "detail", "retryable", "status", "title", "type"];
        // The layer knows the entry of a request after it has read key, principal and body.
        let knows_entry = matches!(
            kind,
            ErrorKind::KeyReused
                | ErrorKind::InProgress
                | ErrorKind::OutcomeUnknown
                | ErrorKind::ResponseNotRetained
                | ErrorKind::StoreUnavailable
                | ErrorKind::UnfinishedTransaction
        );
        if knows_entry {
            all.insert(2, "entry");
            let digits = problem["entry"].as_str().expect("digits");
            assert!(digits.len() == 8 && digits.bytes().all(|it| it.is_ascii_hexdigit()));
        }
        assert_eq!(members(&response), all, "{code}");
        assert_eq!(
            response.header("retry-after").is_some(),
            retry_after,
            "{code}"
        );
        assert_eq!(response.header("cache-control"), Some("no-store"), "{code}");
        let link = response.header("link").expect("a link");
        assert!(link.ends_with("; rel=\"describedby\""), "{code} {link}");
        assert!(!response.is_replay(), "{code}");
    }
}

// F-184, S-297
#[tokio::test(start_paused = true)]
async fn refusals_echo_no_request_or_response_data() {
    for (kind, _, code, _, _) in KINDS {
        let (response, _) = refusal(kind, |layer| layer).await;
        assert!(
            !response.text().contains("secret"),
            "{code}: {}",
            response.text()
        );
        let headers = format!("{:?}", response.headers);
        assert!(!headers.contains("secret"), "{code}: {headers}");
    }
}

// S-298
#[tokio::test(start_paused = true)]
async fn no_refusal_is_recorded() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone()).with_request_limit(20);
    let (app, effects) = creating(layer);
    let large = send(&app, post("/orders", "k", "an order that is too large")).await;
    assert_eq!(large.code(), "body-too-large");
    let malformed = send(&app, post("/orders", "a,b", "order")).await;
    assert_eq!(malformed.code(), "malformed-key");
    assert!(store.is_empty());
    let order = send(&app, post("/orders", "k", "order")).await;
    assert_eq!(order.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 1);
}

// S-299
#[tokio::test(start_paused = true)]
async fn refusals_can_be_rendered_by_service() {
    for (kind, status, _, _, retry_after) in KINDS {
        let rendered = Arc::new(Mutex::new(Vec::new()));
        let (response, executed) = refusal(kind, |layer| {
            let rendered = Arc::clone(&rendered);
            layer.with_error_response(move |error| {
                rendered.lock().expect("no panic").push((
                    error.kind(),
                    error.status().as_u16(),
                    error.retry_after().is_some(),
                ));
                assert_eq!(error.to_string(), error.detail());
                let mut res = http::Response::new(Bytes::from("no"));
                *res.status_mut() = StatusCode::IM_A_TEAPOT;
                res.headers_mut()
                    .insert("x-refused", HeaderValue::from_static("yes"));
                res
            })
        })
        .await;
        assert_eq!(response.status, StatusCode::IM_A_TEAPOT, "{kind:?}");
        assert_eq!(response.text(), "no");
        assert_eq!(response.header("x-refused"), Some("yes"));
        assert_eq!(response.header("link"), None, "nothing is added");
        assert_eq!(executed, 0, "{kind:?}");
        let rendered = rendered.lock().expect("no panic").clone();
        assert_eq!(rendered, [(kind, status, retry_after)], "once");
    }
}

// S-300
#[tokio::test(start_paused = true)]
async fn problem_link_is_configurable() {
    let (response, _) = refusal(ErrorKind::MalformedKey, |layer| layer).await;
    let link = response.header("link").expect("a link");
    assert!(link.contains("draft-ietf-httpapi-idempotency-key-header"));
    let (response, executed) = refusal(ErrorKind::MalformedKey, |layer| {
        layer
            .with_described_by("https://example.com/errors")
            .expect("a URL")
    })
    .await;
    let link = "<https://example.com/errors>; rel=\"describedby\"";
    assert_eq!(response.header("link"), Some(link));
    assert_eq!(executed, 0);
}

// F-045, S-301
#[tokio::test(start_paused = true)]
async fn retry_after_is_whole_seconds_rounded_up() {
    for (after, expected) in [
        (Duration::ZERO, "1"),
        (Duration::from_millis(1), "1"),
        (Duration::from_secs(1), "1"),
        (Duration::from_nanos(1_000_000_001), "2"),
        (Duration::from_secs(90), "90"),
    ] {
        let (response, _) =
            refusal(ErrorKind::InProgress, |layer| layer.with_retry_after(after)).await;
        assert_eq!(response.header("retry-after"), Some(expected), "{after:?}");
    }
}

// S-302
#[test]
fn invalid_settings_are_refused_by_setters() {
    let layer = || IdempotencyLayer::new(MemoryStore::new());
    let error = layer().with_secret("short").expect_err("too short");
    assert!(error.to_string().contains("at least 16 bytes"), "{error}");
    assert!(!error.to_string().contains("short"), "{error}");
    for url in ["https://example.com/>", "https://example.com/\r\nx: y"] {
        assert!(layer().with_described_by(url).is_err(), "{url}");
    }
    for status in [200, 303, 503].map(StatusCode::from_u16) {
        let refuse = KeyReuse::Refuse(status.expect("a status"));
        let error = layer().with_key_reuse(refuse).expect_err("not a refusal");
        assert!(error.to_string().contains("4xx"), "{error}");
    }
    for duration in [Duration::ZERO, Duration::MAX] {
        assert!(Ttl::try_from(duration).is_err(), "{duration:?}");
    }
    let shortest = Ttl::try_from(Duration::from_nanos(1)).expect("above zero");
    assert_eq!(shortest, Ttl::MIN, "never rounded to nothing");
}

// S-303
#[tokio::test(start_paused = true)]
async fn empty_settings_are_obeyed() {
    let layer = || IdempotencyLayer::new(MemoryStore::new());
    let (full, effects) = creating(layer().with_max_in_flight(0));
    assert_eq!(send(&full, order()).await.code(), "overloaded");
    assert_eq!(effects.count(), 0);

    let (lower, upper) = (10, 5);
    let (no_length, effects) = creating(layer().with_key_length(lower..=upper));
    for (key, code) in [("1234567", "key-too-long"), ("1", "malformed-key")] {
        let response = send(&no_length, post("/orders", key, "order")).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST);
        assert_eq!(response.code(), code);
    }
    assert_eq!(effects.count(), 0);

    let (no_method, effects) = creating(layer().with_methods([]));
    for _ in 0..2 {
        assert!(!send(&no_method, order()).await.is_replay());
    }
    assert_eq!(effects.count(), 2);
}

// F-045
#[test]
#[should_panic(expected = "at least 1 ms")]
fn zero_lifetime_is_refused() {
    let _ = Ttl::from_secs(0);
}

// S-304
#[tokio::test(start_paused = true)]
async fn draining_layer_refuses_and_waits() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let (app, effects) = app(layer.clone(), async |n, _| {
        tokio::time::sleep(Duration::from_secs(5)).await;
        created(n)
    });
    let running = {
        let app = app.clone();
        tokio::spawn(async move { send(&app, order()).await })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(
        !layer.drain(Duration::from_secs(1)).await,
        "the first request still runs"
    );
    let refused = send(&app, post("/orders", "k2", "order")).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.code(), "draining");
    let unkeyed = Request::post("/orders")
        .body(Body::empty())
        .expect("a request");
    assert_eq!(
        send(&app, unkeyed).await.status,
        StatusCode::CREATED,
        "of the service"
    );
    assert!(layer.drain(Duration::from_secs(10)).await);
    assert_eq!(running.await.expect("no panic").status, StatusCode::CREATED);
    assert_eq!(layer.in_flight(), 0);
    assert_eq!(effects.count(), 2);
}
