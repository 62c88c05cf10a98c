//! Errors of diesel.

use diesel::result::{DatabaseErrorKind, Error};
use tower_idempotency_sql::SqlError;

/// Converts an error of diesel. Omits a message of the server that may quote values.
pub(crate) fn sql_error(error: Error) -> SqlError {
    match error {
        Error::DatabaseError(kind, reported) => match kind {
            // The connection failed, so the message is the driver's.
            DatabaseErrorKind::UnableToSendCommand | DatabaseErrorKind::ClosedConnection => {
                SqlError::from_driver(reported.message())
            }
            kind => match code(&kind) {
                Some(code) => SqlError::from_reported(code, reported.message()),
                None => SqlError::from_driver("the database reported an error without a code"),
            },
        },
        // The message may quote the value.
        Error::DeserializationError(_) | Error::SerializationError(_) => {
            SqlError::unreadable("a value of an unexpected type")
        }
        Error::RollbackErrorOnCommit { commit_error, .. } => sql_error(*commit_error),
        other => SqlError::from_driver(other),
    }
}

/// Returns the SQLSTATE of this kind, or [`None`] if the kind does not determine one.
fn code(kind: &DatabaseErrorKind) -> Option<&'static str> {
    Some(match kind {
        DatabaseErrorKind::UniqueViolation => "23505",
        DatabaseErrorKind::ForeignKeyViolation => "23503",
        DatabaseErrorKind::NotNullViolation => "23502",
        DatabaseErrorKind::CheckViolation => "23514",
        DatabaseErrorKind::RestrictViolation => "23001",
        DatabaseErrorKind::ExclusionViolation => "23P01",
        DatabaseErrorKind::SerializationFailure => "40001",
        DatabaseErrorKind::ReadOnlyTransaction => "25006",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn error_without_code_has_cause() {
        let reported = Box::new("of values".to_owned());
        let error = sql_error(Error::DatabaseError(DatabaseErrorKind::Unknown, reported));
        assert_eq!(error.code(), None);
        let cause = error.source().expect("a cause").to_string();
        assert_eq!(cause, "the database reported an error without a code");
    }
}
