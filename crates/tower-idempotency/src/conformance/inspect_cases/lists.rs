use std::time::Duration;

use super::{
    STATES, apply, can_list, claim, claims, enter, entry_in, find, listed, own, page, purge, read,
    rounded_down, seen,
};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG},
    },
    inspect::{Inspect, InspectErrorKind, Query, Resolution, State},
    store::{Acquired, Claim, Store},
};

/// 1, 2: an entry is in the listing of its state, and in no other.
pub async fn entry_is_listed_in_its_state_alone<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        let claim = entry_in(subject, state).await;
        for listing in STATES {
            if !can_list(subject, listing) {
                continue;
            }
            let found = find(subject, listing, &claim).await;
            let expected = (listing == state).then_some(state);
            assert_eq!(found.map(|entry| entry.state()), expected, "{listing}");
        }
    }
}

/// 1: a listing that the store does not support is an error, and not an empty page.
pub async fn listing_without_index_is_rejected<S: Store>(subject: &Subject<S>) {
    for &state in State::ALL {
        let listed = subject.inspector().list(&Query::new(state)).await;
        if can_list(subject, state) {
            assert!(listed.is_ok(), "{state}");
        } else {
            let error = listed.err().map(|error| error.kind());
            assert_eq!(error, Some(InspectErrorKind::Unsupported), "{state}");
        }
    }
    assert!(!can_list(subject, State::Unreadable));
}

/// 2: the listing and `get` report the same entry.
pub async fn list_and_get_agree<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        if !can_list(subject, state) {
            continue;
        }
        let claim = entry_in(subject, state).await;
        let listed = find(subject, state, &claim).await.expect("it is listed");
        let read = read(subject, &claim).await.entry;
        assert_eq!(listed.seen(), read.seen());
        assert_eq!(listed.owner, read.owner);
        assert_eq!(listed.operation, read.operation);
        assert_eq!(listed.attention_code, read.attention_code);
        assert_eq!(listed.lease_expires.is_some(), read.lease_expires.is_some());
        assert_eq!(listed.retry_allowed, read.retry_allowed);
    }
}

/// 2: a released takeover is listed as an orphan.
pub async fn released_takeover_is_listed_as_orphan<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::Orphaned).await;
    let next = subject.duplicate(&claim);
    let lease = subject.hold(&next).await;
    if can_list(subject, State::InProgress) {
        let found = find(subject, State::InProgress, &claim).await;
        assert_eq!(found.map(|entry| entry.generation()), Some(2));
    }
    subject.release(&lease).await;
    if can_list(subject, State::Orphaned) {
        let found = find(subject, State::Orphaned, &claim).await;
        assert_eq!(found.map(|entry| entry.generation()), Some(2));
    }
}

/// 4: no listing contains a key that was released or has expired.
pub async fn absent_entries_are_in_no_listing<S: Store>(subject: &Subject<S>) {
    let released = claim(subject);
    let lease = subject.hold(&released).await;
    subject.release(&lease).await;
    let expired = claim(subject);
    let lease = subject.hold(&expired).await;
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
    for claim in [released, expired, orphan] {
        for state in STATES {
            if can_list(subject, state) {
                assert_eq!(find(subject, state, &claim).await, None, "{state}");
            }
        }
    }
}

/// 2, 4: an overdue entry has been in progress for longer than the query sets. A younger one is not listed.
pub async fn overdue_listing_omits_young_entries<S: Store>(subject: &Subject<S>) {
    if !can_list(subject, State::InProgress) {
        return;
    }
    loop {
        let [old, young] = [claim(subject), claim(subject)];
        subject.hold(&old).await;
        subject.sleep(12).await;
        let begin = subject.elapsed();
        subject.hold(&young).await;
        let overdue = Query::overdue(subject.units(6).as_duration());
        let is_overdue = async |claim: &Claim| {
            let claims = std::slice::from_ref(claim);
            !listed(subject, overdue.clone(), claims).await.is_empty()
        };
        assert!(is_overdue(&old).await);
        let is_young_overdue = is_overdue(&young).await;
        if subject.is_late(begin, 6) {
            subject.retry_slower();
            continue;
        }
        assert!(!is_young_overdue);
        return;
    }
}

/// 2, 4: the age of an orphan counts from the expiry of its lease, and can be a filter too.
pub async fn age_filter_applies_to_every_state<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        if !can_list(subject, state) {
            continue;
        }
        let claim = entry_in(subject, state).await;
        subject.sleep(3).await;
        let claims = std::slice::from_ref(&claim);
        let old = Query::new(state).with_older_than(subject.units(2).as_duration());
        assert_eq!(listed(subject, old, claims).await.len(), 1, "{state}");
        let ancient = Query::new(state).with_older_than(Duration::from_secs(1_000_000));
        assert!(listed(subject, ancient, claims).await.is_empty(), "{state}");
    }
}

