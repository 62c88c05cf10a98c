use std::fmt;

use crate::store::StoreError;

/// Error of a call of [`Inspect`](super::Inspect). Its text contains no key and no bytes of a record.
#[derive(Debug)]
pub struct InspectError {
    kind: InspectErrorKind,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// Kind of an [`InspectError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InspectErrorKind {
    /// The backend failed or was unreachable. The call may have taken effect nevertheless.
    Backend,
    /// The store refused the call before it sent a change, for the reason in the source. Nothing was changed.
    Refused,
    /// The resolution does not apply to the state that was seen. Nothing was changed.
    WrongState,
    /// The page token is that of another store or of another query.
    InvalidPage,
    /// The store has no list of this state.
    Unsupported,
    /// The store cannot store a record of this size. Nothing was changed.
    RecordTooLarge {
        /// The size of the largest accepted record, in bytes.
        limit: usize,
    },
}

impl InspectError {
    /// Creates an error of this kind without a source.
    #[must_use]
    pub fn new(kind: InspectErrorKind) -> Self {
        Self { kind, source: None }
    }

    /// Creates an error of the kind [`Backend`](InspectErrorKind::Backend) from its source.
    #[must_use]
    pub fn backend(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self {
            kind: InspectErrorKind::Backend,
            source: Some(source.into()),
        }
    }

    /// Creates an error of the kind [`Refused`](InspectErrorKind::Refused) from its source.
    #[must_use]
    pub fn refused(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self {
            kind: InspectErrorKind::Refused,
            source: Some(source.into()),
        }
    }

    /// Creates an error of the kind [`Unsupported`](InspectErrorKind::Unsupported) whose source names this setting.
    pub(super) fn unsupported_without(setting: &str) -> Self {
        Self {
            kind: InspectErrorKind::Unsupported,
            source: Some(format!("set `{setting}` in each process to list them").into()),
        }
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> InspectErrorKind {
        self.kind
    }
}

impl From<StoreError> for InspectError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Backend(source) => Self::backend(source),
            StoreError::RecordTooLarge { limit } => {
                Self::new(InspectErrorKind::RecordTooLarge { limit })
            }
            error @ (StoreError::LeaseLost
            | StoreError::CallerLimit
            | StoreError::Unreadable(_)) => Self::backend(error),
        }
    }
}

impl fmt::Display for InspectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            InspectErrorKind::Backend => f.write_str("the store failed"),
            InspectErrorKind::Refused => f.write_str("the store refused the call"),
            InspectErrorKind::WrongState => {
                f.write_str("the resolution does not apply to the state of the entry")
            }
            InspectErrorKind::InvalidPage => {
                f.write_str("expected the page token of this store and this query, found another")
            }
            InspectErrorKind::Unsupported => {
                f.write_str("the store does not list entries in this state")
            }
            InspectErrorKind::RecordTooLarge { limit } => {
                write!(f, "the store accepts records of at most {limit} bytes")
            }
        }
    }
}

impl std::error::Error for InspectError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
