//! Requests that two servers may read differently.

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, HeaderName, HeaderValue, Request};
use tests::{
    barrier::bounded,
    wire::{H1, post_bytes},
};
use tokio::net::TcpStream;

use crate::harness::{Script, Served, Upstream, config, exchange};

#[tokio::test]
async fn ambiguous_messages_are_refused() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for head in [
        "POST /pay HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        "POST /pay HTTP/1.1\r\nhost: a\r\ncontent-length: 3, 4\r\n\r\nabcd",
        "POST /pay HTTP/1.1\r\nhost: a\r\ncontent-length: +3\r\n\r\nabc",
        "POST /pay HTTP/1.1\r\nhost: a\r\ncontent-length : 3\r\n\r\nabc",
        "POST /pay HTTP/1.1\r\nhost: a\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        "POST /pay HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "POST /pay HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        "POST /pay HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "POST /pay HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST /pay HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        "POST /pay HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST /pay HTTP/1.1\r\nhost: a\r\n transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST /pay HTTP/1.1\r\nhost: a\r\nx: \0\r\ncontent-length: 0\r\n\r\n",
        "POST /pay HTTP/1.1\r\nhost: a\r\nhost: b\r\ncontent-length: 0\r\n\r\n",
        "POST /pay HTTP/1.1\r\ncontent-length: 0\r\n\r\n",
        "POST /a/../pay HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
        "POST /pay%2fx HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
        "POST /pay/;7 HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
        "POST /pay HTTP/1.1\r\nhost: a b\r\ncontent-length: 0\r\n\r\n",
        "POST /pay HTTP/1.1\r\nhost: \r\ncontent-length: 0\r\n\r\n",
        "POST /pay HTTP/1.1\r\nhost: a@b\r\ncontent-length: 0\r\n\r\n",
        // Django and Hypercorn change the method to capital letters.
        "post /pay HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
        "PoST /pay HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
    ] {
        for mode in ["", "/open"] {
            let request = head.replacen(" /", &format!(" {mode}/"), 1);
            let reply = exchange(
                proxy.address,
                request.replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n"),
            )
            .await;
            assert_eq!(reply.status(), 400, "{request:?}: {reply:?}");
        }
    }
    assert_eq!(upstream.requests(), [""; 0]);
}

/// hyper ignores a length beside chunks, and joins equal lengths. Another server may read a hidden request.
#[tokio::test]
async fn ambiguous_length_closes_connection() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for fields in [
        "content-length: 6\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 6",
        "Transfer-Encoding:chunked\r\nx: y\r\nContent-Length:6",
        "content-length: 5\r\ncontent-length: 5",
        "transfer-encoding: gzip, chunked",
        "transfer-encoding: chunked, chunked",
    ] {
        for (path, key) in [
            ("/pay", "idempotency-key: k\r\n"),
            ("/pay", ""),
            ("/open/pay", ""),
        ] {
            let request = format!(
                "POST {path} HTTP/1.1\r\nhost: a\r\n{key}{fields}\r\n\r\n0\r\n\r\nPOST /open/hidden HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            );
            let reply = exchange(proxy.address, request).await;
            assert_eq!(reply.status(), 400, "{path} {fields}: {reply:?}");
            assert!(
                reply.is_problem("bad-length") && reply.0.contains("\r\nconnection: close\r\n"),
                "{path} {fields}: {reply:?}"
            );
            assert_eq!(reply.0.matches("HTTP/1.1 ").count(), 1, "{reply:?}");
        }
    }
    assert_eq!(upstream.effects(), 0);
}

/// Sends a request with these lengths. Returns the status of the response, and the first bytes of its body.
async fn send_with_lengths(
    client: &SendRequest<Bytes>,
    path: &str,
    lengths: &[&str],
    body: &'static str,
) -> (u16, String) {
    let mut request = Request::post(format!("http://a{path}")).header("idempotency-key", "k");
    for length in lengths {
        request = request.header("content-length", *length);
    }
    let request = request.body(()).unwrap();
    let mut client = client.clone().ready().await.unwrap();
    let (response, mut upload) = client.send_request(request, body.is_empty()).unwrap();
    if !body.is_empty() {
        upload.send_data(Bytes::from(body), true).unwrap();
    }
    let response = bounded(response).await.unwrap();
    let status = response.status().as_u16();
    let mut body = response.into_body();
    let data = bounded(body.data()).await.unwrap().unwrap();
    (status, String::from_utf8_lossy(&data).into_owned())
}

