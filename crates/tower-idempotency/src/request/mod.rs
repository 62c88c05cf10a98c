//! Requests: decides which are covered, parses the key, identifies the principal, and builds the claim for the store.

pub(crate) mod canonical_json;
pub(crate) mod credentials;
pub(crate) mod fingerprint;
pub(crate) mod json_fingerprint;
pub(crate) mod key;
mod message_check;
mod multipart;
pub(crate) mod principal;
pub(crate) mod read_body;
pub(crate) mod recent;
pub(crate) mod route;
pub(crate) mod rules;

use std::borrow::Cow;

use http::{HeaderMap, HeaderName, HeaderValue, Method, Version, header, request};

use crate::{
    digest::{FieldDigest, ScopedKey, VERSION},
    error::{Error, ErrorKind},
    header_lines::lines_of,
    request::{
        credentials::{Identity, PrincipalError},
        fingerprint::{
            entry_id, host, media_type, new_scope, original_path_and_query, original_uri,
            other_host,
        },
        key::{IdempotencyKey, KeyError, KeyScope, RequestKey},
        route::RouteTemplate,
        rules::{KeyFrom, KeyReuse, MissingKey, Rules},
    },
    store::{
        Claim, Fingerprint, ITEM_OPERATION, KeyId, OBSERVED_OPERATION, OrphanPolicy, ScopeDigest,
        StoreError, Token, Ttl, is_operation_of_observation, is_operation_of_run_once,
    },
    telemetry::Coverage,
};

/// Terms of the lease that a claim requests.
#[derive(Clone, Copy)]
pub(crate) struct LeaseTerms {
    pub(crate) ttl: Ttl,
    pub(crate) orphan_policy: OrphanPolicy,
    pub(crate) orphan_retention: Ttl,
    /// Host and process, for operators.
    pub(crate) owner: &'static str,
}

/// Returns `true` if the request has a key header. [`find_key`] decides if the key is valid.
pub(crate) fn has_key_header(rules: &Rules, headers: &HeaderMap) -> bool {
    match &rules.key_from {
        KeyFrom::Header { name, alias } => {
            let mut names = headers.keys();
            names.any(|other| other == name || Some(other) == alias.as_ref())
        }
        KeyFrom::Service { .. } => false,
    }
}

/// Returns the line of the key header that the response repeats, or `None` if it repeats none. A key that the layer rejects is
/// not repeated.
pub(crate) fn echoed_key(rules: &Rules, headers: &HeaderMap) -> Option<(HeaderName, HeaderValue)> {
    let KeyFrom::Header { name, alias } = &rules.key_from else {
        return None;
    };
    if !rules.echo_key {
        return None;
    }
    let name = [Some(name), alias.as_ref()]
        .into_iter()
        .flatten()
        .find(|name| headers.contains_key(*name))?;
    let mut lines = headers.get_all(name).iter();
    let line = lines.next()?;
    let key = rules.key_rules.parse(line.as_bytes()).ok()?;
    if lines.next().is_some() || !passes_key_check(rules, &key) {
        return None;
    }
    let mut line = line.clone();
    // Logs of the response must not contain the key either.
    line.set_sensitive(true);
    Some((name.clone(), line))
}

/// Returns `true` if the layer covers requests with this method.
pub(crate) fn is_method_covered(rules: &Rules, method: &Method) -> bool {
    // Independent of the settings: the response to HEAD has no body to record.
    method != Method::HEAD
        && (rules.methods)(method)
        && !(method == Method::CONNECT && is_key_optional(rules))
}

/// Returns `true` if the client decides if its request is protected: the service neither demands nor makes the key.
pub(crate) fn is_key_optional(rules: &Rules) -> bool {
    rules.missing_key == MissingKey::PassThrough && !rules.key_from.is_service()
}

/// Returns the reason why the layer does not cover the request, or `None` if it does. The key is not considered.
pub(crate) fn pass_reason(rules: &Rules, head: &request::Parts) -> Option<Coverage> {
    if rules.is_grpc() {
        let is_skipped = rules.skip.as_ref().is_some_and(|skip| skip(head));
        return is_skipped.then_some(Coverage::Skip);
    }
    let is_connect =
        head.method == Method::CONNECT && is_key_optional(rules) && (rules.methods)(&head.method);
    if !is_connect && !is_method_covered(rules, &head.method) {
        return Some(Coverage::Method);
    }
    if rules.skip.as_ref().is_some_and(|skip| skip(head)) {
        return Some(Coverage::Skip);
    }
    if !is_key_optional(rules) {
        return None;
    }
    if is_connect {
        return Some(Coverage::Connect);
    }
    if is_upgrade(head) {
        return Some(Coverage::Upgrade);
    }
    is_grpc(head).then_some(Coverage::Grpc)
}

