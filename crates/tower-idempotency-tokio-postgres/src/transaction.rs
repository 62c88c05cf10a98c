//! The fenced transaction.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use http::Response;
use serde::Serialize;
use tokio_postgres::{
    Client, IsolationLevel, Transaction,
    types::{ToSql, Type},
};
use tower_idempotency::{
    Body, Lease,
    store::{LeaseRef, StoreError},
    transaction::{LeaseExt as _, NotRecordable, OpenTransaction, Prepared},
};
use tower_idempotency_sqlx::{
    CommitError, PostgresFence, PostgresStore, SqlError, TransactionError, TransactionErrorKind,
};

// The statements below bind and read what this version documents.
const _: () = assert!(PostgresFence::VERSION == 1);

/// Begins a handler's transaction that is fenced by its lease; see [`FencedTransaction`].
///
/// `client` is connected to the database that has the store's table. The transaction is at READ COMMITTED, regardless of
/// the default of the connection. At a higher level, a renewal of the lease on another connection would make the commit
/// fail. Begin takes two round trips.
///
/// # Errors
///
/// [`LeaseLost`](TransactionErrorKind::LeaseLost) if the lease is no longer held,
/// [`NoEntry`](TransactionErrorKind::NoEntry) if the client's database has no such entry, and
/// [`Database`](TransactionErrorKind::Database).
///
/// # Cancellation
///
/// If the future is dropped, the driver sends a rollback before the next statement of the client.
pub async fn begin<'a>(
    store: &PostgresStore,
    lease: &Lease,
    client: &'a mut Client,
) -> Result<FencedTransaction<'a>, TransactionError> {
    let fence = store.fence();
    let begun = client
        .build_transaction()
        .isolation_level(IsolationLevel::ReadCommitted)
        .read_only(false)
        .start();
    let transaction = begun.await.map_err(database_error)?;
    let LeaseRef { id, token, .. } = lease.lease_ref();
    let (id, token) = (id.as_bytes().as_slice(), token.as_bytes().as_slice());
    let parameters: [(&(dyn ToSql + Sync), Type); 2] = [(&id, Type::BYTEA), (&token, Type::BYTEA)];
    let status = transaction.query_typed_opt(fence.lease_status_sql(), &parameters);
    let kind = match status.await {
        Ok(Some(row)) if row.try_get(0).map_err(database_error)? => {
            return Ok(FencedTransaction {
                transaction,
                fence,
                lease: lease.clone(),
                open: Some(lease.open_transaction()),
            });
        }
        Ok(Some(_)) => TransactionErrorKind::LeaseLost,
        Ok(None) => TransactionErrorKind::NoEntry,
        Err(error) => {
            roll_back(transaction).await;
            let error = sql_error(error);
            let is_missing = error.code().is_some_and(PostgresFence::is_missing_table);
            return Err(if is_missing {
                TransactionError::new(TransactionErrorKind::NoEntry, error)
            } else {
                TransactionError::new(TransactionErrorKind::Database, error)
            });
        }
    };
    roll_back(transaction).await;
    Err(kind.into())
}

/// A handler's transaction of tokio-postgres that is fenced by its lease. It commits the handler's writes and the record
/// together, or neither.
///
/// [`begin`] begins one. It derefs to [`tokio_postgres::Transaction`], so functions that take a transaction or a
/// [`GenericClient`](tokio_postgres::GenericClient) can be called with `&*tx` or [`tx.as_mut()`](AsMut::as_mut). End it
/// with [`commit`](Self::commit) or [`rollback`](Self::rollback). Its drop rolls it back.
///
/// Return the response that [`commit`](Self::commit) returns. If the handler returns a success and has neither committed
/// nor rolled back, the layer logs an error, responds with 500 `unfinished-transaction` and releases the key. So call
/// [`rollback`](Self::rollback) before a success that needs no writes. A 4xx after a dropped transaction is recorded.
///
/// The fence is a conditional write, the last one of the transaction. If the entry is not leased under this lease's
/// token, nothing is committed. So two executions of one request commit once, however they overlap.
///
/// The lease is renewed meanwhile, on connections of the store. Do not end the transaction with a statement of your own:
/// such a commit is not fenced, and `commit` then fails with [`TransactionErrorKind::Ended`].
#[must_use = "a dropped transaction is rolled back"]
pub struct FencedTransaction<'a> {
    transaction: Transaction<'a>,
    fence: PostgresFence,
    lease: Lease,
    open: Option<OpenTransaction>,
}

