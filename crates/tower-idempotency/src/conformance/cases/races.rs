use std::sync::{
    Arc,
    atomic::{
        AtomicBool, AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
};

use bytes::Bytes;
use tokio::{sync::Barrier, task::JoinSet};

use super::{FIRST, SECOND, releases::takeover, replies::assert_completed};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG},
    },
    store::{Acquired, Claim, OrphanPolicy, Store, Ttl},
};

const CLAIMS: usize = 32;

// F-050
/// 2: of 32 concurrent claims under 32 tokens, exactly one is granted. The others find the key in progress.
pub async fn one_of_32_concurrent_claims_is_granted<S: Store>(subject: &Subject<S>) {
    for _ in 0..4 {
        let claim = subject.claim();
        assert_eq!(winner(subject, &claim).await, (1, false));
    }
}

// F-053
/// 2, 7: of 32 concurrent claims on an orphan, exactly one takes it over.
pub async fn one_of_32_claims_takes_over_orphan<S: Store>(subject: &Subject<S>) {
    let (claim, _) = subject.orphan().await;
    assert_eq!(winner(subject, &claim).await, (2, true));
}

// F-053
/// 2, 7: of 32 concurrent claims on an expired record, exactly one is granted.
pub async fn one_of_32_claims_replaces_expired_record<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let retention = subject.short_lease();
    let completed = subject.complete(&lease, &"old".into(), retention).await;
    assert_eq!(completed, CallOutcome::Done);
    subject.outlive_short_lease().await;
    assert_eq!(winner(subject, &claim).await, (1, false));
}

// F-053
/// 2, 7: of 32 concurrent claims on an expired orphan, exactly one starts again at generation 1.
pub async fn one_of_32_claims_replaces_expired_orphan<S: Store>(subject: &Subject<S>) {
    let claim = Claim {
        orphan_retention: subject.units(1),
        ..subject.short_claim()
    };
    subject.hold(&claim).await;
    // The lease and its orphan retention, and the rounding of the backend for each.
    subject.sleep(9).await;
    assert_eq!(winner(subject, &claim).await, (1, false));
}

// F-053
/// 2, 7: of 32 concurrent claims on a released takeover, exactly one takes it over.
pub async fn one_of_32_claims_takes_over_released_takeover<S: Store>(subject: &Subject<S>) {
    let (claim, lease) = takeover(subject, LONG).await;
    subject.release(&lease).await;
    assert_eq!(winner(subject, &claim).await, (3, true));
}

// F-050
/// 2: a counter that is read and written in two steps under the lease alone misses no increment.
pub async fn lease_prevents_lost_increments<S: Store>(subject: &Subject<S>) {
    const WORKERS: u64 = 8;
    const EACH: u64 = 4;
    let counter = Arc::new(AtomicU64::new(0));
    let claim = subject.claim();
    let mut workers = JoinSet::new();
    for _ in 0..WORKERS {
        let (subject, claim) = (subject.clone(), claim.clone());
        let counter = Arc::clone(&counter);
        workers.spawn(async move {
            for _ in 0..EACH {
                let mut mine = subject.duplicate(&claim);
                while let Acquired::InProgress { .. } = subject.acquire(&mine).await {
                    tokio::time::sleep(subject.pause() / 5).await;
                    mine = subject.duplicate(&claim);
                }
                let seen = counter.load(Relaxed);
                tokio::task::yield_now().await;
                counter.store(seen + 1, Relaxed);
                subject.release(&mine.lease_ref(1)).await;
            }
        });
    }
    workers.join_all().await;
    assert_eq!(counter.load(Relaxed), WORKERS * EACH);
}

// F-054
/// 4: of a late completion and a concurrent takeover, exactly one succeeds, and the two replies agree.
pub async fn concurrent_complete_and_takeover_agree<S: Store>(subject: &Subject<S>) {
    for (n, claim) in orphans(subject).await.into_iter().enumerate() {
        let rival = subject.duplicate(&claim);
        let (completing, taking_over) = (subject.clone(), subject.clone());
        let both = race(
            n,
            async move {
                let record = Bytes::from("late");
                completing
                    .complete(&claim.lease_ref(1), &record, LONG)
                    .await
            },
            async move { taking_over.acquire(&rival).await },
        );
        match both.await {
            (CallOutcome::Done, Acquired::Completed { record, .. }) => assert_eq!(record, "late"),
            (CallOutcome::Lost, SECOND) => {}
            both => panic!("completion and takeover disagree: {both:?}"),
        }
    }
}

