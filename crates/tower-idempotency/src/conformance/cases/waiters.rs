use std::time::Duration;

use tokio::time::Instant;

use super::releases::takeover;
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG},
    },
    store::{Claim, Store},
};

/// `wait_for_change` returns after `timeout` at the latest.
pub async fn wait_ends_at_timeout<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    subject.hold(&claim).await;
    let timeout = subject.units(4).as_duration();
    let waited = measure_wait(subject, &claim, timeout).await;
    let slack = subject.units(SLACK_UNITS).as_duration();
    assert!(
        waited < timeout + slack,
        "timeout {timeout:?}, waited {waited:?}"
    );
}

/// With push, a completion wakes every waiter.
pub async fn completion_wakes_waiters<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let waiters = spawn_waiters(subject, &claim);
    subject.wait(2).await;
    let completed = subject.complete(&lease, &"response".into(), LONG).await;
    assert_eq!(completed, CallOutcome::Done);
    assert_woken(subject, waiters).await;
}

/// With push, a release wakes every waiter.
pub async fn release_wakes_waiters<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let waiters = spawn_waiters(subject, &claim);
    subject.wait(2).await;
    subject.release(&lease).await;
    assert_woken(subject, waiters).await;
}

/// With push, the release of a takeover wakes every waiter, because a waiter may take the orphan over.
pub async fn takeover_release_wakes_waiters<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = takeover(subject, LONG).await;
    let waiters = spawn_waiters(subject, &claim);
    subject.wait(2).await;
    subject.release(&lease).await;
    assert_woken(subject, waiters).await;
    assert_woken(subject, spawn_waiters(subject, &claim)).await;
}

/// With push, a wait for a key that is not in progress returns at once: no change between a query and the wait is
/// missed.
pub async fn wait_returns_at_once_if_not_in_progress<S: Store>(subject: &Subject<S>) {
    let absent = subject.claim();
    let completed = subject.claim();
    let lease = subject.hold(&completed).await;
    let done = subject.complete(&lease, &"response".into(), LONG).await;
    assert_eq!(done, CallOutcome::Done);
    let (orphaned, _) = subject.orphan().await;
    for claim in [absent, completed, orphaned] {
        let waiters = spawn_waiters(subject, &claim);
        assert_woken(subject, waiters).await;
    }
}

const WAITERS: usize = 8;

/// Far longer than any delay of an overloaded machine. A case takes this long only if the store is wrong.
const TIMEOUT_UNITS: u32 = 2000;
const SLACK_UNITS: u32 = 400;

pub(in crate::conformance) fn spawn_waiters<S: Store>(
    subject: &Subject<S>,
    claim: &Claim,
) -> Vec<tokio::task::JoinHandle<Duration>> {
    let spawn_one = || {
        let (subject, claim) = (subject.clone(), claim.clone());
        let timeout = if subject.has_push() { TIMEOUT_UNITS } else { 8 };
        let timeout = subject.units(timeout).as_duration();
        tokio::spawn(async move { measure_wait(&subject, &claim, timeout).await })
    };
    (0..WAITERS).map(|_| spawn_one()).collect()
}

pub(in crate::conformance) async fn assert_woken<S: Store>(
    subject: &Subject<S>,
    waiters: Vec<tokio::task::JoinHandle<Duration>>,
) {
    for waiter in waiters {
        let waited = waiter.await.expect("waiting does not panic");
        let most = subject.units(TIMEOUT_UNITS / 2).as_duration();
        assert!(waited < most, "woken only after {waited:?}");
    }
}

async fn measure_wait<S: Store>(
    subject: &Subject<S>,
    claim: &Claim,
    timeout: Duration,
) -> Duration {
    let start = Instant::now();
    subject.store().wait_for_change(&claim.id, timeout).await;
    start.elapsed()
}
