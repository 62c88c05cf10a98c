//! Settings of the layer that retries.

use std::{any::Any, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    backoff::{Backoff, Jitter},
    budget::Budget,
    keys::IdempotencyKeyLayer,
    telemetry::Registration,
    verdict::{Attempt, Cause, Verdict},
    warning::WarningLimit,
};

/// Settings that all clones of a service share.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) keys: IdempotencyKeyLayer,
    pub(crate) max_attempts: u32,
    pub(crate) deadline: Duration,
    pub(crate) backoff: Backoff,
    pub(crate) throttled_base: Duration,
    pub(crate) budget: Budget,
    pub(crate) max_retry_after: Duration,
    pub(crate) lifetime: Duration,
    pub(crate) verdict: Option<Arc<dyn Fn(&Attempt<'_>) -> Option<Verdict> + Send + Sync>>,
    /// A [`CloneBody`](crate::copy::CloneBody) of some type.
    pub(crate) clone_body: Option<Arc<dyn Any + Send + Sync>>,
    pub(crate) jitter: Arc<Jitter>,
    /// Limit of the warning about operations that have expired.
    pub(crate) expired: Arc<WarningLimit>,
    pub(crate) registration: Arc<Registration>,
}

impl Settings {
    /// Returns the end of a call that begins now.
    pub(crate) fn deadline_from(&self, now: Instant) -> Instant {
        now + self.deadline.min(FAR)
    }

    /// Returns the delay before this retry, counted from 0.
    pub(crate) fn delay(&self, retry: u32, cause: Cause, after: Option<Duration>) -> Duration {
        let base = match cause {
            Cause::Throttled => self.throttled_base,
            Cause::NotSent | Cause::Transient | Cause::InProgress => self.backoff.base,
        };
        let backoff = Backoff {
            base,
            ..self.backoff
        };
        // All clients get the same `Retry-After`. The random part spreads them.
        let after = after.unwrap_or_default().min(self.max_retry_after);
        let after = match cause {
            // Neither the number of attempts nor the budget limits these retries.
            Cause::InProgress => after.max(MIN_IN_PROGRESS),
            Cause::NotSent | Cause::Transient | Cause::Throttled => after,
        };
        after.saturating_add(self.jitter.below(backoff.ceiling(retry)))
    }
}

/// Shortest delay before a retry while the server executes the first request.
const MIN_IN_PROGRESS: Duration = Duration::from_millis(10);
/// Longest duration of a call. The clock cannot add every duration.
const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
