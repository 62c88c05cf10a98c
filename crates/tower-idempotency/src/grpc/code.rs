//! The codes of gRPC, and the code of a response.

use http::{HeaderMap, HeaderValue, StatusCode};

/// Code of a gRPC status.
///
/// `tonic::Code` has the same numbers: `GrpcCode::from(tonic::Code::Aborted as i32)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are those of the gRPC documentation")]
#[non_exhaustive]
pub enum GrpcCode {
    Ok = 0,
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

const CODES: [GrpcCode; 17] = [
    GrpcCode::Ok,
    GrpcCode::Cancelled,
    GrpcCode::Unknown,
    GrpcCode::InvalidArgument,
    GrpcCode::DeadlineExceeded,
    GrpcCode::NotFound,
    GrpcCode::AlreadyExists,
    GrpcCode::PermissionDenied,
    GrpcCode::ResourceExhausted,
    GrpcCode::FailedPrecondition,
    GrpcCode::Aborted,
    GrpcCode::OutOfRange,
    GrpcCode::Unimplemented,
    GrpcCode::Internal,
    GrpcCode::Unavailable,
    GrpcCode::DataLoss,
    GrpcCode::Unauthenticated,
];

/// Returns [`GrpcCode::Unknown`] for a number that is no code, as gRPC clients do.
impl From<i32> for GrpcCode {
    fn from(number: i32) -> Self {
        let code = usize::try_from(number).ok().and_then(|at| CODES.get(at));
        code.copied().unwrap_or(Self::Unknown)
    }
}

impl GrpcCode {
    /// Returns `true` for a code that is the outcome of a call: OK, and errors that the same call gets again.
    ///
    /// The other codes leave the work to be done, or the service may respond differently to the next attempt.
    /// `UNIMPLEMENTED` is one of them: servers return it for an unknown compression, and for a method that a later version
    /// adds.
    #[must_use]
    pub const fn is_outcome(self) -> bool {
        matches!(
            self,
            Self::Ok
                | Self::InvalidArgument
                | Self::NotFound
                | Self::AlreadyExists
                | Self::PermissionDenied
                | Self::FailedPrecondition
                | Self::OutOfRange
        )
    }

    /// Returns the code of a gRPC response: that of the trailers, or else that of the headers or of the HTTP status. Returns
    /// `None` if a response with HTTP status 200 has no gRPC status: it broke off before its trailers.
    pub(crate) fn of_response(
        status: StatusCode,
        headers: &HeaderMap,
        trailers: Option<&HeaderMap>,
    ) -> Option<Self> {
        let in_trailers = trailers.and_then(|trailers| trailers.get(GRPC_STATUS));
        match in_trailers.or_else(|| headers.get(GRPC_STATUS)) {
            Some(value) => Some(Self::parse(value)),
            None => Self::of_http_status(status),
        }
    }

    fn parse(value: &HeaderValue) -> Self {
        match value.as_bytes() {
            [digit @ b'0'..=b'9'] => Self::from(i32::from(digit - b'0')),
            [b'1', digit @ b'0'..=b'6'] => Self::from(10 + i32::from(digit - b'0')),
            _ => Self::Unknown,
        }
    }

    /// <https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md>
    fn of_http_status(status: StatusCode) -> Option<Self> {
        Some(match status.as_u16() {
            200 => return None,
            400 => Self::Internal,
            401 => Self::Unauthenticated,
            403 => Self::PermissionDenied,
            404 => Self::Unimplemented,
            429 | 502 | 503 | 504 => Self::Unavailable,
            _ => Self::Unknown,
        })
    }
}

pub(crate) const GRPC_STATUS: &str = "grpc-status";

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(value: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(GRPC_STATUS, HeaderValue::from_static(value));
        headers
    }

    #[test]
    fn numbers_are_those_of_grpc() {
        for (number, code) in (0_i32..).zip(CODES) {
            assert_eq!(code as i32, number);
            assert_eq!(GrpcCode::from(number), code);
            let text: &'static str = number.to_string().leak();
            let parsed = GrpcCode::of_response(StatusCode::OK, &headers(text), None);
            assert_eq!(parsed, Some(code));
        }
        for number in [-1, 17, i32::MAX] {
            assert_eq!(GrpcCode::from(number), GrpcCode::Unknown);
        }
    }

    #[test]
    fn invalid_status_is_unknown() {
        for value in ["", "17", "00", "+1", " 0", "0 ", "OK", "99999999999"] {
            let code = GrpcCode::of_response(StatusCode::OK, &headers(value), None);
            assert_eq!(code, Some(GrpcCode::Unknown), "{value:?}");
        }
    }

    #[test]
    fn trailers_precede_headers_and_http_status() {
        let found = GrpcCode::of_response(StatusCode::OK, &headers("0"), Some(&headers("14")));
        assert_eq!(found, Some(GrpcCode::Unavailable));
        let none = HeaderMap::new();
        let found = GrpcCode::of_response(StatusCode::NOT_FOUND, &headers("5"), Some(&none));
        assert_eq!(found, Some(GrpcCode::NotFound));
        for (status, code) in [
            (200, None),
            (404, Some(GrpcCode::Unimplemented)),
            (503, Some(GrpcCode::Unavailable)),
            (500, Some(GrpcCode::Unknown)),
            (204, Some(GrpcCode::Unknown)),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            assert_eq!(GrpcCode::of_response(status, &none, None), code, "{status}");
        }
    }
}
