//! The console on every store: overview, list, entry, decisions and a conflict.

use std::{fs, net::SocketAddr, time::Duration};

use http::Method;
use tests::{
    scratch::Scratch,
    servers::{
        dynamodb::{StandIn, shared},
        mariadb::MariaDbServer,
        postgres::PostgresServer,
        redis::{RedisCluster, RedisServer},
    },
};
use tokio::time::sleep;
use tower_idempotency::{
    MemoryStore,
    inspect::{Inspect as _, Inspector, State},
    store::{Acquired, Store as _, Ttl},
};
use tower_idempotency_any::{AnyStore, OpenOptions};
use tower_idempotency_console::{Console, audit::AuditLog};

use crate::harness::{Keys, TestResponse, access, form, listen, send};

/// The test of one store. `$start` returns the store and a guard of its server.
macro_rules! store_test {
    ($name:ident, $start:expr) => {
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            let (store, _server) = $start;
            resolve_each_kind(store).await;
        }
    };
}

store_test!(memory_store, {
    (AnyStore::from(MemoryStore::new().with_details()), ())
});

store_test!(redis, {
    let server = RedisServer::start(&[]);
    (open(&server.url()).await, server)
});

store_test!(redis_cluster, {
    let cluster = RedisCluster::start();
    (open(&cluster.url()).await, cluster)
});

store_test!(postgres, {
    let server = PostgresServer::start(&[]);
    (open(&server.url()).await, server)
});

store_test!(mariadb, {
    let server = MariaDbServer::start(&[]);
    (open(&server.url()).await, server)
});

store_test!(sqlite, {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    (open(&url).await, scratch)
});

store_test!(dynamodb, {
    let server = shared(StandIn::Dynoxide);
    let (table, address) = (server.new_table(), server.address());
    // A lease of the test expires within this skew of clocks.
    let url = format!("dynamodb://{table}?endpoint=http://{address}&skew=100ms");
    (open(&url).await, server)
});

/// Opens a store that waits for a busy machine.
async fn open(url: &str) -> AnyStore {
    let options = OpenOptions::new().with_timeout(Duration::from_secs(120));
    options.open(url).await.expect("the server runs")
}

/// A console on a store, with the audit log in a directory of its own.
struct Visited {
    address: SocketAddr,
    store: AnyStore,
    scratch: Scratch,
}

impl Visited {
    async fn get(&self, path: &str) -> TestResponse {
        let response = send(self.address, Method::GET, path, &[], "").await;
        assert_eq!(response.status, 200, "{path}: {}", response.text);
        response
    }

    /// Sends a decision about an entry. Returns the status.
    async fn decide(&self, id: &str, seen: &str, how: &str) -> u16 {
        let fields = [
            ("seen", seen),
            ("how", how),
            ("reason", "ticket 17"),
            ("confirm", "yes"),
            ("status", "201"),
        ];
        let headers = [
            ("content-type", "application/x-www-form-urlencoded"),
            ("sec-fetch-site", "same-origin"),
        ];
        let path = format!("/entries/{id}/resolve");
        let body = form(&fields);
        let sent = send(self.address, Method::POST, &path, &headers, &body).await;
        sent.status.as_u16()
    }

    async fn seen(&self, claim: &tower_idempotency::store::Claim) -> (String, String) {
        let details = self.store.get(&claim.id).await.expect("the store replies");
        let details = details.expect("an entry");
        (claim.id.to_hex(), details.entry.seen().to_string())
    }
}

/// Lists and resolves a key of each kind as an operator in a browser. A SQL store has the audit lines too.
async fn resolve_each_kind(store: AnyStore) {
    let keys = Keys::create(&store).await;
    // Longer than the clock skew of DynamoDB.
    sleep(Duration::from_millis(300)).await;
    let scratch = Scratch::new();
    let file = scratch.file("audit.jsonl");
    let log = match AuditLog::in_table(store.clone()) {
        Ok(log) => log.with_file(&file).with_timeout(Duration::from_secs(120)),
        Err(_) => AuditLog::new(&file),
    };
    let console = Console::new(Inspector::new(store.clone()), access)
        .with_store_timeout(Duration::from_secs(120))
        .with_store_name(store.name())
        .with_audit_log(log);
    let address = listen(console.into_router()).await;
    let visited = Visited {
        address,
        store,
        scratch,
    };
    let overview = visited.get("/").await.text;
    assert!(
        overview.contains(&format!("keys in {}", visited.store.name())),
        "{overview}"
    );
    let summary = visited.get("/api/v1/summary").await.text;
    for (state, claim) in [
        (State::InProgress, &keys.in_progress),
        (State::Orphaned, &keys.orphaned),
        (State::NeedsAttention, &keys.attention),
        (State::Completed, &keys.completed),
    ] {
        let id = claim.id.to_hex();
        let entry = visited.get(&format!("/entries/{id}")).await.text;
        assert!(entry.contains(&*claim.operation), "{state}: {entry}");
        if visited.store.abilities().can_list(state) {
            let count = format!("\"{}\":{{\"count\":1,", state.name());
            assert!(summary.contains(&count), "{state}: {summary}");
            let listed = visited
                .get(&format!("/entries?state={}", state.name()))
                .await
                .text;
            assert!(
                listed.contains(&id) && listed.contains("host-1:4711"),
                "{listed}"
            );
        } else {
            let absent = format!("\"{}\":null", state.name());
            assert!(summary.contains(&absent), "{state}: {summary}");
        }
    }

    // Another process takes the orphan over while the operator reads its page.
    let (id, stale) = visited.seen(&keys.orphaned).await;
    let mut retry = tests::sql::duplicate(&keys.orphaned);
    retry.lease = Ttl::from_secs(600);
    let taken = visited
        .store
        .acquire(&retry)
        .await
        .expect("the store replies");
    assert!(
        matches!(taken, Acquired::Granted { generation: 2, .. }),
        "{taken:?}"
    );
    assert_eq!(visited.decide(&id, &stale, "free").await, 409);
    let found = visited
        .store
        .get(&retry.id)
        .await
        .expect("the store replies");
    assert_eq!(found.map(|it| it.entry.state()), Some(State::InProgress));

    for (claim, how, state) in [
        (&keys.orphaned, "break-lease", Some(State::Orphaned)),
        (&keys.orphaned, "retry", Some(State::Orphaned)),
        (&keys.in_progress, "break-lease", Some(State::Orphaned)),
        (&keys.in_progress, "free", None),
        (&keys.attention, "complete", Some(State::Completed)),
        (&keys.completed, "delete-record", None),
    ] {
        // The lease that was broken has expired by every clock.
        sleep(Duration::from_millis(300)).await;
        let (id, seen) = visited.seen(claim).await;
        assert_eq!(visited.decide(&id, &seen, how).await, 200, "{how}");
        let found = visited
            .store
            .get(&claim.id)
            .await
            .expect("the store replies");
        assert_eq!(found.map(|it| it.entry.state()), state, "{how}");
    }
    let log = fs::read_to_string(visited.scratch.file("audit.jsonl")).expect("the log");
    assert_eq!(log.lines().count(), 12, "{log}");
    assert_eq!(log.matches("\"outcome\":\"applied\"").count(), 6, "{log}");
    if visited.store.has_audit_table() {
        let lines = visited.store.last_audit_lines(100).await;
        let in_file: Vec<_> = log.lines().rev().collect();
        assert_eq!(lines.expect("the store replies"), in_file);
    }
}
