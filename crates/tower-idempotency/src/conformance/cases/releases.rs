use std::time::Duration;

use tokio::task::JoinSet;

use super::{leases::assert_in_progress, records::begins_anew};
use crate::{
    conformance::{
        Subject,
        subject::{LONG, Outcome},
    },
    store::{Acquired, Claim, LeaseRef, OrphanPolicy, Store, Ttl},
};

const THIRD: Acquired = Acquired::Granted {
    generation: 3,
    takeover: true,
};

/// 7: what a takeover took over may have had its effect, so releasing it does not free the key: the same request takes
/// it over in turn, and is told. The generation that counts is the stored one, not the one that the caller believes.
pub async fn a_released_takeover_is_taken_over_in_turn<S: Store>(subject: &Subject<S>) {
    for believed in [2, 1] {
        let (claim, _) = takeover(subject, LONG).await;
        subject.release(&claim.lease_ref(believed)).await;
        let next = subject.duplicate(&claim);
        assert_eq!(subject.acquire(&next).await, THIRD);
        assert_in_progress(subject, &claim).await;
    }
}

/// 7: and each of these as well.
pub async fn takeovers_that_are_released_raise_the_generation_each<S: Store>(subject: &Subject<S>) {
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

/// 6, 7: a released takeover is an orphan to other requests and under `Refuse`, from its release on.
pub async fn a_released_takeover_is_an_orphan_since_its_release<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = takeover(subject, LONG).await;
    subject.release(&lease).await;
    let first = since(subject, &claim, &refusing(subject, &claim)).await;
    subject.sleep(4).await;
    let other = subject.other_request(&claim);
    let second = since(subject, &claim, &other).await;
    let grown = second.saturating_sub(first);
    assert!(
        grown >= subject.units(3).as_duration(),
        "after 4 units: {grown:?}"
    );
}

/// 7: a takeover whose lease is over is released as well, and is an orphan still.
pub async fn a_takeover_that_is_released_late_is_an_orphan<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = takeover(subject, LONG).await;
    let renewed = subject.renew(&lease, subject.short_lease()).await;
    assert_eq!(renewed, Outcome::Done);
    subject.outlive_short_lease().await;
    subject.release(&lease).await;
    since(subject, &claim, &refusing(subject, &claim)).await;
    assert_eq!(subject.renew(&lease, LONG).await, Outcome::Lost);
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, THIRD);
}

/// 2, 7: who released a takeover does not hold it: a renewal that comes late does not revive it.
pub async fn a_renewal_does_not_revive_a_released_takeover<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = takeover(subject, LONG).await;
    subject.release(&lease).await;
    assert_eq!(subject.renew(&lease, LONG).await, Outcome::Lost);
    since(subject, &claim, &refusing(subject, &claim)).await;
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, THIRD);
}

/// 2, 7: a renewal and the release of a takeover at once: an orphan, whichever comes first.
pub async fn a_renewal_and_a_release_at_once_leave_an_orphan<S: Store>(subject: &Subject<S>) {
    let renew = |subject: Subject<S>, lease| async move {
        subject.renew(&lease, LONG).await;
    };
    for claim in released_under(subject, renew).await {
        since(subject, &claim, &refusing(subject, &claim)).await;
    }
}

/// 3, 7: the token that released a takeover has no lease to be granted again: it takes over like any other.
pub async fn who_released_a_takeover_takes_it_over_like_any_other<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = takeover(subject, LONG).await;
    subject.release(&lease).await;
    let refusing = Claim {
        orphans: OrphanPolicy::Refuse,
        ..claim.clone()
    };
    since(subject, &claim, &refusing).await;
    for _ in 0..2 {
        assert_eq!(subject.acquire(&claim).await, THIRD);
    }
    assert_in_progress(subject, &claim).await;
}

/// 4: releasing a takeover again changes nothing, not even once somebody else has taken it over.
pub async fn a_stale_release_of_a_takeover_changes_nothing<S: Store>(subject: &Subject<S>) {
    let (claim, stale) = takeover(subject, LONG).await;
    subject.release(&stale).await;
    subject.release(&stale).await;
    since(subject, &claim, &refusing(subject, &claim)).await;
    let next = subject.duplicate(&claim);
    assert_eq!(subject.acquire(&next).await, THIRD);
    subject.release(&stale).await;
    assert_in_progress(subject, &claim).await;
    let renewed = subject.renew(&next.lease_ref(3), LONG).await;
    assert_eq!(renewed, Outcome::Done);
}

