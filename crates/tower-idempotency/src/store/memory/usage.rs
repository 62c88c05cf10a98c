//! Counts the entries of each group of principals. Records of the largest group are evicted first. Leases and orphans are
//! never evicted, so each group has a share of the store for them.
//!
//! The principals are divided into a fixed number of groups by a keyed hash of their scope. A table of exact counts would
//! grow with the number of principals, and need a lock of its own.

use std::sync::atomic::Ordering::Relaxed;

use super::{
    budget::{Budget, Cost},
    sync::AtomicUsize,
};

/// The number of groups. Two principals share one with a probability of 1 in 1,024.
#[cfg(not(all(test, shuttle)))]
const GROUPS: usize = 1024;
#[cfg(all(test, shuttle))]
const GROUPS: usize = 8;

/// Share of the store from which a group counts as large. The search for the records of smaller groups is not worth its
/// cost.
const LARGE: f32 = 1.0 / 64.0;

/// Share below which the largest group no longer counts as large. The distance to [`LARGE`] prevents repeated comparisons of
/// all groups for a caller near the limit.
const NO_LONGER_LARGE: f32 = LARGE * 3.0 / 4.0;

/// The groups are compared again once 1/256 of the store was evicted.
const COMPARED_EVERY: usize = 256;

/// A group of principals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PrincipalGroup(u16);

/// Share of the store that a group uses for leases and orphans. They are never evicted.
pub(super) enum LeaseShare {
    /// Less than an eighth. The group may use all of the store, and evict records of any group.
    Small,
    /// At least an eighth, and all groups together use less than three quarters. The group may use free capacity and evict its own
    /// records, those with the longest retention only if no group has others. Otherwise it could replace the records of all other
    /// groups by orphans.
    Large,
    /// At least an eighth, and all groups together use three quarters. The last quarter is for small groups.
    UsedUp,
}

/// Counters of the entries of each group. They are changed under the lock of the entry's shard, and read without one, so a
/// comparison may be slightly out of date.
pub(super) struct Usage {
    groups: Box<[Counters]>,
    /// The group that held most at the last comparison.
    largest: AtomicUsize,
    /// Share of the largest group below which the groups are compared again, as the bits of an `f32`. `INFINITY` before the
    /// first comparison, 0 if no group was large at the last one.
    floor: AtomicUsize,
    /// Evictions since the last comparison.
    evicted: Counters,
    /// The sum of all groups, if it is counted.
    total: Option<Counters>,
}

#[derive(Default)]
struct Counters {
    /// Completed entries.
    entries: AtomicUsize,
    /// Bytes of the completed entries.
    bytes: AtomicUsize,
    leases_and_orphans: AtomicUsize,
}

impl PrincipalGroup {
    /// Returns the group of a hash.
    pub(super) const fn of(hash: u64) -> Self {
        Self((hash % GROUPS as u64) as u16)
    }
}

impl Usage {
    pub(super) fn new() -> Self {
        Self {
            groups: (0..GROUPS).map(|_| Counters::default()).collect(),
            largest: AtomicUsize::new(0),
            // Above every share: the first call compares.
            floor: AtomicUsize::new(f32::INFINITY.to_bits() as usize),
            evicted: Counters::default(),
            total: None,
        }
    }

    /// Also counts the sum of all groups. All calls that store or remove a record then change the same counters.
    pub(super) fn with_total() -> Self {
        Self {
            total: Some(Counters::default()),
            ..Self::new()
        }
    }

    pub(super) fn add(&self, group: PrincipalGroup, cost: Cost) {
        for counters in self.counters_of(group) {
            counters.add(cost);
        }
    }

    pub(super) fn remove(&self, group: PrincipalGroup, cost: Cost) {
        for counters in self.counters_of(group) {
            counters.entries.fetch_sub(cost.entries, Relaxed);
            counters.bytes.fetch_sub(cost.bytes, Relaxed);
        }
    }

    fn counters_of(&self, group: PrincipalGroup) -> impl Iterator<Item = &Counters> {
        let group = &self.groups[usize::from(group.0)];
        std::iter::once(group).chain(&self.total)
    }

    /// Returns `true` if the counted records fill more than half of the store.
    pub(super) fn fills_half(&self, budget: &Budget) -> bool {
        let total = self.total.as_ref();
        total.is_some_and(|total| Shares::new(budget).of(total) > 0.5)
    }

    /// Returns `true` if a group has a record.
    pub(super) fn has_records(&self) -> bool {
        let has_record = |counters: &Counters| counters.entries.load(Relaxed) > 0;
        self.groups.iter().any(has_record)
    }

    /// Returns `true` if this group has a record.
    pub(super) fn has_records_of(&self, group: PrincipalGroup) -> bool {
        self.groups[usize::from(group.0)].entries.load(Relaxed) > 0
    }

    pub(super) fn add_lease(&self, group: PrincipalGroup) {
        let counters = &self.groups[usize::from(group.0)];
        counters.leases_and_orphans.fetch_add(1, Relaxed);
    }

    pub(super) fn remove_lease(&self, group: PrincipalGroup) {
        let counters = &self.groups[usize::from(group.0)];
        counters.leases_and_orphans.fetch_sub(1, Relaxed);
    }

    /// Returns the share of a group that claims one more lease of this many bytes.
    pub(super) fn lease_share(
        &self,
        group: PrincipalGroup,
        lease_bytes: usize,
        budget: &Budget,
    ) -> LeaseShare {
        let (entries, bytes) = budget.limits();
        let max = entries.min(bytes / lease_bytes.max(1));
        let leases = |counters: &Counters| counters.leases_and_orphans.load(Relaxed);
        if leases(&self.groups[usize::from(group.0)]) < (max / 8).max(1) {
            LeaseShare::Small
        } else if self.groups.iter().map(leases).sum::<usize>() < max - max / 4 {
            LeaseShare::Large
        } else {
            LeaseShare::UsedUp
        }
    }

