//! A cluster whose slots move and whose nodes fail.

use std::{
    collections::HashSet,
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use http::StatusCode;
use tests::servers::redis::{self, RedisCluster};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tower_idempotency::{
    Ttl,
    store::{Acquired, Claim, Fingerprint, KeyId, Store},
};
use tower_idempotency_redis::{RedisOptions, RedisStore};

use crate::{
    events::{HANG, eventually},
    faults::{
        node::{EffectsByKey, Node, options, options_with_long_timeout, patient, until_connected},
        sentinel::caught_up,
    },
};

pub(crate) async fn connect(cluster: &RedisCluster, prefix: &str) -> RedisStore {
    let options = options().with_prefix(prefix);
    until_connected(|| options.clone().connect_cluster(cluster.urls())).await
}

// F-121
// Each entry is one key, on any node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_all_slots_are_served() {
    let cluster = RedisCluster::start();
    let node = Node::new(connect(&cluster, "all:").await);
    let other = Node::with(connect(&cluster, "all:").await, &node.database, |layer| {
        layer
    });
    let mut requests = JoinSet::new();
    for i in 0..150 {
        let (node, other) = (node.clone(), other.clone());
        requests.spawn(async move {
            let key = format!("k-{i}");
            let response = node.post("/orders", &key).await;
            assert_eq!(response.text(), format!("effect 1 of {key}"));
            other.assert_replays("/orders", &key, &response).await;
            assert_eq!(node.database.of(&key), 1);
        });
    }
    requests.join_all().await;
    for n in 0..3 {
        let entries: u64 = cluster.node(n).command(&["DBSIZE"]).parse().unwrap();
        assert!((25..=75).contains(&entries), "node {n} has {entries}");
    }
}

// F-122
// The store follows the redirections MOVED and ASK.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slot_migration_loses_no_effect_or_record() {
    let cluster = RedisCluster::start();
    // All entries are in one slot, which moves from node to node.
    let slot = cluster.slot("{moving}");
    let moving = options_with_long_timeout().with_prefix("{moving}:");
    let store = || until_connected(|| moving.clone().connect_cluster(cluster.urls()));
    let node = Node::with(store().await, &EffectsByKey::default(), |layer| {
        patient(layer).with_lease_ttl(LEASE.try_into().unwrap())
    });
    let other = Node::with(store().await, &node.database, patient);
    let (running, lease) = node.running("running").await;
    let (done, refused, late) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicU64::new(0)),
    );
    let mut traffic = JoinSet::new();
    for client in 0..8 {
        let (node, other) = (node.clone(), other.clone());
        let (done, refused, late) = (Arc::clone(&done), Arc::clone(&refused), Arc::clone(&late));
        traffic.spawn(async move {
            let mut keys = 0;
            while !done.load(Ordering::Relaxed) {
                let key = format!("k-{client}-{keys}");
                keys += 1;
                let began = Instant::now();
                let first = node.post("/orders", &key).await;
                if first.status != StatusCode::CREATED {
                    refused.fetch_add(1, Ordering::Relaxed);
                    assert_eq!(first.code(), "store-unavailable");
                    assert_eq!(node.database.of(&key), 0, "refused and executed");
                }
                let response = other.until_served("/orders", &key).await;
                let again = node.until_served("/orders", &key).await;
                assert_eq!(again.body, response.body);
                // A machine that stalls for a lease leaves orphans. They are executed again as takeovers.
                let (effects, took) = (node.database.of(&key), began.elapsed());
                let takeovers = node.database.of_takeovers(&key);
                assert!(
                    effects == 1 + takeovers && (takeovers == 0 || took > LEASE),
                    "{key}: {effects} and {takeovers} in {took:?}: {first:?}, {response:?}"
                );
                late.fetch_add(takeovers, Ordering::Relaxed);
            }
            keys
        });
    }
    let moves = async {
        let began = Instant::now();
        let mut round = 0;
        // A slow machine needs more rounds for enough requests.
        while round < 9 || node.database.total() < 200 {
            assert!(began.elapsed() < HANG, "{} effects", node.database.total());
            round += 1;
            let to = (cluster.master_of(slot).unwrap() + 1) % 3;
            thread::scope(|scope| {
                scope.spawn(|| {
                    cluster.begin_move(slot, to);
                    thread::sleep(Duration::from_millis(150));
                    // New keys go to the other node by ASK, and existing keys are moved.
                    cluster.move_keys(slot, to);
                    cluster.end_move(slot, to);
                });
            });
            sleep(Duration::from_millis(150)).await;
            assert!(lease.is_held(), "round {round}");
        }
    };
    moves.await;
    done.store(true, Ordering::Relaxed);
    let keys: Vec<u64> = traffic.join_all().await;
    let (keys, refused): (u64, _) = (keys.iter().sum(), refused.load(Ordering::Relaxed));
    println!("{keys} keys, {refused} refused");
    assert!(refused <= keys / 10, "{refused} of {keys} were refused");
    node.barrier.open_for_good();
    let response = running.await.unwrap();
    other.assert_replays("/held", "running", &response).await;
    assert_eq!(
        node.database.total(),
        keys + 1 + late.load(Ordering::Relaxed)
    );
}

