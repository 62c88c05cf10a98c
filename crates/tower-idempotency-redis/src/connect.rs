//! The ways to connect a store.

#[cfg(feature = "sentinel")]
use std::sync::Arc;
use std::{future, time::Duration};

use redis::{AsyncConnectionConfig, Client, IntoConnectionInfo, RedisResult};
use tokio::time::Instant;

#[cfg(feature = "deadpool")]
use crate::connection::with_deadline;
#[cfg(feature = "cluster")]
use crate::{connection::Cluster, error::ConnectErrorKind};
use crate::{
    connection::{Link, ReconnectingConnection},
    error::ConnectError,
    index::Indexes,
    notifications::Notifications,
    options::RedisOptions,
    scripts::Scripts,
    server_check::{EvictionWatch, check_server},
    store::{Inner, RedisStore},
};

impl RedisStore {
    /// Connects to a server, for example `redis://:password@host:6379/0`, with the default [`RedisOptions`].
    ///
    /// With the feature `tls`, `rediss://` works too. See [`RedisOptions::connect`] for details.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] if the URL is invalid, or if the server cannot be reached or used.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the connections that it has opened are closed.
    pub async fn connect(url: &str) -> Result<Self, ConnectError> {
        RedisOptions::new().connect(url).await
    }
}

impl RedisOptions {
    /// Connects to a server, for example `redis://:password@host:6379/0`. With the feature `tls`, `rediss://` works too.
    ///
    /// With that feature, each method that connects a store installs *ring* as the process's default `CryptoProvider` of
    /// rustls unless there is one. To use another provider, install it before.
    ///
    /// Checks that the server is usable, and loads the scripts. Two connections serve all calls, and a third one serves
    /// waiters. With [`with_wait`](Self::with_wait) a fourth one serves calls that wait for replicas. The store reconnects
    /// if a connection breaks; calls fail meanwhile.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] if the URL is invalid, or if the server cannot be used or cannot be reached within the
    /// [timeout](Self::with_timeout).
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the connections that it has opened are closed.
    pub async fn connect(self, url: &str) -> Result<RedisStore, ConnectError> {
        let info = url
            .into_connection_info()
            .map_err(ConnectError::invalid_address)?;
        self.connect_client(Client::open(info).map_err(ConnectError::invalid_address)?)
            .await
    }

    /// Like [`connect`](Self::connect), but with a client of the application: for certificates, credentials or a Unix
    /// socket.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] if the server cannot be reached or used.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the connections that it has opened are closed.
    pub async fn connect_client(self, client: Client) -> Result<RedisStore, ConnectError> {
        #[cfg(feature = "tls")]
        install_crypto_provider();
        let connect_timeout = self.timeout;
        self.connect_primary(connect_timeout, move || future::ready(Ok(client.clone())))
            .await
    }

    /// Uses a connection pool of the application, and one connection of the same kind for renewals, completions and
    /// releases.
    ///
    /// Those calls therefore never wait for the pool. With [`with_wait`](Self::with_wait), another connection serves calls
    /// that wait for replicas.
    ///
    /// If the pool returns no connection within the [timeout](Self::with_timeout), the layer responds with 503. A shared
    /// connection is faster, because a pool checks each connection before it lends it. A store on a pool receives no
    /// notifications of completions, so waiters poll.
    ///
    /// The pool's manager creates the connections. A call also ends with the timeouts of its connection if those are
    /// shorter. By default every reply has to arrive within 500 ms: to change that, create the pool with
    /// `Manager::new_with_config`. With [`with_wait`](Self::with_wait), that timeout also covers the wait.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] if the pool's manager cannot connect within the [timeout](Self::with_timeout), or if its server cannot
    /// be used. A pool that is exhausted or closed is no error here.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the connections that it has opened are closed.
    #[cfg(feature = "deadpool")]
    pub async fn connect_pool(
        self,
        pool: deadpool_redis::Pool,
    ) -> Result<RedisStore, ConnectError> {
        use deadpool::managed::Manager as _;

        #[cfg(feature = "tls")]
        install_crypto_provider();
        let new_connection = || {
            let pool = pool.clone();
            ReconnectingConnection::new(move || {
                let pool = pool.clone();
                async move {
                    // The pool may have no timeout of its own.
                    let deadline = Instant::now() + SLOW_CONNECT_TIMEOUT;
                    with_deadline(deadline, pool.manager().create()).await
                }
            })
        };
        let lease_link = Link::single(new_connection());
        let waits = self.replica_wait.is_some();
        let replica_link = waits.then(|| Link::replica_waits(new_connection()));
        let connect_timeout = self.timeout;
        self.build_store(
            connect_timeout,
            Link::Pooled(pool),
            lease_link,
            replica_link,
            None,
        )
        .await
    }

