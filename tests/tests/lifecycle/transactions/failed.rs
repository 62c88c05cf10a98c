//! Commits that failed, and commits whose outcome no query shows.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, middleware::from_fn, response::IntoResponse};
use http::StatusCode;
use metrics_util::debugging::DebuggingRecorder;
use tests::{
    app,
    barrier::{Barrier, eventually, within},
    created,
    ledger::{CommitFault, Ledger},
    send,
};
use tokio::time::sleep;
use tower_idempotency::{
    ExecutionFailure, IdempotencyLayer, Lease, MemoryStore, MissingKey, OrphanPolicy,
    conformance::{Fault, FaultInjector, Operation},
    store::StoreError,
    transaction::LeaseExt,
};

use super::{
    LONG, assert_charged_once, assert_unknown, bank, behind, charge, first_of, keyless,
    leases_lost, order,
};

// S-194
#[tokio::test(start_paused = true)]
async fn failed_commit_is_resolved_and_retry_executes() {
    let ledger = Ledger::default();
    ledger.next(CommitFault::CallLost);
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

// S-431, S-920
/// The provider has charged before the commit fails. A retry calls it with the same key.
#[tokio::test(start_paused = true)]
async fn failed_commit_keeps_downstream_key() {
    for (panics, is_rejected) in [(false, false), (false, true), (true, false)] {
        let (ledger, calls) = (Ledger::default(), Arc::new(Mutex::new(Vec::new())));
        let made = Arc::clone(&calls);
        let layer = IdempotencyLayer::new(ledger.clone()).with_missing_key(MissingKey::Derive);
        let (app, _) = behind(layer, &ledger, async move |ledger, lease: Lease, n| {
            let call = (lease.derive("charge"), lease.is_takeover());
            made.lock().expect("a lock").push(call);
            let res = charge(ledger, lease.clone(), n).await;
            assert!(!panics || n > 1, "the intended panic");
            if is_rejected && n == 1 {
                lease.reject_commit();
            }
            res
        });
        ledger.next(CommitFault::CallLost);
        let service = app.clone();
        match tokio::spawn(async move { send(&service, keyless()).await }).await {
            Ok(first) if is_rejected => {
                assert_eq!(first.status, StatusCode::INTERNAL_SERVER_ERROR);
            }
            // The commit may still reach the orphan.
            Ok(first) => assert_unknown(&first, true),
            Err(error) => assert!(panics && error.is_panic()),
        }
        sleep(Duration::from_secs(16)).await;
        let retry = send(&app, keyless()).await;
        assert_eq!(retry.status, StatusCode::CREATED, "{retry:?}");
        let calls = calls.lock().expect("a lock").clone();
        let [(first, false), (second, true)] = &calls[..] else {
            panic!("expected one takeover: {calls:?}");
        };
        assert_eq!(first, second);
        assert_eq!(ledger.rows().await, ["charge 2"]);
        assert!(send(&app, keyless()).await.is_replay());
    }
}

/// A task of the handler begins a transaction after the response. The layer has ended the lease, and no other execution has it.
#[tokio::test(start_paused = true)]
async fn begin_after_response_reports_no_loss() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let ledger = Ledger::default();
    let (app, effects) = bank(&ledger, async |_, lease: Lease, n| {
        tokio::spawn(async move {
            sleep(Duration::from_secs(1)).await;
            lease.fail_transaction(true);
        });
        created(n)
    });
    first_of(&send(&app, order()).await);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(leases_lost(&recorder), 0.0);
    assert!(send(&app, order()).await.is_replay());
    assert_eq!(effects.count(), 1);
}

