//! The principal: identifies the caller, so that callers do not share keys.

use std::{any::Any, fmt, sync::Arc};

use bytes::Bytes;
use http::{HeaderName, Response, header, request};

use crate::{
    digest::{FieldDigest, Secret},
    error::{Error, ErrorKind},
    request::fingerprint::new_scope,
};

/// Sources of the principal, which identifies the caller of a request.
///
/// The principal is part of the ID of every entry: the same key of two principals is two keys. The store gets only a
/// digest of it.
///
/// Sources are tried in order ([`or`](Principal::or)), and the first one that finds a principal decides. If it takes two
/// values to identify a caller, such as a tenant and a user, combine them into one source ([`and`](Principal::and)).
///
/// Requests without any of the headers or cookies share the anonymous scope. There, a caller that knows or guesses another
/// caller's key and request gets that caller's response. A service that authenticates by cookie must therefore not use the
/// default, [`authorization`](Principal::authorization).
///
/// If an [`extension`](Principal::extension) is missing, the layer is outside the authentication that sets it, and all
/// callers would share one scope. Unless another source finds a principal, such a request gets 500 `principal-missing`, and
/// nothing is executed.
///
/// ```
/// use tower_idempotency::Principal;
///
/// #[derive(Clone)]
/// struct Account(u64);
///
/// let principal = Principal::extension(|account: &Account| account.0.to_be_bytes())
///     .or(Principal::header(http::header::AUTHORIZATION));
/// ```
#[derive(Clone)]
pub struct Principal(Vec<Source>);

#[derive(Clone)]
enum Source {
    Unscoped,
    Header(HeaderName),
    Cookie(Arc<str>),
    Extension(Arc<ExtensionFn>),
    Custom(Arc<CustomFn>),
    Both(Arc<(Principal, Principal)>),
}

type ExtensionFn = dyn Fn(&request::Parts) -> Option<Vec<u8>> + Send + Sync;
type CustomFn =
    dyn Fn(&request::Parts) -> Result<Option<Vec<u8>>, Box<Response<Bytes>>> + Send + Sync;

/// Result of the sources for one request.
enum Identity {
    /// A source found a principal.
    Principal,
    /// No source found a principal, and none is required.
    Anonymous,
    /// No source found a principal, and one is required.
    Missing,
}

/// Reason why a request has no principal.
pub(crate) enum PrincipalError {
    /// A required source found none.
    Missing(Box<Error>),
    /// The closure of the application rejected the request with this response.
    Rejected(Box<Response<Bytes>>),
}

impl Principal {
    /// Uses the `Authorization` header. The default.
    ///
    /// Callers with different credentials never share a key. But a refreshed token is a new principal: a retry with it is a
    /// first-time request and executes again. If tokens are refreshed, use a stable value, such as an
    /// [`extension`](Principal::extension) that the authentication sets.
    #[must_use]
    pub fn authorization() -> Self {
        Self::header(header::AUTHORIZATION)
    }

    /// Uses all values of a header, in order.
    ///
    /// Use a header that an authenticating proxy sets. If clients can choose its value, a client can use the principal of
    /// another one.
    #[must_use]
    pub fn header(name: HeaderName) -> Self {
        Self(vec![Source::Header(name)])
    }

    /// Uses the first cookie with this name.
    #[must_use]
    pub fn cookie(name: impl Into<Arc<str>>) -> Self {
        Self(vec![Source::Cookie(name.into())])
    }

