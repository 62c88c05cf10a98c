//! The transaction of an owned connection.

use std::{fmt, ops::DerefMut, pin::Pin, time::Duration};

use diesel::{
    QueryableByName, sql_query,
    sql_types::{BigInt, Binary, Bool},
};
use diesel_async::{
    AnsiTransactionManager, AsyncPgConnection, RunQueryDsl as _, TransactionManager as _,
};
use tokio::{runtime::Handle, time::timeout};
use tower_idempotency::{Lease, store::LeaseRef};
use tower_idempotency_sql::{
    Driver, LeaseStatus, PostgresFence, RecordStatus, RecordWrite, SqlError, TransactionError,
};

use crate::error::sql_error;

// This module relies on the parameters and columns of this version.
const _: () = assert!(PostgresFence::VERSION == 1);

/// A handler's transaction of diesel-async that is fenced by its lease.
///
/// [`begin`] begins one. It derefs to [`AsyncPgConnection`]: execute queries on `&mut *tx`.
pub type FencedTransaction = tower_idempotency_sql::FencedTransaction<OpenTransaction>;

/// An owner of a connection: an object of a pool, or a `Box` of a connection.
pub trait PgConnectionOwner: DerefMut<Target = AsyncPgConnection> + Send + 'static {}

impl<C: DerefMut<Target = AsyncPgConnection> + Send + 'static> PgConnectionOwner for C {}

/// Begins a handler's transaction that is fenced by its lease; see [`FencedTransaction`].
///
/// `fence` is `&store`. `connection` must not be in a transaction, and must be connected to the database that has the
/// store's table. The transaction is at READ COMMITTED, regardless of the connection's default. At a higher level, a
/// renewal of the lease on another connection would make the commit fail.
///
/// # Errors
///
/// [`LeaseLost`](tower_idempotency_sql::TransactionErrorKind::LeaseLost) if the lease is no longer held,
/// [`NoEntry`](tower_idempotency_sql::TransactionErrorKind::NoEntry) if the connection's database has no such entry, and
/// [`Database`](tower_idempotency_sql::TransactionErrorKind::Database). The last one also reports a missing table, and a
/// connection that is in a transaction.
///
/// # Cancellation
///
/// If the future is dropped, a task rolls the transaction back, or the pool closes the connection.
pub fn begin<'a>(
    fence: impl Into<PostgresFence>,
    lease: &'a Lease,
    connection: impl PgConnectionOwner,
) -> BeginFuture<'a> {
    let fence = fence.into();
    // Neither the future nor the transaction names the type of the owner. If a type has a lifetime, as in bb8, the compiler
    // cannot prove that a handler's future with it is `Send`.
    let mut connection: Box<dyn PgConnectionOwner> = Box::new(connection);
    Box::pin(async move {
        let begun =
            AnsiTransactionManager::begin_transaction_sql(&mut **connection, PostgresFence::BEGIN);
        begun
            .await
            .map_err(|error| TransactionError::database(sql_error(error)).register(lease))?;
        let open = OpenTransaction {
            connection: Some(connection),
            is_ending: false,
        };
        FencedTransaction::begin(fence, lease, open).await
    })
}

/// The future of [`begin`].
pub type BeginFuture<'a> =
    Pin<Box<dyn Future<Output = Result<FencedTransaction, TransactionError>> + Send + 'a>>;

/// An open transaction of an owned connection. Its drop rolls back in a task, or closes the connection if a commit or a
/// rollback had begun.
pub struct OpenTransaction {
    connection: Option<Box<dyn PgConnectionOwner>>,
    /// `true` if a commit or a rollback has begun.
    is_ending: bool,
}

#[derive(QueryableByName)]
struct StatusRow {
    #[diesel(sql_type = Bool)]
    is_held: bool,
}

#[derive(QueryableByName)]
struct WriteRow {
    #[diesel(sql_type = Bool)]
    is_marked: bool,
    #[diesel(sql_type = Bool)]
    is_written: bool,
}

impl Driver for OpenTransaction {
    type Fence = PostgresFence;
    type Target = AsyncPgConnection;