/// Returns `true` if the request is for an upgrade of the connection to another protocol.
///
/// Ignores the following:
/// - `Upgrade` without `Connection: upgrade`, as RFC 9110 requires.
/// - `h2c` and `h2`: servers ignore them, and clients send `h2c` with ordinary requests.
/// - `websocket` with another method than GET, which RFC 6455, section 4.1, requires.
/// - Empty names.
/// - Versions of HTTP without the `Upgrade` header.
fn is_upgrade(head: &request::Parts) -> bool {
    const IGNORED: [&[u8]; 3] = [b"h2c", b"h2", b""];
    let is_ignored = |protocol: &[u8]| {
        IGNORED
            .iter()
            .any(|name| protocol.eq_ignore_ascii_case(name))
            || protocol.eq_ignore_ascii_case(b"websocket") && head.method != Method::GET
    };
    head.version == Version::HTTP_11
        && list_items(&head.headers, &header::UPGRADE).any(|protocol| !is_ignored(protocol))
        && list_items(&head.headers, &header::CONNECTION)
            .any(|option| option.eq_ignore_ascii_case(b"upgrade"))
}

/// Returns the items of a header that is a list.
fn list_items<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a [u8]> {
    lines_of(headers, name)
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
}

/// Returns `true` for gRPC, which is HTTP/2 or HTTP/3 with the media type `application/grpc` or `application/grpc+..`.
///
/// `application/grpc+json` does not count: extractors of JSON accept every media type that ends with `+json`.
fn is_grpc(head: &request::Parts) -> bool {
    matches!(head.version, Version::HTTP_2 | Version::HTTP_3)
        && media_type(head).is_some_and(|media_type| {
            media_type
                .strip_prefix("application/grpc")
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('+'))
                && !media_type.ends_with("+json")
        })
}

/// Returns the digest by which stores and limits account for the caller, or `None` if the layer would reject the caller.
pub(crate) fn caller_scope(rules: &Rules, head: &request::Parts) -> Option<ScopeDigest> {
    scope_key(rules, head, &RequestKey::Derived)
        .ok()
        .map(|(scoped, _)| scoped.scope)
}

/// Returns the coverage of a request that the layer covers, by its key.
pub(crate) fn coverage_of(found: &Result<Option<RequestKey>, Error>) -> Coverage {
    match found {
        Ok(Some(RequestKey::Derived)) => Coverage::Derived,
        Ok(Some(_)) => Coverage::Keyed,
        Ok(None) => Coverage::NoKey,
        Err(error) if error.kind() == ErrorKind::MissingKey => Coverage::NoKey,
        Err(_) => Coverage::Keyed,
    }
}

/// Returns the key, or `None` if the request has no key and needs none.
pub(crate) fn find_key(rules: &Rules, head: &request::Parts) -> Result<Option<RequestKey>, Error> {
    let key = match &rules.key_from {
        KeyFrom::Header { name, alias } => {
            let mut lines = lines_of(&head.headers, name);
            let mut line = lines.next();
            if line.is_none()
                && let Some(alias) = alias
            {
                lines = lines_of(&head.headers, alias);
                line = lines.next();
            }
            if lines.next().is_some() {
                return Err(Error::new(
                    ErrorKind::MalformedKey,
                    "expected one idempotency key header line, found several",
                ));
            }
            line.map(|line| rules.key_rules.parse(line.as_bytes()))
                .transpose()
        }
        KeyFrom::Service { key, .. } => key(head)
            .map(|key| rules.key_rules.validate(key))
            .transpose(),
    };
    let key = key.map_err(key_error)?;
    match key {
        Some(key) if !passes_key_check(rules, &key) => Err(rejected_key()),
        Some(key) => Ok(Some(match rules.key_from {
            KeyFrom::Header { .. } => RequestKey::Sent(key),
            KeyFrom::Service { scope, .. } => RequestKey::Named(key, scope),
        })),
        None => match rules.missing_key {
            MissingKey::Reject => Err(missing_key(rules)),
            MissingKey::Derive => Ok(Some(RequestKey::Derived)),
            MissingKey::PassThrough => Ok(None),
        },
    }
}

