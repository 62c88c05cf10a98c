//! What can be set, and the ways to connect.

use std::{future, sync::Arc, time::Duration};

use redis::{AsyncConnectionConfig, Client, Cmd, IntoConnectionInfo, RedisResult};
use tokio::time::Instant;
use tower_idempotency::Ttl;

#[cfg(feature = "deadpool")]
use crate::redial::in_time;
use crate::{
    ConnectError, RedisStore, check::check, link::Link, listen::Listener, redial::Redial,
    scripts::Scripts, store::Inner,
};
#[cfg(feature = "cluster")]
use crate::{ConnectErrorKind, cluster::Cluster};

/// How a [`RedisStore`] uses its server, and how it connects.
///
/// ```no_run
/// use std::time::Duration;
/// use tower_idempotency_redis::{Eviction, RedisOptions};
///
/// # async fn f() -> Result<(), tower_idempotency_redis::ConnectError> {
/// let store = RedisOptions::new()
///     .with_prefix("payments:idempotency:")
///     .with_timeout(Duration::from_millis(500))
///     .with_eviction(Eviction::Refuse)
///     .connect("redis://127.0.0.1:6379/0")
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "options do nothing until a store connects with them"]
pub struct RedisOptions {
    pub(crate) prefix: Arc<str>,
    pub(crate) timeout: Duration,
    pub(crate) record_limit: usize,
    pub(crate) eviction: Eviction,
    pub(crate) wait: Option<Wait>,
}

/// What to do about a server that may evict entries: its `maxmemory-policy` is not `noeviction`, or it does not say.
///
/// Every entry has a time to live, so the `volatile-*` policies evict leases as well as `allkeys-*` do, and a key whose
/// lease was evicted is executed a second time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Eviction {
    /// Connect, and write a warning to the log.
    #[default]
    Warn,
    /// Do not connect.
    Refuse,
}

#[derive(Clone, Debug)]
pub(crate) struct Wait {
    pub(crate) replicas: u32,
    timeout: Duration,
}

impl RedisOptions {
    /// The defaults, each of which is at its setter.
    pub fn new() -> Self {
        Self {
            prefix: Arc::from("idempotency:"),
            timeout: Duration::from_secs(1),
            record_limit: 16 * 1024 * 1024,
            eviction: Eviction::Warn,
            wait: None,
        }
    }

