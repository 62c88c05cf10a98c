//! Effect and record in one transaction: the seam for stores with transactions, on a toy of a database.

use std::{
    future::{Future, poll_fn},
    task::Poll,
    time::Duration,
};

use axum::{
    Extension, Router,
    body::Body,
    middleware::{from_fn, map_response},
    response::{IntoResponse, Response},
};
use http::{HeaderName, HeaderValue, Request, StatusCode, header};
use metrics_util::debugging::DebuggingRecorder;
use tests::{
    Answer, Effects, Scripted, Step, app, created,
    gate::{Gate, bounded, eventually, within},
    ledger::{Failed, Fate, Ledger},
    observed::{read, total},
    post, send,
};
use tokio::time::{advance, sleep};
use tower::{Layer, ServiceExt};
use tower_idempotency::{
    ErrorKind, ExecutionFailure, FingerprintBy, IdempotencyLayer, Lease, MemoryStore,
    NeedsAttention, OrphanPolicy, Retention, Ttl, Unrecordable,
    conformance::{Fault, FaultInjector, Hold, Operation},
    run_once::WorkError,
    store::{Acquired, Claim, Store, StoreError},
    transaction::{LeaseExt, NotRecordedReason},
};

/// A service on the ledger: the handler is given it, its lease and which execution it is.
fn bank<H, F>(ledger: &Ledger, handler: H) -> (Router, Effects)
where
    H: FnOnce(Ledger, Lease, u64) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response> + Send + 'static,
{
    behind(IdempotencyLayer::new(ledger.clone()), ledger, handler)
}

fn behind<H, F>(layer: IdempotencyLayer, ledger: &Ledger, handler: H) -> (Router, Effects)
where
    H: FnOnce(Ledger, Lease, u64) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response> + Send + 'static,
{
    let ledger = ledger.clone();
    app(layer, move |n, req| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        handler.clone()(ledger.clone(), lease, n)
    })
}

/// Charges, and answers 201.
async fn charge(ledger: Ledger, lease: Lease, n: u64) -> Response {
    commit(&ledger, &lease, n, created(n)).await
}

/// Writes a row, and commits it with the answer.
async fn commit(ledger: &Ledger, lease: &Lease, n: u64, res: Response) -> Response {
    let mut tx = ledger.begin();
    tx.insert(format!("charge {n}"));
    match tx.commit(lease, res).await {
        Ok(res) => res.into_response(),
        Err(Failed::NotRecordable(res)) => (*res).into_response(),
        Err(Failed::Store(error)) => failed(&error),
    }
}

fn failed(error: &StoreError) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
}

fn order() -> Request<Body> {
    post("/orders", "k", "{}")
}

fn leases_lost(recorder: &DebuggingRecorder) -> f64 {
    total(&read(recorder), "idempotency_lease_lost_total")
}

/// Checks that the handler's effect happened once, that it is answered with its record, and that no retry changes that.
async fn assert_charged_once(ledger: &Ledger, app: &Router) {
    for _ in 0..2 {
        let retry = send(app, order()).await;
        assert_eq!(retry.status, StatusCode::CREATED);
        assert!(retry.is_replay(), "{retry:?}");
        assert_eq!(retry.text(), "{\"execution\":1}");
    }
    assert_eq!(ledger.rows().await, ["charge 1"]);
}

fn first_of(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    assert_eq!(answer.text(), "{\"execution\":1}");
}

/// Asserts that the outcome is unknown, and that the answer is retryable if `later` is set.
fn assert_unknown(answer: &Answer, later: bool) {
    assert_eq!(answer.code(), "outcome-unknown", "{answer:?}");
    assert_eq!(answer.is_retryable(), later, "{answer:?}");
    assert_eq!(answer.header("retry-after").is_some(), later, "{answer:?}");
}

const LONG: Duration = Duration::from_secs(600);

// ---- Committed ----

// S-168
#[tokio::test(start_paused = true)]
async fn committed_response_is_sent_without_completion() {
    let ledger = Ledger::default();
    let (app, executions) = bank(&ledger, charge);
    let first = send(&app, order()).await;
    first_of(&first);
    assert!(!first.is_replay());
    assert_eq!(ledger.store.all_calls(), 1, "an acquire");
    assert_eq!(ledger.calls(Operation::Acquire), 1);
    assert_charged_once(&ledger, &app).await;
    assert_eq!(executions.count(), 1);
    assert_eq!(ledger.store.all_calls(), 3, "an acquire for each replay");
}

/// Everything that a header can be: replayed or not, repeated, of the connection, of the layer.
fn rich(body: Body) -> Response {
    let mut res = Response::new(body);
    *res.status_mut() = StatusCode::ACCEPTED;
    for (name, value) in [
        ("content-type", "text/plain"),
        ("link", "<a>; rel=a"),
        ("set-cookie", "a=1"),
        ("link", "<b>; rel=b"),
        ("set-cookie", "b=2"),
        ("date", "Sat, 21 Nov 2026 08:00:00 GMT"),
        ("connection", "x-hop"),
        ("x-hop", "1"),
        ("x-request-id", "7"),
        ("x-idempo-persist-for-seconds", "60"),
    ] {
        let name = HeaderName::from_static(name);
        res.headers_mut()
            .append(name, HeaderValue::from_static(value));
    }
    res.extensions_mut().insert("an extension");
    res
}

// S-169
#[tokio::test(start_paused = true)]
async fn committed_and_recorded_responses_are_equal() {
    let trailers = || {
        let mut trailers = http::HeaderMap::new();
        trailers.insert("x-sum", HeaderValue::from_static("42"));
        trailers
    };
    let kinds: [fn() -> Body; 4] = [
        || Body::empty(),
        || Body::from("whole"),
        || Body::new(Scripted::new(["in ", "pieces"])),
        || Body::from("x".repeat(20_000)),
    ];
    for kind in kinds {
        let committing = Ledger::default();
        let (committing, _) = bank(&committing, async move |ledger, lease, n| {
            commit(&ledger, &lease, n, rich(kind())).await
        });
        let (plain, _) = app(
            IdempotencyLayer::new(Ledger::default()),
            move |_, _| async move { rich(kind()) },
        );
        for attempt in ["first", "retry"] {
            let committed = committing
                .clone()
                .oneshot(order())
                .await
                .expect("infallible");
            let other = plain.clone().oneshot(order()).await.expect("infallible");
            let extensions =
                [&committed, &other].map(|res| res.extensions().get::<&str>().copied());
            assert_eq!(extensions[0], extensions[1], "{attempt}");
            let (committed, other) = (tests::read(committed).await, tests::read(other).await);
            assert_eq!(committed, other, "{attempt}");
            assert!(
                !committed
                    .headers
                    .contains_key("x-idempo-persist-for-seconds")
            );
        }
    }
    // Trailers, and a length that the handler gave.
    let ledger = Ledger::default();
    let (app, _) = bank(&ledger, async move |ledger, lease, n| {
        let mut steps = vec![Step::from("body")];
        if n == 1 {
            steps.push(Step::Trailers(trailers()));
        }
        let mut res = Response::new(Body::new(Scripted::new(steps)));
        let trailer = HeaderValue::from_static("x-sum");
        res.headers_mut().insert(header::TRAILER, trailer);
        commit(&ledger, &lease, n, res).await
    });
    for _ in 0..2 {
        let res = app.clone().oneshot(order()).await.expect("infallible");
        assert_eq!(res.headers()["trailer"], "x-sum");
        let body = http_body_util::BodyExt::collect(res.into_body())
            .await
            .expect("a whole body");
        assert_eq!(body.trailers(), Some(&trailers()));
        assert_eq!(body.to_bytes(), "body");
    }
}

// S-107
#[tokio::test(start_paused = true)]
async fn committed_response_keeps_sensitive_mark() {
    let ledger = Ledger::default();
    let (app, _) = bank(&ledger, async |ledger, lease, n| {
        let mut res = created(n);
        let mut token = HeaderValue::from_static("hunter2");
        token.set_sensitive(true);
        res.headers_mut().insert("x-token", token);
        commit(&ledger, &lease, n, res).await
    });
    for replayed in [false, true] {
        let answer = send(&app, order()).await;
        assert_eq!(answer.is_replay(), replayed);
        assert!(answer.headers["x-token"].is_sensitive(), "{replayed}");
    }
}

