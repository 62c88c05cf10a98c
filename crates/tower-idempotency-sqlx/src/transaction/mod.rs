use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use http::Response;
use serde::{Serialize, de::DeserializeOwned};
use sqlx::{Connection as _, Database, Pool, SqlSafeStr as _, Transaction};
use tower_idempotency::{
    Body, Lease,
    store::{LeaseRef, StoreError},
    transaction::{LeaseExt as _, NotRecordable, OpenTransaction, Prepared},
};
use tower_idempotency_sql::{Fence as _, begin_in_task};

use crate::{
    CommitError, LeaseStatus, SqlError, TransactionError, TransactionErrorKind,
    backend::{CheckpointWrite, SqlStore},
    timeout::with_timeout,
};

mod checkpoint;

pub use self::checkpoint::Checkpoint;

/// A handler's transaction that is fenced by its lease. It commits the handler's writes and the record together, or
/// neither.
///
/// [`PostgresStore::begin`](crate::PostgresStore::begin) and the other stores begin one. The transaction derefs to its
/// connection: execute statements of sqlx on `&mut *tx`. End it with [`commit`](Self::commit),
/// [`checkpoint`](Self::checkpoint) or [`rollback`](Self::rollback). Its drop rolls it back.
///
/// Return the response that [`commit`](Self::commit) returns. A handler must not return a success without a commit or a
/// rollback. The layer then logs an error, responds with 500 `unfinished-transaction` and releases the key. After a
/// checkpoint, the release leaves an orphan. So call [`rollback`](Self::rollback) before a success that needs no writes. Also
/// call it if you repeat a transaction whose statement failed: a later rollback does not make up for a dropped transaction. A
/// 4xx after a dropped transaction is recorded.
///
/// The fence is a conditional write, the last one of the transaction. If the entry is not leased under this lease's token,
/// nothing is committed. So two executions of one request commit once, even if they overlap.
///
/// The lease is renewed meanwhile, on connections of the store. Do not end the transaction with a statement of your
/// own: such a commit is not fenced. In MySQL and MariaDB, a statement that changes a table's definition commits, and a
/// deadlock rolls back. With `innodb_rollback_on_timeout`, so does a lock timeout. Nothing is recorded then: see
/// [`TransactionErrorKind::Ended`].
#[must_use = "a dropped transaction is rolled back"]
pub struct FencedTransaction<S: SqlStore> {
    transaction: Transaction<'static, S::Database>,
    store: S,
    lease: Lease,
    open: Option<OpenTransaction>,
}

impl<S: SqlStore> FencedTransaction<S> {
    /// Begins a transaction, like [`PostgresStore::begin`](crate::PostgresStore::begin), for code that is generic over
    /// stores.
    ///
    /// # Errors
    ///
    /// Those of the store's `begin`.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, nothing is written. If the transaction still begins, a task rolls it back.
    pub async fn begin(
        store: &S,
        lease: &Lease,
        pool: &Pool<S::Database>,
    ) -> Result<Self, TransactionError> {
        let begun = begin(store.clone(), lease.lease_ref(), pool).await;
        let error: TransactionError = match begun {
            Ok((transaction, Ok(LeaseStatus::Held))) => {
                return Ok(Self {
                    transaction,
                    store: store.clone(),
                    lease: lease.clone(),
                    open: Some(lease.open_transaction()),
                });
            }
            Ok((_, Ok(LeaseStatus::Absent))) => TransactionErrorKind::NoEntry.into(),
            // `Lost`, or a status that only a later version knows.
            Ok((_, Ok(_))) => TransactionErrorKind::LeaseLost.into(),
            Ok((_, Err(error))) if error.code().is_some_and(S::Fence::is_missing_table) => {
                TransactionError::new(TransactionErrorKind::NoEntry, error)
            }
            Ok((_, Err(error))) => TransactionError::database(error),
            Err(error) => TransactionError::database(error),
        };
        Err(error.register(lease))
    }

