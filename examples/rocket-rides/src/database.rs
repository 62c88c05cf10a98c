//! The connections of the handlers and of the worker. They wait for an unresponsive database no longer than a request may
//! take.

use std::{future::Future, time::Duration};

use tokio::time::timeout;
use tower_idempotency_sqlx::sqlx::{self, Connection as _, PgPool, postgres::PgPoolOptions};

use crate::Failure;

/// Connects a pool to the database at this URL. A handler waits at most `patience` for a connection.
///
/// When a connection returns, the sqlx pool checks if it is alive, and the connection counts as used until it replies.
/// This check has a timeout as well. Otherwise the pool would be empty after all its connections have hung once.
///
/// # Errors
///
/// Returns an error if the database cannot be reached.
///
/// # Cancellation
///
/// If the future is dropped, there are no effects.
pub async fn connect(url: &str, patience: Duration) -> Result<PgPool, Failure> {
    // With a lifetime or an idle timeout, sqlx 0.9.0 starts a task that may use a whole processor (sqlx issue 3645).
    let options = PgPoolOptions::new()
        .max_lifetime(None)
        .idle_timeout(None)
        .acquire_timeout(patience)
        .after_release(move |connection, _| {
            Box::pin(async move {
                let alive = timeout(patience, connection.ping()).await;
                alive.unwrap_or_else(|elapsed| Err(sqlx::Error::Io(elapsed.into())))?;
                Ok(true)
            })
        });
    Ok(options.connect(url).await?)
}

/// Returns the result of the work, or a failure (503) if it is not done within `limit`. If a commit was in flight, the layer
/// queries the store before it responds.
///
/// A driver waits for its server indefinitely, and a key stays in progress while its handler waits.
pub(crate) fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Failure>>,
) -> impl Future<Output = Result<T, Failure>> {
    // Boxed, because the future of a ride is large.
    let work = Box::pin(work);
    async move { timeout(limit, work).await? }
}
