//! Transactions of handlers, checkpoints and orphans in MySQL and MariaDB.

use std::sync::Arc;

use sqlx::{MySql, MySqlConnection, MySqlPool, Row, mysql::MySqlRow};
use tower_idempotency::{
    Lease,
    store::{Fingerprint, KeyId, LeaseRef, Ttl},
};

use super::{MySqlStore, run};
use crate::{
    Checkpoint, Fenced, SqlError, TransactionError,
    completer::{Found, Page},
    connections::Purpose,
    sql_store::{SqlStore, Standing, Written},
};

impl MySqlStore {
    /// Begins a transaction of the handler's that is fenced by its lease: see [`Fenced`].
    ///
    /// `pool` is the handler's own, and leads to the database in which the store has its table. The transaction is at READ
    /// COMMITTED whatever the pool defaults to. Takes two round trips, besides those of the pool. A statement that changes
    /// a table's definition commits it, as everywhere in MySQL: do without.
    ///
    /// # Errors
    ///
    /// [`LeaseLost`](crate::TransactionErrorKind::LeaseLost) when the lease is not held any more,
    /// [`NoEntry`](crate::TransactionErrorKind::NoEntry) when there is no such entry in the pool's database, and
    /// [`Database`](crate::TransactionErrorKind::Database).
    ///
    /// # Cancellation
    ///
    /// Dropped, nothing has happened: a transaction that begins all the same is rolled back, in a task of its own, if the
    /// database answers within the pool's `acquire_timeout`, of 5 seconds at least.
    pub async fn begin(
        &self,
        lease: &Lease,
        pool: &MySqlPool,
    ) -> Result<Fenced<Self>, TransactionError> {
        Fenced::begin(self, lease, pool).await
    }

    /// The last checkpoint of this request, which an execution before this one may have left, or this one.
    ///
    /// There is none before [`Fenced::checkpoint`] wrote one; worth asking where
    /// [`is_takeover`](Lease::is_takeover) says so. On a connection of the store's own.
    ///
    /// # Errors
    ///
    /// [`LeaseLost`](crate::TransactionErrorKind::LeaseLost) and [`Database`](crate::TransactionErrorKind::Database), the latter
    /// after 30 seconds without an answer, too.
    ///
    /// # Cancellation
    ///
    /// Safe to drop.
    pub async fn checkpoint(&self, lease: &Lease) -> Result<Option<Checkpoint>, TransactionError> {
        Checkpoint::last(self, lease).await
    }
}

impl SqlStore for MySqlStore {
    type Database = MySql;

    const BEGIN: &'static str = "set transaction isolation level read committed; start transaction read write; savepoint tower_idempotency";

    async fn largest_record(&self) -> Result<usize, SqlError> {
        self.inner.record_limit().await
    }

    async fn standing(
        &self,
        on: &mut MySqlConnection,
        lease: &LeaseRef,
    ) -> Result<Standing, SqlError> {
        let rows = run(on, &Arc::new(self.inner.statements.standing(lease))).await?;
        Ok(match rows.first() {
            Some(row) if row.try_get(0)? => Standing::Held,
            Some(_) => Standing::Lost,
            None => Standing::Absent,
        })
    }

    async fn write_record(
        &self,
        on: &mut MySqlConnection,
        lease: &LeaseRef,
        record: &[u8],
        retention: Ttl,
    ) -> Result<bool, SqlError> {
        let statement = self.inner.statements.fence(lease, record, retention);
        Ok(!in_the_transaction(on, statement).await?.is_empty())
    }

    async fn write_checkpoint(
        &self,
        on: &mut MySqlConnection,
        lease: &LeaseRef,
        checkpoint: &Checkpoint,
    ) -> Result<Written, SqlError> {
        let statement = self.inner.statements.write_checkpoint(lease, checkpoint);
        Ok(match in_the_transaction(on, statement).await?.first() {
            Some(row) if row.try_get(0)? => Written::Same,
            Some(_) => Written::Changed,
            None => Written::Lost,
        })
    }

    async fn read_checkpoint(
        &self,
        lease: &LeaseRef,
        settled: bool,
    ) -> Result<Option<Option<Checkpoint>>, SqlError> {
        let statement = self.inner.statements.read_checkpoint(lease, settled);
        let rows = self.inner.ask(Purpose::Keep, statement).await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let Some(name) = row.try_get::<Option<String>, _>(0)? else {
            return Ok(Some(None));
        };
        Ok(Some(Some(Checkpoint::stored(name, row.try_get(1)?))))
    }

    async fn orphans(&self, page: &Page) -> Result<Vec<Found>, SqlError> {
        let statement = self.inner.statements.orphans(page);
        let rows = self.inner.ask(Purpose::Keep, statement).await?;
        rows.iter().map(found).collect()
    }

    async fn is_due(&self, orphan: &Found, page: &Page) -> Result<bool, SqlError> {
        let statement = self.inner.statements.is_due(orphan, page);
        Ok(!self.inner.ask(Purpose::Keep, statement).await?.is_empty())
    }

    fn is_missing_table(code: &str) -> bool {
        // No such table, database or column.
        ["1146", "1049", "1054"].contains(&code)
    }

    fn is_refusal(code: &str) -> bool {
        // A deadlock, as certification in a cluster reports.
        code == "1213"
    }
}

/// Releases the savepoint that the transaction began with, which is gone with it, and only then runs the statement.
async fn in_the_transaction(
    on: &mut MySqlConnection,
    statement: String,
) -> Result<Vec<MySqlRow>, SqlError> {
    let statement = format!("release savepoint tower_idempotency; {statement}");
    let rows = run(on, &Arc::new(statement)).await.map_err(SqlError::from);
    // No such savepoint.
    rows.map_err(|error| match error.code() {
        Some("1305") => SqlError::ended(),
        _ => error,
    })
}

fn found(row: &MySqlRow) -> Result<Found, SqlError> {
    let digest = |bytes: Vec<u8>| -> Result<[u8; 32], SqlError> {
        let bytes = bytes.try_into();
        bytes.map_err(|_| SqlError::unreadable("no digest"))
    };
    Ok(Found {
        id: KeyId::from_bytes(digest(row.try_get(0)?)?),
        fingerprint: Fingerprint::from_bytes(digest(row.try_get(1)?)?),
        generation: row.try_get(2)?,
        lease_ends: row.try_get(3)?,
        operation: row.try_get(4)?,
    })
}
