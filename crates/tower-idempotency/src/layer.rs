//! The layer, its setters and its shutdown.

use std::{fmt, ops::RangeInclusive, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode, request};
use tower_layer::Layer;

#[cfg(feature = "rate")]
use crate::rate::FreshKeyRate;
#[cfg(feature = "rate")]
use std::num::NonZeroU32;

use crate::{
    config::Config,
    config::preset::Preset,
    digest::Secret,
    error::{ConfigError, Error},
    execution::rules::{ConcurrentRequests, ExecutionFailure, StoreFailure},
    execution::shared::{Context, Shared},
    request::fingerprint::FingerprintBy,
    request::key::{IDEMPOTENCY_KEY, KeySyntax},
    request::principal::Principal,
    request::rules::{KeyFrom, KeyReuse, KeyScope, MissingKey},
    response::problem,
    response::rules::{ErrorResponse, Unrecordable},
    service::Idempotency,
    store::{OrphanPolicy, Store, Ttl},
};

/// A [`tower_layer::Layer`] that makes unsafe HTTP requests safe to retry.
///
/// Clones share the store, the lease renewals and the limits. Each clone has its own settings: if one route needs another
/// setting, change it on a clone of the layer.
///
/// # Placement
///
/// Place the layer inside CORS, tracing, compression and authentication, and outside body limits and timeouts. Replays then
/// pass through the same layers as other responses, and a timeout is an outcome of the handler instead of a disconnect.
///
/// In axum, add it with `route_layer`, as in the example. `Router::layer` also wraps the 404 responses for unknown paths.
/// Such a 404 would be recorded and replayed for the complete retention, even if a later deployment adds the route. The 405
/// of a route for other methods is still recorded; `post(handler).route_layer(layer)` avoids that too.
///
/// # Timeouts
///
/// Place a timeout inside the layer. A handler that never finishes keeps its lease, which blocks the key, even after its
/// client has disconnected.
///
/// A timeout may stop a handler that has already had its effect. By default its response (408, 503 or 504) is not recorded:
/// the key is released, a retry executes again, and [`is_takeover`](crate::Lease::is_takeover) is `false`. To prevent that,
/// record the status ([`with_recorded_statuses`](Self::with_recorded_statuses)), or put the timeout into the handler and
/// respond with [`NeedsAttention`](crate::NeedsAttention).
///
/// # Concurrency limits
///
/// - A concurrency limit outside this layer does not limit handlers: a handler continues without a permit after its client
///   has disconnected.
/// - A concurrency limit inside this layer, in the same stack of services, acquires its permit before the request body is
///   read. A duplicate that waits holds a permit too.
/// - A semaphore in the handler limits handlers.
/// - [`with_max_in_flight`](Self::with_max_in_flight) limits requests in flight, including those of disconnected clients.
///
/// # Runtime
///
/// The layer needs a Tokio runtime with time enabled. One task renews all leases of a layer, in the runtime that acquired the
/// first one. Use a layer and its clones within one runtime that runs as long as there are leases.
///
/// Do not create a runtime for each message, for example in a consumer thread: leases are not renewed between two messages.
///
/// # Examples
///
/// ```
/// use axum::{Router, body::Body, http::Request, routing::post};
/// use tower::ServiceExt;
/// use tower_idempotency::{IdempotencyLayer, ConcurrentRequests, MemoryStore, MissingKey};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = IdempotencyLayer::new(MemoryStore::new()).with_missing_key(MissingKey::Reject);
/// let app: Router = Router::new()
///     .route("/payments", post(async || "paid"))
///     .route_layer(layer.clone())
///     .merge(
///         Router::new()
///             .route("/reports", post(async || "reported"))
///             .route_layer(layer.with_concurrent_requests(ConcurrentRequests::TooManyRequests)),
///     );
///
/// let without_key = Request::post("/reports").body(Body::empty())?;
/// assert_eq!(app.clone().oneshot(without_key).await?.status(), 400);
///
/// let unknown = || Request::post("/unknown").header("idempotency-key", "8e03978e-40d5").body(Body::empty());
/// assert_eq!(app.clone().oneshot(unknown()?).await?.status(), 404);
/// let retry = app.oneshot(unknown()?).await?;
/// assert!(retry.status() == 404 && !retry.headers().contains_key("idempotent-replayed"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct IdempotencyLayer {
    pub(crate) config: Arc<Config>,
    pub(crate) shared: Arc<Shared>,
}

/// Constructors.
impl IdempotencyLayer {
    /// Creates a layer on `store` with the settings of [`Preset::Recommended`].
    pub fn new(store: impl Store) -> Self {
        Self::with_preset(store, Preset::Recommended)
    }

