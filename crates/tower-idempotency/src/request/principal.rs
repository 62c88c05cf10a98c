//! The principal: identifies the caller, so that callers do not share keys.

use std::{any::Any, fmt, sync::Arc};

use bytes::Bytes;
use http::{HeaderName, Response, header, request};

use crate::{
    digest::FieldDigest,
    error::{Error, ErrorKind},
    request::credentials::{
        Identity, PrincipalError, Purpose, add_credential, add_credentials, add_first_credential,
        add_header_value, add_identifying_header, cookie, is_credential_header,
    },
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
/// caller's key and request gets that caller's response. The layer counts these requests in `idempotency_anonymous_total`
/// and warns about them once.
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
    Credentials,
    Header(HeaderName),
    Cookie(Arc<str>),
    Extension(Arc<ExtensionFn>),
    Custom(Arc<CustomFn>),
    Both(Arc<(Principal, Principal)>),
}

type ExtensionFn = dyn Fn(&request::Parts) -> Option<Vec<u8>> + Send + Sync;
type CustomFn =
    dyn Fn(&request::Parts) -> Result<Option<Vec<u8>>, Box<Response<Bytes>>> + Send + Sync;

impl Source {
    /// Returns `true` if the layer rejects a request without this principal.
    fn is_required(&self) -> bool {
        matches!(self, Self::Extension(_) | Self::Both(_))
    }
}

impl Principal {
    /// Uses all credentials of the request: `Authorization` and the usual headers of API keys, or else the cookies. The
    /// default.
    ///
    /// Callers that show different credentials never share a key, with two exceptions. If a request has one of the headers, its
    /// cookies do not count. `X-Forwarded-Client-Cert` counts by the names in its certificates. Only a request without
    /// credentials is anonymous.
    ///
    /// - **Headers**: `Authorization`, and every header whose name ends with `api-key`, `apikey`, `api-token`, `access-key`,
    ///   `access-token`, `auth-token`, `client-cert`, `clientcert`, `session-token` or `subscription-key`. In addition
    ///   `Private-Token`, `X-Amzn-Mtls-Clientcert-Leaf`, `X-Auth-Key`, `X-Client-Secret`, `X-Figma-Token`,
    ///   `X-Functions-Key`, `X-RapidAPI-Key` and `X-Vault-Token`. A `_` in a name counts as `-`, as in `api_key`. If a request
    ///   has several of them, all count. A header without a value does not count. A request with two lines of one of them gets
    ///   400 `principal-ambiguous`, because the service might read the other line.
    /// - **`X-Forwarded-Client-Cert`**, in which Envoy and Istio describe the certificates of the previous hops. If a certificate
    ///   has a `URI`, `DNS` or `Subject`, its pairs `By`, `Hash`, `Cert` and `Chain` do not count. They differ between the pods
    ///   of a gateway. So two certificates with the same names are one caller. Any other value counts as a whole.
    /// - **Cookies**: all but those that well-known products use for analytics, consent, load balancing, bot detection and
    ///   anti-forgery tokens. Their order does not count. They are ignored if the request has one of the headers, except
    ///   `X-Forwarded-Client-Cert`. If all users send the same header, such as the password of a gateway, use the session
    ///   [`cookie`](Principal::cookie).
    ///
    /// Shares of the limits are counted by the first header, `Authorization` before the others, or by all the cookies.
    /// `X-Forwarded-Client-Cert` decides only if there is nothing else. The layer cannot see which of them the service verifies.
    /// If clients can add an invented one to their own, or if all callers have the same `Authorization`, name the source that
    /// identifies them.
    ///
    /// The case of the scheme of `Authorization`, and the spaces around the scheme, change the principal but not its share of the
    /// limits. Any other spelling has its own share: if the service accepts escapes in a cookie, one client has several shares.
    /// Use an [`extension`](Principal::extension) then.
    ///
    /// A credential that changes makes the caller a new principal: a retry with a refreshed token, or with a
    /// changed cookie, executes again. The layer counts such retries in
    /// `idempotency_principal_changed_total`, if this process saw the same key and content under another principal, and
    /// warns about them. Use a stable value instead, such as an [`extension`](Principal::extension) that the authentication
    /// sets, or the [`cookie`](Principal::cookie) of the session.
    #[must_use]
    pub fn credentials() -> Self {
        Self(vec![Source::Credentials])
    }

