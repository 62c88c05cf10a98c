//! The store behind a URL.

use std::{fmt, time::Duration};

use bytes::Bytes;
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, Preset,
    inspect::{
        Abilities, EntryDetails, Inspect, InspectError, InspectErrorKind, Page, Query, Resolution,
        ResolveOutcome, Seen, Summary,
    },
    store::{Acquired, CheckError, Claim, KeyId, LeaseRef, Store, StoreError, Ttl},
};
#[cfg(feature = "dynamodb")]
use tower_idempotency_dynamodb::DynamoDbStore;
#[cfg(feature = "redis")]
use tower_idempotency_redis::RedisStore;
#[cfg(feature = "mysql")]
use tower_idempotency_sqlx::MySqlStore;
#[cfg(feature = "postgres")]
use tower_idempotency_sqlx::PostgresStore;
#[cfg(feature = "sqlite")]
use tower_idempotency_sqlx::SqliteStore;

/// A store of any type. Clones share it.
///
/// [`AnyStore::open`] opens the store of a URL. `From` converts a store that the program has opened itself.
#[derive(Clone)]
pub struct AnyStore(Backend);

#[derive(Clone)]
enum Backend {
    Memory(MemoryStore),
    #[cfg(feature = "redis")]
    Redis(RedisStore),
    #[cfg(feature = "postgres")]
    Postgres(PostgresStore),
    #[cfg(feature = "mysql")]
    MySql(MySqlStore),
    #[cfg(feature = "sqlite")]
    Sqlite(SqliteStore),
    #[cfg(feature = "dynamodb")]
    DynamoDb(DynamoDbStore),
}

/// Evaluates an expression with the store of any type.
macro_rules! with_store {
    ($any:expr, $store:ident => $result:expr) => {
        match &$any.0 {
            Backend::Memory($store) => $result,
            #[cfg(feature = "redis")]
            Backend::Redis($store) => $result,
            #[cfg(feature = "postgres")]
            Backend::Postgres($store) => $result,
            #[cfg(feature = "mysql")]
            Backend::MySql($store) => $result,
            #[cfg(feature = "sqlite")]
            Backend::Sqlite($store) => $result,
            #[cfg(feature = "dynamodb")]
            Backend::DynamoDb($store) => $result,
        }
    };
}

impl AnyStore {
    /// Returns the name of the store: `memory`, `redis`, `postgres`, `mysql`, `sqlite` or `dynamodb`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match &self.0 {
            Backend::Memory(_) => "memory",
            #[cfg(feature = "redis")]
            Backend::Redis(_) => "redis",
            #[cfg(feature = "postgres")]
            Backend::Postgres(_) => "postgres",
            #[cfg(feature = "mysql")]
            Backend::MySql(_) => "mysql",
            #[cfg(feature = "sqlite")]
            Backend::Sqlite(_) => "sqlite",
            #[cfg(feature = "dynamodb")]
            Backend::DynamoDb(_) => "dynamodb",
        }
    }

    /// Creates a layer on the store behind the URL.
    ///
    /// Prefer this to a layer on the `AnyStore` itself: the layer calls a store in memory without boxing its futures.
    ///
    /// Each call creates a layer with limits and waiters of its own. Clone one layer for routes that share them.
    pub fn layer(&self, preset: Preset) -> IdempotencyLayer {
        with_store!(self, store => IdempotencyLayer::with_preset(store.clone(), preset))
    }

    /// Starts a background task that deletes expired entries of a SQL store once per `period`. Does nothing for the other
    /// stores, which delete them without it.
    ///
    /// Expired entries already count as absent, but their data stays in the store until the task deletes it.
    ///
    /// # Panics
    ///
    /// If the store is a SQL store and the caller is not in a Tokio runtime.
    #[cfg_attr(
        not(any(feature = "mysql", feature = "postgres", feature = "sqlite")),
        expect(unused_variables, reason = "only SQL stores purge")
    )]
    pub fn spawn_purger(&self, period: Duration) -> Purger {
        match &self.0 {
            #[cfg(feature = "postgres")]
            Backend::Postgres(store) => Purger(Some(store.spawn_purger(period))),
            #[cfg(feature = "mysql")]
            Backend::MySql(store) => Purger(Some(store.spawn_purger(period))),
            #[cfg(feature = "sqlite")]
            Backend::Sqlite(store) => Purger(Some(store.spawn_purger(period))),
            Backend::Memory(_) => Purger::default(),
            #[cfg(feature = "redis")]
            Backend::Redis(_) => Purger::default(),
            #[cfg(feature = "dynamodb")]
            Backend::DynamoDb(_) => Purger::default(),
        }
    }
}

