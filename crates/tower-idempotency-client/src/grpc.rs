//! The status of a gRPC call, in the headers or the trailers of its response.

use std::time::Duration;

use base64::{
    Engine as _, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use http::{HeaderMap, HeaderValue, header};

/// Status of a gRPC call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct GrpcStatus {
    /// Code of the call. An invalid value counts as 2 (`UNKNOWN`), as for other clients.
    pub(crate) code: u8,
    /// Code of an error of `tower-idempotency`, such as `in-progress`.
    pub(crate) reason: Option<String>,
    /// Delay that the server requests (gRFC A6).
    pub(crate) delay: Option<Duration>,
    /// `true` if the server rejects a retry.
    pub(crate) is_final: bool,
}

impl GrpcStatus {
    /// Returns the status in these headers or trailers, or `None` if they contain none.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let code = headers.get(STATUS)?;
        let pushback = headers.get(PUSHBACK);
        let delay = pushback.and_then(|value| value.to_str().ok()?.parse().ok());
        let details = headers.get(DETAILS);
        Some(Self {
            code: parse_code(code),
            reason: details.and_then(|details| reason(&BASE64.decode(details).ok()?)),
            delay: delay.map(Duration::from_millis),
            is_final: pushback.is_some() && delay.is_none(),
        })
    }

    /// Returns `true` for a code that a server of `tower-idempotency` records by default. A retry gets the same response.
    pub(crate) fn is_outcome(&self) -> bool {
        matches!(self.code, 0 | 3 | 5 | 6 | 7 | 9 | 11)
    }
}

/// Returns `true` if the response is one of gRPC.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let media_type = headers.get(header::CONTENT_TYPE);
    media_type.is_some_and(|media_type| {
        let start = media_type.as_bytes().get(..MEDIA_TYPE.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(MEDIA_TYPE))
    })
}

fn parse_code(value: &HeaderValue) -> u8 {
    let code = value.to_str().ok().and_then(|text| text.parse().ok());
    code.filter(|code| *code <= 16).unwrap_or(2)
}

/// Returns the reason of an `ErrorInfo` of `tower-idempotency`, if these bytes of a `google.rpc.Status` contain one.
fn reason(details: &[u8]) -> Option<String> {
    // Field 1 of the message is the reason, and field 2 is the domain.
    let end = details
        .windows(DOMAIN.len())
        .position(|bytes| bytes == DOMAIN)?;
    let begin = details[..end]
        .windows(PREFIX.len())
        .rposition(|bytes| bytes == PREFIX)?;
    let reason = &details[begin..end];
    let is_field = details[..begin].ends_with(&[0x0a, u8::try_from(reason.len()).ok()?]);
    let reason = str::from_utf8(&reason[PREFIX.len()..]).ok()?;
    is_field.then(|| reason.to_ascii_lowercase().replace('_', "-"))
}

/// Base64 with or without padding: clients and servers of gRPC send both.
const BASE64: GeneralPurpose = {
    let padding =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    GeneralPurpose::new(&alphabet::STANDARD, padding)
};
const MEDIA_TYPE: &[u8] = b"application/grpc";
const STATUS: &str = "grpc-status";
const PUSHBACK: &str = "grpc-retry-pushback-ms";
const DETAILS: &str = "grpc-status-details-bin";
const PREFIX: &[u8] = b"IDEMPOTENCY_";
/// Tag and length of the field, and the domain.
const DOMAIN: &[u8] = b"\x12\x11tower-idempotency";

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose;

    use super::*;

    fn status(lines: &[(&'static str, &str)]) -> Option<GrpcStatus> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.insert(*name, HeaderValue::from_str(value).unwrap());
        }
        GrpcStatus::of(&headers)
    }

    #[test]
    fn invalid_code_is_unknown() {
        for (value, code) in [
            ("0", 0),
            ("14", 14),
            ("16", 16),
            ("17", 2),
            ("", 2),
            ("x", 2),
        ] {
            assert_eq!(status(&[(STATUS, value)]).unwrap().code, code, "{value}");
        }
        assert_eq!(status(&[]), None);
    }

    /// A value that is negative or no number rejects retries (gRFC A6).
    #[test]
    fn pushback_is_delay_or_rejects_retry() {
        for (value, delay, is_final) in [
            ("1500", Some(1500), false),
            ("0", Some(0), false),
            ("-1", None, true),
            ("soon", None, true),
        ] {
            let status = status(&[(STATUS, "14"), (PUSHBACK, value)]).unwrap();
            assert_eq!(status.delay, delay.map(Duration::from_millis), "{value}");
            assert_eq!(status.is_final, is_final, "{value}");
        }
        assert!(!status(&[(STATUS, "14")]).unwrap().is_final);
    }

    #[test]
    fn details_are_read_with_and_without_padding() {
        let info = b"\x0a\x17IDEMPOTENCY_IN_PROGRESS\x12\x11tower-idempotency";
        let padded = general_purpose::STANDARD.encode(info);
        assert!(padded.ends_with('='));
        for details in [padded.as_str(), padded.trim_end_matches('=')] {
            let status = status(&[(STATUS, "14"), (DETAILS, details)]).unwrap();
            assert_eq!(status.reason.as_deref(), Some("in-progress"));
        }
        let status = status(&[(STATUS, "14"), (DETAILS, "no base64")]).unwrap();
        assert_eq!(status.reason, None);
    }

    #[test]
    fn reason_is_field_before_domain() {
        let info = b"\x0a\x17IDEMPOTENCY_IN_PROGRESS\x12\x11tower-idempotency";
        assert_eq!(reason(info).as_deref(), Some("in-progress"));
        let other = b"\x0a\x17IDEMPOTENCY_IN_PROGRESS\x12\x0bexample.com";
        assert_eq!(reason(other), None);
        // A text that is no field of its own.
        let text = b"\x0a\x20 text: IDEMPOTENCY_IN_PROGRESS\x12\x11tower-idempotency";
        assert_eq!(reason(text), None);
        assert_eq!(reason(b""), None);
    }
}
