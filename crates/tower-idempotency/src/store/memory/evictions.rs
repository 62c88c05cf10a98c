//! Reports of records that were evicted before their expiry.

use std::sync::atomic::Ordering::Relaxed;

use super::{budget::Budget, sync::AtomicUsize};
use crate::panics::catch_report_panic;

/// Time between two warnings, in seconds.
const WARNING_INTERVAL: u64 = 60;
const NANOS: u64 = 1_000_000_000;

/// Evictions that are not reported yet. They are counted under the lock of a shard and reported without it, because a
/// subscriber is foreign code.
#[derive(Default)]
pub(super) struct Evictions {
    uncounted: AtomicUsize,
    without_warning: AtomicUsize,
    /// The second from which on the next warning is due.
    next_warning: AtomicUsize,
}

impl Evictions {
    /// Adds an eviction of a record before its expiry.
    pub(super) fn add(&self) {
        self.uncounted.fetch_add(1, Relaxed);
    }

    /// Counts the evictions since the last report. Logs a warning unless one was logged in the last minute.
    pub(super) fn report(&self, budget: &Budget, now: u64) {
        if self.uncounted.load(Relaxed) == 0 {
            return;
        }
        let evicted = self.uncounted.swap(0, Relaxed);
        #[cfg(feature = "metrics")]
        catch_report_panic(|| {
            metrics::counter!("idempotency_memory_evicted_total").increment(evicted as u64);
        });
        self.without_warning.fetch_add(evicted, Relaxed);
        let second = now / NANOS;
        let due = self.next_warning.load(Relaxed);
        let next = usize::try_from(second + WARNING_INTERVAL).unwrap_or(usize::MAX);
        let is_due = due as u64 <= second
            && self
                .next_warning
                .compare_exchange(due, next, Relaxed, Relaxed)
                .is_ok();
        if is_due {
            let evicted = self.without_warning.swap(0, Relaxed);
            let (entries, bytes) = (budget.entries(), budget.bytes());
            catch_report_panic(|| {
                tracing::warn!(
                    evicted,
                    entries,
                    bytes,
                    "memory store is full: records were evicted before their expiry, their retries execute again"
                );
            });
        }
    }
}