/// Operations for operators beyond [`Inspect`].
impl AnyStore {
    /// Repairs the indexes from which a Redis store lists its entries. Returns `None` for the other stores, which need no
    /// repair. Calls `progress` after each group of keys.
    ///
    /// This reads **all keys** of all Redis servers. See `RedisStore::repair_indexes`.
    ///
    /// # Errors
    ///
    /// Those of `RedisStore::repair_indexes`.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the indexes are repaired in part.
    #[cfg_attr(
        not(feature = "redis"),
        expect(
            unused_variables,
            unused_mut,
            clippy::unused_async,
            reason = "only Redis needs repairs"
        )
    )]
    pub async fn repair_indexes(
        &self,
        mut progress: impl FnMut(&IndexRepair) + Send,
    ) -> Result<Option<IndexRepair>, InspectError> {
        match &self.0 {
            #[cfg(feature = "redis")]
            Backend::Redis(store) => {
                let repaired = store
                    .repair_indexes(|repair| progress(&repair.into()))
                    .await?;
                Ok(Some((&repaired).into()))
            }
            _ => Ok(None),
        }
    }

    /// Returns `true` if the store is a SQL store, which has an audit table.
    #[must_use]
    pub fn has_audit_table(&self) -> bool {
        matches!(self.name(), "postgres" | "mysql" | "sqlite")
    }

    /// Appends a line to the audit table of a SQL store, and creates the table if it is missing. Its name is that of the
    /// table of entries and `_audit`: `tower_idempotency_audit` by default.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](InspectErrorKind::Unsupported) if the store has no such table, and
    /// [`Backend`](InspectErrorKind::Backend) if the database failed. The line may be appended nevertheless.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the line may be appended.
    pub async fn append_audit_line(&self, line: &str) -> Result<(), InspectError> {
        match &self.0 {
            #[cfg(feature = "postgres")]
            Backend::Postgres(store) => Ok(Box::pin(store.append_audit_line(line)).await?),
            #[cfg(feature = "mysql")]
            Backend::MySql(store) => Ok(Box::pin(store.append_audit_line(line)).await?),
            #[cfg(feature = "sqlite")]
            Backend::Sqlite(store) => Ok(Box::pin(store.append_audit_line(line)).await?),
            _ => {
                let _ = line;
                Err(InspectError::new(InspectErrorKind::Unsupported))
            }
        }
    }

    /// Returns at most `limit` of the last lines of the audit table of a SQL store, the last one first. A missing table has
    /// no lines.
    ///
    /// The call reads the primary key of the table from its end. It cuts a line after 65,536 characters.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](InspectErrorKind::Unsupported) if the store has no such table, and
    /// [`Backend`](InspectErrorKind::Backend) if the database failed.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, there are no effects.
    pub async fn last_audit_lines(&self, limit: u32) -> Result<Vec<String>, InspectError> {
        match &self.0 {
            #[cfg(feature = "postgres")]
            Backend::Postgres(store) => Ok(Box::pin(store.last_audit_lines(limit)).await?),
            #[cfg(feature = "mysql")]
            Backend::MySql(store) => Ok(Box::pin(store.last_audit_lines(limit)).await?),
            #[cfg(feature = "sqlite")]
            Backend::Sqlite(store) => Ok(Box::pin(store.last_audit_lines(limit)).await?),
            _ => {
                let _ = limit;
                Err(InspectError::new(InspectErrorKind::Unsupported))
            }
        }
    }
}

