//! Entries for operators, from items of the table and of the index.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_sdk_dynamodb::types::AttributeValue;
use tower_idempotency::{
    inspect::{Entry, EntryDetails, Seen, State},
    store::{Fingerprint, KeyId, Token},
};

use crate::{
    clock::Moment,
    error::DynamoDbError,
    item::{COMPLETED, IN_PROGRESS, Item, NEEDS_ATTENTION, bytes, number, text},
};

/// Attributes that the index has too, from which the version of an unreadable entry is computed.
pub(super) const VERSIONED: [&str; 9] = [
    "expires",
    "generation",
    "lease_ends",
    "listed",
    "operation",
    "owner",
    "reason",
    "since",
    "token",
];

/// Returns the entry of an item, with its record, or `None` if it has expired.
pub(super) fn details(id: KeyId, mut item: Item, moment: Moment) -> Option<EntryDetails> {
    let entry = entry_from_item(id, &item, moment)?;
    let mut details = EntryDetails::new(entry);
    details.record = match item.remove("record") {
        Some(AttributeValue::B(record)) => Some(record.into_inner().into()),
        _ => None,
    };
    let fingerprint = bytes(&mut item, "fingerprint").ok();
    details.fingerprint = fingerprint.map(Fingerprint::from_bytes);
    Some(details)
}

/// Returns the entry of an item of the table, or `None` if it has expired.
pub(super) fn entry_from_item(id: KeyId, item: &Item, moment: Moment) -> Option<Entry> {
    let status = text(item, "status").unwrap_or_default().to_owned();
    entry_with_status(id, item, &status, moment)
}

/// Returns the entry of an item with this status, or `None` if it has expired. The index has no attribute `status`.
pub(super) fn entry_with_status(
    id: KeyId,
    item: &Item,
    status: &str,
    moment: Moment,
) -> Option<Entry> {
    read(id, item, status, moment).unwrap_or_else(|error| {
        let version = unreadable_version(item);
        Some(Entry::unreadable(id, version, error.to_string()))
    })
}

fn read(
    id: KeyId,
    item: &Item,
    status: &str,
    moment: Moment,
) -> Result<Option<Entry>, DynamoDbError> {
    let expires = number(item, "expires")?;
    if expires <= moment.passed {
        return Ok(None);
    }
    let (state, since, lease_ends) = match status {
        IN_PROGRESS => {
            let lease_ends = number(item, "lease_ends")?;
            if lease_ends > moment.passed {
                (State::InProgress, number(item, "since")?, Some(lease_ends))
            } else {
                (State::Orphaned, lease_ends, Some(lease_ends))
            }
        }
        NEEDS_ATTENTION => (State::NeedsAttention, number(item, "since")?, None),
        COMPLETED => {
            // The index has no attribute `completed`. A listed record has the same time in `lease_ends`.
            let completed = number(item, "completed").or_else(|_| number(item, "lease_ends"))?;
            (record_state(item), completed, None)
        }
        _ => return Err(DynamoDbError::unusable("an item of this version")),
    };
    let token = token(item)?;
    let version = Seen::version_of(
        token.as_ref(),
        lease_ends.filter(|_| state == State::Orphaned),
    );
    let mut entry = Entry::new(Seen::new(id, state, number(item, "generation")?, version));
    // An item that was stored after its entry was lost has no details.
    entry.owner = text(item, "owner").unwrap_or_default().into();
    entry.operation = text(item, "operation").unwrap_or_default().into();
    entry.since = time(since);
    entry.age = moment.since(since);
    entry.lease_expires = lease_ends.map(time);
    entry.expires = Some(time(expires));
    entry.retry_allowed = state == State::Orphaned && token.is_some_and(|it| it.allows_retry());
    // The index has no records.
    if let Some(AttributeValue::B(record)) = item.get("record") {
        entry.record_bytes = Some(record.as_ref().len() as u64);
    }
    if state == State::NeedsAttention {
        entry.attention_code = text(item, "reason").ok().map(Box::from);
    }
    if state == State::Unreadable {
        entry.problem = Some("the record is of another version, or damaged".into());
    }
    Ok(Some(entry))
}

/// Returns the state of a completed item of the table, by its record, or of the index, by the beginning of the record.
fn record_state(item: &Item) -> State {
    match item.get("record").or_else(|| item.get("reason")) {
        Some(AttributeValue::B(record)) => State::of_record(record.as_ref()),
        _ => State::Unreadable,
    }
}

fn token(item: &Item) -> Result<Option<Token>, DynamoDbError> {
    match item.get("token") {
        None => Ok(None),
        Some(AttributeValue::B(token)) => match token.as_ref().try_into() {
            Ok(bytes) => Ok(Some(Token::from_bytes(bytes))),
            Err(_) => Err(DynamoDbError::unusable("16 bytes in token")),
        },
        Some(_) => Err(DynamoDbError::unusable("16 bytes in token")),
    }
}

/// Returns a version for an item that cannot be read. It changes with the versioned attributes.
fn unreadable_version(item: &Item) -> u64 {
    let values = VERSIONED.map(|name| match item.get(name) {
        Some(AttributeValue::B(blob)) => blob.as_ref().to_vec(),
        Some(AttributeValue::S(text) | AttributeValue::N(text)) => text.clone().into_bytes(),
        Some(_) => b"of another type".to_vec(),
        None => Vec::new(),
    });
    let parts = values.each_ref().map(Vec::as_slice);
    Seen::version_of_parts(&parts)
}

fn time(millis: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis)
}