// S-170
#[tokio::test(start_paused = true)]
async fn response_after_commit_adds_only_unrecorded_headers() {
    let ledger = Ledger::default();
    let books = ledger.clone();
    let handler = async move |lease: Lease| charge(books, lease, 1).await;
    let app = Router::new()
        .route("/orders", axum::routing::post(handler))
        .layer(map_response(async |mut res: Response| {
            *res.status_mut() = StatusCode::IM_A_TEAPOT;
            let headers = res.headers_mut();
            headers.insert("set-cookie", HeaderValue::from_static("session=1"));
            headers.insert("x-after", HeaderValue::from_static("1"));
            headers.insert("location", HeaderValue::from_static("/elsewhere"));
            headers.insert("content-length", HeaderValue::from_static("3"));
            headers.insert("x-idempo-policy", HeaderValue::from_static("no-store"));
            res.map(|_| Body::from("tea"))
        }))
        .layer(IdempotencyLayer::new(ledger.clone()));
    let first = send(&app, order()).await;
    first_of(&first);
    assert_eq!(first.header("set-cookie"), Some("session=1"));
    assert_eq!(first.header("location"), Some("/orders/1"));
    assert_eq!(first.header("content-length"), Some("15"));
    assert_eq!(first.header("x-after"), None);
    assert_eq!(first.header("x-idempo-policy"), None);
    assert_charged_once(&ledger, &app).await;
}

// S-171
#[tokio::test(start_paused = true)]
async fn other_response_after_commit_is_discarded() {
    for (status, retention) in [
        (StatusCode::OK, None),
        (StatusCode::CONFLICT, None),
        (StatusCode::BAD_GATEWAY, None),
        (StatusCode::OK, Some(Retention::NoStore)),
    ] {
        let ledger = Ledger::default();
        let (app, _) = bank(&ledger, async move |ledger, lease, n| {
            charge(ledger, lease, n).await;
            let mut res = (status, "something else").into_response();
            res.extensions_mut().extend(
                retention
                    .map(|retention| {
                        let mut extensions = http::Extensions::new();
                        extensions.insert(retention);
                        extensions
                    })
                    .unwrap_or_default(),
            );
            res
        });
        let first = send(&app, order()).await;
        first_of(&first);
        assert_charged_once(&ledger, &app).await;
        assert_eq!(
            ledger.calls(Operation::Complete) + ledger.calls(Operation::Release),
            0
        );
    }
}

// S-172
#[tokio::test(start_paused = true)]
async fn service_error_after_commit_is_discarded() {
    let ledger = Ledger::default();
    let books = ledger.clone();
    let service = tower::service_fn(move |req: Request<tower_idempotency::Body<Body>>| {
        let ledger = books.clone();
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        async move {
            charge(ledger, lease, 1).await;
            Err::<Response, _>("it failed")
        }
    });
    let service = IdempotencyLayer::new(ledger.clone()).layer(service);
    for replayed in [false, true] {
        let res = service.clone().oneshot(order()).await.expect("an answer");
        let answer = tests::read(res.map(Body::new)).await;
        first_of(&answer);
        assert_eq!(answer.is_replay(), replayed);
    }
    assert_eq!(ledger.rows().await, ["charge 1"]);
    assert_eq!(ledger.calls(Operation::Release), 0);
}

// S-173
#[tokio::test(start_paused = true)]
async fn panic_after_commit_keeps_record() {
    let ledger = Ledger::default();
    let (app, executions) = bank(&ledger, async |ledger, lease, n| {
        charge(ledger, lease, n).await;
        panic!("after the commit")
    });
    let panicking = app.clone();
    let task = tokio::spawn(async move { send(&panicking, order()).await });
    assert!(task.await.expect_err("a panic").is_panic());
    assert_charged_once(&ledger, &app).await;
    assert_eq!(
        (executions.count(), ledger.calls(Operation::Release)),
        (1, 0)
    );
}