    /// Returns `true` if a header of this name is a credential of [`credentials`](Self::credentials). Cookies are not.
    ///
    /// For a proxy in front of a service: it must not remove such a header after the layer has read it.
    #[must_use]
    pub fn is_credential(name: &HeaderName) -> bool {
        is_credential_header(name.as_str())
    }

    /// Uses only the `Authorization` header, like the Ruby gem idempo. The default of
    /// [`Preset::Idempo`](crate::Preset::Idempo).
    ///
    /// All callers without this header share the anonymous scope, even if they show different cookies or API keys. A
    /// refreshed token is a new principal: see [`credentials`](Principal::credentials).
    #[must_use]
    pub fn authorization() -> Self {
        Self::header(header::AUTHORIZATION)
    }

    /// Uses the value of a header. A request with two lines of this header gets 400 `principal-ambiguous`.
    ///
    /// Use a header that an authenticating proxy sets. If clients can choose its value, a client can use the principal of
    /// another client. If the service accepts several spellings of one value, a client has a share of the limits for each;
    /// for `Authorization` see [`credentials`](Principal::credentials).
    ///
    /// `X-Forwarded-Client-Cert` counts by the names in its certificates, as in [`credentials`](Principal::credentials). Cookies
    /// do not count beside it.
    #[must_use]
    pub fn header(name: HeaderName) -> Self {
        Self(vec![Source::Header(name)])
    }

    /// Uses the cookie with this name.
    ///
    /// A request in which the cookie occurs twice gets 400 `principal-ambiguous`, and nothing is executed. The service might
    /// read the other one: a page on a sibling domain can add a cookie of the same name.
    ///
    /// Name and value count as the client sends them. If the service decodes them, such as `%73ession` for `session`, a
    /// client can show another cookie to the layer than to the service. Each spelling is a principal with its own share. Use
    /// an [`extension`](Principal::extension) then.
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
    /// let principal = tenant.and(Principal::credentials());
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

    /// Returns the kinds of the sources, for policies.
    pub(crate) fn kinds(&self) -> Vec<&'static str> {
        let kind = |source: &Source| match source {
            Source::Unscoped => "all",
            Source::Credentials => "credentials",
            Source::Header(_) => "header",
            Source::Cookie(_) => "cookie",
            Source::Extension(_) | Source::Custom(_) => "service",
            Source::Both(_) => "both",
        };
        self.0.iter().map(kind).collect()
    }

    /// Returns `true` if a request may have no principal, and is then rejected.
    pub(crate) fn can_be_missing(&self) -> bool {
        let is_unscoped = |source: &Source| matches!(source, Source::Unscoped);
        !self.0.iter().any(is_unscoped) && self.0.iter().any(Source::is_required)
    }

    /// Returns `true` if a request may name two principals in one header or cookie, and is then rejected.
    pub(crate) fn can_be_ambiguous(&self) -> bool {
        self.0.iter().any(|source| match source {
            Source::Credentials | Source::Header(_) | Source::Cookie(_) => true,
            Source::Both(both) => both.0.can_be_ambiguous() || both.1.can_be_ambiguous(),
            Source::Unscoped | Source::Extension(_) | Source::Custom(_) => false,
        })
    }

    /// Adds the principal of this request to the digest of its scope, to which the key is then added.
    pub(crate) fn add_to_scope(
        &self,
        head: &request::Parts,
        scope: &mut FieldDigest,
    ) -> Result<Identity, PrincipalError> {
        let identity = self.add_to(head, Purpose::Keys, scope)?;
        match identity {
            Identity::Principal | Identity::OtherAccount => {}
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
        Ok(identity)
    }

    /// Adds the principal by which the stores and the limits account for a caller with
    /// [another account](Identity::OtherAccount).
    pub(crate) fn add_account(
        &self,
        head: &request::Parts,
        account: &mut FieldDigest,
    ) -> Result<(), PrincipalError> {
        self.add_to(head, Purpose::Shares, account).map(drop)
    }

    /// Adds the principal of this request to `hash`, with the name of its source: a cookie never equals a header. Sources
    /// without a name are distinguished by their position.
    fn add_to(
        &self,
        head: &request::Parts,
        purpose: Purpose,
        hash: &mut FieldDigest,
    ) -> Result<Identity, PrincipalError> {
        let mut identity = Identity::Anonymous;
        for (position, source) in self.0.iter().enumerate() {
            match source {
                Source::Unscoped => {
                    hash.field(b"unscoped");
                    return Ok(Identity::Principal);
                }
                Source::Credentials => {
                    let is_for_shares = purpose == Purpose::Shares;
                    let found = if is_for_shares && add_first_credential(&head.headers, hash) {
                        Identity::OtherAccount
                    } else {
                        add_credentials(&head.headers, hash)?
                    };
                    if found.is_found() {
                        return Ok(found);
                    }
                }
                Source::Header(name) => {
                    let found = add_identifying_header(&head.headers, name, purpose, hash)?;
                    if found.is_found() {
                        return Ok(found);
                    }
                }
                Source::Cookie(name) => {
                    if let Some(value) = cookie(&head.headers, name)? {
                        hash.field(b"cookie").field(name.as_bytes()).field(value);
                        return Ok(Identity::Principal);
                    }
                }
                Source::Extension(principal) => match principal(head) {
                    Some(value) => {
                        hash.field(b"extension").number(position).field(&value);
                        return Ok(Identity::Principal);
                    }
                    None => identity = Identity::Missing,
                },
                Source::Custom(principal) => {
                    if let Some(value) = principal(head).map_err(PrincipalError::Rejected)? {
                        hash.field(b"custom").number(position).field(&value);
                        return Ok(Identity::Principal);
                    }
                }
                Source::Both(pair) => {
                    let mut pair_hash = hash.clone();
                    pair_hash.field(b"both").number(position);
                    let first = pair.0.add_to(head, purpose, &mut pair_hash)?;
                    if first.is_found() {
                        let second = pair.1.add_to(head, purpose, &mut pair_hash)?;
                        if second.is_found() {
                            *hash = pair_hash;
                            let is_other = [first, second].contains(&Identity::OtherAccount);
                            return Ok(if is_other {
                                Identity::OtherAccount
                            } else {
                                Identity::Principal
                            });
                        }
                    }
                    identity = Identity::Missing;
                }
            }
        }
        Ok(identity)
    }
}

