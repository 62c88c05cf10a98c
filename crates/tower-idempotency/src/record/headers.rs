//! Selection of the headers that a record stores.

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// Response header by which a handler sets whether its response is recorded.
pub(crate) const POLICY: HeaderName = HeaderName::from_static("x-idempo-policy");
/// Response header by which a handler sets the retention of its response, in seconds.
pub(crate) const PERSIST_FOR: HeaderName = HeaderName::from_static("x-idempo-persist-for-seconds");

/// Returns the header lines to store, in their order. Calls `replayed` once for each. Adds the positions of lines with
/// sensitive values to `sensitive`, counted from `first`.
pub(super) fn recorded_lines<'a>(
    headers: &'a HeaderMap,
    replayed: &dyn Fn(&HeaderName) -> bool,
    first: usize,
    sensitive: &mut Vec<u8>,
) -> Vec<(&'a str, &'a [u8])> {
    let mut lines = Vec::with_capacity(headers.len());
    let listed = headers.contains_key(header::CONNECTION);
    for (name, value) in headers {
        if is_recorded(headers, listed, name, replayed) {
            if value.is_sensitive() {
                // Records with more lines than a byte can count are never written.
                sensitive.extend(u8::try_from(first + lines.len()).ok());
            }
            lines.push((name.as_str(), value.as_bytes()));
        }
    }
    lines
}

/// Returns the header lines that a record omits, in their order: lines that belong to a single exchange.
pub(crate) fn not_kept<'a>(
    headers: &'a HeaderMap,
    replayed: &dyn Fn(&HeaderName) -> bool,
) -> impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)> {
    let listed = headers.contains_key(header::CONNECTION);
    headers
        .iter()
        .filter(move |(name, _)| !is_recorded(headers, listed, name, replayed))
}

/// Returns `true` if a record stores this header. `listed` is `true` if there is a `Connection` line, which lists
/// further fields of the connection.
#[inline]
fn is_recorded(
    headers: &HeaderMap,
    listed: bool,
    name: &HeaderName,
    replayed: &dyn Fn(&HeaderName) -> bool,
) -> bool {
    let single_message = is_never_recorded(name) || listed && connection_lists(headers, name);
    !single_message && replayed(name)
}

/// Returns `true` if a replay carries this header by default.
///
/// All headers are replayed except
///
/// - fields of one connection or one message: `Connection`, `Keep-Alive`, `Proxy-Connection`, `TE`, `Trailer`,
///   `Transfer-Encoding`, `Upgrade`, `Content-Length` (computed again), the `Proxy-*` authentication fields, and the
///   two control headers of the layer;
/// - fields that apply to the first response only: `Date`, `Age`, `Via`, `Server-Timing`, `traceparent`, `tracestate`,
///   `X-Request-Id`, and the rate limit headers `RateLimit`, `RateLimit-*`, `X-RateLimit-*` and `X-Rate-Limit-*`;
/// - `Set-Cookie`: a replayed cookie could restore a session that has ended since.
///
/// No setting can replay the fields that `Connection` names, or those of the first group except the authentication
/// fields.
#[must_use]
pub fn replayed_by_default(name: &HeaderName) -> bool {
    let once = match name.as_str() {
        "date" | "age" | "via" | "server-timing" | "traceparent" | "tracestate"
        | "x-request-id" | "set-cookie" | "ratelimit" => true,
        "proxy-authenticate" | "proxy-authentication-info" | "proxy-authorization" => true,
        other => ["ratelimit-", "x-ratelimit-", "x-rate-limit-"]
            .iter()
            .any(|prefix| other.starts_with(prefix)),
    };
    !once && !is_never_recorded(name)
}

/// Returns `true` for fields that no record stores: those of the connection, of the message framing, and the control
/// headers of this layer.
pub(super) fn is_never_recorded(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection"
            | "keep-alive"
            | "proxy-connection"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
            | "content-length"
            | "x-idempo-policy"
            | "x-idempo-persist-for-seconds"
    )
}

fn connection_lists(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .map(HeaderValue::as_bytes)
        .flat_map(|line| line.split(|&byte| byte == b','))
        .any(|option| {
            option
                .trim_ascii()
                .eq_ignore_ascii_case(name.as_str().as_bytes())
        })
}
