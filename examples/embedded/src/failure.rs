use std::{error::Error, fmt};

use axum::{
    Json,
    http::{StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use serde_json::json;
use tower_idempotency_sqlx::{CommitError, SqlError, TransactionError, sqlx};

/// Why a request has no outcome yet: answered 503, which is not recorded, so that a retry executes.
#[derive(Debug)]
#[non_exhaustive]
pub enum Failure {
    /// A transaction was not committed, or nobody knows: then the layer finds out before it answers.
    Transaction(TransactionError),
    /// The file.
    Database(SqlError),
    /// The answer is one that the layer does not record.
    NotRecorded,
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        tracing::warn!(error = &self as &(dyn Error + 'static), "no outcome yet");
        let body = Json(json!({ "error": "try again with the same key" }));
        let headers = [(RETRY_AFTER, "1")];
        (StatusCode::SERVICE_UNAVAILABLE, headers, body).into_response()
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
            Self::Transaction(_) => "a transaction under the lease failed",
            Self::Database(_) => "the file cannot be used",
            Self::NotRecorded => "expected an answer that is recorded, found another",
        })
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Transaction(error) => Some(error),
            Self::Database(error) => Some(error),
            Self::NotRecorded => None,
        }
    }
}
