//! Reload, drain, and the admin port.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tests::{
    barrier::{bounded, eventually},
    few_or,
    wire::{Disconnect, H1},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::sleep,
};
use tower_idempotency_proxy::Config;

use crate::harness::{ConnectionEnd, Counters, Script, Served, Upstream, config, exchange, post};

async fn get(address: std::net::SocketAddr, path: &str) -> crate::harness::Reply {
    exchange(
        address,
        format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"),
    )
    .await
}

/// Waits until the admin port reports that the proxy drains.
async fn wait_until_draining(admin: std::net::SocketAddr) {
    let polling = async {
        while get(admin, "/readyz").await.status() != 503 {
            tokio::task::yield_now().await;
        }
    };
    bounded(polling).await;
}

fn body(reply: &str) -> &str {
    reply.split_once("\r\n\r\n").unwrap().1
}

#[tokio::test]
async fn admin_port_shows_health_and_policy() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = config(upstream.address, "", "retention = \"2h\"")
        .replace("\"memory\"", "\"memory\"\ntimeout = \"3s\"");
    let proxy = Served::start(&text).await;
    let admin = proxy.admin.unwrap();
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(get(admin, path).await.status(), 200, "{path}");
    }
    let shown = get(admin, "/policy").await;
    let json: serde_json::Value = serde_json::from_str(body(&shown.0)).unwrap();
    let expected: Vec<_> = Config::from_toml(&text)
        .unwrap()
        .policies()
        .unwrap()
        .into_iter()
        .map(|(route, policy)| serde_json::json!({ "route": route, "policy": policy }))
        .collect();
    assert_eq!(json["policies"], serde_json::Value::from(expected));
    assert_eq!(json["policies"][0]["policy"], serde_json::Value::Null);
    assert_eq!(json["policies"][1]["policy"]["retention"], 7_200);
    assert_eq!(json["policies"][1]["policy"]["failure"], "needs-attention");
    let policy = shown.0;
    assert!(
        policy.contains("\"retention\":\"2h\"") && policy.contains("\"unknown\":\"attention\""),
        "{policy}"
    );
    assert!(!policy.contains("memory"), "{policy}");
    assert_eq!(get(admin, "/other").await.status(), 404);
    assert_eq!(
        exchange(admin, post("/policy", "k", "")).await.status(),
        405
    );
    // The port for clients has none of these pages.
    assert_eq!(get(proxy.address, "/healthz").await.status(), 201);
}

#[tokio::test]
async fn each_metric_has_unit() {
    let counters = Counters::default();
    let _guard = counters.install();
    let upstream = Upstream::start(|_| Script::create()).await;
    let _proxy = Served::start(&config(upstream.address, "", "")).await;
    let mut units = counters.units();
    units.retain(|name, _| name.starts_with("idempotency_proxy_"));
    assert_eq!(units.len(), 6, "{units:?}");
    for (name, unit) in units {
        assert_eq!(unit, Some(metrics::Unit::Count), "{name}");
    }
}

/// A reload changes the policy that the admin port shows, and the layer with it.
#[tokio::test]
async fn policy_follows_reload() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = config(upstream.address, "", "");
    let proxy = Served::start(&text).await;
    let shown = async || -> serde_json::Value {
        let page = get(proxy.admin.unwrap(), "/policy").await;
        serde_json::from_str(body(&page.0)).unwrap()
    };
    let without_key =
        "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    for (line, is_required, status) in [("", false, 201), ("missing_key = \"reject\"", true, 400)] {
        let config = config(upstream.address, "", line);
        proxy.handle.reload(Config::from_toml(&config)).unwrap();
        let policy = &shown().await["policies"][1]["policy"];
        assert_eq!(policy["key"]["is_required"], is_required);
        let response = exchange(proxy.address, without_key.to_owned()).await;
        assert_eq!(response.status(), status);
    }
}

