//! Responses after a successful commit.

use std::{
    future::{Future, poll_fn},
    task::Poll,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    middleware::map_response,
    response::{IntoResponse, Response},
};
use http::{HeaderName, HeaderValue, Request, StatusCode, header};
use tests::{
    Scripted, Step, app,
    barrier::{bounded, eventually},
    created,
    ledger::{CommitFault, Ledger},
    send,
};
use tokio::time::sleep;
use tower::{Layer, ServiceExt};
use tower_idempotency::{
    IdempotencyLayer, Lease, Retention,
    conformance::{Fault, Operation},
};

use super::{assert_charged_once, bank, behind, charge, commit, first_of, order};

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

/// Returns a response with headers of every kind: replayed or not, repeated, of the connection, of the layer.
fn full_response(body: Body) -> Response {
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
            commit(&ledger, &lease, n, full_response(kind())).await
        });
        let (plain, _) = app(
            IdempotencyLayer::new(Ledger::default()),
            move |_, _| async move { full_response(kind()) },
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
    // The response has trailers, and a length from the handler.
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
        let response = send(&app, order()).await;
        assert_eq!(response.is_replay(), replayed);
        assert!(response.headers["x-token"].is_sensitive(), "{replayed}");
    }
}

// S-170
#[tokio::test(start_paused = true)]
async fn response_after_commit_adds_only_unrecorded_headers() {
    let ledger = Ledger::default();
    let database = ledger.clone();
    let handler = async move |lease: Lease| charge(database, lease, 1).await;
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
    let database = ledger.clone();
    let service = tower::service_fn(move |req: Request<tower_idempotency::Body<Body>>| {
        let ledger = database.clone();
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        async move {
            charge(ledger, lease, 1).await;
            Err::<Response, _>("it failed")
        }
    });
    let service = IdempotencyLayer::new(ledger.clone()).layer(service);
    for replayed in [false, true] {
        let res = service.clone().oneshot(order()).await.expect("an answer");
        let response = tests::read(res.map(Body::new)).await;
        first_of(&response);
        assert_eq!(response.is_replay(), replayed);
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

/// Returns the output of the future. Drops the future if it is still pending after this number of polls.
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
        for fault in [CommitFault::Committed, CommitFault::ReplyLost] {
            for polls in 0..100 {
                let ledger = Ledger::default();
                ledger.next(fault.clone());
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
        assert!(lease.is_held(), "the lease was renewed");
        let renewals = ledger.calls(Operation::Renew);
        assert!(renewals > 10, "{renewals}");
        let res = charge(ledger.clone(), lease.clone(), n).await;
        assert!(!lease.is_held());
        lease.lost().await;
        sleep(Duration::from_secs(60)).await;
        assert_eq!(
            ledger.calls(Operation::Renew),
            renewals,
            "renewed after the execution ended"
        );
        res
    });
    first_of(&send(&app, order()).await);
    assert_charged_once(&ledger, &app).await;
}
