//! Fingerprints of requests, and the IDs of their entries in the store.

use std::{fmt, sync::Arc};

use http::{header, request};

use crate::{
    digest::{FieldDigest, Secret, VERSION},
    request::canonical_json,
    request::key::IdempotencyKey,
    store::{Fingerprint, KeyId},
};

/// Parts of a request that form its fingerprint.
///
/// Two requests with one key and equal fingerprints are the same request: the second one gets the response of the first.
/// Two requests with one key and different fingerprints are a mistake of the client, and the second one gets 422.
#[derive(Clone)]
pub struct FingerprintBy(pub(crate) FingerprintMethod);

#[derive(Clone)]
pub(crate) enum FingerprintMethod {
    RawBody,
    HeadOnly,
    CanonicalJson,
    Custom(Arc<CustomFn>),
}

type CustomFn = dyn Fn(&request::Parts, &[u8]) -> Vec<u8> + Send + Sync;

impl FingerprintBy {
    /// Uses the method, the path and query as received, the media type, and the bytes of the body. The default.
    ///
    /// The host is not included. If one service has several hosts with separate data, make the host a part of the principal.
    /// Otherwise anonymous callers of two hosts may get each other's responses.
    /// [`Principal::from_fn`](crate::Principal::from_fn) shows how to read the host, and
    /// [`Principal::and`](crate::Principal::and) adds it.
    #[must_use]
    pub const fn raw_body() -> Self {
        Self(FingerprintMethod::RawBody)
    }

    /// Uses the method, the path and query as received, and the media type, but not the body. For uploads.
    ///
    /// The body streams to the handler without a limit and without a timeout. Two bodies with the same key count as the same
    /// request. A client that sends slowly holds its lease during that time.
    ///
    /// The layer does not record an error response (4xx or 5xx) to an incomplete body: one that failed, or that ended before
    /// its announced length. Without an announced length, one case is not detected: hyper reports an HTTP/2 stream that was
    /// reset with `NO_ERROR` as complete.
    #[must_use]
    pub const fn head_only() -> Self {
        Self(FingerprintMethod::HeadOnly)
    }

    /// Like [`raw_body`](Self::raw_body), but ignores differences in white space, in the order of members and in the escapes
    /// of strings between JSON bodies.
    ///
    /// Numbers keep their spelling: `1` is not `1.0`. The bytes of the body are used if:
    /// - its media type or its syntax is not that of JSON;
    /// - it names a member twice;
    /// - it is nested deeper than 64 levels or longer than 1 MiB.
    #[must_use]
    pub const fn canonical_json() -> Self {
        Self(FingerprintMethod::CanonicalJson)
    }

    /// Uses only the bytes that `f` returns for the request head and the body.
    ///
    /// Requests for which it returns the same bytes are the same request, even if their methods and paths differ. The bytes
    /// are hashed, so they may contain secrets. Below `Router::nest`, use the path from [`original_path_and_query`].
    #[must_use]
    pub fn custom(f: impl Fn(&request::Parts, &[u8]) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self(FingerprintMethod::Custom(Arc::new(f)))
    }
}

impl fmt::Debug for FingerprintBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            FingerprintMethod::RawBody => "raw_body",
            FingerprintMethod::HeadOnly => "head_only",
            FingerprintMethod::CanonicalJson => "canonical_json",
            FingerprintMethod::Custom(_) => "custom",
        })
    }
}

impl FingerprintMethod {
    pub(crate) fn fingerprint(
        &self,
        secret: Option<&Secret>,
        head: &request::Parts,
        body: &[u8],
    ) -> Fingerprint {
        let mut hash = FieldDigest::new(secret);
        hash.field(b"fingerprint").field(VERSION);
        if let Self::Custom(f) = self {
            hash.field(b"custom").field(&f(head, body));
            return Fingerprint::from_bytes(hash.finish());
        }
        let media_type = media_type(head);
        hash.field(head.method.as_str().as_bytes())
            .field(original_path_and_query(head).as_bytes())
            .field(
                media_type
                    .as_ref()
                    .map_or(&b""[..], |media_type| media_type.as_bytes()),
            );
        match self {
            Self::RawBody => hash.field(b"raw").field(body),
            Self::HeadOnly => hash.field(b"head"),
            Self::CanonicalJson => {
                let is_json = media_type.is_some_and(|media_type| {
                    media_type.ends_with("/json") || media_type.ends_with("+json")
                });
                match is_json
                    .then(|| canonical_json::canonical_form(body))
                    .flatten()
                {
                    Some(canonical) => hash.field(b"json").field(&canonical),
                    None => hash.field(b"raw").field(body),
                }
            }
            Self::Custom(_) => unreachable!("returned above"),
        };
        Fingerprint::from_bytes(hash.finish())
    }
}

