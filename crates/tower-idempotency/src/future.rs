//! The response future, which is moved to a task instead of being dropped when it holds a lease.

use std::{
    any::Any,
    fmt,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use http::Response;
use pin_project_lite::pin_project;
use tokio::runtime::Handle;
use tracing::{Instrument, Span};

use crate::{body::Body, response::directives, telemetry};

pin_project! {
    /// The future of [`Idempotency`](crate::Idempotency).
    ///
    /// # Cancellation
    ///
    /// Dropped before the request body is in, nothing has happened; with
    /// [`FingerprintBy::head_only`](crate::FingerprintBy::head_only), which leaves the body to the handler, only before the
    /// lease is asked for. Dropped later, the exchange goes on in a task of its own: the handler runs to its end and its
    /// response is recorded, so that a retry is answered with it. Task-locals that something outside of the layer has set
    /// are not there any more; a handler that panics for want of one frees the key. The tracing span is.
    ///
    /// # Panics
    ///
    /// When an exchange is polled outside of a Tokio runtime.
    pub struct ResponseFuture<F, B, E>
    where
        B: http_body::Body,
        B: 'static,
        E: 'static,
    {
        #[pin]
        state: State<F, B, E>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, B, E>
    where
        B: http_body::Body,
        B: 'static,
        E: 'static,
    {
        PassThrough { #[pin] inner: F, strip: bool },
        Refused { res: Option<Box<Response<Body<B>>>> },
        Exchange { exchange: Detachable<Result<Response<Body<B>>, E>> },
    }
}

impl<F, B: http_body::Body + 'static, E: 'static> ResponseFuture<F, B, E> {
    /// Untouched, but for the control headers where `strip` says so.
    pub(crate) fn pass_through(inner: F, strip: bool) -> Self {
        Self {
            state: State::PassThrough { inner, strip },
        }
    }

    pub(crate) fn refused(res: Response<Body<B>>) -> Self {
        Self {
            state: State::Refused {
                res: Some(Box::new(res)),
            },
        }
    }

    pub(crate) fn exchange(exchange: Detachable<Result<Response<Body<B>>, E>>) -> Self {
        Self {
            state: State::Exchange { exchange },
        }
    }
}

impl<F, B, E> Future for ResponseFuture<F, B, E>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: http_body::Body + 'static,
    E: 'static,
{
    type Output = Result<Response<Body<B>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::PassThrough { inner, strip } => {
                let mut res = ready!(inner.poll(cx))?;
                if *strip {
                    directives::strip_only(res.headers_mut());
                }
                Poll::Ready(Ok(res.map(Body::original)))
            }
            StateProj::Refused { res } => Poll::Ready(Ok(*res
                .take()
                .expect("a future is not polled after it is ready"))),
            StateProj::Exchange { exchange } => Pin::new(exchange).poll(cx),
        }
    }
}

impl<F, B: http_body::Body + 'static, E: 'static> fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.state {
            State::PassThrough { .. } => "ResponseFuture::PassThrough",
            State::Refused { .. } => "ResponseFuture::Refused",
            State::Exchange { .. } => "ResponseFuture::Exchange",
        })
    }
}

/// Whether a future goes on in a task of its own when its caller drops it: said from within, as it gets there.
#[derive(Default)]
pub(crate) struct Detach {
    armed: AtomicBool,
    left: AtomicBool,
    /// Where the future is polled, and goes on; and in which span.
    place: OnceLock<(Handle, Span)>,
}

impl Detach {
    /// From here on there is something to lose.
    pub(crate) fn arm(&self) {
        self.place
            .get_or_init(|| (Handle::current(), Span::current()));
        self.armed.store(true, Ordering::Release);
    }

    /// From here on a drop is a drop.
    pub(crate) fn disarm(&self) {
        self.armed.store(false, Ordering::Release);
    }

    /// Whether the future goes on without its caller.
    pub(crate) fn caller_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }
}

/// A future that is polled in place, and moved to a task as it stands when it is dropped while armed.
pub(crate) struct Detachable<T: 'static> {
    // None once it is ready, and while it is polled: a future that panicked is gone, not detached.
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
        // Not the runtime of whoever drops it: there may be none, or one that is gone in a moment. If this one has shut
        // down, it drops the task, and the lease expires.
        let Some((runtime, span)) = self.detach.place.get() else {
            return;
        };
        telemetry::detached();
        self.detach.left.store(true, Ordering::Release);
        let rest = async move {
            let _ = future.await;
        };
        runtime.spawn(rest.instrument(span.clone()));
    }
}

/// The future's output, or what it panicked with.
pub(crate) async fn catch_panic<F: Future>(
    mut future: Pin<&mut F>,
) -> Result<F::Output, Box<dyn Any + Send>> {
    poll_fn(|cx| {
        // Unwind safe: a future that panicked is never polled again, and what it shares with us is atomic.
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(polled) => polled.map(Ok),
            Err(panic) => Poll::Ready(Err(panic)),
        }
    })
    .await
}
