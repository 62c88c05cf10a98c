//! Rows, as operators see them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tower_idempotency::{
    NeedsAttention,
    inspect::{Entry, EntryDetails, Seen, State},
    store::{Fingerprint, KeyId, Token},
};

use crate::SqlError;

/// A row with its record, or with the beginning of it. Times are milliseconds since 1970.
pub(crate) struct EntryRow {
    pub(crate) id: Vec<u8>,
    pub(crate) token: Option<Vec<u8>>,
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) generation: i64,
    pub(crate) lease_ends: i64,
    pub(crate) expires: i64,
    pub(crate) created: i64,
    pub(crate) completed: Option<i64>,
    pub(crate) owner: String,
    pub(crate) operation: String,
    pub(crate) has_checkpoint: bool,
    pub(crate) record: Option<Vec<u8>>,
    /// Number of bytes of the whole record.
    pub(crate) record_len: Option<i64>,
    /// Time of the read, by the store's clock.
    pub(crate) now: i64,
}

impl EntryRow {
    /// Returns the entry, or [`None`] if it has expired.
    pub(super) fn entry(&self) -> Result<Option<Entry>, SqlError> {
        let id = self.key_id()?;
        if self.expires <= self.now {
            return Ok(None);
        }
        let (Ok(token), Ok(_)) = (self.token(), self.fingerprint()) else {
            let problem = "its token or its fingerprint is damaged";
            return Ok(Some(Entry::unreadable(id, self.contents(), problem)));
        };
        let (state, since) = match self.completed {
            Some(completed) => (self.record_state(), completed),
            None if self.lease_ends > self.now => (State::InProgress, self.created),
            None => (State::Orphaned, self.lease_ends),
        };
        let lease_ends = (state == State::Orphaned).then_some(self.lease_ends.unsigned_abs());
        let version = Seen::version_of(token.as_ref(), lease_ends);
        let seen = Seen::new(id, state, self.generation.unsigned_abs(), version);
        let mut entry = Entry::new(seen);
        entry.owner = self.owner.as_str().into();
        entry.operation = self.operation.as_str().into();
        entry.since = time(since);
        entry.age = Duration::from_millis(self.now.saturating_sub(since).max(0).unsigned_abs());
        entry.lease_expires = self.completed.is_none().then(|| time(self.lease_ends));
        entry.expires = Some(time(self.expires));
        entry.retry_allowed = state == State::Orphaned && token.is_some_and(|it| it.allows_retry());
        entry.record_bytes = self.record_len.map(i64::unsigned_abs);
        if state == State::NeedsAttention {
            let attention = self.record.as_deref().and_then(NeedsAttention::in_record);
            entry.attention_code = attention.map(|attention| attention.code().into());
        }
        if state == State::Unreadable {
            entry.problem = Some("the record is of another version, or damaged".into());
        }
        Ok(Some(entry))
    }

    /// Returns the entry with its record, or [`None`] if it has expired. The row must contain the whole record.
    pub(super) fn into_details(self) -> Result<Option<EntryDetails>, SqlError> {
        let Some(entry) = self.entry()? else {
            return Ok(None);
        };
        let mut details = EntryDetails::new(entry);
        details.fingerprint = self.fingerprint().ok().map(Fingerprint::from_bytes);
        details.has_checkpoint = self.has_checkpoint;
        details.record = self.record.map(Into::into);
        Ok(Some(details))
    }

    /// Returns `true` if the listing of this state contains the row, even if the row is unreadable.
    pub(super) fn is_in_listing(&self, state: State) -> bool {
        match (self.completed, state) {
            (Some(_), State::Completed) => self.record_state() != State::NeedsAttention,
            (Some(_), State::NeedsAttention) => {
                needs_attention(self.record.as_deref().unwrap_or_default())
            }
            (None, State::InProgress) => self.lease_ends > self.now,
            (None, State::Orphaned) => self.lease_ends <= self.now,
            _ => false,
        }
    }

    pub(super) fn has_token(&self, token: &Token) -> bool {
        self.token.as_deref() == Some(token.as_bytes())
    }

