use super::{STATES, apply, can_list, entry_in, find, result_record};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG},
    },
    inspect::{Resolution, State},
    store::Store,
};

/// 2: an entry whose state changes is in the listing of the new state, and no longer in that of the old one. Renewals and
/// takeovers change the state too.
pub async fn moved_entry_is_listed_in_new_state_alone<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    let assert_listed_as = async |expected: Option<State>| {
        for listing in STATES {
            if can_list(subject, listing) {
                let found = find(subject, listing, &claim).await;
                let found = found.map(|entry| entry.state());
                let expected = expected.filter(|state| *state == listing);
                assert_eq!(found, expected, "{listing}");
            }
        }
    };
    let lease = claim.lease_ref(1);
    assert_eq!(subject.renew(&lease, LONG).await, CallOutcome::Done);
    assert_listed_as(Some(State::InProgress)).await;
    let renewed = subject.renew(&lease, subject.short_lease()).await;
    assert_eq!(renewed, CallOutcome::Done);
    subject.outlive_short_lease().await;
    assert_listed_as(Some(State::Orphaned)).await;
    let lease = subject.hold(&subject.duplicate(&claim)).await;
    assert_listed_as(Some(State::InProgress)).await;
    let record = result_record(&claim.id, "paid");
    let completed = subject.complete(&lease, &record, LONG).await;
    assert_eq!(completed, CallOutcome::Done);
    assert_listed_as(Some(State::Completed)).await;
    apply(subject, &claim, &Resolution::DeleteRecord).await;
    assert_listed_as(None).await;
}
