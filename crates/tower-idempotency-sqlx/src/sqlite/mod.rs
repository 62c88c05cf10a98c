use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use sqlx::{
    Row, SqlStr, Sqlite,
    query::Query,
    sqlite::{
        SqliteArguments, SqliteConnectOptions, SqliteJournalMode, SqliteRow, SqliteSynchronous,
    },
};
use tower_idempotency::store::{
    Acquired, CheckError, Claim, KeyId, LeaseRef, MIN_RECORD_LIMIT, OrphanPolicy, Store,
    StoreError, Token, Ttl,
};
use tower_idempotency_sql::SqliteFence;

use self::{busy::FileConnections, statements::Statements};
use crate::{
    Purger, SqlError, Table, TableNameError,
    backend::millis,
    check::{IN_MEMORY, NAME_A_FILE},
    connection::{
        Connections,
        Priority::{self, Acquire, Maintain},
    },
    entry::{AcquireRow, CompleteOutcome, MAX_ATTEMPTS},
    inspect::InspectStatements,
    row_readers::{define_row_readers, read_complete_row},
};

mod busy;
mod check;
mod fence;
mod inspect;
mod purge;
mod statements;
mod transaction;

define_row_readers!(SqliteRow);

/// A store in a table of a SQLite file. The processes of one machine may share the file. SQLite is compiled in.
///
/// The file is in WAL mode, and a transaction is on the disk before a call returns. So leases and records survive a crash
/// of the process and of the machine. Do not put the file on a network file system: file locks are unreliable there.
///
/// # Connections
///
/// The store has one connection that writes and 4 that only read. Clones share them. Replays and rejected duplicates
/// only read.
///
/// The store waits for a writer in another process, for the busy timeout of its options: 5 seconds by default. SQLite has no
/// queue for writers, so the store polls every 1 to 10 ms. A process that commits without a pause, such as an import with
/// one commit for each row, keeps the store from writing: leases may expire. Let that process pause between commits.
///
/// # Cancellation
///
/// A call that is dropped closes its connection. SQLite executes the call completely or not at all.
#[derive(Clone)]
pub struct SqliteStore {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    statements: Statements,
    inspect_statements: InspectStatements,
    /// Has one connection. Several writers would wait for each other inside SQLite, which polls for its lock.
    writer: FileConnections,
    readers: FileConnections,
}

#[derive(Clone)]
struct Settings {
    options: SqliteConnectOptions,
    /// The file, if the store creates it. SQLite then does not.
    new_file: Option<PathBuf>,
    table: Table,
    record_limit: usize,
}

impl SqliteStore {
    /// Creates a store in the file of `options`, which is opened with these options and in WAL mode. Does not open the file
    /// yet. [`migrate`](Self::migrate) creates its table.
    ///
    /// The connections share no cache, whatever `shared_cache` is in the options. In a shared cache, they would fail beside another
    /// writer instead of waiting, and could read uncommitted rows. A path that is a URI with `cache=shared` still has that effect.
    ///
    /// `migrate` fails if the file is missing, unless the options have `create_if_missing(true)`. SQLite then creates a file that
    /// every user of the machine can read, unless the umask of the process forbids it. [`in_file`](Self::in_file) creates a
    /// private one.
    ///
    /// `synchronous` below `FULL` is faster, but loses the last leases and records if the machine crashes. A database in memory
    /// is refused by [`migrate`](Self::migrate), because each connection would have a database of its own. Use
    /// [`MemoryStore`](tower_idempotency::MemoryStore) instead.
    ///
    /// The store has connections of its own. To use the file of an existing pool:
    ///
    /// ```
    /// # use tower_idempotency_sqlx::{SqliteStore, sqlx::SqlitePool};
    /// # fn same_file(pool: &SqlitePool) -> SqliteStore {
    /// SqliteStore::new((*pool.connect_options()).clone())
    /// # }
    /// ```
    #[must_use]
    pub fn new(options: SqliteConnectOptions) -> Self {
        Self::build(Settings {
            options: options
                .journal_mode(SqliteJournalMode::Wal)
                .shared_cache(false),
            new_file: None,
            table: Table::default(),
            record_limit: MAX_RECORD_BYTES,
        })
    }

