use std::fmt;

use bytes::Bytes;

use super::{Entry, InspectError, InspectErrorKind, Seen, State};
use crate::{
    record::{self, Codec},
    store::{KeyId, Ttl},
};

/// The orphan retention of an entry that has stored none: 24 h.
pub const DEFAULT_ORPHAN_RETENTION: Ttl = Ttl::from_secs(24 * 60 * 60);

/// Decision of an operator about an entry. Its `Debug` output shows no bytes of a record.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resolution {
    /// The execution had no effect, or the effect has been undone. Deletes the entry, as if the key had never been used.
    ///
    /// The next request with the key executes as the first one, and its handler sees no takeover. If the execution did have
    /// an effect, it happens twice. Until then, an execution that is still running may store its outcome.
    Free,
    /// The handler may run once more, and can determine the effect of an earlier execution.
    ///
    /// The next equal request takes the entry over, unless the orphan policy of the layer is
    /// [`OrphanPolicy::Never`](crate::OrphanPolicy::Never). Its handler sees a takeover. The layer still rejects another
    /// request under the key. If that execution ends without an outcome too, the orphan policy applies again. An execution
    /// that held the entry before can no longer complete it.
    Retry,
    /// The outcome is known. Completes the entry with this record, and each retry gets it from now on.
    Complete {
        /// Record from [`IdempotencyLayer::encode_response_record`] or [`IdempotencyLayer::encode_value_record`].
        ///
        /// [`IdempotencyLayer::encode_response_record`]: crate::IdempotencyLayer::encode_response_record
        /// [`IdempotencyLayer::encode_value_record`]: crate::IdempotencyLayer::encode_value_record
        record: Bytes,
        /// Time after which the record expires.
        retention: Ttl,
    },
    /// Nothing may execute until an operator has examined the entry. Each retry is rejected with the code.
    ///
    /// For an entry that needs attention already, replaces code and reason. With a value from
    /// [`NeedsAttention::in_record`](record::NeedsAttention::in_record) the trace of the execution stays.
    NeedsAttention(record::NeedsAttention),
    /// The handler never ends. Ends its lease, and leaves an orphan.
    ///
    /// The former lease holder can no longer complete the entry, and its client gets 409 `outcome-unknown`. Its handler is
    /// not stopped: it may still have an effect. A retry then executes under
    /// [`OrphanPolicy::TakeOver`](crate::OrphanPolicy::TakeOver). Under
    /// [`OrphanPolicy::Refuse`](crate::OrphanPolicy::Refuse) the orphan needs another resolution.
    BreakLease,
    /// The record must not be replayed: it is wrong, cannot be read, or has to be erased. Deletes the entry.
    ///
    /// The next request with the key executes again, although an execution has had its effect. An execution whose own
    /// commit is unacknowledged finds no record either, and may commit once more.
    ///
    /// The backend may have its bytes for longer: in free pages of a SQLite file, in a log or in a backup.
    DeleteRecord,
}

impl Resolution {
    /// Returns the name of the resolution: `free`, `retry`, `complete`, `needs-attention`, `break-lease` or `delete-record`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Retry => "retry",
            Self::Complete { .. } => "complete",
            Self::NeedsAttention(_) => "needs-attention",
            Self::BreakLease => "break-lease",
            Self::DeleteRecord => "delete-record",
        }
    }

    /// Returns `true` if the resolution applies to entries in this state.
    #[must_use]
    pub const fn applies_to(&self, state: State) -> bool {
        match self {
            Self::Free | Self::Retry | Self::Complete { .. } | Self::NeedsAttention(_) => {
                matches!(state, State::Orphaned | State::NeedsAttention)
            }
            Self::BreakLease => matches!(state, State::InProgress),
            Self::DeleteRecord => matches!(state, State::Completed | State::Unreadable),
        }
    }

    /// Returns an error unless the resolution applies to the state that was seen. Implementors call it first.
    ///
    /// # Errors
    ///
    /// [`WrongState`](InspectErrorKind::WrongState).
    pub fn check(&self, seen: &Seen) -> Result<(), InspectError> {
        if self.applies_to(seen.state()) {
            Ok(())
        } else {
            Err(InspectError::new(InspectErrorKind::WrongState))
        }
    }

    /// Returns the record that the resolution stores in the entry `id`, and its retention. `None` if it stores none. For
    /// implementors.
    #[must_use]
    pub fn record(&self, id: &KeyId) -> Option<(Bytes, Ttl)> {
        match self {
            Self::Complete { record, retention } => Some((record.clone(), *retention)),
            Self::NeedsAttention(attention) => {
                Some((Codec::encode_attention(id, None, attention), Ttl::MAX))
            }
            Self::Free | Self::Retry | Self::BreakLease | Self::DeleteRecord => None,
        }
    }
}

impl fmt::Debug for Resolution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Complete { record, retention } => f
                .debug_struct("Complete")
                .field("bytes", &record.len())
                .field("retention", retention)
                .finish(),
            Self::NeedsAttention(attention) => {
                f.debug_tuple("NeedsAttention").field(attention).finish()
            }
            Self::Free => f.write_str("Free"),
            Self::Retry => f.write_str("Retry"),
            Self::BreakLease => f.write_str("BreakLease"),
            Self::DeleteRecord => f.write_str("DeleteRecord"),
        }
    }
}

/// Outcome of [`Inspect::resolve`](super::Inspect::resolve). Contains the entry after the call; `None` if it is absent.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "an operator's program must tell the user which of the two happened"
)]
#[must_use = "if the entry has changed, the decision was not applied"]
pub enum ResolveOutcome {
    /// The decision is applied.
    Applied(Option<Box<Entry>>),
    /// The entry is no longer as it was seen. This call changed nothing.
    Changed(Option<Box<Entry>>),
}

impl ResolveOutcome {
    /// Returns `true` if the decision is applied.
    #[must_use]
    pub const fn is_applied(&self) -> bool {
        matches!(self, Self::Applied(_))
    }

    /// Returns the entry after the call, or `None` if it is absent.
    #[must_use]
    pub fn entry(&self) -> Option<&Entry> {
        match self {
            Self::Applied(entry) | Self::Changed(entry) => entry.as_deref(),
        }
    }
}
