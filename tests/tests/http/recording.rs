//! The first execution, and the record of its response.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use tests::{Effects, Scripted, Step, TestResponse, app, created, creating, post, read, send};
use tokio::time::advance;
use tower::ServiceExt;
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, Preset, Retention, Ttl,
    conformance::{Fault, FaultInjector, Operation},
};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

fn order() -> Request<Body> {
    post("/orders", "k", "order")
}

/// Returns the number of executions if the same request arrives twice at a handler with this response.
async fn executions<R: IntoResponse + 'static>(
    layer: IdempotencyLayer,
    response: impl Fn(u64) -> R + Clone + Send + Sync + 'static,
) -> u64 {
    let (app, effects) = app(layer, move |n, _req| {
        let response = response(n).into_response();
        async move { response }
    });
    let first = send(&app, order()).await;
    let second = send(&app, order()).await;
    assert!(!first.is_replay());
    assert_eq!(second.status, first.status);
    assert_eq!(second.is_replay(), effects.count() == 1);
    effects.count()
}

/// Returns the recorded statuses.
async fn recorded(layer: impl Fn() -> IdempotencyLayer, statuses: &[u16]) -> Vec<u16> {
    let mut recorded = Vec::new();
    for &code in statuses {
        let status = StatusCode::from_u16(code).expect("a status");
        if executions(layer(), move |_| status).await == 1 {
            recorded.push(code);
        }
    }
    recorded
}

// S-083
#[tokio::test(start_paused = true)]
async fn first_response_is_unchanged() {
    let (app, effects) = app(layer(), async |_, _| {
        let headers = [
            ("set-cookie", "a=1"),
            ("date", "Thu, 01 Jan 1970 00:00:00 GMT"),
            ("x-request-id", "7"),
        ];
        (StatusCode::CREATED, headers, "made")
    });
    let response = send(&app, order()).await;
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(response.text(), "made");
    let mut headers: Vec<_> = response
        .headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_bytes()))
        .collect();
    headers.sort_unstable();
    let expected: [(&str, &[u8]); 5] = [
        ("content-length", b"4"),
        ("content-type", b"text/plain; charset=utf-8"),
        ("date", b"Thu, 01 Jan 1970 00:00:00 GMT"),
        ("set-cookie", b"a=1"),
        ("x-request-id", b"7"),
    ];
    assert_eq!(headers, expected);
    assert_eq!(effects.count(), 1);
}

// S-084
#[tokio::test(start_paused = true)]
async fn execution_makes_two_store_calls_and_replay_one() {
    let store = FaultInjector::new(MemoryStore::new());
    let memory = store.inner().clone();
    let (app, effects) = app(IdempotencyLayer::new(store.clone()), move |n, _req| {
        assert_eq!(memory.len(), 1, "leased while the handler runs");
        async move { created(n) }
    });
    let calls = || {
        (
            store.calls(Operation::Acquire),
            store.calls(Operation::Complete),
            store.all_calls(),
        )
    };
    assert!(!send(&app, order()).await.is_replay());
    assert_eq!(calls(), (1, 1, 2));
    assert!(send(&app, order()).await.is_replay());
    assert_eq!(calls(), (2, 1, 3));
    assert_eq!(effects.count(), 1);
}

// F-082, S-085
#[tokio::test(start_paused = true)]
async fn definite_statuses_are_recorded_by_default() {
    let all: Vec<u16> = (200..600).collect();
    let passing = [
        307, 308, 401, 403, 406, 407, 408, 411, 412, 413, 415, 416, 417, 419, 421, 423, 424, 425,
        426, 428, 429, 431, 440,
    ];
    let definite: Vec<u16> = (200..500).filter(|code| !passing.contains(code)).collect();
    assert_eq!(recorded(layer, &all).await, definite);
}

// F-083, S-086
#[tokio::test(start_paused = true)]
async fn informational_status_is_never_recorded() {
    let any = || layer().with_recorded_statuses(|_| true);
    assert_eq!(recorded(any, &[100, 101, 102, 103, 199]).await, [0_u16; 0]);
}

