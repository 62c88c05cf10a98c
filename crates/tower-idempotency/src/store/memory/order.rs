//! Slots in the order of their deadlines.

use std::collections::{BTreeSet, VecDeque};

/// Deadlines of one length come in the order in which they end: they stand in a queue, where a new one costs a write
/// behind the last. One that ends before the last of the queue goes to a tree.
pub(super) struct Order {
    /// Ascending. The first and the last are not gone.
    queue: VecDeque<Place>,
    /// How many of the queue are gone.
    gone: usize,
    /// Those that came out of order.
    stragglers: BTreeSet<(u64, u32)>,
}

struct Place {
    deadline: u64,
    slot: u32,
    gone: bool,
}

impl Place {
    const fn key(&self) -> (u64, u32) {
        (self.deadline, self.slot)
    }
}

impl Order {
    pub(super) const fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            gone: 0,
            stragglers: BTreeSet::new(),
        }
    }

    /// Adds a slot that is not there under this deadline.
    pub(super) fn insert(&mut self, deadline: u64, slot: u32) {
        let is_last = self
            .queue
            .back()
            .is_none_or(|last| last.key() < (deadline, slot));
        if is_last {
            self.queue.push_back(Place {
                deadline,
                slot,
                gone: false,
            });
        } else {
            self.stragglers.insert((deadline, slot));
        }
    }

    /// Takes a slot out that is there under this deadline.
    pub(super) fn remove(&mut self, deadline: u64, slot: u32) {
        if self.stragglers.remove(&(deadline, slot)) {
            return;
        }
        let is_first = |place: &Place| place.key() == (deadline, slot);
        if self.queue.front().is_some_and(is_first) {
            self.queue.pop_front();
        } else if let Ok(at) = self
            .queue
            .binary_search_by_key(&(deadline, slot), Place::key)
        {
            self.queue[at].gone = true;
            self.gone += 1;
        }
        self.tidy();
    }

    /// The slot whose deadline comes first.
    pub(super) fn first(&self) -> Option<(u64, u32)> {
        let queued = self.queue.front().map(Place::key);
        let straggler = self.stragglers.first().copied();
        match (queued, straggler) {
            (Some(queued), Some(straggler)) => Some(queued.min(straggler)),
            (queued, straggler) => queued.or(straggler),
        }
    }

    /// Drops what is gone at both ends, and all of it when it is more than what is there; gives room back that is no
    /// longer used. Each costs no more than the removals before it did.
    fn tidy(&mut self) {
        while self.queue.front().is_some_and(|place| place.gone) {
            self.queue.pop_front();
            self.gone -= 1;
        }
        while self.queue.back().is_some_and(|place| place.gone) {
            self.queue.pop_back();
            self.gone -= 1;
        }
        if self.gone > self.queue.len() / 2 {
            self.queue.retain(|place| !place.gone);
            self.gone = 0;
        }
        if self.queue.capacity() > 64 && self.queue.len() < self.queue.capacity() / 8 {
            self.queue.shrink_to(self.queue.len() * 2);
        }
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn it_is_the_order_of_a_tree_whatever_comes_and_goes() {
        let mut random = Random::new(7);
        for spread in [1, 10, 1000] {
            let (mut order, mut tree, mut now) = (Order::new(), BTreeSet::new(), 0);
            for slot in 0..20_000 {
                now += random.below(3) as u64;
                let deadline = now + random.below(spread) as u64;
                order.insert(deadline, slot);
                tree.insert((deadline, slot));
                // More come than go, then more go than come.
                for _ in 0..random.below(if slot < 10_000 { 3 } else { 4 }) {
                    let from =
                        (now + random.below(2 * spread) as u64).saturating_sub(spread as u64);
                    let any = tree.range((from, 0)..).next().copied();
                    let first = tree.first().copied();
                    let gone = if random.once_in(4) { first } else { any };
                    if let Some((deadline, slot)) = gone {
                        order.remove(deadline, slot);
                        tree.remove(&(deadline, slot));
                    }
                }
                assert_eq!(order.first(), tree.first().copied());
                assert_eq!(
                    order.queue.len() - order.gone + order.stragglers.len(),
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
    fn deadlines_of_one_length_never_reach_the_tree() {
        let mut order = Order::new();
        for slot in 0..1000 {
            order.insert(u64::from(slot / 10), slot);
        }
        assert!(order.stragglers.is_empty());
    }

    #[test]
    fn what_left_gives_its_room_back_even_behind_one_that_stays() {
        let mut order = Order::new();
        order.insert(0, 0);
        for slot in 1..100_000 {
            order.insert(u64::from(slot), slot);
            order.remove(u64::from(slot), slot);
            assert!(order.queue.len() < 10, "{} in the queue", order.queue.len());
        }
        for slot in 100_000..200_000 {
            order.insert(u64::from(slot), slot);
        }
        for slot in 100_000..200_000 {
            order.remove(u64::from(slot), slot);
        }
        assert_eq!(order.first(), Some((0, 0)));
        assert!(order.queue.capacity() <= 64);
    }
}
