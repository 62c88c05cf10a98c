//! The budget of retries that all calls of a client share.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use crate::verdict::Cause;

/// Budget of retries, in tokens. Clones share their tokens.
///
/// A retry takes 14 tokens after a failure, and 5 if the server limits requests. It takes none while the server executes
/// the first request. A definite response returns the tokens of the last retry that took any, at least 1. So during a long
/// outage the budget is soon spent, and each request is sent once.
///
/// Use one budget for each server. In a shared budget, the failure of one server stops the retries for all servers.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Tokens>);

#[derive(Debug)]
struct Tokens {
    capacity: u32,
    available: AtomicU32,
}

impl Budget {
    /// Creates a budget that begins full. With fewer than 14 tokens no failure is retried.
    #[must_use]
    pub fn new(tokens: u32) -> Self {
        Self(Arc::new(Tokens {
            capacity: tokens,
            available: AtomicU32::new(tokens),
        }))
    }

    /// Takes the tokens of a retry. Returns `false` if too few are left.
    pub(crate) fn take(&self, cost: u32) -> bool {
        self.update(|available| available.checked_sub(cost))
    }

    pub(crate) fn refill(&self, tokens: u32) {
        self.update(|available| {
            // A full budget is the usual case, and needs no write.
            (available < self.0.capacity)
                .then(|| available.saturating_add(tokens).min(self.0.capacity))
        });
    }

    fn update(&self, change: impl FnMut(u32) -> Option<u32>) -> bool {
        self.0
            .available
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, change)
            .is_ok()
    }
}

/// Returns the tokens that a retry takes.
pub(crate) const fn cost(cause: Cause) -> u32 {
    match cause {
        Cause::NotSent | Cause::Transient => 14,
        Cause::Throttled => 5,
        Cause::InProgress => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_tokens() {
        let budget = Budget::new(20);
        assert!(budget.clone().take(14));
        assert!(!budget.take(14), "6 tokens are left");
        assert!(budget.take(5));
        budget.clone().refill(13);
        assert!(budget.take(14));
    }

    #[test]
    fn budget_never_exceeds_capacity() {
        let budget = Budget::new(20);
        budget.refill(14);
        assert!(budget.take(20));
        assert!(!budget.take(1));
        assert!(budget.take(0));
    }
}
