//! Selection of the headers that a record stores.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use smallvec::SmallVec;

/// Response header by which a handler sets whether its response is recorded.
pub(crate) const POLICY: HeaderName = HeaderName::from_static("x-idempo-policy");
/// Response header by which a handler sets the retention of its response, in seconds.
pub(crate) const PERSIST_FOR: HeaderName = HeaderName::from_static("x-idempo-persist-for-seconds");

/// Header lines. Most responses have few, which take no allocation.
pub(super) type LineList<'a> = SmallVec<[(&'a str, &'a [u8]); 8]>;

/// Returns the header lines to store, in their order. Calls `replayed` once for each. Adds the positions of lines with
/// sensitive values to `sensitive`, counted from `first`.
pub(super) fn recorded_lines<'a>(
    headers: &'a HeaderMap,
    replayed: &dyn Fn(&HeaderName) -> bool,
    first: usize,
    sensitive: &mut Vec<u8>,
) -> LineList<'a> {
    let mut lines = LineList::new();
    let listed = headers.keys().any(|name| name == header::CONNECTION);
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
pub(crate) fn unrecorded_lines<'a>(
    headers: &'a HeaderMap,
    replayed: &dyn Fn(&HeaderName) -> bool,
) -> impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)> {
    let listed = headers.keys().any(|name| name == header::CONNECTION);
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
///   `Transfer-Encoding`, `Upgrade`, `Content-Length` (computed again), and the two control headers of the layer;
/// - fields about the first exchange: `Date`, `Age`, `Via`, `Server-Timing`, `Cache-Status`, `Proxy-Status`, and the rate
///   limit headers `RateLimit`, `RateLimit-*`, `X-RateLimit-*` and `X-Rate-Limit-*`;
/// - fields of the authentication of one exchange: `Authentication-Info`, the `Proxy-*` authentication fields,
///   `DPoP-Nonce` (RFC 9449) and `Replay-Nonce` (RFC 8555), whose values can be used once;
/// - trace and correlation IDs: `traceparent`, `tracestate`, `traceresponse`, `baggage`, `X-Request-Id`, `Request-Id`,
///   `X-Correlation-Id`, `Correlation-Id`, `X-Trace-Id` and `X-Span-Id`;
/// - such IDs of AWS, Azure, Cloudflare, Datadog, Elastic, Envoy, Fly, Google Cloud, GitHub, Instana, Jaeger, LightStep,
///   Netlify, New Relic, Sentry, Vercel and Zipkin;
/// - `Access-Control-*`: the permission of one origin. Place the layer inside CORS;
/// - `Set-Cookie` and `Set-Cookie2`: a replayed cookie could restore a session that has ended since;
/// - `Clear-Site-Data`: a replay would delete data that the client has stored since.
///
/// No setting can replay the fields that `Connection` names, or those of the first group.
#[must_use]
pub fn replayed_by_default(name: &HeaderName) -> bool {
    !is_single_exchange(name.as_str()) && !is_trace_id(name.as_str()) && !is_never_recorded(name)
}

/// Returns `true` for fields that describe or authenticate one exchange, or change the state of the client.
fn is_single_exchange(name: &str) -> bool {
    const PREFIXES: [&str; 4] = [
        "access-control-",
        "ratelimit-",
        "x-ratelimit-",
        "x-rate-limit-",
    ];
    matches!(
        name,
        "date"
            | "age"
            | "via"
            | "server-timing"
            | "cache-status"
            | "proxy-status"
            | "ratelimit"
            | "authentication-info"
            | "proxy-authenticate"
            | "proxy-authentication-info"
            | "proxy-authorization"
            | "dpop-nonce"
            | "replay-nonce"
            | "set-cookie"
            | "set-cookie2"
            | "clear-site-data"
    ) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns `true` for fields that name one request in the traces and logs of a service or of its vendor.
fn is_trace_id(name: &str) -> bool {
    const PREFIXES: [&str; 7] = [
        "ot-tracer-",
        "uberctx-",
        "x-b3-",
        "x-datadog-",
        "x-instana-",
        "x-newrelic-",
        "x-ot-",
    ];
    matches!(
        name,
        // W3C Trace Context and Baggage.
        "traceparent" | "tracestate" | "traceresponse" | "baggage"
            // Common names without a vendor.
            | "request-id"
            | "x-request-id"
            | "requestid"
            | "x-requestid"
            | "correlation-id"
            | "x-correlation-id"
            | "x-correlationid"
            | "trace-id"
            | "x-trace-id"
            | "x-span-id"
            // Zipkin, Jaeger, Sentry, Honeycomb, New Relic, Elastic.
            | "b3"
            | "uber-trace-id"
            | "sentry-trace"
            | "x-honeycomb-trace"
            | "newrelic"
            | "elastic-apm-traceparent"
            // AWS.
            | "apigw-requestid"
            | "x-amz-apigw-id"
            | "x-amz-cf-id"
            | "x-amz-id-2"
            | "x-amz-request-id"
            | "x-amzn-requestid"
            | "x-amzn-trace-id"
            // Azure.
            | "request-context"
            | "x-azure-ref"
            | "x-ms-activity-id"
            | "x-ms-client-request-id"
            | "x-ms-correlation-request-id"
            | "x-ms-request-id"
            | "x-ms-routing-request-id"
            // Google Cloud.
            | "function-execution-id"
            | "x-appengine-request-log-id"
            | "x-cloud-trace-context"
            // Proxies and platforms.
            | "cf-ray"
            | "fly-request-id"
            | "x-envoy-upstream-service-time"
            | "x-github-request-id"
            | "x-nf-request-id"
            | "x-vercel-id"
    ) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
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