const LEASE: Duration = Duration::from_secs(20);

// F-122
// While a slot moves, a request for a key that its former node does not have goes to the new node. If a script
// deleted an entry before it wrote the record, the entry would be lost, and the key free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_in_migrating_slot_becomes_record() {
    let cluster = RedisCluster::start();
    let (slot, prefix) = (cluster.slot("{leaving}"), "{leaving}:");
    let node = Node::new(connect(&cluster, prefix).await);
    let other = Node::with(connect(&cluster, prefix).await, &node.database, |layer| {
        layer
    });
    let from = cluster.master_of(slot).unwrap();
    let to = (from + 1) % 3;
    let (running, _) = node.running("running").await;
    let (failing, _) = node.running_on("/held-fails", "failing").await;
    cluster.begin_move(slot, to);
    other.barrier.open_for_good();
    let duplicate = tokio::spawn({
        let other = other.clone();
        async move { other.until_served("/held", "running").await }
    });
    node.barrier.open_for_good();
    let response = running.await.unwrap();
    assert_eq!(failing.await.unwrap().status, StatusCode::BAD_GATEWAY);
    let entries = |n| cluster.node(n).entries().len();
    assert_eq!([entries(from), entries(to)], [1, 0]);
    assert_eq!(duplicate.await.unwrap().body, response.body);
    other.assert_replays("/held", "running", &response).await;
    cluster.move_keys(slot, to);
    cluster.end_move(slot, to);
    other.assert_replays("/held", "running", &response).await;
    assert_eq!(node.database.of("running"), 1);
}

// F-124
// A node that imports a slot executes the command after ASKING on a connection, even if it does not have the
// entry. If that command belonged to another request, whose entry is still on the former owner, that request would
// execute twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn asking_and_command_are_sent_together() {
    let cluster = RedisCluster::start();
    let slot = cluster.slot("{importing}");
    // The monitor does not show a script that the node refuses because the indexes are on the other node.
    let options = options_with_long_timeout()
        .with_prefix("{importing}:")
        .with_indexes(false);
    let store = until_connected(|| options.clone().connect_cluster(cluster.urls())).await;
    let node = Node::new(store);
    let to = (cluster.master_of(slot).unwrap() + 1) % 3;
    node.post("/orders", "before").await;
    cluster.begin_move(slot, to);
    let monitor = cluster.node(to).monitor();
    let mut requests = JoinSet::new();
    for i in 0..200 {
        let node = node.clone();
        requests.spawn(async move {
            let key = format!("k-{i}");
            node.until_served("/orders", &key).await;
            assert_eq!(node.database.of(&key), 1, "{key}");
        });
    }
    requests.join_all().await;
    // Reads the commands of the node in their order.
    let mut asking = HashSet::new();
    let mut redirected = 0;
    for redis::ReceivedCommand {
        client,
        name,
        command,
        ..
    } in monitor.into_commands()
    {
        if name == "asking" {
            assert!(asking.insert(client), "two ASKING in a row: {command}");
        } else if asking.remove(&client) {
            redirected += 1;
            assert!(command.contains("{importing}:"), "{command}");
        }
    }
    // Each request makes an acquire and a completion.
    assert!(redirected >= 400, "{redirected} redirected commands");
    assert!(asking.is_empty(), "{asking:?}");
}

