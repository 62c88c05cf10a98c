//! PostgreSQL passes the suite with each default isolation level of its connections, and behind PgBouncer.

use std::sync::OnceLock;

use tests::{
    conformance_modes,
    servers::{pgbouncer::PgBouncer, postgres},
};
use tower_idempotency::conformance::Subject;
use tower_idempotency_sqlx::{PostgresStore, sqlx::postgres::PgConnectOptions};

async fn at(level: &str) -> Subject<PostgresStore> {
    let options: PgConnectOptions = postgres::shared().url().parse().expect("an URL");
    let options = options.options([("default_transaction_isolation", level)]);
    migrated(PostgresStore::new(options)).await
}

/// PgBouncer has fewer connections to the server than the cases have. The cases share them, statement by statement.
async fn behind_pgbouncer() -> Subject<PostgresStore> {
    static POOLER: OnceLock<PgBouncer> = OnceLock::new();
    let server = postgres::shared();
    let pooler = POOLER.get_or_init(|| PgBouncer::start(server, 8));
    let store = PostgresStore::from_url(&pooler.url()).expect("an URL");
    migrated(store.with_listener(server.url().parse().expect("an URL"))).await
}

async fn migrated(store: PostgresStore) -> Subject<PostgresStore> {
    store.migrate().await.expect("the test server runs");
    Subject::new(store)
}

// The server treats this level as read committed. F-142
conformance_modes! { mod read_uncommitted, subject = async || at("read uncommitted").await }
conformance_modes! { mod read_committed, subject = async || at("read committed").await }
conformance_modes! { mod repeatable_read, subject = async || at("repeatable read").await }
// F-142
conformance_modes! { mod serializable, subject = async || at("serializable").await }
// F-140
conformance_modes! { mod pgbouncer_by_transaction, subject = behind_pgbouncer }
