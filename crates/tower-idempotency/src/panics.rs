//! Panics of futures as values.

use std::{
    any::Any,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::Poll,
};

use crate::layer_name::LayerName;

/// Returns the result of a closure of the service, or `None` if it panics.
///
/// For closures that run after the handler had its effect: their panic must not release the key.
pub(crate) fn catch_setting_panic<T>(
    layer: &LayerName,
    setting: &'static str,
    call: impl FnOnce() -> T,
) -> Option<T> {
    // Unwind safe: a result that was not returned is not used, and the closure is shared by reference.
    let result = catch_unwind(AssertUnwindSafe(call));
    if result.is_err() {
        tracing::error!(
            layer = layer.as_str(),
            setting,
            "closure of a setting panicked"
        );
    }
    result.ok()
}

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
