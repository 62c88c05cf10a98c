//! The connections to an upstream with HTTP/2, which many requests share.

use std::{
    convert::Infallible,
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
use http::{Request, Response};
use tests::{
    barrier::{bounded, eventually},
    wire::Server,
};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::harness::{Served, config, exchange, post};

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
