//! The metrics of the layer, for Prometheus.

use std::time::Duration;

use axum::{Router, http::header, routing::get};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::time::sleep;
use tower_idempotency::metrics::{RECORD_BYTES_BUCKETS, SECONDS_BUCKETS};

/// Installs the recorder. Call it before the layer is created: the layer then registers its counters at once.
pub(crate) fn install() -> Result<PrometheusHandle, BuildError> {
    let full = |name: &str| Matcher::Full(name.to_owned());
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(full("idempotency_handler_seconds"), SECONDS_BUCKETS)?
        .set_buckets_for_metric(full("idempotency_store_seconds"), SECONDS_BUCKETS)?
        .set_buckets_for_metric(full("idempotency_record_bytes"), RECORD_BYTES_BUCKETS)?
        .install_recorder()?;
    // Without this, the samples of histograms use up memory until the next scrape.
    let upkeep = recorder.clone();
    tokio::spawn(async move {
        loop {
            sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });
    Ok(recorder)
}

/// Returns the route that Prometheus scrapes.
pub(crate) fn routes(recorder: PrometheusHandle) -> Router {
    let text = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    let scrape = get(async move || (text, recorder.render()));
    Router::new().route("/metrics", scrape)
}
