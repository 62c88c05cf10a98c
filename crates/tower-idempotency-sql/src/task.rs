//! Begins transactions in a task, so that a dropped caller leaves no transaction open.

use std::{convert::Infallible, panic::resume_unwind, time::Duration};

use tokio::{sync::oneshot, time::sleep};

/// Begins a transaction in a task, and returns its result.
///
/// Some drivers register a transaction only after the reply to its `begin`. If such a `begin` is dropped before that
/// reply, its pool lends the connection out with an open transaction. The task waits for the reply, and drops a
/// transaction without a caller, which rolls it back.
///
/// After the drop of the returned future, the task waits for `grace`, at least 5 seconds. A `begin` that takes longer is
/// dropped.
///
/// Returns [`None`] if the runtime shuts down.
///
/// # Panics
///
/// Panics outside of a tokio runtime, and if `begin` panics.
pub async fn begin_in_task<T: Send + 'static>(
    begin: impl Future<Output = T> + Send + 'static,
    grace: Duration,
) -> Option<T> {
    let grace = grace.max(MIN_GRACE);
    let (caller, caller_dropped) = oneshot::channel::<Infallible>();
    let task = tokio::spawn(async move {
        let abandoned = async {
            caller_dropped.await.ok();
            sleep(grace).await;
        };
        tokio::select! {
            // Polls `begin` first, so that a reply counts even after the grace period.
            biased;
            begun = begin => Some(begun),
            () = abandoned => None,
        }
    });
    let result = task.await;
    drop(caller);
    match result {
        Ok(begun) => begun,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime shuts down.
            Err(_) => None,
        },
    }
}

/// Minimum time for which an abandoned `begin` waits for its reply. If the reply came later, the pool would lend the
/// connection out with an open transaction.
const MIN_GRACE: Duration = Duration::from_secs(5);
