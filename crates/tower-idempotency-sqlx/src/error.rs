use std::{error::Error, fmt};

use tower_idempotency::store::StoreError;

/// Why the database did not do what it was asked.
///
/// What a server says may quote the values of a statement, which are ids, tokens and records. So of an error that the
/// server reported only its code is kept, and its text where that can only speak of names: of a table that is missing, a
/// user who may not, a server that is going away. What it is that failed on the way to the server is the source.
#[derive(Debug)]
pub struct SqlError {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Reported { code: String, text: Option<String> },
    Driver(sqlx::Error),
    Contended,
    Ended,
    Unreadable(&'static str),
}

impl SqlError {
    pub(crate) fn contended() -> Self {
        Self {
            kind: Kind::Contended,
        }
    }

    /// The transaction of a handler that was to be committed.
    pub(crate) fn ended() -> Self {
        Self { kind: Kind::Ended }
    }

    pub(crate) fn is_ended(&self) -> bool {
        matches!(self.kind, Kind::Ended)
    }

    /// An answer that is none to the question, as from a table of another kind.
    pub(crate) fn unreadable(what: &'static str) -> Self {
        Self {
            kind: Kind::Unreadable(what),
        }
    }

    /// The code that the database reported: the SQLSTATE of PostgreSQL, the number of MySQL, the extended result code of
    /// SQLite.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        match &self.kind {
            Kind::Reported { code, .. } => Some(code),
            Kind::Driver(_) | Kind::Contended | Kind::Ended | Kind::Unreadable(_) => None,
        }
    }
}

impl From<sqlx::Error> for SqlError {
    fn from(error: sqlx::Error) -> Self {
        let kind = match error {
            sqlx::Error::Database(reported) => {
                let code = code(&*reported);
                let is_harmless = speaks_of_names(&code) || is_bound(&*reported);
                let text = is_harmless.then(|| reported.message().to_owned());
                Kind::Reported { code, text }
            }
            // What it cannot read it may show.
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => {
                Kind::Unreadable("a value of another type than expected")
            }
            other => Kind::Driver(other),
        };
        Self { kind }
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
            } => write!(f, "the database reports {code}: {text}"),
            Kind::Reported { code, text: None } => write!(f, "the database reports {code}"),
            Kind::Driver(_) => f.write_str("the database did not answer"),
            Kind::Contended => f.write_str("the entry changed each time it was looked at"),
            Kind::Ended => f.write_str("the transaction had ended before"),
            Kind::Unreadable(what) => write!(f, "the database answered with {what}"),
        }
    }
}

impl Error for SqlError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.kind {
            Kind::Driver(error) => Some(error),
            Kind::Reported { .. } | Kind::Contended | Kind::Ended | Kind::Unreadable(_) => None,
        }
    }
}

/// MySQL has a number for each error, and one SQLSTATE for most of them.
pub(crate) fn code(reported: &dyn sqlx::error::DatabaseError) -> String {
    #[cfg(feature = "mysql")]
    if let Some(error) = reported.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
        return error.number().to_string();
    }
    reported.code().unwrap_or_default().into_owned()
}

/// What is given to SQLite is never in the text of a statement, and so not in that of an error either.
#[cfg_attr(
    not(feature = "sqlite"),
    expect(unused_variables, reason = "of SQLite only")
)]
fn is_bound(reported: &dyn sqlx::error::DatabaseError) -> bool {
    #[cfg(feature = "sqlite")]
    return reported
        .try_downcast_ref::<sqlx::sqlite::SqliteError>()
        .is_some();
    #[cfg(not(feature = "sqlite"))]
    false
}

/// Codes whose text names tables, columns, roles and databases, and never a value.
fn speaks_of_names(code: &str) -> bool {
    match code.len() {
        // SQLSTATE: connection, authorization, no such database, no such column, function or table, privileges,
        // resources, shutdown.
        5 => {
            ["08", "28", "3D", "53", "57"].contains(&&code[..2])
                || ["42703", "42883", "42P01", "42501", "3F000"].contains(&code)
        }
        // MySQL: too many connections, access denied, no such database, server shutdown, no such column or table.
        4 => [
            "1040", "1044", "1045", "1049", "1053", "1054", "1142", "1146",
        ]
        .contains(&code),
        _ => false,
    }
}
