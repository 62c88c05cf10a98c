//! Setters about executions: duplicates, leases, orphans and the store.

use std::time::Duration;

use crate::{
    enforcement::EnforcementSwitch,
    execution::rules::{ConcurrentRequests, ExecutionFailure, StoreFailure},
    layer::IdempotencyLayer,
    store::{OrphanPolicy, Ttl},
};

/// Concurrency: duplicates that arrive while the first request is executed.
impl IdempotencyLayer {
    /// Sets the response to a duplicate that arrives while the first request is executed. Default:
    /// [`ConcurrentRequests::Conflict`].
    ///
    /// A long [`ConcurrentRequests::Wait`] holds connections and memory as long as a slow handler runs. Limit them with
    /// [`with_max_waiters`](Self::with_max_waiters).
    pub fn with_concurrent_requests(self, concurrent_requests: ConcurrentRequests) -> Self {
        self.set(|config| config.execution.concurrent_requests = concurrent_requests)
    }

    /// Sets how many requests may wait with [`ConcurrentRequests::Wait`], for one key and in total. Default: 64 and 1,024
    /// requests.
    ///
    /// Further duplicates get 409 at once; if one of the numbers is 0, all duplicates do. If the numbers are too high, waiting
    /// requests use up memory: each one holds its connection and its body.
    pub fn with_max_waiters(self, per_key: usize, total: usize) -> Self {
        self.set(|config| {
            config.execution.waiters_per_key = per_key;
            config.execution.waiters = total;
        })
    }
}

/// Lease and orphans.
impl IdempotencyLayer {
    /// Sets the duration of a lease. Default: 15 s.
    ///
    /// The layer renews a lease every third of its duration (5 s) as long as the handler runs, even if it never finishes. The
    /// default of [`with_overdue_after`](Self::with_overdue_after) follows from the lease.
    ///
    /// If the lease is too short, a paused process or a slow store loses it, and the request executes twice. If it is too
    /// long, a key stays blocked that long after a crash. Use less than 1 s only in tests.
    pub fn with_lease_ttl(self, ttl: Ttl) -> Self {
        self.set(|config| config.execution.lease_ttl = ttl)
    }

    /// Sets the time after which an execution that has not finished counts as overdue. Default: 10 x
    /// [lease](Self::with_lease_ttl) (150 s).
    ///
    /// An overdue execution continues. The layer logs a warning and counts `idempotency_overdue_total`, once for each
    /// execution, when it renews the lease next.
    ///
    /// Under [`Enforcement::Observe`](crate::Enforcement::Observe), this is also the lease of an observed execution, at most
    /// 24 h. If the execution takes longer, its later retries count as `fresh` and not as `would_conflict`.
    ///
    /// If the value is too short, slow handlers cause alarms. If it is too long, an operator learns late of a handler that
    /// hangs and blocks its key.
    pub fn with_overdue_after(self, overdue_after: Duration) -> Self {
        self.set(|config| config.execution.overdue_after = Some(overdue_after))
    }

    /// Sets the treatment of orphans: keys whose execution ended without an outcome, for example in a crash. Default:
    /// [`OrphanPolicy::TakeOver`].
    ///
    /// - [`OrphanPolicy::TakeOver`] is at-least-once: a retry executes again, and the effect may happen twice.
    /// - [`OrphanPolicy::Refuse`] is at-most-once: retries get 409 until the orphan expires. An operator must determine the
    ///   outcome and [resolve](crate::inspect) the entry. A failed execution leaves an orphan too, unless
    ///   [`with_failure`](Self::with_failure) changes that. But a 5xx of the handler releases the key, also after an effect.
    /// - [`OrphanPolicy::Never`] is the same, but a [retry](crate::inspect::Resolution::Retry) that an operator allows has
    ///   no effect.
    ///
    /// The policy of the process that receives the retry applies. Orphans execute again as long as one process on the store
    /// uses [`OrphanPolicy::TakeOver`].
    pub fn with_orphan_policy(self, policy: OrphanPolicy) -> Self {
        self.set(|config| config.execution.orphan_policy = policy)
    }

