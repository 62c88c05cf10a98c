//! A deterministic simulation of the layer as it is: several processes, one store, and everything that goes wrong between
//! them, all of it drawn from a seed.
//!
//! Each process is a runtime of its own with a paused clock (`process`), in which the layer runs unchanged behind its
//! `tower::Service`. The driver (`drive`) moves all clocks from one thing that is due to the next. Calls to the store,
//! replies, the ends of pauses and the moves of clients are due at drawn times (`world`, `link`, `client`); a process
//! is killed by dropping its runtime, and paused by not running it. What happened is judged as it happens: the store's
//! answers by `books` that follow from the calls alone, the rest by the `oracle`. At the end it is told as the history of a
//! fleet would be, and judged again by the oracle of those (`outside`).
//!
//! In one seed of six there is no HTTP: what runs is work of `run_once` (`job`), by the same rules.
//!
//! One seed is one run: the clock is the simulation's, tasks run in the order they were woken, and whatever is random is
//! drawn from the seed, but for tokens, whose values decide nothing.

mod books;
mod bugs;
mod client;
mod dice;
mod drive;
mod handler;
mod history;
mod holder;
mod job;
mod link;
mod oracle;
mod outside;
mod page;
mod plan;
mod process;
mod shelf;
mod sweep;
mod world;

use std::fmt;

use tower_idempotency::conformance::seed_jitter;

pub use self::{
    bugs::Bug,
    history::Event,
    plan::Plan,
    shelf::Shelf,
    sweep::{Sums, Sweep, Swept},
};
use self::{dice::Dice, drive::Driver};

/// Milliseconds since the simulation began.
pub type Millis = u64;

/// What a seed came to.
#[derive(Debug)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// What was drawn before it ran.
    pub plan: Plan,
    /// What happened, in order.
    pub history: Vec<Event>,
    /// The first thing that was not as promised.
    pub violation: Option<String>,
    /// How often handlers ran.
    pub executions: usize,
    /// How many requests were sent.
    pub attempts: usize,
    /// How many leases were taken over.
    pub takeovers: usize,
}

/// From where a run is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there are two")]
pub enum Watch {
    /// By the oracle that sees everything as it happens, and ends the run at the first violation, and by the other one.
    FromInsideToo,
    /// Only by the oracle that judges afterwards what clients, effects and strikes tell.
    FromOutside,
}

/// Runs a seed, with one bug or none.
#[must_use]
pub fn run(seed: u64, bug: Option<Bug>) -> Report {
    run_watched(seed, bug, Watch::FromInsideToo)
}

/// As [`run`], watched from there.
#[must_use]
pub fn run_watched(seed: u64, bug: Option<Bug>, watch: Watch) -> Report {
    seed_jitter(Some(seed));
    let mut dice = Dice::new(seed);
    let mut plan = Plan::draw(&mut dice);
    // Not drawn: the other seeds stay the runs that they were.
    if seed % 6 == 5 {
        plan = plan.of_jobs();
    }
    let world = Driver::new(plan, bug, dice, watch).run();
    seed_jitter(None);
    let mut state = world.look();
    let violation = state.violation.take();
    Report {
        seed,
        plan,
        violation: violation.or_else(|| outside::violation(&state)),
        history: std::mem::take(&mut state.history),
        executions: state.executions.len(),
        attempts: state.attempts.len(),
        takeovers: state.takeovers,
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
