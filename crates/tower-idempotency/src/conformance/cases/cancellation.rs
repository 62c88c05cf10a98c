use std::{future::poll_fn, pin::pin, task::Poll};

use bytes::Bytes;

use crate::{
    conformance::{
        Subject,
        subject::{LONG, Outcome},
    },
    store::{Acquired, Claim, Store},
};

/// More than the awaits in a call.
const POLLS: usize = 12;

/// More than the calls that are dropped before it.
const RELEASES: usize = 8;

/// A call dropped at any of its awaits happened or did not: made again, it ends as if it had been made once.
pub async fn a_call_dropped_at_any_await_leaves_the_store_usable<S: Store>(subject: &Subject<S>) {
    for polls in 0..POLLS {
        let claim = subject.claim();
        drop_after(polls, subject.store().acquire(&claim)).await;
        let first = Acquired::Granted {
            generation: 1,
            takeover: false,
        };
        assert_eq!(subject.acquire(&claim).await, first);
        let lease = claim.lease_ref(1);

        drop_after(polls, subject.store().renew(&lease, LONG)).await;
        assert_eq!(subject.renew(&lease, LONG).await, Outcome::Done);

        drop_after(polls, subject.store().release(&lease)).await;
        let next = subject.other_request(&claim);
        assert_eq!(released_for(subject, &claim, &next).await, first);
        let lease = next.lease_ref(1);

        let within = subject.units(1).as_duration();
        drop_after(polls, subject.store().wait_for_change(&next.id, within)).await;

        let record = Bytes::from("answer");
        drop_after(
            polls,
            subject.store().complete(&lease, record.clone(), LONG),
        )
        .await;
        assert_eq!(subject.complete(&lease, &record, LONG).await, Outcome::Done);
        drop_after(polls, subject.store().acquire(&claim)).await;
        let expected = Acquired::Completed {
            fingerprint: next.fingerprint,
            record,
        };
        assert_eq!(subject.acquire(&claim).await, expected);
    }
}

/// Releases what `claim` holds, and acquires for `next`.
///
/// Where each connection is served by itself, the acquire that was dropped may happen only now: the key is released again
/// then.
async fn released_for<S: Store>(subject: &Subject<S>, claim: &Claim, next: &Claim) -> Acquired {
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

/// Polls the future this often, unless it resolves before, and drops it.
async fn drop_after<T>(polls: usize, future: impl Future<Output = T>) {
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
