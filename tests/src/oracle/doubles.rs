//! Whether effects under one key may be that many: one, and one more for each occasion, each on its own side of them.

use std::{mem, time::Instant};

use super::{Attempt, Effect, History, Occasion, Outcome, judge::Story};

impl History {
    /// Each key with effects that [occasions](Occasion) do not tell apart: there is no way to put each between two of them,
    /// before the first or after the last, and no two into one place.
    ///
    /// What lies there is the *grant*, and not the effect: a process may be slow between the two, so that its effect comes
    /// after that of another one, which was granted later. Of a grant is known that it was
    ///
    /// - while its process was asked for the key, or since then if that client left or heard nothing;
    /// - not after anybody was told what it said, nor after anybody was told what an execution said whose effect came later;
    /// - not after its process was killed.
    #[must_use]
    pub fn doubles(&self) -> Vec<String> {
        let stories = self.stories();
        let doubles = stories
            .iter()
            .filter(|(key, story)| !self.is_told_apart(key, story));
        doubles.map(|(key, story)| story.told(key)).collect()
    }

    fn is_told_apart(&self, key: &str, story: &Story<'_>) -> bool {
        if story.effects.len() < 2 {
            return true;
        }
        let occasions: Vec<_> = self.occasions_of(key).collect();
        let places = self.places_of_all(story, &occasions);
        each_has_a_place(&places, occasions.len() + 1)
    }

    /// Whether two effects are of different requests, and no occasion but takeovers tells them apart.
    pub(super) fn is_of_two_requests(&self, key: &str, story: &Story<'_>) -> bool {
        let effects = &story.effects;
        if effects.iter().all(|it| it.request == effects[0].request) {
            return false;
        }
        let occasions = self.occasions_of(key).filter(|it| !it.takeover);
        let occasions: Vec<_> = occasions.collect();
        let places = self.places_of_all(story, &occasions);
        let pairs = (0..effects.len()).flat_map(|one| (0..one).map(move |other| (one, other)));
        let mut pairs =
            pairs.filter(|(one, other)| effects[*one].request != effects[*other].request);
        pairs.any(|(one, other)| places[one].len() < 2 && places[one] == places[other])
    }

    fn places_of_all(&self, story: &Story<'_>, occasions: &[&Occasion]) -> Vec<Vec<usize>> {
        let effects = story.effects.iter().zip(self.last_moments(story));
        let places = effects.map(|(effect, last)| self.places(story, effect, last, occasions));
        places.collect()
    }

    /// Until when each of the effects was granted, if that is known.
    fn last_moments(&self, story: &Story<'_>) -> Vec<Option<Instant>> {
        let mut later = None;
        let effects = story.effects.iter().enumerate().rev();
        let last = effects.map(|(at, effect)| {
            // Another process may have an execution of the same number: then it is the first of them that is known of.
            let is_first = !story.effects[..at].iter().any(|it| it.n == effect.n);
            let told = story.attempts.iter();
            let told = told.filter(|it| is_first && it.execution() == Some(effect.n));
            later = soonest([told.map(|it| it.ended).min(), later]);

            let strikes = self.strikes.iter();
            let mut killed = strikes.filter(|it| it.pid == effect.pid && it.resumed.is_none());
            soonest([killed.next().map(|it| it.down), later])
        });
        let mut last: Vec<_> = last.collect();
        last.reverse();
        last
    }

    /// After how many of the occasions it may have been granted: each number that is possible.
    fn places(
        &self,
        story: &Story<'_>,
        effect: &Effect,
        last: Option<Instant>,
        occasions: &[&Occasion],
    ) -> Vec<usize> {
        let member = self.processes.get(&effect.pid);
        let asked = story.attempts.iter();
        let asked = asked.filter(|it| member.is_none_or(|member| it.member == *member));
        let mut places = vec![false; occasions.len() + 1];
        for attempt in asked {
            let until = soonest([attempt.came_back(), last]);
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
    /// When nothing was done any more for it, if that is known.
    fn came_back(&self) -> Option<Instant> {
        match self.outcome {
            Outcome::Answered(_) | Outcome::Refused | Outcome::NotYet(_) => Some(self.ended),
            Outcome::HungUp | Outcome::Failed => None,
        }
    }
}

fn soonest(moments: [Option<Instant>; 2]) -> Option<Instant> {
    moments.into_iter().flatten().min()
}

/// Whether each can have one of the places that are possible for it, and no other the same.
fn each_has_a_place(possible: &[Vec<usize>], places: usize) -> bool {
    let mut taken = vec![None; places];
    (0..possible.len()).all(|effect| {
        let mut tried = vec![false; places];
        finds_a_place(effect, possible, &mut taken, &mut tried)
    })
}

/// Takes a place, if need be that of another one that finds another place.
fn finds_a_place(
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
        let is_free = other.is_none_or(|other| finds_a_place(other, possible, taken, tried));
        if is_free {
            taken[place] = Some(effect);
        }
        is_free
    })
}

#[cfg(test)]
mod tests;
