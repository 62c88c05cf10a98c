//! Access to the console of `serve`: the token, the host of loopback, the peer of a Unix socket.

use std::sync::Arc;

use axum::{
    extract::{ConnectInfo, Request, State, connect_info::Connected},
    middleware::Next,
    response::{IntoResponse as _, Response},
    serve::IncomingStream,
};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use http::{
    HeaderMap, StatusCode,
    header::{AUTHORIZATION, HOST, WWW_AUTHENTICATE},
};
use sha2::{Digest as _, Sha256};
use tokio::net::{TcpListener, UnixListener};

/// Name of the operator of a request, which has passed the gate.
#[derive(Clone, Debug)]
pub(super) struct Operator(pub(super) Box<str>);

/// User at the other end of a Unix socket, if it is one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer(Option<u32>);

impl Connected<IncomingStream<'_, TcpListener>> for Peer {
    fn connect_info(_: IncomingStream<'_, TcpListener>) -> Self {
        Self(None)
    }
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Self(stream.io().peer_cred().ok().map(|peer| peer.uid()))
    }
}

pub(super) struct Gate {
    /// Digest of the token. Digests are compared, so the time tells nothing about the token.
    token: Option<[u8; 32]>,
    actor: Box<str>,
    is_loopback: bool,
}

impl Gate {
    pub(super) fn new(token: Option<Vec<u8>>, actor: &str, is_loopback: bool) -> Self {
        Self {
            token: token.map(|token| Sha256::digest(&token).into()),
            actor: actor.into(),
            is_loopback,
        }
    }

    fn operator(&self, headers: &HeaderMap, peer: Peer) -> Result<Operator, Box<Response>> {
        let Some(expected) = self.token else {
            // The name of another site may lead to loopback, and its page must not read this one.
            if self.is_loopback && !is_loopback_host(headers) {
                let text = "The host is not that of loopback.\n";
                return Err(Box::new(
                    (StatusCode::MISDIRECTED_REQUEST, text).into_response(),
                ));
            }
            let uid = peer.0.map(|uid| format!("{} (uid {uid})", self.actor));
            return Ok(Operator(uid.map_or(self.actor.clone(), Into::into)));
        };
        let value = headers.get(AUTHORIZATION).and_then(|it| it.to_str().ok());
        let found = value.and_then(credentials);
        match found {
            Some((name, token)) if <[u8; 32]>::from(Sha256::digest(&token)) == expected => {
                Ok(Operator(name.into()))
            }
            _ => Err(Box::new(
                (
                    StatusCode::UNAUTHORIZED,
                    [(
                        WWW_AUTHENTICATE,
                        "Basic realm=\"idempotency\", charset=\"UTF-8\"",
                    )],
                    "The token is missing or wrong.\n",
                )
                    .into_response(),
            )),
        }
    }
}

/// Returns the name and the token: those of `Basic`, or `token` and that of `Bearer`.
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

pub(super) async fn check(
    State(gate): State<Arc<Gate>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    mut req: Request,
    next: Next,
) -> Response {
    if req.uri().path() == "/healthz" {
        return next.run(req).await;
    }
    match gate.operator(req.headers(), peer) {
        Ok(operator) => {
            req.extensions_mut().insert(operator);
            next.run(req).await
        }
        Err(refusal) => *refusal,
    }
}
