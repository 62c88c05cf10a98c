//! The request that the upstream gets.

use std::collections::HashSet;

use axum::{Router, extract::Request, http::HeaderName};
use http_body_util::BodyExt;
use tests::wire::Server;

use crate::harness::{ConnectionEnd, Script, Served, Upstream, config, exchange, post, post_with};

fn field<'a>(request: &'a str, name: &str) -> Option<&'a str> {
    let lines = request.split("\r\n").skip(1);
    let mut fields = lines.filter_map(|line| line.split_once(": "));
    fields
        .find(|(found, _)| found.eq_ignore_ascii_case(name))
        .map(|(_, value)| value)
}

/// A fragment is no part of the target, and an empty path is `/`.
#[tokio::test]
async fn empty_path_is_written_as_root() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for target in ["http://a#x", "http://a", "http://a?q"] {
        let request = format!(
            "POST {target} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        );
        assert_eq!(
            exchange(proxy.address, request).await.status(),
            201,
            "{target}"
        );
    }
    let lines = upstream.requests();
    let lines: Vec<_> = lines.iter().filter_map(|it| it.lines().next()).collect();
    assert_eq!(
        lines,
        ["POST / HTTP/1.1", "POST / HTTP/1.1", "POST /?q HTTP/1.1"]
    );
}

#[tokio::test]
async fn http2_upstream_gets_path_of_target() {
    let app = Router::new().fallback(async |req: Request| {
        let path = req.uri().path_and_query().unwrap();
        path.as_str().to_owned()
    });
    let upstream = Server::start(app).await;
    let proxy = Served::start(&config(upstream.addr(), "http2 = true", "")).await;
    for (target, path) in [
        ("POST http://a", "/"),
        ("POST http://a?q", "/?q"),
        ("POST http://a/b?q", "/b?q"),
        ("OPTIONS *", "*"),
    ] {
        let request = format!(
            "{target} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        );
        let reply = exchange(proxy.address, request).await;
        assert_eq!(reply.status(), 200, "{reply:?}");
        assert!(reply.0.ends_with(&format!("\r\n\r\n{path}")), "{reply:?}");
    }
}

#[tokio::test]
async fn version_of_response_is_that_of_proxy() {
    let upstream =
        Upstream::start(|_| Script::reply("HTTP/1.0 201 Created\r\ncontent-length: 2\r\n\r\nok"));
    let upstream = upstream.await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for key in ["k", "k"] {
        let reply = exchange(proxy.address, post("/pay", key, "1")).await;
        assert!(reply.0.starts_with("HTTP/1.1 201 "), "{reply:?}");
    }
}

#[tokio::test]
async fn connection_header_removes_no_credential() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    let lines = "x-api-key: a\r\nstripe-account: b\r\nx_tenant_id: d\r\nx-hop: c\r\n";
    let request = post_with("/pay", "k", lines, "1").replace(
        "connection: close",
        "connection: close, x-api-key, stripe-account, x_tenant_id, x-hop",
    );
    assert_eq!(exchange(proxy.address, request).await.status(), 201);
    let received = upstream.requests()[0].to_ascii_lowercase();
    assert!(received.contains("x-api-key: a\r\n"), "{received}");
    assert!(received.contains("stripe-account: b\r\n"), "{received}");
    assert!(received.contains("x_tenant_id: d\r\n"), "{received}");
    assert!(!received.contains("x-hop"), "{received}");
}

#[tokio::test]
async fn upstream_gets_derived_key() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for (path, key) in [("/pay", "k1"), ("/pay", "k2"), ("/open/pay", "k1")] {
        assert_eq!(
            exchange(proxy.address, post(path, key, "1")).await.status(),
            201
        );
    }
    let requests = upstream.requests();
    let keys: Vec<_> = requests
        .iter()
        .map(|request| field(request, "idempotency-key").unwrap())
        .collect();
    assert!(keys[..2].iter().all(|key| key.len() == 64), "{keys:?}");
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), 3);
    assert_eq!(keys[2], "k1");
}

#[tokio::test]
async fn derived_key_is_same_in_each_execution() {
    let upstream = Upstream::start(|number| match number {
        0 => Script::reply("").then(ConnectionEnd::Close),
        _ => Script::create(),
    });
    let upstream = upstream.await;
    let route = "unknown = \"free\"\nkey_header = \"x-request-key\"";
    let proxy = Served::start(&config(upstream.address, "", route)).await;
    let request = post_with("/pay", "ignored", "x-request-key: k\r\n", "1");
    for status in [502, 201] {
        assert_eq!(exchange(proxy.address, &request).await.status(), status);
    }
    let requests = upstream.requests();
    let keys: Vec<_> = requests
        .iter()
        .map(|request| field(request, "x-request-key").unwrap())
        .collect();
    assert_eq!(keys[0], keys[1]);
    assert_ne!(keys[0], "k");
}

