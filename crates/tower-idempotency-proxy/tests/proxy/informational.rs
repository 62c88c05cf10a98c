//! Responses of the upstream with a status of 1xx, before its final response.

use bytes::Bytes;
use http::Response;
use tests::{
    barrier::bounded,
    wire::{H1, poll_briefly, post_bytes},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use crate::harness::{CREATED, Script, Served, Upstream, config, exchange, post};

const INTERIM: &str = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a.css>; rel=preload\r\n\r\n";

#[tokio::test]
async fn only_final_response_is_recorded() {
    let upstream = Upstream::start(|_| Script::reply([INTERIM, CREATED].concat())).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for (path, is_replay, effects) in [
        ("/open/pay", false, 1),
        ("/pay", false, 2),
        ("/pay", true, 2),
    ] {
        let reply = exchange(proxy.address, post(path, "k", "1")).await;
        assert!(
            reply.0.starts_with("HTTP/1.1 201 ") && reply.0.ends_with("\r\n\r\ncreated"),
            "{reply:?}"
        );
        assert!(!reply.0.contains("a.css"), "{reply:?}");
        assert_eq!(reply.is_replay(), is_replay, "{reply:?}");
        assert_eq!(upstream.effects(), effects);
    }
}

/// An informational response does not end the wait for the final one.
#[tokio::test]
async fn final_response_may_come_later() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let proxy = Served::start(&config(address, "", "")).await;
    let mut client = H1::connect(proxy.address).await;
    client.send(post_bytes("/pay", "k", "1")).await;
    let (mut upstream, _) = bounded(listener.accept()).await.unwrap();
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n1") {
        request.push(bounded(upstream.read_u8()).await.unwrap());
    }
    upstream.write_all(INTERIM.as_bytes()).await.unwrap();
    assert!(poll_briefly(client.response()).await.is_none());
    upstream.write_all(CREATED.as_bytes()).await.unwrap();
    let response = bounded(client.response()).await.unwrap();
    assert_eq!(
        (response.status.as_u16(), response.text()),
        (201, "created")
    );
    let retry = exchange(proxy.address, post("/pay", "k", "1")).await;
    assert_eq!(
        (retry.status(), retry.is_replay()),
        (201, true),
        "{retry:?}"
    );
}

#[tokio::test]
async fn only_final_response_of_http2_is_recorded() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let mut requests = 0;
        while let Some(Ok((_request, mut respond))) = connection.accept().await {
            requests += 1;
            let hints = Response::builder().status(103).header("link", "</a.css>");
            respond.send_informational(hints.body(()).unwrap()).unwrap();
            let response = Response::builder().status(201).header("x-number", requests);
            let response = response.body(()).unwrap();
            let mut body = respond.send_response(response, false).unwrap();
            body.send_data(Bytes::from_static(b"created"), true)
                .unwrap();
        }
    });
    let proxy = Served::start(&config(address, "http2 = true", "")).await;
    for is_replay in [false, true] {
        let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
        assert!(
            reply.0.starts_with("HTTP/1.1 201 ") && reply.0.contains("\r\nx-number: 1\r\n"),
            "{reply:?}"
        );
        assert!(
            reply.0.contains("created") && !reply.0.contains("a.css"),
            "{reply:?}"
        );
        assert_eq!(reply.is_replay(), is_replay, "{reply:?}");
    }
}
