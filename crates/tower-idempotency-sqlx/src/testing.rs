//! Tools for the tests of a service: a database in a temporary file, without a server.
//!
//! Feature `testing`. Enable it only in `[dev-dependencies]`. See [`tower_idempotency::testing`] for faults, entries and
//! effects, and `docs/guide/testing.md` for tests of exactly-once.

use std::{fmt, io, path::PathBuf, sync::Arc};

use sqlx::{
    SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions},
};
use tempfile::TempDir;

use crate::{SqlError, SqliteStore};

/// A SQLite database in a temporary directory, with a migrated store and a pool for handlers. Clones share it.
///
/// The drop of the last clone deletes the files. Keep one until the end of the test.
///
/// ```
/// use tower_idempotency::{IdempotencyLayer, Lease, run_once::WorkError};
/// use tower_idempotency_sqlx::{CommitError, sqlx, testing::TemporarySqlite};
///
/// type Failure = Box<dyn std::error::Error + Send + Sync>;
///
/// async fn pay(database: TemporarySqlite, lease: Lease) -> Result<String, WorkError<Failure>> {
///     // Nothing is committed yet: `?` releases the key.
///     let mut tx = database.store().begin(&lease, &database.pool()).await.map_err(Failure::from)?;
///     sqlx::query("insert into payments values (700)").execute(&mut *tx).await.map_err(Failure::from)?;
///     tx.commit_value("paid".to_owned()).await.map_err(CommitError::into_work_error)
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Failure> {
/// let database = TemporarySqlite::create().await?;
/// let (layer, pool) = (IdempotencyLayer::new(database.store()), database.pool());
/// sqlx::raw_sql("create table payments (cents integer)").execute(&pool).await?;
/// for _ in 0..2 {
///     let database = database.clone();
///     let work = async move |lease| pay(database, lease).await;
///     layer.run_once("message-42", "invoice 7", work).await?;
/// }
/// let payments: i64 = sqlx::query_scalar("select count(*) from payments").fetch_one(&pool).await?;
/// assert_eq!(payments, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct TemporarySqlite {
    store: SqliteStore,
    pool: SqlitePool,
    directory: Arc<TempDir>,
}

impl TemporarySqlite {
    /// Creates an empty database, and the table of the store.
    ///
    /// The files are in a new directory below `TMPDIR`, or below `/tmp` on Unix. Commits are not flushed to the disk,
    /// because no test needs the files after a crash of the machine.
    ///
    /// # Errors
    ///
    /// If the directory or the file cannot be created.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the files are deleted.
    pub async fn create() -> Result<Self, SqlError> {
        let directory = TempDir::with_prefix("tower-idempotency-").map_err(io_error)?;
        let options = SqliteConnectOptions::new()
            .filename(directory.path().join("test.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .pragma("synchronous", "off");
        let store = SqliteStore::new(options.clone());
        store.migrate().await?;
        let pool = SqlitePoolOptions::new().max_connections(4);
        Ok(Self {
            store,
            pool: pool.connect_lazy_with(options),
            directory: Arc::new(directory),
        })
    }

    /// Returns the store, for the layer and for [`SqliteStore::begin`].
    #[must_use]
    pub fn store(&self) -> SqliteStore {
        self.store.clone()
    }

    /// Returns the pool of the handlers: at most 4 connections to the file of the store.
    #[must_use]
    pub fn pool(&self) -> SqlitePool {
        self.pool.clone()
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("test.db")
    }
}

impl fmt::Debug for TemporarySqlite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TemporarySqlite")
            .field("path", &self.path())
            .finish_non_exhaustive()
    }
}

fn io_error(error: io::Error) -> SqlError {
    SqlError::from_driver(error)
}
