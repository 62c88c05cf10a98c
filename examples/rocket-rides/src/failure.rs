use std::{error::Error, fmt, io};

use axum::{
    Json,
    http::{StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use serde_json::json;
use tower_idempotency_sqlx::{CommitError, SqlError, TransactionError, sqlx};

use crate::Unavailable;

/// Why a request has no outcome yet: answered 503, which is not recorded, so that a retry or the completer goes on from the
/// last checkpoint.
#[derive(Debug)]
#[non_exhaustive]
pub enum Failure {
    /// The provider is not there, or does not say.
    Payments(Unavailable),
    /// A transaction was not committed, or nobody knows: then the layer finds out before it answers.
    Transaction(TransactionError),
    /// The database.
    Database(SqlError),
    /// A receipt cannot be delivered.
    Mailbox(io::Error),
    /// The answer is one that the layer does not record.
    NotRecorded,
    /// A checkpoint that this release does not know, as after one that knew more of them.
    UnknownCheckpoint,
}

impl Failure {
    pub(crate) fn log(&self, what: &str) {
        tracing::warn!(error = self as &(dyn Error + 'static), "{what}");
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        self.log("a request has no outcome yet");
        let body = Json(json!({ "error": "try again with the same key" }));
        let headers = [(RETRY_AFTER, "1")];
        (StatusCode::SERVICE_UNAVAILABLE, headers, body).into_response()
    }
}

impl From<Unavailable> for Failure {
    fn from(error: Unavailable) -> Self {
        Self::Payments(error)
    }
}

impl From<TransactionError> for Failure {
    fn from(error: TransactionError) -> Self {
        Self::Transaction(error)
    }
}

impl From<SqlError> for Failure {
    fn from(error: SqlError) -> Self {
        Self::Database(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Mailbox(error)
    }
}

/// By way of an error that quotes no values.
impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error.into())
    }
}

impl<T> From<CommitError<T>> for Failure {
    fn from(error: CommitError<T>) -> Self {
        match error {
            CommitError::Failed(error) => Self::Transaction(error),
            _ => Self::NotRecorded,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Payments(_) => "the card was not charged, or nobody says so",
            Self::Transaction(_) => "a transaction under the lease failed",
            Self::Database(_) => "the database failed",
            Self::Mailbox(_) => "the mailbox failed",
            Self::NotRecorded => "expected an answer that is recorded, found another",
            Self::UnknownCheckpoint => "expected a checkpoint of this release, found another",
        })
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Payments(error) => Some(error),
            Self::Transaction(error) => Some(error),
            Self::Database(error) => Some(error),
            Self::Mailbox(error) => Some(error),
            Self::NotRecorded | Self::UnknownCheckpoint => None,
        }
    }
}
