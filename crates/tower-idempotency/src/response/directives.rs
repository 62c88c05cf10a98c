//! Control headers and extensions with which a handler decides if and for how long its response is recorded.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, Response, response};

use crate::{
    layer_name::LayerName,
    panics::catch_report_panic,
    record::{NeedsAttention, PERSIST_FOR, POLICY},
    store::Ttl,
};

/// Response extension with which a handler decides if and for how long its response is recorded.
///
/// This is the typed form of the headers `X-Idempo-Policy: no-store` and `X-Idempo-Persist-For-Seconds: N`, and overrides
/// them. The extension does not change the
/// [recorded statuses](crate::IdempotencyLayer::with_recorded_statuses): a 5xx, for example, is still not recorded. Use
/// [`NeedsAttention`], which overrides both, to prevent that a retry executes after such a response.
///
/// ```
/// use axum::{Extension, Router, body::Body, http::Request, routing::post};
/// use tower::ServiceExt;
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, Retention};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let app: Router = Router::new()
///     .route("/quotes", post(async || (Extension(Retention::NoStore), "42")))
///     .route_layer(IdempotencyLayer::new(MemoryStore::new()));
///
/// let quote = || Request::post("/quotes").header("idempotency-key", "q-1").body(Body::empty());
/// app.clone().oneshot(quote()?).await?;
/// let retry = app.oneshot(quote()?).await?;
/// assert!(!retry.headers().contains_key("idempotent-replayed"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retention {
    /// The response is not recorded. The layer releases the key, and a retry executes again.
    NoStore,
    /// The response is recorded for this duration, at most for the
    /// [maximum](crate::IdempotencyLayer::with_max_retention) of the layer. Zero is ignored with a warning, like an invalid
    /// header value, and the default of the layer applies.
    For(Duration),
}

/// Instruction of the handler about its response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Directive {
    NoStore,
    Record(Ttl),
    /// Record a failure that an operator must resolve, instead of the response.
    NeedsAttention(NeedsAttention),
}

/// Removes the control headers and extensions from the response and returns their directive.
pub(crate) fn take_directive(
    layer: &LayerName,
    head: &mut response::Parts,
    default: Ttl,
    max: Ttl,
) -> Directive {
    let from_headers = take_header_directive(layer, &mut head.headers, default, max);
    let retention = head.extensions.remove::<Retention>();
    if let Some(attention) = head.extensions.remove() {
        return Directive::NeedsAttention(attention);
    }
    match retention {
        None => from_headers,
        Some(Retention::NoStore) => Directive::NoStore,
        Some(Retention::For(duration)) => Directive::Record(match Ttl::try_from(duration) {
            Ok(ttl) => ttl.min(max),
            Err(_) if duration.is_zero() => {
                catch_report_panic(|| {
                    tracing::warn!(
                        layer = layer.as_str(),
                        "ignored a Retention of zero; the default applies"
                    );
                });
                default
            }
            Err(_) => max,
        }),
    }
}

/// Returns the directive of the response, which does not change.
pub(crate) fn read_directive<B>(
    layer: &LayerName,
    res: &Response<B>,
    default: Ttl,
    max: Ttl,
) -> Directive {
    let mut copy = Response::new(());
    if has_control_headers(res.headers()) || !res.extensions().is_empty() {
        Directives::of(res).restore(&mut copy);
    }
    let (mut head, ()) = copy.into_parts();
    take_directive(layer, &mut head, default, max)
}

/// Copy of the control headers and extensions of a response.
pub(crate) struct Directives {
    headers: [Option<HeaderValue>; 2],
    retention: Option<Retention>,
    attention: Option<NeedsAttention>,
}

impl Directives {
    /// Copies the control headers and extensions of the response.
    pub(crate) fn of<B>(res: &Response<B>) -> Self {
        let (headers, extensions) = (res.headers(), res.extensions());
        let mut policies = headers.get_all(POLICY).iter();
        let no_store = policies.find(|policy| is_no_store(policy));
        let policy = no_store.or_else(|| headers.get(POLICY));
        Self {
            headers: [policy, headers.get(PERSIST_FOR)].map(|value| value.cloned()),
            retention: extensions.get().copied(),
            attention: extensions.get().cloned(),
        }
    }

    /// Adds the headers and extensions to the response again.
    pub(crate) fn restore<B>(self, res: &mut Response<B>) {
        for (name, value) in [POLICY, PERSIST_FOR].into_iter().zip(self.headers) {
            if let Some(value) = value {
                res.headers_mut().insert(name, value);
            }
        }
        if let Some(retention) = self.retention {
            res.extensions_mut().insert(retention);
        }
        if let Some(attention) = self.attention {
            res.extensions_mut().insert(attention);
        }
    }
}

/// Removes both control headers.
pub(crate) fn strip_control_headers(headers: &mut HeaderMap) {
    if has_control_headers(headers) {
        headers.remove(POLICY);
        headers.remove(PERSIST_FOR);
    }
}

/// Returns `true` if the response may have a control header.
///
/// Most responses have few headers and none of these. Comparing the names is cheaper than two lookups. Hashing the two long
/// names would be half of the cost of the layer for a request without a key.
fn has_control_headers(headers: &HeaderMap) -> bool {
    headers
        .keys()
        .any(|name| name.as_str().starts_with("x-idempo-"))
}

