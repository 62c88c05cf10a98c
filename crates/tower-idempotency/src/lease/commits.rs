//! What the handler committed under its lease, as far as this process knows.

use std::{
    hash::{DefaultHasher, Hasher},
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use crate::execution::shared::from_now;

/// Shared by whoever commits and whoever ends the lease: the one says what it did, the other asks, once and for all.
#[derive(Default)]
pub(crate) struct Commit {
    state: AtomicU8,
    record: OnceLock<Bytes>,
    begun: Mutex<Begun>,
}

#[derive(Default)]
struct Begun {
    /// When the first record that may have been stored is over, if it was.
    over: Option<Instant>,
    /// Digests of the records that may have been stored.
    records: Vec<u64>,
}

/// What the lease left in the store by itself, without the layer.
pub(crate) enum Committed {
    Nothing,
    /// A commit began, and nobody has heard that it succeeded.
    Unknown,
    Record(Bytes),
}

impl Commit {
    /// Called before a commit of this record is sent, which is kept for so long. False when it would come too late: the lease
    /// has its outcome, the layer is about to give it one, or the record of an earlier commit may be over by now.
    pub(crate) fn begin(&self, record: &[u8], retention: Duration) -> bool {
        let mut before = self.begun();
        if before.may_be_over() {
            return false;
        }
        let begins = |state| (state & (DONE | CLOSED) == 0).then_some(state | BEGUN);
        let begun = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, begins)
            .is_ok();
        if begun {
            let over = from_now(retention);
            before.over = Some(before.over.map_or(over, |first| first.min(over)));
            before.records.push(digest(record));
        }
        begun
    }

    fn begun(&self) -> MutexGuard<'_, Begun> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It succeeded, with this record.
    pub(crate) fn succeed(&self, record: Bytes) {
        // Of two commits under one lease the store takes one.
        let _ = self.record.set(record);
        self.state.fetch_or(DONE, Ordering::AcqRel);
    }

    /// Whether a commit began.
    pub(crate) fn has_begun(&self) -> bool {
        self.state.load(Ordering::Acquire) & BEGUN != 0
    }

    /// Whether the lease is being ended, or has been: it is not for the handler any more to find out about its commits.
    pub(crate) fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Whether a record that was stored may be over by now: then its absence says nothing.
    pub(crate) fn may_be_over(&self) -> bool {
        self.begun().may_be_over()
    }

    /// Whether a record that is stored is that of a commit which began here.
    pub(crate) fn has_begun_with(&self, record: &[u8]) -> bool {
        self.begun().records.contains(&digest(record))
    }

    /// What was committed; nothing begins from here on.
    pub(crate) fn close(&self) -> Committed {
        let state = self.state.fetch_or(CLOSED, Ordering::AcqRel);
        match self.record.get() {
            Some(record) if state & DONE != 0 => Committed::Record(record.clone()),
            Some(_) | None if state & BEGUN != 0 => Committed::Unknown,
            Some(_) | None => Committed::Nothing,
        }
    }
}

impl Begun {
    fn may_be_over(&self) -> bool {
        self.over.is_some_and(|over| Instant::now() >= over)
    }
}

/// Enough to tell it from what others have stored under the same key; a record itself may be megabytes.
fn digest(record: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(record);
    hasher.finish()
}

const BEGUN: u8 = 1;
const DONE: u8 = 2;
const CLOSED: u8 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    #[test]
    fn what_was_committed_is_what_its_lease_ends_with() {
        let commit = Commit::default();
        assert!(commit.begin(b"first", DAY));
        assert!(commit.begin(b"second", DAY), "a transaction is tried again");
        assert!(commit.has_begun_with(b"first") && commit.has_begun_with(b"second"));
        assert!(!commit.has_begun_with(b"of another"));
        commit.succeed(Bytes::from_static(b"first"));
        commit.succeed(Bytes::from_static(b"second"));
        assert!(!commit.begin(b"third", DAY), "the lease has its outcome");
        assert!(!commit.has_begun_with(b"third"));
        assert!(matches!(commit.close(), Committed::Record(record) if record == "first"));
    }

    #[test]
    fn a_commit_that_was_not_heard_of_is_unknown_and_none_begins_once_it_is_closed() {
        let begun = Commit::default();
        assert!(begun.begin(b"first", DAY));
        assert!(matches!(begun.close(), Committed::Unknown));
        assert!(!begun.begin(b"second", DAY));

        let idle = Commit::default();
        assert!(matches!(idle.close(), Committed::Nothing));
        assert!(!idle.begin(b"first", DAY));
        assert!(matches!(idle.close(), Committed::Nothing), "asked again");
    }
}