// S-195
/// If another process acquires the key after its release, it is not a takeover.
#[tokio::test(start_paused = true)]
async fn failed_commit_is_resolved_while_rival_holds_key() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    within(LONG, async {
        for generation in 1..=2 {
            let (ledger, looked) = (Ledger::default(), Barrier::closed());
            let held = looked.clone();
            let (app, _) = bank(&ledger, async move |ledger: Ledger, lease, n| {
                // The handler queries the entry, and then the layer does, under another token.
                let looks = ledger.calls(Operation::Acquire) + 2;
                let held = held.clone();
                ledger.store.set_script(move |op, nth| match (op, nth) {
                    (Operation::Acquire, nth) if nth == looks => {
                        Fault::HoldCall(held.clone().into())
                    }
                    _ => Fault::None,
                });
                ledger.next(CommitFault::CallLost);
                charge(ledger, lease, n).await
            });
            if generation == 2 {
                let stuck = ledger.another();
                stuck.store.set_fault(Operation::Renew, Fault::HangCall);
                let (stuck, _) = bank(&stuck, async |_, _, _| std::future::pending().await);
                tokio::spawn(async move { send(&stuck, order()).await });
                sleep(Duration::from_secs(16)).await;
            }
            let request = tokio::spawn(async move { send(&app, order()).await });
            looked.arrival().await;
            let another = ledger.another();
            let runs = Barrier::closed();
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
/// The query is conclusive only after the lease expired: until then the commit may still arrive.
#[tokio::test(start_paused = true)]
async fn commit_with_unreleasable_lease_is_outcome_unknown() {
    within(LONG, async {
        for (fault, executed) in [(CommitFault::ReplyLost, 1), (CommitFault::CallLost, 2)] {
            let ledger = Ledger::default();
            ledger.next(fault.clone());
            let (app, executions) = bank(&ledger, async move |ledger: Ledger, lease, n| {
                if n > 1 {
                    return charge(ledger, lease, n).await;
                }
                // The handler cannot query the entry either.
                ledger
                    .store
                    .enqueue(Operation::Acquire, vec![Fault::CallLost; 3]);
                ledger.store.set_fault(Operation::Release, Fault::CallLost);
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
            let (store, query) = (FaultInjector::new(MemoryStore::new()), Barrier::closed());
            let layer = IdempotencyLayer::new(store.clone())
                .with_orphan_policy(OrphanPolicy::Refuse)
                .with_failure(ExecutionFailure::Release);
            let (injector, barrier) = (store.clone(), query.clone());
            let (app, executions) = app(layer.clone(), move |n, req| {
                let lease = req.extensions().get::<Lease>().expect("a lease").clone();
                let (injector, barrier) = (injector.clone(), barrier.clone());
                async move {
                    if n > 1 {
                        return created(n);
                    }
                    injector.enqueue(
                        Operation::Acquire,
                        [Fault::HoldCall(barrier.clone().into())],
                    );
                    tokio::spawn(async move {
                        let prepared = lease.prepare(created(n)).await.expect("it is recorded");
                        let cut = async { Err(StoreError::backend("the connection was cut")) };
                        assert!(prepared.commit(cut).await.is_err());
                    });
                    barrier.arrival().await;
                    assert!(!panics, "the intended panic");
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
            assert!(store.inner().is_empty(), "the lease was released");
            query.open_for_good();
            eventually("the query acquires the key", || store.inner().len() == 1).await;
            sleep(Duration::from_secs(3)).await;
            assert_eq!(send(&app, order()).await.text(), "{\"execution\":2}");
            assert!(send(&app, order()).await.is_replay());
            assert_eq!(executions.count(), 2);
            sleep(Duration::from_secs(20)).await;
            assert!(
                store.calls(Operation::Release) <= 8,
                "the releases end with the lease"
            );
            assert_eq!(layer.in_flight(), 0);
        })
        .await;
    }
}

// S-203
/// If a commit fails after the layer has finished, no task would release a newly acquired lease. The commit therefore
/// acquires none.
#[tokio::test(start_paused = true)]
async fn late_failed_commit_acquires_nothing() {
    within(LONG, async {
        let (store, failing) = (FaultInjector::new(MemoryStore::new()), Barrier::closed());
        let layer = IdempotencyLayer::new(store.clone()).with_orphan_policy(OrphanPolicy::Refuse);
        let barrier = failing.clone();
        let (app, executions) = app(layer, move |n, req| {
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            let barrier = barrier.clone();
            async move {
                if n > 1 {
                    return created(n);
                }
                let connection = barrier.clone();
                tokio::spawn(async move {
                    let prepared = lease.prepare(created(n)).await.expect("it is recorded");
                    let commit = async move {
                        connection.pass().await;
                        Err(StoreError::backend("the connection was cut"))
                    };
                    assert!(prepared.commit(commit).await.is_err());
                });
                barrier.arrival().await;
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
/// The query after a commit may acquire a lease although its reply is lost. That lease must not block the key.
#[tokio::test(start_paused = true)]
async fn lease_possibly_taken_by_query_is_released() {
    within(LONG, async {
        for lost in [
            (Operation::Acquire, Fault::ReplyLost),
            (Operation::Acquire, Fault::HangReply),
            (Operation::Release, Fault::CallLost),
        ] {
            let ledger = Ledger::default();
            ledger.next(CommitFault::CallLost);
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
                            // The first release, which ends the lease, succeeds.
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
        for (fault, executed, row) in [
            (CommitFault::ReplyLost, 1, "charge 1"),
            (CommitFault::CallLost, 2, "charge 2"),
        ] {
            for status in [StatusCode::OK, StatusCode::BAD_GATEWAY] {
                let ledger = Ledger::default();
                ledger.next(fault.clone());
                let (app, executions) = bank(&ledger, async move |ledger: Ledger, lease, n| {
                    if n > 1 {
                        return charge(ledger, lease, n).await;
                    }
                    ledger.store.set_fault(Operation::Acquire, Fault::CallLost);
                    ledger.store.set_fault(Operation::Complete, Fault::CallLost);
                    charge(ledger, lease, n).await;
                    (status, "whatever").into_response()
                });
                assert_unknown(&send(&app, order()).await, true);
                ledger.store.clear_faults();
                if status == StatusCode::OK && executed == 2 {
                    // The layer continues its attempts to store the handler's other response.
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
        for (fault, committed) in [
            (CommitFault::HangReply, true),
            (CommitFault::HangCall, false),
        ] {
            for status in [StatusCode::REQUEST_TIMEOUT, StatusCode::CONFLICT] {
                let ledger = Ledger::default();
                ledger.next(fault.clone());
                let database = ledger.clone();
                let handler = async move |lease: Lease| charge(database, lease, 1).await;
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
                // A response after a failed commit is not an outcome, with any status.
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
    for (fault, rows) in [(CommitFault::HangReply, 1), (CommitFault::HangCall, 0)] {
        let ledger = Ledger::default();
        ledger.next(fault);
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
            let (ledger, barrier) = (Ledger::default(), Barrier::closed());
            ledger.next(CommitFault::Late(barrier.clone()));
            let (app, executions) = bank(&ledger, async move |ledger, lease, n| {
                charge(ledger, lease, n).await;
                (status, "the connection was cut").into_response()
            });
            let answering = app.clone();
            let first = tokio::spawn(async move { send(&answering, order()).await });
            barrier.arrival().await;
            sleep(Duration::from_secs(1)).await;
            assert!(!first.is_finished());
            barrier.open_for_good();
            first_of(&first.await.expect("no panic"));
            assert_charged_once(&ledger, &app).await;
            assert_eq!(executions.count(), 1);
        }
    })
    .await;
}
