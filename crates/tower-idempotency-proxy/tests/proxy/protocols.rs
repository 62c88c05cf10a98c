//! HTTP/1.1 and HTTP/2 on both sides, streams, trailers, upgrades and TLS.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{HeaderMap, StatusCode},
    response::IntoResponse,
    routing::any,
};
use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use tests::{
    barrier::bounded,
    wire::{H1, H2, Server, post_h1},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{mpsc, oneshot},
};

use crate::harness::{Script, Served, Upstream, config, exchange, pay_twice, post, post_with};

/// An upstream that echoes bodies as they arrive, and adds a trailer.
async fn echo() -> Server {
    let app = Router::new().route(
        "/{*path}",
        any(async |req: Request| {
            let version = format!("{:?}", req.version());
            let key = req.headers().get("idempotency-key").cloned();
            let (sender, mut receiver) = mpsc::channel::<Result<Frame<Bytes>, io::Error>>(1);
            let mut body = req.into_body();
            tokio::spawn(async move {
                while let Some(Ok(frame)) = body.frame().await {
                    if sender.send(Ok(frame)).await.is_err() {
                        return;
                    }
                }
                let mut trailers = HeaderMap::new();
                trailers.insert("x-sum", "9".parse().unwrap());
                let _ = sender.send(Ok(Frame::trailers(trailers))).await;
            });
            let frames = futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx));
            let mut res = Body::new(StreamBody::new(frames)).into_response();
            res.headers_mut()
                .insert("x-version", version.parse().unwrap());
            res.headers_mut()
                .insert("trailer", "x-sum".parse().unwrap());
            if let Some(key) = key {
                res.headers_mut().insert("x-key", key);
            }
            res
        }),
    );
    Server::start(app).await
}

#[tokio::test]
async fn each_protocol_reaches_each_protocol() {
    let upstream = echo().await;
    for (upstream_lines, version) in [("", "HTTP/1.1"), ("http2 = true", "HTTP/2.0")] {
        let proxy = Served::start(&config(upstream.addr(), upstream_lines, "")).await;
        let h2 = H2::connect(proxy.address).await;
        let mut keys = Vec::new();
        for replay in [false, true] {
            let over_h1 = post_h1(proxy.address, "/echo", "one", "body").await;
            let over_h2 = h2
                .post("/echo", "two", "body")
                .await
                .response()
                .await
                .unwrap();
            for response in [over_h1, over_h2] {
                assert_eq!(
                    (response.status.as_u16(), response.text()),
                    (200, "body"),
                    "{response:?}"
                );
                assert_eq!(response.is_replay(), replay, "{response:?}");
                assert_eq!(response.header("x-version"), Some(version));
                keys.push(response.header("x-key").unwrap().to_owned());
            }
        }
        assert_eq!(keys[..2], keys[2..]);
    }
}

#[tokio::test]
async fn unprotected_bodies_stream_in_both_directions() {
    let upstream = echo().await;
    for upstream_lines in ["", "http2 = true"] {
        let proxy = Served::start(&config(upstream.addr(), upstream_lines, "")).await;
        let mut client = TcpStream::connect(proxy.address).await.unwrap();
        let head = "POST /open/echo HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\nte: trailers\r\n\r\n";
        client.write_all(head.as_bytes()).await.unwrap();
        let mut received = String::new();
        // Each piece comes back before the next one is sent.
        for piece in ["first", "other", "third"] {
            client
                .write_all(format!("5\r\n{piece}\r\n").as_bytes())
                .await
                .unwrap();
            while !received.contains(piece) {
                let mut buffer = [0; 1024];
                let read = bounded(client.read(&mut buffer)).await.unwrap();
                assert_ne!(read, 0, "{received}");
                received.push_str(&String::from_utf8_lossy(&buffer[..read]));
            }
        }
        client.write_all(b"0\r\n\r\n").await.unwrap();
        let mut rest = String::new();
        bounded(client.read_to_string(&mut rest)).await.unwrap();
        assert!(rest.contains("x-sum: 9\r\n"), "{received}{rest}");
    }
}

