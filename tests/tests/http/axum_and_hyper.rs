//! The layer around axum routers, plain tower services and hyper's server.

use std::{
    convert::Infallible,
    fmt::Debug,
    marker::PhantomPinned,
    pin::Pin,
    sync::{Arc, Mutex, atomic::Ordering},
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    middleware,
    response::IntoResponse,
    routing::{any, post as on_post},
};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, Full};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tests::{Effects, Scripted, app, created, creating, post, send};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, retry::Policy, service_fn};
use tower_http::{
    cors::{AllowOrigin, CorsLayer},
    timeout::TimeoutLayer,
};
use tower_idempotency::{
    ConfigError, Error, Idempotency, IdempotencyKey, IdempotencyLayer, Lease, MemoryStore,
    MissingKey, Preset, Principal, ResponseFuture, Ttl, conformance::FaultInjector,
    extract::NoIdempotencyKey,
};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

fn order() -> Request<Body> {
    post("/orders", "k", "order")
}

// ---- Extractors ----

// S-339
#[tokio::test(start_paused = true)]
async fn handler_extracts_key_and_lease() {
    let effects = Effects::default();
    let counted = effects.clone();
    let app = Router::new()
        .route(
            "/orders",
            on_post(async move |key: IdempotencyKey, lease: Lease| {
                let _ = counted.happen();
                assert!(lease.is_held());
                assert!(!lease.is_takeover());
                format!("{} {}", key.as_str(), lease.generation())
            }),
        )
        .layer(layer());
    let first = send(&app, post("/orders", "\"k\"", "order")).await;
    assert_eq!(first.text(), "k 1");
    assert!(send(&app, order()).await.is_replay());
    assert_eq!(effects.count(), 1);
}

// S-340
#[tokio::test(start_paused = true)]
async fn optional_key_is_extracted_as_option() {
    let app = Router::new()
        .route(
            "/orders",
            on_post(async |key: Option<IdempotencyKey>, lease: Option<Lease>| {
                let key = key.map(|key| key.as_str().to_owned());
                format!("{key:?} {}", lease.is_some())
            }),
        )
        .layer(layer());
    let keyless = Request::post("/orders")
        .body(Body::empty())
        .expect("a request");
    assert_eq!(send(&app, keyless).await.text(), "None false");
    assert_eq!(send(&app, order()).await.text(), "Some(\"k\") true");
}

#[tokio::test(start_paused = true)]
async fn derived_key_has_lease_but_no_key_extension() {
    let app = Router::new()
        .route(
            "/orders",
            on_post(async |key: Option<IdempotencyKey>, lease: Option<Lease>| {
                format!("{} {}", key.is_some(), lease.is_some())
            }),
        )
        .layer(layer().with_missing_key(MissingKey::Derive));
    let keyless = Request::post("/orders")
        .body(Body::empty())
        .expect("a request");
    assert_eq!(send(&app, keyless).await.text(), "false true");
}

// S-341
#[tokio::test(start_paused = true)]
async fn unprotected_handler_extraction_is_500() {
    let effects = Effects::default();
    let counted = |effects: &Effects| {
        let effects = effects.clone();
        move || effects.happen()
    };
    let (by_key, by_lease) = (counted(&effects), counted(&effects));
    let app = Router::new()
        .route(
            "/key",
            on_post(async move |_: IdempotencyKey| by_key().to_string()),
        )
        .route(
            "/lease",
            on_post(async move |_: Lease| by_lease().to_string()),
        );
    for app in [app.clone(), app.layer(layer())] {
        for path in ["/key", "/lease"] {
            let keyless = Request::post(path).body(Body::empty()).expect("a request");
            let response = send(&app, keyless).await;
            assert_eq!(response.status, StatusCode::INTERNAL_SERVER_ERROR);
            assert!(
                response
                    .text()
                    .starts_with("expected a request with an idempotency key")
            );
        }
    }
    assert_eq!(effects.count(), 0);
    let rejection = IntoResponse::into_response(extract_lease_without_key().await);
    assert_eq!(rejection.status(), StatusCode::INTERNAL_SERVER_ERROR);
}

