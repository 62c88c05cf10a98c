//! Execution of HTTP requests: the body is read, the lease is acquired, and the inner service is called under it.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, atomic::AtomicBool},
    task::{Context as TaskContext, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, request};
use pin_project_lite::pin_project;
use tower_service::Service;
use tracing::{Instrument, field::Empty, instrument::Instrumented, level_filters::LevelFilter};

use crate::{
    body::Body,
    execution::{
        Execution,
        admission::{Admitted, Arrival, Progress, acquire, acquire_now},
        detach::{Detach, DetachSwitch, Detachable},
        handler::{HandlerRun, call_handler, run_handler, run_unprotected},
        shared::Context,
    },
    limits::Caller,
    panics::POLLED_AGAIN,
    request::{
        key::{IdempotencyKey, RequestKey},
        read_body::{BodyError, ReadBody, expected_length},
    },
    response::reject::{CompleteResponse, admission_error, into_response, reject},
    telemetry,
};

/// Executes a keyed request, from its body to its response.
pub(crate) fn execute_request<S, B, R>(
    context: &Arc<Context>,
    inner: S,
    head: request::Parts,
    body: B,
    arrival: Arrival,
) -> Detachable<Result<Response<Body<R>>, S::Error>>
where
    S: Service<Request<Body<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: http_body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Send,
    R: http_body::Body + Send + 'static,
    R::Data: Send,
    R::Error: Send,
{
    let caller = Arc::clone(arrival.permit.caller());
    let rules = &context.config.request;
    // The shape of a gRPC call is checked whatever the fingerprint is.
    let body = if rules.fingerprint.is_head_only() && !rules.is_grpc() {
        Upload::Streamed { body: Some(body) }
    } else {
        let buffer = caller.request_bytes(context.config.limits.max_request_bytes);
        let read = ReadBody::new(rules, context.config.warnings(), &head, body, buffer);
        Upload::Buffered { read }
    };
    let execution = HttpExecution {
        caller,
        context: Arc::clone(context),
        stage: Stage::Arriving {
            arrived: Some((arrival, inner, head)),
            body,
        },
    };
    // No subscriber has spans at this level. With the feature `log` of `tracing`, a disabled span would still build its fields.
    if LevelFilter::current() < LevelFilter::DEBUG {
        return Detachable::new(execution);
    }
    let layer = context.config.layer();
    let span = tracing::debug_span!(
        "idempotency",
        layer = layer.as_str(),
        execution_trace_id = Empty
    );
    if span.is_disabled() {
        Detachable::new(execution)
    } else {
        Detachable::new(execution.instrument(span))
    }
}

pin_project! {
    /// A keyed request. All its stages share one allocation.
    struct HttpExecution<S, B, F, R, E>
    where
        B: http_body::Body,
        R: http_body::Body,
    {
        caller: Arc<Caller>,
        context: Arc<Context>,
        #[pin]
        stage: Stage<S, B, F, R, E>,
    }
}