    /// Writes the record of `res`, commits it with the transaction's other writes, and returns the response.
    ///
    /// Return that response from the handler. The layer then stores nothing itself, and responds with the committed
    /// record.
    ///
    /// A record above the store's limit becomes a tombstone: retries get the error `response-not-retained`. If the
    /// acknowledgement of the commit is lost, the outcome is read from the store.
    ///
    /// If a [`checkpoint`](Self::checkpoint) returned [`Unknown`](TransactionErrorKind::Unknown) or was dropped, its phase may be
    /// committed. This method does not refuse a transaction that repeats the phase, and the record deletes the checkpoint. So read
    /// the last checkpoint before the `begin`, or do not repeat the phase.
    ///
    /// # Errors
    ///
    /// If the layer does not record the response, such as a 5xx or a response that opts out. The transaction was rolled
    /// back, and [`CommitError::into_output`] returns the response. [`CommitError::into_response`] returns the response for
    /// each failure.
    ///
    /// If the transaction failed: see [`TransactionErrorKind`]. The whole transaction may be repeated from the
    /// beginning, unless the lease was lost or the kind is [`Ended`](TransactionErrorKind::Ended).
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

    /// Commits the value of a [`run_once`](tower_idempotency::IdempotencyLayer::run_once) or of an item, like
    /// [`commit`](Self::commit). A handler of a request calls `commit` with a response instead.
    ///
    /// # Errors
    ///
    /// Those of [`commit`](Self::commit).
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the transaction commits all its writes or none, as in [`commit`](Self::commit).
    pub async fn commit_value<T: Serialize + DeserializeOwned>(
        mut self,
        value: T,
    ) -> Result<T, CommitError<T>> {
        let open = self.open.take();
        let prepared = self.lease.prepare_value(value);
        let committed = self.commit_prepared(prepared).await;
        end(open);
        committed
    }

    /// Writes a checkpoint and commits it with the transaction's other writes. This ends a phase of the request, and
    /// not the request.
    ///
    /// A takeover reads the last checkpoint with [`PostgresStore::checkpoint`](crate::PostgresStore::checkpoint), or
    /// the method of the other stores, and continues there. An execution that writes a checkpoint and no record leaves
    /// an orphan, even if it is the first execution. The next execution needs the checkpoint. A record deletes it, unless
    /// the record [needs attention](tower_idempotency::NeedsAttention): an operator may allow a retry.
    ///
    /// `name` is 1 to 128 letters, digits and `-_.:/`. `data` is stored as JSON, unencrypted.
    ///
    /// # Errors
    ///
    /// If the name or the data is invalid ([`TransactionErrorKind::Checkpoint`]), or if the transaction failed: see
    /// [`TransactionErrorKind`].
    ///
    /// After [`Unknown`](TransactionErrorKind::Unknown), the phase may be committed: do not repeat it. Return a response that is
    /// not recorded. The next execution is then a takeover, and reads the checkpoint. Or read the checkpoint before the next
    /// `begin`, and continue from there. Until that read, this method rolls back and returns `Unknown`.
    /// [`commit`](Self::commit) does not.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the phase and its checkpoint are both committed, or neither is. The rule for `Unknown` applies:
    /// do not repeat the phase.
    pub async fn checkpoint(
        mut self,
        name: &str,
        data: &impl Serialize,
    ) -> Result<(), TransactionError> {
        let (open, lease) = (self.open.take(), self.lease.clone());
        let committed = match Checkpoint::new(name, data) {
            Ok(checkpoint) => self.commit_checkpoint(checkpoint).await,
            Err(error) => Err(error),
        };
        end(open);
        committed.map_err(|error| error.register(&lease))
    }

