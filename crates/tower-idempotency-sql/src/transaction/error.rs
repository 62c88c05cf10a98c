use std::{
    error::Error,
    fmt,
    sync::{Mutex, PoisonError},
};

use http::{Response, StatusCode};
use tower_idempotency::{
    Body, Lease, NeedsAttention, Retention,
    run_once::WorkError,
    store::StoreError,
    transaction::{LeaseExt as _, NotRecordable, NotRecordedReason},
};

use crate::SqlError;

/// Failure of a transaction under a lease. Its writes are not committed, unless the kind says otherwise.
///
/// Return a response that the layer does not record. This is a 503, with [`Retention::NoStore`] if 5xx are recorded. The
/// client then retries, and gets the stored response if there is one. If a commit was sent, the layer queries the store
/// itself and returns the stored response at once.
///
/// After [`Ended`](TransactionErrorKind::Ended) a retry may repeat writes that are already committed. Return
/// [`NeedsAttention`] instead.
///
/// [`into_response`](Self::into_response) returns such a response for each kind, except for gRPC.
/// [`into_work_error`](Self::into_work_error) is the same for the work of `run_once` and of items.
///
/// The error contains nothing of keys, responses or checkpoints. See [`SqlError`] for the content of its source.
#[derive(Debug)]
pub struct TransactionError {
    kind: TransactionErrorKind,
    source: Option<SqlError>,
}

/// Cause of a [`TransactionError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransactionErrorKind {
    /// Another execution holds the lease, or the lease has finished with an outcome. The transaction wrote nothing. If
    /// the transaction had already ended, see [`Ended`](Self::Ended).
    LeaseLost,
    /// The pool connects to another database than the store's, or the entry has expired. The transaction wrote nothing.
    NoEntry,
    /// The checkpoint's name is not 1 to 128 letters, digits and `-_.:/`, or its data cannot be stored. The data must
    /// be serialisable and no larger than a record. The transaction wrote nothing.
    Checkpoint,
    /// The database failed before the commit was sent, or rejected the commit. Or it was the commit of a value under the lease
    /// of a request, or of a response under another lease. The transaction wrote nothing.
    Database,
    /// The transaction had already ended.
    ///
    /// Causes: a statement of the handler ended it; in MySQL and MariaDB also a deadlock or a statement that changes a
    /// table's definition. With `innodb_rollback_on_timeout`, a lock timeout ends it too. The driver also rolls the
    /// transaction back if the begin of a savepoint fails or is dropped.
    ///
    /// No record or checkpoint was written. The handler's earlier writes were rolled back, unless the handler itself
    /// committed them. Its later writes were committed at once, each statement by itself.
    Ended,
    /// The commit was sent, and its outcome is unknown. The transaction wrote everything or nothing.
    ///
    /// The database acknowledged neither the commit nor a query for its outcome, or the lease is still held and the
    /// commit may still take effect. The layer queries the store again before it responds to a client.
    ///
    /// After the `checkpoint` of a sqlx store, do not repeat the phase. The lease is still held, so that a repetition could be
    /// committed too. Until the handler has read the last checkpoint, the next one is refused with this kind, and its transaction
    /// is rolled back. A `commit` is not refused: its transaction must not repeat the phase either.
    Unknown,
}

impl TransactionError {
    /// Returns the cause.
    #[must_use]
    pub fn kind(&self) -> TransactionErrorKind {
        self.kind
    }

