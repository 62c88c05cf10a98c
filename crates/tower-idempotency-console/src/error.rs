//! Errors that a page or the JSON API shows.

use std::{error::Error, time::Duration};

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use tower_idempotency::inspect::{InspectError, InspectErrorKind};

use crate::audit::AuditError;

/// An error as one sentence for the operator. The guard renders it as a page or as JSON.
#[derive(Clone, Debug)]
pub(crate) struct PageError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// `true` if the store may have applied the decision nevertheless.
    pub(crate) is_unknown: bool,
}

impl PageError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        // A driver may report several lines. A sentence has one.
        let message = message.into();
        let words: Vec<_> = message.split_whitespace().collect();
        Self {
            status,
            message: words.join(" "),
            is_unknown: false,
        }
    }

    /// Marks the outcome as unknown.
    pub(crate) fn unknown(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            is_unknown: true,
            ..Self::new(status, message)
        }
    }

    /// Adds that the decision may have been applied.
    pub(crate) fn into_unknown(self) -> Self {
        let message = self.message.trim_end_matches('.');
        Self {
            message: format!("{message}. The decision may have been applied: see the entry."),
            is_unknown: true,
            ..self
        }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, message)
    }

    /// Creates the error of an audit log that cannot be written or read.
    pub(crate) fn of_audit(status: StatusCode, error: &AuditError) -> Self {
        let sentence = error.to_string();
        let mut characters = sentence.chars();
        let first = characters.next().into_iter();
        let first = first.flat_map(char::to_uppercase);
        Self::new(status, first.chain(characters).collect::<String>())
    }

    pub(crate) fn timeout(timeout: Duration) -> Self {
        let timeout = humantime::format_duration(timeout);
        Self::new(
            StatusCode::GATEWAY_TIMEOUT,
            format!("The store did not reply within {timeout}."),
        )
    }
}

impl From<InspectError> for PageError {
    fn from(error: InspectError) -> Self {
        let status = match error.kind() {
            InspectErrorKind::Backend | InspectErrorKind::Refused => StatusCode::BAD_GATEWAY,
            InspectErrorKind::RecordTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            _ => StatusCode::BAD_REQUEST,
        };
        Self::new(status, with_causes(&error))
    }
}

impl IntoResponse for PageError {
    fn into_response(self) -> Response {
        let mut res = self.status.into_response();
        res.extensions_mut().insert(self);
        res
    }
}

/// Returns the messages of an error and its sources, each once.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
        source = error.source();
    }
    message
}
