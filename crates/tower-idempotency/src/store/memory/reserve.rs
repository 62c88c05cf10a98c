//! Reservation of capacity, and the evictions that it needs.

use super::{
    budget::{Cost, MemoryFull, Reservation},
    shard::LockedShard,
    table::Table,
    usage::PrincipalGroup,
};

/// The number of records evicted under one lock.
const EVICTIONS_PER_LOCK: usize = 8;

impl Table {
    /// Returns the reservation made by an earlier eviction, or reserves capacity, evicting a few records of this shard
    /// if needed. Returns `None` if [`evict_and_reserve`](Self::evict_and_reserve) must evict records.
    ///
    /// # Errors
    ///
    /// If an earlier eviction could not free enough, and there is still no capacity.
    pub(super) fn reserve<'a>(
        &'a self,
        shard: &mut LockedShard<'_>,
        evicted: Option<Result<Reservation<'a>, MemoryFull>>,
        only: Option<PrincipalGroup>,
        cost: Cost,
        now: u64,
    ) -> Result<Option<Reservation<'a>>, MemoryFull> {
        let eviction_error = match evicted {
            Some(Ok(reservation)) if reservation.has_cost(cost) => return Ok(Some(reservation)),
            Some(Ok(_)) | None => None,
            Some(Err(full)) => Some(full),
        };
        match (
            self.reserve_in_shard(shard, only, cost, now),
            eviction_error,
        ) {
            (None, Some(full)) => Err(full),
            (reservation, _) => Ok(reservation),
        }
    }

    fn reserve_in_shard(
        &self,
        shard: &mut LockedShard<'_>,
        only: Option<PrincipalGroup>,
        cost: Cost,
        now: u64,
    ) -> Option<Reservation<'_>> {
        let budget = &self.shared.budget;
        if let Some(reservation) = budget.reserve(cost) {
            return Some(reservation);
        }
        if only.is_some() || !budget.can_hold(cost) {
            return None;
        }
        for _ in 0..EVICTIONS_PER_LOCK {
            let is_longest = self.shared.longest.fills_half(budget);
            let group = self.shared.usage_of(is_longest).largest(budget);
            if !shard.evict(&self.shared, group, is_longest, now) {
                return None;
            }
            if let Some(reservation) = budget.reserve(cost) {
                return Some(reservation);
            }
        }
        None
    }

    /// Reserves capacity by evicting records from one shard after the other, starting with the shard of `hash`. Evicts a
    /// record with the longest retention only if no other record is left, or if such records fill more than half of the store.
    ///
    /// With `only`, evicts no records of other groups.
    pub(super) fn evict_and_reserve(
        &self,
        hash: u64,
        only: Option<PrincipalGroup>,
        cost: Cost,
        now: u64,
    ) -> Result<Reservation<'_>, MemoryFull> {
        if let Some(group) = only {
            return self.evict_own_and_reserve(hash, group, cost, now);
        }
        let budget = &self.shared.budget;
        let mut spares_longest = self.shared.usage.has_records();
        let mut is_limited_to_largest = true;
        loop {
            let (mut evicted, mut was_limited) = (false, false);
            for distance in 0..self.shards.len() {
                // Checked at each step, so that a limit lowered meanwhile ends the loop.
                while budget.can_hold(cost) {
                    let mut shard = self.shard_at(self.index(hash) + distance);
                    if let Some(reservation) = budget.reserve(cost) {
                        return Ok(reservation);
                    }
                    // The group may change with each eviction. Its records may be in shards that were visited before.
                    let is_longest = !spares_longest || self.shared.longest.fills_half(budget);
                    let largest = self.shared.usage_of(is_longest).largest(budget);
                    let group = largest.filter(|_| is_limited_to_largest);
                    was_limited |= group.is_some();
                    if !shard.evict(&self.shared, group, is_longest, now) {
                        break;
                    }
                    evicted = true;
                }
            }
            if evicted || was_limited {
                // If no shard had such a record, the next round evicts records of any group. Other calls may have evicted or
                // moved the records of the group meanwhile.
                is_limited_to_largest = evicted;
            } else if spares_longest {
                (spares_longest, is_limited_to_largest) = (false, true);
            } else {
                return budget.reserve(cost).ok_or_else(|| budget.full_error());
            }
        }
    }

    /// Reserves capacity by evicting records of one group. Evicts those with the longest retention only if no group has other
    /// records. A refused claim has no effect, but the request of an evicted record may execute again.
    ///
    /// Searches no shard if the group has no record. Otherwise each claim of a caller that has only leases and orphans would
    /// search all shards.
    fn evict_own_and_reserve(
        &self,
        hash: u64,
        group: PrincipalGroup,
        cost: Cost,
        now: u64,
    ) -> Result<Reservation<'_>, MemoryFull> {
        let budget = &self.shared.budget;
        for is_longest in [false, true] {
            if is_longest && self.shared.usage.has_records() {
                break;
            }
            let usage = self.shared.usage_of(is_longest);
            for distance in 0..self.shards.len() {
                while usage.has_records_of(group) && budget.can_hold(cost) {
                    let mut shard = self.shard_at(self.index(hash) + distance);
                    if let Some(reservation) = budget.reserve(cost) {
                        return Ok(reservation);
                    }
                    if !shard.evict(&self.shared, Some(group), is_longest, now) {
                        break;
                    }
                }
            }
        }
        budget.reserve(cost).ok_or_else(|| budget.full_error())
    }
}
