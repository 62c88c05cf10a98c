//! Operations for operators: [`Inspect`] for the store.
//!
//! A listing reads the sorted sets of [`Indexes`], and then each entry. A resolution reads the entry, and
//! runs one script under the condition that nothing has changed since.

mod entry;
mod repair;
mod walk;

use std::collections::HashSet;

use futures_util::future::try_join_all;
use redis::{RedisResult, Value};
use tower_idempotency::{
    inspect::{
        Abilities, Count, DEFAULT_ORPHAN_RETENTION, Entry, EntryDetails, Inspect, InspectError,
        InspectErrorKind, Page, PageToken, Query, Resolution, ResolveOutcome, Seen, State, Summary,
    },
    store::{Fingerprint, KeyId, StoreError, Token},
};

pub use self::repair::IndexRepair;
use self::{
    entry::{RawEntry, RecordPart},
    walk::{Position, Walk},
};
use crate::{
    index::Indexes,
    store::{Inner, RedisStore, is_slot_moving, run_by_hash, unexpected_reply},
};

/// Lists entries in progress, orphans and entries that need attention, unless the store has [no
/// indexes](crate::RedisOptions::with_indexes). Completed entries are listed if the store has [an index of
/// them](crate::RedisOptions::with_completed_index); `get` always returns them.
///
/// A listing uses no `SCAN` and no `KEYS`. Leases with similar orphan retentions are listed together, in the order of their
/// expiry. Records that need attention are listed in the order of their time, and completed entries in the order of their
/// expiry.
///
/// In a cluster, each of the 16,384 slots has its own indexes. A listing examines 256 of them with one call, and is
/// ordered only within a slot. An entry may be acquired while its slot moves to another node. A listing then has it after
/// the next renewal of its lease, or after a takeover.
///
/// A call of a listing ends with the record that exceeds 1 MiB of records, so that the server serves other clients in between.
/// `summary` reads no record above 4 KiB. It counts such an entry as completed, even if this version cannot read its record.
///
/// A listing removes index members whose entries no longer exist. If a [retry](Resolution::Retry) resolves an entry that
/// needed attention, the age of its next execution counts from that record.
///
/// A resolution does not wait for [replicas](crate::RedisOptions::with_wait). Redis deletes expired entries itself, so
/// [`purge`](Inspect::purge) deletes none.
impl Inspect for RedisStore {
    fn abilities(&self) -> Abilities {
        let mut abilities = Abilities::all().without_purge();
        let indexes = self.inner.indexes.as_ref();
        if !indexes.is_some_and(Indexes::has_completed) {
            let setting = "RedisOptions::with_completed_index(true)";
            abilities = abilities.without_list_unless(State::Completed, setting);
        }
        // `with_completed_index` has no effect without `with_indexes`.
        if indexes.is_none() {
            for state in [
                State::InProgress,
                State::Orphaned,
                State::NeedsAttention,
                State::Completed,
            ] {
                let setting = "RedisOptions::with_indexes(true)";
                abilities = abilities.without_list_unless(state, setting);
            }
        }
        abilities
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        self.abilities().check(query)?;
        let unsupported = || InspectError::new(InspectErrorKind::Unsupported);
        let indexes = self.inner.indexes.as_ref().ok_or_else(unsupported)?;
        Box::pin(self.inner.list(indexes, query)).await
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        let Some(raw) = self.inner.read(id, RecordPart::Whole).await? else {
            return Ok(None);
        };
        let mut details = EntryDetails::new(raw.entry(*id));
        details.fingerprint = raw.fingerprint().map(Fingerprint::from_bytes);
        details.record = raw.record.map(Into::into);
        Ok(Some(details))
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        let mut summary = Summary::default();
        if let Some(indexes) = &self.inner.indexes {
            let abilities = self.abilities();
            for &state in State::ALL {
                if !abilities.can_list(state) {
                    continue;
                }
                let count = Box::pin(self.inner.count(indexes, state, limit)).await?;
                summary.set(state, count);
            }
        }
        Ok(summary)
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        resolution.check(seen)?;
        Box::pin(self.inner.resolve(seen, resolution)).await
    }

