//! The server loses its scripts.

use http::StatusCode;
use tests::servers::redis::RedisServer;
use tower_idempotency::Ttl;

use crate::{
    events::eventually,
    faults::node::{EffectsByKey, Node, connect_with_long_timeout, patient},
};

/// Returns the number of script calls by hash and by code since the last call.
fn calls(server: &RedisServer) -> (u64, u64) {
    let stats = server.commandstats();
    server.command(&["CONFIG", "RESETSTAT"]);
    let of = |name| stats.get(name).copied().unwrap_or(0);
    (of("evalsha"), of("eval"))
}

// F-120
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flushed_script_is_sent_once() {
    let server = RedisServer::start(&[]);
    let store = connect_with_long_timeout(&server.url()).await;
    let node = Node::with(store.clone(), &EffectsByKey::default(), |layer| {
        patient(layer).with_lease_ttl(Ttl::from_secs(600))
    });
    calls(&server);
    let first = node.post("/orders", "first").await;
    assert_eq!(calls(&server), (2, 0), "acquire and complete");

    server.command(&["SCRIPT", "FLUSH"]);
    node.assert_replays("/orders", "first", &first).await;
    assert_eq!(calls(&server), (2, 1), "acquire is sent once");
    node.post("/orders", "second").await;
    assert_eq!(calls(&server), (2, 1), "complete is sent once");
    node.post("/orders", "third").await;
    assert_eq!(calls(&server), (2, 0), "both are known");

    server.command(&["SCRIPT", "FLUSH"]);
    let failed = node.post("/orders-fails", "fourth").await;
    assert_eq!(failed.status, StatusCode::BAD_GATEWAY);
    assert_eq!(calls(&server), (2, 2), "acquire and release are sent once");
    node.post("/orders-fails", "fourth").await;
    assert_eq!(calls(&server), (2, 0));

    let renewing = Node::with(store, &node.database, |layer| {
        patient(layer).with_lease_ttl(Ttl::from_secs(9))
    });
    let (request, lease) = renewing.running("fifth").await;
    calls(&server);
    server.command(&["SCRIPT", "FLUSH", "SYNC"]);
    eventually("the lease is renewed twice", || {
        let renewals = server.commandstats();
        renewals.get("evalsha").is_some_and(|calls| *calls >= 2)
    })
    .await;
    let (_, sent) = calls(&server);
    assert_eq!(sent, 1, "renew is sent once");
    assert!(lease.is_held());
    // The scripts are also lost between an acquire and its completion.
    server.command(&["SCRIPT", "FLUSH"]);
    renewing.barrier.open_for_good();
    let response = request.await.unwrap();
    node.assert_replays("/held", "fifth", &response).await;
    for key in ["first", "second", "third", "fifth"] {
        assert_eq!(node.database.of(key), 1, "{key}");
    }
    assert_eq!(node.database.of("fourth"), 2, "nothing was recorded");
}
