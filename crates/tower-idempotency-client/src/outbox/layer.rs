//! The layer that stores requests before they are sent.

use std::{
    fmt,
    future::{Future, ready},
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::SystemTime,
};

use http::{HeaderName, Request, Response};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::{Instant, error::Elapsed, timeout_at};
use tower_layer::Layer;
use tower_service::Service;

use super::{Outbox, OutboxError, entry::Entry, unknown_on_drop::UnknownOnDrop};
use crate::{
    body::ResponseBody,
    copy::clone_body,
    error::{BoxError, Error, Reason},
    first_sent::FirstSent,
    keys::{IsAttempt, IsCounted, is_safe},
    layer::RetryLayer,
    operation::{Operation, Outcome},
    series::Stored,
    service::Retry,
    telemetry::catch_report_panic,
    warning::WarningLimit,
};

/// Stores each request with a key before its first byte is sent, and retries like [`RetryLayer`], which it includes.
///
/// After a crash, [`OutboxService::recover`] sends the pending requests again under the same keys. The entry of a request
/// is removed
///
/// - after a definite response, or by the application ([`with_manual_removal`](Self::with_manual_removal));
/// - if no attempt was executed, and no other call sends the request.
///
/// While a request is stored, the outcome of its operation is not [`NotExecuted`](Outcome::NotExecuted), because a recovery
/// may send it. A call that is dropped leaves its entry, unless it is dropped during the removal. After a definite response the
/// outcome is then [`ResponseLost`](Outcome::ResponseLost).
///
/// A request under a key that is stored already continues the stored operation. The first attempt, the provider and the key
/// header of the stored operation count. A different method, URL or body under the key is an error, and nothing is sent. So is
/// an operation that already has another provider.
///
/// ```
/// use std::sync::Arc;
///
/// use bytes::Bytes;
/// use http::{Request, Response, header::AUTHORIZATION};
/// use http_body_util::Full;
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
/// use tower_idempotency_client::{FileOutbox, Operation, OutboxLayer, RetryLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = std::env::temp_dir().join(format!("outbox-layer-example-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory)?;
/// # let http_client = service_fn(async |req: Request<Full<Bytes>>| {
/// #     assert!(req.headers().contains_key("idempotency-key"));
/// #     Ok::<_, std::convert::Infallible>(Response::new(Full::<Bytes>::from("order 7")))
/// # });
/// let outbox = Arc::new(FileOutbox::open(directory.join("orders.outbox"))?);
/// let client = ServiceBuilder::new()
///     .layer(OutboxLayer::new(outbox, RetryLayer::new()))
///     .service(http_client);
///
/// // At the start of the process: operations of a process that died.
/// let mut recovery = client.recover();
/// while let Some(recovered) = recovery
///     .next(|request| {
///         request.headers_mut().insert(AUTHORIZATION, "Bearer token".parse().expect("valid"));
///     })
///     .await?
/// {
///     match recovered.result {
///         Ok(response) => println!("{}", response.status()),
///         Err(error) if error.is_expired() => println!("outcome unknown, needs an operator"),
///         Err(_) => println!("stays in the outbox"),
///     }
/// }
///
/// let order = Request::post("https://api.example.com/orders").body(Full::from("one espresso"))?;
/// assert_eq!(client.oneshot(order).await?.status(), 200);
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok(())
/// # }
/// ```
///
/// # Stored data
///
/// An entry contains key, method, URL, body and some headers, in the clear. The headers are the key header, those that describe
/// the content or the target, conditions, and those by which an API selects an account. One of the latter is
/// `PayPal-Auth-Assertion`, which has no effect without a token. A signature in the URL, or in the URL of `X-Ms-Copy-Source`, is
/// stored. `Authorization`, cookies and other headers with credentials are not stored: the application supplies them at the
/// recovery. Recovered headers of [`with_headers`](Self::with_headers) are marked as sensitive.
///
/// # Errors
///
/// A request whose body cannot be copied cannot be stored, and is not sent. The same is true of a request with a key header
/// that the client cannot read, and of one whose URL is too long. If the outbox fails, the request is not sent, and its outcome
/// is [`Unknown`](Outcome::Unknown), because it may be stored nevertheless.
///
/// [`RetryLayer::with_deadline`] includes the time in which the layer copies the body and calls the outbox. If it passes before
/// the first attempt, nothing is sent. A removal that has not ended by then may leave the entry.
///
/// # gRPC
///
/// The status of a call may be in the trailers of its response. Before the layer returns such a response, it reads at most
/// 4 MiB and 16,384 frames of it, until the deadline. If it has not found the status by then, the entry stays. So the layer is
/// not for calls whose response is a stream.
///
/// # Placement
///
/// Use the layer instead of `RetryLayer`. Another `RetryLayer` outside is an error. A service inside that chooses with
/// [`ProviderChoice`](crate::ProviderChoice) does so after the entry was stored. A recovery does not know that choice: see
/// [`with_providers`](Self::with_providers).
#[must_use]
pub struct OutboxLayer<O> {
    shared: Shared<O>,
    retries: RetryLayer,
}