/// 2: the filter of operations selects by prefix.
pub async fn operation_filter_selects_by_prefix<S: Store>(subject: &Subject<S>) {
    let state = State::InProgress;
    if !subject.inspector().abilities().has_details() || !can_list(subject, state) {
        return;
    }
    let claim = entry_in(subject, state).await;
    let is_listed = async |operation: &str| {
        let query = Query::new(state).with_operation(operation);
        let entries = super::all_pages(subject, query).await;
        entries.iter().any(|entry| *entry.id() == claim.id)
    };
    let operation = &*claim.operation;
    assert!(is_listed(operation).await);
    assert!(is_listed(&operation[..operation.len() - 8]).await);
    assert!(!is_listed(&format!("{operation}x")).await);
    assert!(!is_listed(&operation[1..]).await);
    // No character of a filter is a wildcard.
    assert!(!is_listed("POST /%").await);
    assert!(!is_listed("POST /_").await);
}

/// 2: the filter of owners selects by the whole name.
pub async fn owner_filter_selects_whole_name<S: Store>(subject: &Subject<S>) {
    let state = State::InProgress;
    if !subject.inspector().abilities().has_details() || !can_list(subject, state) {
        return;
    }
    let claim = entry_in(subject, state).await;
    let claims = std::slice::from_ref(&claim);
    for (owner, count) in [("conformance", 1), ("conform", 0), ("conformance-2", 0)] {
        let query = Query::new(state).with_owner(owner);
        assert_eq!(listed(subject, query, claims).await.len(), count, "{owner}");
    }
}

/// 2: the first eight digits of an ID, which events and problem bodies show, find the entry.
pub async fn id_prefix_finds_entry<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        if !can_list(subject, state) {
            continue;
        }
        let claim = entry_in(subject, state).await;
        let claims = std::slice::from_ref(&claim);
        let digits = claim.id.to_hex();
        for length in [8, 9, 64] {
            let prefix = digits[..length].parse().expect("digits");
            let query = Query::new(state).with_id_prefix(prefix);
            assert_eq!(listed(subject, query, claims).await.len(), 1, "{state}");
        }
        let mut id = *claim.id.as_bytes();
        id[3] ^= 1;
        let other = crate::store::KeyId::from_bytes(id).to_hex();
        let query = Query::new(state).with_id_prefix(other[..8].parse().expect("digits"));
        assert!(listed(subject, query, claims).await.is_empty(), "{state}");
    }
}

/// 7: an entry reports its owner, operation and generation, also after a takeover and a completion. The stored generation
/// stays, even if the holder passes another one.
pub async fn details_outlive_takeover_and_completion<S: Store>(subject: &Subject<S>) {
    let first = entry_in(subject, State::Orphaned).await;
    let second = Claim {
        owner: "another process",
        ..subject.duplicate(&first)
    };
    let check = async |state, owner: &str, generation| {
        let entry = read(subject, &first).await.entry;
        assert_eq!((entry.state(), entry.generation()), (state, generation));
        if subject.inspector().abilities().has_details() {
            assert_eq!((&*entry.owner, &entry.operation), (owner, &first.operation));
        } else {
            assert_eq!((&*entry.owner, &*entry.operation), ("", ""));
        }
    };
    check(State::Orphaned, "conformance", 1).await;
    subject.hold(&second).await;
    check(State::InProgress, "another process", 2).await;
    let record = super::result_record(&first.id, "paid");
    let completed = subject.complete(&second.lease_ref(1), &record, LONG).await;
    assert_eq!(completed, CallOutcome::Done);
    check(State::Completed, "another process", 2).await;
}

/// 7: a claim without an operation keeps that of the orphan it takes over, and not that of an expired one.
pub async fn takeover_keeps_operation_if_it_has_none<S: Store>(subject: &Subject<S>) {
    if !subject.inspector().abilities().has_details() {
        return;
    }
    let unnamed = |claim: &Claim| Claim {
        operation: Box::default(),
        ..subject.duplicate(claim)
    };
    let operation_of = async |claim: &Claim| read(subject, claim).await.entry.operation;
    let orphan = entry_in(subject, State::Orphaned).await;
    let lease = subject.hold(&unnamed(&orphan)).await;
    assert_eq!(operation_of(&orphan).await, orphan.operation);
    subject.release(&lease).await;
    assert_eq!(operation_of(&orphan).await, orphan.operation);
    let expiring = Claim {
        lease: subject.units(1),
        orphan_retention: subject.units(1),
        ..claim(subject)
    };
    subject.hold(&expiring).await;
    subject.outlive_short_lease().await;
    subject.hold(&unnamed(&expiring)).await;
    assert_eq!(&*operation_of(&expiring).await, "");
}

