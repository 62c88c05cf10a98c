//! The service that the layer wraps around another one.

use std::{
    fmt,
    sync::Arc,
    task::{Context as TaskContext, Poll},
};

use http::{Request, Response};
use tower_service::Service;

use crate::{
    body::Body,
    enforcement::Enforcement,
    execution::{
        admission::{Admission, admit, count_keyless, enforcement, is_keyless, is_nested},
        http::execute_request,
        observe::observe,
        shared::Context,
    },
    future::ResponseFuture,
    request::echoed_key,
    response::reject::into_response,
    safe_methods::is_safe,
    telemetry::{Coverage, unsafe_request},
};
#[cfg(feature = "grpc")]
use crate::{execution::admission::count_unprotected_call, grpc::CallKind};

/// Executes each keyed request once, and responds to every retry with the recorded response.
///
/// Created by [`IdempotencyLayer`](crate::IdempotencyLayer). Works with every inner service of HTTP requests that is `Clone`
/// and whose future is `Send + 'static`. The error type is that of the inner service, since every rejection is a response.
#[derive(Clone)]
pub struct Idempotency<S> {
    inner: S,
    context: Arc<Context>,
}

impl<S> Idempotency<S> {
    pub(crate) fn new(inner: S, context: Arc<Context>) -> Self {
        Self { inner, context }
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

    fn poll_ready(&mut self, cx: &mut TaskContext<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, req: Request<B>) -> Self::Future {
        let nested = is_nested(req.extensions());
        let is_keyless = is_keyless(&self.context, req.headers());
        if is_keyless && is_safe(req.method()) {
            let inner = call_unchanged(&mut self.inner, req);
            return ResponseFuture::pass_through(inner, nested);
        }
        let Some(context) = context_of(&self.context, &req) else {
            let inner = call_unchanged(&mut self.inner, req);
            return ResponseFuture::pass_through(inner, nested);
        };
        let (head, body) = req.into_parts();
        let admission = match enforcement(context, &head) {
            Enforcement::Enforce if is_keyless => {
                count_keyless(context, &head);
                Admission::PassThrough
            }
            Enforcement::Enforce => admit(context, &head),
            Enforcement::Off => {
                let layer = context.config.layer();
                context.shared.registration.at_request(layer);
                unsafe_request(layer, &head.method, Coverage::Off);
                Admission::PassThrough
            }
            Enforcement::Observe => {
                let (watch, call) = observe(context, &head, &body);
                let req = Request::from_parts(head, body);
                let inner = match watch {
                    Some(watch) => self.inner.call(req.map(|body| Body::watched(body, watch))),
                    None => call_unchanged(&mut self.inner, req),
                };
                return ResponseFuture::observed(inner, nested, call);
            }
        };
        let echo = |headers| echoed_key(&context.config.request, headers);
        match admission {
            Admission::PassThrough => {
                let req = Request::from_parts(head, body);
                ResponseFuture::pass_through(call_unchanged(&mut self.inner, req), nested)
            }
            Admission::Rejected(response) => {
                let echo = echo(&head.headers);
                let layer = context.config.layer().clone();
                ResponseFuture::rejected(into_response(*response), nested, layer, echo)
            }
            Admission::Execute(arrival) => {
                // The service that is ready must be the one that is called. The clone becomes ready next time.
                // https://docs.rs/tower/latest/tower/trait.Service.html#be-careful-when-cloning-inner-services
                let clone = self.inner.clone();
                let inner = std::mem::replace(&mut self.inner, clone);
                let echo = echo(&head.headers);
                let execution = execute_request(context, inner, head, body, arrival);
                let layer = context.config.layer().clone();
                ResponseFuture::execution(execution, nested, layer, echo)
            }
        }
    }
}

/// Returns the settings that apply to the request, or `None` if it is a gRPC call that passes through.
fn context_of<'a, B>(context: &'a Arc<Context>, req: &Request<B>) -> Option<&'a Arc<Context>> {
    #[cfg(feature = "grpc")]
    if let (Some(methods), Some(grpc_context)) = (&context.config.grpc, &context.grpc) {
        match methods.kind_of(req.method(), req.uri().path(), req.headers()) {
            CallKind::Protected => return Some(grpc_context),
            CallKind::Unprotected => {
                count_unprotected_call(context, req.method(), req.headers());
                return None;
            }
            CallKind::Http => {}
        }
    }
    let _ = req;
    Some(context)
}

/// Calls the inner service with the body of the client.
fn call_unchanged<S, B>(inner: &mut S, req: Request<B>) -> S::Future
where
    S: Service<Request<Body<B>>> + 'static,
    S::Future: 'static,
    B: http_body::Body + 'static,
{
    #[cfg(feature = "axum")]
    let req = match crate::axum_route::call(inner, req) {
        Ok(call) => return call,
        Err(req) => req,
    };
    inner.call(req.map(Body::original))
}

impl<S: fmt::Debug> fmt::Debug for Idempotency<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("inner", &self.inner)
            .field("config", &self.context.config)
            .finish()
    }
}

#[cfg(all(test, feature = "axum"))]
mod allocations;
#[cfg(all(test, not(shuttle)))]
mod sizes;
