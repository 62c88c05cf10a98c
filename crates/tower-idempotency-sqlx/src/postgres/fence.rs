//! The statements of a fenced transaction, for other drivers.

use tower_idempotency_sql::PostgresFence;

use super::PostgresStore;

impl PostgresStore {
    /// Returns the statements of [`begin`](Self::begin) and its commit, for another driver.
    #[must_use]
    pub fn fence(&self) -> PostgresFence {
        self.inner.statements.fence().clone()
    }
}

/// Converts like [`PostgresStore::fence`], so that the `begin` of another driver takes `&store`.
impl From<&PostgresStore> for PostgresFence {
    fn from(store: &PostgresStore) -> Self {
        store.fence()
    }
}
