//! The statements for MySQL and MariaDB.

use std::sync::Arc;

use tower_idempotency::store::MIN_RECORD_LIMIT;

use crate::{Table, TableNameError};

/// Time at which the statement began, in milliseconds since 1970. Uses UTC: local time repeats an hour in autumn.
macro_rules! now {
    () => {
        "(timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000)"
    };
}

/// Condition that the token holds the entry, even with an expired lease.
macro_rules! is_held {
    () => {
        concat!(
            "id = ? and token = ? and completed is null and expires > ",
            now!()
        )
    };
}

/// The statements that fence a handler's transaction on MySQL and MariaDB.
///
/// `MySqlStore::fence` of `tower-idempotency-sqlx` returns those of a store. The store itself uses its own connections.
/// [`FencedTransaction`](crate::FencedTransaction) implements this protocol. A driver that cannot use that type executes
/// these steps on one connection, to the database with the store's table:
///
/// 1. Begin a transaction with [`BEGIN`](Self::BEGIN), which also marks it with a savepoint. Send its statements as text,
///    because MySQL cannot prepare a savepoint.
/// 2. Execute [`lease_status_sql`](Self::lease_status_sql). If the lease is not held, roll back. Call
///    [`LeaseExt::fail_transaction`](tower_idempotency::transaction::LeaseExt::fail_transaction) then, and after an error of
///    step 1 or 2. Otherwise register the transaction with
///    [`LeaseExt::open_transaction`](tower_idempotency::transaction::LeaseExt::open_transaction).
/// 3. Execute the handler's statements. None of them may change a table's definition, because MySQL would commit first.
/// 4. [Prepare](tower_idempotency::transaction::LeaseExt::prepare) the record. If the layer does not record the response, roll
///    back and return the response. A record above [`record_limit`](Self::record_limit) becomes a
///    [tombstone](tower_idempotency::transaction::Prepared::into_tombstone).
/// 5. In [`Prepared::commit`](tower_idempotency::transaction::Prepared::commit), execute
///    [`RELEASE_MARK`](Self::RELEASE_MARK) and then [`write_record_sql`](Self::write_record_sql). Commit if it changed a row.
///    Otherwise roll back. Return [`StoreError::LeaseLost`](tower_idempotency::store::StoreError::LeaseLost) if it changed
///    none, and [`StoreError::backend`](tower_idempotency::store::StoreError::backend) after any other failure.
/// 6. Call [`OpenTransaction::end`](tower_idempotency::transaction::OpenTransaction::end) after the commit or the rollback.
///    After a [`StoreError::Backend`](tower_idempotency::store::StoreError::Backend) of step 5, also call
///    [`LeaseExt::reject_commit`](tower_idempotency::transaction::LeaseExt::reject_commit) if no commit was sent, or if it
///    [was rejected](Self::is_commit_rejected).
///
/// Without the savepoint of step 1, `RELEASE_MARK` fails. If a handler returns a success without a commit and without
/// step 6, the layer responds with 500 `unfinished-transaction`.
///
/// ```
/// use tower_idempotency::store::LeaseRef;
/// use tower_idempotency_sql::{Driver, LeaseStatus, MySqlFence, RecordStatus, RecordWrite, SqlError};
/// # mod some_driver {
/// #     pub struct Transaction;
/// #     pub struct Error { pub number: Option<u16>, pub message: String }
/// #     pub enum Value<'a> { Bytes(&'a [u8]), Int(i64) }
/// #     impl Transaction {
/// #         pub async fn first(&mut self, _: &str, _: &[Value<'_>]) -> Result<Option<i64>, Error> { Ok(None) }
/// #         pub async fn execute(&mut self, _: &str, _: &[Value<'_>]) -> Result<u64, Error> { Ok(0) }
/// #         pub async fn run_text(&mut self, _: &str) -> Result<(), Error> { Ok(()) }
/// #     }
/// # }
/// use some_driver::Value::{Bytes, Int};
///
/// // This module relies on the parameters and results of this version.
/// const _: () = assert!(MySqlFence::VERSION == 1);
///
/// /// A transaction that was begun with `MySqlFence::BEGIN`.
/// struct Open(some_driver::Transaction);
///
/// impl Driver for Open {
///     type Fence = MySqlFence;
///     type Target = some_driver::Transaction;
///
///     async fn lease_status(&mut self, fence: &MySqlFence, lease: &LeaseRef) -> Result<LeaseStatus, SqlError> {
///         let (id, token) = (lease.id.as_bytes(), lease.token.as_bytes());
///         let parameters = [Bytes(id), Bytes(token), Bytes(id)];
///         let row = self.0.first(fence.lease_status_sql(), &parameters).await.map_err(failure)?;
///         Ok(LeaseStatus::from_row(row.map(|is_held| is_held == 1)))
///     }
///
///     async fn write_record(&mut self, fence: &MySqlFence, write: RecordWrite<'_>) -> Result<RecordStatus, SqlError> {
///         let released = self.0.run_text(MySqlFence::RELEASE_MARK).await.map_err(failure);
///         if let Err(error) = released {
///             let is_ended = error.code() == Some(MySqlFence::NO_MARK);
///             return if is_ended { Ok(RecordStatus::TransactionEnded) } else { Err(error) };
///         }
///         let needs_attention = i64::from(MySqlFence::needs_attention(write.record()));
///         let parameters = [
///             Int(needs_attention),
///             Int(needs_attention),
///             Int(write.retention_millis()),
///             Bytes(write.record()),
///             Bytes(write.id()),
///             Bytes(write.token()),
///         ];
///         let changed = self.0.execute(fence.write_record_sql(), &parameters).await.map_err(failure)?;
///         Ok(RecordStatus::from_row(true, changed > 0))
///     }
///
///     // The other methods are as for every driver.
/// #     fn target(&self) -> &Self::Target { &self.0 }
/// #     fn target_mut(&mut self) -> &mut Self::Target { &mut self.0 }
/// #     async fn commit(mut self) -> Result<(), SqlError> {
/// #         self.0.run_text("commit").await.map_err(failure)
/// #     }
/// #     async fn rollback(mut self) -> Result<(), SqlError> {
/// #         self.0.run_text("rollback").await.map_err(failure)
/// #     }
/// }
///
/// fn failure(error: some_driver::Error) -> SqlError {
///     match error.number {
///         Some(number) => SqlError::from_reported(&number.to_string(), &error.message),
///         None => SqlError::from_driver(error.message),
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct MySqlFence {
    lease_status_sql: Arc<str>,
    write_record_sql: Arc<str>,
    record_limit: usize,
}

