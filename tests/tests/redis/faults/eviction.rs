//! The server evicts entries when its memory is full: failure mode 41.

use std::{
    io,
    sync::{Arc, Mutex},
};

use http::StatusCode;
use tests::servers::redis::RedisServer;
use tower_idempotency_redis::{ConnectErrorKind, Eviction, RedisStore};

use crate::{
    events::eventually,
    faults::node::{Node, connect, connect_unhurried, unhurried},
};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no poison").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

// F-128
// fm 41
#[tokio::test]
async fn evicting_server_is_warned_about_or_refused() {
    // The process has one log: it also contains the events of parallel tests, which have another limit.
    const LIMIT: &str = "123456789";
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(move || writer.clone());
    subscriber.init();
    let server = RedisServer::start(&["--maxmemory", LIMIT]);
    for policy in ["allkeys-lru", "volatile-lru", "volatile-ttl", "noeviction"] {
        server.command(&["CONFIG", "SET", "maxmemory-policy", policy]);
        log.0.lock().unwrap().clear();
        let _store: RedisStore = connect_unhurried(&server.url()).await;
        let said = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let said = said.lines().find(|line| line.contains(LIMIT));
        let refusing = unhurried().with_eviction(Eviction::Refuse);
        let refused = refusing.connect(&server.url()).await;
        if policy == "noeviction" {
            assert_eq!(said, None);
            assert!(refused.is_ok());
        } else {
            let said = said.expect("a warning");
            assert!(said.contains("WARN") && said.contains(policy), "{said}");
            assert!(said.contains("execute twice"), "{said}");
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ConnectErrorKind::EvictionPolicy);
            assert!(error.to_string().contains(policy), "{error}");
        }
    }
}

// F-128
// fm 41: both policies evict leases, for every entry has its time to live.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_lease_runs_twice_with_one_record() {
    for policy in ["allkeys-lru", "volatile-lru"] {
        let server = RedisServer::start(&["--maxmemory-policy", policy]);
        let first = Node::new(connect(&server.url()).await);
        let second = Node::with(connect(&server.url()).await, &first.books, |layer| layer);
        let (late, _) = first.running("k").await;
        let (alone, _) = first.running("l").await;
        // Everything that may go has to.
        server.command(&["CONFIG", "SET", "maxmemory", "1"]);
        let _ = server.try_command(&["SET", "more", "y"]).unwrap();
        let is_empty = || server.command(&["DBSIZE"]) == "0";
        eventually("all entries are evicted", is_empty).await;
        server.command(&["CONFIG", "SET", "maxmemory", "0"]);

        second.gate.open_for_good();
        let answer = second.post("/held", "k").await;
        assert_eq!(answer.status, StatusCode::CREATED);
        assert_eq!(answer.text(), "effect 2 of k", "{policy}");
        first.gate.open_for_good();
        assert_eq!(late.await.unwrap().body, answer.body);
        // No other process took this one meanwhile.
        let stored = alone.await.unwrap();
        for node in [&first, &second] {
            node.assert_replays("/held", "k", &answer).await;
            node.assert_replays("/held", "l", &stored).await;
        }
        assert_eq!((first.books.of("k"), first.books.of("l")), (2, 1));
    }
}
