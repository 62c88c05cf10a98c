use std::time::Duration;

/// Growing delays between the attempts at a message, with full jitter.
///
/// The delay after failure `n` is uniform between zero and `base` x 2^(n-1), and `cap` bounds it. Without the jitter, all
/// messages that failed in an outage would be retried at the same time.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    base: Duration,
    cap: Duration,
    random: fn() -> f64,
}

impl Backoff {
    /// Returns the delays for the bound `base` of the first delay. The bound doubles after each failure, up to `cap`.
    #[must_use]
    pub fn new(base: Duration, cap: Duration) -> Self {
        Self { base, cap, random }
    }

    /// Sets the source of random fractions between 0 and 1. Default: the operating system.
    #[must_use]
    pub fn with_random(self, random: fn() -> f64) -> Self {
        Self { random, ..self }
    }

    /// Returns the delay after this number of failures, counted from 1.
    #[must_use]
    pub fn delay(&self, failures: u32) -> Duration {
        let factor = 2_u32.saturating_pow(failures.saturating_sub(1));
        let longest = self.base.saturating_mul(factor).min(self.cap);
        let delay = longest.as_secs_f64() * (self.random)();
        // A number that is no duration, such as one beyond the largest, counts as the longest delay.
        Duration::try_from_secs_f64(delay).map_or(longest, |it| it.min(longest))
    }
}

/// Returns a random fraction. Without randomness, the delay is the longest.
fn random() -> f64 {
    getrandom::u32().map_or(1.0, |it| f64::from(it) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_doubles_up_to_cap() {
        let backoff = Backoff::new(SECOND, SECOND * 10).with_random(|| 1.0);
        let delays: Vec<_> = (1..=6).map(|it| backoff.delay(it).as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 8, 10, 10]);
        assert_eq!(backoff.delay(u32::MAX), SECOND * 10);
        for random in [|| 1.0, || f64::NAN, || -1.0] {
            let longest = Backoff::new(Duration::MAX, Duration::MAX).with_random(random);
            assert_eq!(longest.delay(9), Duration::MAX);
        }
    }

    /// Judges with certainty: a quarter is empty with a probability of (3/4)^2000, less than 10^-249.
    #[test]
    fn delays_spread_from_zero_to_bound() {
        let backoff = Backoff::new(SECOND, SECOND * 10);
        for (failures, bound) in [(1, 1), (2, 2), (3, 4), (9, 10)] {
            let mut quarters = [0; 4];
            for _ in 0..2000 {
                let part = backoff.delay(failures).as_secs_f64() / f64::from(bound);
                assert!(part <= 1.0, "{part} of the bound");
                quarters[((part * 4.0) as usize).min(3)] += 1;
            }
            assert!(!quarters.contains(&0), "after {failures}: {quarters:?}");
        }
    }

    const SECOND: Duration = Duration::from_secs(1);
}
