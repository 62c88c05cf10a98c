//! Riders book rides while processes are killed or paused and the provider misbehaves; then the final state is checked.
//!
//! ```text
//! riders -> services (two processes) -> provider (a process)
//!               |   strikes befall all three
//!           PostgreSQL, mailbox
//! ```
//!
//! `RIDES` sets the number of rides (40 unless set, or 200 with `FULL=1`), and `SEED` the course of events:
//! `RIDES=200 SEED=7 cargo test -p rocket-rides --test rides simulator`.

use std::{env, fmt, sync::Arc, time::Instant};

use tests::few_or;

use self::{
    riders::Rider,
    strikes::Strikes,
    totals::{Totals, Wrong},
};
use crate::{
    harness::database,
    processes::{BRISK, Processes},
};

mod riders;
mod strikes;
mod totals;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_ride_is_charged_once_despite_kills() {
    let (rides, seed) = (number("RIDES", few_or(40, 200)), number("SEED", 1));
    let began = Instant::now();
    let processes = Processes::start(&database("careful").await, &BRISK).await;
    let (mut riders, strikes) = play(&processes, rides, seed).await;
    let played = began.elapsed();

    // No client retries now: the completer has to finish the requests that have begun.
    processes.reset_mood().await;
    processes.wait_until_idle().await;
    let takeovers = processes.count(TAKEOVERS).await;
    let totals = Totals::open(&processes).await;
    let finished = totals.finished_for(&riders);
    let stuck = totals.judge(&riders);
    let is_stuck = stuck.iter().any(|(wrong, _)| *wrong == Wrong::Stuck);
    assert!(!is_stuck, "{}\n{}", Listed(&stuck), processes.logs());
    // A rider that has a response gets the same one again. A rider that gave up may come back.
    riders::retry_unfinished(&processes, &mut riders).await;
    processes.wait_until_idle().await;

    let totals = Totals::open(&processes).await;
    println!(
        "{} rides, seed {seed}: {strikes}; {} requests, {takeovers} takeovers; {} riders gave up, {finished} of \
         them had their ride all the same; {totals}; {played:?} of {:?}",
        riders.len(),
        riders.iter().map(|rider| rider.requests).sum::<usize>(),
        riders.iter().filter(|rider| rider.gave_up).count(),
        began.elapsed(),
    );
    let wrong = totals.judge(&riders);
    assert!(wrong.is_empty(), "{}\n{}", Listed(&wrong), processes.logs());
    assert!(strikes.has_both_kinds(), "too few strikes: {strikes}");
}

/// Runs all riders and all strikes.
async fn play(processes: &Processes, rides: usize, seed: u64) -> (Vec<Rider>, Strikes) {
    let striking = Arc::new(strikes::begin(processes, seed));
    let riders = riders::ride(processes, rides, seed, &striking).await;
    let striking = Arc::into_inner(striking).expect("the riders are gone");
    (riders, striking.end().await)
}

fn number<N: std::str::FromStr>(name: &str, default: N) -> N {
    match env::var(name) {
        Ok(text) => text.parse().ok().expect("a number in the environment"),
        Err(_) => default,
    }
}

struct Listed<'a>(&'a [(Wrong, String)]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (wrong, what) in self.0 {
            writeln!(f, "{wrong:?}: {what}")?;
        }
        Ok(())
    }
}

const TAKEOVERS: &str = "select coalesce(sum(generation - 1), 0)::bigint from tower_idempotency";
