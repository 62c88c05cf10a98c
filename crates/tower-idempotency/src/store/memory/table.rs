//! The rules of the contract over all shards, at a time that the caller states.
//!
//! No two shards are ever locked together: whoever needs room from another shard reserves it first, and looks at its
//! own shard again.

use std::{
    hash::BuildHasher,
    num::NonZeroU64,
    sync::{Arc, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::Semaphore;

use super::{
    budget::{Budget, Cost, MemoryFull, Room},
    shard::{Entry, Shard, Shared, State, nanos},
    sync::{HashBuilder, Mutex, MutexGuard},
};
use crate::store::{Acquired, Claim, KeyId, LeaseRef, OrphanPolicy, StoreError, Ttl};

/// How many records make way in one go under one lock.
const EVICTED_AT_ONCE: usize = 8;

pub(super) struct Engine {
    shared: Shared,
    shards: Box<[Mutex<Shard>]>,
}

impl Engine {
    /// # Panics
    ///
    /// When `shards` is not a power of two.
    pub(super) fn new(shards: usize, max_entries: usize, max_bytes: usize) -> Self {
        assert!(shards.is_power_of_two());
        Self {
            shared: Shared {
                hasher: HashBuilder::default(),
                budget: Budget::new(max_entries, max_bytes),
            },
            shards: (0..shards).map(|_| Mutex::new(Shard::new())).collect(),
        }
    }

    pub(super) const fn budget(&self) -> &Budget {
        &self.shared.budget
    }

    pub(super) fn acquire(&self, claim: &Claim, now: u64) -> Result<Acquired, MemoryFull> {
        let shared = &self.shared;
        let hash = shared.hasher.hash_one(claim.id);
        let mut made = None;
        loop {
            let mut shard = self.shard(hash);
            shard.tidy(shared, now);
            if let Some(slot) = shard.find(shared, hash, &claim.id, now) {
                return Ok(acquire_present(&mut shard, slot, claim, now));
            }
            let Some(room) = self.room(&mut shard, made.take(), Cost::ENTRY, now)? else {
                drop(shard);
                made = Some(self.make_room(hash, Cost::ENTRY, now));
                continue;
            };
            let generation = NonZeroU64::MIN;
            shard.insert(shared, hash, Entry::leased(claim, generation, now));
            room.fill();
            return Ok(granted(generation));
        }
    }

    /// Whether the lease is held.
    pub(super) fn renew(&self, lease: &LeaseRef, ttl: Ttl, now: u64) -> bool {
        let hash = self.shared.hasher.hash_one(lease.id);
        let mut shard = self.shard(hash);
        let Some(slot) = shard.find(&self.shared, hash, &lease.id, now) else {
            return false;
        };
        let entry = shard.entry(slot);
        let State::Leased {
            ends, forgotten, ..
        } = entry.state
        else {
            return false;
        };
        if entry.holder() != Some(lease.token) {
            return false;
        }
        let keep = forgotten - ends;
        let ends = now.saturating_add(nanos(ttl));
        shard.update(slot, |entry| {
            entry.state = State::Leased {
                ends,
                forgotten: ends.saturating_add(keep),
                released: false,
            };
        });
        true
    }

    /// `record` must own its buffer: it is dropped under a lock.
    pub(super) fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
        now: u64,
    ) -> Result<(), StoreError> {
        let shared = &self.shared;
        let hash = shared.hasher.hash_one(lease.id);
        let expires = now.saturating_add(nanos(retention));
        let mut made = None;
        loop {
            let mut shard = self.shard(hash);
            shard.tidy(shared, now);
            let found = shard.find(shared, hash, &lease.id, now);
            if let Some(slot) = found {
                let entry = shard.entry(slot);
                let held_by_another = entry.holder().is_some_and(|held| held != lease.token);
                match entry.state {
                    _ if held_by_another => return Err(StoreError::LeaseLost),
                    State::Completed { .. } => return Ok(()),
                    State::Leased { .. } => {}
                }
            }
            let limit = shared.budget.largest_record();
            if record.len() > limit {
                return Err(StoreError::RecordTooLarge { limit });
            }
            let cost = match found {
                Some(_) => Cost::record(record.len()),
                None => Cost::entry_with(record.len()),
            };
            let room = self.room(&mut shard, made.take(), cost, now);
            let Some(room) = room.map_err(StoreError::backend)? else {
                drop(shard);
                made = Some(self.make_room(hash, cost, now));
                continue;
            };
            room.fill();
            let waiters = match found {
                None => {
                    shard.insert(shared, hash, Entry::completed(lease, record, expires));
                    None
                }
                Some(slot) => {
                    shard.update(slot, |entry| {
                        *entry = Entry::completed(lease, record, expires);
                    });
                    shard.waiters(slot)
                }
            };
            drop(shard);
            wake(waiters);
            return Ok(());
        }
    }

    pub(super) fn release(&self, lease: &LeaseRef, now: u64) {
        let hash = self.shared.hasher.hash_one(lease.id);
        let mut shard = self.shard(hash);
        shard.tidy(&self.shared, now);
        let Some(slot) = shard.find(&self.shared, hash, &lease.id, now) else {
            return;
        };
        let entry = shard.entry(slot);
        let State::Leased {
            ends, forgotten, ..
        } = entry.state
        else {
            return;
        };
        if entry.holder() != Some(lease.token) {
            return;
        }
        let takeover = entry.generation > NonZeroU64::MIN;
        let waiters = shard.waiters(slot);
        if takeover {
            let keep = forgotten - ends;
            shard.update(slot, |entry| {
                entry.state = State::Leased {
                    ends: now,
                    forgotten: now.saturating_add(keep),
                    released: true,
                };
            });
        } else {
            shard.remove(&self.shared, slot);
        }
        drop(shard);
        wake(waiters);
    }

    /// Registers a waiter, in the same step as the look at the entry; none unless it is in progress.
    pub(super) fn watch(&self, id: &KeyId, now: u64) -> Option<Watch<'_>> {
        let hash = self.shared.hasher.hash_one(id);
        let mut shard = self.shard(hash);
        let slot = shard.find(&self.shared, hash, id, now)?;
        match shard.entry(slot).state {
            State::Leased { ends, .. } if ends > now => Some(Watch {
                engine: self,
                hash,
                slot,
                event: shard.wait(slot),
                lease_ends: ends,
            }),
            State::Leased { .. } | State::Completed { .. } => None,
        }
    }

    /// Room that was made, or is there, or is made by a few records of this shard; none when other shards must make it.
    ///
    /// # Errors
    ///
    /// When they could not, and there is still none.
    fn room<'a>(
        &'a self,
        shard: &mut Shard,
        made: Option<Result<Room<'a>, MemoryFull>>,
        cost: Cost,
        now: u64,
    ) -> Result<Option<Room<'a>>, MemoryFull> {
        let refused = match made {
            Some(Ok(room)) if room.is_for(cost) => return Ok(Some(room)),
            Some(Ok(_)) | None => None,
            Some(Err(full)) => Some(full),
        };
        match (self.room_here(shard, cost, now), refused) {
            (None, Some(full)) => Err(full),
            (room, _) => Ok(room),
        }
    }

    fn room_here(&self, shard: &mut Shard, cost: Cost, now: u64) -> Option<Room<'_>> {
        let budget = &self.shared.budget;
        if let Some(room) = budget.reserve(cost) {
            return Some(room);
        }
        if !budget.could_hold(cost) {
            return None;
        }
        for _ in 0..EVICTED_AT_ONCE {
            if !shard.evict(&self.shared, now) {
                return None;
            }
            if let Some(room) = budget.reserve(cost) {
                return Some(room);
            }
        }
        None
    }

    /// Reserves room, taking records from one shard after the other, beginning with the one of `hash`.
    fn make_room(&self, hash: u64, cost: Cost, now: u64) -> Result<Room<'_>, MemoryFull> {
        let budget = &self.shared.budget;
        for distance in 0..self.shards.len() {
            // Asked each time: a bound that is lowered meanwhile ends it.
            while budget.could_hold(cost) {
                let mut shard = self.shard_at(self.index(hash) + distance);
                if let Some(room) = self.room_here(&mut shard, cost, now) {
                    return Ok(room);
                }
                if shard.victim(now).is_none() {
                    break;
                }
            }
        }
        budget.reserve(cost).ok_or_else(|| budget.full())
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        self.shard_at(self.index(hash))
    }

    fn shard_at(&self, index: usize) -> MutexGuard<'_, Shard> {
        // A panic under the lock would be a bug of ours between two consistent states at worst; a store that refuses
        // everything from then on would be worse.
        self.shards[index & (self.shards.len() - 1)]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// From bits that the index within a shard does not look at.
    const fn index(&self, hash: u64) -> usize {
        (hash >> 40) as usize & (self.shards.len() - 1)
    }
}