    /// Returns the code that the database reported; see [`SqlError::code`].
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        self.source.as_ref()?.code()
    }

    /// Creates an error of this kind, with the failure of the database as its source.
    #[must_use]
    pub fn new(kind: TransactionErrorKind, source: SqlError) -> Self {
        Self {
            kind,
            source: Some(source),
        }
    }

    /// Creates the error of a database that failed before the commit was sent, or of a transaction that had ended.
    #[must_use]
    pub fn database(error: impl Into<SqlError>) -> Self {
        let error = error.into();
        let kind = if error.is_transaction_ended() {
            TransactionErrorKind::Ended
        } else {
            TransactionErrorKind::Database
        };
        Self::new(kind, error)
    }

    /// Registers the failure with the lease, and returns the error. The `begin` of each driver and checkpoints call this.
    ///
    /// The layer then does not record a 4xx of the handler, because the failure may be temporary.
    #[must_use]
    pub fn register(self, lease: &Lease) -> Self {
        lease.fail_transaction(self.kind == TransactionErrorKind::LeaseLost);
        self
    }

    /// Returns the response for this failure, with an empty body, and logs the failure.
    ///
    /// After [`Ended`](TransactionErrorKind::Ended), the response is a 500 with [`NeedsAttention`] and the code
    /// `transaction-ended`. No retry executes until an operator has resolved the key. After any other kind, it is a 503 with
    /// [`Retention::NoStore`], so that a retry executes. After [`LeaseLost`](TransactionErrorKind::LeaseLost) and
    /// [`Unknown`](TransactionErrorKind::Unknown), the layer replaces the 503 by the stored response or by 409
    /// `outcome-unknown`, unless it finds that nothing is stored.
    ///
    /// Do not use this method for gRPC. After a transaction that failed, the layer records no error code. So after `Ended`,
    /// return a message with [`NeedsAttention`] in the extensions of its response: after an error, a retry may repeat writes.
    #[must_use]
    pub fn into_response<B: Default>(self) -> Response<B> {
        let error: &(dyn Error + 'static) = &self;
        tracing::warn!(error, "transaction failed");
        if self.kind != TransactionErrorKind::Ended {
            return not_recorded();
        }
        let mut res = Response::new(B::default());
        *res.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        res.extensions_mut().insert(TRANSACTION_ENDED);
        res
    }

    /// Returns the error for the work of [`run_once`](tower_idempotency::IdempotencyLayer::run_once) and of items.
    ///
    /// After [`Ended`](TransactionErrorKind::Ended), this is [`WorkError::NeedsAttention`] with the code `transaction-ended`.
    /// After any other kind, it is [`WorkError::Release`]. The `?` operator releases the key after each kind. After `Ended`, the
    /// next run then repeats statements that are committed.
    #[must_use]
    pub fn into_work_error<E: From<Self>>(self) -> WorkError<E> {
        work_error(self.kind == TransactionErrorKind::Ended, self)
    }

    /// Converts an error of [`Prepared::commit`](tower_idempotency::transaction::Prepared::commit).
    ///
    /// `may_be_committed` is set if the commit was sent and the database did not reject it.
    #[must_use]
    pub fn from_commit(error: StoreError, may_be_committed: bool) -> Self {
        let source = match error {
            StoreError::Backend(source) => match source.downcast::<SqlError>() {
                Ok(error) => *error,
                // The layer refused a record of the wrong kind.
                Err(refusal) => SqlError::refused(refusal.to_string()),
            },
            _ => return TransactionErrorKind::LeaseLost.into(),
        };
        let kind = if may_be_committed {
            TransactionErrorKind::Unknown
        } else if source.is_transaction_ended() {
            TransactionErrorKind::Ended
        } else {
            TransactionErrorKind::Database
        };
        Self::new(kind, source)
    }
}

const TRANSACTION_ENDED: NeedsAttention = NeedsAttention::new("transaction-ended");

/// Creates the response of a request without an outcome. No preset records it.
fn not_recorded<B: Default>() -> Response<B> {
    let mut res = Response::new(B::default());
    *res.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    res.extensions_mut().insert(Retention::NoStore);
    res
}

fn work_error<S, E: From<S>>(has_ended: bool, error: S) -> WorkError<E> {
    if has_ended {
        WorkError::NeedsAttention(TRANSACTION_ENDED, error.into())
    } else {
        WorkError::Release(error.into())
    }
}

/// Converts the failure of a call before the commit, like [`TransactionError::database`].
impl From<SqlError> for TransactionError {
    fn from(error: SqlError) -> Self {
        Self::database(error)
    }
}

impl From<TransactionErrorKind> for TransactionError {
    fn from(kind: TransactionErrorKind) -> Self {
        Self { kind, source: None }
    }
}

impl fmt::Display for TransactionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            TransactionErrorKind::LeaseLost => "the lease is no longer held",
            TransactionErrorKind::NoEntry => {
                "expected the entry of the lease in the pool's database, found none"
            }
            TransactionErrorKind::Checkpoint => {
                "the checkpoint has an invalid name, or data that cannot be stored"
            }
            TransactionErrorKind::Database => "the transaction failed, and nothing was written",
            TransactionErrorKind::Ended => {
                "the transaction had already ended, and nothing was recorded"
            }
            TransactionErrorKind::Unknown => "the outcome of the commit is unknown",
        })
    }
}

impl Error for TransactionError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}

/// Failure to commit an output, which is a response or a value. Either the layer does not record that output, or the
/// transaction failed.
///
/// This type is `Send` and `Sync` for every output that is `Send`, so `?` converts it to any other error. If the
/// transaction failed, the [`TransactionError`] is the source. [`into_response`](Self::into_response) returns the response for
/// each failure.
pub struct CommitError<T>(Inner<T>);

enum Inner<T> {
    // The mutex is never contended. It makes the error `Sync`, which bodies are not.
    NotRecordable(NotRecordedReason, Mutex<T>),
    Failed(TransactionError),
}

impl<T> CommitError<T> {
    /// Returns the reason for which the layer does not record the output. The transaction was rolled back.
    ///
    /// Returns [`None`] if the transaction failed.
    #[must_use]
    pub fn not_recorded_reason(&self) -> Option<NotRecordedReason> {
        match &self.0 {
            Inner::NotRecordable(reason, _) => Some(*reason),
            Inner::Failed(_) => None,
        }
    }