    /// Uses the bytes that `principal` returns for a request extension, which the authentication outside this layer sets.
    #[must_use]
    pub fn extension<T, V>(principal: impl Fn(&T) -> V + Send + Sync + 'static) -> Self
    where
        T: Any + Send + Sync,
        V: AsRef<[u8]>,
    {
        Self(vec![Source::Extension(Arc::new(move |head| {
            head.extensions
                .get::<T>()
                .map(|value| principal(value).as_ref().to_vec())
        }))])
    }

    /// Uses the bytes that `principal` returns for the request head.
    ///
    /// After `Ok(None)`, the next source is tried. After `Err`, the layer sends that response; it does not call the store, and
    /// nothing is executed. Below `Router::nest`, use the path from
    /// [`original_path_and_query`](crate::original_path_and_query).
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Response, StatusCode};
    /// use tower_idempotency::Principal;
    ///
    /// let tenant = Principal::from_fn(|head| match head.headers.get("x-tenant") {
    ///     Some(tenant) => Ok(Some(tenant.as_bytes().to_vec())),
    ///     None => {
    ///         let mut res = Response::new(Bytes::from("which tenant?"));
    ///         *res.status_mut() = StatusCode::UNAUTHORIZED;
    ///         Err(res.into())
    ///     }
    /// });
    /// // Clients choose the tenant header freely, so it needs the credentials as well.
    /// let principal = tenant.and(Principal::authorization());
    /// ```
    ///
    /// The requested host is a header in HTTP/1. In HTTP/2, hyper makes it a part of the URI. Its letter case and port vary
    /// between clients:
    ///
    /// ```
    /// use axum::{Router, body::Body, http::Request, routing::post};
    /// use http::{header::HOST, request::Parts, uri::Authority};
    /// use tower::ServiceExt;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, Principal};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let host = |head: &Parts| {
    ///     let header = || head.headers.get(HOST)?.to_str().ok()?.parse::<Authority>().ok();
    ///     let authority = head.uri.authority().cloned().or_else(header);
    ///     Ok(authority.map(|authority| authority.host().to_ascii_lowercase().into_bytes()))
    /// };
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).with_principal(Principal::from_fn(host));
    /// let app: Router = Router::new().route("/orders", post(async || "created")).route_layer(layer);
    ///
    /// let is_replay = async |uri: &str, host: Option<&str>| {
    ///     let mut req = Request::post(uri).header("idempotency-key", "8e03978e");
    ///     if let Some(host) = host {
    ///         req = req.header(HOST, host);
    ///     }
    ///     let res = app.clone().oneshot(req.body(Body::empty()).expect("a request")).await?;
    ///     Ok::<_, std::convert::Infallible>(res.headers().contains_key("idempotent-replayed"))
    /// };
    /// assert!(!is_replay("/orders", Some("a.example")).await?);
    /// assert!(is_replay("https://a.example/orders", None).await?);
    /// assert!(is_replay("/orders", Some("A.Example:443")).await?);
    /// assert!(!is_replay("https://b.example/orders", None).await?);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn from_fn(
        principal: impl Fn(&request::Parts) -> Result<Option<Vec<u8>>, Box<Response<Bytes>>>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self(vec![Source::Custom(Arc::new(principal))])
    }

    /// Uses one scope for all callers. For services with one client, or keys that name an entity.
    ///
    /// A caller that knows or guesses another caller's key and request gets that caller's response.
    #[must_use]
    pub fn unscoped() -> Self {
        Self(vec![Source::Unscoped])
    }

    /// Adds the sources of `other`, which are tried if those of `self` find no principal.
    ///
    /// The position of an [`extension`](Self::extension) or a [`from_fn`](Self::from_fn) among the sources is part of the
    /// principal: account 5 and service 5 are two callers. If you change the order, their retries no longer find the records
    /// and execute again.
    #[must_use]
    pub fn or(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Combines `self` and `other` into one source. Two callers are the same if both principals are the same.
    ///
    /// Both must find a principal. If one does not, the source counts as a missing [`extension`](Self::extension): unless
    /// another source finds a principal, the request gets 500 `principal-missing`. [`unscoped`](Self::unscoped) always finds
    /// one.
    ///
    /// ```
    /// use tower_idempotency::Principal;
    ///
    /// #[derive(Clone)]
    /// struct Tenant(String);
    /// #[derive(Clone)]
    /// struct User(u64);
    ///
    /// let principal = Principal::extension(|tenant: &Tenant| tenant.0.clone())
    ///     .and(Principal::extension(|user: &User| user.0.to_be_bytes()));
    /// ```
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(vec![Source::Both(Arc::new((self, other)))])
    }

    /// Returns the digest of the scope of this request's key, to which the key is then added.
    pub(crate) fn scope_digest(
        &self,
        secret: Option<&Secret>,
        namespace: &str,
        head: &request::Parts,
    ) -> Result<FieldDigest, PrincipalError> {
        let mut scope = new_scope(secret, namespace);
        match self.add_to(head, &mut scope)? {
            Identity::Principal => {}
            Identity::Anonymous => {
                scope.field(b"anonymous");
            }
            Identity::Missing => {
                return Err(PrincipalError::Missing(Box::new(Error::new(
                    ErrorKind::PrincipalMissing,
                    "expected the authentication outside this layer to set a principal, found none",
                ))));
            }
        }
        Ok(scope)
    }

    /// Adds the principal of this request to `hash`, with the name of its source: a cookie never equals a header. Sources
    /// without a name are distinguished by their position.
    fn add_to(
        &self,
        head: &request::Parts,
        hash: &mut FieldDigest,
    ) -> Result<Identity, PrincipalError> {
        let mut identity = Identity::Anonymous;
        for (position, source) in self.0.iter().enumerate() {
            let position = (position as u64).to_le_bytes();
            match source {
                Source::Unscoped => {
                    hash.field(b"unscoped");
                    return Ok(Identity::Principal);
                }
                Source::Header(name) => {
                    let values = head.headers.get_all(name);
                    let count = values.iter().count();
                    if count > 0 {
                        hash.field(b"header").field(name.as_str().as_bytes());
                        hash.field(&(count as u64).to_le_bytes());
                        for value in values {
                            hash.field(value.as_bytes());
                        }
                        return Ok(Identity::Principal);
                    }
                }
                Source::Cookie(name) => {
                    if let Some(value) = cookie(head, name) {
                        hash.field(b"cookie").field(name.as_bytes()).field(value);
                        return Ok(Identity::Principal);
                    }
                }
                Source::Extension(principal) => match principal(head) {
                    Some(value) => {
                        hash.field(b"extension").field(&position).field(&value);
                        return Ok(Identity::Principal);
                    }
                    None => identity = Identity::Missing,
                },
                Source::Custom(principal) => {
                    if let Some(value) = principal(head).map_err(PrincipalError::Rejected)? {
                        hash.field(b"custom").field(&position).field(&value);
                        return Ok(Identity::Principal);
                    }
                }
                Source::Both(pair) => {
                    let mut pair_hash = hash.clone();
                    pair_hash.field(b"both").field(&position);
                    if let Identity::Principal = pair.0.add_to(head, &mut pair_hash)?
                        && let Identity::Principal = pair.1.add_to(head, &mut pair_hash)?
                    {
                        *hash = pair_hash;
                        return Ok(Identity::Principal);
                    }
                    identity = Identity::Missing;
                }
            }
        }
        Ok(identity)
    }
}

impl fmt::Debug for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|source| -> &dyn fmt::Debug {
                match source {
                    Source::Unscoped => &"unscoped",
                    Source::Header(name) => name,
                    Source::Cookie(name) => name,
                    Source::Extension(_) => &"extension",
                    Source::Custom(_) => &"custom",
                    Source::Both(pair) => &**pair,
                }
            }))
            .finish()
    }
}

fn cookie<'a>(head: &'a request::Parts, name: &str) -> Option<&'a [u8]> {
    head.headers
        .get_all(header::COOKIE)
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b';'))
        .map(<[u8]>::trim_ascii)
        .find_map(|pair| pair.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}
