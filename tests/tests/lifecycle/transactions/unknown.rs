//! Commits without a reply, and late replies.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use axum::{Router, body::Body, response::IntoResponse};
use bytes::Bytes;
use http::{Request, StatusCode};
use metrics_util::debugging::DebuggingRecorder;
use tests::{
    TestResponse,
    barrier::{Barrier, bounded, within},
    created,
    ledger::{CommitFault, Ledger},
    observed::{read, total},
    send,
};
use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, Lease, MissingKey, OrphanPolicy, Ttl,
    conformance::{Fault, Operation},
    run_once::{Outcome, WorkError},
    store::{Acquired, Claim, LeaseRef, Store, StoreError},
    transaction::LeaseExt,
};

use super::{
    LONG, assert_charged_once, assert_unknown, bank, behind, charge, failed, first_of, keyless,
    leases_lost, order,
};

// S-193
#[tokio::test(start_paused = true)]
async fn lost_commit_reply_is_resolved() {
    let ledger = Ledger::default();
    ledger.next(CommitFault::ReplyLost);
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
/// After the retention, a missing record proves nothing, and a second commit could repeat the effect. Found by the
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
    let response = send(&app, order()).await;
    assert_eq!(ledger.rows().await, ["charge 1"]);
    assert_eq!(response.code(), "outcome-unknown");
    let retry = send(&app, order()).await;
    assert!(
        !retry.is_replay(),
        "the record has expired, and the key is free"
    );
}

// S-308
/// The store does not report the outcome of the commit, and the next renewal finds no lease.
#[tokio::test(start_paused = true)]
async fn own_unacknowledged_commit_is_no_lease_loss() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let ledger = Ledger::default();
    ledger.next(CommitFault::ReplyLost);
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
/// The database rejects the second attempt because the first one has completed the entry.
#[tokio::test(start_paused = true)]
async fn retried_successful_commit_reports_no_loss() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let ledger = Ledger::default();
    ledger.next(CommitFault::ReplyLost);
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

/// A dropped commit is no longer in flight. A later renewal reports the lost lease at once, not at lease expiry.
#[tokio::test(start_paused = true)]
async fn cut_off_commit_leaves_renewals_effective() {
    let ledger = Ledger::default();
    ledger.next(CommitFault::HangReply);
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
/// A commit that began may have completed the entry. Here it has not: another process holds the lease.
#[tokio::test(start_paused = true)]
async fn lease_loss_after_failed_commit_is_reported_once() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let ledger = Ledger::default();
    ledger.next(CommitFault::CallLost);
    let (app, _) = bank(&ledger, async |ledger: Ledger, lease: Lease, n| {
        let failed = charge(ledger.clone(), lease.clone(), n).await;
        let (mine, store) = (lease.lease_ref(), ledger.store.inner());
        store.release(&mine).await.expect("memory does not fail");
        take_entry(&ledger, mine, false).await;
        bounded(lease.lost()).await;
        failed
    });
    send(&app, order()).await;
    assert_eq!(leases_lost(&recorder), 1.0);
}

// S-310
/// The renewer has not noticed the loss when the execution fails. Another execution holds the lease, or has stored its record.
#[tokio::test(start_paused = true)]
async fn lease_loss_is_reported_by_failed_execution() {
    for is_completed in [false, true] {
        let recorder = DebuggingRecorder::new();
        let _recorded = metrics::set_default_local_recorder(&recorder);
        let ledger = Ledger::default();
        ledger.next(CommitFault::CallLost);
        let layer = IdempotencyLayer::new(ledger.clone()).with_orphan_policy(OrphanPolicy::Refuse);
        let (app, _) = behind(
            layer,
            &ledger,
            async move |ledger: Ledger, lease: Lease, n| {
                charge(ledger.clone(), lease.clone(), n).await;
                let (mine, store) = (lease.lease_ref(), ledger.store.inner());
                store.release(&mine).await.expect("memory does not fail");
                take_entry(&ledger, mine, is_completed).await;
                panic!("the handler fails");
            },
        );
        let sent = tokio::spawn(async move { send(&app, order()).await });
        sent.await.expect_err("a panic");
        assert_eq!(leases_lost(&recorder), 1.0, "{is_completed}");
    }
}

