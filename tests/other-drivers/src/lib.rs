//! The drivers under test, with one interface.

pub mod adopted;

use std::time::Duration;

use diesel_async::{
    AsyncPgConnection, SimpleAsyncConnection,
    pooled_connection::{AsyncDieselConnectionManager, deadpool::Pool},
};
use tower_idempotency::Lease;
use tower_idempotency_sea_orm::sea_orm::{
    ConnectOptions, ConnectionTrait, Database, DatabaseConnection,
};
use tower_idempotency_sql::{Driver, FencedTransaction, SqlError, TransactionError};
use tower_idempotency_sqlx::PostgresStore;
use tower_idempotency_sqlx_08::sqlx;

/// The handlers' pool of one driver.
pub trait Handlers: Clone + Send + Sync + 'static {
    /// A name for tables.
    const NAME: &str;
    /// The end of the message that sets the isolation level.
    const BEGIN: &str;
    /// The end of the message with the commit. A shorter text would match the isolation level.
    const COMMIT: &str;
    /// The driver reports the SQLSTATE of each error.
    const REPORTS_CODE: bool;

    /// The transaction.
    type Driver: Driver + 'static;

    /// Creates a pool, which connects when it is used.
    fn pool(url: &str, size: u32) -> Self;

    /// Begins a transaction.
    fn begin(
        &self,
        store: &PostgresStore,
        lease: &Lease,
    ) -> impl Future<Output = Result<FencedTransaction<Self::Driver>, TransactionError>> + Send;

    /// Runs statements in a transaction. Returns `false` if they fail.
    fn run(
        tx: &mut <Self::Driver as Driver>::Target,
        sql: &str,
    ) -> impl Future<Output = bool> + Send;

    /// Runs a statement outside of a transaction. Returns `false` if it fails.
    fn run_alone(&self, sql: &str) -> impl Future<Output = bool> + Send;
}

/// The time that a pool waits for a connection.
const PATIENCE: Duration = Duration::from_secs(20);

/// Sqlx 0.8.
#[derive(Clone)]
pub struct Sqlx08(pub sqlx::PgPool);

impl Handlers for Sqlx08 {
    const NAME: &str = "sqlx08";
    const BEGIN: &str = "read write\0";
    const COMMIT: &str = "COMMIT\0";
    const REPORTS_CODE: bool = true;
    type Driver = tower_idempotency_sqlx_08::PoolTransaction;

    fn pool(url: &str, size: u32) -> Self {
        // Without the task of sqlx that closes idle connections, which may never end (sqlx issue 3645).
        let options = sqlx::postgres::PgPoolOptions::new()
            .max_lifetime(None)
            .idle_timeout(None)
            .max_connections(size)
            .acquire_timeout(PATIENCE);
        Self(options.connect_lazy(url).expect("an URL"))
    }

    async fn begin(
        &self,
        store: &PostgresStore,
        lease: &Lease,
    ) -> Result<FencedTransaction<Self::Driver>, TransactionError> {
        tower_idempotency_sqlx_08::begin(store, lease, &self.0).await
    }

    async fn run(tx: &mut sqlx::Transaction<'static, sqlx::Postgres>, sql: &str) -> bool {
        sqlx::Executor::execute(&mut **tx, sql).await.is_ok()
    }

    async fn run_alone(&self, sql: &str) -> bool {
        sqlx::Executor::execute(&self.0, sql).await.is_ok()
    }
}

/// SeaORM.
#[derive(Clone)]
pub struct SeaOrm(pub DatabaseConnection);

impl Handlers for SeaOrm {
    const NAME: &str = "seaorm";
    const BEGIN: &str = "READ WRITE\0";
    const COMMIT: &str = "commit and chain\0";
    const REPORTS_CODE: bool = true;
    type Driver = tower_idempotency_sea_orm::OpenTransaction;

    fn pool(url: &str, size: u32) -> Self {
        let mut options = ConnectOptions::new(url);
        options
            .max_connections(size)
            .acquire_timeout(PATIENCE)
            .connect_lazy(true)
            .sqlx_logging(false);
        let connect = Database::connect(options);
        // A lazy connect does not wait.
        let runtime = tokio::runtime::Handle::current();
        let connected = tokio::task::block_in_place(|| runtime.block_on(connect));
        Self(connected.expect("an URL"))
    }

    async fn begin(
        &self,
        store: &PostgresStore,
        lease: &Lease,
    ) -> Result<FencedTransaction<Self::Driver>, TransactionError> {
        tower_idempotency_sea_orm::begin(store, lease, &self.0).await
    }

    async fn run(
        tx: &mut tower_idempotency_sea_orm::sea_orm::DatabaseTransaction,
        sql: &str,
    ) -> bool {
        tx.execute_unprepared(sql).await.is_ok()
    }

    async fn run_alone(&self, sql: &str) -> bool {
        self.0.execute_unprepared(sql).await.is_ok()
    }
}

/// Diesel-async, in a pool of deadpool.
#[derive(Clone)]
pub struct Diesel(pub Pool<AsyncPgConnection>);

impl Handlers for Diesel {
    const NAME: &str = "diesel";
    const BEGIN: &str = "read write\0";
    const COMMIT: &str = "COMMIT\0";
    const REPORTS_CODE: bool = false;
    type Driver = tower_idempotency_diesel_async::OpenTransaction;

    fn pool(url: &str, size: u32) -> Self {
        let pool = Pool::builder(AsyncDieselConnectionManager::new(url))
            .max_size(size as usize)
            .runtime(deadpool::Runtime::Tokio1)
            .wait_timeout(Some(PATIENCE));
        Self(pool.build().expect("a pool"))
    }

    async fn begin(
        &self,
        store: &PostgresStore,
        lease: &Lease,
    ) -> Result<FencedTransaction<Self::Driver>, TransactionError> {
        let connection = self.0.get().await.map_err(SqlError::from_driver)?;
        tower_idempotency_diesel_async::begin(store, lease, connection).await
    }

    async fn run(tx: &mut AsyncPgConnection, sql: &str) -> bool {
        tx.batch_execute(sql).await.is_ok()
    }

    async fn run_alone(&self, sql: &str) -> bool {
        match self.0.get().await {
            Ok(mut connection) => connection.batch_execute(sql).await.is_ok(),
            Err(_) => false,
        }
    }
}
