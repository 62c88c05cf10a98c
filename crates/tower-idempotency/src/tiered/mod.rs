//! Completed records of a store, in the memory of the process.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::Instant;

use self::tier::{Tier, TierRecord};
use crate::{
    record::is_replayable,
    store::{Acquired, CheckError, Claim, KeyId, LeaseRef, Store, StoreError, Ttl},
    telemetry,
};

mod inspect;
mod tier;

/// A store with a tier of completed records in front of it, in the memory of the process.
///
/// A replay from the tier costs no round trip. All other calls go to the store, so the tier never decides that a request
/// executes.
///
/// Feature `tiered`. Clones share one tier.
///
/// # Rules
///
/// - The tier stores a record when this process has completed it, or when the store has reported it. A record that a
///   handler committed in its own transaction enters the tier when the store reports it.
/// - It serves a record until its [maximum age](Self::with_max_age) or its retention has passed, whichever is shorter. Both
///   count by the monotonic clock of the process, from before the call to the store was sent.
/// - It stores no record that [needs attention](crate::NeedsAttention), is damaged, or is of an unknown version. Such a
///   record changes when an operator resolves it.
/// - It stores no record that is larger than an eighth of its [bytes](Self::with_max_bytes).
/// - When it is full, it removes records of the principal that uses most of the tier, the oldest first. Principals are
///   compared in 256 groups, by the scope of their claims. A single principal can use all of the tier.
///
/// The layer compares the fingerprint of a request with a record of the tier, as with any other record. If the record
/// belongs to another request, the response is 422.
///
/// # Operators
///
/// If an operator deletes or changes a completed record at the store, each process replays the old record for up to its
/// maximum age. In the repository, `docs/stores/tiered.md` explains this, and the loss of a server's data.
///
/// If the store implements [`Inspect`](crate::inspect::Inspect), so does this type. A resolution through it also removes the
/// record from this tier, but not from those of other processes.
///
/// # Limits
///
/// The tier may serve a record for the rest of its age although it has expired at the store, in these cases:
///
/// - The machine was suspended. The monotonic clock stops meanwhile.
/// - The clock of the store has stepped forward.
/// - The store has no clock, such as DynamoDB. The tier then serves the record longer by the skew that the store allows.
///
/// # Cancellation
///
/// A dropped call stores no record in the tier. Its effect on the store is that of the store's own call.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, Tiered};
///
/// // In place of a `RedisStore`, `PostgresStore` or `DynamoDbStore`.
/// let store = Tiered::new(MemoryStore::new())
///     .with_max_age(Duration::from_secs(30))
///     .with_max_bytes(16 * 1024 * 1024);
/// let layer = IdempotencyLayer::new(store.clone());
/// assert!(store.is_empty());
/// ```
#[derive(Clone)]
#[must_use]
pub struct Tiered<S> {
    store: S,
    tier: Arc<Tier>,
}

impl<S> Tiered<S> {
    /// Creates an empty tier of at most 64 MiB in front of `store`. It serves a record for at most 60 s.
    pub fn new(store: S) -> Self {
        Self {
            store,
            tier: Arc::new(Tier::new(MAX_AGE, MAX_BYTES)),
        }
    }

    /// Sets how long the tier serves a record after the call that stored or reported it. Default: 60 s.
    ///
    /// If the value is too long, processes replay a deleted record for that long. If it is shorter than the time in which
    /// clients retry, each late retry costs a round trip. [`Duration::ZERO`] turns the tier off. Applies at once, to all
    /// clones and to the stored records. A shorter time empties the tier.
    pub fn with_max_age(self, max: Duration) -> Self {
        self.tier.set_max_age(max);
        self
    }

    /// Sets the maximum number of bytes. Default: 67,108,864 (64 MiB).
    ///
    /// The tier counts the records and 320 bytes for each, the measured memory of an entry with its allocation overhead. If
    /// the value is too low, the tier removes records before their age has passed, and a retry costs a round trip. If it
    /// exceeds the memory of the machine, the operating system kills the process. Applies to all clones, from the next
    /// record on.
    pub fn with_max_bytes(self, max: usize) -> Self {
        self.tier.set_max_bytes(max);
        self
    }

    /// Returns the store behind the tier. Its calls do not read or change the tier.
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// Returns the number of records in the tier, including expired ones that are not yet removed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tier.len()
    }

    /// Returns `true` if the tier has no records.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the size of the records in bytes, as [`with_max_bytes`](Self::with_max_bytes) counts them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.tier.bytes()
    }

    /// Returns `true` if the tier may store this record.
    fn can_store(&self, id: &KeyId, record: &[u8]) -> bool {
        if !self.tier.is_on() || !is_replayable(id, record) {
            return false;
        }
        let fits = self.tier.fits(record.len());
        if !fits {
            telemetry::tier_dropped("size", 1);
        }
        fits
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store> Store for Tiered<S> {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        if let Some(found) = self.find_completed(&claim.id) {
            return Ok(found);
        }
        let sent = Instant::now();
        // Boxed, so that a replay from the tier allocates no future of the store.
        let acquired = Box::pin(self.store.acquire(claim)).await?;
        if let Acquired::Completed {
            fingerprint,
            record,
            expires_in,
            token,
        } = &acquired
        {
            telemetry::tier_replay("store");
            if self.can_store(&claim.id, record) {
                let entry = TierRecord {
                    id: claim.id,
                    fingerprint: *fingerprint,
                    token: *token,
                    // The reply may be a part of a larger buffer.
                    record: Bytes::copy_from_slice(record),
                    sent,
                    expires: after(sent, *expires_in),
                };
                self.tier.insert(entry, claim.scope.as_ref());
            }
        }
        Ok(acquired)
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.store.renew(lease, ttl).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        // After an earlier attempt or a commit, the entry may have another record under this token.
        if !lease.is_first_completion {
            return self.store.complete(lease, record, retention).await;
        }
        let sent = Instant::now();
        self.store
            .complete(lease, record.clone(), retention)
            .await?;
        if self.can_store(&lease.id, &record) {
            let entry = TierRecord {
                id: lease.id,
                fingerprint: lease.fingerprint,
                token: Some(lease.token),
                record,
                sent,
                expires: after(sent, retention.as_duration()),
            };
            self.tier.insert(entry, lease.scope.as_ref());
        }
        Ok(())
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.store.release(lease).await
    }

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        self.store.wait_for_change(id, timeout).await;
    }

    async fn check(&self) -> Result<(), CheckError> {
        self.store.check().await
    }

    fn find_completed(&self, id: &KeyId) -> Option<Acquired> {
        let found = self.tier.find(id, Instant::now());
        if found.is_some() {
            telemetry::tier_replay("tier");
        }
        found
    }

    fn compress_above(&self) -> usize {
        self.store.compress_above()
    }
}

/// Shows the number of records and bytes.
impl<S: fmt::Debug> fmt::Debug for Tiered<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tiered")
            .field("store", &self.store)
            .field("len", &self.len())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

fn after(sent: Instant, duration: Duration) -> Instant {
    sent + duration.min(Ttl::MAX.as_duration())
}

const MAX_AGE: Duration = Duration::from_secs(60);
const MAX_BYTES: usize = 64 * 1024 * 1024;