// S-930, F-920
#[tokio::test(start_paused = true)]
async fn redirect_of_request_is_never_recorded() {
    let any = || layer().with_recorded_statuses(|_| true);
    assert_eq!(recorded(any, &[307, 308]).await, [0_u16; 0]);
}

// S-932, F-921
#[tokio::test(start_paused = true)]
async fn corrected_header_is_executed_under_same_key() {
    for preset in [Preset::Recommended, Preset::Ietf, Preset::Stripe] {
        for (code, name) in [
            (401, "x-signature"),
            (406, "accept"),
            (407, "proxy-authorization"),
            (411, "content-length"),
            (412, "if-match"),
            (413, "x-plan"),
            (415, "content-encoding"),
            (416, "content-range"),
            (417, "expect"),
            (419, "x-csrf-token"),
            (421, "host"),
            (423, "if"),
            (426, "x-protocol"),
            (428, "if-match"),
            (431, "referer"),
            (440, "x-session"),
        ] {
            let layer = IdempotencyLayer::with_preset(MemoryStore::new(), preset);
            let (app, effects) = app(layer, move |n, req: Request<Body>| {
                let res = match req.headers().get(name) {
                    Some(value) if value == "5" => created(n),
                    _ => StatusCode::from_u16(code)
                        .expect("a status")
                        .into_response(),
                };
                async move { res }
            });
            let order = || post("/orders", "\"k\"", "order");
            let corrected = || {
                let mut req = order();
                req.headers_mut()
                    .insert(name, HeaderValue::from_static("5"));
                req
            };
            assert_eq!(send(&app, order()).await.status.as_u16(), code);
            let response = send(&app, corrected()).await;
            assert_eq!(response.status, StatusCode::CREATED, "{preset:?} {code}");
            assert_eq!(send(&app, corrected()).await.body, response.body);
            assert_eq!(effects.count(), 2, "{preset:?} {code}");
        }
    }
}

// S-087
#[tokio::test(start_paused = true)]
async fn recorded_statuses_are_configurable() {
    let successes = || layer().with_recorded_statuses(|status| status.is_success());
    assert_eq!(
        recorded(successes, &[200, 299, 300, 400, 500]).await,
        [200, 299]
    );
    let failures = || layer().with_recorded_statuses(|status| status.is_server_error());
    assert_eq!(recorded(failures, &[200, 400, 500, 503]).await, [500, 503]);
}

// S-088
#[tokio::test(start_paused = true)]
async fn unrecorded_status_releases_key_for_any_request() {
    let store = MemoryStore::new();
    let (app, effects) = app(IdempotencyLayer::new(store.clone()), async |n, _| match n {
        1 => StatusCode::BAD_GATEWAY.into_response(),
        _ => created(n),
    });
    assert_eq!(send(&app, order()).await.status, StatusCode::BAD_GATEWAY);
    assert!(store.is_empty());
    let other = send(&app, post("/orders", "k", "another order")).await;
    assert_eq!(other.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 2);
}

fn with_header(name: &'static str, value: &'static str) -> impl Fn(u64) -> Response + Clone {
    move |n| ([(name, value)], format!("execution {n}")).into_response()
}

// F-088, S-089
#[tokio::test(start_paused = true)]
async fn handler_can_opt_out_of_recording() {
    for (name, value) in [
        ("x-idempo-policy", "no-store"),
        ("X-IDEMPO-Policy", "No-Store"),
    ] {
        assert_eq!(executions(layer(), with_header(name, value)).await, 2);
    }
    assert_eq!(
        executions(layer(), with_header("x-idempo-policy", "keep")).await,
        1
    );
    let typed = |n: u64| {
        let mut res = format!("execution {n}").into_response();
        res.extensions_mut().insert(Retention::NoStore);
        res
    };
    assert_eq!(executions(layer(), typed).await, 2);
}

