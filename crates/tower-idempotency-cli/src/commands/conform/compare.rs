//! Comparison of responses.

use http::HeaderValue;

use super::client::ServerResponse;

/// The headers that describe the representation (RFC 9110, section 8), and `Location`.
const REPRESENTATION: [&str; 7] = [
    "content-type",
    "content-encoding",
    "content-language",
    "content-location",
    "location",
    "etag",
    "last-modified",
];

/// Returns how a response differs in status or body from the first one.
pub(super) fn body_difference(first: &ServerResponse, retry: &ServerResponse) -> Option<String> {
    if first.status != retry.status {
        let (first, retry) = (first.status.as_u16(), retry.status.as_u16());
        return Some(format!("{first}, then {retry}"));
    }
    (first.body != retry.body).then(|| "the bodies differ".to_owned())
}

/// Returns the name of a header of the representation that differs.
pub(super) fn header_difference(
    first: &ServerResponse,
    retry: &ServerResponse,
) -> Option<&'static str> {
    let differs = |name: &&str| {
        let values = |response: &ServerResponse| -> Vec<HeaderValue> {
            response.headers.get_all(*name).iter().cloned().collect()
        };
        values(first) != values(retry)
    };
    REPRESENTATION.into_iter().find(differs)
}

/// Returns the name of the header that marks a replay, such as `Idempotent-Replayed: true`.
pub(super) fn marker(response: &ServerResponse) -> Option<&str> {
    let headers = response.headers.iter();
    let mut markers = headers.filter(|(name, value)| {
        name.as_str().contains("replay") && value.as_bytes().eq_ignore_ascii_case(b"true")
    });
    markers.next().map(|(name, _)| name.as_str())
}

pub(super) fn is_marked(response: &ServerResponse) -> bool {
    marker(response).is_some()
}
