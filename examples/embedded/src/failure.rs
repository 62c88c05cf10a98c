use std::{error::Error, iter};

use axum::{
    Extension, Json,
    http::{StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use serde_json::json;
use tower_idempotency::Retention;
use tower_idempotency_sqlx::{SqlError, TransactionError, TransactionErrorKind, sqlx};

/// The reason why a request has no outcome yet. The response is a 503, which is not recorded, so that a retry executes.
///
/// If a transaction failed and it is unknown whether it was committed, the layer queries the store before it responds.
/// If the transaction had ended before the commit, a part of its effect may exist, and a retry would repeat it. The response
/// is then that of [`TransactionError::into_response`], and no retry executes before an operator has resolved the key.
#[derive(Debug)]
pub struct Failure(Box<dyn Error + Send + Sync>);

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        // A database error may quote the values of a statement, and these must not appear in logs.
        match error.into().downcast::<sqlx::Error>() {
            Ok(error) => Self(Box::new(SqlError::from(*error))),
            Err(error) => Self(error),
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let error: &(dyn Error + 'static) = &*self.0;
        tracing::warn!(error, "a request has no outcome yet");
        // With `?`, an error of `commit` has the transaction error as its source.
        let mut causes = iter::successors(Some(error), |&error| error.source());
        let failed = causes.find_map(|it| it.downcast_ref::<TransactionError>());
        if failed.is_some_and(|it| it.kind() == TransactionErrorKind::Ended) {
            return TransactionError::from(TransactionErrorKind::Ended).into_response();
        }
        let body = Json(json!({ "error": "try again with the same key" }));
        let headers = [(RETRY_AFTER, "1")];
        // Some presets record a 503.
        let not_recorded = Extension(Retention::NoStore);
        (StatusCode::SERVICE_UNAVAILABLE, headers, not_recorded, body).into_response()
    }
}

#[cfg(test)]
mod tests {
    use tower_idempotency::NeedsAttention;
    use tower_idempotency_sqlx::CommitError;

    use super::*;

    #[test]
    fn only_early_end_needs_attention() {
        let ended = || TransactionError::from(TransactionErrorKind::Ended);
        // The errors that `?` makes of a failed `begin` and a failed `commit`.
        let committing = CommitError::<()>::from(ended());
        for failure in [Failure::from(ended()), Failure::from(committing)] {
            let res = failure.into_response();
            assert!(res.extensions().get::<NeedsAttention>().is_some());
        }
        for kind in [
            TransactionErrorKind::LeaseLost,
            TransactionErrorKind::Unknown,
        ] {
            let res = Failure::from(TransactionError::from(kind)).into_response();
            assert_eq!(res.status(), StatusCode::SERVICE_UNAVAILABLE);
            assert!(res.extensions().get::<NeedsAttention>().is_none());
            let retention = res.extensions().get::<Retention>();
            assert!(matches!(retention, Some(Retention::NoStore)));
        }
    }
}
