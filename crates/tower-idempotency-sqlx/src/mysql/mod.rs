use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use sqlx::{
    AssertSqlSafe, MySql, Row,
    mysql::{MySqlConnectOptions, MySqlConnection, MySqlRow},
};
use tower_idempotency::store::{
    Acquired, CheckError, Claim, KeyId, LeaseRef, MIN_RECORD_LIMIT, Store, StoreError, Ttl,
};
use tower_idempotency_sql::MySqlFence;

use self::{
    statements::{OVERHEAD, Statements},
    url::has_only_known_parameters,
};
use crate::{
    Purger, SqlError, Table, TableNameError,
    connection::{
        Connections, PooledConnection,
        Priority::{self, Acquire, Maintain},
        STALLED_TURN_HOLD,
    },
    entry::{CompleteOutcome, MAX_ATTEMPTS},
    inspect::InspectStatements,
    row_readers::{define_row_readers, read_complete_row},
    timeout::with_timeout,
    url::without_brackets,
};

mod check;
mod fence;
mod inspect;
mod statements;
mod transaction;
mod url;

define_row_readers!(MySqlRow);

/// A store in a table of MySQL, 8.0 or later, or of MariaDB, 10.6 or later.
///
/// Each call is one round trip: a transaction at READ COMMITTED, regardless of the session's default. The server's
/// `binlog_format` must not be `STATEMENT`, which does not support writes at that level. [`check`](Store::check) reports it.
///
/// The store is as durable as the server. A crash loses the commits that `innodb_flush_log_at_trx_commit` allows it to
/// lose, and a failover loses those that the replica lacks, leases included.
///
/// # Connections
///
/// The store has connections of its own and opens them on demand. So handlers that hold all connections of a pool do
/// not block renewals, and a call takes one round trip instead of a pool's three. Clones share the connections. The
/// connections belong to the tokio runtime that opened them.
///
/// Their parameters are those of the [`MySqlConnectOptions`], with three exceptions. Statements are not logged, because
/// their text contains records. The lock wait timeout is one second, and autocommit is on. The connections set the user
/// variables `@free` and `@record`.
///
/// A server that logs statements, in its general or slow query log, logs IDs, tokens and records with them. So does the error
/// log with `innodb_print_all_deadlocks`, for tokens.
///
/// # Size of records
///
/// A record must fit into the server's `max_allowed_packet`, where three bytes of a record take four.
///
/// # Cancellation
/// A call that is dropped closes its connection. The server executes the call completely or not at all.
#[derive(Clone)]
pub struct MySqlStore {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    statements: Statements,
    inspect_statements: InspectStatements,
    connections: Connections<MySql>,
    /// The server's limit for records; [`UNKNOWN`] before the first connection.
    server_limit: AtomicUsize,
}

#[derive(Clone)]
struct Settings {
    options: MySqlConnectOptions,
    table: Table,
    connections: usize,
    record_limit: usize,
}

impl MySqlStore {
    /// Creates a store at the server in `options`. Does not connect yet. [`migrate`](Self::migrate) creates its table.
    ///
    /// The store has connections of its own. To use the database of an existing pool:
    ///
    /// ```
    /// # use tower_idempotency_sqlx::{MySqlStore, sqlx::MySqlPool};
    /// # fn same_database(pool: &MySqlPool) -> MySqlStore {
    /// MySqlStore::new((*pool.connect_options()).clone())
    /// # }
    /// ```
    #[must_use]
    pub fn new(options: MySqlConnectOptions) -> Self {
        Self::build(Settings {
            options,
            table: Table::default(),
            connections: 10,
            record_limit: MAX_RECORD_BYTES,
        })
    }

    /// Connects to the server of a URL such as `mysql://user:password@host/database`, and creates or migrates the table.
    ///
    /// The store is then ready. To change settings first, use [`from_url`](Self::from_url), the setters, and
    /// [`migrate`](Self::migrate). There is no timeout: like `migrate`, this waits for a server that does not reply.
    ///
    /// # Errors
    ///
    /// If the URL is invalid, or if the server cannot be reached or reports an error.
    ///
    /// # Cancellation
    ///
    /// Like [`migrate`](Self::migrate).
    pub async fn connect(url: &str) -> Result<Self, SqlError> {
        let store = Self::from_url(url)?;
        store.migrate().await?;
        Ok(store)
    }

