//! Enforcement of a layer: off, observe or enforce, and the switch that changes it while the service runs.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::{error::ConfigError, store::ScopeDigest};

/// Treatment of requests by a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Enforcement {
    /// Requests and responses pass through. The layer judges nothing and calls no store.
    ///
    /// It removes only the control headers of a response, as in each enforcement: see [`Retention`](crate::Retention).
    Off,
    /// Requests and responses pass through, byte for byte except for the control headers, as with [`Off`](Self::Off). The
    /// layer counts how it would have treated them.
    ///
    /// Handlers get no [`Lease`](crate::Lease) and no [`IdempotencyKey`](crate::IdempotencyKey), as without the layer. With
    /// the feature `axum`, a handler that extracts a `Lease` responds with 500: extract an `Option<Lease>` instead.
    Observe,
    /// The layer executes each keyed request once, and replays its response.
    #[default]
    Enforce,
}

impl Enforcement {
    const fn bits(self) -> u32 {
        match self {
            Self::Off => 0,
            Self::Observe => 1,
            Self::Enforce => 2,
        }
    }

    const fn from_bits(bits: u32) -> Self {
        match bits & 3 {
            0 => Self::Off,
            1 => Self::Observe,
            _ => Self::Enforce,
        }
    }
}

impl fmt::Display for Enforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Observe => "observe",
            Self::Enforce => "enforce",
        })
    }
}

/// Enforcement of a share of the callers, and of all other callers.
///
/// A digest of the [principal](crate::Principal) decides if a caller belongs to the share. So all requests of one caller
/// have the same enforcement, in each process with the same namespace and secret. A larger share contains all callers of a
/// smaller one. All callers without credentials are one caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rollout {
    percent: u8,
    share: Enforcement,
    rest: Enforcement,
}

impl Rollout {
    /// Creates a rollout: `share` for about `percent` percent of the callers, and `rest` for the others.
    ///
    /// # Errors
    ///
    /// Returns an error if `percent` is above 100.
    pub fn new(percent: u8, share: Enforcement, rest: Enforcement) -> Result<Self, ConfigError> {
        if percent > 100 {
            let found = percent.to_string();
            return Err(ConfigError::new("a share of at most 100 percent", found));
        }
        Ok(Self {
            percent,
            share,
            rest,
        })
    }

    /// Returns the share in percent.
    #[must_use]
    pub const fn percent(self) -> u8 {
        self.percent
    }

    /// Returns the enforcement of the share.
    #[must_use]
    pub const fn share(self) -> Enforcement {
        self.share
    }

    /// Returns the enforcement of all other callers.
    #[must_use]
    pub const fn rest(self) -> Enforcement {
        self.rest
    }

    /// Returns the enforcement of all callers, or `None` if callers differ.
    pub(crate) const fn of_all(self) -> Option<Enforcement> {
        match (self.percent, self.share.bits() == self.rest.bits()) {
            (100, _) | (_, true) => Some(self.share),
            (0, _) => Some(self.rest),
            _ => None,
        }
    }

    /// Returns the share of the callers, in percent, whose requests are enforced.
    pub(crate) fn enforced_percent(self) -> u8 {
        let parts = [(self.share, self.percent), (self.rest, 100 - self.percent)];
        let enforced = parts
            .iter()
            .filter(|(part, _)| *part == Enforcement::Enforce);
        enforced.map(|(_, percent)| percent).sum()
    }

    /// Returns the enforcement of one caller.
    pub(crate) fn of(self, caller: &ScopeDigest) -> Enforcement {
        // Any bytes of a digest are uniformly distributed.
        let [.., a, b, c, d] = *caller.as_bytes();
        if u32::from_le_bytes([a, b, c, d]) % 100 < u32::from(self.percent) {
            self.share
        } else {
            self.rest
        }
    }

    fn bits(self) -> u32 {
        self.share.bits() | self.rest.bits() << 2 | u32::from(self.percent) << 4
    }

    fn from_bits(bits: u32) -> Self {
        let [percent, ..] = (bits >> 4).to_le_bytes();
        Self {
            percent,
            share: Enforcement::from_bits(bits),
            rest: Enforcement::from_bits(bits >> 2),
        }
    }
}

impl From<Enforcement> for Rollout {
    fn from(all: Enforcement) -> Self {
        Self {
            percent: 100,
            share: all,
            rest: all,
        }
    }
}

impl fmt::Display for Rollout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.of_all() {
            Some(all) => all.fmt(f),
            None => write!(
                f,
                "{} for {} %, else {}",
                self.share, self.percent, self.rest
            ),
        }
    }
}

