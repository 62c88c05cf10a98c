use super::leases::assert_in_progress;
use crate::{
    conformance::{
        Subject,
        subject::{LONG, Outcome},
    },
    store::{Acquired, Claim, OrphanPolicy, Store, Ttl},
};
use bytes::Bytes;

const FIRST: Acquired = Acquired::Granted {
    generation: 1,
    takeover: false,
};

/// 6: records are opaque: empty, binary, or looking like something.
pub async fn a_record_comes_back_byte_for_byte<S: Store>(subject: &Subject<S>) {
    let every_byte: Vec<u8> = (0..=255).collect();
    let records = [
        Bytes::new(),
        Bytes::from_static(b"\0"),
        Bytes::from_static(b" trailing \r\n\0 "),
        Bytes::from_static(b"{\"not\": \"parsed\"}"),
        Bytes::from_static(&[0xff, 0xfe, 0xc3, 0x28]),
        every_byte.repeat(256).into(),
    ];
    for record in records {
        let claim = subject.claim();
        let lease = subject.hold(&claim).await;
        assert_eq!(subject.complete(&lease, &record, LONG).await, Outcome::Done);
        for _ in 0..2 {
            assert_record(subject, &claim, &record).await;
        }
    }
}

/// 9: a record of 1 MiB is kept, or refused for its size with the entry left in progress and the limit true.
pub async fn a_large_record_comes_back_or_is_refused_for_its_size<S: Store>(subject: &Subject<S>) {
    let record: Bytes = (0..1 << 20).map(|n: u32| ((n * 31) >> 3) as u8).collect();
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    match subject.complete(&lease, &record, LONG).await {
        Outcome::Done => assert_record(subject, &claim, &record).await,
        Outcome::TooLarge { limit } => {
            assert!(limit < record.len(), "refused below its limit of {limit}");
            assert_in_progress(subject, &claim).await;
            let largest = record.slice(..limit);
            let completed = subject.complete(&lease, &largest, LONG).await;
            assert_eq!(completed, Outcome::Done);
            assert_record(subject, &claim, &largest).await;
        }
        Outcome::Lost => panic!("the lease is held"),
    }
}

/// 6: a record is given to every claim on its key, with the fingerprint it was made for, whatever the claim says.
pub async fn a_record_carries_the_fingerprint_of_its_request<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let record = Bytes::from("answer");
    assert_eq!(subject.complete(&lease, &record, LONG).await, Outcome::Done);
    let refusing = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.duplicate(&claim)
    };
    let expected = Acquired::Completed {
        fingerprint: claim.fingerprint,
        record,
    };
    let other = subject.other_request(&claim);
    for asking in [claim, refusing, other] {
        assert_eq!(subject.acquire(&asking).await, expected);
    }
}

/// 3: completing again with the same token is `Ok` and changes neither the record nor the end of its retention.
pub async fn completing_twice_changes_nothing<S: Store>(subject: &Subject<S>) {
    loop {
        let claim = subject.claim();
        let lease = subject.hold(&claim).await;
        let record = Bytes::from("first");
        let completing = subject.elapsed();
        let first = subject.complete(&lease, &record, subject.units(20)).await;
        let second = subject.complete(&lease, &"second".into(), LONG).await;
        let found = subject.acquire(&subject.duplicate(&claim)).await;
        if subject.is_late(completing, 20) {
            subject.retry_slower();
            continue;
        }
        assert_eq!((first, second), (Outcome::Done, Outcome::Done));
        assert_completed(&claim, &record, found);
        subject.sleep(24).await;
        assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, FIRST);
        return;
    }
}

/// 2: who does not hold the lease completes nothing; who does, still can.
pub async fn a_token_without_the_lease_completes_nothing<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let other = subject.duplicate(&claim).lease_ref(lease.generation);
    let stolen = subject.complete(&other, &"stolen".into(), LONG).await;
    assert_eq!(stolen, Outcome::Lost);
    assert_in_progress(subject, &claim).await;
    let good = Bytes::from("good");
    assert_eq!(subject.complete(&lease, &good, LONG).await, Outcome::Done);
    assert_record(subject, &claim, &good).await;
}

/// 4: nobody overwrites a record.
pub async fn another_token_does_not_overwrite_a_record<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let good = Bytes::from("good");
    assert_eq!(subject.complete(&lease, &good, LONG).await, Outcome::Done);
    let other = subject.other_request(&claim).lease_ref(2);
    let stolen = subject.complete(&other, &"stolen".into(), LONG).await;
    assert_eq!(stolen, Outcome::Lost);
    assert_record(subject, &claim, &good).await;
}

/// 4: where the store lost its data and nobody took the key since, completing stores the record.
pub async fn completing_an_absent_key_stores_the_record<S: Store>(subject: &Subject<S>) {
    for generation in [1, 3] {
        let claim = subject.claim();
        let lease = claim.lease_ref(generation);
        let record = Bytes::from("saved");
        assert_eq!(subject.complete(&lease, &record, LONG).await, Outcome::Done);
        assert_record(subject, &claim, &record).await;
        let other = subject.duplicate(&claim).lease_ref(generation);
        let stolen = subject.complete(&other, &"stolen".into(), LONG).await;
        assert_eq!(stolen, Outcome::Lost);
    }
}

