//! Delays between attempts: exponential, with full jitter.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Source of random delays, shared by all clones of a layer.
///
/// Each draw advances the state by one atomic addition and mixes the result (SplitMix64).
#[derive(Debug)]
pub(crate) struct Jitter(AtomicU64);

impl Jitter {
    /// Creates a source with a seed from the operating system.
    pub(crate) fn from_system() -> Self {
        let mut seed = [0; 8];
        // Without randomness from the system the delays of two processes may be the same. Nothing else depends on it.
        let _ = getrandom::fill(&mut seed);
        Self::seeded(u64::from_le_bytes(seed))
    }

    pub(crate) const fn seeded(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    /// Returns a delay that is uniformly distributed between zero and `ceiling`.
    pub(crate) fn below(&self, ceiling: Duration) -> Duration {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut random = self.0.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        random = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        random = (random ^ (random >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        random ^= random >> 31;
        let ceiling = u64::try_from(ceiling.as_nanos()).unwrap_or(u64::MAX);
        let nanos = (u128::from(random) * u128::from(ceiling)) >> 64;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// Growth of the delays.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    pub(crate) base: Duration,
    pub(crate) cap: Duration,
}

impl Backoff {
    /// Returns the longest delay before this retry, counted from 0: the base, doubled for each earlier retry.
    pub(crate) fn ceiling(self, retry: u32) -> Duration {
        let factor = 1_u32.checked_shl(retry).unwrap_or(u32::MAX);
        self.base.saturating_mul(factor).min(self.cap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ceiling_doubles_up_to_cap() {
        let backoff = Backoff {
            base: Duration::from_millis(50),
            cap: Duration::from_secs(20),
        };
        let millis = |retry| backoff.ceiling(retry).as_millis();
        assert_eq!(
            [0, 1, 2, 8, 9, 31, 32, u32::MAX].map(millis),
            [50, 100, 200, 12_800, 20_000, 20_000, 20_000, 20_000]
        );
    }

    /// Chi-square test with 20 bins. The sum exceeds 43.8 for one of 1,000 seeds if the delays are uniform.
    #[test]
    fn delays_are_uniform() {
        for seed in 0..20 {
            let jitter = Jitter::seeded(seed);
            let mut bins = [0_i32; 20];
            for _ in 0..20_000 {
                let delay = jitter.below(Duration::from_secs(20));
                bins[usize::try_from(delay.as_secs()).unwrap()] += 1;
            }
            let sum: f64 = bins
                .iter()
                .map(|&count| f64::from(count - 1000).powi(2) / 1000.0)
                .sum();
            assert!(sum < 43.8, "seed {seed}: {sum}, {bins:?}");
        }
    }

    #[test]
    fn seed_repeats_delays() {
        let delays = |seed| {
            let jitter = Jitter::seeded(seed);
            [0; 4].map(|_| jitter.below(Duration::from_secs(1)))
        };
        assert_eq!(delays(7), delays(7));
        assert_ne!(delays(7), delays(8));
        assert_eq!(Jitter::seeded(1).below(Duration::ZERO), Duration::ZERO);
        assert!(Jitter::seeded(1).below(Duration::MAX) > Duration::ZERO);
    }
}
