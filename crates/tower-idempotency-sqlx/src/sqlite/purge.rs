//! Deletion of expired entries, in statements that hold the connection for writes only for a short time.

use std::time::Duration;

use sqlx::Row as _;
use tokio::time::{Instant, sleep};

use super::Inner;
use crate::{
    SqlError,
    connection::Priority::Maintain,
    purger::{BATCH_SIZE, PAUSE},
};

/// Upper bound of a pause, because the process may have been stopped during the statement.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Result of one statement that deletes expired entries.
#[derive(Debug, PartialEq)]
pub(super) struct PurgedBatch {
    deleted: u32,
    /// `true` if more expired entries may be left.
    pub(super) has_more: bool,
}

/// The oldest expired entries that one statement may delete.
struct ExpiredRange {
    entries: u32,
    /// Expiry and ID of the last entry.
    last: (i64, Vec<u8>),
    /// `true` if the table may have more expired entries.
    has_more: bool,
}

impl Inner {
    /// Deletes at most `batch` expired entries, and returns their number.
    ///
    /// Pauses after each statement if more entries may be left, even after the last one. So a caller that repeats this call
    /// does not keep other processes from writing.
    pub(super) async fn purge(&self, batch: u32) -> Result<u64, SqlError> {
        let mut rest = batch;
        while rest > 0 {
            let began = Instant::now();
            let purged = self.purge_batch(rest.min(BATCH_SIZE)).await?;
            rest = rest.saturating_sub(purged.deleted);
            if !purged.has_more {
                break;
            }
            sleep((began.elapsed() * PAUSE).min(MAX_PAUSE)).await;
        }
        Ok(u64::from(batch - rest))
    }

    /// Deletes at most `max` expired entries, with one statement.
    pub(super) async fn purge_batch(&self, max: u32) -> Result<PurgedBatch, SqlError> {
        let (mut deleted, mut has_more) = (0, false);
        if let Some(range) = self.read_expired(max).await? {
            deleted = self.delete_expired(&range).await?;
            has_more = range.has_more;
        }
        Ok(PurgedBatch { deleted, has_more })
    }

    /// Returns the oldest expired entries: at most `max`, and at most [`BATCH_BYTES`] or one larger entry. Reads them without the
    /// lock for writes.
    async fn read_expired(&self, max: u32) -> Result<Option<ExpiredRange>, SqlError> {
        let read = sqlx::query(self.statements.read_expired.clone()).bind(max);
        let rows = self.readers.fetch_all(Maintain, read).await?;
        let (mut entries, mut bytes, mut last) = (0, 0, None);
        for row in &rows {
            bytes += row.try_get::<i64, _>(2)?;
            if last.is_some() && bytes > BATCH_BYTES {
                break;
            }
            (entries, last) = (entries + 1, Some(row));
        }
        let Some(last) = last else {
            return Ok(None);
        };
        let found = u32::try_from(rows.len()).unwrap_or(u32::MAX);
        Ok(Some(ExpiredRange {
            entries,
            last: (last.try_get(0)?, last.try_get(1)?),
            has_more: found >= max || entries < found,
        }))
    }

    /// Deletes the entries of the range that are still expired, and returns their number.
    async fn delete_expired(&self, range: &ExpiredRange) -> Result<u32, SqlError> {
        let (expires, id) = &range.last;
        let delete = sqlx::query(self.statements.delete_expired.clone());
        let delete = delete.bind(expires).bind(id).bind(range.entries);
        let deleted = self.writer.fetch_all(Maintain, delete).await?;
        Ok(u32::try_from(deleted.len()).unwrap_or(u32::MAX))
    }
}