    async fn purge(&self, _batch: u32) -> Result<u64, InspectError> {
        Ok(0)
    }
}

impl Inner {
    async fn list(&self, indexes: &Indexes, query: &Query) -> Result<Page, InspectError> {
        let origin = format!("redis {}", self.options.prefix);
        let start = match query.page() {
            None => Position::FIRST,
            Some(page) => Position::parse(page.position(&origin, query)?)
                .filter(|position| position.index < indexes.len())
                .ok_or_else(|| InspectError::new(InspectErrorKind::InvalidPage))?,
        };
        let mut walk = Walk::new(self, indexes, query.state(), RecordPart::Beginning, start);
        if let Some(prefix) = query.id_prefix() {
            walk.select(*prefix);
        }
        let limit = usize::from(query.limit());
        // A lease that is renewed meanwhile moves to a later position of its index.
        let mut listed = HashSet::new();
        let mut entries = Vec::new();
        let mut after = start;
        while walk.examined() <= MAX_EXAMINED {
            let group = walk.next(GROUP.min(limit + 1)).await?;
            if group.is_empty() && walk.is_finished() {
                return Ok(Page::new(entries, None));
            }
            for (position, entry) in group {
                let is_new = |entry: &Entry| query.matches(entry) && listed.insert(*entry.id());
                if let Some(entry) = entry.filter(is_new) {
                    if entries.len() == limit {
                        let next = PageToken::new(&origin, query, &after.to_bytes());
                        return Ok(Page::new(entries, Some(next)));
                    }
                    entries.push(entry);
                }
                after = position;
            }
            if walk.is_queue_empty() {
                after = walk.position();
            }
        }
        let next = PageToken::new(&origin, query, &after.to_bytes());
        Ok(Page::new(entries, Some(next)))
    }

    /// Counts the entries in a state, up to `limit`. Reads each of them, because an index may have members whose entries were
    /// lost. Does not read long records.
    async fn count(
        &self,
        indexes: &Indexes,
        state: State,
        limit: u32,
    ) -> Result<Count, InspectError> {
        let limit = u64::from(limit);
        let max_examined = limit.saturating_mul(4).saturating_add(1024);
        let mut walk = Walk::new(
            self,
            indexes,
            state,
            RecordPart::BeginningIfShort,
            Position::FIRST,
        );
        // A lease that is renewed meanwhile moves to a later position of its index.
        let mut counted = HashSet::new();
        let mut value = 0;
        loop {
            let group = walk.next(GROUP).await?;
            if group.is_empty() && walk.is_finished() {
                return Ok(Count::new(value, true));
            }
            for (_, entry) in group {
                if entry.is_some_and(|it| it.state() == state && counted.insert(*it.id())) {
                    if value == limit {
                        return Ok(Count::new(value, false));
                    }
                    value += 1;
                }
            }
            if walk.examined() as u64 > max_examined {
                return Ok(Count::new(value, false));
            }
        }
    }

    /// Reads an entry, with this part of its record.
    async fn read(&self, id: &KeyId, part: RecordPart) -> Result<Option<RawEntry>, StoreError> {
        let read = self.read_script(&[*id], part).await;
        let mut entries = read.map_err(StoreError::backend)??;
        entries.pop().ok_or_else(|| unexpected_reply("an entry"))
    }

    /// Reads entries of one slot, with this part of their records. Repeats the call if long records end it early. While the
    /// slot is being moved, each call reads one entry.
    async fn read_all(
        &self,
        ids: &[KeyId],
        part: RecordPart,
    ) -> Result<Vec<Option<RawEntry>>, StoreError> {
        let mut entries = Vec::with_capacity(ids.len());
        while entries.len() < ids.len() {
            let rest = &ids[entries.len()..];
            let read = match self.read_script(rest, part).await {
                Err(error) if rest.len() > 1 && is_slot_moving(&error) => {
                    try_join_all(rest.iter().map(|id| self.read(id, part))).await?
                }
                read => read.map_err(StoreError::backend)??,
            };
            entries.extend(read);
        }
        Ok(entries)
    }

