//! A simple store that can break the contract in many ways.

mod steps;

use std::{
    collections::HashMap,
    future::pending,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};
use tower_idempotency::store::{
    Acquired, Claim, Fingerprint, KeyId, LeaseRef, OrphanPolicy, Store, StoreError, Token, Ttl,
};

/// The fault of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    Nothing,
    ClaimIsReadThenWritten,
    ClaimIsAtomicInItsProcess,
    IdIsCut,
    IdIsText,
    FingerprintIsCut,
    TokenIsText,
    OwnTokenIsRefused,
    OwnTokenCountsAsTakeover,
    OwnTokenDoesNotExtend,
    OwnTokenReplacesTheFingerprint,
    OwnTokenOfAnOrphanIsATakeover,
    OwnTokenForgetsItWasATakeover,
    OwnTokenForgetsSooner,
    OwnTokenIsReadThenWritten,
    OwnOrphanIsRefused,
    OldTokenIsGrantedAgain,
    OldTokenIsNotCounted,
    AskersFingerprintInProgress,
    AskersFingerprintCompleted,
    AskersTokenCompleted,
    NoTokenCompleted,
    RetentionIsNotCounted,
    NoTimeLeft,
    NoTakeover,
    TakeoverOfAnotherRequest,
    TakeoverAgainstThePolicy,
    TakeoverUnderNever,
    TakeoverKeepsTheGeneration,
    TakeoverIsHidden,
    TakeoverKeepsTheToken,
    TakeoverForgetsSooner,
    TakeoverFreesFirst,
    RefusalOfTheHolderCounts,
    LeaseNeverEnds,
    LeaseForgetsSooner,
    KeepOverflows,
    OrphanIsForgottenAtOnce,
    OrphanIsNeverForgotten,
    OrphanHasNoAge,
    AgeCountsFromTheGrant,
    GenerationOutlivesTheEntry,
    ForgottenIsTakenOver,
    AnotherLifeKeepsTheFingerprint,
    RenewIsReadThenWritten,
    RenewWritesByToken,
    RenewFreesFirst,
    RenewIsUnfenced,
    RenewDoesNothing,
    RenewOnlyExtends,
    RenewRefusesOrphans,
    RenewForgetsSooner,
    RenewForgetsNever,
    RenewTakesAnyHeldOrphan,
    RenewKnowsOldTokens,
    RenewTakesAbsentKeys,
    RenewTakesCompletedKeys,
    CompleteIsReadThenWritten,
    CompleteFreesFirst,
    CompleteIsUnfenced,
    CompleteOverwrites,
    CompleteRefusesOrphans,
    CompleteTakesAnyOrphan,
    CompleteRefusesAbsentKeys,
    CompleteTwiceIsLost,
    CompleteTwiceReplaces,
    CompleteTwiceExtends,
    CompleteIgnoresExpiry,
    CompleteKeepsTheFingerprint,
    RecordIsText,
    RecordIsCut,
    RecordExpiresWithTheLease,
    RecordNeverExpires,
    RetentionOverflows,
    RetentionCountsFromTheGrant,
    ReplayExtends,
    LimitIsNotTrue,
    LimitIsTooLow,
    RejectionFreesTheKey,
    FindsExpiredRecords,
    FindsRecordsWithoutToken,
    ReleaseIsUnfenced,
    ReleaseIsReadThenWritten,
    ReleaseFreesFirst,
    ReleaseFreesAnyOrphan,
    ReleaseDoesNothing,
    ReleaseDropsRecords,
    ReleaseRefusesOrphans,
    ReleaseTwiceFails,
    ReleaseFreesTakeovers,
    ReleaseBelievesTheGeneration,
    ReleaseRaisesTheGeneration,
    ReleaseFreesLateTakeovers,
    ReleaseKeepsTheToken,
    ReleaseKeepsTheLease,
    ReleaseForgetsSooner,
    ReleaseForgetsLater,
    ReleaseTwiceExtends,
    ReleaseIgnoresExpiry,
    ReleasedIsHeldByAll,
    ReleasedRefusesAnswers,
    ReleasedWakesNobody,
    NobodyIsWoken,
    WaitingSubscribesNever,
    WaitingSubscribesLate,
    WaitingNeverEnds,
    WaitingEndsLate,
    WaitingIsBlind,
}