    /// Creates a layer on `store` with the settings of `preset`.
    ///
    /// The setters change single settings. The defaults in their documentation are those of [`Preset::Recommended`].
    pub fn with_preset<S: Store>(store: S, preset: Preset) -> Self {
        let mut config = preset.config();
        config.response.compress_above = S::COMPRESS_ABOVE;
        Self {
            config: Arc::new(config),
            shared: Shared::new(Arc::new(store)),
        }
    }

    fn set(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(Arc::make_mut(&mut self.config));
        self
    }
}

/// Requests that the layer covers.
impl IdempotencyLayer {
    /// Sets the methods that the layer covers. Default: all but GET, HEAD, OPTIONS, TRACE and QUERY.
    ///
    /// HEAD always passes through. CONNECT, gRPC and upgrades to another protocol pass through only if keys are optional: with
    /// [`MissingKey::PassThrough`] and a key from a header. gRPC is HTTP/2 with the media type `application/grpc` or
    /// `application/grpc+..`, but not `+json`. An upgrade is HTTP/1.1 with `Connection: upgrade`.
    ///
    /// If keys are required, put gRPC services and tunnels on routes without the layer, or exclude them with
    /// [`with_skip`](Self::with_skip). The layer reads a request body to its end, which such a stream does not have.
    ///
    /// The layer counts requests with a key that pass through in `idempotency_passed_through_total`.
    ///
    /// If a method is missing, requests with it execute on every retry. An empty list disables all protection.
    pub fn with_methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        let methods: Vec<_> = methods.into_iter().collect();
        self.with_methods_where(move |method| methods.contains(method))
    }

    /// Sets the predicate that returns `true` for the methods that the layer covers. Default: see
    /// [`with_methods`](Self::with_methods).
    ///
    /// If it returns `false` for an unsafe method, requests with that method execute on every retry.
    pub fn with_methods_where(
        self,
        is_covered: impl Fn(&Method) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.request.methods = Arc::new(is_covered))
    }

    /// Sets a predicate that returns `true` for requests that pass through, with or without a key. Default: none.
    ///
    /// Use it to disable the layer at run time, or for routes that need no protection. Below `Router::nest`, use the path
    /// from [`original_path_and_query`](crate::original_path_and_query).
    ///
    /// If the predicate returns `true` for too many requests, their retries execute again, without any warning.
    pub fn with_skip(self, skip: impl Fn(&request::Parts) -> bool + Send + Sync + 'static) -> Self {
        self.set(|config| config.request.skip = Some(Arc::new(skip)))
    }
}

/// Key: its source, its form, and requests without one.
impl IdempotencyLayer {
    /// Sets the header that carries the key. Default: [`IDEMPOTENCY_KEY`].
    ///
    /// A request with several lines of this header gets 400. Replaces a source that
    /// [`with_key_from`](Self::with_key_from) has set.
    ///
    /// Requests without this header count as requests without a key. If clients already send another header, set that one
    /// as the [alias](Self::with_header_alias).
    pub fn with_header(self, name: HeaderName) -> Self {
        self.set(|config| {
            let alias = match &config.request.key_from {
                KeyFrom::Header { alias, .. } => alias.clone(),
                KeyFrom::Service { .. } => None,
            };
            config.request.key_from = KeyFrom::Header { name, alias };
        })
    }

    /// Sets a second header, which is read if the first one is absent. Default: none.
    ///
    /// The same value in either header is the same key. Replaces a source that [`with_key_from`](Self::with_key_from) has
    /// set; the first header is then [`IDEMPOTENCY_KEY`].
    ///
    /// Do not use a header that a proxy generates for each attempt, such as a request ID. Every retry would have a new key
    /// and execute again.
    pub fn with_header_alias(self, alias: HeaderName) -> Self {
        self.set(|config| {
            let name = match &config.request.key_from {
                KeyFrom::Header { name, .. } => name.clone(),
                KeyFrom::Service { .. } => IDEMPOTENCY_KEY,
            };
            config.request.key_from = KeyFrom::Header {
                name,
                alias: Some(alias),
            };
        })
    }