/// Another execution takes over the orphan that the failed one has left, and completes it before the query.
#[tokio::test(start_paused = true)]
async fn completion_of_left_orphan_is_no_loss() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let ledger = Ledger::default();
    ledger.next(CommitFault::CallLost);
    let is_left = Barrier::closed();
    let held = is_left.clone();
    ledger.store.set_script(move |op, _| match op {
        Operation::Renew => Fault::HoldReply(held.clone().into()),
        _ => Fault::None,
    });
    let layer = IdempotencyLayer::new(ledger.clone()).with_orphan_policy(OrphanPolicy::Refuse);
    let entry = Arc::new(OnceLock::new());
    let own = Arc::clone(&entry);
    let (app, _) = behind(
        layer,
        &ledger,
        async move |ledger: Ledger, lease: Lease, n| {
            own.set(lease.lease_ref()).expect("one execution");
            charge(ledger, lease, n).await;
            panic!("the handler fails");
        },
    );
    let sent = tokio::spawn(async move { send(&app, order()).await });
    is_left.arrival().await;
    // The lease has the shortest duration now.
    sleep(2 * Ttl::MIN.as_duration()).await;
    let orphan = entry.get().expect("an execution");
    take_entry(&ledger, *orphan, true).await;
    is_left.open_for_good();
    sent.await.expect_err("a panic");
    assert_eq!(leases_lost(&recorder), 0.0);
}

/// Acquires the entry for another execution, which completes it or holds the lease.
async fn take_entry(ledger: &Ledger, entry: LeaseRef, is_completed: bool) {
    let store = ledger.store.inner();
    let other = Claim::new(entry.id, entry.fingerprint).expect("randomness");
    let acquired = store.acquire(&other).await.expect("memory does not fail");
    let Acquired::Granted { generation, .. } = acquired else {
        panic!("{acquired:?}");
    };
    if is_completed {
        let (reference, record) = (other.lease_ref(generation), Bytes::from("a record"));
        let completed = store.complete(&reference, record, Ttl::from_secs(60)).await;
        completed.expect("memory does not fail");
    }
}

/// Deletes the entry of the lease, and waits until the renewer has reported the loss.
async fn lose_lease(ledger: &Ledger, lease: &Lease) {
    let released = ledger.store.inner().release(&lease.lease_ref()).await;
    released.expect("memory does not fail");
    bounded(lease.lost()).await;
}

/// The renewal fails, and the query finds the commit of the failed handler.
#[tokio::test(start_paused = true)]
async fn recorded_commit_is_not_counted_as_held() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let ledger = Ledger::default();
    ledger.next(CommitFault::ReplyLost);
    let layer = IdempotencyLayer::new(ledger.clone()).with_orphan_policy(OrphanPolicy::Refuse);
    let (app, _) = behind(layer, &ledger, async |ledger: Ledger, lease: Lease, n| {
        let store = &ledger.store;
        store.enqueue(Operation::Acquire, vec![Fault::CallLost; 3]);
        store.set_fault(Operation::Renew, Fault::CallLost);
        charge(ledger.clone(), lease, n).await;
        panic!("the handler fails");
    });
    let caller = app.clone();
    let sent = tokio::spawn(async move { send(&caller, order()).await });
    sent.await.expect_err("a panic");
    assert_eq!(total(&read(&recorder), "idempotency_held_total"), 0.0);
    assert_charged_once(&ledger, &app).await;
}

// S-311
/// The renewer reports the loss. The handler then attempts a commit, or the work leaves its key.
#[tokio::test(start_paused = true)]
async fn reported_loss_counts_alone() {
    for is_run_once in [false, true] {
        let recorder = DebuggingRecorder::new();
        let _recorded = metrics::set_default_local_recorder(&recorder);
        let ledger = Ledger::default();
        if is_run_once {
            let layer = IdempotencyLayer::new(ledger.clone());
            let ledger = ledger.clone();
            let work = async move |lease: Lease| {
                lose_lease(&ledger, &lease).await;
                Err::<u8, _>(WorkError::Orphan(()))
            };
            let _ = layer.run_once("k", "x", work).await.expect("an outcome");
        } else {
            let (app, _) = bank(&ledger, async move |ledger: Ledger, lease: Lease, n| {
                lose_lease(&ledger, &lease).await;
                charge(ledger, lease, n).await
            });
            send(&app, order()).await;
        }
        let found = read(&recorder);
        for (name, count) in [("lease_lost", 1.0), ("released", 0.0), ("held", 0.0)] {
            let name = format!("idempotency_{name}_total");
            assert_eq!(total(&found, &name), count, "{name}, {is_run_once}");
        }
    }
}