// F-088, S-092
#[tokio::test(start_paused = true)]
async fn control_headers_never_reach_client() {
    let both = [
        ("X-Idempo-Policy", "keep"),
        ("X-Idempo-Persist-For-Seconds", "5"),
    ];
    let (app, effects) = app(layer(), move |n, req: Request<Body>| {
        let status = match req.uri().path() {
            "/failing" => StatusCode::BAD_GATEWAY,
            _ => StatusCode::OK,
        };
        std::future::ready((status, both, format!("execution {n}")))
    });
    let keyless = Request::post("/").body(Body::empty()).expect("a request");
    let get = Request::get("/").body(Body::empty()).expect("a request");
    for req in [order(), order(), post("/failing", "f", ""), keyless, get] {
        let what = format!("{} {}", req.method(), req.uri());
        let response = send(&app, req).await;
        assert_eq!(response.header("x-idempo-policy"), None, "{what}");
        assert_eq!(
            response.header("x-idempo-persist-for-seconds"),
            None,
            "{what}"
        );
    }
    assert_eq!(effects.count(), 4);
}

// F-088, S-090
#[tokio::test(start_paused = true)]
async fn handler_can_set_retention() {
    let typed = |n: u64| {
        let mut res = format!("execution {n}").into_response();
        res.extensions_mut()
            .insert(Retention::For(Duration::from_secs(2)));
        res
    };
    let header = with_header("X-Idempo-Persist-For-Seconds", "2");
    for (app, effects) in [
        app(layer(), move |n, _req| std::future::ready(typed(n))),
        app(layer(), move |n, _req| std::future::ready(header(n))),
    ] {
        assert!(!send(&app, order()).await.is_replay());
        advance(Duration::from_secs(1)).await;
        assert!(send(&app, order()).await.is_replay());
        advance(Duration::from_millis(999)).await;
        assert!(
            send(&app, order()).await.is_replay(),
            "a replay does not extend it"
        );
        advance(Duration::from_millis(1)).await;
        assert!(!send(&app, order()).await.is_replay());
        assert_eq!(effects.count(), 2);
    }
}

// S-091
#[tokio::test(start_paused = true)]
async fn handler_retention_is_capped() {
    let capped = layer().with_max_retention(Ttl::from_secs(10));
    let response = with_header("x-idempo-persist-for-seconds", "86400");
    let (app, effects) = app(capped, move |n, _req| std::future::ready(response(n)));
    assert!(!send(&app, order()).await.is_replay());
    advance(Duration::from_secs(9)).await;
    assert!(send(&app, order()).await.is_replay());
    advance(Duration::from_secs(1)).await;
    assert!(!send(&app, order()).await.is_replay());
    assert_eq!(effects.count(), 2);
}

// S-093
#[tokio::test(start_paused = true)]
async fn record_expires_after_retention() {
    let (app, effects) = creating(layer());
    let day = Duration::from_secs(24 * 60 * 60);
    assert!(!send(&app, order()).await.is_replay());
    advance(day - Duration::from_millis(1)).await;
    assert!(send(&app, order()).await.is_replay());
    advance(Duration::from_millis(1)).await;
    let other = send(&app, post("/orders", "k", "another order")).await;
    assert_eq!(
        other.status,
        StatusCode::CREATED,
        "the old request has expired too"
    );
    assert_eq!(effects.count(), 2);
}

// F-017, S-094
#[tokio::test(start_paused = true)]
async fn panic_propagates_and_releases_key() {
    let store = MemoryStore::new();
    let (app, effects) = app(IdempotencyLayer::new(store.clone()), async |n, _| {
        assert!(n > 1, "the first one fails");
        tokio::task::yield_now().await;
        created(n)
    });
    let panicking = app.clone();
    let task = tokio::spawn(async move { send(&panicking, order()).await });
    let panic = task.await.expect_err("a panic").into_panic();
    assert_eq!(
        panic.downcast_ref::<&str>().copied(),
        Some("the first one fails"),
        "unchanged"
    );
    assert!(store.is_empty());
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert!(send(&app, order()).await.is_replay());
    assert_eq!(effects.count(), 2);
}

