use std::{error::Error, fmt};

use tower_idempotency::{inspect::InspectError, store::StoreError};

/// Failure of a database call.
///
/// The message of a server may quote the values of a statement, which are IDs, tokens and records. So this type stores only
/// the code of a reported error. It also stores the message of an error that can quote only names, such as a missing table,
/// a missing privilege or a shutdown. If the call failed in the driver or in the network, the source is that failure.
#[derive(Debug)]
pub struct SqlError {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Reported {
        code: String,
        text: Option<String>,
    },
    Driver(Box<dyn Error + Send + Sync>),
    Contended,
    TransactionEnded,
    Unreadable(&'static str),
    /// A setting or a call that is refused, as a sentence.
    Refused(String),
}

impl SqlError {
    /// Creates the error that a database reported to another driver.
    ///
    /// Stores `message` only if an error of this code can quote only names.
    #[must_use]
    pub fn from_reported(code: &str, message: &str) -> Self {
        Self {
            kind: Kind::Reported {
                code: code.to_owned(),
                text: is_safe_to_show(code).then(|| message.to_owned()),
            },
        }
    }

    /// Creates the error of a call that failed in another driver or in the network.
    ///
    /// `error` becomes the source, and its text appears in logs. It must contain no values of statements.
    #[must_use]
    pub fn from_driver(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            kind: Kind::Driver(error.into()),
        }
    }

    /// Creates the error of a setting or of a call that is refused. `sentence` is the whole message.
    #[must_use]
    pub fn refused(sentence: impl Into<String>) -> Self {
        Self {
            kind: Kind::Refused(sentence.into()),
        }
    }

    /// Returns the error of an entry that changed during every attempt.
    #[must_use]
    pub fn contended() -> Self {
        Self {
            kind: Kind::Contended,
        }
    }

    /// Returns the error of a handler's transaction that had ended before its commit.
    #[must_use]
    pub fn transaction_ended() -> Self {
        Self {
            kind: Kind::TransactionEnded,
        }
    }

    /// Returns `true` for the error of [`transaction_ended`](Self::transaction_ended).
    #[must_use]
    pub fn is_transaction_ended(&self) -> bool {
        matches!(self.kind, Kind::TransactionEnded)
    }

    /// Returns the error of a result that does not match its statement, for example from an unrelated table.
    ///
    /// `description` completes the sentence "the database returned ..".
    #[must_use]
    pub fn unreadable(description: &'static str) -> Self {
        Self {
            kind: Kind::Unreadable(description),
        }
    }

    /// Returns the code of an error that sqlx 0.9 reports, like [`code`](Self::code).
    ///
    /// The code of MySQL is the error number, because most of its errors share one SQLSTATE.
    #[cfg(feature = "sqlx")]
    #[must_use]
    pub fn code_of_sqlx(reported: &dyn sqlx::error::DatabaseError) -> String {
        #[cfg(feature = "sqlx-mysql")]
        if let Some(error) = reported.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
            return error.number().to_string();
        }
        reported.code().unwrap_or_default().into_owned()
    }

    /// Returns the code that the database reported: the SQLSTATE of PostgreSQL, the error number of MySQL, or the
    /// extended result code of SQLite.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        match &self.kind {
            Kind::Reported { code, .. } => Some(code),
            Kind::Driver(_)
            | Kind::Contended
            | Kind::TransactionEnded
            | Kind::Unreadable(_)
            | Kind::Refused(_) => None,
        }
    }
}

#[cfg(feature = "sqlx")]
impl From<sqlx::Error> for SqlError {
    fn from(error: sqlx::Error) -> Self {
        let kind = match error {
            sqlx::Error::Database(reported) => {
                let code = Self::code_of_sqlx(&*reported);
                let is_safe = is_safe_to_show(&code) || has_bound_values(&*reported);
                let text = is_safe.then(|| reported.message().to_owned());
                Kind::Reported { code, text }
            }
            // The driver's message may quote the value.
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => {
                Kind::Unreadable("a value of an unexpected type")
            }
            other => Kind::Driver(Box::new(other)),
        };
        Self { kind }
    }
}

impl From<SqlError> for InspectError {
    fn from(error: SqlError) -> Self {
        Self::backend(error)
    }
}

impl From<SqlError> for StoreError {
    fn from(error: SqlError) -> Self {
        Self::backend(error)
    }
}

impl fmt::Display for SqlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Reported {
                code,
                text: Some(text),
            } => write!(f, "the database reported {code}: {text}"),
            Kind::Reported { code, text: None } => write!(f, "the database reported {code}"),
            Kind::Driver(_) => f.write_str("the call to the database failed"),
            Kind::Contended => f.write_str("the entry changed during every attempt"),
            Kind::TransactionEnded => f.write_str("the transaction had already ended"),
            Kind::Refused(sentence) => f.write_str(sentence),
            Kind::Unreadable(description) => write!(f, "the database returned {description}"),
        }
    }
}

impl Error for SqlError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.kind {
            Kind::Driver(error) => Some(&**error),
            Kind::Reported { .. }
            | Kind::Contended
            | Kind::TransactionEnded
            | Kind::Unreadable(_)
            | Kind::Refused(_) => None,
        }
    }
}

/// Returns `true` for an error of SQLite. The store binds all values there, so no message can contain one.
#[cfg(feature = "sqlx")]
#[cfg_attr(
    not(feature = "sqlx-sqlite"),
    expect(unused_variables, reason = "read only with SQLite")
)]
fn has_bound_values(reported: &dyn sqlx::error::DatabaseError) -> bool {
    #[cfg(feature = "sqlx-sqlite")]
    return reported
        .try_downcast_ref::<sqlx::sqlite::SqliteError>()
        .is_some();
    #[cfg(not(feature = "sqlx-sqlite"))]
    false
}

/// Returns `true` if the message of this code names only tables, columns, roles and databases, and never a value.
fn is_safe_to_show(code: &str) -> bool {
    match code.len() {
        // SQLSTATE: connection, authorization, no such database, no such column, function or table, privileges,
        // resources, shutdown.
        5 => {
            ["08", "28", "3D", "53", "57"].contains(&&code[..2])
                || ["42703", "42883", "42P01", "42501", "3F000"].contains(&code)
        }
        // MySQL: too many connections, access denied, no such database, server shutdown, no such column or table, format
        // of the binary log.
        4 => [
            "1040", "1044", "1045", "1049", "1053", "1054", "1142", "1146", "1665",
        ]
        .contains(&code),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
