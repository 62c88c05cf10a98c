use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use sqlx::{
    AssertSqlSafe, Postgres, Row,
    postgres::{PgConnectOptions, PgRow},
};
use tokio::time::timeout;
use tower_idempotency::store::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl};

use self::{listen::Listener, statements::Statements};
use crate::{
    Purger, SqlError, TableNameError,
    bounded::bounded,
    connections::{
        Connections, LINGERING,
        Purpose::{self, Ask, Keep},
    },
    entry::{Completion, Ended, Found, TRIES},
    hex,
    table::Table,
};

mod fence;
mod listen;
mod statements;

/// A table in PostgreSQL, 14 or later.
///
/// Each call is one round trip. It is durable when the server is: what `synchronous_commit` loses in a crash of the
/// server, and what a failover to a replica that lags loses, is lost here as well, leases included.
///
/// # Connections
///
/// The store has connections of its own and makes them as it needs them: handlers that hold all of a pool's connections
/// do not keep a lease from being renewed, and a statement takes one round trip instead of a pool's three. Clones share
/// them. They belong to the tokio runtime that made them. The parameters of the connection are those of the
/// [`PgConnectOptions`], save that statements are not logged: their text holds records.
///
/// Whatever isolation level the connections default to, each statement states its own. No statement is prepared and
/// none leaves anything behind in the session, so that pgbouncer may be in between, in transaction mode; waiters then
/// need [`with_listener`](Self::with_listener) or [`without_listener`](Self::without_listener).
///
/// A server that logs statements, as with `log_statement` or `log_min_duration_statement`, logs ids, tokens and records
/// with them.
///
/// # Cancellation
///
/// A call that is dropped closes its connection. The server does what it was asked, or does not.
#[derive(Clone)]
pub struct PostgresStore {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    statements: Statements,
    connections: Connections<Postgres>,
    listener: Option<Listener>,
}

#[derive(Clone)]
struct Settings {
    options: PgConnectOptions,
    table: Table,
    connections: usize,
    record_limit: usize,
    listen: Listen,
}

#[derive(Clone)]
enum Listen {
    Directly,
    At(Box<PgConnectOptions>),
    Never,
}

impl PostgresStore {
    /// A store at the server that `options` name; see [`migrate`](Self::migrate) for its table. Does not connect yet.
    ///
    /// Its connections are its own. At the database of a pool that is there already:
    ///
    /// ```
    /// # use tower_idempotency_sqlx::{PostgresStore, sqlx::PgPool};
    /// # fn beside(pool: &PgPool) -> PostgresStore {
    /// PostgresStore::new((*pool.connect_options()).clone())
    /// # }
    /// ```
    #[must_use]
    pub fn new(options: PgConnectOptions) -> Self {
        Self::build(Settings {
            // Known to poolers, and of no use where no fraction is read.
            options: options.extra_float_digits(None),
            table: Table::default(),
            connections: 10,
            record_limit: LARGEST_RECORD,
            listen: Listen::Directly,
        })
    }

    /// As [`new`](Self::new), from a URL as in `postgres://user:password@host/database`.
    ///
    /// # Errors
    ///
    /// When it is no such URL.
    pub fn from_url(url: &str) -> Result<Self, SqlError> {
        Ok(Self::new(url.parse::<PgConnectOptions>()?))
    }

    /// The table, as in `payments.idempotency`; `tower_idempotency` in the schema of the connection by default.
    ///
    /// Set before the store is used. Two services that share a table and a namespace of the layer share their keys.
    ///
    /// # Errors
    ///
    /// When a part of it is not 1 to 48 of `a` to `z`, `0` to `9` and `_` without a digit in front.
    pub fn with_table(self, name: &str) -> Result<Self, TableNameError> {
        let table = Table::parse(name)?;
        Ok(self.set(|settings| settings.table = table))
    }

    /// How many connections the store makes at most, besides the one that listens for waiters; 10 by default, at least 1.
    ///
    /// Set before the store is used. Too few, and calls wait for each other until the layer's timeout; too many, and the
    /// server refuses them or whoever else comes. One of them, if there are two, is for keeping leases only: renewals and
    /// completions do not stand in line behind requests that ask for a lease. If there is one, they are next.
    ///
    /// A statement that is cut off, as by the layer's timeout, closes its connection, and the server may be busy with it for
    /// longer. If it went without an answer for a second, its turn to ask for a lease is free only 1.5 seconds
    /// later.
    #[must_use]
    pub fn with_connections(self, most: usize) -> Self {
        self.set(|settings| settings.connections = most)
    }

