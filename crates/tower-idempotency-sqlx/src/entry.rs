//! What the statements read of an entry, and what that means.

use std::time::Duration;

use tower_idempotency::store::{Acquired, Claim, Fingerprint, OrphanPolicy};

use crate::SqlError;

/// An entry as a claim finds it, after it has tried to take it.
pub(crate) struct Found {
    pub(crate) is_completed: bool,
    /// Held, or completed, under the token of the claim.
    pub(crate) is_mine: bool,
    /// Still there, and counts as absent.
    pub(crate) is_over: bool,
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) generation: i64,
    /// Until the lease ends, in milliseconds.
    pub(crate) left: i64,
    pub(crate) record: Option<Vec<u8>>,
}

impl Found {
    /// The answer to the claim, unless the entry can be taken: released, expired or forgotten after the attempt.
    pub(crate) fn answer(self, claim: &Claim) -> Result<Option<Acquired>, SqlError> {
        if self.is_mine && !self.is_completed {
            let generation = self.generation.unsigned_abs();
            return Ok(Some(Acquired::Granted {
                generation,
                takeover: generation > 1,
            }));
        }
        if self.is_over {
            return Ok(None);
        }
        let fingerprint = self.fingerprint.try_into();
        let fingerprint = fingerprint.map_err(|_| SqlError::unreadable("no fingerprint"))?;
        let fingerprint = Fingerprint::from_bytes(fingerprint);
        if self.is_completed {
            let record = self.record.ok_or(SqlError::unreadable("no record"))?.into();
            return Ok(Some(Acquired::Completed {
                fingerprint,
                record,
            }));
        }
        let apart = Duration::from_millis(self.left.unsigned_abs());
        if self.left > 0 {
            return Ok(Some(Acquired::InProgress {
                fingerprint,
                expires_in: apart,
            }));
        }
        if claim.orphans == OrphanPolicy::TakeOver && fingerprint == claim.fingerprint {
            return Ok(None);
        }
        Ok(Some(Acquired::Orphaned {
            fingerprint,
            since: apart,
        }))
    }
}

/// An entry after a completion that wrote unless another token held it.
pub(crate) struct Ended {
    pub(crate) is_completed: bool,
    pub(crate) is_mine: bool,
    pub(crate) is_over: bool,
    pub(crate) is_unheld: bool,
}

/// What came of a completion.
pub(crate) enum Completion {
    Stored,
    Lost,
    /// Nobody holds the entry any more: somebody did when the record came.
    Again,
}

impl Ended {
    pub(crate) fn completion(&self) -> Completion {
        if self.is_completed && self.is_mine {
            Completion::Stored
        } else if self.is_over || self.is_unheld || self.is_mine {
            Completion::Again
        } else {
            Completion::Lost
        }
    }
}

/// A call makes as many attempts where the entry or the database asks for another one.
pub(crate) const TRIES: u32 = 3;
