use super::{
    FIRST, SECOND, THIRD, apply, assert_state, claim_under, completion, entry_in, resolve,
    result_record, seen,
};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG},
    },
    inspect::{Resolution, State},
    store::{Acquired, Claim, OrphanPolicy, Store},
};

fn assert_orphaned(found: &Acquired) {
    assert!(
        matches!(found, Acquired::Orphaned { .. }),
        "expected an orphan, found {found:?}"
    );
}

/// Asserts that the first lease of the claim has no rights left.
async fn assert_lost<S: Store>(subject: &Subject<S>, claim: &Claim) {
    let lease = claim.lease_ref(1);
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Lost);
    let record = result_record(&claim.id, "late");
    assert_eq!(
        subject.complete(&lease, &record, LONG).await,
        CallOutcome::Lost
    );
    subject.release(&lease).await;
}

/// 6: a lease that was broken never renews, completes or releases. Its key is an orphan at once.
pub async fn broken_lease_cannot_complete<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::InProgress).await;
    let entry = apply(subject, &claim, &Resolution::BreakLease).await;
    let entry = entry.expect("the entry stays");
    assert_eq!((entry.state(), entry.generation()), (State::Orphaned, 1));
    assert!(!entry.retry_allowed);
    assert_lost(subject, &claim).await;
    assert_state(subject, &claim, Some(State::Orphaned)).await;
}

/// 6: the holder of a broken lease still has no rights after the key was taken over, released or completed.
pub async fn broken_lease_stays_broken<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::InProgress).await;
    apply(subject, &claim, &Resolution::BreakLease).await;
    let next = subject.duplicate(&claim);
    assert_eq!(subject.acquire(&next).await, SECOND);
    assert_lost(subject, &claim).await;
    assert_state(subject, &claim, Some(State::InProgress)).await;
    let record = result_record(&claim.id, "next");
    let completed = subject.complete(&next.lease_ref(2), &record, LONG).await;
    assert_eq!(completed, CallOutcome::Done);
    assert_lost(subject, &claim).await;
    assert_state(subject, &claim, Some(State::Completed)).await;
}

/// 6: a retry or a record of an operator gives the holder of a broken lease no rights back.
pub async fn broken_lease_stays_broken_after_resolution<S: Store>(subject: &Subject<S>) {
    for retried in [true, false] {
        let claim = entry_in(subject, State::InProgress).await;
        apply(subject, &claim, &Resolution::BreakLease).await;
        let (next, state) = if retried {
            (Resolution::Retry, State::Orphaned)
        } else {
            (completion(&claim, "resolved"), State::Completed)
        };
        apply(subject, &claim, &next).await;
        assert_lost(subject, &claim).await;
        assert_state(subject, &claim, Some(state)).await;
    }
}

/// Only the same request takes a broken lease over, and only if the policy allows it.
pub async fn broken_lease_follows_orphan_policy<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::InProgress).await;
    apply(subject, &claim, &Resolution::BreakLease).await;
    for policy in [OrphanPolicy::Refuse, OrphanPolicy::Never] {
        let refusing = claim_under(subject, &claim, policy);
        assert_orphaned(&subject.acquire(&refusing).await);
    }
    assert_orphaned(&subject.acquire(&subject.other_request(&claim)).await);
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, SECOND);
}

/// 5: a renewal does not change the `Seen` of an entry in progress.
pub async fn renewed_lease_can_be_broken<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::InProgress).await;
    let before = seen(subject, &claim).await;
    subject.sleep(1).await;
    let renewed = subject.renew(&claim.lease_ref(1), LONG).await;
    assert_eq!(renewed, CallOutcome::Done);
    assert_eq!(seen(subject, &claim).await, before);
    let broken = resolve(subject, &before, &Resolution::BreakLease).await;
    assert!(broken.is_applied());
}

