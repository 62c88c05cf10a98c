use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use sqlx::{
    AssertSqlSafe, Postgres, Row,
    postgres::{PgConnectOptions, PgRow},
};
use tower_idempotency::store::{
    Acquired, CheckError, Claim, KeyId, LeaseRef, MIN_RECORD_LIMIT, Store, StoreError, Ttl,
};
use tower_idempotency_sql::PostgresFence;

use self::{notifications::Listener, statements::Statements, url::has_only_known_parameters};
use crate::{
    Purger, SqlError, Table, TableNameError,
    connection::{
        Connections,
        Priority::{self, Acquire, Maintain},
        STALLED_TURN_HOLD,
    },
    entry::{AcquireRow, CompleteOutcome, MAX_ATTEMPTS},
    hex,
    inspect::InspectStatements,
    row_readers::read_complete_row,
    timeout::with_timeout,
    url::without_brackets,
};

mod check;
mod fence;
mod inspect;
mod notifications;
mod statements;
mod transaction;
mod unescape;
mod url;

/// A store in a table of PostgreSQL, 14 or later.
///
/// Each call is one round trip. The store is as durable as the server. A crash loses the commits that
/// `synchronous_commit` allows it to lose, and a failover loses those that the replica lacks, leases included.
///
/// # Connections
///
/// The store has connections of its own and opens them on demand. So handlers that hold all connections of a pool do
/// not block renewals, and a statement takes one round trip instead of a pool's three. Clones share the connections.
/// The connections belong to the tokio runtime that opened them. Their parameters are those of the
/// [`PgConnectOptions`], except that statements are not logged, because their text contains records.
///
/// Each statement sets its isolation level, regardless of the connection's default. The store prepares no statements
/// and leaves no state in the session, so it works through pgbouncer in transaction mode. Waiters then need
/// [`with_listener`](Self::with_listener) or [`without_listener`](Self::without_listener).
///
/// A server that logs statements, as with `log_statement` or `log_min_duration_statement`, logs IDs, tokens and records
/// with them.
///
/// # Cancellation
///
/// A call that is dropped closes its connection. The server executes the call completely or not at all.
#[derive(Clone)]
pub struct PostgresStore {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    statements: Statements,
    inspect_statements: InspectStatements,
    connections: Connections<Postgres>,
    listener: Option<Listener>,
}

#[derive(Clone)]
struct Settings {
    options: PgConnectOptions,
    table: Table,
    connections: usize,
    record_limit: usize,
    listen: ListenMode,
}

/// Connection on which the store listens for notifications.
#[derive(Clone)]
enum ListenMode {
    SameOptions,
    OtherOptions(Box<PgConnectOptions>),
    Disabled,
}

impl PostgresStore {
    /// Creates a store at the server in `options`. Does not connect yet. [`migrate`](Self::migrate) creates its table.
    ///
    /// The store has connections of its own. To use the database of an existing pool:
    ///
    /// ```
    /// # use tower_idempotency_sqlx::{PostgresStore, sqlx::PgPool};
    /// # fn same_database(pool: &PgPool) -> PostgresStore {
    /// PostgresStore::new((*pool.connect_options()).clone())
    /// # }
    /// ```
    #[must_use]
    pub fn new(options: PgConnectOptions) -> Self {
        Self::build(Settings {
            // Some poolers reject this parameter, and the store reads no fractions.
            options: options.extra_float_digits(None),
            table: Table::default(),
            connections: 10,
            record_limit: MAX_RECORD_BYTES,
            listen: ListenMode::SameOptions,
        })
    }

    /// Connects to the server of a URL such as `postgres://user:password@host/database`, and creates or migrates the table.
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
    /// If the URL is invalid, or has a parameter that the driver does not know. The driver would ignore that parameter, and log
    /// its value.
    pub fn from_url(url: &str) -> Result<Self, SqlError> {
        if !has_only_known_parameters(url) {
            return Err(SqlError::refused(
                "expected only parameters of the driver after the ? of the URL: sslmode, sslrootcert, sslcert, sslkey, host, \
                 hostaddr, port, dbname, user, password, application_name, options or statement-cache-capacity",
            ));
        }
        // The error of the driver quotes parts of the URL.
        let options: PgConnectOptions = url.parse().map_err(|_| {
            SqlError::refused("expected a URL of the form postgres://USER:PASSWORD@HOST/DATABASE")
        })?;
        let host = without_brackets(options.get_host()).to_owned();
        Ok(Self::new(options.host(&host)))
    }

