//! The server refuses writes. Its memory is full, and it evicts nothing. Or its settings require a snapshot or replicas.

use std::{fs, path::Path, time::Duration};

use http::StatusCode;
use tests::{
    proxy::{ConnectionEnd, Fault, Proxy},
    servers::redis::RedisServer,
};
use tokio::time::Instant;
use tower_idempotency::Ttl;

use crate::{
    events::{eventually, expiries, until_renewed},
    faults::node::{EffectsByKey, Node, connect_with_long_timeout, patient},
};

/// Fills the memory of a server.
fn fill(server: &RedisServer) {
    server.command(&["SET", "filler", &"x".repeat(4 << 20)]);
    server.command(&["CONFIG", "SET", "maxmemory", "2mb"]);
    let refusal = server.try_command(&["SET", "more", "y"]);
    let refusal = refusal.expect("an answer");
    assert!(refusal.expect_err("no room").starts_with("OOM"));
}

// F-129
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_server_refuses_new_keys() {
    let server = RedisServer::start(&["--maxmemory-policy", "noeviction"]);
    let proxy = Proxy::start(server.address());
    let url = format!("redis://{}/0", proxy.address());
    let store = connect_with_long_timeout(&url).await;
    let node = Node::with(store, &EffectsByKey::default(), |layer| {
        patient(layer).with_lease_ttl(LEASE.try_into().unwrap())
    });
    let before = node.post("/orders", "before").await;
    let (request, lease) = node.running_on("/held-large", "running").await;
    let (failing, _) = node.running_on("/held-fails", "failing").await;
    fill(&server);
    let entries = server.command(&["DBSIZE"]);
    let connections = proxy.counts().connections;
    let refused = Instant::now();
    while refused.elapsed() < Duration::from_secs(1) {
        node.assert_unavailable("/orders", "fresh").await;
    }
    assert_eq!(
        proxy.counts().connections,
        connections,
        "the server replies, so no new connection is made"
    );
    node.assert_replays("/orders", "before", &before).await;
    assert_eq!(
        server.command(&["DBSIZE"]),
        entries,
        "nothing is left of it"
    );

    for _ in 0..2 {
        until_renewed(&server, std::slice::from_ref(&lease)).await;
        let duplicate = node.post("/held-large", "running").await;
        assert_eq!(duplicate.code(), "in-progress");
    }
    node.barrier.open_for_good();
    let response = request.await.unwrap();
    assert_eq!(response.status, StatusCode::CREATED);
    node.assert_replays("/held-large", "running", &response)
        .await;
    assert!(response.body.len() > 100_000, "no small record");
    // The release works, too. Otherwise the retry would find the key in progress.
    assert_eq!(failing.await.unwrap().status, StatusCode::BAD_GATEWAY);
    node.assert_unavailable("/orders", "failing").await;

    server.command(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(
        node.post("/orders", "fresh").await.text(),
        "effect 1 of fresh"
    );
    for key in ["before", "running", "failing", "fresh"] {
        assert_eq!(node.database.of(key), 1, "{key}");
    }
}

// F-129
// The record is stored, and repeating the completion needs no memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_completion_is_retried_on_full_server() {
    let server = RedisServer::start(&["--maxmemory-policy", "noeviction"]);
    let proxy = Proxy::start(server.address());
    let url = format!("redis://{}/0", proxy.address());
    let store = connect_with_long_timeout(&url).await;
    let node = Node::with(store, &EffectsByKey::default(), |layer| {
        patient(layer).with_lease_ttl(Ttl::from_secs(600))
    });
    let (request, _) = node.running("running").await;
    fill(&server);
    let refused = out_of_memory(&server);
    proxy.once(Fault::reply_to("effect 1 of running"), ConnectionEnd::Cut);
    node.barrier.open_for_good();
    let response = request.await.unwrap();
    assert_eq!(response.status, StatusCode::CREATED);
    assert_eq!(proxy.injected_faults(), 1);
    eventually("no background attempts are left", || {
        node.layer.in_flight() == 0
    })
    .await;
    assert_eq!(out_of_memory(&server), refused, "no call was refused");
    node.assert_replays("/held", "running", &response).await;
    assert_eq!(node.database.of("running"), 1);
    // The time to live is unchanged.
    let keys = server.entries();
    let key = keys.iter().find(|key| key.starts_with("idempotency:"));
    let lives = server.command(&["TTL", key.unwrap()]);
    let lives: u64 = lives.parse().unwrap();
    assert!((86_000..=86_400).contains(&lives), "{lives} s");
}

