//! The database aborts a statement of a store in favor of another transaction, and the store retries it: failure mode
//! 54.
//!
//! Each statement of a store locks one row, which cannot deadlock. A trigger on its table, as for an audit, locks a
//! second row.

#![expect(clippy::unwrap_used, reason = "a failed test shows its line")]

use std::time::{Duration, Instant};

use tests::{
    proxy::Proxy,
    servers::{
        mariadb::{self, MariaDbServer},
        postgres::{self, PostgresServer},
    },
    sql::{self, claim, duplicate},
};
use tokio::{task::JoinHandle, time::sleep};
use tower_idempotency::store::{Acquired, Claim, Store, StoreError};
use tower_idempotency_sqlx::{
    MySqlStore,
    sqlx::{
        AssertSqlSafe, Connection, Executor, MySqlConnection, PgConnection, query_scalar, raw_sql,
    },
};

/// Completes the lease of a claim.
fn completing<S: Store + Clone>(store: &S, claim: &Claim) -> JoinHandle<Result<(), StoreError>> {
    let (store, lease, keep) = (store.clone(), claim.lease_ref(1), claim.orphan_retention);
    tokio::spawn(async move { store.complete(&lease, "answer".into(), keep).await })
}

async fn assert_completed<S: Store>(store: &S, claim: &Claim) {
    let acquired = store.acquire(&duplicate(claim)).await.expect("an answer");
    let record = match acquired {
        Acquired::Completed { record, .. } => record,
        other => panic!("expected the record, found {other:?}"),
    };
    assert_eq!(record, "answer");
}

/// Repeats a trial until both parties were in time, because a late party proves nothing.
async fn repeat_until_in_time(trial: impl AsyncFn() -> Trial) {
    for _ in 0..10 {
        if trial().await == Trial::Seen {
            return;
        }
    }
    panic!("no trial was conclusive");
}

#[derive(Debug, PartialEq, Eq)]
enum Trial {
    Seen,
    TooLate,
}

/// Returns `true` if all attempts of the store failed with a lock timeout or a deadlock.
fn is_lock_failure(completed: &Result<(), StoreError>) -> bool {
    let codes = ["40P01", "55P03", "1205", "1213"];
    matches!(completed, Err(error) if codes.iter().any(|code| format!("{error:?}").contains(code)))
}

// F-158
#[tokio::test]
async fn completion_retries_after_deadlock_in_postgres() {
    // The party that checks first is aborted: here the store, which checks at once.
    repeat_until_in_time(async || {
        completion_is_retried_in_postgres("10ms", "deadlock detected").await
    })
    .await;
}

// F-158
/// By default the store's lock timeout is shorter than the server's delay before it checks for deadlocks.
#[tokio::test]
async fn completion_retries_after_lock_timeout_in_postgres() {
    let reported = "canceling statement due to lock timeout";
    repeat_until_in_time(async || completion_is_retried_in_postgres("5min", reported).await).await;
}

async fn completion_is_retried_in_postgres(deadlock_timeout: &str, reported: &str) -> Trial {
    let server = PostgresServer::start(&[&format!("deadlock_timeout={deadlock_timeout}")]);
    let store = sql::postgres(&server, "entries").await;
    let mut other = PgConnection::connect(&server.url()).await.unwrap();
    // The first completion waits until another statement waits for it, and only then requests the other's row. Each
    // round is shorter than the half second for which a store waits for a row.
    let setup = "set deadlock_timeout = '5min';
        create table audit (n int);
        insert into audit values (0);
        create sequence tries;
        create function note() returns trigger language plpgsql as $$ begin
          if nextval('tries') = 1 then
            for round in 1..1000 loop
              exit when exists (select from pg_locks where not granted);
              perform pg_sleep(0.01);
            end loop;
          end if;
          update audit set n = n + 1;
          return null;
        end $$";
    other.execute(raw_sql(setup)).await.unwrap();
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    let trigger =
        "create trigger noted after update on entries for each row execute function note()";
    other.execute(raw_sql(trigger)).await.unwrap();

    let hold = "begin; update audit set n = n + 10";
    other.execute(raw_sql(hold)).await.unwrap();
    let completing = completing(&store, &claim);
    let mut watch = PgConnection::connect(&server.url()).await.unwrap();
    let sleeping = "select count(*) from pg_stat_activity where wait_event = 'PgSleep'";
    let began = Instant::now();
    while query_scalar::<_, i64>(sleeping)
        .fetch_one(&mut watch)
        .await
        .unwrap()
        == 0
    {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "no transaction waits"
        );
    }
    let circle = "select from entries for update; commit";
    other.execute(raw_sql(circle)).await.unwrap();
    let completed = completing.await.unwrap();
    let log = server.log();
    if is_lock_failure(&completed) {
        return Trial::TooLate;
    }
    completed.expect("made again");

    // After a stall the server may report another reason first.
    if !log.contains(reported) {
        println!("expected {reported}:\n{log}");
        return Trial::TooLate;
    }
    let noted = query_scalar::<_, i32>("select n from audit").fetch_one(&mut watch);
    assert_eq!(noted.await.unwrap(), 11, "the update happened once");
    assert_completed(&store, &claim).await;
    Trial::Seen
}

