//! Access for operators: entries in the order of their deadlines, and changes under a condition.
//!
//! [`Inspect`](crate::inspect::Inspect) interprets the entries: this module knows no records and no states of operators.

use std::{hash::BuildHasher, mem, sync::atomic::Ordering::Relaxed};

use bytes::Bytes;

use super::{
    MemoryStore,
    budget::Cost,
    entry::{EntryState, Millis, nanos},
    shard::Shard,
    table::{Table, wake},
};
use crate::store::{Fingerprint, KeyId, StoreError, Token, Ttl};

/// The maximum number of entries read under one lock.
#[cfg(not(all(test, shuttle)))]
const ENTRIES_PER_LOCK: usize = 1024;
#[cfg(all(test, shuttle))]
const ENTRIES_PER_LOCK: usize = 2;

/// The number of bytes in records after which no more expired entries are deleted under one lock.
const BYTES_PER_LOCK: usize = 1 << 20;

/// An entry at the time of a call. Times are nanoseconds since the store was created.
pub(crate) struct Snapshot {
    pub(crate) id: KeyId,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) token: Option<Token>,
    pub(crate) generation: u64,
    pub(crate) since: u64,
    /// Expiry of the lease. `None` for an entry with a record.
    pub(crate) lease_expires: Option<u64>,
    pub(crate) expires: u64,
    pub(crate) record: Option<Bytes>,
    pub(crate) owner: &'static str,
    pub(crate) operation: Box<str>,
    /// Known without details too.
    pub(crate) is_of_run_once: bool,
    pub(crate) position: ListPosition,
}

/// Position of an entry in the order of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ListPosition {
    pub(crate) shard: u16,
    pub(crate) deadline: u64,
    pub(crate) slot: u32,
}

/// Kind of entries, each with an order of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListKind {
    /// Leases and orphans, by the expiry of the orphan.
    Leases,
    /// Entries with a record, by the expiry of the record.
    Records,
}

/// Change of an entry by an operator.
#[derive(Clone)]
pub(crate) enum Change {
    Delete,
    /// Leaves an orphan under this token. The retention is used for an entry that has stored none.
    Orphan {
        token: Token,
        retention: Ttl,
    },
    /// Completes the entry. The record owns its buffer, because the store counts it by its length.
    Complete {
        token: Token,
        record: Bytes,
        retention: Ttl,
    },
}

/// Expired entries that were deleted.
#[derive(Default)]
pub(crate) struct Deleted {
    pub(crate) entries: usize,
    /// The length of their records.
    pub(crate) bytes: usize,
    /// `true` if no expired entry is left in the shard.
    pub(crate) is_exhausted: bool,
}

impl MemoryStore {
    /// Stores owner and operation of each key, for [operators](crate::inspect). Default: neither is stored, and the entries of
    /// [`run_once`](crate::IdempotencyLayer::run_once) and of items have the operation `run_once`.
    ///
    /// Each entry then takes 96 bytes more, and the bytes of its operation. These bytes count in the byte limit. Applies to
    /// all clones, and to keys that are used from now on.
    pub fn with_details(self) -> Self {
        self.table.shared.has_details.store(1, Relaxed);
        self
    }

    pub(crate) fn has_details(&self) -> bool {
        self.table.shared.has_details.load(Relaxed) == 1
    }

    pub(crate) fn snapshot(&self, id: &KeyId, now: u64) -> Option<Snapshot> {
        let table = &*self.table;
        let hash = table.shared.hasher.hash_one(id);
        let mut shard = table.shard(hash);
        let slot = shard.find(&table.shared, hash, id, now)?;
        Some(snapshot(&shard, 0, slot))
    }

    /// Returns entries of this kind at or after `first` that have not expired, from one shard, in order. The second value is the
    /// position to continue from, or `None` if that was the last shard.
    pub(crate) fn snapshots(
        &self,
        kind: ListKind,
        first: ListPosition,
        now: u64,
    ) -> (Vec<Snapshot>, Option<ListPosition>) {
        let table = &*self.table;
        let index = usize::from(first.shard);
        if index >= table.shards.len() {
            return (Vec::new(), None);
        }
        let shard = table.shard_at(index);
        // Expired entries are at the beginning.
        let start = (first.deadline, first.slot).max((now.saturating_add(1), 0));
        let mut slots = shard.iter_from(kind == ListKind::Records, start);
        let slots_now = slots.by_ref().take(ENTRIES_PER_LOCK);
        let found: Vec<_> = slots_now
            .map(|(_, slot)| snapshot(&shard, first.shard, slot))
            .collect();
        let next = match slots.next() {
            Some((deadline, slot)) => Some(ListPosition {
                shard: first.shard,
                deadline,
                slot,
            }),
            None => (index + 1 < table.shards.len()).then(|| ListPosition {
                shard: first.shard + 1,
                deadline: 0,
                slot: 0,
            }),
        };
        (found, next)
    }

