//! Warnings of background tasks.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Limits a warning of a background task to one per second, and counts its occurrences.
#[derive(Debug, Default)]
pub(crate) struct WarningLimit(Mutex<WarningState>);

#[derive(Debug, Default)]
struct WarningState {
    last: Option<Instant>,
    /// Occurrences since the last warning.
    count: u64,
}

const INTERVAL: Duration = Duration::from_secs(1);

impl WarningLimit {
    /// Adds occurrences. If a warning is due, returns their number since the last one.
    pub(crate) fn add(&self, occurrences: u64) -> Option<u64> {
        let now = Instant::now();
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.count += occurrences;
        if state.last.is_some_and(|last| now - last < INTERVAL) {
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.count))
    }
}

/// Reports an event to the subscriber. Ignores its panic: a subscriber is foreign code, and must not end a background task.
pub(crate) fn catch_report_panic(report: impl FnOnce()) {
    // Unwind safe: a report changes nothing that the task reads.
    let _ = catch_unwind(AssertUnwindSafe(report));
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_second_has_number_of_occurrences() {
        let limit = WarningLimit::default();
        assert_eq!(limit.add(2), Some(2));
        for _ in 0..9 {
            advance(Duration::from_millis(100)).await;
            assert_eq!(limit.add(3), None);
        }
        advance(Duration::from_millis(100)).await;
        assert_eq!(limit.add(1), Some(28));
        advance(INTERVAL).await;
        assert_eq!(limit.add(1), Some(1));
    }
}
