use std::time::Duration;

use super::{
    FIRST, SECOND, THIRD,
    records::assert_restarts_at_generation_1,
    replies::{assert_completed, assert_in_progress},
};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG, random},
    },
    store::{Acquired, Claim, Fingerprint, OrphanPolicy, Store, Token, Ttl},
};

// F-030, S-148
/// 7: the same request takes over a lease that expired without an outcome, and the reply marks the takeover. The
/// policy of the new claim applies, not that of the old holder.
pub async fn expired_lease_is_taken_over_by_same_request<S: Store>(subject: &Subject<S>) {
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

/// 7: each takeover raises the generation and is marked as a takeover.
pub async fn each_takeover_raises_generation<S: Store>(subject: &Subject<S>) {
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

/// 3: a takeover whose reply was lost is granted again as the same takeover.
pub async fn takeover_token_is_granted_same_takeover_again<S: Store>(subject: &Subject<S>) {
    let (claim, _) = subject.orphan().await;
    let rival = subject.duplicate(&claim);
    for _ in 0..3 {
        assert_eq!(subject.acquire(&rival).await, SECOND);
    }
}

/// 3: the holder of an orphan does not take over and is not rejected. Its lease continues.
pub async fn holder_of_orphan_is_granted_same_lease_again<S: Store>(subject: &Subject<S>) {
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

/// 2, 3: a replaced token has no rights left. It takes over like any other token, and the takeover raises the
/// generation.
pub async fn replaced_token_acquires_like_any_other<S: Store>(subject: &Subject<S>) {
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
        for claimant in [&again, &refusing] {
            match subject.acquire(claimant).await {
                Acquired::InProgress { .. } => {}
                other => panic!("expected the key in progress, found {other:?}"),
            }
        }
        if released {
            subject.release(&lease).await;
        } else {
            let renewed = subject.renew(&lease, subject.short_lease()).await;
            assert_eq!(renewed, CallOutcome::Done);
            subject.outlive_short_lease().await;
        }
        assert_eq!(subject.renew(&stale, LONG).await, CallOutcome::Lost);
        assert_orphaned(subject, &claim, &refusing).await;
        for _ in 0..2 {
            assert_eq!(subject.acquire(&again).await, THIRD);
        }
        assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Lost);
        let (held, retention) = (again.lease_ref(3), subject.short_lease());
        let completed = subject.complete(&held, &"late".into(), retention).await;
        assert_eq!(completed, CallOutcome::Done);
        subject.outlive_short_lease().await;
        assert_eq!(subject.acquire(&second).await, FIRST);
    }
}

/// 2, 4: an orphan is held like a lease: only its holder renews, completes or releases it.
pub async fn other_token_cannot_change_orphan<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = subject.orphan().await;
    for other in [subject.duplicate(&claim), subject.other_request(&claim)] {
        let other = other.lease_ref(lease.generation);
        assert_eq!(subject.renew(&other, LONG).await, CallOutcome::Lost);
        let stolen = subject.complete(&other, &"stolen".into(), LONG).await;
        assert_eq!(stolen, CallOutcome::Lost);
        subject.release(&other).await;
        let refusing = Claim {
            orphans: OrphanPolicy::Refuse,
            ..subject.duplicate(&claim)
        };
        assert_orphaned(subject, &claim, &refusing).await;
    }
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Done);
    assert_in_progress(subject, &claim).await;
}

// S-149
/// 6: another request under an orphaned key gets `Orphaned` and changes nothing.
pub async fn other_request_cannot_take_over_orphan<S: Store>(subject: &Subject<S>) {
    let (claim, _) = subject.orphan().await;
    assert_orphaned(subject, &claim, &subject.other_request(&claim)).await;
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, SECOND);
}

// S-150
/// 6: under `Refuse` and under `Never` no request takes an orphan over, not even the same request.
pub async fn refuse_policy_prevents_takeover<S: Store>(subject: &Subject<S>) {
    let (claim, _) = subject.orphan().await;
    for orphans in [OrphanPolicy::Refuse, OrphanPolicy::Never] {
        let refusing = Claim {
            orphans,
            ..subject.duplicate(&claim)
        };
        assert_orphaned(subject, &claim, &refusing).await;
        assert_orphaned(subject, &claim, &refusing).await;
    }
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, SECOND);
}