async fn extract_lease_without_key() -> NoIdempotencyKey {
    use axum::extract::FromRequestParts;
    let (mut parts, ()) = Request::new(()).into_parts();
    let lease = <Lease as FromRequestParts<()>>::from_request_parts(&mut parts, &()).await;
    lease.expect_err("there is none")
}

// ---- The lease that a handler sees ----

// S-166
#[tokio::test(start_paused = true)]
async fn lease_is_held_until_response() {
    let kept = Arc::new(Mutex::new(None));
    let keep = Arc::clone(&kept);
    let (app, effects) = app(layer(), move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        assert!(lease.is_held());
        *keep.lock().expect("no panic") = Some(lease);
        std::future::ready(created(n))
    });
    send(&app, order()).await;
    let lease = kept.lock().expect("no panic").take().expect("a lease");
    assert!(!lease.is_held());
    lease.lost().await;
    assert_eq!(effects.count(), 1);
}

// S-167
#[tokio::test(start_paused = true)]
async fn lease_derives_same_key_on_takeover() {
    let (app, effects) = app(layer(), async |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease");
        let keys = [lease.derive("charge"), lease.derive("email")].join(" ");
        // The first execution frees its key: its retry is a new one.
        let policy = [("x-idempo-policy", "no-store")];
        let _ = n;
        (policy, keys)
    });
    let first = send(&app, order()).await;
    let again = send(&app, order()).await;
    assert_eq!(first.body, again.body, "of the same request");
    let other_key = send(&app, post("/orders", "k2", "order")).await;
    let other_body = send(&app, post("/orders", "k", "another order")).await;
    let all = [&first, &other_key, &other_body].map(|response| response.text().to_owned());
    let mut keys: Vec<_> = all.iter().flat_map(|keys| keys.split(' ')).collect();
    assert!(keys.iter().all(|key| key.len() == 64));
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 6);
    assert_eq!(effects.count(), 4);
}

// ---- Routers in routers, layers in layers ----

// F-066, S-041
#[tokio::test(start_paused = true)]
async fn nested_routers_differ_by_original_path() {
    for (preset, expected) in [(Preset::Recommended, 422), (Preset::Idempo, 201)] {
        let layer = IdempotencyLayer::with_preset(MemoryStore::new(), preset);
        let effects = Effects::default();
        let nested = || {
            let effects = effects.clone();
            Router::new()
                .route("/items", any(async move || created(effects.happen())))
                .layer(layer.clone())
        };
        let app = Router::new().nest("/a", nested()).nest("/b", nested());
        let first = send(&app, post("/a/items", "k", "item")).await;
        let other = send(&app, post("/b/items", "k", "item")).await;
        assert_eq!(other.status, expected);
        assert_ne!(other.body, first.body);
        let retry = send(&app, post("/a/items", "k", "item")).await;
        assert_eq!(retry.body, first.body);
        assert_eq!(effects.count(), if expected == 201 { 2 } else { 1 });
    }
}

// F-023, S-036
#[tokio::test(start_paused = true)]
async fn nested_layer_passes_through() {
    let (outer, inner) = (
        FaultInjector::new(MemoryStore::new()),
        FaultInjector::new(MemoryStore::new()),
    );
    let effects = Effects::default();
    let counted = effects.clone();
    let app = Router::new()
        .fallback(async move |req: Request<Body>| {
            let policy = match req.uri().path() {
                "/quotes" => "no-store",
                _ => "keep",
            };
            ([("x-idempo-policy", policy)], created(counted.happen()))
        })
        .layer(IdempotencyLayer::new(inner.clone()))
        .layer(IdempotencyLayer::new(outer.clone()));
    for replay in [false, true] {
        let response = send(&app, order()).await;
        assert_eq!(response.is_replay(), replay);
        assert_eq!(response.header("x-idempo-policy"), None);
    }
    assert_eq!(effects.count(), 1);
    for _ in 0..2 {
        let response = send(&app, post("/quotes", "q", "order")).await;
        assert_eq!(response.status, StatusCode::CREATED);
        assert_eq!(response.header("x-idempo-policy"), None);
    }
    assert_eq!(effects.count(), 3, "the outer one read the policy");
    assert_eq!(inner.all_calls(), 0);
    assert!(outer.all_calls() > 0);
}