/// A reason for which a server refuses all writes.
#[derive(Clone, Copy, Debug)]
enum Refusal {
    /// The last snapshot failed.
    Snapshot,
    /// Fewer replicas than `min-replicas-to-write` are connected.
    Replicas,
}

impl Refusal {
    async fn begin(self, server: &RedisServer) {
        match self {
            Self::Snapshot => {
                let directory = server.command(&["CONFIG", "GET", "dir"]);
                let directory = Path::new(directory.lines().nth(1).expect("a directory"));
                fs::create_dir(directory.join("dump.rdb")).expect("a directory");
                server.command(&["CONFIG", "SET", "save", "3600 1"]);
                server.command(&["BGSAVE"]);
                eventually("the snapshot fails", || {
                    let info = server.command(&["INFO", "persistence"]);
                    info.contains("rdb_last_bgsave_status:err")
                })
                .await;
            }
            Self::Replicas => {
                server.command(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
            }
        }
    }

    /// Applies the documented remedy.
    fn end(self, server: &RedisServer) {
        let (setting, value) = match self {
            Self::Snapshot => ("stop-writes-on-bgsave-error", "no"),
            Self::Replicas => ("min-replicas-to-write", "0"),
        };
        server.command(&["CONFIG", "SET", setting, value]);
    }
}

// F-942
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_refused_within_lease_lose_no_record() {
    for refusal in [Refusal::Snapshot, Refusal::Replicas] {
        let server = RedisServer::start(&[]);
        let store = connect_with_long_timeout(&server.url()).await;
        let node = Node::with(store, &EffectsByKey::default(), patient);
        let before = node.post("/orders", "before").await;
        let (request, _) = node.running("running").await;
        refusal.begin(&server).await;
        node.assert_unavailable("/orders", "fresh").await;
        node.assert_replays("/orders", "before", &before).await;
        node.barrier.open_for_good();
        let response = request.await.unwrap();
        assert_eq!(response.status, StatusCode::CREATED, "{refusal:?}");
        assert_eq!(expiries(&server).len(), 1, "the record is not stored yet");

        refusal.end(&server);
        let replay = node.until_served("/held", "running").await;
        assert!(replay.is_replay() && replay.body == response.body);
        node.until_served("/orders", "fresh").await;
        for key in ["before", "running", "fresh"] {
            assert_eq!(node.database.of(key), 1, "{refusal:?} {key}");
        }
    }
}

// F-942
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_refused_beyond_lease_lose_records() {
    let server = RedisServer::start(&[]);
    let store = connect_with_long_timeout(&server.url()).await;
    let node = Node::with(store, &EffectsByKey::default(), |layer| {
        patient(layer).with_lease_ttl(LEASE.try_into().unwrap())
    });
    let (request, _) = node.running("running").await;
    Refusal::Replicas.begin(&server).await;
    node.barrier.open_for_good();
    let response = request.await.unwrap();
    assert_eq!(response.status, StatusCode::CREATED);
    eventually("no background attempts are left", || {
        node.layer.in_flight() == 0
    })
    .await;
    Refusal::Replicas.end(&server);
    let again = node.until_served("/held", "running").await;
    assert_eq!(again.text(), "effect 2 of running");
    node.assert_replays("/held", "running", &again).await;
}

/// Returns the number of commands that failed for lack of memory.
fn out_of_memory(server: &RedisServer) -> u64 {
    let errors = server.command(&["INFO", "errorstats"]);
    let mut lines = errors.lines();
    let count = lines.find_map(|line| line.strip_prefix("errorstat_OOM:count="));
    count.map_or(0, |count| count.trim_end().parse().expect("a number"))
}

/// The lease is long enough for a renewal after a stall of some seconds.
const LEASE: Duration = Duration::from_secs(12);
