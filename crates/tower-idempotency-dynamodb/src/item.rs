//! What an item holds, and how it is read.

use std::collections::HashMap;

use aws_sdk_dynamodb::{primitives::Blob, types::AttributeValue};
use bytes::Bytes;
use tower_idempotency::store::{Fingerprint, KeyId};

use crate::{DynamoDbError, clock::Moment};

pub(crate) type Item = HashMap<String, AttributeValue>;

/// `status` while somebody has the right to execute, or had it and left no outcome.
pub(crate) const IN_PROGRESS: &str = "in-progress";
/// `status` once there is a record that somebody has to look at.
pub(crate) const NEEDS_ATTENTION: &str = "needs-attention";
/// `status` once there is any other record.
pub(crate) const COMPLETED: &str = "completed";

/// What a call finds under its id.
pub(crate) enum Found {
    /// Nothing, or nothing that counts any more.
    Over,
    Leased {
        token: Option<[u8; 16]>,
        fingerprint: Fingerprint,
        generation: u64,
        lease_ends: u64,
    },
    Completed {
        token: [u8; 16],
        fingerprint: Fingerprint,
        record: Bytes,
    },
}

impl Found {
    /// Takes an item apart, as it is to be seen at this moment.
    pub(crate) fn read(mut item: Item, moment: Moment) -> Result<Self, DynamoDbError> {
        if number(&item, "expires")? <= moment.over {
            return Ok(Self::Over);
        }
        let fingerprint = Fingerprint::from_bytes(bytes(&mut item, "fingerprint")?);
        match text(&item, "status")? {
            IN_PROGRESS => Ok(Self::Leased {
                token: match item.contains_key("token") {
                    true => Some(bytes(&mut item, "token")?),
                    false => None,
                },
                fingerprint,
                generation: number(&item, "generation")?,
                lease_ends: number(&item, "lease_ends")?,
            }),
            COMPLETED | NEEDS_ATTENTION => Ok(Self::Completed {
                token: bytes(&mut item, "token")?,
                fingerprint,
                record: blob(&mut item, "record")?.into(),
            }),
            _ => Err(DynamoDbError::unusable("an item of this version")),
        }
    }
}

/// The partition key of an entry.
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
    let bytes = blob(item, name)?.try_into();
    bytes.map_err(|_| DynamoDbError::unusable(&format!("{N} bytes in {name}")))
}

/// Takes the bytes out of the item: a record is not copied.
fn blob(item: &mut Item, name: &str) -> Result<Vec<u8>, DynamoDbError> {
    match item.remove(name) {
        Some(AttributeValue::B(blob)) => Ok(blob.into_inner()),
        _ => Err(DynamoDbError::unusable(&format!("bytes in {name}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = Moment {
        now: 10_000,
        over: 8_000,
    };

    fn item(status: &str, expires: u64) -> Item {
        let attributes = [
            ("status", s(status)),
            ("expires", n(expires)),
            ("fingerprint", binary([7; 32])),
            ("token", binary([1; 16])),
            ("generation", n(2)),
            ("lease_ends", n(9_000)),
            ("record", binary(*b"answer")),
        ];
        attributes
            .map(|(name, value)| (name.to_owned(), value))
            .into()
    }

    #[test]
    fn an_item_that_is_over_is_not_looked_at_any_further() {
        let mut over = item("of a later version", 8_000);
        over.remove("fingerprint");
        assert!(matches!(Found::read(over, NOW), Ok(Found::Over)));
    }

    #[test]
    fn an_item_whose_end_may_not_have_come_by_another_clock_counts() {
        let found = Found::read(item(COMPLETED, 8_001), NOW);
        assert!(matches!(found, Ok(Found::Completed { record, .. }) if record == "answer"));
    }

    #[test]
    fn what_needs_attention_has_its_outcome() {
        let found = Found::read(item(NEEDS_ATTENTION, 20_000), NOW);
        assert!(matches!(found, Ok(Found::Completed { record, .. }) if record == "answer"));
    }

    #[test]
    fn a_released_takeover_has_no_token() {
        let mut released = item(IN_PROGRESS, 20_000);
        released.remove("token");
        let found = Found::read(released, NOW);
        assert!(matches!(
            found,
            Ok(Found::Leased {
                token: None,
                generation: 2,
                ..
            })
        ));
    }

    #[test]
    fn what_cannot_be_read_is_named_and_not_shown() {
        let mut short = item(COMPLETED, 20_000);
        short.insert("token".to_owned(), binary(*b"hush"));
        for (item, what) in [
            (
                item("of a later version", 20_000),
                "an item of this version",
            ),
            (short, "16 bytes in token"),
            (Item::new(), "a number in expires"),
        ] {
            let error = Found::read(item, NOW).err().expect(what).to_string();
            assert_eq!(error, format!("expected {what}, found something else"));
        }
    }
}
