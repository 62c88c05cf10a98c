//! The layer that retries.

use std::{fmt, sync::Arc, time::Duration};

use tower_layer::Layer;

use crate::{
    backoff::{Backoff, Jitter},
    budget::Budget,
    copy::CloneBody,
    keys::IdempotencyKeyLayer,
    service::Retry,
    settings::Settings,
    verdict::{Attempt, Verdict},
};

/// Sends requests again under the same key, until the outcome is known or a limit is reached.
///
/// The layer includes [`IdempotencyKeyLayer`]. It wraps any client that is a Tower service of HTTP requests and can be
/// cloned.
///
/// ```
/// use bytes::Bytes;
/// use http::{Request, Response, StatusCode};
/// use http_body_util::Full;
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
/// use tower_idempotency_client::{Operation, Outcome, RetryLayer};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), tower_idempotency_client::Error> {
/// // A server that is overloaded for one attempt.
/// # let attempts = std::sync::Arc::new(std::sync::atomic::AtomicU16::new(0));
/// # let server = service_fn(move |req: Request<Full<Bytes>>| {
/// #     assert!(req.headers().contains_key("idempotency-key"));
/// #     let attempt = attempts.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
/// #     let status = if attempt == 0 { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::CREATED };
/// #     let mut response = Response::new(Full::<Bytes>::default());
/// #     *response.status_mut() = status;
/// #     async { Ok::<_, std::convert::Infallible>(response) }
/// # });
/// let client = ServiceBuilder::new().layer(RetryLayer::new()).service(server);
///
/// let operation = Operation::new();
/// let order = Request::post("https://api.example.com/orders")
///     .extension(operation.clone())
///     .body(Full::from("one espresso"))
///     .unwrap();
/// let response = client.oneshot(order).await?;
/// assert_eq!(response.status(), StatusCode::CREATED);
/// assert_eq!(operation.attempts(), 2);
/// assert_eq!(operation.outcome(), Outcome::Definite);
/// # Ok(())
/// # }
/// ```
///
/// # Retries
///
/// A response is judged by its code, by the [protocol](crate::Protocol) of the server, and by its status. Without a key,
/// only a request with a safe method and one that was never sent are sent again. `docs/guide/retries.md` in the repository
/// has the table.
///
/// A retry is the same request: method, URI, headers, extensions and body. Bodies of the types `Full<Bytes>`, `Empty<Bytes>`
/// and `String` are copied; [`with_body_clone`](Self::with_body_clone) adds another type. A request with any other body is
/// sent once.
///
/// The response of the last attempt is returned, with any status. If its outcome is not definite, its extensions contain
/// the [`Operation`](crate::Operation).
///
/// # Placement
///
/// - Layers inside see each attempt: a timeout for one attempt, a refresh of tokens, a signature, a span. A server of
///   `tower-idempotency` identifies the caller by its credentials by default. It executes a retry with another token or
///   signature again, unless the service names the account: see `docs/guide/clients.md` in the repository.
/// - Layers outside see one call: a concurrency limit, and `FollowRedirect` of `tower-http`, with a policy that stops for
///   methods that are not safe. It drops the extensions when the origin changes, and `tower-http` 0.6 drops them at each
///   redirect. The request then has another key, and the operation of the caller does not know its outcome. A layer inside
///   that follows redirects would send the key to other origins.
/// - If two `RetryLayer`s are stacked, the outer one retries, and the inner one sends each attempt once.
#[derive(Clone)]
#[must_use]
pub struct RetryLayer {
    pub(crate) settings: Settings,
}

impl RetryLayer {
    /// Creates the layer with the default settings and a budget of 500 tokens.
    ///
    /// With the feature `metrics`, this also describes the counters and registers them with value 0, and so does the first
    /// call. Install the recorder before, so that the counters are 0 before their first event.
    pub fn new() -> Self {
        #[cfg(feature = "metrics")]
        crate::telemetry::register();
        Self {
            settings: Settings {
                keys: IdempotencyKeyLayer::new(),
                max_attempts: 3,
                deadline: Duration::from_secs(30),
                backoff: Backoff {
                    base: Duration::from_millis(50),
                    cap: Duration::from_secs(20),
                },
                throttled_base: Duration::from_secs(1),
                budget: Budget::new(500),
                max_retry_after: Duration::from_secs(60),
                lifetime: Duration::from_secs(23 * 60 * 60),
                verdict: None,
                clone_body: None,
                jitter: Arc::new(Jitter::from_system()),
                expired: Arc::default(),
                registration: Arc::default(),
            },
        }
    }

    /// Sets the header, the protocol and the keys. Default: [`IdempotencyKeyLayer::new`].
    pub fn with_keys(self, keys: IdempotencyKeyLayer) -> Self {
        self.with(|settings| settings.keys = keys)
    }

    /// Sets the number of attempts of one call, the first one included. Default: 3.
    ///
    /// Retries while the server executes the first request do not count: only the deadline limits them. With 1 there are no
    /// other retries. A high number multiplies the load on a server that fails.
    pub fn with_max_attempts(self, attempts: u32) -> Self {
        self.with(|settings| settings.max_attempts = attempts.max(1))
    }

