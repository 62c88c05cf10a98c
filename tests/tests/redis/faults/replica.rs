//! A primary and its replica, without a supervisor.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::StatusCode;
use tests::{
    barrier::within,
    proxy::Proxy,
    servers::redis::{RedisServer, UNHURRIED},
};
use tokio::time::{Instant, sleep};
use tower_idempotency::{
    OrphanPolicy, Ttl,
    store::{Claim, Fingerprint, KeyId, Store},
};
use tower_idempotency_redis::{RedisOptions, RedisStore};

use crate::{
    events::{HANG, eventually, expiries},
    faults::{
        node::{
            BOUND, EffectsByKey, Node, assert_unavailable, connect, connect_with_long_timeout,
            options, options_with_long_timeout, patient, until_connected,
        },
        nowhere::ErrorServer,
        sentinel::caught_up,
    },
};

async fn connect_waiting(server: &RedisServer) -> RedisStore {
    connect_waiting_to(&server.url()).await
}

/// Time that a call waits for replicas: longer than a stall of two seconds.
const WAIT: Duration = Duration::from_secs(3);

async fn connect_waiting_to(url: &str) -> RedisStore {
    let options = options().with_wait(1, WAIT);
    until_connected(|| options.clone().connect(url)).await
}

// F-118
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_wait_executes_nothing_without_replicas() {
    let primary = RedisServer::start(&[]);
    let replica = RedisServer::replica_of(&primary);
    let node = Node::new(connect_waiting(&primary).await);
    let before = node.post("/orders", "before").await;
    assert_eq!(before.status, StatusCode::CREATED);
    let (running, _) = node.running("running").await;
    replica.pause();

    node.assert_unavailable("/orders", "fresh").await;
    node.assert_replays("/orders", "before", &before).await;
    // A running request gets its response, and its record is stored although only one server has it.
    node.barrier.open_for_good();
    let began = Instant::now();
    let response = running.await.unwrap();
    assert_eq!(response.status, StatusCode::CREATED);
    assert!(began.elapsed() < BOUND, "{:?}", began.elapsed());
    node.assert_replays("/held", "running", &response).await;

    replica.resume();
    let served = node.until_served("/orders", "fresh").await;
    assert_eq!(served.text(), "effect 1 of fresh");
    eventually("no background attempts are left", || {
        node.layer.in_flight() == 0
    })
    .await;
    for key in ["before", "running", "fresh"] {
        assert_eq!(node.database.of(key), 1, "{key}");
    }
}

// F-116
/// Nothing can prevent the second effect, because the replica discards what its primary does not have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_discards_records_of_empty_primary() {
    let mut primary = RedisServer::start(&[]);
    let replica = RedisServer::replica_of(&primary);
    let node = Node::new(connect_waiting(&primary).await);
    let before = node.post("/orders", "k").await;
    assert_eq!(before.status, StatusCode::CREATED);
    assert_eq!(replica.entries().len(), 1);
    primary.restart();
    eventually("the replica has the data of its primary", || {
        replica.entries().is_empty()
    })
    .await;
    let retry = node.until_served("/orders", "k").await;
    assert_eq!(retry.text(), "effect 2 of k");
}