    fn target(&self) -> &AsyncPgConnection {
        self.connection.as_ref().expect(OWNED)
    }

    fn target_mut(&mut self) -> &mut AsyncPgConnection {
        self.connection.as_mut().expect(OWNED)
    }

    async fn lease_status(
        &mut self,
        fence: &PostgresFence,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
        let status = sql_query(fence.lease_status_sql())
            .bind::<Binary, _>(lease.id.as_bytes().as_slice())
            .bind::<Binary, _>(lease.token.as_bytes().as_slice());
        let rows: Vec<StatusRow> = status.load(self.target_mut()).await.map_err(sql_error)?;
        Ok(LeaseStatus::from_row(
            rows.into_iter().next().map(|row| row.is_held),
        ))
    }

    async fn write_record(
        &mut self,
        fence: &PostgresFence,
        write: RecordWrite<'_>,
    ) -> Result<RecordStatus, SqlError> {
        let connection = self.target_mut();
        require_outermost(connection)?;
        let written = sql_query(fence.write_record_sql())
            .bind::<Binary, _>(write.id())
            .bind::<Binary, _>(write.token())
            .bind::<Binary, _>(write.record())
            .bind::<BigInt, _>(write.retention_millis());
        let row: WriteRow = written.get_result(connection).await.map_err(sql_error)?;
        Ok(RecordStatus::from_row(row.is_marked, row.is_written))
    }

    async fn commit(mut self) -> Result<(), SqlError> {
        self.is_ending = true;
        let committed = AnsiTransactionManager::commit_transaction(self.target_mut()).await;
        // A connection whose commit failed is not in a transaction, or is closed.
        drop(self.connection.take());
        committed.map_err(sql_error)
    }

    async fn rollback(mut self) -> Result<(), SqlError> {
        self.is_ending = true;
        let rolled_back = roll_back(self.target_mut()).await;
        drop(self.connection.take());
        rolled_back
    }
}

/// Rolls back the transaction and those that are nested in it.
async fn roll_back(connection: &mut AsyncPgConnection) -> Result<(), SqlError> {
    while let Some(before) = depth(connection) {
        AnsiTransactionManager::rollback_transaction(connection)
            .await
            .map_err(sql_error)?;
        if depth(connection) >= Some(before) {
            break;
        }
    }
    Ok(())
}

/// Fails unless the connection is in its transaction, and in no nested one.
fn require_outermost(connection: &mut AsyncPgConnection) -> Result<(), SqlError> {
    let status = AnsiTransactionManager::transaction_manager_status_mut(connection);
    match status.transaction_depth().map_err(sql_error)? {
        // The handler has ended it by a call of diesel.
        None => Err(SqlError::transaction_ended()),
        Some(depth) if depth.get() == 1 => Ok(()),
        // The commit would only release the savepoint, and succeed.
        Some(_) => Err(SqlError::from_driver("a nested transaction is open")),
    }
}

/// Returns 1 in a transaction, a higher number in a nested one, and [`None`] outside of a transaction.
fn depth(connection: &mut AsyncPgConnection) -> Option<u32> {
    let status = AnsiTransactionManager::transaction_manager_status_mut(connection);
    Some(status.transaction_depth().ok()??.get())
}

impl Drop for OpenTransaction {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else {
            return;
        };
        // diesel-async cannot use the connection of a commit whose future was dropped. A pool closes it.
        if self.is_ending {
            return;
        }
        // Without a runtime, the connection is closed with its transaction.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        runtime.spawn(async move {
            // A pool closes a connection that is still in a transaction.
            match timeout(ROLLBACK_TIMEOUT, roll_back(&mut connection)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(error = %error, "rollback failed"),
                Err(elapsed) => tracing::debug!(error = %elapsed, "rollback failed"),
            }
        });
    }
}

impl fmt::Debug for OpenTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenTransaction").finish_non_exhaustive()
    }
}

const OWNED: &str = "the connection is owned until the end";
/// Time for which a task waits for the reply to a rollback.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(5);
