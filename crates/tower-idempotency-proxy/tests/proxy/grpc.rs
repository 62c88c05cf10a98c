//! A gRPC call with a stream of messages in its response.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use tests::barrier::{Barrier, bounded};
use tokio::net::{TcpListener, TcpStream};

use crate::harness::{Served, config};

/// Returns a message with its prefix: not compressed, and the length.
fn message(payload: &[u8]) -> Bytes {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [[0_u8].as_slice(), &length, payload].concat().into()
}

/// Returns the messages of a response to this request. The second one is larger than the default window of a stream.
fn messages(request: Bytes) -> [Bytes; 3] {
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    [request, message(&bytes.repeat(400)), message(b"")]
}

fn trailers() -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    trailers.insert("grpc-message", "done%0A".parse().unwrap());
    trailers.append("x-data-bin", "AAEC/w".parse().unwrap());
    trailers.append("x-data-bin", "AAEC/g".parse().unwrap());
    trailers
}

/// Starts an upstream that passes the barrier after the head of its response, and after each message.
async fn upstream(barrier: Barrier) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            let barrier = barrier.clone();
            tokio::spawn(async move {
                let (head, mut upload) = request.into_parts();
                let mut received = Vec::new();
                while let Some(data) = upload.data().await {
                    received.extend_from_slice(&data.unwrap());
                }
                let response = Response::builder()
                    .header("content-type", "application/grpc")
                    .header("x-te", &head.headers["te"]);
                let response = response.body(()).unwrap();
                let mut body = respond.send_response(response, false).unwrap();
                barrier.pass().await;
                for message in messages(received.into()) {
                    body.send_data(message, false).unwrap();
                    barrier.pass().await;
                }
                body.send_trailers(trailers()).unwrap();
            });
        }
    });
    address
}

/// The upstream sends each message after the client has received the one before. A proxy that buffers would wait forever.
#[tokio::test]
async fn messages_arrive_one_by_one() {
    let barrier = Barrier::closed();
    let address = upstream(barrier.clone()).await;
    let proxy = Served::start(&config(address, "http2 = true", "")).await;
    for path in ["/open/shop.Orders/Watch", "/shop.Orders/Watch"] {
        // Without TLS and without an upgrade: prior knowledge (RFC 9113, section 3.3).
        let stream = TcpStream::connect(proxy.address).await.unwrap();
        let (sender, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::spawn(connection);
        let mut sender = sender.ready().await.unwrap();
        let request = Request::post(format!("http://a{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("idempotency-key", "k");
        let request = request.body(()).unwrap();
        let (response, mut upload) = sender.send_request(request, false).unwrap();
        let query = message(b"orders of today");
        upload.send_data(query.clone(), true).unwrap();
        let response = bounded(response).await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        assert_eq!(response.headers()["content-type"], "application/grpc");
        assert_eq!(response.headers()["x-te"], "trailers");
        barrier.release(1);
        let mut body = response.into_body();
        for (number, expected) in messages(query).into_iter().enumerate() {
            let mut received = Vec::new();
            while received.len() < expected.len() {
                let data = bounded(body.data()).await.unwrap().unwrap();
                body.flow_control().release_capacity(data.len()).unwrap();
                received.extend_from_slice(&data);
            }
            assert!(received == expected, "{path}: message {number}");
            barrier.release(1);
        }
        assert!(bounded(body.data()).await.is_none(), "{path}");
        let received = bounded(body.trailers()).await.unwrap();
        assert_eq!(received, Some(trailers()), "{path}");
        connection.abort();
    }
}
