//! The service as a process: `opentelemetry-example [COLLECTOR]`.

use opentelemetry_example::{GRACE, TelemetryError, app, install_metrics, install_traces, serve};
use tower_idempotency::{IdempotencyLayer, MemoryStore};

#[tokio::main]
async fn main() -> Result<(), TelemetryError> {
    let collector = std::env::args().nth(1);
    let collector = collector.unwrap_or_else(|| "http://127.0.0.1:4318/v1/traces".to_owned());
    // The exporter has a client that blocks, which must not be created or dropped in an asynchronous task.
    let traces = tokio::task::spawn_blocking(move || install_traces(&collector)).await??;
    // Before the layer is created: the layer then registers its counters at once.
    let metrics = install_metrics()?;
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let app = app(layer.clone(), metrics);
    serve("127.0.0.1:3000", app).await?;
    // The server does not wait for executions whose clients have disconnected.
    layer.drain(GRACE).await;
    // Exports the last spans.
    tokio::task::spawn_blocking(move || traces.shutdown()).await??;
    Ok(())
}