// F-158
/// No primary reports this error at READ COMMITTED, so a trigger raises it.
#[tokio::test]
async fn completion_retries_after_serialization_failure() {
    let store = sql::postgres(postgres::shared(), "unserial").await;
    let mut admin = PgConnection::connect(&postgres::shared().url())
        .await
        .unwrap();
    let setup = "create sequence tries;
        create function fails_twice() returns trigger language plpgsql as $$ begin
          if nextval('tries') % 3 <> 0 then raise exception using errcode = '40001'; end if;
          return new;
        end $$;
        create trigger failing before update on unserial for each row execute function fails_twice()";
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    admin.execute(raw_sql(setup)).await.unwrap();
    completing(&store, &claim)
        .await
        .unwrap()
        .expect("made again");
    let tries = query_scalar::<_, i64>("select last_value from tries").fetch_one(&mut admin);
    assert_eq!(tries.await.unwrap(), 3);
    assert_completed(&store, &claim).await;
}

// F-158
/// A replication group reports this error at the commit. Here a trigger raises it.
#[tokio::test]
async fn completion_retries_after_certification_failure() {
    let server = mariadb::shared();
    let store = sql::mariadb(server, "uncertified").await;
    let mut admin = MySqlConnection::connect(&server.url()).await.unwrap();
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    // The sequence keeps its count after a rollback.
    for setup in [
        "create sequence uncertified_tries",
        "create trigger uncertified_twice before update on uncertified for each row
        if nextval(uncertified_tries) % 3 <> 0 then
          signal sqlstate '40000' set mysql_errno = 3101; end if",
    ] {
        admin.execute(raw_sql(setup)).await.unwrap();
    }
    completing(&store, &claim)
        .await
        .unwrap()
        .expect("made again");
    assert_completed(&store, &claim).await;
}

// F-143
/// With these settings, each commit and rollback begins another transaction or ends the session.
#[tokio::test]
async fn mariadb_completion_type_is_irrelevant() {
    for completion in ["CHAIN", "RELEASE"] {
        let server = MariaDbServer::start(&[&format!("completion_type={completion}")]);
        let store = sql::mariadb(&server, "entries").await.with_connections(1);
        let claim = claim();
        for _ in 0..2 {
            store.acquire(&claim).await.expect(completion);
        }
        let mut admin = MySqlConnection::connect(&server.url()).await.unwrap();
        for setup in [
            "create sequence tries",
            "create trigger once before update on entries for each row
            if nextval(tries) = 1 then signal sqlstate '40001' set mysql_errno = 1213; end if",
        ] {
            admin.execute(raw_sql(setup)).await.unwrap();
        }
        completing(&store, &claim).await.unwrap().expect(completion);
        assert_completed(&store, &claim).await;
    }
}

// F-158
#[tokio::test]
async fn completion_retries_after_deadlock_in_mariadb() {
    repeat_until_in_time(retries_after_deadlock_in_mariadb).await;
}

async fn retries_after_deadlock_in_mariadb() -> Trial {
    let server = MariaDbServer::start(&[]);
    let store = sql::mariadb(&server, "entries").await;
    let mut other = MySqlConnection::connect(&server.url()).await.unwrap();
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    for setup in [
        "create table audit (n int not null)",
        "insert into audit values (0)",
        "create table ballast (n int not null)",
        "create trigger noted after update on entries for each row update audit set n = n + 1",
        "begin",
        // The server aborts the transaction that has done less.
        "insert into ballast with recursive rows_of (n) as \
         (select 1 union all select n + 1 from rows_of where n < 1000) select n from rows_of",
        "update audit set n = n + 10",
    ] {
        other.execute(raw_sql(AssertSqlSafe(setup))).await.unwrap();
    }
    let completing = completing(&store, &claim);
    let mut watch = MySqlConnection::connect(&server.url()).await.unwrap();
    let began = Instant::now();
    let waiting =
        "select count(*) from information_schema.innodb_trx where trx_state = 'LOCK WAIT'";
    while !completing.is_finished()
        && query_scalar::<_, i64>(waiting)
            .fetch_one(&mut watch)
            .await
            .unwrap()
            == 0
    {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "it waits for no transaction"
        );
        // The server refreshes this table only after 100 ms without a query.
        sleep(Duration::from_millis(150)).await;
    }
    other
        .execute(raw_sql(
            "update entries set orphan_retention = orphan_retention + 1",
        ))
        .await
        .unwrap();
    other.execute(raw_sql("commit")).await.unwrap();
    let completed = completing.await.unwrap();
    if is_lock_failure(&completed) {
        return Trial::TooLate;
    }
    completed.expect("made again");

    let deadlocks = "select cast(count as signed) from information_schema.innodb_metrics \
                     where name = 'lock_deadlocks'";
    let deadlocks = query_scalar::<_, i64>(deadlocks)
        .fetch_one(&mut watch)
        .await;
    assert!(deadlocks.unwrap() >= 1);
    // The other transaction's update counts too.
    let noted = query_scalar::<_, i32>("select n from audit").fetch_one(&mut watch);
    assert_eq!(noted.await.unwrap(), 12, "the update happened once");
    assert_completed(&store, &claim).await;
    Trial::Seen
}

