use std::time::Duration;

use bytes::Bytes;

use super::{
    EXAMINE, FIRST, SECOND, STATES, THIRD, apply, assert_state, attention_record, can_list,
    claim_under, claims, completion, enter, entry_in, every_resolution, find, read, result_record,
    seen,
};
use crate::{
    conformance::{
        Subject,
        cases::waiters::{assert_wakes_waiters, assert_woken, spawn_waiters},
        subject::{CallOutcome, LONG, large_record},
    },
    inspect::{DEFAULT_ORPHAN_RETENTION, Inspect, InspectErrorKind, Resolution, State},
    record::NeedsAttention,
    store::{Acquired, Claim, OrphanPolicy, Store},
};

/// States in which an operator decides about an execution that ended.
const ENDED: [State; 2] = [State::Orphaned, State::NeedsAttention];

/// `Free` deletes the entry. Any request may use the key, as if it had never been used.
pub async fn freed_key_is_absent<S: Store>(subject: &Subject<S>) {
    for state in ENDED {
        let claim = entry_in(subject, state).await;
        assert_eq!(apply(subject, &claim, &Resolution::Free).await, None);
        assert_state(subject, &claim, None).await;
        let next = subject.other_request(&claim);
        assert_eq!(subject.acquire(&next).await, FIRST);
        let entry = assert_state(subject, &claim, Some(State::InProgress)).await;
        assert_eq!(entry.map(|entry| entry.generation()), Some(1));
    }
}

/// 5: no token holds a released takeover. An operator resolves it like any other orphan.
pub async fn released_takeover_can_be_resolved<S: Store>(subject: &Subject<S>) {
    // The first four resolutions are those of orphans.
    let orphans = claims(subject, 4);
    enter(subject, &orphans, State::Orphaned).await;
    for (at, claim) in orphans.iter().enumerate() {
        let lease = subject.hold(&subject.duplicate(claim)).await;
        subject.release(&lease).await;
        let resolution = &every_resolution(claim)[at];
        let entry = apply(subject, claim, resolution).await;
        let generation = entry.map(|entry| entry.generation());
        let retry = claim_under(subject, claim, OrphanPolicy::Refuse);
        let found = subject.acquire(&retry).await;
        match resolution {
            Resolution::Free => assert_eq!((generation, found), (None, FIRST)),
            Resolution::Retry => assert_eq!((generation, found), (Some(2), THIRD)),
            _ => {
                assert_eq!(generation, Some(2));
                assert!(matches!(found, Acquired::Completed { .. }), "{found:?}");
            }
        }
    }
}

/// `Retry` leaves an orphan. The same request can take it over, and another request cannot. The orphan retention begins
/// again, even after a record with the longest retention.
pub async fn retried_entry_is_taken_over<S: Store>(subject: &Subject<S>) {
    for state in ENDED {
        let claim = entry_in(subject, state).await;
        let entry = apply(subject, &claim, &Resolution::Retry).await;
        let entry = entry.expect("the entry stays");
        assert_eq!((entry.state(), entry.generation()), (State::Orphaned, 1));
        assert!(entry.retry_allowed);
        assert_eq!((&entry.attention_code, entry.record_bytes), (&None, None));
        let times = entry.expires.zip(entry.lease_expires);
        let (end, begin) = times.expect("it has both");
        let retention = end.duration_since(begin).expect("later");
        // The entries have the default retention.
        let difference = retention.abs_diff(DEFAULT_ORPHAN_RETENTION.as_duration());
        assert!(difference < Duration::from_secs(10), "{retention:?}");
        if can_list(subject, State::Orphaned) {
            let found = find(subject, State::Orphaned, &claim).await;
            assert!(found.expect("it is listed").retry_allowed);
        }
        if can_list(subject, State::NeedsAttention) {
            assert_eq!(find(subject, State::NeedsAttention, &claim).await, None);
        }
        let other = subject.other_request(&claim);
        match subject.acquire(&other).await {
            Acquired::Orphaned { fingerprint, .. } => assert_eq!(fingerprint, claim.fingerprint),
            found => panic!("expected an orphan, found {found:?}"),
        }
        assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, SECOND);
        let entry = assert_state(subject, &claim, Some(State::InProgress)).await;
        assert!(!entry.expect("it exists").retry_allowed);
    }
}

