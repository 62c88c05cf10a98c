//! Fields that a proxy removes, adds or rewrites (RFC 9110, section 7.6).

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Version, header, request,
    uri::Authority,
};
use tower_idempotency::{ACTING_HEADERS, Principal};

use crate::config::{Forwarded, HostHeader};

/// Largest number of lines of the head of a request with HTTP/2, and of its trailers. hyper refuses more than 100 with HTTP/1.1.
///
/// The limit of bytes allows 1,900 short lines (64 KiB / 34), and the tables of a `HeaderMap` take a multiple of their size. A
/// client that compresses them sends one byte for each.
pub(crate) const MAX_LINES: usize = 256;

/// Fields that belong to one connection. A `Connection` header names further ones.
static HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("http2-settings"),
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::PROXY_AUTHORIZATION,
];

/// Fields in which earlier proxies describe the path of a request.
static FORWARDED: [HeaderName; 12] = [
    header::FORWARDED,
    X_FORWARDED_FOR,
    X_FORWARDED_HOST,
    X_FORWARDED_PROTO,
    HeaderName::from_static("x-forwarded-port"),
    HeaderName::from_static("x-forwarded-prefix"),
    HeaderName::from_static("x-forwarded-protocol"),
    HeaderName::from_static("x-forwarded-scheme"),
    HeaderName::from_static("x-forwarded-ssl"),
    HeaderName::from_static("x-real-ip"),
    HeaderName::from_static("x-client-ip"),
    HeaderName::from_static("true-client-ip"),
];

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// The connection of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientConnection<'a> {
    pub(crate) address: &'a HeaderValue,
    pub(crate) is_tls: bool,
    pub(crate) forwarded: Forwarded,
}

