//! Events and metrics that alarm operators, and those that must not. This is a test binary of its own because the
//! metrics recorder is global to the process.

use std::time::Duration;

use axum::{Router, routing::post};
use http::StatusCode;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tests::{
    gate::{Gate, bounded},
    probe::{Act, Op, Probe},
    send,
};
use tokio::time::sleep;
use tower_idempotency::IdempotencyLayer;

fn leases_lost(recorded: &Snapshotter) -> u64 {
    let metrics = recorded.snapshot().into_vec();
    let lost = metrics.into_iter().filter_map(|(key, _, _, value)| {
        let lost = key.key().name() == "idempotency_lease_lost_total";
        match value {
            DebugValue::Counter(count) if lost => Some(count),
            DebugValue::Counter(_) | DebugValue::Gauge(_) | DebugValue::Histogram(_) => None,
        }
    });
    lost.sum()
}

// F-186
// fm 123
#[tokio::test(start_paused = true)]
async fn finish_before_renewal_reports_no_loss() {
    let recorder = DebuggingRecorder::new();
    let recorded = recorder.snapshotter();
    recorder.install().expect("the only recorder");
    bounded(async {
        for (op, status) in [
            (Op::Complete, StatusCode::CREATED),
            (Op::Release, StatusCode::BAD_GATEWAY),
        ] {
            let reply = Gate::shut();
            let gate = reply.clone();
            let store = Probe::new(move |called, _| {
                if called == op {
                    Act::ReplyGated(gate.clone())
                } else {
                    Act::Forward
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
            // The lease has ended at the store, and before we hear of it a renewal falls due.
            sleep(Duration::from_secs(1)).await;
            assert_eq!(store.count(Op::Renew), 1);
            reply.open_for_good();
            assert_eq!(request.await.expect("no panic").status, status);
        }
        assert_eq!(leases_lost(&recorded), 0);

        let store = Probe::new(|op, _| match op {
            Op::Renew => Act::Lost,
            _ => Act::Forward,
        });
        let handler = async || sleep(Duration::from_secs(6)).await;
        let app = Router::new()
            .route("/", post(handler))
            .route_layer(IdempotencyLayer::new(store));
        send(&app, tests::post("/", "k", "")).await;
        assert_eq!(leases_lost(&recorded), 1);
    })
    .await;
}