/// A waiter's registration.
pub(super) struct Watch<'a> {
    engine: &'a Engine,
    hash: u64,
    slot: u32,
    event: Arc<Semaphore>,
    lease_ends: u64,
}

impl Watch<'_> {
    /// Resolves when the entry is completed or released.
    pub(super) async fn changed(&self) {
        // There are no permits: the only answer is that the semaphore was closed.
        let _closed = self.event.acquire().await;
    }

    #[cfg(all(test, shuttle))]
    pub(super) fn is_over(&self) -> bool {
        self.event.is_closed()
    }

    /// When the lease is over unless it is renewed.
    pub(super) const fn lease_ends(&self) -> u64 {
        self.lease_ends
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.engine.shard(self.hash).leave(self.slot, &self.event);
    }
}

fn acquire_present(shard: &mut Shard, slot: u32, claim: &Claim, now: u64) -> Acquired {
    let entry = shard.entry(slot);
    let fingerprint = entry.fingerprint;
    let ends = match &entry.state {
        State::Completed { record, .. } => {
            return Acquired::Completed {
                fingerprint,
                record: record.clone(),
            };
        }
        State::Leased { ends, .. } => *ends,
    };
    if entry.holder() == Some(claim.token) {
        let generation = entry.generation;
        shard.update(slot, |entry| entry.state = State::leased(claim, now));
        return granted(generation);
    }
    if ends > now {
        return Acquired::InProgress {
            fingerprint,
            expires_in: Duration::from_nanos(ends - now),
        };
    }
    match claim.orphans {
        OrphanPolicy::TakeOver if fingerprint == claim.fingerprint => {
            let generation = entry.generation.saturating_add(1);
            shard.update(slot, |entry| *entry = Entry::leased(claim, generation, now));
            granted(generation)
        }
        OrphanPolicy::TakeOver | OrphanPolicy::Refuse => Acquired::Orphaned {
            fingerprint,
            since: Duration::from_nanos(now - ends),
        },
    }
}

const fn granted(generation: NonZeroU64) -> Acquired {
    Acquired::Granted {
        generation: generation.get(),
        takeover: generation.get() > 1,
    }
}

fn wake(waiters: Option<Arc<Semaphore>>) {
    if let Some(event) = waiters {
        event.close();
    }
}

#[cfg(test)]
impl Engine {
    pub(super) fn waiting(&self) -> usize {
        let count = |at| self.shard_at(at).waiting();
        (0..self.shards.len()).map(count).sum()
    }

    #[cfg(shuttle)]
    pub(super) fn shard_of(&self, id: &KeyId) -> usize {
        self.index(self.shared.hasher.hash_one(id))
    }

    pub(super) fn sweep(&self, now: u64) {
        for at in 0..self.shards.len() {
            self.shard_at(at).sweep(&self.shared, now);
        }
    }
}
