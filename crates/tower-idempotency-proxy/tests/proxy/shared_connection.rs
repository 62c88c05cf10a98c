//! The connections to an upstream with HTTP/2, which many requests share.

mod limits;
mod resets;

use std::{
    convert::Infallible,
    future::poll_fn,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Router, body::Body, routing::get};
use bytes::Bytes;
use futures_util::{StreamExt, future::join_all};
use h2::{Reason, RecvStream, server::SendResponse};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use tests::{
    barrier::{Barrier, bounded, eventually},
    scratch::Scratch,
    servers::certificates::Certificates,
    wire::{H1, Server},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{Notify, oneshot},
    task::JoinHandle,
    time::sleep,
};

use crate::harness::{Reply, Served, config, exchange, pay_twice, post, post_with, tls_acceptor};

/// An upstream with HTTP/2. A connection on which a request with one of these numbers arrives replies no more.
async fn upstream(hanging: &'static [usize], max_streams: u32) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&requests);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let requests = Arc::clone(&counted);
            tokio::spawn(async move {
                let mut builder = h2::server::Builder::new();
                builder.max_concurrent_streams(max_streams);
                let mut connection = builder.handshake::<_, Bytes>(stream).await.unwrap();
                while let Some(Ok((_request, mut respond))) = connection.accept().await {
                    let number = requests.fetch_add(1, Ordering::SeqCst);
                    if hanging.contains(&number) {
                        std::future::pending::<()>().await;
                    }
                    let response = Response::builder().status(201).body(()).unwrap();
                    respond.send_response(response, true).unwrap();
                }
            });
        }
    });
    (address, requests)
}

#[tokio::test]
async fn connection_without_replies_is_not_used_again() {
    let (address, requests) = upstream(&[0], 100).await;
    let lines = "http2 = true\ntimeout = \"5s\"";
    let proxy = Served::start(&config(address, lines, "")).await;
    let reply = exchange(proxy.address, post("/pay", "a", "1")).await;
    assert_eq!(reply.status(), 504, "{reply:?}");
    let reply = exchange(proxy.address, post("/pay", "b", "1")).await;
    assert_eq!(reply.status(), 201, "{reply:?}");
    assert_eq!(requests.load(Ordering::SeqCst), 2);
}

/// Above the limit hyper would queue the request, and a timeout of an unsent request would be an unknown outcome.
#[tokio::test]
async fn stream_limit_opens_another_connection() {
    let (address, requests) = upstream(&[1], 1).await;
    let lines = "http2 = true\ntimeout = \"20s\"";
    let proxy = Served::start(&config(address, lines, "")).await;
    // With its reply the proxy has the limit of the connection.
    let reply = exchange(proxy.address, post("/pay", "a", "1")).await;
    assert_eq!(reply.status(), 201, "{reply:?}");
    let hanging = tokio::spawn(exchange(proxy.address, post("/pay", "b", "1")));
    eventually("the request hangs", || requests.load(Ordering::SeqCst) == 2).await;
    for key in ["c", "d"] {
        let reply = exchange(proxy.address, post("/pay", key, "1")).await;
        assert_eq!(reply.status(), 201, "{reply:?}");
    }
    assert!(!hanging.is_finished());
    hanging.abort();
}

/// Each request waits for its own timeout, and not for those of the requests before it.
#[tokio::test]
async fn unreachable_upstream_delays_no_line() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    // The kernel drops further connections when the queue is full.
    let queued: Vec<_> = (0..8)
        .map(|_| tokio::spawn(TcpStream::connect(address)))
        .collect();
    eventually("the queue is full", || {
        queued.iter().filter(|task| task.is_finished()).count() >= 2
    })
    .await;
    let lines = "http2 = true\nconnect_timeout = \"500ms\"";
    let proxy = Served::start(&config(address, lines, "")).await;
    let began = Instant::now();
    let requests = (0..120).map(|n| {
        let request = post("/pay", &format!("k{n}"), "1");
        exchange(proxy.address, request)
    });
    for reply in bounded(join_all(requests)).await {
        assert!(reply.is_problem("upstream-unreachable"), "{reply:?}");
    }
    // One after the other, they take 60 s.
    assert!(
        began.elapsed() < Duration::from_secs(30),
        "{:?}",
        began.elapsed()
    );
    for task in queued {
        task.abort();
    }
}

/// Streams that their client does not read. Together their windows exceed the default window of the connection, 5 MiB.
const UNREAD: usize = 64;
const PIECE: usize = 64 * 1024;
const PIECES: usize = 8;

