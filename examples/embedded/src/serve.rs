use std::{io, pin::pin, sync::Arc, time::Duration};

use axum::Router;
use tokio::{net::TcpListener, sync::Notify, time::timeout};

/// The time for requests to finish after a stop signal.
pub const GRACE: Duration = Duration::from_secs(30);

/// Serves until a stop signal arrives, and prints the address on stdout: port 0 picks a free port. After the signal,
/// requests that have begun have at most [`GRACE`] to finish.
///
/// # Errors
///
/// Returns an error if the address is in use or invalid, or if the process cannot listen for signals.
///
/// # Cancellation
///
/// If the future is dropped, the server accepts no more connections.
pub async fn serve(listen: &str, app: Router) -> io::Result<()> {
    // Called before the address is printed, because a signal without a listener ends the process at once.
    let asked_to_stop = stop_signal()?;
    let listener = TcpListener::bind(listen).await?;
    println!("listening on http://{}", listener.local_addr()?);

    let stop = Arc::new(Notify::new());
    let stopped = Arc::clone(&stop);
    let server = axum::serve(listener, app)
        .with_graceful_shutdown(async move { stopped.notified().await })
        .into_future();
    let mut server = pin!(server);
    tokio::select! {
        served = &mut server => return served,
        () = asked_to_stop => {}
    }
    stop.notify_one();
    // The process does not wait longer for a connection that never ends.
    let _ = timeout(GRACE, server).await;
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