    /// Sets a function that returns the key of a request, instead of the header and its alias. Default: none.
    ///
    /// Examples are the key of an entity, such as `payment-1234-refund`, or the event ID of a webhook. `scope` says if a key
    /// names the same operation for all callers, as these do, or another one for each caller. `None` counts as a missing
    /// key. The length limits apply to the key, the key syntax does not. Below `Router::nest`, use the path from
    /// [`original_path_and_query`](crate::original_path_and_query).
    ///
    /// The layer does not record a 4xx response, whatever the [recorded statuses](Self::with_recorded_statuses) are: the
    /// client cannot choose another key for its corrected request. Respond with
    /// [`NeedsAttention`](crate::NeedsAttention) if such a request must not be repeated.
    ///
    /// If two operations get the same key, the second one gets the replay of the first one, or 422. A key of the service
    /// never equals a key that a client sent.
    ///
    /// If you change the function or the scope, requests that get another key no longer find their records and execute
    /// again.
    ///
    /// ```
    /// use tower_idempotency::{IdempotencyLayer, KeyScope, MemoryStore};
    ///
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .with_key_from(KeyScope::AllCallers, |head| Some(format!("{} {}", head.method, head.uri.path())));
    /// ```
    pub fn with_key_from(
        self,
        scope: KeyScope,
        key: impl Fn(&request::Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        let key = Arc::new(key);
        self.set(|config| config.request.key_from = KeyFrom::Service { scope, key })
    }

    /// Sets the syntax of the key header. Default: [`KeySyntax::Lenient`].
    ///
    /// If you change it, the values that clients send become other keys: their retries no longer find the records and
    /// execute again.
    pub fn with_key_syntax(self, syntax: KeySyntax) -> Self {
        self.set(|config| config.request.key_rules.syntax = syntax)
    }

    /// Sets the allowed length of the decoded key in bytes. Default: `1..=255`.
    ///
    /// An empty key gets 400, even if the range contains 0.
    ///
    /// If the range is too narrow, valid keys get 400. If it is empty, all keys do.
    pub fn with_key_length(self, length: RangeInclusive<usize>) -> Self {
        self.set(|config| {
            config.request.key_rules.min = *length.start();
            config.request.key_rules.max = *length.end();
        })
    }

    /// Sets a predicate that keys must satisfy in addition to the syntax, such as being a UUID. Default: none.
    ///
    /// Other keys get 400 `malformed-key`. If the predicate is too strict, valid keys get it too.
    pub fn with_key_check(self, check: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.set(|config| config.request.key_check = Some(Arc::new(check)))
    }

    /// Sets the treatment of requests without a key. Default: [`MissingKey::PassThrough`].
    ///
    /// With the default, requests of clients that send no key execute on every retry.
    pub fn with_missing_key(self, missing: MissingKey) -> Self {
        self.set(|config| config.request.missing_key = missing)
    }
}

/// Fingerprint and principal: which requests are the same request.
impl IdempotencyLayer {
    /// Sets the namespace of the keys, for services that share a store. Default: empty.
    ///
    /// If two services have the same namespace, a request to one of them may get a record of the other one. That requires
    /// the same principal and key.
    ///
    /// If you change it, no record is found any more: retries execute again.
    pub fn with_namespace(self, namespace: impl Into<Arc<str>>) -> Self {
        let namespace = namespace.into();
        self.set(|config| config.request.namespace = namespace)
    }

    /// Sets a secret that keys all digests in the store (HMAC-SHA-256). Default: none, which means plain SHA-256.
    ///
    /// Without the secret, a reader of the store can test guesses of keys, principals and bodies.
    ///
    /// If you change it, no record is found any more: retries execute again.
    ///
    /// # Errors
    ///
    /// Returns an error if the secret is shorter than 16 bytes.
    pub fn with_secret(self, secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        let secret = Secret::new(secret.as_ref())?;
        Ok(self.set(|config| config.request.secret = Some(secret)))
    }

    /// Sets the principal, which separates the keys of different callers. Default: [`Principal::credentials`].
    ///
    /// If several callers share a principal, they may get each other's responses. If the principal changes between
    /// retries, as a refreshed token does, the retry executes again. The layer warns about both if it notices them: about
    /// callers without credentials once, and about a key and content just seen under another principal once a minute.
    ///
    /// If you change it, no record is found any more: retries execute again.
    pub fn with_principal(self, principal: Principal) -> Self {
        self.set(|config| config.request.principal = principal)
    }