/// A client that does not read fills the windows of its streams, and not that of the connection.
#[tokio::test]
async fn client_that_does_not_read_delays_only_itself() {
    let sent = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&sent);
    let large = move || {
        let counted = Arc::clone(&counted);
        async move {
            let pieces = futures_util::stream::iter(0..PIECES).map(move |_| {
                counted.fetch_add(1, Ordering::SeqCst);
                Ok::<_, Infallible>(Bytes::from_static(&[b'x'; PIECE]))
            });
            Body::from_stream(pieces)
        }
    };
    let app = Router::new().route("/open/large", get(large));
    let server = Server::start(app).await;
    let proxy = Served::start(&config(server.addr(), "http2 = true", "")).await;
    let stream = TcpStream::connect(proxy.address).await.unwrap();
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(0);
    let (mut sender, connection) = builder.handshake::<_, Bytes>(stream).await.unwrap();
    tokio::spawn(connection);
    let mut unread = Vec::new();
    for _ in 0..UNREAD {
        sender = sender.ready().await.unwrap();
        let request = Request::get("http://a/open/large").body(()).unwrap();
        let (response, _) = sender.send_request(request, true).unwrap();
        unread.push(bounded(response).await.unwrap());
    }
    // Each window has 4 pieces.
    eventually("the windows of the streams are filled", || {
        sent.load(Ordering::SeqCst) >= 3 * UNREAD
    })
    .await;
    for _ in 0..3 {
        let request = "GET /open/large HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
        let reply = exchange(proxy.address, request).await;
        let (_, body) = reply.0.split_once("\r\n\r\n").unwrap();
        assert_eq!(body.matches('x').count(), PIECES * PIECE);
    }
    assert!(sent.load(Ordering::SeqCst) < (UNREAD + 3) * PIECES);
    drop(unread);
}

/// Pieces of a response that exceeds all buffers of its stream.
const MANY_PIECES: usize = 16;
/// Bytes of a response that the upstream may send while the client does not read. These are the window of the stream, and twice
/// the other buffers of the proxy (64 KiB + 2 frames x 16 KiB).
const MAX_UNREAD: usize = (256 + 2 * 96) * 1024;
/// More bytes than the sockets of a connection hold.
const SOCKETS: usize = 8 << 20;
/// The largest window of HTTP/2 (RFC 9113, section 6.9.1).
const MAX_WINDOW: u32 = (1 << 31) - 1;

/// The windows of the client limit nothing, and the client does not read its socket.
#[tokio::test]
async fn unread_responses_take_limited_memory() {
    let upstream = Payments::new(Barrier::closed());
    let proxy = Served::start(&config(upstream.start().await, "http2 = true", "")).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(64 * 1024).unwrap();
    let stream = socket.connect(proxy.address).await.unwrap();
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(MAX_WINDOW)
        .initial_connection_window_size(MAX_WINDOW);
    let (sender, connection) = builder.handshake::<_, Bytes>(stream).await.unwrap();
    let requests = async {
        let (mut sender, mut responses) = (sender, Vec::new());
        for _ in 0..UNREAD {
            sender = sender.ready().await.unwrap();
            let request = Request::get("http://a/open/pieces").body(()).unwrap();
            responses.push(sender.send_request(request, true).unwrap());
        }
        for _ in 0..UNREAD {
            upstream.barrier.arrival().await;
        }
        (sender, responses)
    };
    let mut connection = Box::pin(connection);
    let _unread = tokio::select! {
        ended = connection.as_mut() => panic!("the connection ended: {ended:?}"),
        unread = bounded(requests) => unread,
    };
    // The connection stays open, and its socket is not read from here on.
    upstream.barrier.release(UNREAD);
    let sent = || upstream.sent.load(Ordering::SeqCst);
    // Each window has 4 pieces.
    eventually("the windows are filled", || sent() >= 4 * UNREAD).await;
    let mut before = 0;
    while before != sent() {
        before = sent();
        sleep(Duration::from_millis(500)).await;
    }
    let bytes = sent() * PIECE;
    assert!(bytes <= UNREAD * MAX_UNREAD + SOCKETS, "{bytes}");
    drop(connection);
}

/// The window of a connection, and of each of its streams (RFC 9113, section 6.9.2).
const WINDOW: usize = 65_535;

/// Largest head of a request that the upstream reads, in bytes.
const MAX_HEAD: u32 = 16 * 1024;

/// An upstream with HTTP/2 that passes the barrier before it counts a payment. Clones share the counters.
#[derive(Clone)]
struct Payments {
    barrier: Barrier,
    executed: Arc<AtomicUsize>,
    /// Bytes of uploads that have arrived, and that stay in the windows.
    unread: Arc<AtomicUsize>,
    /// Pieces of responses that fit into the windows of the proxy.
    sent: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
    /// Streams that the proxy has reset. The first one ends its connection.
    resets: Arc<AtomicUsize>,
}

