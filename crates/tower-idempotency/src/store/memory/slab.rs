//! Values in pages of a fixed size. Growth wastes at most a page, and an empty page is freed. Only the first page grows with its
//! values; no other growth moves a value.

use smallvec::SmallVec;

const PAGE: usize = 32;
const ALL_FREE: u32 = u32::MAX;

/// Values under small stable numbers. The first page is inline, so a slab with few values takes one allocation.
pub(super) struct Slab<T> {
    pages: SmallVec<[SlabPage<T>; 1]>,
    /// The pages with a free slot, each listed once. The last is filled first.
    open: SmallVec<[u32; 2]>,
    /// The number of pages that have memory and no value: at most one. A slab that alternates between zero values and
    /// one then does not allocate each time.
    spare: u32,
}

struct SlabPage<T> {
    /// The slots that had a value; `None` unless the page has a value or is the spare page. Memory of slots that never had a
    /// value is not written.
    slots: Option<Vec<Option<T>>>,
    /// A bit for each slot, set if the slot is free.
    free: u32,
}

impl<T> Slab<T> {
    pub(super) fn new() -> Self {
        Self {
            pages: SmallVec::new(),
            open: SmallVec::new(),
            spare: 0,
        }
    }

    pub(super) fn insert(&mut self, value: T) -> u32 {
        let number = self.open.last().copied().unwrap_or_else(|| {
            let number = u32::try_from(self.pages.len()).expect("2^32 pages do not fit in memory");
            self.pages.push(SlabPage {
                slots: None,
                free: ALL_FREE,
            });
            self.open.push(number);
            number
        });
        let page = &mut self.pages[number as usize];
        if page.slots.is_some() && page.free == ALL_FREE {
            self.spare -= 1;
        }
        let at = page.free.trailing_zeros();
        // A slab with few values has only the first page, and takes as much memory as its values need.
        let capacity = if number == 0 { 0 } else { PAGE };
        let slots = page
            .slots
            .get_or_insert_with(|| Vec::with_capacity(capacity));
        // The first free slot is one that had a value, or the next one.
        match slots.get_mut(at as usize) {
            Some(slot) => *slot = Some(value),
            None => slots.push(Some(value)),
        }
        page.free &= !(1 << at);
        if page.free == 0 {
            self.open.pop();
        }
        number * PAGE as u32 + at
    }

    pub(super) fn get(&self, slot: u32) -> Option<&T> {
        let (number, at) = split(slot);
        self.pages.get(number)?.slots.as_ref()?.get(at)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut T> {
        let (number, at) = split(slot);
        let slots = self.pages.get_mut(number)?.slots.as_mut()?;
        slots.get_mut(at)?.as_mut()
    }

    pub(super) fn remove(&mut self, slot: u32) -> Option<T> {
        let (number, at) = split(slot);
        let page = self.pages.get_mut(number)?;
        let value = page.slots.as_mut()?.get_mut(at)?.take()?;
        if page.free == 0 {
            self.open.push(slot / PAGE as u32);
        }
        page.free |= 1 << at;
        if page.free == ALL_FREE {
            if self.spare == 0 {
                self.spare = 1;
            } else {
                page.slots = None;
            }
        }
        Some(value)
    }
}

const fn split(slot: u32) -> (usize, usize) {
    (slot as usize / PAGE, slot as usize % PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocated_pages<T>(slab: &Slab<T>) -> usize {
        slab.pages.iter().filter(|p| p.slots.is_some()).count()
    }

    #[test]
    fn values_retain_their_slot_while_others_change() {
        let mut slab = Slab::new();
        let slots: Vec<u32> = (0..100).map(|n| slab.insert(n)).collect();
        for slot in slots.iter().step_by(2) {
            assert!(slab.remove(*slot).is_some());
            assert!(slab.remove(*slot).is_none());
        }
        for (n, slot) in slots.iter().enumerate() {
            let expected = (n % 2 == 1).then_some(n);
            assert_eq!(slab.get(*slot).copied(), expected);
            assert_eq!(slab.get_mut(*slot).copied(), expected);
        }
        let more: Vec<u32> = (0..50).map(|n| slab.insert(n)).collect();
        assert!(
            more.iter().all(|slot| *slot < 128),
            "free slots are used before new pages"
        );
    }

    #[test]
    fn slab_with_few_values_takes_little_memory() {
        let mut slab = Slab::new();
        let counted = allocation_counter::measure(|| {
            slab.insert([0_u8; 128]);
        });
        let bytes = counted.bytes_total;
        assert!(bytes < PAGE as u64 * 128 / 4, "{bytes}");
        assert_eq!(counted.count_total, 1);
    }

    #[test]
    fn empty_pages_are_freed() {
        let mut slab = Slab::new();
        let slots: Vec<u32> = (0..PAGE * 10).map(|n| slab.insert(n)).collect();
        assert_eq!(allocated_pages(&slab), 10);
        for slot in slots {
            slab.remove(slot);
        }
        assert_eq!(allocated_pages(&slab), 1);
        for n in 0..PAGE * 10 {
            slab.insert(n);
        }
        assert_eq!(slab.pages.len(), 10, "numbers are used again");
    }
}
