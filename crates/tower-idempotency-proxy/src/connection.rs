//! A connection of a client: TLS, HTTP/1.1 or HTTP/2, and its limits.

use std::{
    future::pending,
    mem,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::HeaderValue;
use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    net::TcpStream,
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::{
    client_stream::{ClientStream, StreamState, Transport},
    proxy::Shared,
    service, telemetry,
};

/// Time for the TLS handshake. Also the minimum time for the first request of a connection.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
/// Minimum time without a read after which a connection that shuts down is closed, although a response or an upload is
/// incomplete. Also the minimum time without a read after which a client of HTTP/2 counts as vanished.
const LAST_READ: Duration = Duration::from_secs(5);
/// Largest head of a request, in bytes.
const MAX_HEAD_BYTES: u32 = 64 * 1024;
const MAX_STREAMS: u32 = 256;
/// Bytes of an upload that the proxy reads before the upstream does. An upload that the upstream does not read delays no other
/// stream until there are 16 of them.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 4 * 1024 * 1024;
/// hyper buffers no further frame of a response while so many bytes of it wait for the client, which can set any window. The default
/// of hyper is 400 KiB.
const MAX_SEND_BUFFER: usize = 64 * 1024;
/// The connection is closed if its client resets more streams before the proxy has accepted them.
const MAX_PENDING_RESETS: usize = 20;
const MAX_ERROR_RESETS: usize = 1024;
/// An HTTP/2 connection is closed if its client does not reply to pings, after at most twice this time.
const PING_PERIOD: Duration = Duration::from_secs(20);

/// A connection of a client, without its stream. It counts as open until its tunnel is closed too.
pub(crate) struct Connection {
    /// The address of the client.
    pub(crate) address: HeaderValue,
    pub(crate) is_tls: bool,
    pub(crate) stream: Arc<StreamState>,
    accepted: Instant,
    /// Number of requests without a complete response, except those whose client has to read a part of it.
    open_requests: AtomicUsize,
    /// Number of requests without a complete response.
    unfinished_requests: AtomicUsize,
    /// Milliseconds from `accepted` to the end of the last use, rounded up. 0 if there is none. A use ends when a request ends or
    /// begins to wait for its client, and with each part of an upload that continues after that.
    last_end: AtomicU64,
    _open: OpenConnection,
}

/// Counts a connection as open until it is dropped.
pub(crate) struct OpenConnection {
    _gauge: telemetry::OpenConnectionGauge,
    _permit: OwnedSemaphorePermit,
}

impl OpenConnection {
    pub(crate) fn new(permit: OwnedSemaphorePermit) -> Self {
        Self {
            _gauge: telemetry::OpenConnectionGauge::new(),
            _permit: permit,
        }
    }
}

/// A request that counts as open until it is dropped, except while it waits for its client.
pub(crate) struct OpenRequest {
    connection: Arc<Connection>,
    waits_for_client: bool,
}

impl OpenRequest {
    /// Stops counting the request as open, until its client has read a part of the response.
    pub(crate) fn wait_for_client(&mut self) {
        if !mem::replace(&mut self.waits_for_client, true) {
            self.connection.end_request();
        }
    }

    /// Counts the request as open again.
    pub(crate) fn resume(&mut self) {
        if mem::take(&mut self.waits_for_client) {
            self.connection
                .open_requests
                .fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.wait_for_client();
        let unfinished = &self.connection.unfinished_requests;
        unfinished.fetch_sub(1, Ordering::Release);
    }
}

impl Connection {
    pub(crate) fn new(peer: SocketAddr, is_tls: bool, open: OpenConnection) -> Arc<Self> {
        let address = HeaderValue::try_from(peer.ip().to_canonical().to_string());
        Arc::new(Self {
            address: address.expect("an address has digits, dots and colons"),
            is_tls,
            stream: StreamState::new(),
            accepted: Instant::now(),
            open_requests: AtomicUsize::new(0),
            unfinished_requests: AtomicUsize::new(0),
            last_end: AtomicU64::new(0),
            _open: open,
        })
    }

    /// Counts a request as open.
    pub(crate) fn begin_request(self: &Arc<Self>) -> OpenRequest {
        self.open_requests.fetch_add(1, Ordering::Relaxed);
        self.unfinished_requests.fetch_add(1, Ordering::Relaxed);
        OpenRequest {
            connection: Arc::clone(self),
            waits_for_client: false,
        }
    }

    /// Counts a part of an upload as a use. While a request is open, it changes nothing.
    pub(crate) fn count_upload(&self) {
        if self.open_requests.load(Ordering::Relaxed) == 0 {
            self.set_last_end();
        }
    }

    fn end_request(&self) {
        self.set_last_end();
        self.open_requests.fetch_sub(1, Ordering::Release);
    }

    fn set_last_end(&self) {
        let elapsed = u64::try_from(self.accepted.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_end
            .fetch_max(elapsed.saturating_add(1), Ordering::Relaxed);
    }

    /// Restarts the time of [`unused`](Self::unused), unless it is that for the first request.
    fn restart_idle_time(&self) {
        if self.last_end.load(Ordering::Relaxed) > 0 {
            self.set_last_end();
        }
    }

    /// Resolves when the connection has had no open request and no upload for the time `idle`. Resolves with `false` if no
    /// request has arrived since `began`, after at least [`FIRST_REQUEST`].
    ///
    /// A response that its client does not read keeps no request open.
    ///
    /// Looks at the requests when a timer fires, at the latest after `idle`. So a request wakes no task and sets no timer.
    async fn unused(&self, began: Instant, idle: Duration) -> bool {
        loop {
            let now = Instant::now();
            let is_open = self.open_requests.load(Ordering::Acquire) > 0;
            let last_end = self.last_end.load(Ordering::Relaxed);
            let deadline = match last_end {
                _ if is_open => now + idle,
                0 => began + FIRST_REQUEST.max(idle),
                _ => self.accepted + Duration::from_millis(last_end) + idle,
            };
            if deadline <= now {
                return last_end > 0;
            }
            sleep_until(deadline.min(now + idle)).await;
        }
    }

    /// Resolves if the client sends nothing while the connection shuts down. Never resolves for HTTP/1.
    ///
    /// Before that, it looks twice, [`LAST_READ`] apart. Both times, no response is incomplete, and the proxy has written all bytes
    /// that the windows of the client allow.
    ///
    /// The shutdown of HTTP/2 begins with a ping, and hyper waits for the reply. HTTP/1 needs no reply of the client.
    async fn vanished(&self) {
        let reads = self.stream.reads();
        let mut was_written = self.is_written();
        loop {
            sleep(LAST_READ).await;
            if !self.stream.lengths.is_http2() || self.stream.reads() != reads {
                return pending().await;
            }
            // The client has the time again after the last bytes. It may read them late, and its reply comes after them.
            let is_written = self.is_written();
            if was_written && is_written {
                return;
            }
            was_written = is_written;
        }
    }

    /// Returns `true` if no response is incomplete, and no byte waits until the client reads.
    fn is_written(&self) -> bool {
        let unfinished = self.unfinished_requests.load(Ordering::Acquire);
        unfinished == 0 && !self.stream.is_blocked()
    }
}

/// Serves a connection until it is closed. `closing` lets its open requests finish, and accepts no others.
pub(crate) async fn serve(
    shared: Arc<Shared>,
    stream: TcpStream,
    peer: SocketAddr,
    open: OpenConnection,
    closing: CancellationToken,
) {
    // A failure affects only the latency.
    let _ = stream.set_nodelay(true);
    // The rest of the configuration is not held: a reload may replace it while the connection is open.
    let tls = shared.live.load().tls.clone();
    let connection = Connection::new(peer, tls.is_some(), open);
    let Some(config) = tls else {
        return serve_stream(shared, stream, connection, closing).await;
    };
    let accepting = timeout(FIRST_REQUEST, TlsAcceptor::from(config).accept(stream));
    let accepted = tokio::select! {
        biased;
        accepted = accepting => accepted,
        // There is no request yet.
        () = closing.cancelled() => return,
    };
    match accepted {
        Ok(Ok(stream)) => serve_stream(shared, stream, connection, closing).await,
        Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => tracing::debug!("TLS handshake timed out"),
    }
}

async fn serve_stream(
    shared: Arc<Shared>,
    stream: impl Transport,
    connection: Arc<Connection>,
    closing: CancellationToken,
) {
    let idle = shared
        .live
        .load()
        .config
        .listen
        .idle_timeout
        .get_ref()
        .get();
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        // `unused` limits the time of a head. hyper would set a timer for each one.
        .header_read_timeout(None::<Duration>)
        // A head has at most 100 lines by default. hyper parses it faster if the number is not set.
        .max_buf_size(MAX_HEAD_BYTES as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEAD_BYTES)
        .max_send_buf_size(MAX_SEND_BUFFER)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        .max_local_error_reset_streams(MAX_ERROR_RESETS)
        .keep_alive_interval(PING_PERIOD)
        .keep_alive_timeout(PING_PERIOD);
    let stream = ClientStream::new(stream, Arc::clone(&connection.stream));
    let service = {
        let connection = Arc::clone(&connection);
        service_fn(move |req| service::respond(Arc::clone(&shared), Arc::clone(&connection), req))
    };
    let mut served =
        std::pin::pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let began = Instant::now();
    let mut has_request = tokio::select! {
        // A request that has arrived is served before the connection closes.
        biased;
        served = served.as_mut() => return report(served),
        () = closing.cancelled() => true,
        has_request = connection.unused(began, idle) => has_request,
    };
    if has_request {
        served.as_mut().graceful_shutdown();
        connection.restart_idle_time();
        has_request = tokio::select! {
            biased;
            served = served.as_mut() => return report(served),
            // A drain waits for the rest of the first head. A client has the idle time again to read a response, or to send a
            // part of an upload.
            has_request = connection.unused(began, idle.max(LAST_READ)) => has_request,
            () = connection.vanished() => {
                tracing::debug!("connection closed: client vanished");
                return;
            }
        };
    }
    if has_request {
        tracing::debug!("connection closed: response or upload incomplete");
    } else {
        tracing::debug!("connection closed: no request arrived");
    }
}

fn report(served: Result<(), Box<dyn std::error::Error + Send + Sync>>) {
    if let Err(error) = served {
        tracing::debug!(%error, "connection failed");
    }
}

#[cfg(test)]
mod tests;