/// A lease that was broken in each of two generations leaves an orphan of the later one.
pub async fn takeover_can_be_broken<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    let second = subject.duplicate(&claim);
    assert_eq!(subject.acquire(&second).await, SECOND);
    let entry = apply(subject, &claim, &Resolution::BreakLease).await;
    assert_eq!(entry.map(|entry| entry.generation()), Some(2));
    let record = result_record(&claim.id, "late");
    for stale in [claim.lease_ref(1), second.lease_ref(2)] {
        assert_eq!(
            subject.complete(&stale, &record, LONG).await,
            CallOutcome::Lost
        );
    }
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, THIRD);
}

/// After a broken lease is freed, the key counts as new, and the old holder cannot overwrite the next execution.
pub async fn freed_broken_lease_leaves_next_holder<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::InProgress).await;
    apply(subject, &claim, &Resolution::BreakLease).await;
    apply(subject, &claim, &Resolution::Free).await;
    let next = subject.other_request(&claim);
    assert_eq!(subject.acquire(&next).await, FIRST);
    assert_lost(subject, &claim).await;
    let renewed = subject.renew(&next.lease_ref(1), LONG).await;
    assert_eq!(renewed, CallOutcome::Done);
}

/// A claim under `Refuse` takes over an orphan whose retry an operator has allowed, once.
pub async fn allowed_retry_is_used_once<S: Store>(subject: &Subject<S>) {
    for state in [State::Orphaned, State::NeedsAttention] {
        let claim = entry_in(subject, state).await;
        apply(subject, &claim, &Resolution::Retry).await;
        let retry = claim_under(subject, &claim, OrphanPolicy::Refuse);
        assert_eq!(subject.acquire(&retry).await, SECOND);
        // The reply may have been lost, so the same attempt acquires again.
        assert_eq!(subject.acquire(&retry).await, SECOND);
        let second = claim_under(subject, &claim, OrphanPolicy::Refuse);
        let found = subject.acquire(&second).await;
        assert!(matches!(found, Acquired::InProgress { .. }), "{found:?}");
        subject.release(&retry.lease_ref(2)).await;
        let third = claim_under(subject, &claim, OrphanPolicy::Refuse);
        assert_orphaned(&subject.acquire(&third).await);
    }
}

/// An allowed retry belongs to the same request, and a query of the layer does not use it.
pub async fn allowed_retry_waits_for_its_request<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    apply(subject, &claim, &Resolution::Retry).await;
    let other = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.other_request(&claim)
    };
    assert_orphaned(&subject.acquire(&other).await);
    let query = claim_under(subject, &claim, OrphanPolicy::Never);
    assert_orphaned(&subject.acquire(&query).await);
    // The query of a former lease holder uses its token.
    let former = Claim {
        orphans: OrphanPolicy::Never,
        ..claim.clone()
    };
    assert_orphaned(&subject.acquire(&former).await);
    let retry = claim_under(subject, &claim, OrphanPolicy::Refuse);
    assert_eq!(subject.acquire(&retry).await, SECOND);
}

/// 4: a broken lease begins its orphan retention, and the orphan expires after it.
pub async fn broken_lease_expires<S: Store>(subject: &Subject<S>) {
    let (claim, broken) = loop {
        let claim = Claim {
            orphan_retention: subject.units(3),
            ..super::claim(subject)
        };
        subject.hold(&claim).await;
        let begin = subject.elapsed();
        let broken = apply(subject, &claim, &Resolution::BreakLease).await;
        match broken {
            Some(broken) => break (claim, broken),
            None if subject.is_late(begin, 3) => subject.retry_slower(),
            None => panic!("the entry stays"),
        }
    };
    let times = broken.expires.zip(broken.lease_expires);
    let (end, begin) = times.expect("it has both");
    let retention = end.duration_since(begin).expect("later");
    let expected = claim.orphan_retention.as_duration();
    assert!(retention.abs_diff(expected) < std::time::Duration::from_secs(2));
    subject.sleep(9).await;
    assert_state(subject, &claim, None).await;
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, FIRST);
}