// S-037
#[tokio::test(start_paused = true)]
async fn inner_layer_handles_requests_outer_passes() {
    let inner = FaultInjector::new(MemoryStore::new());
    let effects = Effects::default();
    let counted = effects.clone();
    let app = Router::new()
        .fallback(async move || created(counted.happen()))
        .layer(IdempotencyLayer::new(inner.clone()).with_missing_key(MissingKey::Derive))
        .layer(layer());
    for _ in 0..2 {
        let keyless = Request::post("/").body(Body::from("x")).expect("a request");
        assert_eq!(send(&app, keyless).await.status, StatusCode::CREATED);
    }
    assert_eq!(effects.count(), 1);
    assert!(inner.all_calls() > 0);
}

// S-034
#[tokio::test(start_paused = true)]
async fn layer_clones_share_store() {
    let layer = layer();
    let (first, effects) = creating(layer.clone());
    let (second, others) = creating(layer);
    send(&first, order()).await;
    assert!(send(&second, order()).await.is_replay());
    assert_eq!((effects.count(), others.count()), (1, 0));
}

// ---- Requests that always pass through ----

// F-016, S-027
#[tokio::test(start_paused = true)]
async fn grpc_upgrades_and_tunnels_pass_through() {
    let requests: [(&str, &[(&str, &str)]); 7] = [
        ("POST", &[("content-type", "application/grpc")]),
        ("POST", &[("content-type", "application/grpc+proto")]),
        ("POST", &[("content-type", "Application/GRPC ; x=y")]),
        (
            "POST",
            &[("connection", "upgrade"), ("upgrade", "example/1")],
        ),
        (
            "POST",
            &[("connection", "upgrade"), ("upgrade", "h2c, example/1")],
        ),
        ("CONNECT", &[]),
        (
            "GET",
            &[("connection", "upgrade"), ("upgrade", "websocket")],
        ),
    ];
    for (method, headers) in requests {
        let store = FaultInjector::new(MemoryStore::new());
        let layer = IdempotencyLayer::new(store.clone())
            .with_methods_where(|method| method != http::Method::GET);
        let (app, effects) = creating(layer);
        for _ in 0..2 {
            let body = Scripted::new(["order"]);
            let taken = body.taken();
            let mut req = post("/orders", "k", Body::new(body));
            *req.method_mut() = method.parse().expect("a method");
            if headers.iter().any(|(name, _)| *name == "content-type") {
                *req.version_mut() = Version::HTTP_2;
            }
            for (name, value) in headers {
                req.headers_mut()
                    .insert(*name, HeaderValue::from_static(value));
            }
            let response = send(&app, req).await;
            assert_eq!(response.status, StatusCode::CREATED, "{method} {headers:?}");
            assert_eq!(taken.load(Ordering::SeqCst), 0, "{method} {headers:?}");
        }
        assert_eq!(effects.count(), 2, "{method} {headers:?}");
        assert_eq!(store.all_calls(), 0, "{method} {headers:?}");
    }
}

// S-028
#[tokio::test(start_paused = true)]
async fn ignored_h2c_upgrade_is_protected() {
    for (name, value) in [
        ("upgrade", "h2c"),
        ("upgrade", " H2C "),
        ("upgrade", "h2"),
        ("upgrade", ""),
        ("upgrade", "h2c, ,"),
        ("upgrade", "TLS/1.0"),
        ("content-type", "application/grp"),
        ("content-type", "application/grpc"),
        ("content-type", "text/application/grpc"),
    ] {
        let (app, effects) = creating(layer());
        for replay in [false, true] {
            let mut req = order();
            req.headers_mut()
                .insert(name, HeaderValue::from_static(value));
            assert_eq!(send(&app, req).await.is_replay(), replay, "{name}: {value}");
        }
        assert_eq!(effects.count(), 1, "{name}: {value}");
    }
}