/// The future's output, unless it is still pending when it has been polled that often: then it is dropped.
async fn dropped_after<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = Box::pin(future);
    let mut left = polls;
    poll_fn(move |cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

// S-174
#[tokio::test(start_paused = true)]
async fn disconnect_around_commit_leaves_one_effect() {
    bounded(async {
        let mut dropped = 0;
        for fate in [Fate::Committed, Fate::ReplyLost] {
            for polls in 0..100 {
                let ledger = Ledger::default();
                ledger.next(fate.clone());
                ledger.store.set_script(|_, _| Fault::Yield);
                let layer = IdempotencyLayer::new(ledger.clone());
                let (app, executions) = behind(layer.clone(), &ledger, async |ledger, lease, n| {
                    tokio::task::yield_now().await;
                    let res = charge(ledger, lease, n).await;
                    tokio::task::yield_now().await;
                    res
                });
                let request = app.clone().oneshot(order());
                let done = dropped_after(polls, request).await.is_some();
                eventually("nothing is in flight", || layer.in_flight() == 0).await;
                let rows = ledger.rows().await.len();
                if !done && rows == 1 {
                    dropped += 1;
                }
                send(&app, order()).await;
                assert_charged_once(&ledger, &app).await;
                assert_eq!(executions.count(), 1);
                if done {
                    break;
                }
            }
        }
        assert!(dropped > 5, "{dropped} drops with the effect done");
    })
    .await;
}

// S-175
#[tokio::test(start_paused = true)]
async fn first_of_two_commits_is_recorded() {
    let ledger = Ledger::default();
    let (app, _) = bank(&ledger, async |ledger, lease, n| {
        charge(ledger.clone(), lease.clone(), n).await;
        let second = commit(&ledger, &lease, 2, "second".into_response()).await;
        assert_eq!(second.status(), StatusCode::INTERNAL_SERVER_ERROR);
        second
    });
    first_of(&send(&app, order()).await);
    assert_charged_once(&ledger, &app).await;
}

// S-177
#[tokio::test(start_paused = true)]
async fn committed_lease_is_not_renewed() {
    let ledger = Ledger::default();
    let (app, _) = bank(&ledger, async |ledger, lease, n| {
        sleep(Duration::from_secs(60)).await;
        assert!(lease.is_held(), "it was renewed");
        let renewals = ledger.calls(Operation::Renew);
        assert!(renewals > 10, "{renewals}");
        let res = charge(ledger.clone(), lease.clone(), n).await;
        assert!(!lease.is_held());
        lease.lost().await;
        sleep(Duration::from_secs(60)).await;
        assert_eq!(
            ledger.calls(Operation::Renew),
            renewals,
            "renewed after its end"
        );
        res
    });
    first_of(&send(&app, order()).await);
    assert_charged_once(&ledger, &app).await;
}

// ---- Records ----

// S-178
#[tokio::test(start_paused = true)]
async fn committed_record_has_usual_retention() {
    const HOUR: Duration = Duration::from_secs(3600);
    let cases: [(fn(Response) -> Response, Duration); 4] = [
        (|res| res, 24 * HOUR),
        (
            |mut res| {
                let name = "x-idempo-persist-for-seconds";
                res.headers_mut()
                    .insert(name, HeaderValue::from_static("7"));
                res
            },
            Duration::from_secs(7),
        ),
        (
            |res| (Extension(Retention::For(Duration::from_secs(9))), res).into_response(),
            Duration::from_secs(9),
        ),
        (
            |res| (Extension(Retention::For(10_000 * HOUR)), res).into_response(),
            100 * HOUR,
        ),
    ];
    for (with, kept) in cases {
        let ledger = Ledger::default();
        let layer = IdempotencyLayer::new(ledger.clone())
            .with_max_retention(Ttl::try_from(100 * HOUR).expect("in range"));
        let (app, executions) = behind(layer, &ledger, async move |ledger, lease, n| {
            commit(&ledger, &lease, n, with(created(n))).await
        });
        send(&app, order()).await;
        advance(kept - Duration::from_millis(1)).await;
        assert!(send(&app, order()).await.is_replay(), "{kept:?}");
        advance(Duration::from_millis(1)).await;
        assert!(!send(&app, order()).await.is_replay(), "{kept:?}");
        assert_eq!(executions.count(), 2);
    }
}

// S-179
#[tokio::test(start_paused = true)]
async fn unrecorded_response_cannot_be_committed() {
    let broken = || Body::new(Scripted::new([Step::from("half"), Step::Fail]));
    // The layer would find it whole: what is left of it no longer says how long it should have been.
    let longer = || Body::new(Scripted::new(["longer than it says"]).of_length(4));
    let kinds: [(NotRecordedReason, Box<dyn Fn() -> Response + Send + Sync>); 6] = [
        (
            NotRecordedReason::Status,
            Box::new(|| StatusCode::BAD_GATEWAY.into_response()),
        ),
        (
            NotRecordedReason::NoStore,
            Box::new(|| [("x-idempo-policy", "no-store")].into_response()),
        ),
        (
            NotRecordedReason::NoStore,
            Box::new(|| Extension(Retention::NoStore).into_response()),
        ),
        (
            NotRecordedReason::BrokenBody,
            Box::new(move || Response::new(broken())),
        ),
        (
            NotRecordedReason::BrokenBody,
            Box::new(move || Response::new(longer())),
        ),
        (
            NotRecordedReason::Unrecordable,
            Box::new(|| Response::new(Body::from("x".repeat(200)))),
        ),
    ];
    for (reason, kind) in kinds {
        let kind = std::sync::Arc::new(kind);
        let ledger = Ledger::default();
        let layer = IdempotencyLayer::new(ledger.clone())
            .with_response_limit(100)
            .with_unrecordable(Unrecordable::Release);
        let (app, executions) = behind(layer, &ledger, async move |ledger: Ledger, lease, n| {
            let mut tx = ledger.begin();
            tx.insert(format!("charge {n}"));
            let not = lease.prepare(kind()).await.expect_err("it is not recorded");
            assert_eq!(not.reason(), reason);
            // Where it would be committed, it is not.
            drop(tx);
            not.into_answer().into_response()
        });
        for n in 1..=2 {
            let res = app.clone().oneshot(order()).await.expect("infallible");
            assert!(!res.headers().contains_key("idempotent-replayed"));
            assert!(!res.headers().contains_key("x-idempo-policy"));
            drop(res);
            assert_eq!(executions.count(), n, "{reason:?}");
        }
        assert!(ledger.rows().await.is_empty(), "{reason:?}");
        assert_eq!(ledger.calls(Operation::Release), 2);
    }
}

// S-180
#[tokio::test(start_paused = true)]
async fn response_to_incomplete_request_is_not_committed() {
    let ledger = Ledger::default();
    let layer = IdempotencyLayer::new(ledger.clone()).with_fingerprint(FingerprintBy::head_only());
    let books = ledger.clone();
    let (app, executions) = app(layer, move |n, req| {
        let ledger = books.clone();
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        async move {
            let read = http_body_util::BodyExt::collect(req.into_body()).await;
            if read.is_ok() {
                return commit(&ledger, &lease, n, created(n)).await;
            }
            let refusal = (StatusCode::BAD_REQUEST, "it broke off").into_response();
            let not = lease
                .prepare(refusal)
                .await
                .expect_err("it is not recorded");
            assert_eq!(not.reason(), NotRecordedReason::BrokenRequest);
            not.into_answer().into_response()
        }
    });
    let half = Body::new(Scripted::new([Step::from("half"), Step::Fail]));
    let first = send(&app, post("/orders", "k", half)).await;
    assert_eq!(first.text(), "it broke off");
    let retry = send(&app, post("/orders", "k", "whole")).await;
    assert_eq!(retry.text(), "{\"execution\":2}");
    assert_eq!(executions.count(), 2);
}

// S-181
#[tokio::test(start_paused = true)]
async fn oversized_commit_leaves_tombstone() {
    let large = || Body::from("x".repeat(2000));
    let streamed = || {
        Body::new(Scripted::new([
            Step::from("one "),
            Step::Wait(Duration::from_millis(300)),
            Step::from("two"),
        ]))
    };
    let kinds: [(Box<dyn Fn() -> Body + Send + Sync>, usize); 3] = [
        (Box::new(large), 2000),
        (Box::new(streamed), 7),
        // The layer would keep it, and the store cannot.
        (Box::new(|| Body::from("x".repeat(900))), 900),
    ];
    for (kind, length) in kinds {
        let kind = std::sync::Arc::new(kind);
        let ledger = Ledger::default().with_limit(500);
        let layer = IdempotencyLayer::new(ledger.clone())
            .with_response_limit(1000)
            .with_collect_timeout(Duration::from_millis(100));
        let (app, executions) = behind(layer, &ledger, async move |ledger, lease, n| {
            commit(&ledger, &lease, n, Response::new(kind())).await
        });
        let first = send(&app, order()).await;
        assert_eq!((first.status, first.body.len()), (StatusCode::OK, length));
        for _ in 0..2 {
            let retry = send(&app, order()).await;
            assert_eq!(retry.status, StatusCode::CONFLICT);
            assert_eq!(retry.code(), "response-not-retained");
        }
        assert_eq!(executions.count(), 1);
        assert_eq!(ledger.rows().await, ["charge 1"]);
        assert_eq!(ledger.calls(Operation::Complete), 0);
    }
}

// S-182
#[tokio::test(start_paused = true)]
async fn prepared_response_counts_as_buffered() {
    let ledger = Ledger::default();
    let layer = IdempotencyLayer::new(ledger.clone())
        .with_max_buffered(100_000, 100_000)
        .with_compression_above(usize::MAX);
    let (app, _) = behind(layer, &ledger, async |_, lease: Lease, _| {
        let prepare = async || {
            lease
                .prepare(Response::new(Body::from("x".repeat(60_000))))
                .await
        };
        let first = prepare().await.expect("a record");
        assert!(first.record().len() > 60_000);
        let second = prepare().await.expect("a tombstone");
        assert!(second.record().len() < 100, "both do not fit");
        drop((first, second));
        let third = prepare().await.expect("a record");
        assert!(third.record().len() > 60_000, "the bytes are free again");
        StatusCode::BAD_GATEWAY.into_response()
    });
    send(&app, order()).await;
}

// S-286
/// A committed response is counted like a response that the layer records itself. The response shares the bytes of the
/// record. Without a record, the handler would produce its chunks only when the client reads them.
#[tokio::test(start_paused = true)]
async fn committed_stream_counts_until_read() {
    let ledger = Ledger::default();
    let layer = IdempotencyLayer::new(ledger.clone())
        .with_max_buffered(100_000, 100_000)
        .with_compression_above(usize::MAX);
    let (app, _) = behind(layer, &ledger, async |ledger, lease, n| {
        let stream = Scripted::new([Step::Data(vec![b'x'; 40_000].into())]);
        commit(&ledger, &lease, n, Response::new(Body::new(stream))).await
    });
    let sent = |key| {
        let sent = app.clone().oneshot(post("/orders", key, "{}"));
        async { sent.await.expect("infallible") }
    };
    let unread = sent("unread").await;
    assert_eq!(tests::read(sent("k").await).await.body.len(), 40_000);
    assert_eq!(
        tests::read(sent("k").await).await.code(),
        "response-not-retained"
    );
    assert_eq!(tests::read(unread).await.body.len(), 40_000);
    for replayed in [false, true] {
        let answer = tests::read(sent("later").await).await;
        assert_eq!((answer.body.len(), answer.is_replay()), (40_000, replayed));
    }
}

// ---- Not committed ----

// S-183
#[tokio::test(start_paused = true)]
async fn rollback_leaves_no_effect_and_no_record() {
    let ledger = Ledger::default();
    let (app, executions) = bank(&ledger, async |ledger: Ledger, lease, n| {
        if n == 1 {
            let mut tx = ledger.begin();
            tx.insert("charge 1");
            drop(tx);
            return StatusCode::SERVICE_UNAVAILABLE.into_response();
        }
        charge(ledger, lease, n).await
    });
    assert_eq!(
        send(&app, order()).await.status,
        StatusCode::SERVICE_UNAVAILABLE
    );
    assert!(ledger.rows().await.is_empty());
    let retry = send(&app, order()).await;
    assert_eq!(retry.text(), "{\"execution\":2}");
    assert_eq!(ledger.rows().await, ["charge 2"]);
    assert_eq!(executions.count(), 2);
}

// S-184
#[tokio::test(start_paused = true)]
async fn layer_records_handler_without_commit() {
    let ledger = Ledger::default();
    let (app, executions) = bank(&ledger, async |ledger: Ledger, lease: Lease, n| {
        let mut tx = ledger.begin();
        tx.insert("charge 1");
        let prepared = lease.prepare(created(n)).await.expect("recorded");
        drop((tx, prepared));
        (StatusCode::PAYMENT_REQUIRED, "no money").into_response()
    });
    for replayed in [false, true] {
        let answer = send(&app, order()).await;
        assert_eq!(
            (answer.status, answer.text()),
            (StatusCode::PAYMENT_REQUIRED, "no money")
        );
        assert_eq!(answer.is_replay(), replayed);
    }
    assert_eq!(
        (executions.count(), ledger.calls(Operation::Complete)),
        (1, 1)
    );
    assert!(ledger.rows().await.is_empty());
}

// S-185
#[tokio::test(start_paused = true)]
async fn failed_transaction_can_be_retried() {
    let ledger = Ledger::default();
    ledger.next(Fate::CallLost);
    let (app, executions) = bank(&ledger, async |ledger, lease: Lease, n| {
        let failed = charge(ledger.clone(), lease.clone(), n).await;
        assert_eq!(failed.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert!(lease.is_held());
        charge(ledger, lease, n).await
    });
    first_of(&send(&app, order()).await);
    assert_charged_once(&ledger, &app).await;
    assert_eq!(
        (executions.count(), ledger.calls(Operation::Complete)),
        (1, 0)
    );
}

/// A node whose lease was lost while its handler ran, to one that executes the same request.
struct Overtaken {
    ledger: Ledger,
    request: tokio::task::JoinHandle<Answer>,
    first: Gate,
    second: Gate,
    other: Router,
}

impl Overtaken {
    async fn new(answers: StatusCode, fate: Fate) -> Self {
        let ledger = Ledger::default();
        ledger.next(fate);
        let (first, second) = (Gate::shut(), Gate::shut());
        let paused = ledger.clone();
        // It cannot renew: it is as good as paused.
        ledger.store.fail_each(Operation::Renew, Fault::Hang);
        let gate = first.clone();
        let (app, _) = bank(&paused, async move |ledger, lease: Lease, n| {
            gate.pass().await;
            let committed = charge(ledger, lease.clone(), n).await;
            assert_eq!(committed.text().await, "the lease is no longer held");
            assert!(!lease.is_held());
            (answers, "not committed").into_response()
        });
        let another = ledger.another();
        let gate = second.clone();
        let (other, _) = bank(&another, async move |ledger, lease, _| {
            gate.pass().await;
            commit(&ledger, &lease, 2, "of the other".into_response()).await
        });
        let request = tokio::spawn(async move { send(&app, order()).await });
        first.arrival().await;
        sleep(Duration::from_secs(16)).await;
        Self {
            ledger,
            request,
            first,
            second,
            other,
        }
    }
}

/// The status that the handler returns, and the fate of its commit, which is rejected if it arrives.
const ENDS: [(StatusCode, Fate); 4] = [
    (StatusCode::INTERNAL_SERVER_ERROR, Fate::Committed),
    (StatusCode::INTERNAL_SERVER_ERROR, Fate::CallLost),
    (StatusCode::CONFLICT, Fate::Committed),
    (StatusCode::CONFLICT, Fate::CallLost),
];

trait Text {
    async fn text(self) -> String;
}

impl Text for Response {
    async fn text(self) -> String {
        tests::read(self).await.text().to_owned()
    }
}

// F-036, S-186
#[tokio::test(start_paused = true)]
async fn commit_after_lost_lease_has_no_effect() {
    within(LONG, async {
        for (answers, fate) in ENDS {
            let overtaken = Overtaken::new(answers, fate).await;
            overtaken.second.open_for_good();
            let other = send(&overtaken.other, order()).await;
            assert_eq!(other.text(), "of the other");
            overtaken.first.open_for_good();
            let answer = overtaken.request.await.expect("no panic");
            assert_eq!(answer.text(), "of the other", "{answers}");
            assert!(answer.is_replay());
            assert_eq!(overtaken.ledger.rows().await, ["charge 2"]);
        }
    })
    .await;
}

// S-187
#[tokio::test(start_paused = true)]
async fn commit_after_lost_lease_is_unknown_if_rival_runs() {
    within(LONG, async {
        for (answers, fate) in ENDS {
            let overtaken = Overtaken::new(answers, fate).await;
            let app = overtaken.other.clone();
            let other = tokio::spawn(async move { send(&app, order()).await });
            overtaken.second.arrival().await;
            overtaken.first.open_for_good();
            let answer = overtaken.request.await.expect("no panic");
            assert_eq!(answer.status, StatusCode::CONFLICT, "{answers}");
            assert_unknown(&answer, true);
            assert!(overtaken.ledger.rows().await.is_empty());
            overtaken.second.open_for_good();
            assert_eq!(other.await.expect("no panic").text(), "of the other");
            assert_eq!(overtaken.ledger.rows().await, ["charge 2"]);
        }
    })
    .await;
}

// S-188
#[tokio::test(start_paused = true)]
async fn ended_lease_commits_nothing() {
    let ledger = Ledger::default();
    let (app, executions) = bank(&ledger, async |ledger: Ledger, lease: Lease, n| {
        if n == 1 {
            let by_hand = ledger.store.inner();
            by_hand.release(&lease.lease_ref()).await.expect("released");
        }
        assert!(lease.is_held(), "as far as it knows");
        let res = charge(ledger, lease.clone(), n).await;
        assert!(!lease.is_held());
        res
    });
    let first = send(&app, order()).await;
    assert_eq!(first.text(), "the lease is no longer held");
    assert!(ledger.rows().await.is_empty());
    let retry = send(&app, order()).await;
    assert_eq!(retry.text(), "{\"execution\":2}");
    assert_eq!(ledger.rows().await, ["charge 2"]);
    assert_eq!(executions.count(), 2);
}

// S-189
#[tokio::test(start_paused = true)]
async fn renewal_during_commit_reports_no_loss() {
    let ledger = Ledger::default();
    ledger.next(Fate::HangAfter);
    let (app, _) = bank(&ledger, async |ledger: Ledger, lease: Lease, n| {
        let commit = charge(ledger.clone(), lease.clone(), n);
        let hung = tokio::time::timeout(Duration::from_secs(6), commit).await;
        assert!(hung.is_err());
        assert_eq!(ledger.calls(Operation::Renew), 1);
        assert!(lease.is_held(), "no other process has it");
        StatusCode::GATEWAY_TIMEOUT.into_response()
    });
    first_of(&send(&app, order()).await);
    assert_charged_once(&ledger, &app).await;
}

// S-190
#[tokio::test(start_paused = true)]
async fn commit_after_response_is_refused() {
    for status in [StatusCode::OK, StatusCode::BAD_GATEWAY] {
        let ledger = Ledger::default();
        let gate = Gate::shut();
        let (task, late) = tokio::sync::oneshot::channel();
        let task = std::sync::Arc::new(std::sync::Mutex::new(Some(task)));
        let held = gate.clone();
        let (app, _) = bank(&ledger, async move |ledger, lease, n| {
            let spawned = tokio::spawn(async move {
                held.pass().await;
                charge(ledger, lease, n).await.text().await
            });
            let task = task.lock().expect("no poison").take().expect("one run");
            task.send(spawned).expect("the receiver waits");
            (status, "not committed").into_response()
        });
        let answer = send(&app, order()).await;
        assert_eq!((answer.status, answer.text()), (status, "not committed"));
        gate.open_for_good();
        let late = late.await.expect("spawned").await.expect("no panic");
        assert_eq!(late, "the lease is no longer held");
        assert!(ledger.rows().await.is_empty());
    }
}

// S-191
#[tokio::test(start_paused = true)]
async fn commit_during_buffering_is_refused() {
    let ledger = Ledger::default();
    let (app, _) = bank(&ledger, async |ledger, lease, n| {
        tokio::spawn(async move {
            sleep(Duration::from_secs(1)).await;
            let late = charge(ledger, lease, n).await;
            assert_eq!(late.text().await, "the lease is no longer held");
        });
        let slowly = Step::Wait(Duration::from_secs(2));
        Response::new(Body::new(Scripted::new([slowly, Step::from("slowly")])))
    });
    for replayed in [false, true] {
        let answer = send(&app, order()).await;
        assert_eq!((answer.text(), answer.is_replay()), ("slowly", replayed));
    }
    assert!(ledger.rows().await.is_empty());
    assert_eq!(ledger.calls(Operation::Acquire), 2, "there was no doubt");
}

// S-192
#[tokio::test(start_paused = true)]
async fn commit_of_other_lease_is_ignored() {
    let ledger = Ledger::default();
    let kept = std::sync::Arc::new(std::sync::Mutex::new(
        None::<(http::response::Parts, Lease)>,
    ));
    let (app, executions) = bank(&ledger, async move |ledger, lease, n| {
        if n == 1 {
            let (head, _) = charge(ledger, lease.clone(), n).await.into_parts();
            *kept.lock().expect("no poison") = Some((head.clone(), lease));
            return Response::from_parts(head, Body::empty());
        }
        let (head, old) = kept.lock().expect("no poison").clone().expect("kept");
        // With its head, extensions and all; and under the lease of the request before.
        let again = commit(&ledger, &old, n, created(n)).await;
        assert_eq!(again.text().await, "the lease is no longer held");
        Response::from_parts(head, Body::from("of another"))
    });
    first_of(&send(&app, order()).await);
    for replayed in [false, true] {
        let other = send(&app, post("/orders", "another", "{}")).await;
        assert_eq!(other.text(), "of another");
        assert_eq!(other.is_replay(), replayed);
    }
    assert_eq!(executions.count(), 2);
    assert_eq!(
        ledger.calls(Operation::Complete),
        1,
        "the layer stored the second"
    );
    assert_charged_once(&ledger, &app).await;
}

// ---- Not known ----

// S-193
#[tokio::test(start_paused = true)]
async fn lost_commit_reply_is_resolved() {
    let ledger = Ledger::default();
    ledger.next(Fate::ReplyLost);
    let (app, executions) = bank(&ledger, async |ledger, lease, n| {
        let res = charge(ledger, lease, n).await;
        assert_eq!(res.status(), StatusCode::CREATED, "the handler sees it too");
        res
    });
    let first = send(&app, order()).await;
    first_of(&first);
    assert!(!first.is_replay());
    assert_charged_once(&ledger, &app).await;
    assert_eq!(executions.count(), 1);
    assert_eq!(
        ledger.calls(Operation::Complete) + ledger.calls(Operation::Release),
        0
    );
}

// S-208
/// Once the retention has passed, that there is no record says nothing: to try again would be to do it again. Found by the
/// simulation (seed 85 of its first version).
#[tokio::test(start_paused = true)]
async fn commit_resolved_after_retention_is_not_retried() {
    let ledger = Ledger::default();
    let second = Ttl::from_secs(1);
    let layer = IdempotencyLayer::new(ledger.clone()).with_retention(second);
    let (app, _) = behind(layer, &ledger, async move |ledger, lease, n| {
        for _ in 0..2 {
            let prepared = lease.prepare(created(n)).await.expect("it is recorded");
            let mut tx = ledger.begin();
            tx.insert(format!("charge {n}"));
            let (reference, record) = (prepared.lease_ref(), prepared.record().clone());
            let committing = prepared.commit(async {
                tx.write(reference, record, second).await?;
                sleep(second.as_duration()).await;
                Err(StoreError::backend("the reply came too late"))
            });
            match committing.await {
                Ok(res) => return res.into_response(),
                Err(StoreError::Backend(_)) => {}
                Err(error) => return failed(&error),
            }
        }
        failed(&StoreError::backend("tried twice"))
    });
    let answer = send(&app, order()).await;
    assert_eq!(ledger.rows().await, ["charge 1"]);
    assert_eq!(answer.code(), "outcome-unknown");
    let retry = send(&app, order()).await;
    assert!(
        !retry.is_replay(),
        "the retention is over, and the key free"
    );
}

// S-308
/// The store does not report the outcome of the commit, and the next renewal finds no lease.
#[tokio::test(start_paused = true)]
async fn own_unacknowledged_commit_is_no_lease_loss() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let ledger = Ledger::default();
    ledger.next(Fate::ReplyLost);
    let (app, _) = bank(&ledger, async |ledger: Ledger, lease: Lease, n| {
        ledger
            .store
            .enqueue(Operation::Acquire, vec![Fault::CallLost; 3]);
        let unknown = charge(ledger.clone(), lease.clone(), n).await;
        bounded(lease.lost()).await;
        assert_eq!(ledger.calls(Operation::Renew), 1, "the renewal reported it");
        unknown
    });
    let first = send(&app, order()).await;
    first_of(&first);
    assert!(!first.is_replay());
    assert_charged_once(&ledger, &app).await;
    assert_eq!(leases_lost(&recorder), 0.0);
}

// S-309
/// The database says of the second try that the lease is gone: the first one has ended it.
#[tokio::test(start_paused = true)]
async fn retried_successful_commit_reports_no_loss() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let ledger = Ledger::default();
    ledger.next(Fate::ReplyLost);
    let (app, _) = bank(&ledger, async |ledger: Ledger, lease: Lease, n| {
        ledger
            .store
            .enqueue(Operation::Acquire, vec![Fault::CallLost; 3]);
        charge(ledger.clone(), lease.clone(), n).await;
        charge(ledger, lease, n).await
    });
    first_of(&send(&app, order()).await);
    assert_charged_once(&ledger, &app).await;
    assert_eq!(leases_lost(&recorder), 0.0);
}

