//! Calls of the store's own that no layer bounds.

use std::{future::Future, time::Duration};

use tokio::time::timeout;

use crate::SqlError;

/// The answer, or an error after a while: a server that vanished would be waited for for ever, and with it go a place among
/// the connections and whoever called. A call that is given up closes its connection.
pub(crate) async fn bounded<T>(
    call: impl Future<Output = Result<T, SqlError>>,
) -> Result<T, SqlError> {
    match timeout(LONGEST, call).await {
        Ok(answer) => answer,
        Err(elapsed) => Err(sqlx::Error::Io(elapsed.into()).into()),
    }
}

/// Longer than any of them takes on a server that is there: a batch of a purger, a page of orphans, and a look at one row,
/// for which a lock may be waited for three times.
const LONGEST: Duration = Duration::from_secs(30);
