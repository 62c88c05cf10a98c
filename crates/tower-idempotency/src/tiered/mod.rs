//! Completed records of a store, in the memory of the process.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::Instant;

use self::tier::{Kept, Tier};
use crate::{
    record::is_replayable,
    store::{Acquired, CheckError, Claim, KeyId, LeaseRef, Store, StoreError, Ttl},
    telemetry,
};

mod inspect;
mod tier;

/// A store with a tier of completed records in front of it, in the memory of the process.
///
/// A replay that the tier has costs no round trip. All other calls go to the store: leases, orphans, and the absence of an
/// entry. So the tier never decides that a request executes.
///
/// Feature `tiered`. Clones share one tier.
///
/// # Rules
///
/// - The tier keeps a record that this process has completed, or that the store has reported to it. It does not keep a record
///   that a handler committed in its own transaction until the store reports it.
/// - It serves a record until its [age](Self::with_max_age) or its life has passed, whichever is shorter. Both count by the
///   monotonic clock of the process, from before the call to the store was sent.
/// - It keeps no record that [needs attention](crate::NeedsAttention), is damaged, or is of an unknown version. Such a record
///   changes when an operator resolves it.
/// - It keeps no record that is larger than an eighth of its [bytes](Self::with_max_bytes).
/// - When it is full, it removes records of the principal that holds most, the oldest first. Principals are compared in 256
///   groups, by the scope of their claims. One principal that is alone can use all of the tier.
///
/// The layer compares the fingerprint of a request with a record of the tier as with any other. The record of another request
/// under the key is 422.
///
/// # Operators
///
/// An operator who deletes or changes a completed record at the store has to wait: each process replays the old record for up
/// to its maximum age. In the repository, `docs/stores/tiered.md` explains this, and the loss of a server's data.
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
/// - The store has no clock, such as DynamoDB. The tier then serves the record for longer by the skew that the store allows.
///
/// # Cancellation
///
/// A dropped call keeps no record. Otherwise the cancellation is that of the store.
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
    /// If the value is too long, an operator who deletes a record waits that long for each process. If it is shorter than the
    /// time in which clients retry, each late retry costs a round trip. [`Duration::ZERO`] turns the tier off. Applies at once,
    /// to all clones and to the records that are kept.
    pub fn with_max_age(self, max: Duration) -> Self {
        self.tier.set_max_age(max);
        self
    }

    /// Sets the maximum number of bytes. Default: 67,108,864 (64 MiB).
    ///
    /// The tier counts the records and 320 bytes for each, the measured memory of an entry with its allocation overhead. If
    /// the value is too low, the tier removes records before their age has passed, and a retry costs a round trip. If it
    /// exceeds the memory of the machine, the operating system kills the process. Applies to all clones, from the next record
    /// on.
    pub fn with_max_bytes(self, max: usize) -> Self {
        self.tier.set_max_bytes(max);
        self
    }

    /// Returns the store behind the tier. Its calls do not read or change the tier.
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// Returns the number of records in the tier, with those whose age has passed and that are not yet removed.
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

    /// Returns `true` if the tier keeps such a record.
    fn can_keep(&self, id: &KeyId, record: &[u8]) -> bool {
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
    const COMPRESS_ABOVE: usize = S::COMPRESS_ABOVE;

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
            if self.can_keep(&claim.id, record) {
                let kept = Kept {
                    id: claim.id,
                    fingerprint: *fingerprint,
                    token: *token,
                    // The reply may be a part of a larger buffer.
                    record: Bytes::copy_from_slice(record),
                    sent,
                    expires: after(sent, *expires_in),
                };
                self.tier.keep(kept, claim.scope.as_ref());
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
        if self.can_keep(&lease.id, &record) {
            let kept = Kept {
                id: lease.id,
                fingerprint: lease.fingerprint,
                token: Some(lease.token),
                record,
                sent,
                expires: after(sent, retention.as_duration()),
            };
            self.tier.keep(kept, lease.scope.as_ref());
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

fn after(sent: Instant, life: Duration) -> Instant {
    sent.checked_add(life).unwrap_or(sent + FAR)
}

const MAX_AGE: Duration = Duration::from_secs(60);
const MAX_BYTES: usize = 64 * 1024 * 1024;
const FAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