impl FencedTransaction<'_> {
    /// Writes the record of `res`, commits it with the transaction's other writes, and returns the response.
    ///
    /// Return that response from the handler. The layer then stores nothing itself, and responds with the committed
    /// record.
    ///
    /// A record above the store's limit becomes a tombstone: retries get an error that the response was not retained.
    /// If the acknowledgement of the commit is lost, the outcome is read from the store.
    ///
    /// # Errors
    ///
    /// If the layer does not record the response, such as a 5xx or a response that opts out. The transaction was rolled
    /// back, and [`CommitError::into_answer`] returns the response.
    ///
    /// If the transaction failed: see [`TransactionErrorKind`]. That includes a transaction in which an earlier statement
    /// failed, and a commit that a deferred constraint rejects. The whole transaction may be repeated from the beginning,
    /// unless the lease was lost or the kind is [`Ended`](TransactionErrorKind::Ended).
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the transaction commits all its writes or none. The layer queries the store for the
    /// outcome before it responds.
    pub async fn commit<B: http_body::Body>(
        mut self,
        res: Response<B>,
    ) -> Result<Response<Body<B>>, CommitError<Response<Body<B>>>> {
        let open = self.open.take();
        let committed = match self.lease.prepare(res).await {
            Ok(prepared) => self.commit_prepared(prepared).await,
            Err(error) => self.roll_back_unrecorded(error).await,
        };
        end(open);
        committed
    }

    /// Commits the value of a [`run_once`](tower_idempotency::IdempotencyLayer::run_once), like
    /// [`commit`](Self::commit).
    ///
    /// # Errors
    ///
    /// Those of [`commit`](Self::commit).
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the transaction commits all its writes or none, as in [`commit`](Self::commit).
    pub async fn commit_value<T: Serialize>(mut self, value: T) -> Result<T, CommitError<T>> {
        let open = self.open.take();
        let prepared = self.lease.prepare_value(value);
        let committed = self.commit_prepared(prepared).await;
        end(open);
        committed
    }

    /// Rolls the transaction back.
    ///
    /// # Errors
    ///
    /// If the database did not acknowledge the rollback. It rolls back all the same.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the transaction is rolled back.
    pub async fn rollback(self) -> Result<(), TransactionError> {
        let result = self.transaction.rollback().await;
        end(self.open);
        result.map_err(database_error)
    }

    async fn commit_prepared<T>(self, prepared: Prepared<T>) -> Result<T, CommitError<T>> {
        let prepared = if prepared.record().len() > self.fence.record_limit() {
            match prepared.into_tombstone() {
                Ok(tombstone) => tombstone,
                Err(error) => return self.roll_back_unrecorded(error).await,
            }
        } else {
            prepared
        };
        let Self {
            transaction, fence, ..
        } = self;
        let (lease, record) = (prepared.lease_ref(), prepared.record().clone());
        let retention = prepared.retention().as_millis();
        let retention = i64::try_from(retention).unwrap_or(i64::MAX);
        let (may_be_committed, has_ended) = (AtomicBool::new(false), AtomicBool::new(false));
        let write = async {
            let written = write_record(&transaction, &fence, &lease, &record, retention).await;
            match written {
                Ok(RecordWrite::Written) => {}
                Ok(RecordWrite::LeaseLost) => {
                    roll_back(transaction).await;
                    return Err(StoreError::LeaseLost);
                }
                Ok(RecordWrite::TransactionEnded) => {
                    has_ended.store(true, Relaxed);
                    roll_back(transaction).await;
                    let error = SqlError::from_driver("the transaction had already ended");
                    return Err(error.into());
                }
                Err(error) => {
                    // The layer queries the entry next. It must not wait for a lock of this transaction.
                    roll_back(transaction).await;
                    return Err(sql_error(error).into());
                }
            }
            // The driver reports the commit of an aborted transaction as a success, although it rolls back. This one is not
            // aborted, because its last statement succeeded.
            may_be_committed.store(true, Relaxed);
            transaction.commit().await.map_err(|error| {
                let error = sql_error(error);
                let is_rejected = error.code().is_some_and(PostgresFence::is_commit_rejected);
                may_be_committed.store(!is_rejected, Relaxed);
                error.into()
            })
        };
        let committed = prepared.commit(write).await;
        committed.map_err(|error| {
            let kind = if may_be_committed.load(Relaxed) {
                TransactionErrorKind::Unknown
            } else if has_ended.load(Relaxed) {
                TransactionErrorKind::Ended
            } else {
                TransactionErrorKind::Database
            };
            transaction_error(error, kind).into()
        })
    }

    /// Rolls back, and returns the answer that the layer does not record as the error.
    async fn roll_back_unrecorded<T>(self, error: NotRecordable<T>) -> Result<T, CommitError<T>> {
        roll_back(self.transaction).await;
        Err(error.into())
    }
}

