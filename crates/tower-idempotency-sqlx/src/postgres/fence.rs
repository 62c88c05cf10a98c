//! Transactions of handlers, checkpoints and orphans in PostgreSQL.

use sqlx::{
    Connection as _, PgConnection, PgPool, Postgres, Row, SqlStr,
    postgres::{PgArguments, PgRow},
    query::Query,
};
use tower_idempotency::{
    Lease,
    store::{Fingerprint, KeyId, LeaseRef, Ttl},
};

use super::PostgresStore;
use crate::{
    Checkpoint, FencedTransaction, SqlError, TransactionError,
    completer::{Found, Page},
    connections::Purpose,
    hex,
    sql_store::{SqlStore, Standing, Written, millis},
};

impl PostgresStore {
    /// Begins a transaction of the handler's that is fenced by its lease: see [`FencedTransaction`].
    ///
    /// `pool` is the handler's own, and leads to the database in which the store has its table. The transaction is at READ
    /// COMMITTED whatever the pool defaults to: at a higher level a renewal of the lease, meanwhile and by another
    /// connection, would make its end fail. Takes two round trips, besides those of the pool, and a third where statements are
    /// not kept on its connections.
    ///
    /// # Errors
    ///
    /// [`LeaseLost`](crate::TransactionErrorKind::LeaseLost) when the lease is not held any more,
    /// [`NoEntry`](crate::TransactionErrorKind::NoEntry) when there is no such entry in the pool's database, and
    /// [`Database`](crate::TransactionErrorKind::Database).
    ///
    /// # Cancellation
    ///
    /// Dropped, nothing has happened: a transaction that begins all the same is rolled back, in a task of its own, if the
    /// database answers within the pool's `acquire_timeout`, of 5 seconds at least.
    pub async fn begin(
        &self,
        lease: &Lease,
        pool: &PgPool,
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

impl SqlStore for PostgresStore {
    type Database = Postgres;

    const BEGIN: &'static str = "begin transaction isolation level read committed, read write";

    async fn largest_record(&self) -> Result<usize, SqlError> {
        Ok(self.inner.settings.record_limit)
    }

    async fn standing(
        &self,
        on: &mut PgConnection,
        lease: &LeaseRef,
    ) -> Result<Standing, SqlError> {
        let standing = bound(on, &self.inner.statements.standing, lease);
        Ok(match standing.fetch_optional(on).await? {
            Some(row) if row.try_get(0)? => Standing::Held,
            Some(_) => Standing::Lost,
            None => Standing::Absent,
        })
    }

    async fn write_record(
        &self,
        on: &mut PgConnection,
        lease: &LeaseRef,
        record: &[u8],
        retention: Ttl,
    ) -> Result<bool, SqlError> {
        let writing = bound(on, &self.inner.statements.fence, lease)
            .bind(record)
            .bind(millis(retention));
        let row = writing.fetch_one(on).await?;
        Ok(in_the_transaction(&row)?.try_get(1)?)
    }

    async fn write_checkpoint(
        &self,
        on: &mut PgConnection,
        lease: &LeaseRef,
        checkpoint: &Checkpoint,
    ) -> Result<Written, SqlError> {
        let writing = bound(on, &self.inner.statements.write_checkpoint, lease)
            .bind(checkpoint.name())
            .bind(checkpoint.json());
        let row = writing.fetch_one(on).await?;
        Ok(match in_the_transaction(&row)?.try_get(1)? {
            Some(true) => Written::Same,
            Some(false) => Written::Changed,
            None => Written::Lost,
        })
    }

    async fn read_checkpoint(
        &self,
        lease: &LeaseRef,
        settled: bool,
    ) -> Result<Option<Option<Checkpoint>>, SqlError> {
        let statement = self.inner.statements.read_checkpoint(lease, settled);
        let rows = self.inner.ask(Purpose::Keep, statement).await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let Some(name) = row.try_get::<Option<String>, _>(0)? else {
            return Ok(Some(None));
        };
        let data = row.try_get::<Option<&str>, _>(1)?.map(bytes).transpose()?;
        Ok(Some(Some(Checkpoint::stored(name, data))))
    }

    async fn orphans(&self, page: &Page) -> Result<Vec<Found>, SqlError> {
        let statement = self.inner.statements.orphans(page);
        let rows = self.inner.ask(Purpose::Keep, statement).await?;
        rows.iter().map(found).collect()
    }

    async fn is_due(&self, orphan: &Found, page: &Page) -> Result<bool, SqlError> {
        let statement = self.inner.statements.is_due(orphan, page);
        Ok(!self.inner.ask(Purpose::Keep, statement).await?.is_empty())
    }

    fn is_missing_table(code: &str) -> bool {
        // No such table, schema or column.
        ["42P01", "3F000", "42703"].contains(&code)
    }

    fn is_refusal(code: &str) -> bool {
        // A constraint that was deferred, or a rollback; not one that leaves the completion unknown.
        code.starts_with("23") || code.starts_with("40") && code != "40003"
    }
}

/// A statement about one entry and one token, for a handler's connection; more is bound after them.
///
/// It is prepared anew, under no name, which a pooler may be in between for: within a transaction the connection to the
/// server stays the same. Where the handler has its own statements kept on that connection, this one is kept, too, and costs
/// one round trip less from then on.
fn bound<'q>(
    on: &PgConnection,
    statement: &SqlStr,
    lease: &'q LeaseRef,
) -> Query<'q, Postgres, PgArguments> {
    sqlx::query(statement.clone())
        .persistent(on.cached_statements_size() > 0)
        .bind(lease.id.as_bytes().as_slice())
        .bind(lease.token.as_bytes().as_slice())
}

