//! Judges if a history is allowed.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use http::StatusCode;

use super::{Attempt, Effect, History, Occasion, Outcome, Strike};
use ::tests::TestResponse;

/// The effects and attempts under one key.
#[derive(Debug, Default)]
pub(super) struct KeyHistory<'a> {
    pub(super) effects: Vec<&'a Effect>,
    pub(super) attempts: Vec<&'a Attempt>,
}

impl History {
    /// Returns each key with more effects than its lost leases explain. One effect is always allowed. An execution explains
    /// one more effect if its lease may have expired before its end, for one of these reasons:
    ///
    /// - A strike killed its process, or stopped that process until the lease expired. No client had a response before the
    ///   strike.
    /// - A request to its member took a lease or longer.
    #[must_use]
    pub fn unexplained_effects(&self) -> Vec<String> {
        let histories = self.histories();
        let unexplained = histories
            .iter()
            .filter(|(_, history)| history.effects.len() > 1 + self.count_lost_leases(history));
        unexplained
            .map(|(key, history)| history.describe(key))
            .collect()
    }

    /// Returns each key with a contradiction. Two responses differ, or two effects are of different requests, and no
    /// [occasion](Occasion) except takeovers lies between them. Or a response is of an execution that does not exist,
    /// or of the execution of another request. Or an outcome is not valid.
    ///
    /// The valid outcomes of a request are: a response, a refusal, a problem after which the client may retry, or no
    /// response. A 503 response reports no effect.
    #[must_use]
    pub fn contradictions(&self) -> Vec<String> {
        self.contradictions_among(|_| true)
    }

    /// Returns the [contradictions](Self::contradictions), but compares only the responses to prompt requests. A
    /// request is prompt if it took less than a lease, without the time in which its process was struck.
    ///
    /// If the store stalls, the layer returns a response that it could not record. If the lease expires meanwhile and
    /// the policy allows takeovers, another execution returns another response.
    #[must_use]
    pub fn contradictions_of_prompt_answers(&self) -> Vec<String> {
        self.contradictions_among(|attempt| self.is_prompt(attempt))
    }

    fn contradictions_among(&self, is_compared: impl Fn(&Attempt) -> bool) -> Vec<String> {
        let histories = self.histories();
        let contradictions = histories.iter().filter(|(key, history)| {
            let mut attempts = history.attempts.iter();
            self.differs_between_occasions(key, history, &is_compared)
                || self.is_of_two_requests(key, history)
                || attempts.any(|attempt| {
                    history.is_response_without_effect(attempt) || self.is_undocumented(attempt)
                })
        });
        contradictions
            .map(|(key, history)| history.describe(key))
            .collect()
    }

    /// Returns each key with a response and a later final refusal of the same request. No [occasion](Occasion) except
    /// takeovers lies between the two.
    ///
    /// The layer sends a response that it could not store, and refuses the next retry. Only callers that know which
    /// responses were stored can therefore use this check.
    #[must_use]
    pub fn retracted(&self) -> Vec<String> {
        let histories = self.histories();
        let retracted = histories.iter().filter(|(key, history)| {
            let answered = || history.attempts.iter().filter(|it| it.response().is_some());
            let mut refused = history.attempts.iter();
            refused.any(|late| {
                late.outcome == Outcome::Refused
                    && answered().any(|one| {
                        let from = one
                            .began
                            .checked_sub(self.max_reply_age)
                            .unwrap_or(one.began);
                        let mut occasions = self.occasions_of(key).filter(|it| !it.takeover);
                        one.request == late.request
                            && one.ended + self.max_reply_age < late.began
                            && !occasions.any(|it| from <= it.until && it.from <= late.ended)
                    })
            })
        });
        retracted
            .map(|(key, history)| history.describe(key))
            .collect()
    }

    /// Returns each key with a response to a request that was sent after the record must have expired. The record expires
    /// one retention after the response to another client.
    #[must_use]
    pub fn stale(&self) -> Vec<String> {
        let Some(retention) = self.retention else {
            return Vec::new();
        };
        let histories = self.histories();
        let stale = histories.iter().filter(|(_, history)| {
            let answered = || history.attempts.iter().filter(|it| it.response().is_some());
            answered().any(|one| {
                let over = one.ended + retention + self.max_reply_age;
                answered().any(|late| late.began > over && late.outcome == one.outcome)
            })
        });
        stale.map(|(key, history)| history.describe(key)).collect()
    }

    /// Returns each key that has a response and no effect.
    #[must_use]
    pub fn responses_without_effect(&self) -> Vec<String> {
        let histories = self.histories();
        let without_effect = histories.iter().filter(|(_, history)| {
            let mut attempts = history.attempts.iter();
            history.effects.is_empty()
                && attempts.any(|attempt| history.is_response_without_effect(attempt))
        });
        without_effect
            .map(|(key, history)| history.describe(key))
            .collect()
    }

