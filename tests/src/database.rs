//! A database with leases and records, and also with the rows of handlers, which show their effects.

use std::time::Duration;

use tokio::time::timeout;
use tower_idempotency::Lease;
use tower_idempotency_sqlx::{
    FencedTransaction, MySqlStore, PostgresStore, SqlStore, SqliteStore, TransactionError,
    sqlx::{
        self, AssertSqlSafe, Connection, Database, MySql, Pool, Postgres, Row, Sqlite, SqlitePool,
        pool::PoolOptions, raw_sql, sqlite::SqliteConnectOptions,
    },
};

use crate::{
    scratch::Scratch,
    servers::{mariadb, postgres},
};

/// A store, the pool of the handlers in the same database, and a table of effects.
#[derive(Debug)]
pub struct TestDatabase<S: TestDialect> {
    /// The store.
    pub store: S,
    /// The handlers' pool.
    pub pool: Pool<S::Database>,
    /// The table of the store.
    pub table: String,
}

/// An effect, as a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EffectRow {
    /// The key of the request.
    pub key: String,
    /// The id of the process.
    pub pid: i64,
    /// The number of the execution in its process.
    pub n: i64,
}

/// The operations that the tests need from a database, independent of its dialect.
pub trait TestDialect: SqlStore {
    /// Creates a store in a table of this name.
    ///
    /// # Errors
    ///
    /// Returns an error if the store cannot be created.
    fn open(url: &str, table: &str) -> Self;

    /// Returns statements that begin a transaction and complete an entry in it. The id of the entry is in hexadecimal.
    fn fence_statement(table: &str, id: &str) -> String;

    /// Creates the table of the store.
    fn make(&self) -> impl Future<Output = ()> + Send;

    /// Runs a statement.
    fn run(
        on: &mut <Self::Database as sqlx::Database>::Connection,
        sql: String,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Runs a statement on a connection of the pool.
    fn run_alone(
        pool: &Pool<Self::Database>,
        sql: String,
    ) -> impl Future<Output = sqlx::Result<u64>> + Send;

    /// Returns the rows of a statement that selects a text and two numbers.
    fn rows(
        pool: &Pool<Self::Database>,
        sql: String,
    ) -> impl Future<Output = Vec<EffectRow>> + Send;
}

macro_rules! ledgered {
    ($($store:ty, $database:ty, $open:expr, $begin:literal, $id:literal;)*) => { $(
        impl TestDialect for $store {
            fn open(url: &str, table: &str) -> Self {
                let open: fn(&str) -> Self = $open;
                open(url).with_table(table).expect("an identifier")
            }

            fn fence_statement(table: &str, id: &str) -> String {
                let id = $id.replace("{id}", id);
                format!(
                    "{}; update {table} set completed = 1, record = fingerprint, \
                     expires = expires + 100000 where id = {id}",
                    $begin
                )
            }

            async fn make(&self) {
                self.migrate().await.expect("the test server runs");
            }

            async fn run(
                on: &mut <$database as sqlx::Database>::Connection,
                sql: String,
            ) -> sqlx::Result<u64> {
                let ran = raw_sql(AssertSqlSafe(sql)).execute(on).await?;
                Ok(ran.rows_affected())
            }

            async fn run_alone(pool: &Pool<$database>, sql: String) -> sqlx::Result<u64> {
                let mut connection = pool.acquire().await?;
                Self::run(&mut connection, sql).await
            }

            async fn rows(pool: &Pool<$database>, sql: String) -> Vec<EffectRow> {
                let rows = raw_sql(AssertSqlSafe(sql)).fetch_all(pool).await;
                let rows = rows.expect("the table is there");
                let row = |row: &<$database as sqlx::Database>::Row| EffectRow {
                    key: row.get(0),
                    pid: row.get(1),
                    n: row.get(2),
                };
                rows.iter().map(row).collect()
            }
        }
    )* };
}

ledgered! {
    PostgresStore, Postgres, |url| Self::from_url(url).expect("an URL"), "begin", "'\\x{id}'::bytea";
    MySqlStore, MySql, |url| Self::from_url(url).expect("an URL"), "begin", "x'{id}'";
    SqliteStore, Sqlite, |path| Self::in_file(path), "begin immediate", "x'{id}'";
}

impl<S: TestDialect> Clone for TestDatabase<S> {
    fn clone(&self) -> Self {
        Self {
            store: self.store.clone(),
            pool: self.pool.clone(),
            table: self.table.clone(),
        }
    }
}

impl<S: TestDialect> TestDatabase<S> {
    /// Opens a store, and creates its table with this name and a table of effects.
    ///
    /// # Panics
    ///
    /// Panics if the database does not reply.
    pub async fn open(url: &str, pool: Pool<S::Database>, table: &str) -> Self {
        let store = S::open(url, table);
        store.make().await;
        let database = Self {
            store,
            pool,
            table: table.to_owned(),
        };
        let effects = database.effects_table();
        let make = format!(
            "create table if not exists {effects} (effect varchar(255) not null, pid bigint not null, n bigint not null)"
        );
        S::run_alone(&database.pool, make).await.expect("a table");
        database
    }

