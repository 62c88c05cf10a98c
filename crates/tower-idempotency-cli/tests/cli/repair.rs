//! `check --repair`: the indexes of Redis, and of a cluster, after they were lost or damaged.

use tests::{
    scratch::Scratch,
    servers::redis::{RedisCluster, RedisServer, UNHURRIED},
};
use tower_idempotency::{
    inspect::{Inspect, State},
    store::{Claim, Store, Ttl},
};
use tower_idempotency_redis::{RedisOptions, RedisStore};

use crate::{CommandOutput, run, run_in, scenario::Keys};

fn repair(url: &str) -> CommandOutput {
    let scratch = Scratch::new();
    let args = [
        "check",
        "--repair",
        "--reason",
        "ticket 17",
        "--audit",
        "log",
        "--yes",
        "--json",
    ];
    let ran = run_in(&scratch.file(""), url, &args);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.err.contains("reads all keys"), "{ran:?}");
    assert_eq!(
        ran.err.lines().count(),
        1,
        "no progress without a terminal: {ran:?}"
    );
    let log = std::fs::read_to_string(scratch.file("log")).expect("the log");
    assert_eq!(log.lines().count(), 2, "{log}");
    ran
}

/// Returns the numbers of entries that the store lists: in progress, orphaned, needing attention.
async fn listed(url: &str) -> [u64; 3] {
    let store = crate::open(url).await.expect("the server runs");
    let summary = store.summary(10_000).await.expect("the server runs");
    [State::InProgress, State::Orphaned, State::NeedsAttention]
        .map(|state| summary.count(state).expect("it is listed").value)
}

/// Takes a lease of each of these claims on a store without indexes.
async fn acquire_unindexed(store: &RedisStore, count: usize) -> Vec<Claim> {
    let mut claims = Vec::new();
    for _ in 0..count {
        let mut claim = tests::sql::claim();
        claim.lease = Ttl::from_secs(36_000);
        store.acquire(&claim).await.expect("the server runs");
        claims.push(claim);
    }
    claims
}

#[tokio::test(flavor = "multi_thread")]
async fn repair_adds_and_removes_on_redis() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let store = crate::open(&url).await.expect("the server runs");
    let keys = Keys::create(&store).await;
    let without = RedisOptions::new()
        .with_indexes(false)
        .with_timeout(UNHURRIED);
    let without = without.connect(&url).await.expect("the server runs");
    acquire_unindexed(&without, 700).await;
    // Keys of other programs, and of a store whose prefix begins with that of this one.
    server.command(&["SET", "idempotency:other", "x"]);
    server.command(&["ZADD", "idempotency:other:~leases", "1", "x"]);
    server.command(&["SET", "unrelated", "x"]);
    // Members without an entry, one of them no ID, and an entry in the wrong index.
    server.command(&["ZADD", "idempotency:~leases", "1", &"z".repeat(32)]);
    server.command(&["ZADD", "idempotency:~attention", "1", "no-id"]);
    let orphaned = keys.orphaned.id.to_hex();
    let script = "local id = string.gsub(ARGV[1], '..', function(h) return string.char(tonumber(h, 16)) end) \
         redis.call('ZREM', KEYS[1], id) return redis.call('ZADD', KEYS[2], 1, id)";
    let indexes = ["idempotency:~leases", "idempotency:~attention"];
    server.command(&["EVAL", script, "2", indexes[0], indexes[1], &orphaned]);
    assert_eq!(server.command(&["ZCARD", "idempotency:~attention"]), "3");

    let ran = repair(&url);
    assert!(ran.out.contains("\"added\":701"), "{ran:?}");
    assert!(ran.out.contains("\"removed\":3"), "{ran:?}");
    assert!(ran.out.contains("\"skipped\":0"), "{ran:?}");
    assert_eq!(listed(&url).await, [701, 1, 1]);
    assert_eq!(server.command(&["ZCARD", "idempotency:~attention"]), "1");
    assert_eq!(server.command(&["ZCARD", "idempotency:other:~leases"]), "1");
    let ran = repair(&url);
    assert!(ran.out.contains("\"added\":0"), "{ran:?}");
    assert!(ran.out.contains("\"removed\":0"), "{ran:?}");

    // An index that was lost as a whole, with the bands of orphan retentions.
    let score = ["ZRANGE", "idempotency:~leases", "-1", "-1", "WITHSCORES"];
    let last = server.command(&score);
    server.command(&["DEL", "idempotency:~leases", "idempotency:~attention"]);
    let ran = repair(&url);
    assert!(ran.out.contains("\"added\":703"), "{ran:?}");
    assert_eq!(listed(&url).await, [701, 1, 1]);
    assert_eq!(server.command(&score), last);
}

#[tokio::test(flavor = "multi_thread")]
async fn repair_adds_and_removes_in_cluster() {
    let cluster = RedisCluster::start();
    let url = cluster.url();
    let store = crate::open(&url).await.expect("the cluster runs");
    Keys::create(&store).await;
    let without = RedisOptions::new()
        .with_indexes(false)
        .with_timeout(UNHURRIED);
    let without = without.connect_cluster(cluster.urls()).await;
    let without = without.expect("the cluster runs");
    let claims = acquire_unindexed(&without, 300).await;
    assert_eq!(listed(&url).await, [1, 1, 1]);
    let ran = repair(&url);
    assert!(ran.out.contains("\"added\":300"), "{ran:?}");
    assert_eq!(listed(&url).await, [301, 1, 1]);
    for claim in &claims[..100] {
        let key = format!("idempotency:{}", claim.id.to_hex());
        let node = cluster.master_of(cluster.slot(&key)).expect("an owner");
        assert_eq!(cluster.node(node).command(&["DEL", &key]), "1");
    }
    let ran = repair(&url);
    assert!(ran.out.contains("\"removed\":100"), "{ran:?}");
    assert_eq!(listed(&url).await, [201, 1, 1]);
}

/// An entry that a later version wrote is listed as unreadable, also after a repair.
#[tokio::test(flavor = "multi_thread")]
async fn repair_keeps_unreadable_entries() {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let store = crate::open(&url).await.expect("the server runs");
    let keys = Keys::create(&store).await;
    let key = format!("idempotency:{}", keys.in_progress.id.to_hex());
    server.command(&["HSET", &key, "s", "X"]);
    let ran = repair(&url);
    assert!(ran.out.contains("\"added\":0"), "{ran:?}");
    let listed = run(&url, &["list", "in-progress", "--json"]);
    assert!(
        listed.out.contains("\"state\":\"unreadable\""),
        "{listed:?}"
    );
}

#[test]
fn repair_needs_reason_log_and_confirmation() {
    let server = RedisServer::start(&[]);
    for (args, expected) in [
        (&["--audit", "log", "--yes"][..], "--reason"),
        (&["--reason", "x", "--yes"], "--audit"),
        (&["--reason", "x", "--audit", "log"], "--yes"),
    ] {
        let args = [&["check", "--repair"], args].concat();
        let ran = run(&server.url(), &args);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(expected), "{ran:?}");
    }
    let args = [
        "check",
        "--repair",
        "--reason",
        "x",
        "--audit",
        "/dev/full",
        "--yes",
    ];
    let ran = run(&server.url(), &args);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("nothing was changed"), "{ran:?}");
}
