//! Transactions of handlers, checkpoints and orphans in SQLite.

use sqlx::{Connection, Row, Sqlite, SqliteConnection, SqlitePool, raw_sql, sqlite::SqliteRow};
use tower_idempotency::{
    Lease,
    store::{Fingerprint, KeyId, LeaseRef, Ttl},
};

use super::{SqliteStore, ask};
use crate::{
    Checkpoint, FencedTransaction, SqlError, TransactionError,
    completer::{Found, Page},
    connections::Purpose,
    sql_store::{SqlStore, Standing, Written, millis},
};

impl SqliteStore {
    /// Begins a transaction of the handler's that is fenced by its lease: see [`FencedTransaction`].
    ///
    /// `pool` is the handler's own, on the file in which the store has its table. SQLite has one writer at a time: from here
    /// until the transaction ends nobody else writes to the file, and leases are not renewed or taken. So keep it short,
    /// and do not wait for anything else in it.
    ///
    /// # Errors
    ///
    /// [`LeaseLost`](crate::TransactionErrorKind::LeaseLost) when the lease is not held any more,
    /// [`NoEntry`](crate::TransactionErrorKind::NoEntry) when there is no such entry in the pool's file, and
    /// [`Database`](crate::TransactionErrorKind::Database), as when another writer is not done within the busy timeout of
    /// the pool's connections.
    ///
    /// # Cancellation
    ///
    /// Dropped, nothing has happened: a transaction that begins all the same is rolled back, in a task of its own.
    pub async fn begin(
        &self,
        lease: &Lease,
        pool: &SqlitePool,
    ) -> Result<FencedTransaction<Self>, TransactionError> {
        FencedTransaction::begin(self, lease, pool).await
    }

    /// The last checkpoint of this request, which an execution before this one may have left, or this one.
    ///
    /// There is none before [`FencedTransaction::checkpoint`] wrote one; worth asking where
    /// [`is_takeover`](Lease::is_takeover) says so. On a connection of the store's own.
    ///
    /// # Errors
    ///
    /// [`LeaseLost`](crate::TransactionErrorKind::LeaseLost) and [`Database`](crate::TransactionErrorKind::Database), the latter
    /// after 30 seconds without an answer, too.
    ///
    /// # Cancellation
    ///
    /// Safe to drop.
    pub async fn checkpoint(&self, lease: &Lease) -> Result<Option<Checkpoint>, TransactionError> {
        Checkpoint::last(self, lease).await
    }
}

impl SqlStore for SqliteStore {
    type Database = Sqlite;

    // One that reads first and writes then is refused if anybody wrote meanwhile, as a renewal does.
    const BEGIN: &'static str = "begin immediate; savepoint tower_idempotency";

    async fn largest_record(&self) -> Result<usize, SqlError> {
        Ok(self.inner.settings.record_limit)
    }

    async fn standing(
        &self,
        on: &mut SqliteConnection,
        lease: &LeaseRef,
    ) -> Result<Standing, SqlError> {
        let standing = self
            .inner
            .about_lease(&self.inner.statements.standing, lease);
        Ok(match standing.fetch_optional(on).await? {
            Some(row) if row.try_get(0)? => Standing::Held,
            Some(_) => Standing::Lost,
            None => Standing::Absent,
        })
    }

    async fn write_record(
        &self,
        on: &mut SqliteConnection,
        lease: &LeaseRef,
        record: &[u8],
        retention: Ttl,
    ) -> Result<bool, SqlError> {
        is_in_the_transaction(on).await?;
        let writing = self.inner.about_lease(&self.inner.statements.fence, lease);
        let writing = writing.bind(millis(retention)).bind(record);
        Ok(writing.fetch_optional(on).await?.is_some())
    }

