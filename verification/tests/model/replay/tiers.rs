//! Random walks of two processes with tiers: `Tiered` has the replies of the model, and calls the store if the model does.

use std::{sync::Arc, time::Duration};

use tests::layered::Layered;
use tokio::time::advance;
use tower_idempotency::{
    Tiered,
    conformance::{Fault, FaultInjector},
    store::{KeyId, MemoryStore},
};

use super::{
    Differs, NEARLY, TICK, durations, to_reply,
    walks::{below, operation},
};
use crate::{
    clients::Delivery,
    holds::tiered,
    mutant::Mutant,
    state::State,
    store::{Call, Caller, ModelReply, Orphans},
    store_calls::{OBSERVER, QUERY, call_store, id, token},
    system::{Action, System},
    tiers::PROCESSES,
};

type Backend = Arc<FaultInjector<MemoryStore>>;

/// Two processes with real tiers, and their state in the model.
struct Walk<'a> {
    system: &'a System,
    processes: [Layered<Tiered<Backend>>; PROCESSES],
    /// The store without a tier in front of it, for calls that have left their process.
    wire: Layered<Backend>,
    id: KeyId,
    from_tier: usize,
}

impl<'a> Walk<'a> {
    fn new(system: &'a System, seed: u64) -> Self {
        let rules = system.tiers.expect("a system with tiers");
        let store = Backend::new(FaultInjector::new(MemoryStore::new()));
        let process = |()| {
            let tiered = Tiered::new(Arc::clone(&store));
            Layered::new(tiered.with_max_age(TICK * rules.age.into()))
        };
        Self {
            system,
            processes: [(); PROCESSES].map(process),
            wire: Layered::new(Arc::clone(&store)),
            id: id(seed),
            from_tier: 0,
        }
    }

    fn store(&self) -> &Backend {
        self.wire.inner()
    }

    /// Makes a call in a process, which must have this reply, and must call the store unless the tier has a record.
    async fn call(
        &mut self,
        process: u8,
        (caller, call, response): (Caller, Call, ModelReply),
        from_tier: bool,
        into: Duration,
    ) -> Result<(), Differs> {
        let process = &self.processes[usize::from(process)];
        let calls = || self.wire.inner().calls(operation(call));
        let before = calls();
        let durations = durations(self.system.rules.times);
        let found = call_store(process, durations, self.id, caller, call).await;
        let found = found.map_err(|error| format!("{call:?} of {caller:?} failed: {error}"))?;
        let expected = to_reply(response, into);
        if found != expected {
            return Err(format!(
                "{call:?} of {caller:?} returns {found:?}, in the model {expected:?}"
            ));
        }
        let called = calls() - before;
        if called != u64::from(!from_tier) {
            return Err(format!("{call:?} of {caller:?} makes {called} calls"));
        }
        self.from_tier += usize::from(from_tier);
        Ok(())
    }

    /// Queries the tiers that have a record. A query would give the other tiers a record.
    async fn check_entry(&mut self, state: &State, into: Duration) -> Result<(), Differs> {
        for (process, tier) in (0..).zip(state.tiers) {
            if let Some(response) = tier.response() {
                self.call(process, (OBSERVER, QUERY, response), true, into)
                    .await?;
            }
        }
        Ok(())
    }

    async fn step(&mut self, state: &State, action: Action) -> Result<State, Differs> {
        let (next, exchange) = self.system.step(state, action);
        match action {
            Action::Tick => {
                advance(NEARLY).await;
                self.check_entry(state, NEARLY).await?;
                advance(TICK - NEARLY).await;
            }
            Action::Call(at, call, delivery @ (Delivery::CallLost | Delivery::ReplyLost)) => {
                let fault = if delivery == Delivery::CallLost {
                    Fault::CallLost
                } else {
                    Fault::ReplyLost
                };
                self.store().enqueue(operation(call), [fault]);
                let process = &self.processes[usize::from(state.clients[at].process)];
                let durations = durations(self.system.rules.times);
                let called = call_store(process, durations, self.id, state.caller(at), call).await;
                assert!(called.is_err(), "{call:?} must fail");
            }
            Action::Call(at, call, Delivery::Late) => {
                let process = &self.processes[usize::from(state.clients[at].process)];
                if call == Call::Complete {
                    process.note_completion(token(state.caller(at).token));
                }
            }
            Action::Call(at, call, Delivery::Delivered) => {
                let process = state.clients[at].process;
                let in_tier = state.tiers[usize::from(process)].kept.is_some();
                let from_tier = in_tier && matches!(call, Call::Acquire(_));
                let exchange = exchange.expect("a reply");
                self.call(process, exchange, from_tier, Duration::ZERO)
                    .await?;
            }
            Action::Arrive(_) => {
                let (caller, call, response) = exchange.expect("a call that comes to the store");
                let durations = durations(self.system.rules.times);
                let found = call_store(&self.wire, durations, self.id, caller, call).await;
                let found = found.map_err(|error| error.to_string())?;
                if found != to_reply(response, Duration::ZERO) {
                    return Err(format!("late {call:?} returns {found:?}"));
                }
            }
            Action::Move(..) | Action::Crash(_) => {}
            Action::LoseData | Action::Sweep | Action::Overwrite(_) | Action::Keep(_) => {
                panic!("not in these systems")
            }
        }
        self.check_entry(&next, Duration::ZERO).await?;
        Ok(next)
    }
}

/// Makes a random walk. Returns the number of equal replies from tiers.
async fn walk(system: &System, seed: u64) -> Result<usize, Differs> {
    let mut random = seed;
    let mut walk = Walk::new(system, seed);
    let mut state = system.first();
    for _ in 0..80 {
        let mut actions = Vec::new();
        system.steps(&state, &mut actions);
        if actions.is_empty() {
            break;
        }
        let action = actions[below(actions.len(), &mut random)];
        state = walk.step(&state, action).await?;
    }
    Ok(walk.from_tier)
}

fn walked() -> [System; 3] {
    let late = System {
        late_calls: true,
        ..tiered(4, 1, false)
    };
    let refusing = System {
        orphans: Orphans::Refuse,
        ..tiered(4, 3, false)
    };
    let mixed = System {
        others: 2,
        late_calls: true,
        ..tiered(4, 3, false)
    };
    [late, refusing, mixed]
}

// F-980, F-984, F-985
#[tokio::test(start_paused = true)]
async fn tiered_follows_every_walk() {
    let mut from_tier = 0;
    for seed in 0..1500 {
        for system in walked() {
            let walked = walk(&system, seed).await;
            from_tier += walked.unwrap_or_else(|differs| panic!("seed {seed}: {differs}"));
        }
    }
    println!("{from_tier} replies from tiers");
    assert!(from_tier > 1000, "{from_tier}");
}

/// Makes walks of a model that lacks a rule of the tier, until one differs from `Tiered`.
async fn diverges(mutant: Mutant) {
    for seed in 0..1500 {
        for mut system in walked() {
            system.rules.mutant = Some(mutant);
            if let Err(differs) = walk(&system, seed).await {
                println!("{mutant:?}, seed {seed}: {differs}");
                return;
            }
        }
    }
    panic!("the tier seems to lack the rule too: {mutant:?}");
}

#[tokio::test(start_paused = true)]
async fn walks_without_tier_rule_diverge() {
    for mutant in [
        Mutant::RefusedCompletionIsKept,
        Mutant::RepeatedCompletionIsKept,
        Mutant::AgeAloneCounts,
    ] {
        diverges(mutant).await;
    }
}
