//! The service as a process: `opentelemetry-example [COLLECTOR]`.

use std::{io, time::Duration};

use opentelemetry_example::{TelemetryError, app, install_metrics, install_traces};
use tokio::net::TcpListener;
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
    // Before the address is printed: a signal without a listener ends the process at once.
    let stopped = stop_signal()?;
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app)
        .with_graceful_shutdown(stopped)
        .await?;
    // The server does not wait for executions whose clients have disconnected.
    layer.drain(Duration::from_secs(30)).await;
    // Exports the last spans.
    tokio::task::spawn_blocking(move || traces.shutdown()).await??;
    Ok(())
}

/// Listens for SIGTERM and ctrl-c from now on; the future ends with the first signal.
#[cfg(unix)]
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    let mut interrupt = tokio::signal::windows::ctrl_c()?;
    Ok(async move {
        interrupt.recv().await;
    })
}
