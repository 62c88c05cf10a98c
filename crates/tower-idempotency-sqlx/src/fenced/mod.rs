use std::{
    convert::Infallible,
    fmt,
    ops::{Deref, DerefMut},
    panic::resume_unwind,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use http::Response;
use serde::Serialize;
use sqlx::{Connection as _, Database, Pool, SqlSafeStr as _, Transaction};
use tokio::{sync::oneshot, time::sleep};
use tower_idempotency::{
    Body, Lease,
    store::{LeaseRef, StoreError},
    transaction::{NotRecordable, Prepared},
};

use crate::{
    Checkpoint, SqlError,
    bounded::bounded,
    sql_store::{ConnectionOf, SqlStore, Standing, Written},
};

mod error;

pub use self::error::{CommitError, TransactionError, TransactionErrorKind};

/// A handler's transaction, fenced by its lease: effect and record are committed together, or neither is.
///
/// Begun by [`PostgresStore::begin`](crate::PostgresStore::begin) and its likes. It derefs to the connection, so that
/// `&mut *tx` is what sqlx executes on. It ends with [`commit`](Self::commit), with [`checkpoint`](Self::checkpoint) or with
/// [`rollback`](Self::rollback); dropped, it is rolled back.
///
/// The layer does not know of it before it is committed: what a handler answers that never commits is recorded as any answer
/// is, and retries are told of an effect that is not there. So return what [`commit`](Self::commit) gives back, and after a
/// rollback what is not recorded, as a 5xx.
///
/// The fence is one conditional write, the last one of the transaction: it finds the entry leased under this lease's
/// token, or nothing is committed. So two executions of one request, however they overlap, commit once.
///
/// Renewals go on meanwhile, on connections of the store. Do not end the transaction by a statement of your own: what is
/// then committed is not fenced. In MySQL and MariaDB a statement that changes a table's definition does that, and a deadlock
/// ends it as well. Nothing is recorded then: see [`TransactionErrorKind::Ended`].
#[must_use = "dropped, it is rolled back"]
pub struct FencedTransaction<S: SqlStore> {
    transaction: Transaction<'static, S::Database>,
    store: S,
    lease: Lease,
}

impl<S: SqlStore> FencedTransaction<S> {
    /// As [`PostgresStore::begin`](crate::PostgresStore::begin) and its likes, for code that is generic over stores.
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Cancellation
    ///
    /// As there.
    pub async fn begin(
        store: &S,
        lease: &Lease,
        pool: &Pool<S::Database>,
    ) -> Result<Self, TransactionError> {
        let begun = begin(store.clone(), lease.lease_ref(), pool).await;
        let (transaction, standing) = begun.map_err(TransactionError::database)?;
        match standing {
            Ok(Standing::Held) => Ok(Self {
                transaction,
                store: store.clone(),
                lease: lease.clone(),
            }),
            Ok(Standing::Lost) => Err(TransactionErrorKind::LeaseLost.into()),
            Ok(Standing::Absent) => Err(TransactionErrorKind::NoEntry.into()),
            Err(error) if error.code().is_some_and(S::is_missing_table) => {
                Err(TransactionError::new(TransactionErrorKind::NoEntry, error))
            }
            Err(error) => Err(TransactionError::database(error)),
        }
    }

    /// Writes the record of `res`, commits it with all that the transaction has written, and gives back the response to
    /// return. The layer then stores nothing, and answers what was committed.
    ///
    /// A record that is larger than the store keeps becomes a tombstone: its retries are told that the response was not
    /// retained. A reply to the commit that is lost is looked up in the store.
    ///
    /// # Errors
    ///
    /// When the layer would not record the response, as a 5xx or what opts out: the transaction was rolled back, and the
    /// error [gives it back](CommitError::into_answer). When the transaction failed: see [`TransactionErrorKind`]. After a
    /// failure other than a lost lease or [`Ended`](TransactionErrorKind::Ended) the whole transaction may be tried again,
    /// from the beginning.
    ///
    /// # Cancellation
    ///
    /// Dropped, both are committed or neither: the layer finds out which before it answers.
    pub async fn commit<B: http_body::Body>(
        self,
        res: Response<B>,
    ) -> Result<Response<Body<B>>, CommitError<Response<Body<B>>>> {
        match self.lease.prepare(res).await {
            Ok(prepared) => self.commit_prepared(prepared).await,
            Err(not) => self.give_back(not).await,
        }
    }

    /// As [`commit`](Self::commit), for the value of a
    /// [`run_once`](tower_idempotency::IdempotencyLayer::run_once).
    ///
    /// # Errors
    ///
    /// As [`commit`](Self::commit).
    ///
    /// # Cancellation
    ///
    /// As [`commit`](Self::commit).
    pub async fn commit_value<T: Serialize>(self, value: T) -> Result<T, CommitError<T>> {
        let prepared = self.lease.prepare_value(value);
        self.commit_prepared(prepared).await
    }

    /// Writes how far the request came, and commits it with all that the transaction has written: the end of a phase, but
    /// not of the request.
    ///
    /// A takeover finds the last one by [`PostgresStore::checkpoint`](crate::PostgresStore::checkpoint) and its likes, and
    /// goes on from there. An execution that leaves one and then no record leaves an orphan, even if it is the first: the
    /// next one has to know. A record empties it.
    ///
    /// `name` is 1 to 128 of letters, digits and `-_.:/`; `data` is stored as JSON, in the clear.
    ///
    /// # Errors
    ///
    /// As [`commit`](Self::commit), and [`TransactionErrorKind::Checkpoint`].
    ///
    /// # Cancellation
    ///
    /// Dropped, the phase and its checkpoint are both committed or neither.
    pub async fn checkpoint(
        self,
        name: &str,
        data: &impl Serialize,
    ) -> Result<(), TransactionError> {
        let checkpoint = Checkpoint::new(name, data)?;
        self.commit_checkpoint(checkpoint).await
    }

    /// Undoes what the transaction has written.
    ///
    /// # Errors
    ///
    /// When the database did not answer: it undoes it all the same.
    ///
    /// # Cancellation
    ///
    /// Dropped, it is undone.
    pub async fn rollback(self) -> Result<(), TransactionError> {
        let undone = self.transaction.rollback().await;
        undone.map_err(TransactionError::database)
    }

    async fn commit_prepared<T>(self, prepared: Prepared<T>) -> Result<T, CommitError<T>> {
        let limit = bounded(self.store.largest_record()).await;
        let limit = limit.map_err(TransactionError::database)?;
        let prepared = if prepared.record().len() > limit {
            match prepared.into_tombstone() {
                Ok(tombstone) => tombstone,
                Err(not) => return self.give_back(not).await,
            }
        } else {
            prepared
        };
        let asked = AtomicBool::new(false);
        let (lease, record) = (prepared.lease_ref(), prepared.record().clone());
        let retention = prepared.retention();
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
                    undo(transaction).await;
                    return Err(StoreError::LeaseLost);
                }
                Err(error) => {
                    // The layer asks for the entry next, and must not wait for ourselves.
                    undo(transaction).await;
                    return Err(error.into());
                }
            }
            asked.store(true, Relaxed);
            transaction.commit().await.map_err(|error| {
                let error = SqlError::from(error);
                asked.store(!error.code().is_some_and(S::is_refusal), Relaxed);
                error.into()
            })
        };
        let committed = prepared.commit(write).await;
        committed.map_err(|error| TransactionError::of_commit(error, asked.load(Relaxed)).into())
    }

    async fn give_back<T>(self, not: NotRecordable<T>) -> Result<T, CommitError<T>> {
        undo(self.transaction).await;
        Err(not.into())
    }

    async fn commit_checkpoint(self, checkpoint: Checkpoint) -> Result<(), TransactionError> {
        let Self {
            mut transaction,
            store,
            lease,
        } = self;
        let limit = bounded(store.largest_record()).await;
        if checkpoint.json().len() > limit.map_err(TransactionError::database)? {
            undo(transaction).await;
            return Err(TransactionErrorKind::Checkpoint.into());
        }
        let lease = lease.lease_ref();
        let written = store.write_checkpoint(&mut transaction, &lease, &checkpoint);
        let before = match written.await {
            Ok(Written::Lost) => {
                undo(transaction).await;
                return Err(TransactionErrorKind::LeaseLost.into());
            }
            Ok(before) => before,
            Err(error) => {
                undo(transaction).await;
                return Err(TransactionError::database(error));
            }
        };
        let Err(error) = transaction.commit().await else {
            return Ok(());
        };
        let error = SqlError::from(error);
        if error.code().is_some_and(S::is_refusal) {
            return Err(TransactionError::database(error));
        }
        // What was there before proves nothing if it is there now.
        if before == Written::Same {
            return Err(TransactionError::new(TransactionErrorKind::Unknown, error));
        }
        match bounded(store.read_checkpoint(&lease, true)).await {
            Ok(Some(Some(stored))) if stored == checkpoint => Ok(()),
            Ok(Some(_)) => Err(TransactionError::database(error)),
            // Whoever has it now, knows.
            Ok(None) | Err(_) => Err(TransactionError::new(TransactionErrorKind::Unknown, error)),
        }
    }
}

