//! Failed commits, and transactions that the handler never ends.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::{Router, body::Body, response::IntoResponse};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body::Frame;
use tests::{
    Broken, Effects, Scripted, Step, app, created,
    ledger::{CommitFault, Failed, Ledger},
    post, send,
};
use tower_idempotency::{
    ErrorKind, FingerprintBy, IdempotencyLayer, Lease, MemoryStore, NeedsAttention, Unrecordable,
    conformance::Operation,
    run_once::{Outcome, WorkError},
    store::StoreError,
    transaction::{LeaseExt, OpenTransaction},
};

use super::{assert_charged_once, bank, behind, charge, first_of, order};

// S-940, F-924
#[tokio::test(start_paused = true)]
async fn client_error_after_failed_commit_is_not_recorded() {
    for status in [StatusCode::CONFLICT, StatusCode::UNPROCESSABLE_ENTITY] {
        let ledger = Ledger::default();
        ledger.next(CommitFault::CallLost);
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

// S-940, F-924
/// The pool had no connection, for example.
#[tokio::test(start_paused = true)]
async fn client_error_after_failed_begin_is_not_recorded() {
    for is_lost in [false, true] {
        let ledger = Ledger::default();
        let (app, effects) = bank(&ledger, async move |ledger, lease: Lease, n| {
            if n > 1 {
                return charge(ledger, lease, n).await;
            }
            lease.fail_transaction(is_lost);
            (StatusCode::CONFLICT, "not charged").into_response()
        });
        let first = send(&app, order()).await;
        assert_eq!(
            (first.status, first.text()),
            (StatusCode::CONFLICT, "not charged")
        );
        assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
        assert!(send(&app, order()).await.is_replay());
        assert_eq!(ledger.rows().await, ["charge 2"]);
        assert_eq!(effects.count(), 2);
    }
}

// S-430
/// No call with the key could read such a record.
#[tokio::test(start_paused = true)]
async fn record_of_wrong_kind_is_not_committed() {
    let ledger = Ledger::default();
    let (app, effects) = bank(&ledger, async |ledger: Ledger, lease: Lease, n| {
        if n > 1 {
            return charge(ledger, lease, n).await;
        }
        let mut tx = ledger.begin();
        tx.insert("value");
        let value = tx.commit_prepared(lease.prepare_value(7)).await;
        assert!(matches!(value, Err(StoreError::Backend(_))), "{value:?}");
        let begun = lease.prepare_value(7).begin_commit();
        assert!(matches!(begun, Err(StoreError::Backend(_))), "{begun:?}");
        (StatusCode::CONFLICT, "not charged").into_response()
    });
    assert_eq!(send(&app, order()).await.text(), "not charged");
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert!(send(&app, order()).await.is_replay());
    assert_eq!(effects.count(), 2);

    let once = IdempotencyLayer::new(ledger.clone());
    let database = ledger.clone();
    let work = async move |lease: Lease| {
        let mut tx = database.begin();
        tx.insert("response");
        let response = tx.commit(&lease, created(1)).await;
        let is_refused = matches!(response, Err(Failed::Store(StoreError::Backend(_))));
        Err::<String, _>(WorkError::Release(is_refused))
    };
    let outcome = once.run_once("k", "order", work).await;
    assert_eq!(outcome.expect("an outcome"), Outcome::Failed(true));
    assert_eq!(ledger.rows().await, ["charge 2"]);
}

/// The way in which a handler reports that the database refused the transaction of a closure.
#[derive(Clone, Copy, Debug)]
enum Refused {
    Status(StatusCode),
    Panic,
}

/// Runs a closure whose statements all succeed, and whose commit the database rejects. The handler reports the commit
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
            Refused::Status(StatusCode::INTERNAL_SERVER_ERROR),
            Refused::Status(StatusCode::CONFLICT),
            Refused::Panic,
        ] {
            let ledger = Ledger::default();
            let (app, effects) = bank(&ledger, async move |ledger, lease, n| {
                if n > 1 {
                    return charge(ledger, lease, n).await;
                }
                refused(&lease, n, is_begun).await;
                match refusal {
                    Refused::Status(status) => (status, "refused").into_response(),
                    Refused::Panic => panic!("refused"),
                }
            });
            let first = {
                let app = app.clone();
                tokio::spawn(async move { send(&app, order()).await }).await
            };
            match (first, refusal) {
                (Ok(first), Refused::Status(status)) => {
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

// S-941, F-925
/// The handler returns an output that it prepared after the refused commit, and that is not recorded.
#[tokio::test(start_paused = true)]
async fn unrecordable_output_is_no_committed_response() {
    for status in [StatusCode::INTERNAL_SERVER_ERROR, StatusCode::CONFLICT] {
        let ledger = Ledger::default();
        let layer = IdempotencyLayer::new(ledger.clone()).with_unrecordable(Unrecordable::Release);
        let (app, effects) = behind(layer, &ledger, async move |ledger, lease, n| {
            if n > 1 {
                return charge(ledger, lease, n).await;
            }
            refused(&lease, n, false).await;
            let prepared = lease.prepare((status, "refused").into_response()).await;
            let unrecordable = match prepared {
                Ok(prepared) => prepared.into_tombstone().expect_err("no tombstones"),
                Err(unrecordable) => unrecordable,
            };
            unrecordable.into_output().into_response()
        });
        let first = send(&app, order()).await;
        assert_eq!((first.status, first.text()), (status, "refused"));
        assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
        assert!(send(&app, order()).await.is_replay());
        assert_eq!(ledger.rows().await, ["charge 2"]);
        assert_eq!(effects.count(), 2);
    }
}

// S-804, F-925
#[tokio::test(start_paused = true)]
async fn value_after_refused_commit_is_recorded() {
    let once = IdempotencyLayer::new(MemoryStore::new());
    let work = async |lease: Lease| {
        // The statements of a closure succeed, and the database refuses its commit.
        let prepared = lease.prepare_value("paid".to_owned());
        let written = prepared.commit(async { Ok(()) }).await;
        drop(written.expect("the statement succeeded"));
        Ok::<_, WorkError<()>>("refused".to_owned())
    };
    let refused = || "refused".to_owned();
    for expected in [Outcome::Executed(refused()), Outcome::Replayed(refused())] {
        let outcome = once.run_once("k", "order", work).await;
        assert_eq!(outcome.expect("an outcome"), expected);
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

// S-942
/// The effect is lost, whether the layer records the response or not.
#[tokio::test(start_paused = true)]
async fn unrecorded_success_with_open_transaction_is_500() {
    let accepted = |status: StatusCode| status.is_success() && status != StatusCode::ACCEPTED;
    let layers = [
        IdempotencyLayer::new(MemoryStore::new()),
        IdempotencyLayer::new(MemoryStore::new()).with_unrecordable(Unrecordable::Release),
        IdempotencyLayer::new(MemoryStore::new()).with_recorded_statuses(accepted),
    ];
    for (n, layer) in layers.into_iter().enumerate() {
        let (app, effects) = app(layer, move |_, req: Request<Body>| {
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            async move {
                drop(lease.open_transaction());
                let body = Body::new(Scripted::new(["streamed"]));
                match n {
                    0 => ([("x-idempo-policy", "no-store")], "done").into_response(),
                    1 => body.into_response(),
                    _ => StatusCode::ACCEPTED.into_response(),
                }
            }
        });
        for _ in 0..2 {
            assert_eq!(
                send(&app, order()).await.code(),
                "unfinished-transaction",
                "{n}"
            );
        }
        assert_eq!(effects.count(), 2);
    }
}

// S-942
/// The handler reads a body that its client breaks off.
#[tokio::test(start_paused = true)]
async fn open_transaction_after_incomplete_body_is_500() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone()).with_fingerprint(FingerprintBy::head_only());
    let (app, effects) = app(layer, async |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let transaction = lease.open_transaction();
        let body = axum::body::to_bytes(req.into_body(), usize::MAX).await;
        assert!(body.is_err());
        // Only the second one is held while the response is decided.
        if n == 1 {
            drop(transaction);
        } else {
            std::mem::forget(transaction);
        }
        created(n)
    });
    for _ in 0..2 {
        let broken = Scripted::new([Step::from("part"), Step::Fail]);
        let response = send(&app, post("/orders", "k", Body::new(broken))).await;
        assert_eq!(response.code(), "unfinished-transaction");
        assert!(store.is_empty(), "the key is free");
    }
    assert_eq!(effects.count(), 2);
}

/// A body that owns a transaction, and ends it after its last frame.
struct Export(Scripted, Option<OpenTransaction>);

impl http_body::Body for Export {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let frame = ready!(Pin::new(&mut self.0).poll_frame(cx));
        if frame.is_none() {
            self.1.take().expect("one end").end();
        }
        Poll::Ready(frame)
    }
}

/// The transaction is open when the handler returns, and is not lost.
#[tokio::test(start_paused = true)]
async fn transaction_of_unrecorded_body_passes() {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let (app, effects) = app(layer, async |_, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let rows = Export(Scripted::new(["rows"]), Some(lease.open_transaction()));
        ([("x-idempo-policy", "no-store")], Body::new(rows))
    });
    assert_eq!(send(&app, order()).await.text(), "rows");
    assert_eq!(effects.count(), 1);
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