impl MySqlFence {
    /// Version of the order of the statements, and of their parameters and results. The text of a statement may change without
    /// it.
    ///
    /// An increase belongs to an incompatible release of this crate, because it stops the build of each driver's crate.
    ///
    /// A driver's crate compares it at compile time: `const _: () = assert!(MySqlFence::VERSION == 1);`.
    pub const VERSION: u32 = 1;

    /// Three statements that begin the transaction and mark it with a savepoint.
    ///
    /// A driver that sends one statement in each message executes `BEGIN.split("; ")` in order. A driver that begins
    /// transactions itself does so with the same isolation level and access mode, and then executes the third statement. At a
    /// higher isolation level, a renewal of the lease on another connection could make the commit fail.
    pub const BEGIN: &str = "set transaction isolation level read committed; start transaction read write; \
         savepoint tower_idempotency";

    /// Statement that removes the mark. It fails with [`NO_MARK`](Self::NO_MARK) if the transaction has ended.
    ///
    /// Send it as text, directly before [`write_record_sql`](Self::write_record_sql). If it fails, write no record, and roll
    /// back.
    pub const RELEASE_MARK: &str = "release savepoint tower_idempotency";

    /// Number of the error of [`RELEASE_MARK`](Self::RELEASE_MARK) after the end of the transaction: no such savepoint.
    ///
    /// A statement of the handler has ended the transaction, or a deadlock has rolled it back. With
    /// `innodb_rollback_on_timeout`, a lock timeout does so too. Writes of the handler may be committed: see
    /// [`Ended`](crate::TransactionErrorKind::Ended).
    pub const NO_MARK: &str = "1305";

    /// The statement of [`lease_status_sql`](Self::lease_status_sql), for the default table `tower_idempotency`.
    pub const LEASE_STATUS: &str = concat!(
        "select coalesce(",
        is_held!(),
        ", false) from `tower_idempotency` where id = ?"
    );

    /// The statement of [`write_record_sql`](Self::write_record_sql), for the default table `tower_idempotency`.
    // No expression reads the new record from its column, because a session of MariaDB may assign all columns at once.
    pub const WRITE_RECORD: &str = concat!(
        "update `tower_idempotency` set
  checkpoint = if(?, checkpoint, null),
  checkpoint_data = if(?, checkpoint_data, null),
  expires = ",
        now!(),
        " + ?,
  record = ?,
  completed = ",
        now!(),
        "\nwhere ",
        is_held!()
    );

    /// Size of the largest record in bytes that a table can store: 128 MiB.
    pub const MAX_RECORD_BYTES: usize = 128 << 20;

