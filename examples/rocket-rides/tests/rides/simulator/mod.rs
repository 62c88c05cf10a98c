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
    books::{Books, Wrong},
    riders::Rider,
    strikes::Strikes,
};
use crate::{
    cast::{BRISK, Cast},
    stage::database,
};

mod books;
mod riders;
mod strikes;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_ride_is_charged_once_despite_kills() {
    let (rides, seed) = (number("RIDES", few_or(40, 200)), number("SEED", 1));
    let began = Instant::now();
    let cast = Cast::start(&database("careful").await, &BRISK).await;
    let (mut riders, strikes) = play(&cast, rides, seed).await;
    let played = began.elapsed();

    // No client retries now: the completer has to finish the requests that have begun.
    cast.calm().await;
    cast.until_nothing_is_left_to_do().await;
    let takeovers = cast.count(TAKEOVERS).await;
    let books = Books::open(&cast).await;
    let finished = books.finished_for(&riders);
    let stuck = books.judge(&riders);
    let is_stuck = stuck.iter().any(|(wrong, _)| *wrong == Wrong::Stuck);
    assert!(!is_stuck, "{}\n{}", Listed(&stuck), cast.said());
    // A rider that has a response gets the same one again. A rider that gave up may come back.
    riders::ask_again(&cast, &mut riders).await;
    cast.until_nothing_is_left_to_do().await;

    let books = Books::open(&cast).await;
    println!(
        "{} rides, seed {seed}: {strikes}; {} requests, {takeovers} takeovers; {} riders gave up, {finished} of \
         them had their ride all the same; {books}; {played:?} of {:?}",
        riders.len(),
        riders.iter().map(|rider| rider.requests).sum::<usize>(),
        riders.iter().filter(|rider| rider.gave_up).count(),
        began.elapsed(),
    );
    let wrong = books.judge(&riders);
    assert!(wrong.is_empty(), "{}\n{}", Listed(&wrong), cast.said());
    assert!(strikes.fell(), "nothing was tried: {strikes}");
}

/// Runs all riders and all strikes.
async fn play(cast: &Cast, rides: usize, seed: u64) -> (Vec<Rider>, Strikes) {
    let striking = Arc::new(strikes::begin(cast, seed));
    let riders = riders::ride(cast, rides, seed, &striking).await;
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
