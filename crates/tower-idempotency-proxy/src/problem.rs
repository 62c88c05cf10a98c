//! Responses of the proxy itself: problem details (RFC 9457).

use bytes::Bytes;
use http::{HeaderValue, Method, Response, StatusCode, header};
use http_body_util::Full;
use serde_json::json;

use crate::body::UpstreamBody;

/// The `Allow` of the responses of the proxy itself.
const ALLOWED: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";

/// A response of the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// No byte of the request was sent to the upstream.
    UpstreamUnreachable,
    /// The request was sent, and the connection broke before the head of the response.
    UpstreamBroken,
    /// The request was sent, and the head of the response did not arrive in time.
    UpstreamTimeout,
    NoRoute,
    BadPath,
    BadHost,
    BadMethod,
    BadLength,
    TooManyHeaders,
    Connect,
}

impl Problem {
    fn status(self) -> StatusCode {
        match self {
            Self::UpstreamUnreachable | Self::UpstreamBroken => StatusCode::BAD_GATEWAY,
            Self::UpstreamTimeout => StatusCode::GATEWAY_TIMEOUT,
            Self::NoRoute => StatusCode::NOT_FOUND,
            Self::BadPath | Self::BadHost | Self::BadMethod | Self::BadLength => {
                StatusCode::BAD_REQUEST
            }
            Self::TooManyHeaders => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::Connect => StatusCode::METHOD_NOT_ALLOWED,
        }
    }

    /// Returns the name in responses and metrics.
    pub(crate) fn code(self) -> &'static str {
        match self {
            Self::UpstreamUnreachable => "upstream-unreachable",
            Self::UpstreamBroken | Self::UpstreamTimeout => "outcome-unknown",
            Self::NoRoute => "no-route",
            Self::BadPath => "bad-path",
            Self::BadHost => "bad-host",
            Self::BadMethod => "bad-method",
            Self::BadLength => "bad-length",
            Self::TooManyHeaders => "too-many-headers",
            Self::Connect => "connect-not-supported",
        }
    }

    fn detail(self) -> &'static str {
        match self {
            Self::UpstreamUnreachable => {
                "the upstream cannot be reached; the request was not sent, and a retry is safe"
            }
            Self::UpstreamBroken => {
                "the connection to the upstream broke after the request was sent; it may or may not have had its effect"
            }
            Self::UpstreamTimeout => {
                "the upstream did not respond in time after the request was sent; it may or may not have had its effect"
            }
            Self::NoRoute => "no route of the proxy matches this request",
            Self::BadPath => {
                "expected a path without two slashes at its start, a dot segment, an empty name before a semicolon, an encoded slash, a backslash, a control character or an incomplete escape"
            }
            Self::BadHost => "the request has no valid host, or more than one",
            Self::BadMethod => {
                "the method has a small letter, and some services read it as another method"
            }
            Self::BadLength => {
                "the request has several lengths, an empty length, both a length and chunks, or another transfer coding than chunked"
            }
            Self::TooManyHeaders => "the request has too many header lines",
            Self::Connect => "this proxy opens no tunnels",
        }
    }

    pub(crate) fn response(self) -> Response<UpstreamBody> {
        let body = json!({
            "type": format!("urn:tower-idempotency:problem:{}", self.code()),
            "title": self.status().canonical_reason(),
            "status": self.status().as_u16(),
            "detail": self.detail(),
            "code": self.code(),
            "retryable": self == Self::UpstreamUnreachable,
        });
        let mut res = Response::new(own_body(body.to_string()));
        *res.status_mut() = self.status();
        let headers = res.headers_mut();
        let media_type = HeaderValue::from_static("application/problem+json");
        headers.insert(header::CONTENT_TYPE, media_type);
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        match self {
            Self::UpstreamUnreachable => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Self::Connect => {
                headers.insert(header::ALLOW, HeaderValue::from_static(ALLOWED));
            }
            _ => {}
        }
        res
    }
}

/// Returns the response to an OPTIONS or a TRACE that the proxy must not forward. The proxy itself does not support TRACE.
pub(crate) fn last_response(method: &Method) -> Response<UpstreamBody> {
    let mut res = Response::new(own_body(""));
    *res.status_mut() = match *method {
        Method::OPTIONS => StatusCode::NO_CONTENT,
        _ => StatusCode::METHOD_NOT_ALLOWED,
    };
    res.headers_mut()
        .insert(header::ALLOW, HeaderValue::from_static(ALLOWED));
    res
}

/// Returns a body of the proxy itself.
fn own_body(data: impl Into<Bytes>) -> UpstreamBody {
    UpstreamBody::Right(Full::new(data.into()))
}
