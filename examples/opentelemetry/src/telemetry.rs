use std::{error::Error, time::Duration};

use axum::{
    extract::{MatchedPath, Request},
    middleware::Next,
    response::Response,
};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use opentelemetry::{
    propagation::TextMapPropagator,
    trace::{TraceContextExt, TracerProvider},
};
use opentelemetry_http::{HeaderExtractor, HeaderInjector};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig};
use opentelemetry_sdk::{Resource, propagation::TraceContextPropagator, trace::SdkTracerProvider};
use tokio::time::sleep;
use tower_idempotency::{
    ExecutionTrace,
    metrics::{RECORD_BYTES_BUCKETS, SECONDS_BUCKETS},
};
use tracing::{Instrument, field::Empty, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::{EnvFilter, layer::SubscriberExt, util::SubscriberInitExt};

/// Error of an exporter or a subscriber that cannot be installed.
pub type TelemetryError = Box<dyn Error + Send + Sync>;

/// Exports all spans and events to the OTLP collector at this URL, such as `http://127.0.0.1:4318/v1/traces`.
///
/// Shut the returned provider down at the end of the process: it exports in batches.
///
/// # Errors
///
/// Returns an error if the URL is invalid or a subscriber is installed already.
pub fn install_traces(collector: &str) -> Result<SdkTracerProvider, TelemetryError> {
    let exporter = SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(collector)
        .build()?;
    let resource = Resource::builder().with_service_name("payments").build();
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(resource)
        .build();
    // The span `idempotency` and most events of the layer are at `debug`.
    let filter = EnvFilter::try_new("info,tower_idempotency=debug")?;
    tracing_subscriber::registry()
        .with(filter)
        .with(tracing_opentelemetry::layer().with_tracer(provider.tracer("payments")))
        .try_init()?;
    Ok(provider)
}

/// Installs the recorder for the counters and histograms of the layer. A collector scrapes its text.
///
/// # Errors
///
/// Returns an error if a recorder is installed already.
///
/// # Panics
///
/// Panics outside of a tokio runtime.
pub fn install_metrics() -> Result<PrometheusHandle, TelemetryError> {
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

/// Runs the request in a span, and links the span of a replay to that of the execution.
///
/// The layer stores the `traceparent` of the request. This function replaces it by that of its own span, so that the link of
/// a replay leads to the server's span. The span continues the trace of the client, who therefore chooses the ID of the
/// trace. Do not call `set_parent` for clients that are not trusted.
pub(crate) async fn trace(mut req: Request, next: Next) -> Response {
    let propagator = TraceContextPropagator::new();
    let route = req.extensions().get::<MatchedPath>();
    let route = route.map_or("", MatchedPath::as_str);
    let span = info_span!(
        "request",
        otel.name = format!("{} {route}", req.method()),
        otel.kind = "server",
        http.response.status_code = Empty,
        idempotency.outcome = Empty,
    );
    let client = propagator.extract(&HeaderExtractor(req.headers()));
    // Fails only if no OpenTelemetry layer is installed.
    let _ = span.set_parent(client);
    req.headers_mut().remove("traceparent");
    propagator.inject_context(&span.context(), &mut HeaderInjector(req.headers_mut()));

    let res = next.run(req).instrument(span.clone()).await;
    span.record("http.response.status_code", res.status().as_u16());
    if let Some(execution) = res.extensions().get::<ExecutionTrace>() {
        let headers = std::collections::HashMap::from([(
            "traceparent".to_owned(),
            execution.as_str().to_owned(),
        )]);
        let linked = propagator.extract(&headers);
        span.add_link(linked.span().span_context().clone());
    }
    res
}