/// An upstream that repeats the header of the key, as a service with support for keys does.
async fn repeating(name: &'static str) -> Server {
    let app = Router::new().fallback(move |req: Request| async move {
        let key = req.headers()[name].clone();
        let text = key.to_str().unwrap().to_owned();
        ([(HeaderName::from_static(name), key)], text)
    });
    Server::start(app).await
}

/// The key of the client is in the response and in its record.
#[tokio::test]
async fn derived_key_does_not_reach_client() {
    for (name, route, key) in [
        ("idempotency-key", "", "k"),
        ("idempotency-key", "", "\"k\""),
        ("idempotency-key", "preset = \"ietf\"", "\"k\""),
        ("x-request-key", "key_header = \"x-request-key\"", "k"),
    ] {
        let upstream = repeating(name).await;
        let proxy = Served::start(&config(upstream.addr(), "", route)).await;
        let request = post("/pay", key, "1").replace("idempotency-key", name);
        for _ in 0..2 {
            let reply = exchange(proxy.address, &request).await;
            let (head, derived) = reply.0.split_once("\r\n\r\n").unwrap();
            assert!(derived.trim_matches('"').len() == 64, "{reply:?}");
            assert!(!head.contains(derived.trim_matches('"')), "{reply:?}");
            assert_eq!(field(head, name), Some(key), "{route}: {reply:?}");
        }
    }
}

#[tokio::test]
async fn other_key_of_upstream_reaches_client() {
    let response = "HTTP/1.1 201 Created\r\nidempotency-key: other\r\ncontent-length: 0\r\n\r\n";
    let upstream = Upstream::start(move |_| Script::reply(response)).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for _ in 0..2 {
        let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
        assert_eq!(field(&reply.0, "idempotency-key"), Some("other"));
    }
    assert_eq!(upstream.effects(), 1);
}

#[tokio::test]
async fn forward_key_and_encoding_are_settings() {
    for (route, key, encoding) in [
        ("forward_key = \"pass\"", Some("k"), Some("identity")),
        (
            "forward_key = \"drop\"\nencoding = \"pass\"",
            None,
            Some("gzip"),
        ),
    ] {
        let upstream = Upstream::start(|_| Script::create()).await;
        let proxy = Served::start(&config(upstream.address, "", route)).await;
        exchange(
            proxy.address,
            post_with("/pay", "k", "accept-encoding: gzip\r\n", "1"),
        )
        .await;
        let requests = upstream.requests();
        assert_eq!(field(&requests[0], "idempotency-key"), key);
        assert_eq!(field(&requests[0], "accept-encoding"), encoding);
    }
}

/// `TE` without `Connection` would belong to the next connection too.
#[tokio::test]
async fn te_belongs_to_connection_of_upstream() {
    let request = post_with("/pay", "k", "te: trailers\r\n", "1");
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    assert_eq!(exchange(proxy.address, &request).await.status(), 201);
    let requests = upstream.requests();
    assert_eq!(field(&requests[0], "te"), Some("trailers"));
    assert_eq!(field(&requests[0], "connection"), Some("te"));

    let app = Router::new().fallback(async |req: Request| {
        assert!(!req.headers().contains_key("connection"));
        req.headers()["te"].to_str().unwrap().to_owned()
    });
    let upstream = Server::start(app).await;
    let proxy = Served::start(&config(upstream.addr(), "http2 = true", "")).await;
    let reply = exchange(proxy.address, &request).await;
    assert!(reply.0.ends_with("\r\n\r\ntrailers"), "{reply:?}");
}

#[tokio::test]
async fn last_forward_is_not_sent() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for (method, forwards, status) in [
        ("OPTIONS", 0, 204),
        ("TRACE", 0, 405),
        ("OPTIONS", 1, 201),
        ("TRACE", 2, 201),
    ] {
        let request = format!(
            "{method} /pay HTTP/1.1\r\nhost: a\r\nconnection: close\r\nmax-forwards: {forwards}\r\n\r\n"
        );
        let reply = exchange(proxy.address, request).await;
        assert_eq!(reply.status(), status, "{method}: {reply:?}");
        let allowed = field(&reply.0, "allow");
        assert_eq!(allowed.is_some(), status != 201, "{method}: {reply:?}");
    }
    let requests = upstream.requests();
    let forwards = requests.iter().map(|it| field(it, "max-forwards"));
    assert_eq!(forwards.collect::<Vec<_>>(), [Some("0"), Some("1")]);
}

