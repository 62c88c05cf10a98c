//! Errors of rejected requests, of `run_once`, and of settings.

use std::{borrow::Cow, fmt, time::Duration};

use http::StatusCode;

use crate::store::KeyId;

/// Error of a rejected request, or of a failed [`run_once`](crate::IdempotencyLayer::run_once).
///
/// The type is opaque, so that it can carry more information later. Use [`kind`](Error::kind), [`status`](Error::status),
/// [`is_retryable`](Error::is_retryable) and [`retry_after`](Error::retry_after).
///
/// Neither the error nor its text contains the key, the principal, a body or a stored response.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    status: StatusCode,
    detail: Cow<'static, str>,
    is_retryable: bool,
    retry_after: Option<Duration>,
    reason: Option<Box<str>>,
    entry: Option<Box<KeyId>>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            status: kind.status(),
            detail: detail.into(),
            is_retryable: kind.is_retryable(),
            retry_after: None,
            reason: None,
            entry: None,
            source: None,
        }
    }

    pub(crate) fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    pub(crate) fn with_retry_after(self, after: Duration) -> Self {
        Self {
            is_retryable: true,
            retry_after: Some(after),
            ..self
        }
    }

    /// Marks the error as not retryable, although its kind is.
    pub(crate) fn without_retry(self) -> Self {
        Self {
            is_retryable: false,
            ..self
        }
    }

    pub(crate) fn with_reason(self, code: &str) -> Self {
        Self {
            reason: Some(code.into()),
            ..self
        }
    }

    pub(crate) fn with_entry(self, id: &KeyId) -> Self {
        Self {
            entry: Some(Box::new(*id)),
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

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the status of the response. A preset or a setting may use another one than [`ErrorKind::status`].
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns a sentence for humans, such as the expected and the found value. It never quotes data of the client or the
    /// handler.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// Returns the code of the [`NeedsAttention`](crate::NeedsAttention) with which an execution ended, or `None` for any
    /// other error.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// Returns the ID of the entry of the request, or `None` if the layer rejected the request before it knew the entry.
    ///
    /// The problem body has its first eight digits as the member `entry`, as events do. With these digits an operator finds
    /// the entry that a client reports: see [`Query::with_id_prefix`](crate::inspect::Query::with_id_prefix).
    #[must_use]
    pub fn entry(&self) -> Option<&KeyId> {
        self.entry.as_deref()
    }

    /// Returns `true` if the same request with the same key can succeed later.
    ///
    /// That depends on the [kind](ErrorKind::is_retryable), with two exceptions. An unknown outcome is retryable if it may
    /// become known later. [`StoreUnavailable`](ErrorKind::StoreUnavailable) is not retryable if an entry or its record cannot
    /// be read, or if the recorded response exceeds a limit of this process.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.is_retryable
    }

    /// Returns how long the client should wait before it retries, or `None` if waiting does not help.
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

/// Kind of an [`Error`]. Each kind has a stable code, a status, a title and a flag that is set if a retry can succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request has no key, and the layer requires one.
    MissingKey,
    /// The key does not match the syntax, or there are several header lines.
    MalformedKey,
    /// The decoded key is longer than the limit.
    KeyTooLong,
    /// The request body is larger than the limit.
    BodyTooLarge,
    /// The request body did not arrive in time.
    BodyTimeout,
    /// The request body failed, or ended before its announced length.
    BodyUnreadable,
    /// The layer found no principal and requires one.
    PrincipalMissing,
    /// A cookie or a header that identifies the caller occurs twice.
    PrincipalAmbiguous,
    /// The handler returned a success, but neither committed nor rolled back a transaction. Nothing is recorded.
    UnfinishedTransaction,
    /// A gRPC call with a key has not exactly one message in its request. See
    /// `GrpcMethods` (feature `grpc`).
    NotUnary,
    /// The key was used with another request.
    KeyReused,
    /// The first request with this key is still being executed.
    InProgress,
    /// An execution ended without an outcome, or with [`NeedsAttention`](crate::NeedsAttention). Its effect may or may not
    /// have happened.
    OutcomeUnknown,
    /// The first request was executed, but its response was not recorded.
    ResponseNotRetained,
    /// The store failed, the entry or its record cannot be read, or the recorded response exceeds a limit of this process.
    /// Nothing was executed now; an earlier attempt may have been executed.
    StoreUnavailable,
    /// Too many requests are in flight or too many bytes are buffered.
    Overloaded,
    /// This caller uses up its share of a limit. Other callers are served.
    CallerLimit,
    /// The service is shutting down.
    Draining,
}

impl ErrorKind {
    /// Returns the stable code, which is also the `code` of the problem body.
    #[must_use]
    pub const fn code(self) -> &'static str {
        self.properties().0
    }

    /// Returns the status that [`Preset::Recommended`](crate::Preset::Recommended) uses.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        self.properties().1
    }

    /// Returns `true` if the same request with the same key can usually succeed later.
    ///
    /// [`Error::is_retryable`] decides it for a single error.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        self.properties().2
    }

    /// Returns a short title, which is the same for all errors of the kind.
    #[must_use]
    pub const fn title(self) -> &'static str {
        self.properties().3
    }

    const fn properties(self) -> (&'static str, StatusCode, bool, &'static str) {
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
                "Request body incomplete",
            ),
            Self::PrincipalMissing => (
                "principal-missing",
                S::INTERNAL_SERVER_ERROR,
                false,
                "Principal missing",
            ),
            Self::PrincipalAmbiguous => (
                "principal-ambiguous",
                S::BAD_REQUEST,
                false,
                "Principal ambiguous",
            ),
            Self::UnfinishedTransaction => (
                "unfinished-transaction",
                S::INTERNAL_SERVER_ERROR,
                false,
                "Transaction unfinished",
            ),
            Self::NotUnary => ("not-unary", S::BAD_REQUEST, false, "Call is not unary"),
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
            Self::CallerLimit => (
                "caller-limit",
                S::TOO_MANY_REQUESTS,
                true,
                "Limit of this caller reached",
            ),
            Self::Draining => ("draining", S::SERVICE_UNAVAILABLE, true, "Shutting down"),
        }
    }
}

/// Error of a setter that rejects its value.
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

#[cfg(all(test, not(shuttle)))]
mod tests;
