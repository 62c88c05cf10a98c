//! Limits of repeated warnings.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Limits a warning to one per interval, and counts its occurrences.
pub(super) struct WarningLimit {
    interval: Duration,
    state: Mutex<WarningState>,
}

struct WarningState {
    last: Option<Instant>,
    /// Occurrences since the last warning.
    count: u64,
}

impl WarningLimit {
    pub(super) const fn new(interval: Duration) -> Self {
        let state = WarningState {
            last: None,
            count: 0,
        };
        Self {
            interval,
            state: Mutex::new(state),
        }
    }

    /// Counts an occurrence. If a warning is due, returns the number of occurrences since the last one.
    pub(super) fn count(&self) -> Option<u64> {
        let now = Instant::now();
        let mut state = self.lock();
        state.count += 1;
        if state.last.is_some_and(|last| now - last < self.interval) {
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.count))
    }

    /// Returns the number of occurrences since the last warning, once a warning has been due for an interval.
    ///
    /// While occurrences continue, the next warning has their number.
    pub(super) fn take_rest(&self) -> Option<u64> {
        let mut state = self.lock();
        let has_ended = state
            .last
            .is_some_and(|last| last.elapsed() >= self.interval * 2);
        (has_ended && state.count > 0).then(|| std::mem::take(&mut state.count))
    }

    /// Returns the number of occurrences since the last warning. Does not wait for further ones.
    pub(super) fn take_rest_now(&self) -> Option<u64> {
        let count = std::mem::take(&mut self.lock().count);
        (count > 0).then_some(count)
    }

    /// Returns `true` if there were occurrences since the last warning.
    pub(super) fn has_rest(&self) -> bool {
        self.lock().count > 0
    }

    fn lock(&self) -> MutexGuard<'_, WarningState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
