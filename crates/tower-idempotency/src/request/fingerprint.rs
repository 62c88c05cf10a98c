//! Fingerprints of requests, and the IDs of their entries in the store.

use std::{borrow::Cow, fmt, sync::Arc};

use http::{HeaderName, HeaderValue, Uri, header, request, uri::Authority};

pub use self::headers::ACTING_HEADERS;
use self::headers::HeaderList;
use crate::{
    digest::{EntryId, FieldDigest, Secret, VERSION},
    header_lines::lines_of,
    layer_name::LayerName,
    request::json_fingerprint::JsonFingerprint,
    request::key::RequestKey,
    request::{canonical_json, multipart},
    store::{Fingerprint, KeyId},
    telemetry::catch_setting_panic,
};

/// Parts of a request that form its fingerprint.
///
/// Two requests with one key and equal fingerprints are the same request: the second one gets the response of the first.
/// Two requests with one key and different fingerprints are a mistake of the client, and the second one gets 422.
///
/// # Headers
///
/// Every fingerprint except a [`custom`](Self::custom) one contains the [`ACTING_HEADERS`], which name the account or tenant
/// on whose behalf a shared token acts. It also contains headers that select the part of a resource, the source or target of a
/// copy or upload, the method or the operation:
///
/// - `X-Amz-Target`, `SOAPAction` and `Next-Action`;
/// - `X-HTTP-Method`, `X-HTTP-Method-Override` and `X-Method-Override`;
/// - `Content-Disposition` and `Content-Range`, `Slug` of AtomPub, and `Dropbox-API-Arg`;
/// - `Upload-Concat`, `Upload-Length`, `Upload-Metadata` and `Upload-Offset` of tus;
/// - `Depth`, `Destination`, `Lock-Token` and `Overwrite` of WebDAV;
/// - `X-Goog-Upload-Command`, `X-Goog-Upload-Offset`, `X-Ms-Range` and `X-Ms-Source-Range`;
/// - `X-Amz-Copy-Source`, `X-Goog-Copy-Source`, `X-Ms-Copy-Source` and `X-Ms-Rename-Source`. Their URL counts with its
///   signature: a retry repeats it.
///
/// With [`MissingKey::Derive`](crate::MissingKey::Derive), the fingerprint of a request without a key also contains `If-Match`,
/// `If-None-Match`, `If-Unmodified-Since` and `If` of WebDAV, unless it is a [`custom`](Self::custom) one. Under a key of the
/// client, these headers do not count: a retry may correct them.
///
/// [`and_header`](Self::and_header) adds a header, and [`with_headers`](Self::with_headers) replaces the list. A header that a
/// request does not have adds nothing. A `_` in a name counts as `-`, because CGI and WSGI servers do not distinguish them:
/// `x_tenant_id` counts if `X-Tenant-Id` is in the list. A retry must repeat the spelling.
///
/// ```
/// use http::HeaderName;
/// use tower_idempotency::FingerprintBy;
///
/// let by = FingerprintBy::raw_body().and_header(HeaderName::from_static("x-branch"));
/// ```
#[derive(Clone)]
pub struct FingerprintBy {
    method: FingerprintMethod,
    headers: HeaderList,
}

#[derive(Clone)]
enum FingerprintMethod {
    RawBody,
    HeadOnly,
    Json(JsonFingerprint),
    Multipart,
    Custom(Arc<CustomFn>),
}

type CustomFn = dyn Fn(&request::Parts, &[u8]) -> Vec<u8> + Send + Sync;

mod headers;
pub(crate) mod observed;

impl FingerprintBy {
    /// Uses the method, the path and query, the media type, and the bytes of the body. The default.
    ///
    /// The path is the one that the client sent. If the service rewrote it before the layer, both paths are used.
    ///
    /// The host is not included. If one service has several hosts with separate data, set
    /// [`with_host_in_scope`](crate::IdempotencyLayer::with_host_in_scope). Otherwise a request to one host may get the
    /// response of another one.
    #[must_use]
    pub fn raw_body() -> Self {
        Self::with_method(FingerprintMethod::RawBody)
    }

