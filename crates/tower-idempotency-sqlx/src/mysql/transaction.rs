//! Handlers' transactions, checkpoints and orphans in MySQL and MariaDB.

use sqlx::{
    Connection as _, Executor as _, MySql, MySqlConnection, MySqlPool, Row, query, raw_sql,
};
use tower_idempotency::{
    Lease,
    store::{LeaseRef, Ttl},
};
use tower_idempotency_sql::MySqlFence;

use super::{MySqlStore, read_orphan_row};
use crate::{
    Checkpoint, FencedTransaction, LeaseStatus, SqlError, TransactionError,
    backend::{Backend, CheckpointWrite, OrphanQuery, OrphanRow, SqlStore, millis},
    connection::Priority,
};

impl MySqlStore {
    /// Begins a handler's transaction that is fenced by its lease; see [`FencedTransaction`].
    ///
    /// `pool` belongs to the handler, and connects to the database that has the store's table. The transaction is at
    /// READ COMMITTED, regardless of the pool's default. Begin takes two round trips besides those of the pool. The
    /// first time on a connection takes more, to prepare statements that the connection caches.
    ///
    /// Do not execute statements that change a table's definition: MySQL commits the transaction before them.
    ///
    /// # Errors
    ///
    /// [`LeaseLost`](crate::TransactionErrorKind::LeaseLost) if the lease is no longer held,
    /// [`NoEntry`](crate::TransactionErrorKind::NoEntry) if the pool's database has no such entry, and
    /// [`Database`](crate::TransactionErrorKind::Database).
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, nothing is written. If the transaction still begins, a task rolls it back. The task waits
    /// for the reply of the database for the pool's `acquire_timeout`, at least 5 seconds.
    pub async fn begin(
        &self,
        lease: &Lease,
        pool: &MySqlPool,
    ) -> Result<FencedTransaction<Self>, TransactionError> {
        FencedTransaction::begin(self, lease, pool).await
    }

    /// Returns the last checkpoint of this request, if an earlier execution or this one has written one.
    ///
    /// [`FencedTransaction::checkpoint`] writes it. The call is useful only if
    /// [`is_takeover`](Lease::is_takeover) returns `true`, or after a checkpoint whose outcome is unknown. In the second case it
    /// waits for the end of that transaction: call it before the next `begin`. It uses a connection of the store.
    ///
    /// # Errors
    ///
    /// [`LeaseLost`](crate::TransactionErrorKind::LeaseLost), and
    /// [`Database`](crate::TransactionErrorKind::Database), also after 30 seconds without a reply.
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
}

impl Backend<MySql> for MySqlStore {
    const BEGIN: &'static str = MySqlFence::BEGIN;

    type Fence = MySqlFence;

    async fn record_limit(&self) -> Result<usize, SqlError> {
        self.inner.record_limit().await
    }

    async fn lease_status(
        &self,
        connection: &mut MySqlConnection,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
        let statements = &self.inner.statements;
        let read = query(statements.lease_status.clone())
            .bind(lease.id.as_bytes().as_slice())
            .bind(lease.token.as_bytes().as_slice())
            .bind(lease.id.as_bytes().as_slice());
        let row = read.fetch_optional(&mut *connection).await?;
        let is_held = row.map(|row| row.try_get(0)).transpose()?;
        let status = LeaseStatus::from_row(is_held);
        // If a future of sqlx is dropped while it prepares a statement, sqlx mistakes later packets for its reply. This
        // future runs in a task and is not dropped. So it prepares the final statements now, unless they are cached or
        // the pool caches none.
        if status == LeaseStatus::Held && connection.cached_statements_size() > 0 {
            connection.prepare(statements.write_record.clone()).await?;
            connection
                .prepare(statements.has_checkpoint.clone())
                .await?;
            connection
                .prepare(statements.write_checkpoint.clone())
                .await?;
        }
        Ok(status)
    }

    async fn write_record(
        &self,
        connection: &mut MySqlConnection,
        lease: &LeaseRef,
        record: &[u8],
        retention: Ttl,
    ) -> Result<bool, SqlError> {
        release_transaction_savepoint(connection).await?;
        let needs_attention = MySqlFence::needs_attention(record);
        let write = query(self.inner.statements.write_record.clone())
            .bind(needs_attention)
            .bind(needs_attention)
            .bind(millis(retention))
            .bind(record)
            .bind(lease.id.as_bytes().as_slice())
            .bind(lease.token.as_bytes().as_slice());
        Ok(write.execute(connection).await?.rows_affected() > 0)
    }

    async fn write_checkpoint(
        &self,
        connection: &mut MySqlConnection,
        lease: &LeaseRef,
        checkpoint: &Checkpoint,
    ) -> Result<CheckpointWrite, SqlError> {
        release_transaction_savepoint(connection).await?;
        let statements = &self.inner.statements;
        let read = query(statements.has_checkpoint.clone())
            .bind(checkpoint.name())
            .bind(checkpoint.json())
            .bind(lease.id.as_bytes().as_slice())
            .bind(lease.token.as_bytes().as_slice());
        match read.fetch_optional(&mut *connection).await? {
            Some(row) if row.try_get(0)? => return Ok(CheckpointWrite::Unchanged),
            Some(_) => {}
            None => return Ok(CheckpointWrite::LeaseLost),
        }
        let write = query(statements.write_checkpoint.clone())
            .bind(checkpoint.name())
            .bind(checkpoint.json())
            .bind(lease.id.as_bytes().as_slice());
        write.execute(connection).await?;
        Ok(CheckpointWrite::Changed)
    }

    async fn read_checkpoint(
        &self,
        lease: &LeaseRef,
        after_writers: bool,
    ) -> Result<Option<Option<Checkpoint>>, SqlError> {
        let statement = self.inner.statements.read_checkpoint(lease, after_writers);
        let rows = self.inner.query(Priority::Maintain, statement).await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let Some(name) = row.try_get::<Option<String>, _>(0)? else {
            return Ok(Some(None));
        };
        Ok(Some(Some(Checkpoint::from_stored(name, row.try_get(1)?))))
    }

    async fn orphans(&self, query: &OrphanQuery) -> Result<Vec<OrphanRow>, SqlError> {
        let statement = self.inner.statements.orphans(query);
        let rows = self.inner.query(Priority::Maintain, statement).await?;
        rows.iter().map(read_orphan_row).collect()
    }

    async fn is_due(&self, orphan: &OrphanRow, query: &OrphanQuery) -> Result<bool, SqlError> {
        let statement = self.inner.statements.is_due(orphan, query);
        Ok(!self
            .inner
            .query(Priority::Maintain, statement)
            .await?
            .is_empty())
    }
}

/// Releases the savepoint that the transaction began with. Fails if the transaction has ended, because its savepoint ended
/// with it.
async fn release_transaction_savepoint(connection: &mut MySqlConnection) -> Result<(), SqlError> {
    let mut release = async || {
        let release = raw_sql(MySqlFence::RELEASE_MARK);
        let result = release.execute(&mut *connection).await;
        result.map(drop).map_err(SqlError::from)
    };
    let is_missing = |error: &SqlError| error.code() == Some(MySqlFence::NO_MARK);
    match release().await {
        // sqlx first returns replies that are pending, such as that for a savepoint of the handler whose future was
        // dropped. The reply to the second `release` is certainly its own.
        Err(error) if is_missing(&error) => match release().await {
            Err(error) if is_missing(&error) => Err(SqlError::transaction_ended()),
            Ok(()) | Err(_) => Err(error),
        },
        result => result,
    }
}