    /// Opens the file of a URL such as `sqlite:keys.db`, and creates or migrates the table. Creates a missing file, unless the URL
    /// has `mode=ro` or `mode=rw`.
    ///
    /// The store is then ready. To change settings first, use [`from_url`](Self::from_url), the setters and
    /// [`migrate`](Self::migrate).
    ///
    /// # Errors
    ///
    /// If the URL is invalid, if the database is in memory, or if the file cannot be opened or written.
    ///
    /// # Cancellation
    ///
    /// Like [`migrate`](Self::migrate).
    pub async fn connect(url: &str) -> Result<Self, SqlError> {
        let store = Self::from_url(url)?;
        store.migrate().await?;
        Ok(store)
    }

    /// Creates a store from a URL, like [`in_file`](Self::in_file). Does not open the file yet.
    ///
    /// With `mode=ro` or `mode=rw`, the store does not create a missing file.
    ///
    /// # Errors
    ///
    /// If the URL is invalid.
    pub fn from_url(url: &str) -> Result<Self, SqlError> {
        // The error of the driver quotes parts of the URL.
        let options: SqliteConnectOptions = url
            .parse()
            .map_err(|_| SqlError::refused("expected a URL of the form sqlite:PATH"))?;
        // The options have no method that returns their mode.
        let (_, parameters) = url.split_once('?').unwrap_or_default();
        let mut parameters = parameters.split('&');
        let creates_file =
            !parameters.any(|it| ["mode=ro", "mode=rw", "mode=memory"].contains(&it));
        Ok(Self::with_defaults(options, creates_file))
    }

    /// Creates a store in the file at `path`. Does not open the file yet.
    ///
    /// The first use creates the file if it is missing, and [`migrate`](Self::migrate) creates the table. A commit is on the
    /// disk before a call returns.
    ///
    /// On Unix, only the owner of a new file can read it (mode 600), and its `-wal` and `-shm` files. This does not apply to a
    /// path that begins with `file:`, which is a URI of SQLite.
    #[must_use]
    pub fn in_file(path: impl AsRef<Path>) -> Self {
        Self::with_defaults(SqliteConnectOptions::new().filename(path), true)
    }

    /// Sets the table, without a schema. Default: `tower_idempotency`.
    ///
    /// Call this before the first use of the store. Two services that share a table and a namespace of the layer share
    /// their keys.
    ///
    /// # Errors
    ///
    /// If the name is not 1 to 48 of `a` to `z`, `0` to `9` and `_`, or begins with a digit.
    pub fn with_table(self, name: &str) -> Result<Self, TableNameError> {
        let table = Table::parse_name(name)?;
        Ok(self.set(|settings| settings.table = table))
    }

    /// Sets the size of the largest record in bytes. Default and maximum: 128 MiB. Minimum: [`MIN_RECORD_LIMIT`].
    ///
    /// Call this before the first use of the store. The layer stores a tombstone in place of a larger record: retries get
    /// the error `response-not-retained`.
    #[must_use]
    pub fn with_record_limit(self, bytes: usize) -> Self {
        self.set(|settings| settings.record_limit = bytes.clamp(MIN_RECORD_LIMIT, MAX_RECORD_BYTES))
    }

    /// Creates the table or migrates it to the current version.
    ///
    /// Every process may call this at each start, also at the same time. To run the statements by other means, use the
    /// files in `migrations/sqlite`.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened or written, or if the database is in memory or has no path.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, each migration was applied as a whole or not at all.
    pub async fn migrate(&self) -> Result<(), SqlError> {
        if self.inner.is_in_memory().await? {
            return Err(SqlError::refused(format!("{IN_MEMORY}: {NAME_A_FILE}")));
        }
        for migration in MIGRATIONS {
            let sql = self.inner.settings.table.in_migration(migration, '"');
            // The migration reads before it writes, so it needs the write lock from the beginning.
            let sql = format!("begin immediate;\n{sql}\ncommit;");
            self.inner.writer.fetch_all_raw(sql).await?;
        }
        Ok(())
    }

