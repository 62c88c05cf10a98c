//! Acquires of a query that arrive after their execution has ended.

use std::time::Duration;

use axum::{Router, body::Body};
use http::{Request, StatusCode};
use tests::{
    app,
    barrier::{Barrier, bounded},
    created, creating,
};
use tokio::time::timeout;
use tower_idempotency::{
    IdempotencyLayer, Lease, OrphanPolicy,
    conformance::{Fault, Operation},
    store::{Store, StoreError},
    transaction::LeaseExt,
};

use super::{StalledStore, assert_late_lease_is_released, releasing_first, spawn_order};

/// A commit that is dropped after this time has sent its query, which has no reply yet.
const DROPPED: Duration = Duration::from_secs(1);

/// A commit that is not dropped.
const AWAITED: Duration = Duration::from_secs(60);

/// Returns a service whose store loses the lease of each execution, which then waits at the barrier. If `commit_limit` is set,
/// the execution commits without a reply, and drops the commit after this time.
fn losing_lease(
    store: &StalledStore,
    layer: IdempotencyLayer,
    commit_limit: Option<Duration>,
    barrier: &Barrier,
) -> Router {
    let (backend, barrier) = (store.injector.inner().clone(), barrier.clone());
    let (app, _) = app(layer, move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let (backend, barrier) = (backend.clone(), barrier.clone());
        async move {
            let released = backend.release(&lease.lease_ref()).await;
            released.expect("memory");
            barrier.pass().await;
            if let Some(limit) = commit_limit {
                let prepared = lease.prepare(created(n)).await.expect("recorded");
                let commit = prepared.commit(async { Err(StoreError::backend("no reply")) });
                match timeout(limit, commit).await {
                    Ok(committed) => {
                        assert!(matches!(committed, Err(StoreError::LeaseLost)));
                        assert_eq!(limit, AWAITED);
                    }
                    Err(_elapsed) => assert_eq!(limit, DROPPED),
                }
            }
            created(n)
        }
    });
    app
}

// S-947, F-804
/// The query after a lost lease finds another execution, and one of its attempts is late. If all are late, the completion in
/// the background finds the other execution.
#[tokio::test(start_paused = true)]
async fn late_query_of_lost_lease_is_released() {
    for (commit_limit, hanging) in [
        (None, 3..=3),
        (None, 3..=4),
        (Some(AWAITED), 3..=3),
        (Some(DROPPED), 3..=3),
    ] {
        let store = StalledStore::new(hanging);
        let layer = || {
            IdempotencyLayer::new(store.injector.clone()).with_orphan_policy(OrphanPolicy::Refuse)
        };
        let (lost, held) = (Barrier::closed(), Barrier::closed());
        let ending = losing_lease(&store, layer(), commit_limit, &lost);
        let first = spawn_order(&ending);
        bounded(lost.arrival()).await;
        let rival = layer();
        let service = releasing_first(rival.clone(), &held);
        let second = spawn_order(&service.0);
        bounded(held.arrival()).await;
        lost.open_for_good();
        let first = bounded(first).await.expect("no panic");
        assert_eq!(
            first.code(),
            "outcome-unknown",
            "{commit_limit:?} {first:?}"
        );
        store.wait_for_releases(1).await;
        held.open_for_good();
        let second = bounded(second).await.expect("no panic");
        assert_eq!(second.status, StatusCode::BAD_GATEWAY);
        assert_late_lease_is_released(&store, &rival, &service).await;
    }
}

// S-947, F-804
/// The query acquires the key again, and the store refuses the completion after it too.
#[tokio::test(start_paused = true)]
async fn late_query_of_refused_completion_is_released() {
    let store = StalledStore::new(2..=2);
    let refusals = [Fault::LeaseLost, Fault::LeaseLost];
    store.injector.enqueue(Operation::Complete, refusals);
    let layer =
        IdempotencyLayer::new(store.injector.clone()).with_orphan_policy(OrphanPolicy::Refuse);
    let service = creating(layer.clone());
    let first = bounded(spawn_order(&service.0)).await.expect("no panic");
    assert_eq!(first.code(), "outcome-unknown", "{first:?}");
    store.wait_for_releases(1).await;
    assert_late_lease_is_released(&store, &layer, &service).await;
}
