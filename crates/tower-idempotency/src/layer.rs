//! The layer and its setters.

use std::{fmt, ops::RangeInclusive, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode, request};
use tower_layer::Layer;

use crate::{
    config::Config,
    config::preset::Preset,
    error::{ConfigError, Error},
    execution::Shared,
    execution::rules::{ConcurrentRequests, StoreFailure},
    execution::shared::Engine,
    request::fingerprint::{FingerprintBy, Secret},
    request::key::{IDEMPOTENCY_KEY, KeySyntax},
    request::principal::Principal,
    request::rules::{KeyFrom, KeyReuse, MissingKey},
    response::problem,
    response::rules::{Refusals, Unrecordable},
    service::Idempotency,
    store::{OrphanPolicy, Store, Ttl},
};

/// A [`tower_layer::Layer`] that makes unsafe HTTP requests safe to retry.
///
/// Clones share the store, the lease renewals and the bounds, and each keeps its own decisions: configure one, and
/// derive the route that differs from a clone of it.
///
/// Place it inside CORS, tracing, compression and authentication, and outside body limits and timeouts: replays then
/// pass through what every response must pass through, and a timeout is an outcome of the handler instead of a client
/// that left. Do place a timeout inside: a handler that never ends keeps its lease, and its key, for ever, also when its
/// client has long left.
///
/// A timeout cuts off a handler that may have had its effect already, and by default its answer (408, 503 or 504) is not
/// recorded: the key is freed, the retry executes again, and [`is_takeover`](crate::Lease::is_takeover) does not warn the
/// handler. Where that matters, have the status recorded ([`with_recorded_statuses`](Self::with_recorded_statuses)), or put the timeout into
/// the handler and answer with [`NeedsAttention`](crate::NeedsAttention).
///
/// A concurrency limit outside of it does not bound handlers, since those whose client left go on without its permit. One
/// inside, in the same stack of services, gives its permit before the request body is read, and a duplicate that waits holds
/// one. To bound handlers, take a permit of a semaphore in the handler; to bound requests in flight, whoever has left, use
/// [`with_max_in_flight`](Self::with_max_in_flight).
///
/// In axum, put it on routes with `route_layer`, as here. With `Router::layer` it is also around the answer to paths of no
/// route: a 404 would be recorded, and be the answer for the whole retention, also once a deployment has added the route.
/// The 405 of a route for other methods is still recorded; `post(handler).route_layer(layer)` leaves that out as well.
///
/// Needs a Tokio runtime with time enabled. All leases of a layer are renewed in one task, in the runtime that took the first
/// of them: use a layer and its clones within one runtime, which runs for as long as there are leases. A thread that enters a
/// runtime of its own for each message, for one, gets no renewals in between, and needs a layer and a runtime that stay.
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
/// let without_a_key = Request::post("/reports").body(Body::empty())?;
/// assert_eq!(app.clone().oneshot(without_a_key).await?.status(), 400);
///
/// let nowhere = || Request::post("/nowhere").header("idempotency-key", "8e03978e-40d5").body(Body::empty());
/// assert_eq!(app.clone().oneshot(nowhere()?).await?.status(), 404);
/// let again = app.oneshot(nowhere()?).await?;
/// assert!(again.status() == 404 && !again.headers().contains_key("idempotent-replayed"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct IdempotencyLayer {
    pub(crate) config: Arc<Config>,
    pub(crate) engine: Arc<Engine>,
}

impl IdempotencyLayer {
    /// A layer on `store` with the `recommended` preset.
    pub fn new(store: impl Store) -> Self {
        Self::with_preset(store, Preset::Recommended)
    }

    /// A layer on `store` that starts from a preset; setters change single decisions of it. The defaults that they name
    /// are those of [`Preset::Recommended`].
    pub fn with_preset<S: Store>(store: S, preset: Preset) -> Self {
        let mut config = preset.config();
        config.response.compress_above = S::COMPRESS_ABOVE;
        Self {
            config: Arc::new(config),
            engine: Engine::new(Arc::new(store)),
        }
    }

