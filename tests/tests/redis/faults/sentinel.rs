//! A replica takes over, and the store finds it.

use std::time::Duration;

use http::StatusCode;
use tests::{
    proxy::{Mode, Proxy},
    servers::redis::{RedisServer, Sentinel},
};
use tokio::time::{Instant, sleep};
use tower_idempotency::Ttl;
use tower_idempotency_redis::{
    RedisOptions, RedisStore,
    redis::{
        Client,
        sentinel::{SentinelClient, SentinelServerType},
    },
};

use crate::{
    events::{HANG, eventually, until_renewed},
    faults::node::{EffectsByKey, Node, options, until_connected},
};

/// Connects to the primary. For a moment, a sentinel still lists the former primary among all that it knows.
pub(crate) async fn connect_through(sentinel: &Sentinel, options: RedisOptions) -> RedisStore {
    until_connected(|| {
        let url = format!("redis://{}/", sentinel.address());
        let name = Sentinel::NAME.to_owned();
        let client = SentinelClient::build(vec![url], name, None, SentinelServerType::Master);
        options
            .clone()
            .connect_sentinel(client.expect("an address"))
    })
    .await
}

/// Waits until a replica has all previous writes. A linked replica may get its first data a second later.
pub(crate) async fn caught_up(primary: &RedisServer, replica: &RedisServer) {
    let offset = |server: &RedisServer, name| {
        let info = server.command(&["INFO", "replication"]);
        let mut lines = info.lines();
        lines.find_map(|line| line.strip_prefix(name)?.parse::<u64>().ok())
    };
    let written = offset(primary, "master_repl_offset:");
    eventually("the replica has all writes", || {
        offset(replica, "slave_repl_offset:") >= written
    })
    .await;
}

fn with_lease(store: RedisStore, database: &EffectsByKey, secs: u64) -> Node {
    Node::with(store, database, |layer| {
        layer.with_lease_ttl(Ttl::from_secs(secs))
    })
}

// F-118
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicated_entries_survive_failover() {
    let mut primary = RedisServer::start(&[]);
    let replica = RedisServer::replica_of(&primary);
    let sentinel = Sentinel::start(&primary, 1);
    let waiting = options().with_wait(1, Duration::from_secs(3));
    let database = EffectsByKey::default();
    let node = with_lease(connect_through(&sentinel, waiting).await, &database, 600);
    let other = with_lease(connect_through(&sentinel, options()).await, &database, 600);
    let mut done = Vec::new();
    for i in 0..20 {
        let key = format!("done-{i}");
        done.push((node.post("/orders", &key).await, key));
    }
    let (running, _) = node.running("running").await;
    primary.kill();
    node.assert_unavailable("/orders", "fresh").await;
    assert_eq!(sentinel.failed_over(primary.address()), replica.address());

    // The process was not restarted. Replays do not wait for replicas.
    for (first, key) in &done {
        let replay = node.until_served("/orders", key).await;
        assert!(replay.is_replay() && replay.body == first.body, "{key}");
    }
    // After this, the other process has connected again.
    other.until_served("/orders", &done[0].1).await;
    let duplicate = other.post("/held", "running").await;
    assert_eq!(
        duplicate.code(),
        "in-progress",
        "the replica has the lease too"
    );
    // There is no replica to wait for.
    node.assert_unavailable("/orders", "fresh").await;
    node.barrier.open_for_good();
    let response = running.await.unwrap();
    assert_eq!(response.status, StatusCode::CREATED);
    other.assert_replays("/held", "running", &response).await;

    primary.restart();
    let port = replica.address().port().to_string();
    primary.command(&["REPLICAOF", "127.0.0.1", &port]);
    node.until_served("/orders", "fresh").await;
    for key in ["running", "fresh"]
        .into_iter()
        .chain(done.iter().map(|(_, key)| key.as_str()))
    {
        assert_eq!(database.of(key), 1, "{key}");
    }
}

// F-135
// A call that queried the sentinel and timed out must not keep renewals from a new query.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unresponsive_sentinels_lose_no_lease() {
    let primary = RedisServer::start(&[]);
    let sentinel = Sentinel::start(&primary, 0);
    let proxy = Proxy::start(sentinel.address());
    let url = format!("redis://{}/", proxy.address());
    let name = Sentinel::NAME.to_owned();
    let store = until_connected(|| {
        let (url, name) = (url.clone(), name.clone());
        let client = SentinelClient::build(vec![url], name, None, SentinelServerType::Master);
        options().connect_sentinel(client.expect("an address"))
    })
    .await;
    let database = EffectsByKey::default();
    let node = with_lease(store, &database, 30);
    let (running, lease) = node.running("running").await;
    proxy.set(Mode::Hold);
    primary.command(&["CLIENT", "KILL", "TYPE", "normal"]);
    node.assert_unavailable("/orders", "fresh").await;
    proxy.set(Mode::Pass);
    until_renewed(&primary, &[lease]).await;
    node.barrier.open_for_good();
    let response = running.await.unwrap();
    node.assert_replays("/held", "running", &response).await;
}

