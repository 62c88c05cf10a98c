//! The statements for SQLite.

use std::sync::Arc;

use tower_idempotency::store::MIN_RECORD_LIMIT;

use crate::{Table, TableNameError};

/// The primary result code of errors of the disk.
const SQLITE_IOERR: u32 = 10;

/// Current time in milliseconds since 1970, constant within a statement.
macro_rules! now {
    () => {
        "cast(unixepoch('subsec') * 1000 as integer)"
    };
}

/// Condition that the token holds an entry, even with an expired lease.
macro_rules! is_held {
    () => {
        concat!("token = ?2 and completed is null and expires > ", now!())
    };
}

/// Condition that the record needs attention, as in the index of these records.
macro_rules! needs_attention {
    () => {
        "substr(?4, 2, 1) = x'02'"
    };
}

/// The statements that fence a handler's transaction on SQLite, 3.42 or later.
///
/// `SqliteStore::fence` of `tower-idempotency-sqlx` returns those of a store. The store itself uses its own connections.
/// [`FencedTransaction`](crate::FencedTransaction) implements this protocol. A driver that cannot use that type executes
/// these steps on one connection. The store's table and the handler's tables are in its main file, not in an attached one:
///
/// 1. Begin a transaction with [`BEGIN`](Self::BEGIN), or with a call of the driver that sends it. Mark the transaction with
///    [`MARK`](Self::MARK).
/// 2. Execute [`lease_status_sql`](Self::lease_status_sql). If the lease is not held, roll back. Call
///    [`LeaseExt::fail_transaction`](tower_idempotency::transaction::LeaseExt::fail_transaction) then, and after an error of
///    step 1 or 2. Otherwise register the transaction with
///    [`LeaseExt::open_transaction`](tower_idempotency::transaction::LeaseExt::open_transaction).
/// 3. Execute the handler's statements. Until the end of the transaction, no other connection can write to the file.
/// 4. [Prepare](tower_idempotency::transaction::LeaseExt::prepare) the record. If the layer does not record the response, roll
///    back and return the response. A record above [`record_limit`](Self::record_limit) becomes a
///    [tombstone](tower_idempotency::transaction::Prepared::into_tombstone).
/// 5. In [`Prepared::commit`](tower_idempotency::transaction::Prepared::commit), execute
///    [`RELEASE_MARK`](Self::RELEASE_MARK) and then [`write_record_sql`](Self::write_record_sql). Commit if it returned a row.
///    If the commit fails, SQLite leaves the transaction open. Roll back after a failure, or close the connection. Then
///    return [`StoreError::LeaseLost`](tower_idempotency::store::StoreError::LeaseLost) if there was no row, and
///    [`StoreError::backend`](tower_idempotency::store::StoreError::backend) after any other failure.
/// 6. Call [`OpenTransaction::end`](tower_idempotency::transaction::OpenTransaction::end) after the commit or the rollback.
///    After a [`StoreError::Backend`](tower_idempotency::store::StoreError::Backend) of step 5, also call
///    [`LeaseExt::reject_commit`](tower_idempotency::transaction::LeaseExt::reject_commit) if no commit was sent, or if it
///    [was rejected](Self::is_commit_rejected).
///
/// Without the mark of step 1, `RELEASE_MARK` fails. If a handler returns a success without a commit and without step 6, the
/// layer responds with 500 `unfinished-transaction`.
///
/// A version of SQLite before 3.42 reports each lease as lost, or the table as missing.
///
/// ```
/// use tower_idempotency::store::LeaseRef;
/// use tower_idempotency_sql::{Driver, LeaseStatus, RecordStatus, RecordWrite, SqlError, SqliteFence};
/// # mod some_driver {
/// #     pub struct Connection;
/// #     pub struct Error { pub extended_code: i32, pub message: String }
/// #     pub enum Value<'a> { Bytes(&'a [u8]), Int(i64) }
/// #     impl Connection {
/// #         pub async fn first(&mut self, _: &str, _: &[Value<'_>]) -> Result<Option<i64>, Error> { Ok(None) }
/// #         pub async fn execute(&mut self, _: &str) -> Result<(), Error> { Ok(()) }
/// #     }
/// # }
/// use some_driver::Value::{Bytes, Int};
///
/// // This module relies on the parameters and results of this version.
/// const _: () = assert!(SqliteFence::VERSION == 1);
///
/// /// A connection with a transaction that was begun with `SqliteFence::BEGIN`.
/// struct Open(some_driver::Connection);
///
/// impl Driver for Open {
///     type Fence = SqliteFence;
///     type Target = some_driver::Connection;
///
///     async fn lease_status(&mut self, fence: &SqliteFence, lease: &LeaseRef) -> Result<LeaseStatus, SqlError> {
///         self.0.execute(SqliteFence::MARK).await.map_err(failure)?;
///         let parameters = [Bytes(lease.id.as_bytes()), Bytes(lease.token.as_bytes())];
///         let row = self.0.first(fence.lease_status_sql(), &parameters).await.map_err(failure)?;
///         Ok(LeaseStatus::from_row(row.map(|is_held| is_held == 1)))
///     }
///
///     async fn write_record(&mut self, fence: &SqliteFence, write: RecordWrite<'_>) -> Result<RecordStatus, SqlError> {
///         let released = self.0.execute(SqliteFence::RELEASE_MARK).await.map_err(failure);
///         if let Err(error) = released {
///             let is_ended = error.code() == Some(SqliteFence::NO_MARK);
///             return if is_ended { Ok(RecordStatus::TransactionEnded) } else { Err(error) };
///         }
///         let parameters = [
///             Bytes(write.id()),
///             Bytes(write.token()),
///             Int(write.retention_millis()),
///             Bytes(write.record()),
///         ];
///         let row = self.0.first(fence.write_record_sql(), &parameters).await.map_err(failure)?;
///         Ok(RecordStatus::from_row(true, row.is_some()))
///     }
///
///     async fn commit(mut self) -> Result<(), SqlError> {
///         let committed = self.0.execute("commit").await;
///         if committed.is_err() {
///             // The rollback fails if SQLite has already rolled back.
///             self.0.execute("rollback").await.ok();
///         }
///         committed.map_err(failure)
///     }
///
///     // The other methods are as for every driver.
/// #     fn target(&self) -> &Self::Target { &self.0 }
/// #     fn target_mut(&mut self) -> &mut Self::Target { &mut self.0 }
/// #     async fn rollback(mut self) -> Result<(), SqlError> {
/// #         self.0.execute("rollback").await.map_err(failure)
/// #     }
/// }
///
/// fn failure(error: some_driver::Error) -> SqlError {
///     SqlError::from_reported(&error.extended_code.to_string(), &error.message)
/// }
/// ```
#[derive(Clone, Debug)]
pub struct SqliteFence {
    lease_status_sql: Arc<str>,
    write_record_sql: Arc<str>,
    record_limit: usize,
}