    /// The largest record in bytes; 128 MiB by default, which is also the most.
    ///
    /// Set before the store is used. The layer stores a tombstone in place of a larger one: its retries are told that
    /// the response was not retained.
    #[must_use]
    pub fn with_record_limit(self, bytes: usize) -> Self {
        self.set(|settings| settings.record_limit = bytes.min(LARGEST_RECORD))
    }

    /// Where to listen for the end of leases, if not where the statements go: past the pooler.
    ///
    /// Set before the store is used. It has to be the same database, or waiters hear nothing and look from time to time
    /// as they do [without a listener](Self::without_listener).
    #[must_use]
    pub fn with_listener(self, options: PgConnectOptions) -> Self {
        self.set(|settings| settings.listen = Listen::At(Box::new(options)))
    }

    /// Listens for nothing: waiters look from time to time, at most a second apart.
    ///
    /// Set before the store is used. By default the first waiter makes one more connection, which listens until the
    /// store is dropped; through pgbouncer in transaction mode it would hear nothing, and leave its wish to listen
    /// behind in a connection that others use.
    #[must_use]
    pub fn without_listener(self) -> Self {
        self.set(|settings| settings.listen = Listen::Never)
    }

    /// Makes the table, or brings it up to date; does nothing if it is.
    ///
    /// May be called by every replica at once, at each start. The same statements are in the files of the folder
    /// `migrations/postgres` for those who run them by other means. Needs the right to create tables.
    ///
    /// Waits for as long as the server takes, which for an index on a large table is minutes, and for one that has fallen
    /// silent is for ever: bound it from outside, with such a table in mind.
    ///
    /// # Errors
    ///
    /// When the server cannot be reached or refuses.
    ///
    /// # Cancellation
    ///
    /// Dropped, it has happened whole or not at all.
    pub async fn migrate(&self) -> Result<(), SqlError> {
        for migration in MIGRATIONS {
            let table = &self.inner.settings.table;
            let migration = table.in_migration(migration, '"');
            // Several statements in one message are a transaction.
            let sql = format!("set transaction isolation level read committed; {migration}");
            self.inner.ask(Keep, sql).await?;
        }
        Ok(())
    }

    /// Deletes at most `batch` entries that are over, oldest first, and says how many.
    ///
    /// What is over counts as absent whether or not it is deleted: this saves space and nothing else. It deletes no entry
    /// that is not over, and may run on every replica at once.
    ///
    /// # Errors
    ///
    /// When the server cannot be reached or refuses, or has not answered within 30 seconds: so a batch should take less.
    ///
    /// # Cancellation
    ///
    /// Dropped, it has deleted the batch or nothing.
    pub async fn purge_expired(&self, batch: u32) -> Result<u64, SqlError> {
        bounded(self.inner.purge(batch)).await
    }

