//! Judges the number of effects under one key. One effect is allowed, and one more for each occasion. Each occasion must
//! separate two effects.

use std::{mem, time::Instant};

use super::{Attempt, Effect, History, Occasion, Outcome, judge::KeyHistory};

impl History {
    /// Returns each key with effects that [occasions](Occasion) do not separate. The occasions divide time into places:
    /// before the first occasion, between two of them, and after the last. The effects are separated if each effect can
    /// have a place of its own.
    ///
    /// An effect belongs to the place of its *grant*: the moment at which its lease was granted. A process may be slow
    /// between grant and effect. Its effect may then follow the effect of another process with a later grant. These
    /// rules limit the time of a grant:
    ///
    /// - The grant is made while a client's request to its process is in flight, or later if that client left or received
    ///   no response.
    /// - The grant is made before any client receives the response of that execution, or of an execution with a later
    ///   effect.
    /// - The grant is made before its process is killed.
    #[must_use]
    pub fn excess_effects(&self) -> Vec<String> {
        let histories = self.histories();
        let excess = histories
            .iter()
            .filter(|(key, history)| !self.is_separable(key, history));
        excess.map(|(key, history)| history.describe(key)).collect()
    }

    fn is_separable(&self, key: &str, history: &KeyHistory<'_>) -> bool {
        if history.effects.len() < 2 {
            return true;
        }
        let occasions: Vec<_> = self.occasions_of(key).collect();
        let places = self.places_of_all(history, &occasions);
        has_matching(&places, occasions.len() + 1)
    }

    /// Returns `true` if two effects are of different requests, and no occasion except takeovers separates them.
    pub(super) fn is_of_two_requests(&self, key: &str, history: &KeyHistory<'_>) -> bool {
        let effects = &history.effects;
        if effects.iter().all(|it| it.request == effects[0].request) {
            return false;
        }
        let occasions = self.occasions_of(key).filter(|it| !it.takeover);
        let occasions: Vec<_> = occasions.collect();
        let places = self.places_of_all(history, &occasions);
        let pairs = (0..effects.len()).flat_map(|one| (0..one).map(move |other| (one, other)));
        let mut pairs =
            pairs.filter(|(one, other)| effects[*one].request != effects[*other].request);
        pairs.any(|(one, other)| places[one].len() < 2 && places[one] == places[other])
    }

    fn places_of_all(&self, history: &KeyHistory<'_>, occasions: &[&Occasion]) -> Vec<Vec<usize>> {
        let effects = history.effects.iter().zip(self.last_moments(history));
        let places = effects.map(|(effect, last)| self.places(history, effect, last, occasions));
        places.collect()
    }

    /// Returns the latest possible moment of the grant of each effect, if that moment is known.
    fn last_moments(&self, history: &KeyHistory<'_>) -> Vec<Option<Instant>> {
        let mut later = None;
        let effects = history.effects.iter().enumerate().rev();
        let last = effects.map(|(at, effect)| {
            // Two processes may have executions with the same number. The attempts then belong to the first effect
            // only.
            let is_first = !history.effects[..at].iter().any(|it| it.n == effect.n);
            let attempts = history.attempts.iter();
            let attempts = attempts.filter(|it| is_first && it.execution() == Some(effect.n));
            later = earliest([attempts.map(|it| it.ended).min(), later]);

            let strikes = self.strikes.iter();
            let mut killed = strikes.filter(|it| it.pid == effect.pid && it.resumed.is_none());
            earliest([killed.next().map(|it| it.down), later])
        });
        let mut last: Vec<_> = last.collect();
        last.reverse();
        last
    }

    /// Returns each possible number of occasions before the grant.
    fn places(
        &self,
        history: &KeyHistory<'_>,
        effect: &Effect,
        last: Option<Instant>,
        occasions: &[&Occasion],
    ) -> Vec<usize> {
        let member = self.processes.get(&effect.pid);
        let attempts = history.attempts.iter();
        let attempts = attempts.filter(|it| member.is_none_or(|member| it.member == *member));
        let mut places = vec![false; occasions.len() + 1];
        for attempt in attempts {
            let until = earliest([attempt.stopped_at(), last]);
            if until.is_some_and(|until| until < attempt.began) {
                continue;
            }
            let is_before = |it: &&&Occasion| it.until < attempt.began;
            let may_be = |it: &&&Occasion| until.is_none_or(|until| it.from <= until);
            let least = occasions.iter().filter(is_before).count();
            let most = occasions.iter().filter(may_be).count();
            places[least..=most].fill(true);
        }
        let possible = places.iter().enumerate().filter(|(_, possible)| **possible);
        possible.map(|(place, _)| place).collect()
    }
}

impl Attempt {
    /// Returns the time at which all work for the attempt had stopped, if that time is known.
    fn stopped_at(&self) -> Option<Instant> {
        match self.outcome {
            Outcome::Answered(_) | Outcome::Refused | Outcome::NotYet(_) => Some(self.ended),
            Outcome::HungUp | Outcome::Failed => None,
        }
    }
}

fn earliest(moments: [Option<Instant>; 2]) -> Option<Instant> {
    moments.into_iter().flatten().min()
}

/// Returns `true` if each effect can have one of its possible places, and no two effects have the same place.
fn has_matching(possible: &[Vec<usize>], places: usize) -> bool {
    let mut taken = vec![None; places];
    (0..possible.len()).all(|effect| {
        let mut tried = vec![false; places];
        assign_place(effect, possible, &mut taken, &mut tried)
    })
}

/// Assigns a place to the effect. May move another effect from its place to a different one.
fn assign_place(
    effect: usize,
    possible: &[Vec<usize>],
    taken: &mut [Option<usize>],
    tried: &mut [bool],
) -> bool {
    possible[effect].iter().any(|&place| {
        if mem::replace(&mut tried[place], true) {
            return false;
        }
        let other = taken[place];
        let is_free = other.is_none_or(|other| assign_place(other, possible, taken, tried));
        if is_free {
            taken[place] = Some(effect);
        }
        is_free
    })
}

#[cfg(test)]
mod tests;