    /// Connects to the primary that sentinels report, and to the new primary after a failover.
    ///
    /// The client has to ask for a primary: `SentinelServerType::Master`. An unresponsive sentinel costs one or two seconds
    /// for each attempt to connect. Connecting may therefore take up to five seconds longer than the
    /// [timeout](Self::with_timeout); calls fail meanwhile.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] if no sentinel replies, or if the primary cannot be reached or used.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the connections that it has opened are closed.
    #[cfg(feature = "sentinel")]
    pub async fn connect_sentinel(
        self,
        client: redis::sentinel::SentinelClient,
    ) -> Result<RedisStore, ConnectError> {
        #[cfg(feature = "tls")]
        install_crypto_provider();
        let sentinels = Arc::new(tokio::sync::Mutex::new(client));
        let connect_timeout = self.timeout.saturating_add(SLOW_CONNECT_TIMEOUT);
        self.connect_primary(connect_timeout, move || {
            let sentinels = Arc::clone(&sentinels);
            async move { sentinels.lock().await.async_get_client().await }
        })
        .await
    }

    /// Connects to a cluster. `nodes` are the URLs of some of its nodes.
    ///
    /// The keys of a call are an entry and its indexes, which are in the slot of the entry. Completions are not published,
    /// because a message would go to every node: waiters poll.
    ///
    /// If nodes do not report a host name (`cluster-preferred-endpoint-type unknown-endpoint`), all URLs must have the same
    /// host. Redirections then lead to that host.
    ///
    /// A node that does not accept a connection within 1/4 of the [timeout](Self::with_timeout) is skipped. Requests for
    /// keys in the slots of that node get 503. The other nodes continue to serve their keys.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] if no node is given, a URL is invalid, no node can be reached, a node cannot be used, or
    /// [`with_wait`](Self::with_wait) is set. Also if the [prefix](Self::with_prefix) contains `{` and no hash tag, unless
    /// there are no [indexes](Self::with_indexes).
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the connections that it has opened are closed.
    #[cfg(feature = "cluster")]
    pub async fn connect_cluster<I>(self, nodes: I) -> Result<RedisStore, ConnectError>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        #[cfg(feature = "tls")]
        install_crypto_provider();
        if self.replica_wait.is_some() {
            return Err(ConnectError::new(
                ConnectErrorKind::Unusable,
                "a cluster cannot wait for replicas: remove `with_wait`",
            ));
        }
        if self.has_indexes && !Indexes::are_possible(&self.prefix) {
            return Err(ConnectError::new(
                ConnectErrorKind::Unusable,
                "the prefix has a { and no hash tag such as {payments}: an entry and its indexes would be on two nodes",
            ));
        }
        let nodes = nodes
            .into_iter()
            .map(|node| node.as_ref().into_connection_info());
        let nodes: Vec<_> = nodes
            .collect::<Result<_, _>>()
            .map_err(ConnectError::invalid_address)?;
        let Some((first, others)) = nodes.split_first() else {
            let message = "expected the URL of at least one node of the cluster, found none";
            return Err(ConnectError::new(ConnectErrorKind::Address, message));
        };
        let client = redis::cluster::ClusterClient::builder(nodes.clone())
            .connection_timeout(self.timeout / NODE_TIMEOUT_DIVISOR)
            .response_timeout(self.timeout)
            // `Cluster` follows redirections.
            .retries(0)
            .build()
            .map_err(ConnectError::invalid_address)?;
        let new_link = || {
            let client = client.clone();
            let nodes = ReconnectingConnection::new_cluster(move || {
                let client = client.clone();
                async move { client.get_async_connection().await }
            });
            let cluster = Cluster::new(nodes, first.clone(), others, self.timeout);
            Link::Cluster(Box::new(cluster))
        };
        let (acquire_link, lease_link) = (new_link(), new_link());
        let connect_timeout = self.timeout;
        self.build_store(connect_timeout, acquire_link, lease_link, None, None)
            .await
    }

    /// Connects to a single server. `primary` returns its address for each new connection.
    async fn connect_primary<F>(
        self,
        connect_timeout: Duration,
        primary: impl Fn() -> F + Clone + Send + Sync + 'static,
    ) -> Result<RedisStore, ConnectError>
    where
        F: Future<Output = RedisResult<Client>> + Send + 'static,
    {
        // No reply timeout here: the store's own timeout covers the whole call.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(None);
        let new_connection = || {
            let (primary, config) = (primary.clone(), config.clone());
            ReconnectingConnection::new(move || {
                let (primary, config) = (primary(), config.clone());
                async move {
                    primary
                        .await?
                        .get_multiplexed_async_connection_with_config(&config)
                        .await
                }
            })
        };
        let acquire_link = Link::single(new_connection());
        let lease_link = Link::single(new_connection());
        let waits = self.replica_wait.is_some();
        let replica_link = waits.then(|| Link::replica_waits(new_connection()));
        let notifications = Notifications::new(connect_timeout, move || {
            let primary = primary();
            async move { primary.await?.get_async_pubsub().await }
        });
        self.build_store(
            connect_timeout,
            acquire_link,
            lease_link,
            replica_link,
            Some(notifications),
        )
        .await
    }

    /// Checks the server through `lease_link`, and returns the store.
    async fn build_store(
        self,
        connect_timeout: Duration,
        acquire_link: Link,
        lease_link: Link,
        replica_link: Option<Link>,
        notifications: Option<Notifications>,
    ) -> Result<RedisStore, ConnectError> {
        let scripts = Scripts::new();
        let deadline = Instant::now() + connect_timeout;
        let is_evicting = check_server(&lease_link, deadline, &scripts, self.eviction).await?;
        let is_cluster = acquire_link.is_cluster();
        let indexes = self
            .has_indexes
            .then(|| Indexes::new(&self.prefix, is_cluster, self.has_completed_index));
        Ok(RedisStore::from_inner(Inner {
            indexes,
            // In a cluster, every message would go to every node.
            can_publish: !is_cluster,
            acquire_link,
            lease_link,
            replica_link,
            scripts,
            notifications,
            eviction_watch: EvictionWatch::new(self.eviction_check, is_evicting),
            options: self,
        }))
    }
}

/// Installs *ring* as the process's default cryptography unless the application has installed another one.
///
/// The first TLS connection of a process without a default panics.
#[cfg(feature = "tls")]
fn install_crypto_provider() {
    use rustls::crypto::{CryptoProvider, ring};

    if CryptoProvider::get_default().is_none() {
        // Fails if another thread has installed a provider meanwhile.
        ring::default_provider().install_default().ok();
    }
}

/// Time for a connection that a pool creates, and additional time for one that sentinels lead to. Both take several steps, each
/// of which the driver limits to one second.
#[cfg(any(feature = "sentinel", feature = "deadpool"))]
const SLOW_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Divisor of a call's timeout that gives the time a cluster node has to accept a connection.
///
/// The driver sends no other call while it connects to a node that hangs, and it may connect twice in a row. A call to another
/// node then still has half of its timeout.
#[cfg(feature = "cluster")]
const NODE_TIMEOUT_DIVISOR: u32 = 4;