/// A commit that was cut off is no longer under way. The loss that a renewal finds then is reported at once, not at
/// lease expiry.
#[tokio::test(start_paused = true)]
async fn cut_off_commit_leaves_renewals_effective() {
    let ledger = Ledger::default();
    ledger.next(Fate::HangAfter);
    let (app, _) = bank(&ledger, async |ledger: Ledger, lease: Lease, n| {
        let commit = charge(ledger.clone(), lease.clone(), n);
        let cut = tokio::time::timeout(Duration::from_secs(1), commit).await;
        assert!(cut.is_err());
        let notified = tokio::time::timeout(Duration::from_secs(9), lease.lost()).await;
        assert!(notified.is_ok(), "a renewal comes after five seconds");
        StatusCode::GATEWAY_TIMEOUT.into_response()
    });
    first_of(&send(&app, order()).await);
    assert_charged_once(&ledger, &app).await;
}

// S-310
/// A commit that began may have ended the lease. Here it has not: another process holds the lease.
#[tokio::test(start_paused = true)]
async fn lease_loss_after_failed_commit_is_reported_once() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let ledger = Ledger::default();
    ledger.next(Fate::CallLost);
    let (app, _) = bank(&ledger, async |ledger: Ledger, lease: Lease, n| {
        let failed = charge(ledger.clone(), lease.clone(), n).await;
        let (mine, store) = (lease.lease_ref(), ledger.store.inner());
        store.release(&mine).await.expect("memory does not fail");
        let other = Claim::new(mine.id, mine.fingerprint).expect("randomness");
        let other = store.acquire(&other).await.expect("memory does not fail");
        assert!(matches!(other, Acquired::Granted { .. }), "{other:?}");
        bounded(lease.lost()).await;
        failed
    });
    send(&app, order()).await;
    assert_eq!(leases_lost(&recorder), 1.0);
}

