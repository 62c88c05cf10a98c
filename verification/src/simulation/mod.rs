//! A deterministic simulation of the unchanged layer. It has several processes, one store, and all faults between them,
//! drawn from a seed.
//!
//! Each process is a separate runtime with a paused clock (`process`), in which the layer runs unchanged behind its
//! `tower::Service`. The driver (`driver`) moves all clocks from one due event to the next. The times of store calls,
//! replies, the ends of pauses and the actions of clients are drawn (`world`, `link`, `client`). A process is killed by
//! dropping its runtime, and paused by not running the runtime. Each event is judged at once. `expected_entry` judges
//! the store's replies by the state that follows from the calls alone, `refusals` judges the reasons of refusals, and
//! `oracle` judges the rest. At the end, the run is converted to the history of a fleet, and the oracle of fleets judges
//! it as well (`outside_view`).
//!
//! In one seed of six there is no HTTP: the processes run work of `run_once` (`run_once`), by the same rules. In one seed
//! of seven an operator reads entries and resolves them (`operator`).
//!
//! One seed always gives the same run. The clock is the simulation's, and tasks run in the order in which they were
//! woken. All random values are drawn from the seed, except tokens, whose values have no influence.

mod backend;
mod bugs;
mod client;
mod driver;
mod expected_entry;
mod handler;
mod history;
mod link;
mod operator;
mod oracle;
mod outside_view;
mod paced_body;
mod plan;
mod process;
mod random;
mod refusals;
mod run_once;
mod setup;
mod store;
mod sweep;
mod world;

use std::fmt;

use tower_idempotency::conformance::seed_jitter;

pub use self::{
    bugs::Bug,
    history::Event,
    plan::Plan,
    store::SimulatedStore,
    sweep::{Sweep, SweepResult, SweepSums},
};
use self::{driver::Driver, random::Random};

/// Milliseconds since the simulation began.
pub type Millis = u64;

/// The result of a seed.
#[derive(Debug)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// The plan that was drawn before the run.
    pub plan: Plan,
    /// The events, in order.
    pub history: Vec<Event>,
    /// The first violation.
    pub violation: Option<String>,
    /// The number of executions of handlers.
    pub executions: usize,
    /// The number of requests that were sent.
    pub attempts: usize,
    /// The number of leases that were taken over.
    pub takeovers: usize,
    /// The number of orphans that were executed for an operator.
    pub operator_takeovers: usize,
    /// The number of decisions of an operator that were applied.
    pub resolutions: usize,
}

/// The viewpoint from which a run is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there are two")]
pub enum Watch {
    /// Watched by both oracles. The inside oracle sees each event at once, and ends the run at the first violation.
    FromInsideToo,
    /// Watched only by the outside oracle, which judges clients, effects and strikes afterwards.
    FromOutside,
}

/// Runs a seed, with one bug or none.
#[must_use]
pub fn run(seed: u64, bug: Option<Bug>) -> Report {
    run_watched(seed, bug, Watch::FromInsideToo)
}

/// Like [`run`], but watched from the given viewpoint.
#[must_use]
pub fn run_watched(seed: u64, bug: Option<Bug>, watch: Watch) -> Report {
    seed_jitter(Some(seed));
    let mut random = Random::new(seed);
    let mut plan = Plan::draw(&mut random);
    // These values are not drawn, so that the runs of the other seeds stay the same.
    if seed % 6 == 5 {
        plan = plan.for_run_once();
    }
    if seed % 7 == 2 {
        plan = plan.with_operator(seed);
    }
    let world = Driver::new(plan, bug, random, watch).run();
    seed_jitter(None);
    let mut state = world.lock();
    let violation = state.violation.take();
    let attempts = state.attempts.iter();
    let for_operator = attempts.filter(|it| it.client.is_none() && it.execution.is_some());
    let operator_takeovers = for_operator.count();
    Report {
        seed,
        plan,
        violation: violation.or_else(|| outside_view::violation(&state)),
        history: std::mem::take(&mut state.history),
        executions: state.executions.len(),
        attempts: state.attempts.len(),
        takeovers: state.takeovers,
        operator_takeovers,
        resolutions: state.resolutions,
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {:?}", self.seed, self.plan)?;
        for event in &self.history {
            writeln!(f, "{event}")?;
        }
        match &self.violation {
            Some(violation) => writeln!(f, "VIOLATION {violation}"),
            None => writeln!(f, "no violation"),
        }
    }
}
