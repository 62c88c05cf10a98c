//! The statements for PostgreSQL.

use std::{fmt, sync::Arc};

use tower_idempotency::store::MIN_RECORD_LIMIT;

use crate::{Table, TableNameError, fence::RecordWrite};

/// Name of the setting that marks a transaction.
macro_rules! mark {
    () => {
        "tower_idempotency.transaction"
    };
}

/// Condition that is true only in the marked transaction.
macro_rules! is_marked {
    () => {
        concat!(
            "coalesce(current_setting('",
            mark!(),
            "', true) = 'fenced', false)"
        )
    };
}

/// Condition that the token holds the entry, even with an expired lease.
///
/// A check of the table makes `record is null` the same as `completed is null`. With the latter, the planner may read the whole
/// index of orphans for each ID.
macro_rules! is_held {
    () => {
        "e.id = $1 and e.token = $2 and e.record is null and e.expires > now"
    };
}

/// Condition that the record needs attention, as in the index of these records. It has no backslash, because some sessions
/// read one as the beginning of an escape sequence.
macro_rules! needs_attention {
    () => {
        "substring($3::bytea from 2 for 1) = decode('02', 'hex')"
    };
}

/// Current time of the statement, in milliseconds since 1970.
macro_rules! clock {
    () => {
        "(select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock"
    };
}

/// The statements that fence a handler's transaction on PostgreSQL.
///
/// `PostgresStore::fence` of `tower-idempotency-sqlx` returns those of a store. The store itself uses its own connections.
/// [`FencedTransaction`](crate::FencedTransaction) implements this protocol. The [documentation of the crate](crate) has an
/// example. A driver that cannot use that type executes these steps on one connection, to the database with the store's
/// table:
///
/// 1. Begin a transaction with [`BEGIN`](Self::BEGIN), or with the same isolation level and access mode.
/// 2. Execute [`lease_status_sql`](Self::lease_status_sql). If the lease is not held, roll back. Call
///    [`LeaseExt::fail_transaction`](tower_idempotency::transaction::LeaseExt::fail_transaction) then, and after an error of
///    step 1 or 2. Otherwise register the transaction with
///    [`LeaseExt::open_transaction`](tower_idempotency::transaction::LeaseExt::open_transaction).
/// 3. Execute the handler's statements.
/// 4. [Prepare](tower_idempotency::transaction::LeaseExt::prepare) the record. If the layer does not record the response, roll
///    back and return the response. A record above [`record_limit`](Self::record_limit) becomes a
///    [tombstone](tower_idempotency::transaction::Prepared::into_tombstone).
/// 5. In [`Prepared::commit`](tower_idempotency::transaction::Prepared::commit), execute
///    [`write_record_sql`](Self::write_record_sql), then commit if it wrote the record. Otherwise roll back. Return
///    [`StoreError::LeaseLost`](tower_idempotency::store::StoreError::LeaseLost) if the transaction is marked and the record is
///    not written, and [`StoreError::backend`](tower_idempotency::store::StoreError::backend) after any other failure.
/// 6. Call [`OpenTransaction::end`](tower_idempotency::transaction::OpenTransaction::end) after the commit or the rollback.
///    After a [`StoreError::Backend`](tower_idempotency::store::StoreError::Backend) of step 5, also call
///    [`LeaseExt::reject_commit`](tower_idempotency::transaction::LeaseExt::reject_commit) if no commit was sent, or if it
///    [was rejected](Self::is_commit_rejected).
///
/// Without step 2 the last statement writes nothing. If a handler returns a success without a commit and without step 6, the
/// layer responds with 500 `unfinished-transaction`.
#[derive(Clone)]
pub struct PostgresFence {
    lease_status: Arc<str>,
    write_record: Arc<str>,
    table: Arc<str>,
    record_limit: usize,
}

impl PostgresFence {
    /// Version of the order of the statements, and of their parameters and results. The text of a statement may change without
    /// it.
    ///
    /// An increase belongs to an incompatible release of this crate, because it stops the build of each driver's crate.
    ///
    /// A driver's crate compares it at compile time: `const _: () = assert!(PostgresFence::VERSION == 1);`.
    pub const VERSION: u32 = 1;

