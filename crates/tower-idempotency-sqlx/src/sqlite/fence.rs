//! The statements of a fenced transaction, for other drivers.

use tower_idempotency_sql::SqliteFence;

use super::SqliteStore;

impl SqliteStore {
    /// Returns the statements of [`begin`](Self::begin) and its commit, for another driver.
    #[must_use]
    pub fn fence(&self) -> SqliteFence {
        self.inner.statements.fence().clone()
    }
}

/// Converts like [`SqliteStore::fence`], so that the `begin` of another driver takes `&store`.
impl From<&SqliteStore> for SqliteFence {
    fn from(store: &SqliteStore) -> Self {
        store.fence()
    }
}