    fn record_state(&self) -> State {
        let record = self.record.as_deref();
        record.map_or(State::Unreadable, State::of_record)
    }

    fn key_id(&self) -> Result<KeyId, SqlError> {
        let id = self.id.as_slice().try_into();
        let id = id.map_err(|_| SqlError::unreadable("no id of 32 bytes"))?;
        Ok(KeyId::from_bytes(id))
    }

    fn token(&self) -> Result<Option<Token>, SqlError> {
        let token = self.token.as_deref().map(TryInto::try_into).transpose();
        let token = token.map_err(|_| SqlError::unreadable("no token"))?;
        Ok(token.map(Token::from_bytes))
    }

    fn fingerprint(&self) -> Result<[u8; 32], SqlError> {
        let fingerprint = self.fingerprint.as_slice().try_into();
        fingerprint.map_err(|_| SqlError::unreadable("no fingerprint"))
    }

    /// Returns a version for a row that cannot be read. It changes with the contents of the row.
    fn contents(&self) -> u64 {
        Seen::version_of_parts(&[
            self.token.as_deref().unwrap_or_default(),
            &self.fingerprint,
            &self.generation.to_le_bytes(),
            &self.lease_ends.to_le_bytes(),
            &self.completed.unwrap_or_default().to_le_bytes(),
        ])
    }
}

/// A position in a listing: after this row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) key: i64,
    pub(super) id: [u8; 32],
}

impl Position {
    pub(super) fn of(key: i64, row: &EntryRow) -> Result<Self, SqlError> {
        let id = *row.key_id()?.as_bytes();
        Ok(Self { key, id })
    }

    pub(super) fn to_bytes(self) -> Vec<u8> {
        [&self.key.to_be_bytes()[..], &self.id].concat()
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (key, id) = bytes.split_first_chunk()?;
        let key = i64::from_be_bytes(*key);
        let id = id.try_into().ok()?;
        // A time is never negative. In SQL, the digits of `i64::MIN` would be of another type.
        (key >= 0).then_some(Self { key, id })
    }
}

fn time(millis: i64) -> SystemTime {
    let since = Duration::from_millis(millis.max(0).unsigned_abs());
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}

/// Returns `true` if the record needs attention, as in the index of these records.
fn needs_attention(record: &[u8]) -> bool {
    record.get(1) == Some(&2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: &[u8], token: &[u8], fingerprint: &[u8], record: &[u8]) -> EntryRow {
        EntryRow {
            id: id.to_vec(),
            token: Some(token.to_vec()),
            fingerprint: fingerprint.to_vec(),
            generation: 1,
            lease_ends: 0,
            expires: 2000,
            created: 0,
            completed: Some(500),
            owner: String::new(),
            operation: String::new(),
            has_checkpoint: false,
            record: Some(record.to_vec()),
            record_len: None,
            now: 1000,
        }
    }

    #[test]
    fn damaged_rows_have_these_texts() {
        let (id, token, fingerprint) = (&[1; 32], &[2; 16], &[3; 32]);
        let record = b"a record of another version";
        for (row, expected) in [
            (
                row(id, b"short", fingerprint, record),
                "its token or its fingerprint is damaged",
            ),
            (
                row(id, token, b"short", record),
                "its token or its fingerprint is damaged",
            ),
            (
                row(id, token, fingerprint, record),
                "the record is of another version, or damaged",
            ),
        ] {
            let entry = row.entry().unwrap().unwrap();
            assert_eq!(entry.state(), State::Unreadable);
            assert_eq!(entry.problem.as_deref(), Some(expected));
        }
        let error = row(b"short", token, fingerprint, record)
            .entry()
            .unwrap_err();
        assert_eq!(error.to_string(), "the database returned no id of 32 bytes");
    }

    #[test]
    fn position_survives_its_byte_form() {
        for key in [0, 1, i64::MAX] {
            let position = Position { key, id: [7; 32] };
            assert_eq!(Position::parse(&position.to_bytes()), Some(position));
        }
        for bytes in [&[][..], &[0; 39], &[0; 41], &[0xff; 40]] {
            assert_eq!(Position::parse(bytes), None, "{} bytes", bytes.len());
        }
    }
}
