//! The ways to reach a server, behind one call.

use redis::{
    Cmd, Pipeline, RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::time::Instant;

#[cfg(feature = "cluster")]
use crate::cluster::Cluster;
use crate::redial::Redial;
#[cfg(feature = "deadpool")]
use crate::redial::{in_time, is_final};

/// What few use is boxed where it is awaited: getting a connection from a pool takes 14 KiB.
pub(crate) enum Link {
    /// One server, or the primary that sentinels name. The connection is replaced when it breaks, and when its server has
    /// become read-only, or silent.
    Dialled(Redial<MultiplexedConnection>),
    /// A connection from the pool for each call.
    #[cfg(feature = "deadpool")]
    Pooled(deadpool_redis::Pool),
    /// The connection knows the nodes and their slots. It is replaced when one of them is silent.
    #[cfg(feature = "cluster")]
    Cluster(Box<Cluster>),
}

impl Link {
    /// Whether waiters can hear what a script publishes: in a cluster a message would go to every node.
    pub(crate) fn can_publish(&self) -> bool {
        match self {
            #[cfg(feature = "cluster")]
            Self::Cluster(_) => false,
            _ => true,
        }
    }

    /// Sends a command, and what it answered. Errors of the server are errors.
    pub(crate) async fn send(&self, deadline: Instant, command: &Cmd) -> RedisResult<Value> {
        match self {
            Self::Dialled(redial) => redial.with(deadline, |it| send(it, command)).await,
            #[cfg(feature = "deadpool")]
            Self::Pooled(pool) => {
                let sent = pooled(pool, |it| send(it, command));
                Box::pin(in_time(deadline, sent)).await
            }
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => Box::pin(cluster.send(deadline, command)).await,
        }
    }

    /// Sends two commands at once, on one connection and in this order.
    pub(crate) async fn send_both(
        &self,
        deadline: Instant,
        first: &Cmd,
        second: &Cmd,
    ) -> RedisResult<(Value, Value)> {
        let mut both = redis::pipe();
        both.add_command(first.clone());
        both.add_command(second.clone());
        match self {
            Self::Dialled(redial) => redial.with(deadline, |it| send_both(it, &both)).await,
            #[cfg(feature = "deadpool")]
            Self::Pooled(pool) => {
                let sent = pooled(pool, |it| send_both(it, &both));
                Box::pin(in_time(deadline, sent)).await
            }
            // Nobody waits for replicas there.
            #[cfg(feature = "cluster")]
            Self::Cluster(_) => {
                let message = "a cluster takes one command at a time";
                Err((redis::ErrorKind::Client, message).into())
            }
        }
    }
}

pub(crate) async fn send(mut connection: impl ConnectionLike, command: &Cmd) -> RedisResult<Value> {
    connection
        .req_packed_command(command)
        .await?
        .extract_error()
}

pub(crate) async fn send_both(
    mut connection: impl ConnectionLike,
    pipeline: &Pipeline,
) -> RedisResult<(Value, Value)> {
    let mut answers = connection
        .req_packed_commands(pipeline, 0, 2)
        .await?
        .into_iter();
    match (answers.next(), answers.next()) {
        (Some(first), Some(second)) => Ok((first.extract_error()?, second.extract_error()?)),
        _ => Err((redis::ErrorKind::Parse, "expected two answers").into()),
    }
}

/// Makes a call on a connection of the pool. One to a server that is no longer the primary is no good for the pool either,
/// which looks whether it answers, and no further.
#[cfg(feature = "deadpool")]
async fn pooled<T, F>(
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
            "the pool gave no connection",
            error.to_string(),
        )
            .into(),
    })?;
    let result = call(MultiplexedConnection::clone(&connection)).await;
    if result.as_ref().is_err_and(is_final) {
        drop(deadpool_redis::Connection::take(connection));
    }
    result
}
