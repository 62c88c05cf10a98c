//! Handlers' transactions, checkpoints and orphans in SQLite.

use sqlx::{Connection, Row, Sqlite, SqliteConnection, SqlitePool, raw_sql};
use tower_idempotency::{
    Lease,
    store::{LeaseRef, Ttl},
};
use tower_idempotency_sql::SqliteFence;

use super::{SqliteStore, fetch_row, read_orphan_row};
use crate::{
    Checkpoint, FencedTransaction, LeaseStatus, SqlError, TransactionError,
    backend::{Backend, CheckpointWrite, OrphanQuery, OrphanRow, SqlStore, millis},
    connection::Priority,
};

impl SqliteStore {
    /// Begins a handler's transaction that is fenced by its lease; see [`FencedTransaction`].
    ///
    /// `pool` belongs to the handler, and opens the file that has the store's table. The handler's writes must be in the
    /// same file: in WAL mode, a crash may leave the commit in one of several attached files. SQLite has one writer at a
    /// time. Until the transaction ends, no other connection can write to the file, so leases are neither renewed nor
    /// acquired. Keep the transaction short, and do not wait for anything else in it.
    ///
    /// # Errors
    ///
    /// [`LeaseLost`](crate::TransactionErrorKind::LeaseLost) if the lease is no longer held.
    /// [`NoEntry`](crate::TransactionErrorKind::NoEntry) if the pool's file has no such entry, even if an attached file has it.
    /// [`Database`](crate::TransactionErrorKind::Database) if the database fails. An example is the busy timeout of the pool's
    /// connections, if another writer holds the file. SQLite polls every 100 ms, so that is likely beside a process that commits
    /// without a pause.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, nothing is written. If the transaction still begins, a task rolls it back.
    pub async fn begin(
        &self,
        lease: &Lease,
        pool: &SqlitePool,
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

impl SqlStore for SqliteStore {
    type Database = Sqlite;
}

impl Backend<Sqlite> for SqliteStore {
    // The savepoint follows in `lease_status`. If it failed here, sqlx would return a connection with an open transaction to
    // the pool.
    const BEGIN: &'static str = SqliteFence::BEGIN;

    type Fence = SqliteFence;

    async fn record_limit(&self) -> Result<usize, SqlError> {
        Ok(self.inner.settings.record_limit)
    }

    async fn lease_status(
        &self,
        connection: &mut SqliteConnection,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
        raw_sql(SqliteFence::MARK).execute(&mut *connection).await?;
        let read = self
            .inner
            .bind_lease(&self.inner.statements.lease_status, lease);
        let row = read.fetch_optional(connection).await?;
        let is_held = row.map(|row| row.try_get(0)).transpose()?;
        Ok(LeaseStatus::from_row(is_held))
    }

    async fn write_record(
        &self,
        connection: &mut SqliteConnection,
        lease: &LeaseRef,
        record: &[u8],
        retention: Ttl,
    ) -> Result<bool, SqlError> {
        release_transaction_savepoint(connection).await?;
        let write = self
            .inner
            .bind_lease(&self.inner.statements.write_record, lease);
        let write = write.bind(millis(retention)).bind(record);
        Ok(write.fetch_optional(connection).await?.is_some())
    }

    async fn write_checkpoint(
        &self,
        connection: &mut SqliteConnection,
        lease: &LeaseRef,
        checkpoint: &Checkpoint,
    ) -> Result<CheckpointWrite, SqlError> {
        release_transaction_savepoint(connection).await?;
        let statements = &self.inner.statements;
        let bind = |statement| {
            let query = self.inner.bind_lease(statement, lease);
            query.bind(checkpoint.name()).bind(checkpoint.json())
        };
        // No other connection can write between the two statements.
        let before = bind(&statements.has_checkpoint)
            .fetch_optional(&mut *connection)
            .await?;
        let written = bind(&statements.write_checkpoint).fetch_optional(connection);
        Ok(match (before, written.await?) {
            (Some(row), Some(_)) if row.try_get(0)? => CheckpointWrite::Unchanged,
            (Some(_), Some(_)) => CheckpointWrite::Changed,
            (None, _) | (_, None) => CheckpointWrite::LeaseLost,
        })
    }

    async fn read_checkpoint(
        &self,
        lease: &LeaseRef,
        after_writers: bool,
    ) -> Result<Option<Option<Checkpoint>>, SqlError> {
        let statements = &self.inner.statements;
        // A statement that writes waits for other writers.
        let (statement, connections) = if after_writers {
            (
                &statements.read_checkpoint_after_writers,
                &self.inner.writer,
            )
        } else {
            (&statements.read_checkpoint, &self.inner.readers)
        };
        let read = self.inner.bind_lease(statement, lease);
        let Some(row) = fetch_row(connections, Priority::Maintain, read).await? else {
            return Ok(None);
        };
        let Some(name) = row.try_get::<Option<String>, _>(0)? else {
            return Ok(Some(None));
        };
        Ok(Some(Some(Checkpoint::from_stored(name, row.try_get(1)?))))
    }

    async fn orphans(&self, query: &OrphanQuery) -> Result<Vec<OrphanRow>, SqlError> {
        let (ends, id) = match &query.after {
            Some((ends, id)) => (*ends, id.as_bytes().as_slice()),
            None => (i64::MIN, [].as_slice()),
        };
        let read = sqlx::query(self.inner.statements.orphans.clone())
            .bind(min_age_millis(query))
            .bind(ends)
            .bind(id)
            .bind(query.limit)
            .bind(query.ended_before.unwrap_or(i64::MAX));
        let rows = self.inner.readers.fetch_all(Priority::Maintain, read);
        let rows = rows.await?;
        rows.iter().map(read_orphan_row).collect()
    }

    async fn is_due(&self, orphan: &OrphanRow, query: &OrphanQuery) -> Result<bool, SqlError> {
        let read = sqlx::query(self.inner.statements.is_due.clone())
            .bind(min_age_millis(query))
            .bind(orphan.id.as_bytes().as_slice())
            .bind(orphan.generation);
        Ok(fetch_row(&self.inner.readers, Priority::Maintain, read)
            .await?
            .is_some())
    }
}

/// Releases the savepoint that the transaction began with. Fails if the transaction has ended, because its savepoint ended
/// with it.
async fn release_transaction_savepoint(connection: &mut SqliteConnection) -> Result<(), SqlError> {
    let released = raw_sql(SqliteFence::RELEASE_MARK).execute(&mut *connection);
    let Err(error) = released.await.map_err(SqlError::from) else {
        return Ok(());
    };
    // Another code, 5, would mean that a running statement still uses the savepoint.
    if error.code() != Some(SqliteFence::NO_MARK) {
        return Err(error);
    }
    // sqlx considers the transaction open and will roll it back. Without a transaction in SQLite that rollback would fail,
    // and the connection would stay unusable. So this begins an empty one.
    if connection.is_in_transaction() {
        raw_sql("begin").execute(connection).await.ok();
    }
    Err(SqlError::transaction_ended())
}

fn min_age_millis(query: &OrphanQuery) -> i64 {
    i64::try_from(query.min_age.as_millis()).unwrap_or(i64::MAX)
}