    /// Purges every so often, in batches of 1000, until what it returns is dropped or the store is, with its clones.
    ///
    /// May run on every replica. What fails is logged and tried again next time. Too seldom, and the table grows by what
    /// was forgotten since; too often costs a search of an index.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn spawn_purger(&self, every: Duration) -> Purger {
        let store = Arc::downgrade(&self.inner);
        Purger::spawn(every, move || {
            let inner = store.upgrade()?;
            Some(async move { inner.purge(crate::purge::BATCH).await })
        })
    }

    fn build(settings: Settings) -> Self {
        let statements = Statements::new(&settings.table);
        let channel = statements.channel().to_owned();
        let listener = match settings.listen.clone() {
            Listen::Directly => Some(Listener::new(settings.options.clone(), channel)),
            Listen::At(options) => Some(Listener::new(*options, channel)),
            Listen::Never => None,
        };
        Self {
            inner: Arc::new(Inner {
                connections: Connections::new(
                    settings.options.clone(),
                    settings.connections,
                    LINGERING,
                ),
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
    /// One round trip; again if the server asks for it.
    async fn ask(&self, purpose: Purpose, sql: String) -> Result<Vec<PgRow>, SqlError> {
        self.ask_again(purpose, &Arc::new(sql)).await
    }

    async fn ask_again(&self, purpose: Purpose, sql: &Arc<String>) -> Result<Vec<PgRow>, SqlError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let (mut lent, _) = self.connections.lend(purpose).await?;
            // Values are in it as digits only.
            let statement = sqlx::raw_sql(AssertSqlSafe(Arc::clone(sql)));
            let error = match statement.fetch_all(&mut lent.connection).await {
                Ok(rows) => {
                    lent.give_back();
                    return Ok(rows);
                }
                Err(sqlx::Error::Database(error)) => error,
                Err(error) => {
                    self.connections.forget();
                    // It is known to be gone: that was no stall.
                    lent.close();
                    return Err(error.into());
                }
            };
            let code = crate::error::code(&*error);
            if is_another_s_now(&code) {
                self.connections.forget();
                lent.close();
            } else {
                // The transaction was the statement's own, and ended with it.
                lent.give_back();
            }
            // Serialization failure, deadlock, and a row that somebody holds: a deadlock as well, if nobody looked for one
            // before. The statement has done nothing.
            if tries == TRIES || !["40001", "40P01", "55P03"].contains(&code.as_str()) {
                return Err(sqlx::Error::Database(error).into());
            }
        }
    }

    async fn purge(&self, batch: u32) -> Result<u64, SqlError> {
        let rows = self.ask(Keep, self.statements.purge(batch)).await?;
        let row = rows.first().ok_or(SqlError::unreadable("no count"))?;
        let deleted: i64 = row.try_get(0)?;
        Ok(deleted.unsigned_abs())
    }
}

impl Store for PostgresStore {
    const COMPRESS_ABOVE: usize = 1024;

    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let sql = Arc::new(self.inner.statements.acquire(claim));
        for _ in 0..TRIES {
            let rows = self.inner.ask_again(Ask, &sql).await?;
            // None, or one that can be taken: released, expired or forgotten between the one statement and the other.
            if let Some(row) = rows.first()
                && let Some(answer) = found(row)?.answer(claim)?
            {
                return Ok(answer);
            }
        }
        Err(SqlError::contended().into())
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        let rows = self
            .inner
            .ask(Keep, self.inner.statements.renew(lease, ttl))
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
        for _ in 0..TRIES {
            let rows = self.inner.ask_again(Keep, &sql).await?;
            // The first row may be that of the notification.
            let Some(row) = rows.last().filter(|row| row.len() > 1) else {
                continue;
            };
            match ended(row)?.completion() {
                Completion::Stored => return Ok(()),
                Completion::Lost => return Err(StoreError::LeaseLost),
                Completion::Again => {}
            }
        }
        Err(SqlError::contended().into())
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let sql = self.inner.statements.release(lease);
        self.inner.ask(Ask, sql).await?;
        Ok(())
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        let listener = self.inner.listener.as_ref();
        // What is cut off closes its connection; and whoever looks again this soon need not be told.
        let Some(listener) = listener.filter(|_| within >= WORTH_WATCHING) else {
            tokio::time::sleep(within).await;
            return;
        };
        let told = async {
            let mut waiting = listener.wait_for(*id);
            waiting.is_heard().await;
            let sql = self.inner.statements.watch(id);
            // Whether it failed or is to come: the waiter looks again after a while in any case.
            let is_in_progress = match self.inner.ask(Ask, sql).await {
                Ok(rows) => rows
                    .last()
                    .is_some_and(|row| row.try_get(0).unwrap_or(true)),
                Err(_) => true,
            };
            if is_in_progress {
                waiting.told().await;
            }
        };
        timeout(within, told).await.ok();
    }
}

/// Connection lost, the server is shutting down, or it has become a replica: the way may lead to another server now.
fn is_another_s_now(code: &str) -> bool {
    code.starts_with("08") || code.starts_with("57P") || code == "25006"
}

fn found(row: &PgRow) -> Result<Found, SqlError> {
    let bytes = |text| hex::decode(text).ok_or(SqlError::unreadable("no bytes"));
    let record: Option<&str> = row.try_get(6)?;
    Ok(Found {
        is_completed: row.try_get(0)?,
        is_mine: row.try_get(1)?,
        is_over: row.try_get(2)?,
        fingerprint: bytes(row.try_get(3)?)?,
        generation: row.try_get(4)?,
        left: row.try_get(5)?,
        record: record.map(bytes).transpose()?,
    })
}

fn ended(row: &PgRow) -> Result<Ended, SqlError> {
    Ok(Ended {
        is_completed: row.try_get(0)?,
        is_mine: row.try_get(1)?,
        is_over: row.try_get(2)?,
        is_unheld: row.try_get(3)?,
    })
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("table", &self.inner.settings.table)
            .finish_non_exhaustive()
    }
}

const MIGRATIONS: [&str; 2] = [
    include_str!("../../migrations/postgres/0001_entries.sql"),
    include_str!("../../migrations/postgres/0002_orphans.sql"),
];
/// A statement takes less, unless the database is overloaded.
const WORTH_WATCHING: Duration = Duration::from_millis(250);
/// Twice as much in digits is well below what the server takes in one message and gives in one value.
const LARGEST_RECORD: usize = 128 << 20;
