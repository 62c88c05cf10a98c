//! Calls that wait for the writers of other connections.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use sqlx::{
    AssertSqlSafe, Execute, Row, SqlSafeStr as _, Sqlite,
    query::Query,
    raw_sql,
    sqlite::{SqliteArguments, SqliteRow},
};
use tokio::time::sleep;

use crate::{
    SqlError,
    connection::{Connections, PooledConnection, Priority, is_busy},
};

/// Connections to a file. They repeat a statement while another connection writes.
///
/// SQLite has no queue for writers: it polls for its lock, and soon only every 100 ms. If another process writes almost
/// without a pause, it then hardly ever finds the lock free. So these connections poll every 1 to 10 ms.
pub(super) struct FileConnections {
    connections: Connections<Sqlite>,
    /// Milliseconds for which a call waits: the busy timeout of the options. Each new connection reads it.
    busy_timeout: AtomicU64,
}

impl FileConnections {
    pub(super) fn new(connections: Connections<Sqlite>) -> Self {
        Self {
            connections,
            busy_timeout: AtomicU64::new(0),
        }
    }

    /// Executes one statement and returns its rows.
    ///
    /// Reads to the end of the result, because SQLite commits only after the last row. A commit can fail, for example on a
    /// full disk. `fetch_optional` would stop after the first row and miss that error.
    pub(super) async fn fetch_all(
        &self,
        priority: Priority,
        mut query: Query<'_, Sqlite, SqliteArguments>,
    ) -> Result<Vec<SqliteRow>, SqlError> {
        let is_persistent = Execute::<Sqlite>::persistent(&query);
        let arguments = query.take_arguments().map_err(sqlx::Error::Encode)?;
        // Clones share the values.
        let (arguments, sql) = (arguments.unwrap_or_default(), query.sql());
        let (mut pooled, wait) = self.checkout(priority).await?;
        let rows = loop {
            let query = sqlx::query_with(sql.clone(), arguments.clone()).persistent(is_persistent);
            match query.fetch_all(&mut pooled.connection).await {
                Ok(rows) => break rows,
                Err(error) => wait.until_retry(error).await?,
            }
        };
        pooled.return_to_pool();
        Ok(rows)
    }

    /// Executes statements without parameters and returns their rows. Only the first statement may wait for a writer, and it
    /// must begin the transaction of the others.
    pub(super) async fn fetch_all_raw(&self, sql: String) -> Result<Vec<SqliteRow>, SqlError> {
        let sql = AssertSqlSafe(sql).into_sql_str();
        let (mut pooled, wait) = self.checkout(Priority::Maintain).await?;
        let rows = loop {
            match raw_sql(sql.clone()).fetch_all(&mut pooled.connection).await {
                Ok(rows) => break rows,
                // The return of another error closes the connection, which rolls its transaction back.
                Err(error) => wait.until_retry(error).await?,
            }
        };
        pooled.return_to_pool();
        Ok(rows)
    }

    /// Returns a connection for one call, and the wait for other writers.
    async fn checkout(
        &self,
        priority: Priority,
    ) -> Result<(PooledConnection<'_, Sqlite>, BusyWait), SqlError> {
        let (mut pooled, is_new) = self.connections.checkout(priority).await?;
        if is_new {
            let replaced = raw_sql(REPLACE_BUSY_TIMEOUT).fetch_all(&mut pooled.connection);
            let rows = replaced.await?;
            let row = rows
                .first()
                .ok_or(SqlError::unreadable("no busy timeout"))?;
            let millis: i64 = row.try_get(0)?;
            self.busy_timeout.store(millis.unsigned_abs(), Relaxed);
        }
        let wait = BusyWait {
            start: Instant::now(),
            limit: Duration::from_millis(self.busy_timeout.load(Relaxed)),
        };
        Ok((pooled, wait))
    }
}

/// The wait of one call for the writers of other connections.
struct BusyWait {
    start: Instant,
    limit: Duration,
}

impl BusyWait {
    /// Returns when the statement may be repeated.
    ///
    /// # Errors
    ///
    /// Returns the error if no other writer is its cause, or if the busy timeout has passed.
    async fn until_retry(&self, error: sqlx::Error) -> Result<(), SqlError> {
        if !is_busy(&error) || self.start.elapsed() >= self.limit {
            return Err(error.into());
        }
        sleep(POLL_INTERVAL).await;
        Ok(())
    }
}

const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Returns the busy timeout of the options, and sets one for which SQLite polls five times. So a dropped call leaves no thread
/// that polls for long and still writes. With a shorter one, many connections to one file use up the processors.
const REPLACE_BUSY_TIMEOUT: &str = "pragma busy_timeout; pragma busy_timeout = 18";
