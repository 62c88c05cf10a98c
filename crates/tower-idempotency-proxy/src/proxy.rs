//! The proxy: its listeners, its configuration in use, and its shutdown.

use std::{
    convert::Infallible,
    fmt, io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use tokio::{
    net::TcpListener,
    sync::Semaphore,
    time::{Instant, sleep, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower_idempotency::IdempotencyLayer;
use tower_idempotency_any::{AnyStore, OpenError, OpenOptions, Purger};
use tower_service::Service;

use crate::{
    admin::{self, ConsoleService},
    body::BodyError,
    config::{Config, ConfigError, EnforcedRoutes},
    connection::{self, OpenConnection},
    routes::{Layers, Live, report_switches},
    sockets::{self, Sockets},
    telemetry::{self, WarningLimit},
    upstream::Tunnels,
};

/// A reverse proxy that is bound to its addresses.
#[must_use = "a proxy accepts no connection before `serve` is called"]
pub struct Proxy {
    pub(crate) shared: Arc<Shared>,
    listener: TcpListener,
    admin: Option<TcpListener>,
    store: AnyStore,
    _purger: Purger,
}

/// A handle to a proxy, which reloads its configuration. Clones refer to the same proxy.
#[derive(Clone)]
pub struct ProxyHandle(Arc<Shared>);

/// State of a proxy that all connections share.
pub(crate) struct Shared {
    pub(crate) live: Arc<ArcSwap<Live>>,
    pub(crate) is_draining: AtomicBool,
    pub(crate) metrics: Box<dyn Fn() -> String + Send + Sync>,
    pub(crate) console: Option<ConsoleService>,
    /// Cancelled when the drain has ended.
    pub(crate) drained: CancellationToken,
    layers: Arc<Layers>,
    tunnels: Tunnels,
    /// Routes that were enforced since the start. The lock lets one reload run at a time.
    enforced: Mutex<EnforcedRoutes>,
}

/// The reason why a proxy could not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum BindError {
    /// The store cannot be opened.
    Store(OpenError),
    /// A file that the configuration names cannot be used.
    Config(ConfigError),
    /// An address cannot be bound.
    Address(SocketAddr, io::Error),
}

/// The period between two deletions of expired entries.
const PURGE_PERIOD: Duration = Duration::from_secs(60);

impl Proxy {
    /// Opens the store of `config` and binds its addresses. Connections wait until [`serve`](Self::serve) is called.
    ///
    /// Install the recorder of the crate `metrics` before. Counters that are created without a recorder count nothing.
    ///
    /// # Errors
    ///
    /// [`BindError`] if the store cannot be opened, if a certificate cannot be read, or if an address cannot be bound.
    pub async fn bind(config: Config) -> Result<Self, BindError> {
        Self::bind_with(config, Sockets::new()).await
    }

    /// Opens the store of `config` like [`bind`](Self::bind), and listens on `sockets` in place of the addresses.
    ///
    /// # Errors
    ///
    /// [`BindError`] like [`bind`](Self::bind), and if there is a socket for the admin port, but no section `[admin]`.
    pub async fn bind_with(config: Config, sockets: Sockets) -> Result<Self, BindError> {
        let Config(config) = config;
        if sockets.admin.is_some() && config.admin.is_none() {
            let message = "expected the section [admin], because there is a socket for it";
            return Err(BindError::Config(ConfigError::without_line(message)));
        }
        // Half the timeout of the layer, so that the layer can retry. The default is the minimum, since connecting has the same
        // limit.
        let half = config.store.timeout.get_ref().get() / 2;
        let options = OpenOptions::new().with_timeout(half.max(Duration::from_secs(1)));
        let store = options
            .open(config.store_url())
            .await
            .map_err(BindError::Store)?;
        let layers = Layers::new(&store);
        let tunnels = Tunnels::default();
        let (address, admin_address) = (
            config.listen.address,
            config.admin.as_ref().map(|admin| admin.address),
        );
        let live = Live::new(config, &layers, &tunnels, None).map_err(BindError::Config)?;
        let failed = |address| move |error| BindError::Address(address, error);
        let bound = sockets::bind(address, sockets.listen).await;
        let listener = bound.map_err(failed(address))?;
        let admin = match admin_address {
            Some(address) => {
                let bound = sockets::bind(address, sockets.admin).await;
                Some(bound.map_err(failed(address))?)
            }
            None => None,
        };
        telemetry::describe();
        tower_idempotency::metrics::register();
        let enforced = Mutex::new(EnforcedRoutes::new(&live.config));
        let shared = Shared {
            live: Arc::new(ArcSwap::from_pointee(live)),
            is_draining: AtomicBool::new(false),
            metrics: Box::new(String::new),
            console: None,
            drained: CancellationToken::new(),
            layers: Arc::new(layers),
            tunnels,
            enforced,
        };
        Ok(Self {
            shared: Arc::new(shared),
            listener,
            admin,
            _purger: store.spawn_purger(PURGE_PERIOD),
            store,
        })
    }

    /// Sets the function that renders `/metrics` of the admin port. Default: an empty page.
    ///
    /// # Panics
    ///
    /// If a [`handle`](Self::handle) was created before.
    pub fn with_metrics(mut self, render: impl Fn() -> String + Send + Sync + 'static) -> Self {
        let shared = Arc::get_mut(&mut self.shared).expect("with_metrics is called before handle");
        shared.metrics = Box::new(render);
        self
    }

    /// Sets the service of the paths `/console` and `/console/..` of the admin port, such as an axum router. Default: none,
    /// and the paths get 404.
    ///
    /// The service decides who has access: the admin port has no authentication. [`Config::console`] returns the settings of
    /// a console.
    ///
    /// # Panics
    ///
    /// If a [`handle`](Self::handle) was created before.
    pub fn with_console<S, B>(mut self, console: S) -> Self
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BodyError>,
    {
        let shared = Arc::get_mut(&mut self.shared).expect("with_console is called before handle");
        shared.console = Some(admin::console(console));
        self
    }

    /// Returns the store, for a [console](Self::with_console). Clones share it.
    #[must_use]
    pub fn store(&self) -> AnyStore {
        self.store.clone()
    }

    /// Returns a function that returns the layer of the protected routes in use, to find the entry of a key. A reload may
    /// change it.
    ///
    /// The function returns `None` if there is no such route, or if the routes identify requests by different settings. It
    /// also returns `None` if a route has `host_in_scope`: a key alone then identifies no entry.
    pub fn current_layer(&self) -> impl Fn() -> Option<IdempotencyLayer> + Send + Sync + use<> {
        let (live, layers) = (
            Arc::clone(&self.shared.live),
            Arc::clone(&self.shared.layers),
        );
        move || live.load().common_layer(&layers)
    }

    /// Waits until the drain of [`serve`](Self::serve) has ended. The responses of a [console](Self::with_console) then have
    /// five seconds to end.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, there are no effects.
    pub fn drained(&self) -> impl Future<Output = ()> + Send + use<> {
        self.shared.drained.clone().cancelled_owned()
    }

    /// Returns the address on which clients connect.
    ///
    /// # Panics
    ///
    /// Never: the socket is bound.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.listener.local_addr().expect("the socket is bound")
    }

    /// Returns the address of the admin port, if there is one.
    #[must_use]
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin
            .as_ref()
            .and_then(|admin| admin.local_addr().ok())
    }

    /// Returns a handle to this proxy.
    #[must_use]
    pub fn handle(&self) -> ProxyHandle {
        ProxyHandle(Arc::clone(&self.shared))
    }

    /// Serves clients until `shutdown` resolves, then drains. Returns `true` if all requests and executions finished within
    /// the drain timeout. Tunnels do not count.
    ///
    /// In order: `/readyz` responds with 503. New connections are accepted for the delay of `[drain]`, and their responses
    /// close them. Then open requests finish, and so do executions of disconnected clients. Tunnels are closed, and last the
    /// admin port.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, open connections continue in tasks, which end with the runtime.
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> bool {
        let shared = &self.shared;
        let (tasks, closing) = (TaskTracker::new(), CancellationToken::new());
        let connections = *shared.live.load().config.listen.max_connections.get_ref();
        let permits = Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS)));
        let admin = self
            .admin
            .map(|listener| tokio::spawn(admin::serve(listener, Arc::clone(shared))));
        let stop = async {
            shutdown.await;
            telemetry::catch_report_panic(|| tracing::info!("drain started"));
            shared.is_draining.store(true, Ordering::Release);
            sleep(shared.live.load().config.drain.delay.get()).await;
        };
        let mut stop = std::pin::pin!(stop);
        let limit = WarningLimit::default();
        loop {
            let accepted = sockets::accept(&self.listener, &permits, &limit, |error, count| {
                tracing::warn!(%error, count, "connection not accepted");
            });
            tokio::select! {
                () = &mut stop => break,
                (permit, stream, peer) = accepted => {
                    let (shared, closing) = (Arc::clone(shared), closing.clone());
                    let open = OpenConnection::new(permit);
                    tasks.spawn(connection::serve(shared, stream, peer, open, closing));
                }
            }
        }
        drop(self.listener);
        closing.cancel();
        let is_finished = drain(shared, tasks).await;
        shared.drained.cancel();
        if let Some(admin) = admin {
            // It ends with an error only if it panics.
            let _ = admin.await;
        }
        is_finished
    }
}