// F-055
/// 2, 7: of a late renewal and a concurrent takeover, exactly one gets the lease, and the two replies agree.
pub async fn concurrent_renew_and_takeover_agree<S: Store>(subject: &Subject<S>) {
    for (n, claim) in orphans(subject).await.into_iter().enumerate() {
        let rival = subject.duplicate(&claim);
        let (renewing, taking_over) = (subject.clone(), subject.clone());
        let both = race(
            n,
            async move { renewing.renew(&claim.lease_ref(1), LONG).await },
            async move { taking_over.acquire(&rival).await },
        );
        match both.await {
            (CallOutcome::Done, Acquired::InProgress { .. }) | (CallOutcome::Lost, SECOND) => {}
            both => panic!("renewal and takeover disagree: {both:?}"),
        }
    }
}

// F-055
/// 4: after a late release and a concurrent takeover, the claim that was granted holds the key, whether it was free or
/// taken over.
pub async fn concurrent_release_and_takeover_leave_next_holder<S: Store>(subject: &Subject<S>) {
    for (n, claim) in orphans(subject).await.into_iter().enumerate() {
        let rival = subject.duplicate(&claim);
        let (releasing, taking_over, taker) = (subject.clone(), subject.clone(), rival.clone());
        let both = race(
            n,
            async move { releasing.release(&claim.lease_ref(1)).await },
            async move { taking_over.acquire(&taker).await },
        );
        let ((), taken_over) = both.await;
        assert!(
            matches!(taken_over, FIRST | SECOND),
            "expected a lease, found {taken_over:?}"
        );
        let renewed = subject.renew(&rival.lease_ref(1), LONG).await;
        assert_eq!(renewed, CallOutcome::Done);
    }
}

// F-054
/// 4: a concurrent completion and release of one token leave the record. If the release comes first, the key is
/// absent, and completing an absent key stores the record.
pub async fn concurrent_complete_and_release_leave_record<S: Store>(subject: &Subject<S>) {
    for _ in 0..16 {
        let claim = subject.claim();
        let lease = subject.hold(&claim).await;
        let releasing = {
            let subject = subject.clone();
            tokio::spawn(async move { subject.release(&lease).await })
        };
        let record = Bytes::from("response");
        assert_eq!(
            subject.complete(&lease, &record, LONG).await,
            CallOutcome::Done
        );
        releasing.await.expect(NO_PANIC);
        let found = subject.acquire(&subject.duplicate(&claim)).await;
        assert_completed(&claim, &record, found);
    }
}

// F-054
/// 4: of 32 concurrent completions of an entry without a holder, exactly one is stored. The entry is absent, has an
/// expired record, or is a released takeover.
pub async fn one_of_32_late_records_is_stored<S: Store>(subject: &Subject<S>) {
    for claim in entries_without_holder(subject, 2).await {
        let start = Arc::new(Barrier::new(CLAIMS));
        let mut racing = JoinSet::new();
        for n in 0..CLAIMS {
            let (subject, start) = (subject.clone(), Arc::clone(&start));
            let late = subject.duplicate(&claim);
            racing.spawn(async move {
                let record = Bytes::from(format!("record {n}"));
                start.wait().await;
                let completed = subject.complete(&late.lease_ref(1), &record, LONG).await;
                (late, record, completed)
            });
        }
        let mut stored = Vec::new();
        for (late, record, completed) in racing.join_all().await {
            match completed {
                CallOutcome::Done => stored.push((late, record)),
                refused => assert_eq!(refused, CallOutcome::Lost),
            }
        }
        let [(late, record)] = &stored[..] else {
            panic!("expected one stored record, found {}", stored.len());
        };
        let found = subject.acquire(&subject.duplicate(&claim)).await;
        assert_completed(late, record, found);
    }
}

