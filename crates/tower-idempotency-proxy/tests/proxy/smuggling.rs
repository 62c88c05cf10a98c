//! Requests that two servers may read differently.

use tests::{
    barrier::bounded,
    wire::{H1, post_bytes},
};

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

#[tokio::test]
async fn length_beside_chunks_leaves_no_second_request() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for (number, fields) in [
        "content-length: 6\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 6",
    ]
    .into_iter()
    .enumerate()
    {
        let request = format!(
            "POST /open/pay HTTP/1.1\r\nhost: a\r\n{fields}\r\n\r\n0\r\n\r\nPOST /open/hidden HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
        );
        // The connection closes by itself.
        let reply = exchange(proxy.address, request).await;
        assert_eq!(reply.0.matches("HTTP/1.1 ").count(), 1, "{reply:?}");
        let requests = upstream.requests();
        assert_eq!(requests.len(), number + 1);
        let lower = requests[number].to_ascii_lowercase();
        assert!(
            lower.starts_with("post /open/pay ") && !lower.contains("content-length"),
            "{lower}"
        );
    }
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
    let many = "x: 1\r\n".repeat(200);
    let long = format!("x: {}\r\n", "a".repeat(100_000));
    for lines in [many, long] {
        let request = format!("POST /pay HTTP/1.1\r\nhost: a\r\n{lines}content-length: 0\r\n\r\n");
        let reply = exchange(proxy.address, request).await;
        assert_eq!(reply.status(), 431, "{reply:?}");
    }
    assert_eq!(upstream.effects(), 0);
}
