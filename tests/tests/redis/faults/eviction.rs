//! The server evicts entries when its memory is full.

use std::{
    io,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use http::StatusCode;
use tests::{barrier::within, servers::redis::RedisServer};
use tokio::time::sleep;
use tower_idempotency::{
    StoreFailure,
    store::{Acquired, Claim, Fingerprint, KeyId, OrphanPolicy, Store, Token, Ttl},
};
use tower_idempotency_redis::{ConnectErrorKind, Eviction, RedisStore};

use crate::{
    events::{HANG, eventually},
    faults::node::{
        EffectsByKey, Node, connect, connect_with_long_timeout, options_with_long_timeout,
    },
};

/// The log of this process. It also contains the events of parallel tests, whose servers have other memory limits.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Returns the log, which the first call installs.
    fn shared() -> &'static Self {
        static LOG: OnceLock<Log> = OnceLock::new();
        LOG.get_or_init(|| {
            let log = Self::default();
            let writer = log.clone();
            let subscriber = tracing_subscriber::fmt()
                .with_max_level(tracing::Level::WARN)
                .with_ansi(false)
                .with_writer(move || writer.clone());
            subscriber.init();
            log
        })
    }

    /// Returns the lines so far that contain each of the texts.
    fn lines(&self, texts: &[&str]) -> Vec<String> {
        let log = String::from_utf8(self.0.lock().expect("no poison").clone());
        let log = log.expect("a log of text");
        let lines = log.lines();
        let lines = lines.filter(|line| texts.iter().all(|text| line.contains(*text)));
        lines.map(str::to_owned).collect()
    }
}

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
#[tokio::test]
async fn evicting_server_is_warned_about_or_refused() {
    const LIMIT: &str = "123456789";
    let log = Log::shared();
    let server = RedisServer::start(&["--maxmemory", LIMIT]);
    for policy in ["allkeys-lru", "volatile-lru", "volatile-ttl", "noeviction"] {
        server.command(&["CONFIG", "SET", "maxmemory-policy", policy]);
        let before = log.lines(&[LIMIT]).len();
        let _store: RedisStore = connect_with_long_timeout(&server.url()).await;
        let warnings = log.lines(&[LIMIT]).split_off(before);
        let refusing = options_with_long_timeout().with_eviction(Eviction::Refuse);
        let refused = refusing.connect(&server.url()).await;
        if policy == "noeviction" {
            assert!(warnings.is_empty(), "{warnings:?}");
            assert!(refused.is_ok());
        } else {
            let warning = warnings.first().expect("a warning");
            assert!(
                warning.contains("WARN") && warning.contains(policy),
                "{warning}"
            );
            assert!(warning.contains("execute twice"), "{warning}");
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ConnectErrorKind::EvictionPolicy);
            assert!(error.to_string().contains(policy), "{error}");
        }
    }
}

// F-128
// Both policies evict leases, because every entry has a time to live.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_lease_runs_twice_with_one_record() {
    for policy in ["allkeys-lru", "volatile-lru"] {
        let server = RedisServer::start(&["--maxmemory-policy", policy]);
        let first = Node::new(connect(&server.url()).await);
        let second = Node::with(connect(&server.url()).await, &first.database, |layer| layer);
        let (late, _) = first.running("k").await;
        let (alone, _) = first.running("l").await;
        // The server now evicts every entry that its policy permits.
        server.command(&["CONFIG", "SET", "maxmemory", "1"]);
        let _ = server.try_command(&["SET", "more", "y"]).unwrap();
        let is_empty = || server.entries().is_empty();
        eventually("all entries are evicted", is_empty).await;
        server.command(&["CONFIG", "SET", "maxmemory", "0"]);

        second.barrier.open_for_good();
        let response = second.post("/held", "k").await;
        assert_eq!(response.status, StatusCode::CREATED);
        assert_eq!(response.text(), "effect 2 of k", "{policy}");
        first.barrier.open_for_good();
        assert_eq!(late.await.unwrap().body, response.body);
        // No other process acquired this key meanwhile.
        let stored = alone.await.unwrap();
        for node in [&first, &second] {
            node.assert_replays("/held", "k", &response).await;
            node.assert_replays("/held", "l", &stored).await;
        }
        assert_eq!((first.database.of("k"), first.database.of("l")), (2, 1));
    }
}

