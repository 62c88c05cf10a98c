//! Coverage of requests by method and settings.

use axum::{Router, body::Body, routing::any};
use http::{Method, Request, StatusCode};
use tests::{Effects, created, creating, post, send};
use tower_idempotency::{
    IdempotencyLayer, KeyReuse, MemoryStore, MissingKey, Ttl, conformance::FaultInjector,
};

fn request(method: &str, path: &str, body: &'static str) -> Request<Body> {
    Request::builder()
        .method(method)
        .uri(path)
        .header("idempotency-key", "k")
        .body(Body::from(body))
        .expect("a valid request")
}

/// Returns the number of executions of two equal requests, and `true` if the store was called.
async fn executed(
    make: impl Fn(IdempotencyLayer) -> IdempotencyLayer,
    method: &str,
) -> (u64, bool) {
    let store = FaultInjector::new(MemoryStore::new());
    let (app, effects) = creating(make(IdempotencyLayer::new(store.clone())));
    let first = send(&app, request(method, "/orders", "order")).await;
    let second = send(&app, request(method, "/orders", "order")).await;
    assert_eq!(first.status, StatusCode::CREATED, "{method}");
    assert_eq!(second.status, StatusCode::CREATED, "{method}");
    assert!(!first.is_replay(), "{method}");
    assert_eq!(second.is_replay(), effects.count() == 1, "{method}");
    (effects.count(), store.all_calls() > 0)
}

const BYPASSED: (u64, bool) = (2, false);
const PROTECTED: (u64, bool) = (1, true);

// F-064, S-023
#[tokio::test(start_paused = true)]
async fn safe_methods_bypass_store() {
    for method in [
        "GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "PROPFIND", "REPORT", "SEARCH",
    ] {
        assert_eq!(executed(|layer| layer, method).await, BYPASSED, "{method}");
    }
}

// S-024
#[tokio::test(start_paused = true)]
async fn every_unsafe_method_is_executed_once() {
    for method in [
        "POST",
        "PATCH",
        "PUT",
        "DELETE",
        "PURGE",
        "PROPPATCH",
        "post",
    ] {
        assert_eq!(executed(|layer| layer, method).await, PROTECTED, "{method}");
    }
}

// S-025
#[tokio::test(start_paused = true)]
async fn protected_methods_are_configurable() {
    for (method, expected) in [("POST", BYPASSED), ("PUT", PROTECTED), ("DELETE", BYPASSED)] {
        let listed = executed(|layer| layer.with_methods([Method::PUT]), method).await;
        assert_eq!(listed, expected, "{method}");
        let none = executed(|layer| layer.with_methods([]), method).await;
        assert_eq!(none, BYPASSED, "{method}");
        let decided = executed(
            |layer| layer.with_methods_where(|method| method.as_str().starts_with("PU")),
            method,
        )
        .await;
        assert_eq!(decided, expected, "{method}");
    }
}

// F-083, S-026
#[tokio::test(start_paused = true)]
async fn head_and_connect_always_pass() {
    for method in ["HEAD", "CONNECT"] {
        let found = executed(|layer| layer.with_methods_where(|_| true), method).await;
        assert_eq!(found, BYPASSED, "{method}");
    }
    let get = executed(|layer| layer.with_methods([Method::GET]), "GET").await;
    assert_eq!(get, PROTECTED);
}

// S-029
#[tokio::test(start_paused = true)]
async fn skipped_request_bypasses_store() {
    assert_eq!(
        executed(|layer| layer.with_skip(|_| true), "POST").await,
        BYPASSED
    );
    assert_eq!(
        executed(|layer| layer.with_skip(|_| false), "POST").await,
        PROTECTED
    );
    let required = |layer: IdempotencyLayer| {
        layer
            .with_missing_key(MissingKey::Reject)
            .with_skip(|head| head.headers.contains_key("idempotency-key"))
    };
    assert_eq!(executed(required, "POST").await, BYPASSED);
}

