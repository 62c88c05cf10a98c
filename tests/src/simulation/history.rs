//! What happened, in order, with tokens and ids by numbers, so that two runs of a seed can be compared.

use std::fmt;

use bytes::Bytes;
use http::StatusCode;

use super::Millis;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub(super) at: Millis,
    pub(super) what: What,
}

/// What can happen. Processes, attempts, executions, tokens and entries are numbers from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    Begins(usize),
    Dies(usize),
    Pauses(usize),
    GoesOn(usize),
    Drains(usize),
    Drained(usize, bool),
    ClockSteps(Millis),
    /// From here on nothing goes wrong any more.
    Heals,
    /// Nothing is under way any more.
    Rests,
    Sends {
        attempt: usize,
        client: Option<usize>,
        process: usize,
        request: Request,
    },
    Leaves(usize),
    Ends(usize, Outcome),
    Executes {
        execution: usize,
        attempt: usize,
        lease: Option<Held>,
    },
    Effect {
        execution: usize,
        held: bool,
    },
    Executed(usize),
    CutOff(usize),
    Arrives {
        process: usize,
        call: &'static str,
        id: usize,
        token: usize,
        found: Found,
    },
    /// A record, an orphan or a first lease is over: the key of this entry is free again.
    IsFree(usize),
    /// Somebody else has the lease now, whose time was over.
    IsTakenOver(usize),
    Hears {
        process: usize,
        call: &'static str,
        token: usize,
        heard: Heard,
    },
}

/// A key, and which of the requests under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Request {
    pub(super) key: u64,
    pub(super) variant: u64,
}

/// The lease that a handler was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) id: usize,
    pub(super) token: usize,
    pub(super) generation: u64,
    pub(super) takeover: bool,
}

/// How an attempt ended, for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Answered(Reply),
    /// By the layer, for this reason.
    Refused(&'static str, StatusCode),
    Panicked,
    Failed,
    BrokeOff,
    /// Its process died.
    Died,
    /// The client had left.
    Left,
    /// There was nothing for an operator to finish.
    NoOrphan,
}

/// An answer that came from a handler, now or earlier.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) status: StatusCode,
    /// Which execution it says it is of.
    pub(super) execution: Option<usize>,
    pub(super) replayed: bool,
    pub(super) body: Bytes,
}

/// What the store answered as a call arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Granted(u64, bool),
    InProgress(Millis),
    Orphaned(Millis),
    Completed,
    Done,
    Lost,
}

/// What the layer heard of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Answer,
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
        write!(f, "{:>7} ms  {:?}", self.at, self.what)
    }
}
