//! The attributes of an item, and how they are read and written.

use std::collections::HashMap;

use aws_sdk_dynamodb::{primitives::Blob, types::AttributeValue};
use bytes::Bytes;
use tower_idempotency::store::{Fingerprint, KeyId};

use crate::{clock::Moment, error::DynamoDbError};

pub(crate) type Item = HashMap<String, AttributeValue>;

/// `status` of an entry that is leased or orphaned.
pub(crate) const IN_PROGRESS: &str = "in-progress";
/// `status` of an entry whose record needs an operator's attention.
pub(crate) const NEEDS_ATTENTION: &str = "needs-attention";
/// `status` of an entry with any other record.
pub(crate) const COMPLETED: &str = "completed";

/// State of an entry, as a call sees it.
pub(crate) enum EntryState {
    Expired,
    /// Leased, or orphaned if `lease_ends` has passed.
    Leased {
        /// `None` after a takeover was released.
        token: Option<[u8; 16]>,
        fingerprint: Fingerprint,
        generation: u64,
        lease_ends: u64,
    },
    /// Completed, also if the record needs attention.
    Completed {
        /// `None` if another program has stored the item.
        token: Option<[u8; 16]>,
        fingerprint: Fingerprint,
        expires: u64,
        record: Bytes,
    },
}

impl EntryState {
    /// Reads the state of an item at this moment.
    pub(crate) fn read(mut item: Item, moment: Moment) -> Result<Self, DynamoDbError> {
        let expires = number(&item, "expires")?;
        if expires <= moment.passed {
            return Ok(Self::Expired);
        }
        let fingerprint = Fingerprint::from_bytes(bytes(&mut item, "fingerprint")?);
        match text(&item, "status")? {
            IN_PROGRESS => Ok(Self::Leased {
                token: take_token(&mut item)?,
                fingerprint,
                generation: number(&item, "generation")?,
                lease_ends: number(&item, "lease_ends")?,
            }),
            COMPLETED | NEEDS_ATTENTION => Ok(Self::Completed {
                token: take_token(&mut item)?,
                fingerprint,
                expires,
                record: take_blob(&mut item, "record")?.into(),
            }),
            _ => Err(DynamoDbError::unusable("an item of this version")),
        }
    }
}

/// Returns the partition key of an entry.
pub(crate) fn key(id: &KeyId) -> AttributeValue {
    binary(id.as_bytes().as_slice())
}

pub(crate) fn n(number: u64) -> AttributeValue {
    AttributeValue::N(number.to_string())
}

pub(crate) fn s(text: impl Into<String>) -> AttributeValue {
    AttributeValue::S(text.into())
}

pub(crate) fn binary(bytes: impl Into<Vec<u8>>) -> AttributeValue {
    AttributeValue::B(Blob::new(bytes))
}

pub(crate) fn number(item: &Item, name: &str) -> Result<u64, DynamoDbError> {
    match item.get(name) {
        Some(AttributeValue::N(digits)) => digits.parse().ok(),
        _ => None,
    }
    .ok_or_else(|| DynamoDbError::unusable(&format!("a number in {name}")))
}

pub(crate) fn text<'a>(item: &'a Item, name: &str) -> Result<&'a str, DynamoDbError> {
    match item.get(name) {
        Some(AttributeValue::S(text)) => Ok(text),
        _ => Err(DynamoDbError::unusable(&format!("a text in {name}"))),
    }
}

pub(crate) fn bytes<const N: usize>(item: &mut Item, name: &str) -> Result<[u8; N], DynamoDbError> {
    let bytes = take_blob(item, name)?.try_into();
    bytes.map_err(|_| DynamoDbError::unusable(&format!("{N} bytes in {name}")))
}

fn take_token(item: &mut Item) -> Result<Option<[u8; 16]>, DynamoDbError> {
    match item.contains_key("token") {
        true => bytes(item, "token").map(Some),
        false => Ok(None),
    }
}

/// Removes the bytes from the item, so that a record is not copied.
fn take_blob(item: &mut Item, name: &str) -> Result<Vec<u8>, DynamoDbError> {
    match item.remove(name) {
        Some(AttributeValue::B(blob)) => Ok(blob.into_inner()),
        _ => Err(DynamoDbError::unusable(&format!("bytes in {name}"))),
    }
}

/// Returns the value of `listed`, the partition key of the index.
pub(crate) fn index_partition(status: &str, shard: u16) -> String {
    format!("{status}#{shard}")
}

/// Returns the value of `reason` of a completed entry in the index: the first bytes of its record. They show if a version can
/// read the record.
pub(crate) fn beginning(record: &[u8]) -> AttributeValue {
    binary(&record[..record.len().min(BEGINNING)])
}

/// Name of the index.
pub(crate) const INDEX: &str = "listed";

/// Length of the version, the kind and the checksum of a record.
const BEGINNING: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = Moment {
        now: 10_000,
        passed: 8_000,
        skew: 2_000,
    };

    fn item(status: &str, expires: u64) -> Item {
        let attributes = [
            ("status", s(status)),
            ("expires", n(expires)),
            ("fingerprint", binary([7; 32])),
            ("token", binary([1; 16])),
            ("generation", n(2)),
            ("lease_ends", n(9_000)),
            ("record", binary(*b"record")),
        ];
        attributes
            .map(|(name, value)| (name.to_owned(), value))
            .into()
    }

    #[test]
    fn expired_item_is_not_parsed_further() {
        let mut expired = item("of a later version", 8_000);
        expired.remove("fingerprint");
        assert!(matches!(
            EntryState::read(expired, NOW),
            Ok(EntryState::Expired)
        ));
    }

    #[test]
    fn item_within_skew_allowance_has_not_expired() {
        let state = EntryState::read(item(COMPLETED, 8_001), NOW);
        assert!(matches!(state, Ok(EntryState::Completed { record, .. }) if record == "record"));
    }

    #[test]
    fn item_that_needs_attention_is_completed() {
        let state = EntryState::read(item(NEEDS_ATTENTION, 20_000), NOW);
        assert!(matches!(state, Ok(EntryState::Completed { record, .. }) if record == "record"));
    }

    #[test]
    fn released_takeover_has_no_token() {
        let mut released = item(IN_PROGRESS, 20_000);
        released.remove("token");
        let state = EntryState::read(released, NOW);
        assert!(matches!(
            state,
            Ok(EntryState::Leased {
                token: None,
                generation: 2,
                ..
            })
        ));
    }

    // F-180
    #[test]
    fn read_error_names_expected_value_and_hides_data() {
        let mut short = item(COMPLETED, 20_000);
        short.insert("token".to_owned(), binary(*b"hush"));
        let without = |name: &str| {
            let mut item = item(COMPLETED, 20_000);
            item.remove(name);
            item
        };
        for (item, expected) in [
            (without("fingerprint"), "bytes in fingerprint"),
            (without("status"), "a text in status"),
            (without("record"), "bytes in record"),
            (
                item("of a later version", 20_000),
                "an item of this version",
            ),
            (short, "16 bytes in token"),
            (Item::new(), "a number in expires"),
        ] {
            let error = EntryState::read(item, NOW)
                .err()
                .expect(expected)
                .to_string();
            assert_eq!(error, format!("expected {expected}, found something else"));
        }
    }
}