#[tokio::test]
async fn slow_upload_outlasts_timeout() {
    // The upstream responds after the complete request.
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "timeout = \"4s\"", "")).await;
    let mut client = H1::connect(proxy.address).await;
    let head = "POST /open/slow HTTP/1.1\r\nhost: a\r\ncontent-length: 7\r\n\r\n";
    client.send(head).await;
    for _ in 0..7 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        client.send("x").await;
    }
    assert_eq!(bounded(client.response()).await.unwrap().status, 201);
}

/// The layer passes a protected body as a whole. It counts as progress that the upstream reads a part of it.
#[tokio::test]
async fn slow_protected_upload_outlasts_timeout() {
    const BODY: usize = 48 << 20;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(64 * 1024).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(16).unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, unread) = oneshot::channel();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let (mut read, mut buffer) = (0, vec![0; 1 << 20]);
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(9) {
            read += stream.read_exact(&mut buffer).await.unwrap();
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        sender.send(BODY - read).unwrap();
        while read < BODY {
            read += stream.read_exact(&mut buffer).await.unwrap();
        }
        // The head of the request is the rest.
        let _ = stream.read(&mut buffer).await;
        stream
            .write_all(crate::harness::CREATED.as_bytes())
            .await
            .unwrap();
        std::future::pending::<()>().await;
    });
    let limits = "request_limit = \"64MiB\"\nlease = \"60s\"";
    let proxy = Served::start(&config(address, "timeout = \"6s\"", limits)).await;
    let request = post_with("/pay", "k", "", &"x".repeat(BODY));
    let reply = exchange(proxy.address, request).await;
    assert_eq!(reply.status(), 201, "{reply:?}");
    // After the timeout, more bytes were unread than the buffers of sockets hold.
    let unread = unread.await.unwrap();
    assert!(unread > 24 << 20, "{unread}");
}

/// A raw upstream that switches to another protocol and echoes its bytes in capitals.
async fn tunnel_upstream() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
                assert!(
                    head.contains("connection: upgrade\r\n")
                        && head.contains("upgrade: websocket\r\n"),
                    "{head}"
                );
                let reply = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nHI";
                stream.write_all(reply.as_bytes()).await.unwrap();
                let mut buffer = [0; 1024];
                while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                    buffer.make_ascii_uppercase();
                    stream.write_all(&buffer[..read]).await.unwrap();
                }
            });
        }
    });
    address
}

async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut text = String::new();
    while !text.ends_with(end) {
        text.push(char::from(bounded(stream.read_u8()).await.unwrap()));
    }
    text
}

#[tokio::test]
async fn upgraded_connection_passes_bytes() {
    let proxy = Served::start(&config(tunnel_upstream().await, "", "")).await;
    for (path, key) in [
        ("/open/chat", ""),
        ("/chat", ""),
        ("/chat", "idempotency-key: k\r\n"),
    ] {
        let mut client = TcpStream::connect(proxy.address).await.unwrap();
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: a\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n{key}\r\n"
        );
        client.write_all(head.as_bytes()).await.unwrap();
        let reply = read_until(&mut client, "\r\n\r\nHI").await;
        assert!(
            reply.starts_with("HTTP/1.1 101 ") && reply.contains("upgrade: websocket\r\n"),
            "{reply}"
        );
        for _ in 0..3 {
            client.write_all(b"abc").await.unwrap();
            assert_eq!(read_until(&mut client, "C").await, "ABC");
        }
    }
}

#[tokio::test]
async fn drain_closes_tunnels_after_timeout() {
    let text = config(tunnel_upstream().await, "", "") + "\n[drain]\ntimeout = \"100ms\"\n";
    let proxy = Served::start(&text).await;
    let mut client = TcpStream::connect(proxy.address).await.unwrap();
    let head = "GET /chat HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    read_until(&mut client, "\r\n\r\nHI").await;
    // A tunnel is no request that could be lost.
    assert!(bounded(proxy.stop()).await.unwrap());
    assert_eq!(bounded(client.read(&mut [0])).await.unwrap(), 0);
}

