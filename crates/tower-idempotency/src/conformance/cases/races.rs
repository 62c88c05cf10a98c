use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use bytes::Bytes;
use tokio::{sync::Barrier, task::JoinSet};

use crate::{
    conformance::{
        Subject,
        subject::{LONG, Outcome},
    },
    store::{Acquired, Claim, Store},
};

const CLAIMS: usize = 32;

/// 2: of 32 claims at once, under 32 tokens, exactly one is granted; the others find it in progress.
pub async fn one_of_32_claims_at_once_is_granted<S: Store>(subject: &Subject<S>) {
    for _ in 0..4 {
        let claim = subject.claim();
        assert_eq!(winner(subject, &claim).await, (1, false));
    }
}

/// 2, 7: of 32 claims on an orphan at once exactly one takes it over.
pub async fn one_of_32_claims_at_once_takes_an_orphan_over<S: Store>(subject: &Subject<S>) {
    let (claim, _) = subject.orphan().await;
    assert_eq!(winner(subject, &claim).await, (2, true));
}

/// 2, 7: of 32 claims on an expired record at once exactly one is granted.
pub async fn one_of_32_claims_at_once_replaces_an_expired_record<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let retention = subject.short_lease();
    let completed = subject.complete(&lease, &"old".into(), retention).await;
    assert_eq!(completed, Outcome::Done);
    subject.outlive_short_lease().await;
    assert_eq!(winner(subject, &claim).await, (1, false));
}

/// 2: a number that is read and written in two steps, under the lease only, misses no increment.
pub async fn no_increment_under_the_lease_is_lost<S: Store>(subject: &Subject<S>) {
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

/// 4: a late completion and a takeover at once: one of them wins, and both are told the same.
pub async fn a_completion_and_a_takeover_at_once_agree<S: Store>(subject: &Subject<S>) {
    let claims: Vec<Claim> = (0..16).map(|_| subject.short_claim()).collect();
    for claim in &claims {
        subject.hold(claim).await;
    }
    subject.outlive_short_lease().await;
    for claim in claims {
        let rival = subject.duplicate(&claim);
        let start = Arc::new(Barrier::new(2));
        let completing = {
            let (subject, start) = (subject.clone(), Arc::clone(&start));
            tokio::spawn(async move {
                start.wait().await;
                let record = Bytes::from("late");
                subject.complete(&claim.lease_ref(1), &record, LONG).await
            })
        };
        let taking_over = {
            let subject = subject.clone();
            tokio::spawn(async move {
                start.wait().await;
                subject.acquire(&rival).await
            })
        };
        let completed = completing.await.expect(NO_PANIC);
        match (completed, taking_over.await.expect(NO_PANIC)) {
            (Outcome::Done, Acquired::Completed { record, .. }) => assert_eq!(record, "late"),
            (
                Outcome::Lost,
                Acquired::Granted {
                    generation: 2,
                    takeover: true,
                },
            ) => {}
            both => panic!("completion and takeover disagree: {both:?}"),
        }
    }
}

/// 4: completion and release of one token at once leave the record: a release that comes first leaves the key absent,
/// and completing an absent key stores the record.
pub async fn a_completion_and_a_release_at_once_leave_the_record<S: Store>(subject: &Subject<S>) {
    for _ in 0..16 {
        let claim = subject.claim();
        let lease = subject.hold(&claim).await;
        let releasing = {
            let subject = subject.clone();
            tokio::spawn(async move { subject.release(&lease).await })
        };
        let record = Bytes::from("answer");
        assert_eq!(subject.complete(&lease, &record, LONG).await, Outcome::Done);
        releasing.await.expect(NO_PANIC);
        let expected = Acquired::Completed {
            fingerprint: claim.fingerprint,
            record,
        };
        assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, expected);
    }
}

/// Lets 32 duplicates of the claim race; generation and takeover of the only one granted.
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
