//! Attempts to finish orphans, and their counts and reports.

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    task::Poll,
};

use tokio::task::{JoinError, JoinSet};
use tower_idempotency::{Error, ErrorKind, store::KeyId};

use crate::warning::{WarningLimit, catch_report_panic};

/// Attempts that run, each with the ID of its orphan. `None` is a panic.
pub(super) type Running = JoinSet<EndedAttempt>;
type EndedAttempt = (KeyId, Option<Result<OrphanOutcome, Error>>);

/// Outcome of one orphan in a sweep.
pub(super) enum OrphanOutcome {
    Executed,
    /// The work returned a response that the layer does not record. The entry is an orphan again.
    NotRecorded,
    /// The attempt failed. Contains the reason for the log: `error` of the work, or `store`.
    Failed(&'static str),
    TakenElsewhere,
}

/// Counts of one sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SweepStats {
    /// Orphans that were due.
    pub due: u64,
    /// Orphans whose work returned a response. Includes those of `not_recorded`.
    pub executed: u64,
    /// Orphans whose work returned a response that the layer does not record, such as a 5xx. Such an entry is still an orphan.
    pub not_recorded: u64,
    /// Orphans whose work failed or panicked, and orphans on which the store failed.
    pub failed: u64,
    /// Orphans that another execution took over or finished first.
    pub taken_elsewhere: u64,
}

/// Counts of attempts since the last report.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) stats: SweepStats,
    /// The last attempt that left an orphan: the ID, and the reason for the log.
    pub(super) last_failed: Option<(KeyId, &'static str)>,
}

impl Tally {
    /// Counts an attempt that has ended, and logs a failure at `debug`. Returns `false` if the sweep must end.
    pub(super) fn add(
        &mut self,
        ended: Option<Result<EndedAttempt, JoinError>>,
        panics: &WarningLimit,
    ) -> bool {
        // A task is cancelled only if the runtime shuts down, which cancels the sweep too.
        let Some(Ok((id, result))) = ended else {
            return true;
        };
        let mut continues = true;
        let stats = &mut self.stats;
        let reason = match result {
            Some(Ok(OrphanOutcome::Executed)) => {
                stats.executed += 1;
                return true;
            }
            Some(Ok(OrphanOutcome::TakenElsewhere)) => {
                stats.taken_elsewhere += 1;
                return true;
            }
            Some(Ok(OrphanOutcome::NotRecorded)) => {
                stats.executed += 1;
                stats.not_recorded += 1;
                "not_recorded"
            }
            Some(Ok(OrphanOutcome::Failed(reason))) => {
                stats.failed += 1;
                reason
            }
            Some(Err(error)) => {
                stats.failed += 1;
                continues = !matches!(
                    error.kind(),
                    ErrorKind::Draining | ErrorKind::Overloaded | ErrorKind::CallerLimit
                );
                error.kind().code()
            }
            None => {
                stats.failed += 1;
                if let Some(count) = panics.add(1) {
                    catch_report_panic(|| tracing::error!(%id, count, "orphan recovery panicked"));
                }
                "panic"
            }
        };
        self.last_failed = Some((id, reason));
        catch_report_panic(|| tracing::debug!(%id, reason, "orphan recovery failed, will retry"));
        continues
    }
}

/// Returns the output of an attempt, or `None` if it panics.
pub(super) async fn catch_panic<T>(attempt: impl Future<Output = T>) -> Option<T> {
    let mut attempt = pin!(attempt);
    // Unwind safe: the attempt is not polled again.
    poll_fn(
        |cx| match catch_unwind(AssertUnwindSafe(|| attempt.as_mut().poll(cx))) {
            Ok(polled) => polled.map(Some),
            Err(_panic) => Poll::Ready(None),
        },
    )
    .await
}