fn take_header_directive(
    layer: &LayerName,
    headers: &mut HeaderMap,
    default: Ttl,
    max: Ttl,
) -> Directive {
    if !has_control_headers(headers) {
        return Directive::Record(default);
    }
    // A middleware may have added another line.
    let is_no_store = headers.get_all(POLICY).iter().any(is_no_store);
    let policy = headers.remove(POLICY);
    let persist_for = headers.remove(PERSIST_FOR);
    if is_no_store {
        return Directive::NoStore;
    }
    if policy.is_some() {
        catch_report_panic(|| {
            tracing::warn!(
                layer = layer.as_str(),
                "ignored X-Idempo-Policy: expected no-store"
            );
        });
    }
    let Some(persist_for) = persist_for else {
        return Directive::Record(default);
    };
    match parse_seconds(persist_for.as_bytes()) {
        Some(ttl) => Directive::Record(ttl.min(max)),
        None => {
            catch_report_panic(|| {
                tracing::warn!(
                    layer = layer.as_str(),
                    "ignored X-Idempo-Persist-For-Seconds: expected whole seconds above zero"
                );
            });
            Directive::Record(default)
        }
    }
}

fn is_no_store(policy: &HeaderValue) -> bool {
    let policy = policy.as_bytes().trim_ascii();
    policy.eq_ignore_ascii_case(b"no-store")
}

/// Parses whole seconds in decimal digits. Returns [`Ttl::MAX`] for larger values, and `None` for 0 and anything else.
fn parse_seconds(value: &[u8]) -> Option<Ttl> {
    let digits = std::str::from_utf8(value.trim_ascii()).ok()?;
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let secs = digits.parse::<u64>().unwrap_or(u64::MAX);
    match Ttl::try_from(Duration::from_secs(secs)) {
        Ok(ttl) => Some(ttl),
        Err(_) if secs == 0 => None,
        Err(_) => Some(Ttl::MAX),
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests {
    use http::{HeaderValue, Response};

    use super::*;

    const DEFAULT: Ttl = Ttl::from_secs(100);
    const MAX: Ttl = Ttl::from_secs(1000);

    fn take(head: &mut response::Parts) -> Directive {
        take_directive(&LayerName::default(), head, DEFAULT, MAX)
    }

    fn directive(header: &'static str, value: &'static [u8]) -> Directive {
        let (mut head, ()) = Response::new(()).into_parts();
        head.headers
            .insert(header, HeaderValue::from_bytes(value).unwrap());
        let directive = take(&mut head);
        assert!(
            head.headers.is_empty(),
            "the control header was not removed"
        );
        directive
    }

    #[test]
    fn persist_for_accepts_only_positive_decimal_seconds() {
        let name = "x-idempo-persist-for-seconds";
        for (value, ttl) in [
            (&b"2"[..], Ttl::from_secs(2)),
            (b" 7 ", Ttl::from_secs(7)),
            (b"0007", Ttl::from_secs(7)),
            (b"5000", MAX),
            (b"99999999999999999999999999", MAX),
            (b"0", DEFAULT),
            (b"-1", DEFAULT),
            (b"+1", DEFAULT),
            (b"1.5", DEFAULT),
            (b"soon", DEFAULT),
            (b"", DEFAULT),
            (b"\xe9", DEFAULT),
        ] {
            assert_eq!(directive(name, value), Directive::Record(ttl), "{value:?}");
        }
    }

    #[test]
    fn policy_accepts_only_no_store_in_any_case() {
        assert_eq!(
            directive("x-idempo-policy", b"no-store"),
            Directive::NoStore
        );
        assert_eq!(
            directive("x-idempo-policy", b" No-Store "),
            Directive::NoStore
        );
        assert_eq!(
            directive("x-idempo-policy", b"keep"),
            Directive::Record(DEFAULT)
        );
    }

    #[test]
    fn each_policy_line_counts() {
        let mut res = Response::new(());
        for policy in ["keep", "no-store"] {
            res.headers_mut()
                .append(POLICY, HeaderValue::from_static(policy));
        }
        let read = read_directive(&LayerName::default(), &res, DEFAULT, MAX);
        assert_eq!(read, Directive::NoStore);
        let (mut head, ()) = res.into_parts();
        assert_eq!(take(&mut head), Directive::NoStore);
        assert!(head.headers.is_empty());
    }

    #[test]
    fn needs_attention_overrides_retention_and_headers() {
        let attention = NeedsAttention::new("refund-failed").with_reason("no refund");
        for retention in [Retention::NoStore, Retention::For(Duration::from_secs(3))] {
            let (mut head, ()) = Response::new(()).into_parts();
            head.headers
                .insert(POLICY, HeaderValue::from_static("no-store"));
            head.extensions.insert(retention);
            head.extensions.insert(attention.clone());
            let expected = Directive::NeedsAttention(attention.clone());
            assert_eq!(take(&mut head), expected);
            assert!(head.headers.is_empty() && head.extensions.is_empty());
        }
    }

    #[test]
    fn typed_extension_overrides_headers() {
        for (retention, expected) in [
            (Retention::NoStore, Directive::NoStore),
            (
                Retention::For(Duration::from_secs(3)),
                Directive::Record(Ttl::from_secs(3)),
            ),
            (Retention::For(Duration::ZERO), Directive::Record(DEFAULT)),
            (Retention::For(Duration::MAX), Directive::Record(MAX)),
        ] {
            let (mut head, ()) = Response::new(()).into_parts();
            head.headers
                .insert(PERSIST_FOR, HeaderValue::from_static("9"));
            head.extensions.insert(retention);
            assert_eq!(take(&mut head), expected);
            assert!(head.extensions.get::<Retention>().is_none());
        }
    }
}
