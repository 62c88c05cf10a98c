//! The outbox in a table of SQLite.

use std::{fmt, time::SystemTime};

use sqlx::{AssertSqlSafe, Row as _, SqlitePool, sqlite::SqliteRow};

use super::{
    Outbox, OutboxError,
    entry::{Entry, millis},
    sql::{
        MAX_ATTEMPTS, Row, Statements, TABLE, headers_to_text, impl_outbox, warn_of_skipped_row,
    },
};
use crate::warning::WarningLimit;

/// Outbox in a table of a SQLite file, which the processes of one machine may share.
///
/// An entry survives a crash of the machine if `synchronous` of the connections is `FULL`, the default of SQLite. With
/// `NORMAL` and write-ahead logging a crash of the machine loses the last changes. The requests of lost entries may have been
/// executed. If a discard is lost, a recovery executes a request whose call has reported
/// [`NotExecuted`](crate::Outcome::NotExecuted).
///
/// Recoveries skip a row that cannot be read, and log its position: at most one warning a second, and the others at `debug`.
pub struct SqliteOutbox {
    pool: SqlitePool,
    table: String,
    statements: Statements,
    /// Limit of the warning about rows that cannot be read.
    skipped: WarningLimit,
}

impl SqliteOutbox {
    /// Creates an outbox that uses this pool, and the table `idempotency_outbox`.
    ///
    /// # Panics
    ///
    /// Never: the name of the table is valid.
    #[must_use]
    pub fn new(pool: SqlitePool) -> Self {
        Self {
            pool,
            table: TABLE.to_owned(),
            statements: Statements::of(TABLE).expect("a valid name"),
            skipped: WarningLimit::default(),
        }
    }

    /// Sets the table. Default: `idempotency_outbox`.
    ///
    /// # Errors
    ///
    /// If the name is not 1 to 48 of `a` to `z`, `0` to `9` and `_`, or begins with a digit.
    pub fn with_table(self, table: &str) -> Result<Self, OutboxError> {
        Ok(Self {
            table: table.to_owned(),
            statements: Statements::of(table)?,
            ..self
        })
    }

    /// Creates the table, unless it exists.
    ///
    /// # Errors
    ///
    /// If the database cannot be opened or written.
    pub async fn migrate(&self) -> Result<(), OutboxError> {
        let table = &self.table;
        let sql = format!(
            "create table if not exists {table} (
                position integer primary key autoincrement,
                key text not null unique,
                method text not null,
                url text not null,
                headers text not null,
                body blob not null,
                first_sent integer,
                provider integer,
                resumed boolean not null default false
            )"
        );
        let created = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool);
        created.await.map(drop).map_err(OutboxError::new)
    }
}

impl_outbox!(SqliteOutbox, SqliteRow);

impl fmt::Debug for SqliteOutbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteOutbox")
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}