    /// Returns the failure of the transaction, or [`None`] if the layer does not record the output.
    #[must_use]
    pub fn failure(&self) -> Option<&TransactionError> {
        match &self.0 {
            Inner::NotRecordable(..) => None,
            Inner::Failed(error) => Some(error),
        }
    }

    /// Returns the output that the layer does not record.
    ///
    /// Return it to the client if it reports that nothing was done, such as a 5xx. An output that reports success is wrong
    /// now, because the transaction was rolled back.
    ///
    /// # Errors
    ///
    /// If the transaction failed.
    pub fn into_output(self) -> Result<T, TransactionError> {
        match self.0 {
            Inner::NotRecordable(_, output) => {
                Ok(output.into_inner().unwrap_or_else(PoisonError::into_inner))
            }
            Inner::Failed(error) => Err(error),
        }
    }

    /// Returns the error for the work of [`run_once`](tower_idempotency::IdempotencyLayer::run_once) and of items, like
    /// [`TransactionError::into_work_error`].
    ///
    /// After an effect outside the database, return [`WorkError::NeedsAttention`] for each failure instead. Work ends with this
    /// line:
    ///
    /// ```
    /// # use tower_idempotency::run_once::WorkError;
    /// # use tower_idempotency_sql::{CommitError, Driver, FencedTransaction};
    /// # type Failure = Box<dyn std::error::Error + Send + Sync>;
    /// # async fn pay(tx: FencedTransaction<impl Driver>, receipt: String) -> Result<String, WorkError<Failure>> {
    /// tx.commit_value(receipt).await.map_err(CommitError::into_work_error)
    /// # }
    /// ```
    #[must_use]
    pub fn into_work_error<E: From<Self>>(self) -> WorkError<E> {
        let has_ended = self
            .failure()
            .is_some_and(|error| error.kind() == TransactionErrorKind::Ended);
        work_error(has_ended, self)
    }
}

impl<B: http_body::Body> CommitError<Response<Body<B>>> {
    /// Returns the response for this failure. Logs it, unless the response is a 4xx or 5xx of the handler.
    ///
    /// If the transaction failed, this is the response of [`TransactionError::into_response`]. The response of the handler is
    /// lost then, also one with [`NeedsAttention`]: after an effect outside the database, return `NeedsAttention` for each failure
    /// instead.
    ///
    /// Otherwise it is the response that the layer does not record, if that is a 4xx or a 5xx. A success would be wrong, because
    /// the transaction was rolled back: it becomes a 503 with an empty body and [`Retention::NoStore`]. So does each response of
    /// gRPC, because its HTTP status is 200: use [`into_output`](Self::into_output) for gRPC.
    ///
    /// A handler ends with this line, and one of axum adds `.into_response()` to it:
    ///
    /// ```
    /// # use http::Response;
    /// # use tower_idempotency::Body;
    /// # use tower_idempotency_sql::{CommitError, Driver, FencedTransaction};
    /// # async fn pay(tx: FencedTransaction<impl Driver>, res: Response<String>) -> Response<Body<String>> {
    /// tx.commit(res).await.unwrap_or_else(CommitError::into_response)
    /// # }
    /// ```
    #[must_use]
    pub fn into_response(self) -> Response<Body<B>> {
        let reason = self.not_recorded_reason();
        match self.into_output() {
            Ok(res) if res.status().is_client_error() || res.status().is_server_error() => res,
            Ok(res) => {
                tracing::warn!(
                    status = res.status().as_u16(),
                    ?reason,
                    "transaction rolled back, its unrecorded response replaced by a 503"
                );
                not_recorded()
            }
            Err(error) => error.into_response(),
        }
    }
}

impl<T> From<TransactionError> for CommitError<T> {
    fn from(error: TransactionError) -> Self {
        Self(Inner::Failed(error))
    }
}

impl<T> From<NotRecordable<T>> for CommitError<T> {
    fn from(error: NotRecordable<T>) -> Self {
        let reason = error.reason();
        Self(Inner::NotRecordable(
            reason,
            Mutex::new(error.into_output()),
        ))
    }
}

impl<T> fmt::Display for CommitError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Inner::NotRecordable(reason, _) => write!(
                f,
                "expected an output that the layer records, found another ({reason:?}): rolled back"
            ),
            // The source reports the outcome.
            Inner::Failed(_) => f.write_str("the transaction of the output failed"),
        }
    }
}

/// Omits the output.
impl<T> fmt::Debug for CommitError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Inner::NotRecordable(reason, _) => {
                f.debug_tuple("NotRecordable").field(reason).finish()
            }
            Inner::Failed(error) => f.debug_tuple("Failed").field(error).finish(),
        }
    }
}

impl<T> Error for CommitError<T> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.0 {
            Inner::NotRecordable(..) => None,
            Inner::Failed(error) => Some(error),
        }
    }
}

#[cfg(test)]
mod tests;
