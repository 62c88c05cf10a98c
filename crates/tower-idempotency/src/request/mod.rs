//! Requests: decides which are covered, parses the key, identifies the principal, and builds the claim for the store.

pub(crate) mod canonical_json;
pub(crate) mod fingerprint;
pub(crate) mod key;
pub(crate) mod principal;
pub(crate) mod read_body;
pub(crate) mod rules;

use std::borrow::Cow;

use http::{HeaderMap, Method, Version, header, request};

use crate::{
    digest::FieldDigest,
    error::{Error, ErrorKind},
    request::{
        fingerprint::{KeyPart, key_id, original_path_and_query},
        key::{IdempotencyKey, KeyError},
        rules::{KeyFrom, KeyReuse, MissingKey, Rules},
    },
    store::{Claim, OrphanPolicy, StoreError, Token, Ttl},
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

/// Returns `true` if the request may have a key. [`find_key`] decides if the key is valid.
pub(crate) fn can_have_key(rules: &Rules, headers: &HeaderMap) -> bool {
    match &rules.key_from {
        KeyFrom::Header { name, alias } => {
            headers.contains_key(name)
                || alias
                    .as_ref()
                    .is_some_and(|alias| headers.contains_key(alias))
        }
        KeyFrom::Head(_) => true,
    }
}

/// Returns `true` if the layer covers the request. The key is not considered.
pub(crate) fn is_covered(rules: &Rules, head: &request::Parts) -> bool {
    // Independent of the settings: the response to HEAD has no body to record, and a tunnel cannot be replayed.
    head.method != Method::HEAD
        && head.method != Method::CONNECT
        && (rules.methods)(&head.method)
        && !is_upgrade(head)
        && !is_grpc(&head.headers)
        && !rules.skip.as_ref().is_some_and(|skip| skip(head))
}

/// Returns `true` if the request asks to upgrade the connection to another protocol.
///
/// Ignores the following:
/// - `h2c` and `h2`: servers ignore them, and clients send `h2c` with ordinary requests.
/// - Empty names.
/// - Versions of HTTP without the `Upgrade` header.
fn is_upgrade(head: &request::Parts) -> bool {
    const IGNORED: [&[u8]; 3] = [b"h2c", b"h2", b""];
    let is_other_protocol = |protocol: &[u8]| {
        let protocol = protocol.trim_ascii();
        !IGNORED
            .iter()
            .any(|name| protocol.eq_ignore_ascii_case(name))
    };
    head.version == Version::HTTP_11
        && head.headers.get_all(header::UPGRADE).iter().any(|value| {
            value
                .as_bytes()
                .split(|byte| *byte == b',')
                .any(is_other_protocol)
        })
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.as_bytes().get(..16))
        .is_some_and(|start| start.eq_ignore_ascii_case(b"application/grpc"))
}

/// Returns the key, or `None` if the request has no key and needs none.
pub(crate) fn find_key(
    rules: &Rules,
    head: &request::Parts,
) -> Result<Option<IdempotencyKey>, Error> {
    let key = match &rules.key_from {
        KeyFrom::Header { name, alias } => {
            let mut lines = head.headers.get_all(name).iter();
            let mut line = lines.next();
            if line.is_none()
                && let Some(alias) = alias
            {
                lines = head.headers.get_all(alias).iter();
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
        KeyFrom::Head(key) => key(head)
            .map(|key| rules.key_rules.validate(key))
            .transpose(),
    };
    let key = key.map_err(|error| match error {
        KeyError::Malformed(detail) => Error::new(ErrorKind::MalformedKey, detail),
        KeyError::TooLong { length, max } => Error::new(
            ErrorKind::KeyTooLong,
            format!("expected a key of at most {max} bytes, found {length}"),
        ),
        KeyError::TooShort { length, min } => Error::new(
            ErrorKind::MalformedKey,
            format!("expected a key of at least {min} bytes, found {length}"),
        ),
    })?;
    match key {
        Some(key)
            if rules
                .key_check
                .as_ref()
                .is_some_and(|check| !check(key.as_str())) =>
        {
            Err(Error::new(
                ErrorKind::MalformedKey,
                "the key does not have the form that this service expects",
            ))
        }
        Some(key) => Ok(Some(key)),
        None if rules.missing_key == MissingKey::Reject => Err(missing_key(rules)),
        None => Ok(None),
    }
}

fn missing_key(rules: &Rules) -> Error {
    let detail = match &rules.key_from {
        KeyFrom::Header { name, .. } => {
            format!("expected an idempotency key in the header {name}, found none").into()
        }
        KeyFrom::Head(_) => Cow::Borrowed("expected an idempotency key, found none"),
    };
    Error::new(ErrorKind::MissingKey, detail)
}

/// Builds the claim that requests a lease for this request. Draws a new token for it.
pub(crate) fn build_claim(
    rules: &Rules,
    terms: LeaseTerms,
    scope: FieldDigest,
    head: &request::Parts,
    content: &[u8],
    key: Option<&IdempotencyKey>,
) -> Result<Claim, StoreError> {
    let fingerprint = rules
        .fingerprint
        .fingerprint(rules.secret.as_ref(), head, content);
    let part = match (key, rules.key_reuse) {
        (Some(key), KeyReuse::Refuse(_)) => KeyPart::Sent(key),
        (Some(key), KeyReuse::Separate) => KeyPart::Separate(key, fingerprint),
        (None, KeyReuse::Refuse(_) | KeyReuse::Separate) => KeyPart::Derived(fingerprint),
    };
    Ok(Claim {
        id: key_id(scope, &part),
        fingerprint,
        token: Token::random()?,
        lease: terms.ttl,
        orphans: terms.orphan_policy,
        orphan_retention: terms.orphan_retention,
        owner: terms.owner,
        operation: operation(head),
    })
}

/// Returns the method and the path, at most 128 bytes. Omits the query, which may contain secrets.
fn operation(head: &request::Parts) -> Box<str> {
    const MAX: usize = 128;
    let path = original_path_and_query(head);
    let path = path.split('?').next().unwrap_or(path);
    let method = head.method.as_str();
    let mut operation = String::with_capacity(method.len() + 1 + path.len());
    operation.push_str(method);
    operation.push(' ');
    operation.push_str(path);
    if operation.len() > MAX {
        let boundary = (0..=MAX).rev().find(|at| operation.is_char_boundary(*at));
        operation.truncate(boundary.unwrap_or(0));
    }
    operation.into()
}
