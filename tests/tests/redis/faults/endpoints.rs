//! Forms of the addresses in the redirections of a cluster's nodes.

#![expect(clippy::unwrap_used, reason = "a failed test shows its line")]

use std::{env, process::Command};

use http::StatusCode;
use tests::servers::redis::{RedisCluster, RedisServer, UNHURRIED};
use tokio::task;
use tower_idempotency_redis::{RedisOptions, RedisStore};

use crate::faults::node::{
    EffectsByKey, Node, options, options_with_long_timeout, patient, until_connected,
};

/// Connects with a timeout of more than 8 s (4 x a stall of 2 s). A node has a quarter of the timeout to accept a
/// connection. The store would connect to a skipped node later, and the test would count that connection.
async fn connect(cluster: &RedisCluster, prefix: &str) -> RedisStore {
    let options = RedisOptions::new()
        .with_timeout(UNHURRIED)
        .with_prefix(prefix);
    until_connected(|| options.clone().connect_cluster(cluster.urls())).await
}

// F-125
// A node that does not know its own name redirects to "the same host, on this port".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redirection_without_host_stays_on_host() {
    let cluster = cluster_without_hostnames();
    let node = Node::new(connect(&cluster, "{nameless}:").await);
    let other = Node::with(
        connect(&cluster, "{nameless}:").await,
        &node.database,
        |it| it,
    );
    assert_is_sent_on(&cluster, "{nameless}", &node, &other).await;
}

// F-125
// The store does not guess an unknown host: another cluster may listen on the same port of another host.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ambiguous_redirection_is_refused_until_moved() {
    let cluster = cluster_without_hostnames();
    let mut urls = cluster.urls();
    urls[1] = urls[1].replace("127.0.0.1", "localhost");
    let prefixed = options().with_prefix("{nameless}:");
    let node = Node::new(until_connected(|| prefixed.clone().connect_cluster(&urls)).await);
    let slot = cluster.slot("{nameless}");
    let to = (cluster.master_of(slot).unwrap() + 1) % 3;
    let before = node.post("/orders", "before").await;
    cluster.begin_move(slot, to);
    node.assert_unavailable("/orders", "asked").await;
    node.assert_replays("/orders", "before", &before).await;
    cluster.move_keys(slot, to);
    cluster.end_move(slot, to);
    node.until_served("/orders", "asked").await;
    node.assert_replays("/orders", "before", &before).await;
    assert_eq!(node.database.total(), 2);
}

// F-126
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redirection_to_ipv6_address_is_followed() {
    let both = ["--bind", "127.0.0.1", "::1"];
    let announced = ["--cluster-announce-ip", "::1"];
    let cluster = RedisCluster::start_with(&[both.as_slice(), &announced].concat());
    let node = Node::new(connect(&cluster, "{colons}:").await);
    let other = Node::with(connect(&cluster, "{colons}:").await, &node.database, |it| {
        it
    });
    assert_is_sent_on(&cluster, "{colons}", &node, &other).await;
}

/// Not a test by itself: the next test starts it as a process, because the trusted certificates are read from the
/// environment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_tls_client_process() {
    let Ok(urls) = env::var("CLUSTER_WITH_TLS") else {
        return;
    };
    let urls: Vec<_> = urls.split(' ').collect();
    let prefixed = options_with_long_timeout().with_prefix("{tls}:");
    let store = until_connected(|| prefixed.clone().connect_cluster(&urls)).await;
    let node = Node::with(store, &EffectsByKey::default(), patient);
    let response = node.post("/orders", "asked").await;
    assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
    node.assert_replays("/orders", "asked", &response).await;
}

// F-126
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn importing_node_is_reached_over_tls() {
    let cluster = RedisCluster::start_with_tls();
    let slot = cluster.slot("{tls}");
    let to = (cluster.master_of(slot).unwrap() + 1) % 3;
    cluster.begin_move(slot, to);
    let nodes = (0..3).map(|n| cluster.node(n));
    let urls: Vec<_> = nodes.map(RedisServer::tls_url).collect();
    let mut client = Command::new(env::current_exe().unwrap());
    client
        .args(["--exact", "faults::endpoints::cluster_tls_client_process"])
        .env("CLUSTER_WITH_TLS", urls.join(" "))
        .env("SSL_CERT_FILE", cluster.node(0).certificates().ca());
    let done = task::spawn_blocking(move || client.output()).await.unwrap();
    let done = done.unwrap();
    assert!(done.status.success(), "{done:?}");
    assert_eq!(cluster.node(to).command(&["DBSIZE"]), "1");
}

/// Checks that a moving key is requested from its new node, and that a moved key is found there. Both work at once,
/// without a new query for the slots. `other` has an old table of slots.
async fn assert_is_sent_on(cluster: &RedisCluster, tag: &str, node: &Node, other: &Node) {
    let slot = cluster.slot(tag);
    let to = (cluster.master_of(slot).unwrap() + 1) % 3;
    for it in [node, other] {
        let response = it.post("/orders", "before").await;
        assert_eq!(response.text(), "effect 1 of before");
    }
    cluster.begin_move(slot, to);
    let first = node.post("/orders", "asked").await;
    assert_eq!(first.text(), "effect 1 of asked");
    assert_eq!(cluster.node(to).command(&["DBSIZE"]), "1");
    cluster.move_keys(slot, to);
    cluster.end_move(slot, to);

    let connected = connections(cluster);
    other.assert_replays("/orders", "asked", &first).await;
    let fresh = other.post("/orders", "moved").await;
    assert_eq!(fresh.text(), "effect 1 of moved");
    // Three connections are those that count, and two are for acquires and completions on the new node.
    assert_eq!(connections(cluster) - connected, 3 + 2);
    node.assert_replays("/orders", "moved", &fresh).await;
    assert_eq!(node.database.total(), 3);
}

/// Starts a cluster whose nodes do not know their own names.
fn cluster_without_hostnames() -> RedisCluster {
    let unknown = ["--cluster-preferred-endpoint-type", "unknown-endpoint"];
    RedisCluster::start_with(&unknown)
}

/// Returns the number of connections made to the nodes so far, including its own.
fn connections(cluster: &RedisCluster) -> u64 {
    let made = |n| {
        let stats = cluster.node(n).command(&["INFO", "stats"]);
        let mut lines = stats.lines();
        let made = lines.find_map(|line| line.strip_prefix("total_connections_received:"));
        made.unwrap().parse::<u64>().unwrap()
    };
    (0..3).map(made).sum()
}
