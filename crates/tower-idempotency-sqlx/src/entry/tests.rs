//! The text of each damaged row. None quotes the row.

use tower_idempotency::store::{Claim, Fingerprint, KeyId};

use super::AcquireRow;

fn row(fingerprint: &[u8], record: Option<&[u8]>, token: &[u8]) -> AcquireRow {
    AcquireRow {
        is_completed: true,
        has_own_token: false,
        is_expired: false,
        fingerprint: fingerprint.to_vec(),
        generation: 1,
        lease_left: 0,
        record: record.map(<[u8]>::to_vec),
        left: 1000,
        token: Some(token.to_vec()),
    }
}

#[test]
fn damaged_rows_have_these_texts() {
    let claim = Claim::new(KeyId::from_bytes([1; 32]), Fingerprint::from_bytes([2; 32])).unwrap();
    let (fingerprint, token, record) = ([2; 32], [3; 16], &b"record"[..]);
    for (row, expected) in [
        (row(b"short", Some(record), &token), "no fingerprint"),
        (row(&fingerprint, None, &token), "no record"),
        (row(&fingerprint, Some(record), b"short"), "no token"),
    ] {
        let error = row.into_acquired(&claim).unwrap_err();
        let expected = format!("the database returned {expected}");
        assert_eq!(error.to_string(), expected);
    }
}
