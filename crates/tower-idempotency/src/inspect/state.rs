use std::{fmt, str::FromStr};

use super::ParseTokenError;
use crate::record::RecordKind;

/// State of an entry for operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum State {
    /// A lease is held: the handler runs, or its process died a moment ago.
    InProgress,
    /// The lease expired without an outcome. The effect may or may not have happened.
    Orphaned,
    /// The execution ended with [`NeedsAttention`](crate::NeedsAttention).
    NeedsAttention,
    /// The entry has any other record.
    Completed,
    /// This version cannot read the entry or its record: a later version wrote it, or it is damaged.
    Unreadable,
}

impl State {
    /// All states.
    pub const ALL: &'static [Self] = &[
        Self::InProgress,
        Self::Orphaned,
        Self::NeedsAttention,
        Self::Completed,
        Self::Unreadable,
    ];

    /// Returns the name of the state: `in-progress`, `orphaned`, `needs-attention`, `completed` or `unreadable`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::InProgress => "in-progress",
            Self::Orphaned => "orphaned",
            Self::NeedsAttention => "needs-attention",
            Self::Completed => "completed",
            Self::Unreadable => "unreadable",
        }
    }

    /// Returns the state of an entry with this record: completed, needs attention or unreadable. For implementors.
    ///
    /// Reads no more than [`RECORD_PREFIX`](Self::RECORD_PREFIX) bytes, so the beginning of a record is enough. It detects
    /// records of later versions, but no damage beyond the beginning.
    ///
    /// ```
    /// use tower_idempotency::{NeedsAttention, inspect::{Resolution, State}, store::KeyId};
    ///
    /// let attention = Resolution::NeedsAttention(NeedsAttention::new("refund-failed"));
    /// let (record, _) = attention.record(&KeyId::from_bytes([7; 32])).expect("it stores a record");
    /// assert_eq!(State::of_record(&record), State::NeedsAttention);
    /// assert_eq!(State::of_record(b"of another format"), State::Unreadable);
    /// ```
    #[must_use]
    pub fn of_record(record: &[u8]) -> Self {
        match RecordKind::of(record) {
            Some(RecordKind::Outcome) => Self::Completed,
            Some(RecordKind::NeedsAttention) => Self::NeedsAttention,
            None => Self::Unreadable,
        }
    }

    /// Length of the prefix of a record that contains its kind. If the record needs attention, the prefix also contains the
    /// code.
    pub const RECORD_PREFIX: usize = 72;

    pub(super) const fn bit(self) -> u8 {
        1 << self.code()
    }

    /// Returns the number of the state in the text form of a token. It never changes.
    pub(super) const fn code(self) -> u8 {
        match self {
            Self::InProgress => 0,
            Self::Orphaned => 1,
            Self::NeedsAttention => 2,
            Self::Completed => 3,
            Self::Unreadable => 4,
        }
    }

    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.iter().copied().find(|state| state.code() == code)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for State {
    type Err = ParseTokenError;

    fn from_str(name: &str) -> Result<Self, ParseTokenError> {
        let state = Self::ALL.iter().find(|state| state.name() == name);
        state.copied().ok_or(ParseTokenError::new(
            "in-progress, orphaned, needs-attention, completed or unreadable",
        ))
    }
}
