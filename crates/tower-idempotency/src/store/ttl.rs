//! Durations of leases, orphans and records.

use std::{fmt, time::Duration};

/// Nonzero duration in whole milliseconds: at least 1 ms, at most 36,500 days (100 years of 365 days).
///
/// A lease or a retention of zero would expire before it began, so the type excludes it. Fractions of a millisecond
/// round up.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ttl(u64);

impl Ttl {
    /// The shortest duration: 1 ms.
    pub const MIN: Self = Self(1);
    /// The longest duration: 100 years of 365 days, so that the sum of two still fits every backend's clock.
    pub const MAX: Self = Self(100 * 365 * 24 * 60 * 60 * 1000);

    /// Creates a duration of `millis` milliseconds.
    ///
    /// # Panics
    ///
    /// If `millis` is zero or above [`Ttl::MAX`]; in a constant, at compile time. Use `Ttl::try_from(Duration)` for
    /// values that are not known at compile time.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        assert!(
            millis > 0 && millis <= Self::MAX.0,
            "a Ttl is at least 1 ms and at most 36500 days"
        );
        Self(millis)
    }

    /// Creates a duration of `secs` seconds.
    ///
    /// # Panics
    ///
    /// If the duration is zero or above [`Ttl::MAX`], like [`Ttl::from_millis`].
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self::from_millis(secs.saturating_mul(1000))
    }

    /// Returns the duration in milliseconds, which is never 0.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// Returns the value as a [`Duration`].
    #[must_use]
    pub const fn as_duration(self) -> Duration {
        Duration::from_millis(self.0)
    }
}

impl TryFrom<Duration> for Ttl {
    type Error = TtlError;

    fn try_from(duration: Duration) -> Result<Self, TtlError> {
        let millis = duration.as_nanos().div_ceil(1_000_000);
        match u64::try_from(millis) {
            Ok(millis @ 1..) if millis <= Self::MAX.0 => Ok(Self(millis)),
            Ok(_) | Err(_) => Err(TtlError { found: duration }),
        }
    }
}

impl From<Ttl> for Duration {
    fn from(ttl: Ttl) -> Self {
        ttl.as_duration()
    }
}

impl fmt::Debug for Ttl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ttl({:?})", self.as_duration())
    }
}

/// Error for a duration that is zero or longer than 36,500 days.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TtlError {
    found: Duration,
}

impl fmt::Display for TtlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "expected a duration above zero and at most 36500 days, found {:?}",
            self.found
        )
    }
}

impl std::error::Error for TtlError {}
