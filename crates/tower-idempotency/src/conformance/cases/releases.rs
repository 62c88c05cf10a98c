use std::time::Duration;

use tokio::task::JoinSet;

use super::{THIRD, records::assert_restarts_at_generation_1, replies::assert_in_progress};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG},
    },
    store::{Acquired, Claim, LeaseRef, OrphanPolicy, Store, Ttl},
};

/// 7: the execution that was taken over may have had its effect, so the release of a takeover does not free the key.
/// The same request takes it over, and the reply marks the takeover. The stored generation decides, not the generation
/// that the caller passes.
pub async fn released_takeover_can_be_taken_over<S: Store>(subject: &Subject<S>) {
    for generation in [2, 1] {
        let (claim, _) = takeover(subject, LONG).await;
        subject.release(&claim.lease_ref(generation)).await;
        let next = subject.duplicate(&claim);
        assert_eq!(subject.acquire(&next).await, THIRD);
        assert_in_progress(subject, &claim).await;
    }
}

/// 7: each takeover of a released takeover raises the generation as well.
pub async fn each_released_takeover_raises_generation<S: Store>(subject: &Subject<S>) {
    let (claim, mut lease) = takeover(subject, LONG).await;
    for generation in 3..=5 {
        subject.release(&lease).await;
        let next = subject.duplicate(&claim);
        let expected = Acquired::Granted {
            generation,
            takeover: true,
        };
        assert_eq!(subject.acquire(&next).await, expected);
        lease = next.lease_ref(generation);
    }
}

// S-152
/// 6, 7: a released takeover is an orphan to other requests and under `Refuse`, from its release on.
pub async fn released_takeover_is_orphan_since_release<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = takeover(subject, LONG).await;
    subject.release(&lease).await;
    let first = orphan_age(subject, &claim, &refusing(subject, &claim)).await;
    subject.sleep(4).await;
    let other = subject.other_request(&claim);
    let second = orphan_age(subject, &claim, &other).await;
    let grown = second.saturating_sub(first);
    assert!(
        grown >= subject.units(3).as_duration(),
        "after 4 units: {grown:?}"
    );
}

/// 7: a takeover released after its expiry is an orphan.
pub async fn takeover_released_after_expiry_is_orphan<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = takeover(subject, LONG).await;
    let renewed = subject.renew(&lease, subject.short_lease()).await;
    assert_eq!(renewed, CallOutcome::Done);
    subject.outlive_short_lease().await;
    subject.release(&lease).await;
    orphan_age(subject, &claim, &refusing(subject, &claim)).await;
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Lost);
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, THIRD);
}

// F-042, S-161
/// 2, 7: the token that released a takeover no longer holds it: a late renewal does not revive it.
pub async fn renewal_does_not_revive_released_takeover<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = takeover(subject, LONG).await;
    subject.release(&lease).await;
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Lost);
    orphan_age(subject, &claim, &refusing(subject, &claim)).await;
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, THIRD);
}

/// 2, 7: a concurrent renewal and release of a takeover leave an orphan in either order.
pub async fn concurrent_renew_and_release_leave_orphan<S: Store>(subject: &Subject<S>) {
    let renew = |subject: Subject<S>, lease| async move {
        subject.renew(&lease, LONG).await;
    };
    for claim in race_with_release(subject, renew).await {
        orphan_age(subject, &claim, &refusing(subject, &claim)).await;
    }
}

/// 3, 7: the token that released a takeover has no lease to be granted again. It takes over like any other token.
pub async fn releasing_token_takes_over_like_any_other<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = takeover(subject, LONG).await;
    subject.release(&lease).await;
    let refusing = Claim {
        orphans: OrphanPolicy::Refuse,
        ..claim.clone()
    };
    orphan_age(subject, &claim, &refusing).await;
    for _ in 0..2 {
        assert_eq!(subject.acquire(&claim).await, THIRD);
    }
    assert_in_progress(subject, &claim).await;
}