/// Switch of the [`Enforcement`] of one or more layers, for use while the service runs. Clones share one state.
///
/// The enforcement at the arrival of a request applies to the end of that request. So a switch under load interrupts no
/// execution, and a recorded response stays recorded. While the layer observes or is off, a retry of a recorded or running
/// request executes again. Keys that are first used during that time count as fresh when the layer enforces again.
///
/// The switch belongs to one process and is not stored. A new process starts with the value of [`new`](Self::new): read it
/// from the configuration. To switch a service, change the configuration first, and then switch every process. A layer that
/// does not enforce all requests logs a warning at its first request.
///
/// ```
/// use axum::{Router, body::Body, http::Request, routing::post};
/// use tower::ServiceExt;
/// use tower_idempotency::{Enforcement, EnforcementSwitch, IdempotencyLayer, MemoryStore, Rollout};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let switch = EnforcementSwitch::new(Enforcement::Observe);
/// let layer = IdempotencyLayer::new(MemoryStore::new()).with_enforcement(&switch);
/// let app: Router = Router::new().route("/pay", post(async || "paid")).route_layer(layer);
///
/// let is_replay = async || {
///     let pay = Request::post("/pay").header("idempotency-key", "8e03978e-40d5").body(Body::empty())?;
///     let res = app.clone().oneshot(pay).await?;
///     Ok::<_, Box<dyn std::error::Error>>(res.headers().contains_key("idempotent-replayed"))
/// };
/// assert!(!is_replay().await? && !is_replay().await?);
///
/// switch.set(Enforcement::Enforce);
/// assert!(!is_replay().await? && is_replay().await?);
///
/// // A tenth of the callers. The others are observed.
/// switch.set(Rollout::new(10, Enforcement::Enforce, Enforcement::Observe)?);
/// assert_eq!(switch.get().to_string(), "enforce for 10 %, else observe");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct EnforcementSwitch(Arc<AtomicU32>);

impl EnforcementSwitch {
    /// Creates a switch. Each process starts with `rollout`, regardless of an earlier [`set`](Self::set).
    #[must_use]
    pub fn new(rollout: impl Into<Rollout>) -> Self {
        Self(Arc::new(AtomicU32::new(rollout.into().bits())))
    }

    /// Sets the enforcement of all requests that arrive from now on, in this process. Logs the change.
    ///
    /// After a restart, the value of [`new`](Self::new) applies again.
    pub fn set(&self, rollout: impl Into<Rollout>) {
        let new = rollout.into();
        let old = Rollout::from_bits(self.0.swap(new.bits(), Ordering::AcqRel));
        if old != new {
            crate::telemetry::enforcement_changed(old, new);
        }
    }

    /// Returns the current enforcement.
    #[must_use]
    pub fn get(&self) -> Rollout {
        Rollout::from_bits(self.0.load(Ordering::Acquire))
    }
}

impl Default for EnforcementSwitch {
    fn default() -> Self {
        Self::new(Enforcement::Enforce)
    }
}

impl From<&EnforcementSwitch> for EnforcementSwitch {
    fn from(switch: &EnforcementSwitch) -> Self {
        switch.clone()
    }
}

impl From<Enforcement> for EnforcementSwitch {
    fn from(all: Enforcement) -> Self {
        Self::new(all)
    }
}

impl From<Rollout> for EnforcementSwitch {
    fn from(rollout: Rollout) -> Self {
        Self::new(rollout)
    }
}

impl fmt::Debug for EnforcementSwitch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EnforcementSwitch({})", self.get())
    }
}

#[cfg(test)]
mod tests {
    use super::{Enforcement::*, *};

    fn caller(n: u32) -> ScopeDigest {
        let mut digest = crate::digest::FieldDigest::new(None);
        digest.number(n as usize);
        digest.scope_digest()
    }

    #[test]
    fn bits_keep_every_rollout() {
        for percent in 0..=100 {
            for share in [Off, Observe, Enforce] {
                for rest in [Off, Observe, Enforce] {
                    let rollout = Rollout::new(percent, share, rest).unwrap();
                    assert_eq!(Rollout::from_bits(rollout.bits()), rollout);
                    assert_eq!(EnforcementSwitch::new(rollout).get(), rollout);
                }
            }
        }
        let error = Rollout::new(101, Enforce, Observe).unwrap_err();
        assert_eq!(
            error.to_string(),
            "expected a share of at most 100 percent, found 101"
        );
    }

    #[test]
    fn enforced_percent_counts_both_parts() {
        use Enforcement::{Enforce, Observe, Off};
        for (percent, share, rest, expected) in [
            (100, Enforce, Off, 100),
            (10, Enforce, Observe, 10),
            (10, Observe, Enforce, 90),
            (0, Enforce, Observe, 0),
            (30, Enforce, Enforce, 100),
            (30, Off, Observe, 0),
        ] {
            let rollout = Rollout::new(percent, share, rest).expect("a share");
            assert_eq!(rollout.enforced_percent(), expected, "{rollout}");
        }
    }

    #[test]
    fn larger_share_contains_smaller_one() {
        let callers: Vec<_> = (0..10_000).map(caller).collect();
        let mut before = vec![false; callers.len()];
        for percent in 0..=100_u8 {
            let rollout = Rollout::new(percent, Enforce, Observe).unwrap();
            let now: Vec<_> = callers
                .iter()
                .map(|caller| rollout.of(caller) == Enforce)
                .collect();
            assert!(before.iter().zip(&now).all(|(before, now)| before <= now));
            let share = now.iter().filter(|is_in| **is_in).count();
            // 10,000 draws of probability p have a standard deviation of at most 50.
            assert!(share.abs_diff(usize::from(percent) * 100) < 300, "{share}");
            before = now;
        }
        assert!(before.iter().all(|is_in| *is_in));
    }
}
