//! Slots in the order of their deadlines.

use std::collections::{BTreeMap, VecDeque, btree_map};

use super::usage::PrincipalGroup;

/// Entries with equal durations arrive in the order of their deadlines. They go to a queue, where an insertion is one
/// write at the back. An entry with an earlier deadline than the last of the queue goes to a tree.
pub(super) struct Order {
    /// Ascending. The first and the last slot are not removed.
    queue: VecDeque<QueuedSlot>,
    /// The number of removed slots in the queue.
    removed: usize,
    /// Slots that arrived out of order.
    out_of_order: BTreeMap<(u64, u32), PrincipalGroup>,
}

struct QueuedSlot {
    deadline: u64,
    slot: u32,
    /// Copy of the entry's group, so that a search reads no entries.
    group: PrincipalGroup,
    removed: bool,
}

impl QueuedSlot {
    const fn key(&self) -> (u64, u32) {
        (self.deadline, self.slot)
    }
}

impl Order {
    pub(super) const fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            removed: 0,
            out_of_order: BTreeMap::new(),
        }
    }

    /// Adds a slot that is not present under this deadline.
    pub(super) fn insert(&mut self, deadline: u64, slot: u32, group: PrincipalGroup) {
        let is_last = self
            .queue
            .back()
            .is_none_or(|last| last.key() < (deadline, slot));
        if is_last {
            if self.queue.len() == self.queue.capacity() {
                // The default is to double, which leaves up to 16 bytes unused for each slot.
                self.queue.reserve_exact((self.queue.len() / 4).max(4));
            }
            self.queue.push_back(QueuedSlot {
                deadline,
                slot,
                group,
                removed: false,
            });
        } else {
            self.out_of_order.insert((deadline, slot), group);
        }
    }

    /// Removes a slot that is present under this deadline.
    pub(super) fn remove(&mut self, deadline: u64, slot: u32) {
        if self.out_of_order.remove(&(deadline, slot)).is_some() {
            return;
        }
        let is_first = |queued: &QueuedSlot| queued.key() == (deadline, slot);
        if self.queue.front().is_some_and(is_first) {
            self.queue.pop_front();
        } else if let Ok(at) = self
            .queue
            .binary_search_by_key(&(deadline, slot), QueuedSlot::key)
        {
            self.queue[at].removed = true;
            self.removed += 1;
        }
        self.compact();
    }

    /// Returns the slot with the earliest deadline.
    pub(super) fn first(&self) -> Option<(u64, u32)> {
        let queued = self.queue.front().map(QueuedSlot::key);
        let unordered = self.out_of_order.keys().next().copied();
        [queued, unordered].into_iter().flatten().min()
    }

    /// Returns the slot of this group with the earliest deadline. Reads each slot before it, one after another in memory.
    pub(super) fn first_of(&self, group: PrincipalGroup) -> Option<u32> {
        let is_of_group = |queued: &&QueuedSlot| !queued.removed && queued.group == group;
        let queued = self.queue.iter().find(is_of_group).map(QueuedSlot::key);
        let mut unordered = self.out_of_order.iter();
        let unordered = unordered
            .find(|(_, other)| **other == group)
            .map(|it| *it.0);
        let first = [queued, unordered].into_iter().flatten().min();
        first.map(|(_, slot)| slot)
    }

    /// Returns the slots from this deadline and slot on, in the order of their deadlines.
    pub(super) fn iter_from(&self, first: (u64, u32)) -> impl Iterator<Item = (u64, u32)> {
        let start = self.queue.partition_point(|queued| queued.key() < first);
        let queued = self.queue.range(start..).filter(|queued| !queued.removed);
        merge(
            queued.map(QueuedSlot::key),
            self.out_of_order.range(first..).map(|(key, _)| *key),
        )
    }

    /// Drops removed slots at both ends, or everywhere if they are the majority. Frees unused capacity. The amortized cost
    /// does not exceed that of the removals.
    fn compact(&mut self) {
        while self.queue.front().is_some_and(|queued| queued.removed) {
            self.queue.pop_front();
            self.removed -= 1;
        }
        while self.queue.back().is_some_and(|queued| queued.removed) {
            self.queue.pop_back();
            self.removed -= 1;
        }
        if self.removed > self.queue.len() / 2 {
            self.queue.retain(|queued| !queued.removed);
            self.removed = 0;
        }
        if self.queue.capacity() > 64 && self.queue.len() < self.queue.capacity() / 8 {
            self.queue.shrink_to(self.queue.len() * 2);
        }
    }
}

/// Records of one kind in the order of their expiry.
pub(super) struct RecordOrder {
    order: Order,
    /// The number of records of each group that has one. The order is searched only for such a group.
    of_groups: BTreeMap<PrincipalGroup, u32>,
}

impl RecordOrder {
    pub(super) const fn new() -> Self {
        Self {
            order: Order::new(),
            of_groups: BTreeMap::new(),
        }
    }

    /// Adds a record that is not present under this deadline.
    pub(super) fn insert(&mut self, deadline: u64, slot: u32, group: PrincipalGroup) {
        self.order.insert(deadline, slot, group);
        *self.of_groups.entry(group).or_default() += 1;
    }

    /// Removes a record that is present under this deadline.
    pub(super) fn remove(&mut self, deadline: u64, slot: u32, group: PrincipalGroup) {
        self.order.remove(deadline, slot);
        if let btree_map::Entry::Occupied(mut records) = self.of_groups.entry(group) {
            *records.get_mut() -= 1;
            if *records.get() == 0 {
                records.remove();
            }
        }
    }

