//! Timeout for the store's own calls, which no layer bounds.

use std::{future::Future, time::Duration};

use tokio::time::timeout;

use crate::SqlError;

/// Returns the result of `call`, or an error after 30 seconds.
///
/// Without the limit, the caller would wait forever for a server that vanished, and hold a connection permit meanwhile.
/// A call that times out closes its connection.
pub(crate) async fn with_timeout<T>(
    call: impl Future<Output = Result<T, SqlError>>,
) -> Result<T, SqlError> {
    match timeout(TIMEOUT, call).await {
        Ok(result) => result,
        Err(elapsed) => Err(sqlx::Error::Io(elapsed.into()).into()),
    }
}

/// Longer than any of these calls takes on a live server. The calls are a purger's batch, a page of orphans, and a read
/// of one row, which may wait for a lock three times.
const TIMEOUT: Duration = Duration::from_secs(30);
