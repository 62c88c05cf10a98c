//! The store for a single process.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

pub use self::budget::MemoryFull;
use self::table::Table;
pub(crate) use self::{
    entry::FIRST_LONGEST_DEADLINE,
    inspect::{Change, ListKind, ListPosition, Snapshot},
};
use super::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl};

mod budget;
mod details;
mod entry;
mod evictions;
mod inspect;
mod order;
mod reserve;
mod shard;
mod slab;
mod sync;
mod table;
mod usage;
mod waiters;

#[cfg(test)]
#[cfg(not(shuttle))]
mod model;
#[cfg(test)]
#[cfg(shuttle)]
mod shuttle_tests;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

/// A store for one process. Leases and records live in its memory and are lost with the process.
///
/// Two processes that serve the same clients must share a store. If each has its own `MemoryStore`, each executes the
/// same request once. Clones share all state.
///
/// The store uses tokio's clock, so a test with a paused clock controls it. The clock is monotonic: a step of the wall
/// clock has no effect.
///
/// # Bounds
///
/// The store holds a bounded number of entries and of bytes. It never evicts a lease or an orphan. When it is full, it
/// evicts completed records of the principal that uses most of the store. Principals are compared in 1,024 groups, by the
/// [scope](Claim::scope) of their claims. If no group uses more than 1/64, the store evicts the records of any principal.
/// It begins with the shard of the new entry, and in each shard with the earliest expiry. It counts evictions before the
/// expiry in `idempotency_memory_evicted_total`, and logs them at most once a minute.
///
/// A record with the retention [`Ttl::MAX`] is evicted only if no other record is left. Above half of the store, such records
/// are evicted first. A record that [needs attention](crate::NeedsAttention) has this retention.
///
/// If leases and orphans fill the store, it returns [`StoreError::Backend`] with [`MemoryFull`] as its source. A group
/// whose leases and orphans fill an eighth of the store cannot use the last quarter, and its claims evict only its own
/// records. They evict those with the retention [`Ttl::MAX`] only if no group has other records. A claim that needs more returns
/// [`StoreError::CallerLimit`].
///
/// The store checks expiry at every access. Later writes remove a few other expired entries each; no background task runs.
///
/// The store does not store `owner` and `operation` of a [`Claim`], unless [`with_details`](Self::with_details) is set.
///
/// # Cancellation
///
/// Every call of [`Store`] except [`wait_for_change`](Store::wait_for_change) takes effect when it is first polled, or never. A
/// dropped `wait_for_change` leaves no state. A dropped purge may have deleted some entries.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::store::{Acquired, Claim, Fingerprint, KeyId, MemoryStore, Store, Ttl};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_idempotency::store::StoreError> {
/// let store = MemoryStore::new().with_max_bytes(64 * 1024 * 1024);
/// let (id, fingerprint) = (KeyId::from_bytes([1; 32]), Fingerprint::from_bytes([2; 32]));
///
/// let claim = Claim::new(id, fingerprint)?;
/// let Acquired::Granted { generation, .. } = store.acquire(&claim).await? else {
///     panic!("no other request holds the key");
/// };
/// store.complete(&claim.lease_ref(generation), "response".into(), Ttl::from_secs(3600)).await?;
///
/// let duplicate = Claim::new(id, fingerprint)?;
/// let Acquired::Completed { record, expires_in, token, .. } = store.acquire(&duplicate).await? else {
///     panic!("the entry is completed");
/// };
/// assert_eq!(record, "response");
/// assert!(expires_in > Duration::from_secs(3590) && token == Some(claim.token));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct MemoryStore {
    table: Arc<Table>,
    epoch: Instant,
}

impl MemoryStore {
    /// Creates an empty store of at most 1,000,000 entries and 256 MiB.
    pub fn new() -> Self {
        Self {
            table: Arc::new(Table::for_limits(MAX_ENTRIES, MAX_BYTES)),
            epoch: Instant::now(),
        }
    }

    /// Sets the maximum number of entries, leases included. Default: 1,000,000.
    ///
    /// If the value is too low, the store evicts records before their retention has passed, and a late retry executes
    /// again. If it is too low for the requests in flight and the orphans of a crash, the store rejects new requests.
    /// A value higher than the byte limit allows has no effect. Applies to all clones from the next write on. Set a limit
    /// of several million before the first clone and the first key: later, a growing table can delay a call by milliseconds.
    pub fn with_max_entries(self, max: usize) -> Self {
        self.table.budget().set_max_entries(max);
        self.divided()
    }

