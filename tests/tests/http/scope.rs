//! Tenants, hosts and accounts of one service, and the settings that separate their requests.

use axum::{
    Router,
    body::Body,
    extract::OriginalUri,
    routing::{any, post as on_post},
};
use http::{HeaderName, HeaderValue, Request, StatusCode, header};
use tests::{Effects, app, created, creating, post, send};
use tower::ServiceExt;
use tower_idempotency::{
    ACTING_HEADERS, FingerprintBy, IdempotencyLayer, MemoryStore, MissingKey, RouteTemplate,
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
    for name in ACTING_HEADERS {
        assert_eq!(other_account(layer(), name).await, (422, 1), "{name}");
        for by in [FingerprintBy::head_only(), FingerprintBy::canonical_json()] {
            let layer = layer().with_fingerprint(by);
            assert_eq!(other_account(layer, name).await, (422, 1), "{name}");
        }
    }
}

// S-912
/// Two parts of an upload may have equal bytes, and a request that creates an upload or copies an object has none. In some
/// protocols, all operations have one method and one path.
#[tokio::test(start_paused = true)]
async fn part_and_method_are_in_fingerprint() {
    for name in [
        "content-disposition",
        "content-range",
        "depth",
        "destination",
        "dropbox-api-arg",
        "lock-token",
        "next-action",
        "overwrite",
        "slug",
        "soapaction",
        "upload-concat",
        "upload-length",
        "upload-metadata",
        "upload-offset",
        "x-amz-copy-source",
        "x-amz-target",
        "x-goog-copy-source",
        "x-goog-upload-command",
        "x-goog-upload-offset",
        "x-http-method",
        "x-http-method-override",
        "x-method-override",
        "x-ms-copy-source",
        "x-ms-range",
        "x-ms-rename-source",
        "x-ms-source-range",
    ] {
        let name = HeaderName::from_static(name);
        assert_eq!(other_account(layer(), &name).await, (422, 1), "{name}");
        assert_eq!(executed_without_key(layer(), &name).await, 2, "{name}");
    }
}

/// Returns the executions of three requests without a key, of which the last one has another value of the header.
async fn executed_without_key(layer: IdempotencyLayer, name: &HeaderName) -> u64 {
    let (app, effects) = creating(layer.with_missing_key(MissingKey::Derive));
    for (value, is_retry) in [("a", false), ("a", true), ("b", false)] {
        let mut req = acting(name, value);
        req.headers_mut().remove("idempotency-key");
        let response = send(&app, req).await;
        assert!(response.is_replay() || !is_retry, "{name}: {value}");
    }
    effects.count()
}

// S-042
#[tokio::test(start_paused = true)]
async fn accept_counts_only_if_listed() {
    assert_eq!(executed_without_key(layer(), &header::ACCEPT).await, 1);
    let by = FingerprintBy::raw_body().and_header(header::ACCEPT);
    let layer = layer().with_fingerprint(by);
    assert_eq!(executed_without_key(layer, &header::ACCEPT).await, 2);
}

// S-929
/// Servers may read `_` in a name as `-`.
#[tokio::test(start_paused = true)]
async fn other_spelling_is_in_fingerprint() {
    for name in [
        "tenant_id",
        "x_tenant_id",
        "x-tenant_id",
        "content_range",
        "x_http_method_override",
        "x_amz_target",
    ] {
        let name = HeaderName::from_static(name);
        assert_eq!(other_account(layer(), &name).await, (422, 1), "{name}");
        assert_eq!(executed_without_key(layer(), &name).await, 2, "{name}");
    }
    for (listed, sent) in [("x-branch", "x_branch"), ("x_branch", "x-branch")] {
        let by = FingerprintBy::raw_body().and_header(HeaderName::from_static(listed));
        let layer = layer().with_fingerprint(by);
        let sent = HeaderName::from_static(sent);
        assert_eq!(other_account(layer, &sent).await, (422, 1), "{sent}");
    }
    let unlisted = HeaderName::from_static("x_branch");
    assert_eq!(other_account(layer(), &unlisted).await, (201, 1));
}

// S-929
/// Clients and proxies may send headers in another order.
#[tokio::test(start_paused = true)]
async fn order_of_listed_headers_does_not_count() {
    let (app, effects) = creating(layer());
    let mut names = ["x_tenant_id", "stripe-account", "tenant_id", "x-tenant-id"];
    for is_replay in [false, true] {
        let mut req = post("/orders", "k", "order");
        for name in names {
            let value = HeaderValue::from_static(name);
            req.headers_mut().insert(name, value);
        }
        assert_eq!(send(&app, req).await.is_replay(), is_replay);
        names.reverse();
    }
    assert_eq!(effects.count(), 1);
}

// S-928
#[tokio::test(start_paused = true)]
async fn precondition_counts_without_key() {
    for name in [
        "if",
        "if-match",
        "if-none-match",
        "if-unmodified-since",
        "if_match",
    ] {
        let name = HeaderName::from_static(name);
        assert_eq!(executed_without_key(layer(), &name).await, 2, "{name}");
        // A client that sends a key corrects the precondition under the same key.
        assert_eq!(other_account(layer(), &name).await, (201, 1), "{name}");
        let json = layer().with_fingerprint(FingerprintBy::canonical_json());
        assert_eq!(executed_without_key(json, &name).await, 2, "{name}");
        // The application chooses what counts.
        for by in [
            FingerprintBy::raw_body().with_headers([]),
            FingerprintBy::custom(|_, body| body.to_vec()),
        ] {
            let layer = layer().with_fingerprint(by);
            assert_eq!(executed_without_key(layer, &name).await, 1, "{name}");
        }
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
    // Another router has set the route.
    let mut req = post("/orders/raw-secret", "k3", "order");
    let template = RouteTemplate::new("/orders/{secret}");
    req.extensions_mut().insert(template);
    send(&fallback, req).await;
    assert_eq!(
        &*store.claims().pop().expect("a claim").operation,
        "POST /orders/{secret}"
    );
}

fn app_of(layer: IdempotencyLayer) -> (Router, Effects) {
    app(layer, async |n, _req| created(n))
}
