//! Faults of the network between the store and its server.

use std::time::Duration;

use http::StatusCode;
use tests::{
    barrier::within,
    proxy::{ConnectionEnd, Fault, Mode, Proxy},
    servers::redis::{
        RedisServer,
        scripts::{RELEASE, RENEW},
    },
    sql,
};
use tokio::time::{Instant, sleep};
use tower_idempotency::{
    ConcurrentRequests, Ttl,
    store::{Acquired, Store},
};
use tower_idempotency_redis::{RedisOptions, RedisStore};

use crate::{
    events::{HANG, eventually, until_renewed},
    faults::node::{
        BOUND, EffectsByKey, Node, connect, connect_with_long_timeout, options,
        options_with_long_timeout, patient, until_connected,
    },
};

/// Bytes that occur only in the acquire, only in the completion, and only in the release.
const ACQUIRE: &str = "POST /orders";
const COMPLETE: &str = "effect 1 of";

const THEN: [ConnectionEnd; 2] = [ConnectionEnd::Cut, ConnectionEnd::Hang];

/// A lease that is long enough for a hanging renewal. The first renewal is due after 6 s, the next one 4.5 s later (the
/// store timeout and a twelfth of the lease).
const LEASE: Ttl = Ttl::from_secs(18);

async fn connect_by(proxy: &Proxy) -> RedisStore {
    connect(&format!("redis://{}/0", proxy.address())).await
}

/// Returns the hash of a script, as in commands.
fn sha(code: &str) -> String {
    let script = tower_idempotency_redis::redis::Script::new(code);
    script.get_hash().to_owned()
}

/// Loses the request or the reply of one command, cuts the connection or lets it hang. Asserts that the key has one effect and
/// one response.
async fn assert_retried(command: &str) {
    for then in THEN {
        for fault in [Fault::request(command), Fault::reply_to(command)] {
            let server = RedisServer::start(&[]);
            let proxy = Proxy::start(server.address());
            let node = Node::new(connect_by(&proxy).await);
            proxy.once(fault.clone(), then);
            let began = Instant::now();
            let response = node.post("/orders", "k").await;
            assert_eq!(response.text(), "effect 1 of k", "{fault:?} {then:?}");
            assert!(began.elapsed() < BOUND, "{:?}", began.elapsed());
            assert_eq!(proxy.injected_faults(), 1);
            node.assert_replays("/orders", "k", &response).await;
            assert_eq!(node.database.of("k"), 1);
        }
    }
}

// F-119
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_acquire_is_retried_with_same_token() {
    assert_retried(ACQUIRE).await;
}

// F-119
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_completion_is_retried() {
    assert_retried(COMPLETE).await;
}