    /// Sets the longest duration of one call, all attempts and delays included. Default: 30 s.
    ///
    /// At the deadline an attempt in flight is cancelled, and no further one begins. With zero, nothing is sent. With a
    /// deadline shorter than the lease of the server (15 s by default), no retry can take over from a process that died.
    pub fn with_deadline(self, deadline: Duration) -> Self {
        self.with(|settings| settings.deadline = deadline)
    }

    /// Sets the delays: before retry `n`, counted from 0, a random one between zero and the smaller of `base` x 2^n and
    /// `cap`. Default: 50 ms and 20 s.
    ///
    /// Short delays let many clients hit a server again before it has recovered. While the server executes the first
    /// request, each delay is at least 10 ms, also if both values are zero.
    pub fn with_backoff(self, base: Duration, cap: Duration) -> Self {
        self.with(|settings| settings.backoff = Backoff { base, cap })
    }

    /// Sets the base of the delays after a response that limits requests, such as 429. Default: 1 s.
    pub fn with_throttled_base(self, base: Duration) -> Self {
        self.with(|settings| settings.throttled_base = base)
    }

    /// Sets the budget of retries. Default: 500 tokens, shared by all clones of this layer and of its services.
    ///
    /// Layers for one server share one budget. A large one lets a client multiply its load while the server is down.
    pub fn with_budget(self, budget: Budget) -> Self {
        self.with(|settings| settings.budget = budget)
    }

    /// Sets the longest `Retry-After` that the layer obeys. Default: 60 s. A longer one is cut to this duration.
    ///
    /// A call whose next attempt would begin after its deadline ends at once.
    pub fn with_max_retry_after(self, duration: Duration) -> Self {
        self.with(|settings| settings.max_retry_after = duration)
    }

    /// Sets the lifetime of a key, counted from the first attempt. Default: 23 h, an hour less than the retention of most
    /// servers.
    ///
    /// No attempt begins later, because it would execute the operation a second time. The outcome is then
    /// [`Outcome::Unknown`](crate::Outcome::Unknown). Both the monotonic clock and the wall clock count, so that a machine
    /// that was suspended begins no attempt late. An attempt that waited for its connection can still be sent after the
    /// suspension. The lifetime must be shorter than the retention of the server. Otherwise a late retry executes the
    /// operation again. With zero, no attempt follows one that may have been executed.
    ///
    /// With an outbox, a recovery may execute the operation while the server rejects the attempts of this call. So no attempt
    /// begins later than this time after the request was stored, for any outcome. With zero, a call makes at most one
    /// attempt, and none if the request may have been sent before.
    pub fn with_lifetime(self, lifetime: Duration) -> Self {
        self.with(|settings| settings.lifetime = lifetime)
    }

    /// Sets a function that judges attempts. If it returns `None`, the layer decides.
    ///
    /// The limits still apply. A request without a key is still not sent again, unless its method is safe or it was never
    /// sent. A function that returns [`Verdict::Definite`] for an unknown outcome lets the caller delete the key too early. So
    /// does one that returns [`Cause::NotSent`](crate::Cause::NotSent) for a request that was sent, or
    /// [`Cause::Throttled`](crate::Cause::Throttled) for a response of a server that executed it.
    pub fn with_verdict(
        self,
        verdict: impl Fn(&Attempt<'_>) -> Option<Verdict> + Send + Sync + 'static,
    ) -> Self {
        self.with(|settings| settings.verdict = Some(Arc::new(verdict)))
    }

    /// Sets a function that copies request bodies of type `B`. It returns `None` if it cannot copy a body. The copies that
    /// it has returned are still sent.
    ///
    /// Replaces an earlier function, even for another type. The copy must have the same bytes, or the server rejects the
    /// retry with 422.
    pub fn with_body_clone<B: 'static>(
        self,
        clone: impl Fn(&B) -> Option<B> + Send + Sync + 'static,
    ) -> Self {
        let clone: CloneBody<B> = Box::new(clone);
        self.with(|settings| settings.clone_body = Some(Arc::new(clone)))
    }

    /// Sets the seed of the random delays, so that a test repeats exactly. Default: a random seed.
    ///
    /// Clients with the same seed retry at the same time.
    pub fn with_jitter_seed(self, seed: u64) -> Self {
        self.with(|settings| settings.jitter = Arc::new(Jitter::seeded(seed)))
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut self.settings);
        self
    }
}

impl Default for RetryLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for RetryLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryLayer")
            .field("keys", &self.settings.keys)
            .field("max_attempts", &self.settings.max_attempts)
            .field("deadline", &self.settings.deadline)
            .field("lifetime", &self.settings.lifetime)
            .field("budget", &self.settings.budget)
            .finish_non_exhaustive()
    }
}

impl<S> Layer<S> for RetryLayer {
    type Service = Retry<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Retry::new(inner, Arc::new(self.settings.clone()))
    }
}