// F-159
/// The completion waits once, for a second or two, and not for as long as the layer waits for a reply. Then it returns
/// the reason, and its connections remain.
#[tokio::test]
async fn completion_waits_for_row_once_in_mariadb() {
    sql::mariadb(mariadb::shared(), "held_long").await;
    let proxy = Proxy::start(mariadb::shared().address());
    let url = mariadb::url(proxy.address());
    let store = MySqlStore::from_url(&url).unwrap();
    let store = store.with_table("held_long").unwrap();
    let mut other = MySqlConnection::connect(&mariadb::shared().url())
        .await
        .unwrap();
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    for hold in ["begin", "select * from held_long for update"] {
        other.execute(raw_sql(AssertSqlSafe(hold))).await.unwrap();
    }
    repeat_until_in_time(async || {
        let began = Instant::now();
        let refused = completing(&store, &claim).await.unwrap().unwrap_err();
        assert!(format!("{refused:?}").contains("1205"), "{refused:?}");
        // Three attempts would take three seconds at least.
        if began.elapsed() < Duration::from_millis(2_900) {
            Trial::Seen
        } else {
            Trial::TooLate
        }
    })
    .await;
    other.execute(raw_sql("commit")).await.unwrap();
    completing(&store, &claim).await.unwrap().unwrap();
    assert_eq!(proxy.counts().connections, 1);
    assert_completed(&store, &claim).await;
}

// F-158
#[tokio::test]
async fn completion_waits_for_row_in_postgres() {
    let store = sql::postgres(postgres::shared(), "held_long").await;
    let mut other = PgConnection::connect(&postgres::shared().url())
        .await
        .unwrap();
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    let hold = "begin; select from held_long for update";
    other.execute(raw_sql(hold)).await.unwrap();
    // The store stops after three attempts of half a second, before the layer's timeout.
    let refused = completing(&store, &claim).await.unwrap().unwrap_err();
    assert!(format!("{refused:?}").contains("55P03"), "{refused:?}");
    other.execute(raw_sql("commit")).await.unwrap();
    repeat_until_in_time(async || {
        let claim = sql::claim();
        store.acquire(&claim).await.unwrap();
        let url = postgres::shared().url();
        let mut other = PgConnection::connect(&url).await.unwrap();
        other.execute(raw_sql(hold)).await.unwrap();
        let completing = completing(&store, &claim);
        let began = Instant::now();
        sleep(Duration::from_millis(700)).await;
        assert!(!completing.is_finished() || began.elapsed() > Duration::from_millis(1_400));
        other.execute(raw_sql("commit")).await.unwrap();
        let completed = completing.await.unwrap();
        if is_lock_failure(&completed) {
            return Trial::TooLate;
        }
        completed.expect("made again");
        assert_completed(&store, &claim).await;
        Trial::Seen
    })
    .await;
}

// F-154
/// The record is large, and its connection stays open. A trigger records the data that its session keeps.
#[tokio::test]
async fn failed_completion_clears_session_in_mariadb() {
    let server = MariaDbServer::start(&[]);
    let store = sql::mariadb(&server, "entries").await.with_connections(1);
    let mut other = MySqlConnection::connect(&server.url()).await.unwrap();
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    let hold = "create table seen (n int not null);
        create trigger note before insert on entries for each row insert into seen values (@record is null);
        begin; update entries set orphan_retention = orphan_retention + 1";
    other.execute(raw_sql(hold)).await.unwrap();
    let completed = completing(&store, &claim).await.unwrap();
    assert!(is_lock_failure(&completed), "{completed:?}");
    other.execute(raw_sql("rollback")).await.unwrap();
    store.acquire(&sql::claim()).await.unwrap();
    let seen = query_scalar::<_, i32>("select n from seen").fetch_all(&mut other);
    assert_eq!(seen.await.unwrap(), [1]);
}