// S-028
#[tokio::test(start_paused = true)]
async fn upgrade_is_ignored_in_http_1_0_and_http_2() {
    for version in [Version::HTTP_10, Version::HTTP_2] {
        let (app, effects) = creating(layer());
        for replay in [false, true] {
            let mut req = order();
            *req.version_mut() = version;
            let websocket = HeaderValue::from_static("websocket");
            req.headers_mut().insert("upgrade", websocket);
            let upgrade = HeaderValue::from_static("upgrade");
            req.headers_mut().insert("connection", upgrade);
            assert_eq!(send(&app, req).await.is_replay(), replay, "{version:?}");
        }
        assert_eq!(effects.count(), 1, "{version:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn upgrade_next_to_h2c_counts() {
    for value in ["h2c, example/1", ",example/1", "websocket, example/1"] {
        let (app, effects) = creating(layer());
        for _ in 0..2 {
            let mut req = order();
            let value = HeaderValue::from_static(value);
            req.headers_mut().insert("upgrade", value);
            let upgrade = HeaderValue::from_static("upgrade");
            req.headers_mut().insert("connection", upgrade);
            assert!(!send(&app, req).await.is_replay());
        }
        assert_eq!(effects.count(), 2, "{value}");
    }
}

// ---- Without axum ----

type Passed<B> = tower_idempotency::Body<B>;

fn full(key: &str, body: &'static str) -> Request<Full<Bytes>> {
    Request::post("/orders")
        .header("idempotency-key", key)
        .body(Full::from(body))
        .expect("a valid request")
}

// S-342
#[tokio::test(start_paused = true)]
async fn plain_service_executes_once() {
    let effects = Effects::default();
    let counted = effects.clone();
    let mut service = ServiceBuilder::new().layer(layer()).service(service_fn(
        move |req: Request<Passed<Full<Bytes>>>| {
            let counted = counted.clone();
            async move {
                let body = req.into_body().collect().await?.to_bytes();
                assert_eq!(body, "order");
                let response = format!("execution {}", counted.happen());
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(response)))
            }
        },
    ));
    for replay in [false, true] {
        let ready = service.ready().await.expect("infallible");
        let res = ready.call(full("k", "order")).await.expect("infallible");
        assert_eq!(res.headers().contains_key("idempotent-replayed"), replay);
        let body = res.into_body().collect().await.expect("infallible");
        assert_eq!(body.to_bytes(), "execution 1");
    }
    assert_eq!(effects.count(), 1);
}

/// A body that is not `Unpin`.
struct Pinned {
    data: Mutex<Vec<Bytes>>,
    _pinned: PhantomPinned,
}

impl Pinned {
    fn new(chunks: &[&'static str]) -> Self {
        let data = chunks.iter().rev().map(|chunk| Bytes::from(*chunk));
        Self {
            data: Mutex::new(data.collect()),
            _pinned: PhantomPinned,
        }
    }
}

impl http_body::Body for Pinned {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.data.lock().expect("no panic").pop();
        Poll::Ready(next.map(|data| Ok(Frame::data(data))))
    }
}

// S-343
#[tokio::test(start_paused = true)]
async fn pinned_bodies_are_read_and_replayed() {
    let effects = Effects::default();
    let counted = effects.clone();
    let service =
        layer()
            .with_response_limit(12)
            .layer(service_fn(move |req: Request<Passed<Pinned>>| {
                let counted = counted.clone();
                async move {
                    let _ = counted.happen();
                    let path = req.uri().path().to_owned();
                    let body = req.into_body().collect().await?.to_bytes();
                    assert_eq!(body, "two chunks");
                    Ok::<_, Infallible>(Response::new(match path.as_str() {
                        "/large" => Pinned::new(&["another ", "two ", "chunks"]),
                        _ => Pinned::new(&["two ", "more"]),
                    }))
                }
            }));
    let req = |path, key| {
        Request::post(path)
            .header("idempotency-key", key)
            .body(Pinned::new(&["two ", "chunks"]))
            .expect("a valid request")
    };
    for replay in [false, true] {
        let res = service.clone().oneshot(req("/", "k")).await;
        let res = res.expect("infallible");
        assert_eq!(res.headers().contains_key("idempotent-replayed"), replay);
        let body = res.into_body().collect().await.expect("infallible");
        assert_eq!(body.to_bytes(), "two more");
    }
    assert_eq!(effects.count(), 1);
    let large = service.clone().oneshot(req("/large", "l")).await;
    let large = large.expect("infallible").into_body().collect().await;
    let large = large.expect("infallible").to_bytes();
    assert_eq!(large, "another two chunks", "given up in the middle");
    assert_eq!(effects.count(), 2);
}

