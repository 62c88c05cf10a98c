//! A shard: its entries, their index by id, and their order by deadline.
//!
//! Every method runs under the shard's lock, so no method calls foreign code. A [`LockedShard`] frees removed records after
//! it has released the lock. The caller wakes waiters after that.

use std::{
    collections::BTreeMap,
    hash::BuildHasher,
    ops::{Deref, DerefMut},
    sync::Arc,
};

use bytes::Bytes;
use hashbrown::HashTable;
use smallvec::SmallVec;
use tokio::sync::Semaphore;

use super::{
    budget::{Budget, Cost},
    details::Details,
    entry::{Entry, EntryState, FIRST_LONGEST_DEADLINE, OrderPosition},
    evictions::Evictions,
    order::{Order, RecordOrder},
    slab::Slab,
    sync::{AtomicUsize, HashBuilder, MutexGuard},
    usage::{PrincipalGroup, Usage},
};
use crate::store::{KeyId, ScopeDigest};

/// The number of expired entries of each kind that a write removes: more than a write can add.
const EXPIRED_PER_WRITE: usize = 2;

/// State that all shards share.
pub(super) struct SharedState {
    pub(super) hasher: HashBuilder,
    pub(super) budget: Budget,
    /// Leases and orphans, and the records with a shorter retention than the longest.
    pub(super) usage: Usage,
    /// Records with the longest retention. They do not count for the eviction of other records, which are evicted first. Above
    /// half of the store they are evicted before others, so that one caller cannot use up the store with them.
    pub(super) longest: Usage,
    pub(super) evictions: Evictions,
    /// 1 if owner and operation of each entry are stored.
    pub(super) has_details: AtomicUsize,
}

impl SharedState {
    /// Returns the group of the principal.
    pub(super) fn group(&self, scope: Option<&ScopeDigest>) -> PrincipalGroup {
        PrincipalGroup::of(self.hasher.hash_one(scope))
    }

    /// Returns the counters of the records with the longest retention, or of all others.
    pub(super) const fn usage_of(&self, is_longest: bool) -> &Usage {
        if is_longest {
            &self.longest
        } else {
            &self.usage
        }
    }
}

/// Aligned, so that two shards never share a cache line.
#[repr(align(64))]
pub(super) struct Shard {
    index: HashTable<u32>,
    entries: Slab<Entry>,
    /// Records with a shorter retention than the longest.
    records: RecordOrder,
    /// Records with the longest retention. They expire after all others.
    longest: RecordOrder,
    /// Leases and orphans by the expiry of the orphan.
    leases: Order,
    /// Owner and operation by slot. Empty unless the store has details.
    details: BTreeMap<u32, Details>,
    /// Waiters by slot. Empty if no entry has a waiter.
    waiters: BTreeMap<u32, WaiterGroup>,
    /// A lower bound of all deadlines.
    earliest_deadline: u64,
}

/// The waiters for the entry in a slot.
pub(super) struct WaiterGroup {
    /// Has no permits and is closed when the entry changes. Unlike a notification, the closed state stays visible to a
    /// waiter that polls later.
    pub(super) event: Arc<Semaphore>,
    pub(super) count: usize,
}

impl Shard {
    pub(super) fn new() -> Self {
        Self {
            index: HashTable::new(),
            entries: Slab::new(),
            records: RecordOrder::new(),
            longest: RecordOrder::new(),
            leases: Order::new(),
            details: BTreeMap::new(),
            waiters: BTreeMap::new(),
            earliest_deadline: u64::MAX,
        }
    }

    pub(super) fn entry(&self, slot: u32) -> &Entry {
        self.entries.get(slot).expect(SLOT_IN_USE)
    }

    /// Adds an entry whose id is not present and whose cost is reserved.
    pub(super) fn insert(&mut self, shared: &SharedState, hash: u64, entry: Entry) -> u32 {
        let position = entry.position();
        let slot = self.entries.insert(entry);
        let entries = &self.entries;
        self.index.insert_unique(hash, slot, |slot| {
            let entry = entries.get(*slot).expect(SLOT_IN_USE);
            shared.hasher.hash_one(entry.id)
        });
        self.add_to_orders(shared, slot, &position);
        slot
    }

    /// Changes an entry and updates its position in the deadline order. Returns the output of `change`.
    pub(super) fn update<T>(
        &mut self,
        shared: &SharedState,
        slot: u32,
        change: impl FnOnce(&mut Entry) -> T,
    ) -> T {
        let entry = self.entries.get_mut(slot).expect(SLOT_IN_USE);
        let before = entry.position();
        let output = change(entry);
        let after = entry.position();
        if before != after {
            self.remove_from_orders(shared, slot, &before);
            self.add_to_orders(shared, slot, &after);
        }
        output
    }