    /// Statement that begins the transaction.
    ///
    /// At a higher isolation level, a renewal of the lease on another connection would make the commit fail.
    pub const BEGIN: &str = "begin transaction isolation level read committed, read write";

    /// The statement of [`lease_status_sql`](Self::lease_status_sql), for the default table `tower_idempotency`.
    pub const LEASE_STATUS: &str = concat!(
        "select coalesce(",
        is_held!(),
        ", false) as is_held, set_config('",
        mark!(),
        "', 'fenced', true) as mark\nfrom \"tower_idempotency\" e, ",
        clock!(),
        " where e.id = $1"
    );

    /// The statement of [`write_record_sql`](Self::write_record_sql), for the default table `tower_idempotency`.
    pub const WRITE_RECORD: &str = concat!(
        "with ended as (
  update \"tower_idempotency\" e set
    expires = now + $4,
    completed = now,
    record = $3,
    checkpoint = case when ",
        needs_attention!(),
        " then e.checkpoint end,
    checkpoint_data = case when ",
        needs_attention!(),
        " then e.checkpoint_data end
  from ",
        clock!(),
        " where ",
        is_held!(),
        " and ",
        is_marked!(),
        " returning e.id, e.awaited
)
select ",
        is_marked!(),
        " as is_marked, ended.awaited is not null as is_written,
  case when ended.awaited then pg_notify('tower_idempotency', encode(ended.id, 'hex'))::text end as notified
from (select 1) one left join ended on true"
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
            lease_status: table.in_migration(Self::LEASE_STATUS, '"').into(),
            write_record: table.in_migration(Self::WRITE_RECORD, '"').into(),
            table: table.in_migration("\"tower_idempotency\"", '"').into(),
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

    /// Returns the statement that reads the status of the lease, and marks the transaction.
    ///
    /// Parameters: `$1` is [`LeaseRef::id`](tower_idempotency::store::LeaseRef), `$2` its token, both `bytea`.
    ///
    /// Returns no row if there is no entry. Otherwise it returns one row. Its first column, `is_held`, is a `boolean`: the
    /// lease is held. The lease is held while the token holds the entry, also after the expiry of the lease. The second column
    /// has no meaning. The table is missing if the code of the error [is one of a missing table](Self::is_missing_table).
    #[must_use]
    pub fn lease_status_sql(&self) -> &str {
        &self.lease_status
    }

    /// Returns the statement that writes the record if the token holds the entry, and notifies waiters. A record that needs
    /// attention keeps the checkpoint; any other deletes it.
    ///
    /// Execute it last. Parameters: `$1` and `$2` like [`lease_status_sql`](Self::lease_status_sql), `$3` the record as
    /// `bytea`, and `$4` its retention in milliseconds as `bigint`.
    ///
    /// Returns one row. Its first two columns are of type `boolean`, and the third has no meaning:
    ///
    /// 1. `is_marked`: the statement was executed in the marked transaction. If it is false, the handler has ended the
    ///    transaction with a statement of its own, and the record is not written. See
    ///    [`Ended`](crate::TransactionErrorKind::Ended).
    /// 2. `is_written`: the record is written. If only this column is false, the lease is lost.
    #[must_use]
    pub fn write_record_sql(&self) -> &str {
        &self.write_record
    }

    /// Returns a statement without parameters that fails with [`NO_RECORD`](Self::NO_RECORD) unless the transaction has written
    /// this record.
    ///
    /// A driver that lends its transaction to several tasks needs it: a task may roll back to a savepoint after
    /// [`write_record_sql`](Self::write_record_sql), which removes the record. Send the statement and the commit in one
    /// message, so that no other statement comes between them.
    #[must_use]
    pub fn require_record_sql(&self, write: &RecordWrite<'_>) -> String {
        let (table, id, token) = (&self.table, Hex(write.id()), Hex(write.token()));
        format!(
            "select 1 / count(*) from {table} where id = decode('{id}', 'hex') \
             and token = decode('{token}', 'hex') and record is not null"
        )
    }

    /// SQLSTATE of [`require_record_sql`](Self::require_record_sql) if there is no record: a division by zero.
    pub const NO_RECORD: &str = "22012";

    /// Returns the size of the largest record in bytes.
    #[must_use]
    pub fn record_limit(&self) -> usize {
        self.record_limit
    }