// F-122
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_node_keys_are_refused_until_failover() {
    let mut cluster = RedisCluster::start_with_replicas();
    set_replica_failover(&cluster, "no");
    for n in 0..6 {
        // Slots without a node do not affect the other slots.
        let command = ["CONFIG", "SET", "cluster-require-full-coverage", "no"];
        cluster.node(n).command(&command);
    }
    // Each hash tag belongs to another node.
    let tags: Vec<_> = (0..3).map(|n| tag_on(&cluster, n)).collect();
    let database = EffectsByKey::default();
    let mut nodes = Vec::new();
    for tag in &tags {
        let store = connect(&cluster, &format!("{{{tag}}}:")).await;
        nodes.push(Node::with(store, &database, |layer| {
            layer.with_lease_ttl(Ttl::from_secs(600))
        }));
    }
    let mut done = Vec::new();
    for (n, node) in nodes.iter().enumerate() {
        for i in 0..20 {
            let key = format!("done-{n}-{i}");
            let response = node.post("/orders-large", &key).await;
            done.push((n, key, response));
        }
    }
    let (running, _) = nodes[0].running("running").await;
    caught_up(cluster.node(0), cluster.node(3)).await;
    let slot = cluster.slot(format!("{{{}}}", tags[0]));
    cluster.node_mut(0).kill();

    nodes[0].assert_unavailable("/orders", "fresh-0").await;
    for (n, node) in nodes.iter().enumerate().skip(1) {
        let key = format!("fresh-{n}");
        assert_eq!(
            node.post("/orders", &key).await.text(),
            format!("effect 1 of {key}")
        );
    }
    set_replica_failover(&cluster, "yes");
    let next = thread::scope(|scope| {
        let waiting = scope.spawn(|| cluster.failed_over(slot, 0));
        waiting.join().unwrap()
    });
    assert_eq!(next, 3);

    // The store reconnects by itself, and the node still has its entries.
    let fresh = nodes[0].until_served("/orders", "fresh-0").await;
    assert_eq!(fresh.text(), "effect 1 of fresh-0");
    for (n, key, response) in &done {
        nodes[*n]
            .assert_replays("/orders-large", key, response)
            .await;
        assert_eq!(database.of(key), 1);
    }
    let duplicate = nodes[0].post("/held", "running").await;
    assert_eq!(duplicate.code(), "in-progress");
    nodes[0].barrier.open_for_good();
    let response = running.await.unwrap();
    nodes[0].assert_replays("/held", "running", &response).await;
    assert_eq!(database.total(), 60 + 3 + 1);
}

