//! Lists of entries in progress and of entries that need attention, read page by page from the index.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tower_idempotency::store::KeyId;

use crate::{
    clock::Moment,
    error::{DynamoDbError, DynamoDbErrorKind},
    item::{IN_PROGRESS, INDEX, Item, NEEDS_ATTENTION, bytes, index_partition, number, s, text},
    store::DynamoDbStore,
};

/// An entry that is in progress or needs attention, as the index shows it. The index lags slightly behind the table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// ID of the entry. The logs show its first digits.
    pub id: KeyId,
    /// Host and process that acquired the lease last.
    pub owner: String,
    /// Operation being executed: method and route, or `run_once`.
    pub operation: String,
    /// Generation of the lease: 1, plus one for each takeover.
    pub generation: u64,
    /// Time of the first lease on the key. For an entry that needs attention, the time since when it does.
    pub since: SystemTime,
    /// Time by which an outcome or a renewal is or was due.
    pub lease_ends: SystemTime,
    /// Time since `lease_ends` by this process's clock, if that has passed.
    ///
    /// An entry in progress is an orphan if this is more than the allowed skew. An entry that needs attention has had no
    /// outcome for clients for this long.
    pub overdue: Option<Duration>,
    /// Reason code of an entry that needs attention, if the index has it.
    pub reason: Option<String>,
    pub(crate) shard: u16,
}

/// A list of entries that is read page by page.
///
/// The list goes through the index partition by partition, each with the oldest entry first. A page takes one `Query` or a
/// few, and never a `Scan`. The table itself is not read.
#[derive(Clone, Debug)]
pub struct Listing {
    store: DynamoDbStore,
    status: &'static str,
    page: u16,
    shard: u16,
    start_key: Option<Item>,
    unreadable: UnreadableEntries,
}

/// Entries that could not be read so far.
#[derive(Clone, Debug, Default)]
struct UnreadableEntries {
    count: u64,
    /// Error of the first of them.
    first_error: String,
}

impl DynamoDbStore {
    /// Lists entries that are in progress or orphaned, at most `page` entries per page (at least one).
    ///
    /// Makes no call before the first [`next`](Listing::next).
    #[must_use]
    pub fn in_progress(&self, page: u16) -> Listing {
        self.list(IN_PROGRESS, page)
    }

    /// Lists entries that ended with [`NeedsAttention`](tower_idempotency::NeedsAttention) and are not
    /// [resolved](Self::resolve), at most `page` entries per page (at least one).
    ///
    /// Makes no call before the first [`next`](Listing::next).
    #[must_use]
    pub fn needs_attention(&self, page: u16) -> Listing {
        self.list(NEEDS_ATTENTION, page)
    }

    fn list(&self, status: &'static str, page: u16) -> Listing {
        Listing {
            store: self.clone(),
            status,
            page: page.max(1),
            shard: 0,
            start_key: None,
            unreadable: UnreadableEntries::default(),
        }
    }
}

impl Listing {
    /// Returns the next page, which is never empty, or `None` after the last one.
    ///
    /// # Errors
    ///
    /// [`DynamoDbError`] if the service does not reply, or if the table has no index. Call again to read the same page.
    ///
    /// If this version cannot read some entries, one error of the kind `Unusable` follows the last page. It contains their
    /// number; all other entries have been listed by then.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the next call reads the same page.
    pub async fn next(&mut self) -> Result<Option<Vec<Entry>>, DynamoDbError> {
        let inner = &self.store.inner;
        while self.shard < inner.options.shards {
            let query = inner
                .admin_client
                .query()
                .table_name(&inner.table)
                .index_name(INDEX)
                .key_condition_expression("#listed = :listed")
                .expression_attribute_names("#listed", "listed")
                .expression_attribute_values(":listed", s(index_partition(self.status, self.shard)))
                .limit(i32::from(self.page))
                .set_exclusive_start_key(self.start_key.clone());
            let page = Box::pin(query.send()).await;
            let page = page.map_err(|error| DynamoDbError::from_item_call(&error))?;
            let moment = inner.options.clock.read();
            let entries = page.items.unwrap_or_default().into_iter();
            let entries = entries.map(|item| Entry::read(item, self.shard, moment));
            let entries: Vec<_> = entries
                .filter_map(|entry| self.unreadable.ok_or_skip(entry).flatten())
                .collect();
            self.start_key = page.last_evaluated_key.filter(|key| !key.is_empty());
            if self.start_key.is_none() {
                self.shard += 1;
            }
            if !entries.is_empty() {
                return Ok(Some(entries));
            }
        }
        let unreadable = std::mem::take(&mut self.unreadable);
        unreadable.into_result().map(|()| None)
    }
}

impl UnreadableEntries {
    /// Returns the value if it was read. Otherwise counts the error and returns `None`.
    fn ok_or_skip<T>(&mut self, result: Result<T, DynamoDbError>) -> Option<T> {
        let error = match result {
            Ok(value) => return Some(value),
            Err(error) => error,
        };
        if self.count == 0 {
            self.first_error = error.to_string();
        }
        self.count += 1;
        None
    }

    fn into_result(self) -> Result<(), DynamoDbError> {
        let Self { count, first_error } = self;
        if count == 0 {
            return Ok(());
        }
        let message = format!("{count} entries of the index cannot be read: {first_error}");
        Err(DynamoDbError::new(DynamoDbErrorKind::Unusable, message))
    }
}

impl Entry {
    /// Reads an entry from an item of the index. Returns `None` if the entry has expired.
    fn read(mut item: Item, shard: u16, moment: Moment) -> Result<Option<Self>, DynamoDbError> {
        if number(&item, "expires")? <= moment.passed {
            return Ok(None);
        }
        let lease_ends = number(&item, "lease_ends")?;
        let time = |millis| UNIX_EPOCH + Duration::from_millis(millis);
        Ok(Some(Self {
            id: KeyId::from_bytes(bytes(&mut item, "id")?),
            owner: text(&item, "owner")?.to_owned(),
            operation: text(&item, "operation")?.to_owned(),
            generation: number(&item, "generation")?,
            since: time(number(&item, "since")?),
            lease_ends: time(lease_ends),
            overdue: Some(moment.since(lease_ends)).filter(|it| !it.is_zero()),
            // The index of an older table may not include this attribute.
            reason: text(&item, "reason").ok().map(str::to_owned),
            shard,
        }))
    }
}
