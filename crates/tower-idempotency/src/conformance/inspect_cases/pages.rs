use std::collections::HashSet;

use super::{STATES, all_pages, can_list, claims, enter, listed, own, page};
use crate::{
    conformance::{
        Subject,
        subject::{CallOutcome, LONG},
    },
    inspect::{Entry, Inspect, InspectErrorKind, PageToken, Query, State},
    store::{Claim, KeyId, Store, Ttl},
};

const ENTRIES: usize = 9;

fn ids(claims: &[Claim]) -> HashSet<KeyId> {
    claims.iter().map(|claim| claim.id).collect()
}

fn ids_of(entries: &[Entry], of: &[Claim]) -> HashSet<KeyId> {
    let found: HashSet<_> = entries.iter().map(|entry| *entry.id()).collect();
    found.intersection(&ids(of)).copied().collect()
}

/// 2: pages of one entry list every entry exactly once, if none changes.
pub async fn pages_of_one_list_each_entry_once<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        if !can_list(subject, state) {
            continue;
        }
        let claims = claims(subject, ENTRIES);
        enter(subject, &claims, state).await;
        for limit in [1, 4, 1000] {
            let query = Query::new(state).with_limit(limit);
            let found = listed(subject, query, &claims).await;
            assert_eq!(found.len(), ENTRIES, "{state}, {limit} in a page");
            assert_eq!(ids_of(&found, &claims).len(), ENTRIES);
        }
    }
}

/// Reads the first page, changes entries, and reads the other pages. Returns the entries of all pages.
async fn change_between_pages<S: Store>(
    subject: &Subject<S>,
    state: State,
    claims: &[Claim],
    change: impl AsyncFnOnce(&[Entry]),
) -> (Vec<Entry>, Vec<Entry>) {
    let query = own(subject, Query::new(state).with_limit(3), claims);
    let mut first = page(subject, &query).await;
    // A page may have few entries, or none.
    while first.entries.is_empty() && first.next.is_some() {
        first = page(subject, &query.clone().with_page(first.next)).await;
    }
    change(&first.entries).await;
    let rest = match first.next {
        Some(next) => all_pages(subject, query.with_page(Some(next))).await,
        None => Vec::new(),
    };
    (first.entries, rest)
}

/// 2: leases that are renewed between two pages move to the end of the order. Each entry is listed at least once.
pub async fn renewed_entries_are_listed<S: Store>(subject: &Subject<S>) {
    let state = State::InProgress;
    if !can_list(subject, state) {
        return;
    }
    let claims = claims(subject, ENTRIES);
    enter(subject, &claims, state).await;
    let renew = async |_: &[Entry]| {
        for claim in &claims {
            let longer = Ttl::from_millis(LONG.as_millis() * 2);
            let renewed = subject.renew(&claim.lease_ref(1), longer).await;
            assert_eq!(renewed, CallOutcome::Done);
        }
    };
    let (first, rest) = change_between_pages(subject, state, &claims, renew).await;
    let all = [first, rest].concat();
    assert_eq!(ids_of(&all, &claims), ids(&claims));
}

/// 2: if entries leave the state between two pages, all other entries are still listed.
pub async fn entries_that_leave_make_no_gap<S: Store>(subject: &Subject<S>) {
    let state = State::InProgress;
    if !can_list(subject, state) {
        return;
    }
    let claims = claims(subject, ENTRIES);
    enter(subject, &claims, state).await;
    let complete = async |first: &[Entry]| {
        for claim in &claims {
            if first.iter().any(|entry| *entry.id() == claim.id) {
                let lease = claim.lease_ref(1);
                let completed = subject.complete(&lease, &"record".into(), LONG).await;
                assert_eq!(completed, CallOutcome::Done);
            }
        }
    };
    let (first, rest) = change_between_pages(subject, state, &claims, complete).await;
    let all = [first, rest].concat();
    assert_eq!(ids_of(&all, &claims), ids(&claims));
}

