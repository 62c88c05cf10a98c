//! The modes of a campaign: each promises a number of effects for a key whose lease holder died.

use verification::oracle::History;

/// The handling of a key whose lease expired without an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the list of all modes")]
pub enum Mode {
    /// The key is refused: at most one effect.
    Refuse,
    /// The key is taken over: one effect, and at most one more for each execution that lost its lease. A strike at its member
    /// or a slow request to its member must explain the loss.
    TakeOver,
    /// The key is taken over, and effect and record are one transaction: exactly one effect.
    Transaction,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 3] = [Self::Refuse, Self::TakeOver, Self::Transaction];

    /// Returns the name of the mode on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::TakeOver => "take-over",
            Self::Transaction => "transaction",
        }
    }

    /// Returns the name of the orphan policy on the command line of a playground.
    pub(super) fn orphans(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::TakeOver | Self::Transaction => "take-over",
        }
    }

    /// Returns the path of a handler that takes this many milliseconds.
    pub(super) fn path(self, handler: u64) -> String {
        match self {
            Self::Refuse | Self::TakeOver => format!("/slow/{handler}"),
            Self::Transaction => format!("/charge/{handler}"),
        }
    }

    /// Returns the events of the history that violate the promise.
    pub(super) fn violations(self, history: &History) -> Vec<String> {
        let mut violations = Vec::new();
        let mut found = |what: &str, keys: Vec<String>| {
            violations.extend(keys.into_iter().map(|key| format!("{what}: {key}")));
        };
        found("contradicts itself", history.contradictions());
        match self {
            Self::Refuse => found("executed twice", history.excess_effects()),
            Self::TakeOver => found("executed too often", history.unexplained_effects()),
            Self::Transaction => {
                found("charged twice", history.excess_effects());
                found(
                    "responded without a charge",
                    history.responses_without_effect(),
                );
            }
        }
        violations
    }
}