fn claim(n: u8) -> Claim {
    let id = KeyId::from_bytes([n; 32]);
    Claim::new(id, Fingerprint::from_bytes([7; 32])).expect("randomness")
}

/// Acquires fresh keys until the store refuses them, or grants them. Each acquire may start a check, and does not wait for it.
async fn until_fresh_keys(store: &RedisStore, are_refused: bool) {
    let acquire = async || {
        let random = Token::random().expect("randomness");
        let mut id = [0; 32];
        id[..16].copy_from_slice(random.as_bytes());
        let claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes(id));
        store.acquire(&claim.expect("randomness")).await
    };
    within(HANG, async {
        while acquire().await.is_err() != are_refused {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

// F-941
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policy_changed_later_is_refused_until_changed_back() {
    const LIMIT: &str = "234567891";
    let log = Log::shared();
    let server = RedisServer::start(&["--maxmemory", LIMIT]);
    let watching = || options_with_long_timeout().with_eviction_check(Duration::from_millis(20));
    let refusing = watching().with_eviction(Eviction::Refuse);
    let refusing = refusing.connect(&server.url()).await.expect("noeviction");
    let warning = watching().connect(&server.url()).await.expect("connected");
    let held = claim(1);
    refusing.acquire(&held).await.expect("the policy is safe");
    for (policy, is_refused) in [("volatile-lru", true), ("noeviction", false)] {
        server.command(&["CONFIG", "SET", "maxmemory-policy", policy]);
        until_fresh_keys(&refusing, is_refused).await;
        // Both stores report the policy that evicts, and one of them does nothing else.
        let reports = || log.lines(&[LIMIT, policy]).len();
        within(HANG, async {
            while is_refused && reports() < 2 {
                warning.acquire(&claim(3)).await.expect("only a report");
                sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        warning.acquire(&claim(3)).await.expect("only a report");
        let renewed = refusing.renew(&held.lease_ref(1), Ttl::from_secs(60)).await;
        renewed.expect("the execution continues");
    }
    server.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    until_fresh_keys(&refusing, true).await;
    let error = refusing.acquire(&claim(2)).await.expect_err("refused");
    let source = std::error::Error::source(&error);
    let source = source.expect("a source").to_string();
    assert!(source.contains("noeviction"), "{source}");
    let lease = held.lease_ref(1);
    let completed = refusing.complete(&lease, "done".into(), Ttl::from_secs(60));
    completed.await.expect("the execution continues");
}

// F-941
/// The server still has its records. A request whose acquire fails may execute, so a retry must get its record.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policy_changed_later_keeps_replays() {
    let server = RedisServer::start(&[]);
    let options = options_with_long_timeout().with_eviction_check(Duration::from_millis(20));
    let options = options.with_eviction(Eviction::Refuse);
    let store = options.connect(&server.url()).await.expect("noeviction");
    let node = Node::with(store.clone(), &EffectsByKey::default(), |layer| {
        layer.with_store_failure(StoreFailure::DangerouslyExecuteUnprotected)
    });
    let first = node.post("/", "k").await;
    let (running, _) = node.running("l").await;
    let (held, mut orphan) = (claim(1), claim(2));
    orphan.lease = Ttl::MIN;
    for claim in [&held, &orphan] {
        let granted = store.acquire(claim).await.expect("the policy is safe");
        assert!(matches!(granted, Acquired::Granted { .. }), "{granted:?}");
    }
    server.command(&["CONFIG", "SET", "maxmemory-policy", "volatile-lru"]);
    until_fresh_keys(&store, true).await;

    node.assert_replays("/", "k", &first).await;
    assert_eq!(node.database.of("k"), 1);
    let duplicate = node.post("/held", "l").await;
    assert_eq!(duplicate.status, StatusCode::CONFLICT);
    let own = store.acquire(&held).await.expect("its own lease");
    assert!(matches!(own, Acquired::Granted { .. }), "{own:?}");
    let mut retry = claim(2);
    store.acquire(&retry).await.expect_err("no takeover");
    retry.orphans = OrphanPolicy::Refuse;
    let refused = store.acquire(&retry).await.expect("the orphan");
    assert!(matches!(refused, Acquired::Orphaned { .. }), "{refused:?}");

    node.barrier.open_for_good();
    let completed = running.await.expect("a response");
    node.assert_replays("/held", "l", &completed).await;
}