    /// Sets if the host of the request is a part of the scope of its key. Default: `false`.
    ///
    /// Set it if one process serves several hosts with separate data, such as one host for each tenant. The same key and
    /// request on two hosts are then two requests. Without it, a caller whose credentials are valid on both hosts gets the
    /// response of one host for a request to the other one, unless the fingerprints differ. Anonymous callers of both hosts
    /// share their keys.
    ///
    /// The host is that of the request's URI, or else of the `Host` header, in lower case and without the port. A proxy must
    /// pass it on: nginx sends its own name for the upstream unless it has `proxy_set_header Host $host`. The layer does not
    /// read `X-Forwarded-Host`, since clients can set it. If your proxy sets it, use [`Principal::header`] with it.
    ///
    /// Do not set it if clients retry through another host name of the same service: those retries execute again.
    ///
    /// If you change it, no record is found any more: retries execute again.
    ///
    /// ```
    /// use axum::{Router, body::Body, http::Request, routing::post};
    /// use tower::ServiceExt;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).with_host_in_scope(true);
    /// let app: Router = Router::new().route("/orders", post(async || "created")).route_layer(layer);
    ///
    /// let to = |host| Request::post("/orders").header("idempotency-key", "7").header("host", host).body(Body::empty());
    /// let is_replay = async |host| {
    ///     let res = app.clone().oneshot(to(host)?).await?;
    ///     Ok::<_, Box<dyn std::error::Error>>(res.headers().contains_key("idempotent-replayed"))
    /// };
    /// assert!(!is_replay("a.example").await?);
    /// assert!(is_replay("A.Example:443").await?);
    /// assert!(!is_replay("b.example").await?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_host_in_scope(self, host_in_scope: bool) -> Self {
        self.set(|config| config.request.host_in_scope = host_in_scope)
    }

    /// Sets the parts of a request that form its fingerprint. Default: [`FingerprintBy::raw_body`].
    ///
    /// If it covers too little, a client that reuses a key by mistake gets the wrong response. If it covers too much, a valid
    /// retry gets 422.
    ///
    /// After a change, retries of requests that were recorded, running or orphaned under the old fingerprint get 422 until
    /// those entries expire. A client that then switches to a new key executes the request twice.
    pub fn with_fingerprint(self, by: FingerprintBy) -> Self {
        self.set(|config| config.request.fingerprint = by)
    }

    /// Sets the treatment of a request that reuses the key of another request. Default: [`KeyReuse::Refuse`] with 422.
    ///
    /// With [`KeyReuse::Separate`], a retry that differs in one byte executes again.
    ///
    /// If you change from or to [`KeyReuse::Separate`], no record is found any more: retries execute again.
    ///
    /// # Errors
    ///
    /// Returns an error if the status of [`KeyReuse::Refuse`] is not a 4xx. A client would take another status for the
    /// response of the handler, or would retry.
    pub fn with_key_reuse(self, key_reuse: KeyReuse) -> Result<Self, ConfigError> {
        match key_reuse {
            KeyReuse::Refuse(status) if !status.is_client_error() => {
                Err(ConfigError::new("a status of 4xx", status.as_str().into()))
            }
            KeyReuse::Refuse(_) | KeyReuse::Separate => {
                Ok(self.set(|config| config.request.key_reuse = key_reuse))
            }
        }
    }
}

/// Concurrency: duplicates that arrive while the first request is executed.
impl IdempotencyLayer {
    /// Sets the response to a duplicate that arrives while the first request is executed. Default:
    /// [`ConcurrentRequests::Conflict`].
    ///
    /// A long [`ConcurrentRequests::Wait`] holds connections and memory as long as a slow handler runs. Limit them with
    /// [`with_max_waiters`](Self::with_max_waiters).
    pub fn with_concurrent_requests(self, concurrent_requests: ConcurrentRequests) -> Self {
        self.set(|config| config.execution.concurrent_requests = concurrent_requests)
    }

    /// Sets how many requests may wait with [`ConcurrentRequests::Wait`], for one key and in total. Default: 64 and 1,024
    /// requests.
    ///
    /// Further duplicates get 409 at once. If the numbers are too high, waiting requests use up memory: each one holds its
    /// connection and its body.
    pub fn with_max_waiters(self, per_key: usize, total: usize) -> Self {
        self.set(|config| {
            config.execution.waiters_per_key = per_key;
            config.execution.waiters = total;
        })
    }
}

/// Lease and orphans.
impl IdempotencyLayer {
    /// Sets the duration of a lease. Default: 15 s.
    ///
    /// The layer renews a lease every third of its duration (5 s) as long as the handler runs, even if it never finishes.
    ///
    /// If the lease is too short, a paused process or a slow store loses it, and the request executes twice. If it is too
    /// long, a key stays blocked that long after a crash. Use less than 1 s only in tests.
    pub fn with_lease_ttl(self, ttl: Ttl) -> Self {
        self.set(|config| config.execution.lease_ttl = ttl)
    }

    /// Sets the treatment of orphans: keys whose execution ended without an outcome, for example in a crash. Default:
    /// [`OrphanPolicy::TakeOver`].
    ///
    /// - [`OrphanPolicy::TakeOver`] is at-least-once: a retry executes again, and the effect may happen twice.
    /// - [`OrphanPolicy::Refuse`] is at-most-once: retries get 409 until the orphan expires, and an operator must find out
    ///   what happened. A failed execution leaves an orphan too, unless [`with_failure`](Self::with_failure) changes that.
    ///
    /// The policy of the process that receives the retry applies. Orphans execute again as long as one process on the store
    /// uses [`OrphanPolicy::TakeOver`].
    pub fn with_orphan_policy(self, policy: OrphanPolicy) -> Self {
        self.set(|config| config.execution.orphan_policy = policy)
    }

