//! Result of a check of a store at the start of a service.

use std::{borrow::Cow, error::Error, fmt};

/// The reason why [`Store::check`](super::Store::check) failed: one sentence with the problem and its remedy.
///
/// It contains no URL, no password and no data of an entry.
///
/// ```
/// use tower_idempotency::store::{CheckError, CheckErrorKind};
///
/// let error = CheckError::new(CheckErrorKind::Incomplete, "the table keys is missing", "call migrate");
/// assert_eq!(error.to_string(), "the table keys is missing: call migrate");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckError {
    kind: CheckErrorKind,
    problem: String,
    remedy: Cow<'static, str>,
}

/// The kind of a [`CheckError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckErrorKind {
    /// The backend cannot be reached, or refuses the connection.
    Unreachable,
    /// A table, a column, an index or a setting of the table is missing.
    Incomplete,
    /// The user lacks a right.
    Denied,
    /// The backend can lose or split entries, because it evicts, is in memory, is a replica, or is too old.
    Unsafe,
}

impl CheckError {
    /// Creates an error. For implementors.
    ///
    /// `problem` states the problem, and `remedy` the action of an operator. Together they are one sentence.
    pub fn new(
        kind: CheckErrorKind,
        problem: impl Into<String>,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            kind,
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    /// Creates the error of a call that failed, from the messages of `error` and its sources. For implementors.
    ///
    /// The messages must contain no secrets.
    pub fn unreachable(
        error: &(dyn Error + 'static),
        remedy: impl Into<Cow<'static, str>>,
    ) -> Self {
        let mut problem = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            let cause = error.to_string();
            if !problem.contains(&cause) {
                problem = format!("{problem} ({cause})");
            }
            source = error.source();
        }
        // A driver may report several lines. A sentence has one.
        let words: Vec<_> = problem.split_whitespace().collect();
        Self::new(CheckErrorKind::Unreachable, words.join(" "), remedy)
    }

    /// Returns the kind of this error.
    #[must_use]
    pub const fn kind(&self) -> CheckErrorKind {
        self.kind
    }

    /// Returns the action by which an operator solves the problem.
    #[must_use]
    pub fn remedy(&self) -> &str {
        &self.remedy
    }
}

impl fmt::Display for CheckError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.problem, self.remedy)
    }
}

impl Error for CheckError {}