// F-123
// This loss is documented. Only the master of a slot knows that the slot moves. A replica that replaces the master does
// not know it, except in Valkey 8 and later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrated_key_reexecutes_after_master_loss() {
    let mut cluster = RedisCluster::start_with_replicas();
    let (tag, to) = (tag_on(&cluster, 0), 1);
    let slot = cluster.slot(format!("{{{tag}}}"));
    let node = Node::new(connect(&cluster, &format!("{{{tag}}}:")).await);
    let moved = node.post("/orders", "moved").await;
    cluster.begin_move(slot, to);
    cluster.move_keys(slot, to);
    node.assert_replays("/orders", "moved", &moved).await;
    caught_up(cluster.node(0), cluster.node(3)).await;
    cluster.node_mut(0).kill();
    // The importing node does not accept the new master of the slot, so no node is queried for the moved record.
    let again = node.until_served("/orders", "moved").await;
    let server = cluster.node(to).command(&["INFO", "server"]);
    if server.contains("server_name:valkey") && again.is_replay() {
        assert_eq!(again.body, moved.body);
    } else {
        assert_eq!(again.text(), "effect 2 of moved");
    }
    node.assert_replays("/orders", "moved", &again).await;
}

// F-127
// The connections stay open, and no node redirects to another node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_node_keys_are_served_after_failover() {
    let cluster = RedisCluster::start_with_replicas();
    set_replica_failover(&cluster, "no");
    for n in 0..6 {
        let command = ["CONFIG", "SET", "cluster-require-full-coverage", "no"];
        cluster.node(n).command(&command);
    }
    let (database, mut nodes) = (EffectsByKey::default(), Vec::new());
    for n in 0..3 {
        let store = connect(&cluster, &format!("{{{}}}:", tag_on(&cluster, n))).await;
        nodes.push(Node::with(store, &database, |layer| layer));
    }
    let before = nodes[0].post("/orders", "before").await;
    caught_up(cluster.node(0), cluster.node(3)).await;
    cluster.node(0).pause();
    nodes[0].assert_unavailable("/orders", "fresh").await;
    set_replica_failover(&cluster, "yes");
    nodes[0].until_served("/orders", "fresh").await;
    nodes[0].assert_replays("/orders", "before", &before).await;
    for (n, node) in nodes.iter().enumerate().skip(1) {
        let key = format!("other-{n}");
        let response = node.post("/orders", &key).await;
        assert_eq!(response.text(), format!("effect 1 of {key}"));
    }
    cluster.node(0).resume();
    nodes[0].until_served("/orders", "after").await;
    assert_eq!(database.total(), 5);
}

// F-127
// Calls for all nodes share connections. A query for the slots at a hanging node must not delay calls to the
// other nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_other_nodes_are_served_while_one_hangs() {
    assert_others_are_served(RedisCluster::start_with(&NEVER_FAILS_OVER)).await;
}

// F-127
// The store queries the replica of the hanging node, which redirects to that node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_nodes_serve_while_one_hangs() {
    assert_others_are_served(RedisCluster::start_with_replicas_and(&NEVER_FAILS_OVER)).await;
}

/// Permits or prevents that replicas take over from failed masters.
fn set_replica_failover(cluster: &RedisCluster, yes_or_no: &str) {
    let prevented = if yes_or_no == "yes" { "no" } else { "yes" };
    for n in 3..6 {
        let command = ["CONFIG", "SET", "cluster-replica-no-failover", prevented];
        cluster.node(n).command(&command);
    }
}

/// A failover takes longer than any test.
const NEVER_FAILS_OVER: [&str; 4] = [
    "--cluster-node-timeout",
    "600000",
    "--cluster-require-full-coverage",
    "no",
];

/// The timeout of the store while a node hangs.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The number of waits that are enough to judge if most are short.
const ENOUGH_WAITS: usize = 3;

