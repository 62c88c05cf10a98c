//! Access to the console of `serve` and of the proxy: the token, the host of loopback, the peer of a Unix socket.

use std::sync::Arc;

use axum::{
    extract::{ConnectInfo, Request, State},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use http::{
    HeaderMap, HeaderValue, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, HOST, WWW_AUTHENTICATE},
};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::net::{TcpStream, UnixStream};

/// Name of the operator of an authenticated request.
#[derive(Clone, Debug)]
pub(crate) struct Operator(pub(crate) Box<str>);

/// User at the other end of a Unix socket. `None` for TCP, and if the system does not report the user.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) Option<u32>);

/// Stream of a connection.
pub(super) trait PeerStream {
    /// Returns the user at the other end.
    fn peer(&self) -> Peer;
}

/// The listener of the console, after it was bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    /// A TCP port of loopback: each user of the machine can connect.
    Loopback,
    /// A TCP port of another address.
    Network,
    /// A Unix socket of the user with this ID.
    Unix { owner: u32 },
}

impl PeerStream for TcpStream {
    fn peer(&self) -> Peer {
        Peer(None)
    }
}

impl PeerStream for UnixStream {
    fn peer(&self) -> Peer {
        Peer(self.peer_cred().ok().map(|peer| peer.uid()))
    }
}

/// Status and message for a request that does not come from an operator.
#[derive(Debug)]
struct Refusal(StatusCode, &'static str);

/// Decides which requests come from an operator.
pub(crate) struct Authentication {
    /// Digest of the token. Digests are compared, so the time of a comparison does not reveal the token.
    token: Option<[u8; 32]>,
    actor: Box<str>,
    listener: ListenerKind,
}

impl Authentication {
    pub(crate) fn new(token: Option<Vec<u8>>, actor: &str, listener: ListenerKind) -> Self {
        Self {
            token: token.map(|token| Sha256::digest(&token).into()),
            actor: actor.into(),
            listener,
        }
    }

    fn operator(&self, headers: &HeaderMap, peer: Peer) -> Result<Operator, Refusal> {
        let Some(expected) = self.token else {
            return self.operator_without_token(headers, peer);
        };
        let value = headers.get(AUTHORIZATION).and_then(|it| it.to_str().ok());
        let found = value.and_then(credentials);
        match found {
            Some((name, token)) if <[u8; 32]>::from(Sha256::digest(&token)) == expected => {
                Ok(Operator(name.into()))
            }
            _ => Err(Refusal(
                StatusCode::UNAUTHORIZED,
                "The token is missing or wrong.",
            )),
        }
    }

    fn operator_without_token(&self, headers: &HeaderMap, peer: Peer) -> Result<Operator, Refusal> {
        if self.listener == ListenerKind::Network {
            return Err(Refusal(StatusCode::FORBIDDEN, "A token is required."));
        }
        // The name of another site may resolve to loopback, and a page of that site must not read this one. A browser gets to a
        // Unix socket through a forwarded port of loopback.
        if !is_loopback_host(headers) {
            return Err(Refusal(
                StatusCode::MISDIRECTED_REQUEST,
                "Expected localhost or an address of loopback as the host.",
            ));
        }
        match self.listener {
            ListenerKind::Loopback | ListenerKind::Network => Ok(Operator(self.actor.clone())),
            // The mode of the file is not enough: it permits all users between `bind` and `chmod`.
            ListenerKind::Unix { owner } => match peer.0 {
                Some(uid) if uid == owner || uid == ROOT => {
                    Ok(Operator(format!("{} (uid {uid})", self.actor).into()))
                }
                _ => Err(Refusal(
                    StatusCode::FORBIDDEN,
                    "The socket belongs to another user.",
                )),
            },
        }
    }
}

impl Refusal {
    /// Returns the response: JSON for the API, text for browsers.
    fn response(self, path: &str) -> Response {
        let Self(status, message) = self;
        let mut res = if path.starts_with("/api/") {
            let body = json!({ "error": message }).to_string();
            (status, [(CONTENT_TYPE, "application/json")], body).into_response()
        } else {
            (status, format!("{message}\n")).into_response()
        };
        if status == StatusCode::UNAUTHORIZED {
            let challenge = "Basic realm=\"idempotency\", charset=\"UTF-8\"";
            let challenge = HeaderValue::from_static(challenge);
            res.headers_mut().insert(WWW_AUTHENTICATE, challenge);
        }
        res
    }
}

/// Returns the name of the operator and the token. `Bearer` has no name, so its operator is `token`.
fn credentials(value: &str) -> Option<(String, Vec<u8>)> {
    let (scheme, value) = value.split_once(' ')?;
    let value = value.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(("token".to_owned(), value.as_bytes().to_vec()));
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(BASE64.decode(value).ok()?).ok()?;
    let (name, token) = decoded.split_once(':')?;
    let name: String = name
        .chars()
        .filter(|it| !it.is_control())
        .take(100)
        .collect();
    let name = if name.is_empty() {
        "token".to_owned()
    } else {
        name
    };
    Some((name, token.as_bytes().to_vec()))
}

fn is_loopback_host(headers: &HeaderMap) -> bool {
    let host = headers.get(HOST).and_then(|it| it.to_str().ok());
    let authority = host.and_then(|host| host.parse::<http::uri::Authority>().ok());
    authority.is_some_and(|authority| {
        let host = authority
            .host()
            .trim_start_matches('[')
            .trim_end_matches(']');
        let address = host.parse::<std::net::IpAddr>();
        host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|it| it.is_loopback())
    })
}

