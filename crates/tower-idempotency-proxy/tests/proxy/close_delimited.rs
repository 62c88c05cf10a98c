//! Responses without a length and chunks, which end with the connection (RFC 9112, section 6.3).

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tests::{
    barrier::bounded,
    scratch::Scratch,
    servers::certificates::Certificates,
    wire::{H1, post_h1},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::{
    breaks::needs_attention,
    harness::{ConnectionEnd, Script, Served, Upstream, config, exchange, post, tls_acceptor},
    tls::{connect, with_tls},
};

const HEADS: [&str; 3] = [
    "HTTP/1.1 201 Created\r\n\r\n",
    "HTTP/1.1 201 Created\r\nconnection: close\r\n\r\n",
    "HTTP/1.0 201 Created\r\n\r\n",
];

/// Reads a request with the body `1`.
async fn read_request(stream: &mut (impl AsyncRead + Unpin)) {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n1") {
        request.push(bounded(stream.read_u8()).await.unwrap());
    }
}

#[tokio::test]
async fn closed_connection_completes_response() {
    for head in HEADS {
        let upstream = Upstream::start(move |_| {
            Script::reply(format!("{head}created")).then(ConnectionEnd::Close)
        });
        let upstream = upstream.await;
        let proxy = Served::start(&config(upstream.address, "", "")).await;
        for (path, is_replay, effects) in [
            ("/open/pay", false, 1),
            ("/pay", false, 2),
            ("/pay", true, 2),
        ] {
            let response = bounded(post_h1(proxy.address, path, "k", "1")).await;
            assert_eq!(
                (response.status.as_u16(), response.text()),
                (201, "created"),
                "{path} {head:?}"
            );
            assert_eq!(response.is_replay(), is_replay, "{path} {head:?}");
            assert_eq!(upstream.effects(), effects, "{path} {head:?}");
        }
    }
}

#[tokio::test]
async fn reset_connection_completes_no_response() {
    for head in HEADS {
        let upstream = Upstream::start(move |_| {
            Script::reply(format!("{head}created")).then(ConnectionEnd::Reset)
        });
        let upstream = upstream.await;
        let proxy = Served::start(&config(upstream.address, "", "")).await;
        let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
        // The reset may overtake the head.
        assert!([201, 502].contains(&reply.status()), "{head:?}: {reply:?}");
        for _ in 0..2 {
            let retry = exchange(proxy.address, post("/pay", "k", "1")).await;
            assert_eq!(retry.status(), 409, "{head:?}: {retry:?}");
            assert!(needs_attention(&retry), "{head:?}: {retry:?}");
        }
        assert_eq!(upstream.effects(), 1, "{head:?}");
    }
}

/// The response to the client ends with its last chunk only if that of the upstream is complete.
#[tokio::test]
async fn client_sees_if_response_is_complete() {
    for (end, is_complete) in [(ConnectionEnd::Close, true), (ConnectionEnd::Reset, false)] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let proxy = Served::start(&config(address, "", "")).await;
        let mut client = H1::connect(proxy.address).await;
        let request = "POST /open/pay HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n1";
        client.send(request).await;
        let (mut upstream, _) = bounded(listener.accept()).await.unwrap();
        read_request(&mut upstream).await;
        let response = [HEADS[0], "created"].concat();
        upstream.write_all(response.as_bytes()).await.unwrap();
        assert!(bounded(client.has_received("created")).await);
        if end == ConnectionEnd::Reset {
            upstream.set_zero_linger().unwrap();
        } else {
            upstream.shutdown().await.unwrap();
        }
        drop(upstream);
        let has_last_chunk = bounded(client.has_received("\r\n0\r\n\r\n")).await;
        assert_eq!(has_last_chunk, is_complete, "{end:?}");
    }
}

