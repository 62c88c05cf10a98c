//! Events and metrics that alarm operators, and situations that must not cause any.

use std::time::Duration;

use axum::{Router, routing::post};
use http::StatusCode;
use metrics_exporter_prometheus::PrometheusRecorder;
use metrics_util::debugging::DebuggingRecorder;
use tests::{
    barrier::{Barrier, bounded, within},
    observed::{read, total},
    send,
    servers::redis::{RedisServer, UNHURRIED, until_connected},
    sql,
};
use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, MemoryStore,
    conformance::{Fault, FaultInjector, Operation},
    store::Store,
};
use tower_idempotency_redis::{RedisOptions, RedisStore};

use crate::registration::{block_on, recorder};

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

/// Returns the number of stores whose Redis server evicts entries.
fn evicting_stores(recorder: &PrometheusRecorder) -> String {
    let page = recorder.handle().render();
    let mut lines = page.lines();
    let value = lines.find_map(|line| line.strip_prefix("idempotency_redis_evicting "));
    value.expect("the gauge").to_owned()
}

/// Connects a store that checks the policy with each acquire.
async fn connect_watching(server: &RedisServer) -> RedisStore {
    let options = RedisOptions::new().with_timeout(UNHURRIED);
    let (options, url) = (options.with_eviction_check(Duration::ZERO), server.url());
    until_connected(|| options.clone().connect(&url)).await
}

/// Makes these stores check the policy until this number of stores counts as evicting.
async fn until_evicting(recorder: &PrometheusRecorder, expected: &str, stores: &[&RedisStore]) {
    within(Duration::from_secs(90), async {
        while evicting_stores(recorder) != expected {
            for store in stores {
                store.acquire(&sql::claim()).await.expect("a lease");
            }
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

// F-128
// The stores of one process use two servers, and only one of these evicts.
#[test]
fn every_evicting_store_is_counted() {
    let recorder = recorder();
    metrics::with_local_recorder(&recorder, || {
        block_on(async {
            let server = RedisServer::start(&["--maxmemory-policy", "allkeys-lru"]);
            let other_server = RedisServer::start(&[]);
            let first = connect_watching(&server).await;
            let _other = connect_watching(&other_server).await;
            assert_eq!(evicting_stores(&recorder), "1");
            let second = connect_watching(&server).await;
            assert_eq!(evicting_stores(&recorder), "2");
            server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
            until_evicting(&recorder, "0", &[&first, &second]).await;
            drop(second);
            server.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
            until_evicting(&recorder, "1", &[&first]).await;
            drop(first);
            // A check that still runs has a reference to its store.
            until_evicting(&recorder, "0", &[]).await;
        });
    });
}
