//! A user of the server with few rights.

#![expect(clippy::unwrap_used, reason = "a failed test shows its line")]

use std::time::Duration;

use http::StatusCode;
use tests::{
    barrier::within,
    servers::redis::{RedisCluster, RedisServer, until_connected},
    sql,
};
use tokio::time::{Instant, sleep};
use tower_idempotency::{
    ConcurrentRequests, NeedsAttention, Ttl,
    inspect::{Inspect, Query, Resolution, State},
    store::Store,
};
use tower_idempotency_redis::RedisStore;

use crate::{
    events::{HANG, eventually},
    faults::node::{
        EffectsByKey, Node, connect_with_long_timeout, options_with_long_timeout, patient,
    },
    inspect::listed,
};

/// The rights listed in `docs/stores/redis.md`, except those for channels.
const COMMANDS: &str = "+@scripting +info +hmget +hset +hdel +del +pexpire +pexpireat +pttl +time +publish +subscribe \
                        +unsubscribe +zadd +zrem +zremrangebyscore";

/// Connects as a user with only these rights.
async fn connect_as(server: &RedisServer, rights: &str) -> RedisStore {
    let mut user = vec!["ACL", "SETUSER", "service", "reset", "on", ">open-sesame"];
    user.extend(rights.split_whitespace());
    server.command(&user);
    let url = format!("redis://service:open-sesame@{}/0", server.address());
    connect_with_long_timeout(&url).await
}

/// Returns the numbers of script calls and of their failures since the last call.
fn scripts(server: &RedisServer) -> (u64, u64) {
    let stats = server.command(&["INFO", "commandstats"]);
    server.command(&["CONFIG", "RESETSTAT"]);
    let figure = |name: &str| {
        let mut lines = stats.lines();
        let line = lines.find(|line| line.starts_with("cmdstat_evalsha:"))?;
        let figure = line
            .split([':', ','])
            .find_map(|it| it.strip_prefix(name))?;
        figure.parse::<u64>().ok()
    };
    (
        figure("calls=").unwrap_or(0),
        figure("failed_calls=").unwrap_or(0),
    )
}

/// Checks a request, a request without a record, a renewed lease, and a released takeover.
async fn assert_served(store: &RedisStore, database: &EffectsByKey, server: &RedisServer) {
    let node = Node::with(store.clone(), database, patient);
    let renewing = Node::with(store.clone(), database, |layer| {
        patient(layer).with_lease_ttl(Ttl::from_secs(9))
    });
    scripts(server);
    let first = node.post("/orders", "first").await;
    assert_eq!(first.text(), "effect 1 of first");
    assert_eq!(scripts(server), (2, 0), "taken and completed");
    let failed = node.post("/orders-fails", "failed").await;
    assert_eq!(failed.status, StatusCode::BAD_GATEWAY);
    assert_eq!(scripts(server), (2, 0), "taken and released");

    let (running, lease) = renewing.running("running").await;
    let renewed = || server.commandstats().get("evalsha") >= Some(&3);
    eventually("the lease is renewed", renewed).await;
    assert!(lease.is_held());
    renewing.barrier.release(1);
    let response = running.await.unwrap();
    node.assert_replays("/held", "running", &response).await;

    let (orphaned, _) = node.running_on("/held-fails", "orphaned").await;
    for key in server.entries() {
        if server.command(&["HGET", &key, "s"]) == "L" {
            server.command(&["HSET", &key, "l", "1"]);
        }
    }
    let taking_over = node.spawn("/held-fails", "orphaned");
    within(HANG, node.barrier.arrival()).await;
    node.barrier.release(2);
    for request in [orphaned, taking_over] {
        assert_eq!(request.await.unwrap().status, StatusCode::BAD_GATEWAY);
    }
    assert_eq!(scripts(server).1, 0);
    assert_eq!(database.of_takeovers("orphaned"), 1);
    assert_eq!((database.of("first"), database.of("running")), (1, 1));
}

// F-132
// A user without channels on a server of version 7, where scripts of this user cannot publish.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_without_channels_polls() {
    let server = RedisServer::start(&[]);
    let store = connect_as(&server, &format!("~idempotency:* {COMMANDS}")).await;
    let database = EffectsByKey::default();
    assert_served(&store, &database, &server).await;

    let held = Node::with(store.clone(), &database, patient);
    let waiting = Node::with(store, &database, |layer| {
        patient(layer).with_concurrent_requests(ConcurrentRequests::Wait(HANG))
    });
    let (request, _) = held.running("waited-for").await;
    let waiter = waiting.spawn("/held", "waited-for");
    // At that time the delays between two connections of the listener have grown to a second. Each count
    // makes a connection, too.
    for _ in 0..8 {
        let refused = denied(&server, "subscribe");
        eventually("another connection may not listen", || {
            denied(&server, "subscribe") > refused
        })
        .await;
    }
    // The counts are within the measured time.
    let began = Instant::now();
    let before = connections(&server);
    sleep(Duration::from_secs(3)).await;
    let (made, took) = (connections(&server) - before, began.elapsed());
    held.barrier.open_for_good();
    let response = request.await.unwrap();
    assert_eq!(waiter.await.unwrap().body, response.body);
    // One call per second, one call of a second that had already begun, and the call that counts.
    assert!(made <= took.as_secs() + 3, "{made} in {took:?}");
    assert_eq!(database.of("waited-for"), 1);
}

