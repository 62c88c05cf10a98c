//! A connection of a client: TLS, HTTP/1.1 or HTTP/2, and its limits.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::Watcher},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use crate::{headers::ClientConnection, proxy::Shared, service, telemetry::OpenConnection};

/// Time for the TLS handshake. Also the minimum time for the first request of a connection.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
const MAX_HEADERS: usize = 100;
const MAX_HEAD_BYTES: u32 = 64 * 1024;
const MAX_STREAMS: u32 = 256;
/// The connection is closed if its client resets more streams before the proxy has accepted them.
const MAX_PENDING_RESETS: usize = 20;
const MAX_ERROR_RESETS: usize = 1024;
/// An HTTP/2 connection is closed if its client does not reply to pings, after at most twice this time.
const PING_PERIOD: Duration = Duration::from_secs(20);

pub(crate) async fn serve(
    shared: Arc<Shared>,
    stream: TcpStream,
    peer: SocketAddr,
    watcher: Watcher,
) {
    let _open = OpenConnection::new();
    // A failure affects only the latency.
    let _ = stream.set_nodelay(true);
    let live = shared.live.load_full();
    let client = |is_tls| ClientConnection {
        address: peer.ip().to_canonical(),
        is_tls,
        forwarded: live.config.listen.forwarded,
    };
    match &live.tls {
        None => serve_stream(Arc::clone(&shared), stream, client(false), watcher).await,
        Some(config) => {
            let acceptor = TlsAcceptor::from(Arc::clone(config));
            match timeout(FIRST_REQUEST, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => {
                    serve_stream(Arc::clone(&shared), stream, client(true), watcher).await;
                }
                Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
                Err(_) => tracing::debug!("TLS handshake timed out"),
            }
        }
    }
}

async fn serve_stream(
    shared: Arc<Shared>,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    client: ClientConnection,
    watcher: Watcher,
) {
    let idle = shared.live.load().config.listen.idle_timeout.get();
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(idle)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD_BYTES as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD_BYTES)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        .max_local_error_reset_streams(MAX_ERROR_RESETS)
        .keep_alive_interval(PING_PERIOD)
        .keep_alive_timeout(PING_PERIOD);
    let has_request = Arc::new(AtomicBool::new(false));
    let service = {
        let has_request = Arc::clone(&has_request);
        service_fn(move |req| {
            has_request.store(true, Ordering::Relaxed);
            service::respond(Arc::clone(&shared), client, req)
        })
    };
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    let connection = watcher.watch(connection.into_owned());
    // The timeouts of hyper begin once the version is known.
    let no_request = async {
        sleep(FIRST_REQUEST.max(idle)).await;
        if has_request.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        served = connection => {
            if let Err(error) = served {
                tracing::debug!(%error, "connection failed");
            }
        }
        () = no_request => tracing::debug!("connection closed: no request arrived"),
    }
}
