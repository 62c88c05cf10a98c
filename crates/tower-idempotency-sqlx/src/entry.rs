//! Rows that the statements of a store read, and their meaning.

use std::time::Duration;

use tower_idempotency::store::{Acquired, Claim, Fingerprint, OrphanPolicy, Token};

use crate::SqlError;

/// The entry after an attempt to acquire it.
pub(crate) struct AcquireRow {
    pub(crate) is_completed: bool,
    /// The entry has the token of the claim, which holds or completed it.
    pub(crate) has_own_token: bool,
    /// The row is still stored, but counts as absent.
    pub(crate) is_expired: bool,
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) generation: i64,
    /// Milliseconds until the lease expires. Negative after the expiry.
    pub(crate) lease_left: i64,
    pub(crate) record: Option<Vec<u8>>,
    /// Milliseconds until the row counts as absent.
    pub(crate) left: i64,
    pub(crate) token: Option<Vec<u8>>,
}

impl AcquireRow {
    /// Returns the result for the claim.
    ///
    /// Returns [`None`] if the entry can be acquired, because it was released, expired or deleted after the attempt.
    pub(crate) fn into_acquired(self, claim: &Claim) -> Result<Option<Acquired>, SqlError> {
        if self.has_own_token && !self.is_completed {
            let generation = self.generation.unsigned_abs();
            return Ok(Some(Acquired::Granted {
                generation,
                takeover: generation > 1,
            }));
        }
        if self.is_expired {
            return Ok(None);
        }
        let fingerprint = self.fingerprint.try_into();
        let fingerprint = fingerprint.map_err(|_| SqlError::unreadable("no fingerprint"))?;
        let fingerprint = Fingerprint::from_bytes(fingerprint);
        if self.is_completed {
            let record = self.record.ok_or(SqlError::unreadable("no record"))?.into();
            let token = self.token.map(TryFrom::try_from).transpose();
            let token = token.map_err(|_: Vec<u8>| SqlError::unreadable("no token"))?;
            return Ok(Some(Acquired::Completed {
                fingerprint,
                record,
                expires_in: Duration::from_millis(self.left.unsigned_abs()),
                token: token.map(Token::from_bytes),
            }));
        }
        let distance = Duration::from_millis(self.lease_left.unsigned_abs());
        if self.lease_left > 0 {
            return Ok(Some(Acquired::InProgress {
                fingerprint,
                expires_in: distance,
            }));
        }
        let allows_retry = || {
            let token = self.token.as_deref().unwrap_or_default();
            token.starts_with(&Token::RETRY_ALLOWED)
        };
        let can_take_over = match claim.orphans {
            OrphanPolicy::TakeOver => true,
            OrphanPolicy::Refuse => allows_retry(),
            OrphanPolicy::Never => false,
        };
        if can_take_over && fingerprint == claim.fingerprint {
            return Ok(None);
        }
        Ok(Some(Acquired::Orphaned {
            fingerprint,
            since: distance,
        }))
    }
}

/// The entry after an attempt to complete it. The attempt writes unless another token holds the entry.
pub(crate) struct CompleteRow {
    pub(crate) is_completed: bool,
    pub(crate) has_own_token: bool,
    pub(crate) is_expired: bool,
    pub(crate) has_no_token: bool,
}

/// Result of an attempt to complete an entry.
pub(crate) enum CompleteOutcome {
    Stored,
    LeaseLost,
    /// Another token held the entry during the attempt, and does not hold it any more. Complete it again.
    Retry,
}

impl CompleteRow {
    pub(crate) fn outcome(&self) -> CompleteOutcome {
        if self.is_completed && self.has_own_token {
            CompleteOutcome::Stored
        } else if self.is_expired || self.has_own_token || self.has_no_token && !self.is_completed {
            CompleteOutcome::Retry
        } else {
            CompleteOutcome::LeaseLost
        }
    }
}

/// Maximum number of attempts of one call, if the entry changes or the database reports a transient error.
pub(crate) const MAX_ATTEMPTS: u32 = 3;

#[cfg(test)]
mod tests;
