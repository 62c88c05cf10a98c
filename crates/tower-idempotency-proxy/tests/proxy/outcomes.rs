//! The state of a key after each way in which an upstream can fail.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use axum::{Extension, Router, routing};
use http::StatusCode;
use tests::{barrier::eventually, wire::Server};
use tower_idempotency::{IdempotencyLayer, MemoryStore, NeedsAttention};

use crate::harness::{
    CREATED, ConnectionEnd, Script, Served, Upstream, config, exchange, exchange_until_resolved,
    pay_twice, post,
};

#[tokio::test]
async fn unreachable_upstream_leaves_key_free() {
    let address = SocketAddr::from(([127, 0, 0, 1], tests::servers::free_port()));
    let proxy = Served::start(&config(address, "", "")).await;
    for _ in 0..3 {
        let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
        assert_eq!(reply.status(), 502, "{reply:?}");
        assert!(
            reply.is_problem("upstream-unreachable") && reply.0.contains("retry-after: 1"),
            "{reply:?}"
        );
    }
    let upstream = Upstream::start_at(address, |_| Script::create()).await;
    pay_twice(proxy.address, 201).await;
    assert_eq!(upstream.effects(), 1);
}

/// The pause is longer than all calls take by default.
#[cfg(feature = "redis")]
#[tokio::test]
async fn timeout_of_store_applies_to_redis() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let server = tests::servers::redis::RedisServer::start(&[]);
    let relay = tests::proxy::Proxy::start(server.address());
    let url = format!("redis://{}/0", relay.address());
    let store = format!("url = \"{url}\"\ntimeout = \"60s\"");
    let text = config(upstream.address, "", "").replace("url = \"memory\"", &store);
    let proxy = Served::start(&text).await;
    server.pause();
    let before = relay.counts().up;
    let request = post("/pay", "k", "1");
    let reply = tokio::spawn(async move { exchange(proxy.address, request).await });
    eventually("the command is at Redis", || relay.counts().up > before).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    server.resume();
    let reply = reply.await.unwrap();
    assert_eq!(reply.status(), 201, "{reply:?}");
    assert_eq!(upstream.effects(), 1);
}

/// The upstream may have executed the request before it switched.
#[tokio::test]
async fn unrequested_switch_leaves_outcome_unknown() {
    let switch =
        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    let upstream = Upstream::start(move |_| Script::reply(switch)).await;
    let proxy = Served::start(&config(upstream.address, "", "unknown_statuses = []")).await;
    let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
    assert_eq!(reply.status(), 502, "{reply:?}");
    assert!(reply.is_problem("outcome-unknown"), "{reply:?}");
    let retry = exchange(proxy.address, post("/pay", "k", "1")).await;
    assert_eq!(retry.status(), 409, "{retry:?}");
    assert_eq!(upstream.effects(), 1);
}

/// Sends pairs of requests until each script has broken reused connections. The upstream keeps the connection of the first
/// request open, and follows the next script for the second request.
async fn break_reused_connections(scripts: &[Script]) {
    let kinds = scripts.len();
    let breaks = scripts.to_owned();
    let upstream = Upstream::start(move |number| {
        if number.is_multiple_of(2) {
            return Script::create();
        }
        breaks[number / 2 % kinds].clone()
    });
    let upstream = upstream.await;
    let proxy = Served::start(&config(upstream.address, "keep_alive = \"1h\"", "")).await;
    let mut reused = vec![0; kinds];
    let began = Instant::now();
    for round in 0.. {
        assert!(began.elapsed() < Duration::from_secs(60), "{reused:?}");
        let reply = exchange(proxy.address, post("/pay", &format!("a{round}"), "1")).await;
        assert_eq!(reply.status(), 201, "{reply:?}");
        // The connection may not be idle yet.
        let connections = upstream.connections();
        let key = format!("b{round}");
        let reply = exchange(proxy.address, post("/pay", &key, "1")).await;
        assert_eq!(reply.status(), 502, "{reply:?}");
        assert!(reply.is_problem("outcome-unknown"), "{reply:?}");
        let effects = upstream.effects();
        assert_eq!(effects, 2 * (round + 1));
        if upstream.connections() == connections {
            reused[round % kinds] += 1;
        }
        for _ in 0..2 {
            let reply = exchange(proxy.address, post("/pay", &key, "1")).await;
            assert_eq!(reply.status(), 409, "{reply:?}");
            assert!(
                reply.0.contains("\"reason\":\"upstream-broken\""),
                "{reply:?}"
            );
        }
        assert_eq!(upstream.effects(), effects);
        if reused.iter().all(|reused| *reused >= 5) {
            return;
        }
    }
}

#[tokio::test]
async fn request_read_on_reused_connection_is_not_repeated() {
    let unanswered = Script::reply("");
    break_reused_connections(&[
        unanswered.clone().then(ConnectionEnd::Close),
        unanswered.then(ConnectionEnd::Reset),
    ])
    .await;
}