#[derive(Clone, Debug, PartialEq)]
struct Boom(u64);

// S-097
#[tokio::test(start_paused = true)]
async fn service_error_propagates_and_releases_key() {
    let store = MemoryStore::new();
    let effects = Effects::default();
    let counted = effects.clone();
    let service = IdempotencyLayer::new(store.clone()).layer(service_fn(
        move |_req: Request<Passed<Full<Bytes>>>| {
            let n = counted.happen();
            async move {
                match n {
                    1 => Err(Boom(n)),
                    _ => Ok(Response::new(Full::<Bytes>::from("fine"))),
                }
            }
        },
    ));
    let failed = service.clone().oneshot(full("k", "order")).await;
    assert_eq!(failed.err(), Some(Boom(1)));
    assert!(store.is_empty());
    for replay in [false, true] {
        let res = service.clone().oneshot(full("k", "order")).await;
        let res = res.expect("fine");
        assert_eq!(res.headers().contains_key("idempotent-replayed"), replay);
    }
    assert_eq!(effects.count(), 2);
    let refused = service.oneshot(full("a,b", "order")).await;
    assert_eq!(
        refused.expect("a response").status(),
        StatusCode::BAD_REQUEST
    );
}

/// A service that panics unless `poll_ready` returned `Ready` before each call, also on each clone.
#[derive(Default)]
struct ReadinessChecked {
    ready: bool,
    effects: Effects,
}

impl Clone for ReadinessChecked {
    fn clone(&self) -> Self {
        Self {
            ready: false,
            effects: self.effects.clone(),
        }
    }
}

impl<B: http_body::Body> Service<Request<B>> for ReadinessChecked {
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        assert!(self.ready, "called without having been found ready");
        self.ready = false;
        let _ = self.effects.happen();
        std::future::ready(Ok(Response::new(Empty::new())))
    }
}

// S-344
#[tokio::test(start_paused = true)]
async fn ready_service_is_called() {
    let inner = ReadinessChecked::default();
    let effects = inner.effects.clone();
    let mut service = layer().layer(inner);
    let requests = [
        full("a", "order"),
        full("a", "order"),
        full("b", "order"),
        full("b", "another order"),
    ];
    let mut keyless = full("c", "order");
    keyless.headers_mut().clear();
    for req in requests.into_iter().chain([keyless]) {
        let ready = ServiceExt::<Request<Full<Bytes>>>::ready(&mut service).await;
        let called = ready.expect("infallible").call(req);
        called.await.expect("infallible");
    }
    assert_eq!(effects.count(), 3);
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "called without having been found ready")]
async fn unready_service_panics() {
    let mut service = layer().layer(ReadinessChecked::default());
    let _ = service.call(full("a", "order")).await;
}

#[tokio::test(start_paused = true)]
async fn service_readiness_is_forwarded() {
    #[derive(Clone)]
    struct Unready(Poll<Result<(), Boom>>);

    impl<B: http_body::Body> Service<Request<B>> for Unready {
        type Response = Response<Empty<Bytes>>;
        type Error = Boom;
        type Future = std::future::Pending<Result<Self::Response, Boom>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Boom>> {
            self.0.clone()
        }

        fn call(&mut self, _: Request<B>) -> Self::Future {
            panic!("the service was never ready");
        }
    }

    let mut cx = Context::from_waker(std::task::Waker::noop());
    for readiness in [
        Poll::Pending,
        Poll::Ready(Err(Boom(7))),
        Poll::Ready(Ok(())),
    ] {
        let mut service = layer().layer(Unready(readiness.clone()));
        let found = Service::<Request<Full<Bytes>>>::poll_ready(&mut service, &mut cx);
        assert_eq!(found, readiness);
    }
}

