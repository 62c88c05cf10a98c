//! What a request says, as a digest; and the digest that names its entry in the store.

use std::{fmt, sync::Arc};

use hmac::{Hmac, KeyInit, Mac};
use http::{header, request};
use sha2::{Digest, Sha256};

use crate::{
    error::ConfigError,
    request::canonical_json,
    request::key::IdempotencyKey,
    store::{Fingerprint, KeyId},
};

/// Raised whenever the same request would get another id or fingerprint than before.
const VERSION: &[u8] = &[1];

/// Which parts of a request make it the same request.
///
/// Two requests with one key and equal fingerprints are the same request: the second gets the first one's answer. Two
/// with one key and different fingerprints are a mistake of the client, answered 422.
#[derive(Clone)]
pub struct FingerprintBy(pub(crate) By);

#[derive(Clone)]
pub(crate) enum By {
    RawBody,
    HeadOnly,
    CanonicalJson,
    Custom(Arc<CustomFn>),
}

type CustomFn = dyn Fn(&request::Parts, &[u8]) -> Vec<u8> + Send + Sync;

impl FingerprintBy {
    /// Method, path and query as received, media type, and the body byte for byte. The default.
    ///
    /// Not the host: where the host says whose service it is, make it part of the principal
    /// ([`Principal::from_fn`](crate::Principal::from_fn) shows how to read it, [`Principal::and`](crate::Principal::and) adds
    /// it), or anonymous callers of two hosts meet each other's answers.
    #[must_use]
    pub const fn raw_body() -> Self {
        Self(By::RawBody)
    }

    /// Method, path and query as received, and media type. The body streams through to the handler unread and
    /// unlimited: for uploads, where another body under the same key cannot be told apart. The body timeout does not
    /// apply either: a client that sends slowly holds its lease for as long.
    ///
    /// What the handler answers to a body that broke off, or ended before the length that was announced, is not recorded
    /// when it is an error, 4xx or 5xx. Of a body without a length, hyper passes an HTTP/2 stream that was reset with
    /// `NO_ERROR` off as whole.
    #[must_use]
    pub const fn head_only() -> Self {
        Self(By::HeadOnly)
    }

    /// As [`raw_body`](Self::raw_body), but JSON bodies that differ only in white space, in the order of members or in
    /// how strings are escaped are the same.
    ///
    /// Numbers keep their spelling (`1` is not `1.0`). A body that is not JSON by its media type or by its syntax,
    /// names a member twice, is nested more than 64 deep or is longer than 1 MiB counts byte for byte.
    #[must_use]
    pub const fn canonical_json() -> Self {
        Self(By::CanonicalJson)
    }

    /// Whatever bytes `f` returns, and nothing else: requests for which it returns the same are the same request, even
    /// when method and path differ. Hashed, so they may hold secrets. Below `Router::nest`, take the path from
    /// [`original_path_and_query`].
    #[must_use]
    pub fn custom(f: impl Fn(&request::Parts, &[u8]) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self(By::Custom(Arc::new(f)))
    }
}

impl fmt::Debug for FingerprintBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            By::RawBody => "raw_body",
            By::HeadOnly => "head_only",
            By::CanonicalJson => "canonical_json",
            By::Custom(_) => "custom",
        })
    }
}

impl By {
    pub(crate) fn fingerprint(
        &self,
        secret: Option<&Secret>,
        head: &request::Parts,
        body: &[u8],
    ) -> Fingerprint {
        let mut hash = Fields::new(secret);
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
                match is_json.then(|| canonical_json::canonical(body)).flatten() {
                    Some(canonical) => hash.field(b"json").field(&canonical),
                    None => hash.field(b"raw").field(body),
                }
            }
            Self::Custom(_) => unreachable!("answered above"),
        };
        Fingerprint::from_bytes(hash.finish())
    }
}

