//! What happened to a fleet.

use std::time::{Duration, Instant};

use crate::Answer;

/// An execution of a handler, as its process wrote it down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    /// Of which process.
    pub pid: u32,
    /// Which of its executions, from 1.
    pub n: u64,
    /// Under which key.
    pub key: String,
}

/// One request of a client.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Its key.
    pub key: String,
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
    /// 409 outcome-unknown.
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

/// The store forgot what it had been told, at some moment between.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// Before this it had forgotten nothing.
    pub from: Instant,
    /// From this on it forgets nothing more.
    pub until: Instant,
}

/// All of it, each in any order.
#[derive(Clone, Debug)]
pub struct History {
    /// What the members did.
    pub effects: Vec<Effect>,
    /// What clients asked for and were told.
    pub attempts: Vec<Attempt>,
    /// What befell the members.
    pub strikes: Vec<Strike>,
    /// What befell the store's memory.
    pub losses: Vec<Loss>,
    /// The lease of the members.
    pub lease: Duration,
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
        let [pid, n, _method, _path, key] = words[..] else {
            panic!("expected PID n METHOD PATH KEY, found {line:?}");
        };
        Self {
            pid: pid.parse().expect("a process id"),
            n: n.parse().expect("a number"),
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