    /// Sets the state in which a failed execution leaves its key. Failures are a panic of the handler, an error of the
    /// inner service, and a response body that fails. Default: [`ExecutionFailure::Release`], and
    /// [`ExecutionFailure::Orphan`] with [`OrphanPolicy::Refuse`].
    ///
    /// For [`run_once`](Self::run_once) the setting applies to panics only. [`WorkError`](crate::run_once::WorkError)
    /// decides about errors.
    ///
    /// With [`ExecutionFailure::Release`], a handler that fails after its effect repeats the effect in each retry, even
    /// under [`OrphanPolicy::Refuse`]. With the other values, a handler that fails before its effect blocks its key. So does
    /// a layer inside that returns an error without a call of the handler, such as tower's `LoadShed`. The entry is an orphan
    /// under [`OrphanPolicy::Refuse`], or needs attention until an operator resolves it.
    ///
    /// A response with a status that is not recorded, such as a 500, is no failure: the key is released.
    pub fn with_failure(self, failure: ExecutionFailure) -> Self {
        self.set(|config| config.execution.failure = Some(failure))
    }

    /// Sets the retention of orphans. Default: the [retention](Self::with_retention) (24 h).
    ///
    /// Each attempt to execute the orphan restarts the period. An orphan that is retried more often than this never expires.
    ///
    /// If the value is shorter than the time in which clients retry, a late retry executes again, without a takeover. This
    /// applies to [`OrphanPolicy::Refuse`] too.
    pub fn with_orphan_retention(self, retention: Ttl) -> Self {
        self.set(|config| config.execution.orphan_retention = Some(retention))
    }
}

/// Enforcement.
impl IdempotencyLayer {
    /// Sets the enforcement of the layer, or a switch that changes the enforcement at run time. Default:
    /// [`Enforcement::Enforce`](crate::Enforcement::Enforce).
    ///
    /// Clones of the layer share the switch. To switch one route alone, give its clone a switch of its own.
    /// [`run_once`](Self::run_once), [`items`](Self::items), [`take_over`](Self::take_over) and [`drain`](Self::drain)
    /// ignore the enforcement.
    ///
    /// With [`Enforcement::Observe`](crate::Enforcement::Observe), the layer counts the treatment that each request would
    /// get in `idempotency_observed_total`, under separate IDs. It counts a request as `not_judged` if the observation
    /// would need more store calls or memory than its limit. If the setting stays at `Observe` or `Off`, every retry
    /// executes again.
    pub fn with_enforcement(self, enforcement: impl Into<EnforcementSwitch>) -> Self {
        self.set(|config| config.enforcement = enforcement.into())
    }
}

/// Store: timeouts and outages.
impl IdempotencyLayer {
    /// Sets the timeout of one store call. Default: 2 s.
    ///
    /// The layer tries to acquire, complete or release at most three times, in at most 4 s (2 x timeout). A renewal takes at
    /// most a third of the lease.
    ///
    /// | the response is delayed by at most | if |
    /// |---|---|
    /// | 4 s (2 x timeout) | the layer stores the record or releases the key |
    /// | 12 s (6 x timeout) | the lease is lost, or a commit of the handler is unacknowledged |
    /// | 20 s (10 x timeout) | the handler reported a commit, and returned another response |
    /// | 4 s more | the store rejects the record as too large |
    ///
    /// If the timeout is too short, a slow store counts as an outage. With zero, only stores work that reply at once, such as
    /// [`MemoryStore`](crate::MemoryStore). If it is too long, requests pile up during an outage.
    ///
    /// With a SQL store, set at least 1.5 s. Below that, the store may refuse requests after its connections died. Below 1 s, it
    /// does not detect a stalled server, and leaves more statements on it. Up to 250 ms, each dead connection costs a timeout.
    pub fn with_store_timeout(self, timeout: Duration) -> Self {
        self.set(|config| config.execution.store_timeout = timeout)
    }

    /// Sets the treatment of requests that get no lease because the store fails. Default: [`StoreFailure::Refuse`].
    ///
    /// With the default, an outage of the store is an outage of the covered routes. With
    /// [`StoreFailure::DangerouslyExecuteUnprotected`], retries during an outage execute again. The setting does not apply
    /// to [`run_once`](Self::run_once), which always returns an error.
    pub fn with_store_failure(self, failure: StoreFailure) -> Self {
        self.set(|config| config.execution.store_failure = failure)
    }
}
