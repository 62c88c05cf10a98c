//! Whether the layer applies to a request, under which key, and what it then asks of the store.

pub(crate) mod canonical_json;
pub(crate) mod fingerprint;
pub(crate) mod key;
pub(crate) mod principal;
pub(crate) mod read_body;
pub(crate) mod rules;

use std::borrow::Cow;

use http::{HeaderMap, Method, Version, header, request};

use crate::{
    config::Config,
    error::{Error, ErrorKind},
    execution::shared::Engine,
    request::fingerprint::{Fields, KeyPart, key_id, original_path_and_query},
    request::key::{IdempotencyKey, KeyError},
    request::rules::{KeyFrom, KeyReuse, MissingKey},
    store::{Claim, StoreError, Token},
};

/// Whether there may be a key at all; whether it is one is for [`find_key`] to say.
pub(crate) fn may_carry_key(config: &Config, headers: &HeaderMap) -> bool {
    match &config.request.key_from {
        KeyFrom::Header { name, alias } => {
            headers.contains_key(name)
                || alias
                    .as_ref()
                    .is_some_and(|alias| headers.contains_key(alias))
        }
        KeyFrom::Head(_) => true,
    }
}

/// Whether the layer applies to a request, before its key is looked at.
pub(crate) fn applies(config: &Config, head: &request::Parts) -> bool {
    // Whatever the setting says: there is no body to keep for HEAD, and nothing to replay for a tunnel.
    head.method != Method::HEAD
        && head.method != Method::CONNECT
        && (config.request.methods)(&head.method)
        && !is_upgrade(head)
        && !is_grpc(&head.headers)
        && !config.request.skip.as_ref().is_some_and(|skip| skip(head))
}

/// Not `Upgrade: h2c` or `h2`: servers ignore them, and clients send the first with ordinary requests. Nor an empty one, nor
/// one of a version of HTTP that has none.
fn is_upgrade(head: &request::Parts) -> bool {
    let ignored: [&[u8]; 3] = [b"h2c", b"h2", b""];
    let of = |protocol: &[u8]| {
        let protocol = protocol.trim_ascii();
        !ignored
            .iter()
            .any(|name| protocol.eq_ignore_ascii_case(name))
    };
    head.version == Version::HTTP_11
        && head
            .headers
            .get_all(header::UPGRADE)
            .iter()
            .any(|value| value.as_bytes().split(|byte| *byte == b',').any(of))
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.as_bytes().get(..16))
        .is_some_and(|start| start.eq_ignore_ascii_case(b"application/grpc"))
}

/// The key, or `None` when the request carries none and that is allowed.
pub(crate) fn find_key(
    config: &Config,
    head: &request::Parts,
) -> Result<Option<IdempotencyKey>, Error> {
    let key = match &config.request.key_from {
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
            line.map(|line| config.request.key_rules.parse(line.as_bytes()))
                .transpose()
        }
        KeyFrom::Head(find) => find(head)
            .map(|key| config.request.key_rules.check(key))
            .transpose(),
    };
    let key = key.map_err(|error| match error {
        KeyError::Malformed(detail) => Error::new(ErrorKind::MalformedKey, detail),
        KeyError::TooLong { found, limit } => Error::new(
            ErrorKind::KeyTooLong,
            format!("expected a key of at most {limit} bytes, found {found}"),
        ),
        KeyError::TooShort { found, limit } => Error::new(
            ErrorKind::MalformedKey,
            format!("expected a key of at least {limit} bytes, found {found}"),
        ),
    })?;
    match key {
        Some(key)
            if config
                .request
                .key_check
                .as_ref()
                .is_some_and(|check| !check(key.as_str())) =>
        {
            Err(Error::new(
                ErrorKind::MalformedKey,
                "the key is not of the form this service expects",
            ))
        }
        Some(key) => Ok(Some(key)),
        None if config.request.missing_key == MissingKey::Reject => Err(missing_key(config)),
        None => Ok(None),
    }
}

fn missing_key(config: &Config) -> Error {
    let detail = match &config.request.key_from {
        KeyFrom::Header { name, .. } => {
            format!("expected an idempotency key in the header {name}, found none").into()
        }
        KeyFrom::Head(_) => Cow::Borrowed("expected an idempotency key, found none"),
    };
    Error::new(ErrorKind::MissingKey, detail)
}

/// What this request asks of the store.
pub(crate) fn claim(
    config: &Config,
    engine: &Engine,
    scope: Fields,
    head: &request::Parts,
    content: &[u8],
    key: Option<&IdempotencyKey>,
) -> Result<Claim, StoreError> {
    let fingerprint =
        config
            .request
            .fingerprint
            .fingerprint(config.request.secret.as_ref(), head, content);
    let part = match (key, config.request.key_reuse) {
        (Some(key), KeyReuse::Refuse(_)) => KeyPart::Sent(key),
        (Some(key), KeyReuse::Separate) => KeyPart::Separate(key, fingerprint),
        (None, KeyReuse::Refuse(_) | KeyReuse::Separate) => KeyPart::Derived(fingerprint),
    };
    Ok(Claim {
        id: key_id(scope, &part),
        fingerprint,
        token: Token::random()?,
        lease: config.execution.lease,
        orphans: config.execution.orphans,
        orphan_retention: config.orphan_retention(),
        owner: engine.owner,
        operation: operation(head),
    })
}

/// Method and path without the query, which may hold secrets; at most 128 bytes.
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
