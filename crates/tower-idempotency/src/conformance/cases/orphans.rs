use std::time::Duration;

use super::{leases::assert_in_progress, records::begins_anew};
use crate::{
    conformance::{
        Subject,
        subject::{LONG, Outcome},
    },
    store::{Acquired, Claim, OrphanPolicy, Store, Ttl},
};

const FIRST: Acquired = Acquired::Granted {
    generation: 1,
    takeover: false,
};
const SECOND: Acquired = Acquired::Granted {
    generation: 2,
    takeover: true,
};
const THIRD: Acquired = Acquired::Granted {
    generation: 3,
    takeover: true,
};

/// 7: a lease that is over without an outcome is taken over by the same request, which is told. The policy that counts is
/// that of who asks, not that of who held it.
pub async fn a_lease_that_is_over_is_taken_over_by_the_same_request<S: Store>(
    subject: &Subject<S>,
) {
    let claims = [OrphanPolicy::TakeOver, OrphanPolicy::Refuse].map(|orphans| Claim {
        orphans,
        ..subject.short_claim()
    });
    for claim in &claims {
        subject.hold(claim).await;
    }
    subject.outlive_short_lease().await;
    for claim in &claims {
        let next = Claim {
            orphans: OrphanPolicy::TakeOver,
            ..subject.duplicate(claim)
        };
        assert_eq!(subject.acquire(&next).await, SECOND);
        assert_in_progress(subject, &next).await;
    }
}

/// 7: each takeover raises the generation, and each is one.
pub async fn each_takeover_raises_the_generation<S: Store>(subject: &Subject<S>) {
    let (claim, _) = subject.orphan().await;
    for generation in 2..=3 {
        let next = Claim {
            lease: subject.short_lease(),
            ..subject.duplicate(&claim)
        };
        let expected = Acquired::Granted {
            generation,
            takeover: true,
        };
        assert_eq!(subject.acquire(&next).await, expected);
        subject.outlive_short_lease().await;
    }
}

/// 3: a takeover whose reply was lost is granted again as the takeover it was.
pub async fn a_takeover_is_still_one_when_its_token_asks_again<S: Store>(subject: &Subject<S>) {
    let (claim, _) = subject.orphan().await;
    let rival = subject.duplicate(&claim);
    for _ in 0..3 {
        assert_eq!(subject.acquire(&rival).await, SECOND);
    }
}

/// 3: the holder itself does not take over, and is not refused: its lease goes on.
pub async fn the_holder_of_an_orphan_is_granted_again_as_it_was<S: Store>(subject: &Subject<S>) {
    let claims = [OrphanPolicy::TakeOver, OrphanPolicy::Refuse].map(|orphans| Claim {
        orphans,
        ..subject.short_claim()
    });
    for claim in &claims {
        subject.hold(claim).await;
    }
    subject.outlive_short_lease().await;
    for claim in claims {
        let again = Claim {
            lease: LONG,
            ..claim
        };
        assert_eq!(subject.acquire(&again).await, FIRST);
        assert_in_progress(subject, &again).await;
    }
}

/// 2, 3: a token that was replaced is a stranger's, whatever it once held: it takes over like any other, and each grant is
/// counted.
pub async fn a_replaced_token_that_asks_again_is_a_stranger<S: Store>(subject: &Subject<S>) {
    for released in [true, false] {
        let (claim, stale) = subject.orphan().await;
        let second = subject.duplicate(&claim);
        let lease = subject.hold(&second).await;
        let again = Claim {
            lease: LONG,
            ..claim.clone()
        };
        let refusing = Claim {
            orphans: OrphanPolicy::Refuse,
            ..again.clone()
        };
        for asking in [&again, &refusing] {
            match subject.acquire(asking).await {
                Acquired::InProgress { .. } => {}
                other => panic!("expected the key in progress, found {other:?}"),
            }
        }
        if released {
            subject.release(&lease).await;
        } else {
            let renewed = subject.renew(&lease, subject.short_lease()).await;
            assert_eq!(renewed, Outcome::Done);
            subject.outlive_short_lease().await;
        }
        assert_eq!(subject.renew(&stale, LONG).await, Outcome::Lost);
        assert_orphaned(subject, &claim, &refusing).await;
        for _ in 0..2 {
            assert_eq!(subject.acquire(&again).await, THIRD);
        }
        assert_eq!(subject.renew(&lease, LONG).await, Outcome::Lost);
        let (held, retention) = (again.lease_ref(3), subject.short_lease());
        let completed = subject.complete(&held, &"late".into(), retention).await;
        assert_eq!(completed, Outcome::Done);
        subject.outlive_short_lease().await;
        assert_eq!(subject.acquire(&second).await, FIRST);
    }
}