impl Payments {
    fn new(barrier: Barrier) -> Self {
        Self {
            barrier,
            executed: Arc::default(),
            unread: Arc::default(),
            sent: Arc::default(),
            connections: Arc::default(),
            resets: Arc::default(),
        }
    }

    /// Accepts connections in a task.
    async fn start(&self) -> SocketAddr {
        self.start_with(100).await
    }

    /// Like [`start`](Self::start), with this limit of the streams of a connection.
    async fn start_with(&self, max_streams: u32) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let upstream = self.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(upstream.clone().serve(stream, max_streams));
            }
        });
        address
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin, max_streams: u32) {
        let mut builder = h2::server::Builder::new();
        builder
            .max_concurrent_streams(max_streams)
            .max_header_list_size(MAX_HEAD);
        let mut connection = builder.handshake::<_, Bytes>(stream).await.unwrap();
        self.connections.fetch_add(1, Ordering::SeqCst);
        let reset = Arc::new(Notify::new());
        loop {
            let accepted = tokio::select! {
                accepted = connection.accept() => accepted,
                () = reset.notified() => {
                    connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                    continue;
                }
            };
            let Some(Ok((request, respond))) = accepted else {
                return;
            };
            let response = self.clone().respond(request, respond, Arc::clone(&reset));
            tokio::spawn(response);
        }
    }

    async fn respond(
        self,
        request: Request<RecvStream>,
        mut respond: SendResponse<Bytes>,
        reset: Arc<Notify>,
    ) {
        let (head, mut body) = request.into_parts();
        match head.uri.path() {
            "/open/upload" | "/stuck" => {
                while let Some(Ok(data)) = body.data().await {
                    self.unread.fetch_add(data.len(), Ordering::SeqCst);
                }
            }
            "/open/large" => {
                let mut response = Response::new(());
                for _ in 0..100 {
                    let value = "x".repeat(20_000).parse().unwrap();
                    response.headers_mut().append("x-large", value);
                }
                respond.send_response(response, true).unwrap();
            }
            "/open/pieces" => {
                self.barrier.pass().await;
                let mut response = respond.send_response(Response::new(()), false).unwrap();
                for number in 1..=MANY_PIECES {
                    response.reserve_capacity(PIECE);
                    while response.capacity() < PIECE {
                        let capacity = poll_fn(|cx| response.poll_capacity(cx)).await;
                        let Some(Ok(_)) = capacity else { return };
                    }
                    let piece = Bytes::from_static(&[b'x'; PIECE]);
                    let is_last = number == MANY_PIECES;
                    response.send_data(piece, is_last).unwrap();
                    self.sent.fetch_add(1, Ordering::SeqCst);
                }
            }
            "/events" => self.send_event(respond, &reset).await,
            "/download" => self.send_download(respond).await,
            "/hang" => {
                let is_reset = poll_fn(|cx| respond.poll_reset(cx)).await.is_ok();
                self.count_reset(is_reset, &reset);
            }
            _ => {
                while let Some(Ok(data)) = body.data().await {
                    body.flow_control().release_capacity(data.len()).unwrap();
                }
                self.barrier.pass().await;
                self.executed.fetch_add(1, Ordering::SeqCst);
                let response = Response::builder().status(201).body(()).unwrap();
                respond.send_response(response, true).unwrap();
            }
        }
    }
}

/// An upload that the upstream does not read uses up the window of its connection.
#[tokio::test]
async fn unread_upload_delays_no_leased_request() {
    const UPLOAD: usize = 256 * 1024;
    let upstream = Payments::new(Barrier::open());
    let lines = "http2 = true\ntimeout = \"20s\"";
    let proxy = Served::start(&config(upstream.start().await, lines, "")).await;
    let mut client = H1::connect(proxy.address).await;
    let head = format!("POST /open/upload HTTP/1.1\r\nhost: a\r\ncontent-length: {UPLOAD}\r\n\r\n");
    client.send(head).await;
    let upload = tokio::spawn(async move {
        client.send(vec![b'x'; UPLOAD]).await;
        client.response().await
    });
    eventually("the window of the connection is full", || {
        upstream.unread.load(Ordering::SeqCst) == WINDOW
    })
    .await;
    pay_twice(proxy.address, 201).await;
    assert_eq!(upstream.executed.load(Ordering::SeqCst), 1);
    upload.abort();
}

