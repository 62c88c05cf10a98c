//! How a handler steers what becomes of its response: two headers, or one typed extension.

use std::time::Duration;

use http::{HeaderMap, response};

use crate::{
    record::{NeedsAttention, PERSIST_FOR, POLICY},
    store::Ttl,
};

/// What becomes of a handler's response: a response extension.
///
/// The typed form of the headers `X-Idempo-Policy: no-store` and `X-Idempo-Persist-For-Seconds: N`, which it overrides.
/// It cannot have a response kept that the layer does not record, such as a 5xx; [`NeedsAttention`] can keep a retry of
/// that from being executed, and goes before both.
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
/// let ask = || Request::post("/quotes").header("idempotency-key", "q-1").body(Body::empty());
/// app.clone().oneshot(ask()?).await?;
/// let retry = app.oneshot(ask()?).await?;
/// assert!(!retry.headers().contains_key("idempotent-replayed"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retention {
    /// Not recorded: the key is freed, and the same request runs again.
    NoStore,
    /// Recorded for this long, at most the layer's maximum. Zero is ignored with a warning, as nonsense in the header
    /// is, and the layer's default applies.
    For(Duration),
}

/// Whether and how long a response is to be kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    NoStore,
    Keep(Ttl),
    /// Not the response, but that somebody has to look at what was done.
    Attention(NeedsAttention),
}

/// Takes the control headers and the extensions off the response and says what they ask for.
pub(crate) fn take_wish(head: &mut response::Parts, default: Ttl, max: Ttl) -> Wish {
    let headers = strip(&mut head.headers, default, max);
    let retention = head.extensions.remove::<Retention>();
    if let Some(attention) = head.extensions.remove() {
        return Wish::Attention(attention);
    }
    match retention {
        None => headers,
        Some(Retention::NoStore) => Wish::NoStore,
        Some(Retention::For(duration)) => Wish::Keep(match Ttl::try_from(duration) {
            Ok(ttl) => ttl.min(max),
            Err(_) if duration.is_zero() => {
                tracing::warn!("ignored a Retention of zero; the default applies");
                default
            }
            Err(_) => max,
        }),
    }
}

/// Removes both control headers, in whatever letter case they came.
pub(crate) fn strip_only(headers: &mut HeaderMap) {
    if are_there(headers) {
        headers.remove(POLICY);
        headers.remove(PERSIST_FOR);
    }
}

/// Whether there may be control headers. Most responses have a few headers and none of these, and looking through them is
/// cheaper than hashing two long names, which would be half of what the layer costs a request without a key.
fn are_there(headers: &HeaderMap) -> bool {
    headers
        .keys()
        .any(|name| name.as_str().starts_with("x-idempo-"))
}

fn strip(headers: &mut HeaderMap, default: Ttl, max: Ttl) -> Wish {
    if !are_there(headers) {
        return Wish::Keep(default);
    }
    let policy = headers.remove(POLICY);
    let persist_for = headers.remove(PERSIST_FOR);
    if let Some(policy) = policy {
        if policy
            .as_bytes()
            .trim_ascii()
            .eq_ignore_ascii_case(b"no-store")
        {
            return Wish::NoStore;
        }
        tracing::warn!("ignored X-Idempo-Policy: expected no-store");
    }
    let Some(persist_for) = persist_for else {
        return Wish::Keep(default);
    };
    match seconds(persist_for.as_bytes()) {
        Some(ttl) => Wish::Keep(ttl.min(max)),
        None => {
            tracing::warn!(
                "ignored X-Idempo-Persist-For-Seconds: expected whole seconds above zero"
            );
            Wish::Keep(default)
        }
    }
}

/// Decimal digits only; more than a `Ttl` can hold is its maximum.
fn seconds(value: &[u8]) -> Option<Ttl> {
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

    fn wish(header: &'static str, value: &'static [u8]) -> Wish {
        let (mut head, ()) = Response::new(()).into_parts();
        head.headers
            .insert(header, HeaderValue::from_bytes(value).unwrap());
        let wish = take_wish(&mut head, DEFAULT, MAX);
        assert!(head.headers.is_empty(), "the control header stayed");
        wish
    }

    #[test]
    fn persist_for_takes_decimal_seconds_and_ignores_nonsense() {
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
            assert_eq!(wish(name, value), Wish::Keep(ttl), "{value:?}");
        }
    }

    #[test]
    fn policy_no_store_is_read_in_any_letter_case_and_other_values_are_ignored() {
        assert_eq!(wish("x-idempo-policy", b"no-store"), Wish::NoStore);
        assert_eq!(wish("x-idempo-policy", b" No-Store "), Wish::NoStore);
        assert_eq!(wish("x-idempo-policy", b"keep"), Wish::Keep(DEFAULT));
    }

    #[test]
    fn what_needs_attention_goes_before_every_other_wish() {
        let attention = NeedsAttention::new("refund-failed").with_reason("no refund");
        for retention in [Retention::NoStore, Retention::For(Duration::from_secs(3))] {
            let (mut head, ()) = Response::new(()).into_parts();
            head.headers
                .insert(POLICY, HeaderValue::from_static("no-store"));
            head.extensions.insert(retention);
            head.extensions.insert(attention.clone());
            let expected = Wish::Attention(attention.clone());
            assert_eq!(take_wish(&mut head, DEFAULT, MAX), expected);
            assert!(head.headers.is_empty() && head.extensions.is_empty());
        }
    }

    #[test]
    fn the_typed_extension_overrides_the_headers() {
        for (retention, expected) in [
            (Retention::NoStore, Wish::NoStore),
            (
                Retention::For(Duration::from_secs(3)),
                Wish::Keep(Ttl::from_secs(3)),
            ),
            (Retention::For(Duration::ZERO), Wish::Keep(DEFAULT)),
            (Retention::For(Duration::MAX), Wish::Keep(MAX)),
        ] {
            let (mut head, ()) = Response::new(()).into_parts();
            head.headers
                .insert(PERSIST_FOR, HeaderValue::from_static("9"));
            head.extensions.insert(retention);
            assert_eq!(take_wish(&mut head, DEFAULT, MAX), expected);
            assert!(head.extensions.get::<Retention>().is_none());
        }
    }
}
