//! The history of a fleet, as far as outside observers can know it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tests::TestResponse;

/// An execution of a handler, as its process recorded it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    /// The id of the process.
    pub pid: u32,
    /// The number of the execution in its process.
    pub n: u64,
    /// The request: its method and path.
    pub request: String,
    /// The key of the request.
    pub key: String,
}

/// A request of a client.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The key of the request.
    pub key: String,
    /// The method and path of the request.
    pub request: String,
    /// The member that received the request, from 0.
    pub member: usize,
    /// The time at which the request was sent.
    pub began: Instant,
    /// The time at which the client knew the outcome.
    pub ended: Instant,
    /// The outcome of the request.
    pub outcome: Outcome,
}

/// The outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The response, without the parts that may differ between replays.
    Answered(TestResponse),
    /// 409 outcome-unknown, or another problem that persists over retries.
    Refused,
    /// Another problem, with this code, after which the client retries.
    NotYet(String),
    /// The client hung up.
    HungUp,
    /// No complete response arrived.
    Failed,
}

/// A strike at a member.
#[derive(Clone, Copy, Debug)]
pub struct Strike {
    /// The member that was struck, from 0.
    pub member: usize,
    /// The id of the process that was struck.
    pub pid: u32,
    /// The time of the strike: until then the process was up.
    pub ordered: Instant,
    /// The time from which the process was down.
    pub down: Instant,
    /// The time at which the process was resumed, if it was only stopped.
    pub resumed: Option<Instant>,
}

/// An occasion on which a key may have one more effect, and another response. The store lost the key, the key was free
/// again, or it was taken over. The moment lies between two times.
#[derive(Clone, Debug)]
pub struct Occasion {
    /// The key, or `None` for all keys.
    pub key: Option<String>,
    /// The time before which the additional effect may not happen.
    pub from: Instant,
    /// The time from which the additional effect may happen, if it happens at all.
    pub until: Instant,
    /// `true` if the key was taken over. It allows one more effect of the same request, and no other response.
    pub takeover: bool,
}

/// The observed events of a run. Except for effects, they are in any order.
#[derive(Clone, Debug)]
pub struct History {
    /// The effects of the members, in the order in which they happened. The order may be unknown only if there are no
    /// occasions.
    pub effects: Vec<Effect>,
    /// The requests of clients, and their outcomes.
    pub attempts: Vec<Attempt>,
    /// The strikes at the members.
    pub strikes: Vec<Strike>,
    /// The occasions on which a key may have one more effect.
    pub occasions: Vec<Occasion>,
    /// The member of each process, by process id.
    pub processes: BTreeMap<u32, usize>,
    /// The lease of the members.
    pub lease: Duration,
    /// The longest time by which a response may be older than its request. A waiter may share the store's reply to
    /// another request of its process, whose call was already in flight.
    pub max_reply_age: Duration,
    /// The retention of records, or `None` if a member may store a record late.
    pub retention: Option<Duration>,
    /// The codes of the problems after which clients may retry, in addition to in-progress and store-unavailable.
    pub problems: &'static [&'static str],
}

impl Effect {
    /// Reads a line that a playground wrote.
    ///
    /// # Panics
    ///
    /// Panics if a playground did not write the line.
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

impl History {
    /// Returns the number of strikes during which a request to their member was in flight.
    #[must_use]
    pub fn count_strikes_with_request(&self) -> usize {
        let strikes = self.strikes.iter();
        let met = strikes.filter(|strike| self.attempts.iter().any(|it| it.is_struck_by(strike)));
        met.count()
    }

    /// Returns `true` if a request was in flight at any time between these two.
    #[must_use]
    pub fn has_request_between(&self, from: Instant, until: Instant) -> bool {
        let mut attempts = self.attempts.iter();
        attempts.any(|it| it.is_in_flight_between(from, until))
    }
}

impl Attempt {
    /// Returns the response, if there is one.
    #[must_use]
    pub fn response(&self) -> Option<&TestResponse> {
        match &self.outcome {
            Outcome::Answered(response) => Some(response),
            Outcome::Refused | Outcome::NotYet(_) | Outcome::HungUp | Outcome::Failed => None,
        }
    }

    /// Returns the number of the execution that is named in the response.
    pub(super) fn execution(&self) -> Option<u64> {
        self.response()?.header("x-execution")?.parse().ok()
    }

    /// Returns `true` if the client need not retry.
    #[must_use]
    pub fn is_definite(&self) -> bool {
        match self.outcome {
            Outcome::Answered(_) | Outcome::Refused => true,
            Outcome::NotYet(_) | Outcome::HungUp | Outcome::Failed => false,
        }
    }

    /// Returns `true` if the attempt was in flight when its member was struck, or while the member was still stopped.
    pub(super) fn is_struck_by(&self, strike: &Strike) -> bool {
        self.member == strike.member && self.is_in_flight_between(strike.ordered, strike.end())
    }

    fn is_in_flight_between(&self, from: Instant, until: Instant) -> bool {
        self.began <= until && self.ended >= from
    }

    /// Returns `true` if the attempt was in flight for the whole time that its process was stopped, and that time was at
    /// least a lease.
    pub(super) fn is_in_flight_during(&self, strike: &Strike, lease: Duration) -> bool {
        self.is_struck_by(strike)
            && strike
                .resumed
                .is_some_and(|resumed| resumed - strike.down >= lease && self.ended >= resumed)
    }
}

impl Strike {
    /// Returns the time from which the process is dead or continues.
    pub(super) fn end(&self) -> Instant {
        self.resumed.unwrap_or(self.down)
    }

    /// Returns `true` if the leases of the process may have been taken over. The process was killed, or a lease that it
    /// renewed each third of the lease duration expired.
    pub(super) fn loses_leases(&self, lease: Duration) -> bool {
        self.resumed
            .is_none_or(|resumed| resumed - self.ordered >= lease * 2 / 3)
    }
}
