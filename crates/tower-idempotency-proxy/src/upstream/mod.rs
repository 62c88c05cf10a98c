//! The inner service of the layer: sends a request to the upstream, and classifies its outcome.

mod connect;
mod pool;
mod streams;
mod tunnel;

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
    header, request, uri::PathAndQuery,
};
use http_body::Body as _;
use hyper::upgrade::OnUpgrade;
use tower_idempotency::{Lease, NeedsAttention, Retention};
use tower_service::Service;

pub(crate) use self::{
    pool::{Pool, SendError},
    streams::Stream,
    tunnel::Tunnels,
};
use crate::{
    body::{ReceivedBody, RequestBody, UpstreamBody},
    config::{Encoding, ForwardKey, Forwarded, HostHeader, UnknownOutcome},
    connection::Connection,
    headers::{self, ClientConnection},
    problem::Problem,
};

const BROKEN: NeedsAttention = NeedsAttention::new("upstream-broken");
const TIMEOUT: NeedsAttention = NeedsAttention::new("upstream-timeout");
const STATUS: NeedsAttention = NeedsAttention::new("upstream-status");

/// The upstream of one route, with the settings for unknown outcomes.
pub(crate) struct Forwarding {
    pub(crate) name: Arc<str>,
    /// `true` if the layer enforces or observes the route. It reads the outcome from the extensions of a response.
    pub(crate) is_protected: bool,
    pub(crate) pool: Arc<Pool>,
    pub(crate) forwarded: Forwarded,
    pub(crate) host: HostHeader,
    pub(crate) unknown: UnknownOutcome,
    pub(crate) unknown_statuses: Vec<StatusCode>,
    pub(crate) forward_key: ForwardKey,
    pub(crate) encoding: Encoding,
    pub(crate) key_header: HeaderName,
    /// The header of the key, and the one that identifies the caller. A client can neither remove them with `Connection` nor
    /// replace them with trailers.
    pub(crate) kept: Arc<[HeaderName]>,
    /// `true` if the key is an RFC 9651 String, with quotes.
    pub(crate) is_key_quoted: bool,
    pub(crate) tunnels: Tunnels,
}

/// An upgrade that the client requests.
pub(crate) struct Upgrade {
    client: OnUpgrade,
    /// The connection counts as open while its tunnel is.
    connection: Option<Arc<Connection>>,
}

/// The derived key, which the upstream gets, and the header of the client that it replaces.
struct ReplacedKey {
    client: Option<HeaderValue>,
    derived: HeaderValue,
}

/// Sends requests to the upstream of a route.
#[derive(Clone)]
pub(crate) struct UpstreamService(pub(crate) Arc<Forwarding>);

/// A response that leaves the key an orphan. The layer does so if the inner service returns an error.
pub(crate) struct OrphanResponse(pub(crate) Response<UpstreamBody>);

impl<B> Service<Request<B>> for UpstreamService
where
    B: Into<RequestBody> + Send + 'static,
{
    type Response = Response<UpstreamBody>;
    type Error = Box<OrphanResponse>;
    type Future =
        Pin<Box<dyn Future<Output = Result<Response<UpstreamBody>, Box<OrphanResponse>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Box<OrphanResponse>>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<B>) -> Self::Future {
        let forwarding = Arc::clone(&self.0);
        Box::pin(async move { forwarding.forward(req.map(Into::into)).await })
    }
}

impl Forwarding {
    async fn forward(
        &self,
        req: Request<RequestBody>,
    ) -> Result<Response<UpstreamBody>, Box<OrphanResponse>> {
        let (mut head, mut body) = req.into_parts();
        body.keep_headers(Arc::clone(&self.kept));
        let lease = head.extensions.remove::<Lease>();
        let (upgrade, replaced) = self.prepare(&mut head, lease.as_ref());
        // hyper omits the body of GET and HEAD unless a header announces it.
        if !self.pool.target.http2
            && [Method::GET, Method::HEAD].contains(&head.method)
            && !head.headers.contains_key(header::CONTENT_LENGTH)
            && !body.is_end_stream()
        {
            let chunked = HeaderValue::from_static("chunked");
            head.headers.insert(header::TRANSFER_ENCODING, chunked);
        }
        let req = Request::from_parts(head, body);
        let res = match self.pool.send(req, lease.is_some()).await {
            Ok(res) => self.responded(res, upgrade).ok_or_else(|| {
                SendError::Broken("the upstream switched to another protocol".into())
            }),
            Err(error) => Err(error),
        };
        let mut res = match res {
            Ok(res) => res,
            Err(error) => return self.failed(&error, lease.is_some()),
        };
        if let Some(replaced) = replaced {
            self.restore_key(res.headers_mut(), replaced);
        }
        if self.is_protected {
            return self.judge(res, lease.is_some());
        }
        Ok(res)
    }