    fn add_to_orders(&mut self, shared: &SharedState, slot: u32, position: &OrderPosition) {
        let OrderPosition {
            group, deadline, ..
        } = *position;
        match position.record {
            None => {
                self.leases.insert(deadline, slot, group);
                shared.usage.add_lease(group);
            }
            Some(len) => {
                let is_longest = is_longest(deadline);
                let records = self.records_mut(is_longest);
                records.insert(deadline, slot, group);
                let usage = shared.usage_of(is_longest);
                usage.add(group, Cost::entry_with(len));
            }
        }
        self.earliest_deadline = self.earliest_deadline.min(deadline);
    }

    fn remove_from_orders(&mut self, shared: &SharedState, slot: u32, position: &OrderPosition) {
        let OrderPosition {
            group, deadline, ..
        } = *position;
        match position.record {
            None => {
                self.leases.remove(deadline, slot);
                shared.usage.remove_lease(group);
            }
            Some(len) => {
                let is_longest = is_longest(deadline);
                let records = self.records_mut(is_longest);
                records.remove(deadline, slot, group);
                let usage = shared.usage_of(is_longest);
                usage.remove(group, Cost::entry_with(len));
            }
        }
    }

    /// Removes and returns an entry. Returns its capacity to the budget.
    fn take(&mut self, shared: &SharedState, slot: u32) -> Entry {
        let entry = self.entries.remove(slot).expect(SLOT_IN_USE);
        let hash = shared.hasher.hash_one(entry.id);
        self.index
            .find_entry(hash, |other| *other == slot)
            .expect("every slot in use is in the index")
            .remove();
        self.remove_from_orders(shared, slot, &entry.position());
        self.waiters.remove(&slot);
        shared.budget.release(entry.cost());
        if !self.details.is_empty()
            && let Some(details) = self.details.remove(&slot)
        {
            shared.budget.release(details.cost());
        }
        self.shrink_index(shared);
        entry
    }

    /// Adds owner and operation of an entry, whose cost is reserved.
    pub(super) fn add_details(&mut self, slot: u32, details: Details) {
        self.details.insert(slot, details);
    }

    /// Returns owner and operation of an entry, if they are stored.
    pub(super) fn details(&self, slot: u32) -> Option<&Details> {
        self.details.get(&slot)
    }

    /// Returns the cost of the details of an entry, if they are stored.
    pub(super) fn details_cost(&self, slot: u32) -> Cost {
        self.details(slot).map_or(Cost::NONE, Details::cost)
    }

    /// Sets the owner of an entry that another process took over.
    pub(super) fn set_owner(&mut self, slot: u32, owner: &'static str) {
        if !self.details.is_empty()
            && let Some(details) = self.details.get_mut(&slot)
        {
            details.owner = owner;
        }
    }

    const fn records_mut(&mut self, is_longest: bool) -> &mut RecordOrder {
        if is_longest {
            &mut self.longest
        } else {
            &mut self.records
        }
    }

    /// Returns the records, or the leases and orphans, from this deadline and slot on, in the order of their deadlines.
    pub(super) fn iter_from(
        &self,
        records: bool,
        first: (u64, u32),
    ) -> impl Iterator<Item = (u64, u32)> {
        let orders = if records {
            [Some(self.records.order()), Some(self.longest.order())]
        } else {
            [Some(&self.leases), None]
        };
        let orders = orders.into_iter().flatten();
        orders.flat_map(move |order| order.iter_from(first))
    }

    pub(super) fn first_record(&self) -> Option<(u64, u32)> {
        self.records.first().or_else(|| self.longest.first())
    }

    pub(super) fn first_lease(&self) -> Option<(u64, u32)> {
        self.leases.first()
    }

    /// Registers a waiter for the entry.
    pub(super) fn add_waiter(&mut self, slot: u32) -> Arc<Semaphore> {
        let group = self.waiters.entry(slot).or_insert_with(|| WaiterGroup {
            event: Arc::new(Semaphore::new(0)),
            count: 0,
        });
        group.count += 1;
        Arc::clone(&group.event)
    }

    /// Removes a waiter. The last waiter removes the registration of the entry.
    pub(super) fn remove_waiter(&mut self, slot: u32, event: &Arc<Semaphore>) {
        let Some(group) = self.waiters.get_mut(&slot) else {
            return;
        };
        if Arc::ptr_eq(&group.event, event) {
            group.count -= 1;
            if group.count == 0 {
                self.waiters.remove(&slot);
            }
        }
    }

    /// Removes and returns the waiters for the entry. The caller wakes them after it has released the lock.
    pub(super) fn take_waiters(&mut self, slot: u32) -> Option<Arc<Semaphore>> {
        if self.waiters.is_empty() {
            return None;
        }
        self.waiters.remove(&slot).map(|group| group.event)
    }