/// Settings of the layer, and its outbox.
pub(super) struct Shared<O> {
    pub(super) outbox: Arc<O>,
    headers: Arc<[HeaderName]>,
    removes: bool,
    providers: Option<Arc<dyn Fn() -> u64 + Send + Sync>>,
    /// Limit of the warning about entries that were not removed.
    not_removed: Arc<WarningLimit>,
}

impl<O: Outbox> OutboxLayer<O> {
    /// Creates the layer with an outbox and the settings of the retries.
    pub fn new(outbox: Arc<O>, retries: RetryLayer) -> Self {
        Self {
            shared: Shared {
                outbox,
                headers: Arc::default(),
                removes: true,
                providers: None,
                not_removed: Arc::default(),
            },
            retries,
        }
    }

    /// Stores these headers, too. Default: only the headers of [stored data](Self#stored-data).
    ///
    /// If the server compares a header that is not stored, it rejects the recovered request with 422. Without a header that the
    /// server needs, the server may execute the request differently, or reject it with a definite response such as 400. The
    /// outbox removes the entry after both. A header with a credential is stored in the clear.
    pub fn with_headers(mut self, headers: impl IntoIterator<Item = HeaderName>) -> Self {
        self.shared.headers = headers.into_iter().collect();
        self
    }

    /// Sets the function that chooses the provider of an operation without one. Default: none.
    ///
    /// The choice is stored with the request, and [`ProviderChoice`](crate::ProviderChoice) returns it for all attempts,
    /// also after a crash. An entry that the application stored in advance gets it before its first attempt.
    ///
    /// Without this setting, a choice that `ProviderChoice` makes inside is lost with the process. A recovery may then send
    /// an executed request to a second provider, which executes it again.
    pub fn with_providers(mut self, choose: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        self.shared.providers = Some(Arc::new(choose));
        self
    }

    /// Leaves entries in the outbox after a definite response. The application calls [`Outbox::remove`] when it has stored
    /// the response.
    ///
    /// If the process dies in between, the recovery gets the response again, as a replay. Without this setting the response
    /// of an executed operation may be lost. If the application removes no entries, the outbox fills up.
    pub fn with_manual_removal(mut self) -> Self {
        self.shared.removes = false;
        self
    }
}

impl<O> Clone for Shared<O> {
    fn clone(&self) -> Self {
        Self {
            outbox: self.outbox.clone(),
            headers: self.headers.clone(),
            removes: self.removes,
            providers: self.providers.clone(),
            not_removed: self.not_removed.clone(),
        }
    }
}

impl<O> Clone for OutboxLayer<O> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
            retries: self.retries.clone(),
        }
    }
}

impl<O> fmt::Debug for OutboxLayer<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboxLayer")
            .field("headers", &self.shared.headers)
            .field("removes", &self.shared.removes)
            .field("retries", &self.retries)
            .finish_non_exhaustive()
    }
}

impl<S, O: Outbox> Layer<S> for OutboxLayer<O> {
    type Service = OutboxService<S, O>;

    fn layer(&self, inner: S) -> Self::Service {
        OutboxService {
            inner: self.retries.layer(inner),
            shared: self.shared.clone(),
        }
    }
}

/// Service of [`OutboxLayer`].
pub struct OutboxService<S, O> {
    pub(super) inner: Retry<S>,
    pub(super) shared: Shared<O>,
}

impl<S: Clone, O> Clone for OutboxService<S, O> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            shared: self.shared.clone(),
        }
    }
}

impl<S: fmt::Debug, O> fmt::Debug for OutboxService<S, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboxService")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

type CallResult<R> = Result<Response<ResponseBody<R>>, Error>;

