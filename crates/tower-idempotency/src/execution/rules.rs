//! The rules for executions: concurrent requests, the lease, orphans, and the store.

use std::time::Duration;

use crate::store::{OrphanPolicy, Ttl};

/// What to answer while the first request with the key is still being executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConcurrentRequests {
    /// 409 `in-progress`, with `Retry-After`.
    Conflict,
    /// 429 `in-progress`, with `Retry-After`.
    TooManyRequests,
    /// Wait for the answer for at most this long, then 409. Waiting requests hold their connection, their body and a
    /// place among the requests in flight.
    Wait(Duration),
}

/// What to do with a request whose lease cannot be taken because the store fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreFailure {
    /// 503 `store-unavailable`; nothing is executed.
    Refuse,
    /// Execute without a lease and without a record: retries during the outage execute again, also beside one another,
    /// and the first retry after it executes once more. Who waits for a request that is known to be running is refused
    /// all the same. There is no [`Lease`](crate::Lease): with the feature `axum`, a handler that extracts one answers 500,
    /// so extract an `Option<Lease>` instead.
    DangerouslyExecuteUnprotected,
}

/// The decisions about executions.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) concurrent_requests: ConcurrentRequests,
    pub(crate) waiters_per_key: usize,
    pub(crate) waiters: usize,
    pub(crate) lease: Ttl,
    pub(crate) orphans: OrphanPolicy,
    pub(crate) orphan_retention: Option<Ttl>,
    pub(crate) store_timeout: Duration,
    pub(crate) store_failure: StoreFailure,
}
