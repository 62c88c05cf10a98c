use std::{fmt, path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use sqlx::{
    AssertSqlSafe, Row, SqlStr, Sqlite,
    query::Query,
    sqlite::{
        SqliteArguments, SqliteConnectOptions, SqliteJournalMode, SqliteRow, SqliteSynchronous,
    },
};
use tower_idempotency::store::{
    Acquired, Claim, KeyId, LeaseRef, OrphanPolicy, Store, StoreError, Ttl,
};

use self::statements::Statements;
use crate::{
    Purger, SqlError, TableNameError,
    connections::{
        Connections,
        Purpose::{self, Ask, Keep},
    },
    entry::{Completion, Ended, Found, TRIES},
    sql_store::millis,
    table::Table,
};

mod fence;
mod statements;

/// A table in a SQLite file, which the processes of one machine may share. SQLite is compiled in.
///
/// The file is in WAL mode, and a transaction is on the disk before a call returns: it survives a crash of the process
/// and of the machine. Do not put the file on a network file system, where its locks are not to be trusted.
///
/// # Connections
///
/// The store has one connection that writes, and a few that only read; clones share them. A replay, and a duplicate that
/// is refused, only read. Another process that writes is waited for, 5 seconds by default.
///
/// # Cancellation
///
/// A call that is dropped closes its connection. What it asked for happened or did not.
#[derive(Clone)]
pub struct SqliteStore {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    statements: Statements,
    /// More than one would wait for each other inside SQLite, which wakes them by looking from time to time.
    writer: Connections<Sqlite>,
    readers: Connections<Sqlite>,
}

#[derive(Clone)]
struct Settings {
    options: SqliteConnectOptions,
    table: Table,
    record_limit: usize,
}

impl SqliteStore {
    /// A store in this file, which is made if it is missing; see [`migrate`](Self::migrate) for its table. Does not open
    /// it yet.
    pub fn new(path: impl AsRef<Path>) -> Self {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .synchronous(SqliteSynchronous::Full);
        Self::with_options(options)
    }

    /// A store in the file that `options` name, opened as they say, save that it is in WAL mode.
    ///
    /// `synchronous` below `FULL` is faster and loses the last leases and records when the machine crashes. A database in
    /// memory will not do, since each connection has its own: use
    /// [`MemoryStore`](tower_idempotency::MemoryStore).
    #[must_use]
    pub fn with_options(options: SqliteConnectOptions) -> Self {
        Self::build(Settings {
            options: options.journal_mode(SqliteJournalMode::Wal),
            table: Table::default(),
            record_limit: LARGEST_RECORD,
        })
    }

    /// The table; `tower_idempotency` by default. It is in the file itself: there is no schema to choose.
    ///
    /// Set before the store is used. Two services that share a table and a namespace of the layer share their keys.
    ///
    /// # Errors
    ///
    /// When it is not 1 to 48 of `a` to `z`, `0` to `9` and `_` without a digit in front.
    pub fn with_table(self, name: &str) -> Result<Self, TableNameError> {
        let table = Table::parse_name(name)?;
        Ok(self.set(|settings| settings.table = table))
    }

    /// The largest record in bytes; 128 MiB by default, which is also the most.
    ///
    /// Set before the store is used. The layer stores a tombstone in place of a larger one: its retries are told that
    /// the response was not retained.
    #[must_use]
    pub fn with_record_limit(self, bytes: usize) -> Self {
        self.set(|settings| settings.record_limit = bytes.min(LARGEST_RECORD))
    }

    /// Makes the table, or brings it up to date; does nothing if it is.
    ///
    /// May be called by every process at once, at each start. The same statements are in the files of the folder
    /// `migrations/sqlite` for those who run them by other means.
    ///
    /// # Errors
    ///
    /// When the file cannot be opened or written.
    ///
    /// # Cancellation
    ///
    /// Dropped, it has happened whole or not at all.
    pub async fn migrate(&self) -> Result<(), SqlError> {
        for migration in MIGRATIONS {
            let sql = self.inner.settings.table.in_migration(migration, '"');
            // Looks before it writes: it has to have the file to itself from the beginning.
            let sql = format!("begin immediate;\n{sql}\ncommit;");
            let (mut lent, _) = self.inner.writer.lend(Keep).await?;
            let migrated = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut lent.connection);
            // A transaction that failed half way ends with its connection.
            migrated.await?;
            lent.give_back();
        }
        Ok(())
    }

    /// Deletes at most `batch` entries that are over, oldest first, and says how many.
    ///
    /// What is over counts as absent whether or not it is deleted: this saves space and nothing else. It deletes no entry
    /// that is not over, and may run in every process at once. The file does not shrink; its space is used again.
    ///
    /// # Errors
    ///
    /// When the file cannot be opened or written.
    ///
    /// # Cancellation
    ///
    /// Dropped, it has deleted the batch or nothing.
    pub async fn purge_expired(&self, batch: u32) -> Result<u64, SqlError> {
        self.inner.purge(batch).await
    }

    /// Purges every so often, in batches of 1000, until what it returns is dropped or the store is, with its clones.
    ///
    /// May run in every process. What fails is logged and tried again next time. Too seldom, and the file grows by what
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
                writer: Connections::new(settings.options.clone(), 1, Duration::ZERO),
                readers: Connections::new(settings.options.clone(), READERS, Duration::ZERO),
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
    async fn look(&self, claim: &Claim) -> Result<Option<Found>, SqlError> {
        let looking = self.about(&self.statements.look, &claim.id, claim.token.as_bytes());
        let row = ask(&self.readers, Ask, looking).await?;
        row.map(|row| found(&row).map_err(SqlError::from))
            .transpose()
    }

    /// A statement about one entry and one token; more is bound after them.
    fn about<'q>(
        &self,
        statement: &SqlStr,
        id: &'q KeyId,
        token: &'q [u8; 16],
    ) -> Query<'q, Sqlite, SqliteArguments> {
        sqlx::query(statement.clone())
            .bind(id.as_bytes().as_slice())
            .bind(token.as_slice())
    }

    fn about_lease<'q>(
        &self,
        statement: &SqlStr,
        lease: &'q LeaseRef,
    ) -> Query<'q, Sqlite, SqliteArguments> {
        self.about(statement, &lease.id, lease.token.as_bytes())
    }

    async fn purge(&self, batch: u32) -> Result<u64, SqlError> {
        let (mut lent, _) = self.writer.lend(Keep).await?;
        let purging = sqlx::query(self.statements.purge.clone()).bind(batch);
        let purged = purging.execute(&mut lent.connection).await?;
        lent.give_back();
        Ok(purged.rows_affected())
    }
}