/// 6: `Retry` replaces the token: a former lease holder that returns late has no rights.
pub async fn retried_entry_has_no_former_holder<S: Store>(subject: &Subject<S>) {
    for state in ENDED {
        let claim = entry_in(subject, state).await;
        apply(subject, &claim, &Resolution::Retry).await;
        let lease = claim.lease_ref(1);
        assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Lost);
        let late = result_record(&claim.id, "late");
        assert_eq!(
            subject.complete(&lease, &late, LONG).await,
            CallOutcome::Lost
        );
        subject.release(&lease).await;
        let entry = assert_state(subject, &claim, Some(State::Orphaned)).await;
        assert!(entry.expect("it exists").retry_allowed);
    }
}

/// `Complete` stores the record of the operator: each retry gets it, and a former lease holder cannot replace it.
pub async fn completed_entry_is_replayed<S: Store>(subject: &Subject<S>) {
    for state in ENDED {
        let claim = entry_in(subject, state).await;
        let entry = apply(subject, &claim, &completion(&claim, "refunded")).await;
        let entry = entry.expect("the entry stays");
        assert_eq!((entry.state(), entry.generation()), (State::Completed, 1));
        assert_eq!(entry.attention_code, None);
        let late = result_record(&claim.id, "late");
        let completed = subject.complete(&claim.lease_ref(1), &late, LONG).await;
        assert_eq!(completed, CallOutcome::Lost);
        let expected = result_record(&claim.id, "refunded");
        for retry in [subject.duplicate(&claim), subject.other_request(&claim)] {
            match subject.acquire(&retry).await {
                Acquired::Completed {
                    fingerprint,
                    record,
                    ..
                } => {
                    assert_eq!(fingerprint, claim.fingerprint);
                    assert_eq!(record, expected);
                }
                found => panic!("expected a record, found {found:?}"),
            }
        }
        if can_list(subject, State::NeedsAttention) {
            assert_eq!(find(subject, State::NeedsAttention, &claim).await, None);
        }
    }
}

/// 4: the record of an operator expires after its retention.
pub async fn record_of_operator_expires<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    let resolution = Resolution::Complete {
        record: result_record(&claim.id, "refunded"),
        retention: subject.units(1),
    };
    apply(subject, &claim, &resolution).await;
    subject.outlive_short_lease().await;
    assert_state(subject, &claim, None).await;
    assert_eq!(subject.acquire(&subject.duplicate(&claim)).await, FIRST);
}

/// `NeedsAttention` stores a record that needs attention, or replaces its code and its reason.
pub async fn attention_of_operator_is_stored<S: Store>(subject: &Subject<S>) {
    for state in ENDED {
        let claim = entry_in(subject, state).await;
        let attention = EXAMINE.with_reason("ticket 17");
        let resolution = Resolution::NeedsAttention(attention.clone());
        let entry = apply(subject, &claim, &resolution).await;
        let entry = entry.expect("the entry stays");
        assert_eq!(entry.state(), State::NeedsAttention);
        assert_eq!(entry.attention_code.as_deref(), Some("examine"));
        let expected = attention_record(&claim.id, &attention).0;
        let found = subject.acquire(&subject.duplicate(&claim)).await;
        let Acquired::Completed { record, .. } = found else {
            panic!("expected a record, found {found:?}");
        };
        assert_eq!(record, expected);
        let stored = NeedsAttention::in_record(&record).expect("it needs attention");
        assert_eq!(stored.reason(), "ticket 17");
        if can_list(subject, State::NeedsAttention) {
            let found = find(subject, State::NeedsAttention, &claim).await;
            let code = found.and_then(|entry| entry.attention_code);
            assert_eq!(code.as_deref(), Some("examine"));
        }
    }
}