    /// Creates the statements for a table, such as `payments.idempotency`. Use the same name as the store.
    ///
    /// # Errors
    ///
    /// If a part of the name is not 1 to 48 of `a` to `z`, `0` to `9` and `_`, or begins with a digit.
    pub fn new(table: &str) -> Result<Self, TableNameError> {
        Ok(Self::for_table(&Table::parse(table)?))
    }

    /// Creates the statements for a validated name of a table.
    #[must_use]
    pub fn for_table(table: &Table) -> Self {
        Self {
            lease_status_sql: table.in_migration(Self::LEASE_STATUS, '`').into(),
            write_record_sql: table.in_migration(Self::WRITE_RECORD, '`').into(),
            record_limit: Self::MAX_RECORD_BYTES,
        }
    }

    /// Sets the size of the largest record in bytes. Default and maximum: 128 MiB. Minimum: [`MIN_RECORD_LIMIT`].
    ///
    /// `MySqlStore::fence` sets it to the limit of the store. A record must fit into the server's `max_allowed_packet`. With
    /// a larger limit than that, the server rejects large records, and their transactions are rolled back.
    #[must_use]
    pub fn with_record_limit(mut self, bytes: usize) -> Self {
        self.record_limit = bytes.clamp(MIN_RECORD_LIMIT, Self::MAX_RECORD_BYTES);
        self
    }

    /// Returns the statement that reads the status of the lease.
    ///
    /// Parameters, in this order: [`LeaseRef::id`](tower_idempotency::store::LeaseRef), its token, and the ID again. Each is a
    /// `binary` value.
    ///
    /// Returns no row if there is no entry. Otherwise it returns one row with one integer: 1 if the lease is held, 0 if it
    /// is not. The lease is held while the token holds the entry, also after the expiry of the lease. The table is missing if
    /// the number of the error [is one of a missing table](Self::is_missing_table).
    #[must_use]
    pub fn lease_status_sql(&self) -> &str {
        &self.lease_status_sql
    }

    /// Returns the statement that writes the record if the token holds the entry. A record that needs attention keeps the
    /// checkpoint; any other deletes it.
    ///
    /// Execute it last, and [`RELEASE_MARK`](Self::RELEASE_MARK) directly before it. Parameters, in this order:
    ///
    /// 1. [`needs_attention`](Self::needs_attention) of the record, as 1 or 0
    /// 2. the same again
    /// 3. the retention in milliseconds, as `bigint`
    /// 4. the record, as `longblob`
    /// 5. the ID, as `binary`
    /// 6. the token, as `binary`
    ///
    /// The record is written if the statement changes one row. If it changes none, the lease is lost. The count is the same
    /// whether the connection counts changed rows or found ones.
    #[must_use]
    pub fn write_record_sql(&self) -> &str {
        &self.write_record_sql
    }

    /// Returns `true` if the record needs attention. This is the value of the first two parameters of
    /// [`write_record_sql`](Self::write_record_sql).
    #[must_use]
    pub fn needs_attention(record: &[u8]) -> bool {
        record.get(1) == Some(&2)
    }

    /// Returns the size of the largest record in bytes.
    #[must_use]
    pub fn record_limit(&self) -> usize {
        self.record_limit
    }

    /// Returns `true` if the error number of [`lease_status_sql`](Self::lease_status_sql) means that the table is missing.
    #[must_use]
    pub fn is_missing_table(code: &str) -> bool {
        // No such table, database or column.
        ["1146", "1049", "1054"].contains(&code)
    }

    /// Returns `true` if the error number of a commit means that nothing was committed.
    ///
    /// After any other error of a commit, its outcome is unknown.
    #[must_use]
    pub fn is_commit_rejected(code: &str) -> bool {
        // A deadlock, or a failed certification: 1213 in a Galera cluster, 3101 in group replication.
        ["1213", "3101"].contains(&code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_statements_of_default_table() {
        let fence = MySqlFence::default();
        assert_eq!(fence.lease_status_sql(), MySqlFence::LEASE_STATUS);
        assert_eq!(fence.write_record_sql(), MySqlFence::WRITE_RECORD);
    }

    #[test]
    fn statements_name_given_table() {
        let fence = MySqlFence::new("payments.tower_idempotency_eu").expect("a valid name");
        for statement in [fence.lease_status_sql(), fence.write_record_sql()] {
            assert!(
                statement.contains("`payments`.`tower_idempotency_eu`"),
                "{statement}"
            );
        }
        MySqlFence::new("a`; drop table b; --").expect_err("no name");
    }

    #[test]
    fn begin_has_three_statements() {
        let statements: Vec<_> = MySqlFence::BEGIN.split("; ").collect();
        assert_eq!(statements.len(), 3, "{statements:?}");
        assert_eq!(
            MySqlFence::RELEASE_MARK,
            format!("release {}", statements[2])
        );
    }
}
