//! Wall clock and jitter, which a simulation replaces with values from its seed.

use std::time::{Duration, SystemTime};

/// Returns between 3/4 of `delay` and all of it, so that callers that failed together do not retry together.
pub(crate) fn jittered(delay: Duration) -> Duration {
    delay * 3 / 4 + delay / 4 * u32::from(random_byte()) / 255
}

/// Returns the wall-clock time, with which records are stamped.
pub(crate) fn now() -> SystemTime {
    #[cfg(feature = "conformance")]
    if let Some(now) = seeded::now() {
        return now;
    }
    SystemTime::now()
}

fn random_byte() -> u8 {
    #[cfg(feature = "conformance")]
    if let Some(byte) = seeded::random_byte() {
        return byte;
    }
    let mut byte = [255];
    // If the operating system has no randomness, the delay has no jitter. Nothing else depends on it.
    let _ = getrandom::fill(&mut byte);
    byte[0]
}

#[cfg(feature = "conformance")]
pub(crate) mod seeded {
    use std::{
        cell::Cell,
        time::{Duration, SystemTime},
    };

    thread_local! {
        static STATE: Cell<Option<u64>> = const { Cell::new(None) };
        static RECORDS: Cell<u64> = const { Cell::new(0) };
    }

    /// Draws the jitter of this thread from a seed, or from the operating system if `seed` is `None`.
    ///
    /// Jitter is the only randomness that decides when the layer acts. A simulation with a seed and a paused clock therefore
    /// repeats exactly. While a seed is set, records are stamped one millisecond apart, so that the machine's clock does not
    /// decide if two records are equal. Tokens remain random.
    pub fn seed_jitter(seed: Option<u64>) {
        STATE.set(seed);
        RECORDS.set(0);
    }

    pub(super) fn now() -> Option<SystemTime> {
        STATE.get()?;
        let records = RECORDS.get() + 1;
        RECORDS.set(records);
        Some(SystemTime::UNIX_EPOCH + Duration::from_millis(records))
    }

    pub(super) fn random_byte() -> Option<u8> {
        let state = STATE.get()?;
        // A linear congruential generator. Its upper bits are random enough for a delay.
        let next = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        STATE.set(Some(next));
        Some(next.to_be_bytes()[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "conformance")]
    #[test]
    fn seeded_timestamps_repeat_and_differ() {
        let times = || {
            seeded::seed_jitter(Some(7));
            let times = [now(), now()];
            seeded::seed_jitter(None);
            times
        };
        let [one, other] = times();
        assert!(one < other, "{one:?}, {other:?}");
        assert_eq!(times(), [one, other]);
        assert!(now() > other, "wall clock again");
    }

    #[test]
    fn jittered_delay_is_within_bounds() {
        let delay = Duration::from_millis(40);
        for _ in 0..1_000 {
            let jittered = jittered(delay);
            assert!(jittered >= Duration::from_millis(30) && jittered <= delay);
        }
    }

    #[cfg(feature = "conformance")]
    #[test]
    fn seeded_delays_repeat() {
        let delays = || -> Vec<Duration> {
            seeded::seed_jitter(Some(7));
            let delays = (0..100).map(|_| jittered(Duration::from_secs(1))).collect();
            seeded::seed_jitter(None);
            delays
        };
        let first = delays();
        assert_eq!(first, delays());
        assert!(first.windows(2).any(|two| two[0] != two[1]), "they differ");
    }
}
