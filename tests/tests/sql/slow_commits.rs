//! Commits that PostgreSQL still executes when the work leaves its key.

use std::time::Duration;

use tests::{
    barrier::within,
    database::{self, TestDatabase},
    sql,
};
use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, Lease,
    run_once::{Outcome, WorkError},
};
use tower_idempotency_sqlx::{PostgresStore, sqlx::query_scalar};

use crate::transactions::charged;

/// Creates a database whose commits wait for this condition, at most for 30 seconds.
async fn database_with_commits_until(condition: &str, table: &str) -> TestDatabase<PostgresStore> {
    let database = database::on_postgres(table).await;
    let delay = "create function {table}_delay() returns trigger language plpgsql as $$ begin
          for round in 1..3000 loop
            exit when {condition};
            perform pg_sleep(0.01);
          end loop;
          return null;
        end $$";
    let delay = delay.replace("{condition}", condition);
    let trigger = "create constraint trigger delay after insert on {table}_effects
        deferrable initially deferred for each row execute function {table}_delay()";
    for sql in [delay.as_str(), trigger] {
        database.admin(sql).await;
    }
    database
}

/// Runs work that gives its commit up while the database executes it, and leaves its key.
async fn abandon_commit(
    database: &TestDatabase<PostgresStore>,
    layer: &IdempotencyLayer,
    key: &str,
) -> Outcome<i32, &'static str> {
    let database = database.clone();
    let work = async move |lease: Lease| {
        let mut tx = charged(&database, &lease, 1).await.expect("a transaction");
        let pid = query_scalar::<_, i32>("select pg_backend_pid()").fetch_one(&mut *tx);
        let pid = pid.await.expect(RUNS);
        let sleeping =
            format!("select 1 from pg_stat_activity where pid = {pid} and wait_event = 'PgSleep'");
        let is_committing = async || database.admin(&sleeping).await > 0;
        tokio::select! {
            committed = tx.commit_value(7) => drop(committed),
            () = async {
                while !is_committing().await {
                    sleep(Duration::from_millis(10)).await;
                }
            } => {}
        }
        Err::<i32, _>(WorkError::Orphan("timed out"))
    };
    let outcome = layer.run_once(key, "payload", work).await;
    outcome.expect("an outcome")
}

/// Waits until a retry gets the committed value.
async fn until_replayed(layer: &IdempotencyLayer, key: &str) {
    let is_replayed = async || {
        let work = async |_| Err::<i32, _>(WorkError::Release("no execution"));
        let retry = layer.run_once(key, "payload", work).await;
        matches!(retry, Ok(Outcome::Replayed(7)))
    };
    within(Duration::from_secs(60), async {
        while !is_replayed().await {
            sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

// S-367
/// Only the transaction sees the record while the database executes the commit. So the layer waits for the transaction.
#[tokio::test(flavor = "multi_thread")]
async fn commit_in_execution_is_awaited() {
    let is_awaited = "exists (select from pg_locks
        where not granted and pg_backend_pid() = any (pg_blocking_pids(pid)))";
    let database = database_with_commits_until(is_awaited, "awaited_commit").await;
    let layer = sql::layer(database.store.clone());
    let mut keys = Vec::new();
    for trial in 0..10 {
        keys.push(format!("job {trial}"));
        match abandon_commit(&database, &layer, &keys[trial]).await {
            Outcome::Executed(7) => {
                for key in &keys {
                    until_replayed(&layer, key).await;
                }
                assert_eq!(database.count().await, keys.len());
                return;
            }
            // The server stalled for longer than the layer waits for a row.
            Outcome::Unknown(_) => {}
            other => panic!("expected the value, found {other:?}"),
        }
    }
    panic!("no commit was awaited");
}

// S-367
/// The commit takes longer than the layer waits for the transaction, so it may still arrive.
#[tokio::test(flavor = "multi_thread")]
async fn commit_in_long_execution_is_unknown() {
    let is_over = "exists (select from {table}_over)";
    let database = database_with_commits_until(is_over, "long_commit").await;
    database.admin("create table {table}_over ()").await;
    let layer = sql::layer(database.store.clone());
    let outcome = abandon_commit(&database, &layer, "job").await;
    assert!(
        matches!(outcome, Outcome::Unknown("timed out")),
        "{outcome:?}"
    );
    database
        .admin("insert into {table}_over default values")
        .await;
    until_replayed(&layer, "job").await;
    assert_eq!(database.count().await, 1);
}

const RUNS: &str = "the server runs";