// F-118
// While a server waits for its replicas, it sends no other reply on that connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_replica_waits_do_not_block_others() {
    let primary = RedisServer::start(&[]);
    let replica = RedisServer::replica_of(&primary);
    let store = connect_waiting(&primary).await;
    let node = Node::with(store, &EffectsByKey::default(), |layer| {
        layer.with_lease_ttl(Ttl::from_secs(18))
    });
    let before = node.post("/orders", "before").await;
    let keys: Vec<_> = (0..30).map(|i| format!("k-{i}")).collect();
    let mut completing = Vec::new();
    for key in &keys {
        completing.push(node.spawn("/held", key));
        within(HANG, node.barrier.arrival()).await;
    }
    let others = expiries(&primary);
    let (running, lease) = node.running("running").await;
    let mut leases = expiries(&primary).into_keys();
    let entry = leases.find(|key| !others.contains_key(key)).unwrap();
    replica.pause();
    // The handlers continue in the order of their arrival.
    node.barrier.release(keys.len());
    let granted = expiries(&primary)[&entry];
    let done = Arc::new(AtomicBool::new(false));
    let mut fresh = Vec::new();
    for i in 0..24 {
        let (node, done) = (node.clone(), Arc::clone(&done));
        fresh.push(tokio::spawn(async move {
            for n in 0.. {
                node.assert_unavailable("/orders", &format!("fresh-{i}-{n}"))
                    .await;
                if done.load(Ordering::Relaxed) {
                    return;
                }
            }
        }));
    }
    // A request with a response has its record already, before its wait for replicas begins.
    let plain = connect_with_long_timeout(&primary.url()).await;
    let plain = Node::with(plain, &node.database, patient);
    plain.barrier.open_for_good();
    for (request, key) in completing.into_iter().zip(&keys) {
        let response = request.await.unwrap();
        plain.assert_replays("/held", key, &response).await;
    }
    // If replays waited for replicas, there would be none meanwhile.
    let (mut replays, began) = (0, Instant::now());
    // If renewals waited for replicas, they would be too late.
    while replays < 5 || expiries(&primary)[&entry] == granted {
        assert!(lease.is_held());
        let response = node.post("/orders", "before").await;
        if response.is_replay() {
            assert_eq!(response.body, before.body);
            replays += 1;
        } else {
            assert_unavailable(&response);
        }
        assert!(began.elapsed() < HANG, "{replays} replays");
        sleep(Duration::from_millis(100)).await;
    }
    done.store(true, Ordering::Relaxed);
    for fresh in fresh {
        fresh.await.unwrap();
    }
    replica.resume();
    assert!(lease.is_held());
    node.barrier.open_for_good();
    let response = running.await.unwrap();
    eventually("no background attempts are left", || {
        node.layer.in_flight() == 0
    })
    .await;
    node.assert_replays("/held", "running", &response).await;
    for key in keys.iter().map(String::as_str).chain(["before", "running"]) {
        assert_eq!(node.database.of(key), 1, "{key}");
    }
    assert_eq!(node.database.total(), 32, "nothing fresh was executed");
}

/// Returns options with which a call waits for replicas for 500 ms, and times out after 1.5 s.
fn options_with_short_wait() -> RedisOptions {
    RedisOptions::new()
        .with_timeout(Duration::from_secs(1))
        .with_wait(1, Duration::from_millis(500))
}

// F-118
// The server executes the calls of a connection one after the other. The layer releases late leases only until they would
// have expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_replica_waits_take_no_late_leases() {
    let primary = RedisServer::start(&[]);
    let replica = RedisServer::replica_of(&primary);
    let (options, url) = (options_with_short_wait(), primary.url());
    let store = until_connected(|| options.clone().connect(&url)).await;
    let lease = Ttl::from_secs(6);
    let node = Node::with(store, &EffectsByKey::default(), |layer| {
        layer
            .with_store_timeout(Duration::from_secs(2))
            .with_orphan_policy(OrphanPolicy::Refuse)
            .with_lease_ttl(lease)
    });
    replica.pause();
    let keys = (0..40).map(|i| format!("k-{i}"));
    let requests: Vec<_> = keys.map(|key| node.spawn("/orders", &key)).collect();
    for request in requests {
        assert_unavailable(&request.await.unwrap());
    }
    // The last releases are sent after a lease duration. Without a limit, the server would execute calls for 20 s (40 x 500 ms).
    sleep(lease.as_duration()).await;
    eventually("no background attempts and calls are left", || {
        node.layer.in_flight() == 0 && !has_blocked_client(&primary)
    })
    .await;
    assert_eq!(primary.entries().len(), 0);
    assert_eq!(node.database.total(), 0);
}

/// Returns `true` if a client of the server is in a blocking command, such as `WAIT`.
fn has_blocked_client(server: &RedisServer) -> bool {
    let clients = server.command(&["CLIENT", "LIST"]);
    let mut flags = clients
        .split_whitespace()
        .filter_map(|field| field.strip_prefix("flags="));
    flags.any(|flags| flags.contains('b'))
}