/// 4: a second release of a takeover changes nothing, even after another token took it over.
pub async fn stale_takeover_release_changes_nothing<S: Store>(subject: &Subject<S>) {
    let (claim, stale) = takeover(subject, LONG).await;
    subject.release(&stale).await;
    subject.release(&stale).await;
    orphan_age(subject, &claim, &refusing(subject, &claim)).await;
    let next = subject.duplicate(&claim);
    assert_eq!(subject.acquire(&next).await, THIRD);
    subject.release(&stale).await;
    assert_in_progress(subject, &claim).await;
    let renewed = subject.renew(&next.lease_ref(3), LONG).await;
    assert_eq!(renewed, CallOutcome::Done);
}

/// 7: the orphan retention counts from the release, even if the lease expired long before.
pub async fn released_takeover_lasts_for_orphan_retention<S: Store>(subject: &Subject<S>) {
    loop {
        let (claim, lease) = takeover(subject, subject.units(40)).await;
        let renewing = subject.elapsed();
        let renewed = subject.renew(&lease, subject.units(1)).await;
        assert_eq!(renewed, CallOutcome::Done);
        subject.sleep(25).await;
        let releasing = subject.elapsed();
        subject.release(&lease).await;
        let expired_before = subject.is_late(renewing, 41);
        subject.sleep(25).await;
        let found = subject.acquire(&subject.other_request(&claim)).await;
        if expired_before || subject.is_late(releasing, 40) {
            subject.retry_slower();
            continue;
        }
        assert_since(&claim, found);
        return;
    }
}

/// 7: after the orphan retention, which counts from the release even for a long lease, the key is free for any request.
/// This includes the same request. The key starts again at generation 1. A second release does not extend the retention.
pub async fn released_takeover_expires_after_orphan_retention<S: Store>(subject: &Subject<S>) {
    let orphans = [(); 2].map(|()| subject.short_claim());
    for orphan in &orphans {
        subject.hold(orphan).await;
    }
    subject.outlive_short_lease().await;
    let [first, second] = &orphans;
    let orphan_retention = subject.units(14);
    let (first, stale) = take_over(subject, first, orphan_retention).await;
    let (second, other_stale) = take_over(subject, second, orphan_retention).await;
    for _ in 0..2 {
        subject.release(&stale).await;
        subject.release(&other_stale).await;
        subject.sleep(10).await;
    }
    let other = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.other_request(&first)
    };
    assert_restarts_at_generation_1(subject, &first, &other).await;
    assert_restarts_at_generation_1(subject, &second, &subject.duplicate(&second)).await;
}

/// 5, 7: a takeover is absent after its orphan retention, even if it is still stored. A late release does not make it an
/// orphan again.
pub async fn release_of_expired_takeover_leaves_no_orphan<S: Store>(subject: &Subject<S>) {
    let (first, _) = subject.orphan().await;
    let claim = Claim {
        lease: subject.short_lease(),
        orphan_retention: subject.units(2),
        ..subject.duplicate(&first)
    };
    let lease = subject.hold(&claim).await;
    subject.sleep(10).await;
    subject.release(&lease).await;
    let other = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.other_request(&claim)
    };
    assert_restarts_at_generation_1(subject, &claim, &other).await;
}

/// 4: no token holds a released takeover, so any execution with a record stores it, as in an absent entry. Only that token
/// can complete the entry again. The fingerprint is that of the record.
pub async fn released_takeover_accepts_first_record<S: Store>(subject: &Subject<S>) {
    let [first, replaced] = [(); 2].map(|()| subject.short_claim());
    let stale = subject.hold(&first).await;
    subject.hold(&replaced).await;
    subject.outlive_short_lease().await;
    let second = subject.duplicate(&first);
    let lease = subject.hold(&second).await;
    let refused = subject.complete(&stale, &"late".into(), LONG).await;
    assert_eq!(refused, CallOutcome::Lost);
    subject.release(&lease).await;
    for _ in 0..2 {
        let completed = subject.complete(&stale, &"late".into(), LONG).await;
        assert_eq!(completed, CallOutcome::Done);
    }
    let refused = subject.complete(&lease, &"later".into(), LONG).await;
    assert_eq!(refused, CallOutcome::Lost);
    assert_late(subject, &first).await;

    let (_, lease) = take_over(subject, &replaced, LONG).await;
    subject.release(&lease).await;
    let other = subject.other_request(&replaced);
    let lease = other.lease_ref(1);
    let completed = subject.complete(&lease, &"late".into(), LONG).await;
    assert_eq!(completed, CallOutcome::Done);
    assert_late(subject, &other).await;
}