async fn drain(shared: &Shared, connections: TaskTracker) -> bool {
    let deadline = Instant::now() + shared.live.load().config.drain.timeout.get();
    let open = connections.len();
    connections.close();
    let is_closed = timeout_at(deadline, connections.wait()).await.is_ok();
    // Executions of disconnected clients.
    let mut is_drained = true;
    for layer in shared.layers.all() {
        is_drained &= layer
            .drain(deadline.saturating_duration_since(Instant::now()))
            .await;
    }
    let tunnels = timeout_at(deadline, shared.tunnels.closed()).await.is_ok();
    shared.tunnels.stop();
    let is_finished = is_closed && is_drained;
    telemetry::catch_report_panic(|| {
        tracing::info!(open, is_finished, tunnels, "drain finished");
    });
    is_finished
}

impl ProxyHandle {
    /// Replaces the configuration, such as the result of [`Config::load`]. Requests in progress finish under the old one,
    /// and no connection is closed.
    ///
    /// The result is logged and counted in `idempotency_proxy_reloads_total`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`], and the old configuration stays, in these cases:
    ///
    /// - `config` is an error.
    /// - A change needs a restart, such as another address.
    /// - The proxy would no longer find its records, and retries of recorded requests would execute again. Examples are
    ///   another store, namespace or secret, and a route that is removed, no longer protected, or identifies requests
    ///   differently. All routes that were enforced since the start count, also if they observe or are removed now.
    /// - The upstream would get another key for requests of such a route.
    /// - A certificate cannot be read.
    ///
    /// A change of `missing_key` is accepted. After a change from `reject` to `pass`, gRPC calls with a key pass through, so
    /// retries of recorded gRPC calls execute again.
    pub fn reload(&self, config: Result<Config, ConfigError>) -> Result<(), ConfigError> {
        let result = config.and_then(|config| self.replace(config));
        match &result {
            Ok(()) => telemetry::reloaded(None),
            Err(error) => telemetry::reloaded(Some(error)),
        }
        result
    }

    fn replace(&self, Config(config): Config) -> Result<(), ConfigError> {
        let enforced = self.0.enforced.lock();
        let mut enforced = enforced.unwrap_or_else(PoisonError::into_inner);
        let old = self.0.live.load_full();
        old.config.accepts(&config, &enforced)?;
        let live = Live::new(config, &self.0.layers, &self.0.tunnels, Some(&old))?;
        enforced.add(&live.config);
        let live = Arc::new(live);
        self.0.live.store(Arc::clone(&live));
        report_switches(&old.config, &live.config);
        Ok(())
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy")
            .field("address", &self.address())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ProxyHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProxyHandle").finish_non_exhaustive()
    }
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(error) => error.fmt(f),
            Self::Config(error) => error.fmt(f),
            Self::Address(address, error) => write!(f, "cannot listen on {address}: {error}"),
        }
    }
}

impl std::error::Error for BindError {}
