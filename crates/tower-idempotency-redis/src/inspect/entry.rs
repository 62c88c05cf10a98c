//! Entries, as the script for operators returns them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redis::Value;
use tower_idempotency::{
    NeedsAttention, Ttl,
    inspect::{Entry, Seen, State},
    store::{KeyId, MIN_RECORD_LIMIT, StoreError, Token},
};

use crate::store::unexpected_reply;

/// The part of a record that the script reads.
#[derive(Clone, Copy, Debug)]
pub(super) enum RecordPart {
    Whole,
    /// The bytes that contain the state of the entry.
    Beginning,
    /// Like [`Beginning`](Self::Beginning), but nothing of a record that is too long to need attention. Such an entry counts as
    /// completed, even if this version cannot read its record.
    BeginningIfShort,
}

impl RecordPart {
    /// Returns the arguments of the script: the number of bytes to return, and the length of the longest record to read.
    pub(super) fn arguments(self) -> (i64, i64) {
        match self {
            Self::Whole => (UNLIMITED, UNLIMITED),
            Self::Beginning => (RECORD_PREFIX, UNLIMITED),
            Self::BeginningIfShort => (RECORD_PREFIX, LONGEST_ATTENTION),
        }
    }
}

/// The fields of an entry: any bytes, because another version or another program may have written them.
pub(super) struct RawEntry {
    /// The fields s, t, f, g, l, c, o and p.
    fields: [Option<Vec<u8>>; 8],
    /// The record, or the beginning of it. `None` also if the script has not read it.
    pub(super) record: Option<Vec<u8>>,
    record_len: Option<u64>,
    /// Milliseconds until the entry expires, or a negative number if it does not.
    left: i64,
    /// Time of the read, in milliseconds since 1970.
    now: u64,
    /// `false` if the key has another type than a hash.
    is_hash: bool,
}

const STATE: usize = 0;
const TOKEN: usize = 1;
const FINGERPRINT: usize = 2;
const GENERATION: usize = 3;
const LEASE_ENDS: usize = 4;
const SINCE: usize = 5;
const OWNER: usize = 6;
const OPERATION: usize = 7;

impl RawEntry {
    pub(super) fn parse(reply: Value) -> Result<Option<Self>, StoreError> {
        let parts = match reply {
            Value::Nil => return Ok(None),
            Value::Array(parts) => parts,
            _ => return Err(unexpected_reply("an array")),
        };
        if let [Value::Int(0)] = parts[..] {
            return Ok(Some(Self {
                fields: Default::default(),
                record: None,
                record_len: None,
                left: -1,
                now: 0,
                is_hash: false,
            }));
        }
        let expected = || unexpected_reply("an entry");
        let mut parts = parts.into_iter();
        let mut field = || match parts.next() {
            Some(Value::Nil) => Ok(None),
            Some(Value::BulkString(bytes)) => Ok(Some(bytes)),
            Some(Value::Int(number)) => Ok(Some(number.to_string().into_bytes())),
            _ => Err(expected()),
        };
        let mut fields = [const { None }; 8];
        for value in &mut fields {
            *value = field()?;
        }
        let record = field()?;
        let record_len = number(field()?.as_deref());
        let left = field()?.and_then(|left| std::str::from_utf8(&left).ok()?.parse().ok());
        let now = number(field()?.as_deref());
        Ok(Some(Self {
            fields,
            record,
            record_len,
            left: left.ok_or_else(expected)?,
            now: now.ok_or_else(expected)?,
            is_hash: true,
        }))
    }

    pub(super) fn entry(&self, id: KeyId) -> Entry {
        self.readable(id).unwrap_or_else(|problem| {
            let parts = self.fields.each_ref();
            let parts = parts.map(|field| field.as_deref().unwrap_or_default());
            Entry::unreadable(id, Seen::version_of_parts(&parts), problem)
        })
    }