/// Result of the last statement.
enum RecordWrite {
    Written,
    LeaseLost,
    /// The statement ran outside of the marked transaction.
    TransactionEnded,
}

async fn write_record(
    transaction: &Transaction<'_>,
    fence: &PostgresFence,
    lease: &LeaseRef,
    record: &[u8],
    retention: i64,
) -> Result<RecordWrite, tokio_postgres::Error> {
    let (id, token) = (
        lease.id.as_bytes().as_slice(),
        lease.token.as_bytes().as_slice(),
    );
    let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
        (&id, Type::BYTEA),
        (&token, Type::BYTEA),
        (&record, Type::BYTEA),
        (&retention, Type::INT8),
    ];
    let row = transaction
        .query_typed_one(fence.write_record_sql(), &parameters)
        .await?;
    Ok(match (row.try_get(0)?, row.try_get(1)?) {
        (false, _) => RecordWrite::TransactionEnded,
        (true, true) => RecordWrite::Written,
        (true, false) => RecordWrite::LeaseLost,
    })
}

/// Converts an error of [`Prepared::commit`]. `kind` is that of a failed database.
fn transaction_error(error: StoreError, kind: TransactionErrorKind) -> TransactionError {
    match error {
        StoreError::Backend(source) => match source.downcast::<SqlError>() {
            Ok(source) => TransactionError::new(kind, *source),
            Err(_) => kind.into(),
        },
        _ => TransactionErrorKind::LeaseLost.into(),
    }
}

fn database_error(error: tokio_postgres::Error) -> TransactionError {
    TransactionError::new(TransactionErrorKind::Database, sql_error(error))
}

/// Converts an error of the driver. Of an error that the server reports, it stores no message that may quote values.
fn sql_error(error: tokio_postgres::Error) -> SqlError {
    match error.as_db_error() {
        Some(reported) => SqlError::from_reported(reported.code().code(), reported.message()),
        None => SqlError::from_driver(error),
    }
}

/// Registers the end of the transaction with the layer.
fn end(open: Option<OpenTransaction>) {
    if let Some(open) = open {
        open.end();
    }
}

/// Rolls back. If that fails, the connection is broken, and the database rolls back.
async fn roll_back(transaction: Transaction<'_>) {
    if let Err(error) = transaction.rollback().await {
        tracing::debug!(error = %sql_error(error), "rollback failed");
    }
}

impl<'a> Deref for FencedTransaction<'a> {
    type Target = Transaction<'a>;

    fn deref(&self) -> &Self::Target {
        &self.transaction
    }
}

impl DerefMut for FencedTransaction<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.transaction
    }
}

impl<'a> AsRef<Transaction<'a>> for FencedTransaction<'a> {
    fn as_ref(&self) -> &Transaction<'a> {
        &self.transaction
    }
}

impl<'a> AsMut<Transaction<'a>> for FencedTransaction<'a> {
    fn as_mut(&mut self) -> &mut Transaction<'a> {
        &mut self.transaction
    }
}

impl fmt::Debug for FencedTransaction<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedTransaction")
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}
