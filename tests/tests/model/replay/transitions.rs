//! Every call in every state that the store's part of the model has, and every call after that.

use std::time::Duration;

use tower_idempotency::{conformance::Faulty, store::MemoryStore};

use super::{Differs, Replay, Seen, id};
use crate::{
    mutants::Mutant,
    store::{Call, Entry, Orphans, Rules, State, Times, Who},
};

#[derive(Clone, Copy, Debug)]
enum Step {
    Call(Who, Call),
    Tick,
}

impl Replay<'_> {
    async fn step(&mut self, step: Step) -> Result<(), Differs> {
        match step {
            Step::Tick => self.tick().await,
            Step::Call(who, call) => {
                let answer = self.rules.apply(&mut self.entry, who, call);
                self.compare(who, call, answer, Duration::ZERO).await
            }
        }
    }
}

/// Two of one request and one of another, and what each may ask.
fn all_steps() -> Vec<Step> {
    let mut steps = vec![Step::Tick];
    for (token, fingerprint) in [(1, 1), (2, 1), (3, 2)] {
        let calls = [
            Call::Acquire(Orphans::TakeOver),
            Call::Acquire(Orphans::Refuse),
            Call::Renew,
            Call::Complete,
            Call::Release,
        ];
        let who = Who { token, fingerprint };
        steps.extend(calls.map(|call| Step::Call(who, call)));
    }
    steps
}

fn after(rules: &Rules, mut entry: Option<Entry>, step: Step) -> Option<Entry> {
    match step {
        Step::Tick => rules.tick(&mut entry),
        Step::Call(who, call) => {
            rules.apply(&mut entry, who, call);
        }
    }
    entry
}

/// The shortest way to each state of the entry, up to the fourth generation.
fn ways(rules: &Rules) -> Vec<Vec<Step>> {
    let mut known = vec![(None, Vec::new())];
    let mut at = 0;
    while at < known.len() {
        let (entry, way) = known[at].clone();
        for step in all_steps() {
            let next = after(rules, entry, step);
            let generation = match next.map(|held| held.state) {
                Some(State::Leased { generation, .. }) => generation,
                Some(State::Completed { .. }) | None => 0,
            };
            if generation <= 4 && !known.iter().any(|(entry, _)| *entry == next) {
                let mut longer = way.clone();
                longer.push(step);
                known.push((next, longer));
            }
        }
        at += 1;
    }
    known.into_iter().map(|(_, way)| way).collect()
}

/// Goes every way and then takes every two steps: the second sees what the first has left behind. Says how many of what
/// answers were the same.
async fn every_transition(mutant: Option<Mutant>) -> Result<Seen, Differs> {
    let rules = Rules {
        times: Times {
            lease: 2,
            keep: 2,
            retention: 3,
        },
        mutant,
    };
    let store = Faulty::new(MemoryStore::new());
    let mut seen = Seen::new();
    let (ways, steps) = (ways(&rules), all_steps());
    let mut number = 0;
    for way in &ways {
        for first in &steps {
            for second in &steps {
                number += 1;
                let mut replay = Replay {
                    rules,
                    entry: None,
                    store: &store,
                    id: id(number),
                    seen: &mut seen,
                };
                for step in way.iter().chain([first, second]) {
                    let compared = replay.step(*step).await;
                    compared
                        .map_err(|differs| format!("{differs}: {way:?} {first:?} {second:?}"))?;
                }
            }
        }
    }
    println!("{} states, {number} sequences, {seen:?}", ways.len());
    Ok(seen)
}

#[tokio::test(start_paused = true)]
async fn the_memory_store_makes_every_transition_of_the_model() {
    let seen = every_transition(None).await.unwrap();
    assert_eq!(seen.len(), 7, "{seen:?}");
}

macro_rules! noticed {
    ($($mutant:ident)+) => { $(
        #[allow(non_snake_case, reason = "named for the mutant")]
        #[tokio::test(start_paused = true)]
        async fn $mutant() {
            let differs = every_transition(Some(Mutant::$mutant)).await.unwrap_err();
            println!("{differs}");
        }
    )+ };
}

/// A rule that the model lacks and the store has.
mod without {
    use super::{Mutant, every_transition};

    noticed! {
        NoOwnToken UnfencedComplete ReleaseByAnyone ReleaseFreesTakeovers LeaseAsLongAsTheRetention ExpiryBySweeperOnly
        TakeoverIsNotTold TakeoverOfAnotherRequest RefuseIsIgnored
    }
}