// F-118
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_discards_dropped_replica_waits() {
    let primary = RedisServer::start(&[]);
    let replica = RedisServer::replica_of(&primary);
    // The test may stall for seconds before it drops the calls.
    let options = options_with_short_wait().with_timeout(Duration::from_secs(5));
    let url = primary.url();
    let store = until_connected(|| options.clone().connect(&url)).await;
    replica.pause();
    let claims: Vec<_> = (0..40)
        .map(|id| {
            let id = KeyId::from_bytes([id; 32]);
            let mut claim = Claim::new(id, Fingerprint::from_bytes([0; 32])).unwrap();
            claim.lease = Ttl::from_secs(600);
            claim
        })
        .collect();
    let calls: Vec<_> = claims
        .iter()
        .map(|claim| {
            let (store, claim) = (store.clone(), claim.clone());
            tokio::spawn(async move { store.acquire(&claim).await })
        })
        .collect();
    let granted = || primary.entries().len() == claims.len();
    eventually("all leases are granted", granted).await;
    eventually("a call waits", || has_blocked_client(&primary)).await;
    // Until then each call has sent its second acquire.
    sleep(Duration::from_millis(100)).await;
    for call in calls {
        call.abort();
    }
    eventually("no call waits", || !has_blocked_client(&primary)).await;
    let waits = primary.commandstats()["wait"];
    assert!(waits < 40, "the server has executed all calls");
    for claim in &claims {
        store.release(&claim.lease_ref(1)).await.unwrap();
    }
    assert_eq!(primary.entries().len(), 0);
}

// F-118
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_fresh_keys_wait_for_replica_at_once() {
    let primary = RedisServer::start(&[]);
    let _replica = RedisServer::replica_of(&primary);
    let options = options_with_long_timeout().with_wait(1, UNHURRIED);
    let url = primary.url();
    let store = until_connected(|| options.clone().connect(&url)).await;
    let node = Node::with(store, &EffectsByKey::default(), patient);
    let keys = (0..200).map(|i| format!("k-{i}"));
    let requests: Vec<_> = keys.map(|key| node.spawn("/orders", &key)).collect();
    for request in requests {
        let response = request.await.unwrap();
        assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
    }
    assert_eq!(node.database.total(), 200);
}

// F-118
// After the lease is taken and before the wait for replicas, another primary may take over and grant it to another
// process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_wait_rechecks_lease_owner() {
    let former = RedisServer::start(&[]);
    let next = RedisServer::start(&[]);
    let _replica = RedisServer::replica_of(&next);
    let there = Node::new(connect(&former.url()).await);
    let before = there.post("/orders", "before").await;
    let proxy = Proxy::start(former.address());
    let store = connect_waiting_to(&format!("redis://{}/0", proxy.address())).await;
    let node = Node::with(store, &there.database, |layer| layer);
    // The connection for leases still leads to the former primary. The connection for replicas has none to wait for
    // yet.
    node.assert_replays("/orders", "before", &before).await;
    proxy.set_upstream(next.address());

    let other = Node::with(connect(&next.url()).await, &node.database, |layer| layer);
    let done = other.post("/orders", "done").await;
    let (running, _) = other.running("running").await;
    node.barrier.open_for_good();
    assert_eq!(node.post("/held", "running").await.code(), "in-progress");
    let replay = node.post("/orders", "done").await;
    assert!(replay.is_replay() && replay.body == done.body, "{replay:?}");
    other.barrier.open_for_good();
    let response = running.await.unwrap();
    assert_eq!(response.text(), "effect 1 of running");
    assert_eq!(
        (node.database.of("running"), node.database.of("done")),
        (1, 1)
    );
}

// F-118
// Scripts are not replicated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicated_record_survives_primary_loss() {
    let mut primary = RedisServer::start(&[]);
    let replica = RedisServer::replica_of(&primary);
    let node = Node::new(connect_waiting(&primary).await);
    let before = node.post("/orders", "before").await;
    let (_running, _) = node.running("running").await;
    primary.kill();
    replica.promote();
    let next = Node::with(connect(&replica.url()).await, &node.database, |layer| layer);
    next.assert_replays("/orders", "before", &before).await;
    assert_eq!(next.post("/held", "running").await.code(), "in-progress");
    for key in ["before", "running"] {
        assert_eq!(node.database.of(key), 1, "{key}");
    }
}

