//! Why the layer answered in the handler's stead, or why `run_once` could not.

use std::{borrow::Cow, fmt, time::Duration};

use http::StatusCode;

/// Why a request was refused, or a [`run_once`](crate::IdempotencyLayer::run_once) could not be carried out.
///
/// Opaque, so that it can say more later: look at [`kind`](Error::kind), [`status`](Error::status),
/// [`is_retryable`](Error::is_retryable) and [`retry_after`](Error::retry_after). It never holds the key, the principal, a body or a stored response, and neither
/// does what it displays.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    status: StatusCode,
    detail: Cow<'static, str>,
    retry_after: Option<Duration>,
    reason: Option<Box<str>>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            status: kind.status(),
            detail: detail.into(),
            retry_after: None,
            reason: None,
            source: None,
        }
    }

    pub(crate) fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    pub(crate) fn with_retry_after(self, after: Duration) -> Self {
        Self {
            retry_after: Some(after),
            ..self
        }
    }

    pub(crate) fn with_reason(self, code: &str) -> Self {
        Self {
            reason: Some(code.into()),
            ..self
        }
    }

    pub(crate) fn with_source(
        self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self {
            source: Some(source.into()),
            ..self
        }
    }

    /// What kind of refusal this is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The status it is answered with; the preset may choose another than [`ErrorKind::status`].
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// One sentence for a person: what was expected and what was found, never what the client or the handler sent.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// The code of the [`NeedsAttention`](crate::NeedsAttention) with which an execution ended; `None` for any other refusal.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// Whether the same request with the same key can succeed later: as its [kind](ErrorKind::is_retryable) says, and also of
    /// an outcome that is only unknown for now.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.kind.is_retryable() || self.retry_after.is_some()
    }

    /// How long the client should wait before it retries; `None` when there is nothing to wait for.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// The kinds of [`Error`]: each has a stable code, a status and an answer to "may I retry?".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A key is required here and none was sent.
    MissingKey,
    /// The key, or the number of its header lines, is not what the syntax allows.
    MalformedKey,
    /// The decoded key is longer than the limit.
    KeyTooLong,
    /// The request body is larger than the limit.
    BodyTooLarge,
    /// The request body did not arrive in time.
    BodyTimeout,
    /// The request body broke off.
    BodyUnreadable,
    /// No principal could be found where one must be.
    PrincipalMissing,
    /// The key was used with another request.
    KeyReused,
    /// The first request with this key is still being executed.
    InProgress,
    /// An execution ended without an outcome, or with [`NeedsAttention`](crate::NeedsAttention): its effect may or may not
    /// have happened.
    OutcomeUnknown,
    /// The first request was executed, but its response was not retained.
    ResponseNotRetained,
    /// The store failed, or its record cannot be read: nothing was executed now, whatever an earlier attempt did.
    StoreUnavailable,
    /// Too many requests are in flight or too many bytes are buffered.
    Overloaded,
    /// The service is shutting down.
    Draining,
}

impl ErrorKind {
    /// The stable code, as in the problem body.
    #[must_use]
    pub const fn code(self) -> &'static str {
        self.row().0
    }

    /// The status of the `recommended` preset.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        self.row().1
    }

    /// Whether the same request with the same key can succeed later, as a rule: [`Error::is_retryable`] says it of one error.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        self.row().2
    }

    /// A short title, the same for every occurrence.
    #[must_use]
    pub const fn title(self) -> &'static str {
        self.row().3
    }

    const fn row(self) -> (&'static str, StatusCode, bool, &'static str) {
        use StatusCode as S;
        match self {
            Self::MissingKey => (
                "missing-key",
                S::BAD_REQUEST,
                false,
                "Idempotency key missing",
            ),
            Self::MalformedKey => (
                "malformed-key",
                S::BAD_REQUEST,
                false,
                "Idempotency key malformed",
            ),
            Self::KeyTooLong => (
                "key-too-long",
                S::BAD_REQUEST,
                false,
                "Idempotency key too long",
            ),
            Self::BodyTooLarge => (
                "body-too-large",
                S::PAYLOAD_TOO_LARGE,
                false,
                "Request body too large",
            ),
            Self::BodyTimeout => (
                "body-timeout",
                S::REQUEST_TIMEOUT,
                true,
                "Request body timed out",
            ),
            Self::BodyUnreadable => (
                "body-unreadable",
                S::BAD_REQUEST,
                true,
                "Request body broke off",
            ),
            Self::PrincipalMissing => (
                "principal-missing",
                S::INTERNAL_SERVER_ERROR,
                false,
                "Principal missing",
            ),
            Self::KeyReused => (
                "key-reused",
                S::UNPROCESSABLE_ENTITY,
                false,
                "Idempotency key used with another request",
            ),
            Self::InProgress => ("in-progress", S::CONFLICT, true, "Request in progress"),
            Self::OutcomeUnknown => ("outcome-unknown", S::CONFLICT, false, "Outcome unknown"),
            Self::ResponseNotRetained => (
                "response-not-retained",
                S::CONFLICT,
                false,
                "Response not retained",
            ),
            Self::StoreUnavailable => (
                "store-unavailable",
                S::SERVICE_UNAVAILABLE,
                true,
                "Idempotency store unavailable",
            ),
            Self::Overloaded => ("overloaded", S::SERVICE_UNAVAILABLE, true, "Overloaded"),
            Self::Draining => ("draining", S::SERVICE_UNAVAILABLE, true, "Shutting down"),
        }
    }
}

/// A setting that cannot work, found as it was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    expected: &'static str,
    found: String,
}

impl ConfigError {
    pub(crate) fn new(expected: &'static str, found: String) -> Self {
        Self { expected, found }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected {}, found {}", self.expected, self.found)
    }
}

impl std::error::Error for ConfigError {}