#[tokio::test(start_paused = true)]
async fn layer_composes_with_tower_layers() {
    let inner = ReadinessChecked::default();
    let effects = inner.effects.clone();
    let service = ServiceBuilder::new()
        .timeout(Duration::from_secs(1))
        .layer(layer())
        .concurrency_limit(1)
        .service(inner);
    for _ in 0..3 {
        let res = service.clone().oneshot(full("k", "order")).await;
        assert_eq!(res.expect("in time").status(), StatusCode::OK);
    }
    assert_eq!(effects.count(), 1);
}

// F-028
/// The order of `docs/guide/placement.md`. Both layers of tower-http can respond with a default body.
#[tokio::test(start_paused = true)]
async fn recommended_order_composes_in_service_builder() {
    let effects = Effects::default();
    let counted = effects.clone();
    let cors = CorsLayer::new()
        .allow_origin(AllowOrigin::mirror_request())
        .allow_methods([Method::POST]);
    let timeout = Duration::from_secs(30);
    let service = ServiceBuilder::new()
        .layer(cors)
        .layer(layer())
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            timeout,
        ))
        .service(service_fn(move |_req: Request<Passed<Full<Bytes>>>| {
            let text = counted.happen().to_string();
            let res = Response::new(Full::<Bytes>::from(text));
            std::future::ready(Ok::<_, Infallible>(res))
        }));
    for (origin, replayed) in [
        ("https://one.example", false),
        ("https://two.example", true),
    ] {
        let preflight = Request::options("/orders")
            .header("origin", origin)
            .body(Full::<Bytes>::default())
            .expect("a valid request");
        let Ok(res) = service.clone().oneshot(preflight).await;
        assert_eq!(res.headers()["access-control-allow-methods"], "POST");
        let Ok(body) = res.into_body().collect().await;
        assert!(body.to_bytes().is_empty());

        let mut req = full("k", "order");
        let value = HeaderValue::from_static(origin);
        req.headers_mut().insert("origin", value);
        let Ok(res) = service.clone().oneshot(req).await;
        assert_eq!(res.headers()["access-control-allow-origin"], origin);
        assert_eq!(res.headers().contains_key("idempotent-replayed"), replayed);
    }
    assert_eq!(effects.count(), 1);
}

/// Retries each failure that is not a replay, at most ten times.
#[derive(Clone, Default)]
struct RetryUnlessReplay(Effects);

impl<B, C: Clone> Policy<Request<C>, Response<B>, Infallible> for RetryUnlessReplay {
    type Future = std::future::Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request<C>,
        res: &mut Result<Response<B>, Infallible>,
    ) -> Option<Self::Future> {
        let res = res.as_ref().ok()?;
        let is_replay = res.headers().contains_key("idempotent-replayed");
        let is_over = res.status().is_success() || is_replay;
        (!is_over && self.0.happen() < 10).then(|| std::future::ready(()))
    }

    fn clone_request(&mut self, req: &Request<C>) -> Option<Request<C>> {
        Some(req.clone())
    }
}

// F-022
#[tokio::test(start_paused = true)]
async fn outer_retry_layer_sees_replay_marker() {
    let (effects, policy) = (Effects::default(), RetryUnlessReplay::default());
    let (counted, retries) = (effects.clone(), policy.0.clone());
    let service = ServiceBuilder::new()
        .retry(policy)
        .layer(layer())
        .service(service_fn(move |_req: Request<Passed<Full<Bytes>>>| {
            let mut res = Response::new(Full::<Bytes>::from("no"));
            *res.status_mut() = match counted.happen() {
                1 => StatusCode::BAD_GATEWAY,
                _ => StatusCode::PAYMENT_REQUIRED,
            };
            std::future::ready(Ok::<_, Infallible>(res))
        }));
    let Ok(res) = service.oneshot(full("k", "order")).await;
    assert_eq!(res.status(), StatusCode::PAYMENT_REQUIRED);
    // The failure without a key was executed again, and the recorded outcome was not.
    assert_eq!((effects.count(), retries.count()), (2, 2));
}

