//! Continues a future in a background task when its caller drops it.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use pin_project_lite::pin_project;
use tokio::runtime::Handle;
use tracing::{Instrument, Span};

use crate::{layer_name::LayerName, limits::Caller, panics::POLLED_AGAIN, telemetry};

/// A future that decides if it continues when its caller drops it.
pub(crate) trait Detach: Future + Send {
    /// Returns the caller of the request if the future continues when it is dropped now, or `None` if the drop cancels it.
    fn continues_for(&self) -> Option<&Arc<Caller>>;

    /// Reports that the future continues without its caller. A request that waits also stores that its caller is gone.
    fn set_detached(&self);
}

/// A future that is polled in place. If it is dropped while it is armed, it continues in a background task.
pub(crate) struct Detachable<T: 'static> {
    // `None` after completion and during a poll. A future that panics is therefore dropped and not detached.
    future: Option<Pin<Box<dyn Detach<Output = T>>>>,
    /// Runtime and span in which the future was polled, and in which it continues. Set when an armed future first waits.
    origin: Option<(Handle, Span)>,
}

impl<T> Detachable<T> {
    pub(crate) fn new(future: impl Detach<Output = T> + 'static) -> Self {
        Self {
            future: Some(Box::pin(future)),
            origin: None,
        }
    }

    /// Creates a future that is armed from the beginning, for a request of `caller`.
    pub(crate) fn armed(
        future: impl Future<Output = T> + Send + 'static,
        caller: Arc<Caller>,
        layer: LayerName,
    ) -> Self {
        Self::new(Armed {
            future,
            caller,
            layer,
        })
    }
}

impl<T> Future for Detachable<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut future = self.future.take().expect(POLLED_AGAIN);
        let polled = future.as_mut().poll(cx);
        if polled.is_pending() {
            if self.origin.is_none() && future.continues_for().is_some() {
                self.origin = Some((Handle::current(), Span::current()));
            }
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
        let Some(caller) = future.continues_for() else {
            return;
        };
        // The runtime in which the future was polled. The thread that drops it may have no runtime, or one that is about to
        // end. If this runtime has shut down, it drops the task, and the lease expires.
        let Some((runtime, span)) = self.origin.take() else {
            return;
        };
        future.set_detached();
        let counted = caller.detach();
        let rest = async move {
            let _counted = counted;
            let _ = future.await;
        };
        runtime.spawn(rest.instrument(span));
    }
}

pin_project! {
    /// A future that always continues.
    struct Armed<F> {
        #[pin]
        future: F,
        caller: Arc<Caller>,
        layer: LayerName,
    }
}

impl<F: Future> Future for Armed<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.project().future.poll(cx)
    }
}

impl<F: Future + Send> Detach for Armed<F> {
    fn continues_for(&self) -> Option<&Arc<Caller>> {
        Some(&self.caller)
    }

    fn set_detached(&self) {
        telemetry::detached(&self.layer);
    }
}

/// Switch of a request that waits for another request. It decides if the future continues after a drop.
pub(crate) struct DetachSwitch {
    armed: AtomicBool,
    detached: AtomicBool,
}

impl DetachSwitch {
    /// Creates an armed switch.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            armed: AtomicBool::new(true),
            detached: AtomicBool::new(false),
        })
    }

    /// Arms the switch: from now on a dropped future continues in a background task.
    pub(crate) fn arm(&self) {
        self.armed.store(true, Ordering::Release);
    }

    /// Disarms the switch: from now on dropping the future cancels it.
    pub(crate) fn disarm(&self) {
        self.armed.store(false, Ordering::Release);
    }

    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Acquire)
    }

    pub(crate) fn set_detached(&self) {
        self.detached.store(true, Ordering::Release);
    }

    /// Returns `true` if the future continues without its caller.
    pub(crate) fn is_detached(&self) -> bool {
        self.detached.load(Ordering::Acquire)
    }
}