pub(crate) struct Mutant {
    flaw: Flaw,
    entries: Arc<Mutex<HashMap<KeyId, Entry>>>,
    changed: Notify,
    /// Held during a claim in two steps, so that it is atomic within the process.
    claiming: tokio::sync::Mutex<()>,
}

#[derive(Clone)]
struct Entry {
    token: Option<Token>,
    fingerprint: Fingerprint,
    generation: u64,
    state: State,
    granted: Instant,
    orphans: OrphanPolicy,
    /// The tokens of earlier lease holders.
    old: Vec<Token>,
}

#[derive(Clone)]
enum State {
    Leased {
        ends: Instant,
        forgotten: Instant,
        keep: Ttl,
    },
    Completed {
        record: Bytes,
        expires: Instant,
    },
}

impl Mutant {
    pub(crate) fn new(flaw: Flaw) -> Self {
        Self {
            flaw,
            entries: Arc::default(),
            changed: Notify::new(),
            claiming: tokio::sync::Mutex::default(),
        }
    }

    /// Returns another process with the same entries. Each process wakes only its own waiters.
    pub(crate) fn second_process(&self) -> Self {
        Self {
            entries: Arc::clone(&self.entries),
            ..Self::new(self.flaw)
        }
    }

    fn has(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }

    fn is_in_progress(&self, id: KeyId) -> bool {
        self.step(id, |found, now| {
            found.as_ref().is_some_and(|entry| match entry.state {
                State::Leased { ends, .. } => now < ends,
                State::Completed { .. } => false,
            })
        })
    }

    fn has_holder(&self, id: KeyId) -> bool {
        self.step(id, |found, _| {
            found.as_ref().is_some_and(|entry| entry.token.is_some())
        })
    }

    fn id(&self, id: KeyId) -> KeyId {
        let mut bytes = *id.as_bytes();
        if self.has(Flaw::IdIsCut) {
            bytes[24..].fill(0);
        }
        if self.has(Flaw::IdIsText) {
            bytes.make_ascii_lowercase();
        }
        KeyId::from_bytes(bytes)
    }

    fn step<T>(&self, id: KeyId, step: impl FnOnce(&mut Option<Entry>, Instant) -> T) -> T {
        self.step_unless_expired(id, true, step)
    }

    /// Runs the step on the stored entry. With `checks_expiry`, an expired entry is absent.
    fn step_unless_expired<T>(
        &self,
        id: KeyId,
        checks_expiry: bool,
        step: impl FnOnce(&mut Option<Entry>, Instant) -> T,
    ) -> T {
        let (id, now) = (self.id(id), Instant::now());
        let mut entries = self.entries.lock().unwrap();
        let found = entries.remove(&id);
        let before = found.clone();
        let mut entry = found.filter(|entry| match entry.state {
            _ if !checks_expiry => true,
            State::Leased { ends, .. } if self.has(Flaw::OrphanIsForgottenAtOnce) => now < ends,
            State::Leased { .. } if self.has(Flaw::OrphanIsNeverForgotten) => true,
            State::Leased { .. } if self.has(Flaw::GenerationOutlivesTheEntry) => true,
            State::Leased { .. } if self.has(Flaw::ForgottenIsTakenOver) => true,
            State::Leased { forgotten, .. } => now < forgotten,
            State::Completed { .. } if self.has(Flaw::RecordNeverExpires) => true,
            State::Completed { expires, .. } => now < expires,
        });
        let over = before.filter(|_| entry.is_none());
        let response = step(&mut entry, now);
        if let Some(over) = over
            && self.has(Flaw::AnotherLifeKeepsTheFingerprint)
        {
            let fingerprint = over.fingerprint;
            entry.get_or_insert(over).fingerprint = fingerprint;
        }
        entries.extend(entry.map(|entry| (id, entry)));
        response
    }