    /// Begins a transaction under the lease.
    ///
    /// # Errors
    ///
    /// Like [`FencedTransaction::begin`].
    pub async fn begin(&self, lease: &Lease) -> Result<FencedTransaction<S>, TransactionError> {
        FencedTransaction::begin(&self.store, lease, &self.pool).await
    }

    /// Returns the name of the table of effects.
    #[must_use]
    pub fn effects_table(&self) -> String {
        format!("{}_effects", self.table)
    }

    /// Returns the statement that inserts an effect. The key comes from a test.
    #[must_use]
    pub fn effect(&self, key: &str, pid: u32, n: u64) -> String {
        let effects = self.effects_table();
        format!("insert into {effects} (effect, pid, n) values ('{key}', {pid}, {n})")
    }

    /// Returns all effects.
    pub async fn effects(&self) -> Vec<EffectRow> {
        let effects = self.effects_table();
        S::rows(&self.pool, format!("select effect, pid, n from {effects}")).await
    }

    /// Returns the number of effects.
    pub async fn count(&self) -> usize {
        self.effects().await.len()
    }

    /// Runs a statement on a separate connection. Replaces `{table}` by the table of the store.
    ///
    /// # Panics
    ///
    /// Panics if it fails.
    pub async fn admin(&self, sql: &str) -> u64 {
        let sql = sql.replace("{table}", &self.table);
        S::run_alone(&self.pool, sql).await.expect("it works")
    }
}

impl TestDatabase<PostgresStore> {
    /// Creates a deferred trigger that raises an exception at the commit of the first execution, like a check of an invariant
    /// over several rows.
    ///
    /// # Panics
    ///
    /// Panics if a statement fails.
    pub async fn reject_first_commit(&self) {
        for sql in [
            "create function {table}_refuse() returns trigger language plpgsql as
             $$ begin if new.n = 1 then raise exception 'unbalanced'; end if; return null; end $$",
            "create constraint trigger refuse after insert on {table}_effects
             deferrable initially deferred for each row execute function {table}_refuse()",
        ] {
            self.admin(sql).await;
        }
    }
}

/// Creates a database on the server that the tests of a binary share.
///
/// # Panics
///
/// Panics if the server does not reply.
pub async fn on_postgres(table: &str) -> TestDatabase<PostgresStore> {
    let url = postgres::shared().url();
    TestDatabase::open(
        &url,
        pool_options::<Postgres>().connect(&url).await.expect(RUNS),
        table,
    )
    .await
}

/// Creates a database on the server that the tests of a binary share.
///
/// # Panics
///
/// Panics if the server does not reply.
pub async fn on_mariadb(table: &str) -> TestDatabase<MySqlStore> {
    let url = mariadb::shared().url();
    TestDatabase::open(
        &url,
        pool_options::<MySql>().connect(&url).await.expect(RUNS),
        table,
    )
    .await
}

/// Creates a database in a file in this directory.
///
/// # Panics
///
/// Panics if it cannot be written.
pub async fn sqlite_file_database(scratch: &Scratch, table: &str) -> TestDatabase<SqliteStore> {
    let path = scratch.file("database.db").display().to_string();
    TestDatabase::open(&path, sqlite_pool(&path), table).await
}

/// Creates a pool for handlers.
#[must_use]
pub fn sqlite_pool(path: &str) -> SqlitePool {
    let options = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true);
    pool_options::<Sqlite>().connect_lazy_with(options)
}

/// Returns options of a pool without the task of sqlx that closes idle connections.
///
/// In sqlx 0.9.0 that task uses a processor without end if a connection is returned at the wrong moment (sqlx issue 3645).
/// It does not run if connections have no age limit and no idle limit.
#[must_use]
pub fn pool_options<DB: Database>() -> PoolOptions<DB> {
    PoolOptions::new().max_lifetime(None).idle_timeout(None)
}

/// Limits the time that handlers wait for an unresponsive database. A pool of sqlx pings each returned connection and holds
/// its permit until the database replies. This pool closes the connection if there is no reply within `patience`.
#[must_use]
pub fn with_timeouts<DB: Database>(
    options: PoolOptions<DB>,
    patience: Duration,
) -> PoolOptions<DB> {
    options
        .acquire_timeout(patience)
        .after_release(move |connection, _| {
            Box::pin(async move {
                let alive = timeout(patience, connection.ping()).await;
                alive.unwrap_or_else(|elapsed| Err(sqlx::Error::Io(elapsed.into())))?;
                Ok(true)
            })
        })
}

/// Timeouts of handlers for a call that must hang, one for each trial. If an earlier call of the trial exceeds the
/// timeout, the trial is inconclusive.
pub const PATIENCE: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_secs(2),
    Duration::from_secs(8),
];

const RUNS: &str = "the test server runs";
