//! The store of a simulation: entries and the contract, without its own clock.
//!
//! Every method is one step at an instant that the caller passes. `verification/tests/simulation.rs` runs the conformance
//! suite against the store.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use tower_idempotency::{
    inspect::{DEFAULT_ORPHAN_RETENTION, Resolution, Seen, State as SeenState},
    store::{Acquired, Claim, Fingerprint, KeyId, LeaseRef, OrphanPolicy, StoreError, Token, Ttl},
};

use super::{Millis, bugs::Bug};

/// The entries, and at most one bug that breaks the contract.
#[derive(Debug, Default)]
pub struct SimulatedStore {
    entries: HashMap<KeyId, Entry>,
    bug: Option<Bug>,
}

/// The state of a key.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// The token that holds or completed the entry, or `None` after a takeover was released.
    token: Option<Token>,
    fingerprint: Fingerprint,
    generation: u64,
    state: EntryState,
    /// The token whose lease an operator broke, for the bug that lets it complete.
    broken: Option<Token>,
    /// `true` if an operator has allowed a retry, for the bug that never uses it up.
    retry_was_allowed: bool,
}

#[derive(Clone, Debug)]
enum EntryState {
    Leased {
        ends: Millis,
        orphan_retention: Millis,
    },
    Completed {
        record: Bytes,
        expires: Millis,
    },
}

impl Entry {
    fn leased(claim: &Claim, generation: u64, now: Millis) -> Self {
        Self {
            token: Some(claim.token),
            fingerprint: claim.fingerprint,
            generation,
            state: EntryState::Leased {
                ends: now + claim.lease.as_millis(),
                orphan_retention: claim.orphan_retention.as_millis(),
            },
            broken: None,
            retry_was_allowed: false,
        }
    }

    fn completed(lease: &LeaseRef, record: Bytes, expires: Millis) -> Self {
        Self {
            token: Some(lease.token),
            fingerprint: lease.fingerprint,
            generation: lease.generation,
            state: EntryState::Completed { record, expires },
            broken: None,
            retry_was_allowed: false,
        }
    }

    /// Identifies the entry, as [`Inspect::get`](tower_idempotency::inspect::Inspect::get) does.
    fn identify(&self, id: KeyId, now: Millis) -> Seen {
        let (state, expiry) = match &self.state {
            EntryState::Completed { record, .. } => (SeenState::of_record(record), None),
            EntryState::Leased { ends, .. } if now < *ends => (SeenState::InProgress, None),
            EntryState::Leased { ends, .. } => (SeenState::Orphaned, Some(*ends)),
        };
        let version = Seen::version_of(self.token.as_ref(), expiry);
        Seen::new(id, state, self.generation, version)
    }

    fn is_leased_by(&self, token: Token) -> bool {
        self.token == Some(token) && matches!(self.state, EntryState::Leased { .. })
    }
}

impl SimulatedStore {
    /// Returns a store with one bug or none.
    #[must_use]
    pub fn with(bug: Option<Bug>) -> Self {
        Self {
            entries: HashMap::new(),
            bug,
        }
    }

    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Returns the entry, unless it has expired.
    pub(super) fn seen(&self, id: KeyId, now: Millis) -> Option<Entry> {
        let entry = self.entries.get(&id)?;
        let over = match entry.state {
            EntryState::Leased {
                ends,
                orphan_retention,
            } => {
                now >= ends
                    && (now - ends >= orphan_retention || self.has(Bug::OrphansAreForgotten))
                    && !self.has(Bug::LeasesNeverEnd)
            }
            EntryState::Completed { expires, .. } => {
                now >= expires && !self.has(Bug::RetentionIsNotJudged)
            }
        };
        (!over).then(|| entry.clone())
    }

    fn put(&mut self, id: KeyId, entry: Option<Entry>) {
        match entry {
            Some(entry) => drop(self.entries.insert(id, entry)),
            None => drop(self.entries.remove(&id)),
        }
    }

    /// Like [`Store::acquire`](tower_idempotency::Store::acquire).
    pub fn acquire(&mut self, claim: &Claim, now: Millis) -> Acquired {
        let seen = self.seen(claim.id, now);
        self.acquire_from(seen.as_ref(), claim, now)
    }