/// Returns the key of an item if it is valid like the key of a request.
pub(crate) fn validate_item_key(rules: &Rules, key: String) -> Result<IdempotencyKey, Error> {
    let key = rules.key_rules.validate(key).map_err(key_error)?;
    if passes_key_check(rules, &key) {
        Ok(key)
    } else {
        Err(rejected_key())
    }
}

fn passes_key_check(rules: &Rules, key: &IdempotencyKey) -> bool {
    let check = rules.key_check.as_ref();
    check.is_none_or(|check| check(key.as_str()))
}

fn rejected_key() -> Error {
    Error::new(
        ErrorKind::MalformedKey,
        "the key does not have the form that this service expects",
    )
}

/// Creates the error of a request whose key is invalid.
pub(crate) fn key_error(error: KeyError) -> Error {
    match error {
        KeyError::Malformed(detail) => Error::new(ErrorKind::MalformedKey, detail),
        KeyError::TooLong { length, max } => Error::new(
            ErrorKind::KeyTooLong,
            format!("expected a key of at most {max} bytes, found {length}"),
        ),
        KeyError::TooShort { length, min } => Error::new(
            ErrorKind::MalformedKey,
            format!("expected a key of at least {min} bytes, found {length}"),
        ),
    }
}

/// Creates the error of a request whose body is incomplete.
fn body_incomplete() -> Error {
    Error::new(
        ErrorKind::BodyUnreadable,
        "the request body ended before it was complete",
    )
}

/// Creates the error of a gRPC call that is protected and not unary.
#[cfg(feature = "grpc")]
pub(crate) fn not_unary(detail: &'static str) -> Error {
    Error::new(ErrorKind::NotUnary, detail)
}

pub(crate) fn missing_key(rules: &Rules) -> Error {
    let detail = match &rules.key_from {
        KeyFrom::Header { name, .. } => {
            format!("expected an idempotency key in the header {name}, found none").into()
        }
        KeyFrom::Service { .. } => Cow::Borrowed("expected an idempotency key, found none"),
    };
    Error::new(ErrorKind::MissingKey, detail)
}

/// Scope of a caller. The key of a request or of an item is added to its digest.
pub(crate) struct CallerScope {
    pub(crate) hash: FieldDigest,
    /// Digest by which the stores and the limits account for the caller.
    pub(crate) account: ScopeDigest,
    /// Digest of the whole principal. Differs from `account` if the identity is [`Identity::OtherAccount`].
    pub(crate) principal: ScopeDigest,
    pub(crate) identity: Identity,
}

/// Returns the scope of the caller. If `is_shared`, all callers have one scope, but each has its own account.
pub(crate) fn find_scope(
    rules: &Rules,
    head: &request::Parts,
    is_shared: bool,
) -> Result<CallerScope, PrincipalError> {
    let mut hash = new_scope(rules.secret.as_ref(), &rules.namespace);
    let all_callers = is_shared.then(|| hash.clone());
    // May reject the request, even if the key is that of all callers.
    let mut identity = rules.principal.add_to_scope(head, &mut hash)?;
    // The stores and the limits account for the caller, whatever the key. A client that adds an invented credential or host
    // to its own must not get another share.
    let principal = hash.scope_digest();
    let account = if identity == Identity::OtherAccount {
        let mut account = new_scope(rules.secret.as_ref(), &rules.namespace);
        rules.principal.add_account(head, &mut account)?;
        account.scope_digest()
    } else {
        principal
    };
    if let Some(mut all_callers) = all_callers {
        all_callers.field(b"all callers");
        hash = all_callers;
        identity = Identity::Principal;
    }
    if rules.host_in_scope {
        hash.field(b"host").field(&host(head));
        // The service may read either of two hosts that differ.
        if let Some(other) = other_host(head) {
            hash.field(b"host header").field(&other);
        }
    }
    if rules.endpoint_in_scope {
        let path = original_uri(head).path();
        hash.field(b"endpoint")
            .field(head.method.as_str().as_bytes())
            .field(path.as_bytes());
    }
    Ok(CallerScope {
        hash,
        account,
        principal,
        identity,
    })
}