/// What a statement answers that is a part of the transaction, and of no other.
fn in_the_transaction(row: &PgRow) -> Result<&PgRow, SqlError> {
    if row.try_get(0)? {
        Ok(row)
    } else {
        Err(SqlError::ended())
    }
}

fn found(row: &PgRow) -> Result<Found, SqlError> {
    let digest = |text| -> Result<[u8; 32], SqlError> {
        let bytes = bytes(text)?.try_into();
        bytes.map_err(|_| SqlError::unreadable("no digest"))
    };
    Ok(Found {
        id: KeyId::from_bytes(digest(row.try_get(0)?)?),
        fingerprint: Fingerprint::from_bytes(digest(row.try_get(1)?)?),
        generation: row.try_get(2)?,
        lease_ends: row.try_get(3)?,
        // As it was asked: whoever takes it over writes it again.
        operation: unescape(row.try_get(4)?),
        seen: row.try_get(5)?,
    })
}

/// What `encode(.., 'escape')` made of a text. What it would not have made, as of a row that is not ours, stays as it is.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, behind @ ..] = rest {
        let (byte, behind) = match (first, behind) {
            (b'\\', [b'\\', behind @ ..]) => (b'\\', behind),
            (
                b'\\',
                &[
                    a @ b'0'..=b'3',
                    b @ b'0'..=b'7',
                    c @ b'0'..=b'7',
                    ref behind @ ..,
                ],
            ) => ((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'), behind),
            _ => (*first, behind),
        };
        bytes.push(byte);
        rest = behind;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn bytes(text: &str) -> Result<Vec<u8>, SqlError> {
    hex::decode(text).ok_or(SqlError::unreadable("no bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_escaped_is_as_it_was() {
        for (stored, asked) in [
            ("POST /rides", "POST /rides"),
            (r"/a\\b/\303\244", "/a\\b/ä"),
            (r"\\134", r"\134"),
            (r"\\\\", r"\\"),
            // Not ours.
            (r"\", r"\"),
            (r"\x\18\477", r"\x\18\477"),
            ("/ä", "/ä"),
            (r"\303", "\u{fffd}"),
        ] {
            assert_eq!(unescape(stored), asked, "{stored}");
        }
    }
}