async fn assert_others_are_served(cluster: RedisCluster) {
    let options = RedisOptions::new().with_timeout(TIMEOUT);
    let store = until_connected(|| options.clone().connect_cluster(cluster.urls())).await;
    let node = Node::with(store.clone(), &EffectsByKey::default(), |layer| {
        let layer = layer.with_store_timeout(TIMEOUT * 2);
        layer.with_lease_ttl(Ttl::from_secs(30))
    });
    let entries = |n| -> u64 {
        let size = cluster.node(n).command(&["DBSIZE"]);
        size.parse().expect("a number")
    };
    let mut running = Vec::new();
    for i in 0..12 {
        let (before, key) = (entries(0), format!("running-{i}"));
        let (request, lease) = node.running(&key).await;
        // Leases on the hanging node are renewed too, until they are lost, so they are left out.
        if entries(0) == before {
            running.push((request, lease, key));
        }
    }
    assert!(!running.is_empty() && running.len() < 12);
    let mut of_each = [Vec::new(), Vec::new(), Vec::new()];
    for claim in (0..200).map(claim) {
        let n = cluster.master_of(slot_of(&cluster, &claim));
        of_each[n.expect("a slot that is served")].push(claim);
    }
    let [hanging, others, more] = of_each;
    let others: Vec<_> = others.iter().chain(&more).collect();
    // If the store queries the hanging node for the slots, other calls wait for the end of that query: half of the call
    // timeout. If the query used the whole timeout, all of these calls would wait that long. Some calls wait for
    // several queries, so most of the waits decide.
    let are_most_short = |waits: &[Duration]| {
        let long = waits.iter().filter(|wait| **wait >= TIMEOUT * 4 / 5);
        2 * long.count() < waits.len()
    };
    let mut waits: Vec<Duration> = Vec::new();
    let mut pauses = 0;
    while pauses < 6 && (waits.len() < ENOUGH_WAITS || !are_most_short(&waits)) {
        pauses += 1;
        waits.extend(long_waits_while_one_hangs(&cluster, &store, &hanging, &others).await);
        for (_, lease, key) in &running {
            assert!(lease.is_held(), "{key}");
        }
    }
    println!("calls waited {waits:?} in {pauses} pauses");
    // If no call had to wait, the other nodes serve as well.
    assert!(waits.is_empty() || are_most_short(&waits), "{waits:?}");
    node.barrier.open_for_good();
    for (request, _, key) in running {
        let response = request.await.expect("no panic");
        assert_eq!(response.text(), format!("effect 1 of {key}"));
        let replay = node.until_served("/held", &key).await;
        assert!(replay.is_replay());
        assert_eq!(node.database.of(&key), 1);
    }
}

/// Pauses a node under calls to all nodes, until enough calls to other nodes had to wait, at most for 7 s. Returns the
/// durations of these calls. Omits calls during which this process stalled.
async fn long_waits_while_one_hangs(
    cluster: &RedisCluster,
    store: &RedisStore,
    hanging: &[Claim],
    others: &[&Claim],
) -> Vec<Duration> {
    cluster.node(0).pause();
    let (paused, trouble) = (Instant::now(), Duration::from_secs(7));
    let done = Arc::new(AtomicBool::new(false));
    let mut traffic = JoinSet::new();
    for claim in hanging.iter().take(40) {
        let (store, claim, done) = (store.clone(), claim.clone(), Arc::clone(&done));
        traffic.spawn(async move {
            while !done.load(Ordering::Relaxed) {
                assert!(store.acquire(&claim).await.is_err(), "it hangs");
            }
        });
    }
    // The longest interruption of this process since the last call began, in milliseconds.
    let interruption = Arc::new(AtomicU64::new(0));
    let beats = tokio::spawn({
        let interruption = Arc::clone(&interruption);
        async move {
            while paused.elapsed() < HANG {
                let last = Instant::now();
                sleep(Duration::from_millis(5)).await;
                let millis = u64::try_from(last.elapsed().as_millis()).unwrap_or(u64::MAX);
                interruption.fetch_max(millis, Ordering::Relaxed);
            }
        }
    });
    let mut waits = Vec::new();
    let mut others = others.iter().cycle();
    while paused.elapsed() < trouble && waits.len() < ENOUGH_WAITS {
        interruption.store(0, Ordering::Relaxed);
        let (began, claim) = (Instant::now(), others.next().expect("calls to other nodes"));
        while let Err(error) = store.acquire(claim).await {
            assert!(began.elapsed() < HANG, "{error:?}");
        }
        let took = began.elapsed();
        // Another beat follows an interruption.
        sleep(Duration::from_millis(20)).await;
        if took > TIMEOUT / 4 && interruption.load(Ordering::Relaxed) < 250 {
            waits.push(took);
        }
    }
    beats.abort();
    done.store(true, Ordering::Relaxed);
    traffic.join_all().await;
    cluster.node(0).resume();
    let resumed = Instant::now();
    while let Err(error) = store.acquire(&hanging[0]).await {
        assert!(resumed.elapsed() < HANG, "{error:?}");
    }
    waits
}

