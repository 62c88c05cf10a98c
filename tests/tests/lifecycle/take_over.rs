//! Takeovers of orphans without their clients.

use std::{convert::Infallible, time::Duration};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use tests::{
    Effects, TestResponse, app,
    barrier::{Barrier, eventually, within},
    created,
    ledger::{CommitFault, Ledger},
    post, send,
};
use tokio::time::sleep;
use tower_idempotency::{
    ErrorKind, IdempotencyLayer, KeyScope, Lease, MemoryStore, OrphanPolicy, TakeOverOutcome, Ttl,
    conformance::{Fault, Operation},
    store::{Claim, Fingerprint, KeyId, Store},
    transaction::LeaseExt,
};

const LONG: Duration = Duration::from_secs(600);

/// An entry whose first execution ended without an outcome, with the id and fingerprint that operators find.
struct Orphan {
    ledger: Ledger,
    layer: IdempotencyLayer,
    app: Router,
    executions: Effects,
    id: KeyId,
    fingerprint: Fingerprint,
    /// The key that the first execution derived for another service.
    derived: String,
}

impl Orphan {
    async fn new(policy: OrphanPolicy) -> Self {
        let ledger = Ledger::default();
        let layer = IdempotencyLayer::new(ledger.clone())
            .with_orphan_policy(policy)
            .with_secret("sixteen bytes at the least")
            .expect("long enough");
        let (sender, lease) = tokio::sync::oneshot::channel();
        let sender = std::sync::Mutex::new(Some(sender));
        let sender = std::sync::Arc::new(sender);
        let database = ledger.clone();
        let (app, executions) = app(layer.clone(), move |n, req| {
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            let (sender, ledger) = (sender.lock().expect("no poison").take(), database.clone());
            async move {
                if let Some(sender) = sender {
                    sender.send(lease.clone()).expect("the receiver waits");
                    // For the database the process is dead, because none of its calls arrive.
                    std::future::pending::<()>().await;
                }
                charge(&ledger, &lease, n).await
            }
        });
        // A process with its own runtime. When the runtime ends, no call reaches the store any more.
        let dying = app.clone();
        let died = tokio::spawn(async move { send(&dying, order()).await });
        let lease: Lease = lease.await.expect("it runs");
        ledger.store.set_fault(Operation::Renew, Fault::HangCall);
        sleep(Duration::from_secs(16)).await;
        assert!(!died.is_finished());
        let (derived, lease) = (lease.derive("charge"), lease.lease_ref());
        Self {
            ledger,
            layer,
            app,
            executions,
            id: lease.id,
            fingerprint: lease.fingerprint,
            derived,
        }
    }

    fn claim(&self) -> Claim {
        Claim::new(self.id, self.fingerprint).expect("randomness")
    }

    async fn retry(&self) -> TestResponse {
        send(&self.app, order()).await
    }
}

fn order() -> http::Request<Body> {
    post("/orders", "k", "{}")
}