#[tokio::test]
async fn acp_route_follows_protocol() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = config(upstream.address, "", "preset = \"acp\"");
    let proxy = Served::start(&text).await;
    let send = async |path: &str, key: &str, body: &str| {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n{key}"
        );
        let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        exchange(proxy.address, request).await
    };
    let key = "idempotency-key: k\r\n";
    let missing = send("/checkout_sessions", "", "{}").await;
    assert!(
        missing.status() == 400 && missing.0.contains("idempotency_key_required"),
        "{}",
        missing.0
    );
    let first = send("/checkout_sessions", key, r#"{"a":1,"b":2}"#).await;
    assert!(first.status() == 201 && !first.is_replay(), "{}", first.0);
    assert!(
        first.0.to_lowercase().contains("idempotency-key: k"),
        "{}",
        first.0
    );
    assert!(
        send("/checkout_sessions", key, r#"{"b":2.0,"a":1}"#)
            .await
            .is_replay()
    );
    let conflict = send("/checkout_sessions", key, r#"{"a":1,"b":3}"#).await;
    assert!(
        conflict.status() == 422 && conflict.0.contains("idempotency_conflict"),
        "{}",
        conflict.0
    );
    assert!(
        !send("/checkout_sessions/1", key, r#"{"a":1,"b":2}"#)
            .await
            .is_replay()
    );
    assert_eq!(upstream.effects(), 2);
}

#[tokio::test]
async fn reloads_under_load_fail_no_request() {
    let upstreams = [
        Upstream::start(|_| Script::create()).await,
        Upstream::start(|_| Script::create()).await,
    ];
    let texts: Vec<_> = upstreams
        .iter()
        .map(|upstream| config(upstream.address, "", ""))
        .collect();
    let proxy = Served::start(&texts[0]).await;
    let (stop, sent) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicUsize::new(0)),
    );
    let clients: Vec<_> = (0..4)
        .map(|client| {
            let (stop, sent, address) = (Arc::clone(&stop), Arc::clone(&sent), proxy.address);
            tokio::spawn(async move {
                let mut connection = H1::connect(address).await;
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    // Each request and its retry, on one connection.
                    for _ in 0..2 {
                        let request =
                            tests::wire::post_bytes("/pay", &format!("{client}-{number}"), "1");
                        connection.send(request).await;
                        assert_eq!(bounded(connection.response()).await.unwrap().status, 201);
                    }
                    number += 1;
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    // More reloads follow if one of the upstreams has had no request.
    for reload in 0..10_000 {
        if reload >= 1000 && upstreams.iter().all(|upstream| upstream.effects() > 0) {
            break;
        }
        let config = Config::from_toml(&texts[(reload + 1) % 2]);
        proxy.handle.reload(config).unwrap();
        let before = sent.load(Ordering::Relaxed);
        while sent.load(Ordering::Relaxed) == before
            && clients.iter().all(|client| !client.is_finished())
        {
            tokio::task::yield_now().await;
        }
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    let effects: Vec<_> = upstreams.iter().map(Upstream::effects).collect();
    assert_eq!(effects[0] + effects[1], sent.load(Ordering::Relaxed));
    assert!(effects[0] > 0 && effects[1] > 0, "{effects:?}");
}

#[tokio::test]
async fn rejected_reload_changes_nothing() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = config(upstream.address, "", "");
    let proxy = Served::start(&text).await;
    assert_eq!(
        exchange(proxy.address, post("/pay", "k", "1"))
            .await
            .status(),
        201
    );
    for (from, to) in [
        ("path = \"/**\"", "path = \"/api/**\""),
        ("[store]", "[identity]\nnamespace = \"other\"\n[store]"),
        (
            "mode = \"off\"",
            "mode = \"off\"\n[[route]]\npath = \"/pay\"\nupstream = \"app\"\nmode = \"off\"",
        ),
    ] {
        let changed = text.replacen(from, to, 1);
        assert!(
            proxy.handle.reload(Config::from_toml(&changed)).is_err(),
            "{to}"
        );
        assert!(
            exchange(proxy.address, post("/pay", "k", "1"))
                .await
                .is_replay()
        );
    }
    assert_eq!(upstream.effects(), 1);
}

#[cfg(feature = "sqlite")]
#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn drain_finishes_open_requests_and_executions() {
    // The upstream responds when the test releases it.
    let released = Arc::new(AtomicBool::new(false));
    let barrier = Arc::clone(&released);
    let upstream = Upstream::start(move |_| {
        let script = Script::create();
        let barrier = Arc::clone(&barrier);
        // The script is chosen on a worker thread of its own connection.
        tokio::task::block_in_place(|| {
            while !barrier.load(Ordering::SeqCst) {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        });
        script
    });
    let upstream = upstream.await;
    let scratch = tests::scratch::Scratch::new();
    let store = format!(
        "url = \"sqlite:{}\"\ntimeout = \"60s\"",
        scratch.file("keys.db").display()
    );
    let text = config(upstream.address, "", "").replace("url = \"memory\"", &store);
    let proxy = Served::start(&text).await;
    let (address, admin) = (proxy.address, proxy.admin.unwrap());
    let open = tokio::spawn(async move { exchange(address, post("/pay", "open", "1")).await });
    let left = std::net::TcpStream::connect(address).unwrap();
    std::io::Write::write_all(&mut &left, post("/pay", "left", "1").as_bytes()).unwrap();
    tests::barrier::eventually("both requests are at the upstream", || {
        upstream.effects() == 2
    })
    .await;
    drop(left);
    let stopped = proxy.stop();
    wait_until_draining(admin).await;
    assert_eq!(get(admin, "/healthz").await.status(), 200);
    assert!(!stopped.is_finished());
    released.store(true, Ordering::SeqCst);
    assert_eq!(open.await.unwrap().status(), 201);
    assert!(bounded(stopped).await.unwrap());
    // The next process has the record of each execution.
    let proxy = Served::start(&text).await;
    for key in ["open", "left"] {
        let reply = exchange(proxy.address, post("/pay", key, "1")).await;
        assert_eq!(
            (reply.status(), reply.is_replay()),
            (201, true),
            "{key}: {reply:?}"
        );
    }
    assert_eq!(upstream.effects(), 2);
}

#[tokio::test]
async fn drain_gives_up_after_timeout() {
    let upstream = Upstream::start(|_| Script::reply("").then(ConnectionEnd::Hang)).await;
    let text = config(upstream.address, "", "") + "\n[drain]\ntimeout = \"100ms\"\n";
    let proxy = Served::start(&text).await;
    let address = proxy.address;
    tokio::spawn(async move { exchange(address, post("/pay", "k", "1")).await });
    tests::barrier::eventually("the request is at the upstream", || upstream.effects() == 1).await;
    assert!(!bounded(proxy.stop()).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn drain_under_load_loses_no_response() {
    for _ in 0..few_or(5, 50) {
        let upstream = Upstream::start(|_| Script::create()).await;
        let proxy = Served::start(&config(upstream.address, "", "")).await;
        let address = proxy.address;
        let clients: Vec<_> = (0..8)
            .map(|client| {
                tokio::spawn(async move {
                    let mut responses = 0;
                    for number in 0.. {
                        let request = post("/pay", &format!("{client}-{number}"), "1");
                        let Ok(mut stream) = TcpStream::connect(address).await else {
                            break;
                        };
                        let mut reply = Vec::new();
                        let _ = stream.write_all(request.as_bytes()).await;
                        let _ = bounded(stream.read_to_end(&mut reply)).await;
                        // A connection that the proxy did not accept is reset.
                        responses += usize::from(reply.starts_with(b"HTTP/1.1 201 "));
                    }
                    responses
                })
            })
            .collect();
        tests::barrier::eventually("requests are executed", || upstream.effects() >= 20).await;
        assert!(bounded(proxy.stop()).await.unwrap());
        let mut responses = 0;
        for client in clients {
            responses += client.await.unwrap();
        }
        assert_eq!(responses, upstream.effects());
    }
}

#[tokio::test]
async fn drain_delay_accepts_and_closes_connections() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let text = |delay: &str| {
        config(upstream.address, "", "") + &format!("\n[drain]\ndelay = \"{delay}\"\n")
    };
    let proxy = Served::start(&text("1h")).await;
    let (address, admin) = (proxy.address, proxy.admin.unwrap());
    let mut open = H1::connect(address).await;
    open.send(tests::wire::post_bytes("/pay", "k", "1")).await;
    let response = bounded(open.response()).await.unwrap();
    assert_eq!(response.header("connection"), None);
    let stopped = proxy.stop();
    wait_until_draining(admin).await;
    // The client learns from the response that it has to connect again.
    open.send(tests::wire::post_bytes("/pay", "k", "1")).await;
    let response = bounded(open.response()).await.unwrap();
    assert_eq!(response.header("connection"), Some("close"));
    assert!(response.is_replay());
    assert!(bounded(open.response()).await.is_none());
    let reply = exchange(address, post("/pay", "k", "1")).await;
    assert!(reply.is_replay(), "{reply:?}");
    assert!(!stopped.is_finished());
    // After its delay, a drain ends.
    let proxy = Served::start(&text("100ms")).await;
    assert!(bounded(proxy.stop()).await.unwrap());
}

/// A client that forges its address keeps its connection open.
#[tokio::test]
async fn reload_applies_to_open_connections() {
    let upstream = Upstream::start(|_| Script::create()).await;
    let strict = config(upstream.address, "", "");
    let proxy = Served::start(&strict.replace("[admin]", "forwarded = \"pass\"\n[admin]")).await;
    let mut client = H1::connect(proxy.address).await;
    let request = "GET /open/x HTTP/1.1\r\nhost: a\r\nx-forwarded-for: 198.51.100.1\r\n\r\n";
    for _ in 0..2 {
        client.send(request).await;
        assert_eq!(bounded(client.response()).await.unwrap().status, 201);
        proxy.handle.reload(Config::from_toml(&strict)).unwrap();
    }
    let requests = upstream.requests();
    let is_forged = |request: &String| request.contains("198.51.100.1");
    assert_eq!(
        requests.iter().map(is_forged).collect::<Vec<_>>(),
        [true, false]
    );
}

#[tokio::test]
async fn tunnel_counts_as_connection() {
    let switch =
        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    let upstream = Upstream::start(move |number| match number {
        0 => Script::reply(switch).then(ConnectionEnd::Hang),
        _ => Script::create(),
    });
    let upstream = upstream.await;
    let text = config(upstream.address, "", "").replace("[admin]", "max_connections = 1\n[admin]");
    let proxy = Served::start(&text).await;
    let mut tunnel = H1::connect(proxy.address).await;
    let head = "GET /chat HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    tunnel.send(head).await;
    assert!(bounded(tunnel.has_received("\r\n\r\n")).await);
    let request = post("/open/x", "k", "1");
    let waiting = tokio::spawn(exchange(proxy.address, request.clone()));
    // Meanwhile a proxy without the limit responds many times.
    let control = Served::start(&config(upstream.address, "", "")).await;
    for _ in 0..20 {
        assert_eq!(exchange(control.address, &request).await.status(), 201);
    }
    assert!(!waiting.is_finished());
    drop(tunnel);
    assert_eq!(bounded(waiting).await.unwrap().status(), 201);
}

/// The upstream has the request, and its client gets no response.
#[tokio::test]
async fn request_of_disconnected_client_is_counted() {
    const REQUESTS: &str = "idempotency_proxy_requests_total";
    let counters = Counters::default();
    let _guard = counters.install();
    let upstream = Upstream::start(|_| Script::reply("").then(ConnectionEnd::Hang)).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    for (number, path) in (1..).zip(["/pay", "/open/pay"]) {
        let mut client = H1::connect(proxy.address).await;
        client.send(tests::wire::post_bytes(path, "k", "1")).await;
        eventually("the request is at the upstream", || {
            upstream.effects() == number
        })
        .await;
        let count = || counters.of(REQUESTS).get("none").copied();
        assert_ne!(count(), Some(number as u64));
        client.disconnect(Disconnect::Reset);
        eventually("the request is counted", || count() == Some(number as u64)).await;
    }
    let counted = counters.of(REQUESTS);
    assert_eq!(counted.len(), 1, "{counted:?}");
}

/// A response that fits into no buffer, and a client that waits for the only connection.
#[tokio::test]
async fn unread_response_keeps_no_connection() {
    const SIZE: usize = 32 << 20;
    for is_http2 in [false, true] {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {SIZE}\r\n\r\n");
        let mut large = head.into_bytes();
        large.resize(large.len() + SIZE, b'x');
        let upstream = Upstream::start(move |number| match number {
            0 => Script::reply(large.clone()),
            _ => Script::create(),
        });
        let upstream = upstream.await;
        let lines = "idle_timeout = \"1s\"\nmax_connections = 1\n[admin]";
        let text = config(upstream.address, "", "").replace("[admin]", lines);
        let proxy = Served::start(&text).await;
        let stream = TcpStream::connect(proxy.address).await.unwrap();
        let unread: Box<dyn std::any::Any> = if is_http2 {
            let mut builder = h2::client::Builder::new();
            builder.initial_window_size(0);
            let (sender, connection) = builder.handshake::<_, Bytes>(stream).await.unwrap();
            // It replies to pings, and reads each frame.
            tokio::spawn(connection);
            let mut sender = sender.ready().await.unwrap();
            let request = http::Request::get("http://a/open/large").body(()).unwrap();
            let (response, _) = sender.send_request(request, true).unwrap();
            Box::new(bounded(response).await.unwrap())
        } else {
            let mut stream = stream;
            let request = "GET /open/large HTTP/1.1\r\nhost: a\r\n\r\n";
            stream.write_all(request.as_bytes()).await.unwrap();
            Box::new(stream)
        };
        eventually("the request is at the upstream", || upstream.effects() == 1).await;
        let other = exchange(proxy.address, post("/open/pay", "k", "1")).await;
        assert_eq!(other.status(), 201, "{is_http2}: {other:?}");
        drop(unread);
    }
}

/// Each part of the response that the client reads restarts its time.
#[tokio::test]
async fn slowly_read_response_is_complete() {
    const PIECE: usize = 1 << 20;
    const PIECES: usize = 24;
    let head = format!(
        "HTTP/1.1 201 Created\r\ncontent-length: {}\r\n\r\n",
        PIECE * PIECES
    );
    let mut large = head.into_bytes();
    large.resize(large.len() + PIECE * PIECES, b'x');
    let upstream = Upstream::start(move |_| Script::reply(large.clone())).await;
    let text = config(upstream.address, "", "");
    let text = text.replace("[admin]", "idle_timeout = \"1s\"\n[admin]");
    let proxy = Served::start(&text).await;
    let socket = TcpSocket::new_v4().unwrap();
    // The kernel would otherwise take large parts of the response that the client does not read.
    socket.set_recv_buffer_size(64 * 1024).unwrap();
    let mut client = socket.connect(proxy.address).await.unwrap();
    let request = post("/open/pay", "k", "1");
    client.write_all(request.as_bytes()).await.unwrap();
    let mut piece = vec![0; PIECE];
    // Together the pauses are longer than the time after which an unread response ends.
    for _ in 0..PIECES {
        bounded(client.read_exact(&mut piece)).await.unwrap();
        sleep(Duration::from_millis(400)).await;
    }
    // As many bytes as the head has.
    let mut rest = Vec::new();
    bounded(client.read_to_end(&mut rest)).await.unwrap();
    assert!((1..1_000).contains(&rest.len()), "{}", rest.len());
}

/// The upstream responds before it reads the upload. Without the parts that follow, the connection would be idle.
#[tokio::test]
async fn upload_after_response_is_complete() {
    const PIECES: usize = 16;
    let upstream = Upstream::start(|number| match number {
        0 => Script {
            read: Some(1),
            ..Script::reply("HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n")
        },
        // The rest of the same request.
        _ => Script::reply("").then(ConnectionEnd::Hang),
    });
    let upstream = upstream.await;
    let text = config(upstream.address, "", "");
    let text = text.replace("[admin]", "idle_timeout = \"1s\"\n[admin]");
    let proxy = Served::start(&text).await;
    let mut client = H1::connect(proxy.address).await;
    let head = format!("POST /open/upload HTTP/1.1\r\nhost: a\r\ncontent-length: {PIECES}\r\n\r\n");
    client.send(head).await;
    assert_eq!(bounded(client.response()).await.unwrap().status, 202);
    // Together the pauses (8 s) are longer than the time after which an idle client loses its connection (1 s + 5 s).
    for _ in 0..PIECES {
        sleep(Duration::from_millis(500)).await;
        client.send("x").await;
    }
    eventually("the upstream has read the upload", || {
        upstream.requests().len() == 2
    })
    .await;
    let rest = upstream.requests().remove(1);
    assert!(rest.ends_with(&"x".repeat(PIECES)), "{rest}");
}

/// Returns `true` if an open connection with these ports has the timer of keepalive.
#[cfg(target_os = "linux")]
fn has_keepalive(local: Option<u16>, remote: u16) -> bool {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    table.lines().any(|line| {
        let cells: Vec<_> = line.split_whitespace().collect();
        let is_port = |cell: usize, port: u16| cells[cell].ends_with(&format!(":{port:04X}"));
        // 01 is an open connection, and 02 the timer.
        is_port(2, remote)
            && local.is_none_or(|local| is_port(1, local))
            && cells[3] == "01"
            && cells[5].starts_with("02:")
    })
}

/// The kernel finds a client and an upstream that vanished without a sign.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn connections_have_keepalive() {
    let upstream = Upstream::start(|_| Script::reply("").then(ConnectionEnd::Hang)).await;
    let proxy = Served::start(&config(upstream.address, "", "")).await;
    let mut client = TcpStream::connect(proxy.address).await.unwrap();
    let request = post("/open/pay", "k", "1");
    client.write_all(request.as_bytes()).await.unwrap();
    let port = client.local_addr().unwrap().port();
    eventually("the connection of the client has keepalive", || {
        has_keepalive(Some(proxy.address.port()), port)
    })
    .await;
    eventually("the connection to the upstream has keepalive", || {
        has_keepalive(None, upstream.address.port())
    })
    .await;
}
