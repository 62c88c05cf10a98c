//! The error of a store that cannot be opened.

use std::fmt;

/// The reason why [`AnyStore::open`](crate::AnyStore::open) failed, as one sentence for the user of a program.
///
/// The error of an invalid URL contains no other part of it than its scheme. The message of a server may name the user, the
/// database or the table of the URL, but not the password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenError {
    kind: OpenErrorKind,
    message: String,
}

/// The kind of an [`OpenError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenErrorKind {
    /// The URL is invalid.
    Url,
    /// The program was built without the feature that the URL needs.
    NotBuilt,
    /// The store cannot be reached, refuses the connection, or cannot be used.
    Unusable,
}

impl OpenError {
    pub(crate) fn new(kind: OpenErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind, message }
    }

    /// Creates the error of a URL that is not as `expected`.
    pub(crate) fn url(expected: impl fmt::Display) -> Self {
        Self::new(OpenErrorKind::Url, format!("expected {expected}"))
    }

    /// Creates the error of a store that failed, from the messages of `error` and its sources.
    pub(crate) fn unusable(store: &str, error: &dyn std::error::Error) -> Self {
        let mut message = format!("cannot use the {store} store: {error}");
        let mut source = error.source();
        while let Some(error) = source {
            let cause = error.to_string();
            if !message.contains(&cause) {
                message = format!("{message}: {cause}");
            }
            source = error.source();
        }
        // A driver may report several lines. A sentence has one.
        let message: Vec<_> = message.split_whitespace().collect();
        Self::new(OpenErrorKind::Unusable, message.join(" "))
    }

    /// Returns the kind of this error.
    #[must_use]
    pub fn kind(&self) -> OpenErrorKind {
        self.kind
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for OpenError {}
