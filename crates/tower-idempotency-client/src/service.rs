//! The service that retries, and its future.

use std::{
    fmt,
    future::{Future, poll_fn},
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep_until};
use tower_service::Service;

use crate::{
    body::ResponseBody,
    copy::{RequestCopy, clone_body},
    error::{BoxError, Error, Reason, is_not_sent},
    keys::{IsAttempt, IsCounted, is_safe},
    operation::{Operation, Outcome},
    series::{Series, Stored, Transport, drive},
    settings::Settings,
};

/// Service of [`RetryLayer`](crate::RetryLayer).
#[derive(Clone)]
pub struct Retry<S> {
    inner: S,
    settings: Arc<Settings>,
}

impl<S> Retry<S> {
    pub(crate) fn new(inner: S, settings: Arc<Settings>) -> Self {
        Self { inner, settings }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }
}

impl<S: fmt::Debug> fmt::Debug for Retry<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retry")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

impl<S, B, R> Service<Request<B>> for Retry<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
    B: Send + 'static,
    R: Body<Data: Send, Error: Send> + Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = Error;
    type Future = ResponseFuture<S, B, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx).map_err(|error| {
            Error::new(
                Reason::NotReady,
                None,
                // An earlier call or another process may have sent the operation of the request.
                Outcome::Unknown,
                Some(error.into()),
            )
        })
    }

    fn call(&mut self, req: Request<B>) -> Self::Future {
        self.call_with(req, None)
    }
}

impl<S> Retry<S> {
    /// Sends a request, and retries it within the limits of its outbox. Without `stored`, the deadline of the settings counts,
    /// from now.
    pub(crate) fn call_with<B, R>(
        &mut self,
        mut req: Request<B>,
        stored: Option<Stored>,
    ) -> ResponseFuture<S, B, R>
    where
        S: Service<Request<B>, Response = Response<R>> + Clone,
        B: 'static,
        R: Body,
    {
        // The clone may not be ready. See
        // https://docs.rs/tower-service/latest/tower_service/trait.Service.html#be-careful-when-cloning-inner-services
        let clone = self.inner.clone();
        let mut service = mem::replace(&mut self.inner, clone);
        if req.extensions().get::<IsAttempt>().is_some() {
            return ResponseFuture {
                state: State::Inside {
                    future: service.call(req),
                },
            };
        }
        let keyed = self.settings.keys.set_key_of(&mut req);
        if let Some(error) = keyed.key_error() {
            return ResponseFuture {
                state: State::Refused { error: Some(error) },
            };
        }
        let operation = keyed.operation.clone();
        let mut series = Series::new(self.settings.clone(), keyed, is_safe(req.method()), stored);
        if req.extensions_mut().remove::<IsCounted>().is_some() {
            series.adopt_attempt();
        }
        if let Err(reason) = series.begin() {
            return ResponseFuture {
                state: State::Refused {
                    error: Some(series.fail(reason, None)),
                },
            };
        }
        let copy = copy_request(&self.settings, &req, operation.is_some());
        req.extensions_mut().insert(IsAttempt);
        let future = service.call(req);
        let resender = Resender {
            service,
            copy,
            operation,
            settings: self.settings.clone(),
        };
        ResponseFuture {
            state: State::First {
                future,
                timer: None,
                call: Some((series, resender)),
            },
        }
    }
}

/// Returns a copy of the request and of its body, or `None` if it cannot be sent twice.
fn copy_request<B: 'static>(
    settings: &Settings,
    req: &Request<B>,
    has_operation: bool,
) -> Option<(RequestCopy, B)> {
    let body = clone_body(settings.clone_body.as_deref(), req.body())?;
    // Each attempt gets the operation in any case, so it does not count here.
    let has_others = req.extensions().len() > usize::from(has_operation);
    let extensions = has_others.then(|| req.extensions().clone());
    Some((RequestCopy::new(req, extensions), body))
}

/// Sends the attempts after the first one.
struct Resender<S, B> {
    /// Service of the first attempt.
    service: S,
    /// The next attempt, or `None` if there is no further copy of the body.
    copy: Option<(RequestCopy, B)>,
    operation: Option<Operation>,
    settings: Arc<Settings>,
}