/// 5: the age of an orphan counts from the expiry of its lease.
pub async fn orphan_age_counts_from_lease_expiry<S: Store>(subject: &Subject<S>) {
    let holding = subject.elapsed();
    let (claim, _) = subject.orphan().await;
    let refusing = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.duplicate(&claim)
    };
    let first = assert_orphaned(subject, &claim, &refusing).await;
    // One unit for the rounding of the backend.
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

// F-103, S-154
/// 7: after the orphan retention, the key is free for any request, including the same request, and starts again at
/// generation 1. The last of the three leases was renewed, which restarts the retention and does not cancel it.
pub async fn orphan_expires_after_orphan_retention<S: Store>(subject: &Subject<S>) {
    let [first, second] = [(); 2].map(|()| Claim {
        orphan_retention: subject.units(2),
        ..subject.short_claim()
    });
    let third = Claim {
        orphan_retention: subject.units(2),
        ..subject.claim()
    };
    for claim in [&first, &second, &third] {
        subject.hold(claim).await;
    }
    // A renewal that is repeated late may find no entry any more.
    let lease = third.lease_ref(1);
    subject.renew(&lease, subject.short_lease()).await;
    subject.sleep(10).await;
    for claim in [&first, &second, &third] {
        let renewed = subject.renew(&claim.lease_ref(1), LONG).await;
        assert_eq!(renewed, CallOutcome::Lost);
    }
    let other = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.other_request(&first)
    };
    assert_restarts_at_generation_1(subject, &first, &other).await;
    assert_restarts_at_generation_1(subject, &second, &subject.duplicate(&second)).await;
    assert_restarts_at_generation_1(subject, &third, &subject.duplicate(&third)).await;
}

/// 5, 7: the shortest durations end. The layer renews a lease by [`Ttl::MIN`] to end it, and a backend may take 0 for a
/// duration without end.
pub async fn shortest_durations_end<S: Store>(subject: &Subject<S>) {
    let renewed = subject.claim();
    let lease = subject.hold(&renewed).await;
    assert_eq!(subject.renew(&lease, Ttl::MIN).await, CallOutcome::Done);
    let expired = Claim {
        lease: Ttl::MIN,
        orphan_retention: Ttl::MIN,
        ..subject.claim()
    };
    subject.hold(&expired).await;
    let completed = subject.claim();
    let lease = subject.hold(&completed).await;
    let outcome = subject.complete(&lease, &"brief".into(), Ttl::MIN).await;
    assert_eq!(outcome, CallOutcome::Done);
    subject.outlive_short_lease().await;
    let refusing = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.duplicate(&renewed)
    };
    assert_orphaned(subject, &renewed, &refusing).await;
    for claim in [expired, completed] {
        assert_eq!(subject.acquire(&subject.other_request(&claim)).await, FIRST);
    }
}

/// 2, 6: all bytes of a fingerprint and of a token count: those after a zero byte, and the case of a letter.
pub async fn fingerprints_and_tokens_are_compared_as_bytes<S: Store>(subject: &Subject<S>) {
    let (mut fingerprint, mut token) = ([b'a'; 32], [b'a'; 16]);
    (fingerprint[1], token[1]) = (0, 0);
    // The store may have the token of an earlier run, which must be another one.
    token[9..15].copy_from_slice(&random()[..6]);
    let claim = Claim {
        fingerprint: Fingerprint::from_bytes(fingerprint),
        token: Token::from_bytes(token),
        ..subject.short_claim()
    };
    let lease = subject.hold(&claim).await;
    subject.outlive_short_lease().await;
    for at in [0, 7, 8, 15, 16, 23, 24, 31] {
        let mut bytes = fingerprint;
        bytes[at].make_ascii_uppercase();
        let other = Claim {
            fingerprint: Fingerprint::from_bytes(bytes),
            ..subject.duplicate(&claim)
        };
        assert_orphaned(subject, &claim, &other).await;
    }
    for at in [0, 7, 8, 15] {
        let mut bytes = token;
        bytes[at].make_ascii_uppercase();
        let other = Claim {
            token: Token::from_bytes(bytes),
            ..claim.clone()
        };
        let renewed = subject.renew(&other.lease_ref(1), LONG).await;
        assert_eq!(renewed, CallOutcome::Lost, "byte {at}");
    }
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Done);
}

