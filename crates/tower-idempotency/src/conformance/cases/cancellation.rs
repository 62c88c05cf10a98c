use std::{future::poll_fn, pin::pin, task::Poll};

use bytes::Bytes;

use super::{FIRST, records::assert_completed};
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
