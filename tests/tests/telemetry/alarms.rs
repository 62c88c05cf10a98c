//! Events and metrics that alarm operators, and situations that must not cause any.

use std::time::Duration;

use axum::{Router, routing::post};
use http::StatusCode;
use metrics_util::debugging::DebuggingRecorder;
use tests::{
    barrier::{Barrier, bounded},
    observed::{read, total},
    send,
};
use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, MemoryStore,
    conformance::{Fault, FaultInjector, Operation},
};

fn leases_lost(recorder: &DebuggingRecorder) -> f64 {
    total(&read(recorder), "idempotency_lease_lost_total")
}

// F-186
#[tokio::test(start_paused = true)]
async fn finish_before_renewal_reports_no_loss() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    bounded(async {
        for (op, status) in [
            (Operation::Complete, StatusCode::CREATED),
            (Operation::Release, StatusCode::BAD_GATEWAY),
        ] {
            let reply = Barrier::closed();
            let barrier = reply.clone();
            let store = FaultInjector::new(MemoryStore::new()).with_script(move |called, _| {
                if called == op {
                    Fault::HoldReply(barrier.clone().into())
                } else {
                    Fault::None
                }
            });
            let handler = async move || {
                sleep(Duration::from_millis(4_500)).await;
                status
            };
            let app = Router::new()
                .route("/", post(handler))
                .route_layer(IdempotencyLayer::new(store.clone()));
            let request = tokio::spawn(async move { send(&app, tests::post("/", "k", "")).await });
            reply.arrival().await;
            // The lease has ended at the store, and a renewal is due before the reply arrives.
            sleep(Duration::from_secs(1)).await;
            assert_eq!(store.calls(Operation::Renew), 1);
            reply.open_for_good();
            assert_eq!(request.await.expect("no panic").status, status);
        }
        assert_eq!(leases_lost(&recorder), 0.0);

        let store = FaultInjector::new(MemoryStore::new()).with_script(|op, _| match op {
            Operation::Renew => Fault::LeaseLost,
            _ => Fault::None,
        });
        let handler = async || sleep(Duration::from_secs(6)).await;
        let app = Router::new()
            .route("/", post(handler))
            .route_layer(IdempotencyLayer::new(store));
        send(&app, tests::post("/", "k", "")).await;
        assert_eq!(leases_lost(&recorder), 1.0);
    })
    .await;
}
