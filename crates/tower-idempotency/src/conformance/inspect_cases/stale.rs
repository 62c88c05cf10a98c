use super::{
    FIRST, SECOND, apply, assert_state, claim, completion, entry_in, every_resolution, get, read,
    resolve, result_record, seen,
};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG},
    },
    inspect::{Resolution, Seen, State},
    store::{Claim, Store},
};

/// Asserts that no resolution of `seen` changes the entry.
async fn assert_unchanged<S: Store>(subject: &Subject<S>, claim: &Claim, seen: &Seen) {
    let before = get(subject, claim).await;
    for resolution in every_resolution(claim) {
        if !resolution.applies_to(seen.state()) {
            continue;
        }
        let outcome = resolve(subject, seen, &resolution).await;
        assert!(!outcome.is_applied(), "{resolution:?} of {before:?}");
        let present = before.as_ref().map(|details| *details.entry.seen());
        assert_eq!(outcome.entry().map(|entry| *entry.seen()), present);
    }
    let after = get(subject, claim).await;
    let contents = |details: &crate::inspect::EntryDetails| {
        (
            *details.entry.seen(),
            details.record.clone(),
            details.fingerprint,
        )
    };
    assert_eq!(after.as_ref().map(contents), before.as_ref().map(contents));
}

/// 5: an orphan that was taken over since it was seen belongs to its new holder.
pub async fn taken_over_orphan_is_not_resolved<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    let before = seen(subject, &claim).await;
    let next = subject.duplicate(&claim);
    assert_eq!(subject.acquire(&next).await, SECOND);
    assert_unchanged(subject, &claim, &before).await;
    let record = result_record(&claim.id, "next");
    let completed = subject.complete(&next.lease_ref(2), &record, LONG).await;
    assert_eq!(completed, CallOutcome::Done);
    assert_unchanged(subject, &claim, &before).await;
}

/// 5: an orphan of a later generation is not the orphan that was seen.
pub async fn later_orphan_is_not_resolved<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    let before = seen(subject, &claim).await;
    let next = subject.duplicate(&claim);
    let lease = subject.hold(&next).await;
    subject.release(&lease).await;
    assert_state(subject, &claim, Some(State::Orphaned)).await;
    assert_unchanged(subject, &claim, &before).await;
}

/// 5: a holder that has renewed its orphan since it was seen is alive, even if its lease has expired again.
pub async fn renewed_orphan_is_not_resolved<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    let before = seen(subject, &claim).await;
    let lease = claim.lease_ref(1);
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Done);
    assert_unchanged(subject, &claim, &before).await;
    let renewed = subject.renew(&lease, subject.short_lease()).await;
    assert_eq!(renewed, CallOutcome::Done);
    subject.outlive_short_lease().await;
    assert_state(subject, &claim, Some(State::Orphaned)).await;
    assert_unchanged(subject, &claim, &before).await;
}

/// 5: a lease that was completed since it was seen is not broken.
pub async fn completed_lease_is_not_broken<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::InProgress).await;
    let before = seen(subject, &claim).await;
    let record = result_record(&claim.id, "paid");
    let completed = subject.complete(&claim.lease_ref(1), &record, LONG).await;
    assert_eq!(completed, CallOutcome::Done);
    assert_unchanged(subject, &claim, &before).await;
}

/// 5: a lease that has expired since it was seen is an orphan, which needs another decision of the operator.
pub async fn expired_lease_is_not_broken<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::InProgress).await;
    let before = seen(subject, &claim).await;
    let (lease, short) = (claim.lease_ref(1), subject.short_lease());
    assert_eq!(subject.renew(&lease, short).await, CallOutcome::Done);
    subject.outlive_short_lease().await;
    assert_state(subject, &claim, Some(State::Orphaned)).await;
    assert_unchanged(subject, &claim, &before).await;
}

/// 5: a key that was released and acquired again has another lease, even at the same moment and generation.
pub async fn reacquired_key_is_not_resolved<S: Store>(subject: &Subject<S>) {
    for _ in 0..8 {
        let claim = entry_in(subject, State::InProgress).await;
        let before = seen(subject, &claim).await;
        subject.release(&claim.lease_ref(1)).await;
        let next = subject.duplicate(&claim);
        assert_eq!(subject.acquire(&next).await, FIRST);
        assert_unchanged(subject, &claim, &before).await;
        let renewed = subject.renew(&next.lease_ref(1), LONG).await;
        assert_eq!(renewed, CallOutcome::Done);
    }
}

