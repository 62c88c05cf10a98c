use std::{future::poll_fn, pin::pin, task::Poll};

use bytes::Bytes;

use super::{FIRST, SECOND, THIRD, replies::assert_completed};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG},
    },
    store::{Acquired, Claim, Store},
};

/// More than the number of awaits in a call.
const POLLS: usize = 12;

/// More than the number of calls dropped before it.
const RELEASES: usize = 8;

// F-102
/// A call dropped at any of its awaits takes effect completely or not at all. A retry then has the same result as a single
/// call.
pub async fn dropped_call_leaves_store_usable<S: Store>(subject: &Subject<S>) {
    for polls in 0..POLLS {
        let claim = subject.claim();
        drop_after(polls, subject.store().acquire(&claim)).await;
        assert_eq!(subject.acquire(&claim).await, FIRST);
        let lease = claim.lease_ref(1);

        drop_after(polls, subject.store().renew(&lease, LONG)).await;
        assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Done);

        drop_after(polls, subject.store().release(&lease)).await;
        let next = subject.other_request(&claim);
        assert_eq!(release_then_acquire(subject, &claim, &next).await, FIRST);
        let lease = next.lease_ref(1);

        let timeout = subject.units(1).as_duration();
        drop_after(polls, subject.store().wait_for_change(&next.id, timeout)).await;

        let record = Bytes::from("response");
        drop_after(
            polls,
            subject.store().complete(&lease, record.clone(), LONG),
        )
        .await;
        assert_eq!(
            subject.complete(&lease, &record, LONG).await,
            CallOutcome::Done
        );
        drop_after(polls, subject.store().acquire(&claim)).await;
        assert_completed(&next, &record, subject.acquire(&claim).await);
    }
}

/// Releases the lease of `claim` and acquires for `next`.
///
/// If the server handles each connection separately, the dropped acquire may take effect only now. The function then
/// releases the key again.
async fn release_then_acquire<S: Store>(
    subject: &Subject<S>,
    claim: &Claim,
    next: &Claim,
) -> Acquired {
    let mut releases = 0;
    loop {
        subject.release(&claim.lease_ref(1)).await;
        releases += 1;
        match subject.acquire(next).await {
            Acquired::InProgress { fingerprint, .. }
                if fingerprint == claim.fingerprint && releases < RELEASES => {}
            found => return found,
        }
    }
}

// F-102
/// A call dropped at any of its awaits takes effect completely or not at all. A claim that comes before any retry sees no
/// partial effect.
pub async fn dropped_call_leaves_no_part<S: Store>(subject: &Subject<S>) {
    let orphans: Vec<Claim> = (0..2 * POLLS).map(|_| subject.short_claim()).collect();
    for claim in &orphans {
        subject.hold(claim).await;
    }
    subject.outlive_short_lease().await;
    for (polls, pair) in orphans.chunks_exact(2).enumerate() {
        let claim = subject.claim();
        let lease = subject.hold(&claim).await;
        let record = Bytes::from("response");
        drop_after(
            polls,
            subject.store().complete(&lease, record.clone(), LONG),
        )
        .await;
        match subject.acquire(&subject.duplicate(&claim)).await {
            Acquired::InProgress { fingerprint, .. } => assert_eq!(fingerprint, claim.fingerprint),
            found => {
                assert_completed(&claim, &record, found);
            }
        }

        // With or without the takeover, the entry is still there: no generation starts at 1 again.
        let takeover = subject.duplicate(&pair[0]);
        drop_after(polls, subject.store().acquire(&takeover)).await;
        let found = subject.acquire(&subject.duplicate(&takeover)).await;
        assert_granted_or_in_progress(&SECOND, &found);

        let takeover = subject.duplicate(&pair[1]);
        let lease = subject.hold(&takeover).await;
        drop_after(polls, subject.store().release(&lease)).await;
        let found = subject.acquire(&subject.duplicate(&takeover)).await;
        assert_granted_or_in_progress(&THIRD, &found);
    }
}

fn assert_granted_or_in_progress(grant: &Acquired, found: &Acquired) {
    assert!(
        found == grant || matches!(found, Acquired::InProgress { .. }),
        "expected {grant:?}, or the key in progress, found {found:?}"
    );
}

/// Polls the future up to this many times and drops it.
pub(in crate::conformance) async fn drop_after<T>(polls: usize, future: impl Future<Output = T>) {
    let mut future = pin!(future);
    let mut polled = 0;
    poll_fn(|cx| {
        if polled == polls || future.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        polled += 1;
        if polled == polls {
            return Poll::Ready(());
        }
        Poll::Pending
    })
    .await;
}