impl<S, B, R> Transport for Resender<S, B>
where
    S: Service<Request<B>, Response = Response<R>> + Send,
    S::Error: Into<BoxError>,
    S::Future: Send,
    B: Send + 'static,
    R: Body,
{
    type Body = R;

    async fn ready(&mut self) -> Result<(), BoxError> {
        poll_fn(|cx| self.service.poll_ready(cx))
            .await
            .map_err(Into::into)
    }

    fn send(&mut self) -> impl Future<Output = Result<Response<R>, BoxError>> + Send {
        let req = self.request().expect("the request can be sent again");
        let future = self.service.call(req);
        async { future.await.map_err(Into::into) }
    }

    fn can_send(&self) -> bool {
        self.copy.is_some()
    }

    fn is_not_sent(&self, error: &BoxError) -> bool {
        is_not_sent(error.as_ref())
    }
}

impl<S, B: 'static> Resender<S, B> {
    /// Returns the next attempt, and keeps a copy of it for a later one.
    fn request(&mut self) -> Option<Request<B>> {
        let (copy, body) = self.copy.take()?;
        let next = clone_body(self.settings.clone_body.as_deref(), &body);
        let mut req = copy.request(body);
        self.copy = next.map(|body| (copy, body));
        if let Some(operation) = &self.operation {
            req.extensions_mut().insert(operation.clone());
        }
        req.extensions_mut().insert(IsAttempt);
        Some(req)
    }
}

pin_project! {
    /// Future of [`Retry`].
    ///
    /// # Cancellation
    ///
    /// Dropping the future cancels the attempt in flight. The outcome of the operation is then unknown: the server may
    /// execute it. The caller should send the request again under the same key.
    ///
    /// # Panics
    ///
    /// If it is polled outside a Tokio runtime whose time is enabled.
    pub struct ResponseFuture<S, B, R>
    where
        S: Service<Request<B>>,
        R: Body,
    {
        #[pin]
        state: State<S, B, R>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<S, B, R>
    where
        S: Service<Request<B>>,
        R: Body,
    {
        // The first attempt. Most calls need no other, and this one needs no allocation.
        First {
            #[pin]
            future: S::Future,
            #[pin]
            timer: Option<Sleep>,
            call: Option<(Series, Resender<S, B>)>,
        },
        // A response that has to be read or retried.
        Driven { future: Driven<R> },
        // One attempt of an outer layer.
        Inside {
            #[pin]
            future: S::Future,
        },
        Refused { error: Option<Error> },
    }
}

type Driven<R> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<R>>, Error>> + Send>>;

impl<S, B, R> Future for ResponseFuture<S, B, R>
where
    S: Service<Request<B>, Response = Response<R>> + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
    B: Send + 'static,
    R: Body<Data: Send, Error: Send> + Send + 'static,
{
    type Output = Result<Response<ResponseBody<R>>, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let driven: Driven<R> = match state.as_mut().project() {
                StateProjection::Driven { future } => return future.as_mut().poll(cx),
                StateProjection::Inside { future } => {
                    let result = ready!(future.poll(cx));
                    return Poll::Ready(result.map(|res| res.map(ResponseBody::new)).map_err(
                        |error| {
                            Error::new(Reason::Attempt, None, Outcome::Unknown, Some(error.into()))
                        },
                    ));
                }
                StateProjection::Refused { error } => {
                    let error = error.take().expect("future polled after completion");
                    return Poll::Ready(Err(error));
                }
                StateProjection::First {
                    future,
                    mut timer,
                    call,
                } => match future.poll(cx) {
                    Poll::Ready(result) => {
                        let (mut series, resender) =
                            call.take().expect("future polled after completion");
                        let result = match result {
                            Ok(res) => match series.judge_head(&res) {
                                Some(judgement) => {
                                    series.conclude(judgement, false);
                                    let res = series.respond(res.map(ResponseBody::new));
                                    return Poll::Ready(Ok(res));
                                }
                                None => Ok(res),
                            },
                            Err(error) => Err(error.into()),
                        };
                        Box::pin(drive(series, resender, result))
                    }
                    Poll::Pending => {
                        let (series, _) = call.as_ref().expect("future polled after completion");
                        if timer.is_none() {
                            timer.set(Some(sleep_until(series.deadline())));
                        }
                        if let Some(timer) = timer.as_mut().as_pin_mut() {
                            ready!(timer.poll(cx));
                        }
                        let (series, _) = call.take().expect("just borrowed");
                        return Poll::Ready(Err(series.fail(Reason::Deadline, None)));
                    }
                },
            };
            state.set(State::Driven { future: driven });
        }
    }
}