/// 7: an entry that needs attention has its details, and so has an entry after each resolution.
pub async fn details_outlive_resolutions<S: Store>(subject: &Subject<S>) {
    let claim = entry_in(subject, State::NeedsAttention).await;
    for resolution in [
        Resolution::NeedsAttention(super::EXAMINE),
        Resolution::Retry,
        super::completion(&claim, "resolved"),
    ] {
        let entry = apply(subject, &claim, &resolution).await;
        let entry = entry.expect("the entry stays");
        assert_eq!(entry.generation(), 1);
        if subject.inspector().abilities().has_details() {
            assert_eq!(&*entry.owner, "conformance");
            assert_eq!(entry.operation, claim.operation);
        }
    }
}

/// 4: the age of an entry counts from the beginning of its state. A takeover does not restart it, and neither does a renewal
/// or a repeated acquire: a handler that hangs still renews its lease.
pub async fn age_counts_from_beginning_of_state<S: Store>(subject: &Subject<S>) {
    let held = entry_in(subject, State::InProgress).await;
    let orphan = entry_in(subject, State::Orphaned).await;
    let entry = read(subject, &orphan).await.entry;
    assert_eq!(Some(entry.since), entry.lease_expires);
    // The lease lasted four units, of the seven that have passed.
    let since_expiry = rounded_down(subject.units(3).as_duration());
    assert!(entry.age >= since_expiry, "{entry:?}");
    subject.hold(&subject.duplicate(&orphan)).await;
    let entry = read(subject, &orphan).await.entry;
    let since_first_lease = rounded_down(subject.units(7).as_duration());
    assert!(entry.age >= since_first_lease, "{entry:?}");
    let renewed = subject.renew(&held.lease_ref(1), LONG).await;
    assert_eq!(renewed, CallOutcome::Done);
    assert_eq!(subject.acquire(&held).await, super::FIRST);
    let renewed_entry = read(subject, &held).await.entry;
    assert!(renewed_entry.age >= since_first_lease, "{renewed_entry:?}");

    for state in [State::NeedsAttention, State::Completed] {
        let claim = entry_in(subject, state).await;
        subject.sleep(3).await;
        let entry = read(subject, &claim).await.entry;
        assert!(entry.age >= rounded_down(subject.units(3).as_duration()));
        assert_eq!(entry.lease_expires, None);
    }
}

/// 4: an entry reports the expiry of its lease and its own expiry.
pub async fn entry_reports_expiry<S: Store>(subject: &Subject<S>) {
    let near = |one: Duration, other: Duration| one.abs_diff(other) < Duration::from_secs(10);
    for state in STATES {
        let claim = entry_in(subject, state).await;
        let entry = read(subject, &claim).await.entry;
        let (begin, expected) = match state {
            State::NeedsAttention => (entry.since, crate::Ttl::MAX),
            State::Completed => (entry.since, LONG),
            _ => {
                let expires = entry.lease_expires.expect("it has a lease");
                (expires, claim.orphan_retention)
            }
        };
        let expires = entry.expires.expect("the entry is readable");
        let stored = expires.duration_since(begin).expect("later");
        assert!(near(stored, expected.as_duration()), "{state}: {stored:?}");
        if state == State::InProgress {
            let lease = entry.lease_expires.expect("it has a lease");
            let lease = lease.duration_since(entry.since).expect("later");
            assert!(near(lease, LONG.as_duration()), "{lease:?}");
        }
    }
}

/// 3: a record of another format is listed as unreadable with the completed entries, and can be read and deleted.
pub async fn unreadable_record_is_listed_and_deleted<S: Store>(subject: &Subject<S>) {
    let records: [&[u8]; 5] = [
        b"of another format",
        b"",
        &[2, 0, 0, 0, 0, 0, 0x80],
        &[1, 2, 0, 0, 0, 0, 200, b'a'],
        &[1, 9, 0, 0, 0, 0],
    ];
    for record in records {
        let claim = claim(subject);
        let lease = subject.hold(&claim).await;
        let completed = subject
            .complete(&lease, &record.to_vec().into(), LONG)
            .await;
        assert_eq!(completed, CallOutcome::Done);
        let details = read(subject, &claim).await;
        assert_eq!(details.entry.state(), State::Unreadable, "{record:?}");
        assert!(details.entry.problem.is_some());
        assert_eq!(details.record.as_deref(), Some(record));
        if can_list(subject, State::Completed) {
            let found = find(subject, State::Completed, &claim).await;
            assert_eq!(found.expect("it is listed").seen(), details.entry.seen());
        }
        if can_list(subject, State::NeedsAttention) && record.get(1) != Some(&2) {
            let found = find(subject, State::NeedsAttention, &claim).await;
            assert_eq!(found, None);
        }
        assert_eq!(
            apply(subject, &claim, &Resolution::DeleteRecord).await,
            None
        );
        let next = subject.acquire(&subject.duplicate(&claim)).await;
        assert_eq!(next, super::FIRST);
    }
}

