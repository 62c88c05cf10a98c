//! What time it is. DynamoDB has no clock that a condition could read, so it is each process's own.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// A process's clock, and how far it may be from another's.
#[derive(Clone)]
pub(crate) struct Clock {
    pub(crate) now: Arc<dyn Fn() -> SystemTime + Send + Sync>,
    pub(crate) skew: Duration,
}

/// One reading of the clock, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) now: u64,
    /// Deadlines up to here have passed by every clock within the allowed skew. Only those count as over.
    pub(crate) over: u64,
}

impl Clock {
    /// Reads the clock once: all that a call writes and compares is of one moment.
    pub(crate) fn read(&self) -> Moment {
        let since = (self.now)().duration_since(UNIX_EPOCH);
        let now = millis(since.unwrap_or_default());
        Moment {
            now,
            over: now.saturating_sub(millis(self.skew)),
        }
    }
}

impl Moment {
    /// What is left until a deadline. One that has passed, but may not have by another's clock, is over once the
    /// allowance for skew has passed too.
    pub(crate) fn until(self, deadline: u64) -> Duration {
        let left = deadline
            .checked_sub(self.now)
            .filter(|left| *left > 0)
            .unwrap_or_else(|| deadline.saturating_sub(self.over));
        Duration::from_millis(left)
    }

    /// How long ago a deadline was.
    pub(crate) fn since(self, deadline: u64) -> Duration {
        Duration::from_millis(self.now.saturating_sub(deadline))
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clock")
            .field("skew", &self.skew)
            .finish_non_exhaustive()
    }
}

/// Whole seconds, rounded up: what is collected by the second is not collected early.
pub(crate) const fn seconds(millis: u64) -> u64 {
    millis.div_ceil(1000)
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(now: u64, skew: u64) -> Moment {
        let clock = Clock {
            now: Arc::new(move || UNIX_EPOCH + Duration::from_millis(now)),
            skew: Duration::from_millis(skew),
        };
        clock.read()
    }

    #[test]
    fn a_deadline_is_over_once_it_is_by_every_clock_within_the_skew() {
        assert_eq!(at(10_000, 2_000).over, 8_000);
        assert_eq!(at(1_000, 2_000).over, 0);
        assert_eq!(at(10_000, 0).over, 10_000);
    }

    #[test]
    fn what_is_left_of_a_lease_counts_to_its_end_and_then_to_the_end_of_the_allowance() {
        let moment = at(10_000, 2_000);
        assert_eq!(moment.until(10_500), Duration::from_millis(500));
        assert_eq!(moment.until(10_000), Duration::from_millis(2_000));
        assert_eq!(moment.until(8_001), Duration::from_millis(1));
        assert_eq!(moment.since(8_000), Duration::from_millis(2_000));
    }

    #[test]
    fn seconds_round_up() {
        assert_eq!([0, 1, 1_000, 1_001].map(seconds), [0, 1, 1, 2]);
    }
}
