//! Commits without a reply whose records expire before the layer finds them.

use std::time::Duration;

use axum::response::IntoResponse;
use http::StatusCode;
use metrics_util::debugging::DebuggingRecorder;
use tests::{
    barrier::{bounded, eventually, within},
    created,
    ledger::{CommitFault, Ledger},
    observed::{read, total},
    send,
};
use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, Lease, Ttl,
    conformance::{Fault, Hold, Operation},
};

use super::{LONG, assert_unknown, behind, charge, order};

// S-204
/// If the record has expired meanwhile, reconciliation releases the lease that its query acquired.
#[tokio::test(start_paused = true)]
async fn reconciliation_after_expiry_leaves_no_lease() {
    within(LONG, async {
        let ledger = Ledger::default();
        ledger.next(CommitFault::HangReply);
        ledger.store.set_script(|op, n| match (op, n) {
            (Operation::Acquire, 2) => {
                Fault::HoldCall(Hold::new(|| sleep(Duration::from_millis(1_500))))
            }
            _ => Fault::None,
        });
        let layer = IdempotencyLayer::new(ledger.clone()).with_retention(Ttl::from_secs(1));
        let (app, _) = behind(layer, &ledger, async |ledger, lease, n| {
            let commit = charge(ledger, lease, n);
            let timed_out = tokio::time::timeout(Duration::from_millis(100), commit).await;
            assert!(timed_out.is_err());
            created(n)
        });
        assert_unknown(&send(&app, order()).await, false);
        assert!(ledger.store.inner().is_empty());
    })
    .await;
}

// S-205
/// The layer can store its own record, but the handler's commit may have succeeded and its record may have expired. The
/// handler's response that nothing was charged may be untrue. The layer neither sends nor records it.
#[tokio::test(start_paused = true)]
async fn response_discarded_if_committed_record_expired() {
    within(LONG, async {
        // The record expires before the layer queries the store, during the query, or in the background.
        for (charging, completing, fails) in [(2_000, 0, 0), (500, 1_000, 0), (500, 0, 20)] {
            let ledger = Ledger::default();
            ledger.next(CommitFault::HangReply);
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
                    let timed_out = tokio::time::timeout(charging, commit).await;
                    assert!(timed_out.is_err());
                    (StatusCode::ACCEPTED, "not charged").into_response()
                });
            let first = send(&app, order()).await;
            // If the record of the commit cannot have expired yet, a retry may still find it.
            assert_unknown(&first, fails > 0);
            eventually("nothing is in flight", || layer.in_flight() == 0).await;
            assert_eq!(ledger.rows().await, ["charge 1"]);
            assert_eq!(executions.count(), 1);
            if completing == 0 {
                assert!(
                    ledger.store.inner().is_empty(),
                    "the layer's record is not stored"
                );
            }
        }
    })
    .await;
}

/// A renewal finds that the handler's commit has ended the lease. The store accepts no record until that of the commit has
/// expired.
#[tokio::test(start_paused = true)]
async fn expired_commit_is_no_lease_loss() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let ledger = Ledger::default();
    ledger.next(CommitFault::ReplyLost);
    ledger.store.set_fault(Operation::Complete, Fault::CallLost);
    let layer = IdempotencyLayer::new(ledger.clone()).with_retention(Ttl::from_secs(10));
    let (app, _) = behind(
        layer.clone(),
        &ledger,
        async move |ledger: Ledger, lease: Lease, n| {
            ledger
                .store
                .enqueue(Operation::Acquire, vec![Fault::CallLost; 3]);
            charge(ledger, lease.clone(), n).await;
            bounded(lease.lost()).await;
            (StatusCode::ACCEPTED, "not charged").into_response()
        },
    );
    assert_unknown(&send(&app, order()).await, true);
    eventually("nothing is in flight", || layer.in_flight() == 0).await;
    assert_eq!(ledger.rows().await, ["charge 1"]);
    let found = read(&recorder);
    assert_eq!(total(&found, "idempotency_lease_lost_total"), 0.0);
    assert_eq!(total(&found, "idempotency_released_total"), 1.0);
}