// F-025
#[tokio::test(start_paused = true)]
async fn auth_outside_layer_blocks_replay_after_revocation() {
    for inside in [true, false] {
        let revoked = Arc::new(Mutex::new(false));
        let checked = Arc::clone(&revoked);
        let authentication = middleware::from_fn(move |req, next: middleware::Next| {
            let is_revoked = *checked.lock().expect("no panic");
            async move {
                match is_revoked {
                    true => StatusCode::FORBIDDEN.into_response(),
                    false => next.run(req).await,
                }
            }
        });
        let effects = Effects::default();
        let counted = effects.clone();
        let app = Router::new().fallback(async move || created(counted.happen()));
        let app = match inside {
            true => app.layer(layer()).layer(authentication),
            false => app.layer(authentication).layer(layer()),
        };
        let first = send(&app, order()).await;
        *revoked.lock().expect("no panic") = true;
        let meanwhile = send(&app, order()).await;
        // With the layer outside, the authentication does not run.
        let expected = if inside { 403 } else { 201 };
        assert_eq!((meanwhile.status.as_u16(), effects.count()), (expected, 1));
        *revoked.lock().expect("no panic") = false;
        let again = send(&app, order()).await;
        assert!(again.is_replay());
        assert_eq!((again.body, effects.count()), (first.body, 1));
    }
}

// F-025
#[tokio::test(start_paused = true)]
async fn permission_checked_in_handler_allows_replay() {
    let revoked = Arc::new(Mutex::new(false));
    let effects = Effects::default();
    let (checked, counted) = (Arc::clone(&revoked), effects.clone());
    let handler = async move || {
        let is_revoked = *checked.lock().expect("no panic");
        match is_revoked {
            true => StatusCode::FORBIDDEN.into_response(),
            false => created(counted.happen()),
        }
    };
    let app = Router::new().fallback(handler).layer(layer());
    let first = send(&app, order()).await;
    assert_eq!(first.status, StatusCode::CREATED);
    *revoked.lock().expect("no panic") = true;
    let again = send(&app, order()).await;
    assert!(again.is_replay());
    assert_eq!((again.body, effects.count()), (first.body, 1));
    let other = send(&app, post("/orders", "k2", "order")).await;
    assert_eq!((other.status.as_u16(), effects.count()), (403, 1));
}

// ---- hyper's server ----

