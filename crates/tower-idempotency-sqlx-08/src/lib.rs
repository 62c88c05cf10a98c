//! Exactly-once handlers with [`sqlx`] 0.8, for the PostgreSQL store of `tower-idempotency-sqlx`.
//!
//! The store uses sqlx 0.9 on connections of its own. The handler's transaction runs on a pool of sqlx 0.8 that is
//! connected to the database of the store. [`begin`] fences it by the lease, and
//! [`commit`](tower_idempotency_sql::FencedTransaction::commit) commits the handler's writes and the record together, or
//! neither.
//!
//! ```no_run
//! use http::Response;
//! use tower_idempotency::{Body, Lease};
//! use tower_idempotency_sqlx::PostgresStore;
//! use tower_idempotency_sqlx_08::{CommitError, begin, sqlx};
//!
//! type Failure = Box<dyn std::error::Error + Send + Sync>;
//!
//! // Functions of the application keep their signatures.
//! async fn debit(tx: &mut sqlx::Transaction<'_, sqlx::Postgres>) -> sqlx::Result<()> {
//!     sqlx::query("update accounts set amount = amount - 7").execute(&mut **tx).await?;
//!     Ok(())
//! }
//!
//! async fn pay(store: PostgresStore, pool: sqlx::PgPool, lease: Lease) -> Result<Response<Body<String>>, Failure> {
//!     let mut tx = begin(&store, &lease, &pool).await?;
//!     debit(&mut tx).await?;
//!     sqlx::query("insert into payments (amount) values (7)").execute(&mut **tx).await?;
//!     Ok(tx.commit(Response::new("paid".to_owned())).await.unwrap_or_else(CommitError::into_response))
//! }
//! ```
//!
//! # SQLite
//!
//! A binary links SQLite once. sqlx 0.8 and 0.9 bundle different versions of it, and Cargo refuses to link both. An
//! application of sqlx 0.8 with SQLite keeps its store in another database, or upgrades the crate of its handlers.
//!
//! # Limits
//!
//! Checkpoints need `PostgresStore::begin`, which uses sqlx 0.9. Both kinds of transaction may be used with one store.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub use sqlx;
use sqlx::{Executor as _, PgPool, Postgres, Row as _, Transaction};
use tower_idempotency::{Lease, store::LeaseRef};
pub use tower_idempotency_sql::{
    CommitError, PostgresFence, SqlError, TransactionError, TransactionErrorKind,
};
use tower_idempotency_sql::{Driver, LeaseStatus, RecordStatus, RecordWrite, begin_in_task};

// This module relies on the parameters and columns of this version.
const _: () = assert!(PostgresFence::VERSION == 1);

/// A handler's transaction of sqlx 0.8 that is fenced by its lease.
///
/// [`begin`] begins one. It derefs to [`sqlx::Transaction`]: execute statements on `&mut **tx`.
pub type FencedTransaction = tower_idempotency_sql::FencedTransaction<PoolTransaction>;

/// Begins a handler's transaction that is fenced by its lease; see [`FencedTransaction`].
///
/// `fence` is `&store`. `pool` belongs to the handler, and connects to the database that has the store's table. The
/// transaction is at READ COMMITTED, regardless of the pool's default. At a higher level, a renewal of the lease on
/// another connection would make the commit fail. Begin takes four round trips besides those of the pool.
///
/// # Errors
///
/// [`LeaseLost`](TransactionErrorKind::LeaseLost) if the lease is no longer held,
/// [`NoEntry`](TransactionErrorKind::NoEntry) if the pool's database has no such entry, and
/// [`Database`](TransactionErrorKind::Database).
///
/// # Cancellation
///
/// If the future is dropped, nothing is written. If the transaction still begins, a task rolls it back. The task waits for
/// the reply of the database for the pool's `acquire_timeout`, at least 5 seconds.
///
/// # Panics
///
/// Panics outside of a tokio runtime.
pub async fn begin(
    fence: impl Into<PostgresFence>,
    lease: &Lease,
    pool: &PgPool,
) -> Result<FencedTransaction, TransactionError> {
    let fence = fence.into();
    let begun = begin_in_task(open(pool.clone()), pool.options().get_acquire_timeout()).await;
    let transaction = begun
        .unwrap_or(Err(sqlx::Error::WorkerCrashed))
        .map_err(|error| TransactionError::database(sql_error(error)).register(lease))?;
    FencedTransaction::begin(fence, lease, PoolTransaction(transaction)).await
}

/// Sets the isolation level after the begin, because sqlx 0.8.0 cannot begin a transaction with a custom statement.
async fn open(pool: PgPool) -> sqlx::Result<Transaction<'static, Postgres>> {
    let mut transaction = pool.begin().await?;
    let level = "set transaction isolation level read committed, read write";
    transaction.execute(level).await?;
    Ok(transaction)
}

/// An open transaction of a pool.
#[derive(Debug)]
pub struct PoolTransaction(Transaction<'static, Postgres>);

impl Driver for PoolTransaction {
    type Fence = PostgresFence;
    type Target = Transaction<'static, Postgres>;

    fn target(&self) -> &Self::Target {
        &self.0
    }

    fn target_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }

    async fn lease_status(
        &mut self,
        fence: &PostgresFence,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
        let status = sqlx::query(fence.lease_status_sql())
            .bind(lease.id.as_bytes().as_slice())
            .bind(lease.token.as_bytes().as_slice())
            .persistent(false)
            .fetch_optional(&mut *self.0);
        let row = status.await.map_err(sql_error)?;
        let is_held = row.map(|row| row.try_get(0)).transpose();
        Ok(LeaseStatus::from_row(is_held.map_err(sql_error)?))
    }

    async fn write_record(
        &mut self,
        fence: &PostgresFence,
        write: RecordWrite<'_>,
    ) -> Result<RecordStatus, SqlError> {
        let written = sqlx::query(fence.write_record_sql())
            .bind(write.id())
            .bind(write.token())
            .bind(write.record())
            .bind(write.retention_millis())
            .persistent(false)
            .fetch_one(&mut *self.0);
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
fn sql_error(error: sqlx::Error) -> SqlError {
    match error {
        sqlx::Error::Database(reported) => {
            let code = reported.code().unwrap_or_default();
            SqlError::from_reported(&code, reported.message())
        }
        // The driver's message may quote the value.
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => {
            SqlError::unreadable("a value of an unexpected type")
        }
        other => SqlError::from_driver(other),
    }
}