/// Requests a response by HTTP/1.0. Its upstream resets the connection after this chunk. Returns the end of the response.
async fn end_of_http10(
    mut client: impl AsyncRead + AsyncWrite + Unpin,
    upstream: &TcpListener,
    last_chunk: &str,
) -> Result<usize, io::ErrorKind> {
    let request = b"POST /open/pay HTTP/1.0\r\nhost: a\r\ncontent-length: 1\r\n\r\n1";
    client.write_all(request).await.unwrap();
    client.flush().await.unwrap();
    let (mut upstream, _) = bounded(upstream.accept()).await.unwrap();
    read_request(&mut upstream).await;
    let head = "HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n";
    let response = [head, "7\r\ncreated\r\n", last_chunk].concat();
    upstream.write_all(response.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    while !response.ends_with(b"\r\n\r\ncreated") {
        response.push(bounded(client.read_u8()).await.unwrap());
    }
    upstream.set_zero_linger().unwrap();
    drop(upstream);
    let ended = bounded(client.read_to_end(&mut response)).await;
    ended.map_err(|error| error.kind())
}

/// HTTP/1.0 has no chunks, so the end of the connection is the end of the response.
#[tokio::test]
async fn incomplete_response_resets_http10() {
    let scratch = Scratch::new();
    let certificates = Certificates::make(scratch.path());
    for (last_chunk, expected) in [
        ("0\r\n\r\n", Ok(0)),
        ("", Err(io::ErrorKind::ConnectionReset)),
    ] {
        let upstream = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let text = config(upstream.local_addr().unwrap(), "", "");
        let proxy = Served::start(&text).await;
        let client = TcpStream::connect(proxy.address).await.unwrap();
        let ended = end_of_http10(client, &upstream, last_chunk).await;
        assert_eq!(ended, expected, "{last_chunk:?}");
        // A client may take the end of TCP for the end of TLS.
        let proxy = Served::start(&with_tls(&text, &certificates)).await;
        let client = connect(proxy.address, certificates.ca(), b"http/1.1")
            .await
            .unwrap();
        let ended = end_of_http10(client, &upstream, last_chunk).await;
        assert_eq!(ended, expected, "TLS: {last_chunk:?}");
    }
}

/// Starts an upstream with TLS that closes the TCP connection after its response. `ends_tls` decides if it sends
/// `close_notify` before. Returns its address and the number of requests.
async fn tls_upstream(
    certificates: &Certificates,
    ends_tls: bool,
) -> (SocketAddr, Arc<AtomicUsize>) {
    let acceptor = tls_acceptor(certificates, b"http/1.1");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let requests = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&requests);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = acceptor.accept(stream).await.unwrap();
            read_request(&mut stream).await;
            counted.fetch_add(1, Ordering::SeqCst);
            let response = [HEADS[0], "created"].concat();
            stream.write_all(response.as_bytes()).await.unwrap();
            stream.flush().await.unwrap();
            if ends_tls {
                stream.shutdown().await.unwrap();
            } else {
                stream.get_mut().0.shutdown().await.unwrap();
            }
            // Until the proxy has closed the connection.
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    });
    (address, requests)
}

/// An attacker in the network can end TCP, and not TLS (RFC 9112, section 9.8).
#[tokio::test]
async fn end_of_tls_completes_response() {
    let scratch = Scratch::new();
    let certificates = Certificates::make(scratch.path());
    let ca = format!("ca_file = \"{}\"", certificates.ca().display());
    for (ends_tls, status) in [(true, 201), (false, 409)] {
        let (address, requests) = tls_upstream(&certificates, ends_tls).await;
        let text = config(address, &ca, "").replace("http://", "https://");
        let proxy = Served::start(&text).await;
        let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
        assert_eq!(reply.status(), 201, "{ends_tls}: {reply:?}");
        let retry = exchange(proxy.address, post("/pay", "k", "1")).await;
        assert_eq!(retry.status(), status, "{ends_tls}: {retry:?}");
        assert_eq!(retry.is_replay(), ends_tls, "{retry:?}");
        assert_eq!(needs_attention(&retry), !ends_tls, "{retry:?}");
        assert_eq!(requests.load(Ordering::SeqCst), 1, "{ends_tls}");
    }
}