// S-201
/// Looking takes a lease where there is none, which must not let in what was shut out.
#[tokio::test(start_paused = true)]
async fn late_commit_fails_after_reconciliation() {
    within(LONG, async {
        let ledger = Ledger::default();
        let (way, looked) = (Gate::shut(), Gate::shut());
        ledger.next(Fate::UnderWay(way.clone()));
        let held = looked.clone();
        ledger.store.set_script(move |op, n| match (op, n) {
            (Operation::Acquire, 2) => Fault::HoldReply(held.clone().into()),
            _ => Fault::None,
        });
        let (app, _) = bank(&ledger, async |ledger, lease, n| {
            let commit = charge(ledger, lease, n);
            match tokio::time::timeout(Duration::from_secs(1), commit).await {
                Ok(res) => res,
                Err(_) => StatusCode::GATEWAY_TIMEOUT.into_response(),
            }
        });
        let asking = app.clone();
        let asked = tokio::spawn(async move { send(&asking, order()).await });
        looked.arrival().await;
        way.open_for_good();
        sleep(Duration::from_millis(100)).await;
        looked.open_for_good();
        let answer = asked.await.expect("no panic");
        assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT);
        sleep(Duration::from_secs(1)).await;
        assert!(ledger.rows().await.is_empty());
        let retry = send(&app, order()).await;
        assert_eq!(retry.text(), "{\"execution\":2}");
        assert_eq!(ledger.rows().await, ["charge 2"]);
    })
    .await;
}