// F-132
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documented_rights_suffice() {
    let server = RedisServer::start(&[]);
    let rights = format!("~idempotency:* &idempotency:* {COMMANDS}");
    let store = connect_as(&server, &rights).await;
    let database = EffectsByKey::default();
    assert_served(&store, &database, &server).await;
    let node = Node::with(store.clone(), &database, patient);
    let waiting = Node::with(store, &database, |layer| {
        patient(layer).with_concurrent_requests(ConcurrentRequests::Wait(HANG))
    });
    let (request, _) = node.running("waited-for").await;
    let waiter = waiting.spawn("/held", "waited-for");
    let subscribed = || !server.command(&["PUBSUB", "CHANNELS"]).is_empty();
    eventually("the waiter listens", subscribed).await;
    node.barrier.open_for_good();
    let response = request.await.unwrap();
    assert_eq!(waiter.await.unwrap().body, response.body);
    assert_nothing_denied(&server);
}

/// The tools of an operator find the few slots of a cluster that have entries.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documented_rights_list_entries_of_cluster() {
    let cluster = RedisCluster::start();
    let nodes = [0, 1, 2].map(|n| cluster.node(n));
    let of_cluster = "+ping +cluster|slots +asking";
    let of_operators = "+type +exists +hstrlen +zrangebyscore";
    for node in nodes {
        node.permit("reset on >open-sesame ~idempotency:* &idempotency:*");
        node.permit(&format!("{COMMANDS} {of_cluster} {of_operators}"));
    }
    let urls = nodes.map(|node| format!("redis://service:open-sesame@{}", node.address()));
    let options = options_with_long_timeout();
    let store = until_connected(|| options.clone().connect_cluster(urls.clone())).await;
    for needs_attention in [false, true] {
        let mut claim = sql::claim();
        claim.lease = Ttl::from_secs(600);
        store.acquire(&claim).await.unwrap();
        if needs_attention {
            let attention = NeedsAttention::new("refund-failed");
            let record = Resolution::NeedsAttention(attention).record(&claim.id);
            let (record, retention) = record.unwrap();
            let lease = claim.lease_ref(1);
            store.complete(&lease, record, retention).await.unwrap();
        }
    }
    let summary = store.summary(10).await.unwrap();
    for (state, expected) in [
        (State::InProgress, 1_usize),
        (State::Orphaned, 0),
        (State::NeedsAttention, 1),
    ] {
        let entries = listed(&store, Query::new(state)).await;
        assert_eq!(entries.len(), expected, "{state}");
        let count = summary.count(state).unwrap();
        assert_eq!(count.value, expected as u64, "{state}");
    }
    for node in nodes {
        assert_nothing_denied(node);
    }
}

/// Checks that the server has rejected no command because of missing rights.
fn assert_nothing_denied(server: &RedisServer) {
    let log = server.command(&["ACL", "LOG"]);
    let log: Vec<_> = log.lines().collect();
    let denied = log.windows(2).filter(|it| it[0] == "object");
    // The client library identifies itself, and ignores the rejection.
    let denied: Vec<_> = denied
        .map(|it| it[1])
        .filter(|it| *it != "client|setinfo")
        .collect();
    assert!(denied.is_empty(), "{denied:?}");
}

// F-133
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_recovers_after_refused_login() {
    let server = RedisServer::start(&[]);
    let database = EffectsByKey::default();
    let mut nodes = Vec::new();
    // The first connection detects its loss at once, the second one with its next call.
    for (user, path) in [("hears", "0?protocol=resp3"), ("asks", "7")] {
        let mut user_with_rights = vec!["ACL", "SETUSER", user, "on", ">open-sesame", "~*", "&*"];
        user_with_rights.extend(COMMANDS.split_whitespace().chain(["+select"]));
        server.command(&user_with_rights);
        let url = format!("redis://{user}:open-sesame@{}/{path}", server.address());
        let node = Node::with(connect_with_long_timeout(&url).await, &database, patient);
        assert_eq!(node.post("/orders", user).await.status, StatusCode::CREATED);
        nodes.push(node);
    }
    // One of the two is refused when it identifies itself, and the other when it selects its database.
    server.command(&["ACL", "SETUSER", "hears", "off"]);
    server.command(&["ACL", "SETUSER", "asks", "-select"]);
    for user in ["hears", "asks"] {
        server.command(&["CLIENT", "KILL", "USER", user]);
    }
    nodes[1].assert_unavailable("/orders", "refused").await;
    // The background release of the unavailable request connects again, until the delay has grown to its maximum.
    let refused = denied(&server, "select");
    eventually("more connections are refused", || {
        denied(&server, "select") >= refused + 6
    })
    .await;
    server.command(&["ACL", "SETUSER", "hears", "on"]);
    server.command(&["ACL", "SETUSER", "asks", "+select"]);
    for (n, node) in nodes.iter().enumerate() {
        let key = format!("again-{n}");
        node.until_served("/orders", &key).await;
        assert_eq!(database.of(&key), 1);
    }
}

/// Returns how often the server has rejected this command because of missing rights.
fn denied(server: &RedisServer, command: &str) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]);
    let prefix = format!("cmdstat_{command}:");
    let mut lines = stats.lines();
    let line = lines.find(|line| line.starts_with(&prefix));
    let figure = line.and_then(|line| line.split("rejected_calls=").nth(1));
    let digits = figure.map(|it| it.split(',').next().unwrap_or(it));
    digits.map_or(0, |digits| digits.trim().parse().unwrap())
}

/// Returns the number of connections made so far, including its own.
fn connections(server: &RedisServer) -> u64 {
    let stats = server.command(&["INFO", "stats"]);
    let mut lines = stats.lines();
    let made = lines.find_map(|line| line.strip_prefix("total_connections_received:"));
    made.unwrap().parse().unwrap()
}
