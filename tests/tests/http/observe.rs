//! Observation: verdicts, bounds, and the switch of the enforcement.

use std::{
    collections::BTreeMap,
    future::ready,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Extension, Router,
    body::Body,
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use http::{Request, StatusCode};
use tests::{
    Effects, Scripted, Step, app,
    barrier::Barrier,
    created,
    observed::{Metrics, counted, observed, total},
    post as keyed, send,
};
use tokio::time::{Instant, sleep};
use tower::ServiceExt;
use tower_idempotency::{
    Enforcement::{self, Enforce, Observe, Off},
    EnforcementSwitch, ExecutionFailure, FingerprintBy, IdempotencyKey, IdempotencyLayer, Lease,
    MemoryStore, MissingKey, NeedsAttention, Principal, Retention, Rollout,
    conformance::{Fault, FaultInjector, Operation},
    inspect::Inspect as _,
    store::Store,
};

fn observing(store: impl Store) -> IdempotencyLayer {
    IdempotencyLayer::new(store).with_enforcement(Observe)
}

/// Serves a handler that reads the body and creates.
fn creating(layer: IdempotencyLayer) -> (Router, Effects) {
    app(layer, async |n, req: Request<Body>| {
        let body = axum::body::to_bytes(req.into_body(), usize::MAX).await;
        body.map(|_| created(n)).map_err(|error| error.to_string())
    })
}

/// Returns the outcomes that were counted, without their prefix.
fn outcomes(metrics: &Metrics) -> BTreeMap<String, f64> {
    labels(metrics, "idempotency_observed_total{outcome=")
}

fn coverage(metrics: &Metrics) -> BTreeMap<String, f64> {
    labels(metrics, "idempotency_unsafe_requests_total{coverage=")
}

fn labels(metrics: &Metrics, prefix: &str) -> BTreeMap<String, f64> {
    let of_metric = metrics.iter().filter_map(|(name, count)| {
        let label = name.strip_prefix(prefix)?.strip_suffix('}')?;
        Some((label.to_owned(), *count))
    });
    of_metric.collect()
}

fn counts<const N: usize>(counts: [(&str, u32); N]) -> BTreeMap<String, f64> {
    let counts = counts.into_iter();
    counts
        .map(|(name, count)| (name.to_owned(), f64::from(count)))
        .collect()
}

/// Lets the background tasks of a request run.
async fn run_background_tasks() {
    sleep(Duration::from_millis(1)).await;
}

/// Each store: one that replies at once, and one that is called in tasks.
fn stores() -> [(&'static str, IdempotencyLayer); 2] {
    [
        ("memory", observing(MemoryStore::new())),
        ("behind", observing(FaultInjector::new(MemoryStore::new()))),
    ]
}

// S-851
#[test]
fn verdicts_are_counted() {
    for (name, layer) in stores() {
        let metrics = counted(async {
            let (app, effects) = creating(layer);
            for body in ["a", "a", "b"] {
                let res = send(&app, keyed("/", "k", body)).await;
                assert_eq!(res.status, StatusCode::CREATED);
                assert!(!res.is_replay());
                run_background_tasks().await;
            }
            for key in ["\"\"", &"k".repeat(300)] {
                assert_eq!(send(&app, keyed("/", key, "")).await.status, 201);
            }
            let keyless = Request::post("/").body(Body::empty()).unwrap();
            assert_eq!(send(&app, keyless).await.status, 201);
            let get = Request::get("/").body(Body::empty()).unwrap();
            assert_eq!(send(&app, get).await.status, 201);
            assert_eq!(effects.count(), 7, "each request executes");
        });
        let expected = counts([
            ("fresh", 1),
            ("would_replay", 1),
            ("would_mismatch", 1),
            ("would_refuse_key", 2),
            ("no_key", 1),
        ]);
        assert_eq!(outcomes(&metrics), expected, "{name}");
        assert_eq!(coverage(&metrics), counts([("keyed", 5), ("no_key", 1)]));
        // The handler counts its executions in the body.
        let differs = metrics["idempotency_observed_differs_total{part=body}"];
        assert_eq!(differs, 1.0, "{name}");
        assert_eq!(total(&metrics, "idempotency_granted_total"), 0.0);
        assert_eq!(total(&metrics, "idempotency_refused_total"), 0.0);
    }
}

// S-851
#[test]
fn concurrent_duplicate_would_conflict() {
    for (name, layer) in stores() {
        let metrics = counted(async {
            let barrier = Barrier::closed();
            let passed = barrier.clone();
            let (app, effects) = app(layer, move |_, _| {
                let barrier = passed.clone();
                async move { barrier.pass().await }
            });
            let first = tokio::spawn(app.clone().oneshot(keyed("/", "k", "")));
            barrier.arrival().await;
            run_background_tasks().await;
            let second = tokio::spawn(app.clone().oneshot(keyed("/", "k", "")));
            barrier.arrival().await;
            barrier.release(2);
            for task in [first, second] {
                let Ok(res) = task.await.unwrap();
                assert_eq!(tests::read(res).await.status, StatusCode::OK);
            }
            run_background_tasks().await;
            assert_eq!(effects.count(), 2);
        });
        let expected = counts([("fresh", 1), ("would_conflict", 1)]);
        assert_eq!(outcomes(&metrics), expected, "{name}");
    }
}

type Answering = fn(u64) -> Response;

// S-855
#[test]
fn retry_is_judged_by_first_response() {
    const GAVE_UP: NeedsAttention = NeedsAttention::new("gave-up");
    let large = |_| Body::from(vec![0; 2000]).into_response();
    let endless = |_| Body::new(Scripted::new([Step::Data(vec![0; 2000].into())])).into_response();
    let cases: [(&str, Answering, &str, Option<&str>); 10] = [
        ("equal", |_| "paid".into_response(), "would_replay", None),
        (
            "other body",
            |n| format!("{n}").into_response(),
            "would_replay",
            Some("body"),
        ),
        (
            "error after success",
            |n| [StatusCode::OK, StatusCode::BAD_GATEWAY][n as usize - 1].into_response(),
            "would_replay",
            Some("status"),
        ),
        (
            "not recorded",
            |_| StatusCode::BAD_GATEWAY.into_response(),
            "fresh",
            None,
        ),
        (
            "no store",
            |_| (Extension(Retention::NoStore), "quote").into_response(),
            "fresh",
            None,
        ),
        (
            "no store by header",
            |_| [("x-idempo-policy", "no-store")].into_response(),
            "fresh",
            None,
        ),
        (
            "attention",
            |_| Extension(GAVE_UP).into_response(),
            "would_refuse_retry",
            None,
        ),
        ("too large", large, "would_refuse_retry", None),
        (
            "too large, unannounced",
            endless,
            "would_refuse_retry",
            None,
        ),
        (
            "event stream",
            |_| [("content-type", "text/event-stream")].into_response(),
            "would_refuse_retry",
            None,
        ),
    ];
    for (name, response, expected, differs) in cases {
        for (store, layer) in stores() {
            let metrics = counted(async {
                let layer = layer.with_response_limit(1999);
                let (app, effects) = app(layer, move |n, _| ready(response(n)));
                for _ in 0..2 {
                    let res = send(&app, keyed("/", "k", "")).await;
                    assert!(!res.headers.contains_key("x-idempo-policy"));
                    run_background_tasks().await;
                }
                assert_eq!(effects.count(), 2);
            });
            let found = outcomes(&metrics);
            let expected = match expected {
                "fresh" => counts([("fresh", 2)]),
                retry => counts([("fresh", 1), (retry, 1)]),
            };
            assert_eq!(found, expected, "{name}, {store}");
            let found = labels(&metrics, "idempotency_observed_differs_total{part=");
            let expected = differs.map(|part| (part.to_owned(), 1.0));
            assert_eq!(found, expected.into_iter().collect(), "{name}, {store}");
        }
    }
}

// S-855
#[test]
fn failed_execution_is_judged_by_settings() {
    let broken = || Body::new(Scripted::new([Step::Data("a".into()), Step::Fail]));
    for (failure, retry) in [
        (ExecutionFailure::Release, counts([("fresh", 2)])),
        (
            ExecutionFailure::NeedsAttention,
            counts([("fresh", 1), ("would_refuse_retry", 1)]),
        ),
    ] {
        let metrics = counted(async {
            let layer = observing(MemoryStore::new()).with_failure(failure);
            let (app, _) = app(layer, move |_, _| ready(broken().into_response()));
            for _ in 0..2 {
                let Ok(res) = app.clone().oneshot(keyed("/", "k", "")).await;
                let read = axum::body::to_bytes(res.into_body(), 99).await;
                assert!(read.is_err(), "the client sees the error");
                run_background_tasks().await;
            }
        });
        assert_eq!(outcomes(&metrics), retry);
    }
}

// S-918
/// Without a key of the client, the layer would not record the response.
#[test]
fn client_error_without_key_is_fresh_again() {
    for (has_key, expected) in [
        (false, counts([("fresh", 2)])),
        (true, counts([("fresh", 1), ("would_replay", 1)])),
    ] {
        let metrics = counted(async {
            let layer = observing(MemoryStore::new()).with_missing_key(MissingKey::Derive);
            let (app, _) = app(layer, |_, _| ready(StatusCode::CONFLICT));
            for _ in 0..2 {
                let mut req = keyed("/", "k", "");
                if !has_key {
                    req.headers_mut().remove("idempotency-key");
                }
                send(&app, req).await;
                run_background_tasks().await;
            }
        });
        assert_eq!(outcomes(&metrics), expected);
    }
}

// S-850
#[test]
fn handler_gets_no_lease() {
    let metrics = counted(async {
        let (app, _) = app(observing(MemoryStore::new()), async |_, req| {
            let extensions = req.extensions();
            let is_bare =
                extensions.get::<Lease>().is_none() && extensions.get::<IdempotencyKey>().is_none();
            assert!(is_bare);
            assert_eq!(req.headers()["idempotency-key"], "k");
        });
        assert_eq!(send(&app, keyed("/", "k", "")).await.status, 200);
    });
    assert_eq!(outcomes(&metrics), counts([("fresh", 1)]));
}

// S-852
#[test]
fn failing_store_changes_nothing() {
    let faults = [
        Fault::CallLost,
        Fault::HangCall,
        Fault::ReplyLost,
        Fault::Panic,
    ];
    for fault in faults {
        let metrics = counted(async {
            let store = Arc::new(FaultInjector::new(MemoryStore::new()));
            store.set_fault_for_all(&fault);
            let (app, effects) = creating(observing(Arc::clone(&store)));
            let began = Instant::now();
            for n in 0..10 {
                let res = send(&app, keyed("/", &format!("{n}"), "")).await;
                assert_eq!(res.status, StatusCode::CREATED, "{fault:?}");
            }
            assert_eq!(began.elapsed(), Duration::ZERO, "{fault:?}");
            assert_eq!(effects.count(), 10);
            // The tasks end by themselves: acquire and release take 4 s each at most.
            sleep(Duration::from_secs(10)).await;
            let calls = store.all_calls();
            sleep(Duration::from_secs(600)).await;
            assert_eq!(store.all_calls(), calls, "{fault:?}");
        });
        assert_eq!(
            outcomes(&metrics),
            counts([("not_judged", 10)]),
            "{fault:?}"
        );
        assert!(total(&metrics, "idempotency_store_error_total") >= 10.0);
    }
}

// S-852
/// No setting makes an observation permanent whose end does not reach the store.
#[test]
fn observation_without_end_expires() {
    let metrics = counted(async {
        let store = Arc::new(FaultInjector::new(MemoryStore::new()));
        store.set_fault(Operation::Complete, Fault::CallLost);
        store.set_fault(Operation::Release, Fault::CallLost);
        let layer = observing(Arc::clone(&store)).with_overdue_after(Duration::MAX);
        let (app, _) = creating(layer);
        for _ in 0..2 {
            send(&app, keyed("/", "k", "a")).await;
            run_background_tasks().await;
        }
        sleep(Duration::from_secs(49 * 60 * 60)).await;
        store.clear_faults();
        send(&app, keyed("/", "k", "a")).await;
        run_background_tasks().await;
    });
    let expected = counts([("fresh", 1), ("not_judged", 1), ("would_conflict", 1)]);
    assert_eq!(outcomes(&metrics), expected);
}

// S-853
#[test]
fn busy_store_leaves_requests_unjudged() {
    let metrics = counted(async {
        let store = Arc::new(FaultInjector::new(MemoryStore::new()));
        store.set_fault_for_all(&Fault::HangCall);
        let (app, effects) = creating(observing(Arc::clone(&store)));
        for n in 0..1000 {
            send(&app, keyed("/", &format!("{n}"), "")).await;
        }
        run_background_tasks().await;
        assert_eq!(
            store.calls(Operation::Acquire),
            48,
            "calls at the same time"
        );
        assert_eq!(effects.count(), 1000);
        sleep(Duration::from_secs(60)).await;
        store.clear_faults();
        send(&app, keyed("/", "after", "")).await;
        run_background_tasks().await;
    });
    let expected = counts([("not_judged", 1000), ("fresh", 1)]);
    assert_eq!(outcomes(&metrics), expected);
}

// S-854
#[test]
fn bodies_are_judged_only_if_seen() {
    type Reading = fn(Body) -> futures::Reading;
    let cases: [(&str, Reading, Request<Body>, &str); 8] = [
        ("read", futures::all, keyed("/", "k", "abc"), "fresh"),
        (
            "nothing read",
            futures::none,
            keyed("/", "k", "abc"),
            "not_judged",
        ),
        (
            "empty, nothing read",
            futures::none,
            keyed("/", "k", ""),
            "fresh",
        ),
        (
            "one frame of two read",
            futures::one_frame,
            keyed("/", "k", Body::new(Scripted::new(["ab", "c"]))),
            "not_judged",
        ),
        (
            "all announced bytes read",
            futures::one_frame,
            announcing(3, Body::new(Scripted::new(["abc", ""]))),
            "fresh",
        ),
        (
            "fewer bytes than announced",
            futures::all,
            announcing(4, Body::new(Scripted::new(["abc"]))),
            "not_judged",
        ),
        (
            "failed",
            futures::all,
            keyed(
                "/",
                "k",
                Body::new(Scripted::new([Step::Data("a".into()), Step::Fail])),
            ),
            "not_judged",
        ),
        (
            "too large",
            futures::all,
            keyed("/", "k", Body::new(Scripted::new(["abc", "def"]))),
            "would_exceed",
        ),
    ];
    for (name, read, req, expected) in cases {
        let metrics = counted(async {
            let layer = observing(MemoryStore::new()).with_request_limit(5);
            let (app, effects) = app(layer, move |_, req: Request<Body>| read(req.into_body()));
            assert_eq!(send(&app, req).await.status, StatusCode::OK, "{name}");
            assert_eq!(effects.count(), 1);
        });
        assert_eq!(outcomes(&metrics), counts([(expected, 1)]), "{name}");
    }
}

mod futures {
    //! Handlers that read a body.

    use std::{future::Future, pin::Pin};

    use axum::body::Body;
    use http_body_util::BodyExt;

    pub(super) type Reading = Pin<Box<dyn Future<Output = ()> + Send>>;

    pub(super) fn all(body: Body) -> Reading {
        Box::pin(async move { drop(body.collect().await) })
    }

    pub(super) fn none(_: Body) -> Reading {
        Box::pin(async {})
    }

    pub(super) fn one_frame(mut body: Body) -> Reading {
        Box::pin(async move { drop(body.frame().await) })
    }
}

fn announcing(length: u64, body: Body) -> Request<Body> {
    let mut req = keyed("/", "k", body);
    req.headers_mut().insert("content-length", length.into());
    req
}

// S-854
#[test]
fn announced_large_body_passes_unread() {
    let metrics = counted(async {
        let layer = observing(MemoryStore::new()).with_request_limit(5);
        let (app, effects) = app(layer, async |_, req: Request<Body>| {
            let body = axum::body::to_bytes(req.into_body(), 99).await;
            assert_eq!(body.unwrap(), "abcdef");
        });
        assert_eq!(send(&app, keyed("/", "k", "abcdef")).await.status, 200);
        assert_eq!(effects.count(), 1);
    });
    assert_eq!(outcomes(&metrics), counts([("would_exceed", 1)]));
}

// S-854
#[test]
fn client_that_leaves_ends_observation() {
    let metrics = counted(async {
        let barrier = Barrier::closed();
        let passed = barrier.clone();
        let (app, effects) = app(observing(MemoryStore::new()), move |n, _| {
            let barrier = passed.clone();
            async move {
                if n == 1 {
                    barrier.pass().await;
                }
            }
        });
        let left = tokio::spawn(app.clone().oneshot(keyed("/", "k", "")));
        barrier.arrival().await;
        left.abort();
        assert!(left.await.is_err());
        assert_eq!(send(&app, keyed("/", "k", "")).await.status, 200);
        assert_eq!(
            effects.count(),
            2,
            "the first one is cancelled, as without the layer"
        );
    });
    // Enforced, the first execution would continue, and its response would be replayed.
    let expected = counts([("fresh", 1), ("would_replay", 1)]);
    assert_eq!(outcomes(&metrics), expected);
    assert_eq!(total(&metrics, "idempotency_observed_differs_total"), 0.0);
    assert_eq!(total(&metrics, "idempotency_detached_total"), 0.0);
}

// S-854
#[test]
fn observed_fingerprints_equal_enforced_ones() {
    let json = |key: &str, body: &'static str| {
        let mut req = keyed("/", key, body);
        let media_type = http::HeaderValue::from_static("application/json");
        req.headers_mut().insert("content-type", media_type);
        req
    };
    let chunked = |key: &str| {
        keyed(
            "/",
            key,
            Body::new(Scripted::new(["{\"a\":1,", "\"b\":2}"])),
        )
    };
    let whole = |key: &str| keyed("/", key, "{\"a\":1,\"b\":2}");
    let custom = FingerprintBy::custom(|_, body| body[..1].to_vec());
    let by = |by: FingerprintBy| observing(MemoryStore::new()).with_fingerprint(by);
    for (name, layer, one, other, expected) in [
        (
            "chunks",
            by(FingerprintBy::raw_body()),
            whole("k"),
            chunked("k"),
            "would_replay",
        ),
        (
            "members",
            by(FingerprintBy::canonical_json()),
            json("k", "{\"a\":1,\"b\":2}"),
            json("k", "{ \"b\":2, \"a\":1 }"),
            "would_replay",
        ),
        (
            "raw members",
            by(FingerprintBy::raw_body()),
            json("k", "{\"a\":1,\"b\":2}"),
            json("k", "{\"b\":2,\"a\":1}"),
            "would_mismatch",
        ),
        (
            "head",
            by(FingerprintBy::head_only()),
            whole("k"),
            json("k", "x"),
            "would_mismatch",
        ),
        (
            "head, bodies",
            by(FingerprintBy::head_only()),
            whole("k"),
            chunked("k"),
            "would_replay",
        ),
        (
            "custom",
            by(custom.clone()),
            whole("k"),
            chunked("k"),
            "would_replay",
        ),
        (
            "custom, other",
            by(custom),
            whole("k"),
            keyed("/", "k", "x"),
            "would_mismatch",
        ),
    ] {
        let metrics = counted(async {
            let (app, _) = app(layer, async |_, req: Request<Body>| {
                drop(axum::body::to_bytes(req.into_body(), 99).await);
            });
            for req in [one, other] {
                send(&app, req).await;
                run_background_tasks().await;
            }
        });
        let expected = counts([("fresh", 1), (expected, 1)]);
        assert_eq!(outcomes(&metrics), expected, "{name}");
    }
}

// S-856
#[test]
fn panic_of_setting_changes_nothing() {
    let principal = || Principal::from_fn(|_| panic!("a principal"));
    let custom = || FingerprintBy::custom(|_, _| panic!("a fingerprint"));
    let layers = [
        observing(MemoryStore::new()).with_skip(|_| panic!("a skip")),
        observing(MemoryStore::new()).with_principal(principal()),
        observing(MemoryStore::new()).with_fingerprint(custom()),
        observing(FaultInjector::new(MemoryStore::new())).with_fingerprint(custom()),
    ];
    for layer in layers {
        let metrics = counted(async {
            let (app, effects) = creating(layer);
            assert_eq!(send(&app, keyed("/", "k", "")).await.status, 201);
            run_background_tasks().await;
            assert_eq!(effects.count(), 1);
        });
        assert_eq!(outcomes(&metrics), counts([("not_judged", 1)]));
    }
}

// S-851
#[test]
fn panic_of_handler_is_failure() {
    let metrics = counted(async {
        let (app, _) = app(observing(MemoryStore::new()), async |n, _| {
            assert_ne!(n, 1, "the first execution fails");
        });
        let first = tokio::spawn(app.clone().oneshot(keyed("/", "k", "")));
        assert!(first.await.unwrap_err().is_panic());
        run_background_tasks().await;
        assert_eq!(send(&app, keyed("/", "k", "")).await.status, 200);
    });
    assert_eq!(outcomes(&metrics), counts([("fresh", 2)]));
}

// S-861
#[test]
fn layer_that_is_off_calls_no_store() {
    let metrics = counted(async {
        let store = Arc::new(FaultInjector::new(MemoryStore::new()));
        let layer = IdempotencyLayer::new(Arc::clone(&store))
            .with_missing_key(MissingKey::Reject)
            .with_enforcement(Off);
        let (app, effects) = creating(layer);
        for req in [keyed("/", "k", ""), keyed("/", "k", "")] {
            assert_eq!(send(&app, req).await.status, 201);
        }
        let keyless = Request::post("/").body(Body::empty()).unwrap();
        assert_eq!(send(&app, keyless).await.status, 201);
        assert_eq!((effects.count(), store.all_calls()), (3, 0));
    });
    assert_eq!(outcomes(&metrics), counts([]));
    assert_eq!(coverage(&metrics), counts([("off", 3)]));
}

// S-860
#[test]
fn coverage_is_counted_in_each_mode() {
    for mode in [Observe, Enforce] {
        let (metrics, log) = observed("off", async {
            let layer = IdempotencyLayer::new(MemoryStore::new())
                .with_skip(|head| head.uri.path() == "/skipped")
                .with_enforcement(mode);
            let (app, _) = creating(layer);
            let request = |method: &str, path: &str, lines: &[(&str, &str)]| {
                let mut req = Request::builder().method(method).uri(path);
                for (name, value) in lines {
                    req = req.header(*name, *value);
                }
                req.body(Body::empty()).unwrap()
            };
            let upgrade = [("connection", "upgrade"), ("upgrade", "example/1")];
            let mut grpc = request("POST", "/", &[("content-type", "application/grpc")]);
            *grpc.version_mut() = http::Version::HTTP_2;
            for req in [
                request("GET", "/", &[]),
                request("OPTIONS", "/", &[]),
                request("PROPFIND", "/", &[("idempotency-key", "c")]),
                request("POST", "/", &[]),
                request("PUT", "/skipped", &[]),
                request("PUT", "/skipped", &[("idempotency-key", "a")]),
                request("DELETE", "/", &[("idempotency-key", "b")]),
                request("PATCH", "/", &[("idempotency-key", "\"")]),
                request("POST", "/", &upgrade),
                grpc,
            ] {
                send(&app, req).await;
            }
        });
        assert_eq!(log, "");
        let expected = counts([
            ("no_key", 1),
            ("skip", 2),
            ("keyed", 2),
            ("upgrade", 1),
            ("grpc", 1),
        ]);
        assert_eq!(coverage(&metrics), expected, "{mode}");
    }
}

// S-860
#[test]
fn required_and_derived_keys_are_covered() {
    for (setting, expected) in [
        (MissingKey::Reject, "no_key"),
        (MissingKey::Derive, "derived"),
    ] {
        for mode in [Observe, Enforce] {
            let metrics = counted(async {
                let layer = IdempotencyLayer::new(MemoryStore::new())
                    .with_missing_key(setting)
                    .with_enforcement(mode);
                let (app, _) = creating(layer);
                let req = Request::post("/").body(Body::empty()).unwrap();
                send(&app, req).await;
            });
            let expected = counts([(expected, 1)]);
            assert_eq!(coverage(&metrics), expected, "{setting:?} {mode}");
        }
    }
}

// S-862
#[test]
fn enforcement_starts_clean() {
    let metrics = counted(async {
        let entries = MemoryStore::new().with_details();
        let store = Arc::new(FaultInjector::new(entries.clone()));
        let switch = EnforcementSwitch::new(Observe);
        let layer = IdempotencyLayer::new(Arc::clone(&store)).with_enforcement(&switch);
        let (app, effects) = creating(layer);
        let order = || keyed("/", "k", "one espresso");
        send(&app, order()).await;
        run_background_tasks().await;
        switch.set(Enforce);
        let first = send(&app, order()).await;
        let retry = send(&app, order()).await;
        assert!(!first.is_replay() && retry.is_replay());
        assert_eq!(effects.count(), 2);
        let claims = store.claims();
        let (observed, enforced) = (&claims[0], &claims[1]);
        assert_ne!(observed.id, enforced.id);
        assert_ne!(observed.scope, enforced.scope, "shares of the store");
        assert!(observed.operation.starts_with("observed: "), "{observed:?}");
        for (claim, is_observed) in [(observed, true), (enforced, false)] {
            let found = entries.get(&claim.id).await.unwrap().unwrap();
            assert_eq!(found.entry.is_observed(), is_observed, "{claim:?}");
        }
    });
    assert_eq!(metrics["idempotency_enforcement_changed_total"], 1.0);
}

// S-858
#[test]
fn execution_ends_under_its_enforcement() {
    counted(async {
        let barrier = Barrier::closed();
        let passed = barrier.clone();
        let switch = EnforcementSwitch::new(Enforce);
        let layer = IdempotencyLayer::new(MemoryStore::new()).with_enforcement(&switch);
        let (app, effects) = app(layer, move |n, _| {
            let barrier = passed.clone();
            async move {
                if n == 1 {
                    barrier.pass().await;
                }
                format!("{n}")
            }
        });
        let order = || keyed("/", "k", "");
        let first = tokio::spawn(app.clone().oneshot(order()));
        barrier.arrival().await;
        switch.set(Observe);
        // The request is no longer protected: it executes concurrently with the first one.
        assert_eq!(send(&app, order()).await.text(), "2");
        barrier.release(1);
        let Ok(res) = first.await.unwrap();
        assert_eq!(tests::read(res).await.text(), "1");
        for mode in [Off, Observe, Enforce] {
            switch.set(mode);
        }
        let retry = send(&app, order()).await;
        assert_eq!((retry.text(), retry.is_replay()), ("1", true));
        assert_eq!(effects.count(), 2);
    });
}

// S-859
#[test]
fn retry_executes_again_while_observed() {
    counted(async {
        let switch = EnforcementSwitch::new(Enforce);
        let layer = IdempotencyLayer::new(MemoryStore::new()).with_enforcement(&switch);
        let (app, effects) = creating(layer);
        let order = || keyed("/", "k", "");
        let first = send(&app, order()).await;
        for (mode, effects_so_far) in [(Observe, 2), (Off, 3)] {
            switch.set(mode);
            assert!(!send(&app, order()).await.is_replay());
            assert_eq!(effects.count(), effects_so_far);
        }
        switch.set(Enforce);
        let retry = send(&app, order()).await;
        assert!(retry.is_replay());
        assert_eq!(retry.body, first.body, "the record of the first execution");
        assert_eq!(effects.count(), 3);
    });
}

// S-857
#[test]
fn callers_of_share_are_protected_as_whole() {
    counted(async {
        let switch = EnforcementSwitch::new(Observe);
        let layer = IdempotencyLayer::new(MemoryStore::new()).with_enforcement(&switch);
        let (app, effects) = creating(layer);
        let order = |caller: u32, key: u32| {
            let mut req = keyed("/", &format!("{key}"), "");
            let token = format!("Bearer {caller}").parse().unwrap();
            req.headers_mut().insert("authorization", token);
            req
        };
        let mut protected = 0;
        for percent in [0, 30, 60, 100] {
            switch.set(Rollout::new(percent, Enforce, Observe).unwrap());
            let mut now = 0;
            for caller in 0..100 {
                // Each share gets other keys, because enforced requests are recorded.
                let keys = u32::from(percent) * 10..u32::from(percent) * 10 + 5;
                let before = effects.count();
                for key in keys.clone().chain(keys) {
                    send(&app, order(caller, key)).await;
                }
                match effects.count() - before {
                    5 => now += 1,
                    10 => {}
                    half => panic!("{half} effects of ten requests: half in"),
                }
            }
            assert!(now >= protected, "a caller left the share");
            assert_eq!(percent == 0, now == 0);
            assert_eq!(percent == 100, now == 100);
            protected = now;
        }
    });
}

// S-857
#[test]
fn caller_without_principal_belongs_to_rest() {
    #[derive(Clone)]
    struct User(u64);
    counted(async {
        let rollout = Rollout::new(99, Enforce, Observe).unwrap();
        let principal = Principal::extension(|user: &User| user.0.to_be_bytes());
        let layer = IdempotencyLayer::new(MemoryStore::new())
            .with_principal(principal)
            .with_enforcement(rollout);
        let (app, effects) = creating(layer);
        for _ in 0..2 {
            assert_eq!(send(&app, keyed("/", "k", "")).await.status, 201);
        }
        assert_eq!(effects.count(), 2, "enforced, it would be 500");
        let mut req = keyed("/", "k", "");
        req.extensions_mut().insert(User(1));
        assert_eq!(send(&app, req).await.status, 201);
    });
}

// S-858
#[test]
fn routes_switch_independently() {
    counted(async {
        let layer = IdempotencyLayer::new(MemoryStore::new());
        let switch = EnforcementSwitch::new(Enforcement::Observe);
        let effects = Effects::default();
        let handler = |effects: &Effects| {
            let effects = effects.clone();
            post(async move || Bytes::from(effects.happen().to_string()))
        };
        let orders = handler(&effects).route_layer(layer.clone());
        let reports = handler(&effects).route_layer(layer.with_enforcement(&switch));
        let app = Router::new()
            .route("/orders", orders)
            .route("/reports", reports);
        for (path, effects_of_route) in [("/orders", 1), ("/reports", 2)] {
            let before = effects.count();
            for _ in 0..2 {
                send(&app, keyed(path, path, "")).await;
            }
            assert_eq!(effects.count() - before, effects_of_route, "{path}");
        }
        switch.set(Enforce);
        let before = effects.count();
        for _ in 0..2 {
            send(&app, keyed("/reports", "r", "")).await;
        }
        assert_eq!(effects.count() - before, 1);
    });
}

/// The number of executions under a lease and without one, by key.
type Executions = Arc<Mutex<BTreeMap<String, [u32; 2]>>>;

// S-858, S-859
/// Every request gets the response of one execution, for any changes of the switch. A key that was executed under a lease
/// is replayed afterwards, and no other one is.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn switch_under_load_loses_nothing() {
    const SENDERS: u64 = 8;
    const KEYS_PER_SENDER: u64 = 250;
    let executions = Executions::default();
    // The total numbers of executions under a lease and without one.
    let totals = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let switch = EnforcementSwitch::new(Enforce);
    let layer = IdempotencyLayer::new(MemoryStore::new()).with_enforcement(&switch);
    let (counts, counted) = (Arc::clone(&executions), Arc::clone(&totals));
    let (app, effects) = app(layer, move |n, req: Request<Body>| {
        let key = req.headers()["idempotency-key"]
            .to_str()
            .unwrap()
            .to_owned();
        let is_leased = req.extensions().get::<Lease>().is_some();
        counts.lock().unwrap().entry(key).or_default()[usize::from(!is_leased)] += 1;
        counted[usize::from(!is_leased)].fetch_add(1, Ordering::SeqCst);
        async move {
            tokio::task::yield_now().await;
            format!("{n}")
        }
    });
    let flipping = tokio::spawn({
        let switch = switch.clone();
        let half = Rollout::new(50, Enforce, Observe).unwrap();
        async move {
            for rollout in [Observe.into(), Enforce.into(), half, Off.into()]
                .into_iter()
                .cycle()
            {
                switch.set(rollout);
                tokio::task::yield_now().await;
            }
        }
    });
    // The senders continue until both kinds of execution have occurred.
    let began = Instant::now();
    let senders = (0..SENDERS).map(|sender| {
        let (app, totals) = (app.clone(), Arc::clone(&totals));
        tokio::spawn(async move {
            let is_done = |sent: u64| {
                let mut totals = totals.iter().map(|total| total.load(Ordering::SeqCst));
                sent >= KEYS_PER_SENDER
                    && (totals.all(|total| total > 0) || began.elapsed() > Duration::from_secs(60))
            };
            let mut sent = 0;
            while !is_done(sent) {
                let key = sent * SENDERS + sender;
                let res = send(&app, keyed("/", &format!("{key}"), "body")).await;
                assert_eq!(res.status, StatusCode::OK);
                assert!(!res.is_replay());
                sent += 1;
            }
            sent
        })
    });
    let mut keys = 0;
    for sender in senders.collect::<Vec<_>>() {
        keys += sender.await.unwrap();
    }
    flipping.abort();
    assert!(flipping.await.unwrap_err().is_cancelled());
    assert_eq!(effects.count(), keys, "each request executed once");

    switch.set(Enforce);
    let before = executions.lock().unwrap().clone();
    let leased = before.values().filter(|count| **count == [1, 0]).count() as u64;
    let unleased = before.values().filter(|count| **count == [0, 1]).count() as u64;
    assert_eq!(leased + unleased, keys);
    assert!(
        leased > 0 && unleased > 0,
        "both occurred: {leased}, {unleased}"
    );
    for (key, count) in &before {
        let retry = send(&app, keyed("/", key, "body")).await;
        assert_eq!(retry.is_replay(), count[0] == 1, "{key}");
    }
    assert_eq!(effects.count(), keys + unleased);
}
