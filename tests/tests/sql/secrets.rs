//! Data in the database that its readers can see.

use std::fs;

use axum::routing::post;
use tests::{
    database::{self, TestDatabase, TestDialect},
    scratch::Scratch,
    secrets::{assert_only_digests_stored, contains, needs_attention},
    sql,
};
use tower_idempotency::Lease;
use tower_idempotency_sqlx::sqlx::{AssertSqlSafe, query_scalar};

const CHECKPOINT: &str = "ride-created";

/// Checks the data that `read` returns. The execution that needs attention writes a checkpoint before.
async fn assert_digests<S: TestDialect>(
    database: &TestDatabase<S>,
    read: impl AsyncFn() -> Vec<u8>,
) {
    let handlers = database.clone();
    let attention = async move |lease: Lease| {
        let tx = handlers.begin(&lease).await.expect("a transaction");
        tx.checkpoint(CHECKPOINT, &1).await.expect("a phase");
        needs_attention()
    };
    let layer = sql::layer(database.store.clone());
    let data = assert_only_digests_stored(layer, post(attention), read).await;
    assert!(contains(&data, CHECKPOINT), "the checkpoint is stored");
}

// F-185
#[tokio::test(flavor = "multi_thread")]
async fn sqlite_file_holds_only_digests() {
    let scratch = Scratch::new();
    let database = database::sqlite_file_database(&scratch, "keys").await;
    let read = async || {
        // The log first: its pages may move to the other file. It is absent while the database is closed.
        let mut data = fs::read(scratch.file("database.db-wal")).unwrap_or_default();
        data.extend(fs::read(scratch.file("database.db")).expect("a file"));
        data
    };
    assert_digests(&database, read).await;
}

// F-185
#[tokio::test(flavor = "multi_thread")]
async fn postgres_table_holds_only_digests() {
    let database = database::on_postgres("secrets").await;
    let (pool, table) = (&database.pool, &database.table);
    let read = async || {
        let rows = AssertSqlSafe(format!("select it::text from {table} it"));
        let rows = query_scalar::<_, String>(rows).fetch_all(pool).await;
        rows.expect("the table is there").concat().into_bytes()
    };
    assert_digests(&database, read).await;
}

// F-185
#[tokio::test(flavor = "multi_thread")]
async fn mariadb_table_holds_only_digests() {
    let database = database::on_mariadb("secrets").await;
    let (pool, table) = (&database.pool, &database.table);
    let columns = "select group_concat('hex(`', column_name, '`)') from information_schema.columns \
                   where table_schema = database() and table_name = ?";
    let columns = query_scalar::<_, String>(columns).bind(table);
    let columns = columns.fetch_one(pool).await.expect("the table is there");
    let read = async || {
        let rows = AssertSqlSafe(format!("select concat_ws(' ', {columns}) from {table}"));
        let rows = query_scalar::<_, String>(rows).fetch_all(pool).await;
        rows.expect("the table is there").concat().into_bytes()
    };
    assert_digests(&database, read).await;
}