/// Returns the key in the scope of its caller.
pub(crate) fn scope_key(
    rules: &Rules,
    head: &request::Parts,
    key: &RequestKey,
) -> Result<(ScopedKey, Identity), PrincipalError> {
    let is_shared = matches!(key, RequestKey::Named(_, KeyScope::AllCallers));
    let scope = find_scope(rules, head, is_shared)?;
    let id = entry_id(scope.hash, key, rules.key_reuse == KeyReuse::Separate);
    let scoped = ScopedKey {
        id,
        scope: scope.account,
        principal: scope.principal,
    };
    Ok((scoped, scope.identity))
}

/// Builds the claim that requests a lease for a request. `new_token` draws the token for an entry.
pub(crate) fn build_claim(
    terms: LeaseTerms,
    scoped: ScopedKey,
    key: &RequestKey,
    fingerprint: Fingerprint,
    operation: Box<str>,
    new_token: impl FnOnce(&KeyId) -> Result<Token, StoreError>,
) -> Result<Claim, StoreError> {
    let id = scoped.id.of(&fingerprint);
    let (token, fingerprint) = match key {
        RequestKey::Sent(_) | RequestKey::Named(..) => (new_token(&id)?, fingerprint),
        RequestKey::Derived => {
            // The life must differ from the lives that other processes start, so the token of the memory store is not
            // enough.
            let token = Token::random()?;
            (token, new_life(&token))
        }
    };
    Ok(Claim {
        id,
        fingerprint,
        token,
        lease: terms.ttl,
        orphans: terms.orphan_policy,
        orphan_retention: terms.orphan_retention,
        owner: terms.owner,
        operation,
        scope: Some(scoped.scope),
    })
}

/// Returns the fingerprint of a new entry with a derived key.
///
/// The ID of such an entry contains the fingerprint of its request, so no other request meets the entry. The stored
/// fingerprint identifies the life of the entry instead: from its first lease to its expiry or release. A takeover does not
/// change the life. A later entry for an equal request has another life. [`Lease::derive`](crate::Lease::derive) uses it.
fn new_life(token: &Token) -> Fingerprint {
    let mut hash = FieldDigest::new(None);
    hash.field(b"life").field(VERSION).field(token.as_bytes());
    Fingerprint::from_bytes(hash.finish())
}

/// Returns the method and the route, at most 128 bytes. If the request has neither a [`RouteTemplate`] nor a route that axum
/// matched, returns the path in its place.
///
/// Omits the query. Without a route, the values of parameters in the path are not omitted, and may be secrets or personal data.
pub(crate) fn operation(head: &request::Parts) -> Box<str> {
    operation_within(head, MAX_OPERATION).into()
}

fn operation_within(head: &request::Parts, max: usize) -> String {
    let path = route(head);
    let method = head.method.as_str();
    let mut operation = String::with_capacity(method.len() + 1 + path.len());
    operation.push_str(method);
    operation.push(' ');
    operation.push_str(path);
    if operation.len() > max {
        let boundary = (0..=max).rev().find(|at| operation.is_char_boundary(*at));
        operation.truncate(boundary.unwrap_or(0));
    }
    operation
}

/// Returns the operation of an observed request, so that operators distinguish its entry from those of executions.
pub(crate) fn observed_operation(head: &request::Parts) -> Box<str> {
    operation_with(OBSERVED_OPERATION, head)
}

/// Returns the operation of the items of a batch request.
pub(crate) fn item_operation(head: &request::Parts) -> Box<str> {
    operation_with(ITEM_OPERATION, head)
}

/// Returns `true` if the record of an entry with this operation is replayed as a response.
pub(crate) fn is_operation_of_request(operation: &str) -> bool {
    !is_operation_of_run_once(operation) && !is_operation_of_observation(operation)
}

fn operation_with(prefix: &str, head: &request::Parts) -> Box<str> {
    let mut operation = String::from(prefix);
    operation.push_str(&operation_within(head, MAX_OPERATION - prefix.len()));
    operation.into()
}

const MAX_OPERATION: usize = 128;

fn route(head: &request::Parts) -> &str {
    if let Some(template) = head.extensions.get::<RouteTemplate>() {
        return template.as_str();
    }
    #[cfg(feature = "axum")]
    if let Some(route) = head.extensions.get::<axum::extract::MatchedPath>() {
        return route.as_str();
    }
    let path = original_path_and_query(head);
    path.split('?').next().unwrap_or(path)
}
