use bytes::Bytes;

use super::{
    FIRST,
    replies::{assert_completed, assert_in_progress},
};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG, large_record},
    },
    store::{Acquired, Claim, LeaseRef, MIN_RECORD_LIMIT, OrphanPolicy, Store, Ttl},
};

// F-087
/// 6: records are opaque bytes: empty, binary, or similar to a known format.
pub async fn record_is_returned_unchanged<S: Store>(subject: &Subject<S>) {
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
        assert_eq!(
            subject.complete(&lease, &record, LONG).await,
            CallOutcome::Done
        );
        for _ in 0..2 {
            assert_record(subject, &claim, &record).await;
        }
    }
}

// F-105
/// 9: a record of 1 MiB is stored, or rejected for its size. After a rejection the entry stays in progress, and a
/// record of the reported limit is accepted. The records of the layer itself never exceed the limit.
pub async fn large_record_is_stored_or_rejected_for_size<S: Store>(subject: &Subject<S>) {
    let record = large_record();
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    match subject.complete(&lease, &record, LONG).await {
        CallOutcome::Done => assert_record(subject, &claim, &record).await,
        CallOutcome::TooLarge { limit } => {
            assert!(limit < record.len(), "refused below its limit of {limit}");
            assert!(limit >= MIN_RECORD_LIMIT, "the limit is only {limit}");
            assert_in_progress(subject, &claim).await;
            let largest = record.slice(..limit);
            let completed = subject.complete(&lease, &largest, LONG).await;
            assert_eq!(completed, CallOutcome::Done);
            assert_record(subject, &claim, &largest).await;
        }
        CallOutcome::Lost => panic!("the lease is held"),
    }
}

/// 6: every claim on a key gets the record with the fingerprint of the request that produced it, even if the claim has
/// another one.
pub async fn record_carries_fingerprint_of_its_request<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let record = Bytes::from("response");
    assert_eq!(
        subject.complete(&lease, &record, LONG).await,
        CallOutcome::Done
    );
    let refusing = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.duplicate(&claim)
    };
    let other = subject.other_request(&claim);
    for claimant in [&claim, &refusing, &other] {
        assert_completed(&claim, &record, subject.acquire(claimant).await);
    }
}

// S-960
/// 4: every claim on a completed key gets the remaining retention and the token that completed the entry. That may be
/// the token of a takeover, or one that held no lease. If `find_completed` returns the record, it returns the same.
pub async fn record_reports_its_expiry_and_token<S: Store>(subject: &Subject<S>) {
    let record = Bytes::from("response");
    loop {
        let retention = subject.units(40);
        let (first, _) = subject.orphan().await;
        let takeover = subject.duplicate(&first);
        let absent = subject.claim();
        let leases = [subject.hold(&takeover).await, absent.lease_ref(1)];
        let completing = subject.elapsed();
        for lease in &leases {
            let completed = subject.complete(lease, &record, retention).await;
            assert_eq!(completed, CallOutcome::Done);
        }
        let completed = subject.elapsed();
        subject.sleep(10).await;
        let slept = subject.elapsed() - completed;
        let mut replies = Vec::new();
        for claim in [&takeover, &absent] {
            replies.push((claim, subject.acquire(&subject.duplicate(claim)).await));
            let found = subject.store().find_completed(&claim.id);
            replies.extend(found.map(|found| (claim, found)));
        }
        let elapsed = subject.elapsed() - completing;
        if subject.is_late(completing, 30) {
            subject.retry_slower();
            continue;
        }
        for (claim, found) in replies {
            let expires_in = assert_completed(claim, &record, found);
            // The clock of a backend may run in milliseconds, or in steps of its own.
            let tolerance = subject.units(2).as_duration();
            let retention = retention.as_duration();
            assert!(
                expires_in + elapsed + tolerance >= retention,
                "{expires_in:?}"
            );
            assert!(
                expires_in + slept <= retention + tolerance,
                "{expires_in:?}"
            );
        }
        return;
    }
}

