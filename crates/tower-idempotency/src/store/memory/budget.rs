//! Capacity of the store: counted exactly and reserved before use.

use std::{fmt, sync::atomic::Ordering::Relaxed};

use super::sync::AtomicUsize;

/// Memory of an entry without the bytes of its record. Includes its slot, its share of the index and of the deadline
/// order, the header of its first replay, and the allocator overhead. Measured, then rounded up.
pub(super) const ENTRY_BYTES: usize = 240;

/// Error of a full memory store that holds only leases and orphans.
///
/// The source of the [`StoreError::Backend`](crate::store::StoreError::Backend) of a call that could not reserve
/// capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFull {
    max_entries: usize,
    max_bytes: usize,
}

impl fmt::Display for MemoryFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "leases and orphans fill the memory store of at most {} entries and {} bytes: \
             raise `with_max_entries` or `with_max_bytes`",
            self.max_entries, self.max_bytes
        )
    }
}

impl std::error::Error for MemoryFull {}

/// Counters of entries and bytes, with their limits. The counters are independent of each other and of the entries, so
/// they need no memory ordering: the shard locks order the entries.
pub(super) struct Budget {
    entries: AtomicUsize,
    bytes: AtomicUsize,
    max_entries: AtomicUsize,
    max_bytes: AtomicUsize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cost {
    pub(super) entries: usize,
    pub(super) bytes: usize,
}

impl Cost {
    pub(super) const ENTRY: Self = Self {
        entries: 1,
        bytes: ENTRY_BYTES,
    };

    pub(super) const NONE: Self = Self {
        entries: 0,
        bytes: 0,
    };

    /// Returns the cost of a record in an existing entry.
    pub(super) const fn record(len: usize) -> Self {
        Self {
            entries: 0,
            bytes: len,
        }
    }

    pub(super) const fn entry_with(len: usize) -> Self {
        Self {
            entries: 1,
            bytes: ENTRY_BYTES.saturating_add(len),
        }
    }

    pub(super) const fn and(self, other: Self) -> Self {
        Self {
            entries: self.entries + other.entries,
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

impl Budget {
    pub(super) fn new(max_entries: usize, max_bytes: usize) -> Self {
        Self {
            entries: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            max_entries: AtomicUsize::new(max_entries),
            max_bytes: AtomicUsize::new(max_bytes),
        }
    }

    pub(super) fn set_max_entries(&self, max: usize) {
        self.max_entries.store(max, Relaxed);
    }

    pub(super) fn set_max_bytes(&self, max: usize) {
        self.max_bytes.store(max, Relaxed);
    }

    pub(super) fn entries(&self) -> usize {
        self.entries.load(Relaxed)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Returns the maximum numbers of entries and of bytes.
    pub(super) fn limits(&self) -> (usize, usize) {
        (self.max_entries.load(Relaxed), self.max_bytes.load(Relaxed))
    }

    /// Returns the size of the largest record that fits in an otherwise empty store, in an entry with details of this cost.
    pub(super) fn largest_record(&self, details: Cost) -> usize {
        let entry = Cost::ENTRY.and(details);
        self.max_bytes.load(Relaxed).saturating_sub(entry.bytes)
    }

    pub(super) fn full_error(&self) -> MemoryFull {
        MemoryFull {
            max_entries: self.max_entries.load(Relaxed),
            max_bytes: self.max_bytes.load(Relaxed),
        }
    }

    /// Returns `true` if the cost fits in an otherwise empty store.
    pub(super) fn can_hold(&self, cost: Cost) -> bool {
        cost.entries <= self.max_entries.load(Relaxed) && cost.bytes <= self.max_bytes.load(Relaxed)
    }

    pub(super) fn reserve(&self, cost: Cost) -> Option<Reservation<'_>> {
        if cost.entries > 0 {
            add_up_to(&self.entries, cost.entries, &self.max_entries)?;
        }
        if add_up_to(&self.bytes, cost.bytes, &self.max_bytes).is_none() {
            self.entries.fetch_sub(cost.entries, Relaxed);
            return None;
        }
        Some(Reservation { budget: self, cost })
    }

    /// Adds a cost without a check of the limits. A reservation fails until the limits are kept again.
    pub(super) fn add(&self, cost: Cost) {
        self.entries.fetch_add(cost.entries, Relaxed);
        self.bytes.fetch_add(cost.bytes, Relaxed);
    }

    pub(super) fn release(&self, cost: Cost) {
        self.entries.fetch_sub(cost.entries, Relaxed);
        self.bytes.fetch_sub(cost.bytes, Relaxed);
    }
}

/// Reserved capacity. Dropping it returns the capacity; committing it assigns the capacity to an entry or a record.
#[must_use]
pub(super) struct Reservation<'a> {
    budget: &'a Budget,
    cost: Cost,
}

impl Reservation<'_> {
    /// Assigns the capacity to an entry or a record, whose removal returns it.
    pub(super) fn commit(mut self) {
        self.cost = Cost::NONE;
    }

    pub(super) fn has_cost(&self, cost: Cost) -> bool {
        self.cost == cost
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.cost.bytes > 0 || self.cost.entries > 0 {
            self.budget.release(self.cost);
        }
    }
}

fn add_up_to(counter: &AtomicUsize, add: usize, max: &AtomicUsize) -> Option<usize> {
    let max = max.load(Relaxed);
    counter
        .fetch_update(Relaxed, Relaxed, |now| {
            now.checked_add(add).filter(|sum| *sum <= max)
        })
        .ok()
}
