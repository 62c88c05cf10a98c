//! Panics of foreign code as values.

use std::{
    any::Any,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::Poll,
};

/// Reports a metric to the recorder, or an event to the subscriber. Ignores their panic.
///
/// Both are foreign code. Many reports follow an effect that is not recorded yet, or a reply of the store: their panic must
/// lose neither.
pub(crate) fn catch_report_panic(report: impl FnOnce()) {
    // Unwind safe: a report changes nothing that the layer reads.
    let _ = catch_unwind(AssertUnwindSafe(report));
}

/// Message of the panic of a future that is polled after it is ready.
pub(crate) const POLLED_AGAIN: &str = "a future is not polled after it is ready";

/// Payload of a panic.
pub(crate) type Panic = Box<dyn Any + Send>;

/// Returns the output of the future, or the payload of its panic.
pub(crate) async fn catch_panic<F: Future>(mut future: Pin<&mut F>) -> Result<F::Output, Panic> {
    poll_fn(|cx| {
        // Unwind safe: a future that panicked is never polled again, and it shares only atomics with its caller.
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(polled) => polled.map(Ok),
            Err(panic) => Poll::Ready(Err(panic)),
        }
    })
    .await
}
