//! Rules for executions: concurrent requests, the lease, orphans, and the store.

use std::time::Duration;

use http::StatusCode;

use crate::store::{OrphanPolicy, Ttl};

/// Response to a concurrent request: one that arrives while the first request with its key is being executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConcurrentRequests {
    /// 409 `in-progress`, with `Retry-After`.
    Conflict,
    /// 429 `in-progress`, with `Retry-After`.
    TooManyRequests,
    /// The request waits for the recorded response for this long, then gets 409. The calls of the store before and after the
    /// wait are not included: each takes at most 4 s (2 x store timeout). A waiting request holds its connection, its body and
    /// a permit of the requests in flight.
    Wait(Duration),
}

impl ConcurrentRequests {
    /// Returns the status of the rejection.
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
            Self::Conflict | Self::Wait(_) => StatusCode::CONFLICT,
        }
    }
}

/// Treatment of a request whose lease cannot be acquired because the store fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreFailure {
    /// 503 `store-unavailable`. Nothing is executed.
    Refuse,
    /// The handler executes without a lease and without a record.
    ///
    /// Retries during the outage execute again, possibly concurrently. The first retry after the outage executes once more.
    /// A request that waits for a running one still gets 503. So does a request with a derived key if the store has
    /// reported an orphan before it failed, and the orphan policy refuses it.
    ///
    /// An entry that the store cannot read is no outage: its request always gets 503. See
    /// [`StoreError::Unreadable`](crate::store::StoreError::Unreadable).
    ///
    /// There is no [`Lease`](crate::Lease). With the feature `axum`, a handler that extracts one responds with 500, so extract
    /// an `Option<Lease>` instead.
    DangerouslyExecuteUnprotected,
}

/// State in which a failed execution leaves its key.
///
/// An execution fails if the handler panics or the inner service returns an error. It also fails if the body of the
/// response fails before it is recorded. The effect of the execution may or may not have happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExecutionFailure {
    /// The key is free, and a retry executes again. After a takeover the key is an orphan again.
    Release,
    /// The key is an orphan, like after a crash. The [orphan policy](crate::OrphanPolicy) decides about retries.
    ///
    /// The lease expires after 1 ms, or by itself if the store fails. DynamoDB adds the allowed clock skew (2 s). Until the
    /// expiry, retries get 409 `in-progress`.
    Orphan,
    /// Retries get 409 `outcome-unknown` until an operator resolves the failure, like after a response with
    /// [`NeedsAttention`](crate::NeedsAttention). The code is `handler-panicked`, `handler-failed` or `body-failed`.
    NeedsAttention,
}

/// Settings of executions.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) concurrent_requests: ConcurrentRequests,
    pub(crate) waiters_per_key: usize,
    pub(crate) waiters: usize,
    pub(crate) lease_ttl: Ttl,
    pub(crate) orphan_policy: OrphanPolicy,
    /// `None` if it follows from the orphan policy.
    pub(crate) failure: Option<ExecutionFailure>,
    pub(crate) orphan_retention: Option<Ttl>,
    /// `None` if it follows from the lease.
    pub(crate) overdue_after: Option<Duration>,
    pub(crate) store_timeout: Duration,
    pub(crate) store_failure: StoreFailure,
}

impl Rules {
    /// Returns the time after which an execution is reported as overdue.
    pub(crate) fn overdue_after(&self) -> Duration {
        let lease = self.lease_ttl.as_duration();
        self.overdue_after.unwrap_or(lease.saturating_mul(10))
    }

    /// Returns the state in which a failed execution leaves its key.
    pub(crate) fn failure(&self) -> ExecutionFailure {
        self.failure.unwrap_or(match self.orphan_policy {
            OrphanPolicy::TakeOver => ExecutionFailure::Release,
            // At most once: the effect of the failed execution may have happened.
            OrphanPolicy::Refuse | OrphanPolicy::Never => ExecutionFailure::Orphan,
        })
    }
}
