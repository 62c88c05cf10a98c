use std::time::Duration;

use tokio::time::Instant;

use super::releases::takeover;
use crate::{
    conformance::{
        Subject,
        subject::{LONG, Outcome},
    },
    store::{Claim, Store},
};

/// `wait_for_change` resolves at the latest after `within`.
pub async fn a_waiter_waits_no_longer_than_it_asks<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    subject.hold(&claim).await;
    let within = subject.units(4).as_duration();
    let waited = waited(subject, &claim, within).await;
    let slack = subject.units(SLACK).as_duration();
    assert!(
        waited < within + slack,
        "asked {within:?}, waited {waited:?}"
    );
}

/// With push, completion wakes every waiter.
pub async fn completion_wakes_the_waiters<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let waiters = wait(subject, &claim);
    subject.wait(2).await;
    let completed = subject.complete(&lease, &"answer".into(), LONG).await;
    assert_eq!(completed, Outcome::Done);
    assert_woken(subject, waiters).await;
}

/// With push, release wakes every waiter.
pub async fn release_wakes_the_waiters<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let waiters = wait(subject, &claim);
    subject.wait(2).await;
    subject.release(&lease).await;
    assert_woken(subject, waiters).await;
}

/// With push, release of a takeover wakes every waiter: one of them may take it over.
pub async fn release_of_a_takeover_wakes_the_waiters<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = takeover(subject, LONG).await;
    let waiters = wait(subject, &claim);
    subject.wait(2).await;
    subject.release(&lease).await;
    assert_woken(subject, waiters).await;
    assert_woken(subject, wait(subject, &claim)).await;
}

/// With push, waiting for a key that is not in progress is over at once: no change falls between a look and the wait.
pub async fn nobody_waits_for_a_key_that_is_not_in_progress<S: Store>(subject: &Subject<S>) {
    let absent = subject.claim();
    let completed = subject.claim();
    let lease = subject.hold(&completed).await;
    let done = subject.complete(&lease, &"answer".into(), LONG).await;
    assert_eq!(done, Outcome::Done);
    let (orphaned, _) = subject.orphan().await;
    for claim in [absent, completed, orphaned] {
        let waiters = wait(subject, &claim);
        assert_woken(subject, waiters).await;
    }
}

const WAITERS: usize = 8;

/// Far longer than a machine with too much to do is late; only where the store is wrong does a case take as long.
const WITHIN: u32 = 2000;
const SLACK: u32 = 400;

fn wait<S: Store>(subject: &Subject<S>, claim: &Claim) -> Vec<tokio::task::JoinHandle<Duration>> {
    let wait = || {
        let (subject, claim) = (subject.clone(), claim.clone());
        let within = if subject.has_push() { WITHIN } else { 8 };
        let within = subject.units(within).as_duration();
        tokio::spawn(async move { waited(&subject, &claim, within).await })
    };
    (0..WAITERS).map(|_| wait()).collect()
}

async fn assert_woken<S: Store>(
    subject: &Subject<S>,
    waiters: Vec<tokio::task::JoinHandle<Duration>>,
) {
    for waiter in waiters {
        let waited = waiter.await.expect("waiting does not panic");
        let most = subject.units(WITHIN / 2).as_duration();
        assert!(waited < most, "woken only after {waited:?}");
    }
}

async fn waited<S: Store>(subject: &Subject<S>, claim: &Claim, within: Duration) -> Duration {
    let start = Instant::now();
    subject.store().wait_for_change(&claim.id, within).await;
    start.elapsed()
}
