//! The clock of the process. DynamoDB has no clock that a condition could read.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The process's clock, and the maximum difference from the clock of another process.
#[derive(Clone)]
pub(crate) struct Clock {
    pub(crate) now: Arc<dyn Fn() -> SystemTime + Send + Sync>,
    /// `true` for the clock of the machine, which is compared with that of the service.
    pub(crate) is_system: bool,
    pub(crate) skew: Duration,
}

/// A reading of the clock, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) now: u64,
    /// The latest deadline that has passed on every clock within the allowed skew: `now - skew`. An entry has expired if
    /// its expiry is not later than this time.
    pub(crate) passed: u64,
    /// The allowed skew.
    pub(crate) skew: u64,
}

impl Clock {
    /// Reads the clock. All values that one write sets and compares belong to one reading.
    pub(crate) fn read(&self) -> Moment {
        let since_epoch = (self.now)().duration_since(UNIX_EPOCH);
        let now = since_epoch.unwrap_or_default().as_millis();
        let now = u64::try_from(now).unwrap_or(u64::MAX);
        let skew = ceil_millis(self.skew);
        Moment {
            now,
            passed: now.saturating_sub(skew),
            skew,
        }
    }
}

impl Moment {
    /// Returns the time until a deadline.
    ///
    /// After the deadline, returns the time until the allowance for skew has passed too: the clock of another process may
    /// not have reached the deadline.
    pub(crate) fn until(self, deadline: u64) -> Duration {
        let left = deadline
            .checked_sub(self.now)
            .filter(|left| *left > 0)
            .unwrap_or_else(|| deadline.saturating_sub(self.passed));
        Duration::from_millis(left)
    }

    /// Returns the value of `ttl` for a deadline of this process, in seconds.
    ///
    /// The service compares the value with its own clock. If the clock of this process is behind, the service reaches the
    /// deadline earlier. So the value includes the allowed skew.
    pub(crate) fn ttl(self, deadline: u64) -> u64 {
        ceil_seconds(deadline.saturating_add(self.skew))
    }

    /// Returns the time since a deadline, or zero before it.
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

/// Returns whole seconds, rounded up, so that the service never deletes an item early.
pub(crate) const fn ceil_seconds(millis: u64) -> u64 {
    millis.div_ceil(1000)
}

/// Returns whole milliseconds, rounded up.
fn ceil_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(now: u64, skew: u64) -> Moment {
        let clock = Clock {
            now: Arc::new(move || UNIX_EPOCH + Duration::from_millis(now)),
            is_system: false,
            skew: Duration::from_millis(skew),
        };
        clock.read()
    }

    #[test]
    fn deadline_passes_later_by_allowed_skew() {
        assert_eq!(moment(10_000, 2_000).passed, 8_000);
        assert_eq!(moment(1_000, 2_000).passed, 0);
        assert_eq!(moment(10_000, 0).passed, 10_000);
    }

    #[test]
    fn until_counts_allowance_after_deadline() {
        let moment = moment(10_000, 2_000);
        assert_eq!(moment.until(10_500), Duration::from_millis(500));
        assert_eq!(moment.until(10_000), Duration::from_millis(2_000));
        assert_eq!(moment.until(8_001), Duration::from_millis(1));
        assert_eq!(moment.since(8_000), Duration::from_millis(2_000));
    }

    #[test]
    fn ttl_includes_allowed_skew() {
        let moment = moment(10_000, 2_000);
        assert_eq!(
            [8_000, 8_001, 10_000].map(|it| moment.ttl(it)),
            [10, 11, 12]
        );
    }

    // F-045
    #[test]
    fn durations_round_up() {
        assert_eq!([0, 1, 1_000, 1_001].map(ceil_seconds), [0, 1, 1, 2]);
        let skews = [0, 1, 1_000_000, 1_000_001].map(Duration::from_nanos);
        assert_eq!(skews.map(ceil_millis), [0, 1, 1, 2]);
        assert_eq!(ceil_millis(Duration::MAX), u64::MAX);
    }
}