    /// Returns the record that expires first.
    pub(super) fn first(&self) -> Option<(u64, u32)> {
        self.order.first()
    }

    /// Returns the record of this group that expires first.
    pub(super) fn first_of(&self, group: PrincipalGroup) -> Option<u32> {
        let has_record = self.of_groups.contains_key(&group);
        has_record.then(|| self.order.first_of(group)).flatten()
    }

    pub(super) const fn order(&self) -> &Order {
        &self.order
    }
}

/// Returns the items of two ascending iterators, in ascending order.
fn merge(
    queued: impl Iterator<Item = (u64, u32)>,
    unordered: impl Iterator<Item = (u64, u32)>,
) -> impl Iterator<Item = (u64, u32)> {
    let (mut queued, mut unordered) = (queued.peekable(), unordered.peekable());
    std::iter::from_fn(move || match (queued.peek(), unordered.peek()) {
        (Some(first), Some(other)) if other < first => unordered.next(),
        (None, _) => unordered.next(),
        (Some(_), _) => queued.next(),
    })
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::random::Random;

    const GROUP: PrincipalGroup = PrincipalGroup::of(0);

    fn group_of(slot: u32) -> PrincipalGroup {
        PrincipalGroup::of(u64::from(slot % 3))
    }

    #[test]
    fn order_matches_tree_under_random_changes() {
        let mut random = Random::new(7);
        for spread in [1, 10, 1000] {
            let (mut order, mut tree, mut now) = (Order::new(), BTreeSet::new(), 0);
            for slot in 0..20_000 {
                now += random.below(3) as u64;
                let deadline = now + random.below(spread) as u64;
                order.insert(deadline, slot, group_of(slot));
                tree.insert((deadline, slot));
                // More insertions than removals at first, then more removals than insertions.
                for _ in 0..random.below(if slot < 10_000 { 3 } else { 4 }) {
                    let from =
                        (now + random.below(2 * spread) as u64).saturating_sub(spread as u64);
                    let any = tree.range((from, 0)..).next().copied();
                    let first = tree.first().copied();
                    let removed = if random.once_in(4) { first } else { any };
                    if let Some((deadline, slot)) = removed {
                        order.remove(deadline, slot);
                        tree.remove(&(deadline, slot));
                    }
                }
                assert_eq!(order.first(), tree.first().copied());
                if slot % 100 == 0 {
                    for group in [0, 1, 2, 3].map(PrincipalGroup::of) {
                        let mut slots = tree.iter().map(|(_, slot)| *slot);
                        let first = slots.find(|slot| group_of(*slot) == group);
                        assert_eq!(order.first_of(group), first);
                    }
                }
                if slot % 1000 == 0 {
                    assert!(order.iter_from((0, 0)).eq(tree.iter().copied()));
                    let first = (now + 1, slot / 2);
                    let rest = tree.range(first..).copied();
                    assert!(order.iter_from(first).eq(rest));
                }
                assert_eq!(
                    order.queue.len() - order.removed + order.out_of_order.len(),
                    tree.len()
                );
            }
            while let Some((deadline, slot)) = tree.pop_first() {
                assert_eq!(order.first(), Some((deadline, slot)));
                order.remove(deadline, slot);
            }
            assert_eq!(order.first(), None);
        }
    }

    #[test]
    fn ascending_deadlines_bypass_tree() {
        let mut order = Order::new();
        for slot in 0..1000 {
            order.insert(u64::from(slot / 10), slot, GROUP);
        }
        assert!(order.out_of_order.is_empty());
    }

    #[test]
    fn ascending_deadlines_need_no_allocations() {
        const LEASES: u32 = 1000;
        let mut order = Order::new();
        for slot in 0..LEASES {
            order.insert(u64::from(slot), slot, GROUP);
        }
        let counted = allocation_counter::measure(|| {
            for slot in LEASES..100 * LEASES {
                order.insert(u64::from(slot), slot, GROUP);
                let first = slot - LEASES;
                order.remove(u64::from(first), first);
            }
        });
        // The queue may grow once. A tree would allocate a node for each six slots.
        assert!(counted.count_total <= 1, "{}", counted.count_total);
    }

    #[test]
    fn queue_grows_by_quarter() {
        let mut order = Order::new();
        for slot in 0..10_000 {
            order.insert(u64::from(slot), slot, GROUP);
            let (len, capacity) = (order.queue.len(), order.queue.capacity());
            assert!(capacity <= len + len / 4 + 4, "{capacity} for {len}");
        }
    }

    #[test]
    fn removed_slots_free_memory_behind_first_slot() {
        let mut order = Order::new();
        order.insert(0, 0, GROUP);
        for slot in 1..100_000 {
            order.insert(u64::from(slot), slot, GROUP);
            order.remove(u64::from(slot), slot);
            assert!(order.queue.len() < 10, "{} in the queue", order.queue.len());
        }
        for slot in 100_000..200_000 {
            order.insert(u64::from(slot), slot, GROUP);
        }
        for slot in 100_000..200_000 {
            order.remove(u64::from(slot), slot);
        }
        assert_eq!(order.first(), Some((0, 0)));
        assert!(order.queue.capacity() <= 64);
    }
}