/// `h2c` would carry requests past the routes of the proxy, and WebSocket begins with GET. The layer protects the
/// request, since it is no tunnel.
#[tokio::test]
async fn other_upgrades_are_ignored() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for (number, protocol) in ["h2c", "echo", "websocket, h2c", "websocket"]
        .into_iter()
        .enumerate()
    {
        let lines = format!("upgrade: {protocol}\r\n");
        let request = post_with("/pay", &format!("k{number}"), &lines, "1")
            .replace("connection: close", "connection: close, upgrade");
        for is_replay in [false, true] {
            let reply = exchange(proxy.address, &request).await;
            assert_eq!(
                (reply.status(), reply.is_replay()),
                (201, is_replay),
                "{reply:?}"
            );
        }
    }
    for (method, protocol) in [("GET", "h2c"), ("POST", "websocket")] {
        let request = format!(
            "{method} /open/x HTTP/1.1\r\nhost: a\r\nconnection: close, upgrade\r\nupgrade: {protocol}\r\ncontent-length: 0\r\n\r\n"
        );
        assert_eq!(exchange(proxy.address, request).await.status(), 201);
    }
    for request in upstream.requests() {
        assert!(
            !request.to_ascii_lowercase().contains("upgrade"),
            "{request}"
        );
    }
}

#[tokio::test]
async fn body_of_get_reaches_upstream() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    let request = "GET /search HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n5\r\nquery\r\n0\r\n\r\n";
    assert_eq!(exchange(proxy.address, request).await.status(), 201);
    let requests = upstream.requests();
    assert!(
        requests[0].ends_with("5\r\nquery\r\n0\r\n\r\n"),
        "{requests:?}"
    );
    let plain = "GET /search HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    assert_eq!(exchange(proxy.address, plain).await.status(), 201);
    let requests = upstream.requests();
    assert!(
        !requests[1]
            .to_ascii_lowercase()
            .contains("transfer-encoding"),
        "{requests:?}"
    );
}

/// Its request was executed, so the response must reach the client.
#[tokio::test]
async fn large_head_of_response_reaches_client() {
    // The number of header lines, and the length of each value.
    for (lines, length, is_recorded) in [
        (1, 20_000, true),
        (15, 20_000, true),
        (120, 10, true),
        // A record has at most 128 lines.
        (200, 10, false),
    ] {
        let effects = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&effects);
        let app = Router::new().fallback(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            let mut headers = HeaderMap::new();
            for _ in 0..lines {
                headers.append("x-large", "x".repeat(length).parse().unwrap());
            }
            async move { (StatusCode::CREATED, headers) }
        });
        let upstream = Server::start(app).await;
        let line = format!("\r\nx-large: {}", "x".repeat(length));
        for (number, upstream_lines) in ["", "http2 = true"].into_iter().enumerate() {
            let proxy = Served::start(&config(upstream.addr(), upstream_lines, "")).await;
            let context = format!("{lines} lines of {length} bytes, {upstream_lines:?}");
            let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
            assert_eq!(reply.status(), 201, "{context}");
            assert_eq!(reply.0.matches(&line).count(), lines, "{context}");
            let retry = exchange(proxy.address, post("/pay", "k", "1")).await;
            if is_recorded {
                assert_eq!(
                    (retry.status(), retry.is_replay()),
                    (201, true),
                    "{context}"
                );
                assert_eq!(retry.0.matches(&line).count(), lines, "{context}");
            } else {
                assert!(retry.is_problem("response-not-retained"), "{context}");
            }
            assert_eq!(effects.load(Ordering::SeqCst), number + 1, "{context}");
        }
    }
}

#[tokio::test]
async fn large_trailers_of_response_are_recorded() {
    for (lines, length) in [(120, 1), (2, 10_000)] {
        let trailers = format!("x-sum: {}\r\n", "9".repeat(length)).repeat(lines);
        let chunks = format!("7\r\ncreated\r\n0\r\n{trailers}\r\n");
        let head = "HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n";
        let response = [head, &chunks].concat();
        let upstream = Upstream::start(move |_| Script::reply(response.clone())).await;
        let proxy = Served::start(&config(upstream.address, "", "")).await;
        pay_twice(proxy.address, 201).await;
        assert_eq!(upstream.effects(), 1);
    }
}

