//! Renders errors: RFC 9457 problem details, and the bodies of the presets `Stripe`, `Idempo` and `Acp`.

use std::borrow::Cow;

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use serde_json::{Value, json};

use crate::error::{Error, ErrorKind};

/// Default value of the `Link` header: the draft that defines the key header. Recommended in
/// draft-ietf-httpapi-idempotency-key-header-07, section 2.7.
pub(crate) const DEFAULT_LINK: &str = "<https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/>; rel=\"describedby\"";

/// Renders `application/problem+json` (RFC 9457) with the members `type`, `title`, `status`, `detail`, `code` and
/// `retryable`, and `entry` and `reason` if the error has them.
pub(crate) fn problem_json(error: &Error, described_by: &HeaderValue) -> Response<Bytes> {
    let kind = error.kind();
    let mut body = json!({
        "type": format!("urn:tower-idempotency:problem:{}", kind.code()),
        "title": kind.title(),
        "status": error.status().as_u16(),
        "detail": error.detail(),
        "code": kind.code(),
        "retryable": error.is_retryable(),
    });
    add_details(error, &mut body);
    let mut res = response(error, "application/problem+json", body.to_string());
    res.headers_mut().insert(header::LINK, described_by.clone());
    res
}

/// Renders the body that clients of Stripe's API expect.
pub(crate) fn stripe(error: &Error) -> Response<Bytes> {
    let error_type = match error.kind() {
        ErrorKind::StoreUnavailable
        | ErrorKind::Overloaded
        | ErrorKind::Draining
        | ErrorKind::PrincipalMissing
        | ErrorKind::UnfinishedTransaction => "api_error",
        ErrorKind::BodyTooLarge
        | ErrorKind::BodyTimeout
        | ErrorKind::BodyUnreadable
        | ErrorKind::PrincipalAmbiguous => "invalid_request_error",
        ErrorKind::CallerLimit => "rate_limit_error",
        ErrorKind::MissingKey
        | ErrorKind::MalformedKey
        | ErrorKind::KeyTooLong
        | ErrorKind::NotUnary
        | ErrorKind::KeyReused
        | ErrorKind::InProgress
        | ErrorKind::OutcomeUnknown
        | ErrorKind::ResponseNotRetained => "idempotency_error",
    };
    let mut body = json!({ "error": { "type": error_type, "code": error.kind().code(), "message": error.detail() } });
    add_details(error, &mut body["error"]);
    response(error, "application/json", body.to_string())
}

/// Renders the body that the Ruby gem idempo sends.
pub(crate) fn idempo(error: &Error) -> Response<Bytes> {
    let body = json!({ "ok": false, "error": { "message": error.detail() } });
    response(error, "application/json", body.to_string())
}

/// Renders the flat body of the Agentic Commerce Protocol (RFC "Agentic Checkout", section 6.4).
///
/// It has no other members: its schema permits none. The statuses 503 and 429 are temporary, and have the protocol's type
/// for temporary errors.
pub(crate) fn acp(error: &Error) -> Response<Bytes> {
    let (error_type, code) = match error.kind() {
        ErrorKind::MissingKey => ("invalid_request", Cow::Borrowed("idempotency_key_required")),
        ErrorKind::InProgress => ("invalid_request", Cow::Borrowed("idempotency_in_flight")),
        ErrorKind::KeyReused => ("invalid_request", Cow::Borrowed("idempotency_conflict")),
        kind => {
            let error_type = match kind {
                ErrorKind::StoreUnavailable
                | ErrorKind::Overloaded
                | ErrorKind::Draining
                | ErrorKind::CallerLimit => "service_unavailable",
                ErrorKind::PrincipalMissing
                | ErrorKind::UnfinishedTransaction
                | ErrorKind::OutcomeUnknown
                | ErrorKind::ResponseNotRetained => "processing_error",
                _ => "invalid_request",
            };
            (error_type, Cow::Owned(kind.code().replace('-', "_")))
        }
    };
    let body = json!({ "type": error_type, "code": code, "message": error.detail() });
    response(error, "application/json", body.to_string())
}

/// Adds the first digits of the entry, and the code of the failure that needs attention.
fn add_details(error: &Error, body: &mut Value) {
    if let Some(id) = error.entry() {
        body["entry"] = id.to_string().into();
    }
    if let Some(reason) = error.reason() {
        body["reason"] = reason.into();
    }
}