    /// What the keys of all entries, and the channels of their waiters, begin with. Default `idempotency:`.
    ///
    /// Two services that share a server and a prefix share entries where their namespaces, principals and keys are equal.
    /// One that changes its prefix forgets all it knew: retries of earlier requests execute again. With `{..}` in it all
    /// entries of a cluster land on one node.
    pub fn with_prefix(mut self, prefix: &str) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How long a call may take, from getting a connection to the answer. Default 1 s.
    ///
    /// Too short, and a server that pauses to fork answers 503. Too long, and the layer has no time for a second try:
    /// it gives all tries together twice its own [store timeout], 4 s unless set.
    ///
    /// [store timeout]: tower_idempotency::IdempotencyLayer::with_store_timeout
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.min(Ttl::MAX.as_duration());
        self
    }

    /// The largest record in bytes; for a larger one the layer stores a tombstone. Default 16 MiB.
    ///
    /// A server moves one record at a time, so large ones delay everybody. It keeps none above its own
    /// `proto-max-bulk-len` (512 MiB unless set): with a limit above that, such a record is neither stored nor replaced
    /// by a tombstone, and its request is executed again once its lease is over.
    pub fn with_record_limit(mut self, bytes: usize) -> Self {
        self.record_limit = bytes;
        self
    }

    /// What to do about a server that may evict entries. Default [`Eviction::Warn`].
    pub fn with_eviction(mut self, eviction: Eviction) -> Self {
        self.eviction = eviction;
        self
    }

    /// Waits after each granted acquire and each completion until `replicas` replicas have it, for `timeout` at most
    /// (whole milliseconds, at least one), which such a call has beside the [timeout](Self::with_timeout). Default: no waiting.
    ///
    /// When too few have it the call failed: an acquire is answered 503, and a completion is tried again until its lease
    /// is over. A failover to a replica that was waited for then loses no lease and no record; to another one it may,
    /// so wait for as many as may be promoted. It costs a round trip more for each fresh request and sends each record
    /// twice, and it makes a replica that is down an outage. What waits does so on a connection of its own, one after the
    /// other.
    ///
    /// Renewals are not waited for: the next primary knows those that have reached it. A failover to one that is behind by
    /// as long as a lease, or longer, may end leases that are held. Not for clusters.
    pub fn with_wait(mut self, replicas: u32, timeout: Duration) -> Self {
        let timeout = timeout.min(Ttl::MAX.as_duration());
        self.wait = (replicas > 0).then_some(Wait { replicas, timeout });
        self
    }

    /// Connects to a server, as in `redis://:password@host:6379/0`; with the feature `tls` also `rediss://`.
    ///
    /// With that feature, a process that has no default `CryptoProvider` of rustls is given the one of *ring*: to use
    /// another, install it before.
    ///
    /// Looks whether the server can be used, and teaches it the scripts. Two connections serve all calls, another one the
    /// waiters, and with [`with_wait`](Self::with_wait) one more what waits for replicas. They are made again when they break; calls fail meanwhile.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] when the URL is not one, or the server cannot be reached within the [timeout](Self::with_timeout) or
    /// cannot be used.
    ///
    /// # Cancellation
    ///
    /// Nothing is left behind: connections that were made are closed.
    pub async fn connect(self, url: &str) -> Result<RedisStore, ConnectError> {
        let info = url.into_connection_info().map_err(ConnectError::address)?;
        self.connect_client(Client::open(info).map_err(ConnectError::address)?)
            .await
    }

    /// As [`connect`](Self::connect), with a client of your own: for certificates, credentials or a Unix socket.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] when the server cannot be reached or cannot be used.
    ///
    /// # Cancellation
    ///
    /// Nothing is left behind: connections that were made are closed.
    pub async fn connect_client(self, client: Client) -> Result<RedisStore, ConnectError> {
        #[cfg(feature = "tls")]
        provide_cryptography();
        let within = self.timeout;
        self.connect_to(within, move || future::ready(Ok(client.clone())))
            .await
    }

    /// Uses a pool that the application has already, and one connection like those of it for renewals, completions and
    /// releases, which so never wait for the pool; with [`with_wait`](Self::with_wait) another one, for what waits for replicas.
    ///
    /// When the pool has no connection to give within the [timeout](Self::with_timeout), a request is answered 503. A
    /// shared connection is faster: a pool looks after each connection it hands out. Nothing is heard of completions,
    /// so waiters poll.
    ///
    /// The connections are as the pool makes them, and a call ends with their timeouts where those are shorter: unless the
    /// application made the pool with a `Manager::new_with_config` that has another one, each answer has to come within
    /// 500 ms. With [`with_wait`](Self::with_wait) it has to come within the time of the waiting, too.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] when the pool gives no connection in time or its server cannot be used.
    ///
    /// # Cancellation
    ///
    /// Nothing is left behind: connections that were made are closed.
    #[cfg(feature = "deadpool")]
    pub async fn connect_pool(
        self,
        pool: deadpool_redis::Pool,
    ) -> Result<RedisStore, ConnectError> {
        use deadpool::managed::Manager as _;

        #[cfg(feature = "tls")]
        provide_cryptography();
        let like_those = || {
            let pool = pool.clone();
            Link::Dialled(Redial::new(move || {
                let pool = pool.clone();
                // The application may have given it no limit of its own.
                async move { in_time(Instant::now() + DIALLING, pool.manager().create()).await }
            }))
        };
        let (keeping, waiting) = (like_those(), self.wait.is_some().then(like_those));
        let within = self.timeout;
        self.store(within, Link::Pooled(pool), keeping, waiting, None)
            .await
    }

    /// Connects to the primary that sentinels name, and to the next one when that changes.
    ///
    /// The client has to ask for a primary: `SentinelServerType::Master`. Sentinels that are gone without a word cost a second
    /// or two each time it asks, for which connecting waits beside the [timeout](Self::with_timeout), five seconds at most;
    /// calls that come meanwhile fail.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] when no sentinel answers, or the primary cannot be reached or cannot be used.
    ///
    /// # Cancellation
    ///
    /// Nothing is left behind: connections that were made are closed.
    #[cfg(feature = "sentinel")]
    pub async fn connect_sentinel(
        self,
        client: redis::sentinel::SentinelClient,
    ) -> Result<RedisStore, ConnectError> {
        #[cfg(feature = "tls")]
        provide_cryptography();
        let sentinels = Arc::new(tokio::sync::Mutex::new(client));
        let within = self.timeout.saturating_add(DIALLING);
        self.connect_to(within, move || {
            let sentinels = Arc::clone(&sentinels);
            async move { sentinels.lock().await.async_get_client().await }
        })
        .await
    }

    /// Connects to a cluster, of which some nodes are given as URLs.
    ///
    /// Each call touches one key, so no two have to be on one node. Completions are not published, which would go to every
    /// node: waiters poll.
    ///
    /// Of nodes that do not say under which name they are reached (`cluster-preferred-endpoint-type unknown-endpoint`) all
    /// URLs have to have the same host: redirections lead to that one.
    ///
    /// A node that does not take a connection within a quarter of the [timeout](Self::with_timeout) is passed over: its keys
    /// are answered 503 while it has slots, and those of others are served.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] when no node is given, a URL is not one, no node can be reached, one of them cannot be used, or
    /// [`with_wait`](Self::with_wait) is set.
    ///
    /// # Cancellation
    ///
    /// Nothing is left behind: connections that were made are closed.
    #[cfg(feature = "cluster")]
    pub async fn connect_cluster<I>(self, nodes: I) -> Result<RedisStore, ConnectError>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        #[cfg(feature = "tls")]
        provide_cryptography();
        if self.wait.is_some() {
            return Err(ConnectError::new(
                ConnectErrorKind::Unusable,
                "expected no wait for replicas with a cluster",
            ));
        }
        let nodes = nodes
            .into_iter()
            .map(|node| node.as_ref().into_connection_info());
        let nodes: Vec<_> = nodes
            .collect::<Result<_, _>>()
            .map_err(ConnectError::address)?;
        let Some((first, others)) = nodes.split_first() else {
            let message = "expected a node of the cluster";
            return Err(ConnectError::new(ConnectErrorKind::Address, message));
        };
        let client = redis::cluster::ClusterClient::builder(nodes.clone())
            .connection_timeout(self.timeout / CONNECTING)
            .response_timeout(self.timeout)
            // Redirections are followed here.
            .retries(0)
            .build()
            .map_err(ConnectError::address)?;
        let link = || {
            let client = client.clone();
            let nodes = Redial::to_many(move || {
                let client = client.clone();
                async move { client.get_async_connection().await }
            });
            let cluster = Cluster::new(nodes, first.clone(), others, self.timeout);
            Link::Cluster(Box::new(cluster))
        };
        let (asking, keeping) = (link(), link());
        let within = self.timeout;
        self.store(within, asking, keeping, None, None).await
    }

    /// Connects to one server, which `primary` names anew for each connection that is made.
    async fn connect_to<F>(
        self,
        within: Duration,
        primary: impl Fn() -> F + Clone + Send + Sync + 'static,
    ) -> Result<RedisStore, ConnectError>
    where
        F: Future<Output = RedisResult<Client>> + Send + 'static,
    {
        // No timeout for answers here: the store's own covers the whole call.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(None);
        let link = || {
            let (primary, config) = (primary.clone(), config.clone());
            Link::Dialled(Redial::new(move || {
                let (primary, config) = (primary(), config.clone());
                async move {
                    primary
                        .await?
                        .get_multiplexed_async_connection_with_config(&config)
                        .await
                }
            }))
        };
        let (asking, keeping, waiting) = (link(), link(), self.wait.is_some().then(link));
        let listener = Listener::new(within, move || {
            let primary = primary();
            async move { primary.await?.get_async_pubsub().await }
        });
        self.store(within, asking, keeping, waiting, Some(listener))
            .await
    }

    async fn store(
        self,
        within: Duration,
        asking: Link,
        keeping: Link,
        waiting: Option<Link>,
        listener: Option<Listener>,
    ) -> Result<RedisStore, ConnectError> {
        let scripts = Scripts::new();
        let deadline = Instant::now() + within;
        check(&keeping, deadline, &scripts, self.eviction).await?;
        Ok(RedisStore::new(Inner {
            publishes: asking.can_publish(),
            asking,
            keeping,
            waiting,
            scripts,
            listener,
            options: self,
        }))
    }

    /// How long a call may take, with what it waits for replicas.
    pub(crate) fn call_limit(&self) -> Duration {
        self.wait.as_ref().map_or(self.timeout, |wait| {
            self.timeout.saturating_add(wait.timeout)
        })
    }
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// Whoever speaks TLS has to choose whose cryptography it uses, once for the process, or the first connection panics.
/// An application that has chosen keeps its choice.
#[cfg(feature = "tls")]
fn provide_cryptography() {
    use rustls::crypto::{CryptoProvider, ring};

    if CryptoProvider::get_default().is_none() {
        // Fails where somebody else has chosen meanwhile.
        ring::default_provider().install_default().ok();
    }
}

impl Wait {
    /// The server would wait for ever for a timeout of zero.
    pub(crate) fn command(&self) -> Cmd {
        let millis = u64::try_from(self.timeout.as_millis())
            .unwrap_or(u64::MAX)
            .max(1);
        let mut command = redis::cmd("WAIT");
        command.arg(self.replicas).arg(millis);
        command
    }
}

/// How long making a connection may take where that is not one step of the driver's, each of which it gives a second at most.
#[cfg(any(feature = "sentinel", feature = "deadpool"))]
const DIALLING: Duration = Duration::from_secs(5);
/// Which part of a call's timeout a node of a cluster has for taking a connection. Whoever looks for one that hangs looks at
/// nothing else meanwhile, twice in a row at worst, and a call to another node has to come through between two looks.
#[cfg(feature = "cluster")]
const CONNECTING: u32 = 4;
