//! The store of one process.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

pub use self::budget::MemoryFull;
use self::table::Engine;
use super::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl};

mod budget;
mod order;
mod shard;
mod slab;
mod sync;
mod table;

#[cfg(test)]
#[cfg(not(shuttle))]
mod model;
#[cfg(test)]
#[cfg(shuttle)]
mod shuttle_tests;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

/// A store for one process: leases and records live in its memory, and end with it.
///
/// Two processes that share their clients must share a store; each with a `MemoryStore` of its own, they execute the
/// same request once each. Clones share everything.
///
/// Time is tokio's, so a test with a paused clock moves it. It is monotonic: nothing happens when the wall clock steps.
///
/// # Bounds
///
/// The store holds a bounded number of entries and of bytes. When it is full, completed records make way, those that
/// expire soonest first (first in the part of the store that the new entry falls into, then elsewhere). A lease and an
/// orphan never make way: a store full of them answers [`StoreError::Backend`] with [`MemoryFull`] as its source. Whether
/// an entry is over is judged at every access; those that nobody asks for again are taken away by later writes, a few
/// at a time, and no task runs in the background.
///
/// `owner` and `operation` of a [`Claim`] are not kept.
///
/// # Cancellation
///
/// Every call but [`wait_for_change`](Store::wait_for_change) does its work when it is first polled, or not at all. A `wait_for_change` that is
/// dropped leaves nothing behind.
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
///     panic!("nobody else holds it");
/// };
/// store.complete(&claim.lease_ref(generation), "answer".into(), Ttl::from_secs(3600)).await?;
///
/// let duplicate = Claim::new(id, fingerprint)?;
/// let expected = Acquired::Completed { fingerprint, record: "answer".into() };
/// assert_eq!(store.acquire(&duplicate).await?, expected);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct MemoryStore {
    engine: Arc<Engine>,
    epoch: Instant,
}

impl MemoryStore {
    /// An empty store of at most 1,000,000 entries and 256 MiB.
    pub fn new() -> Self {
        Self {
            engine: Arc::new(Engine::new(SHARDS, MAX_ENTRIES, MAX_BYTES)),
            epoch: Instant::now(),
        }
    }

    /// Holds at most `max` entries, leases included; 1,000,000 by default.
    ///
    /// Too low, and answers make way before their retention is over: a late retry executes again. Too low for the
    /// requests in flight and the orphans of a crash, and new requests are refused. Higher than the bytes allow, it has
    /// no effect. Applies to all clones, from the next write on.
    pub fn with_max_entries(self, max: usize) -> Self {
        self.engine.budget().set_max_entries(max);
        self
    }

    /// Holds at most `max` bytes; 268,435,456 (256 MiB) by default.
    ///
    /// Counts the records and 240 bytes for each entry, which is what entries and the memory around them were measured
    /// to take. Too low, and answers make way before their retention is over: a late retry executes again. Higher than
    /// the machine can give, and the process is killed for it, with every lease and record. A record that could never
    /// fit is refused with [`StoreError::RecordTooLarge`]. Applies to all clones, from the next write on.
    pub fn with_max_bytes(self, max: usize) -> Self {
        self.engine.budget().set_max_bytes(max);
        self
    }

    /// How many entries there are: leases, orphans, records, and expired ones not yet taken away.
    #[must_use]
    pub fn len(&self) -> usize {
        self.engine.budget().entries()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many bytes they take, as [`with_max_bytes`](Self::with_max_bytes) counts them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.engine.budget().bytes()
    }

    fn now(&self) -> u64 {
        let elapsed = self.epoch.elapsed().as_nanos();
        u64::try_from(elapsed).unwrap_or(u64::MAX)
    }

    /// When the clock that [`now`](Self::now) reads shows `nanos`.
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
        let acquired = self.engine.acquire(claim, self.now());
        acquired.map_err(StoreError::backend)
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        if self.engine.renew(lease, ttl, self.now()) {
            Ok(())
        } else {
            Err(StoreError::LeaseLost)
        }
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        self.engine.complete(lease, record, retention, self.now())
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.engine.release(lease, self.now());
        Ok(())
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        let start = Instant::now();
        let give_up = start.checked_add(within).unwrap_or(start + FAR);
        while let Some(watch) = self.engine.watch(id, self.now()) {
            // Nobody announces the end of a lease; and when it comes, the lease may have been renewed meanwhile.
            let lease_ends = self.instant(watch.lease_ends()).unwrap_or(give_up);
            let changed = timeout_at(give_up.min(lease_ends), watch.changed()).await;
            if changed.is_ok() || Instant::now() >= give_up {
                return;
            }
        }
    }
}

/// Shows how full it is.
impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("len", &self.len())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

const SHARDS: usize = 64;
const MAX_ENTRIES: usize = 1_000_000;
const MAX_BYTES: usize = 256 * 1024 * 1024;
const FAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