/// A transaction, and how the lease stands in it.
type Begun<S> = (
    Transaction<'static, <S as SqlStore>::Database>,
    Result<Standing, SqlError>,
);

/// In a task of its own: sqlx knows of a transaction only once it has heard that it began, and would lend the connection to
/// whoever comes next with the transaction open. What nobody takes is rolled back.
async fn begin<S: SqlStore>(
    store: S,
    lease: LeaseRef,
    pool: &Pool<S::Database>,
) -> sqlx::Result<Begun<S>> {
    let connection = loop {
        let connection = pool.acquire().await?;
        // SQLite takes a transaction back by itself, as on a full disk, and sqlx goes on taking it for open: nothing can begin.
        if !connection.is_in_transaction() {
            break connection;
        }
        connection.close().await.ok();
    };
    let patience = pool.options().get_acquire_timeout().max(SHORTEST_PATIENCE);
    let (caller, left) = oneshot::channel::<Infallible>();
    let beginning = tokio::spawn(async move {
        let begun = async {
            let begin = Some(S::BEGIN.into_sql_str());
            let mut transaction = Transaction::begin(connection, begin).await?;
            let standing = store.standing(&mut transaction, &lease).await;
            Ok((transaction, standing))
        };
        let given_up = async {
            left.await.ok();
            sleep(patience).await;
        };
        tokio::select! {
            // An answer that is there counts, however late it is.
            biased;
            begun = begun => Some(begun),
            () = given_up => None,
        }
    });
    let begun = beginning.await;
    drop(caller);
    match begun {
        Ok(begun) => begun.unwrap_or(Err(sqlx::Error::WorkerCrashed)),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime ends.
            Err(_) => Err(sqlx::Error::WorkerCrashed),
        },
    }
}

/// A connection that cannot is closed, and the database undoes it then.
async fn undo<DB: Database>(transaction: Transaction<'static, DB>) {
    if let Err(error) = transaction.rollback().await {
        tracing::debug!(error = %SqlError::from(error), "a transaction was not rolled back by asking");
    }
}

impl<S: SqlStore> Deref for FencedTransaction<S> {
    type Target = ConnectionOf<S>;

    fn deref(&self) -> &Self::Target {
        &self.transaction
    }
}

impl<S: SqlStore> DerefMut for FencedTransaction<S> {
    fn deref_mut(&mut self) -> &mut Self::Target {
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

/// For so long, at least, the answer to a `begin` is waited for that nobody needs any more: a connection on which it came
/// later would be lent with the transaction open.
const SHORTEST_PATIENCE: Duration = Duration::from_secs(5);
