//! Continues a future in a background task when its caller drops it.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use tokio::runtime::Handle;
use tracing::{Instrument, Span};

use crate::{limits::Caller, telemetry};

/// Switch inside a [`Detachable`] future that decides if the future continues when its caller drops it.
pub(crate) struct Detach {
    caller: Arc<Caller>,
    armed: AtomicBool,
    detached: AtomicBool,
    /// Runtime and span in which the future is polled, and in which it continues.
    origin: OnceLock<(Handle, Span)>,
}

impl Detach {
    /// Creates a switch, not armed, for a request of `caller`.
    pub(crate) fn new(caller: Arc<Caller>) -> Arc<Self> {
        Arc::new(Self {
            caller,
            armed: AtomicBool::new(false),
            detached: AtomicBool::new(false),
            origin: OnceLock::new(),
        })
    }

    /// Returns the caller of the request.
    pub(crate) fn caller(&self) -> &Arc<Caller> {
        &self.caller
    }

    /// Arms the switch: from now on a dropped future continues in a background task.
    pub(crate) fn arm(&self) {
        self.origin
            .get_or_init(|| (Handle::current(), Span::current()));
        self.armed.store(true, Ordering::Release);
    }

    /// Disarms the switch: from now on dropping the future cancels it.
    pub(crate) fn disarm(&self) {
        self.armed.store(false, Ordering::Release);
    }

    /// Returns `true` if the future continues without its caller.
    pub(crate) fn is_detached(&self) -> bool {
        self.detached.load(Ordering::Acquire)
    }
}

/// A future that is polled in place. If it is dropped while armed, it continues in a background task.
pub(crate) struct Detachable<T: 'static> {
    // `None` after completion and during a poll. A future that panics is therefore dropped and not detached.
    future: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    detach: Arc<Detach>,
}

impl<T> Detachable<T> {
    pub(crate) fn new(
        future: impl Future<Output = T> + Send + 'static,
        detach: Arc<Detach>,
    ) -> Self {
        Self {
            future: Some(Box::pin(future)),
            detach,
        }
    }
}

impl<T> Future for Detachable<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut future = self
            .future
            .take()
            .expect("a future is not polled after it is ready");
        let polled = future.as_mut().poll(cx);
        if polled.is_pending() {
            self.future = Some(future);
        }
        polled
    }
}

impl<T> Drop for Detachable<T> {
    fn drop(&mut self) {
        let Some(future) = self.future.take() else {
            return;
        };
        if !self.detach.armed.load(Ordering::Acquire) {
            return;
        }
        // The runtime in which the future was polled. The thread that drops it may have no runtime, or one that is about to
        // end. If this runtime has shut down, it drops the task, and the lease expires.
        let Some((runtime, span)) = self.detach.origin.get() else {
            return;
        };
        telemetry::detached();
        self.detach.detached.store(true, Ordering::Release);
        let counted = self.detach.caller.detach();
        let rest = async move {
            let _counted = counted;
            let _ = future.await;
        };
        runtime.spawn(rest.instrument(span.clone()));
    }
}