#[tokio::test]
async fn idle_connection_closed_by_upstream_executes_once() {
    let upstream = Upstream::start(|_| Script::create().then(ConnectionEnd::Close)).await;
    let proxy = Served::start(&config(upstream.address, "keep_alive = \"1h\"", "")).await;
    // The proxy may learn of the close before or after it sends the next request.
    let mut executed = 0;
    for round in 0..200 {
        let before = upstream.effects();
        let reply = exchange(proxy.address, post("/pay", &format!("k{round}"), "1")).await;
        let effects = upstream.effects() - before;
        match reply.status() {
            201 => assert_eq!(effects, 1),
            502 => assert!(effects <= 1, "{effects}"),
            _ => panic!("{reply:?}"),
        }
        executed += effects;
        if executed >= 20 {
            break;
        }
    }
    assert!(executed >= 20, "the upstream executed {executed} requests");
    // Here it learns of it afterwards: the upstream closes when a request arrives, and reads none of it.
    let unread = Script {
        read: Some(0),
        ..Script::reply("")
    };
    break_reused_connections(&[unread.then(ConnectionEnd::Close)]).await;
}

#[tokio::test]
async fn timeout_needs_attention() {
    let upstream = Upstream::start(|_| Script::reply("").then(ConnectionEnd::Hang)).await;
    let proxy = Served::start(&config(upstream.address, "timeout = \"200ms\"", "")).await;
    let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
    assert_eq!(reply.status(), 504, "{reply:?}");
    assert!(reply.is_problem("outcome-unknown"), "{reply:?}");
    eventually("the request is at the upstream", || upstream.effects() == 1).await;
    for _ in 0..3 {
        let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
        assert_eq!(reply.status(), 409, "{reply:?}");
        assert!(
            reply.0.contains("\"reason\":\"upstream-timeout\""),
            "{reply:?}"
        );
    }
    assert_eq!(upstream.effects(), 1);
}

/// A body that is sent at once does not restart the time.
#[tokio::test]
async fn timeout_begins_with_last_byte() {
    let upstream = Upstream::start(|_| Script::reply("").then(ConnectionEnd::Hang)).await;
    let proxy = Served::start(&config(upstream.address, "timeout = \"12s\"", "")).await;
    let began = Instant::now();
    let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
    assert_eq!(reply.status(), 504, "{reply:?}");
    // A timeout that restarts once takes 24 s.
    assert!(
        began.elapsed() < Duration::from_secs(23),
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test]
async fn status_of_upstream_decides_about_key() {
    let none = "";
    for (first, route, retry, effects) in [
        ("500 Internal Server Error\r\n", none, 201, 2),
        (
            "503 Service Unavailable\r\nretry-after: 1\r\n",
            none,
            201,
            2,
        ),
        (
            "503 Service Unavailable\r\nretry-after: 1\r\n",
            "preset = \"stripe\"",
            201,
            2,
        ),
        ("409 Conflict\r\nretry-after: 1\r\n", none, 201, 2),
        ("502 Bad Gateway\r\n", none, 409, 1),
        ("504 Gateway Timeout\r\n", none, 409, 1),
        // Of Cloudflare: the origin replied with something unexpected, or not in time.
        ("520 Unknown\r\n", none, 409, 1),
        ("524 Timeout\r\n", none, 409, 1),
        (
            "504 Gateway Timeout\r\n",
            "preset = \"ietf\"\nkey_syntax = \"lenient\"",
            409,
            1,
        ),
        ("504 Gateway Timeout\r\n", "unknown = \"free\"", 201, 2),
        ("504 Gateway Timeout\r\n", "unknown = \"orphan\"", 409, 1),
        ("504 Gateway Timeout\r\n", "unknown_statuses = []", 201, 2),
        (
            "503 Service Unavailable\r\n",
            "unknown_statuses = [502, 503, 504]",
            409,
            1,
        ),
        // Of Varnish, after it has sent the request.
        (
            "503 Service Unavailable\r\nretry-after: 5\r\n",
            "unknown_statuses = [503]",
            409,
            1,
        ),
        ("404 Not Found\r\n", none, 404, 1),
    ] {
        let response = format!("HTTP/1.1 {first}content-length: 4\r\n\r\nbody");
        let upstream = Upstream::start(move |number| {
            Script::reply(if number == 0 { &response } else { CREATED })
        });
        let upstream = upstream.await;
        let proxy = Served::start(&config(upstream.address, "", route)).await;
        let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
        assert_eq!(
            reply.0.get(9..12),
            first.get(..3),
            "{first} {route}: {reply:?}"
        );
        assert!(
            reply.0.ends_with("\r\n\r\nbody"),
            "{first} {route}: {reply:?}"
        );
        // A held key is an orphan after one millisecond.
        let reply = exchange_until_resolved(proxy.address, &post("/pay", "k", "1")).await;
        assert_eq!(reply.status(), retry, "{first} {route}: {reply:?}");
        assert!(
            retry != 409 || reply.is_problem("outcome-unknown"),
            "{first} {route}: {reply:?}"
        );
        assert_eq!(upstream.effects(), effects, "{first} {route}");
    }
}

// F-088, S-089, S-090, S-092
#[tokio::test]
async fn control_headers_of_upstream_decide_about_key() {
    let upstream = Upstream::start(|number| {
        let (status, line) = match number {
            0 => ("404 Not Found", "x-idempo-policy: no-store"),
            _ => ("201 Created", "x-idempo-persist-for-seconds: 3600"),
        };
        Script::reply(format!(
            "HTTP/1.1 {status}\r\n{line}\r\ncontent-length: 2\r\n\r\nok"
        ))
    });
    let upstream = upstream.await;
    let proxy = Served::start(&config(upstream.address, "", "retention = \"1s\"")).await;
    let request = post("/pay", "k", "1");
    let mut replies = vec![
        exchange(proxy.address, &request).await,
        exchange_until_resolved(proxy.address, &request).await,
    ];
    // The record is stored for longer than the retention.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    replies.push(exchange(proxy.address, &request).await);
    let seen: Vec<_> = replies
        .iter()
        .map(|reply| (reply.status(), reply.is_replay()))
        .collect();
    assert_eq!(seen, [(404, false), (201, false), (201, true)]);
    for reply in &replies {
        assert!(!reply.0.contains("x-idempo-"), "{reply:?}");
    }
    assert_eq!(upstream.effects(), 2);
}

#[tokio::test]
async fn unknown_setting_decides_about_broken_upstream() {
    for (route, retry, effects) in [
        ("unknown = \"attention\"", 409, 1),
        ("unknown = \"orphan\"", 409, 1),
        ("unknown = \"free\"", 201, 2),
        ("unknown = \"orphan\"\norphans = \"take-over\"", 201, 2),
        ("unknown = \"attention\"\norphans = \"take-over\"", 409, 1),
    ] {
        for reply in ["", "HTTP/1.1 201 Created\r\ncontent-length: 7\r\n\r\ncrea"] {
            let upstream = Upstream::start(move |number| match number {
                0 => Script::reply(reply).then(ConnectionEnd::Close),
                _ => Script::create(),
            });
            let upstream = upstream.await;
            let proxy = Served::start(&config(upstream.address, "", route)).await;
            exchange(proxy.address, post("/pay", "k", "1")).await;
            // A held key is an orphan after one millisecond.
            let retried = exchange_until_resolved(proxy.address, &post("/pay", "k", "1")).await;
            assert_eq!(retried.status(), retry, "{route} {reply:?}: {retried:?}");
            assert_eq!(upstream.effects(), effects, "{route} {reply:?}");
        }
    }
}

#[tokio::test]
async fn client_that_leaves_does_not_stop_execution() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for round in 0..20 {
        let request = post("/pay", &format!("k{round}"), "1");
        let client = std::net::TcpStream::connect(proxy.address).unwrap();
        std::io::Write::write_all(&mut &client, request.as_bytes()).unwrap();
        drop(client);
        let reply = exchange_until_resolved(proxy.address, &request).await;
        assert_eq!(reply.status(), 201, "{reply:?}");
        assert_eq!(upstream.effects(), round + 1);
    }
}