// F-117
// The failover loses only the data that the documentation lists.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreplicated_record_reexecutes_on_replica() {
    let mut primary = RedisServer::start(&[]);
    let replica = RedisServer::replica_of(&primary);
    let node = Node::new(connect(&primary.url()).await);
    let before = node.post("/orders", "before").await;
    caught_up(&primary, &replica).await;
    // The promoted replica misses later writes. A replica that is merely slow would still read the bytes in transit.
    replica.promote();
    let lost = node.post("/orders", "lost").await;
    assert_eq!(lost.status, StatusCode::CREATED);
    let (running, _) = node.running("running").await;
    primary.kill();

    let next = Node::with(connect(&replica.url()).await, &node.database, |layer| layer);
    next.assert_replays("/orders", "before", &before).await;
    let again = next.post("/orders", "lost").await;
    assert_eq!(again.text(), "effect 2 of lost");
    next.assert_replays("/orders", "lost", &again).await;
    next.barrier.open_for_good();
    let again = next.post("/held", "running").await;
    assert_eq!(again.text(), "effect 2 of running");
    next.assert_replays("/held", "running", &again).await;
    // The first process cannot reach a server, so its client receives the response of its own execution.
    node.barrier.open_for_good();
    assert_eq!(running.await.unwrap().status, StatusCode::CREATED);
    assert_eq!(node.database.of("before"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demoted_primary_executes_nothing() {
    let server = RedisServer::start(&[]);
    let other = RedisServer::start(&[]);
    let node = Node::with(
        connect(&server.url()).await,
        &EffectsByKey::default(),
        |layer| layer.with_lease_ttl(Ttl::from_secs(600)),
    );
    let before = node.post("/orders", "before").await;
    let (running, _) = node.running("running").await;
    let port = server.address().port().to_string();
    // The other server has the same data. Otherwise the first one would lose its data.
    other.command(&["REPLICAOF", "127.0.0.1", &port]);
    eventually("it has begun", || other.entries().len() == 2).await;
    caught_up(&server, &other).await;
    other.promote();
    let port = other.address().port().to_string();
    server.command(&["REPLICAOF", "127.0.0.1", &port]);

    assert_unavailable(&node.post("/orders", "fresh").await);
    node.barrier.open_for_good();
    let response = running.await.unwrap();
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(node.database.of("fresh"), 0);
    // A replica that still loads the data of its primary rejects commands.
    eventually("the server is a replica with the data", || {
        let info = server.try_command(&["INFO", "replication"]);
        matches!(info, Ok(Ok(info)) if info.contains("master_link_status:up"))
    })
    .await;
    server.promote();
    node.until_served("/orders", "fresh").await;
    let replay = node.until_served("/held", "running").await;
    assert!(replay.is_replay() && replay.body == response.body);
    node.assert_replays("/orders", "before", &before).await;
    for key in ["before", "running", "fresh"] {
        assert_eq!(node.database.of(key), 1, "{key}");
    }
}

// F-130
// Redis 5 and 6 report an error in a script with a separate code, followed by READONLY.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demoted_primary_of_old_version_is_left() {
    let server = ErrorServer::start();
    let proxy = Proxy::start(server.address);
    let node = Node::new(connect(&format!("redis://{}/0", proxy.address())).await);
    node.post("/orders", "before").await;
    for (says, is_left) in [
        ("attempt to compare number with nil", false),
        (
            "-READONLY You can't write against a read only replica.",
            true,
        ),
    ] {
        let connections = proxy.counts().connections;
        server.set_errors(&[format!(
            "ERR Error running script (call to f_0): @user_script:20: @user_script: 20: {says}"
        )]);
        node.assert_unavailable("/orders", "refused").await;
        assert_eq!(proxy.counts().connections > connections, is_left, "{says}");
    }
    server.set_errors(&[]);
    node.until_served("/orders", "fresh").await;
}
