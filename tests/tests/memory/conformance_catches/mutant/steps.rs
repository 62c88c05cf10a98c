//! Calls in two steps. Another call can come between them, and a dropped call makes the first step alone.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower_idempotency::store::{Acquired, Claim, LeaseRef, StoreError, Ttl};

use super::{Entry, Flaw, Mutant, State};

impl Mutant {
    /// Returns `true` if the flaw is one of [`acquire_in_steps`](Self::acquire_in_steps).
    pub(super) fn claims_in_steps(&self) -> bool {
        matches!(
            self.flaw,
            Flaw::ClaimIsAtomicInItsProcess
                | Flaw::OwnTokenIsReadThenWritten
                | Flaw::TakeoverFreesFirst
        )
    }

    /// Acquires the lease. Reads the entry before, and writes it without a condition, if the claim is one of the flaw.
    pub(super) async fn acquire_in_steps(&self, claim: &Claim) -> Acquired {
        let _claiming = match self.flaw {
            Flaw::ClaimIsAtomicInItsProcess => Some(self.claiming.lock().await),
            _ => None,
        };
        let mut entry = self.step(claim.id, |found, _| found.clone());
        let is_own = entry
            .as_ref()
            .is_some_and(|entry| entry.token == Some(claim.token));
        let acquired = self.grant(&mut entry, claim, Instant::now());
        let has_two_steps = match acquired {
            Acquired::Granted { takeover, .. } => match self.flaw {
                Flaw::OwnTokenIsReadThenWritten => is_own,
                Flaw::TakeoverFreesFirst => takeover && !is_own,
                _ => true,
            },
            _ => false,
        };
        if !has_two_steps {
            return self.step(claim.id, |found, now| self.grant(found, claim, now));
        }
        if self.has(Flaw::TakeoverFreesFirst) {
            self.step(claim.id, |found, _| *found = None);
        }
        sleep(BETWEEN_STEPS).await;
        self.step(claim.id, |found, _| *found = entry);
        acquired
    }

    /// Reads and changes the entry, and writes it if the token is still the same.
    pub(super) async fn renew_by_token(
        &self,
        lease: &LeaseRef,
        ttl: Ttl,
    ) -> Result<(), StoreError> {
        let mut entry = self.step(lease.id, |found, _| found.clone());
        self.prolong(&mut entry, lease, ttl, Instant::now())?;
        sleep(BETWEEN_STEPS).await;
        self.step(lease.id, |found, _| match found {
            Some(found) if found.token == Some(lease.token) => {
                *found = entry.ok_or(StoreError::LeaseLost)?;
                Ok(())
            }
            _ => Err(StoreError::LeaseLost),
        })
    }

    /// Deletes the lease, and stores it again with a later expiry.
    pub(super) async fn renew_after_delete(
        &self,
        lease: &LeaseRef,
        ttl: Ttl,
    ) -> Result<(), StoreError> {
        let mut entry = self.delete_lease(lease).await;
        self.prolong(&mut entry, lease, ttl, Instant::now())?;
        self.step(lease.id, |found, _| *found = entry);
        Ok(())
    }

    /// Deletes the lease, and stores an orphan if the lease was a takeover. Returns `true` if it stored one.
    pub(super) async fn release_after_delete(&self, lease: &LeaseRef) -> Result<bool, StoreError> {
        let mut entry = self.delete_lease(lease).await;
        let is_orphaned = self.apply_release(&mut entry, lease, Instant::now())?;
        if entry.is_some() {
            self.step(lease.id, |found, _| *found = entry);
        }
        Ok(is_orphaned)
    }

    /// Deletes the lease or the orphan of this token, and returns it after a delay.
    pub(super) async fn delete_lease(&self, lease: &LeaseRef) -> Option<Entry> {
        let deleted = self.step(lease.id, |found, _| {
            found.take_if(|entry| {
                entry.token == Some(lease.token) && matches!(entry.state, State::Leased { .. })
            })
        });
        if deleted.is_some() {
            sleep(BETWEEN_STEPS).await;
        }
        deleted
    }
}

/// Longer than the interval of the claims in the cases.
const BETWEEN_STEPS: Duration = Duration::from_millis(5);