    fn lease(&self, claim: &Claim, generation: u64, now: Instant) -> Entry {
        let ends = if self.has(Flaw::LeaseNeverEnds) {
            now + Ttl::MAX.as_duration() / 2
        } else {
            now + claim.lease.as_duration()
        };
        let keep = claim.orphan_retention.as_duration();
        Entry {
            token: Some(claim.token),
            fingerprint: claim.fingerprint,
            generation,
            state: State::Leased {
                ends,
                forgotten: match self.flaw {
                    Flaw::LeaseForgetsSooner => now + keep,
                    Flaw::KeepOverflows if i32::try_from(keep.as_secs()).is_err() => now,
                    _ => ends + keep,
                },
                keep: claim.orphan_retention,
            },
            granted: now,
            orphans: claim.orphans,
            old: Vec::new(),
        }
    }

    fn granted(&self, generation: u64) -> Acquired {
        Acquired::Granted {
            generation,
            takeover: generation > 1 && !self.has(Flaw::TakeoverIsHidden),
        }
    }

    fn grant(&self, found: &mut Option<Entry>, claim: &Claim, now: Instant) -> Acquired {
        let Some(entry) = found else {
            *found = Some(self.lease(claim, 1, now));
            return self.granted(1);
        };
        let (ends, forgotten) = match &mut entry.state {
            State::Completed { record, expires } => {
                if self.has(Flaw::ReplayExtends) {
                    *expires += Duration::from_secs(60);
                }
                let record = match self.flaw {
                    Flaw::RecordIsText => String::from_utf8_lossy(record).into_owned().into(),
                    Flaw::RecordIsCut => record.slice(..record.len().min(1 << 19)),
                    _ => record.clone(),
                };
                let fingerprint = match self.flaw {
                    Flaw::AskersFingerprintCompleted => claim.fingerprint,
                    _ => entry.fingerprint,
                };
                return Acquired::Completed {
                    fingerprint,
                    record,
                    expires_in: match self.flaw {
                        Flaw::RetentionIsNotCounted => *expires - entry.granted,
                        _ => expires.saturating_duration_since(now),
                    },
                    token: match self.flaw {
                        Flaw::AskersTokenCompleted => Some(claim.token),
                        Flaw::NoTokenCompleted => None,
                        _ => entry.token,
                    },
                };
            }
            State::Leased {
                ends, forgotten, ..
            } => (*ends, *forgotten),
        };
        if now >= forgotten && self.has(Flaw::ForgottenIsTakenOver) {
            let same = entry.fingerprint == claim.fingerprint;
            let takes = same && claim.orphans == OrphanPolicy::TakeOver;
            let generation = if takes { entry.generation + 1 } else { 1 };
            *entry = self.lease(claim, generation, now);
            return self.granted(generation);
        }
        let old = entry.old.contains(&claim.token);
        let held =
            entry.token == Some(claim.token) || old && self.has(Flaw::OldTokenIsGrantedAgain);
        let refused = self.has(Flaw::OwnTokenIsRefused)
            || self.has(Flaw::OwnOrphanIsRefused)
                && now >= ends
                && claim.orphans == OrphanPolicy::Refuse;
        if held && !refused {
            return self.grant_again(entry, claim, ends, now);
        }
        if now < ends {
            return Acquired::InProgress {
                fingerprint: match self.flaw {
                    Flaw::AskersFingerprintInProgress => claim.fingerprint,
                    _ => entry.fingerprint,
                },
                expires_in: match self.flaw {
                    Flaw::NoTimeLeft => Duration::ZERO,
                    _ => ends - now,
                },
            };
        }
        let same = entry.fingerprint == claim.fingerprint
            || self.has(Flaw::FingerprintIsCut)
                && entry.fingerprint.as_bytes()[..16] == claim.fingerprint.as_bytes()[..16];
        let asks = match claim.orphans {
            OrphanPolicy::TakeOver => true,
            OrphanPolicy::Refuse => false,
            OrphanPolicy::Never => self.has(Flaw::TakeoverUnderNever),
        };
        let may = asks
            && (entry.orphans == OrphanPolicy::TakeOver
                || !self.has(Flaw::RefusalOfTheHolderCounts));
        let takes = (same || self.has(Flaw::TakeoverOfAnotherRequest))
            && (may || self.has(Flaw::TakeoverAgainstThePolicy))
            && !self.has(Flaw::NoTakeover);
        if takes || (self.has(Flaw::GenerationOutlivesTheEntry) && now >= forgotten) {
            let counts = !(self.has(Flaw::TakeoverKeepsTheGeneration)
                || old && self.has(Flaw::OldTokenIsNotCounted));
            let generation = entry.generation + u64::from(counts);
            let before = std::mem::replace(entry, self.lease(claim, generation, now));
            if self.has(Flaw::TakeoverKeepsTheToken) {
                entry.token = before.token;
            }
            entry.old = before.old;
            entry.old.extend(before.token);
            if let State::Leased {
                forgotten: moved, ..
            } = &mut entry.state
                && self.has(Flaw::TakeoverForgetsSooner)
            {
                *moved = forgotten;
            }
            return self.granted(generation);
        }
        Acquired::Orphaned {
            fingerprint: entry.fingerprint,
            since: match self.flaw {
                Flaw::OrphanHasNoAge => Duration::ZERO,
                Flaw::AgeCountsFromTheGrant if entry.token.is_some() => now - entry.granted,
                _ => now - ends,
            },
        }
    }