#[tokio::test]
async fn request_without_key_passes_unchanged() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    let request = "POST /pay?a=%20b HTTP/1.1\r\nhost: shop.example\r\naccept-encoding: gzip\r\nconnection: close, x-hop\r\nx-hop: 1\r\nx-end: 2\r\ncontent-length: 3\r\n\r\nabc";
    for _ in 0..2 {
        assert_eq!(exchange(proxy.address, request).await.status(), 201);
    }
    assert_eq!(upstream.effects(), 2);
    let requests = upstream.requests();
    let sent = &requests[1];
    assert!(
        sent.starts_with("POST /pay?a=%20b HTTP/1.1\r\n") && sent.ends_with("\r\n\r\nabc"),
        "{sent}"
    );
    for (name, value) in [
        ("host", Some("shop.example")),
        ("accept-encoding", Some("gzip")),
        ("x-end", Some("2")),
        ("x-hop", None),
        ("connection", None),
        ("content-length", Some("3")),
        ("x-forwarded-for", Some("127.0.0.1")),
        ("x-forwarded-host", Some("shop.example")),
        ("x-forwarded-proto", Some("http")),
        ("via", Some("1.1 idempotency-proxy")),
    ] {
        assert_eq!(field(sent, name), value, "{name} in {sent}");
    }
}

#[tokio::test]
async fn missing_key_is_rejected_if_required() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "missing_key = \"reject\"")).await;
    let without_key =
        "POST /pay HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let reply = exchange(proxy.address, without_key).await;
    assert!(
        reply.status() == 400 && reply.is_problem("missing-key"),
        "{reply:?}"
    );
    let reply = exchange(proxy.address, without_key.replace("POST", "GET")).await;
    assert_eq!(reply.status(), 201, "{reply:?}");
    assert_eq!(upstream.effects(), 1);
}

#[tokio::test]
async fn request_without_route_is_rejected() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = config(
        upstream.address,
        "",
        "host = \"api.example\"\nmethods = [\"POST\"]",
    );
    let proxy = Served::start(&text).await;
    let request = "POST /pay HTTP/1.1\r\nhost: API.example:80\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    assert_eq!(exchange(proxy.address, request).await.status(), 201);
    let in_full = request.replace("API.example", "api.example.");
    assert_eq!(exchange(proxy.address, in_full).await.status(), 201);
    for other in [
        request.replace("API.example", "b.example"),
        request.replace("POST", "PUT"),
        request.replace("POST /pay", "POST http://b.example/pay"),
    ] {
        let reply = exchange(proxy.address, other).await;
        assert!(
            reply.status() == 404 && reply.is_problem("no-route"),
            "{reply:?}"
        );
    }
    let tunnel =
        "CONNECT api.example:443 HTTP/1.1\r\nhost: api.example:443\r\nconnection: close\r\n\r\n";
    assert_eq!(exchange(proxy.address, tunnel).await.status(), 405);
    assert_eq!(upstream.effects(), 2);
}

#[tokio::test]
async fn derived_key_has_syntax_of_route() {
    for (route, is_quoted) in [
        ("", false),
        ("preset = \"ietf\"", true),
        ("key_syntax = \"strict\"", true),
    ] {
        let upstream = Upstream::start(|_| Script::create()).await;
        let proxy = Served::start(&config(upstream.address, "", route)).await;
        let reply = exchange(proxy.address, post("/pay", "\"k\"", "1")).await;
        assert_eq!(reply.status(), 201, "{reply:?}");
        let requests = upstream.requests();
        let key = field(&requests[0], "idempotency-key").unwrap();
        assert_eq!(
            (key.starts_with('"'), key.len()),
            (is_quoted, if is_quoted { 66 } else { 64 })
        );
    }
}

