//! What the store may hold in all: counted exactly, reserved before it is used.

use std::{fmt, sync::atomic::Ordering::Relaxed};

use super::sync::AtomicUsize;

/// What an entry takes beside the bytes of its record: its slot, its share of the index and of the order by deadline,
/// the header that a record gets when it is first replayed, and what the allocator adds. Measured, and then rounded up.
pub(super) const ENTRY_BYTES: usize = 240;

/// The memory store holds as much as it may, and all of it is leases.
///
/// The source of the [`StoreError::Backend`](crate::store::StoreError::Backend) of a call that found no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFull {
    max_entries: usize,
    max_bytes: usize,
}

impl fmt::Display for MemoryFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "expected room within {} entries and {} bytes, found leases only",
            self.max_entries, self.max_bytes
        )
    }
}

impl std::error::Error for MemoryFull {}

/// The counters are independent of each other and of what they count, so they need no ordering: the shard locks order
/// the entries themselves.
pub(super) struct Budget {
    entries: AtomicUsize,
    bytes: AtomicUsize,
    max_entries: AtomicUsize,
    max_bytes: AtomicUsize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cost {
    entries: usize,
    bytes: usize,
}

impl Cost {
    pub(super) const ENTRY: Self = Self {
        entries: 1,
        bytes: ENTRY_BYTES,
    };

    /// Of a record in an entry that is there.
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

    /// The largest record that fits in an otherwise empty store.
    pub(super) fn largest_record(&self) -> usize {
        self.max_bytes.load(Relaxed).saturating_sub(ENTRY_BYTES)
    }

    pub(super) fn full(&self) -> MemoryFull {
        MemoryFull {
            max_entries: self.max_entries.load(Relaxed),
            max_bytes: self.max_bytes.load(Relaxed),
        }
    }

    /// Whether it fits in an otherwise empty store.
    pub(super) fn could_hold(&self, cost: Cost) -> bool {
        cost.entries <= self.max_entries.load(Relaxed) && cost.bytes <= self.max_bytes.load(Relaxed)
    }

    pub(super) fn reserve(&self, cost: Cost) -> Option<Room<'_>> {
        if cost.entries > 0 {
            add_within(&self.entries, cost.entries, &self.max_entries)?;
        }
        if add_within(&self.bytes, cost.bytes, &self.max_bytes).is_none() {
            self.entries.fetch_sub(cost.entries, Relaxed);
            return None;
        }
        Some(Room { budget: self, cost })
    }

    pub(super) fn give_back(&self, cost: Cost) {
        self.entries.fetch_sub(cost.entries, Relaxed);
        self.bytes.fetch_sub(cost.bytes, Relaxed);
    }
}

/// Room that was reserved: given back when it is dropped, kept when it is filled.
#[must_use]
pub(super) struct Room<'a> {
    budget: &'a Budget,
    cost: Cost,
}

impl Room<'_> {
    /// `self` is used up by an entry or a record, whose removal gives the room back.
    pub(super) fn fill(mut self) {
        self.cost = Cost {
            entries: 0,
            bytes: 0,
        };
    }

    pub(super) fn is_for(&self, cost: Cost) -> bool {
        self.cost == cost
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if self.cost.bytes > 0 || self.cost.entries > 0 {
            self.budget.give_back(self.cost);
        }
    }
}

fn add_within(counter: &AtomicUsize, add: usize, max: &AtomicUsize) -> Option<usize> {
    let max = max.load(Relaxed);
    counter
        .fetch_update(Relaxed, Relaxed, |now| {
            now.checked_add(add).filter(|sum| *sum <= max)
        })
        .ok()
}