// F-134
// Each reconnect first queries the unreachable sentinel, for a second or two.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_sentinel_is_skipped() {
    let primary = RedisServer::start(&[]);
    let sentinel = Sentinel::start(&primary, 0);
    let proxy = Proxy::start(sentinel.address());
    let connect = || {
        let urls = [proxy.address(), sentinel.address()].map(|it| format!("redis://{it}/"));
        let (name, primary) = (Sentinel::NAME.to_owned(), SentinelServerType::Master);
        let client = SentinelClient::build(urls.to_vec(), name, None, primary);
        RedisOptions::new().connect_sentinel(client.expect("addresses"))
    };
    let node = with_lease(until_connected(connect).await, &EffectsByKey::default(), 30);
    let before = node.until_served("/orders", "before").await;
    let (running, lease) = node.running("running").await;
    proxy.set(Mode::Hold);
    primary.command(&["CLIENT", "KILL", "TYPE", "normal"]);
    node.until_served("/orders", "fresh").await;
    until_renewed(&primary, &[lease]).await;
    node.barrier.open_for_good();
    let response = running.await.unwrap();

    let next = with_lease(until_connected(connect).await, &node.database, 600);
    for (path, key, first) in [
        ("/orders", "before", before),
        ("/held", "running", response),
    ] {
        let replay = next.until_served(path, key).await;
        assert!(replay.is_replay() && replay.body == first.body, "{key}");
    }
    assert_eq!(node.database.total(), 3);
}

// F-117
// A failover without a wait for replicas loses data. The responses of a key are still the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_loss_reexecutes_with_one_record() {
    let mut primary = RedisServer::start(&[]);
    let replica = RedisServer::replica_of(&primary);
    let sentinel = Sentinel::start(&primary, 1);
    let database = EffectsByKey::default();
    let node = with_lease(connect_through(&sentinel, options()).await, &database, 600);
    // The replica gets its data through a proxy that can block it.
    let proxy = Proxy::start(primary.address());
    let port = proxy.address().port().to_string();
    replica.command(&["REPLICAOF", "127.0.0.1", &port]);
    let (running, _) = node.running("running").await;
    let (alone, _) = node.running("alone").await;
    let before = node.post("/orders", "before").await;
    caught_up(&primary, &replica).await;
    proxy.set(Mode::Hold);
    let (taken, _) = node.running("taken").await;
    primary.kill();
    proxy.set(Mode::Cut);
    assert_eq!(sentinel.failed_over(primary.address()), replica.address());

    let other = with_lease(connect_through(&sentinel, options()).await, &database, 600);
    other.assert_replays("/orders", "before", &before).await;
    assert_eq!(other.post("/held", "running").await.code(), "in-progress");
    // The lease was acknowledged and is lost. The process that acquires the key next has the only recorded response.
    other.barrier.open_for_good();
    let response = other.post("/held", "taken").await;
    assert_eq!(response.text(), "effect 2 of taken");
    let reconnected = node.until_served("/orders", "reconnected").await;
    // The record is stored on the new primary, through the connection for completions.
    let stored = || other.post("/orders", "reconnected");
    assert_eq!(stored().await.body, reconnected.body);
    node.barrier.open_for_good();
    assert_eq!(taken.await.unwrap().body, response.body);
    for (request, key) in [(running, "running"), (alone, "alone")] {
        let response = request.await.unwrap();
        other.assert_replays("/held", key, &response).await;
        assert_eq!(database.of(key), 1, "{key}");
    }
    node.assert_replays("/held", "taken", &response).await;
    assert_eq!((database.of("before"), database.of("taken")), (1, 2));
}

// F-130
// Connections to the former primary work, and get the error READONLY.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demoted_primary_is_left() {
    let primary = RedisServer::start(&[]);
    let replica = RedisServer::replica_of(&primary);
    let sentinel = Sentinel::start(&primary, 1);
    let database = EffectsByKey::default();
    let node = with_lease(connect_through(&sentinel, options()).await, &database, 600);
    let before = node.post("/orders", "before").await;
    let (running, _) = node.running("running").await;
    caught_up(&primary, &replica).await;

    let client = Client::open(format!("redis://{}/", sentinel.address())).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let mut failover = tower_idempotency_redis::redis::cmd("SENTINEL");
    failover.arg("FAILOVER").arg(Sentinel::NAME);
    let began = Instant::now();
    // The sentinel rejects the failover until it knows the state of the replica.
    while let Err(error) = failover.query_async::<String>(&mut connection).await {
        assert!(began.elapsed() < HANG, "{error}");
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(sentinel.failed_over(primary.address()), replica.address());
    // The server may close a connection during its demotion.
    let refused = || primary.try_command(&["SET", "k", "v"]);
    while !matches!(refused(), Ok(Err(error)) if error.starts_with("READONLY")) {
        assert!(began.elapsed() < HANG, "the primary is demoted");
        sleep(Duration::from_millis(10)).await;
    }

    node.until_served("/orders", "fresh").await;
    node.barrier.open_for_good();
    let response = running.await.unwrap();
    assert_eq!(response.status, StatusCode::CREATED);
    let replay = node.until_served("/held", "running").await;
    assert_eq!(replay.body, response.body);
    node.assert_replays("/orders", "before", &before).await;
    for key in ["before", "running", "fresh"] {
        assert_eq!(database.of(key), 1, "{key}");
    }
}
