//! Every pair of calls in every state of the model's store.

use std::time::Duration;

use tower_idempotency::{conformance::FaultInjector, store::MemoryStore};

use super::{Differs, Replay, Seen};
use crate::{
    mutant::Mutant,
    sequences::{Step, all_steps, sequences},
    store::{Rules, Times},
    store_calls::id,
};

impl Replay<'_> {
    async fn step(&mut self, step: Step) -> Result<(), Differs> {
        match step {
            Step::Tick => self.tick().await,
            Step::Call(caller, call) => {
                let response = self.rules.apply(&mut self.entry, caller, call);
                self.compare(caller, call, response, Duration::ZERO).await
            }
        }
    }
}

/// Takes every sequence to a state and then every two steps, so that the second step shows the effect of the first one. The
/// final acquire shows if an entry is left. Returns the number of equal replies by kind.
async fn every_transition(mutant: Option<Mutant>) -> Result<Seen, Differs> {
    let rules = Rules {
        times: Times {
            lease: 2,
            orphan_retention: 2,
            retention: 3,
        },
        mutant,
    };
    let store = FaultInjector::new(MemoryStore::new());
    let mut seen = Seen::new();
    let (sequences, steps) = (sequences(&rules, 4), all_steps());
    let mut number = 0;
    for sequence in &sequences {
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
                let differs = |differs| format!("{differs}: {sequence:?} {first:?} {second:?}");
                for step in sequence.iter().chain([first, second]) {
                    replay.step(*step).await.map_err(differs)?;
                }
                replay.take().await.map_err(differs)?;
            }
        }
    }
    println!("{} states, {number} sequences, {seen:?}", sequences.len());
    Ok(seen)
}

// F-115
#[tokio::test(start_paused = true)]
async fn memory_store_makes_every_transition() {
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

/// Models that lack a rule which the store has.
mod without {
    use super::{Mutant, every_transition};

    noticed! {
        NoOwnToken UnfencedComplete ReleaseByAnyone ReleaseFreesTakeovers LeaseAsLongAsTheRetention ExpiryBySweeperOnly
        TakeoverIsHidden TakeoverOfAnotherRequest RefuseIsIgnored
    }
}
