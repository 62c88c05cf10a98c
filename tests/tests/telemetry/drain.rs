//! Events that a drain reports.

use std::time::Duration;

use tests::send;
use tokio::{task::JoinSet, time::sleep};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore,
    conformance::{Fault, FaultInjector, Operation},
};

use crate::{
    observability::{StartFlow, logged},
    outages::{lines, order, slow, sum_of_counts},
};

/// Loses three leases after 5 s, while the layer drains. The renewer would report the last ones after 10 s.
async fn lose_leases_in_drain(timeout: Duration) -> u64 {
    let store = FaultInjector::new(MemoryStore::new());
    store.set_fault(Operation::Renew, Fault::LeaseLost);
    let layer = IdempotencyLayer::new(store);
    let (app, effects) = slow(layer.clone(), 6);
    let mut calls = JoinSet::new();
    for key in ["a", "b", "c"] {
        let (app, request) = (app.clone(), order(key));
        calls.spawn(async move { drop(send(&app, request).await) });
    }
    sleep(Duration::from_millis(500)).await;
    let is_idle = layer.drain(timeout).await;
    assert_eq!(is_idle, timeout > Duration::from_secs(6));
    tracing::info!("drained");
    calls.join_all().await;
    effects.count()
}

// S-874
/// A process may end after its drain.
#[test]
fn rest_is_reported_by_drain() {
    let flows: [StartFlow; 2] = [
        || Box::pin(lose_leases_in_drain(Duration::from_secs(5))),
        || Box::pin(lose_leases_in_drain(Duration::from_secs(60))),
    ];
    for flow in flows {
        let log = logged(flow);
        let (before, after) = log.split_once("drained").expect("a drain");
        let event = "lease lost while the handler was running";
        assert_eq!(lines(before, "DEBUG", event).len(), 2, "{log}");
        let again = "earlier event occurred again";
        let rest = lines(before, "WARN", again);
        assert!(rest.len() == 1 && rest[0].contains(event), "{log}");
        assert_eq!(sum_of_counts(&rest), 2);
        assert_eq!(lines(after, "WARN", again), [""; 0]);
    }
}