    /// Returns the transaction of sqlx, for functions that take a `&mut Transaction<'_, DB>`.
    ///
    /// Such a function may begin a savepoint. It must not replace the transaction by another one: the writes of the replaced
    /// transaction would be rolled back, and [`commit`](Self::commit) would fail.
    pub fn as_transaction_mut(&mut self) -> &mut Transaction<'static, S::Database> {
        &mut self.transaction
    }

    /// Rolls the transaction back.
    ///
    /// # Errors
    ///
    /// If the database did not acknowledge the rollback. The database still rolls back.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the transaction is rolled back.
    pub async fn rollback(self) -> Result<(), TransactionError> {
        let result = self.transaction.rollback().await;
        end(self.open);
        result.map_err(TransactionError::database)
    }

    async fn commit_prepared<T>(self, prepared: Prepared<T>) -> Result<T, CommitError<T>> {
        let limit = with_timeout(self.store.record_limit()).await;
        let limit =
            limit.map_err(|error| TransactionError::database(error).register(&self.lease))?;
        let prepared = if prepared.record().len() > limit {
            match prepared.into_tombstone() {
                Ok(tombstone) => tombstone,
                Err(error) => return self.roll_back_unrecorded(error).await,
            }
        } else {
            prepared
        };
        let (may_be_committed, is_rejected) = (AtomicBool::new(false), AtomicBool::new(false));
        let (lease, record) = (prepared.lease_ref(), prepared.record().clone());
        let retention = prepared.retention();
        let handle = self.lease.clone();
        let write = async {
            let Self {
                mut transaction,
                store,
                ..
            } = self;
            let written = store.write_record(&mut transaction, &lease, &record, retention);
            match written.await {
                Ok(true) => {}
                Ok(false) => {
                    roll_back(transaction).await;
                    return Err(StoreError::LeaseLost);
                }
                Err(error) => {
                    is_rejected.store(true, Relaxed);
                    // The layer queries the entry next. It must not wait for a lock of this transaction.
                    roll_back(transaction).await;
                    return Err(error.into());
                }
            }
            may_be_committed.store(true, Relaxed);
            transaction.commit().await.map_err(|error| {
                let error = SqlError::from(error);
                if error.code().is_some_and(S::Fence::is_commit_rejected) {
                    may_be_committed.store(false, Relaxed);
                    is_rejected.store(true, Relaxed);
                }
                error.into()
            })
        };
        let committed = prepared.commit(write).await;
        committed.map_err(|error| {
            if is_rejected.load(Relaxed) && matches!(error, StoreError::Backend(_)) {
                handle.reject_commit();
            }
            TransactionError::from_commit(error, may_be_committed.load(Relaxed)).into()
        })
    }

    /// Rolls back, and returns the output that the layer does not record, in the error.
    async fn roll_back_unrecorded<T>(self, error: NotRecordable<T>) -> Result<T, CommitError<T>> {
        roll_back(self.transaction).await;
        Err(error.into())
    }

    async fn commit_checkpoint(self, checkpoint: Checkpoint) -> Result<(), TransactionError> {
        let Self {
            mut transaction,
            store,
            lease,
            ..
        } = self;
        // The handler may be repeating a phase that is committed.
        if lease.has_unresolved_checkpoint() {
            roll_back(transaction).await;
            return Err(TransactionErrorKind::Unknown.into());
        }
        let limit = with_timeout(store.record_limit()).await;
        if checkpoint.json().len() > limit.map_err(TransactionError::database)? {
            roll_back(transaction).await;
            return Err(TransactionErrorKind::Checkpoint.into());
        }
        let reference = lease.lease_ref();
        let written = store.write_checkpoint(&mut transaction, &reference, &checkpoint);
        let write = match written.await {
            Ok(CheckpointWrite::LeaseLost) => {
                roll_back(transaction).await;
                return Err(TransactionErrorKind::LeaseLost.into());
            }
            Ok(write) => write,
            Err(error) => {
                roll_back(transaction).await;
                return Err(TransactionError::database(error));
            }
        };
        lease.register_checkpoint();
        let Err(error) = transaction.commit().await else {
            lease.resolve_checkpoint();
            return Ok(());
        };
        let error = SqlError::from(error);
        if error.code().is_some_and(S::Fence::is_commit_rejected) {
            lease.resolve_checkpoint();
            return Err(TransactionError::database(error));
        }
        // The same checkpoint was stored before, so its presence now does not prove this commit.
        if write == CheckpointWrite::Unchanged {
            return Err(TransactionError::new(TransactionErrorKind::Unknown, error));
        }
        match with_timeout(store.read_checkpoint(&reference, true)).await {
            Ok(Some(stored)) => {
                lease.resolve_checkpoint();
                if stored == Some(checkpoint) {
                    Ok(())
                } else {
                    Err(TransactionError::database(error))
                }
            }
            // Another execution holds or completed the entry, or the store failed: the checkpoint cannot be read.
            Ok(None) | Err(_) => Err(TransactionError::new(TransactionErrorKind::Unknown, error)),
        }
    }
}