/// h2 compares the numbers of several lengths, and reads an empty one as 0. An upstream may read another number.
#[tokio::test]
async fn ambiguous_http2_length_is_refused() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    let stream = TcpStream::connect(proxy.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    for path in ["/pay", "/open/pay"] {
        for (lengths, body) in [
            (&["5", "5"][..], "abcde"),
            (&["5", "05"], "abcde"),
            (&[""], ""),
        ] {
            let (status, problem) = send_with_lengths(&client, path, lengths, body).await;
            assert_eq!(status, 400, "{path} {lengths:?}: {problem}");
            assert!(
                problem.contains("\"code\":\"bad-length\""),
                "{path} {lengths:?}: {problem}"
            );
        }
    }
    assert_eq!(upstream.effects(), 0);
    // The connection stays open, and accepts one length.
    let (status, body) = send_with_lengths(&client, "/pay", &["5"], "abcde").await;
    assert_eq!((status, body.as_str()), (201, "created"));
    assert_eq!(upstream.effects(), 1);
    connection.abort();
}

/// The requests before it on the connection are executed, and a body may have the lines of a head.
#[tokio::test]
async fn only_ambiguous_request_is_refused() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    let head = |fields: &str| format!("POST /open/pay HTTP/1.1\r\nhost: a\r\n{fields}\r\n");
    let ambiguous = head("content-length: 0\r\ntransfer-encoding: chunked\r\n");
    let size = ambiguous.len();
    let sized = head(&format!("content-length: {size}\r\n")) + &ambiguous;
    let chunked = head("transfer-encoding: chunked\r\n");
    let chunked = format!("{chunked}{size:x};a=b\r\n{ambiguous}\r\n0\r\n\r\n");
    let reply = exchange(proxy.address, sized + &chunked + &ambiguous + "0\r\n\r\n").await;
    assert_eq!(reply.0.matches("HTTP/1.1 201 ").count(), 2, "{reply:?}");
    assert_eq!(reply.0.matches("HTTP/1.1 400 ").count(), 1, "{reply:?}");
    assert!(reply.is_problem("bad-length"), "{reply:?}");
    assert_eq!(upstream.effects(), 2);
}

/// Parsers of URLs read `//x/pay` as the path `/pay` of the host `x`.
#[tokio::test]
async fn path_with_host_avoids_no_route() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = config(upstream.address, "", "missing_key = \"reject\"");
    let text = text.replace("path = \"/**\"", "path = \"/pay\"");
    let text = text + "\n[[route]]\npath = \"/**\"\nupstream = \"app\"\nmode = \"off\"\n";
    let proxy = Served::start(&text).await;
    for target in ["//x/pay", "//pay", "///pay", "//", "http://a//x/pay"] {
        let request = format!(
            "POST {target} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        );
        let reply = exchange(proxy.address, request).await;
        assert!(
            reply.status() == 400 && reply.is_problem("bad-path"),
            "{target}: {reply:?}"
        );
    }
    assert_eq!(upstream.effects(), 0);
}

#[tokio::test]
async fn length_beside_chunks_of_response_is_removed() {
    for fields in [
        "content-length: 100\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 3",
    ] {
        let response = format!("HTTP/1.1 201 Created\r\n{fields}\r\n\r\n7\r\ncreated\r\n0\r\n\r\n");
        let upstream = Upstream::start(move |_| Script::reply(response.as_str())).await;
        let proxy = Served::start(&config(upstream.address, "", "")).await;
        for (path, is_replay, effects) in [
            ("/open/pay", false, 1),
            ("/pay", false, 2),
            ("/pay", true, 2),
        ] {
            let mut client = H1::connect(proxy.address).await;
            client.send(post_bytes(path, "k", "1")).await;
            let response = bounded(client.response()).await.unwrap();
            assert_eq!(
                (response.status.as_u16(), response.text()),
                (201, "created"),
                "{path} {fields}"
            );
            assert_eq!(response.is_replay(), is_replay, "{path} {fields}");
            assert_eq!(upstream.effects(), effects, "{path} {fields}");
        }
    }
}

#[tokio::test]
async fn oversized_heads_are_refused() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    // With 3 other lines.
    let lines = |count: usize| "x: 1\r\n".repeat(count - 3);
    let long = format!("x: {}\r\n", "a".repeat(100_000));
    for (lines, status) in [(lines(100), 201), (lines(101), 431), (long, 431)] {
        let request = format!(
            "POST /pay HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{lines}content-length: 0\r\n\r\n"
        );
        let reply = exchange(proxy.address, request).await;
        assert_eq!(reply.status(), status, "{reply:?}");
    }
    assert_eq!(upstream.effects(), 1);
}

