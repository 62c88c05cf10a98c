//! Sums over a history.

use std::{fmt, time::Duration};

use super::{
    History, Outcome,
    judge::{KeyHistory, UNAVAILABLE},
};

/// The sums of a [`History`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// The number of keys that were requested.
    pub keys: usize,
    /// The number of strikes.
    pub strikes: usize,
    /// The number of keys with an effect whose process was struck while a client waited for it.
    pub struck: usize,
    /// The number of keys with more than one effect.
    pub executed_twice: usize,
    /// The number of keys with an effect and no response except 409 outcome-unknown.
    pub refused_with_effect: usize,
    /// The number of keys without an effect and with no response except 409 outcome-unknown: only the lease was
    /// acquired.
    pub refused_without_effect: usize,
    /// The number of keys whose recorded response was produced by a process that was killed before it could send the
    /// response.
    pub lost_replies: usize,
    /// The number of responses from a process that was stopped for a lease or longer during the request.
    pub late: usize,
    /// The number of these if the process had an effect itself, and returned the response of another process.
    pub late_and_outrun: usize,
    /// The number of requests that took a lease or longer although their process was not struck.
    pub slow: usize,
    /// The number of requests that got 503 store-unavailable, as on an overloaded machine.
    pub unavailable: usize,
    /// The longest time without a response for a key, since its first request or the last strike.
    pub longest_wait: Duration,
}

impl Sums {
    /// Adds the sums of another history.
    pub fn add(&mut self, other: &Self) {
        self.keys += other.keys;
        self.strikes += other.strikes;
        self.struck += other.struck;
        self.executed_twice += other.executed_twice;
        self.refused_with_effect += other.refused_with_effect;
        self.refused_without_effect += other.refused_without_effect;
        self.lost_replies += other.lost_replies;
        self.late += other.late;
        self.late_and_outrun += other.late_and_outrun;
        self.slow += other.slow;
        self.unavailable += other.unavailable;
        self.longest_wait = self.longest_wait.max(other.longest_wait);
    }
}

impl History {
    /// Returns the sums.
    #[must_use]
    pub fn sums(&self) -> Sums {
        let mut sums = Sums {
            strikes: self.strikes.len(),
            ..Sums::default()
        };
        for history in self.histories().values() {
            self.add(history, &mut sums);
        }
        sums
    }

    fn add(&self, history: &KeyHistory<'_>, sums: &mut Sums) {
        sums.keys += 1;
        sums.executed_twice += usize::from(history.effects.len() > 1);
        sums.longest_wait = sums.longest_wait.max(self.wait(history));
        let refused = history.responses().next().is_none();
        sums.refused_with_effect += usize::from(refused && !history.effects.is_empty());
        sums.refused_without_effect += usize::from(refused && history.effects.is_empty());
        let given = history.responses().next();
        let given = given.and_then(|(_, response)| response.header("x-execution"));
        let (mut struck, mut lost_reply) = (false, false);
        for attempt in &history.attempts {
            let mut met = false;
            for strike in self.strikes_of(attempt) {
                met = true;
                let effects = history.effects.iter();
                let mut own = effects.filter(|effect| effect.pid == strike.pid).peekable();
                let has_own = own.peek().is_some();
                let is_own = own.any(|own| given == Some(&own.n.to_string()));
                struck |= has_own;
                lost_reply |= is_own && attempt.outcome == Outcome::Failed;
                if attempt.is_in_flight_during(strike, self.lease) && attempt.response().is_some() {
                    sums.late += 1;
                    sums.late_and_outrun += usize::from(has_own && !is_own);
                }
            }
            let took = attempt.ended - attempt.began;
            sums.slow += usize::from(!met && took >= self.lease);
            let unavailable =
                matches!(&attempt.outcome, Outcome::NotYet(code) if code == UNAVAILABLE);
            sums.unavailable += usize::from(unavailable);
        }
        sums.struck += usize::from(struck);
        sums.lost_replies += usize::from(lost_reply);
    }
}

impl fmt::Display for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} keys, {} strikes, {} keys struck: {} executed twice, {} refused with an effect and {} without, {} answered \
             by another process; {} late responses, {} of them another's; {} slow; {} without a store; longest wait {:?}",
            self.keys,
            self.strikes,
            self.struck,
            self.executed_twice,
            self.refused_with_effect,
            self.refused_without_effect,
            self.lost_replies,
            self.late,
            self.late_and_outrun,
            self.slow,
            self.unavailable,
            self.longest_wait
        )
    }
}