/// A transaction, and the status of the lease in it.
type BegunTransaction<S> = (
    Transaction<'static, <S as SqlStore>::Database>,
    Result<LeaseStatus, SqlError>,
);

/// Begins a transaction in a task of its own.
///
/// sqlx registers a transaction only after the reply to its `begin`. If the caller were dropped before that reply, the pool
/// would lend the connection out with an open transaction. The task waits for the reply. It rolls the transaction back if
/// the caller was dropped.
async fn begin<S: SqlStore>(
    store: S,
    lease: LeaseRef,
    pool: &Pool<S::Database>,
) -> sqlx::Result<BegunTransaction<S>> {
    let connection = loop {
        // Boxed, because it may connect: in an optimized build its future has up to 18 KB, which a handler would contain.
        let connection = Box::pin(pool.acquire()).await?;
        // SQLite rolls a transaction back by itself, for example on a full disk. sqlx does not notice, and considers
        // the transaction open. No other transaction can begin on such a connection.
        if !connection.is_in_transaction() {
            break connection;
        }
        connection.close().await.ok();
    };
    let grace = pool.options().get_acquire_timeout();
    let begin = async move {
        let statements = Some(S::BEGIN.into_sql_str());
        let mut transaction = Transaction::begin(connection, statements).await?;
        let status = store.lease_status(&mut transaction, &lease).await;
        Ok((transaction, status))
    };
    let begun = begin_in_task(begin, grace).await;
    begun.unwrap_or(Err(sqlx::Error::WorkerCrashed))
}

/// Registers the end of the transaction with the layer.
fn end(open: Option<OpenTransaction>) {
    if let Some(open) = open {
        open.end();
    }
}

/// Rolls back. If that fails, the connection is closed, and the database rolls back.
async fn roll_back<DB: Database>(transaction: Transaction<'static, DB>) {
    if let Err(error) = transaction.rollback().await {
        tracing::debug!(error = %SqlError::from(error), "rollback failed");
    }
}

impl Checkpoint {
    /// Returns the last checkpoint, like [`PostgresStore::checkpoint`](crate::PostgresStore::checkpoint), for code that
    /// is generic over stores.
    ///
    /// # Errors
    ///
    /// Those of `PostgresStore::checkpoint`.
    ///
    /// # Cancellation
    ///
    /// Safe to drop.
    pub async fn last<S: SqlStore>(
        store: &S,
        lease: &Lease,
    ) -> Result<Option<Self>, TransactionError> {
        let reference = lease.lease_ref();
        // The commit of an unresolved checkpoint may still be running.
        let is_unresolved = lease.has_unresolved_checkpoint();
        let error = match with_timeout(store.read_checkpoint(&reference, is_unresolved)).await {
            Ok(Some(checkpoint)) => {
                if is_unresolved {
                    lease.resolve_checkpoint();
                }
                return Ok(checkpoint);
            }
            Ok(None) => TransactionError::from(TransactionErrorKind::LeaseLost),
            Err(error) => TransactionError::database(error),
        };
        Err(error.register(lease))
    }
}

impl<S: SqlStore> Deref for FencedTransaction<S> {
    type Target = <S::Database as Database>::Connection;

    fn deref(&self) -> &Self::Target {
        &self.transaction
    }
}

impl<S: SqlStore> DerefMut for FencedTransaction<S> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.transaction
    }
}

impl<S: SqlStore> AsRef<<S::Database as Database>::Connection> for FencedTransaction<S> {
    fn as_ref(&self) -> &<S::Database as Database>::Connection {
        &self.transaction
    }
}

impl<S: SqlStore> AsMut<<S::Database as Database>::Connection> for FencedTransaction<S> {
    fn as_mut(&mut self) -> &mut <S::Database as Database>::Connection {
        &mut self.transaction
    }
}

impl<S: SqlStore> fmt::Debug for FencedTransaction<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedTransaction")
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}