/// Passes the requests of operators on, and those for `/healthz`.
pub(crate) async fn check(
    State(authentication): State<Arc<Authentication>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    mut req: Request,
    next: Next,
) -> Response {
    if req.uri().path() == "/healthz" {
        return next.run(req).await;
    }
    match authentication.operator(req.headers(), peer) {
        Ok(operator) => {
            req.extensions_mut().insert(operator);
            next.run(req).await
        }
        Err(refusal) => refusal.response(req.uri().path()),
    }
}

/// User ID of root, which can read the memory of the process and the store of each user.
const ROOT: u32 = 0;

#[cfg(test)]
mod tests {
    use super::*;

    fn status(listener: ListenerKind, host: &'static str, peer: Option<u32>) -> Option<u16> {
        let authentication = Authentication::new(None, "alice", listener);
        let mut headers = HeaderMap::new();
        headers.insert(HOST, http::HeaderValue::from_static(host));
        let operator = authentication.operator(&headers, Peer(peer));
        operator.err().map(|refusal| refusal.0.as_u16())
    }

    #[test]
    fn unix_socket_accepts_owner_and_root() {
        let unix = ListenerKind::Unix { owner: 1000 };
        for (peer, expected) in [
            (Some(1000), None),
            (Some(0), None),
            (Some(1001), Some(403)),
            (None, Some(403)),
        ] {
            assert_eq!(status(unix, "localhost", peer), expected, "{peer:?}");
        }
    }

    #[test]
    fn other_hosts_are_rejected_without_token() {
        let unix = ListenerKind::Unix { owner: 1000 };
        for (host, expected) in [
            ("localhost:7480", None),
            ("127.0.0.1:7480", None),
            ("[::1]:7480", None),
            ("evil.test:7480", Some(421)),
            ("127.0.0.1.evil.test", Some(421)),
            ("0.0.0.0:7480", Some(421)),
            ("", Some(421)),
        ] {
            for listener in [unix, ListenerKind::Loopback] {
                assert_eq!(status(listener, host, Some(1000)), expected, "{host}");
            }
            assert_eq!(status(ListenerKind::Network, host, None), Some(403));
        }
    }
}