impl SqliteFence {
    /// Version of the order of the statements, and of their parameters and results. The text of a statement may change without
    /// it.
    ///
    /// An increase belongs to an incompatible release of this crate, because it stops the build of each driver's crate.
    ///
    /// A driver's crate compares it at compile time: `const _: () = assert!(SqliteFence::VERSION == 1);`.
    pub const VERSION: u32 = 1;

    /// Statement that begins the transaction.
    ///
    /// While another connection writes, it waits for at most the busy timeout of this connection. The default of SQLite is
    /// zero. A transaction that reads before it takes the lock for writes would fail if a renewal wrote in between.
    pub const BEGIN: &str = "begin immediate";

    /// Statement that marks the transaction with a savepoint. Execute it directly after [`BEGIN`](Self::BEGIN).
    pub const MARK: &str = "savepoint tower_idempotency";

    /// Statement that removes the mark. It fails with [`NO_MARK`](Self::NO_MARK) if the transaction has ended.
    ///
    /// Execute it directly before [`write_record_sql`](Self::write_record_sql). If it fails, write no record, and roll back.
    pub const RELEASE_MARK: &str = "release savepoint tower_idempotency";

    /// Extended result code of [`RELEASE_MARK`](Self::RELEASE_MARK) after the end of the transaction: no such savepoint.
    ///
    /// The handler has ended the transaction with a statement of its own, or SQLite has rolled it back. Writes of the handler
    /// may be committed: see [`Ended`](crate::TransactionErrorKind::Ended).
    pub const NO_MARK: &str = "1";

    /// The statement of [`lease_status_sql`](Self::lease_status_sql), for the default table `tower_idempotency`.
    pub const LEASE_STATUS: &str = concat!(
        "select coalesce(",
        is_held!(),
        ", false)\nfrom main.\"tower_idempotency\" where id = ?1"
    );

    /// The statement of [`write_record_sql`](Self::write_record_sql), for the default table `tower_idempotency`.
    pub const WRITE_RECORD: &str = concat!(
        "update main.\"tower_idempotency\" set expires = ",
        now!(),
        " + ?3, completed = ",
        now!(),
        ", record = ?4,
  checkpoint = case when ",
        needs_attention!(),
        " then checkpoint end,
  checkpoint_data = case when ",
        needs_attention!(),
        " then checkpoint_data end\nwhere id = ?1 and ",
        is_held!(),
        " returning 1"
    );

    /// Size of the largest record in bytes that a table can store: 128 MiB.
    // Well below SQLite's limit of 1,000,000,000 bytes for a row.
    pub const MAX_RECORD_BYTES: usize = 128 << 20;