/// 2, 4: an orphan is held as a lease is: nobody but its holder renews, completes or releases it.
pub async fn a_stranger_does_nothing_to_an_orphan<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = subject.orphan().await;
    for stranger in [subject.duplicate(&claim), subject.other_request(&claim)] {
        let stranger = stranger.lease_ref(lease.generation);
        assert_eq!(subject.renew(&stranger, LONG).await, Outcome::Lost);
        let stolen = subject.complete(&stranger, &"stolen".into(), LONG).await;
        assert_eq!(stolen, Outcome::Lost);
        subject.release(&stranger).await;
        let refusing = Claim {
            orphans: OrphanPolicy::Refuse,
            ..subject.duplicate(&claim)
        };
        assert_orphaned(subject, &claim, &refusing).await;
    }
    assert_eq!(subject.renew(&lease, LONG).await, Outcome::Done);
    assert_in_progress(subject, &claim).await;
}

/// 6: another request under an orphaned key is told of the orphan, and changes nothing.
pub async fn another_request_does_not_take_an_orphan_over<S: Store>(subject: &Subject<S>) {
    let (claim, _) = subject.orphan().await;
    assert_orphaned(subject, &claim, &subject.other_request(&claim)).await;
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, SECOND);
}

/// 6: under `Refuse` nobody takes an orphan over, not even the same request.
pub async fn a_refusing_claim_does_not_take_an_orphan_over<S: Store>(subject: &Subject<S>) {
    let (claim, _) = subject.orphan().await;
    let refusing = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.duplicate(&claim)
    };
    assert_orphaned(subject, &claim, &refusing).await;
    assert_orphaned(subject, &claim, &refusing).await;
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, SECOND);
}

/// 5: an orphan's age is counted from the end of its lease.
pub async fn an_orphan_knows_since_when<S: Store>(subject: &Subject<S>) {
    let holding = subject.elapsed();
    let (claim, _) = subject.orphan().await;
    let refusing = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.duplicate(&claim)
    };
    let first = assert_orphaned(subject, &claim, &refusing).await;
    // A unit for what the backend rounds.
    let most = subject.elapsed() - holding - subject.units(3).as_duration();
    assert!(first <= most, "at most {most:?}: {first:?}");
    subject.sleep(4).await;
    let second = assert_orphaned(subject, &claim, &refusing).await;
    let grown = second.saturating_sub(first);
    assert!(
        grown >= subject.units(3).as_duration(),
        "after 4 units: {grown:?}"
    );
}

/// 7: once `keep` has passed after the lease, the key is free for any request, also the same, and begins at generation 1.
pub async fn an_orphan_is_forgotten_after_keep<S: Store>(subject: &Subject<S>) {
    let [first, second] = [(); 2].map(|()| Claim {
        orphan_retention: subject.units(2),
        ..subject.short_claim()
    });
    for claim in [&first, &second] {
        subject.hold(claim).await;
    }
    subject.sleep(10).await;
    for claim in [&first, &second] {
        let renewed = subject.renew(&claim.lease_ref(1), LONG).await;
        assert_eq!(renewed, Outcome::Lost);
    }
    let other = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.other_request(&first)
    };
    begins_anew(subject, &first, &other).await;
    begins_anew(subject, &second, &subject.duplicate(&second)).await;
}

/// 2, 7: a lease is not forgotten while it lasts, however short `keep` is: not one that was extended by its own token, nor
/// one that took over.
pub async fn a_lease_is_not_forgotten_while_it_is_held<S: Store>(subject: &Subject<S>) {
    loop {
        let brief = Claim {
            orphan_retention: subject.units(1),
            ..subject.claim()
        };
        subject.hold(&brief).await;
        let extended = Claim {
            orphan_retention: subject.units(1),
            ..subject.short_claim()
        };
        subject.hold(&extended).await;
        let again = Claim {
            lease: LONG,
            ..extended.clone()
        };
        subject.hold(&again).await;
        let orphan = Claim {
            orphan_retention: subject.units(30),
            ..subject.short_claim()
        };
        let holding = subject.elapsed();
        subject.hold(&orphan).await;
        subject.outlive_short_lease().await;
        let taken_over = subject.acquire(&subject.duplicate(&orphan)).await;
        if subject.is_late(holding, 34) {
            subject.retry_slower();
            continue;
        }
        assert_eq!(taken_over, SECOND);
        subject.sleep(30).await;
        for claim in [brief, extended, orphan] {
            assert_in_progress(subject, &claim).await;
        }
        return;
    }
}

