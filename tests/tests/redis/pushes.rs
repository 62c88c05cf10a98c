//! Checks that a push woke a waiter, by the calls that the server received and not by elapsed time.

use std::time::{Duration, Instant};

use tests::servers::redis::{
    ReceivedCommand, RedisServer,
    scripts::{ACQUIRE, COMPLETE, IS_IN_PROGRESS},
};
use tower_idempotency_redis::redis::Script;

/// Repeats a trial until pushes have woken the waiters of three trials.
///
/// A trial has an entry in progress and one waiter. It returns the commands that the server received. A waiter that was
/// not woken queries again only after its delay, even on a slow machine. A waiter that queries sooner was therefore
/// woken. If it does not, the machine may have stalled, and the trial proves nothing.
///
/// # Panics
///
/// Panics if fewer than three waiters were woken within two minutes and ten trials.
pub(crate) async fn until_pushes_have_woken(trial: impl AsyncFn(usize) -> Vec<ReceivedCommand>) {
    let began = Instant::now();
    let mut woken = 0;
    for n in 0.. {
        woken += usize::from(was_woken(&trial(n).await));
        if woken == 3 {
            return;
        }
        let left = n < 10 || began.elapsed() < Duration::from_secs(120);
        assert!(left, "pushes woke {woken} of {} waiters", n + 1);
    }
}

/// Waits until the waiter has made so many queries that its delays are long.
pub(crate) async fn until_delays_are_long(server: &RedisServer, before: u64) {
    let calls = || server.commandstats().get("evalsha").copied().unwrap_or(0);
    // Each query is one call, and an acquire follows it.
    let looked = || calls() >= before + 2 * 7;
    crate::events::eventually("the waiter queries repeatedly", looked).await;
}

/// Returns `true` if a push woke the waiter. Its last acquire then came before its delay had ended, and the entry was
/// completed while the waiter listened.
fn was_woken(commands: &[ReceivedCommand]) -> bool {
    let places = |script: &str| -> Vec<usize> {
        let sha = Script::new(script).get_hash().to_owned();
        let is_call = |n: &usize| commands[*n].first == sha;
        (0..commands.len()).filter(is_call).collect()
    };
    let (acquires, queries) = (places(ACQUIRE), places(IS_IN_PROGRESS));
    let completed = places(COMPLETE)[0];
    let Some(last) = acquires.iter().position(|it| *it > completed) else {
        panic!("expected an acquire after the completion: {commands:?}");
    };
    let Some(before) = last.checked_sub(1).map(|it| acquires[it]) else {
        return false;
    };
    let listened = queries.iter().any(|it| (before..completed).contains(it));
    // The first delay is the one between the first two acquires.
    let delay = (1..last).fold(25.0, |delay, _| f64::min(delay * 1.6, 1000.0));
    let apart = commands[acquires[last]]
        .at
        .saturating_sub(commands[before].at);
    println!("an acquire {apart:?} after the previous one; polling has a delay of {delay} ms");
    listened && apart.as_secs_f64() * 1000.0 < delay * 0.95
}