    /// Creates the statements for a table without a schema, such as `idempotency`. Use the same name as the store.
    ///
    /// # Errors
    ///
    /// If the name is not 1 to 48 of `a` to `z`, `0` to `9` and `_`, or begins with a digit.
    pub fn new(table: &str) -> Result<Self, TableNameError> {
        Ok(Self::for_table(&Table::parse_name(table)?))
    }

    /// Creates the statements for a validated name of a table. SQLite rejects them if the name has a schema.
    #[must_use]
    pub fn for_table(table: &Table) -> Self {
        Self {
            lease_status_sql: table.in_migration(Self::LEASE_STATUS, '"').into(),
            write_record_sql: table.in_migration(Self::WRITE_RECORD, '"').into(),
            record_limit: Self::MAX_RECORD_BYTES,
        }
    }

    /// Sets the size of the largest record in bytes. Default and maximum: 128 MiB. Minimum: [`MIN_RECORD_LIMIT`].
    ///
    /// With a larger limit than the store's, a handler commits records that the store itself would reject.
    #[must_use]
    pub fn with_record_limit(mut self, bytes: usize) -> Self {
        self.record_limit = bytes.clamp(MIN_RECORD_LIMIT, Self::MAX_RECORD_BYTES);
        self
    }

    /// Returns the statement that reads the status of the lease.
    ///
    /// Parameters: `?1` is [`LeaseRef::id`](tower_idempotency::store::LeaseRef), `?2` its token, both blobs.
    ///
    /// Returns no row if there is no entry. Otherwise it returns one row with one integer: 1 if the lease is held, 0 if it
    /// is not. The lease is held while the token holds the entry, also after the expiry of the lease. The table is missing if
    /// the code of the error [is one of a missing table](Self::is_missing_table).
    #[must_use]
    pub fn lease_status_sql(&self) -> &str {
        &self.lease_status_sql
    }

    /// Returns the statement that writes the record if the token holds the entry. A record that needs attention keeps the
    /// checkpoint; any other deletes it.
    ///
    /// Execute it last, and [`RELEASE_MARK`](Self::RELEASE_MARK) directly before it. Parameters: `?1` and `?2` like
    /// [`lease_status_sql`](Self::lease_status_sql), `?3` the retention in milliseconds as an integer, and `?4` the record as
    /// a blob.
    ///
    /// Returns one row if the record is written, and none if the lease is lost. Use a call of the driver that returns rows.
    /// Read the result to its end, or reset the statement: SQLite cannot commit while a statement that writes is in progress.
    #[must_use]
    pub fn write_record_sql(&self) -> &str {
        &self.write_record_sql
    }

    /// Returns the size of the largest record in bytes.
    #[must_use]
    pub fn record_limit(&self) -> usize {
        self.record_limit
    }

    /// Returns `true` if the extended result code of [`lease_status_sql`](Self::lease_status_sql) means that the table is
    /// missing.
    #[must_use]
    pub fn is_missing_table(code: &str) -> bool {
        // The statement is valid, so this error can only be a missing name.
        code == "1"
    }

    /// Returns `true` unless the disk failed: after any other error of a commit, nothing was committed.
    #[must_use]
    pub fn is_commit_rejected(code: &str) -> bool {
        // SQLite runs in this process, so its reports are reliable: nothing was committed, and the transaction may be open. But
        // if the sync of the log fails, a recovery can find the commit in the log.
        code.parse::<u32>()
            .is_ok_and(|code| code & 0xff != SQLITE_IOERR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_statements_of_default_table() {
        let fence = SqliteFence::default();
        assert_eq!(fence.lease_status_sql(), SqliteFence::LEASE_STATUS);
        assert_eq!(fence.write_record_sql(), SqliteFence::WRITE_RECORD);
    }

    /// SQLite reports a failed sync of the log as 1034.
    #[test]
    fn failed_disk_rejects_no_commit() {
        for (code, is_rejected) in [("5", true), ("787", true), ("10", false), ("1034", false)] {
            assert_eq!(SqliteFence::is_commit_rejected(code), is_rejected, "{code}");
        }
    }

    #[test]
    fn statements_name_given_table() {
        let fence = SqliteFence::new("tower_idempotency_eu").expect("a valid name");
        for statement in [fence.lease_status_sql(), fence.write_record_sql()] {
            assert!(
                statement.contains("main.\"tower_idempotency_eu\""),
                "{statement}"
            );
        }
        SqliteFence::new("a\"; drop table b; --").expect_err("no name");
        SqliteFence::new("main.keys").expect_err("a schema");
    }

    #[test]
    fn mark_is_savepoint_of_release() {
        let release = format!("release {}", SqliteFence::MARK);
        assert_eq!(SqliteFence::RELEASE_MARK, release);
    }
}