pin_project! {
    #[project = StageProj]
    enum Stage<S, B, F, R, E>
    where
        B: http_body::Body,
        R: http_body::Body,
    {
        // The body is read. Nothing has happened yet: a drop cancels the request.
        Arriving { arrived: Option<(Arrival, S, request::Parts)>, #[pin] body: Upload<B> },
        // The request waits for the store, for another request, or for the renewer.
        Acquiring { call: Option<Call<S, B>>, acquiring: Acquiring, switch: Arc<DetachSwitch> },
        Running { #[pin] running: HandlerRun<F, R, E> },
        Unprotected { running: Running<R, E> },
    }
}

pin_project! {
    /// The body of a request.
    #[project = UploadProj]
    enum Upload<B> {
        Buffered { #[pin] read: ReadBody<B> },
        // The handler reads it.
        Streamed { body: Option<B> },
    }
}

/// A body that was read, or the body that the handler reads.
enum Uploaded<B> {
    Whole(Bytes, Option<HeaderMap>),
    Streamed(B),
}

/// The call that a request makes once it is admitted.
struct Call<S, B: http_body::Body> {
    inner: S,
    head: request::Parts,
    body: Body<B>,
}

type Acquiring = Pin<Box<dyn Future<Output = Result<Admitted, Box<CompleteResponse>>> + Send>>;
type Running<R, E> = Pin<Box<dyn Future<Output = Result<Response<Body<R>>, E>> + Send>>;

impl<S, B, R> Future for HttpExecution<S, B, S::Future, R, S::Error>
where
    S: Service<Request<Body<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: http_body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Send,
    R: http_body::Body + Send + 'static,
    R::Data: Send,
    R::Error: Send,
{
    type Output = Result<Response<Body<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let (caller, context) = (this.caller, this.context);
        let mut stage = this.stage;
        loop {
            match stage.as_mut().project() {
                StageProj::Arriving { arrived, body } => {
                    let (_, _, head) = arrived.as_ref().expect(POLLED_AGAIN);
                    let upload = match body.project() {
                        UploadProj::Buffered { read } => {
                            let rules = &context.config.request;
                            match ready!(read.poll(cx, rules, head.version)) {
                                Ok((data, trailers)) => Uploaded::Whole(data, trailers),
                                Err(error) => {
                                    let res = reject_body(context, error);
                                    return Poll::Ready(Ok(into_response(res)));
                                }
                            }
                        }
                        UploadProj::Streamed { body } => {
                            Uploaded::Streamed(body.take().expect(POLLED_AGAIN))
                        }
                    };
                    let (arrival, inner, head) = arrived.take().expect(POLLED_AGAIN);
                    let (content, body_aborted) = match &upload {
                        Uploaded::Whole(data, _) => (&data[..], None),
                        Uploaded::Streamed(_) => (&[][..], Some(Arc::<AtomicBool>::default())),
                    };
                    let progress =
                        acquire_now(context, caller, arrival, &head, content, &body_aborted);
                    let admitted = match progress {
                        Progress::Respond(res) => return Poll::Ready(Ok(into_response(res))),
                        Progress::Execute(execution) => Ok(execution),
                        Progress::Continue(unadmitted) => Err(unadmitted),
                    };
                    let body = match upload {
                        Uploaded::Whole(data, trailers) => Body::whole(data, trailers),
                        Uploaded::Streamed(body) => {
                            let expected = expected_length(&head.headers, &body);
                            let aborted = body_aborted.clone().unwrap_or_default();
                            Body::monitored(body, expected, aborted)
                        }
                    };
                    let call = Call { inner, head, body };
                    match admitted {
                        Ok(execution) => {
                            let running = call.start(execution);
                            stage.set(Stage::Running { running });
                        }
                        Err(unadmitted) => {
                            let switch = DetachSwitch::new();
                            let acquiring = Box::pin(acquire(
                                Arc::clone(context),
                                Arc::clone(caller),
                                Arc::clone(&switch),
                                unadmitted,
                                body_aborted,
                                context.config.response.trace(&call.head.headers),
                            ));
                            stage.set(Stage::Acquiring {
                                call: Some(call),
                                acquiring,
                                switch,
                            });
                        }
                    }
                }
                StageProj::Acquiring {
                    call, acquiring, ..
                } => {
                    let admitted = match ready!(acquiring.as_mut().poll(cx)) {
                        Ok(admitted) => admitted,
                        Err(res) => return Poll::Ready(Ok(into_response(*res))),
                    };
                    let call = call.take().expect(POLLED_AGAIN);
                    match admitted {
                        Admitted::Protected(execution) => {
                            let running = call.start(execution);
                            stage.set(Stage::Running { running });
                        }
                        Admitted::Unprotected(attempt) => {
                            let Call {
                                inner,
                                mut head,
                                body,
                            } = call;
                            insert_key(&mut head, attempt.key.as_ref());
                            let req = Request::from_parts(head, body);
                            let running =
                                run_unprotected(Arc::clone(context), inner, req, *attempt);
                            stage.set(Stage::Unprotected {
                                running: Box::pin(running),
                            });
                        }
                    }
                }
                StageProj::Running { running } => return running.poll(cx),
                StageProj::Unprotected { running } => return running.as_mut().poll(cx),
            }
        }
    }
}

impl<S, B, F, R, E> Detach for HttpExecution<S, B, F, R, E>
where
    Self: Future + Send,
    B: http_body::Body,
    R: http_body::Body,
{
    fn continues_for(&self) -> Option<&Arc<Caller>> {
        let continues = match &self.stage {
            // Nothing has happened yet.
            Stage::Arriving { .. } => false,
            Stage::Acquiring { switch, .. } => switch.is_armed(),
            Stage::Running { .. } | Stage::Unprotected { .. } => true,
        };
        continues.then_some(&self.caller)
    }

    fn set_detached(&self) {
        telemetry::detached(self.context.config.layer());
        if let Stage::Acquiring { switch, .. } = &self.stage {
            switch.set_detached();
        }
    }
}

impl<D: Detach> Detach for Instrumented<D> {
    fn continues_for(&self) -> Option<&Arc<Caller>> {
        self.inner().continues_for()
    }

    fn set_detached(&self) {
        self.inner().set_detached();
    }
}

impl<S, B: http_body::Body> Call<S, B> {
    /// Calls the handler under the lease.
    fn start<R>(self, execution: Execution) -> HandlerRun<S::Future, R, S::Error>
    where
        S: Service<Request<Body<B>>, Response = Response<R>>,
        S::Error: Send + 'static,
        R: http_body::Body + Send + 'static,
        R::Data: Send,
        R::Error: Send,
    {
        let Self {
            mut inner,
            mut head,
            body,
        } = self;
        head.extensions.insert(execution.lease.handle());
        insert_key(&mut head, execution.lease.grant.key.as_ref());
        let call = call_handler(&mut inner, Request::from_parts(head, body));
        run_handler(execution, call)
    }
}

/// Inserts the key for the handler, or removes that of an outer layer.
fn insert_key(head: &mut request::Parts, key: Option<&RequestKey>) {
    match key {
        Some(RequestKey::Sent(key) | RequestKey::Named(key, _)) => {
            head.extensions.insert(key.clone());
        }
        Some(RequestKey::Derived) | None => {
            head.extensions.remove::<IdempotencyKey>();
        }
    }
}

fn reject_body(context: &Context, error: BodyError) -> CompleteResponse {
    let rules = &context.config.response;
    match error {
        BodyError::Rejected(error) => reject(rules, &error),
        BodyError::OverLimit(error) => reject(rules, &admission_error(rules, error)),
    }
}
