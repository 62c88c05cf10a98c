//! The handlers' connections, which wait for a silent database no longer than a request may take.

use std::{future::Future, time::Duration};

use tokio::time::timeout;
use tower_idempotency_sqlx::sqlx::{self, Connection as _, PgPool, postgres::PgPoolOptions};

use crate::Failure;

/// A pool for the database at this URL. Nobody waits longer than `patience` for a place in it.
///
/// A pool of sqlx asks a connection that comes back whether it is alive, and the connection keeps its place until it answers.
/// So that is bounded as well: otherwise the pool is empty after as many connections as it has have hung.
///
/// # Errors
///
/// When the database cannot be reached.
///
/// # Cancellation
///
/// Dropped, nothing has happened.
pub async fn connect(url: &str, patience: Duration) -> Result<PgPool, Failure> {
    let options = PgPoolOptions::new()
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

/// What comes of the work within `limit`: 503 if nothing has. What was being committed is looked up by the layer before it
/// answers.
///
/// A driver waits for its server for ever, and the key of a handler that waits for ever is in progress for ever.
pub(crate) fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Failure>>,
) -> impl Future<Output = Result<T, Failure>> {
    // Boxed: the work of a ride is large.
    let work = Box::pin(work);
    async move { timeout(limit, work).await? }
}