    /// Sets the state in which a failed execution leaves its key: after a panic of the handler, an error of the inner service,
    /// or a response body that fails. Default: [`ExecutionFailure::Release`], and [`ExecutionFailure::Orphan`] with
    /// [`OrphanPolicy::Refuse`].
    ///
    /// For [`run_once`](Self::run_once) the setting applies to panics only. [`WorkError`](crate::run_once::WorkError) decides
    /// about errors.
    ///
    /// With [`ExecutionFailure::Release`], a handler that fails after its effect has the effect once for each retry. That
    /// includes [`OrphanPolicy::Refuse`]. With the other values, a handler that fails before its effect blocks its key: as
    /// an orphan under [`OrphanPolicy::Refuse`], or until an operator resolves it.
    ///
    /// A response with a status that is not recorded, such as a 500, is no failure: the key is released.
    pub fn with_failure(self, failure: ExecutionFailure) -> Self {
        self.set(|config| config.execution.failure = Some(failure))
    }

    /// Sets how long the layer keeps an orphan. Default: the [retention](Self::with_retention) (24 h).
    ///
    /// Each attempt to execute the orphan restarts the period. An orphan that is retried more often than this never expires.
    ///
    /// If the value is shorter than the time in which clients retry, a late retry executes again, without a takeover. This
    /// applies to [`OrphanPolicy::Refuse`] too.
    pub fn with_orphan_retention(self, retention: Ttl) -> Self {
        self.set(|config| config.execution.orphan_retention = Some(retention))
    }
}

/// Recording: which responses are recorded, and for how long.
impl IdempotencyLayer {
    /// Sets the predicate that returns `true` for the statuses that the layer records. Default: 2xx, 3xx and 4xx, except the
    /// statuses below.
    ///
    /// | status | reason why it is not recorded by default |
    /// |---|---|
    /// | 401, 407 | put right by `Authorization`, `Proxy-Authorization` or another credential |
    /// | 403 | put right by another permission of the caller |
    /// | 406 | put right by `Accept` and the other headers of content negotiation |
    /// | 408, 425, 429 | temporary: the request can succeed later without a change |
    /// | 411, 413, 431 | put right by `Content-Length`, smaller headers, or a higher limit of the service |
    /// | 412, 428 | put right by `If-Match` or `If-Unmodified-Since` |
    /// | 415 | put right by `Content-Encoding`, or by parameters of `Content-Type` |
    /// | 416, 417, 426 | put right by `Range` or `Content-Range`, `Expect`, `Upgrade` |
    /// | 421 | put right by a connection to another server |
    /// | 423, 424 | put right by the header `If`, or by the end of another operation |
    /// | 5xx | the handler failed |
    ///
    /// The fingerprint covers none of these headers: the corrected request is the same request, under the same key. It must
    /// not get the old rejection.
    ///
    /// The layer never records 1xx, 307 and 308, whatever the predicate returns. 307 and 308 ask the client to repeat the
    /// request at another URL, under the same key. 301 and 302 are recorded: they are common responses to a form. A client
    /// that follows one of them with PUT, PATCH or DELETE gets 422 `key-reused` if its method stays the same.
    ///
    /// After a status that is not recorded, the layer releases the key and a retry executes again. If you record the status
    /// of a temporary failure, retries get that failure for the complete retention.
    pub fn with_recorded_statuses(
        self,
        is_recorded: impl Fn(StatusCode) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.response.recorded_statuses = Arc::new(is_recorded))
    }

    /// Sets the treatment of responses that are too large or streamed. Default: [`Unrecordable::Tombstone`].
    ///
    /// A response also counts as too large if it exceeds the rest of the
    /// [byte limit](Self::with_max_buffered). Responses do so while clients of the same caller leave other ones unread.
    ///
    /// With [`Unrecordable::Release`], every retry repeats the effects of such a request.
    pub fn with_unrecordable(self, unrecordable: Unrecordable) -> Self {
        self.set(|config| config.response.unrecordable = unrecordable)
    }

    /// Sets how long records are stored unless the handler specifies it. Default: 24 h.
    ///
    /// If it is shorter than the time in which clients retry, late retries execute again.
    pub fn with_retention(self, retention: Ttl) -> Self {
        self.set(|config| config.response.retention = retention)
    }

    /// Sets the longest retention that a handler can specify. Default: 365 days.
    ///
    /// This does not limit the [default retention](Self::with_retention). If it is too long, one faulty handler can fill the
    /// store.
    pub fn with_max_retention(self, retention: Ttl) -> Self {
        self.set(|config| config.response.max_retention = retention)
    }

    /// Sets the size in bytes above which records are compressed. Default: [`Store::COMPRESS_ABOVE`] of the store.
    ///
    /// | store | bytes | reason |
    /// |---|---|---|
    /// | memory, SQLite | 8 KiB | compressing 1 KiB of JSON takes ten times as long as storing it |
    /// | Redis, PostgreSQL, MySQL | 1 KiB | saves about two thirds of most records |
    /// | DynamoDB | 512 | the service charges for bytes |
    ///
    /// `usize::MAX` disables compression. A store that charges for bytes then charges for all of them.
    pub fn with_compression_above(self, bytes: usize) -> Self {
        self.set(|config| config.response.compress_above = bytes)
    }
}

