//! The protocol of one request, as far as the store can observe it. The order of calls is that of `execution/` and
//! `transaction.rs` in the main crate.
//!
//! The model counts neither retries nor time. A client may retry or give up at any moment, so the results hold for all
//! timeouts.

use crate::store::{Call, Caller, ModelReply, Orphans};

/// A request, from its arrival to its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Client {
    pub(crate) fingerprint: u8,
    /// The process that handles the request. All are in one unless the processes have tiers.
    pub(crate) process: u8,
    pub(crate) phase: Phase,
    /// `true` if the request got its lease in the present life of the key: see `History`.
    pub(crate) current: bool,
    /// A call that the client no longer waits for, and that has not arrived at the store yet.
    pub(crate) late: Option<Call>,
    /// `true` if an operator has broken the lease of the request.
    pub(crate) broken: bool,
    /// `true` if the store accepted a commit of the request. `false` again if its record was lost or deleted before its expiry.
    pub(crate) committed: bool,
}

/// The progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// The request has not arrived yet.
    NotArrived,
    /// The request has called acquire, without a reply so far.
    Acquiring,
    /// The key is in progress: the request waits, and may query again at any time.
    Waiting,
    /// The request has the lease, and no effect so far.
    Running,
    /// The request has had its effect, and ends with or without a response to record.
    Executed,
    /// The request has sent its record, without a reply so far.
    Completing,
    /// The store kept failing, and the request returned its response, or an unknown outcome if a renewal found no lease. Its
    /// record is still being sent.
    Late,
    /// The record arrived too late: the request queries the stored state.
    Lost,
    /// The store has no record: the request sends its own record once more.
    Resending,
    /// The commit got no reply, or the reply that the lease was lost. The request queries the stored state.
    Unacknowledged,
    /// The request leaves nothing to record, or stopped querying.
    Releasing,
    /// The state of a mutant: the request has read that it may take over, and has not written yet.
    Reclaiming,
    /// The request has its response, or its process is dead.
    Finished,
}

/// A move of a client that does not involve the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// The handler has its effect.
    Effect,
    /// The handler ends without a response to record.
    NothingToRecord,
    /// The client stops retrying or waiting.
    GiveUp,
}

/// The delivery of a call and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    Delivered,
    /// The call never arrived at the store.
    CallLost,
    /// The call had its effect, and the reply was lost.
    ReplyLost,
    /// The call has not reached the store yet, and its caller no longer waits for it.
    Late,
}

/// The consequence of the store's reply for the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Nothing,
    /// The request returns the response of this client.
    Recorded(u8),
    /// The request is executed.
    Run {
        takeover: bool,
    },
}

impl Client {
    pub(crate) fn new(fingerprint: u8) -> Self {
        Self {
            fingerprint,
            process: 0,
            phase: Phase::NotArrived,
            current: false,
            late: None,
            broken: false,
            committed: false,
        }
    }

