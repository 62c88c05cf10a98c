//! Clients that wait for `100 Continue` before they send the body.

use http::StatusCode;
use tests::{barrier::bounded, wire::H1};

use crate::harness::{ConnectionEnd, Script, Served, Upstream, config};

const KEY: &str = "idempotency-key: k\r\n";

/// Returns the head of a POST that announces a body of this length. `lines` are further header lines.
fn expecting(path: &str, lines: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n{lines}content-length: {length}\r\n\r\n"
    )
}

/// An upstream that responds with this status before it has read the request.
async fn refusing(status: &'static str) -> Upstream {
    let reply = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno");
    let script = Script {
        read: Some(16),
        ..Script::reply(reply)
    };
    let script = script.then(ConnectionEnd::Hang);
    Upstream::start(move |_| script.clone()).await
}

const REFUSALS: [(&str, u16); 2] = [
    ("413 Content Too Large", 413),
    ("417 Expectation Failed", 417),
];

#[tokio::test]
async fn waiting_client_gets_100_continue() {
    for (path, lines) in [
        ("/pay", KEY),
        ("/pay", ""),
        ("/open/pay", KEY),
        ("/open/pay", ""),
    ] {
        let upstream = Upstream::start(|_| Script::create()).await;
        let proxy = Served::start(&config(upstream.address, "", "")).await;
        let mut client = H1::connect(proxy.address).await;
        client.send(expecting(path, lines, 4)).await;
        let interim = bounded(client.response()).await.unwrap();
        assert_eq!(interim.status, StatusCode::CONTINUE, "{path} {lines:?}");
        client.send("body").await;
        let response = bounded(client.response()).await.unwrap();
        assert_eq!(response.status, StatusCode::CREATED, "{path} {lines:?}");
        let requests = upstream.requests();
        assert_eq!(requests.len(), 1, "{requests:?}");
        // The proxy has met the expectation.
        let request = requests[0].to_ascii_lowercase();
        assert!(
            request.ends_with("\r\n\r\nbody") && !request.contains("expect:"),
            "{request}"
        );
    }
}

#[tokio::test]
async fn refusal_by_head_comes_without_100() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let route = "missing_key = \"reject\"\nrequest_limit = \"1KiB\"";
    let proxy = Served::start(&config(upstream.address, "", route)).await;
    for (path, lines, length, status, code) in [
        ("/pay", "", 4, 400, "missing-key"),
        ("/pay", "idempotency-key: \r\n", 4, 400, "malformed-key"),
        ("/pay", KEY, 1025, 413, "body-too-large"),
        ("//pay", KEY, 4, 400, "bad-path"),
    ] {
        let mut client = H1::connect(proxy.address).await;
        client.send(expecting(path, lines, length)).await;
        let response = bounded(client.response()).await.unwrap();
        assert_eq!(response.status.as_u16(), status, "{code}");
        assert_eq!(response.code(), code);
        // The next bytes could be the body or another request.
        assert!(bounded(client.response()).await.is_none(), "{code}");
    }
    assert_eq!(upstream.effects(), 0);
}

/// The client has not sent a byte of the body.
#[tokio::test]
async fn upstream_refusal_reaches_waiting_client() {
    for (line, status) in REFUSALS {
        let upstream = refusing(line).await;
        let proxy = Served::start(&config(upstream.address, "", "")).await;
        for lines in [KEY, ""] {
            let mut client = H1::connect(proxy.address).await;
            client.send(expecting("/open/pay", lines, 1 << 20)).await;
            let mut response = bounded(client.response()).await.unwrap();
            // The proxy may read the body before the upstream responds.
            if response.status == StatusCode::CONTINUE {
                response = bounded(client.response()).await.unwrap();
            }
            assert_eq!(
                (response.status.as_u16(), response.text()),
                (status, "no"),
                "{lines:?}"
            );
        }
        assert_eq!(upstream.effects(), 2);
    }
}

/// The proxy has the body of a protected request before it sends a byte of it.
#[tokio::test]
async fn upstream_refusal_reaches_client_with_key() {
    const BODY: usize = 1 << 20;
    for (line, status) in REFUSALS {
        let upstream = refusing(line).await;
        let proxy = Served::start(&config(upstream.address, "", "")).await;
        let mut client = H1::connect(proxy.address).await;
        client.send(expecting("/pay", KEY, BODY)).await;
        let interim = bounded(client.response()).await.unwrap();
        assert_eq!(interim.status, StatusCode::CONTINUE);
        assert_eq!(upstream.effects(), 0);
        client.send("x".repeat(BODY)).await;
        let response = bounded(client.response()).await.unwrap();
        assert_eq!(
            (response.status.as_u16(), response.text()),
            (status, "no"),
            "{response:?}"
        );
        assert_eq!(upstream.effects(), 1);
    }
}