    /// Reads as many entries as one call permits, at least one, from the beginning of `ids`.
    async fn read_script(
        &self,
        ids: &[KeyId],
        part: RecordPart,
    ) -> RedisResult<Result<Vec<Option<RawEntry>>, StoreError>> {
        let keys: Vec<_> = ids.iter().map(|id| self.key(id)).collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        let script = &self.scripts.operators.read;
        let (link, deadline) = (&self.acquire_link, self.deadline());
        let reply = run_by_hash(link, deadline, script, &keys, &part.arguments()).await?;
        Ok(match reply {
            Value::Array(entries) if (1..=ids.len()).contains(&entries.len()) => {
                entries.into_iter().map(RawEntry::parse).collect()
            }
            _ => Err(unexpected_reply("an array of entries")),
        })
    }

    async fn read_entry(&self, id: &KeyId) -> Result<Option<Entry>, StoreError> {
        let raw = self.read(id, RecordPart::Beginning).await?;
        Ok(raw.map(|raw| raw.entry(*id)))
    }

    /// Moves an entry to the index of its state. Ignores an error, so that a user who may not write can list entries.
    async fn reindex(&self, id: &KeyId) {
        let (keys, script) = (self.keys(id), &self.scripts.operators.reindex);
        if keys.indexes.is_some() {
            let (link, deadline) = (&self.acquire_link, self.deadline());
            let arguments = &id.as_bytes();
            let moved = self.run_script(link, deadline, script, &keys, arguments);
            moved.await.ok();
        }
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        let id = seen.id();
        let record = resolution.record(id);
        let limit = self.options.record_limit;
        if record.as_ref().is_some_and(|it| it.0.len() > limit) {
            return Err(InspectError::new(InspectErrorKind::RecordTooLarge {
                limit,
            }));
        }
        let Some(raw) = self.read(id, RecordPart::Beginning).await? else {
            return Ok(ResolveOutcome::Changed(None));
        };
        let entry = raw.entry(*id);
        if entry.seen() != seen {
            return Ok(ResolveOutcome::Changed(Some(Box::new(entry))));
        }
        let token = match resolution {
            Resolution::Retry => Token::retry_allowed()?,
            _ => Token::random()?,
        };
        let (decision, millis, record) = match (&record, resolution) {
            (Some((record, retention)), _) => ("complete", retention.as_millis(), &**record),
            (None, Resolution::Free | Resolution::DeleteRecord) => ("delete", 0, &b""[..]),
            (None, _) => ("orphan", DEFAULT_ORPHAN_RETENTION.as_millis(), &b""[..]),
        };
        let arguments = (
            raw.conditions(),
            raw.condition_of_state(seen.state()),
            decision,
            token.as_bytes(),
            millis,
            record,
            u8::from(self.can_publish),
            id.as_bytes(),
        );
        let (script, keys) = (&self.scripts.operators.resolve, self.keys(id));
        let (link, deadline) = (&self.lease_link, self.deadline());
        let reply = self.run_script(link, deadline, script, &keys, &arguments);
        let applied = match reply.await? {
            Value::Int(0) => false,
            Value::Int(1) => true,
            _ => return Err(unexpected_reply("0 or 1").into()),
        };
        let entry = self.read_entry(id).await?.map(Box::new);
        Ok(match applied {
            true if decision == "delete" => ResolveOutcome::Applied(None),
            true => ResolveOutcome::Applied(entry),
            false => ResolveOutcome::Changed(entry),
        })
    }
}

/// Number of entries that are read at the same time.
const GROUP: usize = 64;
/// Maximum number of members of the indexes that a page examines, besides one for each index.
const MAX_EXAMINED: usize = 8_000;