/// Returns the protocol of an HTTP/1.1 upgrade that the head requests, or to which a 101 response switches: WebSocket, or
/// none.
///
/// A tunnel of another protocol, such as `h2c`, could carry requests past the routes.
pub(crate) fn upgrade_protocol(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut protocols = headers.get_all(header::UPGRADE).iter();
    let protocol = protocols.next().filter(|_| protocols.next().is_none())?;
    let is_listed =
        list(headers, &header::CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"));
    let is_websocket = protocol.as_bytes().eq_ignore_ascii_case(b"websocket");
    (is_listed && is_websocket).then(|| protocol.clone())
}

/// Removes an upgrade that the proxy does not tunnel, so that the layer protects the request. WebSocket begins with GET (RFC
/// 6455, section 4.1).
pub(crate) fn remove_other_upgrade<B>(req: &mut Request<B>) {
    if req.method() != Method::GET || upgrade_protocol(req.headers()).is_none() {
        req.headers_mut().remove(header::UPGRADE);
    }
}

/// Counts a forward in the `Max-Forwards` of an OPTIONS or a TRACE. Returns `false` if the proxy must respond itself (RFC 9110,
/// section 7.6.2).
pub(crate) fn count_forward<B>(req: &mut Request<B>) -> bool {
    if ![Method::OPTIONS, Method::TRACE].contains(req.method()) {
        return true;
    }
    let line = req.headers().get(header::MAX_FORWARDS);
    let left = line.and_then(|line| line.to_str().ok()?.parse::<u64>().ok());
    match left {
        Some(0) => false,
        Some(left) => {
            let left = HeaderValue::from(left - 1);
            req.headers_mut().insert(header::MAX_FORWARDS, left);
            true
        }
        None => true,
    }
}

/// Removes the fields that belong to one connection.
///
/// `Trailer` and the value `trailers` of `TE` stay, because the proxy forwards trailers. The headers `kept` stay too, even if
/// `Connection` names them.
pub(crate) fn remove_hop_by_hop(headers: &mut HeaderMap, kept: &[HeaderName]) {
    if !has_any(headers, &HOP_BY_HOP) {
        return;
    }
    let named: Vec<HeaderName> = list(headers, &header::CONNECTION)
        .filter_map(|token| token.parse().ok())
        .collect();
    let accepts_trailers =
        list(headers, &header::TE).any(|token| token.eq_ignore_ascii_case("trailers"));
    for name in named {
        // A client must not remove fields that identify it or the message.
        if !is_protected(&name) && !kept.contains(&name) {
            headers.remove(name);
        }
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
    if accepts_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// Returns the lines of `Connection`. Trailers that they name belong to one connection (RFC 9110, section 7.6.1).
///
/// The lines share the memory of the head. The names would take a multiple of it, and a client can send thousands.
pub(crate) fn connection_lines(headers: &HeaderMap) -> Vec<HeaderValue> {
    // Other messages of HTTP/1 have no trailers, and HTTP/2 has no `Connection`.
    if !headers.contains_key(header::TRANSFER_ENCODING) {
        return Vec::new();
    }
    headers
        .get_all(header::CONNECTION)
        .iter()
        .cloned()
        .collect()
}

/// Removes the trailers that these lines of `Connection` name.
pub(crate) fn remove_named(trailers: &mut HeaderMap, connection_lines: &[HeaderValue]) {
    for name in members(connection_lines.iter()) {
        trailers.remove(name);
    }
}

/// Returns `true` if the message has one of these fields.
///
/// Compares the names. To look all of them up takes longer, because the map hashes each one.
fn has_any(headers: &HeaderMap, names: &[HeaderName]) -> bool {
    headers.keys().any(|name| names.contains(name))
}

/// Returns `true` for fields that a `Connection` header must not remove, because they are not meant for one connection.
fn is_protected(name: &HeaderName) -> bool {
    [
        header::HOST,
        header::AUTHORIZATION,
        header::COOKIE,
        header::CONTENT_LENGTH,
        header::CONTENT_TYPE,
    ]
    .contains(name)
        || FORWARDED.contains(name)
        // The layer compares them in each spelling.
        || ACTING_HEADERS.iter().any(|acting| is_spelling(name, acting))
        || Principal::is_credential(name)
}

/// Removes the trailers that belong to one connection or to the framing. Peers with HTTP/2 reject them.
///
/// For a request, `kept` is set. Some servers add its trailers to the headers (RFC 9110, section 6.5.1). So the function also
/// removes those that could replace a header that the proxy sets or reads, in each spelling.
pub(crate) fn remove_trailers(trailers: &mut HeaderMap, kept: Option<&[HeaderName]>) {
    let could_replace = |name: &HeaderName, kept: &[HeaderName]| {
        let mut known = FORWARDED.iter().chain(kept);
        is_protected(name) || known.any(|known| is_spelling(name, known))
    };
    let removed: Vec<HeaderName> = trailers
        .keys()
        .filter(|name| {
            HOP_BY_HOP.contains(name)
                || *name == header::CONTENT_LENGTH
                || kept.is_some_and(|kept| could_replace(name, kept))
        })
        .cloned()
        .collect();
    for name in removed {
        trailers.remove(name);
    }
}

/// Leaves one length in a response, and none in a 204. Clients with HTTP/2 reject other responses. hyper or h2 has compared the
/// first length with the body.
pub(crate) fn correct_length(status: StatusCode, headers: &mut HeaderMap) {
    if status == StatusCode::NO_CONTENT {
        headers.remove(header::CONTENT_LENGTH);
        return;
    }
    let Some(length) = list(headers, &header::CONTENT_LENGTH).next() else {
        return;
    };
    let lines = headers.get_all(header::CONTENT_LENGTH).iter();
    if (lines.count() > 1 || headers[header::CONTENT_LENGTH] != length)
        && let Ok(length) = HeaderValue::from_str(length)
    {
        headers.insert(header::CONTENT_LENGTH, length);
    }
}

/// Returns `true` if the request has other transfer codings than one `chunked`. hyper decodes only the last one, and the proxy
/// removes the header. The upstream would read coded bytes as the content (RFC 9112, section 6.1).
pub(crate) fn has_unknown_coding(headers: &HeaderMap) -> bool {
    let mut lines = headers.get_all(header::TRANSFER_ENCODING).iter();
    let is_chunked = |line: &HeaderValue| line.as_bytes().eq_ignore_ascii_case(b"chunked");
    lines.next().is_some_and(|line| !is_chunked(line)) || lines.next().is_some()
}

/// Returns the host that the client requests: that of the URI, or else of the `Host` header.
pub(crate) fn requested_host(head: &request::Parts) -> Option<HeaderValue> {
    match head.uri.authority() {
        Some(authority) => HeaderValue::from_str(without_user(authority)).ok(),
        None => head.headers.get(header::HOST).cloned(),
    }
}

fn without_user(authority: &Authority) -> &str {
    let text = authority.as_str();
    text.rsplit_once('@').map_or(text, |(_, host)| host)
}

/// Rewrites the fields of a request for the upstream.
pub(crate) fn for_upstream(
    head: &mut request::Parts,
    client: &ClientConnection<'_>,
    host: HostHeader,
    upstream: &HeaderValue,
    kept: &[HeaderName],
) {
    let requested = requested_host(head);
    let headers = &mut head.headers;
    remove_hop_by_hop(headers, kept);
    headers.remove(header::EXPECT);
    remove_other_spellings(headers, kept);
    join_cookies(headers);
    set_forwarded(headers, client, requested.as_ref());
    let host = match (host, requested) {
        (HostHeader::Client, Some(requested)) => requested,
        (HostHeader::Client, None) | (HostHeader::Upstream, _) => upstream.clone(),
    };
    headers.insert(header::HOST, host);
    let via = match head.version {
        Version::HTTP_2 => "2.0 idempotency-proxy",
        Version::HTTP_10 => "1.0 idempotency-proxy",
        _ => "1.1 idempotency-proxy",
    };
    headers.append(header::VIA, HeaderValue::from_static(via));
}

/// Removes headers whose name differs only in `_` and `-` from one that the proxy sets, or from one of `kept`.
///
/// CGI and servers like it read both names as the same one. A client could then add a value that the proxy does not
/// see.
fn remove_other_spellings(headers: &mut HeaderMap, kept: &[HeaderName]) {
    // One of two spellings has a `_`, and no name in `FORWARDED` has one.
    let has_underscore = |name: &HeaderName| name.as_str().contains('_');
    if !headers.keys().any(has_underscore) && !kept.iter().any(has_underscore) {
        return;
    }
    let known = || FORWARDED.iter().chain(kept);
    let others: Vec<HeaderName> = headers
        .keys()
        .filter(|name| known().any(|known| is_spelling(name, known)))
        .filter(|name| !known().any(|known| known == *name))
        .cloned()
        .collect();
    for name in others {
        headers.remove(name);
    }
}

/// Returns `true` if the names are equal with `-` in place of each `_`.
fn is_spelling(name: &HeaderName, other: &HeaderName) -> bool {
    fn dashed(name: &HeaderName) -> impl Iterator<Item = u8> {
        let bytes = name.as_str().bytes();
        bytes.map(|byte| if byte == b'_' { b'-' } else { byte })
    }
    dashed(name).eq(dashed(other))
}

fn set_forwarded(
    headers: &mut HeaderMap,
    client: &ClientConnection<'_>,
    host: Option<&HeaderValue>,
) {
    match client.forwarded {
        Forwarded::Pass => return,
        Forwarded::Replace if has_any(headers, &FORWARDED) => {
            for name in &FORWARDED {
                headers.remove(name);
            }
        }
        Forwarded::Replace => {}
        // `Forwarded` of the client would contradict the other fields.
        Forwarded::Append => drop(headers.remove(header::FORWARDED)),
    }
    headers.append(X_FORWARDED_FOR, client.address.clone());
    let protocol = if client.is_tls { "https" } else { "http" };
    let protocol = HeaderValue::from_static(protocol);
    headers.entry(X_FORWARDED_PROTO).or_insert(protocol);
    if let Some(host) = host {
        headers.entry(X_FORWARDED_HOST).or_insert(host.clone());
    }
}

/// Joins the lines of `Cookie`: HTTP/2 splits them, and HTTP/1.1 allows one (RFC 9113, section 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let mut lines = headers.get_all(header::COOKIE).iter();
    if lines.nth(1).is_none() {
        return;
    }
    let lines: Vec<_> = headers
        .get_all(header::COOKIE)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    if let Ok(mut joined) = HeaderValue::from_bytes(&lines.join(&b"; "[..])) {
        joined.set_sensitive(true);
        headers.insert(header::COOKIE, joined);
    }
}

/// Returns the members of a header that is a list.
fn list<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> + use<'a> {
    members(headers.get_all(name).into_iter())
}

fn members<'a>(lines: impl Iterator<Item = &'a HeaderValue>) -> impl Iterator<Item = &'a str> {
    lines
        .filter_map(|line| line.to_str().ok())
        .flat_map(|line| line.split(','))
        .map(|member| member.split(';').next().unwrap_or_default().trim())
        .filter(|member| !member.is_empty())
}

#[cfg(test)]
mod tests;
