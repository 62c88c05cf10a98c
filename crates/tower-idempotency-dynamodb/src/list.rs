//! What is in progress, and what needs attention, for operators: read from the index, page by page.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tower_idempotency::store::KeyId;

use crate::{
    DynamoDbError, DynamoDbErrorKind, DynamoDbStore,
    clock::Moment,
    item::{IN_PROGRESS, Item, NEEDS_ATTENTION, bytes, number, s, text},
};

/// An entry in progress, or one that needs attention, as the index knows it: some moments after the table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// Which entry. Its first digits are in the logs.
    pub id: KeyId,
    /// Who took the lease last: host and process.
    pub owner: String,
    /// What is being executed: method and path, or `run_once`.
    pub operation: String,
    /// 1, and one more with each takeover.
    pub generation: u64,
    /// When the key was first leased; of what needs attention, since when it does.
    pub since: SystemTime,
    /// When an outcome or a renewal is, or was, expected.
    pub lease_ends: SystemTime,
    /// For how long there has been neither, by this process's clock. What is in progress is an orphan, if it is more than
    /// the allowed skew; what needs attention has so long been without an outcome that can be told.
    pub overdue: Option<Duration>,
    /// The code of what needs attention, if the index has it.
    pub reason: Option<String>,
    pub(crate) shard: u16,
}

/// A list that is read page by page.
///
/// A partition of the index after another, in each the oldest entry first. Each page is one `Query` or a few, and never
/// a `Scan`; the table itself is not read.
#[derive(Clone, Debug)]
pub struct Listing {
    store: DynamoDbStore,
    status: &'static str,
    page: u16,
    shard: u16,
    after: Option<Item>,
    unread: Unread,
}

/// What could not be read so far.
#[derive(Clone, Debug, Default)]
struct Unread {
    entries: u64,
    /// Why the first of them could not be.
    why: String,
}

impl DynamoDbStore {
    /// What is in progress or was left behind, at most `page` entries at a time (at least one).
    ///
    /// Nothing is asked before the first [`next`](Listing::next).
    #[must_use]
    pub fn in_progress(&self, page: u16) -> Listing {
        self.list(IN_PROGRESS, page)
    }

    /// What ended with [`NeedsAttention`](tower_idempotency::NeedsAttention) and was not [resolved](Self::resolve), at most
    /// `page` entries at a time (at least one).
    ///
    /// Nothing is asked before the first [`next`](Listing::next).
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
            after: None,
            unread: Unread::default(),
        }
    }
}

impl Listing {
    /// The next page, which is never empty; nothing once there is no more.
    ///
    /// # Errors
    ///
    /// [`DynamoDbError`] when the service does not answer, or the table has no index: the same page can be asked for
    /// again. After the last page once, and of the kind `Unusable`, when there were entries that this version cannot read: it
    /// says how many, and all others have been listed by then.
    ///
    /// # Cancellation
    ///
    /// A page whose call is dropped is the next one's.
    pub async fn next(&mut self) -> Result<Option<Vec<Entry>>, DynamoDbError> {
        let inner = &self.store.inner;
        while self.shard < inner.options.shards {
            let query = inner
                .theirs
                .query()
                .table_name(&inner.table)
                .index_name(INDEX)
                .key_condition_expression("#listed = :listed")
                .expression_attribute_names("#listed", "listed")
                .expression_attribute_values(":listed", s(partition(self.status, self.shard)))
                .limit(i32::from(self.page))
                .set_exclusive_start_key(self.after.clone());
            let found = Box::pin(query.send()).await;
            let found = found.map_err(|error| DynamoDbError::call(&error))?;
            let moment = inner.options.clock.read();
            let entries = found.items.unwrap_or_default().into_iter();
            let entries = entries.map(|item| Entry::read(item, self.shard, moment));
            let entries: Vec<_> = entries
                .filter_map(|entry| self.unread.but(entry).flatten())
                .collect();
            self.after = found.last_evaluated_key.filter(|key| !key.is_empty());
            if self.after.is_none() {
                self.shard += 1;
            }
            if !entries.is_empty() {
                return Ok(Some(entries));
            }
        }
        std::mem::take(&mut self.unread).told().map(|()| None)
    }
}

impl Unread {
    /// What was read, or nothing and counted.
    fn but<T>(&mut self, read: Result<T, DynamoDbError>) -> Option<T> {
        let error = match read {
            Ok(read) => return Some(read),
            Err(error) => error,
        };
        if self.entries == 0 {
            self.why = error.to_string();
        }
        self.entries += 1;
        None
    }

    fn told(self) -> Result<(), DynamoDbError> {
        let Self { entries, why } = self;
        if entries == 0 {
            return Ok(());
        }
        let message = format!("{entries} entries of the index cannot be read: {why}");
        Err(DynamoDbError::new(DynamoDbErrorKind::Unusable, message))
    }
}

impl Entry {
    /// Nothing, if the entry is to be remembered no longer.
    fn read(mut item: Item, shard: u16, moment: Moment) -> Result<Option<Self>, DynamoDbError> {
        if number(&item, "expires")? <= moment.over {
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
            // A table that was made without it has an index without it.
            reason: text(&item, "reason").ok().map(str::to_owned),
            shard,
        }))
    }
}

/// The value of `listed`: which entries, and which part of them.
pub(crate) fn partition(status: &str, shard: u16) -> String {
    format!("{status}#{shard}")
}

/// The name of the index.
pub(crate) const INDEX: &str = "listed";