    /// Acquires the entry according to `seen`. This is the current entry, unless another call read it first and writes
    /// later.
    pub(super) fn acquire_from(
        &mut self,
        seen: Option<&Entry>,
        claim: &Claim,
        now: Millis,
    ) -> Acquired {
        let generation = match seen {
            None => 1,
            Some(entry) => match self.judge(entry, claim, now) {
                Ok(generation) => generation,
                Err(refused) => {
                    if self.has(Bug::WaitersRemove) {
                        self.put(claim.id, None);
                    }
                    return refused;
                }
            },
        };
        let mut leased = Entry::leased(claim, generation, now);
        if let Some(entry) = seen {
            leased.broken = entry.broken;
            leased.retry_was_allowed = entry.retry_was_allowed;
            // An earlier attempt of the claim may be applied after the takeover that followed it.
            if entry.token == Some(claim.token) {
                leased.fingerprint = entry.fingerprint;
            }
        }
        self.put(claim.id, Some(leased));
        Acquired::Granted {
            generation,
            takeover: generation > 1 && !self.has(Bug::TakeoversAreHidden),
        }
    }

    /// Returns the generation at which a claim on this entry is granted, or the reason for a refusal.
    fn judge(&self, entry: &Entry, claim: &Claim, now: Millis) -> Result<u64, Acquired> {
        let fingerprint = entry.fingerprint;
        let ends = match &entry.state {
            EntryState::Completed { record, expires } => {
                return Err(Acquired::Completed {
                    fingerprint,
                    record: record.clone(),
                    expires_in: Duration::from_millis(expires.saturating_sub(now)),
                    token: entry.token,
                });
            }
            EntryState::Leased { ends, .. } => *ends,
        };
        // The claim's own token is checked first, because the reply that granted its lease may have been lost.
        if entry.token == Some(claim.token) && !self.has(Bug::OwnTokenIsRefused) {
            return Ok(entry.generation);
        }
        if now < ends || self.has(Bug::LeasesNeverEnd) {
            let left = ends.saturating_sub(now).max(1);
            if self.has(Bug::LeasesEndEarly) && left * 2 < claim.lease.as_millis() {
                return Ok(entry.generation + 1);
            }
            return Err(Acquired::InProgress {
                fingerprint,
                expires_in: Duration::from_millis(left),
            });
        }
        let is_allowed = entry.token.is_some_and(|token| token.allows_retry())
            || (entry.retry_was_allowed && self.has(Bug::AllowedRetriesStay));
        let may = match claim.orphans {
            OrphanPolicy::TakeOver => true,
            OrphanPolicy::Refuse => is_allowed,
            OrphanPolicy::Never => false,
        };
        let may = may || self.has(Bug::RefusalIsIgnored);
        let same = fingerprint == claim.fingerprint || self.has(Bug::TakeoverOfAnotherRequest);
        if may && same {
            return Ok(entry.generation + 1);
        }
        Err(Acquired::Orphaned {
            fingerprint,
            since: Duration::from_millis(now - ends),
        })
    }

