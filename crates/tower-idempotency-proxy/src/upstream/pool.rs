//! Connections to one upstream, and requests on them.
//!
//! The pool sends a request a second time only if hyper returned it unsent. Everything else is an unknown outcome.

use std::{
    collections::VecDeque,
    error::Error,
    future::poll_fn,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http::{
    Request, Response, StatusCode, Version,
    uri::{Authority, PathAndQuery},
};
use http_body::Body as _;
use hyper::{
    body::Incoming,
    client::conn::{TrySendError, http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::time::{Instant, timeout, timeout_at};

use super::{
    connect::Target,
    streams::{ConnectionBudget, SharedConnection, SharedConnections, Stream, Streams},
};
use crate::{
    body::{Progress, ReceivedBody, RequestBody},
    config::{ConfigError, Upstream},
    headers::connection_lines,
    telemetry::UpstreamWarnings,
};

/// The reason why a request got no response.
#[derive(Debug)]
pub(crate) enum SendError {
    /// No byte of the request was sent.
    Unsent(Cause),
    /// The request was sent, completely or in part.
    Broken(Cause),
    /// The request was sent, and the head of the response did not arrive in time.
    Timeout,
}

pub(crate) type Cause = Box<dyn Error + Send + Sync>;

/// The connections to one upstream.
pub(crate) struct Pool {
    pub(crate) target: Target,
    pub(crate) warnings: UpstreamWarnings,
    connect_timeout: Duration,
    timeout: Duration,
    keep_alive: Duration,
    max_idle: usize,
    idle: Mutex<VecDeque<Idle>>,
    /// The connections with HTTP/2 for requests with a lease. Their bodies are complete. A client can cancel only the rest of a
    /// response, and `OpenStream::keep` delays the reset of its stream. A request with a large head or with trailers has a
    /// connection of its own.
    with_lease: Arc<SharedConnections>,
    /// The connections with HTTP/2 for all other requests. A client can use up the window of such a connection for uploads, or
    /// make the upstream close it. This ends the other requests on it with an unknown outcome.
    without_lease: Arc<SharedConnections>,
}

/// Bytes of a response that the proxy reads before its client does. Each stream has a window of its own, so that a client
/// that does not read delays only its response.
const STREAM_WINDOW: u32 = 256 * 1024;
/// The largest window of HTTP/2 (RFC 9113, section 6.9.1).
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Largest head of a response, and largest trailers, in bytes. If the head is larger, or the trailers of HTTP/1.1 are, the outcome
/// of the request is unknown. The default of hyper is 16 KiB for HTTP/2, and for the trailers of HTTP/1.1.
const MAX_RESPONSE_HEAD: u32 = 400 * 1024;
/// Largest number of lines of the head and of the trailers of a response with HTTP/1.1. Above its default of 100 lines, hyper
/// allocates two tables of 8 KiB (256 x 32) for each head. A record has at most 128 lines, so a response with more is sent and not
/// recorded.
const MAX_RESPONSE_LINES: usize = 256;
/// Largest head of a request that shares a connection, in bytes. An upstream may close the connection because of a larger one.
/// This is half of the default limit of hyper.
const MAX_SHARED_HEAD: usize = 8 * 1024;
/// Bytes that HTTP/2 counts for each line in addition to its name and value (RFC 9113, section 6.5.2).
const LINE_OVERHEAD: usize = 32;
/// Interval of the checks if the settings of an upstream have arrived.
const SETTINGS_INTERVAL: Duration = Duration::from_millis(1);

/// A connection without a request.
struct Idle {
    sender: http1::SendRequest<RequestBody>,
    since: Instant,
}

impl Pool {
    pub(crate) fn new(upstream: &Upstream) -> Result<Self, ConfigError> {
        let timeout = upstream.timeout.get_ref().get();
        Ok(Self {
            target: Target::new(upstream)?,
            warnings: UpstreamWarnings::default(),
            connect_timeout: upstream.connect_timeout.get_ref().get(),
            timeout,
            keep_alive: upstream.keep_alive.get(),
            max_idle: upstream.max_idle,
            idle: Mutex::default(),
            with_lease: Arc::new(SharedConnections::with_keep_limit(timeout)),
            without_lease: Arc::default(),
        })
    }

    /// Sends a request and returns the head of its response.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the request may have been sent.
    pub(crate) async fn send(
        self: &Arc<Self>,
        req: Request<RequestBody>,
        has_lease: bool,
    ) -> Result<Response<ReceivedBody>, SendError> {
        if !self.target.http2 {
            let res = self.send_http1(req).await?;
            let lines = connection_lines(res.headers());
            let received = |body| ReceivedBody::new(body, Version::HTTP_11);
            return Ok(res.map(|body| received(body).without_trailers_of(lines)));
        }
        let with_lease = &self.with_lease;
        let connections = if has_lease && (may_break_connection(&req) || !with_lease.can_keep()) {
            // A connection of its own.
            Arc::default()
        } else if has_lease {
            Arc::clone(with_lease)
        } else {
            Arc::clone(&self.without_lease)
        };
        self.send_http2(req, &connections).await
    }

    async fn send_http1(
        self: &Arc<Self>,
        mut req: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        *req.version_mut() = Version::HTTP_11;
        let mut now = Instant::now();
        while let Some(mut sender) = self.take_idle(now) {
            match self
                .attempt(now, req.body().progress(), sender.try_send_request(req))
                .await
            {
                Ok(res) => return Ok(self.received(sender, res)),
                // The upstream closed the connection before hyper wrote a byte of the request.
                Err(AttemptError::Unsent(unsent, _)) => req = *unsent,
                Err(AttemptError::Failed(error)) => return Err(error),
            }
            now = Instant::now();
        }
        let mut sender = self.connect_http1().await.map_err(SendError::Unsent)?;
        let (began, progress) = (Instant::now(), req.body().progress());
        match self
            .attempt(began, progress, sender.try_send_request(req))
            .await
        {
            Ok(res) => Ok(self.received(sender, res)),
            Err(error) => Err(error.into()),
        }
    }

    async fn send_http2(
        &self,
        mut req: Request<RequestBody>,
        connections: &Arc<SharedConnections>,
    ) -> Result<Response<ReceivedBody>, SendError> {
        *req.version_mut() = Version::HTTP_2;
        loop {
            let shared = self.shared_sender(connections).await;
            let (mut sender, stream, is_fresh) = shared.map_err(SendError::Unsent)?;
            req.body_mut().set_stream(Arc::clone(&stream));
            let (began, progress) = (Instant::now(), req.body().progress());
            // Connections that keep requests get only bodies of known size.
            let size = req.body().size_hint().exact().unwrap_or(u64::MAX);
            let mut sent = Box::pin(sender.try_send_request(req));
            let error = match self.attempt(began, progress, sent.as_mut()).await {
                Ok(res) => {
                    let received = |body| ReceivedBody::new(body, Version::HTTP_2);
                    return Ok(res.map(|body| received(body).with_stream(stream)));
                }
                Err(error) => error,
            };
            match error {
                AttemptError::Unsent(unsent, _) if !is_fresh => {
                    connections.discard(&stream);
                    req = *unsent;
                }
                // The upstream may have stopped without closing the connection.
                AttemptError::Failed(SendError::Timeout) => {
                    connections.discard(&stream);
                    stream.keep_request(sent, size);
                    return Err(SendError::Timeout);
                }
                error => return Err(error.into()),
            }
        }
    }

    /// Waits for the head of a response. The timeout begins at `began`, and restarts when the upstream reads from the request
    /// body.
    async fn attempt(
        &self,
        began: Instant,
        progress: Arc<Progress>,
        sent: impl Future<Output = Result<Response<Incoming>, TrySendError<Request<RequestBody>>>>,
    ) -> Result<Response<Incoming>, AttemptError> {
        let mut sent = std::pin::pin!(sent);
        let deadline = || progress.last().max(began) + self.timeout;
        loop {
            let current = deadline();
            match timeout_at(current, sent.as_mut()).await {
                Ok(Ok(res)) => return Ok(res),
                Ok(Err(mut error)) => {
                    return Err(match error.take_message() {
                        Some(unsent) => AttemptError::Unsent(Box::new(unsent), error.into_error()),
                        // Also after REFUSED_STREAM: HAProxy resets a stream so after it has forwarded the request.
                        None => AttemptError::Failed(SendError::Broken(error.into_error().into())),
                    });
                }
                Err(_) if deadline() > current => {}
                Err(_) => return Err(AttemptError::Failed(SendError::Timeout)),
            }
        }
    }

    /// Returns the response. The connection returns to the pool when the response has been read.
    fn received(
        self: &Arc<Self>,
        mut sender: http1::SendRequest<RequestBody>,
        res: Response<Incoming>,
    ) -> Response<Incoming> {
        if res.status() == StatusCode::SWITCHING_PROTOCOLS || self.keep_alive.is_zero() {
            return res;
        }
        if sender.is_ready() {
            self.put_idle(sender);
        } else {
            let pool = Arc::downgrade(self);
            tokio::spawn(async move {
                if sender.ready().await.is_ok()
                    && let Some(pool) = pool.upgrade()
                {
                    pool.put_idle(sender);
                }
            });
        }
        res
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the connection that was used last, unless it is closed or has been idle for too long.
    fn take_idle(&self, now: Instant) -> Option<http1::SendRequest<RequestBody>> {
        let mut idle = self.idle();
        while let Some(last) = idle.pop_back() {
            if now.duration_since(last.since) >= self.keep_alive {
                // The other connections have been idle for longer.
                idle.clear();
                return None;
            }
            if last.sender.is_ready() {
                return Some(last.sender);
            }
        }
        None
    }

    fn put_idle(&self, sender: http1::SendRequest<RequestBody>) {
        let mut idle = self.idle();
        let since = Instant::now();
        while let Some(first) = idle.front()
            && (since.duration_since(first.since) >= self.keep_alive || idle.len() >= self.max_idle)
        {
            idle.pop_front();
        }
        if self.max_idle > 0 {
            idle.push_back(Idle { sender, since });
        }
    }

    async fn connect_http1(&self) -> Result<http1::SendRequest<RequestBody>, Cause> {
        let connecting = async {
            let io = TokioIo::new(self.target.connect().await?);
            let mut builder = http1::Builder::new();
            builder
                // A proxy must remove the space before a colon, and may join folded lines (RFC 9112, sections 5.1 and 5.2).
                .allow_spaces_after_header_name_in_responses(true)
                .allow_obsolete_multiline_headers_in_responses(true)
                .max_headers(MAX_RESPONSE_LINES)
                .max_header_size(MAX_RESPONSE_HEAD as usize);
            let (sender, connection) = builder.handshake(io).await?;
            tokio::spawn(async move {
                // The request on the connection reports the error.
                let _ = connection.with_upgrades().await;
            });
            Ok::<_, Cause>(sender)
        };
        timeout(self.connect_timeout, connecting).await?
    }

    /// Connects, and waits for the settings of the upstream. Before they arrive, no request is sent.
    async fn connect_http2(&self) -> Result<SharedConnection, Cause> {
        let io = TokioIo::new(self.target.connect().await?);
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            // The limit is above zero from the settings on.
            .initial_max_send_streams(0_usize)
            .max_header_list_size(MAX_RESPONSE_HEAD)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        let (sender, connection) = builder.handshake::<_, RequestBody>(io).await?;
        let mut connection = Box::pin(connection);
        // An upstream refuses the streams above its limit, and their outcome would be unknown. hyper does not report the arrival.
        while connection.current_max_send_streams() == 0 {
            if let Ok(ended) = timeout(SETTINGS_INTERVAL, connection.as_mut()).await {
                ended?;
                return Err("the upstream closed the connection before its settings".into());
            }
        }
        let streams = Arc::<Streams>::default();
        let limits = Arc::clone(&streams);
        limits.update(connection.current_max_send_streams());
        tokio::spawn(async move {
            let ended = poll_fn(|cx| {
                let polled = connection.as_mut().poll(cx);
                limits.update(connection.current_max_send_streams());
                polled
            });
            let _ = ended.await;
        });
        Ok(SharedConnection {
            sender,
            streams,
            budget: ConnectionBudget::default(),
        })
    }

    /// Returns a handle to a connection with room for a stream, that stream, and `true` if the connection was opened now.
    async fn shared_sender(
        &self,
        connections: &Arc<SharedConnections>,
    ) -> Result<(http2::SendRequest<RequestBody>, Stream, bool), Cause> {
        // Without the lock: an upstream that accepts no further connection still responds on the open ones.
        if let Some((sender, stream)) = connections.open_stream() {
            return Ok((sender, stream, false));
        }
        let connecting = async {
            let _connecting = connections.connecting.lock().await;
            // The request before this one may have connected, or a stream may have ended.
            if let Some((sender, stream)) = connections.open_stream() {
                return Ok((sender, stream, false));
            }
            let mut connection = self.connect_http2().await?;
            let (sender, stream) = connection.open_stream(connections);
            connections.open().push(connection);
            Ok::<_, Cause>((sender, stream, true))
        };
        // The timeout includes the wait for requests that connect before this one.
        timeout(self.connect_timeout, connecting).await?
    }
}

/// The failure of one attempt.
enum AttemptError {
    /// hyper returned the request and has sent no byte of it.
    Unsent(Box<Request<RequestBody>>, hyper::Error),
    Failed(SendError),
}

impl From<AttemptError> for SendError {
    fn from(attempt: AttemptError) -> Self {
        match attempt {
            AttemptError::Unsent(_, error) => Self::Unsent(error.into()),
            AttemptError::Failed(error) => error,
        }
    }
}

/// Returns `true` if an upstream may close the connection because of the head or the trailers of a request with a lease.
fn may_break_connection(req: &Request<RequestBody>) -> bool {
    let uri = req.uri();
    let authority = uri.authority().map_or("", Authority::as_str);
    let path = uri.path_and_query().map_or("", PathAndQuery::as_str);
    let lines = req.headers().iter();
    let lines = lines.map(|(name, value)| name.as_str().len() + value.len() + LINE_OVERHEAD);
    let size = req.method().as_str().len() + authority.len() + path.len() + lines.sum::<usize>();
    // The body is in memory. Its length is exact unless trailers follow it.
    size > MAX_SHARED_HEAD || req.body().size_hint().exact().is_none()
}