/// Progress and result of [`AnyStore::repair_indexes`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexRepair {
    /// Number of keys with the prefix of the store that were examined. A server may return a key more than once.
    pub examined: u64,
    /// Number of entries that were added to their index, because it lacked them.
    pub added: u64,
    /// Number of members that were removed from an index, because their entry does not exist or has another state.
    pub removed: u64,
    /// Number of entries that were left out, because their slot was being moved to another node.
    pub skipped: u64,
}

#[cfg(feature = "redis")]
impl From<&tower_idempotency_redis::IndexRepair> for IndexRepair {
    fn from(repair: &tower_idempotency_redis::IndexRepair) -> Self {
        Self {
            examined: repair.examined,
            added: repair.added,
            removed: repair.removed,
            skipped: repair.skipped,
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl Store for AnyStore {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        with_store!(self, store => store.acquire(claim).await)
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        with_store!(self, store => store.renew(lease, ttl).await)
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        with_store!(self, store => store.complete(lease, record, retention).await)
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        with_store!(self, store => store.release(lease).await)
    }

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        with_store!(self, store => store.wait_for_change(id, timeout).await);
    }

    fn find_completed(&self, id: &KeyId) -> Option<Acquired> {
        with_store!(self, store => store.find_completed(id))
    }

    fn compress_above(&self) -> usize {
        with_store!(self, store => store.compress_above())
    }

    async fn check(&self) -> Result<(), CheckError> {
        with_store!(self, store => store.check().await)
    }
}

/// Lists and resolves the entries of the store behind the URL, with its [`Abilities`].
impl Inspect for AnyStore {
    fn abilities(&self) -> Abilities {
        with_store!(self, store => store.abilities())
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        with_store!(self, store => store.list(query).await)
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        with_store!(self, store => store.get(id).await)
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        with_store!(self, store => store.summary(limit).await)
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        with_store!(self, store => store.resolve(seen, resolution).await)
    }

    async fn purge(&self, batch: u32) -> Result<u64, InspectError> {
        with_store!(self, store => store.purge(batch).await)
    }
}

/// Shows only the name of the store.
impl fmt::Debug for AnyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AnyStore").field(&self.name()).finish()
    }
}

impl From<MemoryStore> for AnyStore {
    fn from(store: MemoryStore) -> Self {
        Self(Backend::Memory(store))
    }
}

#[cfg(feature = "redis")]
impl From<RedisStore> for AnyStore {
    fn from(store: RedisStore) -> Self {
        Self(Backend::Redis(store))
    }
}

#[cfg(feature = "postgres")]
impl From<PostgresStore> for AnyStore {
    fn from(store: PostgresStore) -> Self {
        Self(Backend::Postgres(store))
    }
}

#[cfg(feature = "mysql")]
impl From<MySqlStore> for AnyStore {
    fn from(store: MySqlStore) -> Self {
        Self(Backend::MySql(store))
    }
}

#[cfg(feature = "sqlite")]
impl From<SqliteStore> for AnyStore {
    fn from(store: SqliteStore) -> Self {
        Self(Backend::Sqlite(store))
    }
}

#[cfg(feature = "dynamodb")]
impl From<DynamoDbStore> for AnyStore {
    fn from(store: DynamoDbStore) -> Self {
        Self(Backend::DynamoDb(store))
    }
}

/// A background task that deletes expired entries. Dropping it stops the task.
#[derive(Debug, Default)]
#[must_use = "a purger stops when it is dropped"]
pub struct Purger(
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    #[expect(dead_code, reason = "its drop stops the task")]
    Option<tower_idempotency_sqlx::Purger>,
);