    fn grant_again(
        &self,
        entry: &mut Entry,
        claim: &Claim,
        ends: Instant,
        now: Instant,
    ) -> Acquired {
        let over = now >= ends && self.has(Flaw::OwnTokenOfAnOrphanIsATakeover);
        let raised = self.has(Flaw::OwnTokenCountsAsTakeover) || over;
        let generation = entry.generation + u64::from(raised);
        let before = std::mem::replace(entry, self.lease(claim, generation, now));
        entry.old = before.old;
        if !self.has(Flaw::OwnTokenReplacesTheFingerprint) {
            entry.fingerprint = before.fingerprint;
        }
        match (before.state, &mut entry.state) {
            (state, extended) if self.has(Flaw::OwnTokenDoesNotExtend) => *extended = state,
            (
                State::Leased { forgotten, .. },
                State::Leased {
                    forgotten: moved, ..
                },
            ) if self.has(Flaw::OwnTokenForgetsSooner) => {
                *moved = forgotten;
            }
            _ => {}
        }
        match self.granted(generation) {
            Acquired::Granted { generation, .. }
                if self.has(Flaw::OwnTokenForgetsItWasATakeover) =>
            {
                Acquired::Granted {
                    generation,
                    takeover: false,
                }
            }
            granted => granted,
        }
    }
}

impl Mutant {
    /// Turns a released takeover into an orphan. Returns `true` if the lease was a takeover.
    fn orphans(&self, entry: &mut Entry, lease: &LeaseRef, now: Instant) -> bool {
        let State::Leased {
            ends,
            forgotten,
            keep,
        } = &mut entry.state
        else {
            return false;
        };
        let later = now + keep.as_duration();
        match entry.token {
            Some(token) if token != lease.token && !self.has(Flaw::ReleaseIsUnfenced) => {
                return false;
            }
            Some(_) => {}
            None => {
                if self.has(Flaw::ReleaseTwiceExtends) {
                    *forgotten = later;
                }
                return true;
            }
        }
        let generation = match self.flaw {
            Flaw::ReleaseBelievesTheGeneration => lease.generation,
            Flaw::ReleaseFreesTakeovers => 1,
            Flaw::ReleaseFreesLateTakeovers if now >= *ends => 1,
            _ => entry.generation,
        };
        if generation == 1 || self.has(Flaw::ReleaseDoesNothing) {
            return false;
        }
        if !self.has(Flaw::ReleaseKeepsTheLease) {
            *ends = now;
        }
        *forgotten = match self.flaw {
            Flaw::ReleaseForgetsSooner => later.min(*forgotten),
            Flaw::ReleaseForgetsLater => later.max(*forgotten),
            _ => later,
        };
        if !self.has(Flaw::ReleaseKeepsTheToken) {
            entry.token = None;
        }
        entry.generation += u64::from(self.has(Flaw::ReleaseRaisesTheGeneration));
        true
    }

