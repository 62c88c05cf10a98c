//! The texts of errors. Each list has a line for each variant, and a new variant does not compile without one.

use std::iter::successors;

use bytes::Bytes;
use http::{Response, StatusCode};

use super::ErrorKind;
use crate::{
    IdempotencyLayer, MemoryStore,
    inspect::{InspectError, InspectErrorKind},
    policy::DescribeError,
    request::credentials::PrincipalError,
    response::reject::{outcome_pending, unreadable_entry},
    store::StoreError,
    store_client::failure_source,
};

/// Returns a line for each value. `next` returns the value that follows another one.
fn lines<T>(first: T, next: impl Fn(&T) -> Option<T>, line: impl Fn(T) -> String) -> String {
    let lines: Vec<_> = successors(Some(first), next).map(line).collect();
    lines.join("\n")
}

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

#[test]
fn kinds_have_these_titles() {
    let next = |kind: &ErrorKind| {
        Some(match kind {
            ErrorKind::MissingKey => ErrorKind::MalformedKey,
            ErrorKind::MalformedKey => ErrorKind::KeyTooLong,
            ErrorKind::KeyTooLong => ErrorKind::BodyTooLarge,
            ErrorKind::BodyTooLarge => ErrorKind::BodyTimeout,
            ErrorKind::BodyTimeout => ErrorKind::BodyUnreadable,
            ErrorKind::BodyUnreadable => ErrorKind::PrincipalMissing,
            ErrorKind::PrincipalMissing => ErrorKind::PrincipalAmbiguous,
            ErrorKind::PrincipalAmbiguous => ErrorKind::UnfinishedTransaction,
            ErrorKind::UnfinishedTransaction => ErrorKind::NotUnary,
            ErrorKind::NotUnary => ErrorKind::KeyReused,
            ErrorKind::KeyReused => ErrorKind::InProgress,
            ErrorKind::InProgress => ErrorKind::OutcomeUnknown,
            ErrorKind::OutcomeUnknown => ErrorKind::ResponseNotRetained,
            ErrorKind::ResponseNotRetained => ErrorKind::StoreUnavailable,
            ErrorKind::StoreUnavailable => ErrorKind::Overloaded,
            ErrorKind::Overloaded => ErrorKind::CallerLimit,
            ErrorKind::CallerLimit => ErrorKind::Draining,
            ErrorKind::Draining => return None,
        })
    };
    let line = |kind: ErrorKind| {
        let status = kind.status().as_u16();
        format!("{status} {}: {}", kind.code(), kind.title())
    };
    insta::assert_snapshot!(lines(ErrorKind::MissingKey, next, line), @r"
    400 missing-key: Idempotency key missing
    400 malformed-key: Idempotency key malformed
    400 key-too-long: Idempotency key too long
    413 body-too-large: Request body too large
    408 body-timeout: Request body timed out
    400 body-unreadable: Request body incomplete
    500 principal-missing: Principal missing
    400 principal-ambiguous: Principal ambiguous
    500 unfinished-transaction: Transaction unfinished
    400 not-unary: Call is not unary
    422 key-reused: Idempotency key used with another request
    409 in-progress: Request in progress
    409 outcome-unknown: Outcome unknown
    409 response-not-retained: Response not retained
    503 store-unavailable: Idempotency store unavailable
    503 overloaded: Overloaded
    429 caller-limit: Limit of this caller reached
    503 draining: Shutting down
    ");
}

#[cfg(feature = "rate")]
#[test]
fn limits_have_these_refusals() {
    use std::time::Duration;

    use crate::{limits::AdmissionError, response::reject::admission_error};

    let next = |error: &AdmissionError| {
        Some(match error {
            AdmissionError::Draining => AdmissionError::RequestLimit,
            AdmissionError::RequestLimit => AdmissionError::ByteLimit,
            AdmissionError::ByteLimit => AdmissionError::ResponseTooLarge { bytes: 8, limit: 7 },
            AdmissionError::ResponseTooLarge { .. } => AdmissionError::CallerLimit,
            AdmissionError::CallerLimit => AdmissionError::CallerStoreLimit,
            AdmissionError::CallerStoreLimit => {
                AdmissionError::FreshKeyRate(Duration::from_secs(1))
            }
            AdmissionError::FreshKeyRate(_) => return None,
        })
    };
    let layer = layer();
    let line = |error: AdmissionError| {
        let error = admission_error(&layer.config.response, error);
        format!(
            "{} {}: {error}",
            error.status().as_u16(),
            error.kind().code()
        )
    };
    insta::assert_snapshot!(lines(AdmissionError::Draining, next, line), @r"
    503 draining: the service is shutting down
    503 overloaded: too many requests are in flight
    503 overloaded: too many bytes are buffered
    503 store-unavailable: this request was executed before, but its response exceeds a limit of this process
    429 caller-limit: this caller has too many requests in flight, or too many bytes of bodies in them
    429 caller-limit: this caller has too many keys in the store whose outcome is unknown
    429 caller-limit: this caller sends new keys faster than its rate allows
    ");
}

/// The other refusals are in the tests with requests.
#[test]
fn rare_refusals_have_these_texts() {
    let mut res = Response::new(Bytes::new());
    *res.status_mut() = StatusCode::UNAUTHORIZED;
    let rejected = PrincipalError::Rejected(Box::new(res)).into_error();
    let pending = outcome_pending(&layer().config.response);
    let unreadable = unreadable_entry("the cause");
    let lines = [rejected, pending, unreadable].map(|error| {
        let status = error.status().as_u16();
        format!("{status} {}: {error}", error.kind().code())
    });
    insta::assert_snapshot!(lines.join("\n"), @r"
    401 principal-missing: the closure of the application rejected the request
    409 outcome-unknown: it is not yet known if this request had its effect; retry with the same key
    503 store-unavailable: the entry of this key cannot be read, so nothing was executed now; an earlier attempt may have been executed
    ");
}

#[test]
fn store_errors_have_these_texts() {
    let next = |error: &StoreError| {
        Some(match error {
            StoreError::LeaseLost => StoreError::RecordTooLarge { limit: 7 },
            StoreError::RecordTooLarge { .. } => StoreError::CallerLimit,
            StoreError::CallerLimit => StoreError::unreadable("the cause"),
            StoreError::Unreadable(_) => StoreError::backend("the cause"),
            StoreError::Backend(_) => return None,
        })
    };
    let line = |error: StoreError| error.to_string();
    insta::assert_snapshot!(lines(StoreError::LeaseLost, next, line), @r"
    the lease is no longer held
    the store accepts records of at most 7 bytes
    the caller uses up its share of the store
    the store cannot read the entry
    the store failed
    ");
}

#[test]
fn failed_store_calls_have_these_sources() {
    let text = |error| failure_source(error).to_string();
    assert_eq!(
        text(Some(StoreError::LeaseLost)),
        "the lease is no longer held"
    );
    assert_eq!(text(None), "the store did not reply in time");
}

#[test]
fn inspect_errors_have_these_texts() {
    let next = |kind: &InspectErrorKind| {
        Some(match kind {
            InspectErrorKind::Backend => InspectErrorKind::Refused,
            InspectErrorKind::Refused => InspectErrorKind::WrongState,
            InspectErrorKind::WrongState => InspectErrorKind::InvalidPage,
            InspectErrorKind::InvalidPage => InspectErrorKind::Unsupported,
            InspectErrorKind::Unsupported => InspectErrorKind::RecordTooLarge { limit: 7 },
            InspectErrorKind::RecordTooLarge { .. } => return None,
        })
    };
    let line = |kind: InspectErrorKind| InspectError::new(kind).to_string();
    insta::assert_snapshot!(lines(InspectErrorKind::Backend, next, line), @r"
    the store failed
    the store refused the call
    the resolution does not apply to the state of the entry
    expected the page token of this store and this query, found another
    the store does not list entries in this state
    the store accepts records of at most 7 bytes
    ");
}

#[test]
fn documents_have_these_errors() {
    let next = |error: &DescribeError| {
        Some(match error {
            DescribeError::Version(found) if found.is_empty() => {
                DescribeError::Version("2.0".to_owned())
            }
            DescribeError::Version(_) => DescribeError::Malformed("/paths".to_owned()),
            DescribeError::Malformed(_) => DescribeError::Reference("#/a".to_owned()),
            DescribeError::Reference(_) => return None,
        })
    };
    let line = |error: DescribeError| error.to_string();
    let first = DescribeError::Version(String::new());
    insta::assert_snapshot!(lines(first, next, line), @r"
    expected an OpenAPI document with `openapi`, found none
    expected OpenAPI 3.0 or 3.1, found 2.0
    the document is malformed at /paths
    the reference #/a leads to nothing in this document
    ");
}

#[cfg(feature = "axum")]
#[test]
fn extractors_have_this_rejection() {
    let text = crate::extract::NoIdempotencyKey.to_string();
    insta::assert_snapshot!(text, @"expected a request with an idempotency key, found one without");
}
