//! The preset `Acp`: section 6 of the RFC "Agentic Checkout" of the Agentic Commerce Protocol, and section 5 of "Delegate
//! Payment".

use axum::{Router, body::Body, response::IntoResponse};
use http::{HeaderValue, Request, StatusCode};
use serde_json::Value;
use tests::{
    Effects, TestResponse, app,
    barrier::{Barrier, bounded},
    created, send,
};
use tower_idempotency::{
    FingerprintBy, IdempotencyLayer, JsonFingerprint, MemoryStore, Preset,
    conformance::{Fault, FaultInjector},
};

const SESSIONS: &str = "/checkout_sessions";

fn acp() -> IdempotencyLayer {
    IdempotencyLayer::with_preset(MemoryStore::new(), Preset::Acp)
}

fn creating() -> (Router, Effects) {
    app(acp(), async |n, _| created(n))
}

fn request(path: &str, key: Option<&str>, body: &str) -> Request<Body> {
    let mut req = Request::post(path)
        .header("authorization", "Bearer agent")
        .header("content-type", "application/json")
        .body(Body::from(body.to_owned()))
        .expect("a valid request");
    if let Some(key) = key {
        let key = HeaderValue::from_str(key).expect("a header");
        req.headers_mut().insert("idempotency-key", key);
    }
    req
}

/// Asserts that the response is an error in the flat form of the protocol, whose schema permits no other members.
#[track_caller]
fn assert_error(response: &TestResponse, status: u16, error_type: &str, code: &str) {
    assert_eq!(response.status, status, "{response:?}");
    assert_eq!(response.header("content-type"), Some("application/json"));
    let body: Value = serde_json::from_slice(&response.body).expect("JSON");
    let members: Vec<_> = body.as_object().expect("an object").keys().collect();
    assert_eq!(members, ["code", "message", "type"]);
    assert!(
        body["message"]
            .as_str()
            .is_some_and(|text| !text.is_empty())
    );
    assert_eq!(
        (&body["type"], &body["code"]),
        (&error_type.into(), &code.into())
    );
}

// S-948
#[tokio::test(start_paused = true)]
async fn missing_key_is_required() {
    let (app, effects) = creating();
    let response = send(&app, request(SESSIONS, None, "{}")).await;
    assert_error(
        &response,
        400,
        "invalid_request",
        "idempotency_key_required",
    );
    assert_eq!(response.header("idempotency-key"), None);
    assert_eq!(effects.count(), 0);
    let get = Request::get(SESSIONS).body(Body::empty()).expect("valid");
    assert_eq!(send(&app, get).await.status, 201);
}

// S-949
#[tokio::test(start_paused = true)]
async fn key_is_opaque_and_at_most_255_long() {
    let (app, effects) = creating();
    let longest = "k".repeat(255);
    for key in ["idk_abc123", "\"quoted\"", "a,b;c=1", &longest] {
        let response = send(&app, request(SESSIONS, Some(key), "{}")).await;
        assert_eq!(
            (response.status.as_u16(), response.header("idempotency-key")),
            (201, Some(key))
        );
    }
    assert_eq!(effects.count(), 4);
    let too_long = format!("{longest}k");
    let response = send(&app, request(SESSIONS, Some(&too_long), "{}")).await;
    assert_error(&response, 400, "invalid_request", "key_too_long");
    assert_eq!(response.header("idempotency-key"), None);
    // Two opaque strings, although another syntax takes them for one.
    send(&app, request(SESSIONS, Some("quoted"), "{}")).await;
    assert_eq!(effects.count(), 5);
}