fn claim(n: u32) -> Claim {
    let mut id = [0; 32];
    id[..4].copy_from_slice(&n.to_be_bytes());
    let fingerprint = Fingerprint::from_bytes([1; 32]);
    Claim::new(KeyId::from_bytes(id), fingerprint).expect("randomness")
}

fn slot_of(cluster: &RedisCluster, claim: &Claim) -> u16 {
    let digits = claim.id.as_bytes().iter().map(|it| format!("{it:02x}"));
    cluster.slot(format!("idempotency:{}", digits.collect::<String>()))
}

// F-127
// Unresponsive nodes do not prevent a connection to the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_connects_despite_unresponsive_nodes() {
    let cluster = RedisCluster::start_with(&NEVER_FAILS_OVER);
    let gone: Vec<_> = (0..3)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    let mut urls: Vec<_> = gone
        .iter()
        .map(|it| format!("redis://{}/", it.local_addr().unwrap()))
        .collect();
    urls.extend(cluster.urls());
    let store = until_connected(|| RedisOptions::new().connect_cluster(&urls)).await;
    for claim in (0..20).map(claim) {
        let began = Instant::now();
        let acquired = loop {
            match store.acquire(&claim).await {
                Ok(acquired) => break acquired,
                Err(error) => assert!(began.elapsed() < HANG, "{error:?}"),
            }
        };
        assert!(matches!(acquired, Acquired::Granted { generation: 1, .. }));
    }
    // Node 2 has slots as well.
    cluster.node(2).pause();
    let store = until_connected(|| RedisOptions::new().connect_cluster(&urls)).await;
    let claims = (20..100).map(claim);
    let mut others = claims.filter(|it| cluster.master_of(slot_of(&cluster, it)) != Some(2));
    let claim = others.next().expect("two thirds of the keys");
    let began = Instant::now();
    while let Err(error) = store.acquire(&claim).await {
        assert!(began.elapsed() < HANG, "{error:?}");
    }
    cluster.node(2).resume();
}

// F-122
// The cluster replies CLUSTERDOWN.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_outage_executes_nothing() {
    let mut cluster = RedisCluster::start();
    let tag = tag_on(&cluster, 1);
    let node = Node::new(connect(&cluster, &format!("{{{tag}}}:")).await);
    let before = node.post("/orders", "before").await;
    cluster.node_mut(0).kill();
    eventually("the others refuse", || {
        let info = cluster.node(1).command(&["CLUSTER", "INFO"]);
        info.contains("cluster_state:fail")
    })
    .await;
    node.assert_unavailable("/orders", "before").await;
    node.assert_unavailable("/orders", "fresh").await;
    cluster.node_mut(0).restart();
    let fresh = node.until_served("/orders", "fresh").await;
    assert_eq!(fresh.text(), "effect 1 of fresh");
    node.assert_replays("/orders", "before", &before).await;
    assert_eq!(node.database.total(), 2);
}

/// Returns a hash tag whose slot belongs to this node.
fn tag_on(cluster: &RedisCluster, node: usize) -> String {
    let tags = (0..1_000).map(|i| format!("t{i}"));
    let mut tags = tags.filter(|tag| cluster.master_of(cluster.slot(tag)) == Some(node));
    tags.next().expect("a third of the slots")
}
