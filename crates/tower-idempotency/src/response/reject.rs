//! What the layer says when it answers in the handler's stead.

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};

use crate::{
    body::Body,
    config::Config,
    error::{Error, ErrorKind},
    execution::rules::ConcurrentRequests,
    execution::shared::Failure,
    limits::NoPlace,
    request::rules::KeyReuse,
    telemetry,
};

/// An answer that is in our hands whole: a refusal or a replay.
pub(crate) type Answer = Response<(Bytes, Option<HeaderMap>)>;

/// The answer as the body of any service's response.
pub(crate) fn into_response<R: http_body::Body>(answer: Answer) -> Response<Body<R>> {
    answer.map(|(data, trailers)| Body::held(data, trailers))
}

pub(crate) fn refuse(config: &Config, error: &Error) -> Answer {
    telemetry::refused(error.kind());
    own(config.response.refusal(error))
}

/// An answer without trailers.
pub(crate) fn own(res: Response<Bytes>) -> Answer {
    res.map(|body| (body, None))
}

pub(crate) fn turned_away(config: &Config, no_place: &NoPlace) -> Error {
    match no_place {
        NoPlace::Draining => Error::new(ErrorKind::Draining, "the service is shutting down"),
        NoPlace::Full => Error::new(ErrorKind::Overloaded, "too many requests are in flight"),
        NoPlace::TooManyBytes => Error::new(ErrorKind::Overloaded, "too many bytes are buffered"),
    }
    .with_retry_after(config.response.retry_after)
}

pub(crate) fn key_reused(config: &Config) -> Error {
    let status = match config.request.key_reuse {
        KeyReuse::Refuse(status) => status,
        KeyReuse::Separate => ErrorKind::KeyReused.status(),
    };
    let detail = "the key was used with another request; use a new key for a new request";
    Error::new(ErrorKind::KeyReused, detail).with_status(status)
}

pub(crate) fn in_progress(config: &Config) -> Error {
    let status = match config.execution.concurrent_requests {
        ConcurrentRequests::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
        ConcurrentRequests::Conflict | ConcurrentRequests::Wait(_) => StatusCode::CONFLICT,
    };
    let detail = "the first request with this key is still being executed";
    Error::new(ErrorKind::InProgress, detail)
        .with_status(status)
        .with_retry_after(config.response.retry_after)
}

pub(crate) fn outcome_unknown() -> Error {
    let detail = "an execution of this request ended without an outcome; it may or may not have had its effect";
    Error::new(ErrorKind::OutcomeUnknown, detail)
}

/// As [`outcome_unknown`], of the request's own execution, and for now: somebody else executes it, or the store does not say.
pub(crate) fn not_known_yet(config: &Config) -> Error {
    let detail =
        "it cannot be told yet whether this request had its effect; ask again with the same key";
    Error::new(ErrorKind::OutcomeUnknown, detail).with_retry_after(config.response.retry_after)
}

/// As [`outcome_unknown`], of an execution that said so itself.
pub(crate) fn unresolved(code: &str) -> Error {
    // The code is in the sentence as well, for those whose renderer has a place for nothing else.
    let detail = format!(
        "an execution of this request failed and needs attention ({code}); it may or may not have had its effect"
    );
    Error::new(ErrorKind::OutcomeUnknown, detail).with_reason(code)
}

pub(crate) fn unavailable(config: &Config, failure: Failure) -> Error {
    // Of an earlier attempt nothing is known: whoever reads this must not take it for one that came to nothing.
    let detail = "the store failed, so nothing was executed now; an earlier attempt may have been";
    Error::new(ErrorKind::StoreUnavailable, detail)
        .with_retry_after(config.response.retry_after)
        .with_source(failure.into_source())
}

pub(crate) fn unreadable(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    // Unlike the other refusals of this kind: a new key would do it again.
    let detail = "this request was executed before, but what was recorded of it cannot be read";
    Error::new(ErrorKind::StoreUnavailable, detail).with_source(source)
}
