//! Transactions of handlers, checkpoints and orphans in MySQL and MariaDB.

use sqlx::{
    Connection as _, Executor as _, MySql, MySqlConnection, MySqlPool, Row, mysql::MySqlRow, query,
    raw_sql,
};
use tower_idempotency::{
    Lease,
    store::{Fingerprint, KeyId, LeaseRef, Ttl},
};

use super::{MySqlStore, is_deadlock};
use crate::{
    Checkpoint, FencedTransaction, SqlError, TransactionError,
    completer::{Found, Page},
    connections::Purpose,
    sql_store::{SqlStore, Standing, Written, millis},
};

impl MySqlStore {
    /// Begins a transaction of the handler's that is fenced by its lease: see [`FencedTransaction`].
    ///
    /// `pool` is the handler's own, and leads to the database in which the store has its table. The transaction is at READ
    /// COMMITTED whatever the pool defaults to. Takes two round trips, besides those of the pool, and more the first time on
    /// a connection, which keeps what it prepares then. A statement that changes a table's definition commits it, as
    /// everywhere in MySQL: do without.
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
    ) -> Result<FencedTransaction<Self>, TransactionError> {
        FencedTransaction::begin(self, lease, pool).await
    }

    /// The last checkpoint of this request, which an execution before this one may have left, or this one.
    ///
    /// There is none before [`FencedTransaction::checkpoint`] wrote one; worth asking where
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
        let statements = &self.inner.statements;
        let standing = query(statements.standing.clone())
            .bind(lease.id.as_bytes().as_slice())
            .bind(lease.token.as_bytes().as_slice())
            .bind(lease.id.as_bytes().as_slice());
        let standing = match standing.fetch_optional(&mut *on).await? {
            Some(row) if row.try_get(0)? => Standing::Held,
            Some(_) => Standing::Lost,
            None => Standing::Absent,
        };
        // sqlx takes what comes next for an answer if it is cut off while it prepares a statement. Here it is not cut off; so
        // what is to be written last is prepared now, unless it is kept from before, or the pool keeps none.
        if standing == Standing::Held && on.cached_statements_size() > 0 {
            on.prepare(statements.fence.clone()).await?;
            on.prepare(statements.has_checkpoint.clone()).await?;
            on.prepare(statements.write_checkpoint.clone()).await?;
        }
        Ok(standing)
    }

    async fn write_record(
        &self,
        on: &mut MySqlConnection,
        lease: &LeaseRef,
        record: &[u8],
        retention: Ttl,
    ) -> Result<bool, SqlError> {
        is_in_the_transaction(on).await?;
        let writing = query(self.inner.statements.fence.clone())
            .bind(millis(retention))
            .bind(record)
            .bind(lease.id.as_bytes().as_slice())
            .bind(lease.token.as_bytes().as_slice());
        Ok(writing.execute(on).await?.rows_affected() > 0)
    }

    async fn write_checkpoint(
        &self,
        on: &mut MySqlConnection,
        lease: &LeaseRef,
        checkpoint: &Checkpoint,
    ) -> Result<Written, SqlError> {
        is_in_the_transaction(on).await?;
        let statements = &self.inner.statements;
        let before = query(statements.has_checkpoint.clone())
            .bind(checkpoint.name())
            .bind(checkpoint.json())
            .bind(lease.id.as_bytes().as_slice())
            .bind(lease.token.as_bytes().as_slice());
        match before.fetch_optional(&mut *on).await? {
            Some(row) if row.try_get(0)? => return Ok(Written::Same),
            Some(_) => {}
            None => return Ok(Written::Lost),
        }
        let writing = query(statements.write_checkpoint.clone())
            .bind(checkpoint.name())
            .bind(checkpoint.json())
            .bind(lease.id.as_bytes().as_slice());
        writing.execute(on).await?;
        Ok(Written::Changed)
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
        is_deadlock(code)
    }
}

/// Releases the savepoint that the transaction began with, which is gone with it.
async fn is_in_the_transaction(on: &mut MySqlConnection) -> Result<(), SqlError> {
    let mut release = async || {
        let release = raw_sql("release savepoint tower_idempotency");
        let released = release.execute(&mut *on).await.map_err(SqlError::from);
        released.map(drop)
    };
    let is_missing = |error: &SqlError| error.code() == Some("1305");
    match release().await {
        // sqlx answers first with what it has in line, as for a savepoint of the handler's that was cut off: what it answers
        // to the same question now is ours.
        Err(error) if is_missing(&error) => match release().await {
            Err(error) if is_missing(&error) => Err(SqlError::ended()),
            Ok(()) | Err(_) => Err(error),
        },
        released => released,
    }
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
        seen: row.try_get(5)?,
    })
}