    async fn write_checkpoint(
        &self,
        on: &mut SqliteConnection,
        lease: &LeaseRef,
        checkpoint: &Checkpoint,
    ) -> Result<Written, SqlError> {
        is_in_the_transaction(on).await?;
        let statements = &self.inner.statements;
        let about = |statement| {
            let about = self.inner.about_lease(statement, lease);
            about.bind(checkpoint.name()).bind(checkpoint.json())
        };
        // Nobody else writes between the two.
        let before = about(&statements.has_checkpoint)
            .fetch_optional(&mut *on)
            .await?;
        let written = about(&statements.write_checkpoint).fetch_optional(on);
        Ok(match (before, written.await?) {
            (Some(row), Some(_)) if row.try_get(0)? => Written::Same,
            (Some(_), Some(_)) => Written::Changed,
            (None, _) | (_, None) => Written::Lost,
        })
    }

    async fn read_checkpoint(
        &self,
        lease: &LeaseRef,
        settled: bool,
    ) -> Result<Option<Option<Checkpoint>>, SqlError> {
        let statements = &self.inner.statements;
        // Whoever writes waits for who is writing.
        let (statement, connections) = if settled {
            (&statements.settled_checkpoint, &self.inner.writer)
        } else {
            (&statements.checkpoint, &self.inner.readers)
        };
        let reading = self.inner.about_lease(statement, lease);
        let Some(row) = ask(connections, Purpose::Keep, reading).await? else {
            return Ok(None);
        };
        let Some(name) = row.try_get::<Option<String>, _>(0)? else {
            return Ok(Some(None));
        };
        Ok(Some(Some(Checkpoint::stored(name, row.try_get(1)?))))
    }

    async fn orphans(&self, page: &Page) -> Result<Vec<Found>, SqlError> {
        let (ends, id) = match &page.after {
            Some((ends, id)) => (*ends, id.as_bytes().as_slice()),
            None => (i64::MIN, [].as_slice()),
        };
        let looking = sqlx::query(self.inner.statements.orphans.clone())
            .bind(older_than(page))
            .bind(ends)
            .bind(id)
            .bind(page.limit)
            .bind(page.until.unwrap_or(i64::MAX));
        let (mut lent, _) = self.inner.readers.lend(Purpose::Keep).await?;
        let rows = looking.fetch_all(&mut lent.connection).await?;
        lent.give_back();
        rows.iter().map(found).collect()
    }

    async fn is_due(&self, orphan: &Found, page: &Page) -> Result<bool, SqlError> {
        let looking = sqlx::query(self.inner.statements.is_due.clone())
            .bind(older_than(page))
            .bind(orphan.id.as_bytes().as_slice())
            .bind(orphan.generation);
        Ok(ask(&self.inner.readers, Purpose::Keep, looking)
            .await?
            .is_some())
    }

    fn is_missing_table(code: &str) -> bool {
        // What is wrong with a statement of ours can only be a name that is not there.
        code == "1"
    }

    fn is_refusal(_code: &str) -> bool {
        // It is in the process: what it says is so.
        true
    }
}

/// Releases the savepoint that the transaction began with, which is gone with it.
async fn is_in_the_transaction(on: &mut SqliteConnection) -> Result<(), SqlError> {
    let released = raw_sql("release savepoint tower_idempotency").execute(&mut *on);
    let Err(error) = released.await.map_err(SqlError::from) else {
        return Ok(());
    };
    // No such savepoint; 5 would be one that a statement still under way keeps.
    if error.code() != Some("1") {
        return Err(error);
    }
    // What sqlx takes for open it rolls back, and goes on taking for open if there is nothing.
    if on.is_in_transaction() {
        raw_sql("begin").execute(on).await.ok();
    }
    Err(SqlError::ended())
}

fn older_than(page: &Page) -> i64 {
    i64::try_from(page.older_than.as_millis()).unwrap_or(i64::MAX)
}

fn found(row: &SqliteRow) -> Result<Found, SqlError> {
    let digest = |bytes: Vec<u8>| -> Result<[u8; 32], SqlError> {
        let bytes = bytes.try_into();
        bytes.map_err(|_| SqlError::unreadable("no digest"))
    };
    Ok(Found {
        id: KeyId::from_bytes(digest(row.try_get(0)?)?),
        fingerprint: Fingerprint::from_bytes(digest(row.try_get(1)?)?),
        generation: row.try_get(2)?,
        lease_ends: row.try_get(3)?,
        operation: row.try_get(4)?,
        seen: row.try_get(5)?,
    })
}