// S-927, S-950
#[tokio::test(start_paused = true)]
async fn same_key_on_other_endpoint_is_other_key() {
    let (app, effects) = creating();
    let paths = [
        SESSIONS,
        "/checkout_sessions/1",
        "/checkout_sessions/1/complete",
        "/checkout_sessions/2/complete",
    ];
    for path in paths {
        assert!(
            !send(&app, request(path, Some("k"), "{}")).await.is_replay(),
            "{path}"
        );
    }
    for path in paths {
        assert!(
            send(&app, request(path, Some("k"), "{}")).await.is_replay(),
            "{path}"
        );
    }
    assert_eq!(effects.count(), 4);
    let mut other_agent = request(SESSIONS, Some("k"), "{}");
    let token = HeaderValue::from_static("Bearer other agent");
    other_agent.headers_mut().insert("authorization", token);
    assert!(!send(&app, other_agent).await.is_replay());
    assert_eq!(effects.count(), 5);
}

// S-924, S-926, S-951
#[tokio::test(start_paused = true)]
async fn equal_json_is_same_request() {
    let (app, effects) = creating();
    let first = r#"{"items":[{"id":"a","quantity":1}],"total":100}"#;
    let equal = [
        r#"{"total":100.0,"items":[{"quantity":1.00,"id":"a"}]}"#,
        "{ \"total\" : 1e2, \"items\" : [ { \"id\" : \"\\u0061\", \"quantity\" : 10e-1 } ] }",
    ];
    let other = [
        r#"{"items":[{"id":"a","quantity":1}],"total":100,"coupon":null}"#,
        r#"{"items":[{"id":"a","quantity":1}],"total":"100"}"#,
        r#"{"items":[{"id":"a","quantity":1}],"total":100.01}"#,
        r#"{"items":[{"id":"a","quantity":1}],"total":100,"Total":1}"#,
        r#"{"items":[{"id":"a","quantity":1}],"total":1,"total":100}"#,
        r#"{"items":[],"total":100}"#,
        "",
        "{",
    ];
    let response = send(&app, request(SESSIONS, Some("k"), first)).await;
    for body in equal {
        let retry = send(&app, request(SESSIONS, Some("k"), body)).await;
        assert!(retry.is_replay(), "{body}");
        assert_eq!(
            (retry.status, &retry.body),
            (response.status, &response.body)
        );
        assert_eq!(retry.header("idempotency-key"), Some("k"));
    }
    for body in other {
        let refused = send(&app, request(SESSIONS, Some("k"), body)).await;
        assert_error(&refused, 422, "invalid_request", "idempotency_conflict");
        assert_eq!(refused.header("idempotency-key"), Some("k"));
    }
    assert_eq!(effects.count(), 1);
}

// S-952
#[tokio::test(start_paused = true)]
async fn duplicate_in_flight_gets_retry_after() {
    bounded(async {
        let barrier = Barrier::closed();
        let held = barrier.clone();
        let (app, effects) = app(acp(), move |n, _| {
            let held = held.clone();
            async move {
                held.pass().await;
                created(n)
            }
        });
        let first = {
            let app = app.clone();
            tokio::spawn(async move { send(&app, request(SESSIONS, Some("k"), "{}")).await })
        };
        barrier.arrival().await;
        let refused = send(&app, request(SESSIONS, Some("k"), "{}")).await;
        assert_error(&refused, 409, "invalid_request", "idempotency_in_flight");
        assert_eq!(refused.header("retry-after"), Some("1"));
        barrier.open_for_good();
        assert_eq!(first.await.expect("no panic").status, 201);
        assert_eq!(effects.count(), 1);
    })
    .await;
}

// S-953
#[tokio::test(start_paused = true)]
async fn server_errors_are_not_recorded() {
    for status in [500, 502, 503, 599] {
        let (app, effects) = app(acp(), move |n, _| async move {
            match n {
                1 => StatusCode::from_u16(status)
                    .expect("a status")
                    .into_response(),
                n => created(n),
            }
        });
        let first = send(&app, request(SESSIONS, Some("k"), "{}")).await;
        assert_eq!(first.header("idempotency-key"), Some("k"));
        let retry = send(&app, request(SESSIONS, Some("k"), "{}")).await;
        assert_eq!(
            (retry.status.as_u16(), effects.count()),
            (201, 2),
            "{status}"
        );
    }
}

