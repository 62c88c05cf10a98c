//! The response future, which continues in a background task if it is dropped while it holds a lease.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::{HeaderName, HeaderValue, Response};
use pin_project_lite::pin_project;

use crate::{
    body::Body,
    execution::{detach::Detachable, observe::ObservedCall},
    layer_name::LayerName,
    panics::POLLED_AGAIN,
    response::directives::strip_control_headers,
    telemetry::record_outcome,
};

pin_project! {
    /// Future of [`Idempotency`](crate::Idempotency).
    ///
    /// # Cancellation
    ///
    /// If the future is dropped before the request body is read, the request is cancelled, and nothing has happened. With
    /// [`FingerprintBy::head_only`](crate::FingerprintBy::head_only) the handler reads the body, and the request is
    /// cancelled if the drop comes before the request for the lease.
    ///
    /// If the future is dropped later, it continues in a background task. The handler runs to completion and its response
    /// is recorded, so that a retry gets it. The task has the tracing span, but not the task-locals that code outside the
    /// layer has set. A handler that panics because a task-local is missing releases the key.
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
        state: FutureState<F, B, E>,
        // `true` if an outer layer records the outcome.
        nested: bool,
        // The layer that executes or rejects the request.
        layer: LayerName,
        // The key header of the request, if the response repeats it.
        echo: Option<Box<(HeaderName, HeaderValue)>>,
    }
}

pin_project! {
    #[project = StateProj]
    enum FutureState<F, B, E>
    where
        B: http_body::Body,
        B: 'static,
        E: 'static,
    {
        PassThrough { #[pin] inner: F, observed: Option<ObservedCall> },
        Rejected { res: Option<Box<Response<Body<B>>>> },
        Execution { execution: Detachable<Result<Response<Body<B>>, E>> },
    }
}

impl<F, B: http_body::Body + 'static, E: 'static> ResponseFuture<F, B, E> {
    /// Returns the future of a request that the inner service handles. Unless `nested`, removes the control headers.
    pub(crate) fn pass_through(inner: F, nested: bool) -> Self {
        Self::observed(inner, nested, None)
    }

    /// Like [`pass_through`](Self::pass_through), with an observer of the call.
    pub(crate) fn observed(inner: F, nested: bool, observed: Option<ObservedCall>) -> Self {
        let state = FutureState::PassThrough { inner, observed };
        Self::new(state, nested, LayerName::default(), None)
    }

    /// Returns the future of a response of this layer. `echo` is the header that the response repeats.
    pub(crate) fn rejected(
        res: Response<Body<B>>,
        nested: bool,
        layer: LayerName,
        echo: Option<(HeaderName, HeaderValue)>,
    ) -> Self {
        let res = Some(Box::new(res));
        Self::new(FutureState::Rejected { res }, nested, layer, echo)
    }

    /// Returns the future of an execution. `echo` is the header that the response repeats.
    pub(crate) fn execution(
        execution: Detachable<Result<Response<Body<B>>, E>>,
        nested: bool,
        layer: LayerName,
        echo: Option<(HeaderName, HeaderValue)>,
    ) -> Self {
        Self::new(FutureState::Execution { execution }, nested, layer, echo)
    }

    fn new(
        state: FutureState<F, B, E>,
        nested: bool,
        layer: LayerName,
        echo: Option<(HeaderName, HeaderValue)>,
    ) -> Self {
        let echo = echo.map(Box::new);
        Self {
            state,
            nested,
            layer,
            echo,
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
        let this = self.project();
        let mut res = match this.state.project() {
            StateProj::PassThrough { inner, observed } => {
                let result = ready!(match observed {
                    Some(call) => call.poll(|| inner.poll(cx)),
                    None => inner.poll(cx),
                });
                let mut res = match result {
                    Ok(res) => res,
                    Err(error) => {
                        if let Some(call) = observed.take() {
                            call.failed();
                        }
                        return Poll::Ready(Err(error));
                    }
                };
                let watch = observed.take().and_then(|call| call.responded(&res));
                if !*this.nested {
                    strip_control_headers(res.headers_mut());
                }
                return Poll::Ready(Ok(res.map(|body| match watch {
                    Some(watch) => Body::watched(body, watch),
                    None => Body::original(body),
                })));
            }
            StateProj::Rejected { res } => Ok(*res.take().expect(POLLED_AGAIN)),
            StateProj::Execution { execution } => ready!(Pin::new(execution).poll(cx)),
        };
        if let Ok(res) = &mut res {
            if !*this.nested {
                record_outcome(this.layer, res);
            }
            if let Some(echo) = this.echo.take() {
                let (name, line) = *echo;
                res.headers_mut().insert(name, line);
            }
        }
        Poll::Ready(res)
    }
}

impl<F, B: http_body::Body + 'static, E: 'static> fmt::Debug for ResponseFuture<F, B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.state {
            FutureState::PassThrough { .. } => "ResponseFuture::PassThrough",
            FutureState::Rejected { .. } => "ResponseFuture::Rejected",
            FutureState::Execution { .. } => "ResponseFuture::Execution",
        })
    }
}