    /// Applies a release. Returns `true` if it left an orphan.
    fn apply_release(
        &self,
        found: &mut Option<Entry>,
        lease: &LeaseRef,
        now: Instant,
    ) -> Result<bool, StoreError> {
        if found.is_none() && self.has(Flaw::ReleaseTwiceFails) {
            return Err(StoreError::LeaseLost);
        }
        if let Some(entry) = found
            && self.orphans(entry, lease, now)
        {
            return Ok(true);
        }
        let _freed = found.take_if(|entry| {
            let held = entry.token == Some(lease.token) || self.has(Flaw::ReleaseIsUnfenced);
            let held = held
                || self.has(Flaw::ReleaseFreesAnyOrphan)
                    && matches!(entry.state, State::Leased { ends, .. } if now >= ends);
            held && match entry.state {
                State::Leased { .. } if self.has(Flaw::ReleaseDoesNothing) => false,
                State::Leased { ends, .. } if self.has(Flaw::ReleaseRefusesOrphans) => now < ends,
                State::Leased { .. } => true,
                State::Completed { .. } => self.has(Flaw::ReleaseDropsRecords),
            }
        });
        Ok(false)
    }

    fn prolong(
        &self,
        found: &mut Option<Entry>,
        lease: &LeaseRef,
        ttl: Ttl,
        now: Instant,
    ) -> Result<(), StoreError> {
        let Some(entry) = found else {
            return match self.flaw {
                Flaw::RenewTakesAbsentKeys => Ok(()),
                _ => Err(StoreError::LeaseLost),
            };
        };
        let over = matches!(entry.state, State::Leased { ends, .. } if now >= ends);
        let held = match entry.token {
            Some(token) => {
                let (one, other) = (token.as_bytes(), lease.token.as_bytes());
                token == lease.token
                    || self.has(Flaw::TokenIsText) && one.eq_ignore_ascii_case(other)
                    || over && self.has(Flaw::RenewTakesAnyHeldOrphan)
            }
            None => self.has(Flaw::ReleasedIsHeldByAll),
        };
        let held_once =
            over && entry.old.contains(&lease.token) && self.has(Flaw::RenewKnowsOldTokens);
        if !(held || held_once || self.has(Flaw::RenewIsUnfenced)) {
            return Err(StoreError::LeaseLost);
        }
        match &mut entry.state {
            State::Leased { .. } if self.has(Flaw::RenewRefusesOrphans) && over => {
                Err(StoreError::LeaseLost)
            }
            State::Leased { forgotten, .. } if now >= *forgotten => Err(StoreError::LeaseLost),
            State::Leased { .. } if self.has(Flaw::RenewDoesNothing) => Ok(()),
            State::Leased {
                ends,
                forgotten,
                keep,
            } => {
                let requested = now + ttl.as_duration();
                *ends = match self.flaw {
                    Flaw::RenewOnlyExtends => requested.max(*ends),
                    _ => requested,
                };
                match self.flaw {
                    Flaw::RenewForgetsSooner => {}
                    Flaw::RenewForgetsNever => *forgotten = now + Ttl::MAX.as_duration(),
                    _ => *forgotten = *ends + keep.as_duration(),
                }
                Ok(())
            }
            State::Completed { .. } if self.has(Flaw::RenewTakesCompletedKeys) => Ok(()),
            State::Completed { .. } => Err(StoreError::LeaseLost),
        }
    }
}