// S-096
#[tokio::test(start_paused = true)]
async fn panic_caught_outside_is_not_recorded() {
    let (app, effects) = app(layer(), async |n, _| {
        assert!(n > 1, "the first one fails");
        created(n)
    });
    let app = app.layer(tower_http::catch_panic::CatchPanicLayer::new());
    let failed = send(&app, order()).await;
    assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 2);
}

// F-017, S-095
#[tokio::test(start_paused = true)]
async fn panic_in_call_or_body_releases_key() {
    struct Panicking;
    impl http_body::Body for Panicking {
        type Data = bytes::Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<bytes::Bytes>, Infallible>>> {
            panic!("in the body");
        }
    }

    let store = MemoryStore::new();
    // The handler of `app` runs its closure in `Service::call`, before there is a future.
    let (app, effects) = app(IdempotencyLayer::new(store.clone()), move |n, _req| {
        assert!(n > 1, "in the call");
        std::future::ready(match n {
            2 => Response::new(Body::new(Panicking)),
            _ => created(n),
        })
    });
    for words in ["in the call", "in the body"] {
        let panicking = app.clone();
        let task = tokio::spawn(async move { send(&panicking, order()).await });
        let panic = task.await.expect_err("a panic").into_panic();
        assert_eq!(panic.downcast_ref::<&str>().copied(), Some(words));
        assert!(store.is_empty(), "{words}");
    }
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 3);
}

#[tokio::test(start_paused = true)]
async fn extensions_pass_through_in_both_directions() {
    #[derive(Clone, Debug, PartialEq)]
    struct Tag(u64);

    let (app, effects) = app(layer(), async |n, req: Request<Body>| {
        assert_eq!(req.extensions().get::<Tag>(), Some(&Tag(7)));
        let mut res = created(n);
        res.extensions_mut().insert(Tag(n));
        res
    });
    let mut req = order();
    req.extensions_mut().insert(Tag(7));
    let res = app.oneshot(req).await.expect("infallible");
    assert_eq!(res.extensions().get::<Tag>(), Some(&Tag(1)));
    assert_eq!(effects.count(), 1);
}

// F-080, S-098, S-293
#[tokio::test(start_paused = true)]
async fn aborted_response_reaches_client_aborted() {
    let store = MemoryStore::new();
    let (app, effects) = app(IdempotencyLayer::new(store.clone()), async |n, _| match n {
        1 => {
            let wait = Step::Wait(Duration::from_secs(1));
            let steps = [Step::from("ha"), wait, Step::from("lf"), Step::Fail];
            Response::new(Body::new(Scripted::new(steps)))
        }
        _ => created(n),
    });
    let res = app.clone().oneshot(order()).await.expect("infallible");
    assert_eq!(res.status(), StatusCode::OK);
    let mut body = res.into_body();
    let half = body.frame().await.expect("a frame").expect("data");
    assert_eq!(half.into_data().expect("data"), "half");
    let failure = body
        .frame()
        .await
        .expect("a frame")
        .expect_err("the failure");
    assert_eq!(failure.to_string(), "the body broke off");
    assert!(body.frame().await.is_none());
    assert!(store.is_empty());
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert_eq!(effects.count(), 2);
}

// F-008, S-099
#[tokio::test(start_paused = true)]
async fn record_is_stored_before_first_byte() {
    let store = FaultInjector::new(MemoryStore::new());
    let (app, effects) = creating(IdempotencyLayer::new(store.clone()));
    let res = app.clone().oneshot(order()).await.expect("infallible");
    assert_eq!(store.calls(Operation::Complete), 1);
    drop(res);
    let retry = send(&app, order()).await;
    assert!(retry.is_replay());
    assert_eq!(retry.text(), "{\"execution\":1}");
    assert_eq!(effects.count(), 1);
}

