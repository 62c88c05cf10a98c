//! The layer that sets the key header.

use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, Request};
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

use crate::{
    error::{Error, Reason},
    key::Key,
    operation::Operation,
    protocol::Protocol,
};

/// Sets the key header of requests that need one.
///
/// [`RetryLayer`](crate::RetryLayer) includes this layer. Use it alone if another component retries, and give that component
/// requests that have an [`Operation`] in their extensions. Otherwise each attempt is an operation of its own.
///
/// - A key that the caller has set stays. If the request also has an [`Operation`], [`RetryLayer`](crate::RetryLayer)
///   compares the keys. It returns an error if they differ. It also returns an error if the client cannot read the key and
///   the method is not safe.
/// - Otherwise the key is that of the [`Operation`] in the extensions. Without one, the layer creates an operation and puts
///   it there.
/// - Requests with a safe method get no key: GET, HEAD, OPTIONS, TRACE, QUERY, PROPFIND, REPORT and SEARCH.
///
/// The layer does not see responses. Without `RetryLayer` the outcome of an operation that was sent stays
/// [`Outcome::Unknown`](crate::Outcome::Unknown).
///
/// ```
/// use http::{Request, Response};
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
/// use tower_idempotency_client::IdempotencyKeyLayer;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), std::convert::Infallible> {
/// let client = ServiceBuilder::new()
///     .layer(IdempotencyKeyLayer::new())
///     .service(service_fn(async |req: Request<()>| {
///         assert_eq!(req.headers()["idempotency-key"].len(), 36);
///         Ok::<_, std::convert::Infallible>(Response::new(()))
///     }));
/// client.oneshot(Request::post("/orders").body(()).unwrap()).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct IdempotencyKeyLayer {
    header: HeaderName,
    protocol: Protocol,
    methods: Arc<dyn Fn(&Method) -> bool + Send + Sync>,
    operations: Arc<dyn Fn() -> Operation + Send + Sync>,
}

impl IdempotencyKeyLayer {
    /// Creates the layer for the header `Idempotency-Key`, [`Protocol::TowerIdempotency`], and random UUIDs of version 4.
    pub fn new() -> Self {
        Self {
            header: HeaderName::from_static("idempotency-key"),
            protocol: Protocol::default(),
            methods: Arc::new(|method| !is_safe(method)),
            operations: Arc::new(Operation::new),
        }
    }

    /// Sets the name of the header. Default: `Idempotency-Key`.
    ///
    /// A server that expects another name ignores the key, and retries execute again. A request that a call stored in an outbox
    /// keeps its key header: recover it before the server stops reading the earlier name. An entry that the application stored
    /// in advance has none: recover it before you change the name.
    pub fn with_header(self, header: HeaderName) -> Self {
        Self { header, ..self }
    }

    /// Sets the protocol of the server. Default: [`Protocol::TowerIdempotency`].
    ///
    /// With the wrong protocol the server may reject the key for its quotes. The client may also retry a 409 in vain, or
    /// report it as the response. A request that a call stored in an outbox keeps its key header. An entry that the application
    /// stored in advance has none: recover it before you change the protocol.
    pub fn with_protocol(self, protocol: Protocol) -> Self {
        Self { protocol, ..self }
    }

    /// Sets the predicate of the methods whose requests get a key. Default: all but the safe ones.
    ///
    /// A request without a key is not sent again after an attempt that may have been executed, unless its method is safe. A
    /// request whose extensions contain an [`Operation`] gets a key with every method that is not safe.
    pub fn with_methods_where(
        self,
        has_key: impl Fn(&Method) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self {
            methods: Arc::new(has_key),
            ..self
        }
    }

    /// Sets the function that creates the operation of a request without one. Default: [`Operation::new`].
    ///
    /// If the function returns the same key for two operations, the server replays the response of the first for the
    /// second.
    pub fn with_operations(
        self,
        operations: impl Fn() -> Operation + Send + Sync + 'static,
    ) -> Self {
        Self {
            operations: Arc::new(operations),
            ..self
        }
    }

    pub(crate) fn header(&self) -> &HeaderName {
        &self.header
    }

    pub(crate) fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Sets the key of a request.
    pub(crate) fn set_key(
        &self,
        method: &Method,
        headers: &mut HeaderMap,
        extensions: &mut Extensions,
    ) -> Keyed {
        let by_caller = extensions.get::<Operation>().cloned();
        if let (Some(operation), Some(stored)) = (&by_caller, extensions.get::<StoredKey>())
            && stored.replaced == self.header
        {
            let is_sent = stored.is_sent(operation, headers);
            // Under the same name, the key may have another form: the code below compares it.
            if is_sent || stored.name != self.header {
                return Keyed {
                    has_other_key: !is_sent,
                    ..Keyed::with_key(operation.clone())
                };
            }
        }
        let is_new = by_caller.is_none();
        let mut lines = headers.get_all(&self.header).iter();
        let operation = if let Some(first) = lines.next() {
            // A server rejects several lines, or reads one of them.
            let key = lines.next().is_none();
            let key = key.then(|| Key::parse(first, self.protocol).ok());
            match (key.flatten(), by_caller) {
                (Some(key), Some(operation)) if key.as_str() != operation.key() => {
                    return Keyed {
                        has_other_key: true,
                        ..Keyed::without_key(Some(operation))
                    };
                }
                (Some(_), Some(operation)) => operation,
                (Some(key), None) => Operation::from_key(key),
                (None, by_caller) => {
                    let is_unsafe = !is_safe(method);
                    return Keyed {
                        has_other_key: is_unsafe && by_caller.is_some(),
                        has_unreadable_key: is_unsafe,
                        ..Keyed::without_key(by_caller)
                    };
                }
            }
        } else {
            let is_covered = match by_caller {
                Some(_) => !is_safe(method),
                None => (self.methods)(method),
            };
            if !is_covered {
                return Keyed::without_key(None);
            }
            let operation = by_caller.unwrap_or_else(|| (self.operations)());
            let value = operation.header(self.protocol);
            let is_set =
                value.is_some_and(|value| headers.try_insert(self.header.clone(), value).is_ok());
            if !is_set {
                return Keyed::without_key(Some(operation));
            }
            operation
        };
        if is_new {
            extensions.insert(operation.clone());
        }
        Keyed::with_key(operation)
    }