/// 5: of two decisions about one entry that needs attention, the second changes nothing.
pub async fn resolved_attention_is_not_resolved_again<S: Store>(subject: &Subject<S>) {
    for at in 0..4 {
        let claim = entry_in(subject, State::NeedsAttention).await;
        let before = seen(subject, &claim).await;
        let first = &every_resolution(&claim)[at];
        assert!(resolve(subject, &before, first).await.is_applied());
        assert_unchanged(subject, &claim, &before).await;
    }
}

/// 5: of two decisions about one orphan, the second changes nothing.
pub async fn resolved_orphan_is_not_resolved_again<S: Store>(subject: &Subject<S>) {
    for at in 0..4 {
        let claim = entry_in(subject, State::Orphaned).await;
        let before = seen(subject, &claim).await;
        let first = &every_resolution(&claim)[at];
        assert!(resolve(subject, &before, first).await.is_applied());
        assert_unchanged(subject, &claim, &before).await;
    }
}

/// 5: a record that was stored under the same key later is not deleted.
pub async fn later_record_is_not_deleted<S: Store>(subject: &Subject<S>) {
    for _ in 0..8 {
        let claim = entry_in(subject, State::Completed).await;
        let before = seen(subject, &claim).await;
        apply(subject, &claim, &Resolution::DeleteRecord).await;
        assert_unchanged(subject, &claim, &before).await;
        let next = subject.duplicate(&claim);
        let lease = subject.hold(&next).await;
        let record = result_record(&claim.id, "paid");
        assert_eq!(
            subject.complete(&lease, &record, LONG).await,
            CallOutcome::Done
        );
        assert_unchanged(subject, &claim, &before).await;
    }
}

/// 5: a record of an operator is not the record that was seen, even if both have the same bytes.
pub async fn replaced_record_is_not_deleted<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    apply(subject, &claim, &completion(&claim, "paid")).await;
    let before = seen(subject, &claim).await;
    apply(subject, &claim, &Resolution::DeleteRecord).await;
    let next = subject.duplicate(&claim);
    let lease = subject.hold(&next).await;
    let record = result_record(&claim.id, "paid");
    assert_eq!(
        subject.complete(&lease, &record, LONG).await,
        CallOutcome::Done
    );
    assert_unchanged(subject, &claim, &before).await;
}

/// 4, 5: an entry that is absent or has expired since it was seen stays absent.
pub async fn absent_entry_is_not_resolved<S: Store>(subject: &Subject<S>) {
    let never = claim(subject);
    for state in super::STATES {
        let invented = Seen::new(never.id, state, 1, 7);
        assert_unchanged(subject, &never, &invented).await;
    }
    let (orphan, before) = loop {
        let orphan = Claim {
            lease: subject.short_lease(),
            orphan_retention: subject.units(6),
            ..claim(subject)
        };
        subject.hold(&orphan).await;
        subject.sleep(6).await;
        match get(subject, &orphan).await {
            Some(details) if details.entry.state() == State::Orphaned => {
                break (orphan, *details.entry.seen());
            }
            // The machine paused for longer than the orphan retention.
            _ => subject.retry_slower(),
        }
    };
    subject.sleep(9).await;
    assert_state(subject, &orphan, None).await;
    assert_unchanged(subject, &orphan, &before).await;
}

/// 5: an identification with a wrong version, generation or ID changes nothing.
pub async fn invented_version_changes_nothing<S: Store>(subject: &Subject<S>) {
    for state in super::STATES {
        let claim = entry_in(subject, state).await;
        let seen = *read(subject, &claim).await.entry.seen();
        let invented = [
            Seen::new(*seen.id(), state, seen.generation(), seen.version() ^ 1),
            Seen::new(*seen.id(), state, seen.generation() + 1, seen.version()),
        ];
        for invented in invented {
            assert_unchanged(subject, &claim, &invented).await;
        }
        let other = entry_in(subject, state).await;
        let mixed = Seen::new(other.id, state, seen.generation(), seen.version());
        assert_unchanged(subject, &other, &mixed).await;
    }
}
