//! Commits that the handler attempts under its lease.

use std::{
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;

use crate::clock::ClockTimes;

/// Tracks the handler's commits. The handler adds attempts; the layer closes the set when it finishes the lease.
///
/// A commit whose reply was lost may have succeeded. The layer then queries the store before it responds.
#[derive(Default)]
pub(crate) struct CommitAttempts {
    /// Flags, and the number of attempts that the database has not rejected, in units of [`ATTEMPT`].
    state: AtomicU32,
    record: OnceLock<Bytes>,
    /// Earliest expiry of an attempted record on each clock, provided that it was stored.
    first_expiry: Mutex<Option<ClockTimes>>,
}

/// Extension of a response that [`Prepared::commit`](crate::transaction::Prepared::commit) or
/// [`BegunCommit::acknowledge`](crate::transaction::BegunCommit::acknowledge) returned. If the handler returns another
/// response, its commit may have been reported too early.
#[derive(Clone, Copy)]
pub(crate) struct CommittedResponse;

/// Outcome of the handler's own commits, as far as this process knows.
pub(crate) enum CommitOutcome {
    /// The handler attempted no commit, or the database rejected each attempt.
    NotAttempted,
    /// The handler attempted a commit, and no success was acknowledged.
    Unacknowledged,
    /// A commit of this record succeeded, as the handler reported.
    Committed(Bytes),
}

impl CommitAttempts {
    /// Registers a commit that is about to be sent. Returns `false` if the commit must not be sent: the lease is finished or
    /// finishing, or the record of an earlier attempt may have expired.
    pub(crate) fn begin(&self, retention: Duration) -> bool {
        self.begin_at(retention, ClockTimes::now())
    }

    fn begin_at(&self, retention: Duration, now: ClockTimes) -> bool {
        let mut first_expiry = self.first_expiry();
        if first_expiry.is_some_and(|first| first.has_passed(now)) {
            return false;
        }
        let begin = |state| (state & (SUCCEEDED | CLOSED) == 0).then_some(state + ATTEMPT);
        let begun = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, begin)
            .is_ok();
        if begun {
            let expiry = now.plus(retention);
            *first_expiry = Some(first_expiry.map_or(expiry, |first| first.earliest(expiry)));
        }
        begun
    }

    /// Registers that the database rejected the last attempt, so that nothing of it is stored.
    pub(crate) fn reject(&self) {
        let mut first_expiry = self.first_expiry();
        let reject = |state| (state >= ATTEMPT).then(|| (state - ATTEMPT) | FAILED);
        let rejected = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, reject);
        if rejected.is_ok_and(|before| before < 2 * ATTEMPT) {
            *first_expiry = None;
        }
    }

    fn first_expiry(&self) -> MutexGuard<'_, Option<ClockTimes>> {
        self.first_expiry
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers the success of a commit with this record.
    pub(crate) fn succeed(&self, record: Bytes) {
        // The store accepts only one of two commits under one lease, so a second success is ignored.
        let _ = self.record.set(record);
        self.state.fetch_or(SUCCEEDED, Ordering::AcqRel);
    }

    /// Registers a transaction whose commit is not sent, because the lease is lost.
    pub(crate) fn refuse(&self) {
        self.state.fetch_or(FAILED | REFUSED, Ordering::AcqRel);
    }

    /// Registers a transaction whose commit is not sent, for another reason.
    pub(crate) fn fail(&self) {
        self.state.fetch_or(FAILED, Ordering::AcqRel);
    }

    /// Returns `true` if a transaction ended without a commit because the lease is lost.
    pub(crate) fn has_refused(&self) -> bool {
        self.state.load(Ordering::Acquire) & REFUSED != 0
    }

    /// Returns `true` if a transaction failed before its commit was sent, or if its commit was rejected.
    pub(crate) fn has_failed(&self) -> bool {
        self.state.load(Ordering::Acquire) & FAILED != 0
    }

    /// Returns `true` if a commit was attempted that the database has not rejected.
    pub(crate) fn has_begun(&self) -> bool {
        self.state.load(Ordering::Acquire) >= ATTEMPT
    }

    /// Returns `true` if the layer is finishing the lease. The layer then reconciles the handler's commits.
    pub(crate) fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Returns `true` if the record of an attempt may have expired. A missing record then proves nothing.
    pub(crate) fn record_may_have_expired(&self) -> bool {
        self.has_expiry_passed(ClockTimes::now())
    }

    fn has_expiry_passed(&self, now: ClockTimes) -> bool {
        self.first_expiry()
            .is_some_and(|first| first.has_passed(now))
    }

    /// Closes the set and returns its outcome. No commit can begin afterwards.
    pub(crate) fn close(&self) -> CommitOutcome {
        let state = self.state.fetch_or(CLOSED, Ordering::AcqRel);
        match self.record.get() {
            Some(record) if state & SUCCEEDED != 0 => CommitOutcome::Committed(record.clone()),
            Some(_) | None if state >= ATTEMPT => CommitOutcome::Unacknowledged,
            Some(_) | None => CommitOutcome::NotAttempted,
        }
    }
}