// S-954
#[tokio::test(start_paused = true)]
async fn other_errors_have_types_of_protocol() {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = IdempotencyLayer::with_preset(store.clone(), Preset::Acp);
    let (app, effects) = app(layer.clone(), async |n, _| created(n));
    store.set_fault_for_all(&Fault::CallLost);
    let response = send(&app, request(SESSIONS, Some("k"), "{}")).await;
    assert_error(&response, 503, "service_unavailable", "store_unavailable");
    assert!(response.header("retry-after").is_some());
    store.clear_faults();
    let large = "1".repeat(3 * 1024 * 1024);
    let response = send(&app, request(SESSIONS, Some("l"), &large)).await;
    assert_error(&response, 413, "invalid_request", "body_too_large");
    layer.drain(std::time::Duration::from_secs(60)).await;
    let response = send(&app, request(SESSIONS, Some("m"), "{}")).await;
    assert_error(&response, 503, "service_unavailable", "draining");
    assert_eq!(effects.count(), 0);
}

// S-955
#[tokio::test(start_paused = true)]
async fn echo_replaces_header_of_handler() {
    for is_on in [true, false] {
        let layer = IdempotencyLayer::new(MemoryStore::new()).with_key_echo(is_on);
        let (app, effects) = app(layer, async |_, _| [("idempotency-key", "of the handler")]);
        let expected = if is_on { "k" } else { "of the handler" };
        for is_replay in [false, true] {
            let response = send(&app, request("/", Some("k"), "")).await;
            assert_eq!(response.header("idempotency-key"), Some(expected));
            assert_eq!(response.is_replay(), is_replay);
            if is_on {
                assert!(response.headers["idempotency-key"].is_sensitive());
            }
        }
        assert_eq!(effects.count(), 1);
        // A request that passes through the layer is unchanged.
        let get = Request::get("/")
            .header("idempotency-key", "k")
            .body(Body::empty());
        let response = send(&app, get.expect("valid")).await;
        assert_eq!(response.header("idempotency-key"), Some("of the handler"));
    }
}

// S-955
#[tokio::test(start_paused = true)]
async fn rejected_key_is_not_echoed() {
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .with_key_echo(true)
        .with_key_check(|key| key != "k");
    let (app, effects) = app(layer, async |n, _| created(n));
    let response = send(&app, request("/", Some("k"), "")).await;
    assert_eq!(response.status, 400);
    assert_eq!(response.header("idempotency-key"), None);
    assert_eq!(effects.count(), 0);
}

// S-925
#[tokio::test(start_paused = true)]
async fn members_without_influence_do_not_count() {
    let by = JsonFingerprint::new()
        .without(["/id", "/params/_meta"])
        .expect("valid pointers");
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_fingerprint(FingerprintBy::json(by));
    let (app, effects) = app(layer, async |n, _| created(n));
    let call = |id: u64, amount: &str| {
        let body =
            format!(r#"{{"id":{id},"params":{{"amount":{amount},"_meta":{{"token":{id}}}}}}}"#);
        request("/", Some("k"), &body)
    };
    send(&app, call(1, "7")).await;
    assert!(send(&app, call(2, "7")).await.is_replay());
    assert_eq!(send(&app, call(1, "8")).await.status, 422);
    // Numbers keep their spelling.
    assert_eq!(send(&app, call(1, "7.0")).await.status, 422);
    assert_eq!(effects.count(), 1);
}

// S-925
/// A client of JSON-RPC discards a response with another id than that of its request, so it must not be left out.
#[tokio::test(start_paused = true)]
async fn replay_repeats_id_of_first_attempt() {
    let by = JsonFingerprint::new()
        .without(["/id"])
        .expect("a valid pointer");
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_fingerprint(FingerprintBy::json(by));
    let (app, effects) = app(layer, async |_, req: Request<Body>| {
        let body = axum::body::to_bytes(req.into_body(), 99).await;
        body.expect("a body")
    });
    for id in [1, 2] {
        let call = request("/", Some("k"), &format!(r#"{{"id":{id}}}"#));
        assert_eq!(send(&app, call).await.text(), r#"{"id":1}"#);
    }
    assert_eq!(effects.count(), 1);
}
