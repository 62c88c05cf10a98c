//! Clock under the control of a test.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, SystemTime},
};

/// Clock that stands still until a test advances it.
///
/// Intended for stores that use the clock of their process. Clones share one time. With
/// [`Subject::with_clock`](super::Subject::with_clock) the cases advance this clock instead of waiting, so they take no
/// time and no stall of the machine can expire a lease.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// use tower_idempotency::conformance::ManualClock;
///
/// let clock = ManualClock::new();
/// let before = clock.now();
/// clock.advance(Duration::from_secs(60));
/// assert_eq!(clock.now(), before + Duration::from_secs(60));
/// ```
#[derive(Clone, Debug)]
pub struct ManualClock {
    start: SystemTime,
    elapsed_nanos: Arc<AtomicU64>,
}

impl ManualClock {
    /// Returns a clock that shows the current time of the system.
    #[must_use]
    pub fn new() -> Self {
        Self {
            start: SystemTime::now(),
            elapsed_nanos: Arc::default(),
        }
    }

    /// Returns the time that the clock shows.
    #[must_use]
    pub fn now(&self) -> SystemTime {
        self.start + self.elapsed()
    }

    /// Moves the clock forward, for all clones.
    ///
    /// # Panics
    ///
    /// If the duration is longer than 584 years.
    pub fn advance(&self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).expect("less than 584 years");
        self.elapsed_nanos.fetch_add(nanos, SeqCst);
    }

    pub(super) fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.elapsed_nanos.load(SeqCst))
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}
