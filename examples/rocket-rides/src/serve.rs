use std::{io, pin::pin, sync::Arc, time::Duration};

use axum::Router;
use tokio::{net::TcpListener, sync::Notify, time::timeout};

/// How long what has begun may take to end, once the process has been asked to stop.
pub const GRACE: Duration = Duration::from_secs(30);

/// Serves until the process is asked to stop, and says on stdout where: port 0 picks a free one. Requests that have begun
/// are then answered, for at most [`GRACE`].
///
/// # Errors
///
/// When the address is taken, or none, or signals cannot be listened for.
///
/// # Cancellation
///
/// Dropped, it takes no more connections.
pub async fn serve(listen: &str, app: Router) -> io::Result<()> {
    // Before anybody is told that we are ready: a signal that nobody listens for ends the process at once.
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
    // A connection that never ends is not waited for any longer.
    let _ = timeout(GRACE, server).await;
    Ok(())
}

/// Listens for SIGTERM and ctrl-c from now on; the future ends with the first of them.
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
