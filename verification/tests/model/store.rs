//! The entry of a store according to the contract, as a pure function. The model checks this function, and the replies
//! of the real stores are compared with it.
//!
//! Each time is the remaining time of a lease, an orphan or a record, in ticks. An entry does not contain the current
//! time, so time may pass indefinitely without a new state.

use crate::mutant::Mutant;

/// The caller: its token, and the fingerprint of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Caller {
    pub(crate) token: u8,
    pub(crate) fingerprint: u8,
}

/// A call to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Call {
    Acquire(Orphans),
    Renew,
    /// The record is the number of the client that made it.
    Complete,
    /// The transaction of the handler: see `tower_idempotency::transaction`.
    Commit,
    Release,
}

/// The policy for an expired lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Orphans {
    TakeOver,
    /// Refuses the orphan, unless an operator has allowed a retry.
    Refuse,
    /// A query, which never takes over.
    Never,
}

/// The token of an entry that an operator has resolved. No client has it.
pub(crate) const OPERATOR: u8 = 100;
/// The token of an orphan whose retry an operator has allowed.
pub(crate) const RETRY_ALLOWED: u8 = 101;

/// The reply of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModelReply {
    Granted {
        generation: u8,
        takeover: bool,
    },
    InProgress {
        fingerprint: u8,
        left: u8,
    },
    Orphaned {
        fingerprint: u8,
        since: u8,
    },
    Completed {
        fingerprint: u8,
        record: u8,
        left: u8,
    },
    Done,
    LeaseLost,
}

/// The entry stored under the only key; an absent entry is `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Entry {
    /// `None` after a takeover was released.
    pub(crate) token: Option<u8>,
    pub(crate) fingerprint: u8,
    pub(crate) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum State {
    /// An orphan if no time is left of the lease.
    Leased {
        generation: u8,
        left: u8,
        /// The remaining retention of the orphan.
        orphan_retention: u8,
    },
    Completed {
        record: u8,
        left: u8,
    },
}

/// Durations in ticks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) lease: u8,
    pub(crate) orphan_retention: u8,
    pub(crate) retention: u8,
}

/// The rules of the store, without the one that the mutant omits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) times: Times,
    pub(crate) mutant: Option<Mutant>,
}

impl Rules {
    /// Applies one call, which is one step.
    pub(crate) fn apply(
        &self,
        entry: &mut Option<Entry>,
        caller: Caller,
        call: Call,
    ) -> ModelReply {
        match call {
            Call::Acquire(orphans) => self.acquire(entry, caller, orphans),
            Call::Renew => self.renew(entry, caller),
            Call::Complete => self.complete(entry, caller),
            Call::Commit => self.commit(entry, caller),
            Call::Release => self.release(entry, caller),
        }
    }

    /// Advances the time by one tick.
    pub(crate) fn tick(&self, entry: &mut Option<Entry>) {
        let Some(held) = entry else { return };
        let over = match &mut held.state {
            State::Leased {
                left: 0,
                orphan_retention,
                ..
            } => {
                *orphan_retention = orphan_retention.saturating_sub(1);
                *orphan_retention == 0
            }
            State::Leased { left, .. } => {
                *left -= 1;
                false
            }
            State::Completed { left, .. } => {
                *left = left.saturating_sub(1);
                *left == 0
            }
        };
        if over && !self.has(Mutant::ExpiryBySweeperOnly) {
            *entry = None;
        }
    }

    /// Runs the sweeper of the mutant `ExpiryBySweeperOnly`, which may run at any time.
    pub(crate) fn sweep(entry: &mut Option<Entry>) {
        if let Some(Entry {
            state: State::Leased { left: 0, .. } | State::Completed { left: 0, .. },
            ..
        }) = entry
        {
            *entry = None;
        }
    }

