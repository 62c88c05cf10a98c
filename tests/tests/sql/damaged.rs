//! Rows that another program has damaged.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::response::Response;
use http::StatusCode;
use tests::{
    creating,
    database::{TestDialect, sqlite_pool},
    post,
    scratch::Scratch,
    send,
    servers::{mariadb, postgres},
    sql::{self, claim},
};
use tower_idempotency::{
    StoreFailure,
    inspect::{Inspect, Query, State},
    store::{Store, Ttl},
};
use tower_idempotency_sqlx::{
    Completer, MySqlStore, Orphan, SqliteStore,
    sqlx::{Connection, MySqlConnection, PgConnection, raw_sql},
};

const WORKS: &str = "the database works";

/// Damages the entries of the store in this directory with these statements.
async fn damage_sqlite(scratch: &Scratch, statements: &str) {
    let pool = sqlite_pool(&scratch.file("keys.db").display().to_string());
    let damaged = SqliteStore::run_alone(&pool, statements.to_owned()).await;
    damaged.expect(WORKS);
}

// ---- Requests ----

/// Checks that no policy for outages executes a request whose entry the store cannot read. `damage` damages the entry.
async fn unreadable_entry_never_executes<S: Store>(store: S, damage: impl Future<Output = ()>) {
    let layer = sql::layer(store);
    let layer = layer.with_store_failure(StoreFailure::DangerouslyExecuteUnprotected);
    let (app, effects) = creating(layer);
    let order = || post("/orders", "damaged", "tea");
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    damage.await;
    for _ in 0..2 {
        let refused = send(&app, order()).await;
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(refused.code(), "store-unavailable");
        // An outage gets this header.
        assert_eq!(refused.header("retry-after"), None);
    }
    assert_eq!(effects.count(), 1);
}

// F-999
#[tokio::test]
async fn unreadable_row_of_postgres_never_executes() {
    let server = postgres::shared();
    let store = sql::postgres(server, "damaged").await;
    let damage = async {
        let mut other = PgConnection::connect(&server.url()).await.expect(WORKS);
        let damage = raw_sql(
            "alter table damaged drop constraint damaged_fingerprint_check;
             update damaged set fingerprint = '\\x00'",
        );
        damage.execute(&mut other).await.expect(WORKS);
    };
    unreadable_entry_never_executes(store, damage).await;
}

// F-999
#[tokio::test]
async fn unreadable_row_of_mariadb_never_executes() {
    let server = mariadb::shared();
    let store = sql::mariadb(server, "damaged").await;
    let damage = async {
        let mut other = MySqlConnection::connect(&server.url()).await.expect(WORKS);
        let damage = raw_sql(
            "alter table damaged modify fingerprint varbinary(32) not null;
             update damaged set fingerprint = x'00'",
        );
        damage.execute(&mut other).await.expect(WORKS);
    };
    unreadable_entry_never_executes(store, damage).await;
}

// F-999
#[tokio::test]
async fn unreadable_row_of_sqlite_never_executes() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    let damage = damage_sqlite(
        &scratch,
        "pragma ignore_check_constraints = on; update tower_idempotency set fingerprint = x'00'",
    );
    unreadable_entry_never_executes(store, damage).await;
}

// ---- Text ----

/// Stores three leases whose operation is not ASCII.
async fn store_leases<S: Store>(store: &S, lease: Ttl) {
    for _ in 0..3 {
        let mut claim = claim();
        (claim.lease, claim.operation) = (lease, "POST /caf\u{e9}".into());
        store.acquire(&claim).await.expect(WORKS);
    }
}

/// Returns the operations of all leases, sorted.
async fn listed_operations(store: &impl Inspect) -> Vec<String> {
    let page = store.list(&Query::new(State::InProgress)).await;
    let entries = page.expect(WORKS).entries;
    for entry in &entries {
        let details = store.get(entry.id()).await.expect(WORKS);
        let found = details.expect("it is listed").entry;
        assert_eq!(found.operation, entry.operation);
    }
    let operations = entries.into_iter().map(|it| it.operation.into_string());
    let mut operations: Vec<_> = operations.collect();
    operations.sort();
    operations
}

/// Undecodable bytes in the text of the first row.
const SPOIL_TEXT: &str = "update tower_idempotency
    set operation = cast(x'504f5354ff' as text), owner = cast(x'ff' as text) where rowid = 1";

#[tokio::test]
async fn undecodable_text_of_sqlite_hides_no_entry() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    store_leases(&store, Ttl::from_secs(600)).await;
    damage_sqlite(&scratch, SPOIL_TEXT).await;
    let expected = ["POST /caf\u{e9}", "POST /caf\u{e9}", "POST\u{fffd}"];
    assert_eq!(listed_operations(&store).await, expected);
}

/// The server sends all text in the character set of the URL.
#[tokio::test]
async fn other_charset_of_mariadb_hides_no_entry() {
    let server = mariadb::shared();
    let store = sql::mariadb(server, "charset").await;
    store_leases(&store, Ttl::from_secs(600)).await;
    let url = format!("{}?charset=latin1", server.url());
    let latin = MySqlStore::from_url(&url).expect("a URL");
    let latin = latin.with_table("charset").expect("an identifier");
    assert_eq!(listed_operations(&latin).await, ["POST /caf\u{fffd}"; 3]);
}

#[tokio::test]
async fn undecodable_text_of_sqlite_delays_no_orphan() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    store_leases(&store, Ttl::MIN).await;
    damage_sqlite(&scratch, SPOIL_TEXT).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let attempts = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&attempts);
    let work = move |_: Orphan| {
        counted.fetch_add(1, SeqCst);
        async { Err::<Response, _>("the intended error") }
    };
    let completer = Completer::new(&store, &sql::layer(store.clone()), work);
    let swept = completer.with_min_age(Duration::ZERO).sweep().await;
    swept.expect(WORKS);
    assert_eq!(attempts.load(SeqCst), 3);
}
