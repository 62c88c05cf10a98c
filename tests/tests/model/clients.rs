//! What one request does, as far as the store can tell: the order of `exchange.rs`, `settle.rs` and `transaction.rs`.
//!
//! Nothing counts tries or time: whoever may try again or give up does either, so that what holds here holds whatever
//! the timeouts are.

use crate::store::{Answer, Call, Orphans, Who};

/// One request, from its key to its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Client {
    pub(crate) fingerprint: u8,
    pub(crate) phase: Phase,
    /// It was granted its lease in the present life of the key: see `History`.
    pub(crate) current: bool,
    /// A call of it that nobody waits for any more, and that has not come to the store yet.
    pub(crate) late: Option<Call>,
}

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// It has not come yet.
    Coming,
    /// It has asked for the lease, and heard nothing.
    Asking,
    /// The key is in progress: it waits, and looks again when it likes.
    Waiting,
    /// It has the lease, and no effect so far.
    Running,
    /// It has had its effect, and ends with an answer to keep or without one.
    Ran,
    /// It has sent its record, and heard nothing.
    Completing,
    /// It was answered although the store kept failing, and its record is still being sent.
    Late,
    /// Its record came too late: it asks what is stored.
    Lost,
    /// Nobody else has an answer: it sends its own once more.
    Salvaging,
    /// It has committed, and heard nothing, or that the lease was lost: it asks what is stored.
    InDoubt,
    /// It leaves nothing to keep, or gave up asking.
    Releasing,
    /// Of a mutant: it has read that it may take over, and not written yet.
    Reclaiming,
    /// It is answered, or its process is dead.
    Over,
}

/// What it does without the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// The handler has its effect.
    Effect,
    /// The handler ends with nothing to keep.
    NothingToKeep,
    /// It stops trying, or waiting.
    GiveUp,
}

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Heard,
    /// It never came to the store.
    CallLost,
    /// It had its effect, and the answer was lost.
    ReplyLost,
    /// It is on its way still, and its caller has given up on it.
    Late,
}

/// What a client makes of the store's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    Nothing,
    /// The answer of this client is the client's answer.
    Answer(u8),
    /// It runs from here on.
    Run {
        takeover: bool,
    },
}

impl Client {
    pub(crate) fn new(fingerprint: u8) -> Self {
        Self {
            fingerprint,
            phase: Phase::Coming,
            current: false,
            late: None,
        }
    }

    /// The calls that it may make now.
    pub(crate) fn calls(&self, orphans: Orphans, transactional: bool) -> &'static [Call] {
        const TAKE_OVER: Call = Call::Acquire(Orphans::TakeOver);
        const REFUSE: Call = Call::Acquire(Orphans::Refuse);
        match (self.phase, orphans) {
            (Phase::Coming | Phase::Asking | Phase::Waiting, Orphans::TakeOver) => &[TAKE_OVER],
            (Phase::Coming | Phase::Asking | Phase::Waiting, Orphans::Refuse) => &[REFUSE],
            (Phase::Running, _) if transactional => &[Call::Commit, Call::Renew],
            (Phase::Running, _) => &[Call::Renew],
            (Phase::Ran | Phase::Completing, _) => &[Call::Complete, Call::Renew],
            (Phase::Late | Phase::Salvaging, _) => &[Call::Complete],
            // Whoever looks must not take over from whoever took over from it.
            (Phase::Lost, _) => &[REFUSE],
            (Phase::InDoubt, _) => &[REFUSE, Call::Renew],
            (Phase::Releasing, _) => &[Call::Release, Call::Renew],
            (Phase::Reclaiming | Phase::Over, _) => &[],
        }
    }

    /// What else it may do now.
    pub(crate) fn moves(&self, transactional: bool) -> &'static [Move] {
        match self.phase {
            Phase::Running if transactional => &[Move::NothingToKeep],
            Phase::Running => &[Move::Effect, Move::NothingToKeep],
            Phase::Ran => &[Move::NothingToKeep],
            Phase::Asking
            | Phase::Waiting
            | Phase::Completing
            | Phase::Late
            | Phase::Lost
            | Phase::Salvaging
            | Phase::InDoubt
            | Phase::Releasing => &[Move::GiveUp],
            Phase::Coming | Phase::Reclaiming | Phase::Over => &[],
        }
    }

    pub(crate) fn take(&mut self, step: Move) {
        self.phase = match (step, self.phase) {
            (Move::Effect, _) => Phase::Ran,
            (Move::NothingToKeep, _) => Phase::Releasing,
            // The store may hold a lease for it all the same.
            (Move::GiveUp, Phase::Asking) => Phase::Releasing,
            (Move::GiveUp, Phase::Completing) => Phase::Late,
            (Move::GiveUp, _) => Phase::Over,
        };
    }

    /// It made this call, and heard nothing.
    pub(crate) fn hears_nothing(&mut self, call: Call) {
        self.phase = match (call, self.phase) {
            (Call::Acquire(_), Phase::Coming | Phase::Waiting) => Phase::Asking,
            (Call::Complete, Phase::Ran) => Phase::Completing,
            (Call::Commit, _) => Phase::InDoubt,
            (_, phase) => phase,
        };
    }

    /// It made this call as `who`, and this is the answer.
    pub(crate) fn hears(&mut self, who: Who, call: Call, answer: Answer) -> Told {
        let (phase, told) = match (call, self.phase, answer) {
            (Call::Renew, phase, _) => (phase, Told::Nothing),
            // What is on record is the answer, whoever asks; another request learns nothing of it.
            (
                Call::Acquire(_),
                _,
                Answer::Completed {
                    fingerprint,
                    record,
                },
            ) if fingerprint == who.fingerprint => (Phase::Over, Told::Answer(record)),
            (Call::Acquire(_), Phase::Lost, Answer::Granted { .. } | Answer::Orphaned { .. }) => {
                (Phase::Salvaging, Told::Nothing)
            }
            (Call::Acquire(_), Phase::Lost | Phase::InDoubt, Answer::InProgress { .. }) => {
                (Phase::Over, Told::Nothing)
            }
            (Call::Acquire(_), _, Answer::Granted { takeover, .. }) => {
                (Phase::Running, Told::Run { takeover })
            }
            (Call::Acquire(_), _, Answer::InProgress { fingerprint, .. })
                if fingerprint == who.fingerprint =>
            {
                (Phase::Waiting, Told::Nothing)
            }
            (Call::Acquire(_), _, _) => (Phase::Over, Told::Nothing),
            (Call::Complete, Phase::Late, _) => (Phase::Over, Told::Nothing),
            (Call::Complete | Call::Commit, _, Answer::Done) => {
                (Phase::Over, Told::Answer(who.token))
            }
            (Call::Complete, Phase::Salvaging, _) => (Phase::Over, Told::Nothing),
            (Call::Complete, _, _) => (Phase::Lost, Told::Nothing),
            (Call::Commit, _, _) => (Phase::InDoubt, Told::Nothing),
            (Call::Release, _, _) => (Phase::Over, Told::Nothing),
        };
        self.phase = phase;
        told
    }
}
