//! Calls to a store as the layer makes them, for tests that call a store without a layer.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tower_idempotency::store::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Token, Ttl};

/// A store that calls its inner store as the layer does. Each record has a prefix with a checksum, and the first
/// completion under a token is marked.
///
/// [`Tiered`](tower_idempotency::Tiered) keeps only such records. The records of the conformance suite are arbitrary
/// bytes.
#[derive(Debug)]
pub struct Layered<S> {
    inner: S,
    completed: Mutex<HashSet<Token>>,
}

impl<S> Layered<S> {
    /// Wraps `inner`.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            completed: Mutex::default(),
        }
    }

    /// Returns the inner store.
    pub const fn inner(&self) -> &S {
        &self.inner
    }

    /// Notes a completion under this token that the inner store does not get. Returns `true` if it is the first one.
    pub fn note_completion(&self, token: Token) -> bool {
        let completed = self.completed.lock();
        completed
            .unwrap_or_else(PoisonError::into_inner)
            .insert(token)
    }
}

/// Returns `payload` as an undamaged record of the entry.
#[must_use]
pub fn record_of(id: &KeyId, payload: &[u8]) -> Bytes {
    let mut record = vec![VERSION, 0, 0, 0, 0, 0];
    record.extend_from_slice(payload);
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(id.as_bytes());
    hasher.update(&record[..2]);
    hasher.update(payload);
    record[2..PREFIX].copy_from_slice(&hasher.finalize().to_le_bytes());
    record.into_boxed_slice().into()
}

impl<S: Store> Store for Layered<S> {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        Ok(without_prefix(self.inner.acquire(claim).await?))
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.inner.renew(lease, ttl).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let mut lease = *lease;
        lease.is_first_completion = self.note_completion(lease.token);
        let record = record_of(&lease.id, &record);
        match self.inner.complete(&lease, record, retention).await {
            Err(StoreError::RecordTooLarge { limit }) => Err(StoreError::RecordTooLarge {
                limit: limit - PREFIX,
            }),
            completed => completed,
        }
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.inner.release(lease).await
    }

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        self.inner.wait_for_change(id, timeout).await;
    }

    fn find_completed(&self, id: &KeyId) -> Option<Acquired> {
        self.inner.find_completed(id).map(without_prefix)
    }

    fn compress_above(&self) -> usize {
        self.inner.compress_above()
    }
}

/// Removes the prefix from the record of a reply.
fn without_prefix(mut acquired: Acquired) -> Acquired {
    if let Acquired::Completed { record, .. } = &mut acquired {
        *record = record.slice(PREFIX..);
    }
    acquired
}

const VERSION: u8 = 1;
/// Version, flags and checksum.
const PREFIX: usize = 6;
