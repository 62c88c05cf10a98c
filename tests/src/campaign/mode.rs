//! What is promised about the keys of those who die.

use crate::oracle::History;

/// What becomes of a key whose lease ended without an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the promises that there are")]
pub enum Mode {
    /// It is refused: at most one effect.
    Refuse,
    /// It is taken over: one effect, and at most one more for each member that was struck at it.
    TakeOver,
    /// It is taken over, and effect and record are one transaction: exactly one effect.
    Transaction,
}

impl Mode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Refuse, Self::TakeOver, Self::Transaction];

    /// As it is named on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::TakeOver => "take-over",
            Self::Transaction => "transaction",
        }
    }

    /// As playgrounds name it.
    pub(super) fn orphans(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::TakeOver | Self::Transaction => "reexecute",
        }
    }

    /// Where members execute something that takes so many milliseconds.
    pub(super) fn path(self, handler: u64) -> String {
        match self {
            Self::Refuse | Self::TakeOver => format!("/slow/{handler}"),
            Self::Transaction => format!("/charge/{handler}"),
        }
    }

    /// What of this may not have happened.
    pub(super) fn violations(self, history: &History) -> Vec<String> {
        let mut violations = Vec::new();
        let mut found = |what: &str, keys: Vec<String>| {
            violations.extend(keys.into_iter().map(|told| format!("{what}: {told}")));
        };
        found("contradicts itself", history.contradictions());
        match self {
            Self::Refuse => found("executed twice", history.doubles()),
            Self::TakeOver => found("executed too often", history.unexplained()),
            Self::Transaction => {
                found("charged twice", history.doubles());
                found("answered and not charged", history.uncaused());
            }
        }
        violations
    }
}