    /// Creates a store from a URL, like [`new`](Self::new). Does not connect yet.
    ///
    /// # Errors
    ///
    /// If the URL is invalid, or has a parameter that the driver does not know. The driver would ignore that parameter.
    pub fn from_url(url: &str) -> Result<Self, SqlError> {
        if !has_only_known_parameters(url) {
            return Err(SqlError::refused(
                "expected only parameters of the driver after the ? of the URL: ssl-mode, ssl-ca, ssl-cert, ssl-key, charset, \
                 collation, statement-cache-capacity, socket or timezone",
            ));
        }
        // The error of the driver quotes parts of the URL.
        let options: MySqlConnectOptions = url.parse().map_err(|_| {
            SqlError::refused("expected a URL of the form mysql://USER:PASSWORD@HOST/DATABASE")
        })?;
        let host = without_brackets(options.get_host()).to_owned();
        Ok(Self::new(options.host(&host)))
    }

    /// Sets the table, such as `payments.idempotency`. Default: `tower_idempotency` in the current database of each connection.
    ///
    /// Name the database if handlers change it by `use` in their transactions.
    ///
    /// Call this before the first use of the store. Two services that share a table and a namespace of the layer share
    /// their keys.
    ///
    /// # Errors
    ///
    /// If a part of the name is not 1 to 48 of `a` to `z`, `0` to `9` and `_`, or begins with a digit.
    pub fn with_table(self, name: &str) -> Result<Self, TableNameError> {
        let table = Table::parse(name)?;
        Ok(self.set(|settings| settings.table = table))
    }

    /// Sets the maximum number of connections. Default: 10; at least 1.
    ///
    /// Call this before the first use of the store. With too few connections, calls wait for each other until the
    /// layer's timeout. With too many, the server rejects connections of this store or of other clients.
    ///
    /// If there are at least two, one is reserved for renewals and completions, so that these never wait behind
    /// acquires. A single connection serves them before waiting acquires.
    ///
    /// A statement that is dropped, for example by the layer's timeout, closes its connection. The server may still execute
    /// it. If an acquire had no reply for a second, the store waits 1.5 seconds before it starts another one in its place.
    #[must_use]
    pub fn with_connections(self, max: usize) -> Self {
        self.set(|settings| settings.connections = max)
    }

    /// Sets the size of the largest record in bytes. Default and maximum: 128 MiB. Minimum: [`MIN_RECORD_LIMIT`].
    ///
    /// The server's `max_allowed_packet` may lower it.
    ///
    /// Call this before the first use of the store. The layer stores a tombstone in place of a larger record: retries get
    /// the error `response-not-retained`.
    #[must_use]
    pub fn with_record_limit(self, bytes: usize) -> Self {
        self.set(|settings| settings.record_limit = bytes.clamp(MIN_RECORD_LIMIT, MAX_RECORD_BYTES))
    }

    /// Creates the table or migrates it to the current version.
    ///
    /// Every replica may call this at each start, also at the same time. To run the statements by other means, use the
    /// files in `migrations/mysql`. If the table is up to date, the statements only read. Otherwise the user needs the rights
    /// to create tables and indexes and to alter the table.
    ///
    /// There is no timeout. An index on a large table can take minutes, and the call waits forever for a server that
    /// does not reply. Set a timeout that allows for the size of the table.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or reports an error.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, some of the statements were executed. Call it again.
    pub async fn migrate(&self) -> Result<(), SqlError> {
        for migration in MIGRATIONS {
            let table = &self.inner.settings.table;
            let sql = table.in_migration(migration, '`');
            match self.inner.query(Maintain, sql).await {
                // Another process has created the index or the column meanwhile.
                Err(error) if matches!(error.code(), Some("1060" | "1061")) => {}
                result => drop(result?),
            }
        }
        Ok(())
    }

    /// Deletes at most `batch` expired entries, oldest first, and returns their number.
    ///
    /// Expired entries already count as absent, but their data stays in the table until a purge. This deletes no other entries, and
    /// may run on every replica at the same time.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or reports an error, or if the batch takes longer than 30 seconds.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the batch was deleted as a whole or not at all.
    pub async fn purge_expired(&self, batch: u32) -> Result<u64, SqlError> {
        with_timeout(self.inner.purge(batch)).await
    }