// S-204
/// If the record has expired meanwhile, reconciliation releases the lease that its query acquired.
#[tokio::test(start_paused = true)]
async fn reconciliation_after_expiry_leaves_no_lease() {
    within(LONG, async {
        let ledger = Ledger::default();
        ledger.next(Fate::HangAfter);
        ledger.store.set_script(|op, n| match (op, n) {
            (Operation::Acquire, 2) => {
                Fault::HoldCall(Hold::new(|| sleep(Duration::from_millis(1_500))))
            }
            _ => Fault::None,
        });
        let layer = IdempotencyLayer::new(ledger.clone()).with_retention(Ttl::from_secs(1));
        let (app, _) = behind(layer, &ledger, async |ledger, lease, n| {
            let commit = charge(ledger, lease, n);
            let unheard = tokio::time::timeout(Duration::from_millis(100), commit).await;
            assert!(unheard.is_err());
            created(n)
        });
        assert_unknown(&send(&app, order()).await, false);
        assert!(ledger.store.inner().is_empty());
    })
    .await;
}

// S-205
/// The layer's own record can be stored, but this does not prove that there was no commit: its record may have expired.
/// The handler's response, that nothing was charged, may be untrue. It is neither sent nor recorded.
#[tokio::test(start_paused = true)]
async fn response_discarded_if_committed_record_expired() {
    within(LONG, async {
        // Before the layer asks the store, while it asks, or while it goes on asking without its client.
        for (charging, completing, fails) in [(2_000, 0, 0), (500, 1_000, 0), (500, 0, 20)] {
            let ledger = Ledger::default();
            ledger.next(Fate::HangAfter);
            ledger.store.set_script(move |op, nth| match (op, nth) {
                (Operation::Complete, nth) if nth <= fails => Fault::CallLost,
                (Operation::Complete, _) => {
                    Fault::HoldCall(Hold::new(move || sleep(Duration::from_millis(completing))))
                }
                _ => Fault::None,
            });
            let layer = IdempotencyLayer::new(ledger.clone()).with_retention(Ttl::from_secs(1));
            let (app, executions) =
                behind(layer.clone(), &ledger, async move |ledger, lease, n| {
                    let commit = charge(ledger, lease, n);
                    let charging = Duration::from_millis(charging);
                    let unheard = tokio::time::timeout(charging, commit).await;
                    assert!(unheard.is_err());
                    (StatusCode::ACCEPTED, "not charged").into_response()
                });
            let first = send(&app, order()).await;
            // Before its record would be over, the commit may be found yet.
            assert_unknown(&first, fails > 0);
            eventually("nothing is in flight", || layer.in_flight() == 0).await;
            assert_eq!(ledger.rows().await, ["charge 1"]);
            assert_eq!(executions.count(), 1);
            if completing == 0 {
                assert!(ledger.store.inner().is_empty(), "it is not kept");
            }
        }
    })
    .await;
}

// S-194
#[tokio::test(start_paused = true)]
async fn failed_commit_is_resolved_and_retry_executes() {
    let ledger = Ledger::default();
    ledger.next(Fate::CallLost);
    let (app, executions) = bank(&ledger, charge);
    let first = send(&app, order()).await;
    assert_eq!(first.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(first.text(), "the store failed");
    assert!(ledger.rows().await.is_empty());
    let retry = send(&app, order()).await;
    assert_eq!(retry.text(), "{\"execution\":2}");
    assert_eq!(ledger.rows().await, ["charge 2"]);
    assert_eq!(executions.count(), 2);
}

// S-195
/// A process that acquires the key after this process has released it has not taken it over.
#[tokio::test(start_paused = true)]
async fn failed_commit_is_resolved_while_rival_holds_key() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    within(LONG, async {
        for generation in 1..=2 {
            let (ledger, looked) = (Ledger::default(), Gate::shut());
            let held = looked.clone();
            let (app, _) = bank(&ledger, async move |ledger: Ledger, lease, n| {
                // The handler asks, and then the layer, under another token.
                let looks = ledger.calls(Operation::Acquire) + 2;
                let held = held.clone();
                ledger.store.set_script(move |op, nth| match (op, nth) {
                    (Operation::Acquire, nth) if nth == looks => {
                        Fault::HoldCall(held.clone().into())
                    }
                    _ => Fault::None,
                });
                ledger.next(Fate::CallLost);
                charge(ledger, lease, n).await
            });
            if generation == 2 {
                let stuck = ledger.another();
                stuck.store.fail_each(Operation::Renew, Fault::Hang);
                let (stuck, _) = bank(&stuck, async |_, _, _| std::future::pending().await);
                tokio::spawn(async move { send(&stuck, order()).await });
                sleep(Duration::from_secs(16)).await;
            }
            let request = tokio::spawn(async move { send(&app, order()).await });
            looked.arrival().await;
            let another = ledger.another();
            let runs = Gate::shut();
            let held = runs.clone();
            let (other, _) = bank(&another, async move |ledger, lease, _| {
                held.pass().await;
                charge(ledger, lease, 2).await
            });
            let other = tokio::spawn(async move { send(&other, order()).await });
            runs.arrival().await;
            looked.open_for_good();
            let first = request.await.expect("no panic");
            assert_eq!(first.status, StatusCode::INTERNAL_SERVER_ERROR);
            assert_eq!(first.text(), "the store failed");
            runs.open_for_good();
            assert_eq!(other.await.expect("no panic").status, StatusCode::CREATED);
            assert_eq!(ledger.rows().await, ["charge 2"]);
        }
    })
    .await;
    assert_eq!(leases_lost(&recorder), 0.0);
}

// S-207
/// The lease has to be over before the look says anything: until then the commit may still come.
#[tokio::test(start_paused = true)]
async fn commit_with_unreleasable_lease_is_outcome_unknown() {
    within(LONG, async {
        for (fate, executed) in [(Fate::ReplyLost, 1), (Fate::CallLost, 2)] {
            let ledger = Ledger::default();
            ledger.next(fate.clone());
            let (app, executions) = bank(&ledger, async move |ledger: Ledger, lease, n| {
                if n > 1 {
                    return charge(ledger, lease, n).await;
                }
                // Then it cannot be looked up by the handler either.
                ledger
                    .store
                    .enqueue(Operation::Acquire, vec![Fault::CallLost; 3]);
                ledger.store.fail_each(Operation::Release, Fault::CallLost);
                charge(ledger, lease, n).await;
                (StatusCode::BAD_GATEWAY, "whatever").into_response()
            });
            let first = send(&app, order()).await;
            assert_unknown(&first, true);
            ledger.store.clear_faults();
            sleep(Duration::from_secs(16)).await;
            send(&app, order()).await;
            let retry = send(&app, order()).await;
            assert_eq!(retry.text(), format!("{{\"execution\":{executed}}}"));
            assert!(retry.is_replay());
            assert_eq!(executions.count(), executed);
            assert_eq!(ledger.rows().await, [format!("charge {executed}")]);
        }
    })
    .await;
}

// S-202
/// A commit in a task that outlives the handler queries the store for its outcome, possibly after the layer has
/// released the lease. A lease that this query acquires has no owner.
#[tokio::test(start_paused = true)]
async fn lease_acquired_by_commit_check_is_released() {
    for panics in [false, true] {
        within(LONG, async {
            let (store, asking) = (FaultInjector::new(MemoryStore::new()), Gate::shut());
            let layer = IdempotencyLayer::new(store.clone())
                .with_orphan_policy(OrphanPolicy::Refuse)
                .with_failure(ExecutionFailure::Release);
            let (injector, gate) = (store.clone(), asking.clone());
            let (app, executions) = app(layer.clone(), move |n, req| {
                let lease = req.extensions().get::<Lease>().expect("a lease").clone();
                let (injector, gate) = (injector.clone(), gate.clone());
                async move {
                    if n > 1 {
                        return created(n);
                    }
                    injector.enqueue(Operation::Acquire, [Fault::HoldCall(gate.clone().into())]);
                    tokio::spawn(async move {
                        let prepared = lease.prepare(created(n)).await.expect("it is recorded");
                        let cut = async { Err(StoreError::backend("the connection was cut")) };
                        assert!(prepared.commit(cut).await.is_err());
                    });
                    gate.arrival().await;
                    assert!(!panics, "as it should");
                    StatusCode::GATEWAY_TIMEOUT.into_response()
                }
            });
            let request = tokio::spawn({
                let app = app.clone();
                async move { send(&app, order()).await }
            });
            match request.await {
                Ok(first) => assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT),
                Err(error) => assert!(panics && error.is_panic()),
            }
            sleep(Duration::from_millis(500)).await;
            assert!(store.inner().is_empty(), "it was released");
            asking.open_for_good();
            eventually("it is taken", || store.inner().len() == 1).await;
            sleep(Duration::from_secs(3)).await;
            assert_eq!(send(&app, order()).await.text(), "{\"execution\":2}");
            assert!(send(&app, order()).await.is_replay());
            assert_eq!(executions.count(), 2);
            sleep(Duration::from_secs(20)).await;
            assert!(
                store.calls(Operation::Release) <= 8,
                "and that for a lease only"
            );
            assert_eq!(layer.in_flight(), 0);
        })
        .await;
    }
}