/// The beginning of every id: what follows is who is asking, then the key.
pub(crate) fn scope_of(secret: Option<&Secret>, namespace: &str) -> Fields {
    let mut scope = Fields::new(secret);
    scope
        .field(b"id")
        .field(VERSION)
        .field(namespace.as_bytes());
    scope
}

/// The id of the entry for `key` in its scope.
pub(crate) fn key_id(mut scope: Fields, key: &KeyPart<'_>) -> KeyId {
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

/// What of the request goes into the id beside the scope.
pub(crate) enum KeyPart<'a> {
    /// The key alone: another request under it is a mismatch.
    Sent(&'a IdempotencyKey),
    /// Key and fingerprint: another request under the key is a separate one.
    Separate(&'a IdempotencyKey, Fingerprint),
    /// No key was sent: equal content is the same request.
    Derived(Fingerprint),
}

/// A stable name for a call that the handler of this entry makes to somebody else.
pub(crate) fn derived_key(id: &KeyId, fingerprint: &Fingerprint, name: &str) -> String {
    let mut hash = Fields::new(None);
    hash.field(b"downstream")
        .field(VERSION)
        .field(id.as_bytes())
        .field(fingerprint.as_bytes())
        .field(name.as_bytes());
    hex(&hash.finish())
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut out = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        out.push(DIGITS[usize::from(byte >> 4)].into());
        out.push(DIGITS[usize::from(byte & 15)].into());
    }
    out
}

/// A secret that keys every digest, so that nobody who reads the store can guess at keys or bodies.
#[derive(Clone)]
pub(crate) struct Secret(Hmac<Sha256>);

impl Secret {
    pub(crate) fn new(secret: &[u8]) -> Result<Self, ConfigError> {
        let too_short =
            || ConfigError::new("a secret of at least 16 bytes", format!("{}", secret.len()));
        if secret.len() < 16 {
            return Err(too_short());
        }
        Hmac::new_from_slice(secret)
            .map(Self)
            .map_err(|_| too_short())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A digest over length-prefixed fields: no two lists of fields feed it the same bytes.
#[derive(Clone)]
pub(crate) struct Fields(Hasher);

#[derive(Clone)]
enum Hasher {
    Plain(Sha256),
    Keyed(Hmac<Sha256>),
}

impl Fields {
    pub(crate) fn new(secret: Option<&Secret>) -> Self {
        Self(secret.map_or_else(
            || Hasher::Plain(Sha256::new()),
            |secret| Hasher::Keyed(secret.0.clone()),
        ))
    }

    pub(crate) fn field(&mut self, bytes: &[u8]) -> &mut Self {
        let len = (bytes.len() as u64).to_le_bytes();
        match &mut self.0 {
            Hasher::Plain(hash) => {
                hash.update(len);
                hash.update(bytes);
            }
            Hasher::Keyed(hash) => {
                hash.update(&len);
                hash.update(bytes);
            }
        }
        self
    }

    pub(crate) fn finish(self) -> [u8; 32] {
        match self.0 {
            Hasher::Plain(hash) => hash.finalize().into(),
            Hasher::Keyed(hash) => hash.finalize().into_bytes().into(),
        }
    }
}

/// Path and query as the client sent them, for the closures that are given a request's head.
///
/// Under axum's `Router::nest` the URI in the head has lost the prefix of the nest, so that two routes would look alike: a key, a
/// principal or a fingerprint that is made of it would let requests to one be answered with what was recorded for the
/// other. This one has the prefix, with the feature `axum`.
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

/// Type and subtype in lower case, without parameters.
fn media_type(head: &request::Parts) -> Option<std::borrow::Cow<'_, str>> {
    let value = head.headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    let essence = value.split(';').next().unwrap_or(value).trim();
    Some(if essence.bytes().any(|byte| byte.is_ascii_uppercase()) {
        essence.to_ascii_lowercase().into()
    } else {
        essence.into()
    })
}