/// Sends the request to a handler that charges, and responds with `timed_out` after a second. The commit arrives while the layer
/// queries the store. Returns the response and the service.
async fn send_with_late_commit(
    layer: IdempotencyLayer,
    ledger: &Ledger,
    req: fn() -> Request<Body>,
    timed_out: StatusCode,
) -> (TestResponse, Router) {
    let (way, looked) = (Barrier::closed(), Barrier::closed());
    ledger.next(CommitFault::UnderWay(way.clone()));
    let held = looked.clone();
    ledger.store.set_script(move |op, n| match (op, n) {
        (Operation::Acquire, 2) => Fault::HoldReply(held.clone().into()),
        _ => Fault::None,
    });
    let (app, _) = behind(layer, ledger, async move |ledger, lease: Lease, n| {
        // A release loses this key only if the layer has derived the key of the request.
        let _ = lease.derive("charge");
        let commit = charge(ledger, lease, n);
        match tokio::time::timeout(Duration::from_secs(1), commit).await {
            Ok(res) => res,
            Err(_) => timed_out.into_response(),
        }
    });
    let caller = app.clone();
    let sent = tokio::spawn(async move { send(&caller, req()).await });
    looked.arrival().await;
    way.open_for_good();
    sleep(Duration::from_millis(100)).await;
    looked.open_for_good();
    let response = sent.await.expect("no panic");
    sleep(Duration::from_secs(1)).await;
    (response, app)
}

// S-201
/// A query acquires a lease on a free key. The late commit must still be rejected.
#[tokio::test(start_paused = true)]
async fn late_commit_fails_after_reconciliation() {
    within(LONG, async {
        let ledger = Ledger::default();
        let layer = IdempotencyLayer::new(ledger.clone());
        let (response, app) =
            send_with_late_commit(layer, &ledger, order, StatusCode::GATEWAY_TIMEOUT).await;
        assert_eq!(response.status, StatusCode::GATEWAY_TIMEOUT);
        assert!(ledger.rows().await.is_empty());
        let retry = send(&app, order()).await;
        assert_eq!(retry.text(), "{\"execution\":2}");
        assert_eq!(ledger.rows().await, ["charge 2"]);
    })
    .await;
}

// S-431
/// A release would lose the downstream key. So the key is an orphan, and the commit still finds its lease.
#[tokio::test(start_paused = true)]
async fn late_commit_after_derived_key_is_unknown() {
    within(LONG, async {
        let ledger = Ledger::default();
        let layer = IdempotencyLayer::new(ledger.clone()).with_missing_key(MissingKey::Derive);
        let (response, app) =
            send_with_late_commit(layer, &ledger, keyless, StatusCode::CONFLICT).await;
        assert_unknown(&response, true);
        let retry = send(&app, keyless()).await;
        assert!(retry.is_replay());
        assert_eq!(retry.text(), "{\"execution\":1}");
        assert_eq!(ledger.rows().await, ["charge 1"]);
    })
    .await;
}

// S-367
/// The work holds its key, so the commit still finds its lease.
#[tokio::test(start_paused = true)]
async fn late_commit_of_held_key_is_unknown() {
    within(LONG, async {
        let ledger = Ledger::default();
        let way = Barrier::closed();
        ledger.next(CommitFault::UnderWay(way.clone()));
        let layer = IdempotencyLayer::new(ledger.clone());
        let run = async || {
            let database = ledger.clone();
            let work = async move |lease: Lease| {
                let mut tx = database.begin();
                tx.insert("charge");
                let commit = tx.commit_prepared(lease.prepare_value(7));
                let committed = tokio::time::timeout(Duration::from_secs(1), commit).await;
                Err::<i32, _>(WorkError::Orphan(committed.is_ok()))
            };
            let outcome = layer.run_once("message-42", "invoice 7", work).await;
            outcome.expect("an outcome")
        };
        assert_eq!(run().await, Outcome::Unknown(false));
        way.open_for_good();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(run().await, Outcome::Replayed(7));
        assert_eq!(ledger.rows().await, ["charge"]);
    })
    .await;
}

/// The commit is stored, and its record expires before the layer queries the store.
#[tokio::test(start_paused = true)]
async fn expired_commit_of_held_key_is_unknown() {
    within(LONG, async {
        let ledger = Ledger::default();
        ledger.next(CommitFault::HangReply);
        let layer = IdempotencyLayer::new(ledger.clone()).with_retention(Ttl::from_secs(1));
        let database = ledger.clone();
        let work = async move |lease: Lease| {
            let mut tx = database.begin();
            tx.insert("charge");
            let commit = tx.commit_prepared(lease.prepare_value(7));
            let committed = tokio::time::timeout(Duration::from_secs(2), commit).await;
            Err::<i32, _>(WorkError::Orphan(committed.is_ok()))
        };
        let outcome = layer.run_once("message-42", "invoice 7", work).await;
        assert_eq!(outcome.expect("an outcome"), Outcome::Unknown(false));
        assert_eq!(ledger.rows().await, ["charge"]);
    })
    .await;
}
