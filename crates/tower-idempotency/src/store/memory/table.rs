//! The rules of the contract over all shards, at a time that the caller passes.
//!
//! No call locks two shards at once. A call that needs capacity from another shard reserves it first, then queries its
//! own shard again.

use std::{
    hash::BuildHasher,
    mem,
    num::NonZeroU64,
    sync::{Arc, PoisonError, atomic::Ordering::Relaxed},
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::Semaphore;

use super::{
    budget::{Budget, Cost, ENTRY_BYTES},
    details::Details,
    entry::{Entry, EntryState, nanos},
    evictions::Evictions,
    shard::{LockedShard, Shard, SharedState},
    sync::{AtomicUsize, HashBuilder, Mutex},
    usage::{LeaseShare, Usage},
};
use crate::store::{Acquired, Claim, LeaseRef, OrphanPolicy, StoreError, Ttl};

/// The number of entries for which a shard is meant. A shard's index, its order and a search for a group of principals take
/// time in proportion to its entries, under its lock.
const ENTRIES_PER_SHARD: usize = 4096;
/// The number of bytes for which a shard is meant. A shard evicts its own records in the order of their expiry, so it needs room
/// for more than one large record.
const BYTES_PER_SHARD: usize = 4 << 20;

/// Fewer shards would delay concurrent calls.
const MIN_SHARDS: usize = 64;
/// An empty store of unlimited size takes some 7 MB for its shards. A position of a listing has two bytes for the shard.
const MAX_SHARDS: usize = 1 << 14;

pub(super) struct Table {
    pub(super) shared: SharedState,
    pub(super) shards: Box<[Mutex<Shard>]>,
}

impl Table {
    /// Creates an empty table with shards for these limits.
    pub(super) fn for_limits(max_entries: usize, max_bytes: usize) -> Self {
        let shards = shards_for((max_entries, max_bytes));
        Self::new(shards, max_entries, max_bytes)
    }

    /// # Panics
    ///
    /// If `shards` is not a power of two.
    pub(super) fn new(shards: usize, max_entries: usize, max_bytes: usize) -> Self {
        assert!(shards.is_power_of_two());
        Self {
            shared: SharedState {
                hasher: HashBuilder::default(),
                budget: Budget::new(max_entries, max_bytes),
                usage: Usage::new(),
                longest: Usage::with_total(),
                evictions: Evictions::default(),
                has_details: AtomicUsize::new(0),
            },
            shards: (0..shards).map(|_| Mutex::new(Shard::new())).collect(),
        }
    }

    /// Divides an empty table into as many shards as its limits need.
    pub(super) fn divide(&mut self) {
        let shards = shards_for(self.budget().limits());
        if self.budget().entries() == 0 && shards != self.shards.len() {
            self.shards = (0..shards).map(|_| Mutex::new(Shard::new())).collect();
        }
    }

    pub(super) const fn budget(&self) -> &Budget {
        &self.shared.budget
    }

    pub(super) fn acquire(&self, claim: &Claim, now: u64) -> Result<Acquired, StoreError> {
        let acquired = self.acquire_unreported(claim, now);
        self.report_evictions(now);
        acquired
    }

    /// Does not report evictions. The caller reports them after the lock is released, because a subscriber is foreign code.
    fn acquire_unreported(&self, claim: &Claim, now: u64) -> Result<Acquired, StoreError> {
        let shared = &self.shared;
        let hash = shared.hasher.hash_one(claim.id);
        let has_details = shared.has_details.load(Relaxed) == 1;
        let cost = if has_details {
            Cost::ENTRY.and(Details::cost_of(&claim.operation))
        } else {
            Cost::ENTRY
        };
        let (mut evicted, mut share) = (None, None);
        loop {
            let mut shard = self.shard(hash);
            shard.remove_expired(shared, now);
            if let Some(slot) = shard.find(shared, hash, &claim.id, now) {
                return Ok(acquire_present(shared, &mut shard, slot, claim, now));
            }
            let group = shared.group(claim.scope.as_ref());
            // Decided once: a failed eviction within the group does not mean that the store is full.
            let lease_share = || shared.usage.lease_share(group, cost.bytes, &shared.budget);
            let only = match share.get_or_insert_with(lease_share) {
                LeaseShare::Small => None,
                LeaseShare::Large => Some(group),
                LeaseShare::UsedUp => return Err(StoreError::CallerLimit),
            };
            let reservation = self.reserve(&mut shard, evicted.take(), only, cost, now);
            let reservation = reservation.map_err(|full| match only {
                None => StoreError::backend(full),
                Some(_) => StoreError::CallerLimit,
            });
            let Some(reservation) = reservation? else {
                drop(shard);
                evicted = Some(self.evict_and_reserve(hash, only, cost, now));
                continue;
            };
            let generation = NonZeroU64::MIN;
            let slot = shard.insert(shared, hash, Entry::leased(claim, group, generation, now));
            if has_details {
                shard.add_details(slot, Details::of(claim));
            }
            reservation.commit();
            return Ok(granted(generation));
        }
    }

    /// Renews the lease. Returns `false` if the token does not hold the entry.
    pub(super) fn renew(&self, lease: &LeaseRef, ttl: Ttl, now: u64) -> bool {
        let hash = self.shared.hasher.hash_one(lease.id);
        let mut shard = self.shard(hash);
        let Some(slot) = shard.find(&self.shared, hash, &lease.id, now) else {
            return false;
        };
        let entry = shard.entry(slot);
        let EntryState::Leased {
            lease_expires,
            orphan_expires,
            ..
        } = entry.state
        else {
            return false;
        };
        if entry.holder() != Some(lease.token) {
            return false;
        }
        let orphan_retention = orphan_expires - lease_expires;
        let previous_expiry = lease_expires;
        let lease_expires = now.saturating_add(nanos(ttl));
        shard.update(&self.shared, slot, |entry| {
            entry.state = EntryState::Leased {
                lease_expires,
                orphan_expires: lease_expires.saturating_add(orphan_retention),
                released: false,
            };
        });
        // The waiters would sleep until the previous expiry.
        let waiters = if lease_expires < previous_expiry {
            shard.take_waiters(slot)
        } else {
            None
        };
        drop(shard);
        wake(waiters);
        true
    }

    /// Reports the records that were evicted before their expiry.
    pub(super) fn report_evictions(&self, now: u64) {
        self.shared.evictions.report(self.budget(), now);
    }

    /// Stores the record, and takes it out of `record` if it is stored. The record must own its buffer, because the store
    /// counts it by its length.
    ///
    /// Does not report evictions. The caller reports them after the lock is released, because a subscriber is foreign code.
    pub(super) fn complete(
        &self,
        lease: &LeaseRef,
        record: &mut Bytes,
        retention: Ttl,
        now: u64,
    ) -> Result<(), StoreError> {
        let shared = &self.shared;
        let hash = shared.hasher.hash_one(lease.id);
        let expires = now.saturating_add(nanos(retention));
        let mut evicted = None;
        loop {
            let mut shard = self.shard(hash);
            shard.remove_expired(shared, now);
            let found = shard.find(shared, hash, &lease.id, now);
            if let Some(slot) = found {
                let entry = shard.entry(slot);
                let is_held_elsewhere = entry.holder().is_some_and(|holder| holder != lease.token);
                match entry.state {
                    _ if is_held_elsewhere => return Err(StoreError::LeaseLost),
                    EntryState::Completed { .. } => return Ok(()),
                    EntryState::Leased { .. } => {}
                }
            }
            // An entry that is absent gets no details.
            let details = found.map_or(Cost::NONE, |slot| shard.details_cost(slot));
            let limit = shared.budget.largest_record(details);
            if record.len() > limit {
                return Err(StoreError::RecordTooLarge { limit });
            }
            let cost = match found {
                Some(_) => Cost::record(record.len()),
                None => Cost::entry_with(record.len()),
            };
            // The effect has happened, so its record may evict records of any group.
            let reservation = self.reserve(&mut shard, evicted.take(), None, cost, now);
            let Some(reservation) = reservation.map_err(StoreError::backend)? else {
                drop(shard);
                evicted = Some(self.evict_and_reserve(hash, None, cost, now));
                continue;
            };
            reservation.commit();
            let record = mem::take(record);
            let waiters = match found {
                None => {
                    let group = shared.group(lease.scope.as_ref());
                    let entry = Entry::completed(lease, group, record, expires, now);
                    shard.insert(shared, hash, entry);
                    None
                }
                Some(slot) => {
                    shard.update(shared, slot, |entry| {
                        let (group, is_held) = (entry.group, entry.holder().is_some());
                        let completed = Entry::completed(lease, group, record, expires, now);
                        let before = mem::replace(entry, completed);
                        entry.is_of_run_once = before.is_of_run_once;
                        if is_held {
                            entry.generation = before.generation;
                        }
                    });
                    shard.take_waiters(slot)
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
        shard.remove_expired(&self.shared, now);
        let Some(slot) = shard.find(&self.shared, hash, &lease.id, now) else {
            return;
        };
        let entry = shard.entry(slot);
        let EntryState::Leased {
            lease_expires,
            orphan_expires,
            ..
        } = entry.state
        else {
            return;
        };
        if entry.holder() != Some(lease.token) {
            return;
        }
        let takeover = entry.generation > NonZeroU64::MIN;
        let waiters = shard.take_waiters(slot);
        if takeover {
            let orphan_retention = orphan_expires - lease_expires;
            shard.update(&self.shared, slot, |entry| {
                entry.state = EntryState::Leased {
                    lease_expires: now,
                    orphan_expires: now.saturating_add(orphan_retention),
                    released: true,
                };
            });
        } else {
            shard.remove(&self.shared, slot);
        }
        drop(shard);
        wake(waiters);
    }

    pub(super) fn shard(&self, hash: u64) -> LockedShard<'_> {
        self.shard_at(self.index(hash))
    }

    pub(super) fn shard_at(&self, index: usize) -> LockedShard<'_> {
        let shard = self.shards[index & (self.shards.len() - 1)].lock();
        // A panic under the lock would be a bug of this crate, and the state would still be consistent. A store that
        // rejects every later call would be worse.
        LockedShard::new(shard.unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the shard of a hash. Uses bits that the index within a shard does not use.
    pub(super) const fn index(&self, hash: u64) -> usize {
        (hash >> 40) as usize & (self.shards.len() - 1)
    }
}

/// Returns the number of shards for a maximum number of entries and of bytes.
fn shards_for((max_entries, max_bytes): (usize, usize)) -> usize {
    let entries = max_entries.min(max_bytes / ENTRY_BYTES);
    let shards = (entries / ENTRIES_PER_SHARD).min(max_bytes / BYTES_PER_SHARD);
    shards.clamp(MIN_SHARDS, MAX_SHARDS).next_power_of_two()
}

fn acquire_present(
    shared: &SharedState,
    shard: &mut Shard,
    slot: u32,
    claim: &Claim,
    now: u64,
) -> Acquired {
    let entry = shard.entry(slot);
    let fingerprint = entry.fingerprint;
    let lease_expires = match &entry.state {
        EntryState::Completed { record, expires } => {
            return Acquired::Completed {
                fingerprint,
                record: record.clone(),
                expires_in: Duration::from_nanos(expires - now),
                token: entry.holder(),
            };
        }
        EntryState::Leased { lease_expires, .. } => *lease_expires,
    };
    if entry.holder() == Some(claim.token) {
        let generation = entry.generation;
        shard.update(shared, slot, |entry| {
            entry.state = EntryState::leased(claim, now);
        });
        return granted(generation);
    }
    if lease_expires > now {
        return Acquired::InProgress {
            fingerprint,
            expires_in: Duration::from_nanos(lease_expires - now),
        };
    }
    let may_take_over = match claim.orphans {
        OrphanPolicy::TakeOver => true,
        OrphanPolicy::Refuse => entry.holder().is_some_and(|token| token.allows_retry()),
        OrphanPolicy::Never => false,
    };
    if may_take_over && fingerprint == claim.fingerprint {
        let (generation, group) = (entry.generation.saturating_add(1), entry.group);
        let (since, is_of_run_once) = (entry.since, entry.is_of_run_once);
        shard.update(shared, slot, |entry| {
            *entry = Entry::leased(claim, group, generation, now);
            entry.since = since;
            // The claim of a manual takeover may have no operation.
            entry.is_of_run_once |= is_of_run_once;
        });
        shard.set_owner(slot, claim.owner);
        return granted(generation);
    }
    Acquired::Orphaned {
        fingerprint,
        since: Duration::from_nanos(now - lease_expires),
    }
}

const fn granted(generation: NonZeroU64) -> Acquired {
    Acquired::Granted {
        generation: generation.get(),
        takeover: generation.get() > 1,
    }
}

pub(super) fn wake(waiters: Option<Arc<Semaphore>>) {
    if let Some(event) = waiters {
        event.close();
    }
}

#[cfg(test)]
impl Table {
    pub(super) fn waiter_groups(&self) -> usize {
        let count = |at| self.shard_at(at).waiter_groups();
        (0..self.shards.len()).map(count).sum()
    }

    #[cfg(shuttle)]
    pub(super) fn shard_of(&self, id: &crate::store::KeyId) -> usize {
        self.index(self.shared.hasher.hash_one(id))
    }

    /// Returns the counters of all groups: completed entries, their bytes, and leases and orphans.
    pub(super) fn usage_sums(&self) -> (usize, usize, usize) {
        let [usage, longest] = [self.shared.usage.sums(), self.shared.longest.sums()];
        (
            usage.0 + longest.0,
            usage.1 + longest.1,
            usage.2 + longest.2,
        )
    }

    pub(super) fn sweep(&self, now: u64) {
        for at in 0..self.shards.len() {
            self.shard_at(at).sweep(&self.shared, now);
        }
    }
}