/// Creates the digest with which every ID begins. The principal and then the key are added to it.
pub(crate) fn new_scope(secret: Option<&Secret>, namespace: &str) -> FieldDigest {
    let mut scope = FieldDigest::new(secret);
    scope
        .field(b"id")
        .field(VERSION)
        .field(namespace.as_bytes());
    scope
}

/// Returns the ID of the entry for `key` in its scope.
pub(crate) fn key_id(mut scope: FieldDigest, key: &KeyPart<'_>) -> KeyId {
    match key {
        KeyPart::Sent(key) => scope.field(b"sent").field(key.as_str().as_bytes()),
        KeyPart::Separate(key, fingerprint) => scope
            .field(b"separate")
            .field(key.as_str().as_bytes())
            .field(fingerprint.as_bytes()),
        KeyPart::Derived(fingerprint) => scope.field(b"derived").field(fingerprint.as_bytes()),
    };
    KeyId::from_bytes(scope.finish())
}

/// Part of the ID in addition to the scope.
pub(crate) enum KeyPart<'a> {
    /// The key alone. Another request with the same key is a mismatch.
    Sent(&'a IdempotencyKey),
    /// The key and the fingerprint. Another request with the same key is separate.
    Separate(&'a IdempotencyKey, Fingerprint),
    /// The fingerprint, without a key. Equal requests are the same request.
    Derived(Fingerprint),
}

/// Returns the path and the query as the client sent them. For closures that get the head of a request.
///
/// Below axum's `Router::nest`, the URI in the head lacks the prefix of the nest, so two routes may have equal paths. If a
/// key, a principal or a fingerprint uses that path, a request to one route may get the record of the other one. With the
/// feature `axum`, the path that this function returns includes the prefix.
///
/// ```
/// use axum::{Router, body::Body, http::Request, routing::post};
/// use tower::ServiceExt;
/// use tower_idempotency::{FingerprintBy, IdempotencyLayer, MemoryStore, original_path_and_query};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let by_path = FingerprintBy::custom(|head, _| original_path_and_query(head).into());
/// let layer = IdempotencyLayer::new(MemoryStore::new()).with_fingerprint(by_path);
/// let orders = || Router::new().route("/orders", post(async || "ordered")).layer(layer.clone());
/// let app: Router = Router::new().nest("/books", orders()).nest("/bikes", orders());
///
/// let to = |path: &str| Request::post(path).header("idempotency-key", "7").body(Body::empty());
/// assert_eq!(app.clone().oneshot(to("/books/orders")?).await?.status(), 200);
/// assert_eq!(app.oneshot(to("/bikes/orders")?).await?.status(), 422);
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn original_path_and_query(head: &request::Parts) -> &str {
    #[cfg(feature = "axum")]
    let uri = head
        .extensions
        .get::<axum::extract::OriginalUri>()
        .map_or(&head.uri, |uri| &uri.0);
    #[cfg(not(feature = "axum"))]
    let uri = &head.uri;
    uri.path_and_query().map_or("/", |path| path.as_str())
}

/// Returns the type and subtype in lower case, without parameters.
fn media_type(head: &request::Parts) -> Option<std::borrow::Cow<'_, str>> {
    let value = head.headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    let essence = value.split(';').next().unwrap_or(value).trim();
    Some(if essence.bytes().any(|byte| byte.is_ascii_uppercase()) {
        essence.to_ascii_lowercase().into()
    } else {
        essence.into()
    })
}