/// Returns the value `<url>; rel="describedby"` of a `Link` header, or `None` if a header cannot contain the URL.
pub(crate) fn described_by(url: &str) -> Option<HeaderValue> {
    let is_allowed = |byte: u8| byte.is_ascii_graphic() && !b"<>".contains(&byte);
    if !url.bytes().all(is_allowed) {
        return None;
    }
    HeaderValue::from_str(&format!("<{url}>; rel=\"describedby\"")).ok()
}

fn response(error: &Error, media_type: &'static str, body: String) -> Response<Bytes> {
    let mut res = Response::new(Bytes::from(body));
    *res.status_mut() = error.status();
    let headers = res.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Some(after) = error.retry_after() {
        // Whole seconds, rounded up: 0 would request an immediate retry.
        let secs = after.as_nanos().div_ceil(1_000_000_000).max(1);
        headers.insert(
            header::RETRY_AFTER,
            HeaderValue::from(u64::try_from(secs).unwrap_or(u64::MAX)),
        );
    }
    res
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::store::KeyId;

    fn text(res: &Response<Bytes>) -> String {
        String::from_utf8(res.body().to_vec()).expect("UTF-8")
    }

    #[test]
    fn problem_has_code_and_retryable_flag() {
        let error = Error::new(ErrorKind::InProgress, "the first request is still running")
            .with_retry_after(Duration::from_millis(1));
        let res = problem_json(&error, &HeaderValue::from_static(DEFAULT_LINK));
        insta::assert_snapshot!(text(&res), @r#"{"code":"in-progress","detail":"the first request is still running","retryable":true,"status":409,"title":"Request in progress","type":"urn:tower-idempotency:problem:in-progress"}"#);
        insta::assert_debug_snapshot!(res.headers(), @r#"
        {
            "content-type": "application/problem+json",
            "cache-control": "no-store",
            "retry-after": "1",
            "link": "<https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/>; rel=\"describedby\"",
        }
        "#);
    }

    #[test]
    fn presets_render_bodies_their_clients_expect() {
        let error = Error::new(
            ErrorKind::KeyReused,
            "the key was used with another request",
        );
        insta::assert_snapshot!(text(&stripe(&error)), @r#"{"error":{"code":"key-reused","message":"the key was used with another request","type":"idempotency_error"}}"#);
        insta::assert_snapshot!(text(&idempo(&error)), @r#"{"error":{"message":"the key was used with another request"},"ok":false}"#);
        insta::assert_snapshot!(text(&acp(&error)), @r#"{"code":"idempotency_conflict","message":"the key was used with another request","type":"invalid_request"}"#);
    }

    #[test]
    fn every_body_contains_reason() {
        let error = Error::new(ErrorKind::OutcomeUnknown, "needs attention (refund-failed)")
            .with_reason("refund-failed");
        insta::assert_snapshot!(text(&problem_json(&error, &HeaderValue::from_static(DEFAULT_LINK))), @r#"{"code":"outcome-unknown","detail":"needs attention (refund-failed)","reason":"refund-failed","retryable":false,"status":409,"title":"Outcome unknown","type":"urn:tower-idempotency:problem:outcome-unknown"}"#);
        insta::assert_snapshot!(text(&stripe(&error)), @r#"{"error":{"code":"outcome-unknown","message":"needs attention (refund-failed)","reason":"refund-failed","type":"idempotency_error"}}"#);
        insta::assert_snapshot!(text(&idempo(&error)), @r#"{"error":{"message":"needs attention (refund-failed)"},"ok":false}"#);
    }

    #[test]
    fn bodies_contain_first_digits_of_entry() {
        let id = KeyId::from_bytes([0x6f; 32]);
        let error = Error::new(ErrorKind::InProgress, "still running").with_entry(&id);
        let described_by = HeaderValue::from_static(DEFAULT_LINK);
        insta::assert_snapshot!(text(&problem_json(&error, &described_by)), @r#"{"code":"in-progress","detail":"still running","entry":"6f6f6f6f","retryable":true,"status":409,"title":"Request in progress","type":"urn:tower-idempotency:problem:in-progress"}"#);
        insta::assert_snapshot!(text(&stripe(&error)), @r#"{"error":{"code":"in-progress","entry":"6f6f6f6f","message":"still running","type":"idempotency_error"}}"#);
        insta::assert_snapshot!(text(&idempo(&error)), @r#"{"error":{"message":"still running"},"ok":false}"#);
    }

    #[test]
    fn described_by_rejects_urls_that_escape_header() {
        assert!(described_by("https://example.com/errors").is_some());
        assert!(described_by("https://example.com/>; rel=\"x\"").is_none());
        assert!(described_by("https://example.com/\r\nx: y").is_none());
    }
}
