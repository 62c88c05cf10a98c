use std::{future::Future, io};

/// Listens for SIGTERM and ctrl-c from now on. The future ends with the first of them.
///
/// # Errors
///
/// Returns an error if the signals cannot be listened for.
///
/// # Cancellation
///
/// If the future is dropped, the signals have no effect.
#[cfg(unix)]
pub fn stop_signal() -> io::Result<impl Future<Output = ()>> {
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

/// Listens for ctrl-c from now on. The future ends with it.
///
/// # Errors
///
/// Returns an error if ctrl-c cannot be listened for.
///
/// # Cancellation
///
/// If the future is dropped, ctrl-c has no effect.
#[cfg(not(unix))]
pub fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    let mut interrupt = tokio::signal::windows::ctrl_c()?;
    Ok(async move {
        interrupt.recv().await;
    })
}