    fn readable(&self, id: KeyId) -> Result<Entry, &'static str> {
        if !self.is_hash {
            return Err("its key has another type than a hash");
        }
        self.fingerprint().ok_or("its fingerprint is damaged")?;
        let lease_ends = self.number(LEASE_ENDS);
        let since = self.number(SINCE);
        let (state, since, lease_ends) = match self.field(STATE) {
            Some(b"L") => {
                let lease_ends = lease_ends.ok_or("the expiry of its lease is damaged")?;
                if self.now < lease_ends {
                    let since = since.ok_or("its time is damaged")?;
                    (State::InProgress, since, Some(lease_ends))
                } else {
                    (State::Orphaned, lease_ends, Some(lease_ends))
                }
            }
            // A version before this one stored no time.
            Some(b"D") => (self.record_state(), since.unwrap_or(self.now), None),
            _ => return Err("another version wrote it"),
        };
        let token = self.token()?;
        let generation = self.number(GENERATION).ok_or("its generation is damaged")?;
        let version = Seen::version_of(
            token.as_ref(),
            lease_ends.filter(|_| state == State::Orphaned),
        );
        let mut entry = Entry::new(Seen::new(id, state, generation, version));
        entry.owner = self.text(OWNER);
        entry.operation = self.text(OPERATION);
        entry.since = time(since);
        entry.age = Duration::from_millis(self.now.saturating_sub(since));
        entry.lease_expires = lease_ends.map(time);
        let left = match u64::try_from(self.left) {
            Ok(left) => left,
            // An operator removed the expiry.
            Err(_) => Ttl::MAX.as_millis(),
        };
        entry.expires = Some(time(self.now.saturating_add(left)));
        entry.retry_allowed = state == State::Orphaned && token.is_some_and(|it| it.allows_retry());
        entry.record_bytes = self.record_len;
        match (state, &self.record) {
            (State::NeedsAttention, Some(record)) => {
                let attention = NeedsAttention::in_record(record);
                entry.attention_code = attention.map(|attention| attention.code().into());
            }
            (State::Unreadable, _) => {
                entry.problem = Some("the record is of another version, or damaged".into());
            }
            _ => {}
        }
        Ok(entry)
    }

    /// Returns `true` if the index from which entries of this state are listed should have the entry.
    pub(super) fn is_in_index(&self, state: State) -> bool {
        match self.field(STATE) {
            Some(b"L") => matches!(state, State::InProgress | State::Orphaned),
            Some(b"D") if state == State::Completed => self.record_state() != State::NeedsAttention,
            Some(b"D") => {
                let record = self.record.as_deref().unwrap_or_default();
                state == State::NeedsAttention && record.starts_with(&ATTENTION)
            }
            // Any other entry is listed as unreadable.
            _ => true,
        }
    }

    /// Returns the fields in the form in which `resolve.lua` compares them: `=` and the value, or nothing if the field is
    /// absent.
    pub(super) fn conditions(&self) -> Vec<Vec<u8>> {
        let fields = [STATE, TOKEN, GENERATION, LEASE_ENDS, SINCE];
        let condition = |field| match self.field(field) {
            Some(value) => [b"=", value].concat(),
            None => Vec::new(),
        };
        fields.into_iter().map(condition).collect()
    }

    /// Returns the word for the state that `resolve.lua` compares.
    pub(super) fn condition_of_state(&self, state: State) -> &'static str {
        match state {
            State::InProgress => "live",
            State::Orphaned => "orphan",
            _ if !self.is_hash => "type",
            _ => "record",
        }
    }

    pub(super) fn fingerprint(&self) -> Option<[u8; 32]> {
        self.field(FINGERPRINT)?.try_into().ok()
    }

    fn record_state(&self) -> State {
        match (&self.record, self.record_len) {
            (Some(record), _) => State::of_record(record),
            // The script has not read it.
            (None, Some(_)) => State::Completed,
            (None, None) => State::Unreadable,
        }
    }

    fn token(&self) -> Result<Option<Token>, &'static str> {
        let token = self.field(TOKEN).map(TryInto::try_into).transpose();
        let token = token.map_err(|_| "its token is damaged")?;
        Ok(token.map(Token::from_bytes))
    }

    fn field(&self, field: usize) -> Option<&[u8]> {
        self.fields[field].as_deref()
    }

    fn number(&self, field: usize) -> Option<u64> {
        number(self.field(field))
    }

    fn text(&self, field: usize) -> Box<str> {
        String::from_utf8_lossy(self.field(field).unwrap_or_default()).into()
    }
}

fn number(digits: Option<&[u8]>) -> Option<u64> {
    std::str::from_utf8(digits?).ok()?.parse().ok()
}

fn time(millis: u64) -> SystemTime {
    let time = UNIX_EPOCH.checked_add(Duration::from_millis(millis));
    time.unwrap_or(UNIX_EPOCH)
}

const UNLIMITED: i64 = -1;
const RECORD_PREFIX: i64 = State::RECORD_PREFIX as i64;
/// A record that needs attention has at most this many bytes, with its reason.
const LONGEST_ATTENTION: i64 = MIN_RECORD_LIMIT as i64;
/// The first two bytes of a record that needs attention, as in the scripts.
const ATTENTION: [u8; 2] = [1, 2];

#[cfg(test)]
mod tests;