/// 2: entries that are added between two pages hide no other entries.
pub async fn new_entries_hide_no_others<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        if !can_list(subject, state) {
            continue;
        }
        let claims = claims(subject, 2 * ENTRIES);
        let (old, new) = claims.split_at(ENTRIES);
        enter(subject, old, state).await;
        let add = async |_: &[Entry]| enter(subject, new, state).await;
        let (first, rest) = change_between_pages(subject, state, old, add).await;
        let all = [first, rest].concat();
        assert_eq!(ids_of(&all, old), ids(old), "{state}");
    }
}

/// 2: the last page has no token, and the text form of a token continues the listing.
pub async fn page_token_continues_as_text<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        if !can_list(subject, state) {
            continue;
        }
        let claims = claims(subject, ENTRIES);
        enter(subject, &claims, state).await;
        let mut query = own(subject, Query::new(state).with_limit(2), &claims);
        let mut found = HashSet::new();
        loop {
            let page = page(subject, &query).await;
            found.extend(ids_of(&page.entries, &claims));
            let Some(next) = page.next else { break };
            let text = next.to_string();
            assert!(text.len() <= 1024 && text.is_ascii());
            let parsed: PageToken = text.parse().expect("the text form");
            // The limit may change from page to page.
            query = query.with_page(Some(parsed)).with_limit(3);
        }
        assert_eq!(found, ids(&claims));
    }
}

/// Returns a listing of this state, and the token of its second page.
async fn second_page<S: Store>(subject: &Subject<S>, state: State) -> (Query, PageToken) {
    let claims = claims(subject, ENTRIES);
    enter(subject, &claims, state).await;
    let query = own(subject, Query::new(state).with_limit(1), &claims);
    let next = page(subject, &query).await.next;
    (query, next.expect("nine entries are more than one page"))
}

/// The token of another store or another query is rejected.
pub async fn page_token_of_other_listing_is_rejected<S: Store>(subject: &Subject<S>) {
    let listable: Vec<_> = STATES
        .into_iter()
        .filter(|it| can_list(subject, *it))
        .collect();
    for state in &listable {
        let (query, next) = second_page(subject, *state).await;
        let other_state = listable.iter().find(|other| *other != state);
        let other_filters = [
            query.clone().with_owner("another"),
            query.clone().with_operation("another"),
            query
                .clone()
                .with_older_than(std::time::Duration::from_secs(7)),
            query
                .clone()
                .with_id_prefix("0123456789".parse().expect("digits")),
        ];
        let of_state = other_state.map(|other| Query::new(*other));
        for other in other_filters.into_iter().chain(of_state) {
            assert_rejected(subject, other.with_page(Some(next.clone()))).await;
        }
        let foreign = PageToken::new("another store", &query, next.raw_position());
        assert_rejected(subject, query.with_page(Some(foreign))).await;
    }
}

async fn assert_rejected<S: Store>(subject: &Subject<S>, query: Query) {
    let error = subject.inspector().list(&query).await.err();
    let kind = error.map(|error| error.kind());
    assert_eq!(kind, Some(InspectErrorKind::InvalidPage), "{query:?}");
}

/// A token that an operator has edited is rejected, or continues at another position. It causes no other failure.
pub async fn edited_page_token_is_harmless<S: Store>(subject: &Subject<S>) {
    for state in STATES {
        if !can_list(subject, state) {
            continue;
        }
        let (query, next) = second_page(subject, state).await;
        let position = next.raw_position().to_vec();
        let mut positions = vec![
            Vec::new(),
            vec![0],
            vec![0xff; PageToken::MAX_POSITION],
            vec![b'\''; 64],
            vec![0xff; position.len()],
            vec![0; position.len()],
            [position.clone(), vec![7]].concat(),
        ];
        for at in 0..position.len() {
            let mut edited = position.clone();
            edited[at] ^= 0x80;
            positions.push(edited);
            positions.push(position[..at].to_vec());
        }
        for edited in positions {
            let token = next.with_position(&edited);
            let query = query.clone().with_page(Some(token));
            match subject.inspector().list(&query).await {
                Ok(page) => assert!(page.entries.len() <= 1),
                Err(error) => assert_eq!(error.kind(), InspectErrorKind::InvalidPage),
            }
        }
    }
}
