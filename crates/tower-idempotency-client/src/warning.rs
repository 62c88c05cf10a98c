//! A limit of repeated warnings.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Limits a warning to one per second, and counts its occurrences.
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
    /// Counts an occurrence. If a warning is due, returns the number of occurrences since the last one.
    pub(crate) fn count(&self) -> Option<u64> {
        let now = Instant::now();
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.count += 1;
        if state.last.is_some_and(|last| now - last < INTERVAL) {
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.count))
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_second_has_number_of_occurrences() {
        let limit = WarningLimit::default();
        assert_eq!(limit.count(), Some(1));
        for _ in 0..9 {
            advance(Duration::from_millis(100)).await;
            assert_eq!(limit.count(), None);
        }
        advance(Duration::from_millis(100)).await;
        assert_eq!(limit.count(), Some(10));
        advance(INTERVAL).await;
        assert_eq!(limit.count(), Some(1));
    }
}
