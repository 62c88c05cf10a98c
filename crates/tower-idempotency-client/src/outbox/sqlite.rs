//! The outbox in a table of SQLite.

use std::time::{Duration, SystemTime};

use sqlx::{AssertSqlSafe, Row as _, Sqlite, SqlitePool, sqlite::SqliteRow};
use tokio::time::{Instant, sleep};

use super::{
    Outbox, OutboxError,
    entry::{Entry, millis},
    sql::{MAX_ATTEMPTS, Row, Statements, TABLE, impl_outbox, warn_of_skipped_row},
};
use crate::warning::WarningLimit;

/// Outbox in a table of a SQLite file, which the processes of one machine may share.
///
/// An entry survives a crash of the machine with write-ahead logging, which [`migrate`](Self::migrate) sets, if `synchronous` of
/// the connections is `FULL`, the default of SQLite. With `NORMAL` a crash of the machine loses the last changes. So does `FULL`
/// if the options of the connections set another `journal_mode`: these need `EXTRA`. The requests of lost entries may have been
/// executed. If a discard is lost, a recovery executes a request whose call has reported
/// [`NotExecuted`](crate::Outcome::NotExecuted).
///
/// Recoveries skip a row that cannot be read, and log its position: at most one warning a second, and the others at `debug`.
pub struct SqliteOutbox {
    pool: SqlitePool,
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
            statements: Statements::of(table)?,
            ..self
        })
    }

    /// Creates the table, unless it exists, and sets write-ahead logging for the file. Every process may call this at each
    /// start.
    ///
    /// A database in memory, as in tests, has no such mode and is accepted.
    ///
    /// # Errors
    ///
    /// - The database cannot be opened or written.
    /// - It has no write-ahead logging, for example a temporary one.
    pub async fn migrate(&self) -> Result<(), OutboxError> {
        self.set_journal_mode().await?;
        let table = &self.statements.table;
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

    /// Sets write-ahead logging, which the file keeps.
    ///
    /// A commit in the mode `DELETE`, the default, ends with the removal of a file. Only `synchronous = EXTRA` makes that
    /// durable. If a crash brings the file back, SQLite rolls the commit back.
    async fn set_journal_mode(&self) -> Result<(), OutboxError> {
        let start = Instant::now();
        let modes = loop {
            let set = sqlx::query_scalar::<Sqlite, String>("pragma journal_mode = wal");
            match set.fetch_all(&self.pool).await {
                // SQLite needs exclusive access, and does not wait for it. Another process may be setting the mode, too.
                Err(error) if is_busy(&error) && start.elapsed() < BUSY_TIMEOUT => {
                    sleep(BUSY_RETRY_DELAY).await;
                }
                modes => break modes.map_err(OutboxError::new)?,
            }
        };
        match modes.first().map(String::as_str) {
            Some("wal" | "memory") => Ok(()),
            _ => Err(OutboxError::with_message(
                "the database of the outbox has no write-ahead logging",
            )),
        }
    }
}

impl_outbox!(SqliteOutbox, SqliteRow);

/// Returns `true` for `SQLITE_BUSY` and its extended codes.
fn is_busy(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    let code = code.and_then(|code| code.parse::<u32>().ok());
    // The lowest byte is the primary code.
    code.is_some_and(|code| code & 0xff == 5)
}

/// The default busy timeout of sqlx. SQLite may not apply a busy timeout to this statement.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
const BUSY_RETRY_DELAY: Duration = Duration::from_millis(10);