/// Runs one statement, which answers with a row at most.
///
/// To its end: it is committed after its row has been read, and whether that worked, as it does not where the disk is
/// full, is known only then. Whoever asks for one row never hears of it.
async fn ask(
    connections: &Connections<Sqlite>,
    purpose: Purpose,
    query: Query<'_, Sqlite, SqliteArguments>,
) -> Result<Option<SqliteRow>, SqlError> {
    let (mut lent, _) = connections.lend(purpose).await?;
    let mut rows = query.fetch_all(&mut lent.connection).await?;
    lent.give_back();
    Ok(rows.pop())
}

impl Store for SqliteStore {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let Inner {
            statements, writer, ..
        } = &*self.inner;
        for _ in 0..TRIES {
            // A look is an answer if it shows what cannot be taken; whoever can take it does so by a condition.
            let found = self.inner.look(claim).await?;
            let may_extend = |found: &Found| found.is_mine && !found.is_completed;
            if let Some(found) = found.filter(|found| !may_extend(found))
                && let Some(answer) = found.answer(claim)?
            {
                return Ok(answer);
            }
            let acquiring = self
                .inner
                .about(&statements.acquire, &claim.id, claim.token.as_bytes())
                .bind(claim.fingerprint.as_bytes().as_slice())
                .bind(millis(claim.lease))
                .bind(millis(claim.orphan_retention))
                .bind(claim.orphans == OrphanPolicy::TakeOver)
                .bind(claim.owner)
                .bind(&*claim.operation);
            if let Some(row) = ask(writer, Ask, acquiring).await? {
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
        let renewing = self.inner.about_lease(&self.inner.statements.renew, lease);
        let renewed = ask(&self.inner.writer, Keep, renewing.bind(millis(ttl))).await?;
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
        for _ in 0..TRIES {
            let completing = self
                .inner
                .about_lease(&statements.complete, lease)
                .bind(lease.fingerprint.as_bytes().as_slice())
                .bind(generation)
                .bind(millis(retention))
                .bind(&*record);
            if ask(writer, Keep, completing).await?.is_some() {
                return Ok(());
            }
            let looking = self.inner.about_lease(&statements.ended, lease);
            let Some(row) = ask(writer, Keep, looking).await? else {
                continue;
            };
            match ended(&row).map_err(SqlError::from)?.completion() {
                Completion::Stored => return Ok(()),
                Completion::Lost => return Err(StoreError::LeaseLost),
                Completion::Again => {}
            }
        }
        Err(SqlError::contended().into())
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let Inner {
            statements, writer, ..
        } = &*self.inner;
        // The generation of a token never changes: at most one of the two finds it.
        let freed = ask(writer, Ask, self.inner.about_lease(&statements.free, lease)).await?;
        if freed.is_none() {
            let orphaning = self.inner.about_lease(&statements.orphan, lease);
            ask(writer, Ask, orphaning).await?;
        }
        Ok(())
    }

    /// Waiters look from time to time: another process does not tell this one.
    async fn wait_for_change(&self, _id: &KeyId, within: Duration) {
        tokio::time::sleep(within).await;
    }
}

fn found(row: &SqliteRow) -> Result<Found, sqlx::Error> {
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

fn ended(row: &SqliteRow) -> Result<Ended, sqlx::Error> {
    Ok(Ended {
        is_completed: row.try_get(0)?,
        is_mine: row.try_get(1)?,
        is_over: row.try_get(2)?,
        is_unheld: row.try_get(3)?,
    })
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("table", &self.inner.settings.table)
            .finish_non_exhaustive()
    }
}

const MIGRATIONS: [&str; 2] = [
    include_str!("../../migrations/sqlite/0001_entries.sql"),
    include_str!("../../migrations/sqlite/0002_orphans.sql"),
];
const READERS: usize = 4;
/// Well below the 1,000,000,000 bytes that a row may have.
const LARGEST_RECORD: usize = 128 << 20;
