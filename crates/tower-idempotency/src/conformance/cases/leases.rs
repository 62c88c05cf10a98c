use bytes::Bytes;

use super::{
    FIRST,
    replies::{assert_completed, assert_in_progress},
};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG, random},
    },
    store::{Acquired, Claim, KeyId, LeaseRef, OrphanPolicy, ScopeDigest, Store},
};

/// 2: a claim on a held key gets the fingerprint of the holder, not its own, and the time left.
pub async fn rejected_claim_gets_holder_fingerprint_and_expiry<S: Store>(subject: &Subject<S>) {
    let holder = subject.claim();
    assert_eq!(subject.acquire(&holder).await, FIRST);
    for refused in [subject.duplicate(&holder), subject.other_request(&holder)] {
        match subject.acquire(&refused).await {
            Acquired::InProgress {
                fingerprint,
                expires_in,
            } => {
                assert_eq!(fingerprint, holder.fingerprint);
                let lease = holder.lease.as_duration();
                assert!(
                    expires_in <= lease,
                    "{expires_in:?} left of a lease of {lease:?}"
                );
                assert!(
                    expires_in > lease / 2,
                    "{expires_in:?} left of a new lease of {lease:?}"
                );
            }
            other => panic!("expected the key in progress, found {other:?}"),
        }
    }
}

// F-095
/// 3: the token that holds the key is granted the same lease again, because the first reply may have been lost.
pub async fn same_token_is_granted_same_generation_again<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    for _ in 0..3 {
        assert_eq!(subject.acquire(&claim).await, FIRST);
    }
    let lease = claim.lease_ref(1);
    let completed = subject.complete(&lease, &"done".into(), LONG).await;
    assert_eq!(completed, CallOutcome::Done);
}

/// 3: the lease then lasts as long as the later claim requests.
pub async fn acquire_with_same_token_extends_lease<S: Store>(subject: &Subject<S>) {
    let claim = subject.short_claim();
    assert_eq!(subject.acquire(&claim).await, FIRST);
    let longer = Claim {
        lease: LONG,
        ..claim.clone()
    };
    assert_eq!(subject.acquire(&longer).await, FIRST);
    subject.outlive_short_lease().await;
    assert_in_progress(subject, &claim).await;
}

/// 3: the entry keeps its fingerprint, even if the token that holds it claims it for another request. The first of the
/// two claims finds an expired lease.
pub async fn acquire_with_same_token_keeps_fingerprint<S: Store>(subject: &Subject<S>) {
    let policies = [
        OrphanPolicy::TakeOver,
        OrphanPolicy::Refuse,
        OrphanPolicy::Never,
    ];
    let claims = policies.map(|orphans| Claim {
        orphans,
        ..subject.short_claim()
    });
    for claim in &claims {
        subject.hold(claim).await;
    }
    subject.outlive_short_lease().await;
    for claim in &claims {
        let changed = Claim {
            token: claim.token,
            ..subject.other_request(claim)
        };
        for _ in 0..2 {
            assert_eq!(subject.acquire(&changed).await, FIRST);
        }
        match subject.acquire(&subject.duplicate(claim)).await {
            Acquired::InProgress { fingerprint, .. } => assert_eq!(fingerprint, claim.fingerprint),
            found => panic!("expected the key in progress, found {found:?}"),
        }
    }
}

/// 4, 7: after the release of its first lease, the key is free and starts at generation 1.
pub async fn release_frees_key<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    subject.release(&lease).await;
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, FIRST);
}

/// 4: a released key is also free for another request.
pub async fn release_frees_key_for_other_request<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    subject.release(&lease).await;
    let other = subject.other_request(&claim);
    assert_eq!(subject.acquire(&other).await, FIRST);
    match subject.acquire(&subject.duplicate(&claim)).await {
        Acquired::InProgress { fingerprint, .. } => assert_eq!(fingerprint, other.fingerprint),
        found => panic!("expected the key in progress, found {found:?}"),
    }
}

/// 4: the release of a released or never held lease is `Ok`.
pub async fn release_twice_is_harmless<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    subject.release(&claim.lease_ref(1)).await;
    let lease = subject.hold(&claim).await;
    subject.release(&lease).await;
    subject.release(&lease).await;
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, FIRST);
}