    /// Counts the eviction of an unexpired record.
    pub(super) fn note_eviction(&self, cost: Cost) {
        self.evicted.add(cost);
    }

    /// Returns the group with the largest share of the entries or of the bytes, if it counts as large.
    ///
    /// A group counts as large above 1/64 of the store. While a group is large, the bound is 3/256 (3/4 of 1/64).
    ///
    /// Reuses the last comparison until 1/256 of the store was evicted, or until the largest share crosses its bound. The
    /// bound is `floor` while a group is large, and 1/64 otherwise.
    pub(super) fn largest(&self, budget: &Budget) -> Option<PrincipalGroup> {
        let shares = Shares::new(budget);
        let largest = self.largest.load(Relaxed);
        let share = shares.of(&self.groups[largest]);
        let few_evictions = shares.of(&self.evicted) * (COMPARED_EVERY as f32) < 1.0;
        let floor = floor_of(self.floor.load(Relaxed));
        let was_large = floor > 0.0 && floor.is_finite();
        if few_evictions && share >= floor && (was_large || share <= LARGE) {
            return was_large.then(|| group(largest));
        }
        self.compare(&shares, was_large)
    }

    /// Compares the groups. Returns the one with the largest share, if it counts as large.
    fn compare(&self, shares: &Shares, was_large: bool) -> Option<PrincipalGroup> {
        let large = if was_large { NO_LONGER_LARGE } else { LARGE };
        let (mut first, mut second) = ((0.0, 0), 0.0);
        for (group, counters) in self.groups.iter().enumerate() {
            let share = shares.of(counters);
            if share > first.0 {
                second = first.0;
                first = (share, group);
            } else if share > second {
                second = share;
            }
        }
        let (share, largest) = first;
        // Compares again once the group has fallen below the second and has lost 1/8 of its share. Two equal groups then do not
        // cause a comparison at each eviction.
        let floor = if share > large {
            f32::min(second, share * 7.0 / 8.0).max(NO_LONGER_LARGE)
        } else {
            0.0
        };
        self.largest.store(largest, Relaxed);
        self.floor.store(floor.to_bits() as usize, Relaxed);
        self.evicted.entries.store(0, Relaxed);
        self.evicted.bytes.store(0, Relaxed);
        (share > large).then(|| group(largest))
    }
}

#[cfg(test)]
impl Usage {
    /// Returns the sums of all groups: completed entries, their bytes, and leases and orphans.
    pub(super) fn sums(&self) -> (usize, usize, usize) {
        let sum = |of: fn(&Counters) -> &AtomicUsize| {
            let counters = self.groups.iter();
            counters.map(|it| of(it).load(Relaxed)).sum::<usize>()
        };
        let sums = (
            sum(|counters| &counters.entries),
            sum(|counters| &counters.bytes),
            sum(|counters| &counters.leases_and_orphans),
        );
        if let Some(total) = &self.total {
            let total = (total.entries.load(Relaxed), total.bytes.load(Relaxed));
            assert_eq!(total, (sums.0, sums.1));
        }
        sums
    }
}

impl Counters {
    fn add(&self, cost: Cost) {
        self.entries.fetch_add(cost.entries, Relaxed);
        self.bytes.fetch_add(cost.bytes, Relaxed);
    }
}

/// Factors that turn counts into shares of the store.
struct Shares {
    entry: f32,
    byte: f32,
}

impl Shares {
    fn new(budget: &Budget) -> Self {
        let (entries, bytes) = budget.limits();
        Self {
            entry: 1.0 / float(entries.max(1)),
            byte: 1.0 / float(bytes.max(1)),
        }
    }

    fn of(&self, counters: &Counters) -> f32 {
        let entries = float(counters.entries.load(Relaxed)) * self.entry;
        let bytes = float(counters.bytes.load(Relaxed)) * self.byte;
        entries.max(bytes)
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "24 bits suffice for a comparison"
)]
const fn float(count: usize) -> f32 {
    count as f32
}

#[expect(clippy::cast_possible_truncation, reason = "the bits of an f32")]
const fn floor_of(bits: usize) -> f32 {
    f32::from_bits(bits as u32)
}

#[expect(clippy::cast_possible_truncation, reason = "there are fewer groups")]
const fn group(index: usize) -> PrincipalGroup {
    PrincipalGroup(index as u16)
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    /// Each change of the result takes a comparison of all groups.
    #[test]
    fn fairness_does_not_flicker_near_limit() {
        const ENTRIES: usize = 64_000;
        let (budget, usage) = (Budget::new(ENTRIES, usize::MAX), Usage::new());
        let entry = Cost::entry_with(0);
        let hostile = PrincipalGroup(7);
        let hold = |count: usize| {
            let held = usage.groups[7].entries.load(Relaxed);
            (held..count).for_each(|_| usage.add(hostile, entry));
            (count..held).for_each(|_| usage.remove(hostile, entry));
            // More than it takes for a comparison.
            (0..=ENTRIES / COMPARED_EVERY).for_each(|_| usage.note_eviction(entry));
            usage.largest(&budget)
        };
        assert_eq!(hold(990), None);
        for _ in 0..100 {
            assert_eq!(hold(1001), Some(hostile));
            assert_eq!(hold(1000), Some(hostile));
            assert_eq!(hold(800), Some(hostile));
        }
        for _ in 0..100 {
            assert_eq!(hold(740), None);
            assert_eq!(hold(990), None);
        }
        assert_eq!(hold(1001), Some(hostile));
    }
}