/// Replay: headers of replayed responses.
impl IdempotencyLayer {
    /// Sets the predicate that returns `true` for the response headers and trailers that are replayed. Default:
    /// [`replayed_by_default`](crate::replayed_by_default).
    ///
    /// Extend the default like this:
    ///
    /// ```
    /// use http::header::SET_COOKIE;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, replayed_by_default};
    ///
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .with_replayed_headers(|name| name == SET_COOKIE || replayed_by_default(name));
    /// ```
    ///
    /// - Hop-by-hop fields, `Content-Length` and the control headers are never replayed.
    /// - A value that is marked as sensitive is marked in the replay too.
    /// - The extensions of a response are not replayed. That includes a custom reason phrase, which hyper stores there.
    ///
    /// If you replay a header that belongs to one response, such as a session cookie, every client that retries the request
    /// gets it.
    pub fn with_replayed_headers(
        self,
        is_replayed: impl Fn(&HeaderName) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.response.replayed_headers = Arc::new(is_replayed))
    }

    /// Sets the header that marks replays, or `None`. Default: [`IDEMPOTENT_REPLAYED`](crate::IDEMPOTENT_REPLAYED) with the
    /// value `true`.
    ///
    /// The marker replaces a header of the same name in the recorded response. Without a marker, clients cannot recognize
    /// replays.
    pub fn with_replay_marker(self, marker: Option<(HeaderName, HeaderValue)>) -> Self {
        self.set(|config| config.response.replay_marker = marker)
    }
}

/// Errors: the form of the responses that the layer itself creates.
impl IdempotencyLayer {
    /// Sets the function that renders errors. Default: `application/problem+json` (RFC 9457).
    ///
    /// The layer sends the status and the headers that the function returns without a change. If they are those of a success,
    /// clients take a request that was not executed for a completed one.
    pub fn with_error_response(
        self,
        render: impl Fn(&Error) -> Response<Bytes> + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.response.error_response = ErrorResponse::Custom(Arc::new(render)))
    }

    /// Sets the documentation that errors link to, as problem+json with `Link: <url>; rel="describedby"`. Default: the draft
    /// that defines the key header.
    ///
    /// Replaces [`with_error_response`](Self::with_error_response) and the error bodies of the preset. Clients of a preset
    /// that expect those bodies then cannot parse the errors.
    ///
    /// # Errors
    ///
    /// Returns an error if a header cannot contain the URL.
    pub fn with_described_by(self, url: &str) -> Result<Self, ConfigError> {
        let described_by = problem::described_by(url).ok_or_else(|| {
            ConfigError::new(
                "a URL of visible ASCII without angle brackets",
                "another".to_owned(),
            )
        })?;
        Ok(self.set(|config| {
            config.response.error_response = ErrorResponse::ProblemJson { described_by }
        }))
    }

    /// Sets the value of `Retry-After` in errors that are temporary, in whole seconds rounded up. Default: 1 s.
    ///
    /// Errors about a body that did not arrive (`body-timeout`, `body-unreadable`) and about an unreadable record have no
    /// `Retry-After`.
    ///
    /// If it is too short, the retries of clients overload a service that is already busy.
    pub fn with_retry_after(self, after: Duration) -> Self {
        self.set(|config| config.response.retry_after = after)
    }
}

/// Store: timeouts and outages.
impl IdempotencyLayer {
    /// Sets the timeout of one store call. Default: 2 s.
    ///
    /// The layer tries to acquire, complete or release at most three times, in at most 4 s (2 x timeout). A renewal takes at
    /// most a third of the lease.
    ///
    /// | the response is delayed by at most | if |
    /// |---|---|
    /// | 4 s (2 x timeout) | the layer stores the record or releases the key |
    /// | 12 s (6 x timeout) | the lease is lost, or a commit of the handler is unacknowledged |
    /// | 4 s more | the store rejects the record as too large |
    ///
    /// If the timeout is too short, a slow store counts as an outage. If it is too long, requests pile up during an outage.
    pub fn with_store_timeout(self, timeout: Duration) -> Self {
        self.set(|config| config.execution.store_timeout = timeout)
    }

