//! Links to a server: a single connection, a pool or a cluster behind one interface.

#[cfg(feature = "cluster")]
mod cluster;
mod command;
mod reconnect;

use std::{io, sync::Arc};

use redis::{Cmd, RedisResult, Value, aio::MultiplexedConnection};
use tokio::time::Instant;

#[cfg(feature = "cluster")]
pub(crate) use self::cluster::Cluster;
pub(crate) use self::command::no_reply_in_time;
#[cfg(feature = "deadpool")]
pub(crate) use self::command::with_deadline;
use self::command::{send, send_pair};
pub(crate) use self::reconnect::ReconnectingConnection;
#[cfg(feature = "deadpool")]
use self::reconnect::{MAX_BACKOFF, is_from_replica};

/// A server that stores keys.
pub(crate) enum Node {
    /// The only server, or the primary that sentinels report.
    Only,
    /// A master of a cluster, by host and port.
    #[cfg(feature = "cluster")]
    Master((String, u16)),
}

/// Number of times that a command may arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// A cluster may receive the command again after a lost reply. Other links send it once. The server may execute such a
    /// command twice, and after the call has ended.
    AtLeastOnce,
    /// The command is not sent again after a lost reply. The call fails, and its outcome is unknown. After a redirection or
    /// a temporary error, the node has not executed the command, and the store sends it again.
    AtMostOnce,
}

/// A way to send commands to the server.
///
/// Futures of the less common variants are boxed: getting a connection from a pool takes 14 KiB.
pub(crate) enum Link {
    /// A connection to one server, or to the primary that sentinels report. The connection is replaced if it breaks, if its
    /// server has become read-only, or if its server is unresponsive.
    Single(Arc<ReconnectingConnection<MultiplexedConnection>>),
    /// A pool, which lends a connection to each call.
    #[cfg(feature = "deadpool")]
    Pooled(deadpool_redis::Pool),
    /// A connection that knows the nodes and their slots. It is replaced if a node is unresponsive.
    #[cfg(feature = "cluster")]
    Cluster(Box<Cluster>),
}

impl Link {
    /// Creates a link to one server.
    pub(crate) fn single(connection: ReconnectingConnection<MultiplexedConnection>) -> Self {
        Self::Single(Arc::new(connection))
    }

    /// Creates a link for calls that wait for replicas. Each wait delays the calls after it, so each timeout replaces the
    /// connection.
    pub(crate) fn replica_waits(connection: ReconnectingConnection<MultiplexedConnection>) -> Self {
        Self::single(connection.replace_on_timeout())
    }

    /// Returns `true` if the link leads to the nodes of a cluster.
    pub(crate) fn is_cluster(&self) -> bool {
        match self {
            #[cfg(feature = "cluster")]
            Self::Cluster(_) => true,
            _ => false,
        }
    }

    /// Sends a command and returns its reply. Error replies of the server become errors. The command may arrive twice.
    pub(crate) async fn send(&self, deadline: Instant, command: &Cmd) -> RedisResult<Value> {
        self.deliver(deadline, command, Delivery::AtLeastOnce).await
    }

    /// Sends a command and returns its reply. Error replies of the server become errors.
    pub(crate) async fn deliver(
        &self,
        deadline: Instant,
        command: &Cmd,
        #[cfg_attr(not(feature = "cluster"), expect(unused_variables))] delivery: Delivery,
    ) -> RedisResult<Value> {
        match self {
            Self::Single(connection) => connection.call(deadline, |it| send(it, command)).await,
            #[cfg(feature = "deadpool")]
            Self::Pooled(pool) => {
                let sent = call_pooled(pool, |it| send(it, command));
                Box::pin(with_deadline(deadline, sent)).await
            }
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => Box::pin(cluster.send(deadline, command, delivery)).await,
        }
    }

    /// Returns the servers that have the keys: each master of a cluster, or the only server.
    pub(crate) async fn masters(
        &self,
        #[cfg_attr(not(feature = "cluster"), expect(unused_variables))] deadline: Instant,
    ) -> RedisResult<Vec<Node>> {
        match self {
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => {
                let masters = Box::pin(cluster.masters(deadline)).await?;
                Ok(masters.into_iter().map(Node::Master).collect())
            }
            _ => Ok(vec![Node::Only]),
        }
    }

    /// Sends a command to this server, even if its keys are in slots of other servers.
    pub(crate) async fn send_to(
        &self,
        node: &Node,
        deadline: Instant,
        command: &Cmd,
    ) -> RedisResult<Value> {
        match (self, node) {
            #[cfg(feature = "cluster")]
            (Self::Cluster(cluster), Node::Master(address)) => {
                Box::pin(cluster.send_to(address, deadline, command)).await
            }
            _ => self.send(deadline, command).await,
        }
    }

    /// Sends two commands at once, on one connection and in this order. Returns both replies.
    ///
    /// A dropped call continues in a task until its reply or its deadline. So the connection is replaced also if all callers
    /// drop their calls earlier. The server would otherwise execute all of these calls, one after the other.
    pub(crate) async fn send_pair(
        &self,
        deadline: Instant,
        first: Cmd,
        second: Cmd,
    ) -> RedisResult<(Value, Value)> {
        match self {
            Self::Single(connection) => {
                let connection = Arc::clone(connection);
                let mut pair = redis::pipe();
                pair.add_command(first).add_command(second);
                let call = async move { connection.call(deadline, |it| send_pair(it, pair)).await };
                tokio::spawn(call).await.map_err(io::Error::other)?
            }
            // Only calls that wait for replicas send pairs, and their link is a single connection.
            #[cfg(any(feature = "cluster", feature = "deadpool"))]
            _ => {
                let message = "only a single connection accepts two commands at a time";
                Err((redis::ErrorKind::Client, message).into())
            }
        }
    }
}

/// Makes a call on a connection of the pool.
///
/// If the server is no longer the primary, removes the connections that no call uses from the pool. The pool would keep
/// them, because the pool only checks that the server replies. New connections stay: the address may still lead to that
/// server, and each call would open another connection.
#[cfg(feature = "deadpool")]
async fn call_pooled<T, F>(
    pool: &deadpool_redis::Pool,
    call: impl FnOnce(MultiplexedConnection) -> F,
) -> RedisResult<T>
where
    F: Future<Output = RedisResult<T>>,
{
    use deadpool_redis::PoolError;

    let connection = pool.get().await.map_err(|error| match error {
        PoolError::Backend(error) => error,
        error => (
            redis::ErrorKind::Client,
            "the pool returned no connection",
            error.to_string(),
        )
            .into(),
    })?;
    let result = call(MultiplexedConnection::clone(&connection)).await;
    match &result {
        Err(error) if is_from_replica(error) => {
            drop(connection);
            drop(pool.retain(|_, metrics| metrics.age() < MAX_BACKOFF));
        }
        Err(error) if error.is_unrecoverable_error() => {
            drop(deadpool_redis::Connection::take(connection));
        }
        _ => {}
    }
    result
}
