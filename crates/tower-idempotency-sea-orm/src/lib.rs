//! Exactly-once handlers with [SeaORM](sea_orm) 2, for the PostgreSQL store of `tower-idempotency-sqlx`.
//!
//! The store uses connections of its own. The handler's transaction runs on a [`DatabaseConnection`] to the database of
//! the store. [`begin`] fences it by the lease, and [`commit`](tower_idempotency_sql::FencedTransaction::commit) commits
//! the handler's writes and the record together, or neither.
//!
//! ```no_run
//! use http::Response;
//! use tower_idempotency::{Body, Lease};
//! use tower_idempotency_sea_orm::{
//!     CommitError, begin, sea_orm::{ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbErr},
//! };
//! use tower_idempotency_sqlx::PostgresStore;
//!
//! type Failure = Box<dyn std::error::Error + Send + Sync>;
//!
//! // Functions of the application keep their signatures.
//! async fn debit(tx: &DatabaseTransaction) -> Result<(), DbErr> {
//!     tx.execute_unprepared("update accounts set amount = amount - 7").await?;
//!     Ok(())
//! }
//!
//! async fn pay(store: PostgresStore, db: DatabaseConnection, lease: Lease) -> Result<Response<Body<String>>, Failure> {
//!     let tx = begin(&store, &lease, &db).await?;
//!     debit(&tx).await?;
//!     Ok(tx.commit(Response::new("paid".to_owned())).await.unwrap_or_else(CommitError::into_response))
//! }
//! ```
//!
//! # Closures
//!
//! `db.transaction(..)` commits after its closure has returned. The database may reject that commit after the response has
//! been built. Use [`begin`] for the outer transaction. Nested transactions, also those of closures, are savepoints in it:
//! end them before the commit.
//!
//! Another task may hold a nested transaction during the commit. If it rolls the record back, the commit fails with
//! [`Database`](TransactionErrorKind::Database), and nothing is committed. A nested transaction that is still open after a
//! rollback, a failed commit or a drop of the outer one commits nothing either.
//!
//! # Limits
//!
//! A task rolls back a transaction that is dropped, and ends one after its commit. It holds the connection until the server
//! replies or the kernel ends the connection. No setting of the pool limits that: SeaORM cannot close a connection that another
//! task may be using.
//!
//! Checkpoints need `PostgresStore::begin`, with the pool of
//! [`get_postgres_connection_pool`](DatabaseConnection::get_postgres_connection_pool). SeaORM 1 uses sqlx 0.8, and is not
//! supported by this crate.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub use sea_orm;
use sea_orm::{
    AccessMode, ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbBackend, DbErr,
    IsolationLevel, QueryResult, RuntimeErr, SqlxError, Statement, TransactionTrait as _, Value,
};
use std::{fmt, sync::Arc, time::Duration};
use tokio::runtime::Handle;
use tower_idempotency::{Lease, store::LeaseRef};
pub use tower_idempotency_sql::{
    CommitError, PostgresFence, SqlError, TransactionError, TransactionErrorKind,
};
use tower_idempotency_sql::{Driver, LeaseStatus, RecordStatus, RecordWrite, begin_in_task};

// This module relies on the parameters and columns of this version.
const _: () = assert!(PostgresFence::VERSION == 1);

/// A handler's transaction of SeaORM that is fenced by its lease.
///
/// [`begin`] begins one. It derefs to [`DatabaseTransaction`]: pass `&*tx` where SeaORM expects a connection.
pub type FencedTransaction = tower_idempotency_sql::FencedTransaction<OpenTransaction>;

