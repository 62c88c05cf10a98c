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
            kind => SqlError::from_reported(code(&kind), reported.message()),
        },
        // The message may quote the value.
        Error::DeserializationError(_) | Error::SerializationError(_) => {
            SqlError::unreadable("a value of an unexpected type")
        }
        Error::RollbackErrorOnCommit { commit_error, .. } => sql_error(*commit_error),
        other => SqlError::from_driver(other),
    }
}

/// Returns the SQLSTATE of this kind, or an empty text if the kind does not determine one.
fn code(kind: &DatabaseErrorKind) -> &'static str {
    match kind {
        DatabaseErrorKind::UniqueViolation => "23505",
        DatabaseErrorKind::ForeignKeyViolation => "23503",
        DatabaseErrorKind::NotNullViolation => "23502",
        DatabaseErrorKind::CheckViolation => "23514",
        DatabaseErrorKind::RestrictViolation => "23001",
        DatabaseErrorKind::ExclusionViolation => "23P01",
        DatabaseErrorKind::SerializationFailure => "40001",
        DatabaseErrorKind::ReadOnlyTransaction => "25006",
        _ => "",
    }
}
