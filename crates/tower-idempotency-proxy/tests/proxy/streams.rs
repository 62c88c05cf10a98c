//! Upstreams with HTTP/2 that reset streams, and streams that never end.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;
use h2::Reason;
use http::{HeaderMap, Response};
use tests::{barrier::bounded, wire::H2};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

use crate::harness::{CREATED, Served, config, exchange, post};

/// The end of the first stream of an upstream.
#[derive(Clone, Copy, Debug)]
enum End {
    Reset(Reason),
    /// The connection closes.
    Close,
    /// A head, half a body, and then a reset.
    ResetBody(Reason),
}

/// An upstream with HTTP/2. It ends the first stream, and responds to the others with a body and trailers, as gRPC does.
async fn upstream(end: End) -> (std::net::SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&requests);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let requests = Arc::clone(&counted);
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                let mut ping = connection.ping_pong();
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    let number = requests.fetch_add(1, Ordering::SeqCst);
                    let response = Response::builder().status(201).body(()).unwrap();
                    match (number, end) {
                        (0, End::Reset(reason)) => respond.send_reset(reason),
                        (0, End::Close) => return,
                        (0, End::ResetBody(reason)) => {
                            let mut body = respond.send_response(response, false).unwrap();
                            body.send_data(Bytes::from_static(b"half"), false).unwrap();
                            let mut ping = ping.take().expect("the first stream");
                            tokio::spawn(async move {
                                // Without this round trip, the reset could overtake the head.
                                ping.ping(h2::Ping::opaque()).await.unwrap();
                                body.send_reset(reason);
                            });
                        }
                        _ => {
                            let mut body = respond.send_response(response, false).unwrap();
                            tokio::spawn(async move {
                                let mut upload = request.into_body();
                                while let Some(Ok(data)) = upload.data().await {
                                    let _ = upload.flow_control().release_capacity(data.len());
                                    body.send_data(data, false).unwrap();
                                }
                                let mut trailers = HeaderMap::new();
                                trailers.insert("grpc-status", "0".parse().unwrap());
                                body.send_trailers(trailers).unwrap();
                            });
                        }
                    }
                }
            });
        }
    });
    (address, requests)
}

/// The upstream may have executed the request. HAProxy sends REFUSED_STREAM after it has forwarded one.
#[tokio::test]
async fn no_reset_leaves_key_free() {
    for (end, first, retry, executions) in [
        (End::Reset(Reason::REFUSED_STREAM), 502, 409, 1),
        (End::Reset(Reason::CANCEL), 502, 409, 1),
        (End::Reset(Reason::INTERNAL_ERROR), 502, 409, 1),
        (End::Reset(Reason::NO_ERROR), 502, 409, 1),
        (End::Close, 502, 409, 1),
        (End::ResetBody(Reason::INTERNAL_ERROR), 201, 409, 1),
        (End::ResetBody(Reason::NO_ERROR), 201, 409, 1),
    ] {
        let (address, requests) = upstream(end).await;
        let proxy = Served::start(&config(address, "http2 = true", "")).await;
        let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
        assert_eq!(reply.status(), first, "{end:?}: {reply:?}");
        let is_unknown = reply.is_problem("outcome-unknown");
        assert_eq!(is_unknown, first == 502, "{end:?}: {reply:?}");
        let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
        assert_eq!(reply.status(), retry, "{end:?}: {reply:?}");
        assert_eq!(requests.load(Ordering::SeqCst), executions, "{end:?}");
    }
}

#[tokio::test]
async fn grpc_stream_and_trailers_pass() {
    let (address, requests) = upstream(End::Close).await;
    // The first stream of this upstream closes its connection.
    requests.store(1, Ordering::SeqCst);
    let proxy = Served::start(&config(address, "http2 = true", "")).await;
    let h2 = H2::connect(proxy.address).await;
    let mut stream = h2.start("/open/grpc.Service/Method", "k").await;
    for piece in ["one", "two", "three"] {
        stream.send(piece, false);
    }
    stream.send("", true);
    let response = bounded(stream.response()).await.unwrap();
    assert_eq!(response.text(), "onetwothree");
    assert_eq!(requests.load(Ordering::SeqCst), 2);
}

/// An upload uses up its own window, and not that of the connection.
#[tokio::test]
async fn stalled_upload_delays_no_other_stream() {
    // With the windows of the connection, these would need four times as much as it has.
    const UPLOADS: usize = 4;
    const SIZE: usize = 32 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut received = Vec::new();
                while let Ok(byte) = stream.read_u8().await {
                    received.push(byte);
                    // A head, or the end of a body in chunks.
                    if received.ends_with(b"\r\n\r\n") {
                        let part = String::from_utf8(std::mem::take(&mut received)).unwrap();
                        if part.contains("POST /open/") {
                            std::future::pending::<()>().await;
                        }
                        if part.contains("POST /pay") {
                            stream.write_all(CREATED.as_bytes()).await.unwrap();
                        }
                    }
                }
            });
        }
    });
    let proxy = Served::start(&config(address, "timeout = \"1h\"", "")).await;
    let h2 = H2::connect(proxy.address).await;
    let sent = Arc::new(AtomicUsize::new(0));
    let mut uploads = JoinSet::new();
    for _ in 0..UPLOADS {
        let mut stalled = h2.start("/open/upload", "a").await;
        let sent = Arc::clone(&sent);
        uploads.spawn(async move { stalled.send_within_windows(SIZE, &sent).await });
    }
    // Until the buffers of the sockets are full: the uploads send nothing while other requests are executed.
    let (mut before, mut stalled_for) = (0, 0);
    for number in 0.. {
        let other = h2.post("/pay", &format!("k-{number}"), "1").await;
        assert_eq!(bounded(other.response()).await.unwrap().status, 201);
        let now = sent.load(Ordering::Relaxed);
        stalled_for = if now == before { stalled_for + 1 } else { 0 };
        before = now;
        if now > 0 && stalled_for == 20 {
            break;
        }
    }
    assert!(uploads.try_join_next().is_none(), "an upload did not stall");
}

#[tokio::test]
async fn server_sent_events_arrive_one_by_one() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let proxy = Served::start(&config(address, "", "")).await;
    let mut client = TcpStream::connect(proxy.address).await.unwrap();
    let request = "GET /events HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\n\r\n";
    client.write_all(request.as_bytes()).await.unwrap();
    let (mut upstream, _) = bounded(listener.accept()).await.unwrap();
    // The test reads an event before it sends the next one. A proxy that buffers would never send the first.
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    upstream.write_all(head.as_bytes()).await.unwrap();
    for event in ["data: 1\n\n", "data: 2\n\n", "data: 3\n\n"] {
        upstream
            .write_all(format!("9\r\n{event}\r\n").as_bytes())
            .await
            .unwrap();
        let mut received = String::new();
        while !received.contains(event) {
            received.push(char::from(bounded(client.read_u8()).await.unwrap()));
        }
    }
}