    fn set(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(Arc::make_mut(&mut self.config));
        self
    }

    // ---- Which requests ----

    /// Protects these methods only. Default: all but GET, HEAD, OPTIONS, TRACE and QUERY.
    ///
    /// HEAD and CONNECT, gRPC and upgrades always pass through. A method that is left out runs on every retry; so do all, if
    /// there are none in the list.
    pub fn with_methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        let methods: Vec<_> = methods.into_iter().collect();
        self.with_methods_where(move |method| methods.contains(method))
    }

    /// Protects the methods for which `protects` is true; see [`with_methods`](Self::with_methods).
    pub fn with_methods_where(
        self,
        protects: impl Fn(&Method) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.request.methods = Arc::new(protects))
    }

    /// Lets requests for which `skip` is true pass through, keyed or not: a kill switch, or routes that need no
    /// protection. Default: none. A predicate that is true too often leaves retries unprotected, silently. Below
    /// `Router::nest`, go by [`original_path_and_query`](crate::original_path_and_query).
    pub fn with_skip(self, skip: impl Fn(&request::Parts) -> bool + Send + Sync + 'static) -> Self {
        self.set(|config| config.request.skip = Some(Arc::new(skip)))
    }

    // ---- The key ----

    /// The header that carries the key. Default: [`IDEMPOTENCY_KEY`]. Several lines of it are answered 400. Under a name
    /// that clients do not send, every request is one without a key: where clients use a header already, keep it as the
    /// [alias](Self::with_header_alias). In place of what [`with_key_from`](Self::with_key_from) has set, if it has.
    pub fn with_header(self, name: HeaderName) -> Self {
        self.set(|config| {
            let alias = match &config.request.key_from {
                KeyFrom::Header { alias, .. } => alias.clone(),
                KeyFrom::Head(_) => None,
            };
            config.request.key_from = KeyFrom::Header { name, alias };
        })
    }

    /// A second header that is looked at when the first is absent; the same key under either name is one key.
    /// Default: none. A header that proxies add, such as a request id, makes a key of what is new on every retry. In place
    /// of what [`with_key_from`](Self::with_key_from) has set, if it has, and then beside [`IDEMPOTENCY_KEY`].
    pub fn with_header_alias(self, alias: HeaderName) -> Self {
        self.set(|config| {
            let name = match &config.request.key_from {
                KeyFrom::Header { name, .. } => name.clone(),
                KeyFrom::Head(_) => IDEMPOTENCY_KEY,
            };
            config.request.key_from = KeyFrom::Header {
                name,
                alias: Some(alias),
            };
        })
    }

    /// Takes the key from the request head instead of a header: an entity key such as `payment-1234-refund`, or a
    /// webhook's event id. `None` is a missing key. Length limits apply, the key syntax does not. A key that names more
    /// than one operation makes all but the first of them replays or mismatches. A change forgets the records of the requests
    /// that it gives another key. In place of the header and its alias, which
    /// are not looked at any more. Below `Router::nest`, go by
    /// [`original_path_and_query`](crate::original_path_and_query).
    pub fn with_key_from(
        self,
        key: impl Fn(&request::Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.request.key_from = KeyFrom::Head(Arc::new(key)))
    }

    /// How the header value is read. Default: [`KeySyntax::Lenient`]. A change makes clients' present keys other keys.
    pub fn with_key_syntax(self, syntax: KeySyntax) -> Self {
        self.set(|config| config.request.key_rules.syntax = syntax)
    }

    /// The length of the decoded key in bytes. Default: `1..=255`. An empty key is refused whatever the range says;
    /// a range that is too narrow refuses honest keys with 400, one that is empty all of them.
    pub fn with_key_length(self, length: RangeInclusive<usize>) -> Self {
        self.set(|config| {
            config.request.key_rules.min = *length.start();
            config.request.key_rules.max = *length.end();
        })
    }

    /// A form that keys must have besides their syntax, such as being a UUID; others are answered 400 `malformed-key`.
    /// Default: none.
    pub fn with_key_check(self, check: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.set(|config| config.request.key_check = Some(Arc::new(check)))
    }

    /// What to do without a key. Default: [`MissingKey::PassThrough`], which leaves clients that send none unprotected.
    pub fn with_missing_key(self, missing: MissingKey) -> Self {
        self.set(|config| config.request.missing_key = missing)
    }

    // ---- Scope and fingerprint ----

    /// A prefix of every entry's scope, for services that share one store. Default: empty. Two services with the same
    /// namespace, principal and key meet each other's records; a change forgets all records.
    pub fn with_namespace(self, namespace: impl Into<Arc<str>>) -> Self {
        let namespace = namespace.into();
        self.set(|config| config.request.namespace = namespace)
    }

    /// Keys every digest that reaches the store (HMAC-SHA-256), so that nobody who reads the store can test guesses at
    /// keys, principals or bodies. Default: none, plain SHA-256. A change forgets all records.
    ///
    /// # Errors
    ///
    /// When the secret is shorter than 16 bytes.
    pub fn with_secret(self, secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        let secret = Secret::new(secret.as_ref())?;
        Ok(self.set(|config| config.request.secret = Some(secret)))
    }

    /// Who is asking. Default: [`Principal::authorization`]. A principal that callers share lets them meet each other's
    /// answers; one that changes between retries, as a refreshed token does, makes a retry execute again. A change forgets all
    /// records.
    pub fn with_principal(self, principal: Principal) -> Self {
        self.set(|config| config.request.principal = principal)
    }

    /// What makes a request the same request. Default: [`FingerprintBy::raw_body`]. Too little, and a client's mistake
    /// is answered with the wrong response; too much, and an honest retry is answered 422.
    ///
    /// So it is after a change: what another process has recorded, executes or left behind under another fingerprint is refused to
    /// its own retries until it is forgotten, and a client that then takes a new key has it done twice.
    pub fn with_fingerprint(self, by: FingerprintBy) -> Self {
        self.set(|config| config.request.fingerprint = by.0)
    }

    /// What to do when a key comes back with another request. Default: refuse it with 422. With
    /// [`KeyReuse::Separate`], a retry that differs in one byte is executed. A change from or to that forgets all records.
    ///
    /// # Errors
    ///
    /// When the status of [`KeyReuse::Refuse`] is none of 4xx: clients would take a refusal for an answer, or try again.
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

    // ---- Concurrent requests ----

    /// What to answer while the first request is still being executed. Default: [`ConcurrentRequests::Conflict`]. A long wait
    /// holds connections and memory for as long as a slow handler takes; see [`with_max_waiters`](Self::with_max_waiters).
    pub fn with_concurrent_requests(self, concurrent_requests: ConcurrentRequests) -> Self {
        self.set(|config| config.execution.concurrent_requests = concurrent_requests)
    }

    /// What refusals that pass with time say in `Retry-After`, in whole seconds rounded up; those for a body that did not
    /// arrive (`body-timeout`, `body-unreadable`) or a record that cannot be read have none. Default: 1 s. Too short, and
    /// clients hammer the service while it is busy.
    pub fn with_retry_after(self, after: Duration) -> Self {
        self.set(|config| config.response.retry_after = after)
    }

    /// How many requests may wait with [`ConcurrentRequests::Wait`], for one key and in total; more are answered at once.
    /// Default: 64 and 1,024. Each holds its connection and its request body.
    pub fn with_max_waiters(self, per_key: usize, total: usize) -> Self {
        self.set(|config| {
            config.execution.waiters_per_key = per_key;
            config.execution.waiters = total;
        })
    }

    // ---- Lease and store ----

    /// How long a lease lasts unless it is renewed, which happens every third of it. Default: 15 s.
    ///
    /// Too short, and a pause of the process or a slow store loses it, which costs a second execution; too long, and a
    /// key stays blocked for as long after a crash. Below a second is for tests. However long it is, it is renewed for
    /// as long as the handler runs, if that is for ever.
    pub fn with_lease_ttl(self, lease: Ttl) -> Self {
        self.set(|config| config.execution.lease = lease)
    }

    /// What becomes of a key whose execution ended without an outcome, as after a crash. Default:
    /// [`OrphanPolicy::TakeOver`], at-least-once: the effect may happen twice. [`OrphanPolicy::Refuse`] is at-most-once:
    /// the key answers 409 until the orphan is forgotten, and somebody has to find out what happened. Who asks decides: while one
    /// process on the store takes over, orphans are executed again.
    pub fn with_orphan_policy(self, policy: OrphanPolicy) -> Self {
        self.set(|config| config.execution.orphans = policy)
    }

    /// How long an orphan is remembered, anew from the end of each attempt to execute it again: one that a completer tries
    /// sooner each time is never forgotten. Default: the retention. Under [`OrphanPolicy::Refuse`] a retry after this
    /// executes again; so it does when this is shorter than clients go on retrying.
    pub fn with_orphan_retention(self, keep: Ttl) -> Self {
        self.set(|config| config.execution.orphan_retention = Some(keep))
    }

    /// How long one store call may take; an acquire, a completion or a release is tried at most three times within twice
    /// this, and a renewal may take a third of the lease at most. An answer waits for one of them, or for up to three where the
    /// lease was lost or a commit is in doubt, and for one more where its record is too large for the store. Default: 2 s. Too
    /// short, and a slow store is an outage; too long, and an outage is a pile of waiting requests.
    pub fn with_store_timeout(self, timeout: Duration) -> Self {
        self.set(|config| config.execution.store_timeout = timeout)
    }

    /// What to do when no lease can be taken because the store fails. Default: [`StoreFailure::Refuse`], so that an outage
    /// of the store is one of the service. Does not apply to [`run_once`](Self::run_once), which always refuses.
    pub fn with_store_failure(self, failure: StoreFailure) -> Self {
        self.set(|config| config.execution.store_failure = failure)
    }

    // ---- Bodies ----

    /// The largest body in bytes of a request under a key; a larger one is answered 413, unread where it announces its
    /// length, and else read no further than the limit. Default: 2 MiB, as axum's own: to take more, raise axum's
    /// `DefaultBodyLimit` as well, which bounds extractors whatever is set here. Every request in flight may hold as much in
    /// memory. Does not apply with [`FingerprintBy::head_only`].
    pub fn with_request_limit(self, bytes: usize) -> Self {
        self.set(|config| config.request.body_limit = bytes)
    }

    /// How long the request body may take to arrive, else 408. Default: 30 s. Too short, and clients on slow networks are
    /// never served; too long, and they hold places among the requests in flight. Does not apply with
    /// [`FingerprintBy::head_only`].
    pub fn with_body_timeout(self, timeout: Duration) -> Self {
        self.set(|config| config.request.body_timeout = timeout)
    }

    /// The largest response body in bytes that is recorded. Default: 4 MiB. See
    /// [`with_unrecordable`](Self::with_unrecordable) for larger ones. Too low, and retries are told that there was an answer
    /// instead of which; every response in flight may hold as much in memory. Of a record that was stored deflated under a
    /// higher limit no more is read than this limit and 1 MiB, or 16 MiB if that is more: beyond it, retries are answered 503
    /// `store-unavailable` until its retention is over.
    pub fn with_response_limit(self, bytes: usize) -> Self {
        self.set(|config| config.response.body_limit = bytes)
    }

    /// How long a response of unknown length is collected before it counts as streamed, and how long one that told its
    /// length may stall. Default: 10 s. The client sees nothing of it before: too long, and streams seem to hang; too
    /// short, and slow answers are not recorded.
    pub fn with_collect_timeout(self, timeout: Duration) -> Self {
        self.set(|config| config.response.collect_timeout = timeout)
    }

    /// How many requests may be in flight, and how many bytes of bodies they may buffer, in this layer and all its
    /// clones; more are answered 503 `overloaded`. Default: 10,000 and 256 MiB.
    ///
    /// A quarter of the bytes is for responses alone. One that does not fit in what is left is treated as too large. What was
    /// collected of a response of unknown length, or in pieces, counts until it is sent, also when nothing is in flight. Of such
    /// responses there may be half of the bytes, and half of that quarter stays free of them: clients that read slowly, or not
    /// at all, leave a quarter of the bytes to requests, and have no response treated as too large but further ones like theirs.
    ///
    /// Too low, and the service refuses what it could serve, every body above three quarters of it among that, and with 0 requests
    /// all; higher than the memory there is, and it is killed for it. Requests that wait count too. Leases that are given back
    /// after the store failed count apart, up to the same number.
    pub fn with_max_in_flight(self, requests: usize, bytes: usize) -> Self {
        self.set(|config| {
            config.limits.max_in_flight = requests;
            config.limits.max_buffered = bytes;
        })
    }

    // ---- Records ----

    /// Which statuses are recorded; others free the key. Default: 2xx, 3xx, and 4xx but 401, 403, 407, 408, 421, 423,
    /// 424, 425 and 429. Record passing failures, and they are replayed for the whole retention.
    pub fn with_recorded_statuses(
        self,
        recorded: impl Fn(StatusCode) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.response.recorded = Arc::new(recorded))
    }

    /// What to do about responses that are too large or streamed. Default: [`Unrecordable::Tombstone`]. With
    /// [`Unrecordable::Release`] the effects behind them happen again on every retry. Too large is also what finds
    /// [no room](Self::with_max_in_flight), as streamed responses do while clients leave others unread.
    pub fn with_unrecordable(self, unrecordable: Unrecordable) -> Self {
        self.set(|config| config.response.unrecordable = unrecordable)
    }

    /// How long records live unless the handler says otherwise. Default: 24 h. A retry that comes later executes again.
    pub fn with_retention(self, retention: Ttl) -> Self {
        self.set(|config| config.response.retention = retention)
    }

    /// The longest a handler can ask for. Default: 365 days. It does not cap the default retention. Too long, and one
    /// handler's mistake fills the store.
    pub fn with_max_retention(self, retention: Ttl) -> Self {
        self.set(|config| config.response.max_retention = retention)
    }

    /// Which response headers and trailers are replayed. Default: [`replayed_by_default`](crate::replayed_by_default); build
    /// on it:
    ///
    /// ```
    /// use http::header::SET_COOKIE;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, replayed_by_default};
    ///
    /// let layer = IdempotencyLayer::new(MemoryStore::new())
    ///     .with_replayed_headers(|name| name == SET_COOKIE || replayed_by_default(name));
    /// ```
    ///
    /// Hop-by-hop fields, `Content-Length` and the control headers never are. A header that belongs to one exchange, a
    /// session cookie above all, reaches whoever retries. A value that is marked as sensitive is so in a replay, too. The
    /// extensions of a response are not replayed, and so a reason phrase of its own, which hyper has among them, is not either.
    pub fn with_replayed_headers(
        self,
        replayed: impl Fn(&HeaderName) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.response.replayed = Arc::new(replayed))
    }

    /// The header that marks replays, or none. Default: [`IDEMPOTENT_REPLAYED`](crate::IDEMPOTENT_REPLAYED) of `true`. It
    /// replaces a header of that name in the recorded response; without one, clients cannot tell a replay.
    pub fn with_replay_marker(self, marker: Option<(HeaderName, HeaderValue)>) -> Self {
        self.set(|config| config.response.replay_marker = marker)
    }

    /// Records larger than this many bytes are compressed. Default: [what the store says](Store::COMPRESS_ABOVE). In memory
    /// and in SQLite that is 8 KiB, since deflating 1 KiB of JSON takes ten times as long as keeping it; in Redis, PostgreSQL
    /// and MySQL it is 1 KiB, which saves about two thirds of most records; in DynamoDB, 512 bytes. `usize::MAX` compresses none, and then a store that charges for
    /// bytes charges for all of them.
    pub fn with_compression_above(self, bytes: usize) -> Self {
        self.set(|config| config.response.compress_above = bytes)
    }

    // ---- Refusals ----

    /// Renders every refusal. Default: `application/problem+json` (RFC 9457). Status and headers of what it returns are
    /// answered as they are.
    pub fn with_error_response(
        self,
        render: impl Fn(&Error) -> Response<Bytes> + Send + Sync + 'static,
    ) -> Self {
        self.set(|config| config.response.refusals = Refusals::Custom(Arc::new(render)))
    }

    /// Answers refusals as problem+json whose `Link: <url>; rel="describedby"` leads to your own documentation.
    /// Default: the draft that defines the header. Replaces [`with_error_response`](Self::with_error_response) and the preset's shape.
    ///
    /// # Errors
    ///
    /// When the URL cannot stand in a header.
    pub fn with_described_by(self, url: &str) -> Result<Self, ConfigError> {
        let described_by = problem::described_by(url).ok_or_else(|| {
            ConfigError::new(
                "a URL of visible ASCII without angle brackets",
                "another".to_owned(),
            )
        })?;
        Ok(self.set(|config| config.response.refusals = Refusals::ProblemJson { described_by }))
    }

    // ---- Shutting down ----

    /// Refuses new keyed requests with 503 `draining` and waits for those in flight, also those whose clients left, for
    /// at most `timeout`. True when all have ended, `run_once` included.
    ///
    /// All clones of the layer drain with it, and for good; a layer of its own, though on the same store, needs a drain of
    /// its own. Requests that pass through are neither refused nor waited for: those without a key under
    /// [`MissingKey::PassThrough`], for example.
    ///
    /// Call it after the server's graceful shutdown: exchanges whose clients left run in tasks that the server does not
    /// know of. What is still running when it returns false keeps its leases until they expire.
    ///
    /// ```no_run
    /// use std::{io, pin::pin, sync::Arc, time::Duration};
    ///
    /// use axum::Router;
    /// use tokio::{net::TcpListener, sync::Notify, time::timeout};
    /// use tower_idempotency::IdempotencyLayer;
    ///
    /// /// Serves `app`, which is behind `layer`, until `asked_to_stop` resolves, as when a SIGTERM comes. True when
    /// /// everything that had begun has ended.
    /// async fn serve(app: Router, layer: IdempotencyLayer, asked_to_stop: impl Future<Output = ()>) -> io::Result<bool> {
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
    ///         () = asked_to_stop => {}
    ///     }
    ///     stop.notify_one();
    ///     // A connection that never ends is not waited for any longer.
    ///     let closed = timeout(GRACE, server).await.is_ok();
    ///     let ended = layer.drain(GRACE).await;
    ///     Ok(closed && ended)
    /// }
    /// ```
    ///
    /// # Cancellation
    ///
    /// Dropping the future stops the waiting; requests are refused all the same.
    pub async fn drain(&self, timeout: Duration) -> bool {
        self.engine.limits.drain();
        tokio::time::timeout(timeout, self.engine.limits.idle())
            .await
            .is_ok()
    }

    /// How many exchanges are in flight, in this layer and all its clones, and how many leases are being given back after
    /// requests that were refused: all that [`drain`](Self::drain) waits for.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.engine.limits.in_flight()
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Idempotency<S> {
        let shared = Shared {
            config: Arc::clone(&self.config),
            engine: Arc::clone(&self.engine),
        };
        Idempotency::new(inner, Arc::new(shared))
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
