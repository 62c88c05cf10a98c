//! What happened, as it is known from outside.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use crate::Answer;

/// An execution of a handler, as its process wrote it down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    /// Of which process.
    pub pid: u32,
    /// Which of its executions.
    pub n: u64,
    /// Of which request: its method and path.
    pub request: String,
    /// Under which key.
    pub key: String,
}

/// One request of a client.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Its key.
    pub key: String,
    /// Its method and path.
    pub request: String,
    /// Which member was asked, from 0.
    pub member: usize,
    /// When it was sent.
    pub began: Instant,
    /// When the client knew its outcome.
    pub ended: Instant,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The answer, without what may differ from one telling of it to another.
    Answered(Answer),
    /// 409 outcome-unknown, or another problem that stays however often one asks.
    Refused,
    /// To be tried again: another problem, of this code.
    NotYet(String),
    /// The client hung up.
    HungUp,
    /// No whole answer came.
    Failed,
}

/// A blow that fell.
#[derive(Clone, Copy, Debug)]
pub struct Strike {
    /// Which member it struck, from 0.
    pub member: usize,
    /// Which process that was.
    pub pid: u32,
    /// Before this it was up.
    pub ordered: Instant,
    /// From this on it was down.
    pub down: Instant,
    /// Until this, if it was only stopped.
    pub resumed: Option<Instant>,
}

/// A key that has had its effect may have it once more, and another answer, from some moment between: the store forgot
/// it, it was free again, or it was taken over.
#[derive(Clone, Debug)]
pub struct Occasion {
    /// Which key; all of them, if it is not said.
    pub key: Option<String>,
    /// Before this it may not.
    pub from: Instant,
    /// From this on it may, if it may at all.
    pub until: Instant,
    /// It was taken over: one more effect of the same request, and no other answer.
    pub takeover: bool,
}

/// All of it; but for effects in any order.
#[derive(Clone, Debug)]
pub struct History {
    /// What the members did, in the order in which it happened. Where that is not known, there may be no occasions.
    pub effects: Vec<Effect>,
    /// What clients asked for and were told.
    pub attempts: Vec<Attempt>,
    /// What befell the members.
    pub strikes: Vec<Strike>,
    /// When something may happen once more.
    pub occasions: Vec<Occasion>,
    /// Which member each process was, by its id.
    pub processes: BTreeMap<u32, usize>,
    /// The lease of the members.
    pub lease: Duration,
    /// How long before a client asked it may have been that what it is told was so: who waits is told what another one of
    /// the same process hears, whose call may have been on its way already.
    pub hearsay: Duration,
    /// For how long they keep records, if nothing can store one late.
    pub retention: Option<Duration>,
    /// For which problems clients may be told to try again, besides in-progress and store-unavailable: their codes.
    pub problems: &'static [&'static str],
}

impl Effect {
    /// Reads a line that a playground wrote.
    ///
    /// # Panics
    ///
    /// When it did not.
    #[must_use]
    pub fn parse(line: &str) -> Self {
        let words: Vec<_> = line.split(' ').collect();
        let [pid, n, method, path, key] = words[..] else {
            panic!("expected PID n METHOD PATH KEY, found {line:?}");
        };
        Self {
            pid: pid.parse().expect("a process id"),
            n: n.parse().expect("a number"),
            request: format!("{method} {path}"),
            key: key.to_owned(),
        }
    }
}

impl Attempt {
    /// The answer, if it was one.
    #[must_use]
    pub fn answer(&self) -> Option<&Answer> {
        match &self.outcome {
            Outcome::Answered(answer) => Some(answer),
            Outcome::Refused | Outcome::NotYet(_) | Outcome::HungUp | Outcome::Failed => None,
        }
    }

    /// Of which execution the answer says that it is.
    pub(super) fn execution(&self) -> Option<u64> {
        self.answer()?.header("x-execution")?.parse().ok()
    }

    /// Whether a client need not ask again.
    #[must_use]
    pub fn is_definite(&self) -> bool {
        match self.outcome {
            Outcome::Answered(_) | Outcome::Refused => true,
            Outcome::NotYet(_) | Outcome::HungUp | Outcome::Failed => false,
        }
    }

    /// Whether it was under way when its member was struck, or still stopped.
    pub(super) fn meets(&self, strike: &Strike) -> bool {
        self.member == strike.member && self.began <= strike.over() && self.ended >= strike.ordered
    }

    /// Whether it was under way all the time that its process was stopped, and that was at least a lease.
    pub(super) fn outlasts(&self, strike: &Strike, lease: Duration) -> bool {
        self.meets(strike)
            && strike
                .resumed
                .is_some_and(|resumed| resumed - strike.down >= lease && self.ended >= resumed)
    }
}

impl Strike {
    /// From this on, the process is dead or goes on.
    pub(super) fn over(&self) -> Instant {
        self.resumed.unwrap_or(self.down)
    }

    /// Whether whatever the process was doing may have been taken over: it is gone, or a lease that was renewed each
    /// third of its length ran out.
    pub(super) fn loses_leases(&self, lease: Duration) -> bool {
        self.resumed
            .is_none_or(|resumed| resumed - self.ordered >= lease * 2 / 3)
    }
}
