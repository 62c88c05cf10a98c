use std::{
    error::Error,
    fmt,
    sync::{Mutex, PoisonError},
};

use tower_idempotency::{
    store::StoreError,
    transaction::{NotRecordable, NotRecordedReason},
};

use crate::SqlError;

/// Why a transaction under a lease did not do what it was asked. Its effect is not there, unless the kind says otherwise.
///
/// Answer with a response that the layer does not record: a 503, with [`Retention::NoStore`](tower_idempotency::Retention)
/// where 5xx are recorded. The client asks again, and is told what is stored then. Where a commit has begun, the layer looks
/// by itself, and answers what is stored at once. After [`Ended`](TransactionErrorKind::Ended) a retry may do again what is
/// done already: answer with [`NeedsAttention`](tower_idempotency::NeedsAttention).
///
/// Holds nothing of keys, responses or checkpoints; see [`SqlError`] for what its source says.
#[derive(Debug)]
pub struct TransactionError {
    kind: TransactionErrorKind,
    source: Option<SqlError>,
}

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransactionErrorKind {
    /// Somebody else has the lease, or it has ended with an outcome. Nothing was written in the transaction; if that had
    /// ended before, see [`Ended`](Self::Ended).
    LeaseLost,
    /// The pool leads to where the entry is not: to another database than the store's, or the entry was forgotten.
    /// Nothing was written.
    NoEntry,
    /// The checkpoint's name is not 1 to 128 of letters, digits and `-_.:/`, or its data cannot be serialised or is larger
    /// than a record may be. Nothing was written.
    Checkpoint,
    /// The database failed before it was asked to commit, or refused to. Nothing was written.
    Database,
    /// The transaction had ended before: by a statement of the handler's own, in MySQL and MariaDB also by a deadlock or by
    /// one that changes a table's definition, or because the driver took it back whole, as it does when the begin of a
    /// savepoint is cut off or fails. No record or checkpoint was written. What the handler wrote until then was undone, or
    /// committed if it did that itself; what it wrote since then was committed at once, statement by statement.
    Ended,
    /// The database was asked to commit and did not answer, nor can it be said what became of it: it did not answer that
    /// either, or the lease is still held, and the commit may come yet. Everything was written or nothing. The layer asks
    /// again before it answers a client.
    Unknown,
}

impl TransactionError {
    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> TransactionErrorKind {
        self.kind
    }

    /// The code that the database reported; see [`SqlError::code`].
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        self.source.as_ref()?.code()
    }

    pub(crate) fn new(kind: TransactionErrorKind, source: SqlError) -> Self {
        Self {
            kind,
            source: Some(source),
        }
    }

    pub(crate) fn database(error: impl Into<SqlError>) -> Self {
        let error = error.into();
        let kind = if error.is_ended() {
            TransactionErrorKind::Ended
        } else {
            TransactionErrorKind::Database
        };
        Self::new(kind, error)
    }

    /// What [`Prepared::commit`](tower_idempotency::transaction::Prepared::commit) says; `asked` if the database was asked
    /// to commit and did not refuse.
    pub(super) fn of_commit(error: StoreError, asked: bool) -> Self {
        let source = match error {
            StoreError::Backend(source) => source.downcast::<SqlError>().ok().map(|it| *it),
            _ => return TransactionErrorKind::LeaseLost.into(),
        };
        let kind = match &source {
            _ if asked => TransactionErrorKind::Unknown,
            Some(error) if error.is_ended() => TransactionErrorKind::Ended,
            _ => TransactionErrorKind::Database,
        };
        Self { kind, source }
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
                "expected the entry of the lease in the database of the pool, found none"
            }
            TransactionErrorKind::Checkpoint => {
                "expected a checkpoint with a plain name and data that can be kept, found another"
            }
            TransactionErrorKind::Database => "the transaction failed, and nothing was written",
            TransactionErrorKind::Ended => {
                "the transaction had ended before, and nothing was recorded"
            }
            TransactionErrorKind::Unknown => {
                "it is not known whether the transaction was committed"
            }
        })
    }
}

impl Error for TransactionError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}

/// Why an answer is not known to be committed: the layer does not record it, or the transaction failed.
///
/// It may be sent between threads whatever the answer is, so that `?` makes it any other error. The [`TransactionError`] is
/// its source then.
pub struct CommitError<T>(Inner<T>);

enum Inner<T> {
    // Nobody looks at it but who owns it; so it is `Sync`, as bodies are not.
    NotRecordable(NotRecordedReason, Mutex<T>),
    Failed(TransactionError),
}

impl<T> CommitError<T> {
    /// Why the layer would not record it, if that is what is wrong. The transaction was rolled back.
    #[must_use]
    pub fn not_recorded_reason(&self) -> Option<NotRecordedReason> {
        match &self.0 {
            Inner::NotRecordable(reason, _) => Some(*reason),
            Inner::Failed(_) => None,
        }
    }

    /// What went wrong with the transaction, if that is it.
    #[must_use]
    pub fn failure(&self) -> Option<&TransactionError> {
        match &self.0 {
            Inner::NotRecordable(..) => None,
            Inner::Failed(error) => Some(error),
        }
    }

    /// The answer, where it is only one that the layer does not record; the failure otherwise.
    ///
    /// For answers that say that nothing was done, such as a 5xx. One that says that something was done is wrong now:
    /// the transaction was rolled back.
    ///
    /// # Errors
    ///
    /// When the transaction failed.
    pub fn into_answer(self) -> Result<T, TransactionError> {
        match self.0 {
            Inner::NotRecordable(_, answer) => {
                Ok(answer.into_inner().unwrap_or_else(PoisonError::into_inner))
            }
            Inner::Failed(error) => Err(error),
        }
    }
}

impl<T> From<TransactionError> for CommitError<T> {
    fn from(error: TransactionError) -> Self {
        Self(Inner::Failed(error))
    }
}

impl<T> From<NotRecordable<T>> for CommitError<T> {
    fn from(not: NotRecordable<T>) -> Self {
        let reason = not.reason();
        Self(Inner::NotRecordable(reason, Mutex::new(not.into_answer())))
    }
}

impl<T> fmt::Display for CommitError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Inner::NotRecordable(reason, _) => write!(
                f,
                "expected an answer that is recorded, found one that is not ({reason:?}): rolled back"
            ),
            // What became of it only the source says.
            Inner::Failed(_) => f.write_str("the transaction of the answer failed"),
        }
    }
}

/// Shows no answer.
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
mod tests {
    use super::*;

    #[test]
    fn what_became_of_a_transaction_that_failed_only_its_kind_says() {
        for kind in [
            TransactionErrorKind::LeaseLost,
            TransactionErrorKind::NoEntry,
            TransactionErrorKind::Checkpoint,
            TransactionErrorKind::Database,
            TransactionErrorKind::Ended,
            TransactionErrorKind::Unknown,
        ] {
            let error = CommitError::<()>::from(TransactionError::from(kind));
            assert_eq!(
                error.to_string(),
                "the transaction of the answer failed",
                "{kind:?}"
            );
            let source = error.source().expect("the failure");
            assert_eq!(source.to_string(), TransactionError::from(kind).to_string());
        }
    }
}
