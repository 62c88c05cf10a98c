//! The statements of a fenced transaction, for other drivers.

use std::fmt;

use super::PostgresStore;
use crate::backend::Backend;

/// The statements that fence a handler's transaction, for a driver other than sqlx 0.9.
///
/// [`PostgresStore::fence`] returns it. The store itself still uses its own connections of sqlx. A crate for a driver
/// calls this type; a handler calls that crate. This is the protocol, on one connection to the database that has the
/// store's table:
///
/// 1. Begin a transaction with [`BEGIN`](Self::BEGIN), or with the same isolation level.
/// 2. Execute [`lease_status_sql`](Self::lease_status_sql). Continue only if the lease is held. Register the transaction
///    with [`LeaseExt::open_transaction`](tower_idempotency::transaction::LeaseExt::open_transaction).
/// 3. Execute the handler's statements.
/// 4. [Prepare](tower_idempotency::transaction::LeaseExt::prepare) the record. A record above
///    [`record_limit`](Self::record_limit) becomes a
///    [tombstone](tower_idempotency::transaction::Prepared::into_tombstone).
/// 5. In [`Prepared::commit`](tower_idempotency::transaction::Prepared::commit), execute
///    [`write_record_sql`](Self::write_record_sql), then commit if it wrote the record. Roll back otherwise.
///
/// Without the second step the last statement writes nothing. Without the fifth the layer responds with an error.
#[derive(Clone)]
pub struct PostgresFence {
    store: PostgresStore,
}

impl PostgresFence {
    /// Version of the parameters and columns of the statements. A release that changes their meaning increases it.
    ///
    /// A driver's crate compares it at compile time: `const { assert!(PostgresFence::VERSION == 1) }`.
    pub const VERSION: u32 = 1;

    /// Statement that begins the transaction.
    ///
    /// At a higher isolation level, a renewal of the lease on another connection would make the commit fail.
    pub const BEGIN: &str = PostgresStore::BEGIN;

    /// Returns the statement that reads the status of the lease, and marks the transaction.
    ///
    /// Parameters: `$1` is [`LeaseRef::id`](tower_idempotency::store::LeaseRef), `$2` its token, both `bytea`.
    ///
    /// Returns no row if there is no entry. Otherwise it returns one row. Its first column is a `boolean`: the lease is
    /// held. The second column has no meaning. The table is missing if the code of the error
    /// [is one of a missing table](Self::is_missing_table).
    #[must_use]
    pub fn lease_status_sql(&self) -> &str {
        self.store.inner.statements.lease_status.as_str()
    }

    /// Returns the statement that writes the record if the token holds the entry, and notifies waiters.
    ///
    /// Execute it last. Parameters: `$1` and `$2` like [`lease_status_sql`](Self::lease_status_sql), `$3` the record as
    /// `bytea`, and `$4` its retention in milliseconds as `bigint`.
    ///
    /// Returns one row. Its first two columns are of type `boolean`, and the third has no meaning:
    ///
    /// 1. The statement was executed in the marked transaction. If it is false, the handler has ended the transaction
    ///    with a statement of its own, and nothing was written.
    /// 2. The record is written. If it is false, the lease is lost.
    #[must_use]
    pub fn write_record_sql(&self) -> &str {
        self.store.inner.statements.write_record.as_str()
    }

    /// Returns the size of the largest record in bytes.
    #[must_use]
    pub fn record_limit(&self) -> usize {
        self.store.inner.settings.record_limit
    }

    /// Returns `true` if the SQLSTATE of [`lease_status_sql`](Self::lease_status_sql) means that the table is missing.
    #[must_use]
    pub fn is_missing_table(code: &str) -> bool {
        PostgresStore::is_missing_table(code)
    }

    /// Returns `true` if the SQLSTATE of a commit means that nothing was committed.
    ///
    /// After any other error of a commit, its outcome is unknown.
    #[must_use]
    pub fn is_commit_rejected(code: &str) -> bool {
        PostgresStore::is_commit_rejected(code)
    }
}

impl PostgresStore {
    /// Returns the statements of [`begin`](Self::begin) and its commit, for another driver.
    #[must_use]
    pub fn fence(&self) -> PostgresFence {
        PostgresFence {
            store: self.clone(),
        }
    }
}

/// Shows the statements, which contain no values.
impl fmt::Debug for PostgresFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresFence")
            .field("lease_status_sql", &self.lease_status_sql())
            .field("write_record_sql", &self.write_record_sql())
            .finish_non_exhaustive()
    }
}
