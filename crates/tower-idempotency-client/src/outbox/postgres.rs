//! The outbox in a table of PostgreSQL.

use std::time::SystemTime;

use sqlx::{AssertSqlSafe, PgConnection, PgPool, Row as _, postgres::PgRow};

use super::{
    Outbox, OutboxError,
    entry::{Entry, millis},
    sql::{MAX_ATTEMPTS, Row, Statements, TABLE, impl_outbox, warn_of_skipped_row},
};
use crate::warning::WarningLimit;

/// Outbox in a table of PostgreSQL, which any number of processes may share.
///
/// The application can store an entry in the transaction of its own data, and send the request after the commit. Then
/// either both are stored, or neither. It can remove the entry in the transaction that stores the response, with
/// [`OutboxLayer::with_manual_removal`](crate::OutboxLayer::with_manual_removal). Recoveries skip a row that cannot be read,
/// and log its position: at most one warning a second, and the others at `debug`.
///
/// ```no_run
/// use bytes::Bytes;
/// use http::Request;
/// use http_body_util::Full;
/// use tower_idempotency_client::{Entry, Operation, PostgresOutbox, sqlx::PgPool};
///
/// # async fn order(pool: PgPool, outbox: PostgresOutbox) -> Result<(), Box<dyn std::error::Error>> {
/// let operation = Operation::new();
/// let request = Request::post("https://api.example.com/orders").body(Bytes::from("one espresso"))?;
///
/// let mut tx = pool.begin().await?;
/// // Insert the order here.
/// outbox.store_in(&mut tx, &Entry::new(&operation, &request)).await?;
/// tx.commit().await?;
///
/// let mut request = request.map(Full::<Bytes>::from);
/// request.extensions_mut().insert(operation);
/// // Send the request with an `OutboxService`. After a crash, the recovery of any process sends it.
/// # Ok(())
/// # }
/// ```
pub struct PostgresOutbox {
    pool: PgPool,
    statements: Statements,
    /// Limit of the warning about rows that cannot be read.
    skipped: WarningLimit,
}

impl PostgresOutbox {
    /// Creates an outbox that uses this pool, and the table `idempotency_outbox` in the search path.
    ///
    /// # Panics
    ///
    /// Never: the name of the table is valid.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
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

    /// Creates the table, unless it exists. Every process may call this at each start.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached, or the user may not create tables in the schema. PostgreSQL checks this right also
    /// if the table exists. A process without it does not call this method.
    pub async fn migrate(&self) -> Result<(), OutboxError> {
        let table = &self.statements.table;
        // Without the lock, two processes that create the table at the same time get an error. The server executes both
        // statements of this message in one transaction, which also ends if one of them fails.
        let sql = format!(
            "select pg_advisory_xact_lock(hashtext('{table}'));
            create table if not exists {table} (
                position bigint generated always as identity primary key,
                key text not null unique,
                method text not null,
                url text not null,
                headers text not null,
                body bytea not null,
                first_sent bigint,
                provider bigint,
                resumed boolean not null default false
            )"
        );
        let created = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool);
        created.await.map(drop).map_err(OutboxError::new)
    }

    /// Stores an entry in the transaction of the caller, unless there is one under its key.
    ///
    /// Once the transaction has committed, the caller or a recovery sends the request. If it is rolled back, there is no
    /// entry.
    ///
    /// # Errors
    ///
    /// - The database fails. The transaction is then broken.
    /// - The URL of the request is too long.
    pub async fn store_in(&self, tx: &mut PgConnection, entry: &Entry) -> Result<(), OutboxError> {
        entry.check()?;
        let inserted = self.insert(entry).execute(tx).await;
        inserted.map(drop).map_err(OutboxError::new)
    }

    /// Removes an entry in the transaction of the caller, for example the one that stores the response.
    ///
    /// # Errors
    ///
    /// If the database fails. The transaction is then broken.
    pub async fn remove_in(&self, tx: &mut PgConnection, key: &str) -> Result<(), OutboxError> {
        let deleted = sqlx::query(AssertSqlSafe(self.statements.remove.as_str())).bind(key);
        let deleted = deleted.execute(tx).await;
        deleted.map(drop).map_err(OutboxError::new)
    }
}

impl_outbox!(PostgresOutbox, PgRow);
