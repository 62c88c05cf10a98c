//! Assertions about replies to claims.

use std::time::Duration;

use bytes::Bytes;

use crate::{
    conformance::Subject,
    store::{Acquired, Claim, Store},
};

/// Asserts that `claim` completed the entry with this record. Returns the time until its expiry.
pub(super) fn assert_completed(claim: &Claim, expected: &Bytes, found: Acquired) -> Duration {
    match found {
        Acquired::Completed {
            fingerprint,
            record,
            expires_in,
            token,
        } => {
            assert_eq!(fingerprint, claim.fingerprint);
            assert!(record == *expected, "the record came back changed");
            assert!(expires_in > Duration::ZERO);
            assert!(token == Some(claim.token), "another token: {token:?}");
            expires_in
        }
        other => panic!("expected a record, found {other:?}"),
    }
}

/// Asserts that a duplicate of the claim finds the key in progress.
pub(super) async fn assert_in_progress<S: Store>(subject: &Subject<S>, claim: &Claim) {
    match subject.acquire(&subject.duplicate(claim)).await {
        Acquired::InProgress { .. } => {}
        other => panic!("expected the key in progress, found {other:?}"),
    }
}