    /// Sets a stored key header, in place of the one that the layer would set.
    pub(crate) fn restore_key<B>(
        &self,
        req: &mut Request<B>,
        key: &str,
        name: &HeaderName,
        value: &HeaderValue,
    ) {
        req.headers_mut().remove(&self.header);
        req.headers_mut().insert(name.clone(), value.clone());
        req.extensions_mut().insert(StoredKey {
            key: key.to_owned(),
            name: name.clone(),
            value: value.clone(),
            replaced: self.header.clone(),
        });
    }

    /// Sets the key of a request of `http`, as [`set_key`](Self::set_key) does.
    pub(crate) fn set_key_of<B>(&self, req: &mut Request<B>) -> Keyed {
        // A request does not lend its parts separately.
        let mut headers = mem::take(req.headers_mut());
        let mut extensions = mem::take(req.extensions_mut());
        let keyed = self.set_key(req.method(), &mut headers, &mut extensions);
        *req.headers_mut() = headers;
        *req.extensions_mut() = extensions;
        keyed
    }
}

/// Operation of a request, after its key was set.
pub(crate) struct Keyed {
    /// Operation whose attempts are counted. A safe request without a key has none.
    pub(crate) operation: Option<Operation>,
    /// The request has a key that the server can read.
    pub(crate) has_key: bool,
    /// `true` if the key of the request is not that of the operation, or cannot be read. The request must not be sent.
    pub(crate) has_other_key: bool,
    /// `true` if the method is not safe, and the client cannot read the key of the request. No outbox can store it.
    pub(crate) has_unreadable_key: bool,
}

impl Keyed {
    fn with_key(operation: Operation) -> Self {
        Self {
            has_key: true,
            ..Self::without_key(Some(operation))
        }
    }

    fn without_key(operation: Option<Operation>) -> Self {
        Self {
            operation,
            has_key: false,
            has_other_key: false,
            has_unreadable_key: false,
        }
    }

    /// Returns an error if the key of the request is not that of its operation, or cannot be read.
    pub(crate) fn key_error(&self) -> Option<Error> {
        let operation = self.operation.clone().filter(|_| self.has_other_key)?;
        let outcome = operation.outcome();
        Some(Error::new(Reason::OtherKey, Some(operation), outcome, None))
    }
}

/// Extension of a request of an outbox: the key header of its first attempt.
///
/// It may have another name than that of the layer, or a form that the protocol of the layer reads as another key.
#[derive(Clone)]
struct StoredKey {
    /// Key of the stored operation.
    key: String,
    name: HeaderName,
    value: HeaderValue,
    /// Name of the header that the layer of the outbox would set.
    replaced: HeaderName,
}

impl StoredKey {
    /// Returns `true` if the request still has the stored header, no second key header, and the stored operation.
    fn is_sent(&self, operation: &Operation, headers: &HeaderMap) -> bool {
        let mut lines = headers.get_all(&self.name).iter();
        let is_stored = lines.next() == Some(&self.value) && lines.next().is_none();
        let has_second = self.name != self.replaced && headers.contains_key(&self.replaced);
        is_stored && !has_second && operation.key() == self.key
    }
}

/// Extension of each attempt. A `RetryLayer` that finds it sends the request once.
#[derive(Clone, Copy)]
pub(crate) struct IsAttempt;

/// Extension of a request whose attempt [`IdempotencyKeyLayer`] has counted.
#[derive(Clone, Copy)]
pub(crate) struct IsCounted;

impl Default for IdempotencyKeyLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for IdempotencyKeyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyKeyLayer")
            .field("header", &self.header)
            .field("protocol", &self.protocol)
            .finish_non_exhaustive()
    }
}

impl<S> Layer<S> for IdempotencyKeyLayer {
    type Service = SetIdempotencyKey<S>;

    fn layer(&self, inner: S) -> Self::Service {
        SetIdempotencyKey {
            inner,
            keys: self.clone(),
        }
    }
}

/// Service of [`IdempotencyKeyLayer`].
#[derive(Clone, Debug)]
pub struct SetIdempotencyKey<S> {
    inner: S,
    keys: IdempotencyKeyLayer,
}

impl<S, B> Service<Request<B>> for SetIdempotencyKey<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut req: Request<B>) -> Self::Future {
        let operation = self.keys.set_key_of(&mut req).operation;
        // `RetryLayer` counts its attempts itself.
        if let Some(operation) = operation
            && req.extensions().get::<IsAttempt>().is_none()
        {
            operation.begin_counted_attempt(Instant::now());
            req.extensions_mut().insert(IsCounted);
        }
        self.inner.call(req)
    }
}

/// Returns `true` if the IANA registry lists the method as safe. `Method::is_safe` does not know those of WebDAV, and QUERY only
/// in newer versions of `http`.
pub(crate) fn is_safe(method: &Method) -> bool {
    method.is_safe() || ["QUERY", "PROPFIND", "REPORT", "SEARCH"].contains(&method.as_str())
}
