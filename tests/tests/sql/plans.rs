//! Plans of purges and of statements by ID, from the log of a PostgreSQL server. The table has 20,000 completed rows.

use std::time::Duration;

use axum::response::IntoResponse;
use http::StatusCode;
use tests::{
    barrier::within,
    created,
    database::{TestDatabase, pool_options},
    post, send,
    servers::postgres::PostgresServer,
    sql::claim,
};
use tokio::time::sleep;
use tower_idempotency::store::{Store, Ttl};
use tower_idempotency_sqlx::{PostgresStore, sqlx::Postgres};

use crate::transactions::bank;

fn start_server() -> PostgresServer {
    PostgresServer::start(&[
        "session_preload_libraries=auto_explain",
        "auto_explain.log_min_duration=0",
        "autovacuum=off",
    ])
}

/// Creates the table `planned`. This number of its rows have expired.
async fn filled_database(server: &PostgresServer, expired: u32) -> TestDatabase<PostgresStore> {
    let url = server.url();
    let pool = pool_options::<Postgres>().connect(&url).await.expect(WORKS);
    let database = TestDatabase::open(&url, pool, "planned").await;
    let fill = format!(
        r"insert into planned
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)
select sha256(n::text::bytea), substring(sha256(n::text::bytea) from 1 for 16), sha256('fingerprint'), 1,
  now - n, 3600000, case when n > {expired} then now + 86400000 + n else now - n end, now - 900000, now - n, '', '',
  '\x0100000000007061'::bytea
from generate_series(1, 20000) n, (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock"
    );
    assert_eq!(database.admin(&fill).await, 20_000);
    database
}

#[tokio::test(flavor = "multi_thread")]
async fn purge_of_postgres_uses_indexes() {
    let server = start_server();
    let database = filled_database(&server, 1_500).await;
    database.admin("analyze {table}").await;
    let before = server.log().len();
    let mut purged = Vec::new();
    for _ in 0..3 {
        purged.push(database.store.purge_expired(1_000).await.expect(WORKS));
    }
    assert_eq!(purged, [1_000, 500, 0]);
    let log = server.log();
    let log = &log[before..];
    for node in ["Seq Scan on planned", "Bitmap", "Sort", "Join", "Loop"] {
        assert!(!log.contains(node), "{node}:\n{log}");
    }
    for node in [
        "using planned_expires on planned",
        "Index Cond: (expires <=",
        "using planned_pkey on planned",
        "Index Cond: (id = ANY",
    ] {
        assert_eq!(log.matches(node).count(), 3, "{node}:\n{log}");
    }
}

/// The analysis finds no orphan and no lease. So the planner takes the index of orphans for empty, but the index has pages.
#[tokio::test(flavor = "multi_thread")]
async fn statements_by_id_of_postgres_use_primary_key() {
    let server = start_server();
    let database = filled_database(&server, 0).await;
    let store = &database.store;
    for _ in 0..300 {
        let claim = claim();
        store.acquire(&claim).await.expect(WORKS);
        let lease = claim.lease_ref(1);
        let stored = store.complete(&lease, "record".into(), Ttl::MAX).await;
        stored.expect(WORKS);
    }
    database.admin("analyze {table}").await;
    let before = server.log().len();

    let claim = claim();
    store.acquire(&claim).await.expect(WORKS);
    let lease = claim.lease_ref(1);
    store.renew(&lease, claim.lease).await.expect(WORKS);
    let release = async {
        let is_awaited = "update {table} set awaited = true where awaited";
        while database.admin(is_awaited).await == 0 {
            sleep(Duration::from_millis(5)).await;
        }
        store.release(&lease).await.expect(WORKS);
    };
    let waiter = store.wait_for_change(&claim.id, LONG);
    let both = async { tokio::join!(waiter, release) };
    within(LONG, Box::pin(both)).await;

    let (app, _) = bank(&database, async |database, lease, n| {
        let tx = database.begin(&lease).await.expect("a transaction");
        tx.checkpoint("phase", &n).await.expect("a phase");
        let phase = database.store.checkpoint(&lease).await.expect(WORKS);
        assert!(phase.is_some());
        let tx = database.begin(&lease).await.expect("a transaction");
        let committed = tx.commit(created(n)).await;
        committed.expect("a recorded status").into_response()
    });
    let response = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(response.status, StatusCode::CREATED, "{response:?}");

    let log = server.log();
    let log = &log[before..];
    assert!(log.contains("using planned_pkey on planned"), "{log}");
    assert!(!log.contains("using planned_orphans"), "{log}");
}

/// The time limit of a waiter that is notified.
const LONG: Duration = Duration::from_secs(90);
const WORKS: &str = "the database works";