    /// Like [`raw_body`](Self::raw_body), but without the body. For uploads.
    ///
    /// The body streams to the handler without a limit and without a timeout. Two bodies with the same key count as the same
    /// request. A client that sends slowly holds its lease during that time.
    ///
    /// The layer does not record an error response (4xx or 5xx) to an incomplete body: one that failed, or that ended before
    /// its announced length. Without an announced length, one case is not detected: hyper reports an HTTP/2 stream that was
    /// reset with `NO_ERROR` as complete.
    #[must_use]
    pub fn head_only() -> Self {
        Self::with_method(FingerprintMethod::HeadOnly)
    }

    /// Like [`raw_body`](Self::raw_body), but ignores differences in white space, in the order of members and in the escapes
    /// of strings between JSON bodies.
    ///
    /// Numbers keep their spelling: `1` is not `1.0`. The bytes of the body are used if:
    /// - its media type or its syntax is not that of JSON;
    /// - it names a member twice, or in two letter cases;
    /// - it is nested deeper than 64 levels or longer than 1 MiB.
    #[must_use]
    pub fn canonical_json() -> Self {
        Self::json(JsonFingerprint::new())
    }

    /// Like [`canonical_json`](Self::canonical_json), with numbers by value or without some members, according to `by`.
    ///
    /// The bytes of the body are used in the same cases. With numbers by value, they are also used if a power of ten does not
    /// fit into 64 bits.
    #[must_use]
    pub fn json(by: JsonFingerprint) -> Self {
        Self::with_method(FingerprintMethod::Json(by))
    }

    /// Like [`raw_body`](Self::raw_body), but ignores the boundary of a `multipart/form-data` body (RFC 7578).
    ///
    /// Form libraries draw a boundary for each request, so a retry differs from the first attempt. With
    /// [`raw_body`](Self::raw_body) that retry gets 422. The parts count in their order, each with its headers and its bytes.
    ///
    /// The bytes of the body are used if:
    /// - its media type is another one, or announces no boundary or several;
    /// - it has text outside the parts, or a boundary inside a part or with a space behind it.
    ///
    /// The whole body is buffered, within [`with_request_limit`](crate::IdempotencyLayer::with_request_limit). For large uploads,
    /// see [`head_only`](Self::head_only).
    #[must_use]
    pub fn multipart() -> Self {
        Self::with_method(FingerprintMethod::Multipart)
    }

    /// Uses only the bytes that `f` returns for the request head and the body.
    ///
    /// Requests for which it returns the same bytes are the same request, even if their methods, paths or
    /// [headers](Self#headers) differ. The bytes are hashed, so they may contain secrets. Below `Router::nest`, use the path
    /// from [`original_path_and_query`].
    #[must_use]
    pub fn custom(f: impl Fn(&request::Parts, &[u8]) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::with_method(FingerprintMethod::Custom(Arc::new(f))).with_headers([])
    }

    /// Adds a header, with all its values. May be called several times.
    ///
    /// A retry with another value gets 422. Do not add a header that changes between retries, such as a date, a signature
    /// or a trace ID.
    #[must_use]
    pub fn and_header(mut self, name: HeaderName) -> Self {
        self.headers.add(name);
        self
    }

    /// Replaces the list of headers. Default: [the headers above](Self#headers), and none for [`custom`](Self::custom). The
    /// preconditions count only if they are in the new list.
    ///
    /// If the list lacks a header by which a token acts for several accounts, one account may get the response of another.
    #[must_use]
    pub fn with_headers(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        let headers = HeaderList::only(names);
        Self { headers, ..self }
    }

    fn with_method(method: FingerprintMethod) -> Self {
        Self {
            method,
            headers: HeaderList::new(),
        }
    }

