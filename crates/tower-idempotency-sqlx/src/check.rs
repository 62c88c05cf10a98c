//! Errors of a store's check, as sentences for an operator.

use tower_idempotency::store::{CheckError, CheckErrorKind};

#[cfg(any(feature = "mysql", feature = "postgres"))]
use crate::SqlError;

/// Columns of the table that all stores have.
pub(crate) const COLUMNS: [&str; 14] = [
    "id",
    "token",
    "fingerprint",
    "generation",
    "lease_ends",
    "orphan_retention",
    "expires",
    "created",
    "completed",
    "owner",
    "operation",
    "checkpoint",
    "checkpoint_data",
    "record",
];

/// Indexes of the table: the name, or its end.
pub(crate) const INDEXES: [&str; 4] = ["expires", "orphans", "attention", "completed"];

/// Reason why the stores reject a database in memory.
#[cfg(feature = "sqlite")]
pub(crate) const IN_MEMORY: &str = "the database is in memory or in an unnamed file, so each connection would have a \
                                    database of its own";
#[cfg(feature = "sqlite")]
pub(crate) const NAME_A_FILE: &str = "name a file, or use MemoryStore";

/// Part of the database that is missing.
pub(crate) enum Missing<'a> {
    Table,
    /// A column or an index, such as `column id`.
    Part(&'a str),
    /// A right on the table, such as `insert`.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    Right(&'a str),
    /// Writes, because the server is a replica or read-only.
    Writes,
    /// A binary log of rows. The server logs statements, and so rejects writes at READ COMMITTED.
    #[cfg(feature = "mysql")]
    RowLog,
}

impl Missing<'_> {
    /// Returns the error for this table.
    pub(crate) fn in_table(&self, table: &str) -> CheckError {
        match self {
            Self::Table => CheckError::new(
                CheckErrorKind::Incomplete,
                format!("the table {table} is missing or not visible to the user"),
                "call `migrate`, or execute the files in `migrations`",
            ),
            Self::Part(part) => CheckError::new(
                CheckErrorKind::Incomplete,
                format!("the table {table} has no {part}"),
                "call `migrate`, or execute the files in `migrations`",
            ),
            #[cfg(any(feature = "mysql", feature = "postgres"))]
            Self::Right(right) => CheckError::new(
                CheckErrorKind::Denied,
                format!("the user may not {right} in the table {table}"),
                "grant select, insert, update and delete on the table",
            ),
            Self::Writes => CheckError::new(
                CheckErrorKind::Unsafe,
                "the database accepts no writes",
                "connect to the primary, and to a database that is not read-only",
            ),
            #[cfg(feature = "mysql")]
            Self::RowLog => CheckError::new(
                CheckErrorKind::Unsafe,
                "the server has binlog_format = STATEMENT, and rejects writes at READ COMMITTED",
                "set binlog_format to ROW or MIXED",
            ),
        }
    }
}

/// Returns the error of a check that failed for another reason.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) fn failed(error: &SqlError) -> CheckError {
    CheckError::unreachable(
        error,
        "check the address, the credentials and the network, and that the server runs",
    )
}
