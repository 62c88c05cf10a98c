//! Handlers that never end. The layer has no deadline for them, but a timeout inside the layer ends them.

use std::{future::pending, time::Duration};

use axum::{Router, routing};
use http::StatusCode;
use tests::{Effects, app, created, post, send};
use tokio::time::{sleep, timeout};
use tower_http::timeout::TimeoutLayer;
use tower_idempotency::{IdempotencyLayer, MemoryStore};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

// F-019, S-144
#[tokio::test(start_paused = true)]
async fn endless_handler_holds_its_key() {
    let layer = layer();
    let (app, effects) = app(layer.clone(), async |_, _| pending::<StatusCode>().await);
    let first = send(&app, post("/orders", "k", "tea"));
    let first = timeout(Duration::from_secs(1), first).await;
    assert!(first.is_err(), "the client disconnects");
    for _ in 0..24 {
        sleep(Duration::from_secs(3600)).await;
        let retry = send(&app, post("/orders", "k", "tea"));
        let retry = timeout(Duration::from_secs(1), retry).await;
        let retry = retry.expect("the retry is rejected at once");
        assert_eq!(retry.code(), "in-progress");
    }
    assert_eq!((effects.count(), layer.in_flight()), (1, 1));
}

/// Returns a service whose first execution never ends by itself. A timeout of ten seconds inside the layer ends it.
fn stuck(layer: IdempotencyLayer) -> (Router, Effects) {
    let effects = Effects::default();
    let counted = effects.clone();
    let handler = async move || {
        let n = counted.happen();
        if n == 1 {
            pending::<()>().await;
        }
        created(n)
    };
    let limit = Duration::from_secs(10);
    let app = Router::new()
        .route("/orders", routing::post(handler))
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            limit,
        ))
        .layer(layer);
    (app, effects)
}

// F-019, S-145
#[tokio::test(start_paused = true)]
async fn timeout_inside_layer_releases_key() {
    let layer = layer();
    let (app, effects) = stuck(layer.clone());
    let first = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(layer.in_flight(), 0);
    let retry = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(
        (retry.status, retry.is_replay()),
        (StatusCode::CREATED, false)
    );
    assert!(send(&app, post("/orders", "k", "tea")).await.is_replay());
    assert_eq!(effects.count(), 2);
}

// F-020, S-145
// The handler may have had its effect before it was dropped.
#[tokio::test(start_paused = true)]
async fn timeout_inside_layer_can_be_recorded() {
    let recorded =
        |status: StatusCode| status.is_success() || status == StatusCode::GATEWAY_TIMEOUT;
    let (app, effects) = stuck(layer().with_recorded_statuses(recorded));
    let first = send(&app, post("/orders", "k", "tea")).await;
    let retry = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(retry.status, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!((first.is_replay(), retry.is_replay()), (false, true));
    assert_eq!(effects.count(), 1);
}
