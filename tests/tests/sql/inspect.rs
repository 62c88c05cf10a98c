//! Operators on the SQL stores: the cases of the suite, and the plans of the listings.

use std::sync::OnceLock;

use tests::{
    conformance::every_inspect_case_at_once,
    scratch::Scratch,
    servers::{mariadb, postgres},
    sql,
};
use tower_idempotency::conformance::Subject;
use tower_idempotency_sqlx::{PostgresStore, sqlx::postgres::PgConnectOptions};

#[test]
fn postgres_passes_every_case() {
    every_inspect_case_at_once(async || {
        let store = sql::postgres(postgres::shared(), "operators").await;
        Subject::new(store).with_inspector()
    });
}

#[test]
fn serializable_postgres_passes_every_case() {
    every_inspect_case_at_once(async || {
        let options: PgConnectOptions = postgres::shared().url().parse().expect("a URL");
        let options = options.options([("default_transaction_isolation", "serializable")]);
        let store = PostgresStore::new(options);
        let store = store.with_table("operators_2").expect("an identifier");
        store.migrate().await.expect("the test server runs");
        Subject::new(store).with_inspector()
    });
}

#[test]
fn mariadb_passes_every_case() {
    every_inspect_case_at_once(async || {
        let store = sql::mariadb(mariadb::shared(), "operators").await;
        Subject::new(store).with_push(false).with_inspector()
    });
}

#[test]
fn sqlite_passes_every_case() {
    static SCRATCH: OnceLock<Scratch> = OnceLock::new();
    every_inspect_case_at_once(async || {
        let store = sql::sqlite(SCRATCH.get_or_init(Scratch::new)).await;
        Subject::new(store).with_push(false).with_inspector()
    });
}
