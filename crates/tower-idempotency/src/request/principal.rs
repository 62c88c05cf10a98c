//! Who is asking: the principal whose keys a key is one of.

use std::{any::Any, fmt, sync::Arc};

use bytes::Bytes;
use http::{HeaderName, Response, header, request};

use crate::{
    error::{Error, ErrorKind},
    request::fingerprint::{Fields, Secret, scope_of},
};

/// Who is asking.
///
/// Part of every entry's id, so that one caller never meets another's keys. Sources are tried in order
/// ([`or`](Principal::or)); the first that finds something decides. What takes two to tell callers apart, such as a tenant and
/// a user, is one source ([`and`](Principal::and)). Only a digest of it reaches the store.
///
/// Requests that carry none of the looked-for headers or cookies share the anonymous scope: there, whoever knows or
/// guesses another's key and request is given that caller's answer. A service that authenticates by cookie must
/// therefore not keep the default, [`authorization`](Principal::authorization). An
/// [`extension`](Principal::extension) that is missing means that the layer stands outside the authentication that sets
/// it, which would put all callers into one scope: unless another source finds something, such a request is answered 500
/// `principal-missing` and nothing is executed.
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

/// What the sources found.
enum Found {
    Principal,
    /// Nothing, and nothing has to be there.
    Nobody,
    /// Nothing, though something has to be there.
    Missing,
}

/// Why there is no principal.
pub(crate) enum NoPrincipal {
    Missing(Box<Error>),
    Refused(Box<Response<Bytes>>),
}

impl Principal {
    /// The `Authorization` header. The default.
    ///
    /// Safe against leaks, but a refreshed token is a new principal: a retry that carries it is a first-time request
    /// and executes again. Where tokens are refreshed, use something stable, such as an
    /// [`extension`](Principal::extension) that the authentication sets.
    #[must_use]
    pub fn authorization() -> Self {
        Self::header(header::AUTHORIZATION)
    }

    /// All values of a header, in order.
    ///
    /// A header that clients can set freely gives no protection from each other: use one that the authenticating proxy
    /// sets.
    #[must_use]
    pub fn header(name: HeaderName) -> Self {
        Self(vec![Source::Header(name)])
    }

    /// The first cookie of this name.
    #[must_use]
    pub fn cookie(name: impl Into<Arc<str>>) -> Self {
        Self(vec![Source::Cookie(name.into())])
    }

    /// Bytes of a request extension, as the authentication in front of this layer has set it.
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

    /// What `principal` finds in the request head. `Ok(None)` tries the next source, `Err` is answered as it is: the
    /// store is not touched and nothing is executed. Below `Router::nest`, take a path from
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
    /// // Clients say of which tenant they are, so that alone does not tell them apart.
    /// let principal = tenant.and(Principal::authorization());
    /// ```
    ///
    /// The host that was asked for is a header in HTTP/1 and, with hyper, a part of the URI in HTTP/2. Clients write it as they
    /// like:
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
    ///     let named = head.headers.get(HOST);
    ///     let named = || named?.to_str().ok()?.parse::<Authority>().ok();
    ///     let asked = head.uri.authority().cloned().or_else(named);
    ///     Ok(asked.map(|asked| asked.host().to_ascii_lowercase().into_bytes()))
    /// };
    /// let layer = IdempotencyLayer::new(MemoryStore::new()).with_principal(Principal::from_fn(host));
    /// let app: Router = Router::new().route("/orders", post(async || "made")).route_layer(layer);
    ///
    /// let sent = async |uri: &str, host: Option<&str>| {
    ///     let mut req = Request::post(uri).header("idempotency-key", "8e03978e");
    ///     if let Some(host) = host {
    ///         req = req.header(HOST, host);
    ///     }
    ///     let answer = app.clone().oneshot(req.body(Body::empty()).expect("a request")).await?;
    ///     Ok::<_, std::convert::Infallible>(answer.headers().contains_key("idempotent-replayed"))
    /// };
    /// assert!(!sent("/orders", Some("a.example")).await?);
    /// assert!(sent("https://a.example/orders", None).await?);
    /// assert!(sent("/orders", Some("A.Example:443")).await?);
    /// assert!(!sent("https://b.example/orders", None).await?);
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

    /// Everybody shares one scope: whoever knows or guesses another caller's key and request is given that caller's
    /// answer. For services with one client, or keys that name an entity.
    #[must_use]
    pub fn unscoped() -> Self {
        Self(vec![Source::Unscoped])
    }

    /// Tries `other` when nothing was found so far.
    ///
    /// The place of an [`extension`](Self::extension) or a [`from_fn`](Self::from_fn) among the sources is part of the
    /// principal, so that account 5 is not service 5: another order forgets their records.
    #[must_use]
    pub fn or(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Both together: callers are the same if they are the same to this one and to `other`.
    ///
    /// Both must find something. Where one finds nothing this is as an [`extension`](Self::extension) that is missing, and
    /// never half a principal: unless another source finds something, the request is answered 500 `principal-missing`.
    /// [`unscoped`](Self::unscoped) always finds something.
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

    /// The scope of this request's key.
    pub(crate) fn scope(
        &self,
        secret: Option<&Secret>,
        namespace: &str,
        head: &request::Parts,
    ) -> Result<Fields, NoPrincipal> {
        let mut scope = scope_of(secret, namespace);
        match self.feed(head, &mut scope)? {
            Found::Principal => {}
            Found::Nobody => {
                scope.field(b"anonymous");
            }
            Found::Missing => {
                return Err(NoPrincipal::Missing(Box::new(Error::new(
                    ErrorKind::PrincipalMissing,
                    "expected the authentication in front of this layer to name a principal, found none",
                ))));
            }
        }
        Ok(scope)
    }

    /// Feeds the principal of this request, under the name of the source that found it: a cookie never equals a header.
    /// What has no name is told apart by its place.
    fn feed(&self, head: &request::Parts, hash: &mut Fields) -> Result<Found, NoPrincipal> {
        let mut nothing = Found::Nobody;
        for (place, source) in self.0.iter().enumerate() {
            let place = (place as u64).to_le_bytes();
            match source {
                Source::Unscoped => {
                    hash.field(b"unscoped");
                    return Ok(Found::Principal);
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
                        return Ok(Found::Principal);
                    }
                }
                Source::Cookie(name) => {
                    if let Some(value) = cookie(head, name) {
                        hash.field(b"cookie").field(name.as_bytes()).field(value);
                        return Ok(Found::Principal);
                    }
                }
                Source::Extension(principal) => match principal(head) {
                    Some(value) => {
                        hash.field(b"extension").field(&place).field(&value);
                        return Ok(Found::Principal);
                    }
                    None => nothing = Found::Missing,
                },
                Source::Custom(principal) => {
                    if let Some(value) = principal(head).map_err(NoPrincipal::Refused)? {
                        hash.field(b"custom").field(&place).field(&value);
                        return Ok(Found::Principal);
                    }
                }
                Source::Both(both) => {
                    let mut fed = hash.clone();
                    fed.field(b"both").field(&place);
                    if let Found::Principal = both.0.feed(head, &mut fed)?
                        && let Found::Principal = both.1.feed(head, &mut fed)?
                    {
                        *hash = fed;
                        return Ok(Found::Principal);
                    }
                    nothing = Found::Missing;
                }
            }
        }
        Ok(nothing)
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
                    Source::Both(both) => &**both,
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