    /// Returns each key without a response for longer than `limit`, since its first request or the last strike.
    #[must_use]
    pub fn stuck(&self, limit: Duration) -> Vec<String> {
        let histories = self.histories();
        let stuck = histories
            .iter()
            .filter(|(_, history)| self.wait(history) > limit);
        stuck.map(|(key, history)| history.describe(key)).collect()
    }

    /// Returns the number of keys that were taken over in time. The process that had the effect was struck while a
    /// client waited for it. Another execution responded within `limit` after the last strike.
    #[must_use]
    pub fn taken_over_within(&self, limit: Duration) -> usize {
        let histories = self.histories();
        let in_time = histories.values().filter(|history| {
            history.effects.len() > 1 && self.is_struck(history) && self.wait(history) <= limit
        });
        in_time.count()
    }

    /// Returns `true` if a process that had an effect of the key was struck while a client waited for it.
    fn is_struck(&self, history: &KeyHistory<'_>) -> bool {
        let mut attempts = history.attempts.iter();
        attempts.any(|attempt| {
            self.strikes_of(attempt)
                .any(|strike| history.effects.iter().any(|it| it.pid == strike.pid))
        })
    }

    /// Returns each key that was requested and for which no client received a definite outcome.
    #[must_use]
    pub fn keys_without_response(&self) -> Vec<String> {
        let histories = self.histories();
        let without_response = histories.iter().filter(|(_, history)| {
            let mut attempts = history.attempts.iter();
            !attempts.any(|attempt| attempt.is_definite())
        });
        without_response
            .map(|(key, history)| history.describe(key))
            .collect()
    }

    pub(super) fn histories(&self) -> BTreeMap<&str, KeyHistory<'_>> {
        let mut histories: BTreeMap<&str, KeyHistory<'_>> = BTreeMap::new();
        for effect in &self.effects {
            let history = histories.entry(&effect.key).or_default();
            history.effects.push(effect);
        }
        for attempt in &self.attempts {
            let history = histories.entry(&attempt.key).or_default();
            history.attempts.push(attempt);
        }
        histories
    }

    fn is_prompt(&self, attempt: &Attempt) -> bool {
        let struck = self.strikes_of(attempt).map(|strike| {
            let (from, until) = (
                strike.ordered.max(attempt.began),
                strike.end().min(attempt.ended),
            );
            until.saturating_duration_since(from)
        });
        let struck: Duration = struck.sum();
        attempt.ended - attempt.began < self.lease + struck
    }

    fn differs_between_occasions(
        &self,
        key: &str,
        history: &KeyHistory<'_>,
        is_compared: impl Fn(&Attempt) -> bool,
    ) -> bool {
        let attempts = || history.attempts.iter().filter(|it| is_compared(it));
        let answered = || attempts().filter(|it| it.response().is_some());
        answered().any(|one| {
            answered().any(|other| {
                let (from, until) = (one.began.min(other.began), one.ended.max(other.ended));
                let from = from.checked_sub(self.max_reply_age).unwrap_or(from);
                let mut occasions = self.occasions_of(key).filter(|it| !it.takeover);
                one.outcome != other.outcome
                    && !occasions.any(|it| from <= it.until && it.from <= until)
            })
        })
    }

    fn is_undocumented(&self, attempt: &Attempt) -> bool {
        let Outcome::NotYet(code) = &attempt.outcome else {
            return false;
        };
        let mut known = ["in-progress", UNAVAILABLE].iter().chain(self.problems);
        !known.any(|known| known == code)
    }

    pub(super) fn occasions_of(&self, key: &str) -> impl Iterator<Item = &Occasion> {
        let all_or_this = move |it: &&Occasion| it.key.as_deref().is_none_or(|its| its == key);
        self.occasions.iter().filter(all_or_this)
    }

    pub(super) fn strikes_of<'a>(
        &'a self,
        attempt: &'a Attempt,
    ) -> impl Iterator<Item = &'a Strike> {
        self.strikes
            .iter()
            .filter(|strike| attempt.is_struck_by(strike))
    }

    /// Returns the number of executions of this key whose leases may have been lost. For each member, it is at most the number
    /// of its executions, and at most that of its strikes and slow requests together.
    fn count_lost_leases(&self, history: &KeyHistory<'_>) -> usize {
        let mut executions: BTreeMap<Option<&usize>, Vec<u32>> = BTreeMap::new();
        for effect in &history.effects {
            let member = self.processes.get(&effect.pid);
            executions.entry(member).or_default().push(effect.pid);
        }
        let answered = history.responses().map(|(when, _)| when).min();
        let lost = executions.iter().map(|(member, executions)| {
            let pids: BTreeSet<_> = executions.iter().copied().collect();
            let struck = pids.iter().map(|pid| self.count_explained(history, *pid));
            let is_slow = |attempt: &&&Attempt| {
                member.is_none_or(|member| *member == attempt.member)
                    && self.is_slow(attempt, answered)
            };
            let slow = history.attempts.iter().filter(is_slow).count();
            executions.len().min(struck.sum::<usize>() + slow)
        });
        lost.sum()
    }

    /// Returns `true` if the attempt took a lease or longer before any strike. `answered` is the time of the first response.
    fn is_slow(&self, attempt: &Attempt, answered: Option<Instant>) -> bool {
        // A client that hung up does not know the duration of the execution.
        let ended = match attempt.outcome {
            Outcome::HungUp => answered.unwrap_or(attempt.ended).max(attempt.ended),
            _ => attempt.ended,
        };
        // Delays after a strike are explained by the strike.
        let strikes = self.strikes_of(attempt).map(|strike| strike.ordered);
        let ended = strikes.fold(ended, Instant::min);
        ended.saturating_duration_since(attempt.began) >= self.lease
    }

    /// Returns the number of executions of this key by one process that may have been taken over. It is at most the number
    /// of strikes at the process in that time.
    fn count_explained(&self, history: &KeyHistory<'_>, pid: u32) -> usize {
        let asked = history.attempts.iter().map(|attempt| attempt.began).min();
        let answered = history.responses().map(|(when, _)| when).min();
        let strikes = self.strikes.iter().filter(|strike| {
            strike.pid == pid
                && strike.loses_leases(self.lease)
                && asked.is_some_and(|asked| asked <= strike.end())
                && answered.is_none_or(|answered| strike.ordered <= answered)
        });
        let executions = history.effects.iter().filter(|effect| effect.pid == pid);
        strikes.count().min(executions.count())
    }

    /// Returns the wait for the first definite outcome. The wait begins with the first request for the key, or with the
    /// last strike at the lease holder.
    ///
    /// A process that had an effect is known to have held the lease. A struck process with a waiting client may have
    /// held the lease too, but only after the last known lease expired. Because leases are renewed each third, at least
    /// two thirds of that lease are assumed to be left.
    pub(super) fn wait(&self, history: &KeyHistory<'_>) -> Duration {
        let definite = history
            .attempts
            .iter()
            .filter(|attempt| attempt.is_definite());
        let asked = history.attempts.iter().map(|attempt| attempt.began).min();
        let (Some(answered), Some(asked)) = (definite.map(|it| it.ended).min(), asked) else {
            return Duration::MAX;
        };
        let met = history
            .attempts
            .iter()
            .flat_map(|attempt| self.strikes_of(attempt));
        let mut met: Vec<_> = met.filter(|strike| strike.down <= answered).collect();
        met.sort_by_key(|strike| strike.down);
        let (mut since, mut free) = (asked, asked);
        for strike in met {
            if history
                .effects
                .iter()
                .any(|effect| effect.pid == strike.pid)
            {
                since = strike.down;
                free = since + self.lease * 2 / 3;
            } else if strike.down >= free {
                since = strike.down;
            }
        }
        answered - since.min(answered)
    }
}

