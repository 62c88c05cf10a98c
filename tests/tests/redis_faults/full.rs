//! The server's memory is full, and it evicts nothing: failure mode 42.

use std::time::Duration;

use http::StatusCode;
use tests::{proxy::Proxy, servers::redis::RedisServer};
use tokio::time::{Instant, sleep};
use tower_idempotency::Ttl;

use crate::node::{Books, Node, STORE_TIMEOUT, connect};

// fm 42
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_full_refuses_what_is_new_and_keeps_what_was_granted() {
    let server = RedisServer::start(&["--maxmemory-policy", "noeviction"]);
    let way = Proxy::start(server.address());
    let store = connect(&format!("redis://{}/0", way.address())).await;
    let node = Node::with(store, &Books::default(), |layer| {
        layer.with_lease(Ttl::from_millis(900))
    });
    let before = node.post("/orders", "before").await;
    let (request, lease) = node.running_on("/held-large", "running").await;
    let (failing, _) = node.running_on("/held-fails", "failing").await;
    server.command(&["SET", "filler", &"x".repeat(4 << 20)]);
    server.command(&["CONFIG", "SET", "maxmemory", "2mb"]);
    let refusal = server.try_command(&["SET", "more", "y"]).unwrap();
    assert!(refusal.unwrap_err().starts_with("OOM"));

    let entries = server.command(&["DBSIZE"]);
    let connections = way.counts().connections;
    let refused = Instant::now();
    while refused.elapsed() < STORE_TIMEOUT * 2 {
        node.assert_unavailable("/orders", "fresh").await;
    }
    assert_eq!(
        way.counts().connections,
        connections,
        "it answers, so no connection is made anew"
    );
    node.assert_replays("/orders", "before", &before).await;
    assert_eq!(
        server.command(&["DBSIZE"]),
        entries,
        "nothing is left of it"
    );

    // Renewed when each of three leases would have been over.
    for _ in 0..3 {
        sleep(Duration::from_millis(900)).await;
        assert!(lease.is_held());
        let duplicate = node.post("/held-large", "running").await;
        assert_eq!(duplicate.code(), "in-progress");
    }
    node.gate.open_for_good();
    let answer = request.await.unwrap();
    assert_eq!(answer.status, StatusCode::CREATED);
    node.assert_replays("/held-large", "running", &answer).await;
    assert!(answer.body.len() > 100_000, "no small record");
    // A key is freed as well, or its retry would find it in progress.
    assert_eq!(failing.await.unwrap().status, StatusCode::BAD_GATEWAY);
    node.assert_unavailable("/orders", "failing").await;

    server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(
        node.post("/orders", "fresh").await.text(),
        "effect 1 of fresh"
    );
    for key in ["before", "running", "failing", "fresh"] {
        assert_eq!(node.books.of(key), 1, "{key}");
    }
}