    /// Returns the calls that the client may make now.
    pub(crate) fn calls(&self, orphans: Orphans, transactional: bool) -> &'static [Call] {
        const TAKE_OVER: Call = Call::Acquire(Orphans::TakeOver);
        const REFUSE: Call = Call::Acquire(Orphans::Refuse);
        const QUERY: Call = Call::Acquire(Orphans::Never);
        match (self.phase, orphans) {
            (Phase::NotArrived | Phase::Acquiring | Phase::Waiting, Orphans::TakeOver) => {
                &[TAKE_OVER]
            }
            (Phase::NotArrived | Phase::Acquiring | Phase::Waiting, _) => &[REFUSE],
            (Phase::Running, _) if transactional => &[Call::Commit, Call::Renew],
            (Phase::Running, _) => &[Call::Renew],
            (Phase::Executed | Phase::Completing, _) => &[Call::Complete, Call::Renew],
            (Phase::Late | Phase::Resending, _) => &[Call::Complete],
            // A query must not take over the lease of the client that took over from this one.
            (Phase::Lost, _) => &[QUERY],
            (Phase::Unacknowledged, _) => &[QUERY, Call::Renew],
            (Phase::Releasing, _) => &[Call::Release, Call::Renew],
            (Phase::Reclaiming | Phase::Finished, _) => &[],
        }
    }

    /// Returns the other moves that the client may make now.
    pub(crate) fn moves(&self, transactional: bool) -> &'static [Move] {
        match self.phase {
            Phase::Running if transactional => &[Move::NothingToRecord],
            Phase::Running => &[Move::Effect, Move::NothingToRecord],
            Phase::Executed => &[Move::NothingToRecord],
            Phase::Acquiring
            | Phase::Waiting
            | Phase::Completing
            | Phase::Late
            | Phase::Lost
            | Phase::Resending
            | Phase::Unacknowledged
            | Phase::Releasing => &[Move::GiveUp],
            Phase::NotArrived | Phase::Reclaiming | Phase::Finished => &[],
        }
    }

    pub(crate) fn take(&mut self, step: Move) {
        self.phase = match (step, self.phase) {
            (Move::Effect, _) => Phase::Executed,
            (Move::NothingToRecord, _) => Phase::Releasing,
            // The store may have granted the lease nevertheless.
            (Move::GiveUp, Phase::Acquiring) => Phase::Releasing,
            (Move::GiveUp, Phase::Completing) => Phase::Late,
            (Move::GiveUp, _) => Phase::Finished,
        };
    }

    /// Handles a call without a reply.
    pub(crate) fn miss_reply(&mut self, call: Call) {
        self.phase = match (call, self.phase) {
            (Call::Acquire(_), Phase::NotArrived | Phase::Waiting) => Phase::Acquiring,
            (Call::Complete, Phase::Executed) => Phase::Completing,
            (Call::Commit, _) => Phase::Unacknowledged,
            (_, phase) => phase,
        };
    }

    /// Handles the reply to a call of the caller `who`.
    pub(crate) fn receive(&mut self, caller: Caller, call: Call, response: ModelReply) -> Reply {
        let (phase, reply) = match (call, self.phase, response) {
            (Call::Renew, phase, _) => (phase, Reply::Nothing),
            // The record is the response for every caller with the same request. Another request must not get it.
            (
                Call::Acquire(_),
                _,
                ModelReply::Completed {
                    fingerprint,
                    record,
                    ..
                },
            ) if fingerprint == caller.fingerprint => (Phase::Finished, Reply::Recorded(record)),
            (
                Call::Acquire(_),
                Phase::Lost,
                ModelReply::Granted { .. } | ModelReply::Orphaned { .. },
            ) => (Phase::Resending, Reply::Nothing),
            (
                Call::Acquire(_),
                Phase::Lost | Phase::Unacknowledged,
                ModelReply::InProgress { .. },
            ) => (Phase::Finished, Reply::Nothing),
            // The record of the commit has expired. Another commit would repeat the effect.
            (Call::Acquire(_), Phase::Unacknowledged, ModelReply::Granted { .. })
                if self.committed =>
            {
                (Phase::Releasing, Reply::Nothing)
            }
            (Call::Acquire(_), _, ModelReply::Granted { takeover, .. }) => {
                (Phase::Running, Reply::Run { takeover })
            }
            (Call::Acquire(_), _, ModelReply::InProgress { fingerprint, .. })
                if fingerprint == caller.fingerprint =>
            {
                (Phase::Waiting, Reply::Nothing)
            }
            (Call::Acquire(_), _, _) => (Phase::Finished, Reply::Nothing),
            (Call::Complete, Phase::Late, _) => (Phase::Finished, Reply::Nothing),
            (Call::Complete | Call::Commit, _, ModelReply::Done) => {
                (Phase::Finished, Reply::Recorded(caller.token))
            }
            (Call::Complete, Phase::Resending, _) => (Phase::Finished, Reply::Nothing),
            (Call::Complete, _, _) => (Phase::Lost, Reply::Nothing),
            (Call::Commit, _, _) => (Phase::Unacknowledged, Reply::Nothing),
            (Call::Release, _, _) => (Phase::Finished, Reply::Nothing),
        };
        self.phase = phase;
        reply
    }
}