impl<'a> KeyHistory<'a> {
    /// Returns each response, and its time.
    pub(super) fn responses(&self) -> impl Iterator<Item = (Instant, &'a TestResponse)> {
        let attempts = self.attempts.iter();
        attempts.filter_map(|&attempt| Some((attempt.ended, attempt.response()?)))
    }

    /// Returns `true` if the response is not of an execution of this request.
    fn is_response_without_effect(&self, attempt: &Attempt) -> bool {
        let n = attempt.execution();
        let is_cause = |it: &&Effect| Some(it.n) == n && it.request == attempt.request;
        let response = attempt.response();
        response.is_some_and(|response| response.status != StatusCode::SERVICE_UNAVAILABLE)
            && !self.effects.iter().any(is_cause)
    }

    /// Returns a readable description of all known events.
    pub(super) fn describe(&self, key: &str) -> String {
        let began = self.attempts.iter().map(|attempt| attempt.began).min();
        let mut lines = vec![format!("{key}:")];
        for effect in &self.effects {
            lines.push(format!("  process {} had effect {}", effect.pid, effect.n));
        }
        let mut attempts = self.attempts.clone();
        attempts.sort_by_key(|attempt| attempt.began);
        for attempt in attempts {
            if attempt.outcome == Outcome::Failed && attempt.ended - attempt.began < QUICK {
                continue;
            }
            let at = began.map_or(Duration::ZERO, |began| attempt.began - began);
            let outcome = match &attempt.outcome {
                Outcome::Answered(response) => {
                    format!("{} {:?}", response.status, response.text())
                }
                other => format!("{other:?}"),
            };
            let took = attempt.ended - attempt.began;
            let member = attempt.member;
            lines.push(format!(
                "  at {at:?} member {member} received a request, after {took:?}: {outcome}"
            ));
        }
        lines.join("\n")
    }
}

pub(super) const UNAVAILABLE: &str = "store-unavailable";
/// The longest duration of an attempt that failed because no process listened.
const QUICK: Duration = Duration::from_millis(3);

#[cfg(test)]
mod tests;