// F-098, F-145
/// 3: a second complete with the same token is `Ok` and changes neither the record nor its expiry.
pub async fn second_complete_changes_nothing<S: Store>(subject: &Subject<S>) {
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
        assert_eq!((first, second), (CallOutcome::Done, CallOutcome::Done));
        assert_completed(&claim, &record, found);
        subject.sleep(24).await;
        assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, FIRST);
        return;
    }
}

/// 2: a token that does not hold the lease cannot complete. The holder still can.
pub async fn token_without_lease_cannot_complete<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let other = subject.duplicate(&claim).lease_ref(lease.generation);
    let stolen = subject.complete(&other, &"stolen".into(), LONG).await;
    assert_eq!(stolen, CallOutcome::Lost);
    assert_in_progress(subject, &claim).await;
    let good = Bytes::from("good");
    assert_eq!(
        subject.complete(&lease, &good, LONG).await,
        CallOutcome::Done
    );
    assert_record(subject, &claim, &good).await;
}

// F-037
/// 4: no other token overwrites a record.
pub async fn other_token_cannot_overwrite_record<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let good = Bytes::from("good");
    assert_eq!(
        subject.complete(&lease, &good, LONG).await,
        CallOutcome::Done
    );
    let other = subject.other_request(&claim).lease_ref(2);
    let stolen = subject.complete(&other, &"stolen".into(), LONG).await;
    assert_eq!(stolen, CallOutcome::Lost);
    assert_record(subject, &claim, &good).await;
}

// F-106
/// 4: if the store lost its data and no other request acquired the key, a complete stores the record.
pub async fn complete_of_absent_key_stores_record<S: Store>(subject: &Subject<S>) {
    for generation in [1, 3] {
        let claim = subject.claim();
        let lease = claim.lease_ref(generation);
        let record = Bytes::from("saved");
        assert_eq!(
            subject.complete(&lease, &record, LONG).await,
            CallOutcome::Done
        );
        assert_record(subject, &claim, &record).await;
        let other = subject.duplicate(&claim).lease_ref(generation);
        let stolen = subject.complete(&other, &"stolen".into(), LONG).await;
        assert_eq!(stolen, CallOutcome::Lost);
    }
}

// F-103
/// 5: an expired entry is absent, even if it is still stored. `complete` stores the record, under the token of the expired
/// entry and under another one. No byte of a longer record remains.
pub async fn complete_of_expired_entry_stores_record<S: Store>(subject: &Subject<S>) {
    let records = [(); 2].map(|()| subject.claim());
    for claim in &records {
        let lease = subject.hold(claim).await;
        complete_with_large_record(subject, &lease, subject.short_lease()).await;
    }
    let orphans = [(); 2].map(|()| Claim {
        orphan_retention: subject.units(2),
        ..subject.short_claim()
    });
    for claim in &orphans {
        subject.hold(claim).await;
    }
    subject.sleep(10).await;
    let record = Bytes::from("new");
    for [own, replaced] in [records, orphans] {
        for claim in [own, subject.other_request(&replaced)] {
            let completed = subject.complete(&claim.lease_ref(1), &record, LONG).await;
            assert_eq!(completed, CallOutcome::Done);
            assert_record(subject, &claim, &record).await;
        }
    }
}

/// A completed key has no lease to renew. Its record stays.
pub async fn renew_of_completed_key_is_lost<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let record = Bytes::from("response");
    assert_eq!(
        subject.complete(&lease, &record, LONG).await,
        CallOutcome::Done
    );
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Lost);
    assert_record(subject, &claim, &record).await;
}

/// 4: a release of a completed key, by its own token or another, changes nothing.
pub async fn release_of_completed_key_leaves_record<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let record = Bytes::from("response");
    assert_eq!(
        subject.complete(&lease, &record, LONG).await,
        CallOutcome::Done
    );
    subject.release(&lease).await;
    subject
        .release(&subject.duplicate(&claim).lease_ref(1))
        .await;
    assert_record(subject, &claim, &record).await;
}