/// Begins a handler's transaction that is fenced by its lease; see [`FencedTransaction`].
///
/// `fence` is `&store`. `db` belongs to the handler, and connects to the database that has the store's table. The
/// transaction is at READ COMMITTED, regardless of the connection's default. At a higher level, a renewal of the lease
/// on another connection would make the commit fail.
///
/// # Errors
///
/// [`LeaseLost`](TransactionErrorKind::LeaseLost) if the lease is no longer held,
/// [`NoEntry`](TransactionErrorKind::NoEntry) if the connection's database has no such entry, and
/// [`Database`](TransactionErrorKind::Database), also if `db` is not PostgreSQL.
///
/// # Cancellation
///
/// If the future is dropped, nothing is written. If the transaction still begins within 30 seconds, a task rolls it back.
///
/// # Panics
///
/// Panics outside of a tokio runtime.
pub async fn begin(
    fence: impl Into<PostgresFence>,
    lease: &Lease,
    db: &DatabaseConnection,
) -> Result<FencedTransaction, TransactionError> {
    let fence = fence.into();
    if db.get_database_backend() != DbBackend::Postgres {
        let error = SqlError::from_driver("expected a connection to PostgreSQL, found another");
        return Err(TransactionError::database(error).register(lease));
    }
    let db = db.clone();
    let begun = async move {
        let level = Some(IsolationLevel::ReadCommitted);
        db.begin_with_config(level, Some(AccessMode::ReadWrite))
            .await
    };
    let begun = begin_in_task(begun, BEGIN_GRACE).await;
    let transaction = begun
        .unwrap_or_else(|| Err(DbErr::Custom("the runtime shuts down".to_owned())))
        .map_err(|error| TransactionError::database(sql_error(error)).register(lease))?;
    FencedTransaction::begin(fence, lease, transaction.into()).await
}

/// An open transaction of a connection. Its drop rolls back in a task.
pub struct OpenTransaction {
    transaction: Option<DatabaseTransaction>,
    /// The statement that fails unless the record is written.
    require_record: Option<String>,
}

/// Conversion for a [`Driver`] that wraps this one. The transaction is not nested, and is at READ COMMITTED.
impl From<DatabaseTransaction> for OpenTransaction {
    fn from(transaction: DatabaseTransaction) -> Self {
        Self {
            transaction: Some(transaction),
            require_record: None,
        }
    }
}

/// Omits the statement, which contains the lease's token.
impl fmt::Debug for OpenTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenTransaction").finish_non_exhaustive()
    }
}

impl OpenTransaction {
    async fn query_one(
        &self,
        statement: &str,
        values: impl IntoIterator<Item = Value>,
    ) -> Result<Option<QueryResult>, SqlError> {
        let statement = Statement::from_sql_and_values(DbBackend::Postgres, statement, values);
        let queried = self.target().query_one_raw(statement).await;
        queried.map_err(sql_error)
    }
}

impl Driver for OpenTransaction {
    type Fence = PostgresFence;
    type Target = DatabaseTransaction;

    fn target(&self) -> &DatabaseTransaction {
        self.transaction.as_ref().expect(OWNED)
    }

    fn target_mut(&mut self) -> &mut DatabaseTransaction {
        self.transaction.as_mut().expect(OWNED)
    }

    async fn lease_status(
        &mut self,
        fence: &PostgresFence,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
        let values = [bytes(lease.id.as_bytes()), bytes(lease.token.as_bytes())];
        let row = self.query_one(fence.lease_status_sql(), values).await?;
        let is_held = row.map(|row| row.try_get_by_index(0)).transpose();
        Ok(LeaseStatus::from_row(is_held.map_err(sql_error)?))
    }

    async fn write_record(
        &mut self,
        fence: &PostgresFence,
        write: RecordWrite<'_>,
    ) -> Result<RecordStatus, SqlError> {
        let values = [
            bytes(write.id()),
            bytes(write.token()),
            bytes(write.record()),
            write.retention_millis().into(),
        ];
        let row = self.query_one(fence.write_record_sql(), values).await?;
        let row = row.ok_or_else(|| SqlError::unreadable("no row"))?;
        let is_marked = row.try_get_by_index(0).map_err(sql_error)?;
        let is_written = row.try_get_by_index(1).map_err(sql_error)?;
        self.require_record = Some(fence.require_record_sql(&write));
        Ok(RecordStatus::from_row(is_marked, is_written))
    }