/// A completed key has no lease to renew; its record stays.
pub async fn renew_of_a_completed_key_is_lost<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let record = Bytes::from("answer");
    assert_eq!(subject.complete(&lease, &record, LONG).await, Outcome::Done);
    assert_eq!(subject.renew(&lease, LONG).await, Outcome::Lost);
    assert_record(subject, &claim, &record).await;
}

/// 4: releasing a completed key, by its own token or another, does nothing.
pub async fn release_of_a_completed_key_keeps_its_record<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let record = Bytes::from("answer");
    assert_eq!(subject.complete(&lease, &record, LONG).await, Outcome::Done);
    subject.release(&lease).await;
    subject
        .release(&subject.duplicate(&claim).lease_ref(1))
        .await;
    assert_record(subject, &claim, &record).await;
}

/// 7: after its retention a record is absent at the next access: the key is free and begins at generation 1.
pub async fn a_record_is_absent_after_its_retention<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let retention = subject.short_lease();
    let completed = subject.complete(&lease, &"old".into(), retention).await;
    assert_eq!(completed, Outcome::Done);
    subject.outlive_short_lease().await;
    let other = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.other_request(&claim)
    };
    begins_anew(subject, &claim, &other).await;
}

/// 7: the retention counts from completion, not from the lease, and however short lease and keep were.
pub async fn a_record_outlives_its_lease<S: Store>(subject: &Subject<S>) {
    let claim = Claim {
        orphan_retention: subject.units(1),
        ..subject.short_claim()
    };
    let lease = subject.hold(&claim).await;
    let record = Bytes::from("kept");
    assert_eq!(subject.complete(&lease, &record, LONG).await, Outcome::Done);
    subject.outlive_short_lease().await;
    assert_record(subject, &claim, &record).await;

    loop {
        let claim = subject.claim();
        let lease = subject.hold(&claim).await;
        subject.sleep(12).await;
        let completing = subject.elapsed();
        let completed = subject.complete(&lease, &record, subject.units(16)).await;
        subject.sleep(8).await;
        let found = subject.acquire(&subject.duplicate(&claim)).await;
        if subject.is_late(completing, 16) {
            subject.retry_slower();
            continue;
        }
        assert_eq!(completed, Outcome::Done);
        assert_completed(&claim, &record, found);
        return;
    }
}

/// 7: a record may be kept as long as there is: that somebody has to look at what was done is, until somebody has.
pub async fn a_record_of_the_longest_retention_is_kept<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let record = Bytes::from("kept");
    let completed = subject.complete(&lease, &record, Ttl::MAX).await;
    assert_eq!(completed, Outcome::Done);
    for _ in 0..2 {
        assert_record(subject, &claim, &record).await;
        subject.sleep(1).await;
    }
}

/// 7: duplicates replay a record, they do not make it last.
pub async fn a_replay_does_not_extend_the_retention<S: Store>(subject: &Subject<S>) {
    loop {
        let claim = subject.claim();
        let lease = subject.hold(&claim).await;
        let record = Bytes::from("short");
        let completing = subject.elapsed();
        let completed = subject.complete(&lease, &record, subject.units(12)).await;
        assert_eq!(completed, Outcome::Done);
        subject.sleep(6).await;
        let found = subject.acquire(&subject.duplicate(&claim)).await;
        if subject.is_late(completing, 12) {
            subject.retry_slower();
            continue;
        }
        assert_completed(&claim, &record, found);
        subject.sleep(9).await;
        assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, FIRST);
        return;
    }
}

/// `next` is granted as the first; and whoever asks, also by what `before` said, is told of it and of nothing before it.
pub(super) async fn begins_anew<S: Store>(subject: &Subject<S>, before: &Claim, next: &Claim) {
    assert_eq!(subject.acquire(next).await, FIRST);
    for asking in [before, next] {
        match subject.acquire(&subject.duplicate(asking)).await {
            Acquired::InProgress { fingerprint, .. } => assert_eq!(fingerprint, next.fingerprint),
            other => panic!("expected the key in progress, found {other:?}"),
        }
    }
    let record = Bytes::from("anew");
    let completed = subject.complete(&next.lease_ref(1), &record, LONG).await;
    assert_eq!(completed, Outcome::Done);
    let found = subject.acquire(&subject.duplicate(before)).await;
    assert_completed(next, &record, found);
}

async fn assert_record<S: Store>(subject: &Subject<S>, claim: &Claim, expected: &Bytes) {
    let found = subject.acquire(&subject.duplicate(claim)).await;
    assert_completed(claim, expected, found);
}

fn assert_completed(claim: &Claim, expected: &Bytes, found: Acquired) {
    match found {
        Acquired::Completed {
            fingerprint,
            record,
        } => {
            assert_eq!(fingerprint, claim.fingerprint);
            assert!(record == *expected, "the record came back changed");
        }
        other => panic!("expected a record, found {other:?}"),
    }
}