#[tokio::test]
async fn each_spelling_of_path_is_protected() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = config(upstream.address, "", "missing_key = \"reject\"");
    let text = text.replace("path = \"/**\"", "path = \"/pay\"");
    let text = text + "\n[[route]]\npath = \"/**\"\nupstream = \"app\"\nmode = \"off\"\n";
    let proxy = Served::start(&text).await;
    let without_key =
        "POST /pay HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    for path in [
        "/pay",
        "/pay//",
        "/pay/",
        "/%70ay",
        "/p%61y?a=b",
        "/PAY",
        "/pay;a=b",
        "/pay%3B",
    ] {
        let reply = exchange(proxy.address, without_key.replace("/pay", path)).await;
        assert!(reply.is_problem("missing-key"), "{path}: {reply:?}");
    }
    // Some services read it as /pay.
    let reply = exchange(proxy.address, without_key.replace("/pay", "/pay%0A")).await;
    assert!(reply.is_problem("bad-path"), "{reply:?}");
    assert_eq!(upstream.effects(), 0);
    let reply = exchange(proxy.address, without_key.replace("/pay", "/paid")).await;
    assert_eq!(reply.status(), 201);
}

#[tokio::test]
async fn connection_header_cannot_remove_principal() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let route = "principal = { header = \"x-user-id\" }";
    let proxy = Served::start(&config(upstream.address, "", route)).await;
    let lines = "connection: x-user-id, idempotency-key\r\nx-user-id: 7\r\n";
    exchange(proxy.address, post_with("/pay", "k", lines, "1")).await;
    let requests = upstream.requests();
    assert_eq!(field(&requests[0], "x-user-id"), Some("7"));
    assert_eq!(field(&requests[0], "idempotency-key").unwrap().len(), 64);
}

/// The last body ends without trailers.
#[tokio::test]
async fn trailers_of_connection_are_removed() {
    const TWO: &str = "x-hop: 1\r\nx-sum: 9\r\n";
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for (number, (path, sent, expected)) in [
        ("/open/pay", TWO, "x-sum: 9\r\n"),
        ("/pay", TWO, "x-sum: 9\r\n"),
        ("/open/pay", "x-hop: 1\r\n", ""),
    ]
    .into_iter()
    .enumerate()
    {
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\nconnection: close, X-Hop\r\ntrailer: x-hop, x-sum\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n{sent}\r\n"
        );
        let reply = exchange(proxy.address, request).await;
        assert_eq!(reply.status(), 201, "{reply:?}");
        let requests = upstream.requests();
        let (_, body) = requests[number].split_once("\r\n\r\n").unwrap();
        assert_eq!(body, format!("1\r\na\r\n0\r\n{expected}\r\n"), "{path}");
    }
}

/// A server may add trailers to the headers, as tonic does.
#[tokio::test]
async fn trailers_replace_no_headers() {
    const BODY: &str = "1\r\na\r\n0\r\nx-user-id: 8\r\nx_user_id: 8\r\nx-forwarded-for: 192.0.2.1\r\nidempotency-key: other\r\nx-sum: 9\r\nconnection: x\r\n\r\n";
    let route = "principal = { header = \"x-user-id\" }";
    let trailers = "x-user-id, x_user_id, x-forwarded-for, idempotency-key, x-sum, connection";
    let request = |path: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nhost: a\r\nx-user-id: 7\r\nidempotency-key: k\r\nconnection: close\r\ntrailer: {trailers}\r\ntransfer-encoding: chunked\r\n\r\n{BODY}"
        )
    };
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", route)).await;
    // The open route names no header of a principal.
    let open = "1\r\na\r\n0\r\nx-user-id: 8\r\nx_user_id: 8\r\nx-sum: 9\r\n\r\n";
    let protected = "1\r\na\r\n0\r\nx-sum: 9\r\n\r\n";
    for (number, (path, expected)) in [("/open/pay", open), ("/pay", protected)]
        .into_iter()
        .enumerate()
    {
        let reply = exchange(proxy.address, request(path)).await;
        assert_eq!(reply.status(), 201, "{reply:?}");
        let requests = upstream.requests();
        let (_, body) = requests[number].split_once("\r\n\r\n").unwrap();
        assert_eq!(body, expected, "{path}");
    }

    // Without the end of the body, this upstream would not respond.
    let app = Router::new().fallback(async |req: Request| {
        let body = req.into_body().collect().await.unwrap();
        let trailers = body.trailers().cloned().unwrap_or_default();
        format!("{:?}", trailers.keys().collect::<Vec<_>>())
    });
    let upstream = Server::start(app).await;
    let proxy = Served::start(&config(upstream.addr(), "http2 = true", route)).await;
    for path in ["/open/pay", "/pay"] {
        let reply = exchange(proxy.address, request(path)).await;
        let (head, trailers) = reply.0.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 "), "{path}: {reply:?}");
        let is_expected = trailers.contains("x-sum") && !trailers.contains("connection");
        assert!(is_expected, "{path}: {reply:?}");
    }
}