const SUCCEEDED: u32 = 1;
const CLOSED: u32 = 2;
const REFUSED: u32 = 4;
const FAILED: u32 = 8;
const ATTEMPT: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(60 * 60);
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    #[test]
    fn first_committed_record_becomes_outcome() {
        let commits = CommitAttempts::default();
        assert!(commits.begin(DAY));
        assert!(commits.begin(DAY), "a transaction is retried");
        commits.succeed(Bytes::from_static(b"first"));
        commits.succeed(Bytes::from_static(b"second"));
        assert!(!commits.begin(DAY), "the lease has its outcome");
        assert!(matches!(commits.close(), CommitOutcome::Committed(record) if record == "first"));
    }

    #[test]
    fn rejected_attempt_leaves_earlier_one() {
        let commits = CommitAttempts::default();
        commits.reject();
        assert!(!commits.has_begun() && commits.begin(DAY) && commits.begin(DAY));
        commits.reject();
        assert!(commits.has_begun(), "the first one may be stored");
        commits.reject();
        assert!(!commits.has_begun() && commits.has_failed());
        assert!(commits.begin(Duration::ZERO) && commits.record_may_have_expired());
        commits.reject();
        assert!(!commits.record_may_have_expired());
        assert!(matches!(commits.close(), CommitOutcome::NotAttempted));
    }

    /// The first commit may be stored, although the database rejects the second one.
    #[test]
    fn rejected_attempt_leaves_expiry_of_earlier_one() {
        let commits = CommitAttempts::default();
        let start = ClockTimes::now();
        assert!(commits.begin_at(HOUR, start) && commits.begin_at(DAY, start));
        commits.reject();
        assert!(commits.has_expiry_passed(start.plus(HOUR)));
        assert!(!commits.begin_at(DAY, start.plus(HOUR)));
        assert!(matches!(commits.close(), CommitOutcome::Unacknowledged));
    }

    #[test]
    fn record_expires_on_either_clock() {
        let start = ClockTimes::now();
        let at = |monotonic: u32, wall: u32| ClockTimes {
            monotonic: start.monotonic + HOUR * monotonic,
            wall: start.wall + HOUR * wall,
        };
        for (now, reason) in [
            (at(0, 24), "the machine was suspended"),
            (at(24, 0), "the wall clock was set back"),
        ] {
            let commits = CommitAttempts::default();
            assert!(commits.begin_at(DAY, start) && !commits.has_expiry_passed(at(23, 23)));
            assert!(commits.has_expiry_passed(now), "{reason}");
            assert!(!commits.begin_at(DAY, now), "{reason}");
        }
        let commits = CommitAttempts::default();
        assert!(commits.begin_at(DAY, start));
        assert!(commits.begin_at(DAY / 2, at(1, 20)), "after a suspension");
        assert!(!commits.has_expiry_passed(at(2, 23)));
        assert!(commits.has_expiry_passed(at(2, 24)), "the first record");
        assert!(commits.has_expiry_passed(at(13, 23)), "the second one");
    }

    #[test]
    fn begin_fails_after_close() {
        let begun = CommitAttempts::default();
        assert!(begun.begin(DAY));
        assert!(matches!(begun.close(), CommitOutcome::Unacknowledged));
        assert!(!begun.begin(DAY));

        let idle = CommitAttempts::default();
        assert!(matches!(idle.close(), CommitOutcome::NotAttempted));
        assert!(!idle.begin(DAY));
        assert!(
            matches!(idle.close(), CommitOutcome::NotAttempted),
            "closed twice"
        );
    }
}