/// Starts a proxy, and a payment that its upstream does not finish until the barrier opens.
async fn start_payment() -> (Payments, Served, JoinHandle<Reply>) {
    let upstream = Payments::new(Barrier::closed());
    let proxy = Served::start(&config(upstream.start().await, "http2 = true", "")).await;
    let payment = tokio::spawn(exchange(proxy.address, post("/pay", "k", "1")));
    bounded(upstream.barrier.arrival()).await;
    (upstream, proxy, payment)
}

/// Lets the payment end. Its response is recorded, and no other payment is executed.
async fn finish_payment(upstream: &Payments, proxy: &Served, payment: JoinHandle<Reply>) {
    upstream.barrier.release(1);
    let reply = bounded(payment).await.unwrap();
    assert_eq!(reply.status(), 201, "{reply:?}");
    let retry = exchange(proxy.address, post("/pay", "k", "1")).await;
    assert!(retry.is_replay(), "{retry:?}");
    assert_eq!(upstream.executed.load(Ordering::SeqCst), 1);
}

/// HTTP/2 ends all streams of a connection if a head is too large by far.
#[tokio::test]
async fn large_head_breaks_no_leased_request() {
    let (upstream, proxy, payment) = start_payment().await;
    let request = "GET /open/large HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    let reply = exchange(proxy.address, request).await;
    assert_eq!(reply.status(), 502, "{reply:?}");
    finish_payment(&upstream, &proxy, payment).await;
}

/// Returns lines of 50,000 bytes, which HTTP/2 does not compress. The proxy accepts them, and the upstream ends their connection.
fn large_lines() -> HeaderMap {
    let lines = (0..10).map(|number| {
        let name = HeaderName::try_from(format!("x-{number}")).unwrap();
        let value = HeaderValue::try_from("{|}~^".repeat(1_000)).unwrap();
        (name, value)
    });
    lines.collect()
}

#[tokio::test]
async fn large_request_breaks_no_leased_request() {
    let (upstream, proxy, payment) = start_payment().await;

    let lines = large_lines();
    let lines = lines
        .iter()
        .map(|(name, value)| format!("{name}: {}\r\n", value.to_str().unwrap()));
    let head = post_with("/pay", "head", &lines.collect::<String>(), "1");
    let reply = exchange(proxy.address, head).await;
    assert_eq!(reply.status(), 502, "{reply:?}");

    let stream = TcpStream::connect(proxy.address).await.unwrap();
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut sender = sender.ready().await.unwrap();
    let request = Request::post("http://a/pay").header("idempotency-key", "trailers");
    let request = request.body(()).unwrap();
    let (response, mut body) = sender.send_request(request, false).unwrap();
    body.send_data(Bytes::from_static(b"1"), false).unwrap();
    body.send_trailers(large_lines()).unwrap();
    let response = bounded(response).await.unwrap();
    assert_eq!(response.status(), 502);

    finish_payment(&upstream, &proxy, payment).await;
}

/// A request waits for a connection that does not open. The open connection has room again, and serves the next request.
#[tokio::test]
async fn connecting_request_delays_no_other() {
    let scratch = Scratch::new();
    let certificates = Certificates::make(scratch.path());
    let acceptor = tls_acceptor(&certificates, b"h2");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let upstream = Payments::new(Barrier::closed());
    let served = upstream.clone();
    let (accepted, second) = oneshot::channel();
    tokio::spawn(async move {
        let (first, _) = listener.accept().await.unwrap();
        let first = acceptor.accept(first).await.unwrap();
        tokio::spawn(served.serve(first, 1));
        // The TLS handshake of the second connection never ends.
        let (second, _) = listener.accept().await.unwrap();
        accepted.send(second).unwrap();
    });
    let ca = certificates.ca().display();
    let lines = format!("http2 = true\nconnect_timeout = \"60s\"\nca_file = \"{ca}\"");
    let text = config(address, &lines, "").replace("http://", "https://");
    let proxy = Served::start(&text).await;
    let pay = |key| tokio::spawn(exchange(proxy.address, post("/pay", key, "1")));
    // With this reply the proxy has the limit of the connection.
    upstream.barrier.release(1);
    let reply = bounded(pay("a")).await.unwrap();
    assert_eq!(reply.status(), 201, "{reply:?}");
    bounded(upstream.barrier.arrival()).await;
    let executing = pay("b");
    bounded(upstream.barrier.arrival()).await;
    let connecting = pay("c");
    let _second = bounded(second).await.unwrap();
    upstream.barrier.release(2);
    let reply = bounded(executing).await.unwrap();
    assert_eq!(reply.status(), 201, "{reply:?}");
    let reply = bounded(pay("d")).await.unwrap();
    assert_eq!(reply.status(), 201, "{reply:?}");
    assert!(!connecting.is_finished());
    assert_eq!(upstream.executed.load(Ordering::SeqCst), 3);
    connecting.abort();
}
