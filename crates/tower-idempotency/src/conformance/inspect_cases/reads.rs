use super::{STATES, assert_state, attention_record, claim, entry_in, get, read, result_record};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG},
    },
    inspect::State,
    record::NeedsAttention,
    store::{Claim, Store},
};

/// `get` returns the fingerprint, and the record byte by byte.
pub async fn get_returns_record_and_fingerprint<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        let claim = entry_in(subject, state).await;
        let details = read(subject, &claim).await;
        assert_eq!(*details.entry.id(), claim.id);
        assert_eq!(details.entry.state(), state);
        assert_eq!(details.fingerprint, Some(claim.fingerprint));
        let expected = match state {
            State::NeedsAttention => Some(attention_record(&claim.id, &super::REFUND_FAILED).0),
            State::Completed => Some(result_record(&claim.id, "paid")),
            _ => None,
        };
        assert_eq!(details.record, expected);
        let bytes = expected.map(|record| record.len() as u64);
        assert_eq!(details.entry.record_bytes, bytes);
        assert!(!details.has_checkpoint);
    }
}

/// 4: `get` returns `None` for a key that was never used, was released, or has expired.
pub async fn get_of_absent_entry_is_none<S: Store>(subject: &Subject<S>) {
    assert_eq!(get(subject, &claim(subject)).await, None);
    let released = claim(subject);
    let lease = subject.hold(&released).await;
    subject.release(&lease).await;
    assert_eq!(get(subject, &released).await, None);

    let record = claim(subject);
    let lease = subject.hold(&record).await;
    let retention = subject.units(1);
    let completed = subject.complete(&lease, &"record".into(), retention).await;
    assert_eq!(completed, CallOutcome::Done);
    let orphan = Claim {
        lease: subject.units(1),
        orphan_retention: subject.units(1),
        ..claim(subject)
    };
    subject.hold(&orphan).await;
    subject.outlive_short_lease().await;
    for claim in [record, orphan] {
        assert_eq!(get(subject, &claim).await, None);
    }
}

/// An entry that needs attention reports its code. Only the record contains the reason.
pub async fn attention_reports_code_and_reason<S: Store>(subject: &Subject<S>) {
    let claim = claim(subject);
    let lease = subject.hold(&claim).await;
    let attention = super::REFUND_FAILED.with_reason("refund re_7");
    let (record, retention) = attention_record(&claim.id, &attention);
    let completed = subject.complete(&lease, &record, retention).await;
    assert_eq!(completed, CallOutcome::Done);
    let details = read(subject, &claim).await;
    assert_eq!(
        details.entry.attention_code.as_deref(),
        Some("refund-failed")
    );
    assert!(!format!("{details:?}").contains("re_7"));
    let record = details.record.expect("it has a record");
    let found = NeedsAttention::in_record(&record).expect("it needs attention");
    assert_eq!(found.reason(), "refund re_7");
    if super::can_list(subject, State::NeedsAttention) {
        let listed = super::find(subject, State::NeedsAttention, &claim).await;
        let code = listed.and_then(|entry| entry.attention_code);
        assert_eq!(code.as_deref(), Some("refund-failed"));
    }
}

/// 4: the state follows the store's clock: a lease that expires leaves an orphan, and a renewal revives it.
pub async fn state_follows_lease_expiry<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    assert_state(subject, &claim, Some(State::Orphaned)).await;
    let renewed = subject.renew(&claim.lease_ref(1), LONG).await;
    assert_eq!(renewed, CallOutcome::Done);
    assert_state(subject, &claim, Some(State::InProgress)).await;
}