/// Maximum size of the records and checkpoints that one statement deletes, unless it deletes only one entry.
///
/// SQLite reads the pages of a deleted record twice: for the index of records that need attention, and to free them. On one
/// machine, 4 MiB took 3 to 12 ms, and up to 50 ms if the file was not in memory.
const BATCH_BYTES: i64 = 4 << 20;

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use sqlx::{AssertSqlSafe, SqlSafeStr as _};

    use super::*;
    use crate::{SqliteStore, sqlite::statements::NOW};

    /// A store in a directory, which the drop removes.
    struct Fixture {
        store: SqliteStore,
        directory: PathBuf,
    }

    impl Fixture {
        async fn new(name: &str) -> Self {
            let name = format!("tower-idempotency-purge-{name}-{}", std::process::id());
            let directory = std::env::temp_dir().join(name);
            fs::create_dir_all(&directory).expect("a directory for throwaway files");
            let store = SqliteStore::in_file(directory.join("keys.db"));
            store.migrate().await.expect("the file can be written");
            Self { store, directory }
        }

        fn inner(&self) -> &Inner {
            &self.store.inner
        }

        async fn execute(&self, sql: String) {
            let query = sqlx::query(AssertSqlSafe(sql).into_sql_str());
            let executed = self.inner().writer.fetch_all(Maintain, query).await;
            executed.expect("the file can be written");
        }

        /// Adds an entry that expired this number of milliseconds ago.
        async fn add_expired(&self, age: usize, record: Option<usize>, checkpoint: usize) {
            let record = record.map_or("null".to_owned(), |bytes| format!("zeroblob({bytes})"));
            let insert = format!(
                "insert into tower_idempotency
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation,
   checkpoint, checkpoint_data, record)
select randomblob(32), randomblob(16), randomblob(32), 1, 0, 0, {NOW} - {age}, 0, iif(record is null, null, 0), '', '',
  'phase', zeroblob({checkpoint}), record
from (select {record} as record)"
            );
            self.execute(insert).await;
        }

        async fn add_small_expired(&self, entries: usize) {
            for n in 0..entries {
                self.add_expired(HOUR - n, Some(10), 0).await;
            }
        }

        async fn range(&self) -> ExpiredRange {
            let range = self.inner().read_expired(100).await;
            range.expect("the file can be read").expect("an entry")
        }

        async fn delete(&self, range: &ExpiredRange) -> u32 {
            let deleted = self.inner().delete_expired(range).await;
            deleted.expect("the file can be written")
        }
    }

    impl Drop for Fixture {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.directory).ok();
        }
    }

    #[tokio::test]
    async fn statement_deletes_few_large_entries() {
        let fixture = Fixture::new("large").await;
        let sizes = [
            (Some(MIB), 0),
            (Some(MIB), 0),
            (Some(MIB), 0),
            (Some(MIB), 0),
            (Some(MIB), 0),
            (Some(MIB), 0),
            (Some(5 * MIB), 0),
            (None, 3 * MIB),
            (Some(2 * MIB), 0),
            (Some(100), 0),
        ];
        for (n, (record, checkpoint)) in sizes.into_iter().enumerate() {
            fixture.add_expired(HOUR - n, record, checkpoint).await;
        }
        for (deleted, has_more) in [
            (4, true),
            (2, true),
            (1, true),
            (1, true),
            (2, false),
            (0, false),
        ] {
            let purged = fixture.inner().purge_batch(100).await;
            let purged = purged.expect("the file can be written");
            assert_eq!(purged, PurgedBatch { deleted, has_more });
        }
    }

    #[tokio::test]
    async fn purge_repeats_statement() {
        let fixture = Fixture::new("repeated").await;
        for n in 0..10 {
            fixture.add_expired(HOUR - n, Some(MIB), 0).await;
        }
        for (batch, deleted) in [(7, 7), (0, 0), (u32::MAX, 3), (1, 0)] {
            let purged = fixture.store.purge_expired(batch).await;
            assert_eq!(purged.expect("the file can be written"), deleted);
        }
    }

    #[tokio::test]
    async fn entry_leased_after_read_is_not_deleted() {
        let fixture = Fixture::new("leased").await;
        fixture.add_small_expired(3).await;
        let range = fixture.range().await;
        let lease = format!(
            "update tower_idempotency set expires = {NOW} + 100000
where expires = (select min(expires) from tower_idempotency)"
        );
        fixture.execute(lease).await;
        assert_eq!(fixture.delete(&range).await, 2);
    }

    /// An entry with a short retention may be committed after its expiry, and after the read.
    #[tokio::test]
    async fn entry_added_after_read_is_not_counted() {
        let fixture = Fixture::new("added").await;
        fixture.add_small_expired(2).await;
        let range = fixture.range().await;
        fixture.add_expired(2 * HOUR, Some(10), 0).await;
        fixture.add_expired(1, Some(10), 0).await;
        assert_eq!(fixture.delete(&range).await, 2);
        let rest = ExpiredRange {
            entries: 100,
            ..range
        };
        assert_eq!(fixture.delete(&rest).await, 1);
    }

    #[tokio::test]
    async fn clock_set_back_after_read_keeps_entries() {
        let fixture = Fixture::new("clock").await;
        fixture.add_small_expired(2).await;
        let read = fixture.range().await;
        let later = format!("update tower_idempotency set expires = {NOW} + 100000");
        fixture.execute(later).await;
        let range = ExpiredRange {
            last: (i64::MAX, read.last.1),
            ..read
        };
        assert_eq!(fixture.delete(&range).await, 0);
    }

    const MIB: usize = 1 << 20;
    /// In milliseconds.
    const HOUR: usize = 3_600_000;
}