    /// Returns `true` if the SQLSTATE of [`lease_status_sql`](Self::lease_status_sql) means that the table is missing.
    #[must_use]
    pub fn is_missing_table(code: &str) -> bool {
        // No such table, schema or column.
        ["42P01", "3F000", "42703"].contains(&code)
    }

    /// Returns `true` if the SQLSTATE of a commit means that nothing was committed.
    ///
    /// After any other error of a commit, its outcome is unknown. Such errors have a code of the classes 08, 53, 57, 58 and XX,
    /// the code 40003 or 25P04, or no complete code.
    #[must_use]
    pub fn is_commit_rejected(code: &str) -> bool {
        // PostgreSQL rolls back after each error of a commit. A deferred trigger may choose the code of its error. But after
        // the commit, a pooler or a server that ends may report that the connection or the session was lost.
        let is_uncertain = ["40003", "25P04"].contains(&code)
            || ["08", "53", "57", "58", "XX"]
                .into_iter()
                .any(|class| code.starts_with(class));
        code.len() == 5 && !is_uncertain
    }

    /// Returns the condition that a statement runs in the marked transaction.
    ///
    /// The mark is a setting that ends with the transaction, after a commit and after a rollback. A savepoint as the mark would
    /// put the handler's writes into a subtransaction, which uses a second transaction ID.
    #[must_use]
    pub fn is_marked_sql() -> &'static str {
        is_marked!()
    }
}

/// Displays bytes as hexadecimal digits.
struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Shows the statements, which contain no values.
impl fmt::Debug for PostgresFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresFence")
            .field("lease_status_sql", &self.lease_status)
            .field("write_record_sql", &self.write_record)
            .field("record_limit", &self.record_limit)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use tower_idempotency::store::{Claim, Fingerprint, KeyId};

    use super::*;

    #[test]
    fn constants_are_statements_of_default_table() {
        let fence = PostgresFence::default();
        assert_eq!(fence.lease_status_sql(), PostgresFence::LEASE_STATUS);
        assert_eq!(fence.write_record_sql(), PostgresFence::WRITE_RECORD);
    }

    /// The author of a trigger chose ACC01. A server that reports no code gives an empty one.
    #[test]
    fn uncertain_code_rejects_no_commit() {
        for (code, is_rejected) in [
            ("22003", true),
            (PostgresFence::NO_RECORD, true),
            ("23505", true),
            ("25006", true),
            ("40001", true),
            ("54000", true),
            ("ACC01", true),
            ("P0001", true),
            ("P0002", true),
            ("08006", false),
            ("25P04", false),
            ("40003", false),
            ("53100", false),
            ("57P01", false),
            ("58030", false),
            ("XX000", false),
            ("235", false),
            ("", false),
        ] {
            assert_eq!(
                PostgresFence::is_commit_rejected(code),
                is_rejected,
                "{code}"
            );
        }
    }

    /// With `completed is null` or its opposite, the planner may read a whole partial index for one ID.
    #[test]
    fn conditions_match_no_partial_index() {
        let fence = PostgresFence::default();
        let claim = Claim::new(KeyId::from_bytes([7; 32]), Fingerprint::from_bytes([7; 32]));
        let lease = claim.expect("randomness").lease_ref(1);
        let require_record = fence.require_record_sql(&RecordWrite::new(&lease, b"record", 1));
        for statement in [
            fence.lease_status_sql(),
            fence.write_record_sql(),
            require_record.as_str(),
        ] {
            assert!(!statement.contains("completed is"), "{statement}");
        }
    }

    #[test]
    fn statements_name_given_table() {
        let fence = PostgresFence::new("payments.tower_idempotency_eu").expect("a valid name");
        let table = "\"payments\".\"tower_idempotency_eu\" e";
        for statement in [fence.lease_status_sql(), fence.write_record_sql()] {
            assert!(statement.contains(table), "{statement}");
            assert!(statement.contains("'tower_idempotency.transaction'"));
        }
        let notify = "pg_notify('tower_idempotency_eu',";
        assert!(fence.write_record_sql().contains(notify));
        PostgresFence::new("a\"; drop table b; --").expect_err("no name");
    }
}
