use std::{
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;

use super::{PageToken, Seen, State};
use crate::store::{Fingerprint, KeyId, is_operation_of_observation, is_operation_of_run_once};

/// An entry, as an operator sees it. Contains no key, no principal and no record.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    seen: Seen,
    /// Host and process that acquired the lease last. Empty if the store does not store it.
    pub owner: Box<str>,
    /// Operation: method and route, or `run_once`. Empty if the store does not store it.
    pub operation: Box<str>,
    /// Beginning of the state. For an entry in progress, this is the first lease on the key, regardless of renewals. For an
    /// orphan, it is the expiry of the lease. For an entry with a record, it is the completion.
    pub since: SystemTime,
    /// Time from `since` until now, by the clock of the store.
    pub age: Duration,
    /// Expiry of the lease, unless it is renewed. `None` for an entry with a record.
    pub lease_expires: Option<SystemTime>,
    /// Expiry of the entry: the store then deletes the orphan or the record. `None` if the entry is unreadable.
    pub expires: Option<SystemTime>,
    /// Code of the [`NeedsAttention`](crate::NeedsAttention) with which the execution ended.
    pub attention_code: Option<Box<str>>,
    /// `true` if an operator has allowed a retry of this orphan, which no request has used yet.
    pub retry_allowed: bool,
    /// Size of the record in bytes. `None` without a record, or if the listing does not contain the size.
    pub record_bytes: Option<u64>,
    /// Reason why the entry is unreadable. Never quotes its contents.
    pub problem: Option<Box<str>>,
}

impl Entry {
    /// Creates an entry. For implementors, who then set the public fields.
    #[must_use]
    pub fn new(seen: Seen) -> Self {
        Self {
            seen,
            owner: Box::from(""),
            operation: Box::from(""),
            since: UNIX_EPOCH,
            age: Duration::ZERO,
            lease_expires: None,
            expires: None,
            attention_code: None,
            retry_allowed: false,
            record_bytes: None,
            problem: None,
        }
    }

    /// Creates an entry that the store cannot read. For implementors. [`Seen::version_of_parts`] computes a version.
    #[must_use]
    pub fn unreadable(id: KeyId, version: u64, problem: impl Into<Box<str>>) -> Self {
        Self {
            problem: Some(problem.into()),
            ..Self::new(Seen::new(id, State::Unreadable, 0, version))
        }
    }

    /// Returns the ID of the entry.
    #[must_use]
    pub const fn id(&self) -> &KeyId {
        self.seen.id()
    }

    /// Returns the state at the time of the call that returned the entry.
    #[must_use]
    pub const fn state(&self) -> State {
        self.seen.state()
    }

    /// Returns the generation: 1, and one more for each takeover. 0 if the entry is unreadable.
    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.seen.generation()
    }

    /// Returns `true` for an entry of `run_once` or of an item of a batch. Its record is a value, and not a response.
    ///
    /// Decided by the operation. A record of a response would block such an entry: its next run could not read it.
    #[must_use]
    pub fn is_of_run_once(&self) -> bool {
        is_operation_of_run_once(&self.operation)
    }

    /// Returns `true` for an entry of a request that was only [observed](crate::Enforcement::Observe). Each retry executes,
    /// whatever the state of the entry is. Its record is the observed status and a digest of the body.
    ///
    /// Decided by the operation. If the store does not store the operation, as a [`MemoryStore`](crate::MemoryStore) without
    /// [`with_details`](crate::MemoryStore::with_details), the method returns `false`.
    #[must_use]
    pub fn is_observed(&self) -> bool {
        is_operation_of_observation(&self.operation)
    }

    /// Returns the identification of this state of the entry, for [`Inspect::resolve`](super::Inspect::resolve).
    #[must_use]
    pub const fn seen(&self) -> &Seen {
        &self.seen
    }
}

/// An entry with its record. Its `Debug` output shows no bytes of the record.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EntryDetails {
    /// The entry.
    pub entry: Entry,
    /// Fingerprint of the request. `None` if the entry is unreadable.
    pub fingerprint: Option<Fingerprint>,
    /// Stored bytes of the record. If the entry is unreadable, all bytes of its value, if the store can read them.
    pub record: Option<Bytes>,
    /// `true` if a transaction has stored a checkpoint with which the next execution continues.
    pub has_checkpoint: bool,
}

impl EntryDetails {
    /// Creates the details of an entry without fingerprint, record and checkpoint. For implementors, who then set these
    /// fields.
    #[must_use]
    pub fn new(entry: Entry) -> Self {
        Self {
            entry,
            fingerprint: None,
            record: None,
            has_checkpoint: false,
        }
    }
}

impl fmt::Debug for EntryDetails {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EntryDetails")
            .field("entry", &self.entry)
            .field("fingerprint", &self.fingerprint)
            .field("record_bytes", &self.record.as_ref().map(Bytes::len))
            .field("has_checkpoint", &self.has_checkpoint)
            .finish()
    }
}

/// A page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Page {
    /// The entries, at most [`Query::limit`](super::Query::limit). May be empty although a next page follows.
    pub entries: Vec<Entry>,
    /// Token of the next page, or `None` after the last one.
    pub next: Option<PageToken>,
}

impl Page {
    /// Creates a page. For implementors.
    #[must_use]
    pub fn new(entries: Vec<Entry>, next: Option<PageToken>) -> Self {
        Self { entries, next }
    }

    /// Returns the number of entries that cannot be read.
    #[must_use]
    pub fn unreadable(&self) -> usize {
        let states = self.entries.iter().map(Entry::state);
        states.filter(|state| *state == State::Unreadable).count()
    }
}

/// Number of entries in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Count {
    /// The number, or a lower bound.
    pub value: u64,
    /// `true` if there are exactly `value` entries, `false` if there may be more.
    pub is_exact: bool,
}

impl Count {
    /// Creates a count. For implementors.
    #[must_use]
    pub const fn new(value: u64, is_exact: bool) -> Self {
        Self { value, is_exact }
    }
}

/// Number of entries in each state that a store lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Entries in progress.
    pub in_progress: Option<Count>,
    /// Orphans.
    pub orphaned: Option<Count>,
    /// Entries that need attention.
    pub needs_attention: Option<Count>,
    /// Entries with any other record.
    pub completed: Option<Count>,
}

impl Summary {
    /// Returns the count of this state, or `None` if the store does not list it.
    #[must_use]
    pub const fn count(&self, state: State) -> Option<Count> {
        match state {
            State::InProgress => self.in_progress,
            State::Orphaned => self.orphaned,
            State::NeedsAttention => self.needs_attention,
            State::Completed => self.completed,
            State::Unreadable => None,
        }
    }

    /// Sets the count of this state. For implementors.
    pub const fn set(&mut self, state: State, count: Count) {
        match state {
            State::InProgress => self.in_progress = Some(count),
            State::Orphaned => self.orphaned = Some(count),
            State::NeedsAttention => self.needs_attention = Some(count),
            State::Completed => self.completed = Some(count),
            State::Unreadable => {}
        }
    }
}
