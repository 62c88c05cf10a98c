//! The server restarts without its data.

use http::StatusCode;
use tests::{barrier::within, servers::redis::RedisServer};
use tower_idempotency::Ttl;

use crate::{
    events::{HANG, eventually},
    faults::node::{EffectsByKey, Node, connect},
};

// F-116
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn record_is_stored_after_server_data_loss() {
    for (lease, notices) in [(Ttl::from_secs(600), false), (Ttl::from_secs(9), true)] {
        let mut server = RedisServer::start(&[]);
        let store = connect(&server.url()).await;
        let node = Node::with(store, &EffectsByKey::default(), |layer| {
            layer.with_lease_ttl(lease)
        });
        let (request, held) = node.running("k").await;
        server.restart();
        assert_eq!(server.command(&["DBSIZE"]), "0");
        if notices {
            // A renewal finds no lease, and the handler is notified.
            within(HANG, held.lost()).await;
            let calls = server.commandstats();
            assert!(calls.contains_key("evalsha"), "a renewal: {calls:?}");
        }
        node.barrier.open_for_good();
        let response = request.await.unwrap();
        assert_eq!(response.status, StatusCode::CREATED);
        node.assert_replays("/held", "k", &response).await;
        assert_eq!(node.database.of("k"), 1);
    }
}

// F-116
// Nothing can prevent the second effect, because the server cannot detect that it lost its data.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_retaken_after_data_loss_runs_twice() {
    let mut server = RedisServer::start(&[]);
    let first = Node::new(connect(&server.url()).await);
    let second = Node::with(connect(&server.url()).await, &first.database, |layer| layer);
    let (late, _) = first.running("k").await;
    let (later, _) = first.running("l").await;
    server.restart();
    let (early, _) = second.running("k").await;
    let (earlier, _) = second.running("l").await;

    // The process that acquired the key later completes first.
    second.barrier.release(2);
    let response = early.await.unwrap();
    assert_eq!(response.text(), "effect 2 of k");
    earlier.await.unwrap();
    // The other request receives the stored record, and not the response of its own execution.
    first.barrier.release(2);
    assert_eq!(late.await.unwrap().body, response.body);
    assert_eq!(later.await.unwrap().text(), "effect 2 of l");
    for node in [&first, &second] {
        node.assert_replays("/held", "k", &response).await;
    }
    assert_eq!((first.database.of("k"), first.database.of("l")), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_data_returns_only_stored_response() {
    let mut server = RedisServer::start(&[]);
    let first = Node::new(connect(&server.url()).await);
    let second = Node::with(connect(&server.url()).await, &first.database, |layer| layer);
    let (former, _) = first.running("k").await;
    server.restart();
    let (present, _) = second.running("k").await;
    // The first process completes while another process holds the key. The other process's response will be the stored
    // one.
    first.barrier.open_for_good();
    let unknown = former.await.unwrap();
    assert_eq!(unknown.status, StatusCode::CONFLICT);
    assert_eq!(unknown.code(), "outcome-unknown");
    second.barrier.open_for_good();
    let response = present.await.unwrap();
    assert_eq!(response.text(), "effect 2 of k");
    for node in [&first, &second] {
        node.assert_replays("/held", "k", &response).await;
    }
    assert_eq!(first.database.of("k"), 2);
}

// F-116
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_recovers_after_server_restart() {
    let mut server = RedisServer::start(&["--appendonly", "yes", "--appendfsync", "always"]);
    let node = Node::new(connect(&server.url()).await);
    let before = node.post("/orders", "before").await;
    let (running, _) = node.running("running").await;
    server.kill();
    node.assert_unavailable("/orders", "before").await;
    node.assert_unavailable("/orders", "fresh").await;
    node.barrier.open_for_good();
    let response = running.await.unwrap();
    assert_eq!(
        response.status,
        StatusCode::CREATED,
        "the effect has happened"
    );
    server.restart();
    // The server has its data again, but not its scripts.
    node.until_served("/orders", "fresh").await;
    node.assert_replays("/orders", "before", &before).await;
    let stored = node.until_served("/held", "running").await;
    assert!(stored.is_replay() && stored.body == response.body);
    eventually("no background attempts are left", || {
        node.layer.in_flight() == 0
    })
    .await;
    for key in ["before", "running", "fresh"] {
        assert_eq!(node.database.of(key), 1, "{key}");
    }
}
