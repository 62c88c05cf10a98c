//! A connection of a client: TLS, HTTP/1.1 or HTTP/2, and its limits.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::{OwnedSemaphorePermit, watch},
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::{
    lengths::{CheckedStream, LengthCheck},
    proxy::Shared,
    service, telemetry,
};

/// Time for the TLS handshake. Also the minimum time for the first request of a connection.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
const MAX_HEADERS: usize = 100;
const MAX_HEAD_BYTES: u32 = 64 * 1024;
const MAX_STREAMS: u32 = 256;
/// Bytes of an upload that the proxy reads before the upstream does. An upload that the upstream does not read delays no other
/// stream until there are 16 of them.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 4 * 1024 * 1024;
/// The connection is closed if its client resets more streams before the proxy has accepted them.
const MAX_PENDING_RESETS: usize = 20;
const MAX_ERROR_RESETS: usize = 1024;
/// An HTTP/2 connection is closed if its client does not reply to pings, after at most twice this time.
const PING_PERIOD: Duration = Duration::from_secs(20);

/// A connection of a client, without its stream.
pub(crate) struct Connection {
    pub(crate) address: IpAddr,
    pub(crate) is_tls: bool,
    pub(crate) open: Arc<OpenConnection>,
    pub(crate) lengths: Arc<LengthCheck>,
    /// Number of requests without a complete response.
    requests: watch::Sender<usize>,
}

/// Counts a connection as open, until its tunnel is closed too.
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

/// A request that counts as open until it is dropped.
pub(crate) struct OpenRequest(Arc<Connection>);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.requests.send_modify(|open| *open -= 1);
    }
}

impl Connection {
    /// Counts a request as open.
    pub(crate) fn begin_request(self: &Arc<Self>) -> OpenRequest {
        self.requests.send_modify(|open| *open += 1);
        OpenRequest(Arc::clone(self))
    }

    /// Resolves when the connection has had no open request for this time. Resolves with `false` if no request has arrived
    /// at all. `open` is a receiver of `requests` from before the first request.
    async fn unused(mut open: watch::Receiver<usize>, idle: Duration) -> bool {
        let first = timeout(FIRST_REQUEST.max(idle), open.changed()).await;
        if first.is_err() {
            return false;
        }
        loop {
            let is_idle = *open.borrow_and_update() == 0;
            if !is_idle {
                let _ = open.changed().await;
            } else if timeout(idle, open.changed()).await.is_err() {
                return true;
            }
        }
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
    let live = shared.live.load_full();
    let connection = Arc::new(Connection {
        address: peer.ip().to_canonical(),
        is_tls: live.tls.is_some(),
        open: Arc::new(open),
        lengths: LengthCheck::new(),
        requests: watch::Sender::new(0),
    });
    let tls = live.tls.clone();
    // A reload replaces the configuration while the connection is open.
    drop(live);
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
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
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
        .timer(TokioTimer::new())
        // The first head has this time. `unused` closes a connection that is idle for less.
        .header_read_timeout(FIRST_REQUEST.max(idle))
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD_BYTES as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEAD_BYTES)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        .max_local_error_reset_streams(MAX_ERROR_RESETS)
        .keep_alive_interval(PING_PERIOD)
        .keep_alive_timeout(PING_PERIOD);
    let open = connection.requests.subscribe();
    let stream = CheckedStream::new(stream, Arc::clone(&connection.lengths));
    let service = {
        let connection = Arc::clone(&connection);
        service_fn(move |req| service::respond(Arc::clone(&shared), Arc::clone(&connection), req))
    };
    let mut served =
        std::pin::pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let close = async {
        tokio::select! {
            () = closing.cancelled() => true,
            has_request = Connection::unused(open, idle) => has_request,
        }
    };
    tokio::select! {
        // A request that has arrived is served before the connection closes.
        biased;
        served = served.as_mut() => return report(served),
        has_request = close => {
            if !has_request {
                tracing::debug!("connection closed: no request arrived");
                return;
            }
        }
    }
    served.as_mut().graceful_shutdown();
    report(served.await);
}

fn report(served: Result<(), Box<dyn std::error::Error + Send + Sync>>) {
    if let Err(error) = served {
        tracing::debug!(%error, "connection failed");
    }
}
