//! Rate at which a caller may send fresh keys.

use std::{
    num::NonZeroU32,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use governor::{
    Quota, RateLimiter, clock::Clock, middleware::NoOpMiddleware, nanos::Nanos,
    state::keyed::HashMapStateStore,
};
use tokio::time::Instant;

use crate::store::ScopeDigest;

type Limiter =
    RateLimiter<ScopeDigest, HashMapStateStore<ScopeDigest>, TokioClock, NoOpMiddleware<Nanos>>;

/// Rate of fresh keys, for each caller separately.
pub(crate) struct FreshKeyRate {
    limiter: Limiter,
    checks: AtomicUsize,
}

impl FreshKeyRate {
    pub(crate) fn new(per_second: NonZeroU32, burst: NonZeroU32) -> Self {
        let quota = Quota::per_second(per_second).allow_burst(burst);
        let clock = TokioClock(Instant::now());
        Self {
            limiter: RateLimiter::new(quota, HashMapStateStore::default(), clock),
            checks: AtomicUsize::new(0),
        }
    }

    /// Counts a fresh key of this caller. Returns the time to wait if the rate does not allow it.
    pub(crate) fn check(&self, caller: ScopeDigest) -> Result<(), Duration> {
        // A caller with a full burst needs no entry.
        if self.checks.fetch_add(1, Ordering::Relaxed) % CLEAN_EVERY == CLEAN_EVERY - 1 {
            self.limiter.retain_recent();
            self.limiter.shrink_to_fit();
        }
        self.limiter
            .check_key(&caller)
            .map_err(|until| until.wait_time_from(self.limiter.clock().now()))
    }
}

/// Tokio's clock, which tests can pause.
#[derive(Clone)]
struct TokioClock(Instant);

impl Clock for TokioClock {
    type Instant = Nanos;

    fn now(&self) -> Nanos {
        self.0.elapsed().into()
    }
}

/// Number of checks after which entries are removed that are no longer needed.
const CLEAN_EVERY: usize = 4096;
