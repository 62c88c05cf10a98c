//! WebSockets (RFC 6455) through the proxy, with the frames of a library on both sides.

use std::net::SocketAddr;

use futures_util::{SinkExt, StreamExt};
use tests::barrier::bounded;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        protocol::{CloseFrame, Role, frame::coding::CloseCode},
    },
};

use crate::harness::{Served, config};

/// The key of the handshake and its reply in RFC 6455, section 1.3.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";

async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(bounded(stream.read_u8()).await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// Starts a server that returns each message.
async fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let head = read_head(&mut stream).await;
                assert!(
                    head.contains(&format!("sec-websocket-key: {KEY}\r\n")),
                    "{head}"
                );
                let reply = format!(
                    "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: {ACCEPT}\r\n\r\n"
                );
                stream.write_all(reply.as_bytes()).await.unwrap();
                let mut socket = WebSocketStream::from_raw_socket(stream, Role::Server, None).await;
                while let Some(message) = socket.next().await {
                    let message = message.unwrap();
                    if message.is_text() || message.is_binary() {
                        socket.send(message).await.unwrap();
                    }
                }
            });
        }
    });
    address
}

#[tokio::test]
async fn messages_and_close_handshake_pass() {
    let proxy = Served::start(&config(echo().await, "", "")).await;
    for (path, lines) in [
        ("/open/chat", ""),
        ("/open/chat", "idempotency-key: k\r\n"),
        ("/chat", ""),
        // A second socket under the key is no replay.
        ("/chat", "idempotency-key: k\r\n"),
        ("/chat", "idempotency-key: k\r\n"),
    ] {
        let mut stream = TcpStream::connect(proxy.address).await.unwrap();
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: {KEY}\r\n{lines}\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let reply = read_head(&mut stream).await;
        assert!(
            reply.starts_with("HTTP/1.1 101 ")
                && reply.contains(&format!("sec-websocket-accept: {ACCEPT}\r\n")),
            "{path} {lines:?}: {reply}"
        );
        let mut socket = WebSocketStream::from_raw_socket(stream, Role::Client, None).await;
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        for message in [
            Message::text("one"),
            Message::binary(bytes.repeat(4096)),
            // Lines that look like a head of HTTP.
            Message::text("GET / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\n"),
        ] {
            bounded(socket.send(message.clone())).await.unwrap();
            let echoed = bounded(socket.next()).await.unwrap().unwrap();
            assert!(
                echoed == message,
                "{path} {lines:?}: {} bytes",
                message.len()
            );
        }
        let frame = CloseFrame {
            code: CloseCode::Normal,
            reason: "done".into(),
        };
        bounded(socket.close(Some(frame.clone()))).await.unwrap();
        let closed = bounded(socket.next()).await.unwrap().unwrap();
        assert_eq!(closed, Message::Close(Some(frame)), "{path} {lines:?}");
        assert!(bounded(socket.next()).await.is_none(), "{path} {lines:?}");
    }
}