// S-203
/// A commit may fail when no task releases a newly acquired lease any more: then the commit acquires none.
#[tokio::test(start_paused = true)]
async fn late_failed_commit_acquires_nothing() {
    within(LONG, async {
        let (store, failing) = (FaultInjector::new(MemoryStore::new()), Gate::shut());
        let layer = IdempotencyLayer::new(store.clone()).with_orphan_policy(OrphanPolicy::Refuse);
        let gate = failing.clone();
        let (app, executions) = app(layer, move |n, req| {
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            let gate = gate.clone();
            async move {
                if n > 1 {
                    return created(n);
                }
                let connection = gate.clone();
                tokio::spawn(async move {
                    let prepared = lease.prepare(created(n)).await.expect("it is recorded");
                    let commit = async move {
                        connection.pass().await;
                        Err(StoreError::backend("the connection was cut"))
                    };
                    assert!(prepared.commit(commit).await.is_err());
                });
                gate.arrival().await;
                StatusCode::GATEWAY_TIMEOUT.into_response()
            }
        });
        let first = send(&app, order()).await;
        assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT);
        sleep(Duration::from_secs(40)).await;
        failing.open_for_good();
        sleep(Duration::from_secs(5)).await;
        assert!(store.inner().is_empty(), "no process has it");
        assert_eq!(send(&app, order()).await.text(), "{\"execution\":2}");
        assert_eq!(executions.count(), 2);
    })
    .await;
}

// S-206
/// The query for a commit may acquire a lease without an acknowledgement: that lease must not block the key.
#[tokio::test(start_paused = true)]
async fn lease_possibly_taken_by_query_is_released() {
    within(LONG, async {
        for lost in [
            (Operation::Acquire, Fault::ReplyLost),
            (Operation::Acquire, Fault::HangAfter),
            (Operation::Release, Fault::CallLost),
        ] {
            let ledger = Ledger::default();
            ledger.next(Fate::CallLost);
            let (app, executions) = bank(&ledger, {
                let lost = lost.clone();
                move |ledger: Ledger, lease: Lease, n| {
                    let (op, act) = lost.clone();
                    async move {
                        if n > 1 {
                            return charge(ledger, lease, n).await;
                        }
                        let before = ledger.store.calls(Operation::Release);
                        ledger.store.set_script(move |called, nth| {
                            // The release that ends the lease is answered.
                            let looked = called == Operation::Acquire || nth > before + 1;
                            if called == op && looked {
                                act.clone()
                            } else {
                                Fault::None
                            }
                        });
                        charge(ledger, lease, n).await;
                        StatusCode::BAD_GATEWAY.into_response()
                    }
                }
            });
            let first = send(&app, order()).await;
            assert_unknown(&first, true);
            ledger.store.set_script(|_, _| Fault::None);
            sleep(Duration::from_secs(5)).await;
            let retry = send(&app, order()).await;
            assert_eq!(retry.text(), "{\"execution\":2}", "{lost:?}");
            assert_eq!(ledger.rows().await, ["charge 2"]);
            assert_eq!(executions.count(), 2);
        }
    })
    .await;
}

// F-146, S-197
#[tokio::test(start_paused = true)]
async fn unverifiable_commit_is_outcome_unknown() {
    within(LONG, async {
        for (fate, executed, row) in [
            (Fate::ReplyLost, 1, "charge 1"),
            (Fate::CallLost, 2, "charge 2"),
        ] {
            for status in [StatusCode::OK, StatusCode::BAD_GATEWAY] {
                let ledger = Ledger::default();
                ledger.next(fate.clone());
                let (app, executions) = bank(&ledger, async move |ledger: Ledger, lease, n| {
                    if n > 1 {
                        return charge(ledger, lease, n).await;
                    }
                    ledger.store.fail_each(Operation::Acquire, Fault::CallLost);
                    ledger.store.fail_each(Operation::Complete, Fault::CallLost);
                    charge(ledger, lease, n).await;
                    (status, "whatever").into_response()
                });
                assert_unknown(&send(&app, order()).await, true);
                ledger.store.clear_faults();
                if status == StatusCode::OK && executed == 2 {
                    // The layer goes on trying to store what the handler answered instead.
                    sleep(Duration::from_secs(5)).await;
                    let retry = send(&app, order()).await;
                    assert_eq!((retry.text(), retry.is_replay()), ("whatever", true));
                    assert!(ledger.rows().await.is_empty());
                    continue;
                }
                sleep(Duration::from_secs(16)).await;
                send(&app, order()).await;
                let retry = send(&app, order()).await;
                assert_eq!(retry.text(), format!("{{\"execution\":{executed}}}"));
                assert!(retry.is_replay());
                assert_eq!(executions.count(), executed);
                assert_eq!(ledger.rows().await, [row]);
            }
        }
    })
    .await;
}

// S-198
#[tokio::test(start_paused = true)]
async fn timeout_during_commit_returns_its_outcome() {
    within(LONG, async {
        for (fate, committed) in [(Fate::HangAfter, true), (Fate::Hang, false)] {
            for status in [StatusCode::REQUEST_TIMEOUT, StatusCode::CONFLICT] {
                let ledger = Ledger::default();
                ledger.next(fate.clone());
                let books = ledger.clone();
                let handler = async move |lease: Lease| charge(books, lease, 1).await;
                let app = Router::new()
                    .route("/orders", axum::routing::post(handler))
                    .layer(from_fn(
                        move |req, next: axum::middleware::Next| async move {
                            let run = tokio::time::timeout(Duration::from_secs(5), next.run(req));
                            run.await
                                .unwrap_or_else(|_| (status, "timed out").into_response())
                        },
                    ))
                    .layer(IdempotencyLayer::new(ledger.clone()));
                let first = send(&app, order()).await;
                if committed {
                    first_of(&first);
                    assert!(!first.is_replay());
                    assert_charged_once(&ledger, &app).await;
                    continue;
                }
                assert_eq!((first.status, first.text()), (status, "timed out"));
                assert!(ledger.rows().await.is_empty());
                // A response after a failed commit is no outcome, whatever its status is.
                first_of(&send(&app, order()).await);
                assert_charged_once(&ledger, &app).await;
            }
        }
    })
    .await;
}

// S-199
#[tokio::test(start_paused = true)]
async fn panic_during_commit_keeps_its_outcome() {
    for (fate, rows) in [(Fate::HangAfter, 1), (Fate::Hang, 0)] {
        let ledger = Ledger::default();
        ledger.next(fate);
        let (app, executions) = bank(&ledger, async |ledger, lease, n| {
            if n > 1 {
                return charge(ledger, lease, 1).await;
            }
            let commit = charge(ledger, lease, n);
            let _ = tokio::time::timeout(Duration::from_secs(1), commit).await;
            panic!("in the middle")
        });
        let panicking = app.clone();
        let task = tokio::spawn(async move { send(&panicking, order()).await });
        assert!(task.await.expect_err("a panic").is_panic());
        assert_eq!(ledger.rows().await.len(), rows);
        send(&app, order()).await;
        assert_charged_once(&ledger, &app).await;
        assert_eq!(executions.count(), 2 - rows as u64);
    }
}

// S-196
#[tokio::test(start_paused = true)]
async fn pending_commit_is_awaited() {
    within(LONG, async {
        for status in [StatusCode::OK, StatusCode::BAD_GATEWAY] {
            let (ledger, gate) = (Ledger::default(), Gate::shut());
            ledger.next(Fate::Late(gate.clone()));
            let (app, executions) = bank(&ledger, async move |ledger, lease, n| {
                charge(ledger, lease, n).await;
                (status, "the connection was cut").into_response()
            });
            let answering = app.clone();
            let first = tokio::spawn(async move { send(&answering, order()).await });
            gate.arrival().await;
            sleep(Duration::from_secs(1)).await;
            assert!(!first.is_finished());
            gate.open_for_good();
            first_of(&first.await.expect("no panic"));
            assert_charged_once(&ledger, &app).await;
            assert_eq!(executions.count(), 1);
        }
    })
    .await;
}

// ---- Layers within layers, and many at once ----

