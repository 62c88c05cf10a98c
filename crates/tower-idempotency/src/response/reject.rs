//! Responses that the layer sends without executing the request, and the errors that they render.

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};

use crate::{
    body::Body,
    error::{Error, ErrorKind},
    limits::AdmissionError,
    response::{directives::Retention, rules::Rules},
    store::KeyId,
    telemetry,
};

/// Complete response with its trailers: a replay or a rejection.
pub(crate) type CompleteResponse = Response<(Bytes, Option<HeaderMap>)>;

/// Converts the response into one with the body type of the layer.
pub(crate) fn into_response<R: http_body::Body>(res: CompleteResponse) -> Response<Body<R>> {
    res.map(|(data, trailers)| Body::chunked(data, trailers))
}

/// Renders the response for `error` and counts the rejection.
pub(crate) fn reject(rules: &Rules, error: &Error) -> CompleteResponse {
    telemetry::refused(rules.layer(), error.kind());
    let mut res = rejection(rules.render_error(error));
    telemetry::set_rejected(&mut res, error.kind().code());
    res
}

/// Counts the rejection of a call or an item, for which the layer renders no response. Returns its error.
pub(crate) fn count_rejection(rules: &Rules, error: Error) -> Error {
    telemetry::refused(rules.layer(), error.kind());
    error
}

/// Converts a rejection into a complete response that no outer layer records. It is no result of the handler, and most
/// rejections are temporary.
pub(crate) fn rejection(mut res: Response<Bytes>) -> CompleteResponse {
    res.extensions_mut().insert(Retention::NoStore);
    res.map(|body| (body, None))
}

/// Creates the error of a request that the limits of the layer do not admit.
pub(crate) fn admission_error(rules: &Rules, error: AdmissionError) -> Error {
    match error {
        AdmissionError::Draining => Error::new(ErrorKind::Draining, "the service is shutting down"),
        AdmissionError::RequestLimit => {
            Error::new(ErrorKind::Overloaded, "too many requests are in flight")
        }
        AdmissionError::ByteLimit => {
            Error::new(ErrorKind::Overloaded, "too many bytes are buffered")
        }
        // Only for a replay. Usually, a process with a higher limit has recorded the response. The length of a compressed record
        // also counts the head, so a body just below the limit can exceed it too. The text does not propose a new key, because
        // that would execute the request again.
        AdmissionError::ResponseTooLarge { .. } => {
            let detail =
                "this request was executed before, but its response exceeds a limit of this process";
            return Error::new(ErrorKind::StoreUnavailable, detail).without_retry();
        }
        #[cfg(feature = "rate")]
        AdmissionError::FreshKeyRate(wait) => {
            let detail = "this caller sends new keys faster than its rate allows";
            let error = Error::new(ErrorKind::CallerLimit, detail);
            return error.with_retry_after(wait.max(rules.retry_after));
        }
        AdmissionError::CallerLimit => Error::new(
            ErrorKind::CallerLimit,
            "this caller has too many requests in flight, or too many bytes of bodies in them",
        ),
        AdmissionError::CallerStoreLimit => Error::new(
            ErrorKind::CallerLimit,
            "this caller has too many keys in the store whose outcome is unknown",
        ),
    }
    .with_retry_after(rules.retry_after)
}

/// Creates the error of a request that reuses the key of another request.
pub(crate) fn key_reused(status: StatusCode) -> Error {
    let detail = "the key was used with another request; use a new key for a new request";
    Error::new(ErrorKind::KeyReused, detail).with_status(status)
}

/// Creates the error of a duplicate that arrives while the first request is executed.
pub(crate) fn in_progress(rules: &Rules, status: StatusCode) -> Error {
    let detail = "the first request with this key is still being executed";
    Error::new(ErrorKind::InProgress, detail)
        .with_status(status)
        .with_retry_after(rules.retry_after)
}

/// Creates the error of a request whose earlier execution ended without an outcome.
pub(crate) fn outcome_unknown() -> Error {
    let detail = "an execution of this request ended without an outcome; it may or may not have had its effect";
    Error::new(ErrorKind::OutcomeUnknown, detail)
}

/// Creates the error of a request that was executed, and whose outcome may become known later.
///
/// Another execution holds the lease, or the store failed.
pub(crate) fn outcome_pending(rules: &Rules) -> Error {
    let detail = "it is not yet known if this request had its effect; retry with the same key";
    Error::new(ErrorKind::OutcomeUnknown, detail).with_retry_after(rules.retry_after)
}

/// Creates the error of a request whose earlier execution ended with `NeedsAttention`.
pub(crate) fn needs_attention(code: &str) -> Error {
    // The sentence includes the code for custom error responses that send only the detail.
    let detail = format!(
        "an execution of this request failed and needs attention ({code}); it may or may not have had its effect"
    );
    Error::new(ErrorKind::OutcomeUnknown, detail).with_reason(code)
}

/// Creates the error of a request that got no lease because the store failed.
pub(crate) fn store_unavailable(
    rules: &Rules,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> Error {
    // The state of an earlier attempt is unknown. The text must not suggest that it had no effect.
    let detail =
        "the store failed, so nothing was executed now; an earlier attempt may have been executed";
    Error::new(ErrorKind::StoreUnavailable, detail)
        .with_retry_after(rules.retry_after)
        .with_source(source)
}

/// Creates the error of an execution that reported a success without the end of its transaction.
pub(crate) fn unfinished_transaction() -> Error {
    let detail = "the service neither committed nor rolled back its transaction, so the transaction had no effect";
    Error::new(ErrorKind::UnfinishedTransaction, detail)
}

/// Creates the error of a request whose entry the store cannot read.
pub(crate) fn unreadable_entry(
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> Error {
    // The entry may be in progress, completed, or that of another request. The text does not propose a new key, because that
    // would execute the request again.
    let detail = "the entry of this key cannot be read, so nothing was executed now; an earlier attempt may have been executed";
    unreadable(detail, source)
}

/// Reports a record that cannot be read, and returns the error of its request. `source` quotes no data.
pub(crate) fn unreadable_record<S>(rules: &Rules, id: &KeyId, source: S) -> Error
where
    S: std::fmt::Display + Into<Box<dyn std::error::Error + Send + Sync>>,
{
    telemetry::bad_record(&rules.warnings, id, &source);
    // The text does not propose a new key, because that would execute the request again.
    let detail = "this request was executed before, but its record cannot be read";
    unreadable(detail, source).with_entry(id)
}

fn unreadable(
    detail: &'static str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> Error {
    Error::new(ErrorKind::StoreUnavailable, detail)
        .without_retry()
        .with_source(source)
}