    /// Rewrites the head for the upstream. Returns the upgrade that the client requests, and the key that was replaced.
    fn prepare(
        &self,
        head: &mut request::Parts,
        lease: Option<&Lease>,
    ) -> (Option<Upgrade>, Option<ReplacedKey>) {
        let connection = head.extensions.remove::<Arc<Connection>>();
        let on_upgrade = head.extensions.remove::<OnUpgrade>();
        let protocol = headers::upgrade_protocol(&head.headers)
            .filter(|_| !self.pool.target.http2 && lease.is_none());
        let authority = &self.pool.target.authority;
        if let Some(connection) = &connection {
            let client = ClientConnection {
                address: &connection.address,
                is_tls: connection.is_tls,
                forwarded: self.forwarded,
            };
            headers::for_upstream(head, &client, self.host, authority, &self.kept);
        }
        let upgrade = match (protocol, on_upgrade) {
            (Some(protocol), Some(client)) => {
                let upgrade = HeaderValue::from_static("upgrade");
                head.headers.insert(header::CONNECTION, upgrade);
                head.headers.insert(header::UPGRADE, protocol);
                Some(Upgrade { client, connection })
            }
            _ => None,
        };
        // `TE` belongs to one connection (RFC 9110, section 10.1.4). HTTP/2 has no `Connection`.
        if !self.pool.target.http2 && head.headers.contains_key(header::TE) {
            let te = HeaderValue::from_static("te");
            head.headers.append(header::CONNECTION, te);
        }
        let replaced = lease.and_then(|lease| self.forward_key(head, lease));
        if lease.is_some() && self.encoding == Encoding::Identity {
            // Without the header, any encoding is acceptable (RFC 9110, section 12.5.3).
            let identity = HeaderValue::from_static("identity");
            head.headers.insert(header::ACCEPT_ENCODING, identity);
        }
        // Extensions of the client's side mean nothing to the connection to the upstream.
        head.extensions.clear();
        head.uri = self.uri(head);
        (upgrade, replaced)
    }

    /// Sets the key that the upstream gets. Returns the key of the client if the upstream gets a derived one.
    fn forward_key(&self, head: &mut request::Parts, lease: &Lease) -> Option<ReplacedKey> {
        match self.forward_key {
            ForwardKey::Pass => None,
            ForwardKey::Drop => {
                head.headers.remove(&self.key_header);
                None
            }
            ForwardKey::Derive => {
                let derived = lease.derive("upstream");
                let value = if self.is_key_quoted {
                    format!("\"{derived}\"")
                } else {
                    derived
                };
                // Hexadecimal digits are a valid value.
                let derived = HeaderValue::try_from(value).ok()?;
                let client = head.headers.insert(&self.key_header, derived.clone());
                Some(ReplacedKey { client, derived })
            }
        }
    }

    /// Sets the key of the client in a response that repeats the derived key. The client does not know the derived key.
    fn restore_key(&self, headers: &mut HeaderMap, replaced: ReplacedKey) {
        let derived = unquoted(&replaced.derived);
        let mut lines = headers.get_all(&self.key_header).iter();
        if !lines.any(|line| unquoted(line) == derived) {
            return;
        }
        match replaced.client {
            Some(mut client) => {
                client.set_sensitive(true);
                headers.insert(&self.key_header, client);
            }
            None => drop(headers.remove(&self.key_header)),
        }
    }

    /// Returns the target of the request: the path for HTTP/1.1, and scheme, host and path for HTTP/2.
    fn uri(&self, head: &mut request::Parts) -> Uri {
        let root = PathAndQuery::from_static("/");
        // An empty path reads as `/`, and would be written as nothing.
        let path = head
            .uri
            .path_and_query()
            .filter(|path| path.as_str() != "/");
        let path = match path {
            // The text of a path that is empty before its query begins with `?`, which is no valid target for HTTP/2.
            Some(path) if path.as_str().starts_with('?') => {
                PathAndQuery::try_from(format!("/{}", path.as_str())).unwrap_or(root)
            }
            Some(path) => path.clone(),
            None => root,
        };
        if !self.pool.target.http2 {
            return Uri::from(path);
        }
        let host = head.headers.remove(header::HOST);
        let host = host.as_ref().unwrap_or(&self.pool.target.authority);
        let uri = Uri::builder()
            .scheme(self.pool.target.scheme)
            .authority(host.as_bytes())
            .path_and_query(path.clone())
            .build();
        uri.unwrap_or_else(|_| Uri::from(path))
    }

