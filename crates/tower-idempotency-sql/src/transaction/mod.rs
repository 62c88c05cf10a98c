//! A transaction that is fenced by its lease.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use http::Response;
use serde::{Serialize, de::DeserializeOwned};
use tower_idempotency::{
    Body, Lease,
    store::StoreError,
    transaction::{LeaseExt as _, NotRecordable, OpenTransaction, Prepared},
};

mod driver;
mod error;

pub use self::{
    driver::{Driver, LeaseStatus, RecordStatus},
    error::{CommitError, TransactionError, TransactionErrorKind},
};
use crate::{
    SqlError,
    fence::{Fence, RecordWrite},
};

/// A handler's transaction that is fenced by its lease. It commits the handler's writes and the record
/// together, or neither.
///
/// The `begin` of a driver's crate begins one. It derefs to the transaction or connection of that driver. Functions that
/// take such a type can be called with `&*tx`, `&mut *tx` or [`tx.as_mut()`](AsMut::as_mut). End it with
/// [`commit`](Self::commit) or [`rollback`](Self::rollback). Its drop rolls it back.
///
/// Return the response that [`commit`](Self::commit) returns. A handler must not return a success without a commit or a
/// rollback. The layer then logs an error, responds with 500 `unfinished-transaction` and releases the key. So call
/// [`rollback`](Self::rollback) before a success that needs no writes. Also call it if you repeat a transaction whose
/// statement failed: a later rollback does not make up for a dropped transaction. A 4xx after a dropped transaction is
/// recorded.
///
/// The fence is a conditional write, the last one of the transaction. If the entry is not leased under this lease's token,
/// nothing is committed. So two executions of one request commit once, even if they overlap.
///
/// The lease is renewed meanwhile, on connections of the store. Do not end the transaction with a statement of your own:
/// such a commit is not fenced, and `commit` then fails with [`TransactionErrorKind::Ended`].
#[must_use = "a dropped transaction is rolled back"]
pub struct FencedTransaction<D: Driver> {
    driver: D,
    fence: D::Fence,
    lease: Lease,
    open: Option<OpenTransaction>,
}

impl<D: Driver> FencedTransaction<D> {
    /// Reads the status of the lease in a transaction that has just begun, for the crate of a driver.
    ///
    /// # Errors
    ///
    /// [`LeaseLost`](TransactionErrorKind::LeaseLost) if the lease is no longer held,
    /// [`NoEntry`](TransactionErrorKind::NoEntry) if the connection's database has no such entry, and
    /// [`Database`](TransactionErrorKind::Database). The transaction was rolled back.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the transaction is rolled back.
    pub async fn begin(
        fence: D::Fence,
        lease: &Lease,
        mut driver: D,
    ) -> Result<Self, TransactionError> {
        let status = driver.lease_status(&fence, &lease.lease_ref()).await;
        let error: TransactionError = match status {
            Ok(LeaseStatus::Held) => {
                return Ok(Self {
                    driver,
                    fence,
                    lease: lease.clone(),
                    open: Some(lease.open_transaction()),
                });
            }
            Ok(LeaseStatus::Lost) => TransactionErrorKind::LeaseLost.into(),
            Ok(LeaseStatus::Absent) => TransactionErrorKind::NoEntry.into(),
            Err(error) if error.code().is_some_and(D::Fence::is_missing_table) => {
                TransactionError::new(TransactionErrorKind::NoEntry, error)
            }
            Err(error) => TransactionError::database(error),
        };
        roll_back(driver).await;
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
    /// # Errors
    ///
    /// If the layer does not record the response, such as a 5xx or a response that opts out. The transaction was rolled
    /// back, and [`CommitError::into_output`] returns the response. [`CommitError::into_response`] returns the response for
    /// each failure.
    ///
    /// If the transaction failed: see [`TransactionErrorKind`]. That includes a transaction in which an earlier statement
    /// failed, and a commit that a deferred constraint or trigger rejects. The whole transaction may be repeated from the
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
        let result = self.driver.rollback().await;
        end(self.open);
        result.map_err(TransactionError::database)
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
            mut driver,
            fence,
            lease: handle,
            open: _open,
        } = self;
        let (lease, record) = (prepared.lease_ref(), prepared.record().clone());
        let retention = prepared.retention().as_millis();
        let retention = i64::try_from(retention).unwrap_or(i64::MAX);
        let (may_be_committed, is_rejected) = (AtomicBool::new(false), AtomicBool::new(false));
        let write = async {
            let write = RecordWrite::new(&lease, &record, retention);
            let error = match driver.write_record(&fence, write).await {
                Ok(RecordStatus::Written) => {
                    // Some drivers report the commit of an aborted transaction as a success, although the database rolls
                    // back. This one is not aborted, because its last statement succeeded.
                    may_be_committed.store(true, Relaxed);
                    return driver.commit().await.map_err(|error| {
                        if error.code().is_some_and(D::Fence::is_commit_rejected) {
                            may_be_committed.store(false, Relaxed);
                            is_rejected.store(true, Relaxed);
                        }
                        error.into()
                    });
                }
                Ok(RecordStatus::LeaseLost) => StoreError::LeaseLost,
                Ok(RecordStatus::TransactionEnded) => SqlError::transaction_ended().into(),
                Err(error) => error.into(),
            };
            is_rejected.store(true, Relaxed);
            // The layer queries the entry next. It must not wait for a lock of this transaction.
            roll_back(driver).await;
            Err(error)
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
        roll_back(self.driver).await;
        Err(error.into())
    }
}

/// Registers the end of the transaction with the layer.
fn end(open: Option<OpenTransaction>) {
    if let Some(open) = open {
        open.end();
    }
}

/// Rolls back. If that fails, the connection is broken, and the database rolls back.
async fn roll_back(driver: impl Driver) {
    if let Err(error) = driver.rollback().await {
        tracing::debug!(error = %error, "rollback failed");
    }
}

impl<D: Driver> Deref for FencedTransaction<D> {
    type Target = D::Target;

    fn deref(&self) -> &Self::Target {
        self.driver.target()
    }
}

impl<D: Driver> DerefMut for FencedTransaction<D> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.driver.target_mut()
    }
}

impl<D: Driver> AsRef<D::Target> for FencedTransaction<D> {
    fn as_ref(&self) -> &D::Target {
        self.driver.target()
    }
}

impl<D: Driver> AsMut<D::Target> for FencedTransaction<D> {
    fn as_mut(&mut self) -> &mut D::Target {
        self.driver.target_mut()
    }
}

impl<D: Driver> fmt::Debug for FencedTransaction<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedTransaction")
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}
