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
use tower_idempotency::store::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl};

use self::statements::{OVERHEAD, Statements};
use crate::{
    Purger, SqlError, TableNameError,
    bounded::bounded,
    connections::{
        Connections, LINGERING, Lent,
        Purpose::{self, Ask, Keep},
    },
    entry::{Completion, Ended, Found, TRIES},
    table::Table,
};

mod fence;
mod statements;

/// A table in MySQL, 8.0 or later, or in MariaDB, 10.6 or later.
///
/// Each call is one round trip: a transaction at READ COMMITTED, whatever the sessions default to. So the server must
/// not log for replication by statements (`binlog_format = STATEMENT`), which does not go with that level. It is durable
/// when the server is: what `innodb_flush_log_at_trx_commit` loses in a crash of the server, and what a failover to a
/// replica that lags loses, is lost here as well, leases included.
///
/// # Connections
///
/// The store has connections of its own and makes them as it needs them: handlers that hold all of a pool's connections
/// do not keep a lease from being renewed, and a call takes one round trip instead of a pool's three. Clones share them.
/// They belong to the tokio runtime that made them. Their parameters are those of the [`MySqlConnectOptions`], save that
/// statements are not logged, since their text holds records, and that they wait a second for a locked row. They set the
/// user variables `@free` and `@record`.
///
/// A server that logs statements, as its general and its slow query log do, logs ids, tokens and records with them.
///
/// # The largest record
///
/// A record has to fit into the server's `max_allowed_packet`, of which it takes four bytes for three.
///
/// # Cancellation
///
/// A call that is dropped closes its connection. The server does what it was asked, or does not.
#[derive(Clone)]
pub struct MySqlStore {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    statements: Statements,
    connections: Connections<MySql>,
    /// The largest record that the server takes; unknown before the first connection.
    largest: AtomicUsize,
}

#[derive(Clone)]
struct Settings {
    options: MySqlConnectOptions,
    table: Table,
    connections: usize,
    record_limit: usize,
}

impl MySqlStore {
    /// A store at the server that `options` name; see [`migrate`](Self::migrate) for its table. Does not connect yet.
    ///
    /// Its connections are its own. At the database of a pool that is there already:
    ///
    /// ```
    /// # use tower_idempotency_sqlx::{MySqlStore, sqlx::MySqlPool};
    /// # fn beside(pool: &MySqlPool) -> MySqlStore {
    /// MySqlStore::new((*pool.connect_options()).clone())
    /// # }
    /// ```
    #[must_use]
    pub fn new(options: MySqlConnectOptions) -> Self {
        Self::build(Settings {
            options,
            table: Table::default(),
            connections: 10,
            record_limit: LARGEST_RECORD,
        })
    }

    /// As [`new`](Self::new), from a URL as in `mysql://user:password@host/database`.
    ///
    /// # Errors
    ///
    /// When it is no such URL.
    pub fn from_url(url: &str) -> Result<Self, SqlError> {
        Ok(Self::new(url.parse::<MySqlConnectOptions>()?))
    }

    /// The table, as in `payments.idempotency`; `tower_idempotency` in the database of the connection by default.
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

    /// How many connections the store makes at most; 10 by default, at least 1.
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

    /// The largest record in bytes, if the server's `max_allowed_packet` allows for it; 128 MiB by default, which is also
    /// the most.
    ///
    /// Set before the store is used. The layer stores a tombstone in place of a larger one: its retries are told that
    /// the response was not retained.
    #[must_use]
    pub fn with_record_limit(self, bytes: usize) -> Self {
        self.set(|settings| settings.record_limit = bytes.min(LARGEST_RECORD))
    }