// F-991
/// If the store repeated an acquire by itself, the layer would not know that the first attempt may arrive after its release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_acquire_without_reply_is_sent_once() {
    // The proxy leads to the server as soon as that has an address.
    let proxy = Proxy::start(([127, 0, 0, 1], 1).into());
    let server = RedisServer::start_cluster_behind(&proxy);
    let urls = [format!("redis://{}", proxy.address())];
    let options = options_with_long_timeout();
    let store = until_connected(|| options.clone().connect_cluster(&urls)).await;
    for is_executed in [false, true] {
        let (claim, faults) = (sql::claim(), proxy.injected_faults());
        let key = format!("idempotency:{}", claim.id.to_hex());
        let fault = match is_executed {
            false => Fault::request(&*key),
            true => Fault::reply_to(&*key),
        };
        proxy.once(fault, ConnectionEnd::Cut);
        let lost = store.acquire(&claim).await;
        assert!(lost.is_err(), "{lost:?}");
        assert_eq!(proxy.injected_faults(), faults + 1);
        let exists = u8::from(is_executed).to_string();
        assert_eq!(server.command(&["EXISTS", &key]), exists);
        // The same token finds its lease.
        let acquired = within(HANG, async {
            loop {
                // The connection is being replaced.
                if let Ok(acquired) = store.acquire(&claim).await {
                    break acquired;
                }
                sleep(Duration::from_millis(10)).await;
            }
        });
        let acquired = acquired.await;
        assert!(
            matches!(acquired, Acquired::Granted { generation: 1, .. }),
            "{acquired:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_release_frees_key() {
    let release = sha(RELEASE);
    for then in THEN {
        for fault in [Fault::request(&*release), Fault::reply_to(&*release)] {
            let server = RedisServer::start(&[]);
            let proxy = Proxy::start(server.address());
            let node = Node::new(connect_by(&proxy).await);
            proxy.once(fault.clone(), then);
            let failed = node.post("/orders-fails", "k").await;
            assert_eq!(failed.status, StatusCode::BAD_GATEWAY);
            assert_eq!(proxy.injected_faults(), 1, "{fault:?} {then:?}");
            let is_empty = || server.command(&["DBSIZE"]) == "0";
            eventually("the key is released", is_empty).await;
            let again = node.post("/orders", "k").await;
            assert_eq!(again.text(), "effect 2 of k");
        }
    }
}

// A lease survives a network failure that is shorter than the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_renewal_is_retried_before_expiry() {
    let renew = sha(RENEW);
    for then in THEN {
        let server = RedisServer::start(&[]);
        let proxy = Proxy::start(server.address());
        let lease = LEASE;
        let store = connect_by(&proxy).await;
        let node = Node::with(store, &EffectsByKey::default(), |layer| {
            layer.with_lease_ttl(lease)
        });
        let plain = connect_with_long_timeout(&server.url()).await;
        let other = Node::with(plain, &node.database, patient);
        proxy.once(Fault::request(&*renew), then);
        let (request, held) = node.running("k").await;
        eventually("a renewal is lost", || proxy.injected_faults() == 1).await;
        until_renewed(&server, std::slice::from_ref(&held)).await;
        assert_eq!(other.post("/held", "k").await.code(), "in-progress");
        node.barrier.open_for_good();
        let response = request.await.unwrap();
        other.assert_replays("/held", "k", &response).await;
        assert_eq!(node.database.of("k"), 1);
    }
}