// F-037, S-162
/// 4: a late release is `Ok` and does not end the lease of a later holder. That holder acquired after a release, or by
/// takeover.
pub async fn stale_release_leaves_next_holder<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let stale = subject.hold(&claim).await;
    subject.release(&stale).await;
    subject.hold(&subject.duplicate(&claim)).await;
    subject.release(&stale).await;
    assert_in_progress(subject, &claim).await;

    let (claim, stale) = subject.orphan().await;
    subject.hold(&subject.duplicate(&claim)).await;
    subject.release(&stale).await;
    assert_in_progress(subject, &claim).await;
}

// F-052
/// 2: a token that was rejected cannot end the lease.
pub async fn rejected_claim_cannot_end_holders_lease<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    let lease = subject.hold(&claim).await;
    let refused = subject.duplicate(&claim);
    assert_in_progress(subject, &refused).await;
    subject.release(&refused.lease_ref(1)).await;
    assert_in_progress(subject, &claim).await;
    let refused = refused.lease_ref(lease.generation);
    assert_eq!(subject.renew(&refused, LONG).await, CallOutcome::Lost);
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Done);
}

/// 2: the renewal of a key that was never held, or was released, returns a lost lease.
pub async fn renew_of_absent_key_is_lost<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    assert_eq!(
        subject.renew(&claim.lease_ref(1), LONG).await,
        CallOutcome::Lost
    );
    let lease = subject.hold(&claim).await;
    subject.release(&lease).await;
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Lost);
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, FIRST);
}

// F-104
/// All 32 bytes of an id count.
pub async fn ids_differing_in_one_bit_are_distinct<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    assert_eq!(subject.acquire(&claim).await, FIRST);
    for at in 0..32 {
        let mut bytes = *claim.id.as_bytes();
        bytes[at] ^= 1 << (at % 8);
        let near = Claim {
            id: KeyId::from_bytes(bytes),
            ..subject.duplicate(&claim)
        };
        assert_eq!(subject.acquire(&near).await, FIRST, "byte {at}");
    }
}

// F-104
/// Ids are bytes, not text: case, padding and terminators count.
pub async fn ids_equal_as_text_are_distinct<S: Store>(subject: &Subject<S>) {
    let claim = subject.claim();
    for end in [
        *b"aa",
        *b"AA",
        *b"a ",
        *b"a\0",
        *b"a'",
        *b"\0\0",
        *b"  ",
        [0xc3, 0xa4],
        [0xff; 2],
    ] {
        let mut bytes = random();
        bytes[..30].copy_from_slice(&claim.id.as_bytes()[..30]);
        bytes[30..].copy_from_slice(&end);
        let similar = Claim {
            id: KeyId::from_bytes(bytes),
            ..subject.duplicate(&claim)
        };
        assert_eq!(subject.acquire(&similar).await, FIRST, "ending in {end:x?}");
        assert_in_progress(subject, &similar).await;
    }
}

/// No reply depends on the scope. A caller may know the ID and not the scope, as [`take_over`] does.
///
/// [`take_over`]: crate::IdempotencyLayer::take_over
pub async fn scope_changes_no_reply<S: Store>(subject: &Subject<S>) {
    let [own, other] = [1, 2].map(|byte| Some(ScopeDigest::from_bytes([byte; 16])));
    let claim = Claim {
        scope: own,
        ..subject.claim()
    };
    let lease = subject.hold(&claim).await;
    let scopes = [None, other, own];
    for scope in scopes {
        let claimant = Claim {
            scope,
            ..claim.clone()
        };
        assert_in_progress(subject, &claimant).await;
        let renewed = subject.renew(&LeaseRef { scope, ..lease }, LONG).await;
        assert_eq!(renewed, CallOutcome::Done);
    }
    let record = Bytes::from("response");
    let unscoped = LeaseRef {
        scope: None,
        ..lease
    };
    let completed = subject.complete(&unscoped, &record, LONG).await;
    assert_eq!(completed, CallOutcome::Done);
    for scope in scopes {
        let claimant = Claim {
            scope,
            ..subject.duplicate(&claim)
        };
        assert_completed(&claim, &record, subject.acquire(&claimant).await);
    }
}
