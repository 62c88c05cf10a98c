//! Why DynamoDB did not do what it was asked.

use std::{error::Error, fmt};

use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use tower_idempotency::store::StoreError;

/// Why DynamoDB did not do what it was asked.
///
/// Of what the service said only the name of the error is kept, and its sentence where that speaks of the table: a
/// response of the SDK holds items, and those hold records.
#[derive(Debug)]
pub struct DynamoDbError {
    kind: DynamoDbErrorKind,
    message: String,
}

/// What kind of a [`DynamoDbError`] it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DynamoDbErrorKind {
    /// The service asks for fewer calls, and went on to when they were repeated.
    Throttled,
    /// No answer, or none in time: what was asked may have happened all the same.
    Unreachable,
    /// The service refuses: the credentials, the permissions, or there is no such table.
    Refused,
    /// The table, or an item in it, is not one of this version of this store.
    Unusable,
    /// The entry changed each time it was looked at.
    Contended,
}

impl DynamoDbError {
    /// What kind it is.
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

    /// Says what was expected, and nothing of what was found: that may be a record.
    pub(crate) fn unusable(expected: &str) -> Self {
        let message = format!("expected {expected}, found something else");
        Self::new(DynamoDbErrorKind::Unusable, message)
    }

    pub(crate) fn contended() -> Self {
        let message = "the entry changed each time it was looked at";
        Self::new(DynamoDbErrorKind::Contended, message)
    }

    /// Of a call that moves items.
    pub(crate) fn call<E, R>(error: &SdkError<E, R>) -> Self
    where
        E: ProvideErrorMetadata + Error + 'static,
        R: fmt::Debug,
    {
        match error.as_service_error() {
            Some(reported) => Self::reported(reported.code(), None),
            None => Self::unanswered(error),
        }
    }

    /// Of a call that speaks of the table alone.
    pub(crate) fn of_table<E, R>(error: &SdkError<E, R>) -> Self
    where
        E: ProvideErrorMetadata + Error + 'static,
        R: fmt::Debug,
    {
        match error.as_service_error() {
            Some(reported) => Self::reported(reported.code(), reported.message()),
            None => Self::unanswered(error),
        }
    }

    pub(crate) fn reported(code: Option<&str>, sentence: Option<&str>) -> Self {
        let code = code.unwrap_or("an error without a name");
        let kind = match code {
            "ProvisionedThroughputExceededException"
            | "RequestLimitExceeded"
            | "ThrottlingException"
            | "LimitExceededException" => DynamoDbErrorKind::Throttled,
            "InternalServerError" | "ServiceUnavailable" => DynamoDbErrorKind::Unreachable,
            _ => DynamoDbErrorKind::Refused,
        };
        let message = match sentence {
            Some(sentence) => format!("DynamoDB reports {code}: {sentence}"),
            None => format!("DynamoDB reports {code}"),
        };
        Self::new(kind, message)
    }

    fn unanswered<E, R>(error: &SdkError<E, R>) -> Self
    where
        E: Error + 'static,
        R: fmt::Debug,
    {
        let message = match error {
            // The names of what failed on the way: hosts and credentials providers, and nothing that was sent.
            SdkError::DispatchFailure(_) | SdkError::ConstructionFailure(_) => {
                format!("cannot reach DynamoDB: {}", story(error))
            }
            SdkError::TimeoutError(_) => "DynamoDB did not answer in time".to_owned(),
            _ => "DynamoDB did not answer what was asked".to_owned(),
        };
        Self::new(DynamoDbErrorKind::Unreachable, message)
    }
}

/// What the sources of an error say, each once.
fn story(error: &dyn Error) -> String {
    let mut story = String::new();
    let mut source = error.source();
    while let Some(error) = source {
        let chapter = error.to_string();
        if !story.contains(&chapter) {
            if !story.is_empty() {
                story.push_str(": ");
            }
            story.push_str(&chapter);
        }
        source = error.source();
    }
    story
}

impl From<DynamoDbError> for StoreError {
    fn from(error: DynamoDbError) -> Self {
        Self::backend(error)
    }
}

impl fmt::Display for DynamoDbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for DynamoDbError {}
