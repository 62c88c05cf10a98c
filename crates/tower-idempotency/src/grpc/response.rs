//! Renders errors as gRPC responses that consist of headers alone.

use std::{fmt::Write as _, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, header};

use super::{
    code::{GRPC_STATUS, GrpcCode},
    details::encode_status,
};
use crate::error::{Error, ErrorKind};

/// Renders an error as a gRPC response without a message ("trailers-only"), as the layer does for protected calls.
///
/// The response has `grpc-status`, `grpc-message` with [`Error::detail`], and `grpc-status-details-bin`. The latter is a
/// `google.rpc.Status` with an `ErrorInfo`: the reason is `IDEMPOTENCY_` and the [code](ErrorKind::code), such as
/// `IDEMPOTENCY_IN_PROGRESS`, and the domain is `tower-idempotency`. If the error has a [delay](Error::retry_after), there
/// is also a `RetryInfo`, and `grpc-retry-pushback-ms` has the delay. If a retry cannot succeed, `grpc-retry-pushback-ms` is
/// -1, so that clients do not retry whatever their retry policy is (gRFC A6).
///
/// | code | errors |
/// |---|---|
/// | `INVALID_ARGUMENT` | the key is missing, invalid, or was used with another request; the call is not unary |
/// | `UNAVAILABLE` | the first call is in progress; the store fails; the service shuts down; the request is incomplete; the outcome may become known |
/// | `FAILED_PRECONDITION` | the outcome is unknown; the response was not recorded; the entry or its record cannot be read |
/// | `RESOURCE_EXHAUSTED` | limits of the layer, of the caller, or of the size of a request |
/// | `INTERNAL` | the service has no principal, or left a transaction open |
///
/// For services that get an [`Error`] themselves, such as from [`run_once`](crate::IdempotencyLayer::run_once). The status
/// for tonic is `Status::from_header_map(grpc_response(&error).headers())`.
///
/// ```
/// use std::{convert::Infallible, time::Duration};
///
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, grpc_response, run_once::WorkError};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let layer = IdempotencyLayer::new(MemoryStore::new());
/// layer.drain(Duration::ZERO).await;
///
/// let ship = async |_lease| Ok::<_, WorkError<Infallible>>("shipped".to_owned());
/// let error = layer.run_once("order-7", "ship", ship).await.expect_err("it shuts down");
/// let res = grpc_response(&error);
/// assert_eq!(res.headers()["grpc-status"], "14");
/// assert_eq!(res.headers()["grpc-retry-pushback-ms"], "1000");
/// # }
/// ```
#[must_use]
pub fn grpc_response(error: &Error) -> Response<Bytes> {
    let mut res = Response::new(Bytes::new());
    write_headers(error, res.headers_mut());
    res
}

fn write_headers(error: &Error, headers: &mut HeaderMap) {
    let code = code_of(error);
    let reason = format!(
        "IDEMPOTENCY_{}",
        error.kind().code().replace('-', "_").to_ascii_uppercase()
    );
    let entry = error.entry().map(ToString::to_string);
    let metadata: Vec<_> = [("entry", entry.as_deref()), ("reason", error.reason())]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect();
    let retry_after = error.retry_after().map(|after| {
        // Whole milliseconds, rounded up: 0 would request an immediate retry.
        let millis = after.as_nanos().div_ceil(1_000_000).max(1);
        Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
    });
    let details = encode_status(code as u64, error.detail(), &reason, &metadata, retry_after);
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/grpc"),
    );
    let pushback = match retry_after {
        Some(after) => Some(i32::try_from(after.as_millis()).unwrap_or(i32::MAX)),
        None => (!error.is_retryable()).then_some(-1),
    };
    let lines = [
        (GRPC_STATUS, Some((code as i32).to_string())),
        ("grpc-message", Some(percent_encode(error.detail()))),
        (
            "grpc-status-details-bin",
            Some(STANDARD_NO_PAD.encode(details)),
        ),
        (
            "grpc-retry-pushback-ms",
            pushback.map(|pushback| pushback.to_string()),
        ),
    ];
    for (name, value) in lines {
        let value = value.and_then(|value| HeaderValue::try_from(value).ok());
        if let Some(value) = value {
            headers.insert(name, value);
        }
    }
}

/// Returns the code of an error. `UNAVAILABLE`, which clients retry, is used only if a retry is safe and can succeed.
fn code_of(error: &Error) -> GrpcCode {
    match error.kind() {
        ErrorKind::MissingKey
        | ErrorKind::MalformedKey
        | ErrorKind::KeyTooLong
        | ErrorKind::KeyReused
        | ErrorKind::NotUnary
        | ErrorKind::PrincipalAmbiguous => GrpcCode::InvalidArgument,
        ErrorKind::InProgress
        | ErrorKind::Draining
        | ErrorKind::BodyTimeout
        | ErrorKind::BodyUnreadable => GrpcCode::Unavailable,
        ErrorKind::OutcomeUnknown | ErrorKind::StoreUnavailable if error.is_retryable() => {
            GrpcCode::Unavailable
        }
        ErrorKind::OutcomeUnknown
        | ErrorKind::StoreUnavailable
        | ErrorKind::ResponseNotRetained => GrpcCode::FailedPrecondition,
        ErrorKind::Overloaded | ErrorKind::CallerLimit | ErrorKind::BodyTooLarge => {
            GrpcCode::ResourceExhausted
        }
        ErrorKind::PrincipalMissing | ErrorKind::UnfinishedTransaction => GrpcCode::Internal,
    }
}

/// Encodes a message for `grpc-message`: visible ASCII and spaces stay, except `%`.
fn percent_encode(message: &str) -> String {
    let mut encoded = String::with_capacity(message.len());
    for byte in message.bytes() {
        if matches!(byte, b' '..=b'~') && byte != b'%' {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pushback(error: &Error) -> Option<String> {
        let res = grpc_response(error);
        let value = res.headers().get("grpc-retry-pushback-ms")?;
        Some(value.to_str().unwrap().to_owned())
    }

    // S-301
    #[test]
    fn pushback_says_if_and_when_to_retry() {
        let delayed = |after| {
            let error = Error::new(ErrorKind::InProgress, "still running");
            pushback(&error.with_retry_after(after))
        };
        for (after, millis) in [
            (Duration::ZERO, "1"),
            (Duration::from_micros(1_500), "2"),
            (Duration::from_millis(1_500), "1500"),
            (Duration::MAX, "2147483647"),
        ] {
            assert_eq!(delayed(after).as_deref(), Some(millis));
        }
        let without_delay = Error::new(ErrorKind::BodyTimeout, "too slow");
        assert_eq!(pushback(&without_delay), None);
        let mismatch = Error::new(ErrorKind::KeyReused, "another request");
        assert_eq!(pushback(&mismatch).as_deref(), Some("-1"));
    }

    #[test]
    fn unreadable_record_is_not_retried() {
        let unreadable = Error::new(ErrorKind::StoreUnavailable, "a record").without_retry();
        assert_eq!(pushback(&unreadable).as_deref(), Some("-1"));
        let res = grpc_response(&unreadable);
        assert_eq!(res.headers()["grpc-status"], "9");
    }

    #[test]
    fn message_is_percent_encoded() {
        assert_eq!(percent_encode("50 % of \u{e9}\n~"), "50 %25 of %C3%A9%0A~");
    }
}