// S-100
#[tokio::test(start_paused = true)]
async fn no_byte_is_sent_before_record() {
    let store = FaultInjector::new(MemoryStore::new());
    store.enqueue(Operation::Complete, [Fault::HangCall]);
    let (app, effects) = creating(IdempotencyLayer::new(store.clone()));
    let response = tokio::spawn(app.clone().oneshot(order()));
    while store.calls(Operation::Complete) == 0 {
        tokio::task::yield_now().await;
    }
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert!(!response.is_finished());
    assert_eq!(effects.count(), 1);
    let duplicate = send(&app, order()).await;
    assert_eq!(duplicate.code(), "in-progress");
    response.abort();
}

#[tokio::test(start_paused = true)]
async fn every_execution_has_own_entry() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone());
    let count = Effects::default();
    let effects = count.clone();
    let app = axum::Router::new()
        .fallback(async move || created(effects.happen()))
        .layer(layer);
    for key in ["a", "b", "c"] {
        let first = read(
            app.clone()
                .oneshot(post("/orders", key, "order"))
                .await
                .expect("infallible"),
        )
        .await;
        let again = send(&app, post("/orders", key, "order")).await;
        assert_eq!(again.body, first.body);
    }
    assert_eq!((store.len(), count.count()), (3, 3));
}

// ---- Closures of the service that panic after the effect ----

/// Asserts that a retry was refused because of a tombstone.
fn assert_not_retained(preset: Preset, retry: &TestResponse) {
    assert_eq!(retry.status, StatusCode::CONFLICT, "{preset:?}");
    if preset != Preset::Idempo {
        assert_eq!(retry.code(), "response-not-retained");
        return;
    }
    let body: Value = serde_json::from_slice(&retry.body).expect("a JSON body");
    assert_eq!(body["ok"], false);
    let message = body["error"]["message"].as_str().expect("a message");
    let end = "its response could not be recorded";
    assert!(message.ends_with(end), "{message}");
}

// S-945, F-927
#[tokio::test(start_paused = true)]
async fn panicking_setting_leaves_tombstone() {
    let settings: [fn(IdempotencyLayer) -> IdempotencyLayer; 2] = [
        |layer| layer.with_recorded_statuses(|status| panic!("no rule for {status}")),
        |layer| layer.with_replayed_headers(|name| panic!("no rule for {name}")),
    ];
    // Two leases are shorter than the retention of `Idempo`.
    let lease = Ttl::from_secs(5);
    for preset in [Preset::Recommended, Preset::Idempo] {
        for setting in settings {
            let layer = IdempotencyLayer::with_preset(MemoryStore::new(), preset);
            let layer = layer.with_lease_ttl(lease);
            let (app, effects) = creating(setting(layer));
            let first = send(&app, order()).await;
            assert_eq!(
                (first.status, first.text()),
                (StatusCode::CREATED, "{\"execution\":1}")
            );
            for _ in 0..2 {
                assert_not_retained(preset, &send(&app, order()).await);
                // The lease of a held key has expired by then, and the next retry executes.
                advance(lease.as_duration() * 2).await;
            }
            assert_eq!(effects.count(), 1, "{preset:?}");
        }
    }
}

// S-946, F-927
#[tokio::test(start_paused = true)]
async fn panicking_error_response_is_problem_json() {
    let layer = layer().with_error_response(|error| panic!("no page for {error}"));
    let (app, effects) = app(layer, async |_n, _req| {
        Body::new(Scripted::new(["streamed"])).into_response()
    });
    assert_eq!(send(&app, order()).await.text(), "streamed");
    let reused = send(&app, post("/orders", "k", "another order")).await;
    assert_eq!(reused.code(), "key-reused");
    let event = Request::post("/orders")
        .header("idempotency-key", "\"")
        .body(Body::empty());
    let malformed = send(&app, event.expect("a request")).await;
    assert_eq!(malformed.code(), "malformed-key");
    assert_eq!(effects.count(), 1);
}