    /// Starts a task that deletes expired entries in intervals of `period`, in batches of at most 1000.
    ///
    /// The task stops when the returned value is dropped, or the store and all its clones. It may run on every replica.
    /// A failed batch is logged, and retried with a tenth of its entries. If a single entry fails, the task waits for the next
    /// interval. The table grows by the entries that expire in an interval. Each interval costs one index search.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime.
    pub fn spawn_purger(&self, period: Duration) -> Purger {
        let store = Arc::downgrade(&self.inner);
        Purger::spawn(period, move |batch| {
            let inner = store.upgrade()?;
            Some(async move {
                let deleted = inner.purge(batch).await?;
                Ok(deleted >= u64::from(batch))
            })
        })
    }

    fn build(settings: Settings) -> Self {
        Self {
            inner: Arc::new(Inner {
                statements: Statements::new(&settings.table),
                inspect_statements: InspectStatements::new(inspect::dialect(), &settings.table),
                connections: Connections::new(
                    settings.options.clone(),
                    settings.connections,
                    STALLED_TURN_HOLD,
                ),
                server_limit: AtomicUsize::new(UNKNOWN),
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
    /// Sends the statements in one round trip. Repeats them after a deadlock.
    async fn query(&self, priority: Priority, sql: String) -> Result<Vec<MySqlRow>, SqlError> {
        self.query_shared(priority, &Arc::new(sql)).await
    }

    /// Sends the statements like [`query`](Self::query), without a copy of their text.
    async fn query_shared(
        &self,
        priority: Priority,
        sql: &Arc<String>,
    ) -> Result<Vec<MySqlRow>, SqlError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let mut pooled = self.checkout(priority).await?;
            let error = match execute(&mut pooled.connection, sql).await {
                Ok(rows) => {
                    pooled.return_to_pool();
                    return Ok(rows);
                }
                Err(sqlx::Error::Database(error)) => error,
                Err(error) => {
                    self.connections.close_idle();
                    // The connection is known to be dead, so this was no stall.
                    pooled.close();
                    return Err(error.into());
                }
            };
            let code = SqlError::code_of_sqlx(&*error);
            let is_deadlock = is_deadlock(&code);
            // After any error but a deadlock or a lock timeout, the connection may be unusable. Its close ends the transaction.
            if !is_deadlock && code != "1205" {
                if is_failover_error(&code) {
                    self.connections.close_idle();
                }
                pooled.close();
                return Err(sqlx::Error::Database(error).into());
            }
            execute(&mut pooled.connection, &Arc::new(ROLLBACK.to_owned())).await?;
            pooled.return_to_pool();
            // A second wait for a lock would take longer than the layer's timeout, so only deadlocks are retried.
            if attempts == MAX_ATTEMPTS || !is_deadlock {
                return Err(sqlx::Error::Database(error).into());
            }
        }
    }

    /// Returns a connection. Configures it if it is new.
    async fn checkout(&self, priority: Priority) -> Result<PooledConnection<'_, MySql>, SqlError> {
        let (mut pooled, is_new) = self.connections.checkout(priority).await?;
        if is_new {
            let rows = execute(&mut pooled.connection, &Arc::new(SETUP.to_owned())).await?;
            let row = rows.first().ok_or(SqlError::unreadable("no setting"))?;
            let packet = usize::try_from(row.try_get::<u64, _>(0)?).unwrap_or(usize::MAX);
            let limit = packet.saturating_sub(OVERHEAD) / 4 * 3;
            self.server_limit.store(limit, Relaxed);
        }
        Ok(pooled)
    }

    async fn record_limit(&self) -> Result<usize, SqlError> {
        if self.server_limit.load(Relaxed) == UNKNOWN {
            self.checkout(Maintain).await?.return_to_pool();
        }
        Ok(self
            .settings
            .record_limit
            .min(self.server_limit.load(Relaxed)))
    }

    async fn purge(&self, batch: u32) -> Result<u64, SqlError> {
        let rows = self.query(Maintain, self.statements.purge(batch)).await?;
        let row = rows.first().ok_or(SqlError::unreadable("no count"))?;
        let deleted: i64 = row.try_get(0)?;
        Ok(deleted.unsigned_abs())
    }
}

/// Executes the statements. They contain values as digits and letters only, so their text is safe.
async fn execute(
    connection: &mut MySqlConnection,
    sql: &Arc<String>,
) -> sqlx::Result<Vec<MySqlRow>> {
    sqlx::raw_sql(AssertSqlSafe(Arc::clone(sql)))
        .fetch_all(connection)
        .await
}

impl Store for MySqlStore {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let sql = Arc::new(self.inner.statements.acquire(claim));
        for _ in 0..MAX_ATTEMPTS {
            let rows = self.inner.query_shared(Acquire, &sql).await?;
            // No row, or an entry that can be acquired: it was released, expired or deleted between the two statements.
            if let Some(row) = rows.first()
                && let Some(acquired) = read_acquire_row(row)
                    .and_then(|row| row.into_acquired(claim))
                    .map_err(StoreError::unreadable)?
            {
                return Ok(acquired);
            }
        }
        Err(SqlError::contended().into())
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        let rows = self
            .inner
            .query(Maintain, self.inner.statements.renew(lease, ttl))
            .await?;
        if rows.is_empty() {
            return Err(StoreError::LeaseLost);
        }
        Ok(())
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let limit = self.inner.record_limit().await?;
        if record.len() > limit {
            return Err(StoreError::RecordTooLarge { limit });
        }
        let sql = Arc::new(self.inner.statements.complete(lease, &record, retention));
        for _ in 0..MAX_ATTEMPTS {
            let rows = self.inner.query_shared(Maintain, &sql).await?;
            let Some(row) = rows.first() else {
                continue;
            };
            match read_complete_row(row)?.outcome() {
                CompleteOutcome::Stored => return Ok(()),
                CompleteOutcome::LeaseLost => return Err(StoreError::LeaseLost),
                CompleteOutcome::Retry => {}
            }
        }
        Err(SqlError::contended().into())
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let sql = self.inner.statements.release(lease);
        self.inner.query(Acquire, sql).await?;
        Ok(())
    }

