//! Handlers' transactions, checkpoints and orphans in PostgreSQL.

use sqlx::{
    Connection as _, PgConnection, PgPool, Postgres, Row, SqlStr,
    postgres::{PgArguments, PgRow},
    query::Query,
};
use tower_idempotency::{
    Lease,
    store::{Fingerprint, KeyId, LeaseRef, Ttl},
};
use tower_idempotency_sql::PostgresFence;

use super::{PostgresStore, unescape::unescape};
use crate::{
    Checkpoint, FencedTransaction, LeaseStatus, SqlError, TransactionError,
    backend::{Backend, CheckpointWrite, OrphanQuery, OrphanRow, SqlStore, millis},
    connection::Priority,
    hex,
};

impl PostgresStore {
    /// Begins a handler's transaction that is fenced by its lease; see [`FencedTransaction`].
    ///
    /// `pool` belongs to the handler, and connects to the database that has the store's table. The transaction is at
    /// READ COMMITTED, regardless of the pool's default. At a higher level, a renewal of the lease on another
    /// connection would make the commit fail. Begin takes two round trips besides those of the pool. It takes a third on a
    /// connection that has not cached its statement yet, or caches none.
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
        pool: &PgPool,
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

impl SqlStore for PostgresStore {
    type Database = Postgres;
}

impl Backend<Postgres> for PostgresStore {
    const BEGIN: &'static str = PostgresFence::BEGIN;

    type Fence = PostgresFence;

    async fn record_limit(&self) -> Result<usize, SqlError> {
        Ok(self.inner.settings.record_limit)
    }

    async fn lease_status(
        &self,
        connection: &mut PgConnection,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
        let read = bind_lease(connection, &self.inner.statements.lease_status, lease);
        let row = read.fetch_optional(connection).await?;
        let is_held = row.map(|row| row.try_get(0)).transpose()?;
        Ok(LeaseStatus::from_row(is_held))
    }

    async fn write_record(
        &self,
        connection: &mut PgConnection,
        lease: &LeaseRef,
        record: &[u8],
        retention: Ttl,
    ) -> Result<bool, SqlError> {
        let write = bind_lease(connection, &self.inner.statements.write_record, lease)
            .bind(record)
            .bind(millis(retention));
        let row = write.fetch_one(connection).await?;
        Ok(check_transaction_mark(&row)?.try_get(1)?)
    }

    async fn write_checkpoint(
        &self,
        connection: &mut PgConnection,
        lease: &LeaseRef,
        checkpoint: &Checkpoint,
    ) -> Result<CheckpointWrite, SqlError> {
        let write = bind_lease(connection, &self.inner.statements.write_checkpoint, lease)
            .bind(checkpoint.name())
            .bind(checkpoint.json());
        let row = write.fetch_one(connection).await?;
        Ok(match check_transaction_mark(&row)?.try_get(1)? {
            Some(true) => CheckpointWrite::Unchanged,
            Some(false) => CheckpointWrite::Changed,
            None => CheckpointWrite::LeaseLost,
        })
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
        let data = row.try_get::<Option<&str>, _>(1)?.map(bytes).transpose()?;
        Ok(Some(Some(Checkpoint::from_stored(name, data))))
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

/// Binds the ID and the token to a statement for a handler's connection. The caller binds further values.
///
/// The statement is prepared each time, without a name. This works through a pooler, because the connection to the
/// server does not change within a transaction. If the handler's connection caches statements, this one is cached too.
/// It then takes one round trip less from the second time on.
fn bind_lease<'q>(
    connection: &PgConnection,
    statement: &SqlStr,
    lease: &'q LeaseRef,
) -> Query<'q, Postgres, PgArguments> {
    sqlx::query(statement.clone())
        .persistent(connection.cached_statements_size() > 0)
        .bind(lease.id.as_bytes().as_slice())
        .bind(lease.token.as_bytes().as_slice())
}

/// Returns the row if its statement ran in the marked transaction, and an error otherwise.
fn check_transaction_mark(row: &PgRow) -> Result<&PgRow, SqlError> {
    if row.try_get(0)? {
        Ok(row)
    } else {
        Err(SqlError::transaction_ended())
    }
}

fn read_orphan_row(row: &PgRow) -> Result<OrphanRow, SqlError> {
    let digest = |text| -> Result<[u8; 32], SqlError> {
        let bytes = bytes(text)?.try_into();
        bytes.map_err(|_| SqlError::unreadable("no digest"))
    };
    Ok(OrphanRow {
        id: KeyId::from_bytes(digest(row.try_get(0)?)?),
        fingerprint: Fingerprint::from_bytes(digest(row.try_get(1)?)?),
        generation: row.try_get(2)?,
        lease_ends: row.try_get(3)?,
        // Unescaped, because the takeover stores it again.
        operation: unescape(row.try_get(4)?),
        read_at: row.try_get(5)?,
        orphan_retention: row.try_get(6)?,
        created: row.try_get(7)?,
    })
}

fn bytes(text: &str) -> Result<Vec<u8>, SqlError> {
    hex::decode(text).ok_or(SqlError::unreadable("no bytes"))
}