// S-345
#[tokio::test(start_paused = true)]
async fn plain_hyper_server_replays() {
    for version in [1, 2] {
        let effects = Effects::default();
        let counted = effects.clone();
        let service = layer().layer(service_fn(
            move |req: Request<Passed<hyper::body::Incoming>>| {
                let counted = counted.clone();
                async move {
                    let body = req.into_body().collect().await?.to_bytes();
                    let n = counted.happen();
                    let response = format!("execution {n} of {} bytes", body.len());
                    Ok::<_, hyper::Error>(Response::new(Full::<Bytes>::from(response)))
                }
            },
        ));
        let (client, server) = tokio::io::duplex(64 * 1024);
        let serving = tokio::spawn(async move {
            let io = TokioIo::new(server);
            let executor = hyper_util::rt::TokioExecutor::new();
            let builder = hyper_util::server::conn::auto::Builder::new(executor);
            let service = TowerToHyperService::new(service);
            let _ = builder.serve_connection(io, service).await;
        });
        let mut sender = Sender::connect(version, client).await;
        let mut bodies = Vec::new();
        for replay in [false, true, true] {
            let res = sender.send(full("k", "order")).await;
            assert_eq!(res.headers().contains_key("idempotent-replayed"), replay);
            assert_eq!(res.headers()["content-length"], "22", "HTTP/{version}");
            let body = res.into_body().collect().await.expect("a body");
            bodies.push(body.to_bytes());
        }
        assert!(bodies.iter().all(|body| body == "execution 1 of 5 bytes"));
        let refused = sender.send(full("k", "another order")).await;
        assert_eq!(refused.status(), StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(effects.count(), 1);
        drop(sender);
        serving.abort();
    }
}

enum Sender {
    Http1(hyper::client::conn::http1::SendRequest<Full<Bytes>>),
    Http2(hyper::client::conn::http2::SendRequest<Full<Bytes>>),
}

impl Sender {
    async fn connect(version: u8, io: tokio::io::DuplexStream) -> Self {
        let io = TokioIo::new(io);
        if version == 1 {
            let connected = hyper::client::conn::http1::handshake(io).await;
            let (sender, connection) = connected.expect("connected");
            tokio::spawn(connection);
            return Self::Http1(sender);
        }
        let executor = hyper_util::rt::TokioExecutor::new();
        let connected = hyper::client::conn::http2::handshake(executor, io).await;
        let (sender, connection) = connected.expect("connected");
        tokio::spawn(connection);
        Self::Http2(sender)
    }

    async fn send(&mut self, req: Request<Full<Bytes>>) -> Response<hyper::body::Incoming> {
        let res = match self {
            Self::Http1(sender) => sender.send_request(req).await,
            Self::Http2(sender) => sender.send_request(req).await,
        };
        res.expect("a response")
    }
}

// ---- Types ----

#[test]
fn public_types_can_go_between_threads() {
    fn shared<T: Send + Sync + Unpin + 'static>() {}
    fn sent<T: Send + Unpin + 'static>(_: &T) {}
    fn shown<T: Debug>() {}

    shared::<IdempotencyLayer>();
    shared::<Idempotency<ReadinessChecked>>();
    shared::<IdempotencyKey>();
    shared::<Lease>();
    shared::<MemoryStore>();
    shared::<Preset>();
    shared::<Principal>();
    shared::<Ttl>();
    shared::<Error>();
    shared::<ConfigError>();
    shared::<Passed<Full<Bytes>>>();
    shown::<Passed<Full<Bytes>>>();
    shown::<ResponseFuture<std::future::Ready<()>, Full<Bytes>, Infallible>>();

    let mut service = layer().layer(ReadinessChecked {
        ready: true,
        ..ReadinessChecked::default()
    });
    let future = service.call(full("k", "order"));
    sent(&future);
}

#[tokio::test(start_paused = true)]
async fn debug_output_hides_body() {
    let bodies = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&bodies);
    let service = layer().with_response_limit(5).layer(service_fn(
        move |req: Request<Passed<Full<Bytes>>>| {
            let text = format!("{:?}", req.body());
            keep.lock().expect("no panic").push(text);
            std::future::ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(
                "a large answer",
            ))))
        },
    ));
    let res = service.clone().oneshot(full("k", "order")).await;
    let text = format!("{:?}", res.expect("infallible").body());
    assert_eq!(text, "Body::Original", "too large to be buffered");
    let res = service.oneshot(full("k", "order")).await;
    assert_eq!(
        format!("{:?}", res.expect("infallible").body()),
        "Body::Buffered"
    );
    assert_eq!(*bodies.lock().expect("no panic"), ["Body::Buffered"]);
}

#[tokio::test(start_paused = true)]
async fn request_headers_reach_handler_unchanged() {
    let seen = Arc::new(Mutex::new(HeaderMap::new()));
    let keep = Arc::clone(&seen);
    let (app, effects) = app(layer(), move |n, req: Request<Body>| {
        *keep.lock().expect("no panic") = req.headers().clone();
        std::future::ready(created(n))
    });
    let mut req = order();
    req.headers_mut()
        .append("x-line", HeaderValue::from_static("1"));
    req.headers_mut()
        .append("x-line", HeaderValue::from_static("2"));
    let sent = req.headers().clone();
    send(&app, req).await;
    assert_eq!(*seen.lock().expect("no panic"), sent);
    assert_eq!(effects.count(), 1);
}