/// Leases and times as long as there are, and texts of any kind, break nothing.
pub async fn the_longest_of_everything_is_taken<S: Store>(subject: &Subject<S>) {
    let operations = [
        String::new(),
        r#"it's "quoted" \ ${} %s :now -- $1"#.to_owned(),
        // 128 bytes.
        "ä".repeat(64),
    ];
    for operation in operations {
        let claim = Claim {
            lease: Ttl::MAX,
            orphan_retention: Ttl::MAX,
            owner: r#"who's "there" \ %s"#,
            operation: operation.into(),
            ..subject.claim()
        };
        let lease = subject.hold(&claim).await;
        assert_eq!(subject.renew(&lease, Ttl::MAX).await, Outcome::Done);
        assert_in_progress(subject, &claim).await;
        let renewed = subject.renew(&lease, subject.units(1)).await;
        assert_eq!(renewed, Outcome::Done);
        subject.sleep(4).await;
        let refusing = Claim {
            orphans: OrphanPolicy::Refuse,
            ..subject.duplicate(&claim)
        };
        assert_orphaned(subject, &claim, &refusing).await;
    }
}

/// 7: `keep` counts from the end of the lease as it was last renewed.
pub async fn a_renewed_lease_is_remembered_for_keep_too<S: Store>(subject: &Subject<S>) {
    loop {
        let claim = Claim {
            orphan_retention: subject.units(30),
            ..subject.short_claim()
        };
        let holding = subject.elapsed();
        let lease = subject.hold(&claim).await;
        let renewing = subject.elapsed();
        let renewed = subject.renew(&lease, subject.units(30)).await;
        // Of the first lease, which is not renewed once it is forgotten.
        let forgotten_before = subject.is_late(holding, 34);
        subject.sleep(37).await;
        let found = subject.acquire(&subject.other_request(&claim)).await;
        if forgotten_before || subject.is_late(renewing, 60) {
            subject.retry_slower();
            continue;
        }
        assert_eq!(renewed, Outcome::Done);
        assert_since(&claim, found);
        return;
    }
}

/// `renew` moves the end of the lease away.
pub async fn renew_extends_the_lease<S: Store>(subject: &Subject<S>) {
    let claim = subject.short_claim();
    let lease = subject.hold(&claim).await;
    assert_eq!(subject.renew(&lease, LONG).await, Outcome::Done);
    subject.outlive_short_lease().await;
    assert_in_progress(subject, &claim).await;
}

/// `renew` counts from now, whatever was left.
pub async fn renew_can_bring_the_end_of_the_lease_nearer<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let renewed = subject.renew(&lease, subject.short_lease()).await;
    assert_eq!(renewed, Outcome::Done);
    subject.outlive_short_lease().await;
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, SECOND);
}

/// A process that was paused past its lease gets it back if nobody took over.
pub async fn the_holder_renews_an_orphan_that_nobody_took_over<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = subject.orphan().await;
    assert_eq!(subject.renew(&lease, LONG).await, Outcome::Done);
    assert_in_progress(subject, &claim).await;
}

/// 4: who completes late, but before anyone took over, still gives the answer.
pub async fn the_holder_completes_an_orphan_that_nobody_took_over<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = subject.orphan().await;
    let completed = subject.complete(&lease, &"late".into(), LONG).await;
    assert_eq!(completed, Outcome::Done);
    let expected = Acquired::Completed {
        fingerprint: claim.fingerprint,
        record: "late".into(),
    };
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, expected);
}

/// 2, 4: whose lease was taken over renews and completes no more; the new holder does.
pub async fn a_replaced_token_neither_renews_nor_completes<S: Store>(subject: &Subject<S>) {
    let (claim, stale) = subject.orphan().await;
    let holder = subject.hold(&subject.duplicate(&claim)).await;
    assert_eq!(subject.renew(&stale, LONG).await, Outcome::Lost);
    let stolen = subject.complete(&stale, &"stale".into(), LONG).await;
    assert_eq!(stolen, Outcome::Lost);
    assert_in_progress(subject, &claim).await;

    let completed = subject.complete(&holder, &"good".into(), LONG).await;
    assert_eq!(completed, Outcome::Done);
    let stolen = subject.complete(&stale, &"stale".into(), LONG).await;
    assert_eq!(stolen, Outcome::Lost);
    let expected = Acquired::Completed {
        fingerprint: claim.fingerprint,
        record: "good".into(),
    };
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, expected);
}

/// 4: a lease that is over is released as well.
pub async fn the_holder_releases_an_orphan_that_nobody_took_over<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = subject.orphan().await;
    subject.release(&lease).await;
    assert_eq!(subject.acquire(&subject.other_request(&claim)).await, FIRST);
}

async fn assert_orphaned<S: Store>(
    subject: &Subject<S>,
    orphan: &Claim,
    claim: &Claim,
) -> Duration {
    assert_since(orphan, subject.acquire(claim).await)
}

fn assert_since(orphan: &Claim, found: Acquired) -> Duration {
    match found {
        Acquired::Orphaned { fingerprint, since } => {
            assert_eq!(fingerprint, orphan.fingerprint);
            assert!(since < Ttl::from_secs(60).as_duration(), "since {since:?}");
            since
        }
        other => panic!("expected an orphan, found {other:?}"),
    }
}