    /// Deletes at most `batch` expired entries, oldest first, and returns their number.
    ///
    /// Expired entries already count as absent, but their data stays in the file until a purge. This deletes no other entries, and
    /// may run in every process at the same time. The file does not shrink; SQLite reuses its free space.
    ///
    /// One statement deletes at most 1000 entries and 4 MiB, or one larger entry. After each full statement the call pauses four
    /// times as long as the statement took. Other calls, and other processes, write meanwhile.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened or written.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, some of these entries may have been deleted.
    pub async fn purge_expired(&self, batch: u32) -> Result<u64, SqlError> {
        self.inner.purge(batch).await
    }

    /// Starts a task that deletes expired entries in intervals of `period`, in batches of at most 1000 and 4 MiB.
    ///
    /// The task stops when the returned value is dropped, or the store and all its clones. It may run in every process.
    /// A failed batch is logged, and retried with a tenth of its entries. If a single entry fails, the task waits for the next
    /// interval. The file grows by the entries that expire in an interval. Each interval costs one index search.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime.
    pub fn spawn_purger(&self, period: Duration) -> Purger {
        let store = Arc::downgrade(&self.inner);
        Purger::spawn(period, move |batch| {
            let inner = store.upgrade()?;
            Some(async move { Ok(inner.purge_batch(batch).await?.has_more) })
        })
    }

    /// Writes each commit to the disk. If `creates_file` is `true`, the first use creates a missing file.
    fn with_defaults(options: SqliteConnectOptions, creates_file: bool) -> Self {
        let path = options.get_filename().to_owned();
        let name = path.as_os_str().as_encoded_bytes();
        // SQLite itself finds and creates the file of a URI.
        let is_uri = name.starts_with(b"file:");
        let has_file = creates_file && !is_uri && !matches!(name, b"" | b":memory:");
        let options = options.create_if_missing(is_uri && creates_file);
        Self::new(options.synchronous(SqliteSynchronous::Full))
            .set(|settings| settings.new_file = has_file.then_some(path))
    }

    fn build(settings: Settings) -> Self {
        let connections = |max| {
            let connections = Connections::new(settings.options.clone(), max, Duration::ZERO);
            FileConnections::new(connections.with_new_file(settings.new_file.clone()))
        };
        Self {
            inner: Arc::new(Inner {
                statements: Statements::new(&settings.table, settings.record_limit),
                inspect_statements: InspectStatements::new(inspect::dialect(), &settings.table),
                writer: connections(1),
                readers: connections(READERS),
                settings,
            }),
        }
    }

    fn set(self, set: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = self.inner.settings.clone();
        set(&mut settings);
        Self::build(settings)
    }
}

impl Inner {
    /// Reads the entry on a connection for reads.
    async fn read_entry(&self, claim: &Claim) -> Result<Option<AcquireRow>, StoreError> {
        let read = self.bind_entry(
            &self.statements.read_entry,
            &claim.id,
            claim.token.as_bytes(),
        );
        let row = fetch_row(&self.readers, Acquire, read).await?;
        let entry = row.map(|row| read_acquire_row(&row)).transpose();
        entry.map_err(StoreError::unreadable)
    }

    /// Binds the ID and the token to a statement. The caller binds further values.
    fn bind_entry<'q>(
        &self,
        statement: &SqlStr,
        id: &'q KeyId,
        token: &'q [u8; 16],
    ) -> Query<'q, Sqlite, SqliteArguments> {
        sqlx::query(statement.clone())
            .bind(id.as_bytes().as_slice())
            .bind(token.as_slice())
    }

    fn bind_lease<'q>(
        &self,
        statement: &SqlStr,
        lease: &'q LeaseRef,
    ) -> Query<'q, Sqlite, SqliteArguments> {
        self.bind_entry(statement, &lease.id, lease.token.as_bytes())
    }
}

/// Executes one statement that returns at most one row.
async fn fetch_row(
    connections: &FileConnections,
    priority: Priority,
    query: Query<'_, Sqlite, SqliteArguments>,
) -> Result<Option<SqliteRow>, SqlError> {
    Ok(connections.fetch_all(priority, query).await?.pop())
}