// S-030
#[tokio::test(start_paused = true)]
async fn uncovered_route_runs_each_time() {
    let (opted_in, other) = (Effects::default(), Effects::default());
    let counted = |effects: &Effects| {
        let effects = effects.clone();
        any(async move || created(effects.happen()))
    };
    let store = FaultInjector::new(MemoryStore::new());
    let app = Router::new()
        .route("/opted-in", counted(&opted_in))
        .route_layer(IdempotencyLayer::new(store.clone()))
        .route("/other", counted(&other));
    for _ in 0..2 {
        send(&app, request("POST", "/other", "order")).await;
    }
    assert_eq!(other.count(), 2);
    assert_eq!(store.all_calls(), 0);
    for _ in 0..2 {
        send(&app, request("POST", "/opted-in", "order")).await;
    }
    assert_eq!(opted_in.count(), 1);
}

// S-031
#[tokio::test(start_paused = true)]
async fn exempted_route_needs_no_key() {
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .with_missing_key(MissingKey::Reject)
        .with_skip(|head| head.uri.path() == "/webhooks");
    let (app, effects) = creating(layer);
    let keyless = |path| Request::post(path).body(Body::empty()).expect("a request");
    assert_eq!(
        send(&app, keyless("/webhooks")).await.status,
        StatusCode::CREATED
    );
    assert_eq!(
        send(&app, keyless("/orders")).await.status,
        StatusCode::BAD_REQUEST
    );
    assert_eq!(effects.count(), 1);
}

// S-032
#[tokio::test(start_paused = true)]
async fn each_route_obeys_its_own_decisions_on_one_store() {
    let effects = Effects::default();
    let handler = {
        let effects = effects.clone();
        move || {
            let effects = effects.clone();
            any(async move || created(effects.happen()))
        }
    };
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let brief = layer
        .clone()
        .with_retention(Ttl::from_secs(10))
        .with_key_reuse(KeyReuse::Refuse(StatusCode::CONFLICT))
        .expect("a 4xx");
    let app = Router::new()
        .route("/long", handler())
        .route_layer(layer)
        .merge(Router::new().route("/brief", handler()).route_layer(brief));

    let keyed = |path, key, body| post(path, key, body);
    for (path, key) in [("/long", "l"), ("/brief", "b")] {
        assert!(!send(&app, keyed(path, key, "1")).await.is_replay());
        assert!(send(&app, keyed(path, key, "1")).await.is_replay());
    }
    assert_eq!(effects.count(), 2);
    let long = send(&app, keyed("/long", "l", "2")).await;
    let brief = send(&app, keyed("/brief", "b", "2")).await;
    assert_eq!(long.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(brief.status, StatusCode::CONFLICT);
    assert_eq!(effects.count(), 2);
    tokio::time::advance(std::time::Duration::from_secs(10)).await;
    assert!(send(&app, keyed("/long", "l", "1")).await.is_replay());
    assert!(!send(&app, keyed("/brief", "b", "1")).await.is_replay());
    assert_eq!(effects.count(), 3);
}

// S-033
#[tokio::test(start_paused = true)]
async fn stores_are_independent() {
    let (one, other) = (MemoryStore::new(), MemoryStore::new());
    let (first, first_effects) = creating(IdempotencyLayer::new(one.clone()));
    let (second, second_effects) = creating(IdempotencyLayer::new(other.clone()));
    for _ in 0..2 {
        send(&first, request("POST", "/orders", "order")).await;
        send(&second, request("POST", "/orders", "order")).await;
    }
    assert_eq!((first_effects.count(), second_effects.count()), (1, 1));
    assert_eq!((one.len(), other.len()), (1, 1));
}

// S-035
#[tokio::test(start_paused = true)]
async fn empty_body_is_covered() {
    let (app, effects) = creating(IdempotencyLayer::new(MemoryStore::new()));
    let first = send(&app, request("POST", "/orders", "")).await;
    let second = send(&app, request("POST", "/orders", "")).await;
    assert!(second.is_replay());
    assert_eq!(first.body, second.body);
    assert_eq!(effects.count(), 1);
}