    /// Like [`Store::renew`](tower_idempotency::Store::renew).
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::LeaseLost`] if the token does not hold the entry.
    pub fn renew(&mut self, lease: &LeaseRef, ttl: Ttl, now: Millis) -> Result<(), StoreError> {
        let unchecked = self.has(Bug::RenewalWithoutToken);
        let mut seen = self.seen(lease.id, now);
        match &mut seen {
            Some(entry) if entry.is_leased_by(lease.token) || unchecked => {
                if let EntryState::Leased { ends, .. } = &mut entry.state {
                    *ends = now + ttl.as_millis();
                }
                self.put(lease.id, seen);
                Ok(())
            }
            Some(_) | None => Err(StoreError::LeaseLost),
        }
    }

    /// Like [`Store::complete`](tower_idempotency::Store::complete).
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::LeaseLost`] if another token holds or completed the entry.
    pub fn complete(
        &mut self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
        now: Millis,
    ) -> Result<(), StoreError> {
        if let Some(entry) = self.seen(lease.id, now) {
            let own = entry.token.is_none_or(|token| token == lease.token);
            let is_broken = self.is_broken_lease(&entry, lease);
            match entry.state {
                EntryState::Leased { .. } if own || self.has(Bug::CompletionIsUnfenced) => {}
                EntryState::Completed { .. } if own => return Ok(()),
                EntryState::Completed { .. } if self.has(Bug::CompletionOverwrites) => {}
                EntryState::Leased { .. } | EntryState::Completed { .. } if is_broken => {}
                EntryState::Leased { .. } | EntryState::Completed { .. } => {
                    return match self.bug {
                        Some(Bug::LostLeasesAreHidden) => Ok(()),
                        _ => Err(StoreError::LeaseLost),
                    };
                }
            }
        }
        self.put_record(lease, record, now + retention.as_millis(), now);
        Ok(())
    }

    fn put_record(&mut self, lease: &LeaseRef, record: Bytes, expires: Millis, now: Millis) {
        let mut completed = Entry::completed(lease, record, expires);
        completed.broken = self.seen(lease.id, now).and_then(|entry| entry.broken);
        self.put(lease.id, Some(completed));
    }

    /// Stores the record of a handler's transaction at its commit, if the token holds the entry. The lease may have
    /// expired.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::LeaseLost`] if the token does not hold the entry.
    pub fn commit(
        &mut self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
        now: Millis,
    ) -> Result<(), StoreError> {
        let seen = self.seen(lease.id, now);
        let held = seen.is_some_and(|entry| {
            entry.is_leased_by(lease.token) || self.is_broken_lease(&entry, lease)
        });
        if !held && !self.has(Bug::CommitIsUnfenced) {
            return Err(StoreError::LeaseLost);
        }
        self.put_record(lease, record, now + retention.as_millis(), now);
        Ok(())
    }

    /// Like [`Store::release`](tower_idempotency::Store::release).
    pub fn release(&mut self, lease: &LeaseRef, now: Millis) {
        let Some(mut entry) = self.seen(lease.id, now) else {
            return;
        };
        let EntryState::Leased { ends, .. } = &mut entry.state else {
            if self.has(Bug::ReleaseDropsRecords) {
                self.put(lease.id, None);
            }
            return;
        };
        if entry.token != Some(lease.token) && !self.has(Bug::ReleaseWithoutToken) {
            return;
        }
        // The previous execution may have had its effect, so the entry stays an orphan.
        if entry.generation > 1 && !self.has(Bug::ReleasedTakeoversAreFree) {
            *ends = now;
            entry.token = None;
            self.put(lease.id, Some(entry));
        } else {
            self.put(lease.id, None);
        }
    }

    /// Returns `true` if the bug lets this lease complete, which an operator broke.
    fn is_broken_lease(&self, entry: &Entry, lease: &LeaseRef) -> bool {
        self.has(Bug::BrokenLeasesComplete) && entry.broken == Some(lease.token)
    }

    /// Returns the entry as an operator sees it, with the fingerprint of its request.
    ///
    /// Like [`Inspect::get`](tower_idempotency::inspect::Inspect::get).
    #[must_use]
    pub fn inspect(&self, id: KeyId, now: Millis) -> Option<(Seen, Fingerprint)> {
        let entry = self.seen(id, now)?;
        Some((entry.identify(id, now), entry.fingerprint))
    }

    /// Applies a decision, and returns `true`, if the entry is still as the operator saw it.
    ///
    /// Like [`Inspect::resolve`](tower_idempotency::inspect::Inspect::resolve).
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Backend`] if there is no randomness for a token.
    pub fn resolve(
        &mut self,
        seen: &Seen,
        resolution: &Resolution,
        now: Millis,
    ) -> Result<bool, StoreError> {
        let id = *seen.id();
        let Some(mut entry) = self.seen(id, now) else {
            return Ok(false);
        };
        if entry.identify(id, now) != *seen && !self.has(Bug::ChangedEntriesAreResolved) {
            return Ok(false);
        }
        if let Some((record, retention)) = resolution.record(&id) {
            entry.token = Some(Token::random()?);
            let expires = now + retention.as_millis();
            entry.state = EntryState::Completed { record, expires };
        } else if matches!(resolution, Resolution::Retry | Resolution::BreakLease) {
            let orphan_retention = match entry.state {
                EntryState::Leased {
                    orphan_retention, ..
                } => orphan_retention,
                EntryState::Completed { .. } => DEFAULT_ORPHAN_RETENTION.as_millis(),
            };
            entry.state = EntryState::Leased {
                ends: now,
                orphan_retention,
            };
            if matches!(resolution, Resolution::Retry) {
                entry.token = Some(Token::retry_allowed()?);
                entry.retry_was_allowed = true;
            } else {
                entry.broken = entry.token;
                entry.token = Some(Token::random()?);
            }
        } else {
            self.put(id, None);
            return Ok(true);
        }
        self.put(id, Some(entry));
        Ok(true)
    }

    /// Returns `true` if a process may hold the entry.
    #[must_use]
    pub fn is_in_progress(&self, id: KeyId, now: Millis) -> bool {
        let seen = self.seen(id, now);
        seen.is_some_and(|entry| match entry.state {
            EntryState::Leased { ends, .. } => now < ends,
            EntryState::Completed { .. } => false,
        })
    }
}