    async fn commit(mut self) -> Result<(), SqlError> {
        let Some(require_record) = self.require_record.take() else {
            return Err(SqlError::unreadable("no record before the commit"));
        };
        // If a nested transaction is still open, SeaORM's commit only releases its savepoint, and succeeds. This
        // statement commits. It also begins an empty transaction, which SeaORM then ends.
        //
        // Another task may have rolled a nested transaction back since the record was written, and the record with it.
        // SeaORM sends both statements in one message, so that none of that task comes between them.
        let statements = format!("{require_record}; commit and chain");
        if let Err(error) = self.target().execute_unprepared(&statements).await {
            self.rollback().await.ok();
            return Err(sql_error(error));
        }
        // If this fails, the pool closes the connection.
        let transaction = self.transaction.take().expect(OWNED);
        end_in_task(transaction.commit()).await;
        Ok(())
    }

    async fn rollback(mut self) -> Result<(), SqlError> {
        let replaced = replace_with_empty(self.target()).await;
        let transaction = self.transaction.take().expect(OWNED);
        end_in_task(transaction.rollback()).await;
        replaced
    }
}

/// Ends the transaction in a task. If another task uses the connection at that moment, SeaORM panics, and the pool closes the
/// connection.
async fn end_in_task(end: impl Future<Output = Result<(), DbErr>> + Send + 'static) {
    tokio::spawn(end).await.ok();
}

/// Rolls back the transaction and those that are nested in it, and begins an empty one, which SeaORM's rollback then ends.
///
/// If a nested transaction is still open, SeaORM's rollback only returns to its savepoint. The commit of the nested
/// transaction would then commit the handler's earlier writes. In the empty transaction that savepoint is missing, so the
/// rollback fails, and PostgreSQL executes nothing more in it. The pool then closes the connection.
async fn replace_with_empty(transaction: &DatabaseTransaction) -> Result<(), SqlError> {
    let replace = async || transaction.execute_unprepared("rollback; begin").await;
    let mut replaced = replace().await;
    if replaced.is_err() {
        // The error may be the reply to an earlier statement whose future was dropped. sqlx then sends nothing.
        replaced = replace().await;
    }
    replaced.map(drop).map_err(sql_error)
}

impl Drop for OpenTransaction {
    fn drop(&mut self) {
        let Some(transaction) = self.transaction.take() else {
            return;
        };
        // Without a runtime, SeaORM cannot return the connection to its pool either.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        runtime.spawn(async move {
            if let Err(error) = replace_with_empty(&transaction).await {
                tracing::debug!(error = %error, "rollback failed");
            }
            transaction.rollback().await.ok();
        });
    }
}

fn bytes(bytes: &[u8]) -> Value {
    bytes.into()
}

/// Converts an error of the driver. Omits a message of the server that may quote values.
fn sql_error(error: DbErr) -> SqlError {
    let (DbErr::Conn(cause) | DbErr::Exec(cause) | DbErr::Query(cause)) = &error else {
        return SqlError::from_driver(error);
    };
    let RuntimeErr::SqlxError(cause) = cause else {
        return SqlError::from_driver(error);
    };
    match &**cause {
        SqlxError::Database(reported) => {
            let code = reported.code().unwrap_or_default();
            SqlError::from_reported(&code, reported.message())
        }
        // The driver's message may quote the value.
        SqlxError::ColumnDecode { .. } | SqlxError::Decode(_) => {
            SqlError::unreadable("a value of an unexpected type")
        }
        _ => SqlError::from_driver(Arc::clone(cause)),
    }
}

const OWNED: &str = "the transaction is owned until the end";
/// Default acquire timeout of SeaORM's pools.
const BEGIN_GRACE: Duration = Duration::from_secs(30);