    /// Shrinks the index if less than an eighth of its capacity is in use, and leaves capacity to grow. Otherwise the index
    /// would remain large after a few large records replaced many small ones. The byte count does not include that memory.
    fn shrink_index(&mut self, shared: &SharedState) {
        if self.index.capacity() > 256 && self.index.len() < self.index.capacity() / 8 {
            let entries = &self.entries;
            self.index.shrink_to(self.index.len() * 2, |slot| {
                let entry = entries.get(*slot).expect(SLOT_IN_USE);
                shared.hasher.hash_one(entry.id)
            });
        }
    }
}

/// A shard under its lock. Frees removed records after the lock is released, because it can take long to free a large one.
///
/// The fields are dropped in the order of their declaration.
pub(super) struct LockedShard<'a> {
    shard: MutexGuard<'a, Shard>,
    removed: RemovedRecords,
}

/// Removed records. Most calls remove at most one, or the expired ones of a write, and need no allocation.
type RemovedRecords = SmallVec<[Bytes; 2 * EXPIRED_PER_WRITE]>;

impl<'a> LockedShard<'a> {
    pub(super) fn new(shard: MutexGuard<'a, Shard>) -> Self {
        Self {
            shard,
            removed: RemovedRecords::new(),
        }
    }
}

impl LockedShard<'_> {
    /// Returns the slot of the entry with this id. Removes the entry and returns `None` if it is expired.
    pub(super) fn find(
        &mut self,
        shared: &SharedState,
        hash: u64,
        id: &KeyId,
        now: u64,
    ) -> Option<u32> {
        let entries = &self.entries;
        let holds_id = |slot: &u32| entries.get(*slot).is_some_and(|entry| entry.id == *id);
        let slot = *self.index.find(hash, holds_id)?;
        if self.entry(slot).state.deadline() <= now {
            self.remove(shared, slot);
            return None;
        }
        Some(slot)
    }

    /// Removes an entry and returns its capacity to the budget.
    pub(super) fn remove(&mut self, shared: &SharedState, slot: u32) {
        let entry = self.shard.take(shared, slot);
        self.free_later(entry.state);
    }

    /// Frees the record of an entry that was removed or changed, after the lock is released.
    pub(super) fn free_later(&mut self, replaced: EntryState) {
        if let EntryState::Completed { record, .. } = replaced {
            self.removed.push(record);
        }
    }

    /// Removes at most [`EXPIRED_PER_WRITE`] expired entries of each kind.
    pub(super) fn remove_expired(&mut self, shared: &SharedState, now: u64) {
        if now < self.earliest_deadline {
            return;
        }
        for first in [Shard::first_record, Shard::first_lease] {
            for _ in 0..EXPIRED_PER_WRITE {
                match first(self) {
                    Some((deadline, slot)) if deadline <= now => self.remove(shared, slot),
                    _ => break,
                }
            }
        }
        let deadline = |first: Option<(u64, u32)>| first.map_or(u64::MAX, |at| at.0);
        self.earliest_deadline = deadline(self.first_record()).min(deadline(self.first_lease()));
    }

    /// Removes an expired entry, else evicts the record of this group that expires first. Without a group, evicts the
    /// record of the shard that expires first. Returns `false` if there is none. Never evicts a lease.
    ///
    /// If `is_longest` is `true`, evicts only a record with the longest retention, otherwise only another one.
    pub(super) fn evict(
        &mut self,
        shared: &SharedState,
        group: Option<PrincipalGroup>,
        is_longest: bool,
        now: u64,
    ) -> bool {
        let firsts = [self.first_lease(), self.first_record()];
        let expired = firsts.into_iter().flatten().find(|(at, _)| *at <= now);
        if let Some((_, slot)) = expired {
            self.remove(shared, slot);
            return true;
        }
        let records = self.records_mut(is_longest);
        let slot = match group {
            None => records.first().map(|(_, slot)| slot),
            Some(group) => records.first_of(group),
        };
        let Some(slot) = slot else {
            return false;
        };
        let cost = self.entry(slot).cost();
        shared.usage_of(is_longest).note_eviction(cost);
        shared.evictions.add();
        self.remove(shared, slot);
        true
    }
}

impl Deref for LockedShard<'_> {
    type Target = Shard;

    fn deref(&self) -> &Shard {
        &self.shard
    }
}

impl DerefMut for LockedShard<'_> {
    fn deref_mut(&mut self) -> &mut Shard {
        &mut self.shard
    }
}

#[cfg(test)]
impl Shard {
    pub(super) fn waiter_groups(&self) -> usize {
        self.waiters.len()
    }
}

#[cfg(test)]
impl LockedShard<'_> {
    /// Removes all expired entries.
    pub(super) fn sweep(&mut self, shared: &SharedState, now: u64) {
        while self.earliest_deadline <= now && self.earliest_deadline < u64::MAX {
            self.remove_expired(shared, now);
        }
    }
}

/// Returns `true` if a record with this deadline has the longest retention.
const fn is_longest(deadline: u64) -> bool {
    deadline >= FIRST_LONGEST_DEADLINE
}

const SLOT_IN_USE: &str = "slots in the index and in the orders are in use";
