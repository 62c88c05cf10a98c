//! The service the layer makes of another.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response};
use tower_service::Service;
use tracing::Instrument;

use crate::{
    body::Body,
    execution::{Admission, Shared, admit, exchange, is_keyless, is_nested},
    future::{Detach, Detachable, ResponseFuture},
    response::reject::into_response,
};

/// Executes each keyed request once and answers every retry with the recorded response.
///
/// Made by [`IdempotencyLayer`](crate::IdempotencyLayer). Works for any inner service of HTTP requests that is `Clone`
/// and whose future is `Send + 'static`; the service's error type stays what it is, since every refusal is a response.
#[derive(Clone)]
pub struct Idempotency<S> {
    inner: S,
    shared: Arc<Shared>,
}

impl<S> Idempotency<S> {
    pub(crate) fn new(inner: S, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }
}

impl<S, B, R> Service<Request<B>> for Idempotency<S>
where
    S: Service<Request<Body<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: http_body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Send,
    R: http_body::Body + Send + 'static,
    R::Data: Send,
    R::Error: Send,
{
    type Response = Response<Body<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, R, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, req: Request<B>) -> Self::Future {
        let nested = is_nested(req.extensions());
        if nested || is_keyless(&self.shared, req.headers()) {
            let inner = self.inner.call(req.map(Body::original));
            return ResponseFuture::pass_through(inner, !nested);
        }
        let (head, body) = req.into_parts();
        match admit(&self.shared, &head) {
            Admission::PassThrough => {
                let req = Request::from_parts(head, Body::original(body));
                ResponseFuture::pass_through(self.inner.call(req), true)
            }
            Admission::Refused(answer) => ResponseFuture::refused(into_response(*answer)),
            Admission::Exchange(key, place) => {
                // The service that was found ready is the one to call; the clone gets ready next time.
                // https://docs.rs/tower/latest/tower/trait.Service.html#be-careful-when-cloning-inner-services
                let clone = self.inner.clone();
                let inner = std::mem::replace(&mut self.inner, clone);
                let detach = Arc::<Detach>::default();
                let exchange = exchange(
                    Arc::clone(&self.shared),
                    inner,
                    head,
                    body,
                    key,
                    place,
                    Arc::clone(&detach),
                );
                // Where this one is off, `Detach` takes the one around it along.
                let exchange = exchange.instrument(tracing::debug_span!("idempotency"));
                ResponseFuture::exchange(Detachable::new(exchange, detach))
            }
        }
    }
}

impl<S: fmt::Debug> fmt::Debug for Idempotency<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("inner", &self.inner)
            .field("config", &self.shared.config)
            .finish()
    }
}
