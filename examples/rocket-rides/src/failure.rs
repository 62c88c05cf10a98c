use std::error::Error;

use axum::{
    Json,
    http::{StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use serde_json::json;
use tower_idempotency_sqlx::{SqlError, sqlx};

/// Why a request has no outcome yet: answered 503, which is not recorded, so that a retry or the completer goes on from
/// the last checkpoint.
///
/// Where a transaction failed and nobody knows whether it was committed, the layer finds out before it answers.
#[derive(Debug)]
pub struct Failure(Box<dyn Error + Send + Sync>);

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        // What a database says may quote what it was given, and logs are no place for that.
        match error.into().downcast::<sqlx::Error>() {
            Ok(error) => Self(Box::new(SqlError::from(*error))),
            Err(error) => Self(error),
        }
    }
}

impl Failure {
    pub(crate) fn log(&self, what: &str) {
        let error: &(dyn Error + 'static) = &*self.0;
        tracing::warn!(error, "{what}");
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