async fn charge(ledger: &Ledger, lease: &Lease, n: u64) -> Response {
    let mut tx = ledger.begin();
    tx.insert(format!("charge {n}"));
    match tx.commit(lease, created(n)).await {
        Ok(res) => res.into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

type TakeOverResponse<E = Infallible> = TakeOverOutcome<Response<tower_idempotency::Body<Body>>, E>;

async fn executed(taken: TakeOverResponse) -> TestResponse {
    match taken {
        TakeOverOutcome::Executed(res) => tests::read(res.map(Body::new)).await,
        other => panic!("expected an execution, found {other:?}"),
    }
}

// S-248
#[tokio::test(start_paused = true)]
async fn orphan_is_executed_without_its_client() {
    within(LONG, async {
        // The policy applies to clients; a caller of `take_over` has decided.
        for policy in [OrphanPolicy::TakeOver, OrphanPolicy::Refuse] {
            for committing in [true, false] {
                let orphan = Orphan::new(policy).await;
                let (ledger, derived) = (orphan.ledger.clone(), orphan.derived.clone());
                ledger.store.clear_faults();
                let taken: TakeOverResponse = orphan
                    .layer
                    .take_over(orphan.claim(), async move |lease: Lease| {
                        assert!(lease.is_takeover());
                        assert_eq!(lease.generation(), 2);
                        assert_eq!(lease.derive("charge"), derived);
                        // Sleeps for longer than the lease.
                        sleep(Duration::from_secs(60)).await;
                        assert!(lease.is_held());
                        Ok(if committing {
                            charge(&ledger, &lease, 7).await
                        } else {
                            created(7)
                        })
                    })
                    .await
                    .expect("a lease");
                let done = executed(taken).await;
                assert_eq!(done.status, StatusCode::CREATED);
                let retry = orphan.retry().await;
                assert!(retry.is_replay());
                assert_eq!(retry.body, done.body);
                assert_eq!(retry.text(), "{\"execution\":7}");
                assert_eq!(orphan.executions.count(), 1, "only the dead execution");
                assert_eq!(orphan.ledger.rows().await.len(), usize::from(committing));
                assert_eq!(orphan.layer.in_flight(), 1, "only the dead execution");
            }
        }
    })
    .await;
}

// F-033, S-249
#[tokio::test(start_paused = true)]
async fn one_of_many_takeovers_executes() {
    within(LONG, async {
        let orphan = Orphan::new(OrphanPolicy::TakeOver).await;
        let mut completers = tokio::task::JoinSet::new();
        for n in 0..32 {
            let ledger = orphan.ledger.another();
            let layer = IdempotencyLayer::new(ledger.clone());
            let claim = orphan.claim();
            completers.spawn(async move {
                let work = async move |lease: Lease| Ok(charge(&ledger, &lease, n).await);
                let taken: TakeOverResponse =
                    layer.take_over(claim, work).await.expect("an answer");
                matches!(taken, TakeOverOutcome::Executed(_))
            });
        }
        let executed = completers.join_all().await;
        assert_eq!(executed.into_iter().filter(|executed| *executed).count(), 1);
        assert_eq!(orphan.ledger.rows().await.len(), 1);
    })
    .await;
}

// S-251
#[tokio::test(start_paused = true)]
async fn take_over_without_orphan_runs_nothing() {
    within(200 * LONG, async {
        let orphan = Orphan::new(OrphanPolicy::TakeOver).await;
        let ran = Effects::default();
        let refused = async |layer: &IdempotencyLayer, claim: Claim| {
            let ran = ran.clone();
            let work = async move |_lease| {
                ran.happen();
                Ok(created(0))
            };
            let taken: TakeOverResponse = layer.take_over(claim, work).await.expect("an answer");
            assert!(matches!(taken, TakeOverOutcome::NoOrphan), "{taken:?}");
        };
        // A claim of another request, and a claim of an unknown key, which must not be leased afterwards.
        let other = Fingerprint::from_bytes([9; 32]);
        let unknown = KeyId::from_bytes([9; 32]);
        refused(
            &orphan.layer,
            Claim::new(orphan.id, other).expect("randomness"),
        )
        .await;
        refused(
            &orphan.layer,
            Claim::new(unknown, other).expect("randomness"),
        )
        .await;
        let fresh = Claim::new(unknown, Fingerprint::from_bytes([8; 32])).expect("randomness");
        let acquired = orphan.ledger.acquire(&fresh).await.expect("no failure");
        assert!(matches!(
            acquired,
            tower_idempotency::store::Acquired::Granted {
                takeover: false,
                ..
            }
        ));
        // A retry is in progress, and then completes.
        let barrier = Barrier::closed();
        let held = barrier.clone();
        let ledger = orphan.ledger.another();
        let layer = IdempotencyLayer::new(ledger.clone());
        let (running, claim) = (layer.clone(), orphan.claim());
        let first = tokio::spawn(async move {
            let work = async move |lease: Lease| {
                held.pass().await;
                Ok(charge(&ledger, &lease, 1).await)
            };
            running.take_over::<_, Infallible, _, _>(claim, work).await
        });
        barrier.arrival().await;
        refused(&orphan.layer, orphan.claim()).await;
        barrier.open_for_good();
        executed(first.await.expect("no panic").expect("a lease")).await;
        refused(&orphan.layer, orphan.claim()).await;
        // The record expires.
        sleep(Duration::from_secs(25 * 3600)).await;
        refused(&orphan.layer, orphan.claim()).await;
        assert_eq!(ran.count(), 0);
    })
    .await;
}

// S-250
/// A caller repeats the call after a timeout: a claim identifies the requested key, not the caller.
#[tokio::test(start_paused = true)]
async fn reused_claim_does_not_execute_concurrently() {
    within(LONG, async {
        let orphan = Orphan::new(OrphanPolicy::Refuse).await;
        orphan.ledger.store.clear_faults();
        let (claim, barrier, runs) = (orphan.claim(), Barrier::closed(), Effects::default());
        let take_over = || {
            let (layer, claim, ledger) =
                (orphan.layer.clone(), claim.clone(), orphan.ledger.clone());
            let (barrier, runs) = (barrier.clone(), runs.clone());
            async move {
                let work = async move |lease: Lease| {
                    let n = runs.happen();
                    barrier.pass().await;
                    Ok(charge(&ledger, &lease, n).await)
                };
                let taken: TakeOverResponse =
                    layer.take_over(claim, work).await.expect("an answer");
                taken
            }
        };
        let left = tokio::time::timeout(Duration::from_secs(1), take_over()).await;
        assert!(left.is_err(), "the execution continues in a task");
        assert!(matches!(take_over().await, TakeOverOutcome::NoOrphan));
        barrier.open_for_good();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(runs.count(), 1);
        assert_eq!(orphan.ledger.rows().await, ["charge 1"]);
        assert!(orphan.retry().await.is_replay());
    })
    .await;
}

// S-250
/// A failed release of the first call must not release the lease of the second.
#[tokio::test(start_paused = true)]
async fn failed_call_does_not_release_reused_claim() {
    within(LONG, async {
        let orphan = Orphan::new(OrphanPolicy::Refuse).await;
        let (claim, store) = (orphan.claim(), &orphan.ledger.store);
        store.clear_faults();
        store.set_fault(Operation::Acquire, Fault::CallLost);
        let work = async |_| Ok::<Response, Infallible>(created(1));
        let failed = orphan.layer.take_over(claim.clone(), work).await;
        let failed = failed.expect_err("the store fails");
        assert_eq!(failed.kind(), ErrorKind::StoreUnavailable);
        store.clear_faults();
        let ledger = orphan.ledger.clone();
        let work = async move |lease: Lease| {
            sleep(Duration::from_secs(30)).await;
            assert!(lease.is_held());
            Ok(charge(&ledger, &lease, 2).await)
        };
        let taken: TakeOverResponse = orphan.layer.take_over(claim, work).await.expect("a lease");
        assert_eq!(executed(taken).await.status, StatusCode::CREATED);
        assert_eq!(orphan.ledger.rows().await, ["charge 2"]);
    })
    .await;
}

// S-252
#[tokio::test(start_paused = true)]
async fn failed_takeover_leaves_orphan() {
    within(LONG, async {
        let orphan = Orphan::new(OrphanPolicy::Refuse).await;
        let (layer, claim) = (&orphan.layer, || orphan.claim());
        orphan.ledger.store.clear_faults();

        let failed: TakeOverOutcome<Response<tower_idempotency::Body<Body>>, &str> = layer
            .take_over(claim(), async |_| Err::<Response, _>("no connection"))
            .await
            .expect("a lease");
        assert!(matches!(failed, TakeOverOutcome::Failed("no connection")));

        let taken: TakeOverResponse = layer
            .take_over(claim(), async |lease: Lease| {
                assert_eq!(lease.generation(), 3);
                Ok(StatusCode::BAD_GATEWAY.into_response())
            })
            .await
            .expect("a lease");
        assert_eq!(executed(taken).await.status, StatusCode::BAD_GATEWAY);

        let panicking = {
            let (layer, claim) = (layer.clone(), claim());
            tokio::spawn(async move {
                let work =
                    async |_| -> Result<Response, Infallible> { panic!("the intended panic") };
                layer.take_over(claim, work).await
            })
        };
        assert!(panicking.await.expect_err("a panic").is_panic());

        assert_eq!(orphan.retry().await.code(), "outcome-unknown");
        let ledger = orphan.ledger.clone();
        let taken: TakeOverResponse = layer
            .take_over(claim(), async move |lease: Lease| {
                assert_eq!(lease.generation(), 5);
                Ok(charge(&ledger, &lease, 5).await)
            })
            .await
            .expect("a lease");
        executed(taken).await;
        assert!(orphan.retry().await.is_replay());
        assert_eq!(orphan.ledger.rows().await, ["charge 5"]);
    })
    .await;
}

// S-253
#[tokio::test(start_paused = true)]
async fn takeover_resolves_unacknowledged_commit() {
    within(LONG, async {
        for (fault, rows) in [(CommitFault::ReplyLost, 1), (CommitFault::CallLost, 0)] {
            let orphan = Orphan::new(OrphanPolicy::TakeOver).await;
            orphan.ledger.store.clear_faults();
            orphan.ledger.next(fault);
            let ledger = orphan.ledger.clone();
            let taken: TakeOverResponse = orphan
                .layer
                .take_over(orphan.claim(), async move |lease: Lease| {
                    Ok(charge(&ledger, &lease, 2).await)
                })
                .await
                .expect("a lease");
            let status = executed(taken).await.status;
            assert_eq!(status == StatusCode::CREATED, rows == 1, "{status}");
            assert_eq!(orphan.ledger.rows().await.len(), rows);
            let retry = orphan.retry().await;
            assert_eq!(retry.is_replay(), rows == 1);
            assert_eq!(
                orphan.ledger.rows().await,
                ["charge 2"],
                "the retry is the second"
            );
        }
    })
    .await;
}

// S-254
#[tokio::test(start_paused = true)]
async fn dropped_takeover_continues_and_delays_drain() {
    within(LONG, async {
        let orphan = Orphan::new(OrphanPolicy::TakeOver).await;
        orphan.ledger.store.clear_faults();
        let ledger = orphan.ledger.another();
        let layer = IdempotencyLayer::new(ledger.clone());
        let work = {
            let ledger = ledger.clone();
            async move |lease: Lease| {
                sleep(Duration::from_secs(5)).await;
                Ok::<_, Infallible>(charge(&ledger, &lease, 1).await)
            }
        };
        let taking = layer.take_over(orphan.claim(), work);
        assert!(
            tokio::time::timeout(Duration::from_secs(1), taking)
                .await
                .is_err()
        );
        assert!(layer.drain(Duration::from_secs(10)).await);
        assert_eq!(ledger.rows().await, ["charge 1"]);
        let work = async |_| Ok::<_, Infallible>(created(0));
        let error = layer
            .take_over(orphan.claim(), work)
            .await
            .expect_err("draining");
        assert_eq!(error.kind(), ErrorKind::Draining);
    })
    .await;
}

// S-255
#[tokio::test(start_paused = true)]
async fn take_over_needs_lease() {
    within(LONG, async {
        let orphan = Orphan::new(OrphanPolicy::TakeOver).await;
        orphan.ledger.store.clear_faults();
        let ledger = orphan.ledger.another();
        let layer = IdempotencyLayer::new(ledger.clone()).with_lease_ttl(Ttl::from_secs(60));
        ledger.store.set_fault(Operation::Acquire, Fault::ReplyLost);
        let work = async |_| -> Result<Response, Infallible> { panic!("it must not run") };
        let error = layer
            .take_over(orphan.claim(), work)
            .await
            .expect_err("no lease");
        assert_eq!(error.kind(), ErrorKind::StoreUnavailable);
        ledger.store.clear_faults();
        // The layer releases the lease that the store granted, and the orphan can be taken over again.
        eventually("the lease is released", || {
            ledger.calls(Operation::Release) > 0
        })
        .await;
        let work = async |lease: Lease| {
            assert_eq!(lease.generation(), 3);
            Ok(created(3))
        };
        executed(
            layer
                .take_over(orphan.claim(), work)
                .await
                .expect("a lease"),
        )
        .await;
    })
    .await;
}

// S-251
/// A response would block such an entry.
#[tokio::test(start_paused = true)]
async fn entry_of_no_request_is_not_taken_over() {
    for operation in ["run_once", "item: POST /rides", "observed: POST /rides"] {
        let store = MemoryStore::new();
        let layer = IdempotencyLayer::new(store.clone());
        let [id, fingerprint] = [[7; 32]; 2];
        let claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes(fingerprint));
        let mut claim = claim.expect("randomness");
        claim.operation = operation.into();
        store.acquire(&claim).await.expect("room");
        sleep(Duration::from_secs(16)).await;
        let work = async |_| -> Result<Response, Infallible> { panic!("it must not run") };
        let taken: TakeOverResponse = layer.take_over(claim, work).await.expect("an answer");
        assert!(matches!(taken, TakeOverOutcome::NoOrphan), "{operation}");
    }
}

/// A retry of the client would get the same: it cannot choose another key.
// S-918
#[tokio::test(start_paused = true)]
async fn client_error_under_key_of_service_leaves_orphan() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone()).with_key_from(KeyScope::AllCallers, |_| None);
    let id = KeyId::from_bytes([7; 32]);
    let claim = || Claim::new(id, Fingerprint::from_bytes([7; 32])).expect("randomness");
    store.acquire(&claim()).await.expect("room");
    sleep(Duration::from_secs(16)).await;
    for status in [StatusCode::NOT_FOUND, StatusCode::CREATED] {
        let work = async move |_: Lease| Ok(status.into_response());
        let taken: TakeOverResponse = layer.take_over(claim(), work).await.expect("an answer");
        assert_eq!(executed(taken).await.status, status);
    }
}