/// A client sends one byte for a line that it has sent before, and the proxy takes about 100 bytes for it.
#[tokio::test]
async fn heads_with_many_lines_are_refused() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    let stream = TcpStream::connect(proxy.address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let lines = |count: usize| {
        let lines = (0..count).map(|number| {
            let name = HeaderName::try_from(format!("x-{number}")).unwrap();
            (name, HeaderValue::from_static("1"))
        });
        lines.collect::<HeaderMap>()
    };
    for (count, status) in [(256, 201), (257, 431), (1_500, 431)] {
        let mut request = Request::post("http://a/pay").body(()).unwrap();
        *request.headers_mut() = lines(count);
        let mut client = client.clone().ready().await.unwrap();
        let (received, _) = client.send_request(request, true).unwrap();
        let received = bounded(received).await.unwrap();
        assert_eq!(received.status(), status, "{count}");
        let body = bounded(received.into_body().data()).await.unwrap().unwrap();
        let is_problem = String::from_utf8_lossy(&body).contains("too-many-headers");
        assert_eq!(is_problem, status == 431, "{count}");
    }
    assert_eq!(upstream.effects(), 1);
    // Trailers with more lines make the body of a protected request incomplete.
    for (count, status) in [(256, 201), (257, 400)] {
        let request = Request::post("http://a/pay").header("idempotency-key", count);
        let mut client = client.clone().ready().await.unwrap();
        let (received, mut body) = client
            .send_request(request.body(()).unwrap(), false)
            .unwrap();
        body.send_trailers(lines(count)).unwrap();
        assert_eq!(bounded(received).await.unwrap().status(), status, "{count}");
    }
    assert_eq!(upstream.effects(), 2);
    connection.abort();
}

/// Clients with HTTP/2 reject several lengths, a length of a 204, and trailers that belong to one connection.
#[tokio::test]
async fn http2_client_gets_obsolete_responses() {
    const CREATED: &str = "HTTP/1.1 201 Created\r\n";
    for (response, status, trailer) in [
        (
            "HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n".to_owned(),
            204,
            None,
        ),
        (
            format!("{CREATED}content-length: 2\r\ncontent-length: 2\r\n\r\nok"),
            201,
            None,
        ),
        (
            format!("{CREATED}content-length: 2, 2\r\n\r\nok"),
            201,
            None,
        ),
        (
            format!(
                "{CREATED}transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nconnection: close\r\nx-sum: 9\r\n\r\n"
            ),
            201,
            Some("9"),
        ),
        (
            format!(
                "{CREATED}connection: x-hop\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-hop: 1\r\nx-sum: 9\r\n\r\n"
            ),
            201,
            Some("9"),
        ),
    ] {
        let reply = response.clone();
        let upstream = Upstream::start(move |_| Script::reply(reply.as_str())).await;
        let proxy = Served::start(&config(upstream.address, "", "")).await;
        let stream = TcpStream::connect(proxy.address).await.unwrap();
        let (client, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::spawn(connection);
        for path in ["/open/pay", "/pay", "/pay"] {
            let request = Request::post(format!("http://a{path}"));
            let request = request.header("idempotency-key", "k").body(()).unwrap();
            let mut client = client.clone().ready().await.unwrap();
            let (received, _) = client.send_request(request, true).unwrap();
            let received = bounded(received).await.unwrap();
            assert_eq!(received.status(), status, "{path}: {response}");
            let lengths = received.headers().get_all("content-length").iter().count();
            assert_eq!(
                lengths,
                usize::from(status == 201 && trailer.is_none()),
                "{path}: {response}"
            );
            let mut body = received.into_body();
            let mut data = Vec::new();
            while let Some(bytes) = bounded(body.data()).await {
                data.extend_from_slice(&bytes.unwrap());
            }
            assert_eq!(
                data,
                if status == 204 { "" } else { "ok" }.as_bytes(),
                "{path}: {response}"
            );
            let trailers = bounded(body.trailers()).await.unwrap().unwrap_or_default();
            for name in ["connection", "x-hop"] {
                assert!(!trailers.contains_key(name), "{path}: {response}");
            }
            assert_eq!(
                trailers.get("x-sum").map(|value| value.to_str().unwrap()),
                trailer,
                "{path}: {response}"
            );
        }
        assert_eq!(upstream.effects(), 2, "{response}");
        connection.abort();
    }
}
