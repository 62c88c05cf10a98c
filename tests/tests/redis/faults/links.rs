//! Each kind of connection to a server gives the same responses.

use std::fs;

use http::StatusCode;
use tests::servers::redis::{RedisServer, Sentinel};
use tower_idempotency::ConcurrentRequests;
use tower_idempotency_redis::{
    ConnectErrorKind, RedisStore,
    redis::{Client, TlsCertificates},
};

use crate::{
    events::HANG,
    faults::{
        node::{EffectsByKey, Node, connect, options, until_connected},
        pool::connect_pool,
        sentinel::connect_through,
    },
    pools::pool_to,
    pushes::{until_delays_are_long, until_pushes_have_woken},
};

/// Checks a request, its replay and a waiter, and the same requests through another process with a plain connection.
async fn assert_serves(store: RedisStore, server: &RedisServer, pushes: bool) {
    let database = EffectsByKey::default();
    let node = Node::with(store, &database, |layer| {
        layer.with_concurrent_requests(ConcurrentRequests::Wait(HANG))
    });
    let plain = Node::with(connect(&server.url()).await, &database, |layer| layer);
    let first = node.post("/orders-large", "first").await;
    assert_eq!(first.status, StatusCode::CREATED);
    node.assert_replays("/orders-large", "first", &first).await;
    plain.assert_replays("/orders-large", "first", &first).await;

    let trial = async |n| {
        let key = format!("waited-for-{n}");
        let (request, _) = plain.running(&key).await;
        let monitor = server.monitor();
        let before = server.commandstats()["evalsha"];
        let waiter = node.spawn("/held", &key);
        if pushes {
            until_delays_are_long(server, before).await;
        }
        plain.barrier.release(1);
        let waited = waiter.await.expect("no panic");
        assert_eq!(waited.body, request.await.expect("no panic").body);
        assert_eq!(database.of(&key), 1);
        monitor.into_commands()
    };
    if pushes {
        until_pushes_have_woken(trial).await;
    } else {
        trial(0).await;
    }
    assert_eq!(database.of("first"), 1);
}

fn trusting(ca: &RedisServer) -> TlsCertificates {
    TlsCertificates {
        client_tls: None,
        root_cert: Some(fs::read(ca.certificates().ca()).expect("a certificate")),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_server_needs_trusted_certificate() {
    let server = RedisServer::start_with_tls();
    let client = Client::build_with_tls(server.tls_url(), trusting(&server)).unwrap();
    let store = until_connected(|| options().connect_client(client.clone())).await;
    assert_serves(store, &server, true).await;

    let other = RedisServer::start_with_tls();
    let client = Client::build_with_tls(server.tls_url(), trusting(&other)).unwrap();
    let refused = options().connect_client(client).await.unwrap_err();
    assert_eq!(refused.kind(), ConnectErrorKind::Unreachable);
    // The certificate authorities of the system do not trust the server either.
    let refused = options().connect(&server.tls_url()).await.unwrap_err();
    assert_eq!(refused.kind(), ConnectErrorKind::Unreachable);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unix_socket_server_serves() {
    let server = RedisServer::start(&["--unixsocket", "redis.sock"]);
    let directory = server.command(&["CONFIG", "GET", "dir"]);
    let directory = directory.lines().nth(1).unwrap();
    let url = format!("redis+unix://{directory}/redis.sock");
    let client = Client::open(url).unwrap();
    let store = until_connected(|| options().connect_client(client.clone())).await;
    assert_serves(store, &server, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinel_primary_serves() {
    let primary = RedisServer::start(&[]);
    let sentinel = Sentinel::start(&primary, 0);
    let store = connect_through(&sentinel, options()).await;
    assert_serves(store, &primary, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pooled_server_serves() {
    let server = RedisServer::start(&[]);
    let store = connect_pool(&pool_to(2, &server.url())).await;
    assert_serves(store, &server, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn password_database_and_prefix_apply() {
    let server = RedisServer::start(&["--requirepass", "open-sesame"]);
    let url = server.url().replace("/0", "/7");
    let connect = async |url: &str, prefix: &str| {
        let options = options().with_prefix(prefix);
        until_connected(|| options.clone().connect(url)).await
    };
    let node = Node::new(connect(&url, "payments:").await);
    let first = node.post("/orders", "k").await;
    node.assert_replays("/orders", "k", &first).await;
    assert_eq!(
        server
            .command(&["INFO", "keyspace"])
            .lines()
            .nth(1)
            .map(|it| it.starts_with("db7:keys=1,")),
        Some(true)
    );
    // Another database and another prefix have none of the entries.
    for (url, prefix) in [(server.url(), "payments:"), (url, "idempotency:")] {
        let store = connect(&url, prefix).await;
        let other = Node::with(store, &node.database, |layer| layer);
        assert!(!other.post("/orders", "k").await.is_replay());
    }
    assert_eq!(node.database.of("k"), 3);
}