/// `DeleteRecord` deletes a completed entry. The next request executes as the first one, also if the process that deleted the
/// record has replayed it before.
pub async fn deleted_record_frees_key<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Completed).await;
    let replay = subject.acquire(&subject.duplicate(&claim)).await;
    assert!(matches!(replay, Acquired::Completed { .. }), "{replay:?}");
    assert_eq!(
        apply(subject, &claim, &Resolution::DeleteRecord).await,
        None
    );
    assert_state(subject, &claim, None).await;
    assert_eq!(subject.store().find_completed(&claim.id), None);
    assert_eq!(subject.acquire(&subject.other_request(&claim)).await, FIRST);
}

/// A resolution that does not apply to the state is an error and changes nothing.
pub async fn resolution_of_wrong_state_is_rejected<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        let claim = entry_in(subject, state).await;
        let before = read(subject, &claim).await;
        for resolution in every_resolution(&claim) {
            if resolution.applies_to(state) {
                continue;
            }
            let resolved = subject
                .inspector()
                .resolve(before.entry.seen(), &resolution);
            let kind = resolved.await.err().map(|error| error.kind());
            let expected = Some(InspectErrorKind::WrongState);
            assert_eq!(kind, expected, "{state}: {resolution:?}");
        }
        let after = read(subject, &claim).await;
        assert_eq!(after.entry.seen(), before.entry.seen());
        assert_eq!(after.record, before.record);
    }
}

/// The outcome of a resolution contains the same entry as `get` returns afterwards.
pub async fn outcome_contains_resolved_entry<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        for at in 0..6 {
            let claim = entry_in(subject, state).await;
            let resolution = &every_resolution(&claim)[at];
            if !resolution.applies_to(state) {
                continue;
            }
            let outcome = apply(subject, &claim, resolution).await;
            let read = super::get(subject, &claim)
                .await
                .map(|details| details.entry);
            let identity = |entry: &crate::inspect::Entry| *entry.seen();
            assert_eq!(outcome.as_ref().map(identity), read.as_ref().map(identity));
        }
    }
}

/// 7: a resolution does not change generation and fingerprint, and the next takeover raises the generation.
pub async fn resolution_keeps_generation<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    let second = Claim {
        lease: subject.short_lease(),
        ..subject.duplicate(&claim)
    };
    let lease = subject.hold(&second).await;
    let (attention, retention) = attention_record(&claim.id, &EXAMINE);
    let completed = subject.complete(&lease, &attention, retention).await;
    assert_eq!(completed, CallOutcome::Done);
    apply(subject, &claim, &Resolution::Retry).await;
    let details = read(subject, &claim).await;
    assert_eq!(details.entry.generation(), 2);
    assert_eq!(details.fingerprint, Some(claim.fingerprint));
    let next = claim_under(subject, &claim, OrphanPolicy::Refuse);
    assert_eq!(subject.acquire(&next).await, THIRD);
}

/// 5: a record that the store cannot store is rejected, and the entry stays.
pub async fn oversized_resolution_changes_nothing<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    let record = large_record();
    let before = seen(subject, &claim).await;
    let resolution = |record: &Bytes| Resolution::Complete {
        record: record.clone(),
        retention: LONG,
    };
    let large = resolution(&record);
    let resolved = subject.inspector().resolve(&before, &large).await;
    let limit = match resolved {
        Ok(outcome) => {
            assert!(outcome.is_applied());
            assert_eq!(read(subject, &claim).await.record, Some(record));
            return;
        }
        Err(error) => match error.kind() {
            InspectErrorKind::RecordTooLarge { limit } => limit,
            kind => panic!("expected a rejection for its size, found {kind:?}"),
        },
    };
    assert!(limit < record.len(), "rejected below its limit of {limit}");
    assert_eq!(seen(subject, &claim).await, before);
    let largest = record.slice(..limit);
    apply(subject, &claim, &resolution(&largest)).await;
    assert_eq!(read(subject, &claim).await.record, Some(largest));
}

/// 8: with push, a broken lease wakes every waiter.
pub async fn broken_lease_wakes_waiters<S: Store>(subject: &Subject<S>) {
    let enter = async || entry_in(subject, State::InProgress).await;
    let break_lease = async |claim: &Claim| {
        apply(subject, claim, &Resolution::BreakLease).await;
    };
    let claim = assert_wakes_waiters(subject, enter, break_lease).await;
    assert_woken(subject, spawn_waiters(subject, &claim)).await;
}