/// 2, 7: a lease stays while it is held, even with a very short orphan retention. This includes a lease that its own token
/// extended and a lease that took over.
pub async fn held_lease_outlives_orphan_retention<S: Store>(subject: &Subject<S>) {
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

/// The store accepts the longest leases and times, and texts with any characters.
pub async fn longest_times_and_odd_texts_are_accepted<S: Store>(subject: &Subject<S>) {
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
        assert_eq!(subject.renew(&lease, Ttl::MAX).await, CallOutcome::Done);
        assert_in_progress(subject, &claim).await;
        let renewed = subject.renew(&lease, subject.units(1)).await;
        assert_eq!(renewed, CallOutcome::Done);
        subject.sleep(4).await;
        let refusing = Claim {
            orphans: OrphanPolicy::Refuse,
            ..subject.duplicate(&claim)
        };
        assert_orphaned(subject, &claim, &refusing).await;
    }
}

/// 7: the orphan retention counts from the expiry of the last renewal.
pub async fn renewed_lease_restarts_orphan_retention<S: Store>(subject: &Subject<S>) {
    loop {
        let claim = Claim {
            orphan_retention: subject.units(30),
            ..subject.short_claim()
        };
        let holding = subject.elapsed();
        let lease = subject.hold(&claim).await;
        let renewing = subject.elapsed();
        let renewed = subject.renew(&lease, subject.units(30)).await;
        // Only for the first lease, which cannot be renewed after its orphan retention.
        let expired_before = subject.is_late(holding, 34);
        subject.sleep(37).await;
        let found = subject.acquire(&subject.other_request(&claim)).await;
        if expired_before || subject.is_late(renewing, 60) {
            subject.retry_slower();
            continue;
        }
        assert_eq!(renewed, CallOutcome::Done);
        assert_since(&claim, found);
        return;
    }
}

/// `renew` extends the lease.
pub async fn renew_extends_lease<S: Store>(subject: &Subject<S>) {
    let claim = subject.short_claim();
    let lease = subject.hold(&claim).await;
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Done);
    subject.outlive_short_lease().await;
    assert_in_progress(subject, &claim).await;
}

/// `renew` counts from now, regardless of the remaining time.
pub async fn renew_can_shorten_lease<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let renewed = subject.renew(&lease, subject.short_lease()).await;
    assert_eq!(renewed, CallOutcome::Done);
    subject.outlive_short_lease().await;
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, SECOND);
}

/// A process that was paused past its lease gets it back if no other execution took over.
pub async fn holder_renews_orphan_before_takeover<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = subject.orphan().await;
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Done);
    assert_in_progress(subject, &claim).await;
}

/// 4: a holder that completes late, but before any takeover, still stores its record.
pub async fn holder_completes_orphan_before_takeover<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = subject.orphan().await;
    let completed = subject.complete(&lease, &"late".into(), LONG).await;
    assert_eq!(completed, CallOutcome::Done);
    let found = subject.acquire(&subject.duplicate(&claim)).await;
    assert_completed(&claim, &"late".into(), found);
}

// F-037, S-160
/// 2, 4: a holder whose lease was taken over can no longer renew or complete; the new holder can. If its grant was lost, it
/// does not know its generation: the stored one counts.
pub async fn replaced_token_cannot_renew_or_complete<S: Store>(subject: &Subject<S>) {
    let (claim, stale) = subject.orphan().await;
    let second = subject.duplicate(&claim);
    subject.hold(&second).await;
    let holder = second.lease_ref(1);
    assert_eq!(subject.renew(&stale, LONG).await, CallOutcome::Lost);
    let stolen = subject.complete(&stale, &"stale".into(), LONG).await;
    assert_eq!(stolen, CallOutcome::Lost);
    assert_in_progress(subject, &claim).await;

    assert_eq!(subject.renew(&holder, LONG).await, CallOutcome::Done);
    let completed = subject.complete(&holder, &"good".into(), LONG).await;
    assert_eq!(completed, CallOutcome::Done);
    let stolen = subject.complete(&stale, &"stale".into(), LONG).await;
    assert_eq!(stolen, CallOutcome::Lost);
    let found = subject.acquire(&subject.duplicate(&claim)).await;
    assert_completed(&second, &"good".into(), found);
}

/// 4: the holder can release an expired lease.
pub async fn holder_releases_orphan_before_takeover<S: Store>(subject: &Subject<S>) {
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