/// 4: a concurrent completion and release of a takeover leave the record, as for any lease.
pub async fn concurrent_takeover_complete_release_leave_record<S: Store>(subject: &Subject<S>) {
    let complete = |subject: Subject<S>, lease| async move {
        let completed = subject.complete(&lease, &"late".into(), LONG).await;
        assert_eq!(completed, CallOutcome::Done);
    };
    for claim in race_with_release(subject, complete).await {
        assert_late(subject, &claim).await;
    }
}

/// Returns a takeover of an orphan, with this orphan retention.
pub(super) async fn takeover<S: Store>(
    subject: &Subject<S>,
    orphan_retention: Ttl,
) -> (Claim, LeaseRef) {
    let (first, _) = subject.orphan().await;
    take_over(subject, &first, orphan_retention).await
}

/// Returns takeovers, each released concurrently with another call of the holder. The order of the two calls
/// alternates.
async fn race_with_release<S, C>(
    subject: &Subject<S>,
    call: impl Fn(Subject<S>, LeaseRef) -> C,
) -> Vec<Claim>
where
    S: Store,
    C: Future<Output = ()> + Send + 'static,
{
    let claims: Vec<Claim> = (0..16).map(|_| subject.short_claim()).collect();
    for claim in &claims {
        subject.hold(claim).await;
    }
    subject.outlive_short_lease().await;
    let mut racing = JoinSet::new();
    for (n, claim) in claims.iter().enumerate() {
        let (_, lease) = take_over(subject, claim, LONG).await;
        let calling = call(subject.clone(), lease);
        let releasing = subject.clone();
        let releasing = async move { releasing.release(&lease).await };
        if n % 2 == 0 {
            racing.spawn(calling);
            racing.spawn(releasing);
        } else {
            racing.spawn(releasing);
            racing.spawn(calling);
        }
    }
    racing.join_all().await;
    claims
}

async fn take_over<S: Store>(
    subject: &Subject<S>,
    orphan: &Claim,
    orphan_retention: Ttl,
) -> (Claim, LeaseRef) {
    let claim = Claim {
        orphan_retention,
        ..subject.duplicate(orphan)
    };
    let lease = subject.hold(&claim).await;
    assert_eq!(lease.generation, 2);
    (claim, lease)
}

fn refusing<S: Store>(subject: &Subject<S>, claim: &Claim) -> Claim {
    Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.duplicate(claim)
    }
}

/// Returns the age of the orphan of `orphan`, as reported to `claim`.
async fn orphan_age<S: Store>(subject: &Subject<S>, orphan: &Claim, claim: &Claim) -> Duration {
    assert_since(orphan, subject.acquire(claim).await)
}

fn assert_since(orphan: &Claim, found: Acquired) -> Duration {
    match found {
        Acquired::Orphaned { fingerprint, since } => {
            assert_eq!(fingerprint, orphan.fingerprint);
            assert!(since < LONG.as_duration() / 10, "since {since:?}");
            since
        }
        other => panic!("expected an orphan, found {other:?}"),
    }
}

async fn assert_late<S: Store>(subject: &Subject<S>, claim: &Claim) {
    let found = subject.acquire(&subject.duplicate(claim)).await;
    assert!(
        matches!(&found, Acquired::Completed { fingerprint, record, .. }
            if *fingerprint == claim.fingerprint && record == "late"),
        "{found:?}"
    );
}