impl Store for SqliteStore {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let Inner {
            statements, writer, ..
        } = &*self.inner;
        for _ in 0..MAX_ATTEMPTS {
            // The read decides only that the entry cannot be acquired. Otherwise a conditional write acquires it.
            let entry = self.inner.read_entry(claim).await?;
            let can_extend = |entry: &AcquireRow| entry.has_own_token && !entry.is_completed;
            if let Some(entry) = entry.filter(|entry| !can_extend(entry))
                && let Some(acquired) =
                    entry.into_acquired(claim).map_err(StoreError::unreadable)?
            {
                return Ok(acquired);
            }
            let acquire = self
                .inner
                .bind_entry(&statements.acquire, &claim.id, claim.token.as_bytes())
                .bind(claim.fingerprint.as_bytes().as_slice())
                .bind(millis(claim.lease))
                .bind(millis(claim.orphan_retention))
                .bind(claim.orphans == OrphanPolicy::TakeOver)
                .bind(claim.owner)
                .bind(&*claim.operation)
                .bind(
                    (claim.orphans == OrphanPolicy::Refuse)
                        .then_some(Token::RETRY_ALLOWED.as_slice()),
                );
            if let Some(row) = fetch_row(writer, Acquire, acquire).await? {
                let generation = row.try_get::<i64, _>(0).map_err(SqlError::from)?;
                let generation = generation.unsigned_abs();
                return Ok(Acquired::Granted {
                    generation,
                    takeover: generation > 1,
                });
            }
        }
        Err(SqlError::contended().into())
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        let renew = self.inner.bind_lease(&self.inner.statements.renew, lease);
        let renew = renew.bind(millis(ttl));
        let renewed = fetch_row(&self.inner.writer, Maintain, renew).await?;
        renewed.map(|_| ()).ok_or(StoreError::LeaseLost)
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let Inner {
            settings,
            statements,
            writer,
            ..
        } = &*self.inner;
        let limit = settings.record_limit;
        if record.len() > limit {
            return Err(StoreError::RecordTooLarge { limit });
        }
        let generation = i64::try_from(lease.generation).unwrap_or(i64::MAX).max(1);
        for _ in 0..MAX_ATTEMPTS {
            let complete = self
                .inner
                .bind_lease(&statements.complete, lease)
                .bind(lease.fingerprint.as_bytes().as_slice())
                .bind(generation)
                .bind(millis(retention))
                .bind(&*record);
            if fetch_row(writer, Maintain, complete).await?.is_some() {
                return Ok(());
            }
            let read = self.inner.bind_lease(&statements.read_completion, lease);
            let Some(row) = fetch_row(writer, Maintain, read).await? else {
                continue;
            };
            match read_complete_row(&row)?.outcome() {
                CompleteOutcome::Stored => return Ok(()),
                CompleteOutcome::LeaseLost => return Err(StoreError::LeaseLost),
                CompleteOutcome::Retry => {}
            }
        }
        Err(SqlError::contended().into())
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let Inner {
            statements, writer, ..
        } = &*self.inner;
        // The generation of a token never changes, so at most one of the two statements matches.
        let delete = self.inner.bind_lease(&statements.delete_released, lease);
        let deleted = fetch_row(writer, Acquire, delete).await?;
        if deleted.is_none() {
            let release = self.inner.bind_lease(&statements.release_as_orphan, lease);
            fetch_row(writer, Acquire, release).await?;
        }
        Ok(())
    }

    async fn check(&self) -> Result<(), CheckError> {
        self.check_file().await
    }

    /// Waits for the whole `timeout`: SQLite does not notify other processes, so waiters poll.
    async fn wait_for_change(&self, _id: &KeyId, timeout: Duration) {
        tokio::time::sleep(timeout).await;
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("table", &self.inner.settings.table)
            .finish_non_exhaustive()
    }
}

const MIGRATIONS: [&str; 4] = [
    include_str!("../../migrations/sqlite/0001_entries.sql"),
    include_str!("../../migrations/sqlite/0002_orphans.sql"),
    include_str!("../../migrations/sqlite/0003_listings.sql"),
    include_str!("../../migrations/sqlite/0004_completed.sql"),
];
const READERS: usize = 4;
const MAX_RECORD_BYTES: usize = SqliteFence::MAX_RECORD_BYTES;