    /// Returns the name of the part that the body has in the fingerprint, for policies.
    pub(crate) fn body_name(&self) -> &'static str {
        match &self.method {
            FingerprintMethod::RawBody => "bytes",
            FingerprintMethod::HeadOnly => "none",
            FingerprintMethod::Json(_) => "json",
            FingerprintMethod::Multipart => "form",
            FingerprintMethod::Custom(_) => "service",
        }
    }

    /// Returns the comparison of JSON bodies.
    pub(crate) fn json_comparison(&self) -> Option<&JsonFingerprint> {
        match &self.method {
            FingerprintMethod::Json(by) => Some(by),
            _ => None,
        }
    }

    /// Returns the headers that count.
    pub(crate) fn headers(&self) -> &[HeaderName] {
        self.headers.names()
    }

    /// Returns `true` if the body is not a part of the fingerprint.
    pub(crate) const fn is_head_only(&self) -> bool {
        matches!(self.method, FingerprintMethod::HeadOnly)
    }

    /// Returns the fingerprint of a request with this key.
    pub(crate) fn fingerprint(
        &self,
        secret: Option<&Secret>,
        key: &RequestKey,
        head: &request::Parts,
        body: &[u8],
    ) -> Fingerprint {
        let mut hash = FieldDigest::new(secret);
        hash.field(b"fingerprint").field(VERSION);
        if let FingerprintMethod::Custom(f) = &self.method {
            hash.field(b"custom").field(&f(head, body));
            self.headers.add_listed(&head.headers, &mut hash);
            return Fingerprint::from_bytes(hash.finish());
        }
        let media_type = media_type(head);
        self.add_head(head, media_type.as_deref(), &mut hash);
        self.add_preconditions(key, head, &mut hash);
        match &self.method {
            FingerprintMethod::RawBody => hash.field(b"raw").field(body),
            FingerprintMethod::HeadOnly => hash.field(b"head"),
            FingerprintMethod::Json(by) => {
                let is_json = media_type.is_some_and(|media_type| is_json(&media_type));
                match is_json
                    .then(|| canonical_json::canonical_form(body, by))
                    .flatten()
                {
                    Some(canonical) if by.is_by_value() => {
                        hash.field(b"json by value").field(&canonical)
                    }
                    Some(canonical) => hash.field(b"json").field(&canonical),
                    None => hash.field(b"raw").field(body),
                }
            }
            FingerprintMethod::Multipart => {
                let is_form = media_type.is_some_and(|it| it == FORM);
                match is_form
                    .then(|| multipart::parts(&head.headers, body))
                    .flatten()
                {
                    Some(parts) => {
                        hash.field(b"multipart");
                        parts.iter().fold(&mut hash, |hash, part| hash.field(part))
                    }
                    None => hash.field(b"raw").field(body),
                }
            }
            FingerprintMethod::Custom(_) => unreachable!("returned above"),
        };
        Fingerprint::from_bytes(hash.finish())
    }

    /// Adds the parts of the head that form the fingerprint.
    pub(crate) fn add_head(
        &self,
        head: &request::Parts,
        media_type: Option<&str>,
        hash: &mut FieldDigest,
    ) {
        let (original, path) = (original_path_and_query(head), path_and_query(&head.uri));
        hash.field(head.method.as_str().as_bytes())
            .field(original.as_bytes())
            .field(media_type.unwrap_or_default().as_bytes());
        // The handler sees this path: it may name the tenant that the original path does not name.
        if path != original {
            hash.field(b"rewritten").field(path.as_bytes());
        }
        self.headers.add_listed(&head.headers, hash);
    }

    /// Adds the parts of the head of a batch request that form the fingerprint of its items. A custom fingerprint decides if
    /// the query counts: it gets the head without a body. If it panics then, the query counts.
    pub(crate) fn add_head_of_items(
        &self,
        layer: &LayerName,
        head: &request::Parts,
        hash: &mut FieldDigest,
    ) {
        let custom = match &self.method {
            FingerprintMethod::Custom(f) => {
                catch_setting_panic(layer, "with_fingerprint", || f(head, b""))
            }
            _ => None,
        };
        let Some(custom) = custom else {
            return self.add_head(head, None, hash);
        };
        let (original, rewritten) = (original_uri(head).path(), head.uri.path());
        hash.field(b"custom")
            .field(&custom)
            .field(head.method.as_str().as_bytes())
            .field(original.as_bytes());
        if rewritten != original {
            hash.field(b"rewritten").field(rewritten.as_bytes());
        }
        self.headers.add_listed(&head.headers, hash);
    }

    /// Adds the preconditions of the request if its fingerprint is the key.
    fn add_preconditions(&self, key: &RequestKey, head: &request::Parts, hash: &mut FieldDigest) {
        if *key == RequestKey::Derived {
            self.headers.add_preconditions(&head.headers, hash);
        }
    }
}

