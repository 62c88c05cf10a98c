//! The server does not reply.

use std::time::Duration;

use http::StatusCode;
use tests::{barrier::within, proxy::Proxy, send, servers::redis::RedisServer};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    events::{HANG, eventually},
    faults::node::{
        BOUND, EffectsByKey, Node, connect, connect_with_long_timeout, keyless, patient,
    },
};

/// Sends requests without a key, one after the other. If each of them waited for the store, all would take minutes.
async fn send_keyless(node: &Node) {
    for _ in 0..200 {
        let response = send(&node.app, keyless()).await;
        assert_eq!(response.status, StatusCode::OK);
    }
}

// F-093, F-137
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unresponsive_server_loses_no_effect() {
    let server = RedisServer::start(&[]);
    let store = connect(&server.url()).await;
    let node = Node::new(store);
    let before = node.post("/orders", "before").await;
    let (running, lease) = node.running("running").await;

    server.pause();
    let paused = Instant::now();
    let mut fresh = JoinSet::new();
    for i in 0..40 {
        let node = node.clone();
        fresh.spawn(async move {
            // The requests are spread over seven seconds, and each must get its response in time.
            sleep(Duration::from_millis(170 * i)).await;
            let key = format!("fresh-{i}");
            node.assert_unavailable("/orders", &key).await;
            key
        });
    }
    node.assert_unavailable("/orders", "before").await;
    within(HANG, send_keyless(&node)).await;
    let opened = Instant::now();
    node.barrier.open_for_good();
    let response = running.await.unwrap();
    assert_eq!(
        response.status,
        StatusCode::CREATED,
        "the effect has happened"
    );
    assert!(opened.elapsed() < BOUND, "{:?}", opened.elapsed());
    let keys = fresh.join_all().await;
    assert_eq!(node.database.total(), 2, "before and running");
    sleep_until(paused + Duration::from_secs(10)).await;
    server.resume();

    // A record completed meanwhile is stored, and a lease requested meanwhile is not held.
    let replay = node.until_served("/held", "running").await;
    assert!(replay.is_replay());
    assert_eq!(replay.body, response.body);
    drop(lease);
    node.assert_replays("/orders", "before", &before).await;
    for key in &keys {
        let response = node.until_served("/orders", key).await;
        assert_eq!(response.text(), format!("effect 1 of {key}"));
        node.assert_replays("/orders", key, &response).await;
    }
    for key in keys.iter().map(String::as_str).chain(["before", "running"]) {
        assert_eq!(node.database.of(key), 1, "{key}");
    }
    eventually("no background attempts are left", || {
        node.layer.in_flight() == 0
    })
    .await;
}

// F-119
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_acquire_finds_own_lease() {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::start(server.address());
    let store = connect_with_long_timeout(&format!("redis://{}/0", proxy.address())).await;
    let node = Node::with(store, &EffectsByKey::default(), patient);
    node.post("/orders", "before").await;
    server.pause();
    let connections = proxy.counts().connections;
    let request = node.spawn("/orders", "k");
    // The first attempt has timed out, and the second is in flight, or a third after a stall.
    let connects = || proxy.counts().connections > connections;
    eventually("the store connects again", connects).await;
    server.resume();
    let response = request.await.unwrap();
    assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
    node.assert_replays("/orders", "k", &response).await;
    assert_eq!(node.database.of("k"), 1);
    let tries = || server.commandstats()["evalsha"] - (2 + 1 + 2);
    eventually("both attempts reach the server", || tries() >= 2).await;
    let tries = tries();
    assert!(
        (2..=3).contains(&tries),
        "{tries} attempts reached the server"
    );
}

// F-119
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_completion_counts() {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::start(server.address());
    let store = connect_with_long_timeout(&format!("redis://{}/0", proxy.address())).await;
    let node = Node::with(store, &EffectsByKey::default(), patient);
    let (request, _) = node.running("k").await;
    server.pause();
    let connections = proxy.counts().connections;
    node.barrier.open_for_good();
    let connects = || proxy.counts().connections > connections;
    eventually("the store connects again", connects).await;
    server.resume();
    let response = request.await.unwrap();
    assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
    node.assert_replays("/held", "k", &response).await;
    assert_eq!(node.database.of("k"), 1);
    let tries = || server.commandstats()["evalsha"] - (1 + 2);
    eventually("both attempts reach the server", || tries() >= 2).await;
    let tries = tries();
    assert!(
        (2..=3).contains(&tries),
        "{tries} attempts reached the server"
    );
}
