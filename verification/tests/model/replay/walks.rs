//! Random walks of the whole model, with clients and faults. Each call is made on the store as well, and fails as it
//! does in the model.

use std::time::Duration;

use tower_idempotency::{
    conformance::{Fault, FaultInjector, Operation},
    store::MemoryStore,
};

use super::{Differs, Replay, Seen, durations};
use crate::{
    clients::Delivery,
    holds::system,
    mutant::Mutant,
    store::{Call, Orphans},
    store_calls::{call_store, id},
    system::{Action, System},
};

/// Makes a random walk of the system.
async fn walk(system: &System, seed: u64, seen: &mut Seen) -> Result<(), Differs> {
    let mut random = seed;
    let store = FaultInjector::new(MemoryStore::new());
    let mut state = system.first();
    let mut replay = Replay {
        rules: system.rules,
        entry: None,
        store: &store,
        id: id(seed),
        seen,
    };
    for _ in 0..80 {
        let mut actions = Vec::new();
        system.steps(&state, &mut actions);
        if actions.is_empty() {
            break;
        }
        let action = actions[below(actions.len(), &mut random)];
        let (next, exchange) = system.step(&state, action);
        replay.entry = next.entry;
        match action {
            Action::Tick => {
                replay.entry = state.entry;
                replay.tick().await?;
            }
            Action::Call(at, call, delivery @ (Delivery::CallLost | Delivery::ReplyLost)) => {
                let fault = match delivery {
                    Delivery::CallLost => Fault::CallLost,
                    Delivery::ReplyLost | Delivery::Delivered | Delivery::Late => Fault::ReplyLost,
                };
                store.enqueue(operation(call), [fault]);
                let called = call_store(
                    &store,
                    durations(system.rules.times),
                    replay.id,
                    state.caller(at),
                    call,
                )
                .await;
                assert!(called.is_err(), "{call:?} must fail");
            }
            Action::Call(_, _, Delivery::Delivered) | Action::Arrive(_) => {
                let (caller, call, response) = exchange.expect("a call that comes to the store");
                replay
                    .compare(caller, call, response, Duration::ZERO)
                    .await?;
            }
            Action::Call(_, _, Delivery::Late) | Action::Move(..) | Action::Crash(_) => {}
            Action::LoseData | Action::Sweep | Action::Overwrite(_) | Action::Keep(_) => {
                panic!("a store has no such action")
            }
        }
        replay.check_entry(Duration::ZERO).await?;
        assert_eq!(replay.entry, next.entry);
        state = next;
    }
    replay.take().await
}

/// Returns a random number below `limit`, by SplitMix64.
pub(super) fn below(limit: usize, random: &mut u64) -> usize {
    *random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut stirred = *random;
    stirred = (stirred ^ (stirred >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    stirred = (stirred ^ (stirred >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    usize::try_from((stirred ^ (stirred >> 31)) % limit as u64).expect("below a usize")
}

pub(super) fn operation(call: Call) -> Operation {
    match call {
        Call::Acquire(_) => Operation::Acquire,
        Call::Renew => Operation::Renew,
        Call::Complete | Call::Commit => Operation::Complete,
        Call::Release => Operation::Release,
    }
}

/// Returns the systems for the walks: with late calls, with refused orphans, and with two different requests.
fn walked() -> [System; 3] {
    let late = System {
        late_calls: true,
        ..system(4)
    };
    let refusing = System {
        orphans: Orphans::Refuse,
        ..late.clone()
    };
    let mixed = System {
        others: 2,
        ..late.clone()
    };
    [late, refusing, mixed]
}

#[tokio::test(start_paused = true)]
async fn memory_store_follows_every_walk() {
    let mut seen = Seen::new();
    for seed in 0..1500 {
        for system in walked() {
            let walked = walk(&system, seed, &mut seen).await;
            walked.unwrap_or_else(|differs| panic!("seed {seed}: {differs}"));
        }
    }
    println!("{seen:?}");
    assert_eq!(seen.len(), 7, "{seen:?}");
    assert!(seen.values().all(|&times| times > 100), "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn walk_without_own_token_rule_diverges() {
    let mut system = system(4);
    system.rules.mutant = Some(Mutant::NoOwnToken);
    let mut seen = Seen::new();
    for seed in 0..1500 {
        if let Err(differs) = walk(&system, seed, &mut seen).await {
            println!("seed {seed}: {differs}");
            return;
        }
    }
    panic!("the store seems to lack the rule too");
}