impl<S, O, B, R> Service<Request<B>> for OutboxService<S, O>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
    O: Outbox,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    R: Body<Data: Send, Error: Send> + Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = CallResult<R>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut req: Request<B>) -> Self::Future {
        // The clone may not be ready.
        let clone = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, clone);
        if req.extensions().get::<IsAttempt>().is_some() {
            return Box::pin(ready(Err(not_stored(None, STACKED))));
        }
        let keyed = inner.settings().keys.set_key_of(&mut req);
        if let Some(error) = keyed.key_error() {
            return Box::pin(ready(Err(error)));
        }
        if keyed.has_unreadable_key {
            return Box::pin(ready(Err(not_stored(None, UNREADABLE_KEY))));
        }
        let is_stored = keyed.has_key && !is_safe(req.method());
        let Some(operation) = keyed.operation.filter(|_| is_stored) else {
            return Box::pin(inner.call(req));
        };
        // A key layer outside counts an attempt that has not begun. The retries count their own.
        if req.extensions_mut().remove::<IsCounted>().is_some() {
            operation.adopt_attempt();
        }
        let Some(copy) = clone_body(inner.settings().clone_body.as_deref(), req.body()) else {
            return Box::pin(ready(Err(not_stored(Some(operation), STREAM))));
        };
        let (head, body) = req.into_parts();
        let mut entry = Entry::of_head(&operation, &head, &self.shared.headers);
        if !operation.is_open() {
            // No attempt of an earlier call was executed. The lifetime begins again, and the entry differs from an earlier one.
            entry.first_sent = None;
        }
        let now = SystemTime::now();
        let mut entry = entry.or_first_sent(now);
        let mut stored = Stored {
            first_sent: FirstSent::restored(entry.first_sent().unwrap_or(now)),
            deadline: inner.settings().deadline_from(Instant::now()),
        };
        // The operation gets the provider after the outbox was called, because the outbox may have an entry with another
        // provider.
        entry.provider = entry.provider.or_else(|| self.shared.choose_provider());
        let keys = inner.settings().keys.clone();
        // A server may compare the bytes of the header, and a later process may have another protocol.
        entry.set_key_header(keys.header(), &head.headers);
        let mut req = Request::from_parts(head, body);
        let shared = self.shared.clone();
        Box::pin(async move {
            entry.body = match timeout_at(stored.deadline, copy.collect()).await {
                Ok(Ok(body)) => body.to_bytes(),
                Ok(Err(error)) => return Err(not_stored(Some(operation), error)),
                Err(_) => return Err(not_stored(Some(operation), LATE_BODY)),
            };
            if let Err(error) = entry.check() {
                return Err(not_stored(Some(operation), error));
            }
            let unknown_on_drop = UnknownOnDrop::new(&operation);
            let previous = match shared.store(&entry, stored.deadline).await {
                Ok(previous) => previous,
                Err(error) => {
                    drop(unknown_on_drop);
                    return Err(not_stored(Some(operation), error));
                }
            };
            if let Some(previous) = previous {
                if !previous.is_same_request(&entry) {
                    drop(unknown_on_drop);
                    return Err(not_stored(Some(operation), OTHER_REQUEST));
                }
                let providers = [previous.provider, operation.provider()];
                if matches!(providers, [Some(stored), Some(chosen)] if stored != chosen) {
                    drop(unknown_on_drop);
                    return Err(not_stored(Some(operation), OTHER_PROVIDER));
                }
                if let Some(at) = previous.first_sent() {
                    stored.first_sent = FirstSent::restored(at);
                }
                previous.restore(&operation);
                // An entry without a stored key header may have one that the application added.
                let key = previous.headers.get(keys.header()).cloned();
                if let Some(key) = key.or_else(|| operation.header(keys.protocol())) {
                    req.headers_mut().insert(keys.header(), key);
                }
                previous.restore_key(&keys, &mut req);
            }
            if let Some(provider) = entry.provider {
                operation.provider_or(|| provider);
            }
            shared
                .send(inner, req, operation, unknown_on_drop, stored)
                .await
        })
    }
}

impl<O: Outbox> Shared<O> {
    /// Returns the provider of an operation without one.
    pub(super) fn choose_provider(&self) -> Option<u64> {
        self.providers.as_ref().map(|choose| choose())
    }

    /// Stores an entry, until the deadline of a call.
    async fn store(&self, entry: &Entry, deadline: Instant) -> Result<Option<Entry>, OutboxError> {
        timeout_at(deadline, self.outbox.store(entry))
            .await
            .unwrap_or_else(|_| Err(OutboxError::with_message(LATE)))
    }

