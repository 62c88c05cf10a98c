//! The layer, its constructors and its shutdown. The setters are in the modules, by topic.

use std::{fmt, sync::Arc, time::Duration};

use tower_layer::Layer;

use crate::{
    config::Config,
    config::preset::Preset,
    execution::shared::{Context, Shared},
    service::Idempotency,
    store::Store,
};

mod execution;
mod limits;
mod requests;
mod responses;
mod signals;

/// A [`tower_layer::Layer`] that makes unsafe HTTP requests safe to retry.
///
/// Clones share the store, the lease renewals and the limits. Each clone has its own settings: if one route needs another
/// setting, change it on a clone of the layer.
///
/// # Placement
///
/// Place the layer inside CORS, tracing, compression and authentication, and outside body limits and timeouts. Replays then
/// pass through the same layers as other responses, and a timeout is an outcome of the handler instead of a disconnect.
/// A middleware that finishes the effect after the handler, such as a commit, belongs inside: outside, it runs after the
/// response is recorded.
///
/// In axum, add it with `route_layer`, as in the example, after the routes: routes that are added later and fallbacks are
/// not protected. `Router::layer` also wraps the 404 responses for unknown paths.
/// Such a 404 would be recorded and replayed for the complete retention, even if a later deployment adds the route. The 405
/// of a route for other methods is still recorded; `post(handler).route_layer(layer)` avoids that too.
///
/// # Timeouts
///
/// Place a timeout inside the layer. A handler that never finishes holds its lease, which blocks the key, even after its
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
/// The layer needs a Tokio runtime with time enabled. One task renews all leases of a layer, in the runtime that acquired
/// the first one. Use a layer and its clones within one runtime that runs as long as there are leases.
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
    pub fn with_preset(store: impl Store, preset: Preset) -> Self {
        let mut config = preset.config();
        config.response.compress_above = store.compress_above();
        Self {
            config: Arc::new(config),
            shared: Shared::new(store),
        }
    }

    fn set(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(Arc::make_mut(&mut self.config));
        self
    }
}

/// Shutdown.
impl IdempotencyLayer {
    /// Rejects new requests and waits until those in flight have finished. Returns `true` if they finish within `timeout`.
    ///
    /// New requests with a key get 503 `draining`. The requests in flight include those of disconnected clients and
    /// [`run_once`](Self::run_once). Requests that pass through, such as those without a key under
    /// [`MissingKey::PassThrough`](crate::MissingKey::PassThrough), are neither rejected nor waited for.
    ///
    /// All clones of the layer drain together, permanently. Another layer on the same store must be drained separately.
    ///
    /// Call this after the graceful shutdown of the server: the server does not know the tasks in which executions of
    /// disconnected clients continue. If this returns `false`, the remaining executions hold their leases until these
    /// expire. If the server has runtimes of its own, like that of actix-web, its shutdown also ends these executions. Then call
    /// this before the shutdown instead.
    ///
    /// Before this returns, the layer logs the number of events about leases that no line has counted yet, as
    /// `earlier event occurred again`. A process that ends without a drain loses the numbers of its last seconds.
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
        let idle = self.shared.limits.wait_until_idle();
        let is_idle = tokio::time::timeout(timeout, idle).await.is_ok();
        // The process may end before the renewer reports them.
        self.shared.renewer.report_rest_now();
        is_idle
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
        let context = Context::new(&self.config, &self.shared);
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
