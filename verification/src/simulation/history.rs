//! The events of a run, in order. Tokens and ids are replaced by numbers, so that two runs of a seed can be compared.

use std::fmt;

use bytes::Bytes;
use http::StatusCode;

use super::Millis;

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub(super) at: Millis,
    pub(super) kind: EventKind,
}

/// The possible events. Processes, attempts, executions, tokens and entries are numbers from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EventKind {
    ProcessStarted(usize),
    ProcessKilled(usize),
    ProcessPaused(usize),
    ProcessResumed(usize),
    DrainStarted(usize),
    DrainEnded(usize, bool),
    ClockStepped(Millis),
    /// No fault is injected from here on.
    FaultsEnded,
    /// No exchange is in flight any more.
    ExchangesEnded,
    RequestSent {
        attempt: usize,
        client: Option<usize>,
        process: usize,
        request: Request,
    },
    ClientLeft(usize),
    AttemptEnded(usize, AttemptOutcome),
    ExecutionStarted {
        execution: usize,
        attempt: usize,
        lease: Option<HeldLease>,
    },
    Effect {
        execution: usize,
        held: bool,
    },
    ExecutionEnded(usize),
    ExecutionDropped(usize),
    /// A call was sent that fails, or whose reply arrives after its caller may have stopped waiting.
    CallFaulted {
        process: usize,
        call: &'static str,
        token: usize,
    },
    CallArrived {
        process: usize,
        call: &'static str,
        id: usize,
        token: usize,
        reply: ReplySummary,
    },
    /// An operator read the entry in this state, or found none.
    EntryRead {
        id: usize,
        state: Option<&'static str>,
    },
    /// A decision of an operator arrived at the store. `response` is the number of the operator's response.
    EntryResolved {
        id: usize,
        resolution: &'static str,
        is_applied: bool,
        response: Option<usize>,
    },
    /// A record, an orphan or a first lease expired, or an operator deleted the entry: its key is free again.
    KeyFreed(usize),
    /// Another process is the new lease holder; the earlier lease had expired.
    LeaseTakenOver(usize),
    ReplyReceived {
        process: usize,
        call: &'static str,
        token: usize,
        received: ReceivedReply,
    },
}

/// A key, and the variant of the request under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Request {
    pub(super) key: u64,
    pub(super) variant: u64,
}

/// The lease that a handler was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeldLease {
    pub(super) id: usize,
    pub(super) token: usize,
    pub(super) generation: u64,
    pub(super) takeover: bool,
}

/// The outcome of an attempt, for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AttemptOutcome {
    Answered(Reply),
    /// The layer refused the request, for this reason.
    Refused(&'static str, StatusCode),
    Panicked,
    Failed,
    BodyBroken,
    /// The process of the attempt died.
    Died,
    /// The client had left.
    Left,
    /// The operator found no orphan to finish.
    NoOrphan,
}

/// A response of a handler, from this attempt or an earlier one.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) status: StatusCode,
    /// The number of the execution that is named in the response.
    pub(super) execution: Option<usize>,
    pub(super) replayed: bool,
    pub(super) body: Bytes,
}

/// The reply of the store at the arrival of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplySummary {
    Granted(u64, bool),
    InProgress(Millis),
    Orphaned(Millis),
    Completed,
    Done,
    Lost,
}

/// The reply as the layer received it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReceivedReply {
    Reply,
    Error,
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let marked = if self.replayed { " replayed" } else { "" };
        write!(f, "{}{marked} {:?}", self.status.as_u16(), self.body)
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>7} ms  {:?}", self.at, self.kind)
    }
}