    /// Sets the treatment of requests that get no lease because the store fails. Default: [`StoreFailure::Refuse`].
    ///
    /// With the default, an outage of the store is an outage of the covered routes. With
    /// [`StoreFailure::DangerouslyExecuteUnprotected`], retries during an outage execute again. The setting does not apply to
    /// [`run_once`](Self::run_once), which always returns an error.
    pub fn with_store_failure(self, failure: StoreFailure) -> Self {
        self.set(|config| config.execution.store_failure = failure)
    }
}

/// Limits: bodies, requests in flight and buffered bytes.
impl IdempotencyLayer {
    /// Sets the size in bytes of the largest request body. Default: 2 MiB, like axum.
    ///
    /// Applies to requests with a key. Larger bodies get 413. The layer does not read a body whose announced length exceeds
    /// the limit, and reads no other body beyond it. Does not apply with [`FingerprintBy::head_only`].
    ///
    /// If you raise the limit, also raise axum's `DefaultBodyLimit`, which limits extractors independently. If the limit is
    /// too high, requests in flight use up memory: each may hold that many bytes.
    pub fn with_request_limit(self, bytes: usize) -> Self {
        self.set(|config| config.request.body_limit = bytes)
    }

    /// Sets how long the layer waits for the complete request body. Default: 30 s.
    ///
    /// After that, the request gets 408. Does not apply with [`FingerprintBy::head_only`].
    ///
    /// If it is too short, clients with slow connections always get 408. If it is too long, they hold permits for
    /// [requests in flight](Self::with_max_in_flight).
    pub fn with_body_timeout(self, timeout: Duration) -> Self {
        self.set(|config| config.request.body_timeout = timeout)
    }

    /// Sets the size in bytes of the largest response body that is recorded. Default: 4 MiB.
    ///
    /// Larger responses are treated according to [`with_unrecordable`](Self::with_unrecordable).
    ///
    /// If the limit is too low, retries of completed requests get an error instead of the response. If it is too high,
    /// requests in flight use up memory: each may hold that many bytes.
    ///
    /// The limit also applies to compressed records. They may inflate to the limit + 1 MiB, or to 16 MiB if that is more.
    /// Retries of a larger record, stored under a higher limit, get 503 `store-unavailable` until it expires.
    pub fn with_response_limit(self, bytes: usize) -> Self {
        self.set(|config| config.response.body_limit = bytes)
    }

    /// Sets how long the layer buffers a response before it counts as streamed. Default: 10 s.
    ///
    /// The timeout limits the total time for a response of unknown length, and each stall of one of known length.
    ///
    /// The client receives nothing during this time. If it is too long, streams seem to hang. If it is too short, slow
    /// responses are not recorded.
    pub fn with_collect_timeout(self, timeout: Duration) -> Self {
        self.set(|config| config.response.collect_timeout = timeout)
    }

    /// Sets how many requests may arrive, and how many may be executed, at the same time. Default: 10,000 each.
    ///
    /// A request arrives while its body is read, while it acquires its lease and while it waits for another one. Replays and
    /// rejected duplicates only arrive. An execution counts until it ends, also after its client has disconnected. If
    /// more than half of the executions are those of disconnected clients of one caller, this caller gets no new ones.
    ///
    /// The limits apply to this layer and all its clones, and every caller has a share in each limit:
    /// - A caller that holds at most an eighth can use all of it.
    /// - A caller that holds more leaves the last quarter to the others. It gets 429 `caller-limit`.
    /// - If the limit is used up, all callers get 503 `overloaded`.
    ///
    /// The [principal](Self::with_principal) identifies a caller. All requests without a principal count as one caller, and
    /// so do all executions by [`run_once`](Self::run_once). Place the layer inside the
    /// authentication: a client that can choose its principal can take any number of shares.
    ///
    /// Releases of leases after a store failure count separately, up to the same number.
    ///
    /// If the limit is too low, the layer rejects requests that the service could serve; with 0, it rejects all. If it is too
    /// high, requests use up memory during a burst.
    pub fn with_max_in_flight(self, requests: usize) -> Self {
        self.set(|config| config.limits.max_in_flight = requests)
    }

