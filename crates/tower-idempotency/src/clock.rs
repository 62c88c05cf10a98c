//! Pauses of slightly different lengths, and the time of day: what a simulation has to draw from its seed.

use std::time::{Duration, SystemTime};

/// Between three quarters of `pause` and all of it, so that those who failed together do not come back together.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause * 3 / 4 + pause / 4 * u32::from(drawn()) / 255
}

/// The time of day, for a record to say when it was made.
pub(crate) fn now() -> SystemTime {
    #[cfg(feature = "conformance")]
    if let Some(now) = seeded::now() {
        return now;
    }
    SystemTime::now()
}

fn drawn() -> u8 {
    #[cfg(feature = "conformance")]
    if let Some(drawn) = seeded::drawn() {
        return drawn;
    }
    let mut byte = [255];
    // Without randomness there is no jitter, and nothing else is lost.
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

    /// Draws the jitter of this thread's pauses from a seed from here on, or from the operating system again.
    ///
    /// It is the only randomness that decides when the layer does something, so a simulation with it and a paused clock runs
    /// the same each time. Records are a millisecond apart meanwhile, as whether two are alike must not depend on the
    /// machine's clock. Tokens stay as random as they are.
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

    pub(super) fn drawn() -> Option<u8> {
        let state = STATE.get()?;
        // A linear congruence: its upper bits are random enough for a pause.
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
    fn records_of_a_seed_are_made_at_the_same_times_and_no_two_at_one() {
        let times = || {
            seeded::seed_jitter(Some(7));
            let times = [now(), now()];
            seeded::seed_jitter(None);
            times
        };
        let [one, other] = times();
        assert!(one < other, "{one:?}, {other:?}");
        assert_eq!(times(), [one, other]);
        assert!(now() > other, "the time of day again");
    }

    #[test]
    fn a_pause_is_never_longer_than_asked_nor_much_shorter() {
        let pause = Duration::from_millis(40);
        for _ in 0..1_000 {
            let jittered = jittered(pause);
            assert!(jittered >= Duration::from_millis(30) && jittered <= pause);
        }
    }

    #[cfg(feature = "conformance")]
    #[test]
    fn a_seed_draws_the_same_pauses_each_time() {
        let pauses = || -> Vec<Duration> {
            seeded::seed_jitter(Some(7));
            let pauses = (0..100).map(|_| jittered(Duration::from_secs(1))).collect();
            seeded::seed_jitter(None);
            pauses
        };
        let first = pauses();
        assert_eq!(first, pauses());
        assert!(first.windows(2).any(|two| two[0] != two[1]), "they differ");
    }
}
