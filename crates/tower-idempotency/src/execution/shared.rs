//! State that the clones of a layer share, and the settings of each clone.

use std::sync::{Arc, OnceLock};

use crate::{
    config::Config,
    execution::{observe::Observer, waiters::Waiters},
    lease::renewer::Renewer,
    limits::Limits,
    request::recent::RecentRequests,
    response::replay::UnreadReplays,
    store::Store,
    store_client::StoreClient,
    telemetry::Registration,
};

/// State that all clones of a layer share.
pub(crate) struct Shared {
    pub(crate) store: StoreClient,
    pub(crate) renewer: Arc<Renewer>,
    pub(crate) limits: Arc<Limits>,
    pub(crate) waiters: Waiters,
    pub(crate) recent_requests: RecentRequests,
    pub(crate) registration: Registration,
    pub(crate) observer: Arc<Observer>,
    pub(crate) unread_replays: Arc<UnreadReplays>,
    /// Host name and process id, for operators.
    pub(crate) owner: &'static str,
}

/// Settings of one clone of a layer, and the state that it shares with the others.
pub(crate) struct Context {
    pub(crate) config: Arc<Config>,
    pub(crate) shared: Arc<Shared>,
    /// The settings for gRPC calls of protected methods, with the same state.
    #[cfg(feature = "grpc")]
    pub(crate) grpc: Option<Arc<Context>>,
}

impl Context {
    /// Returns the context of a layer for HTTP requests.
    pub(crate) fn new(config: &Arc<Config>, shared: &Arc<Shared>) -> Self {
        Self {
            #[cfg(feature = "grpc")]
            grpc: config
                .for_grpc()
                .map(|config| Arc::new(Self::for_values(&Arc::new(config), shared))),
            ..Self::for_values(config, shared)
        }
    }

    /// Returns a context for executions that record a value, not a response. It has no settings for gRPC calls.
    pub(crate) fn for_values(config: &Arc<Config>, shared: &Arc<Shared>) -> Self {
        Self {
            config: Arc::clone(config),
            shared: Arc::clone(shared),
            #[cfg(feature = "grpc")]
            grpc: None,
        }
    }
}

impl Shared {
    pub(crate) fn new(store: impl Store) -> Arc<Self> {
        let store = StoreClient::new(store);
        Arc::new(Self {
            renewer: Renewer::new(store.clone()),
            store,
            limits: Arc::default(),
            waiters: Waiters::default(),
            recent_requests: RecentRequests::default(),
            registration: Registration::new(),
            observer: Arc::default(),
            unread_replays: Arc::default(),
            owner: owner(),
        })
    }
}

/// Returns host name and process id. They are read once per process.
fn owner() -> &'static str {
    static OWNER: OnceLock<String> = OnceLock::new();
    OWNER.get_or_init(|| {
        let host = std::env::var("HOSTNAME")
            .or_else(|_| std::fs::read_to_string("/etc/hostname"))
            .unwrap_or_default();
        format!("{}:{}", host.trim(), std::process::id())
    })
}