    async fn check(&self) -> Result<(), CheckError> {
        self.check_server().await
    }

    /// Waits for the whole `timeout`: MySQL has no notifications, so waiters poll.
    async fn wait_for_change(&self, _id: &KeyId, timeout: Duration) {
        tokio::time::sleep(timeout).await;
    }

    fn compress_above(&self) -> usize {
        1024
    }
}

/// Returns `true` if the server rolled the transaction back in favour of another one, at a statement or at the commit.
fn is_deadlock(code: &str) -> bool {
    // A deadlock, or a failed certification: 1213 in a Galera cluster, 3101 in group replication. The store repeats its
    // own statements after these errors.
    ["1213", "3101"].contains(&code)
}

/// Returns `true` if all idle connections should be closed.
///
/// The server shuts down, has become a replica, or has left its cluster. A new connection may then reach another server. Or
/// the server has closed this connection, for example after a long idle time, and probably the others too.
fn is_failover_error(code: &str) -> bool {
    let not_writable = ["1047", "1053", "1290", "1792", "1836"];
    let closed = ["1159", "1160", "1927", "3032", "3169", "4031"];
    not_writable.contains(&code) || closed.contains(&code)
}

impl fmt::Debug for MySqlStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlStore")
            .field("table", &self.inner.settings.table)
            .finish_non_exhaustive()
    }
}

const MIGRATIONS: [&str; 4] = [
    include_str!("../../migrations/mysql/0001_entries.sql"),
    include_str!("../../migrations/mysql/0002_orphans.sql"),
    include_str!("../../migrations/mysql/0003_listings.sql"),
    include_str!("../../migrations/mysql/0004_completed.sql"),
];
/// Without autocommit, a statement outside a transaction would begin one that nothing commits.
const SETUP: &str =
    "set session autocommit = 1, innodb_lock_wait_timeout = 1; select @@max_allowed_packet;";
/// Rolls back, and frees the record that a failed completion left in the session.
const ROLLBACK: &str = "rollback and no chain no release; set @record = null;";
const MAX_RECORD_BYTES: usize = MySqlFence::MAX_RECORD_BYTES;
const UNKNOWN: usize = usize::MAX;