// F-103
/// 7: after its retention a record is absent at the next access. The key is free and starts again at generation 1. A shorter
/// record then replaces all of the expired one.
pub async fn record_is_absent_after_retention<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    complete_with_large_record(subject, &lease, subject.short_lease()).await;
    subject.outlive_short_lease().await;
    assert_eq!(subject.store().find_completed(&claim.id), None);
    let other = Claim {
        orphans: OrphanPolicy::Refuse,
        ..subject.other_request(&claim)
    };
    assert_restarts_at_generation_1(subject, &claim, &other).await;
}

/// 7: the retention counts from the completion, regardless of a short lease and orphan retention.
pub async fn record_outlives_its_lease<S: Store>(subject: &Subject<S>) {
    let claim = Claim {
        orphan_retention: subject.units(1),
        ..subject.short_claim()
    };
    let lease = subject.hold(&claim).await;
    let record = Bytes::from("kept");
    assert_eq!(
        subject.complete(&lease, &record, LONG).await,
        CallOutcome::Done
    );
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
        assert_eq!(completed, CallOutcome::Done);
        assert_completed(&claim, &record, found);
        return;
    }
}

/// 7: a record may have the longest retention. A record that needs attention has it, until an operator resolves it.
pub async fn record_with_longest_retention_is_stored<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let record = Bytes::from("kept");
    let completed = subject.complete(&lease, &record, Ttl::MAX).await;
    assert_eq!(completed, CallOutcome::Done);
    for _ in 0..2 {
        let found = subject.acquire(&subject.duplicate(&claim)).await;
        let expires_in = assert_completed(&claim, &record, found);
        assert!(expires_in > Ttl::MAX.as_duration() / 2, "{expires_in:?}");
        subject.sleep(1).await;
    }
}

// S-121
/// 7: duplicates replay a record and do not extend its retention.
pub async fn replay_does_not_extend_retention<S: Store>(subject: &Subject<S>) {
    loop {
        let claim = subject.claim();
        let lease = subject.hold(&claim).await;
        let record = Bytes::from("short");
        let completing = subject.elapsed();
        let completed = subject.complete(&lease, &record, subject.units(12)).await;
        assert_eq!(completed, CallOutcome::Done);
        subject.sleep(6).await;
        let found = subject.acquire(&subject.duplicate(&claim)).await;
        if subject.is_late(completing, 12) {
            subject.retry_slower();
            continue;
        }
        assert_completed(&claim, &record, found);
        subject.sleep(9).await;
        assert_eq!(subject.store().find_completed(&claim.id), None);
        assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, FIRST);
        return;
    }
}

/// Asserts that `next` is granted at generation 1, and that later claims get only the state of `next`, also claims
/// with the fingerprint of `before`.
pub(super) async fn assert_restarts_at_generation_1<S: Store>(
    subject: &Subject<S>,
    before: &Claim,
    next: &Claim,
) {
    assert_eq!(subject.acquire(next).await, FIRST);
    for claimant in [before, next] {
        match subject.acquire(&subject.duplicate(claimant)).await {
            Acquired::InProgress { fingerprint, .. } => assert_eq!(fingerprint, next.fingerprint),
            other => panic!("expected the key in progress, found {other:?}"),
        }
    }
    let record = Bytes::from("new");
    let completed = subject.complete(&next.lease_ref(1), &record, LONG).await;
    assert_eq!(completed, CallOutcome::Done);
    let found = subject.acquire(&subject.duplicate(before)).await;
    assert_completed(next, &record, found);
}

/// Completes the entry with a record of 1 MiB, or with the largest one that the store accepts.
async fn complete_with_large_record<S: Store>(
    subject: &Subject<S>,
    lease: &LeaseRef,
    retention: Ttl,
) {
    let record = large_record();
    let mut completed = subject.complete(lease, &record, retention).await;
    if let CallOutcome::TooLarge { limit } = completed {
        let largest = record.slice(..limit);
        completed = subject.complete(lease, &largest, retention).await;
    }
    assert_eq!(completed, CallOutcome::Done);
}

async fn assert_record<S: Store>(subject: &Subject<S>, claim: &Claim, expected: &Bytes) {
    let found = subject.acquire(&subject.duplicate(claim)).await;
    assert_completed(claim, expected, found);
}