// F-054
/// 2, 4: of the completion of an entry without a holder and a concurrent claim, exactly one succeeds, and the two replies
/// agree.
pub async fn concurrent_late_record_and_claim_agree<S: Store>(subject: &Subject<S>) {
    let entries = entries_without_holder(subject, 8).await;
    for (n, late) in entries.into_iter().enumerate() {
        let rival = subject.duplicate(&late);
        let (completing, claiming) = (subject.clone(), subject.clone());
        let (lease, claimant) = (late.lease_ref(1), rival.clone());
        let record = Bytes::from("late");
        let completed = record.clone();
        let both = race(
            n,
            async move { completing.complete(&lease, &completed, LONG).await },
            async move { claiming.acquire(&claimant).await },
        );
        match both.await {
            (CallOutcome::Done, found) => {
                assert_completed(&late, &record, found);
            }
            (CallOutcome::Lost, Acquired::Granted { generation, .. }) => {
                let renewed = subject.renew(&rival.lease_ref(generation), LONG).await;
                assert_eq!(renewed, CallOutcome::Done);
            }
            both => panic!("completion and claim disagree: {both:?}"),
        }
    }
}

// F-054
/// 1, 4: while a lease is renewed and completed, each claim finds it in progress, and afterwards its record. None is granted.
pub async fn concurrent_claims_find_lease_or_record<S: Store>(subject: &Subject<S>) {
    const CLAIMANTS: usize = 4;
    for _ in 0..8 {
        let claim = subject.claim();
        let lease = subject.hold(&claim).await;
        let record = Bytes::from("response");
        let start = Arc::new(Barrier::new(CLAIMANTS + 1));
        let is_completed = Arc::new(AtomicBool::new(false));
        let mut claimants = JoinSet::new();
        for _ in 0..CLAIMANTS {
            let (subject, claim) = (subject.clone(), claim.clone());
            let (start, is_completed) = (Arc::clone(&start), Arc::clone(&is_completed));
            claimants.spawn(async move {
                start.wait().await;
                loop {
                    let must_be_completed = is_completed.load(SeqCst);
                    let found = subject.acquire(&subject.duplicate(&claim)).await;
                    match &found {
                        Acquired::InProgress { fingerprint, .. } if !must_be_completed => {
                            assert_eq!(*fingerprint, claim.fingerprint);
                        }
                        _ => return found,
                    }
                    tokio::time::sleep(subject.pause() / 10).await;
                }
            });
        }
        start.wait().await;
        for _ in 0..4 {
            assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Done);
        }
        let completed = subject.complete(&lease, &record, LONG).await;
        assert_eq!(completed, CallOutcome::Done);
        is_completed.store(true, SeqCst);
        for found in claimants.join_all().await {
            assert_completed(&claim, &record, found);
        }
    }
}

// F-054
/// 2, 3, 4: a completion and a concurrent renewal, or repeated acquire, of the same token leave the record and its expiry.
pub async fn concurrent_complete_and_extension_leave_record<S: Store>(subject: &Subject<S>) {
    for n in 0..24 {
        let claim = subject.claim();
        let lease = subject.hold(&claim).await;
        let record = Bytes::from("response");
        let retention = Ttl::from_millis(2 * LONG.as_millis());
        let (completing, extending) = (subject.clone(), subject.clone());
        let (stored, again) = (record.clone(), claim.clone());
        let both = race(
            n,
            async move { completing.complete(&lease, &stored, retention).await },
            async move {
                if n % 4 < 2 {
                    extending.renew(&lease, LONG).await;
                } else {
                    extending.acquire(&again).await;
                }
            },
        );
        let (completed, ()) = both.await;
        assert_eq!(completed, CallOutcome::Done);
        let found = subject.acquire(&subject.duplicate(&claim)).await;
        let expires_in = assert_completed(&claim, &record, found);
        // A lease expires sooner, and its orphan later.
        let tolerance = subject.units(2).as_duration();
        assert!(expires_in > LONG.as_duration(), "{expires_in:?}");
        assert!(
            expires_in <= retention.as_duration() + tolerance,
            "{expires_in:?}"
        );
    }
}