/// 2: the summary counts each state that the store lists, up to its limit. On a shared server, a small limit may count fewer
/// entries than there are.
pub async fn summary_counts_up_to_limit<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        enter(subject, &claims(subject, 3), state).await;
    }
    let inspector = subject.inspector();
    let few = inspector.summary(2).await.expect("the store replies");
    let all = inspector
        .summary(1_000_000)
        .await
        .expect("the store replies");
    for state in STATES {
        if !can_list(subject, state) {
            assert_eq!((few.count(state), all.count(state)), (None, None));
            continue;
        }
        let (few, all) = (
            few.count(state).expect("few"),
            all.count(state).expect("all"),
        );
        assert!(few.value <= 2 && !few.is_exact, "{state}: {few:?}");
        assert!(all.value >= 3, "{state}: {all:?}");
    }
    assert_eq!(all.count(State::Unreadable), None);
}

/// 4: a purge deletes expired entries, at most the given number, and no other entries. Fails if another program, such as a
/// background purger, deletes all expired entries first.
pub async fn purge_deletes_expired_entries_alone<S: Store>(subject: &Subject<S>) {
    // Another case on the same store may purge the entries of a trial first.
    const TRIALS: u32 = 8;
    let mut live = Vec::new();
    for state in STATES {
        live.push((entry_in(subject, state).await, state));
    }
    let can_purge = subject.inspector().abilities().can_purge();
    let mut expired: Vec<Claim> = Vec::new();
    let mut purged = 0;
    for _ in 0..TRIALS {
        expired.extend(expired_entries(subject, 5).await);
        purged += purge_all(subject).await;
        if purged > 0 || !can_purge {
            break;
        }
    }
    assert_eq!(purged > 0, can_purge, "{purged} entries were purged");
    for (claim, state) in live {
        super::assert_state(subject, &claim, Some(state)).await;
    }
    for claim in &expired {
        super::assert_state(subject, claim, None).await;
        let found = subject.acquire(&subject.duplicate(claim)).await;
        assert!(matches!(found, Acquired::Granted { generation: 1, .. }));
    }
}

/// Returns the claims of entries that have expired.
pub(super) async fn expired_entries<S: Store>(subject: &Subject<S>, count: usize) -> Vec<Claim> {
    let expired = claims(subject, count);
    for claim in &expired {
        let lease = subject.hold(claim).await;
        let retention = subject.units(1);
        let completed = subject.complete(&lease, &"record".into(), retention).await;
        assert_eq!(completed, CallOutcome::Done);
    }
    subject.outlive_short_lease().await;
    expired
}

/// Purges until no more expired entries are left. Returns the number of deleted entries.
async fn purge_all<S: Store>(subject: &Subject<S>) -> u64 {
    assert_eq!(purge(subject, 0).await, 0);
    let mut purged = 0;
    loop {
        let deleted = purge(subject, 2).await;
        assert!(deleted <= 2, "{deleted} of at most 2");
        purged += deleted;
        if deleted < 2 {
            return purged;
        }
    }
}

/// 2: a page of a listing identifies each entry, so that an operator can resolve it.
pub async fn listed_entry_can_be_resolved<S: Store>(subject: &Subject<S>) {
    for (state, resolution) in [
        (State::InProgress, Resolution::BreakLease),
        (State::Orphaned, Resolution::Free),
        (State::NeedsAttention, Resolution::Free),
        (State::Completed, Resolution::DeleteRecord),
    ] {
        if !can_list(subject, state) {
            continue;
        }
        let claim = entry_in(subject, state).await;
        let query = own(subject, Query::new(state), std::slice::from_ref(&claim));
        let first = page(subject, &query.with_id_prefix(claim.id.into())).await;
        let entry = match first.entries.first() {
            Some(entry) => entry.clone(),
            None => find(subject, state, &claim).await.expect("it is listed"),
        };
        // A form field or an argument contains the text form.
        let text = entry.seen().to_string();
        let parsed = text.parse().expect("the text form");
        assert_eq!(parsed, seen(subject, &claim).await);
        assert!(
            super::resolve(subject, &parsed, &resolution)
                .await
                .is_applied()
        );
    }
}
