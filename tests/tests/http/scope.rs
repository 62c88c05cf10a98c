//! Tenants, hosts and accounts of one service, and the settings that separate their requests.

use axum::{
    Router,
    body::Body,
    extract::OriginalUri,
    routing::{any, post as on_post},
};
use http::{HeaderName, HeaderValue, Request, StatusCode};
use tests::{Effects, app, created, creating, post, send};
use tower::ServiceExt;
use tower_idempotency::{
    ACTING_HEADERS, FingerprintBy, IdempotencyLayer, MemoryStore, MissingKey,
    conformance::FaultInjector,
};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

fn acting(name: &HeaderName, account: &'static str) -> Request<Body> {
    let mut req = post("/orders", "k", "order");
    let headers = req.headers_mut();
    headers.insert("authorization", HeaderValue::from_static("Bearer platform"));
    headers.insert(name, HeaderValue::from_static(account));
    req
}

/// Returns the status of the second request: the first one is for account a, the second one for account b.
async fn other_account(layer: IdempotencyLayer, name: &HeaderName) -> (u16, u64) {
    let (app, effects) = creating(layer);
    let first = send(&app, acting(name, "a")).await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert!(send(&app, acting(name, "a")).await.is_replay(), "{name}");
    let second = send(&app, acting(name, "b")).await;
    (second.status.as_u16(), effects.count())
}

// F-074, S-912
#[tokio::test(start_paused = true)]
async fn account_of_shared_token_is_in_fingerprint() {
    for name in [
        "stripe-account",
        "x-tenant-id",
        "x-organization-id",
        "openai-organization",
        "x-on-behalf-of",
    ] {
        let name = HeaderName::from_static(name);
        assert!(ACTING_HEADERS.contains(&name), "{name}");
    }
    for name in &ACTING_HEADERS {
        assert_eq!(other_account(layer(), name).await, (422, 1), "{name}");
        for by in [FingerprintBy::head_only(), FingerprintBy::canonical_json()] {
            let layer = layer().with_fingerprint(by);
            assert_eq!(other_account(layer, name).await, (422, 1), "{name}");
        }
    }
}

// S-912
/// Two parts of an upload may have equal bytes, and a request that creates an upload or copies an object has none.
#[tokio::test(start_paused = true)]
async fn part_and_method_are_in_fingerprint() {
    for name in [
        "content-range",
        "destination",
        "dropbox-api-arg",
        "slug",
        "upload-concat",
        "upload-length",
        "upload-metadata",
        "upload-offset",
        "x-amz-copy-source",
        "x-goog-copy-source",
        "x-http-method",
        "x-http-method-override",
        "x-method-override",
        "x-ms-copy-source",
    ] {
        let name = HeaderName::from_static(name);
        assert_eq!(other_account(layer(), &name).await, (422, 1), "{name}");
        let (app, effects) = creating(layer().with_missing_key(MissingKey::Derive));
        for (value, is_replay) in [("a", false), ("a", true), ("b", false)] {
            let mut req = acting(&name, value);
            req.headers_mut().remove("idempotency-key");
            let response = send(&app, req).await;
            assert_eq!(response.is_replay(), is_replay, "{name}: {value}");
        }
        assert_eq!(effects.count(), 2, "{name}");
    }
}

// S-913
#[tokio::test(start_paused = true)]
async fn headers_of_fingerprint_are_configurable() {
    let stripe = HeaderName::from_static("stripe-account");
    let mine = HeaderName::from_static("x-branch");
    assert_eq!(other_account(layer(), &mine).await, (201, 1));
    let both = FingerprintBy::raw_body().and_header(mine.clone());
    assert_eq!(
        other_account(layer().with_fingerprint(both.clone()), &mine).await,
        (422, 1)
    );
    assert_eq!(
        other_account(layer().with_fingerprint(both), &stripe).await,
        (422, 1)
    );
    let replaced = FingerprintBy::raw_body().with_headers([mine.clone()]);
    let replaced = || layer().with_fingerprint(replaced.clone());
    assert_eq!(other_account(replaced(), &mine).await, (422, 1));
    assert_eq!(other_account(replaced(), &stripe).await, (201, 1));
    let custom = FingerprintBy::custom(|_, body| body.to_vec());
    let custom = || custom.clone();
    assert_eq!(
        other_account(layer().with_fingerprint(custom()), &stripe).await,
        (201, 1)
    );
    let added = custom().and_header(stripe.clone());
    assert_eq!(
        other_account(layer().with_fingerprint(added), &stripe).await,
        (422, 1)
    );
}