    /// Changes the entry if it exists and meets the condition. Returns `false` otherwise. Evicts no record, so the bytes can
    /// exceed their limit until a later claim or completion evicts records.
    pub(crate) fn change(
        &self,
        id: &KeyId,
        condition: impl Fn(&Snapshot) -> bool,
        change: &Change,
        now: u64,
    ) -> Result<bool, StoreError> {
        self.table.change(id, &condition, change, now)
    }

    /// Deletes at most `max` expired entries of a shard, and stops after records of 1 MiB. Returns `None` if there is no such
    /// shard.
    pub(crate) fn delete_expired(&self, shard: usize, max: usize, now: u64) -> Option<Deleted> {
        let table = &*self.table;
        if shard >= table.shards.len() {
            return None;
        }
        let mut shard = table.shard_at(shard);
        let mut deleted = Deleted::default();
        while deleted.entries < max && deleted.bytes < BYTES_PER_LOCK {
            let firsts = [shard.first_lease(), shard.first_record()];
            let expired = firsts.into_iter().flatten().find(|(at, _)| *at <= now);
            let Some((_, slot)) = expired else {
                deleted.is_exhausted = true;
                break;
            };
            deleted.entries += 1;
            deleted.bytes += record_len(&shard, slot);
            shard.remove(&table.shared, slot);
        }
        Some(deleted)
    }

    /// Returns a number that differs from that of any other store.
    pub(crate) fn instance(&self) -> u64 {
        self.table.shared.hasher.hash_one("instance")
    }
}

impl Table {
    pub(super) fn change(
        &self,
        id: &KeyId,
        condition: &dyn Fn(&Snapshot) -> bool,
        change: &Change,
        now: u64,
    ) -> Result<bool, StoreError> {
        let shared = &self.shared;
        let hash = shared.hasher.hash_one(id);
        let mut shard = self.shard(hash);
        let Some(slot) = shard.find(shared, hash, id, now) else {
            return Ok(false);
        };
        if !condition(&snapshot(&shard, 0, slot)) {
            return Ok(false);
        }
        let before = record_len(&shard, slot);
        let replaced = match change {
            Change::Delete => {
                let waiters = shard.take_waiters(slot);
                shard.remove(shared, slot);
                drop(shard);
                wake(waiters);
                return Ok(true);
            }
            Change::Orphan { token, retention } => shard.update(shared, slot, |entry| {
                let retention = match entry.state {
                    EntryState::Leased {
                        lease_expires,
                        orphan_expires,
                        ..
                    } => orphan_expires - lease_expires,
                    EntryState::Completed { .. } => nanos(*retention),
                };
                entry.set_token(*token);
                let orphan = EntryState::Leased {
                    lease_expires: now,
                    orphan_expires: now.saturating_add(retention),
                    released: false,
                };
                mem::replace(&mut entry.state, orphan)
            }),
            Change::Complete {
                token,
                record,
                retention,
            } => {
                let limit = shared.budget.largest_record(shard.details_cost(slot));
                if record.len() > limit {
                    return Err(StoreError::RecordTooLarge { limit });
                }
                // A reservation could evict this very entry, and would fail in a store full of orphans. The next claim or
                // completion evicts records if the limit is exceeded, also this one if there is no other.
                shared.budget.add(Cost::record(record.len()));
                let completed = EntryState::Completed {
                    record: record.clone(),
                    expires: now.saturating_add(nanos(*retention)),
                };
                shard.update(shared, slot, |entry| {
                    entry.set_token(*token);
                    entry.since = Millis::from_nanos(now);
                    mem::replace(&mut entry.state, completed)
                })
            }
        };
        shard.free_later(replaced);
        shared.budget.release(Cost::record(before));
        let waiters = shard.take_waiters(slot);
        drop(shard);
        wake(waiters);
        Ok(true)
    }
}

fn snapshot(shard: &Shard, index: u16, slot: u32) -> Snapshot {
    let entry = shard.entry(slot);
    let (lease_expires, record) = match &entry.state {
        EntryState::Leased { lease_expires, .. } => (Some(*lease_expires), None),
        EntryState::Completed { record, .. } => (None, Some(record.clone())),
    };
    let details = shard.details(slot);
    Snapshot {
        id: entry.id,
        fingerprint: entry.fingerprint,
        token: entry.holder(),
        generation: entry.generation.get(),
        since: entry.since.as_nanos(),
        lease_expires,
        expires: entry.state.deadline(),
        record,
        owner: details.map_or("", |details| details.owner),
        operation: details.map_or_else(Box::default, |details| details.operation.clone()),
        is_of_run_once: entry.is_of_run_once,
        position: ListPosition {
            shard: index,
            deadline: entry.state.deadline(),
            slot,
        },
    }
}

fn record_len(shard: &Shard, slot: u32) -> usize {
    match &shard.entry(slot).state {
        EntryState::Leased { .. } => 0,
        EntryState::Completed { record, .. } => record.len(),
    }
}
