use std::{error::Error, fmt};

use hyper_util::client::legacy;
use tower_idempotency_dynamodb::aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};

use crate::Failure;

/// The reason why an addition failed, and if it may have happened.
#[derive(Debug)]
pub enum Unadded {
    /// Nothing was added, and a retry may succeed.
    Not(Failure),
    /// Nothing was added, and nothing will be until an operator fixes the cause: there is no such table, or no permission.
    Never(Failure),
    /// The request may have reached the server, and the number may have been added.
    Perhaps(Failure),
}

impl Unadded {
    /// Classifies an error by the service's code, or by `reason` if that is more specific. An unsent request and one refused
    /// with a known code added nothing. The outcome of every other error is unknown, including codes missing from this list.
    pub(crate) fn judge<E, R>(error: &SdkError<E, R>, reason: Option<&str>) -> Self
    where
        E: ProvideErrorMetadata + Error + 'static,
        R: fmt::Debug + 'static,
    {
        let said = Failure::from(error_chain(error));
        match error {
            SdkError::ConstructionFailure(_) => return Self::Never(said),
            SdkError::DispatchFailure(_) if is_connecting(error) => return Self::Not(said),
            _ => {}
        }
        let code = error.as_service_error().and_then(E::code);
        match reason.or(code) {
            Some(
                "AccessDeniedException"
                | "ResourceNotFoundException"
                | "ValidationError"
                | "ValidationException",
            ) => Self::Never(said),
            Some(
                "ProvisionedThroughputExceeded"
                | "ProvisionedThroughputExceededException"
                | "RequestLimitExceeded"
                | "ThrottlingError"
                | "ThrottlingException"
                | "TransactionCanceledException"
                | "TransactionConflict"
                | "TransactionConflictException",
            ) => Self::Not(said),
            _ => Self::Perhaps(said),
        }
    }
}

/// Returns `true` if the connection was not yet established, so nothing was sent.
fn is_connecting(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<legacy::Error>() {
            return error.is_connect();
        }
        next = error.source();
    }
    false
}

/// Returns the messages of an error and its sources. The SDK's message of the first is too short.
fn error_chain(error: &dyn Error) -> String {
    let mut chain = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        chain = format!("{chain}: {error}");
        source = error.source();
    }
    chain
}

#[cfg(test)]
mod tests {
    use tower_idempotency_dynamodb::aws_sdk_dynamodb::{
        error::ErrorMetadata, operation::update_item::UpdateItemError,
    };

    use super::*;

    #[test]
    fn only_known_error_codes_are_certain() {
        let judged = |code: &str| {
            let error = UpdateItemError::generic(ErrorMetadata::builder().code(code).build());
            match Unadded::judge(&SdkError::service_error(error, ()), None) {
                Unadded::Not(_) => "not",
                Unadded::Never(_) => "never",
                Unadded::Perhaps(_) => "perhaps",
            }
        };
        assert_eq!(judged("ThrottlingException"), "not");
        assert_eq!(judged("RequestLimitExceeded"), "not");
        assert_eq!(judged("AccessDeniedException"), "never");
        assert_eq!(judged("ValidationException"), "never");
        assert_eq!(judged("ResourceNotFoundException"), "never");
        assert_eq!(judged("InternalServerError"), "perhaps");
        assert_eq!(judged("SomethingNewException"), "perhaps");
    }

    #[test]
    fn timeout_is_uncertain_and_unsent_request_is_not() {
        type Failed = SdkError<UpdateItemError, ()>;
        let unanswered = Unadded::judge(&Failed::timeout_error("too late"), None);
        assert!(matches!(unanswered, Unadded::Perhaps(_)), "{unanswered:?}");
        let unsent = Unadded::judge(&Failed::construction_failure("no credentials"), None);
        assert!(matches!(unsent, Unadded::Never(_)), "{unsent:?}");
    }
}
