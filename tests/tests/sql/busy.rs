//! A SQLite store while another connection writes to its file.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use tests::{
    scratch::Scratch,
    sql::{self, claim, duplicate},
};
use tokio::{
    runtime::Builder,
    time::{sleep, timeout},
};
use tower_idempotency::store::{Acquired, LeaseRef, Store as _, Ttl};
use tower_idempotency_sqlx::{
    SqliteStore,
    sqlx::{
        ConnectOptions as _, SqliteConnection, raw_sql,
        sqlite::{SqliteConnectOptions, SqliteSynchronous},
    },
};

/// Opens the file like another process.
async fn open(file: &Path) -> SqliteConnection {
    let options = SqliteConnectOptions::new().filename(file);
    let options = options.synchronous(SqliteSynchronous::Off);
    options.connect().await.expect(WORKS)
}

async fn execute(connection: &mut SqliteConnection, sql: &'static str) {
    raw_sql(sql).execute(connection).await.expect(WORKS);
}

/// Executes the call while another connection writes for 0.3 s.
async fn beside_writer<T>(writer: &mut SqliteConnection, call: impl Future<Output = T>) -> T {
    execute(writer, "begin immediate").await;
    let (output, ()) = tokio::join!(call, async {
        sleep(Duration::from_millis(300)).await;
        execute(writer, "commit").await;
    });
    output
}

/// Acquires a lease in a new store. Executes the call while another connection writes to the file of the store.
async fn on_busy_file<T>(call: impl AsyncFnOnce(&SqliteStore, &LeaseRef) -> T) -> T {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    let claim = claim();
    store.acquire(&claim).await.expect(WORKS);
    let lease = claim.lease_ref(1);
    let mut writer = open(&scratch.file("keys.db")).await;
    beside_writer(&mut writer, call(&store, &lease)).await
}

#[tokio::test]
async fn calls_wait_for_writer() {
    let (acquired, renewed, purged, appended, migrated, checked) = tokio::join!(
        on_busy_file(async |store, _| store.acquire(&claim()).await),
        on_busy_file(async |store, lease| store.renew(lease, LONG).await),
        on_busy_file(async |store, _| store.purge_expired(1).await),
        on_busy_file(async |store, _| store.append_audit_line("a line").await),
        on_busy_file(async |store, _| store.migrate().await),
        on_busy_file(async |store, _| store.check().await),
    );
    assert!(matches!(acquired, Ok(Acquired::Granted { .. })));
    renewed.expect(WORKS);
    purged.expect(WORKS);
    appended.expect(WORKS);
    migrated.expect(WORKS);
    checked.expect(WORKS);
}

/// The options are those of the handlers' pool. Its connections share a cache, in which each reads the uncommitted rows of the
/// others, and fails beside another writer.
#[tokio::test]
async fn store_shares_no_cache() {
    let scratch = Scratch::new();
    let options = SqliteConnectOptions::new()
        .filename(scratch.file("keys.db"))
        .create_if_missing(true)
        .shared_cache(true)
        .pragma("read_uncommitted", "1");
    let store = SqliteStore::new(options.clone());
    store.migrate().await.expect(WORKS);
    let claim = claim();
    store.acquire(&claim).await.expect(WORKS);
    let mut writer = options.connect().await.expect(WORKS);
    execute(&mut writer, "begin immediate").await;
    let fence = "update tower_idempotency set completed = 1, record = fingerprint, expires = expires + 100000";
    execute(&mut writer, fence).await;
    let acquired = store.acquire(&duplicate(&claim)).await.expect(WORKS);
    assert!(
        matches!(acquired, Acquired::InProgress { .. }),
        "{acquired:?}"
    );
    execute(&mut writer, "rollback").await;
    let lease = claim.lease_ref(1);
    let renewed = beside_writer(&mut writer, store.renew(&lease, LONG)).await;
    renewed.expect(WORKS);
}

