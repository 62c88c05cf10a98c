//! The transaction of a client.

use tokio_postgres::{
    Client, IsolationLevel, Transaction,
    types::{ToSql, Type},
};
use tower_idempotency::{Lease, store::LeaseRef};
use tower_idempotency_sql::{
    Driver, LeaseStatus, PostgresFence, RecordStatus, RecordWrite, SqlError, TransactionError,
};

// This module relies on the parameters and columns of this version.
const _: () = assert!(PostgresFence::VERSION == 1);

/// A handler's transaction of tokio-postgres that is fenced by its lease.
///
/// [`begin`] begins one. It derefs to [`tokio_postgres::Transaction`], so functions that take a transaction or a
/// [`GenericClient`](tokio_postgres::GenericClient) can be called with `&*tx` or [`tx.as_mut()`](AsMut::as_mut).
pub type FencedTransaction<'a> = tower_idempotency_sql::FencedTransaction<ClientTransaction<'a>>;

/// Begins a handler's transaction that is fenced by its lease; see [`FencedTransaction`].
///
/// `client` is connected to the database that has the store's table. The transaction is at READ COMMITTED, regardless of
/// the default of the connection. At a higher level, a renewal of the lease on another connection would make the commit
/// fail. Begin takes two round trips.
///
/// # Errors
///
/// [`LeaseLost`](tower_idempotency_sql::TransactionErrorKind::LeaseLost) if the lease is no longer held,
/// [`NoEntry`](tower_idempotency_sql::TransactionErrorKind::NoEntry) if the client's database has no such entry, and
/// [`Database`](tower_idempotency_sql::TransactionErrorKind::Database).
///
/// # Cancellation
///
/// If the future is dropped, the driver sends a rollback before the next statement of the client.
pub async fn begin<'a>(
    fence: impl Into<PostgresFence>,
    lease: &Lease,
    client: &'a mut Client,
) -> Result<FencedTransaction<'a>, TransactionError> {
    let begun = client
        .build_transaction()
        .isolation_level(IsolationLevel::ReadCommitted)
        .read_only(false)
        .start();
    let transaction = begun
        .await
        .map_err(|error| TransactionError::database(sql_error(error)).register(lease))?;
    FencedTransaction::begin(fence.into(), lease, ClientTransaction(transaction)).await
}

/// An open transaction of a client.
pub struct ClientTransaction<'a>(Transaction<'a>);

impl<'a> Driver for ClientTransaction<'a> {
    type Fence = PostgresFence;
    type Target = Transaction<'a>;

    fn target(&self) -> &Transaction<'a> {
        &self.0
    }

    fn target_mut(&mut self) -> &mut Transaction<'a> {
        &mut self.0
    }

    async fn lease_status(
        &mut self,
        fence: &PostgresFence,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
        let (id, token) = (
            lease.id.as_bytes().as_slice(),
            lease.token.as_bytes().as_slice(),
        );
        let parameters: [(&(dyn ToSql + Sync), Type); 2] =
            [(&id, Type::BYTEA), (&token, Type::BYTEA)];
        let status = self
            .0
            .query_typed_opt(fence.lease_status_sql(), &parameters);
        let row = status.await.map_err(sql_error)?;
        let is_held = row.map(|row| row.try_get(0)).transpose();
        Ok(LeaseStatus::from_row(is_held.map_err(sql_error)?))
    }

    async fn write_record(
        &mut self,
        fence: &PostgresFence,
        write: RecordWrite<'_>,
    ) -> Result<RecordStatus, SqlError> {
        let (id, token, record) = (write.id(), write.token(), write.record());
        let retention = write.retention_millis();
        let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
            (&id, Type::BYTEA),
            (&token, Type::BYTEA),
            (&record, Type::BYTEA),
            (&retention, Type::INT8),
        ];
        let written = self
            .0
            .query_typed_one(fence.write_record_sql(), &parameters);
        let row = written.await.map_err(sql_error)?;
        let is_marked = row.try_get(0).map_err(sql_error)?;
        let is_written = row.try_get(1).map_err(sql_error)?;
        Ok(RecordStatus::from_row(is_marked, is_written))
    }

    async fn commit(self) -> Result<(), SqlError> {
        self.0.commit().await.map_err(sql_error)
    }

    async fn rollback(self) -> Result<(), SqlError> {
        self.0.rollback().await.map_err(sql_error)
    }
}

/// Converts an error of the driver. Omits a message of the server that may quote values.
fn sql_error(error: tokio_postgres::Error) -> SqlError {
    match error.as_db_error() {
        Some(reported) => SqlError::from_reported(reported.code().code(), reported.message()),
        None => SqlError::from_driver(error),
    }
}

impl std::fmt::Debug for ClientTransaction<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientTransaction").finish_non_exhaustive()
    }
}