impl Store for Mutant {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        if self.claims_in_steps() {
            return Ok(self.acquire_in_steps(claim).await);
        }
        if !self.has(Flaw::ClaimIsReadThenWritten) {
            return Ok(self.step(claim.id, |found, now| self.grant(found, claim, now)));
        }
        let mut seen = self.step(claim.id, |found, _| found.clone());
        sleep(Duration::from_millis(2)).await;
        let acquired = self.grant(&mut seen, claim, Instant::now());
        if let Acquired::Granted { .. } = acquired {
            self.step(claim.id, |found, _| *found = seen);
        }
        Ok(acquired)
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        match self.flaw {
            Flaw::RenewFreesFirst => return self.renew_after_delete(lease, ttl).await,
            Flaw::RenewWritesByToken => return self.renew_by_token(lease, ttl).await,
            _ => {}
        }
        if !self.has(Flaw::RenewIsReadThenWritten) {
            return self.step(lease.id, |found, now| self.prolong(found, lease, ttl, now));
        }
        let mut seen = self.step(lease.id, |found, _| found.clone());
        sleep(Duration::from_millis(2)).await;
        self.prolong(&mut seen, lease, ttl, Instant::now())?;
        self.step(lease.id, |found, _| *found = seen);
        Ok(())
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        if self.has(Flaw::CompleteIsReadThenWritten) && !self.has_holder(lease.id) {
            sleep(Duration::from_millis(2)).await;
            // The record replaces an entry that was written since.
            self.step(lease.id, |found, _| *found = None);
        }
        if self.has(Flaw::CompleteFreesFirst) {
            // The record is then stored like that of an absent entry.
            self.delete_lease(lease).await;
        }
        let checks_expiry = !self.has(Flaw::CompleteIgnoresExpiry);
        let completed = self.step_unless_expired(lease.id, checks_expiry, |found, now| {
            let seconds = retention.as_duration().as_secs();
            let mut expires = now + retention.as_duration();
            if self.has(Flaw::RetentionOverflows) && i32::try_from(seconds).is_err() {
                expires = now;
            }
            if let Some(entry) = found
                && self.has(Flaw::RetentionCountsFromTheGrant)
            {
                expires = entry.granted + retention.as_duration();
            }
            match found {
                None if self.has(Flaw::CompleteRefusesAbsentKeys) => {
                    return Err(StoreError::LeaseLost);
                }
                None => {}
                Some(Entry { token: None, .. }) if self.has(Flaw::ReleasedRefusesAnswers) => {
                    return Err(StoreError::LeaseLost);
                }
                Some(Entry { token: None, .. }) => {}
                Some(entry) if entry.token != Some(lease.token) => match entry.state {
                    State::Leased { .. } if self.has(Flaw::CompleteIsUnfenced) => {}
                    State::Leased { ends, .. }
                        if now >= ends && self.has(Flaw::CompleteTakesAnyOrphan) => {}
                    State::Completed { .. } if self.has(Flaw::CompleteOverwrites) => {}
                    State::Leased { .. } | State::Completed { .. } => {
                        return Err(StoreError::LeaseLost);
                    }
                },
                Some(entry) => match &mut entry.state {
                    State::Leased { ends, .. }
                        if self.has(Flaw::CompleteRefusesOrphans) && now >= *ends =>
                    {
                        return Err(StoreError::LeaseLost);
                    }
                    State::Leased { forgotten, .. } => {
                        if self.has(Flaw::RecordExpiresWithTheLease) {
                            expires = *forgotten;
                        }
                    }
                    State::Completed {
                        record: kept,
                        expires,
                    } => {
                        match self.flaw {
                            Flaw::CompleteTwiceIsLost => return Err(StoreError::LeaseLost),
                            Flaw::CompleteTwiceReplaces => *kept = record,
                            Flaw::CompleteTwiceExtends => *expires = now + retention.as_duration(),
                            _ => {}
                        }
                        return Ok(());
                    }
                },
            }
            let (above, limit) = match self.flaw {
                Flaw::LimitIsNotTrue => (1 << 18, 1 << 19),
                Flaw::LimitIsTooLow => (1 << 10, 1 << 10),
                Flaw::RejectionFreesTheKey => (1 << 19, 1 << 19),
                _ => (usize::MAX, usize::MAX),
            };
            if record.len() > above {
                if self.has(Flaw::RejectionFreesTheKey) {
                    *found = None;
                }
                return Err(StoreError::RecordTooLarge { limit });
            }
            let fingerprint = match found {
                Some(entry) if self.has(Flaw::CompleteKeepsTheFingerprint) => entry.fingerprint,
                _ => lease.fingerprint,
            };
            *found = Some(Entry {
                token: Some(lease.token),
                fingerprint,
                generation: lease.generation,
                state: State::Completed { record, expires },
                granted: now,
                orphans: OrphanPolicy::TakeOver,
                old: Vec::new(),
            });
            Ok(())
        });
        self.changed.notify_waiters();
        completed
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let released = if self.has(Flaw::ReleaseFreesFirst) {
            self.release_after_delete(lease).await
        } else if self.has(Flaw::ReleaseIsReadThenWritten) {
            let mut seen = self.step(lease.id, |found, _| found.clone());
            sleep(Duration::from_millis(2)).await;
            let held = seen
                .as_ref()
                .is_some_and(|it| it.token == Some(lease.token));
            let released = self.apply_release(&mut seen, lease, Instant::now());
            if held {
                self.step(lease.id, |found, _| *found = seen);
            }
            released
        } else {
            let checks_expiry = !self.has(Flaw::ReleaseIgnoresExpiry);
            self.step_unless_expired(lease.id, checks_expiry, |found, now| {
                self.apply_release(found, lease, now)
            })
        };
        if !(self.has(Flaw::ReleasedWakesNobody) && matches!(released, Ok(true))) {
            self.changed.notify_waiters();
        }
        released.map(|_orphaned| ())
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        match self.flaw {
            Flaw::NobodyIsWoken => return sleep(within).await,
            Flaw::WaitingNeverEnds => return pending().await,
            Flaw::WaitingEndsLate => return sleep(within.max(Duration::from_secs(59))).await,
            Flaw::WaitingSubscribesNever if self.is_in_progress(*id) => {
                return sleep(within).await;
            }
            // A change between the query and the subscription is missed.
            Flaw::WaitingSubscribesLate if self.is_in_progress(*id) => {
                sleep(Duration::from_secs(1)).await;
                timeout(within, self.changed.notified()).await.ok();
                return;
            }
            _ => {}
        }
        let deadline = Instant::now() + within;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let in_progress = self.is_in_progress(*id);
            let blind = self.has(Flaw::WaitingIsBlind);
            let left = deadline.saturating_duration_since(Instant::now());
            if !(in_progress || blind) || timeout(left, changed).await.is_err() {
                return;
            }
            if blind {
                return;
            }
        }
    }

    fn find_completed(&self, id: &KeyId) -> Option<Acquired> {
        let token_is_known = match self.flaw {
            Flaw::FindsExpiredRecords => true,
            Flaw::FindsRecordsWithoutToken => false,
            _ => return None,
        };
        let entries = self.entries.lock().unwrap();
        let entry = entries.get(&self.id(*id))?;
        let State::Completed { record, expires } = &entry.state else {
            return None;
        };
        let expires_in = expires.saturating_duration_since(Instant::now());
        if expires_in.is_zero() && !self.has(Flaw::FindsExpiredRecords) {
            return None;
        }
        Some(Acquired::Completed {
            fingerprint: entry.fingerprint,
            record: record.clone(),
            expires_in,
            token: entry.token.filter(|_| token_is_known),
        })
    }
}