    /// Sets the maximum number of bytes. Default: 268,435,456 (256 MiB).
    ///
    /// The store counts the records and 240 bytes for each entry: its measured size with the allocation overhead, rounded
    /// up. If the value is too low, the store evicts records before their retention has passed, and a late retry
    /// executes again. If it exceeds the memory of the machine, the operating system kills the process, and every
    /// lease and record is lost. A record that can never fit is rejected with [`StoreError::RecordTooLarge`]. Below 5,000
    /// bytes, this may be a tombstone or a record that needs attention: a retry after the lease then executes again. Applies
    /// to all clones from the next write on.
    ///
    /// The memory can exceed this value in two cases:
    ///
    /// - A [resolution](crate::inspect::Inspect::resolve) evicts no record. The store can exceed the value by the records of
    ///   resolutions, until a later claim or completion evicts records. If leases and orphans fill the store, these are the
    ///   records of the resolutions, and a retry then executes again. If the leases and orphans of a principal fill an eighth, its
    ///   claims may evict all of its records, also those of resolutions. A retry then executes again, too.
    /// - If large records replace many small ones, the store can take up to 1.5 times the value. It frees the memory of 32
    ///   entries at once, so few small entries that stay can keep the memory of most others.
    pub fn with_max_bytes(self, max: usize) -> Self {
        self.table.budget().set_max_bytes(max);
        self.divided()
    }

    /// Divides a store without clones and entries into as many shards as its limits need.
    fn divided(mut self) -> Self {
        if let Some(table) = Arc::get_mut(&mut self.table) {
            table.divide();
        }
        self
    }

    /// Returns the number of entries: leases, orphans, records, and expired entries that are not yet removed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.budget().entries()
    }

    /// Returns `true` if the store has no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the size of the entries in bytes, as [`with_max_bytes`](Self::with_max_bytes) counts them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.table.budget().bytes()
    }

    /// Acquires a lease at `now`, or returns the state that prevents it.
    pub(crate) fn acquire_now(&self, claim: &Claim, now: Instant) -> Result<Acquired, StoreError> {
        self.table.acquire(claim, self.nanos_at(now))
    }

    /// Stores the record and ends the lease. Takes the record out of `record` if it is stored.
    pub(crate) fn complete_now(
        &self,
        lease: &LeaseRef,
        record: &mut Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let now = self.now();
        let completed = self.table.complete(lease, record, retention, now);
        self.table.report_evictions(now);
        completed
    }

    /// Returns the time of the store, in nanoseconds since it was created.
    pub(crate) fn now(&self) -> u64 {
        self.nanos_at(Instant::now())
    }

    fn nanos_at(&self, at: Instant) -> u64 {
        let elapsed = at.saturating_duration_since(self.epoch).as_nanos();
        u64::try_from(elapsed).unwrap_or(u64::MAX)
    }

    /// Returns the instant at which [`now`](Self::now) returns `nanos`.
    fn instant(&self, nanos: u64) -> Option<Instant> {
        self.epoch.checked_add(Duration::from_nanos(nanos))
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Store for MemoryStore {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        self.acquire_now(claim, Instant::now())
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        if self.table.renew(lease, ttl, self.now()) {
            Ok(())
        } else {
            Err(StoreError::LeaseLost)
        }
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        mut record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        self.complete_now(lease, &mut record, retention)
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.table.release(lease, self.now());
        Ok(())
    }

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        let start = Instant::now();
        let deadline = start + timeout.min(Ttl::MAX.as_duration());
        while let Some(watch) = self.table.watch(id, self.now()) {
            // The expiry of a lease causes no notification. At that time, the lease may have been renewed.
            let lease_expires = self.instant(watch.lease_expires()).unwrap_or(deadline);
            let changed = timeout_at(deadline.min(lease_expires), watch.changed()).await;
            if changed.is_ok() || Instant::now() >= deadline {
                return;
            }
        }
    }
}

/// Shows the number of entries and bytes.
impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("len", &self.len())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

const MAX_ENTRIES: usize = 1_000_000;
const MAX_BYTES: usize = 256 * 1024 * 1024;
