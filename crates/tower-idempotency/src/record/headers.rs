//! Which headers a record keeps.

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// Response header by which a handler says what becomes of its answer.
pub(crate) const POLICY: HeaderName = HeaderName::from_static("x-idempo-policy");
/// Response header by which a handler says for how many seconds its answer is kept.
pub(crate) const PERSIST_FOR: HeaderName = HeaderName::from_static("x-idempo-persist-for-seconds");

/// The header lines to store, in their order. `replayed` is asked once for each. The places of those whose values are marked as
/// sensitive are added to `sensitive`, counted from `first` on.
pub(super) fn kept<'a>(
    headers: &'a HeaderMap,
    replayed: &dyn Fn(&HeaderName) -> bool,
    first: usize,
    sensitive: &mut Vec<u8>,
) -> Vec<(&'a str, &'a [u8])> {
    let mut kept = Vec::with_capacity(headers.len());
    let listed = headers.contains_key(header::CONNECTION);
    for (name, value) in headers {
        if is_kept(headers, listed, name, replayed) {
            if value.is_sensitive() {
                // More lines than a byte can count are never written.
                sensitive.extend(u8::try_from(first + kept.len()).ok());
            }
            kept.push((name.as_str(), value.as_bytes()));
        }
    }
    kept
}

/// The header lines that a record leaves out, in their order: those of one exchange only.
pub(crate) fn not_kept<'a>(
    headers: &'a HeaderMap,
    replayed: &dyn Fn(&HeaderName) -> bool,
) -> impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)> {
    let listed = headers.contains_key(header::CONNECTION);
    headers
        .iter()
        .filter(move |(name, _)| !is_kept(headers, listed, name, replayed))
}

/// `listed` says whether there is a `Connection` line, which lists fields that belong to it.
#[inline]
fn is_kept(
    headers: &HeaderMap,
    listed: bool,
    name: &HeaderName,
    replayed: &dyn Fn(&HeaderName) -> bool,
) -> bool {
    let of_this_message = is_kept_back(name) || listed && connection_lists(headers, name);
    !of_this_message && replayed(name)
}

/// Whether a replay may carry this header: the default answer.
///
/// Everything is replayed except
///
/// - what belongs to one connection or one message: `Connection`, `Keep-Alive`, `Proxy-Connection`, `TE`, `Trailer`,
///   `Transfer-Encoding`, `Upgrade`, `Content-Length` (computed again), the `Proxy-*` authentication fields, and our two
///   control headers;
/// - what was true of the first answer only: `Date`, `Age`, `Via`, `Server-Timing`, `traceparent`, `tracestate`,
///   `X-Request-Id`, and the rate limit headers `RateLimit`, `RateLimit-*`, `X-RateLimit-*` and `X-Rate-Limit-*`;
/// - `Set-Cookie`: a replayed cookie could bring back a session that ended since.
///
/// The fields that `Connection` names, and all of the first group but the authentication fields, are kept back whatever
/// a closure of your own says.
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
    !once && !is_kept_back(name)
}

/// Fields that no record holds: of the connection, of the message framing, and addressed to this layer.
pub(super) fn is_kept_back(name: &HeaderName) -> bool {
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