// S-200
#[tokio::test(start_paused = true)]
async fn nested_layer_leaves_commit_to_outer() {
    let (ledger, inner) = (Ledger::default(), Ledger::default());
    let books = ledger.clone();
    let handler = async move |lease: Lease| charge(books, lease, 1).await;
    let app = Router::new()
        .route("/orders", axum::routing::post(handler))
        .layer(IdempotencyLayer::new(inner.clone()))
        .layer(IdempotencyLayer::new(ledger.clone()));
    first_of(&send(&app, order()).await);
    assert_charged_once(&ledger, &app).await;
    assert_eq!(inner.store.all_calls(), 0);
}

// S-176
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_many_commits_takes_effect() {
    bounded(async {
        for (round, fate) in [
            Fate::Committed,
            Fate::ReplyLost,
            Fate::CallLost,
            Fate::Committed,
        ]
        .into_iter()
        .cycle()
        .take(40)
        .enumerate()
        {
            let ledger = Ledger::default();
            ledger.next(fate.clone());
            let (app, _) = bank(&ledger, async |ledger, lease, _| {
                charge(ledger, lease, 1).await
            });
            let mut clients = tokio::task::JoinSet::new();
            for _ in 0..32 {
                let app = app.clone();
                clients.spawn(async move { send(&app, order()).await });
            }
            while let Some(answer) = clients.join_next().await {
                let answer = answer.expect("no panic");
                match answer.status {
                    StatusCode::CREATED => first_of(&answer),
                    StatusCode::CONFLICT => assert_eq!(answer.code(), "in-progress"),
                    other => assert_eq!(other, StatusCode::INTERNAL_SERVER_ERROR, "{round}"),
                }
            }
            send(&app, order()).await;
            assert_charged_once(&ledger, &app).await;
        }
    })
    .await;
}

// ---- Commits that failed, and transactions without an end ----

// S-940, F-924
#[tokio::test(start_paused = true)]
async fn client_error_after_failed_commit_is_not_recorded() {
    for status in [StatusCode::CONFLICT, StatusCode::UNPROCESSABLE_ENTITY] {
        let ledger = Ledger::default();
        ledger.next(Fate::CallLost);
        let (app, effects) = bank(&ledger, async move |ledger, lease, n| {
            let res = charge(ledger, lease, n).await;
            match res.status() {
                StatusCode::CREATED => res,
                _ => (status, "not charged").into_response(),
            }
        });
        let first = send(&app, order()).await;
        assert_eq!((first.status, first.text()), (status, "not charged"));
        assert!(ledger.rows().await.is_empty());
        assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
        assert!(send(&app, order()).await.is_replay());
        assert_eq!(ledger.rows().await, ["charge 2"]);
        assert_eq!(effects.count(), 2);
    }
}

/// The way in which a handler reports that the database refused the transaction of a closure.
#[derive(Clone, Copy, Debug)]
enum Refused {
    Answer(StatusCode),
    Panic,
}

/// A closure whose statements all succeed, and after which the database refuses to commit. The handler reports the commit
/// inside the closure.
async fn refused(lease: &Lease, n: u64, is_begun: bool) {
    let prepared = lease.prepare(created(n)).await.expect("recorded");
    if is_begun {
        let begun = prepared.begin_commit().expect("the lease is held");
        drop(begun);
    } else {
        let written = prepared.commit(async { Ok(()) }).await;
        drop(written.expect("the statement succeeded"));
    }
}

// S-941, F-925
#[tokio::test(start_paused = true)]
async fn refused_commit_of_closure_is_not_reported() {
    for is_begun in [false, true] {
        for refusal in [
            Refused::Answer(StatusCode::INTERNAL_SERVER_ERROR),
            Refused::Answer(StatusCode::CONFLICT),
            Refused::Panic,
        ] {
            let ledger = Ledger::default();
            let (app, effects) = bank(&ledger, async move |ledger, lease, n| {
                if n > 1 {
                    return charge(ledger, lease, n).await;
                }
                refused(&lease, n, is_begun).await;
                match refusal {
                    Refused::Answer(status) => (status, "refused").into_response(),
                    Refused::Panic => panic!("refused"),
                }
            });
            let first = {
                let app = app.clone();
                tokio::spawn(async move { send(&app, order()).await }).await
            };
            match (first, refusal) {
                (Ok(first), Refused::Answer(status)) => {
                    assert_eq!((first.status, first.text()), (status, "refused"));
                }
                (Err(error), Refused::Panic) => assert!(error.is_panic()),
                (first, _) => panic!("{refusal:?}: {first:?}"),
            }
            assert_eq!(
                send(&app, order()).await.status,
                StatusCode::CREATED,
                "{refusal:?}"
            );
            assert!(send(&app, order()).await.is_replay());
            assert_eq!(ledger.rows().await, ["charge 2"]);
            assert_eq!(effects.count(), 2);
        }
    }
}

// S-941
#[tokio::test(start_paused = true)]
async fn commit_of_closure_is_acknowledged_after_closure() {
    let ledger = Ledger::default();
    let (app, effects) = bank(&ledger, async |ledger, lease, n| {
        // The first attempt of the transaction fails, and the driver runs the closure again.
        refused(&lease, n, true).await;
        let prepared = lease.prepare(created(n)).await.expect("recorded");
        let (lease_ref, record) = (prepared.lease_ref(), prepared.record().clone());
        let retention = prepared.retention();
        let begun = prepared.begin_commit().expect("the lease is held");
        let mut tx = ledger.begin();
        tx.insert(format!("charge {n}"));
        let written = tx.write(lease_ref, record, retention).await;
        written.expect("committed");
        begun.acknowledge().into_response()
    });
    first_of(&send(&app, order()).await);
    assert_charged_once(&ledger, &app).await;
    assert_eq!(effects.count(), 1);
    assert_eq!(
        ledger.calls(Operation::Complete) + ledger.calls(Operation::Release),
        0
    );
}

fn unfinished(status: StatusCode, attention: bool) -> (Router, Effects, MemoryStore) {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone());
    let (app, effects) = app(layer, move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        async move {
            let open = lease.open_transaction();
            if n > 1 {
                open.end();
                return created(n);
            }
            drop(open);
            let mut res = (status, "done").into_response();
            if attention {
                res.extensions_mut().insert(NeedsAttention::new("unclear"));
            }
            res
        }
    });
    (app, effects, store)
}

// S-942, F-926
#[tokio::test(start_paused = true)]
async fn success_with_open_transaction_is_500() {
    for status in [StatusCode::OK, StatusCode::CREATED, StatusCode::SEE_OTHER] {
        let (app, effects, store) = unfinished(status, false);
        let first = send(&app, order()).await;
        assert_eq!(first.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(first.code(), "unfinished-transaction");
        assert!(store.is_empty(), "the key is free");
        assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
        assert!(send(&app, order()).await.is_replay());
        assert_eq!(effects.count(), 2);
    }
}

// S-943
#[tokio::test(start_paused = true)]
async fn refusal_with_open_transaction_is_recorded() {
    for (status, attention, expected) in [
        (StatusCode::CONFLICT, false, StatusCode::CONFLICT),
        (StatusCode::CREATED, true, StatusCode::CONFLICT),
    ] {
        let (app, effects, _) = unfinished(status, attention);
        assert_eq!(send(&app, order()).await.status, status);
        assert_eq!(send(&app, order()).await.status, expected);
        assert_eq!(effects.count(), 1);
    }
}

// S-944
#[tokio::test(start_paused = true)]
async fn value_with_open_transaction_is_error() {
    let store = MemoryStore::new();
    let once = IdempotencyLayer::new(store.clone());
    let work = async |lease: Lease| -> Result<String, WorkError<&str>> {
        drop(lease.open_transaction());
        Ok("done".to_owned())
    };
    let error = once.run_once("k", "order", work).await;
    let error = error.expect_err("an unfinished transaction");
    assert_eq!(error.kind(), ErrorKind::UnfinishedTransaction);
    assert!(store.is_empty(), "the key is free");
}

// S-945, F-927
#[tokio::test(start_paused = true)]
async fn panicking_setting_commits_tombstone() {
    let ledger = Ledger::default();
    let layer = IdempotencyLayer::new(ledger.clone())
        .with_replayed_headers(|name| panic!("no rule for {name}"));
    let (app, effects) = behind(layer, &ledger, charge);
    first_of(&send(&app, order()).await);
    assert_eq!(send(&app, order()).await.code(), "response-not-retained");
    assert_eq!(ledger.rows().await, ["charge 1"]);
    assert_eq!(effects.count(), 1);
}
