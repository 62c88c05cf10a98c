//! One shard: its entries, the index that finds them by id, and their order by deadline.
//!
//! Every method runs under the shard's lock, so nothing here calls foreign code: records own their buffers, and waiters
//! are handed out to be woken by the caller once the lock is gone.

use std::{collections::BTreeMap, hash::BuildHasher, num::NonZeroU64, sync::Arc};

use bytes::Bytes;
use hashbrown::HashTable;
use tokio::sync::Semaphore;

use super::{
    budget::{Budget, Cost},
    order::Order,
    slab::Slab,
    sync::HashBuilder,
};
use crate::store::{Claim, Fingerprint, KeyId, LeaseRef, Token};

/// How many expired entries of each kind a write takes away beside its own work: more than it can add.
const TIDY: usize = 2;

/// What the shards share.
pub(super) struct Shared {
    pub(super) hasher: HashBuilder,
    pub(super) budget: Budget,
}

/// Aligned, so that two shards never share a cache line.
#[repr(align(64))]
pub(super) struct Shard {
    index: HashTable<u32>,
    entries: Slab<Entry>,
    /// Completed entries by the end of their retention.
    records: Order,
    /// Leases and orphans by the moment they are forgotten.
    leases: Order,
    /// Those who wait for an entry; empty unless someone does.
    waiting: BTreeMap<u32, Waiting>,
    /// No entry's deadline is before this.
    due: u64,
}

/// Who waits for the entry in a slot.
pub(super) struct Waiting {
    /// Has no permits and is closed when the entry changes: unlike a notification, that is also seen by a waiter that
    /// looks afterwards.
    pub(super) event: Arc<Semaphore>,
    pub(super) count: usize,
}

pub(super) struct Entry {
    pub(super) id: KeyId,
    pub(super) fingerprint: Fingerprint,
    token: Token,
    pub(super) generation: NonZeroU64,
    pub(super) state: State,
}

pub(super) enum State {
    /// In progress until `ends`, then orphaned until `forgotten`. Once it is released nobody holds it.
    Leased {
        ends: u64,
        forgotten: u64,
        released: bool,
    },
    Completed {
        record: Bytes,
        expires: u64,
    },
}

impl Entry {
    pub(super) fn leased(claim: &Claim, generation: NonZeroU64, now: u64) -> Self {
        Self {
            id: claim.id,
            fingerprint: claim.fingerprint,
            token: claim.token,
            generation,
            state: State::leased(claim, now),
        }
    }

    pub(super) fn completed(lease: &LeaseRef, record: Bytes, expires: u64) -> Self {
        Self {
            id: lease.id,
            fingerprint: lease.fingerprint,
            token: lease.token,
            generation: NonZeroU64::new(lease.generation).unwrap_or(NonZeroU64::MIN),
            state: State::Completed { record, expires },
        }
    }

    /// The token that holds the entry, or completed it.
    pub(super) const fn holder(&self) -> Option<Token> {
        match self.state {
            State::Leased { released: true, .. } => None,
            State::Leased { .. } | State::Completed { .. } => Some(self.token),
        }
    }

    fn cost(&self) -> Cost {
        match &self.state {
            State::Leased { .. } => Cost::ENTRY,
            State::Completed { record, .. } => Cost::entry_with(record.len()),
        }
    }
}

impl State {
    pub(super) fn leased(claim: &Claim, now: u64) -> Self {
        let ends = now.saturating_add(nanos(claim.lease));
        Self::Leased {
            ends,
            forgotten: ends.saturating_add(nanos(claim.orphan_retention)),
            released: false,
        }
    }

    fn deadline(&self) -> u64 {
        match *self {
            Self::Leased { forgotten, .. } => forgotten,
            Self::Completed { expires, .. } => expires,
        }
    }
}

impl Shard {
    pub(super) const fn new() -> Self {
        Self {
            index: HashTable::new(),
            entries: Slab::new(),
            records: Order::new(),
            leases: Order::new(),
            waiting: BTreeMap::new(),
            due: u64::MAX,
        }
    }

    /// The slot of the entry with this id. One that is over is taken away and not found.
    pub(super) fn find(&mut self, shared: &Shared, hash: u64, id: &KeyId, now: u64) -> Option<u32> {
        let entries = &self.entries;
        let holds_id = |slot: &u32| entries.get(*slot).is_some_and(|entry| entry.id == *id);
        let slot = *self.index.find(hash, holds_id)?;
        if self.entry(slot).state.deadline() <= now {
            self.remove(shared, slot);
            return None;
        }
        Some(slot)
    }

    pub(super) fn entry(&self, slot: u32) -> &Entry {
        self.entries.get(slot).expect(SLOT_IN_USE)
    }