    /// Sets the table, such as `payments.idempotency`. Default: `tower_idempotency`, without a schema.
    ///
    /// PostgreSQL searches a name without a schema in the `search_path` of each connection. If any schema of the path has the
    /// table, [`migrate`](Self::migrate) creates none. So name the schema if several services share a database, or if handlers
    /// change the path or the role in their transactions. Each role of a handler needs the rights `select` and `update`.
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

    /// Sets the maximum number of connections, besides the one that listens for notifications. Default: 10; at least 1.
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
    /// Call this before the first use of the store. The layer stores a tombstone in place of a larger record: retries get
    /// the error `response-not-retained`.
    #[must_use]
    pub fn with_record_limit(self, bytes: usize) -> Self {
        self.set(|settings| settings.record_limit = bytes.clamp(MIN_RECORD_LIMIT, MAX_RECORD_BYTES))
    }

    /// Sets a separate connection for notifications that a lease has ended, to bypass a pooler.
    ///
    /// Call this before the first use of the store. The options must lead to the same database. Otherwise no
    /// notifications arrive, and waiters poll as they do [without a listener](Self::without_listener).
    #[must_use]
    pub fn with_listener(self, options: PgConnectOptions) -> Self {
        self.set(|settings| settings.listen = ListenMode::OtherOptions(Box::new(options)))
    }

    /// Disables notifications. Waiters poll at most a second apart.
    ///
    /// Call this before the first use of the store. By default the first waiter opens one more connection, which
    /// listens until the store is dropped. Through pgbouncer in transaction mode no notification would arrive, and the
    /// `LISTEN` would remain on a server connection that other clients use.
    #[must_use]
    pub fn without_listener(self) -> Self {
        self.set(|settings| settings.listen = ListenMode::Disabled)
    }