/// The statement waits for the other connection. The pause is four times as long.
#[tokio::test]
async fn purge_pauses_if_entries_are_left() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    for _ in 0..2 {
        let mut expired = claim();
        (expired.lease, expired.orphan_retention) = (Ttl::MIN, Ttl::MIN);
        store.acquire(&expired).await.expect(WORKS);
    }
    sleep(Duration::from_millis(20)).await;
    let mut writer = open(&scratch.file("keys.db")).await;
    let began = Instant::now();
    let purged = beside_writer(&mut writer, store.purge_expired(1)).await;
    assert_eq!(purged.expect(WORKS), 1);
    let took = began.elapsed();
    assert!(took > Duration::from_millis(1_200), "{took:?}");
}

/// Writes for 10 ms, again and again, almost without a pause.
fn import(file: &Path, commits: u32) {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let mut connection = open(file).await;
        execute(&mut connection, "create table imported (n integer)").await;
        for _ in 0..commits {
            let insert = "begin immediate; insert into imported values (1)";
            execute(&mut connection, insert).await;
            thread::sleep(Duration::from_millis(10));
            execute(&mut connection, "commit").await;
            thread::sleep(Duration::from_micros(50));
        }
    });
}

/// Renews a lease again and again during an import of 400 rows. Returns the number of renewals.
async fn count_renewals_during_import() -> u32 {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    let claim = claim();
    store.acquire(&claim).await.expect(WORKS);
    let lease = claim.lease_ref(1);
    store.renew(&lease, LONG).await.expect(WORKS);
    let file = scratch.file("keys.db");
    let importing = thread::spawn(move || import(&file, 400));
    let mut renewed = 0;
    while !importing.is_finished() {
        if store.renew(&lease, LONG).await.is_ok() {
            renewed += 1;
        }
        sleep(Duration::from_millis(20)).await;
    }
    importing.join().expect("the import ends");
    renewed
}

// F-171
/// SQLite itself polls every 100 ms. On an idle machine it renewed 1 to 3 times in an import. The commits of the other
/// connection are the clock, so a stall of the machine hardly changes these numbers. A busy machine may run the import almost
/// alone, so there are several imports.
#[tokio::test(flavor = "multi_thread")]
async fn renewals_continue_during_import() {
    let mut counts = Vec::new();
    for _ in 0..5 {
        let renewed = count_renewals_during_import().await;
        if renewed >= 10 {
            return;
        }
        counts.push(renewed);
    }
    panic!("renewals in each import: {counts:?}");
}

#[tokio::test]
async fn busy_timeout_of_options_limits_wait() {
    let scratch = Scratch::new();
    let file = scratch.file("keys.db");
    let limit = Duration::from_millis(50);
    let options = SqliteConnectOptions::new().filename(&file);
    let options = options.create_if_missing(true).busy_timeout(limit);
    let store = SqliteStore::new(options);
    store.migrate().await.expect(WORKS);
    let mut writer = open(&file).await;
    execute(&mut writer, "begin immediate").await;
    let sent = Instant::now();
    let acquired = store.acquire(&claim()).await;
    let took = sent.elapsed();
    acquired.expect_err("the other connection writes");
    // The default is 5 seconds.
    assert!((limit..Duration::from_secs(5)).contains(&took), "{took:?}");
}

/// The layer drops a call at its timeout, and reports that it failed.
#[tokio::test]
async fn dropped_call_does_not_write_later() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    let claim = claim();
    let mut writer = open(&scratch.file("keys.db")).await;
    execute(&mut writer, "begin immediate").await;
    let waiting = timeout(Duration::from_millis(200), store.acquire(&claim)).await;
    waiting.expect_err("the other connection writes");
    // A stall of the machine ends only one of these early.
    for _ in 0..10 {
        sleep(Duration::from_millis(100)).await;
    }
    execute(&mut writer, "commit").await;
    sleep(Duration::from_millis(500)).await;
    let acquired = store.acquire(&duplicate(&claim)).await.expect(WORKS);
    assert!(
        matches!(acquired, Acquired::Granted { generation: 1, .. }),
        "{acquired:?}"
    );
}

const LONG: Ttl = Ttl::from_secs(600);
const WORKS: &str = "the file can be written";