    /// Makes the table, or brings it up to date; does nothing if it is.
    ///
    /// May be called by every replica at once, at each start. The same statements are in the files of the folder
    /// `migrations/mysql` for those who run them by other means. Needs the right to create tables.
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
    /// Dropped, it has happened up to some statement. It may be called again.
    pub async fn migrate(&self) -> Result<(), SqlError> {
        for migration in MIGRATIONS {
            let table = &self.inner.settings.table;
            let sql = table.in_migration(migration, '`');
            match self.inner.ask(Keep, sql).await {
                // Somebody else has made the index meanwhile.
                Err(error) if error.code() == Some("1061") => {}
                migrated => drop(migrated?),
            }
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
        Self {
            inner: Arc::new(Inner {
                statements: Statements::new(&settings.table),
                connections: Connections::new(
                    settings.options.clone(),
                    settings.connections,
                    LINGERING,
                ),
                largest: AtomicUsize::new(UNKNOWN),
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
    async fn ask(&self, purpose: Purpose, sql: String) -> Result<Vec<MySqlRow>, SqlError> {
        self.ask_again(purpose, &Arc::new(sql)).await
    }

    /// One round trip; again if the server asks for it.
    async fn ask_again(
        &self,
        purpose: Purpose,
        sql: &Arc<String>,
    ) -> Result<Vec<MySqlRow>, SqlError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let mut lent = self.lend(purpose).await?;
            let error = match run(&mut lent.connection, sql).await {
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
            let is_deadlock = is_deadlock(&code);
            // Of anything else than a deadlock, or a row that somebody holds for long, the connection may be part, and the
            // transaction ends with it.
            if !is_deadlock && code != "1205" {
                if is_another_s_now(&code) {
                    self.connections.forget();
                }
                lent.close();
                return Err(sqlx::Error::Database(error).into());
            }
            run(&mut lent.connection, &Arc::new(ROLLBACK.to_owned())).await?;
            lent.give_back();
            // Who waits for a row once more waits for longer than the layer does for an answer.
            if tries == TRIES || !is_deadlock {
                return Err(sqlx::Error::Database(error).into());
            }
        }
    }

    async fn lend(&self, purpose: Purpose) -> Result<Lent<'_, MySql>, SqlError> {
        let (mut lent, is_new) = self.connections.lend(purpose).await?;
        if is_new {
            let rows = run(&mut lent.connection, &Arc::new(SETUP.to_owned())).await?;
            let row = rows.first().ok_or(SqlError::unreadable("no setting"))?;
            let packet = usize::try_from(row.try_get::<u64, _>(0)?).unwrap_or(usize::MAX);
            let largest = packet.saturating_sub(OVERHEAD) / 4 * 3;
            self.largest.store(largest, Relaxed);
        }
        Ok(lent)
    }

    async fn record_limit(&self) -> Result<usize, SqlError> {
        if self.largest.load(Relaxed) == UNKNOWN {
            self.lend(Keep).await?.give_back();
        }
        Ok(self.settings.record_limit.min(self.largest.load(Relaxed)))
    }

    async fn purge(&self, batch: u32) -> Result<u64, SqlError> {
        let rows = self.ask(Keep, self.statements.purge(batch)).await?;
        let row = rows.first().ok_or(SqlError::unreadable("no count"))?;
        let deleted: i64 = row.try_get(0)?;
        Ok(deleted.unsigned_abs())
    }
}

/// Values are in the statements as digits and letters only.
async fn run(connection: &mut MySqlConnection, sql: &Arc<String>) -> sqlx::Result<Vec<MySqlRow>> {
    sqlx::raw_sql(AssertSqlSafe(Arc::clone(sql)))
        .fetch_all(connection)
        .await
}

impl Store for MySqlStore {
    const COMPRESS_ABOVE: usize = 1024;

    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let sql = Arc::new(self.inner.statements.acquire(claim));
        for _ in 0..TRIES {
            let rows = self.inner.ask_again(Ask, &sql).await?;
            // None, or one that can be taken: released, expired or forgotten between the one statement and the other.
            if let Some(row) = rows.first()
                && let Some(answer) = found(row).map_err(SqlError::from)?.answer(claim)?
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
        let limit = self.inner.record_limit().await?;
        if record.len() > limit {
            return Err(StoreError::RecordTooLarge { limit });
        }
        let sql = Arc::new(self.inner.statements.complete(lease, &record, retention));
        for _ in 0..TRIES {
            let rows = self.inner.ask_again(Keep, &sql).await?;
            let Some(row) = rows.first() else {
                continue;
            };
            match ended(row).map_err(SqlError::from)?.completion() {
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

    /// Waiters look from time to time.
    async fn wait_for_change(&self, _id: &KeyId, within: Duration) {
        tokio::time::sleep(within).await;
    }
}

/// The transaction is rolled back, for somebody else's: a deadlock, which is also what certification in a Galera cluster
/// reports at a commit, or certification in a group.
fn is_deadlock(code: &str) -> bool {
    ["1213", "3101"].contains(&code)
}

/// The server is shutting down, or it has become a replica, by one setting or another, or has left its cluster: the way may
/// lead to another server now. Or it has closed the connection, as after it was idle for long, and then the others too.
fn is_another_s_now(code: &str) -> bool {
    let not_this_one = ["1047", "1053", "1290", "1792", "1836"];
    let closed = ["1159", "1160", "1927", "3032", "3169", "4031"];
    not_this_one.contains(&code) || closed.contains(&code)
}

fn found(row: &MySqlRow) -> Result<Found, sqlx::Error> {
    Ok(Found {
        is_completed: row.try_get(0)?,
        is_mine: row.try_get(1)?,
        is_over: row.try_get(2)?,
        fingerprint: row.try_get(3)?,
        generation: row.try_get(4)?,
        left: row.try_get(5)?,
        record: row.try_get(6)?,
    })
}

fn ended(row: &MySqlRow) -> Result<Ended, sqlx::Error> {
    Ok(Ended {
        is_completed: row.try_get(0)?,
        is_mine: row.try_get(1)?,
        is_over: row.try_get(2)?,
        is_unheld: row.try_get(3)?,
    })
}

impl fmt::Debug for MySqlStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlStore")
            .field("table", &self.inner.settings.table)
            .finish_non_exhaustive()
    }
}

const MIGRATIONS: [&str; 2] = [
    include_str!("../../migrations/mysql/0001_entries.sql"),
    include_str!("../../migrations/mysql/0002_orphans.sql"),
];
const SETUP: &str = "set session innodb_lock_wait_timeout = 1; select @@max_allowed_packet;";
/// And lets go of the record that a completion which failed has put there.
const ROLLBACK: &str = "rollback and no chain no release; set @record = null;";
const LARGEST_RECORD: usize = 128 << 20;
const UNKNOWN: usize = usize::MAX;
