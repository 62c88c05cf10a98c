//! Settings at the ends of their ranges: their types reject them, or they are harmless.

use std::time::Duration;

use axum::{Router, routing::post};
use http::StatusCode;
use tests::{
    Effects,
    bodies::{Piece, pieces},
    send,
};
use tower_idempotency::{ConcurrentRequests, IdempotencyLayer, MemoryStore, Ttl};

fn app(effects: &Effects, layer: IdempotencyLayer) -> Router {
    let effects = effects.clone();
    Router::new()
        .route("/", post(async move || effects.happen().to_string()))
        .layer(layer)
}

// F-045
#[tokio::test(start_paused = true)]
async fn maximum_durations_neither_panic_nor_overflow() {
    let effects = Effects::default();
    let layer = IdempotencyLayer::new(MemoryStore::new())
        .with_store_timeout(Duration::MAX)
        .with_body_timeout(Duration::MAX)
        .with_collect_timeout(Duration::MAX)
        .with_concurrent_requests(ConcurrentRequests::Wait(Duration::MAX))
        .with_retry_after(Duration::MAX)
        .with_lease_ttl(Ttl::MAX)
        .with_retention(Ttl::MAX);
    let app = app(&effects, layer.clone());
    // Only a body that is not complete at once starts the timers.
    for _ in 0..2 {
        let body = pieces([Piece::Wait, Piece::Data("late".into())]);
        let response = send(&app, tests::post("/", "k", body)).await;
        assert_eq!(response.status, StatusCode::OK);
        assert_eq!(response.text(), "1");
    }
    assert_eq!(effects.count(), 1);
    assert!(layer.drain(Duration::MAX).await);
}

#[tokio::test(start_paused = true)]
async fn limits_of_zero_refuse_every_request() {
    let effects = Effects::default();
    let store = MemoryStore::new();
    let none_in_flight = IdempotencyLayer::new(store.clone())
        .with_max_in_flight(0)
        .with_max_buffered(1 << 20, 1 << 20);
    let nothing_buffered = IdempotencyLayer::new(store.clone())
        .with_max_in_flight(10)
        .with_max_buffered(0, 0);
    for layer in [none_in_flight, nothing_buffered] {
        let response = send(&app(&effects, layer), tests::post("/", "k", "body")).await;
        assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.code(), "overloaded");
    }
    let no_body = IdempotencyLayer::new(store.clone()).with_request_limit(0);
    let response = send(
        &app(&effects, no_body.clone()),
        tests::post("/", "k", "body"),
    )
    .await;
    assert_eq!(response.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(effects.count(), 0);
    assert!(store.is_empty(), "nothing reached the store");

    let response = send(&app(&effects, no_body), tests::post("/", "k", "")).await;
    assert_eq!(response.status, StatusCode::OK);
}

// F-045
#[test]
fn ttl_of_zero_is_refused() {
    for (duration, millis) in [
        (Duration::ZERO, None),
        (Duration::from_nanos(1), Some(1)),
        (Duration::from_micros(1_001), Some(2)),
        (Duration::from_secs(1), Some(1_000)),
        (Ttl::MAX.as_duration(), Some(Ttl::MAX.as_millis())),
        (Ttl::MAX.as_duration() + Duration::from_nanos(1), None),
        (Duration::MAX, None),
    ] {
        assert_eq!(
            Ttl::try_from(duration).ok().map(Ttl::as_millis),
            millis,
            "{duration:?}"
        );
    }
}