// F-903, S-914
#[tokio::test(start_paused = true)]
async fn rewritten_path_is_in_fingerprint() {
    // The tenant of the host name becomes a part of the path, and the request is dispatched in process.
    let (tenants, effects) = creating(layer());
    let front = Router::new().fallback(any(async move |mut req: Request<Body>| {
        let host = req.headers()["host"].to_str().expect("text").to_owned();
        *req.uri_mut() = format!("/{host}/orders").parse().expect("a URI");
        tenants.oneshot(req).await
    }));
    let to = |host| {
        let mut req = post("/orders", "k", "order");
        req.headers_mut()
            .insert("host", HeaderValue::from_static(host));
        req
    };
    assert_eq!(send(&front, to("a")).await.status, StatusCode::CREATED);
    assert!(send(&front, to("a")).await.is_replay());
    assert_eq!(send(&front, to("b")).await.code(), "key-reused");
    assert_eq!(effects.count(), 1);
}

// S-914
#[tokio::test(start_paused = true)]
async fn requests_of_batch_differ_by_own_path() {
    let (inner, effects) = creating(layer());
    let batch = Router::new().fallback(any(
        async move |OriginalUri(_): OriginalUri, req: Request<Body>| {
            let mut statuses = Vec::new();
            for path in ["/one", "/two"] {
                let mut part = post(path, "k", "order");
                *part.extensions_mut() = req.extensions().clone();
                statuses.push(send(&inner, part).await.status.as_u16());
            }
            format!("{statuses:?}")
        },
    ));
    let res = send(
        &batch,
        Request::post("/batch")
            .body(Body::empty())
            .expect("a request"),
    )
    .await;
    assert_eq!(res.text(), "[201, 422]");
    assert_eq!(effects.count(), 1);
}

// F-904, S-915
#[tokio::test(start_paused = true)]
async fn host_is_in_scope_if_set() {
    let (app, effects) = creating(layer().with_host_in_scope(true));
    let to = |uri: &str, host: Option<&'static str>| {
        let mut req = post(uri, "k", "order");
        if let Some(host) = host {
            req.headers_mut()
                .insert("host", HeaderValue::from_static(host));
        }
        req
    };
    let is_replay = async |uri: &str, host| send(&app, to(uri, host)).await.is_replay();
    assert!(!is_replay("/orders", Some("a.example")).await);
    assert!(is_replay("/orders", Some("A.Example:443")).await);
    assert!(is_replay("https://a.example:8443/orders", None).await);
    // A trailing dot names the same host.
    assert!(is_replay("/orders", Some("a.example.")).await);
    assert!(is_replay("https://a.example/orders", Some("A.Example.:443")).await);
    // The service may read either of two hosts that differ.
    for (replay, host) in [
        (false, "b.example"),
        (true, "b.example"),
        (false, "c.example"),
    ] {
        let found = is_replay("https://a.example/orders", Some(host)).await;
        assert_eq!(found, replay, "{host}");
    }
    assert!(!is_replay("/orders", Some("b.example")).await);
    assert!(!is_replay("/orders", None).await);
    assert!(!is_replay("/orders", Some("not a host!")).await);
    assert!(!is_replay("/orders", Some("not a host?")).await);
    assert_eq!(effects.count(), 7);
    let (app, effects) = creating(layer());
    assert!(
        !send(&app, to("/orders", Some("a.example")))
            .await
            .is_replay()
    );
    assert!(
        send(&app, to("/orders", Some("b.example")))
            .await
            .is_replay()
    );
    assert_eq!(effects.count(), 1);
}

// S-916
#[tokio::test(start_paused = true)]
async fn operation_is_matched_route() {
    let store = FaultInjector::new(MemoryStore::new());
    let effects = Effects::default();
    let counted = effects.clone();
    let handler = async move || created(counted.happen());
    let nested = Router::new()
        .route("/reset/{secret}", on_post(handler))
        .route_layer(IdempotencyLayer::new(store.clone()));
    let app = Router::new().nest("/users/{id}", nested);
    send(
        &app,
        post("/users/7/reset/raw-secret?code=raw-query", "k", "order"),
    )
    .await;
    assert_eq!(effects.count(), 1);
    let operation = store.claims().pop().expect("a claim").operation;
    assert_eq!(&*operation, "POST /users/{id}/reset/{secret}");
    // Without a route, the operation contains the path.
    let (fallback, _) = app_of(IdempotencyLayer::new(store.clone()));
    send(&fallback, post("/orders?code=raw-query", "k2", "order")).await;
    assert_eq!(
        &*store.claims().pop().expect("a claim").operation,
        "POST /orders"
    );
}

fn app_of(layer: IdempotencyLayer) -> (Router, Effects) {
    app(layer, async |n, _req| created(n))
}