/// 7: `keep` counts from the release: it is not over before, although the lease had long been.
pub async fn a_released_takeover_is_remembered_for_keep<S: Store>(subject: &Subject<S>) {
    loop {
        let (claim, lease) = takeover(subject, subject.units(40)).await;
        let renewing = subject.elapsed();
        let renewed = subject.renew(&lease, subject.units(1)).await;
        assert_eq!(renewed, Outcome::Done);
        subject.sleep(25).await;
        let releasing = subject.elapsed();
        subject.release(&lease).await;
        let forgotten_before = subject.is_late(renewing, 41);
        subject.sleep(25).await;
        let found = subject.acquire(&subject.other_request(&claim)).await;
        if forgotten_before || subject.is_late(releasing, 40) {
            subject.retry_slower();
            continue;
        }
        assert_since(&claim, found);
        return;
    }
}

/// 7: once `keep` has passed after the release, however long the lease would have lasted, the key is free for any
/// request, also the same, and begins at generation 1. A second release does not make it last.
pub async fn a_released_takeover_is_forgotten_after_keep<S: Store>(subject: &Subject<S>) {
    let orphans = [(); 2].map(|()| subject.short_claim());
    for orphan in &orphans {
        subject.hold(orphan).await;
    }
    subject.outlive_short_lease().await;
    let [first, second] = &orphans;
    let keep = subject.units(14);
    let (first, stale) = take_over(subject, first, keep).await;
    let (second, too) = take_over(subject, second, keep).await;
    for _ in 0..2 {
        subject.release(&stale).await;
        subject.release(&too).await;
        subject.sleep(10).await;
    }
    let other = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.other_request(&first)
    };
    begins_anew(subject, &first, &other).await;
    begins_anew(subject, &second, &subject.duplicate(&second)).await;
}

/// 4: nobody holds a released takeover, so whoever still has an answer gives it, as to an absent entry; the record then
/// is theirs alone.
pub async fn a_released_takeover_is_completed_by_whoever_has_the_answer<S: Store>(
    subject: &Subject<S>,
) {
    let (first, stale) = subject.orphan().await;
    let second = subject.duplicate(&first);
    let lease = subject.hold(&second).await;
    let refused = subject.complete(&stale, &"late".into(), LONG).await;
    assert_eq!(refused, Outcome::Lost);
    subject.release(&lease).await;
    for _ in 0..2 {
        let completed = subject.complete(&stale, &"late".into(), LONG).await;
        assert_eq!(completed, Outcome::Done);
    }
    let refused = subject.complete(&lease, &"later".into(), LONG).await;
    assert_eq!(refused, Outcome::Lost);
    assert_late(subject, &first).await;
}

/// 4: completion and release of one takeover at once leave the record, as those of any lease.
pub async fn a_completion_and_a_release_of_a_takeover_at_once_leave_the_record<S: Store>(
    subject: &Subject<S>,
) {
    let complete = |subject: Subject<S>, lease| async move {
        let completed = subject.complete(&lease, &"late".into(), LONG).await;
        assert_eq!(completed, Outcome::Done);
    };
    for claim in released_under(subject, complete).await {
        assert_late(subject, &claim).await;
    }
}

/// An orphan that was taken over, and is remembered for `keep`.
pub(super) async fn takeover<S: Store>(subject: &Subject<S>, keep: Ttl) -> (Claim, LeaseRef) {
    let (first, _) = subject.orphan().await;
    take_over(subject, &first, keep).await
}

/// Takeovers that were each released while the holder made another call; now the one began first, now the other.
async fn released_under<S, C>(
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

async fn take_over<S: Store>(subject: &Subject<S>, orphan: &Claim, keep: Ttl) -> (Claim, LeaseRef) {
    let claim = Claim {
        orphan_retention: keep,
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

/// How long the entry has been an orphan of `orphan`, as `claim` is told.
async fn since<S: Store>(subject: &Subject<S>, orphan: &Claim, claim: &Claim) -> Duration {
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
    let expected = Acquired::Completed {
        fingerprint: claim.fingerprint,
        record: "late".into(),
    };
    assert_eq!(subject.acquire(&subject.duplicate(claim)).await, expected);
}