    /// Creates the table or migrates it to the current version.
    ///
    /// Every replica may call this at each start, also at the same time. To run the statements by other means, use the
    /// files in `migrations/postgres`. If the table is up to date, the statements only read. Otherwise the user needs the
    /// right to create tables, and an existing table must belong to the user.
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
    /// If the future is dropped, each migration was applied as a whole or not at all.
    pub async fn migrate(&self) -> Result<(), SqlError> {
        for migration in MIGRATIONS {
            let table = &self.inner.settings.table;
            let migration = table.in_migration(migration, '"');
            // Statements in one message run in one transaction.
            let sql = format!("set transaction isolation level read committed; {migration}");
            self.inner.query(Maintain, sql).await?;
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
        let statements = Statements::new(&settings.table, settings.record_limit);
        let channel = statements.channel().to_owned();
        let listener = match settings.listen.clone() {
            ListenMode::SameOptions => Some(Listener::new(settings.options.clone(), channel)),
            ListenMode::OtherOptions(options) => Some(Listener::new(*options, channel)),
            ListenMode::Disabled => None,
        };
        Self {
            inner: Arc::new(Inner {
                connections: Connections::new(
                    settings.options.clone(),
                    settings.connections,
                    STALLED_TURN_HOLD,
                ),
                inspect_statements: InspectStatements::new(inspect::dialect(), &settings.table),
                statements,
                listener,
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
    /// Sends the statements in one round trip. Repeats them after a conflict or a lock timeout.
    async fn query(&self, priority: Priority, sql: String) -> Result<Vec<PgRow>, SqlError> {
        self.query_shared(priority, &Arc::new(sql)).await
    }

    /// Sends the statements like [`query`](Self::query), without a copy of their text.
    async fn query_shared(
        &self,
        priority: Priority,
        sql: &Arc<String>,
    ) -> Result<Vec<PgRow>, SqlError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let (mut pooled, _) = self.connections.checkout(priority).await?;
            // Safe: values are in the text as digits only.
            let statement = sqlx::raw_sql(AssertSqlSafe(Arc::clone(sql)));
            let error = match statement.fetch_all(&mut pooled.connection).await {
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
            if is_failover_error(&code) {
                self.connections.close_idle();
                pooled.close();
            } else {
                // The transaction consisted of these statements and ended with them, so the connection is clean.
                pooled.return_to_pool();
            }
            // Serialization failure, deadlock, and lock timeout, which may be a deadlock that the server has not
            // detected yet. The statements have changed nothing.
            if attempts == MAX_ATTEMPTS || !["40001", "40P01", "55P03"].contains(&code.as_str()) {
                return Err(sqlx::Error::Database(error).into());
            }
        }
    }

    async fn purge(&self, batch: u32) -> Result<u64, SqlError> {
        let rows = self.query(Maintain, self.statements.purge(batch)).await?;
        let row = rows.first().ok_or(SqlError::unreadable("no count"))?;
        let deleted: i64 = row.try_get(0)?;
        Ok(deleted.unsigned_abs())
    }
}

impl Store for PostgresStore {
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
        let limit = self.inner.settings.record_limit;
        if record.len() > limit {
            return Err(StoreError::RecordTooLarge { limit });
        }
        let sql = Arc::new(self.inner.statements.complete(lease, &record, retention));
        for _ in 0..MAX_ATTEMPTS {
            let rows = self.inner.query_shared(Maintain, &sql).await?;
            // The first row may belong to the notification.
            let Some(row) = rows.last().filter(|row| row.len() > 1) else {
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

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        let listener = self.inner.listener.as_ref();
        // A waiter that polls this soon needs no notification. A statement that times out would also close its connection.
        let Some(listener) = listener.filter(|_| timeout >= MIN_NOTIFIED_WAIT) else {
            tokio::time::sleep(timeout).await;
            return;
        };
        let changed = async {
            let mut subscription = listener.subscribe(*id);
            subscription.wait_until_listening().await;
            let sql = self.inner.statements.watch(id);
            // After an error the entry counts as in progress. The waiter always polls after the timeout.
            let is_in_progress = match self.inner.query(Acquire, sql).await {
                Ok(rows) => rows
                    .last()
                    .is_some_and(|row| row.try_get(0).unwrap_or(true)),
                Err(_) => true,
            };
            if is_in_progress {
                subscription.notified().await;
            }
        };
        tokio::time::timeout(timeout, changed).await.ok();
    }

    fn compress_above(&self) -> usize {
        1024
    }
}

/// Returns `true` if the connection is lost, the server shuts down, or the server has become a replica. A new
/// connection may then reach another server.
fn is_failover_error(code: &str) -> bool {
    code.starts_with("08") || code.starts_with("57P") || code == "25006"
}

fn read_acquire_row(row: &PgRow) -> Result<AcquireRow, SqlError> {
    let bytes = |text| hex::decode(text).ok_or(SqlError::unreadable("no bytes"));
    let record: Option<&str> = row.try_get(6)?;
    let token: Option<&str> = row.try_get(8)?;
    Ok(AcquireRow {
        is_completed: row.try_get(0)?,
        has_own_token: row.try_get(1)?,
        is_expired: row.try_get(2)?,
        fingerprint: bytes(row.try_get(3)?)?,
        generation: row.try_get(4)?,
        lease_left: row.try_get(5)?,
        record: record.map(bytes).transpose()?,
        left: row.try_get(7)?,
        token: token.map(bytes).transpose()?,
    })
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("table", &self.inner.settings.table)
            .finish_non_exhaustive()
    }
}

const MIGRATIONS: [&str; 4] = [
    include_str!("../../migrations/postgres/0001_entries.sql"),
    include_str!("../../migrations/postgres/0002_orphans.sql"),
    include_str!("../../migrations/postgres/0003_listings.sql"),
    include_str!("../../migrations/postgres/0004_completed.sql"),
];
/// Shortest wait that uses notifications. A statement takes less, unless the database is overloaded.
const MIN_NOTIFIED_WAIT: Duration = Duration::from_millis(250);
/// The hexadecimal text of a record is twice as long, and still well below the server's limits for a message and a value.
const MAX_RECORD_BYTES: usize = PostgresFence::MAX_RECORD_BYTES;
