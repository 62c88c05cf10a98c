use std::time::Duration;

use tokio::{
    task::JoinHandle,
    time::{Instant, timeout},
};

use super::releases::takeover;
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG},
    },
    store::{Claim, Store},
};

/// `wait_for_change` returns after `timeout` at the latest.
///
/// A stall of the machine may delay the return. The wait is then repeated with a longer timeout.
pub async fn wait_ends_at_timeout<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    subject.hold(&claim).await;
    for _ in 0..LATE_WAITS {
        let limit = subject.units(4).as_duration();
        let wait = timeout(limit + SLACK, measure_wait(subject, &claim, limit)).await;
        let Ok(wait) = wait else {
            panic!("timeout {limit:?}, still waiting {SLACK:?} later");
        };
        if wait.end - wait.start <= 2 * limit {
            return;
        }
        subject.retry_slower();
    }
    panic!("each of {LATE_WAITS} waits took more than twice its timeout");
}

/// With push, a completion wakes every waiter.
pub async fn completion_wakes_waiters<S: Store>(subject: &Subject<S>) {
    let complete = async |claim: &Claim| {
        let lease = claim.lease_ref(1);
        let completed = subject.complete(&lease, &"response".into(), LONG).await;
        assert_eq!(completed, CallOutcome::Done);
    };
    assert_wakes_waiters(subject, async || hold_new_key(subject).await, complete).await;
}

/// With push, a release wakes every waiter.
pub async fn release_wakes_waiters<S: Store>(subject: &Subject<S>) {
    let release = async |claim: &Claim| subject.release(&claim.lease_ref(1)).await;
    assert_wakes_waiters(subject, async || hold_new_key(subject).await, release).await;
}

/// With push, the release of a takeover wakes every waiter, because a waiter may take the orphan over.
pub async fn takeover_release_wakes_waiters<S: Store>(subject: &Subject<S>) {
    let take_over = async || takeover(subject, LONG).await.0;
    let release = async |claim: &Claim| subject.release(&claim.lease_ref(2)).await;
    let claim = assert_wakes_waiters(subject, take_over, release).await;
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

/// Longer than any stall of an overloaded machine.
const SLACK: Duration = Duration::from_secs(60);

/// The number of waits that may return late. The timeout of the last is 64 times that of the first.
const LATE_WAITS: usize = 7;

/// The time before a change in which the waiters must begin to wait.
const HEAD_START_UNITS: u32 = 2;

/// The number of trials in which waiters may return before the change. A store may return early, because the result is
/// only a hint. Its waiters then query again, and miss no change.
const EARLY_TRIALS: usize = 8;

/// A call of `wait_for_change`.
pub(in crate::conformance) struct Wait {
    start: Instant,
    end: Instant,
}

/// Acquires a lease on an unused key and returns its claim.
async fn hold_new_key<S: Store>(subject: &Subject<S>) -> Claim {
    let claim = subject.claim();
    subject.hold(&claim).await;
    claim
}

/// Asserts that `change` wakes every waiter of an entry in progress, which `enter` creates. Returns the claim on the
/// last entry that changed.
///
/// A waiter that subscribes after the change finds the key no longer in progress, and returns at once. With such waiters, a
/// store that never notifies would pass. So a trial counts on two conditions. All waiters began well before the change.
/// A wait for a free key took less than their head start, so they have subscribed by then. Other trials are repeated.
pub(in crate::conformance) async fn assert_wakes_waiters<S: Store>(
    subject: &Subject<S>,
    enter: impl AsyncFn() -> Claim,
    change: impl AsyncFn(&Claim),
) -> Claim {
    let mut early_trials = 0;
    loop {
        let claim = enter().await;
        let is_quick = subject.has_push() && subscribes_in_time(subject).await;
        let waiters = spawn_waiters(subject, &claim);
        subject.wait(2 * HEAD_START_UNITS).await;
        let changed = Instant::now();
        change(&claim).await;
        let waits = assert_woken(subject, waiters).await;
        if !subject.has_push() {
            return claim;
        }
        let head_start = subject.units(HEAD_START_UNITS).as_duration();
        let in_time = |wait: &Wait| wait.start + head_start <= changed;
        if !is_quick || !waits.iter().all(in_time) {
            subject.retry_slower();
            continue;
        }
        // A fault plan lets at most half of the waiters return early.
        let pending = waits.iter().filter(|wait| wait.end >= changed).count();
        if pending >= WAITERS / 2 || early_trials == EARLY_TRIALS {
            return claim;
        }
        early_trials += 1;
    }
}

/// Waits for a free key, so that a listener of the store is connected. Returns `true` if this took less than the head
/// start of the waiters: they then subscribe before the change.
async fn subscribes_in_time<S: Store>(subject: &Subject<S>) -> bool {
    let timeout = subject.units(TIMEOUT_UNITS).as_duration();
    let wait = measure_wait(subject, &subject.claim(), timeout).await;
    wait.end - wait.start <= subject.units(HEAD_START_UNITS).as_duration()
}

pub(in crate::conformance) fn spawn_waiters<S: Store>(
    subject: &Subject<S>,
    claim: &Claim,
) -> Vec<JoinHandle<Wait>> {
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
    waiters: Vec<JoinHandle<Wait>>,
) -> Vec<Wait> {
    let mut waits = Vec::new();
    for waiter in waiters {
        let wait = waiter.await.expect("waiting does not panic");
        let waited = wait.end - wait.start;
        let most = subject.units(TIMEOUT_UNITS / 2).as_duration();
        assert!(waited < most, "woken only after {waited:?}");
        waits.push(wait);
    }
    waits
}

async fn measure_wait<S: Store>(subject: &Subject<S>, claim: &Claim, timeout: Duration) -> Wait {
    let start = Instant::now();
    subject.store().wait_for_change(&claim.id, timeout).await;
    Wait {
        start,
        end: Instant::now(),
    }
}
