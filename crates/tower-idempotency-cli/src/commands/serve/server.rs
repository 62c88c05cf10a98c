//! The HTTP server of the console. Its limits bound the connections of clients that send or read nothing.

use std::{pin::pin, time::Duration};

use axum::{Router, extract::ConnectInfo, serve::Listener};
use hyper::{
    Request,
    body::Incoming,
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};

use super::authentication::PeerStream;

/// Largest number of open connections. A further client waits until one of them is closed.
const MAX_CONNECTIONS: usize = 500;
/// Longest time until the head of the next request is complete. Then the connection is closed.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Time after which a connection accepts no further request.
const MAX_AGE: Duration = Duration::from_secs(600);
/// Longest time of the last response of a connection. An event stream takes five minutes.
const LAST_RESPONSE: Duration = Duration::from_secs(360);
/// Time that open requests have to end after the signal.
const GRACE: Duration = Duration::from_secs(5);

/// Serves until `stopped` is `true`. Open requests then have five seconds to end.
pub(super) async fn serve<L>(mut listener: L, app: Router, mut stopped: watch::Receiver<bool>)
where
    L: Listener<Io: PeerStream>,
{
    let connection_stopped = stopped.clone();
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = stopped.wait_for(|stopped| *stopped) => break,
            // Removes a connection that has ended.
            Some(_) = connections.join_next() => {}
            (stream, _) = listener.accept(), if connections.len() < MAX_CONNECTIONS => {
                connections.spawn(serve_connection(stream, app.clone(), connection_stopped.clone()));
            }
        }
    }
    drop(listener);
    let ended = async { while connections.join_next().await.is_some() {} };
    timeout(GRACE, ended).await.ok();
}

/// Serves the requests of a connection.
async fn serve_connection<S>(stream: S, app: Router, mut stopped: watch::Receiver<bool>)
where
    S: PeerStream + AsyncRead + AsyncWrite + Unpin,
{
    let peer = stream.peer();
    let app = TowerToHyperService::new(app);
    let service = service_fn(move |mut req: Request<Incoming>| {
        req.extensions_mut().insert(ConnectInfo(peer));
        app.call(req)
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        // An error comes from the client, which left or sent an invalid request.
        _ = connection.as_mut() => return,
        _ = stopped.wait_for(|stopped| *stopped) => {}
        () = sleep(MAX_AGE) => {}
    }
    connection.as_mut().graceful_shutdown();
    timeout(LAST_RESPONSE, connection).await.ok();
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        future::pending,
        io,
        sync::{Arc, Mutex},
    };

    use axum::{body::Body, routing::get};
    use bytes::Bytes;
    use futures_util::stream;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
        sync::{mpsc, oneshot},
        time::Instant,
    };

    use super::*;
    use crate::commands::serve::authentication::Peer;

    /// A listener whose connections are in memory, so that the clock can be paused.
    struct InMemory(mpsc::UnboundedReceiver<DuplexStream>);

    impl Listener for InMemory {
        type Io = DuplexStream;
        type Addr = ();

        async fn accept(&mut self) -> (DuplexStream, ()) {
            match self.0.recv().await {
                Some(stream) => (stream, ()),
                None => pending().await,
            }
        }

        fn local_addr(&self) -> io::Result<()> {
            Ok(())
        }
    }

    impl PeerStream for DuplexStream {
        fn peer(&self) -> Peer {
            Peer(None)
        }
    }

    /// A running server.
    struct Running {
        connections: mpsc::UnboundedSender<DuplexStream>,
        // The server ends with the sender.
        _stop: watch::Sender<bool>,
    }

    impl Running {
        fn start(app: Router) -> Self {
            let (connections, accepted) = mpsc::unbounded_channel();
            let (stop, stopped) = watch::channel(false);
            tokio::spawn(serve(InMemory(accepted), app, stopped));
            Self {
                connections,
                _stop: stop,
            }
        }

        /// Opens a connection, and sends these bytes.
        async fn connect(&self, sent: &[u8]) -> DuplexStream {
            let (mut client, server) = duplex(64 * 1024);
            self.connections.send(server).expect("it accepts");
            client.write_all(sent).await.expect("it is open");
            client
        }
    }

    fn hello() -> Router {
        Router::new().route("/", get(async || "hello"))
    }

    #[tokio::test(start_paused = true)]
    async fn unresponsive_connection_is_closed() {
        let server = Running::start(hello());
        for sent in [&b""[..], b"GET / HTTP/1.1\r\nhost", REQUEST] {
            let mut client = server.connect(sent).await;
            let began = Instant::now();
            let mut received = Vec::new();
            client.read_to_end(&mut received).await.ok();
            assert!(began.elapsed() < MAX_AGE, "{:?}", began.elapsed());
            assert_eq!(received.ends_with(b"hello"), sent == REQUEST);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn open_connections_are_limited() {
        let server = Running::start(hello());
        let mut unresponsive = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            unresponsive.push(server.connect(b"").await);
        }
        let began = Instant::now();
        let mut client = server.connect(REQUEST).await;
        client.read_u8().await.expect("a response");
        assert!(began.elapsed() >= HEAD_TIMEOUT, "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn event_stream_outlives_head_timeout() {
        let app = Router::new().route("/", get(async || Body::from_stream(events(5))));
        let server = Running::start(app);
        let mut client = server.connect(REQUEST).await;
        let mut received = String::new();
        client.read_to_string(&mut received).await.expect("text");
        assert_eq!(received.matches("event").count(), 5, "{received}");
        assert!(received.ends_with("\r\n0\r\n\r\n"), "{received}");
    }

    #[tokio::test(start_paused = true)]
    async fn unread_response_ends() {
        let (dropped, ended) = oneshot::channel::<()>();
        let dropped = Arc::new(Mutex::new(Some(dropped)));
        let app = Router::new().route(
            "/",
            get(move || async move {
                let dropped = dropped.lock().expect("no panic").take();
                let endless = stream::unfold(dropped, async |dropped| {
                    let event = Bytes::from_static(&[b'x'; 4096]);
                    Some((Ok::<_, Infallible>(event), dropped))
                });
                Body::from_stream(endless)
            }),
        );
        let server = Running::start(app);
        let _client = server.connect(REQUEST).await;
        let ended = timeout(MAX_AGE * 2, ended).await;
        ended.expect("it ends").expect_err("nothing is sent");
    }

    /// Returns events, one a minute.
    fn events(count: u64) -> impl stream::Stream<Item = Result<&'static str, Infallible>> {
        stream::unfold(0, move |sent| async move {
            if sent == count {
                return None;
            }
            sleep(Duration::from_secs(60)).await;
            Some((Ok("event\n"), sent + 1))
        })
    }

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
}