// F-055
/// 2, 3: of a claim under the token of an orphan and a concurrent takeover, exactly one gets the lease, and the two replies
/// agree.
pub async fn concurrent_own_claim_and_takeover_agree<S: Store>(subject: &Subject<S>) {
    for (n, claim) in orphans(subject).await.into_iter().enumerate() {
        let again = Claim {
            lease: LONG,
            orphans: OrphanPolicy::Never,
            ..claim.clone()
        };
        let rival = subject.duplicate(&claim);
        let (own, taking_over, taker) = (subject.clone(), subject.clone(), rival.clone());
        let both = race(n, async move { own.acquire(&again).await }, async move {
            taking_over.acquire(&taker).await
        });
        let holder = match both.await {
            (FIRST, Acquired::InProgress { .. }) => claim.lease_ref(1),
            (Acquired::InProgress { .. }, SECOND) => rival.lease_ref(2),
            both => panic!("claim of the holder and takeover disagree: {both:?}"),
        };
        assert_eq!(subject.renew(&holder, LONG).await, CallOutcome::Done);
    }
}

/// Returns claims on entries without a holder: this number each of absent entries, expired records and released takeovers.
async fn entries_without_holder<S: Store>(subject: &Subject<S>, each: usize) -> Vec<Claim> {
    let claims: Vec<Claim> = (0..3 * each).map(|_| subject.short_claim()).collect();
    let (records, takeovers) = (&claims[each..2 * each], &claims[2 * each..]);
    for claim in records {
        let lease = subject.hold(claim).await;
        let retention = subject.short_lease();
        let completed = subject.complete(&lease, &"old".into(), retention).await;
        assert_eq!(completed, CallOutcome::Done);
    }
    for claim in takeovers {
        subject.hold(claim).await;
    }
    subject.outlive_short_lease().await;
    for claim in takeovers {
        let lease = subject.hold(&subject.duplicate(claim)).await;
        subject.release(&lease).await;
    }
    claims
}

/// Returns sixteen expired leases.
async fn orphans<S: Store>(subject: &Subject<S>) -> Vec<Claim> {
    let claims: Vec<Claim> = (0..16).map(|_| subject.short_claim()).collect();
    for claim in &claims {
        subject.hold(claim).await;
    }
    subject.outlive_short_lease().await;
    claims
}

/// Runs two calls concurrently. The call that starts first alternates with `n`.
pub(in crate::conformance) async fn race<A, B>(
    n: usize,
    one: impl Future<Output = A> + Send + 'static,
    other: impl Future<Output = B> + Send + 'static,
) -> (A, B)
where
    A: Send + 'static,
    B: Send + 'static,
{
    let start = Arc::new(Barrier::new(2));
    let one = {
        let start = Arc::clone(&start);
        async move {
            start.wait().await;
            one.await
        }
    };
    let other = async move {
        start.wait().await;
        other.await
    };
    let (one, other) = if n.is_multiple_of(2) {
        let one = tokio::spawn(one);
        (one, tokio::spawn(other))
    } else {
        let other = tokio::spawn(other);
        (tokio::spawn(one), other)
    };
    (one.await.expect(NO_PANIC), other.await.expect(NO_PANIC))
}

/// Runs 32 duplicates of the claim concurrently. Returns the generation and the takeover flag of the only granted one.
async fn winner<S: Store>(subject: &Subject<S>, claim: &Claim) -> (u64, bool) {
    let start = Arc::new(Barrier::new(CLAIMS));
    let mut racing = JoinSet::new();
    for _ in 0..CLAIMS {
        let (subject, start) = (subject.clone(), Arc::clone(&start));
        let mine = subject.duplicate(claim);
        racing.spawn(async move {
            start.wait().await;
            subject.acquire(&mine).await
        });
    }
    let mut winners = Vec::new();
    for acquired in racing.join_all().await {
        match acquired {
            Acquired::Granted {
                generation,
                takeover,
            } => winners.push((generation, takeover)),
            Acquired::InProgress { fingerprint, .. } => assert_eq!(fingerprint, claim.fingerprint),
            other => panic!("expected a winner and the key in progress, found {other:?}"),
        }
    }
    assert_eq!(winners.len(), 1, "granted: {winners:?}");
    winners[0]
}

const NO_PANIC: &str = "a call does not panic";