impl Principal {
    /// Returns the scopes that requests with these values can have, in the order of the sources that have this number of
    /// values. Without values, adds the scope of anonymous callers, unless a source is required. `scope` is the digest to
    /// which the principal is added.
    pub(crate) fn scopes_of(&self, values: &[&[u8]], scope: &FieldDigest) -> Vec<FieldDigest> {
        let mut scopes = self.principals_of(values, scope);
        if values.is_empty() && !self.0.iter().any(Source::is_required) {
            let mut anonymous = scope.clone();
            anonymous.field(b"anonymous");
            scopes.push(anonymous);
        }
        scopes
    }

    /// Like [`scopes_of`](Self::scopes_of), but without the scope of anonymous callers.
    fn principals_of(&self, values: &[&[u8]], scope: &FieldDigest) -> Vec<FieldDigest> {
        let mut scopes = Vec::new();
        for (position, source) in self.0.iter().enumerate() {
            let mut hash = scope.clone();
            match (source, values) {
                (Source::Unscoped, _) => {
                    hash.field(b"unscoped");
                }
                (Source::Credentials, [value]) => {
                    add_header_value(&header::AUTHORIZATION, value, &mut hash);
                }
                (Source::Header(name), [value]) => add_credential(name, value, &mut hash),
                (Source::Cookie(name), [value]) => {
                    hash.field(b"cookie").field(name.as_bytes()).field(value);
                }
                (Source::Extension(_), [value]) => {
                    hash.field(b"extension").number(position).field(value);
                }
                (Source::Custom(_), [value]) => {
                    hash.field(b"custom").number(position).field(value);
                }
                (Source::Both(pair), values) => {
                    hash.field(b"both").number(position);
                    for at in 0..=values.len() {
                        let (first, second) = values.split_at(at);
                        let firsts = pair.0.principals_of(first, &hash);
                        scopes.extend(
                            firsts
                                .iter()
                                .flat_map(|it| pair.1.principals_of(second, it)),
                        );
                    }
                    continue;
                }
                _ => continue,
            }
            scopes.push(hash);
        }
        scopes
    }
}

impl fmt::Debug for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|source| -> &dyn fmt::Debug {
                match source {
                    Source::Unscoped => &"unscoped",
                    Source::Credentials => &"credentials",
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