// F-118
// The timeout of calls that do not wait for replicas does not include time for replicas.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_renewal_is_retried_despite_replica_waits() {
    let renew = sha(RENEW);
    let server = RedisServer::start(&[]);
    let _replica = RedisServer::replica_of(&server);
    let proxy = Proxy::start(server.address());
    let url = format!("redis://{}/0", proxy.address());
    let waiting = options().with_wait(1, Duration::from_secs(60));
    let store = until_connected(|| waiting.clone().connect(&url)).await;
    let node = Node::with(store, &EffectsByKey::default(), |layer| {
        layer.with_lease_ttl(LEASE)
    });
    proxy.once(Fault::request(&*renew), ConnectionEnd::Hang);
    let (request, held) = node.running("k").await;
    eventually("a renewal is lost", || proxy.injected_faults() == 1).await;
    until_renewed(&server, &[held]).await;
    node.barrier.open_for_good();
    let response = request.await.unwrap();
    let replay = node.until_served("/held", "k").await;
    assert!(replay.is_replay() && replay.body == response.body);
    assert_eq!(node.database.of("k"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_recovers_after_network_cut() {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::start(server.address());
    let node = Node::new(connect_by(&proxy).await);
    let before = node.post("/orders", "before").await;
    let (running, _) = node.running("running").await;
    proxy.set(Mode::Cut);
    for i in 0..5 {
        node.assert_unavailable("/orders", &format!("fresh-{i}"))
            .await;
    }
    node.assert_unavailable("/orders", "before").await;
    node.barrier.open_for_good();
    let response = running.await.unwrap();
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(node.database.total(), 2);

    proxy.set(Mode::Pass);
    let replay = node.until_served("/held", "running").await;
    assert!(replay.is_replay() && replay.body == response.body);
    node.assert_replays("/orders", "before", &before).await;
    for i in 0..5 {
        let key = format!("fresh-{i}");
        node.until_served("/orders", &key).await;
        assert_eq!(node.database.of(&key), 1, "{key}");
    }
    assert_eq!(
        (node.database.of("before"), node.database.of("running")),
        (1, 1)
    );
}

// F-137
// A middlebox that lost the state of the connection drops all packets, without a reset.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unresponsive_connection_is_replaced() {
    for silence in [Mode::LoseReplies(ConnectionEnd::Hang), Mode::Hold] {
        let server = RedisServer::start(&[]);
        let proxy = Proxy::start(server.address());
        let node = Node::new(connect_by(&proxy).await);
        let before = node.post("/orders", "before").await;
        let (running, _) = node.running("running").await;
        let connections = proxy.counts().connections;
        proxy.set(silence);
        node.assert_unavailable("/orders", "fresh").await;
        node.barrier.open_for_good();
        assert_eq!(running.await.unwrap().status, StatusCode::CREATED);
        if silence == Mode::Hold {
            // The proxy still holds these bytes, and serves only new connections.
            assert!(proxy.counts().connections > connections, "connected again");
        }
        proxy.set(Mode::Pass);
        node.until_served("/orders", "fresh").await;
        let replay = node.until_served("/held", "running").await;
        assert!(replay.is_replay());
        node.assert_replays("/orders", "before", &before).await;
        for key in ["before", "running", "fresh"] {
            assert_eq!(node.database.of(key), 1, "{silence:?} {key}");
        }
    }
}

// A caller with a shorter timeout than the store never sees its own call time out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unresponsive_connection_replaced_if_callers_leave() {
    let server = RedisServer::start(&[]);
    let proxy = Proxy::start(server.address());
    let store = RedisOptions::new().with_timeout(Duration::from_secs(10));
    let url = format!("redis://{}/0", proxy.address());
    let store = until_connected(|| store.clone().connect(&url)).await;
    let node = Node::with(store, &EffectsByKey::default(), |layer| {
        layer.with_store_timeout(Duration::from_secs(3))
    });
    let before = node.post("/orders", "before").await;
    let (running, _) = node.running("running").await;
    // The connection for acquires is lost, and then the one for completions.
    proxy.once(Fault::request(ACQUIRE), ConnectionEnd::Hang);
    node.assert_unavailable("/orders", "fresh").await;
    node.until_served("/orders", "fresh").await;
    proxy.once(Fault::request("effect 1 of running"), ConnectionEnd::Hang);
    node.barrier.open_for_good();
    let response = running.await.unwrap();
    assert_eq!(proxy.injected_faults(), 2);
    let replay = node.until_served("/held", "running").await;
    assert!(replay.is_replay() && replay.body == response.body);
    node.assert_replays("/orders", "before", &before).await;
    for key in ["before", "running", "fresh"] {
        assert_eq!(node.database.of(key), 1, "{key}");
    }
}

// F-057
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_succeed_without_notifications() {
    for fault in [Fault::request("SUBSCRIBE"), Fault::reply_to("SUBSCRIBE")] {
        let server = RedisServer::start(&[]);
        let proxy = Proxy::start(server.address());
        let node = Node::new(connect(&server.url()).await);
        let waiting = Node::with(connect_by(&proxy).await, &node.database, |layer| {
            layer.with_concurrent_requests(ConcurrentRequests::Wait(HANG))
        });
        proxy.once(fault, ConnectionEnd::Hang);
        let (request, _) = node.running("k").await;
        let waiter = waiting.spawn("/held", "k");
        eventually("its subscriptions fail", || proxy.injected_faults() == 1).await;
        node.barrier.open_for_good();
        let response = request.await.unwrap();
        let waited = waiter.await.unwrap();
        assert!(waited.is_replay());
        assert_eq!(waited.body, response.body);
        assert_eq!(node.database.of("k"), 1);
    }
}
