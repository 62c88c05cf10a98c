//! Completed records in memory, within bytes and age.
//!
//! The records are in queues, one for each group of principals, in the order in which they were inserted. When the tier is
//! full, it removes the oldest record of the group that uses most memory. A hit changes nothing, and needs only a read
//! lock.

use std::{
    collections::VecDeque,
    hash::BuildHasher,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use hashbrown::{DefaultHashBuilder, HashTable};
use tokio::time::Instant;

use crate::{
    store::{Acquired, Fingerprint, KeyId, ScopeDigest, Token},
    telemetry,
};

/// Memory of a record in addition to its bytes. Includes its share of index and queue, the header of its bytes and the
/// allocator overhead. Measured, then rounded up.
pub(super) const OVERHEAD: usize = 320;

/// The number of groups of principals. Two principals share one with a probability of 1 to 256.
const GROUPS: usize = 256;

/// A record above 1/8 of the tier is not stored, because it would evict the records of many callers.
const LARGEST: usize = 8;

/// The number of expired records that an insertion removes from each of two groups: its own group, and the other groups in
/// rotation.
const REMOVED_EACH: usize = 4;

/// The records in the memory of one process.
pub(super) struct Tier {
    records: RwLock<Records>,
    hasher: DefaultHashBuilder,
    /// In nanoseconds.
    max_age: AtomicU64,
    max_bytes: AtomicUsize,
}

/// A record, as the store reported it or accepted it.
pub(super) struct TierRecord {
    pub(super) id: KeyId,
    pub(super) fingerprint: Fingerprint,
    pub(super) token: Option<Token>,
    pub(super) record: Bytes,
    /// Instant at which the call to the store was sent. The age and the retention count from here, so the record does not
    /// expire later than at the store.
    pub(super) sent: Instant,
    /// Instant at which the record expires at the store, at the earliest.
    pub(super) expires: Instant,
}

struct Records {
    by_id: HashTable<Arc<TierRecord>>,
    groups: Box<[RecordGroup]>,
    bytes: usize,
    /// The group that the next insertion cleans in addition to its own.
    next_cleaned: usize,
    /// Time at which the age was last lowered, or a record was last removed. A reply to an earlier call is not inserted.
    valid_from: Option<Instant>,
}

/// The records of some principals.
#[derive(Default)]
struct RecordGroup {
    /// The oldest record first.
    queue: VecDeque<Arc<TierRecord>>,
    bytes: usize,
    /// Time at which the oldest record was sent.
    oldest: Option<Instant>,
}

impl Tier {
    pub(super) fn new(max_age: Duration, max_bytes: usize) -> Self {
        Self {
            records: RwLock::new(Records {
                by_id: HashTable::new(),
                groups: new_groups(),
                bytes: 0,
                next_cleaned: 0,
                valid_from: None,
            }),
            hasher: DefaultHashBuilder::default(),
            max_age: AtomicU64::new(nanos(max_age)),
            max_bytes: AtomicUsize::new(max_bytes),
        }
    }

    pub(super) fn set_max_age(&self, max: Duration) {
        let before = self.max_age.swap(nanos(max), Relaxed);
        if nanos(max) < before {
            // A later, longer age must not make these records valid again: the store may have others by then.
            let mut records = self.records.write().unwrap_or_else(PoisonError::into_inner);
            let removed = records.clear();
            records.valid_from = Some(Instant::now());
            drop(records);
            // Other calls do not wait until the memory is free.
            drop(removed);
        }
    }

    pub(super) fn set_max_bytes(&self, max: usize) {
        self.max_bytes.store(max, Relaxed);
    }

    pub(super) fn len(&self) -> usize {
        let records = self.records.read().unwrap_or_else(PoisonError::into_inner);
        records.by_id.len()
    }

    pub(super) fn bytes(&self) -> usize {
        let records = self.records.read().unwrap_or_else(PoisonError::into_inner);
        records.bytes
    }

    /// Returns the record, unless its maximum age or its retention has passed.
    pub(super) fn find(&self, id: &KeyId, now: Instant) -> Option<Acquired> {
        let hash = self.hasher.hash_one(id);
        let records = self.records.read().unwrap_or_else(PoisonError::into_inner);
        let entry = records.by_id.find(hash, |entry| entry.id == *id)?;
        entry
            .is_valid(now, self.max_age())
            .then(|| Acquired::Completed {
                fingerprint: entry.fingerprint,
                record: entry.record.clone(),
                expires_in: entry.expires - now,
                token: entry.token,
            })
    }

    /// Returns `true` unless the maximum age is zero.
    pub(super) fn is_on(&self) -> bool {
        !self.max_age().is_zero()
    }

    /// Returns `true` if a record of this length fits.
    pub(super) fn fits(&self, len: usize) -> bool {
        weight(len) <= self.max_bytes.load(Relaxed) / LARGEST
    }

    /// Inserts a record if it is still valid and [fits](Self::fits).
    ///
    /// A valid record of the same entry stays unless it has another token and its call was sent earlier. Such a record was
    /// deleted at the store while its reply was on the way, and the request has executed again.
    pub(super) fn insert(&self, entry: TierRecord, scope: Option<&ScopeDigest>) {
        let now = Instant::now();
        let hash = self.hasher.hash_one(entry.id);
        let group = self.group(scope);
        let max_bytes = self.max_bytes.load(Relaxed);
        let max_age = self.max_age();
        if !entry.is_valid(now, max_age) || entry.weight() > max_bytes / LARGEST {
            return;
        }
        let entry = Arc::new(entry);
        // Records are freed without the lock.
        let mut removed = Vec::new();
        let mut dropped = 0;
        {
            let mut records = self.records.write().unwrap_or_else(PoisonError::into_inner);
            let records = &mut *records;
            if records.valid_from.is_some_and(|from| entry.sent < from) {
                return;
            }
            let found = records.by_id.find_entry(hash, |old| old.id == entry.id);
            if let Ok(old) = found {
                if old.get().is_valid(now, max_age) && !entry.replaces(old.get()) {
                    return;
                }
                // The queue still contains and counts the old record.
                old.remove();
            }
            let cleaned = records.next_cleaned;
            records.next_cleaned = (cleaned + 1) % GROUPS;
            for group in [group, cleaned] {
                for _ in 0..REMOVED_EACH {
                    if !records.groups[group].has_expired(now, max_age) {
                        break;
                    }
                    removed.extend(records.pop(group, &self.hasher));
                }
            }
            while records.bytes + entry.weight() > max_bytes {
                let group = records.group_to_shrink(now, max_age);
                let Some(popped) = records.pop(group, &self.hasher) else {
                    break;
                };
                dropped += u64::from(popped.is_valid(now, max_age));
                removed.push(popped);
            }
            records.push(group, hash, entry, &self.hasher);
        }
        drop(removed);
        if dropped > 0 {
            telemetry::tier_dropped("full", dropped);
        }
    }

    /// Stops serving the record. Its queue still contains the record until its maximum age has passed.
    ///
    /// The reply to an earlier call may still contain the record. The tier therefore inserts no reply to an earlier call, for
    /// any entry. The next retry of such an entry costs a round trip.
    pub(super) fn remove(&self, id: &KeyId) {
        let hash = self.hasher.hash_one(id);
        let mut records = self.records.write().unwrap_or_else(PoisonError::into_inner);
        records.valid_from = Some(Instant::now());
        if let Ok(found) = records.by_id.find_entry(hash, |entry| entry.id == *id) {
            found.remove();
        }
    }

    fn max_age(&self) -> Duration {
        Duration::from_nanos(self.max_age.load(Relaxed))
    }

    fn group(&self, scope: Option<&ScopeDigest>) -> usize {
        let hash = self.hasher.hash_one(scope);
        usize::try_from(hash % GROUPS as u64).unwrap_or(0)
    }
}

impl TierRecord {
    /// Returns `true` if neither the maximum age nor the retention of the record has passed.
    fn is_valid(&self, now: Instant, max_age: Duration) -> bool {
        now < self.expires && now.saturating_duration_since(self.sent) < max_age
    }

    /// Returns `true` if the store has this record in place of an earlier one of the same entry.
    fn replaces(&self, old: &Self) -> bool {
        self.token != old.token && self.sent > old.sent
    }

    fn weight(&self) -> usize {
        weight(self.record.len())
    }
}

impl Records {
    /// Removes and returns all records.
    fn clear(&mut self) -> (HashTable<Arc<TierRecord>>, Box<[RecordGroup]>) {
        self.bytes = 0;
        (
            std::mem::take(&mut self.by_id),
            std::mem::replace(&mut self.groups, new_groups()),
        )
    }

    /// Returns the group whose oldest record is to be removed. Prefers a group whose oldest record has passed its maximum
    /// age, then the group that uses most memory.
    fn group_to_shrink(&self, now: Instant, max_age: Duration) -> usize {
        let groups = || 0..self.groups.len();
        groups()
            .find(|&group| self.groups[group].has_expired(now, max_age))
            .or_else(|| groups().max_by_key(|&group| self.groups[group].bytes))
            .unwrap_or(0)
    }

    fn push(
        &mut self,
        group: usize,
        hash: u64,
        entry: Arc<TierRecord>,
        hasher: &DefaultHashBuilder,
    ) {
        let weight = entry.weight();
        let group = &mut self.groups[group];
        group.oldest.get_or_insert(entry.sent);
        group.bytes += weight;
        self.bytes += weight;
        group.queue.push_back(Arc::clone(&entry));
        self.by_id
            .insert_unique(hash, entry, |entry| hasher.hash_one(entry.id));
    }

    /// Removes the oldest record of a group.
    fn pop(&mut self, group: usize, hasher: &DefaultHashBuilder) -> Option<Arc<TierRecord>> {
        let group = &mut self.groups[group];
        let entry = group.queue.pop_front()?;
        group.oldest = group.queue.front().map(|next| next.sent);
        group.bytes -= entry.weight();
        self.bytes -= entry.weight();
        if group.queue.capacity() > 64 && group.queue.len() < group.queue.capacity() / 4 {
            group.queue.shrink_to(group.queue.len() * 2);
        }
        // A later record of the same entry may have replaced it.
        let hash = hasher.hash_one(entry.id);
        let found = self
            .by_id
            .find_entry(hash, |found| Arc::ptr_eq(found, &entry));
        if let Ok(found) = found {
            found.remove();
        }
        if self.by_id.capacity() > 256 && self.by_id.len() < self.by_id.capacity() / 8 {
            let len = self.by_id.len() * 2;
            self.by_id.shrink_to(len, |entry| hasher.hash_one(entry.id));
        }
        Some(entry)
    }
}

impl RecordGroup {
    /// Returns `true` if the oldest record has passed its maximum age.
    fn has_expired(&self, now: Instant, max_age: Duration) -> bool {
        self.oldest
            .is_some_and(|sent| now.saturating_duration_since(sent) >= max_age)
    }
}

fn new_groups() -> Box<[RecordGroup]> {
    (0..GROUPS).map(|_| RecordGroup::default()).collect()
}

const fn weight(len: usize) -> usize {
    len.saturating_add(OVERHEAD)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
