//! The server does not reply: failure modes 36, 37 and 45.

use std::time::Duration;

use http::StatusCode;
use tests::{gate::within, proxy::Proxy, send, servers::redis::RedisServer};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    events::{HANG, eventually},
    faults::node::{BOUND, Books, Node, connect, connect_unhurried, keyless, patient},
};

/// Sends requests without a key, one after the other. If each of them waited for the store, all would take minutes.
async fn send_keyless(node: &Node) {
    for _ in 0..200 {
        let answer = send(&node.app, keyless()).await;
        assert_eq!(answer.status, StatusCode::OK);
    }
}

// F-093, F-137
// fm 45, 36, 37
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
    node.gate.open_for_good();
    let answer = running.await.unwrap();
    assert_eq!(
        answer.status,
        StatusCode::CREATED,
        "the effect has happened"
    );
    assert!(opened.elapsed() < BOUND, "{:?}", opened.elapsed());
    let keys = fresh.join_all().await;
    assert_eq!(node.books.total(), 2, "before and running");
    sleep_until(paused + Duration::from_secs(10)).await;
    server.resume();

    // A record completed meanwhile is stored, and a lease requested meanwhile is not held.
    let replay = node.until_served("/held", "running").await;
    assert!(replay.is_replay());
    assert_eq!(replay.body, answer.body);
    drop(lease);
    node.assert_replays("/orders", "before", &before).await;
    for key in &keys {
        let answer = node.until_served("/orders", key).await;
        assert_eq!(answer.text(), format!("effect 1 of {key}"));
        node.assert_replays("/orders", key, &answer).await;
    }
    for key in keys.iter().map(String::as_str).chain(["before", "running"]) {
        assert_eq!(node.books.of(key), 1, "{key}");
    }
    eventually("no background attempts are left", || {
        node.layer.in_flight() == 0
    })
    .await;
}

// F-119
// fm 36
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_acquire_finds_own_lease() {
    let server = RedisServer::start(&[]);
    let way = Proxy::start(server.address());
    let store = connect_unhurried(&format!("redis://{}/0", way.address())).await;
    let node = Node::with(store, &Books::default(), patient);
    node.post("/orders", "before").await;
    server.pause();
    let connections = way.counts().connections;
    let request = node.spawn("/orders", "k");
    // The first attempt has timed out, and the second is in flight, or a third after a stall.
    let connects = || way.counts().connections > connections;
    eventually("the store connects again", connects).await;
    server.resume();
    let answer = request.await.unwrap();
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    node.assert_replays("/orders", "k", &answer).await;
    assert_eq!(node.books.of("k"), 1);
    let tries = || server.commandstats()["evalsha"] - (2 + 1 + 2);
    eventually("both attempts reach the server", || tries() >= 2).await;
    let tries = tries();
    assert!(
        (2..=3).contains(&tries),
        "{tries} attempts reached the server"
    );
}

// F-119
// fm 37
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_completion_counts() {
    let server = RedisServer::start(&[]);
    let way = Proxy::start(server.address());
    let store = connect_unhurried(&format!("redis://{}/0", way.address())).await;
    let node = Node::with(store, &Books::default(), patient);
    let (request, _) = node.running("k").await;
    server.pause();
    let connections = way.counts().connections;
    node.gate.open_for_good();
    let connects = || way.counts().connections > connections;
    eventually("the store connects again", connects).await;
    server.resume();
    let answer = request.await.unwrap();
    assert_eq!(answer.status, StatusCode::CREATED, "{answer:?}");
    node.assert_replays("/held", "k", &answer).await;
    assert_eq!(node.books.of("k"), 1);
    let tries = || server.commandstats()["evalsha"] - (1 + 2);
    eventually("both attempts reach the server", || tries() >= 2).await;
    let tries = tries();
    assert!(
        (2..=3).contains(&tries),
        "{tries} attempts reached the server"
    );
}
