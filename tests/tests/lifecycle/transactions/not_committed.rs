//! Rollbacks, lost leases, and rejected commits.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use tests::{
    Scripted, Step, TestResponse,
    barrier::{Barrier, within},
    created,
    ledger::{CommitFault, Ledger},
    post, send,
};
use tokio::time::sleep;
use tower_idempotency::{
    Lease,
    conformance::{Fault, Operation},
    store::Store,
    transaction::LeaseExt,
};

use super::{LONG, assert_charged_once, assert_unknown, bank, charge, commit, first_of, order};

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
        let response = send(&app, order()).await;
        assert_eq!(
            (response.status, response.text()),
            (StatusCode::PAYMENT_REQUIRED, "no money")
        );
        assert_eq!(response.is_replay(), replayed);
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
    ledger.next(CommitFault::CallLost);
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

/// A node whose handler runs under a lost lease, and another node that executes the same request.
struct LostLeaseFixture {
    ledger: Ledger,
    request: tokio::task::JoinHandle<TestResponse>,
    first: Barrier,
    second: Barrier,
    other: Router,
}

impl LostLeaseFixture {
    async fn new(responses: StatusCode, fault: CommitFault) -> Self {
        let ledger = Ledger::default();
        ledger.next(fault);
        let (first, second) = (Barrier::closed(), Barrier::closed());
        let paused = ledger.clone();
        // The node cannot renew its lease, like a paused process.
        ledger.store.set_fault(Operation::Renew, Fault::HangCall);
        let barrier = first.clone();
        let (app, _) = bank(&paused, async move |ledger, lease: Lease, n| {
            barrier.pass().await;
            let committed = charge(ledger, lease.clone(), n).await;
            assert_eq!(committed.text().await, "the lease is no longer held");
            assert!(!lease.is_held());
            (responses, "not committed").into_response()
        });
        let another = ledger.another();
        let barrier = second.clone();
        let (other, _) = bank(&another, async move |ledger, lease, _| {
            barrier.pass().await;
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

/// The status that the handler returns, and the result of its commit. The database rejects the commit if it arrives.
const ENDS: [(StatusCode, CommitFault); 4] = [
    (StatusCode::INTERNAL_SERVER_ERROR, CommitFault::Committed),
    (StatusCode::INTERNAL_SERVER_ERROR, CommitFault::CallLost),
    (StatusCode::CONFLICT, CommitFault::Committed),
    (StatusCode::CONFLICT, CommitFault::CallLost),
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
        for (responses, fault) in ENDS {
            let fixture = LostLeaseFixture::new(responses, fault).await;
            fixture.second.open_for_good();
            let other = send(&fixture.other, order()).await;
            assert_eq!(other.text(), "of the other");
            fixture.first.open_for_good();
            let response = fixture.request.await.expect("no panic");
            assert_eq!(response.text(), "of the other", "{responses}");
            assert!(response.is_replay());
            assert_eq!(fixture.ledger.rows().await, ["charge 2"]);
        }
    })
    .await;
}

// S-187
#[tokio::test(start_paused = true)]
async fn commit_after_lost_lease_is_unknown_if_rival_runs() {
    within(LONG, async {
        for (responses, fault) in ENDS {
            let fixture = LostLeaseFixture::new(responses, fault).await;
            let app = fixture.other.clone();
            let other = tokio::spawn(async move { send(&app, order()).await });
            fixture.second.arrival().await;
            fixture.first.open_for_good();
            let response = fixture.request.await.expect("no panic");
            assert_eq!(response.status, StatusCode::CONFLICT, "{responses}");
            assert_unknown(&response, true);
            assert!(fixture.ledger.rows().await.is_empty());
            fixture.second.open_for_good();
            assert_eq!(other.await.expect("no panic").text(), "of the other");
            assert_eq!(fixture.ledger.rows().await, ["charge 2"]);
        }
    })
    .await;
}

// S-186, S-187
/// A renewal has reported the loss, so the layer sends no commit.
#[tokio::test(start_paused = true)]
async fn refused_commit_returns_response_of_rival() {
    within(LONG, async {
        for status in [StatusCode::INTERNAL_SERVER_ERROR, StatusCode::CONFLICT] {
            for has_responded in [true, false] {
                let fixture = LostLeaseFixture::new(status, CommitFault::Committed).await;
                let app = fixture.other.clone();
                let other = tokio::spawn(async move { send(&app, order()).await });
                fixture.second.arrival().await;
                if has_responded {
                    fixture.second.open_for_good();
                }
                fixture.ledger.store.clear_faults();
                sleep(Duration::from_secs(10)).await;
                assert_eq!(other.is_finished(), has_responded);
                fixture.first.open_for_good();
                let response = fixture.request.await.expect("no panic");
                if has_responded {
                    assert_eq!(response.text(), "of the other", "{status}");
                    assert!(response.is_replay());
                } else {
                    assert_unknown(&response, true);
                }
                fixture.second.open_for_good();
                assert_eq!(other.await.expect("no panic").text(), "of the other");
                assert_eq!(fixture.ledger.rows().await, ["charge 2"]);
            }
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
        assert!(lease.is_held(), "the loss is not known yet");
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

// S-188, S-940
/// The commit of a lease that is known to be lost sends nothing. A 4xx after it is no outcome.
#[tokio::test(start_paused = true)]
async fn client_error_after_known_loss_is_not_recorded() {
    let ledger = Ledger::default();
    let (app, executions) = bank(&ledger, async |ledger: Ledger, lease: Lease, n| {
        if n > 1 {
            return charge(ledger, lease, n).await;
        }
        let by_hand = ledger.store.inner();
        by_hand.release(&lease.lease_ref()).await.expect("released");
        // A renewal detects the loss.
        sleep(Duration::from_secs(10)).await;
        assert!(!lease.is_held());
        let res = charge(ledger, lease, n).await;
        assert_eq!(res.text().await, "the lease is no longer held");
        (StatusCode::CONFLICT, "not committed").into_response()
    });
    assert_eq!(send(&app, order()).await.text(), "not committed");
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
    ledger.next(CommitFault::HangReply);
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
        let barrier = Barrier::closed();
        let (task, late) = tokio::sync::oneshot::channel();
        let task = std::sync::Arc::new(std::sync::Mutex::new(Some(task)));
        let held = barrier.clone();
        let (app, _) = bank(&ledger, async move |ledger, lease, n| {
            let spawned = tokio::spawn(async move {
                held.pass().await;
                charge(ledger, lease, n).await.text().await
            });
            let task = task.lock().expect("no poison").take().expect("one run");
            task.send(spawned).expect("the receiver waits");
            (status, "not committed").into_response()
        });
        let response = send(&app, order()).await;
        assert_eq!(
            (response.status, response.text()),
            (status, "not committed")
        );
        barrier.open_for_good();
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
        let response = send(&app, order()).await;
        assert_eq!(
            (response.text(), response.is_replay()),
            ("slowly", replayed)
        );
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
        // Commits with the complete head, and under the lease of the previous request.
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
