//! The response future, which continues in a background task if it is dropped while it holds a lease.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::Response;
use pin_project_lite::pin_project;

use crate::{
    body::Body, execution::detach::Detachable, response::directives::strip_control_headers,
};

pin_project! {
    /// Future of [`Idempotency`](crate::Idempotency).
    ///
    /// # Cancellation
    ///
    /// Dropping the future before the request body is read cancels the request: nothing has happened. With
    /// [`FingerprintBy::head_only`](crate::FingerprintBy::head_only), which leaves the body to the handler, that is before the
    /// lease is requested.
    ///
    /// If the future is dropped later, it continues in a background task. The handler runs to completion and its response is
    /// recorded, so that a retry gets it. The task keeps the tracing span but not the task-locals that code outside the layer
    /// has set. A handler that panics because a task-local is missing releases the key.
    ///
    /// # Panics
    ///
    /// If a request with a key is polled outside a Tokio runtime.
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
        Rejected { res: Option<Box<Response<Body<B>>>> },
        Execution { execution: Detachable<Result<Response<Body<B>>, E>> },
    }
}

impl<F, B: http_body::Body + 'static, E: 'static> ResponseFuture<F, B, E> {
    /// Returns the future of a request that the inner service handles. If `strip`, removes the control headers.
    pub(crate) fn pass_through(inner: F, strip: bool) -> Self {
        Self {
            state: State::PassThrough { inner, strip },
        }
    }

    pub(crate) fn rejected(res: Response<Body<B>>) -> Self {
        Self {
            state: State::Rejected {
                res: Some(Box::new(res)),
            },
        }
    }

    pub(crate) fn execution(execution: Detachable<Result<Response<Body<B>>, E>>) -> Self {
        Self {
            state: State::Execution { execution },
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
                    strip_control_headers(res.headers_mut());
                }
                Poll::Ready(Ok(res.map(Body::original)))
            }
            StateProj::Rejected { res } => Poll::Ready(Ok(*res
                .take()
                .expect("a future is not polled after it is ready"))),
            StateProj::Execution { execution } => Pin::new(execution).poll(cx),
        }
    }
}

impl<F, B: http_body::Body + 'static, E: 'static> fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.state {
            State::PassThrough { .. } => "ResponseFuture::PassThrough",
            State::Rejected { .. } => "ResponseFuture::Rejected",
            State::Execution { .. } => "ResponseFuture::Execution",
        })
    }
}
