//! The error of a DynamoDB call.

use std::{error::Error, fmt};

use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use tower_idempotency::store::StoreError;

/// The reason why a DynamoDB call failed.
///
/// The message contains the service's error code, and the service's own message only for calls about the table. Errors of
/// other SDK calls may contain items, and items contain records.
#[derive(Debug)]
pub struct DynamoDbError {
    kind: DynamoDbErrorKind,
    message: String,
}

/// The kind of a [`DynamoDbError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DynamoDbErrorKind {
    /// The URL is invalid. The message contains no part of it.
    Address,
    /// The service throttled the call and its retries.
    Throttled,
    /// The service did not reply in time or at all. The call may have taken effect.
    Unreachable,
    /// The service refused the call: invalid credentials, missing permissions, or no such table.
    Refused,
    /// The table or an item in it does not belong to this version of this store.
    Unusable,
    /// Other processes changed the entry between each read and the following write.
    Contended,
    /// The clock of the process differs from that of the service by more than the allowance. Nothing was changed.
    ClockSkew,
}

impl DynamoDbError {
    /// Returns the kind of this error.
    #[must_use]
    pub fn kind(&self) -> DynamoDbErrorKind {
        self.kind
    }

    pub(crate) fn new(kind: DynamoDbErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    /// Creates an error that names the expected value. It omits the value found, which may be a record.
    pub(crate) fn unusable(expected: &str) -> Self {
        let message = format!("expected {expected}, found something else");
        Self::new(DynamoDbErrorKind::Unusable, message)
    }

    pub(crate) fn contended() -> Self {
        let message = "the entry changed after each read";
        Self::new(DynamoDbErrorKind::Contended, message)
    }

    /// Returns `true` if the service refused a value in the call.
    pub(crate) fn is_refused_value(&self) -> bool {
        self.message.contains("ValidationException")
    }

    /// Creates the error of a call that reads or writes items.
    pub(crate) fn from_item_call<E, R>(error: &SdkError<E, R>) -> Self
    where
        E: ProvideErrorMetadata + Error + 'static,
        R: fmt::Debug,
    {
        match error.as_service_error() {
            Some(error) => Self::from_code(error.code(), None),
            None => Self::without_reply(error),
        }
    }

    /// Creates the error of a call about the table, with the service's message.
    pub(crate) fn from_table_call<E, R>(error: &SdkError<E, R>) -> Self
    where
        E: ProvideErrorMetadata + Error + 'static,
        R: fmt::Debug,
    {
        match error.as_service_error() {
            Some(error) => Self::from_code(error.code(), error.message()),
            None => Self::without_reply(error),
        }
    }

    /// Creates an error from the service's error code and message.
    pub(crate) fn from_code(code: Option<&str>, message: Option<&str>) -> Self {
        let code = code.unwrap_or("an error without a code");
        let kind = match code {
            "ProvisionedThroughputExceededException"
            | "RequestLimitExceeded"
            | "ThrottlingException"
            | "LimitExceededException" => DynamoDbErrorKind::Throttled,
            "InternalServerError" | "ServiceUnavailable" => DynamoDbErrorKind::Unreachable,
            _ => DynamoDbErrorKind::Refused,
        };
        let message = match message {
            // The message quotes the headers of the call, among them the token of temporary credentials.
            Some(message) if code != "InvalidSignatureException" => {
                format!("DynamoDB reports {code}: {message}")
            }
            _ => format!("DynamoDB reports {code}"),
        };
        Self::new(kind, message)
    }

    /// Creates the error of a call without a reply of the service.
    fn without_reply<E, R>(error: &SdkError<E, R>) -> Self
    where
        E: Error + 'static,
        R: fmt::Debug,
    {
        let message = match error {
            // The sources name hosts and credentials providers. They contain no part of the request.
            SdkError::DispatchFailure(_) | SdkError::ConstructionFailure(_) => {
                format!("cannot reach DynamoDB: {}", error_chain(error))
            }
            SdkError::TimeoutError(_) => "DynamoDB did not reply in time".to_owned(),
            _ => "DynamoDB sent no valid reply".to_owned(),
        };
        Self::new(DynamoDbErrorKind::Unreachable, message)
    }
}

/// Joins the messages of an error's sources, and leaves out repetitions.
fn error_chain(error: &dyn Error) -> String {
    let mut chain = String::new();
    let mut source = error.source();
    while let Some(error) = source {
        let message = error.to_string();
        if !chain.contains(&message) {
            if !chain.is_empty() {
                chain.push_str(": ");
            }
            chain.push_str(&message);
        }
        source = error.source();
    }
    chain
}

impl From<DynamoDbError> for StoreError {
    /// Reports an unusable item as an unreadable entry. The methods of the store read items only, and never the table.
    fn from(error: DynamoDbError) -> Self {
        if error.kind() == DynamoDbErrorKind::Unusable {
            Self::unreadable(error)
        } else {
            Self::backend(error)
        }
    }
}

impl fmt::Display for DynamoDbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for DynamoDbError {}

#[cfg(test)]
mod tests {
    use aws_sdk_dynamodb::operation::get_item::GetItemError;

    use super::*;

    #[test]
    fn message_that_quotes_call_is_omitted() {
        let text = |code| DynamoDbError::from_code(Some(code), Some("x-amz-security-token:hush"));
        let error = text("InvalidSignatureException");
        assert_eq!(
            error.to_string(),
            "DynamoDB reports InvalidSignatureException"
        );
        assert!(text("AccessDeniedException").to_string().contains("hush"));
    }

    #[test]
    fn errors_have_these_texts() {
        type CallError = SdkError<GetItemError, ()>;

        let of_call = |error: CallError| DynamoDbError::from_item_call(&error).to_string();
        for (text, expected) in [
            (
                DynamoDbError::unusable("a table").to_string(),
                "expected a table, found something else",
            ),
            (
                DynamoDbError::contended().to_string(),
                "the entry changed after each read",
            ),
            (
                DynamoDbError::from_code(Some("ThrottlingException"), None).to_string(),
                "DynamoDB reports ThrottlingException",
            ),
            (
                DynamoDbError::from_code(None, Some("a message")).to_string(),
                "DynamoDB reports an error without a code: a message",
            ),
            (
                of_call(CallError::timeout_error("hush")),
                "DynamoDB did not reply in time",
            ),
            (
                of_call(CallError::response_error("hush", ())),
                "DynamoDB sent no valid reply",
            ),
            (
                of_call(CallError::construction_failure("no region")),
                "cannot reach DynamoDB: no region",
            ),
        ] {
            assert_eq!(text, expected);
        }
    }
}