#[tokio::test]
async fn other_request_under_same_key_is_rejected() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    assert_eq!(
        exchange(proxy.address, post("/pay", "k", "1"))
            .await
            .status(),
        201
    );
    assert_eq!(
        exchange(proxy.address, post("/pay", "k", "2"))
            .await
            .status(),
        422
    );
    assert_eq!(
        exchange(proxy.address, post("/refund", "k", "1"))
            .await
            .status(),
        422
    );
    assert_eq!(
        exchange(proxy.address, post("/pay?a=b", "k", "1"))
            .await
            .status(),
        422
    );
    assert_eq!(upstream.effects(), 1);
}

/// The layer of the upstream has an entry that needs attention. Its rejection is no outcome for the proxy.
#[tokio::test]
async fn rejection_by_layer_of_upstream_is_not_recorded() {
    let pay = async || {
        let attention = Extension(NeedsAttention::new("refund-failed"));
        (StatusCode::INTERNAL_SERVER_ERROR, attention, "failed")
    };
    let app = Router::new()
        .route("/pay", routing::post(pay))
        .layer(IdempotencyLayer::new(MemoryStore::new()));
    let upstream = Server::start(app).await;
    let proxy = Served::start(&config(upstream.addr(), "", "")).await;
    for status in [500, 409, 409] {
        let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
        assert_eq!(
            (reply.status(), reply.is_replay()),
            (status, false),
            "{reply:?}"
        );
        assert_eq!(
            reply.is_problem("outcome-unknown"),
            status == 409,
            "{reply:?}"
        );
    }
}

/// An application may send problems and forbid caches to store them.
#[tokio::test]
async fn conflict_of_application_is_recorded() {
    for lines in [
        "",
        "content-type: application/problem+json\r\ncache-control: no-store\r\n",
    ] {
        let response = format!("HTTP/1.1 409 Conflict\r\n{lines}content-length: 2\r\n\r\n{{}}");
        let upstream = Upstream::start(move |_| Script::reply(&*response)).await;
        let proxy = Served::start(&config(upstream.address, "", "")).await;
        pay_twice(proxy.address, 409).await;
    }
}
