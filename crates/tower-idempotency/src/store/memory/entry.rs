//! An entry of a shard: a lease, an orphan or a record.

use std::num::NonZeroU64;

use bytes::Bytes;

use super::{budget::Cost, usage::PrincipalGroup};
use crate::store::{Claim, Fingerprint, KeyId, LeaseRef, Token, Ttl, is_operation_of_run_once};

pub(super) struct Entry {
    pub(super) id: KeyId,
    pub(super) fingerprint: Fingerprint,
    token: Token,
    pub(super) generation: NonZeroU64,
    pub(super) group: PrincipalGroup,
    /// `true` for an entry of `run_once` or of an item of a batch. Its record is a value and not a response.
    pub(super) is_of_run_once: bool,
    /// Time of the first lease on the key, or of the completion.
    pub(super) since: Millis,
    pub(super) state: EntryState,
}

/// A time in whole milliseconds since the store was created, in five bytes, which fit into the padding of an entry. After 34 years
/// it stays at its maximum.
#[derive(Clone, Copy)]
pub(super) struct Millis([u8; 5]);

impl Millis {
    pub(super) const fn from_nanos(nanos: u64) -> Self {
        match (nanos / 1_000_000).to_le_bytes() {
            [a, b, c, d, e, 0, 0, 0] => Self([a, b, c, d, e]),
            _ => Self([u8::MAX; 5]),
        }
    }

    pub(super) const fn as_nanos(self) -> u64 {
        let Self([a, b, c, d, e]) = self;
        u64::from_le_bytes([a, b, c, d, e, 0, 0, 0]).saturating_mul(1_000_000)
    }
}

/// Position of an entry in the orders of its shard.
#[derive(PartialEq, Eq)]
pub(super) struct OrderPosition {
    pub(super) group: PrincipalGroup,
    pub(super) deadline: u64,
    /// The length of the record. `None` for leases and orphans.
    pub(super) record: Option<usize>,
}

pub(super) enum EntryState {
    /// In progress until `lease_expires`, then orphaned until `orphan_expires`. No token holds a released entry.
    Leased {
        lease_expires: u64,
        orphan_expires: u64,
        released: bool,
    },
    Completed {
        record: Bytes,
        expires: u64,
    },
}

impl Entry {
    pub(super) fn leased(
        claim: &Claim,
        group: PrincipalGroup,
        generation: NonZeroU64,
        now: u64,
    ) -> Self {
        Self {
            group,
            id: claim.id,
            fingerprint: claim.fingerprint,
            token: claim.token,
            generation,
            is_of_run_once: is_operation_of_run_once(&claim.operation),
            since: Millis::from_nanos(now),
            state: EntryState::leased(claim, now),
        }
    }

    pub(super) fn completed(
        lease: &LeaseRef,
        group: PrincipalGroup,
        record: Bytes,
        expires: u64,
        now: u64,
    ) -> Self {
        Self {
            group,
            is_of_run_once: false,
            since: Millis::from_nanos(now),
            id: lease.id,
            fingerprint: lease.fingerprint,
            token: lease.token,
            generation: NonZeroU64::new(lease.generation).unwrap_or(NonZeroU64::MIN),
            state: EntryState::Completed { record, expires },
        }
    }

    /// Replaces the token, so that no execution holds the entry.
    pub(super) fn set_token(&mut self, token: Token) {
        self.token = token;
    }

    /// Returns the token that holds or completed the entry.
    pub(super) const fn holder(&self) -> Option<Token> {
        match self.state {
            EntryState::Leased { released: true, .. } => None,
            EntryState::Leased { .. } | EntryState::Completed { .. } => Some(self.token),
        }
    }

    pub(super) fn position(&self) -> OrderPosition {
        OrderPosition {
            group: self.group,
            deadline: self.state.deadline(),
            record: match &self.state {
                EntryState::Leased { .. } => None,
                EntryState::Completed { record, .. } => Some(record.len()),
            },
        }
    }

    pub(super) fn cost(&self) -> Cost {
        match &self.state {
            EntryState::Leased { .. } => Cost::ENTRY,
            EntryState::Completed { record, .. } => Cost::entry_with(record.len()),
        }
    }
}

impl EntryState {
    pub(super) fn leased(claim: &Claim, now: u64) -> Self {
        let lease_expires = now.saturating_add(nanos(claim.lease));
        Self::Leased {
            lease_expires,
            orphan_expires: lease_expires.saturating_add(nanos(claim.orphan_retention)),
            released: false,
        }
    }

    pub(super) fn deadline(&self) -> u64 {
        match *self {
            Self::Leased { orphan_expires, .. } => orphan_expires,
            Self::Completed { expires, .. } => expires,
        }
    }
}

/// The first deadline that a record with the longest retention can have. A record that needs attention has this retention.
/// Deadlines count from the creation of the store, so a record of a day has such a deadline only after almost 100 years.
pub(crate) const FIRST_LONGEST_DEADLINE: u64 = nanos(Ttl::MAX);

pub(super) const fn nanos(ttl: Ttl) -> u64 {
    ttl.as_millis() * 1_000_000
}
