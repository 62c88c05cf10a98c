//! What the handler committed under its lease, as far as this process knows.

use std::{
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use crate::engine::from_now;

/// Shared by whoever commits and whoever ends the lease: the one says what it did, the other asks, once and for all.
#[derive(Default)]
pub(crate) struct Commit {
    state: AtomicU8,
    record: OnceLock<Bytes>,
    // When the first record that may have been stored is over, if it was.
    over: Mutex<Option<Instant>>,
}

/// What the lease left in the store by itself, without the layer.
pub(crate) enum Committed {
    Nothing,
    /// A commit began, and nobody has heard that it succeeded.
    Unknown,
    Record(Bytes),
}

impl Commit {
    /// Called before a commit is sent, of a record that is kept for so long. False when it would come too late: the lease
    /// has its outcome, the layer is about to give it one, or the record of an earlier commit may be over by now.
    pub(crate) fn begin(&self, retention: Duration) -> bool {
        let mut first = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        if first.is_some_and(|first| Instant::now() >= first) {
            return false;
        }
        let begins = |state| (state & (DONE | CLOSED) == 0).then_some(state | BEGUN);
        let begun = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, begins)
            .is_ok();
        if begun {
            let over = from_now(retention);
            *first = Some(first.map_or(over, |first| first.min(over)));
        }
        begun
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

    /// Whether a record that was stored may be over by now: then its absence says nothing.
    pub(crate) fn may_be_over(&self) -> bool {
        let over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        over.is_some_and(|over| Instant::now() >= over)
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
        assert!(commit.begin(DAY));
        assert!(commit.begin(DAY), "a transaction is tried again");
        commit.succeed(Bytes::from_static(b"first"));
        commit.succeed(Bytes::from_static(b"second"));
        assert!(!commit.begin(DAY), "the lease has its outcome");
        assert!(matches!(commit.close(), Committed::Record(record) if record == "first"));
    }

    #[test]
    fn a_commit_that_was_not_heard_of_is_unknown_and_none_begins_once_it_is_closed() {
        let begun = Commit::default();
        assert!(begun.begin(DAY));
        assert!(matches!(begun.close(), Committed::Unknown));
        assert!(!begun.begin(DAY));

        let idle = Commit::default();
        assert!(matches!(idle.close(), Committed::Nothing));
        assert!(!idle.begin(DAY));
        assert!(matches!(idle.close(), Committed::Nothing), "asked again");
    }
}