    /// Adds an entry whose id is not there and whose cost is reserved.
    pub(super) fn insert(&mut self, shared: &Shared, hash: u64, entry: Entry) {
        let deadline = entry.state.deadline();
        let completed = matches!(entry.state, State::Completed { .. });
        let slot = self.entries.insert(entry);
        let entries = &self.entries;
        self.index.insert_unique(hash, slot, |slot| {
            let entry = entries.get(*slot).expect(SLOT_IN_USE);
            shared.hasher.hash_one(entry.id)
        });
        self.order(completed).insert(deadline, slot);
        self.due = self.due.min(deadline);
    }

    /// Changes an entry, keeping its place in the order by deadline.
    pub(super) fn update(&mut self, slot: u32, change: impl FnOnce(&mut Entry)) {
        let entry = self.entries.get_mut(slot).expect(SLOT_IN_USE);
        let before = (
            matches!(entry.state, State::Completed { .. }),
            entry.state.deadline(),
        );
        change(entry);
        let after = (
            matches!(entry.state, State::Completed { .. }),
            entry.state.deadline(),
        );
        if before != after {
            self.order(before.0).remove(before.1, slot);
            self.order(after.0).insert(after.1, slot);
            self.due = self.due.min(after.1);
        }
    }

    /// Takes an entry away, and gives back what it cost.
    pub(super) fn remove(&mut self, shared: &Shared, slot: u32) {
        let entry = self.entries.remove(slot).expect(SLOT_IN_USE);
        let hash = shared.hasher.hash_one(entry.id);
        self.index
            .find_entry(hash, |other| *other == slot)
            .expect("every slot in use is in the index")
            .remove();
        let completed = matches!(entry.state, State::Completed { .. });
        let deadline = entry.state.deadline();
        self.order(completed).remove(deadline, slot);
        self.waiting.remove(&slot);
        shared.budget.give_back(entry.cost());
        self.shrink_index(shared);
    }

    /// Takes away some entries that are over.
    pub(super) fn tidy(&mut self, shared: &Shared, now: u64) {
        if now < self.due {
            return;
        }
        for completed in [true, false] {
            for _ in 0..TIDY {
                match self.order(completed).first() {
                    Some((deadline, slot)) if deadline <= now => self.remove(shared, slot),
                    _ => break,
                }
            }
        }
        let first = |order: &Order| order.first().map_or(u64::MAX, |at| at.0);
        self.due = first(&self.records).min(first(&self.leases));
    }

    /// The entry that makes way next: a forgotten orphan, or else the record that expires first. Never a lease.
    pub(super) fn victim(&self, now: u64) -> Option<u32> {
        let forgotten = self.leases.first().filter(|(at, _)| *at <= now);
        let (_, slot) = forgotten.or_else(|| self.records.first())?;
        Some(slot)
    }

    pub(super) fn evict(&mut self, shared: &Shared, now: u64) -> bool {
        let victim = self.victim(now);
        if let Some(slot) = victim {
            self.remove(shared, slot);
        }
        victim.is_some()
    }

    /// Registers a waiter for the entry.
    pub(super) fn wait(&mut self, slot: u32) -> Arc<Semaphore> {
        let waiting = self.waiting.entry(slot).or_insert_with(|| Waiting {
            event: Arc::new(Semaphore::new(0)),
            count: 0,
        });
        waiting.count += 1;
        Arc::clone(&waiting.event)
    }

    /// A waiter leaves; the last one takes the registration along.
    pub(super) fn leave(&mut self, slot: u32, event: &Arc<Semaphore>) {
        let Some(waiting) = self.waiting.get_mut(&slot) else {
            return;
        };
        if Arc::ptr_eq(&waiting.event, event) {
            waiting.count -= 1;
            if waiting.count == 0 {
                self.waiting.remove(&slot);
            }
        }
    }

    /// Those who wait for the entry, to be woken once the lock is gone.
    pub(super) fn waiters(&mut self, slot: u32) -> Option<Arc<Semaphore>> {
        if self.waiting.is_empty() {
            return None;
        }
        self.waiting.remove(&slot).map(|waiting| waiting.event)
    }

    const fn order(&mut self, completed: bool) -> &mut Order {
        if completed {
            &mut self.records
        } else {
            &mut self.leases
        }
    }

    /// Gives memory back once an eighth of the index is in use, keeping room to grow again: many small records that
    /// made way for few large ones must not count twice.
    fn shrink_index(&mut self, shared: &Shared) {
        if self.index.capacity() > 256 && self.index.len() < self.index.capacity() / 8 {
            let entries = &self.entries;
            self.index.shrink_to(self.index.len() * 2, |slot| {
                let entry = entries.get(*slot).expect(SLOT_IN_USE);
                shared.hasher.hash_one(entry.id)
            });
        }
    }
}

#[cfg(test)]
impl Shard {
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes away everything that is over.
    pub(super) fn sweep(&mut self, shared: &Shared, now: u64) {
        while self.due <= now && self.due < u64::MAX {
            self.tidy(shared, now);
        }
    }
}

pub(super) const fn nanos(ttl: crate::store::Ttl) -> u64 {
    ttl.as_millis() * 1_000_000
}

const SLOT_IN_USE: &str = "slots in the index and in the orders are in use";
