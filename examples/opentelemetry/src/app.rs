use axum::{
    Router,
    http::StatusCode,
    middleware::from_fn,
    routing::{get, post},
};
use metrics_exporter_prometheus::PrometheusHandle;
use tower_idempotency::IdempotencyLayer;

use crate::telemetry::trace;

/// Returns the service behind this layer. The page `/metrics` has the counters of the layer.
pub fn app(layer: IdempotencyLayer, metrics: PrometheusHandle) -> Router {
    let layer = layer.with_trace_links(true);
    Router::new()
        .route("/payments", post(pay))
        .route_layer(layer)
        // Outside of the layer, so that replays have a span too.
        .route_layer(from_fn(trace))
        .route("/metrics", get(async move || metrics.render()))
}

#[tracing::instrument]
async fn pay() -> (StatusCode, &'static str) {
    tracing::info!("paid");
    (StatusCode::CREATED, "paid")
}