/// A proxy must remove a space before the colon, and may join folded lines (RFC 9112, sections 5.1 and 5.2).
#[tokio::test]
async fn obsolete_lines_of_response_are_corrected() {
    let head =
        "HTTP/1.1 201 Created\r\nx-space : 1\r\nx-folded: 1\r\n \t2\r\ncontent-length\t: 7\r\n\r\n";
    let response = [head, "created"].concat();
    let upstream = Upstream::start(move |_| Script::reply(response.clone())).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for reply in pay_twice(proxy.address, 201).await {
        for line in ["x-space: 1", "x-folded: 1 2", "content-length: 7"] {
            assert!(reply.0.contains(&format!("\r\n{line}\r\n")), "{reply:?}");
        }
        assert!(reply.0.ends_with("\r\n\r\ncreated"), "{reply:?}");
    }
    assert_eq!(upstream.effects(), 1);
}

/// An open request outlasts the timeout of idle connections.
#[tokio::test]
async fn idle_connection_with_http2_is_closed() {
    let upstream = echo().await;
    let text = config(upstream.addr(), "", "").replace("[admin]", "idle_timeout = \"1s\"\n[admin]");
    let proxy = Served::start(&text).await;
    let stream = TcpStream::connect(proxy.address).await.unwrap();
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut sender = sender.ready().await.unwrap();
    let request = http::Request::post("http://a/open/echo").body(()).unwrap();
    let (response, mut upload) = sender.send_request(request, false).unwrap();
    let mut body = bounded(response).await.unwrap().into_body();
    tokio::time::sleep(Duration::from_secs(3)).await;
    // The connection accepts requests as long as one of them is open.
    let mut other = sender.clone().ready().await.unwrap();
    let request = http::Request::post("http://a/open/echo").body(()).unwrap();
    let (response, _) = other.send_request(request, true).unwrap();
    assert_eq!(bounded(response).await.unwrap().status(), 200);
    drop(other);
    upload.send_data(Bytes::from_static(b"late"), true).unwrap();
    assert_eq!(bounded(body.data()).await.unwrap().unwrap(), "late");
    while bounded(body.data()).await.is_some() {}
    drop((body, upload));
    // Without the timeout it stays open.
    bounded(connection).await.unwrap().unwrap();
    drop(sender);
}

/// The first head has 30 s, also if idle connections are closed earlier.
#[tokio::test]
async fn slow_first_head_outlasts_idle_timeout() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text =
        config(upstream.address, "", "").replace("[admin]", "idle_timeout = \"1s\"\n[admin]");
    let proxy = Served::start(&text).await;
    let mut client = H1::connect(proxy.address).await;
    client.send("POST /pay HTTP/1.1\r\nhost: a\r\n").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    client.send("content-length: 0\r\n\r\n").await;
    assert_eq!(bounded(client.response()).await.unwrap().status, 201);
    assert_eq!(upstream.effects(), 1);
}

/// An open request outlasts the timeout of idle connections.
#[tokio::test]
async fn idle_connection_with_http1_is_closed() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text =
        config(upstream.address, "", "").replace("[admin]", "idle_timeout = \"1s\"\n[admin]");
    let proxy = Served::start(&text).await;
    let mut client = H1::connect(proxy.address).await;
    let head = "POST /open/slow HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nx";
    client.send(head).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    client.send("x").await;
    assert_eq!(bounded(client.response()).await.unwrap().status, 201);
    // A part of a head is no request.
    client.send("POST /pay HTTP/1.1\r\n").await;
    let began = Instant::now();
    assert!(bounded(client.response()).await.is_none());
    assert!(
        began.elapsed() < Duration::from_secs(25),
        "the minimum for the first head is 30 s: {:?}",
        began.elapsed()
    );
    assert_eq!(upstream.effects(), 1);
}