    pub(crate) fn has(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    fn acquire(&self, entry: &mut Option<Entry>, caller: Caller, orphans: Orphans) -> ModelReply {
        let Some(held) = entry else {
            *entry = Some(self.leased(caller, 1));
            return self.granted(1);
        };
        let fingerprint = held.fingerprint;
        let (generation, left, orphan_retention) = match held.state {
            State::Completed { record, left } => {
                return ModelReply::Completed {
                    fingerprint,
                    record,
                    left,
                };
            }
            State::Leased {
                generation,
                left,
                orphan_retention,
            } => (generation, left, orphan_retention),
        };
        if held.token == Some(caller.token) && !self.has(Mutant::NoOwnToken) {
            held.state = self.leased(caller, generation).state;
            return self.granted(generation);
        }
        if left > 0 || self.has(Mutant::ExpiryBySweeperOnly) {
            return ModelReply::InProgress { fingerprint, left };
        }
        let same = fingerprint == caller.fingerprint || self.has(Mutant::TakeoverOfAnotherRequest);
        let may = match orphans {
            Orphans::TakeOver => true,
            Orphans::Refuse => {
                held.token == Some(RETRY_ALLOWED) || self.has(Mutant::RefuseIsIgnored)
            }
            Orphans::Never => self.has(Mutant::QueryTakesOver),
        };
        if !(same && may) {
            let since = self.times.orphan_retention - orphan_retention;
            return ModelReply::Orphaned { fingerprint, since };
        }
        *held = self.leased(caller, generation + 1);
        self.granted(generation + 1)
    }

    fn renew(&self, entry: &mut Option<Entry>, caller: Caller) -> ModelReply {
        match entry {
            Some(Entry {
                token,
                state:
                    State::Leased {
                        left,
                        orphan_retention,
                        ..
                    },
                ..
            }) if *token == Some(caller.token) => {
                *left = self.lease();
                *orphan_retention = self.times.orphan_retention;
                ModelReply::Done
            }
            Some(_) | None => ModelReply::LeaseLost,
        }
    }

    fn complete(&self, entry: &mut Option<Entry>, caller: Caller) -> ModelReply {
        if let Some(held) = entry
            && let Some(token) = held.token
        {
            if token != caller.token {
                if !self.has(Mutant::UnfencedComplete) {
                    return ModelReply::LeaseLost;
                }
            } else if let State::Completed { .. } = held.state {
                return ModelReply::Done;
            }
        }
        *entry = Some(self.completed(caller));
        ModelReply::Done
    }

    fn commit(&self, entry: &mut Option<Entry>, caller: Caller) -> ModelReply {
        match entry {
            Some(Entry {
                token,
                state: State::Leased { .. },
                ..
            }) if *token == Some(caller.token) => {}
            Some(_) if self.has(Mutant::UnfencedCommit) => {}
            Some(_) | None => return ModelReply::LeaseLost,
        }
        *entry = Some(self.completed(caller));
        ModelReply::Done
    }

    fn release(&self, entry: &mut Option<Entry>, caller: Caller) -> ModelReply {
        if let Some(held) = entry
            && let State::Leased {
                generation,
                left,
                orphan_retention,
            } = &mut held.state
            && (held.token == Some(caller.token) || self.has(Mutant::ReleaseByAnyone))
        {
            if *generation == 1 || self.has(Mutant::ReleaseFreesTakeovers) {
                *entry = None;
            } else {
                held.token = None;
                *left = 0;
                *orphan_retention = self.times.orphan_retention;
            }
        }
        ModelReply::Done
    }

    fn granted(&self, generation: u8) -> ModelReply {
        ModelReply::Granted {
            generation,
            takeover: generation > 1 && !self.has(Mutant::TakeoverIsHidden),
        }
    }

    pub(crate) fn leased(&self, caller: Caller, generation: u8) -> Entry {
        Entry {
            token: Some(caller.token),
            fingerprint: caller.fingerprint,
            state: State::Leased {
                generation,
                left: self.lease(),
                orphan_retention: self.times.orphan_retention,
            },
        }
    }

    fn completed(&self, caller: Caller) -> Entry {
        Entry {
            token: Some(caller.token),
            fingerprint: caller.fingerprint,
            state: State::Completed {
                record: caller.token,
                left: self.times.retention,
            },
        }
    }

    fn lease(&self) -> u8 {
        if self.has(Mutant::LeaseAsLongAsTheRetention) {
            self.times.retention
        } else {
            self.times.lease
        }
    }
}