    /// Sends a stored request, and removes its entry if the outcome allows it. The inner service is ready.
    pub(super) async fn send<S, B, R>(
        &self,
        mut inner: Retry<S>,
        req: Request<B>,
        operation: Operation,
        mut unknown_on_drop: UnknownOnDrop,
        stored: Stored,
    ) -> CallResult<R>
    where
        S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
        S::Error: Into<BoxError>,
        S::Future: Send,
        B: Send + 'static,
        R: Body<Data: Send, Error: Send> + Send + 'static,
    {
        let deadline = stored.deadline;
        let result = inner.call_with(req, Some(stored)).await;
        unknown_on_drop.has_response = result.is_ok();
        let mut result = match result {
            Ok(res) => Ok(read_status(res, deadline).await),
            Err(error) => Err(error),
        };
        let key = operation.key();
        let is_settled = match operation.outcome() {
            Outcome::Definite => {
                // A response of gRPC got the operation while the outcome was unknown. The trailers have shown the outcome
                // since.
                if let Ok(res) = &mut result {
                    res.extensions_mut().remove::<Operation>();
                }
                if self.removes {
                    self.warn_if_failed(timeout_at(deadline, self.outbox.remove(key)).await);
                }
                true
            }
            Outcome::ResponseLost => true,
            Outcome::NotExecuted => {
                let discard = async {
                    // The outbox may execute a call that begins too late, although nothing waits for it.
                    if Instant::now() >= deadline {
                        return Err(OutboxError::with_message(LATE));
                    }
                    self.outbox.discard(key, stored.first_sent.wall).await
                };
                let discarded = timeout_at(deadline, discard).await;
                self.warn_if_failed(discarded) == Some(true)
            }
            Outcome::Unknown => false,
        };
        if is_settled {
            unknown_on_drop.disarm();
            return result;
        }
        drop(unknown_on_drop);
        match result {
            Ok(mut res) => {
                res.extensions_mut().insert(operation);
                Ok(res)
            }
            Err(error) => Err(error.with_outcome(operation.outcome())),
        }
    }

    /// Returns the result of a removal. After an error, logs it and returns `None`: the entry may stay for a recovery, and may
    /// be removed.
    fn warn_if_failed<T>(&self, result: Result<Result<T, OutboxError>, Elapsed>) -> Option<T> {
        let late = |_| Err(OutboxError::with_message(LATE));
        match result.unwrap_or_else(late) {
            Ok(value) => Some(value),
            Err(error) => {
                if let Some(count) = self.not_removed.count() {
                    catch_report_panic(|| {
                        tracing::warn!(%error, count, "entry may still be in the outbox");
                    });
                }
                None
            }
        }
    }
}

/// Reads the body of a gRPC response until its trailers, whose status decides on the removal of the entry.
async fn read_status<R: Body>(
    res: Response<ResponseBody<R>>,
    deadline: Instant,
) -> Response<ResponseBody<R>> {
    if !res.body().is_awaited() {
        return res;
    }
    let (head, body) = res.into_parts();
    let body = body.read_to_trailers(MAX_GRPC_BYTES, deadline).await;
    Response::from_parts(head, body)
}

fn not_stored(operation: Option<Operation>, source: impl Into<BoxError>) -> Error {
    let outcome = operation
        .as_ref()
        .map_or(Outcome::NotExecuted, Operation::outcome);
    Error::new(Reason::NotStored, operation, outcome, Some(source.into()))
}

const STACKED: &str =
    "a RetryLayer outside of an OutboxLayer would store each attempt: remove the RetryLayer";
const UNREADABLE_KEY: &str = "a request whose key the client cannot read cannot be stored";
const STREAM: &str = "a body that cannot be copied cannot be stored: set `with_body_clone`, or use a body such as `Full<Bytes>`";
const OTHER_REQUEST: &str = "the outbox has another request under this key";
const OTHER_PROVIDER: &str = "the outbox has another provider for this operation";
/// Longest gRPC response whose trailers are read. Clients of gRPC read messages of this size by default.
const MAX_GRPC_BYTES: usize = 4 * 1024 * 1024;
const LATE_BODY: &str = "the body did not end before the deadline of the call";
pub(super) const LATE: &str = "the outbox did not reply before the deadline of the call";
