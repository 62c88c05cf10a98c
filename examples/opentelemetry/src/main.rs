//! The service as a process: `opentelemetry-example [COLLECTOR]`.

use opentelemetry_example::{TelemetryError, app, install_metrics, install_traces};
use tokio::net::TcpListener;
use tower_idempotency::MemoryStore;

#[tokio::main]
async fn main() -> Result<(), TelemetryError> {
    let collector = std::env::args().nth(1);
    let collector = collector.unwrap_or_else(|| "http://127.0.0.1:4318/v1/traces".to_owned());
    // The exporter has a client that blocks, which must not be created or dropped in an asynchronous task.
    let traces = tokio::task::spawn_blocking(move || install_traces(&collector)).await??;
    let app = app(MemoryStore::new(), install_metrics()?);
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on http://{}", listener.local_addr()?);
    let stopped = async {
        let _ = tokio::signal::ctrl_c().await;
    };
    axum::serve(listener, app)
        .with_graceful_shutdown(stopped)
        .await?;
    // Exports the last spans.
    tokio::task::spawn_blocking(move || traces.shutdown()).await??;
    Ok(())
}
