//! The statements of a fenced transaction, for other drivers.

use tower_idempotency_sql::MySqlFence;

use super::MySqlStore;
use crate::{SqlError, timeout::with_timeout};

impl MySqlStore {
    /// Returns the statements of [`begin`](Self::begin) and its commit, for another driver.
    ///
    /// Their limit of records is that of the store. It depends on the server's `max_allowed_packet`, so the call connects
    /// unless an earlier call has connected.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached, or does not reply within 30 seconds.
    ///
    /// # Cancellation
    ///
    /// Safe to drop.
    pub async fn fence(&self) -> Result<MySqlFence, SqlError> {
        let limit = with_timeout(self.inner.record_limit()).await?;
        let fence = self.inner.statements.fence().clone();
        Ok(fence.with_record_limit(limit))
    }
}