    /// Sets how many fresh keys each caller may send per second, and how many at once after a pause. Default: no limit.
    ///
    /// A key is fresh if its request is executed and is no takeover. Replays and other duplicates are not limited, and
    /// neither are [`run_once`](Self::run_once) and [`take_over`](Self::take_over). A request beyond the rate gets 429
    /// `caller-limit` with `Retry-After`; nothing is executed or recorded. The rate applies to this process.
    ///
    /// If the rate is too low, bursts of honest callers are slowed down.
    #[cfg(feature = "rate")]
    pub fn with_fresh_key_rate(self, per_second: NonZeroU32, burst: NonZeroU32) -> Self {
        let rate = Arc::new(FreshKeyRate::new(per_second, burst));
        self.set(|config| config.limits.fresh_keys = Some(rate))
    }

    /// Sets how many bytes of request bodies and of response bodies the layer may hold. Default: 128 MiB each.
    ///
    /// - A request body counts until the handler has dropped it. A request that exceeds the limit gets 503 `overloaded`.
    /// - A response body counts until the client has read it, also if it is a replay. A first response that exceeds the limit
    ///   counts as too large ([`with_unrecordable`](Self::with_unrecordable)). A replay that exceeds it is not sent, and the
    ///   client gets 503 `overloaded`. Replays of one record share their bytes.
    ///
    /// Bodies of at most 8 KiB do not count. If the limit is below 8 MiB, the bound is 1/1024 of it. The limits apply to this layer and all its clones. Callers
    /// have shares in them like in [`with_max_in_flight`](Self::with_max_in_flight), so that slow clients of one caller affect
    /// no other caller.
    ///
    /// If a limit is too low, the layer rejects requests, or does not record responses, that the service could serve. That
    /// includes every body above 3/4 of the limit. If the limits exceed the available memory, the system may kill the
    /// process.
    pub fn with_max_buffered(self, request_bytes: usize, response_bytes: usize) -> Self {
        self.set(|config| {
            config.limits.max_request_bytes = request_bytes;
            config.limits.max_response_bytes = response_bytes;
        })
    }
}

/// Shutdown.
impl IdempotencyLayer {
    /// Rejects new requests and waits until those in flight have finished. Returns `true` if they finish within `timeout`.
    ///
    /// New requests with a key get 503 `draining`. The requests in flight include those of disconnected clients and
    /// [`run_once`](Self::run_once). Requests that pass through, such as those without a key under
    /// [`MissingKey::PassThrough`], are neither rejected nor waited for.
    ///
    /// All clones of the layer drain together, permanently. Another layer on the same store must be drained separately.
    ///
    /// Call this after the graceful shutdown of the server: the server does not know the tasks in which executions of
    /// disconnected clients continue. If this returns `false`, the remaining executions keep their leases until they expire.
    ///
    /// ```no_run
    /// use std::{io, pin::pin, sync::Arc, time::Duration};
    ///
    /// use axum::Router;
    /// use tokio::{net::TcpListener, sync::Notify, time::timeout};
    /// use tower_idempotency::IdempotencyLayer;
    ///
    /// /// Serves `app`, which `layer` wraps, until `shutdown` resolves, for example on a SIGTERM. Returns `true` if all
    /// /// connections and executions have finished.
    /// async fn serve(app: Router, layer: IdempotencyLayer, shutdown: impl Future<Output = ()>) -> io::Result<bool> {
    ///     const GRACE: Duration = Duration::from_secs(30);
    ///     let listener = TcpListener::bind("127.0.0.1:3000").await?;
    ///     let stop = Arc::new(Notify::new());
    ///     let stopped = Arc::clone(&stop);
    ///     let server = axum::serve(listener, app)
    ///         .with_graceful_shutdown(async move { stopped.notified().await })
    ///         .into_future();
    ///     let mut server = pin!(server);
    ///     tokio::select! {
    ///         served = &mut server => return served.map(|()| false),
    ///         () = shutdown => {}
    ///     }
    ///     stop.notify_one();
    ///     // Do not wait longer for a connection that never closes.
    ///     let closed = timeout(GRACE, server).await.is_ok();
    ///     let drained = layer.drain(GRACE).await;
    ///     Ok(closed && drained)
    /// }
    /// ```
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the layer continues to reject requests.
    pub async fn drain(&self, timeout: Duration) -> bool {
        self.shared.limits.drain();
        tokio::time::timeout(timeout, self.shared.limits.idle())
            .await
            .is_ok()
    }

    /// Returns the number of requests in flight, in this layer and all its clones.
    ///
    /// Includes leases that are being released after their requests were rejected: [`drain`](Self::drain) waits for all of
    /// these.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.limits.in_flight()
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Idempotency<S> {
        let context = Context {
            config: Arc::clone(&self.config),
            shared: Arc::clone(&self.shared),
        };
        Idempotency::new(inner, Arc::new(context))
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