impl fmt::Debug for FingerprintBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.method {
            FingerprintMethod::RawBody => "raw_body",
            FingerprintMethod::HeadOnly => "head_only",
            FingerprintMethod::Json(_) => "canonical_json",
            FingerprintMethod::Multipart => "multipart",
            FingerprintMethod::Custom(_) => "custom",
        })
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

/// Returns the ID of the entry for `key` in its scope. If `separate`, another request with the same key is separate.
pub(crate) fn entry_id(mut scope: FieldDigest, key: &RequestKey, separate: bool) -> EntryId {
    match key {
        RequestKey::Sent(key) => scope.field(b"sent").field(key.as_bytes()),
        RequestKey::Named(key, _) => scope.field(b"named").field(key.as_bytes()),
        RequestKey::Derived => scope.field(b"derived"),
    };
    if separate || *key == RequestKey::Derived {
        EntryId::OfFingerprint(Box::new(scope))
    } else {
        EntryId::Known(KeyId::from_bytes(scope.finish()))
    }
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
    path_and_query(original_uri(head))
}

/// Returns the URI that the client sent.
pub(super) fn original_uri(head: &request::Parts) -> &Uri {
    #[cfg(feature = "axum")]
    let uri = head
        .extensions
        .get::<axum::extract::OriginalUri>()
        .map_or(&head.uri, |uri| &uri.0);
    #[cfg(not(feature = "axum"))]
    let uri = &head.uri;
    uri
}

fn path_and_query(uri: &Uri) -> &str {
    uri.path_and_query().map_or("/", |path| path.as_str())
}

/// Returns the requested host in lower case, without the port and a trailing dot (RFC 1034, section 3.1). Empty if the request
/// names none.
///
/// HTTP/2 has the host in the URI, and HTTP/1 in a header. A URI with a host takes precedence over the header, as RFC 9112
/// requires.
pub(super) fn host(head: &request::Parts) -> Vec<u8> {
    match original_uri(head).host() {
        Some(host) => normalized_host(host),
        None => head.headers.get(header::HOST).map_or(Vec::new(), host_in),
    }
}

/// Returns the host of the `Host` header if the URI names another one. RFC 9113, section 8.3.1, forbids such a request, but
/// servers pass it on.
pub(super) fn other_host(head: &request::Parts) -> Option<Vec<u8>> {
    let host = normalized_host(original_uri(head).host()?);
    let mut others = head.headers.get_all(header::HOST).iter().map(host_in);
    others.find(|other| *other != host)
}

fn host_in(header: &HeaderValue) -> Vec<u8> {
    match Authority::try_from(header.as_bytes()) {
        Ok(authority) => normalized_host(authority.host()),
        Err(_) => header.as_bytes().to_ascii_lowercase(),
    }
}

fn normalized_host(host: &str) -> Vec<u8> {
    let host = host.strip_suffix('.').unwrap_or(host);
    host.to_ascii_lowercase().into_bytes()
}

const FORM: &str = "multipart/form-data";

fn is_json(media_type: &str) -> bool {
    media_type.ends_with("/json") || media_type.ends_with("+json")
}

/// Returns the type and subtype in lower case, without parameters.
pub(super) fn media_type(head: &request::Parts) -> Option<Cow<'_, str>> {
    let line = lines_of(&head.headers, &header::CONTENT_TYPE).next()?;
    let value = line.to_str().ok()?;
    let essence = value.split(';').next().unwrap_or(value).trim();
    Some(if essence.bytes().any(|byte| byte.is_ascii_uppercase()) {
        essence.to_ascii_lowercase().into()
    } else {
        essence.into()
    })
}