    /// Returns the response for the client, or `None` for a switch of protocols that the proxy has not requested.
    fn responded(
        &self,
        mut res: Response<ReceivedBody>,
        upgrade: Option<Upgrade>,
    ) -> Option<Response<UpstreamBody>> {
        if res.status() == StatusCode::SWITCHING_PROTOCOLS {
            let protocol = headers::upgrade_protocol(res.headers());
            let (Some(upgrade), Some(protocol)) = (upgrade, protocol) else {
                return None;
            };
            headers::remove_hop_by_hop(res.headers_mut(), &[]);
            let connection = HeaderValue::from_static("upgrade");
            res.headers_mut().insert(header::CONNECTION, connection);
            res.headers_mut().insert(header::UPGRADE, protocol);
            let upstream = hyper::upgrade::on(&mut res);
            self.tunnels.open(upgrade, upstream);
            return Some(res.map(UpstreamBody::Left));
        }
        // The chunks determine the end of the body, but the client would use the length (RFC 9112, section 6.3).
        if res.headers().contains_key(header::TRANSFER_ENCODING) {
            res.headers_mut().remove(header::CONTENT_LENGTH);
        }
        headers::correct_length(res.status(), res.headers_mut());
        headers::remove_hop_by_hop(res.headers_mut(), &[]);
        // The version is that of the proxy (RFC 9110, section 2.5).
        *res.version_mut() = Version::HTTP_11;
        // The extensions belong to the connection to the upstream.
        res.extensions_mut().clear();
        Some(res.map(UpstreamBody::Left))
    }

    /// Decides if a response of the upstream is an outcome. Without a lease, the layer only observes the request, or it has no
    /// key. The extensions of the response then do not change its bytes.
    fn judge(
        &self,
        mut res: Response<UpstreamBody>,
        has_lease: bool,
    ) -> Result<Response<UpstreamBody>, Box<OrphanResponse>> {
        if self.unknown_statuses.contains(&res.status()) {
            if has_lease {
                self.report_unknown("status");
            }
            return self.unknown(res, STATUS, has_lease);
        }
        // The upstream requests a retry. A 409 then comes from its own layer, which still executes the first request.
        let is_temporary = [StatusCode::CONFLICT, StatusCode::SERVICE_UNAVAILABLE]
            .contains(&res.status())
            && res.headers().contains_key(header::RETRY_AFTER);
        if is_temporary || is_layer_conflict(&res) {
            res.extensions_mut().insert(Retention::NoStore);
        }
        Ok(res)
    }

    fn failed(
        &self,
        error: &SendError,
        has_lease: bool,
    ) -> Result<Response<UpstreamBody>, Box<OrphanResponse>> {
        let (problem, attention, cause) = match error {
            SendError::Unsent(cause) => {
                self.pool
                    .warnings
                    .failed(&self.name, "unsent", Some(&**cause));
                let mut res = Problem::UpstreamUnreachable.response();
                res.extensions_mut().insert(Retention::NoStore);
                return Ok(res);
            }
            SendError::Broken(cause) => (Problem::UpstreamBroken, BROKEN, Some(cause)),
            SendError::Timeout => (Problem::UpstreamTimeout, TIMEOUT, None),
        };
        let reason = attention.code().to_owned();
        let cause = cause.map(|cause| &**cause);
        self.pool.warnings.failed(&self.name, &reason, cause);
        let res = problem.response();
        if has_lease {
            self.report_unknown(&reason);
        }
        if self.is_protected {
            return self.unknown(res, attention, has_lease);
        }
        Ok(res)
    }

    /// Reports the unknown outcome of an execution.
    fn report_unknown(&self, reason: &str) {
        let needs_attention = self.unknown == UnknownOutcome::Attention;
        let warnings = &self.pool.warnings;
        warnings.outcome_unknown(&self.name, reason, needs_attention);
    }

    /// Leaves the key in the state that the policy sets for an unknown outcome.
    fn unknown(
        &self,
        mut res: Response<UpstreamBody>,
        attention: NeedsAttention,
        has_lease: bool,
    ) -> Result<Response<UpstreamBody>, Box<OrphanResponse>> {
        match self.unknown {
            UnknownOutcome::Orphan if has_lease => return Err(Box::new(OrphanResponse(res))),
            // An observed orphan rejects retries too.
            UnknownOutcome::Attention | UnknownOutcome::Orphan => {
                let reason = format!("upstream {}, status {}", self.name, res.status().as_u16());
                res.extensions_mut().insert(attention.with_reason(reason));
            }
            UnknownOutcome::Free => {
                res.extensions_mut().insert(Retention::NoStore);
            }
        }
        Ok(res)
    }
}

/// Returns `true` for the 409 of a layer in the upstream, such as `outcome-unknown`. It is a problem that no cache stores, with a
/// link to the description of the key header.
///
/// It is no outcome. The entry of that layer decides about retries, and an operator may change it.
fn is_layer_conflict<B>(res: &Response<B>) -> bool {
    let headers = res.headers();
    let line = |name: HeaderName| headers.get(name).map_or(&b""[..], HeaderValue::as_bytes);
    res.status() == StatusCode::CONFLICT
        && line(header::CONTENT_TYPE) == b"application/problem+json"
        && line(header::CACHE_CONTROL) == b"no-store"
        && line(header::LINK).ends_with(b"; rel=\"describedby\"")
}

/// Returns the value of a key header without the quotes of an RFC 9651 String.
fn unquoted(value: &HeaderValue) -> &[u8] {
    let value = value.as_bytes();
    let inner = value.strip_prefix(b"\"");
    inner
        .and_then(|inner| inner.strip_suffix(b"\""))
        .unwrap_or(value)
}

#[cfg(test)]
mod tests;
