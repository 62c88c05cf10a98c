//! The records that a commit stores.

use std::time::Duration;

use axum::{
    Extension,
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode};
use tests::{Scripted, Step, app, created, ledger::Ledger, post, send};
use tokio::time::advance;
use tower::ServiceExt;
use tower_idempotency::{
    FingerprintBy, IdempotencyLayer, Lease, Retention, Ttl, Unrecordable,
    conformance::Operation,
    transaction::{LeaseExt, NotRecordedReason},
};

use super::{behind, commit, order};

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
    // The body is longer than announced. After the announced bytes, the rest looks like a complete body of unknown
    // length.
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
            // The transaction is dropped instead of the commit.
            drop(tx);
            not.into_output().into_response()
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
    let database = ledger.clone();
    let (app, executions) = app(layer, move |n, req| {
        let ledger = database.clone();
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
            not.into_output().into_response()
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
        // The layer would record it, but the store cannot.
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
        let response = tests::read(sent("later").await).await;
        assert_eq!(
            (response.body.len(), response.is_replay()),
            (40_000, replayed)
        );
    }
}
