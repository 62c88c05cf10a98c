//! The time from which the lifetime of a key counts.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// Time of the first attempt, on both clocks.
///
/// Neither is enough: the monotonic clock stops while the machine is suspended, and the wall clock can be set back.
#[derive(Clone, Copy)]
pub(crate) struct FirstSent {
    pub(crate) wall: SystemTime,
    monotonic: Instant,
    /// Age of the operation at the time `monotonic`.
    age: Duration,
}

impl FirstSent {
    /// Returns the time of an attempt that begins now.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            wall: SystemTime::now(),
            monotonic: now,
            age: Duration::ZERO,
        }
    }

    /// Restores a time of the wall clock. If it is more than a minute in the future, one of the clocks is wrong, and the age is
    /// the longest possible one.
    pub(crate) fn restored(at: SystemTime) -> Self {
        let age = match SystemTime::now().duration_since(at) {
            Ok(age) => age,
            Err(error) if error.duration() <= CLOCK_SKEW => Duration::ZERO,
            Err(_) => Duration::MAX,
        };
        Self {
            wall: at,
            monotonic: Instant::now(),
            age,
        }
    }

    /// Returns this time with at least the age that has passed since `first`. The wall clock may have been set meanwhile.
    pub(crate) fn known_since(self, first: Self) -> Self {
        if self.was_in_future() {
            // Once the clock is corrected, the age of `first` counts. If that is the longest one, it is not known.
            let began = first.monotonic.checked_sub(first.age);
            let monotonic = began.unwrap_or(first.monotonic);
            return Self { monotonic, ..self };
        }
        let age = self.age.max(first.monotonic.elapsed());
        Self { age, ..self }
    }

    /// Returns `true` if the restored time was more than a minute in the future, so that one of the clocks is wrong.
    pub(crate) fn was_in_future(&self) -> bool {
        self.age == Duration::MAX
    }

    /// Returns `true` if the server may have deleted a record that it stored at this time.
    pub(crate) fn is_older_than(&self, lifetime: Duration) -> bool {
        let by_wall_clock = self.wall.elapsed().unwrap_or_default();
        let by_monotonic_clock = self.age.saturating_add(self.monotonic.elapsed());
        by_wall_clock.max(by_monotonic_clock) >= lifetime
    }
}

/// Difference between the clocks of two machines that is not an error.
const CLOCK_SKEW: Duration = Duration::from_secs(60);
