//! The tables of the SQL stores: created at each start, by every replica at once, without blocking other statements.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use tests::{
    HANG_GUARD, app,
    barrier::{Barrier, eventually},
    created, post,
    scratch::Scratch,
    send,
    servers::{mariadb, postgres},
    sql::{self, claim},
};
use tokio::time::{sleep, timeout};
use tower_idempotency::{
    IdempotencyLayer,
    store::{Acquired, Store, Ttl},
};
use tower_idempotency_sqlx::{
    MySqlStore, PostgresStore, SqlError, SqliteStore,
    sqlx::{
        AssertSqlSafe, ConnectOptions, Connection, Executor, MySqlConnection, PgConnection,
        mysql::MySqlConnectOptions, postgres::PgConnectOptions, query_scalar, raw_sql,
        sqlite::SqliteConnectOptions,
    },
};

/// Asserts that the table can be used, and that its contents remain when it is created again.
async fn holds_a_lease<S: Store>(store: &S, again: impl AsyncFn() -> Result<(), SqlError>) {
    let claim = claim();
    let granted = store.acquire(&claim).await.expect("the database works");
    assert!(matches!(granted, Acquired::Granted { .. }), "{granted:?}");
    again().await.expect("the database works");
    let mine = store.renew(&claim.lease_ref(1), claim.lease).await;
    assert!(mine.is_ok(), "{mine:?}");
}

/// Makes a test in which 16 stores create one table at once, like replicas that start together.
macro_rules! at_once {
    ($store:expr) => {{
        let store = $store;
        let mut migrating = tokio::task::JoinSet::new();
        for _ in 0..16 {
            let store = store();
            migrating.spawn(async move { store.migrate().await });
        }
        for migrated in migrating.join_all().await {
            migrated.unwrap();
        }
        let store = store();
        holds_a_lease(&store, || store.migrate()).await;
    }};
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_of_postgres_migrate_at_once() {
    let store = || PostgresStore::from_url(&postgres::shared().url()).unwrap();
    at_once!(|| store().with_table("at_once").unwrap());
    let mut admin = PgConnection::connect(&postgres::shared().url())
        .await
        .unwrap();
    admin.execute("create schema of_its_own").await.unwrap();
    at_once!(|| store().with_table("of_its_own.select").unwrap());
}

/// A name without a schema is searched in the path, as for each statement.
#[tokio::test(flavor = "multi_thread")]
async fn table_of_any_schema_in_path_is_used() {
    let server = postgres::shared();
    let store = sql::postgres(server, "of_path").await;
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    admin.execute("create schema path_first").await.unwrap();
    let options: PgConnectOptions = server.url().parse().unwrap();
    let options = options.options([("search_path", "path_first,public")]);
    let other = PostgresStore::new(options).with_table("of_path").unwrap();
    holds_a_lease(&store, || other.migrate()).await;
    let created = "select count(*) from pg_tables where schemaname = 'path_first'";
    let created = query_scalar::<_, i64>(created).fetch_one(&mut admin);
    assert_eq!(created.await.unwrap(), 0);
    // A store that names its schema has a table of its own.
    let named = other.with_table("path_first.of_path").unwrap();
    holds_a_lease(&store, || named.migrate()).await;
    let created = "select count(*) from pg_tables where schemaname = 'path_first'";
    let created = query_scalar::<_, i64>(created).fetch_one(&mut admin);
    assert_eq!(created.await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_of_mariadb_migrate_at_once() {
    let store = || MySqlStore::from_url(&mariadb::shared().url()).unwrap();
    at_once!(|| store().with_table("at_once").unwrap());
    let mut admin = MySqlConnection::connect(&mariadb::shared().url())
        .await
        .unwrap();
    admin.execute("create database of_its_own").await.unwrap();
    at_once!(|| store().with_table("of_its_own.select").unwrap());
}

// F-171
#[tokio::test(flavor = "multi_thread")]
async fn processes_on_one_sqlite_file_migrate_at_once() {
    let scratch = Scratch::new();
    // In some of many files, two stores set WAL mode at the same moment.
    for file in 0..50 {
        at_once!(|| SqliteStore::in_file(scratch.file(format!("{file}.db"))));
    }
}

/// Two operators append the first lines of the audit table at once. Another process is about to create the table.
#[tokio::test]
async fn first_audit_line_waits_for_other_process() {
    let url = postgres::shared().url();
    let store = sql::postgres(postgres::shared(), "first_line").await;
    let mut other = PgConnection::connect(&url).await.unwrap();
    let create = "begin;
        select pg_advisory_xact_lock(x'746f7765725f6964'::bigint);
        create table first_line_audit (
          n bigint generated always as identity primary key,
          at timestamptz not null default clock_timestamp(), line text not null)";
    other.execute(create).await.unwrap();
    let appending = {
        let store = store.clone();
        tokio::spawn(async move { store.append_audit_line("second").await })
    };
    let mut watch = PgConnection::connect(&url).await.unwrap();
    let waiting = "select count(*) from pg_stat_activity
        where wait_event_type = 'Lock' and query like '%create table if not exists \"first_line_audit\"%'";
    let began = Instant::now();
    while query_scalar::<_, i64>(waiting)
        .fetch_one(&mut watch)
        .await
        .unwrap()
        == 0
    {
        assert!(
            !appending.is_finished(),
            "the line did not wait: {appending:?}"
        );
        assert!(began.elapsed() < HANG_GUARD, "the line does not wait");
        sleep(Duration::from_millis(5)).await;
    }
    let first = "insert into first_line_audit (line) values ('first'); commit";
    other.execute(first).await.unwrap();
    appending.await.unwrap().unwrap();
    let lines = store.last_audit_lines(9).await.unwrap();
    assert_eq!(lines, ["second", "first"]);
}

/// The database belongs to the application, and is not in WAL mode yet. During a write, SQLite rejects the change to
/// WAL at once.
#[tokio::test]
async fn migration_waits_for_sqlite_writer() {
    // If the migration does not try the change during a short write, it does during a longer one.
    for millis in [50, 150, 450] {
        let scratch = Scratch::new();
        let file = scratch.file("application.db");
        let options = SqliteConnectOptions::new()
            .filename(&file)
            .create_if_missing(true);
        let mut application = options.connect().await.unwrap();
        let writing = "begin immediate; create table payments (id integer)";
        application.execute(writing).await.unwrap();

        let before = open_descriptors(&file);
        let store = SqliteStore::in_file(&file);
        let (migrated, ()) = tokio::join!(store.migrate(), async {
            let is_opened = || open_descriptors(&file) > before;
            eventually("the migration opens the file", is_opened).await;
            sleep(Duration::from_millis(millis)).await;
            application.execute("commit").await.unwrap();
        });
        migrated.unwrap();
        holds_a_lease(&store, || store.migrate()).await;
    }
}

/// Returns the number of descriptors of this process for the file. SQLite closes none of them while a connection of the
/// process has locked the file.
fn open_descriptors(file: &Path) -> usize {
    let file = file.canonicalize().expect("the file exists");
    let descriptors = fs::read_dir("/proc/self/fd").expect("a system with procfs");
    let files = descriptors.filter_map(|it| fs::read_link(it.ok()?.path()).ok());
    files.filter(|it| *it == file).count()
}

/// The name of the table or of its schema begins like the default name, which the migrations contain.
#[tokio::test]
async fn table_with_default_prefix_is_created() {
    let (name, in_a_schema) = ("tower_idempotency_payments", "tower_idempotency_eu.keys");

    let mut admin = PgConnection::connect(&postgres::shared().url())
        .await
        .unwrap();
    let schema = "create schema tower_idempotency_eu";
    admin.execute(schema).await.unwrap();
    for name in [name, in_a_schema] {
        let store = sql::postgres(postgres::shared(), name).await;
        holds_a_lease(&store, || store.migrate()).await;
    }

    let mut admin = MySqlConnection::connect(&mariadb::shared().url())
        .await
        .unwrap();
    admin.execute(schema).await.unwrap();
    for name in [name, in_a_schema] {
        let store = sql::mariadb(mariadb::shared(), name).await;
        holds_a_lease(&store, || store.migrate()).await;
    }

    let scratch = Scratch::new();
    let store = SqliteStore::in_file(scratch.file("keys.db"));
    let store = store.with_table(name).unwrap();
    store.migrate().await.unwrap();
    holds_a_lease(&store, || store.migrate()).await;
}

#[test]
fn schema_qualified_sqlite_table_is_refused() {
    let refused = SqliteStore::in_file("keys.db").with_table("main.keys");
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("SQLite") && refused.contains("main.keys"),
        "{refused}"
    );
}

#[tokio::test]
async fn migration_does_not_wait_for_transaction() {
    let url = postgres::shared().url();
    let store = sql::postgres(postgres::shared(), "held").await;
    store.acquire(&claim()).await.unwrap();
    let mut other = PgConnection::connect(&url).await.unwrap();
    let update = "begin; update held set owner = 'another'";
    other.execute(update).await.unwrap();
    timeout(SOON, store.migrate()).await.expect(WAITS).unwrap();

    let url = mariadb::shared().url();
    let store = sql::mariadb(mariadb::shared(), "held").await;
    store.acquire(&claim()).await.unwrap();
    let mut other = MySqlConnection::connect(&url).await.unwrap();
    other.execute("begin").await.unwrap();
    other
        .execute("update held set owner = 'another'")
        .await
        .unwrap();
    timeout(SOON, store.migrate()).await.expect(WAITS).unwrap();
}

const SOON: Duration = Duration::from_secs(60);
const WAITS: &str = "the migration waits for another transaction";

/// The table is of a version without an index for orphans.
#[tokio::test]
async fn old_table_is_migrated() {
    let store = sql::postgres(postgres::shared(), "before").await;
    let mut admin = PgConnection::connect(&postgres::shared().url())
        .await
        .unwrap();
    admin.execute("drop index before_orphans").await.unwrap();
    holds_a_lease(&store, || store.migrate()).await;
    let index = "select count(*) from pg_indexes where indexname = 'before_orphans'";
    let made: i64 = query_scalar(index).fetch_one(&mut admin).await.unwrap();
    assert_eq!(made, 1);

    let store = sql::mariadb(mariadb::shared(), "before").await;
    let mut admin = MySqlConnection::connect(&mariadb::shared().url())
        .await
        .unwrap();
    admin
        .execute("drop index orphans on `before`")
        .await
        .unwrap();
    holds_a_lease(&store, || store.migrate()).await;
    let index = "select count(*) from information_schema.statistics \
                 where table_name = 'before' and index_name = 'orphans' and seq_in_index = 1";
    let made: i64 = query_scalar(index).fetch_one(&mut admin).await.unwrap();
    assert_eq!(made, 1);
}

/// The operator builds it before the deployment, concurrently with requests.
#[tokio::test]
async fn migration_keeps_index_of_operator() {
    let store = sql::postgres(postgres::shared(), "built_before").await;
    let mut admin = PgConnection::connect(&postgres::shared().url())
        .await
        .unwrap();
    let build = "drop index built_before_completed;
        create index built_before_completed on built_before (expires, id) where completed is not null";
    admin.execute(build).await.unwrap();
    let index = "select oid::bigint from pg_class where relname = 'built_before_completed'";
    let built: i64 = query_scalar(index).fetch_one(&mut admin).await.unwrap();
    holds_a_lease(&store, || store.migrate()).await;
    let found: i64 = query_scalar(index).fetch_one(&mut admin).await.unwrap();
    assert_eq!(found, built);
}

// F-996
/// The lock is that of `create index`.
#[tokio::test(flavor = "multi_thread")]
async fn long_migration_loses_record_of_request() {
    let store = sql::postgres(postgres::shared(), "long_migration").await;
    let layer = IdempotencyLayer::new(store).with_lease_ttl(Ttl::from_secs(1));
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let (app, effects) = app(layer.clone(), move |n, _req| {
        let held = held.clone();
        async move {
            held.pass().await;
            created(n)
        }
    });
    let running = {
        let app = app.clone();
        tokio::spawn(async move { send(&app, post("/", "k", "")).await })
    };
    barrier.arrival().await;
    let mut migration = PgConnection::connect(&postgres::shared().url())
        .await
        .unwrap();
    let lock = "begin; lock table long_migration in share mode";
    migration.execute(lock).await.unwrap();
    barrier.open_for_good();
    running.await.unwrap();
    eventually("the layer gives the record up", || layer.in_flight() == 0).await;
    // The lease expires. A statement that the server still executes waits for the lock for at most half a second.
    sleep(Duration::from_secs(2)).await;
    migration.execute("commit").await.unwrap();
    let retry = send(&app, post("/", "k", "")).await;
    assert!(!retry.is_replay());
    assert_eq!(effects.count(), 2);
}

// F-995
/// The user may read and write the table, but create none.
#[tokio::test]
async fn postgres_user_without_right_to_create_opens_table() {
    let url = postgres::shared().url();
    let mut admin = PgConnection::connect(&url).await.unwrap();
    let role = "create schema locked; create role locked_writer login; \
                grant usage on schema locked to locked_writer";
    admin.execute(role).await.unwrap();
    let options: PgConnectOptions = url.parse().unwrap();
    let store = PostgresStore::new(options.username("locked_writer"));
    let store = store.with_table("locked.keys").unwrap();
    let denied = store.migrate().await.expect_err("no table, and no right");
    assert_eq!(denied.code(), Some("42501"), "{denied}");

    sql::postgres(postgres::shared(), "locked.keys").await;
    let rights = "grant select, insert, update, delete on locked.keys to locked_writer";
    admin.execute(rights).await.unwrap();
    store.migrate().await.unwrap();
    store.check().await.unwrap();
    holds_a_lease(&store, || store.migrate()).await;
}

// F-995
/// The user may read and write the table, but create none.
#[tokio::test]
async fn mariadb_user_without_right_to_create_opens_table() {
    let url = mariadb::shared().url();
    sql::mariadb(mariadb::shared(), "locked").await;
    let mut admin = MySqlConnection::connect(&url).await.unwrap();
    // Without TLS, the driver sends no password to MySQL.
    let password = if mariadb::is_mysql() { "" } else { "locked" };
    let user = format!(
        "create user locked_writer@'%' identified by '{password}';
         grant select, insert, update, delete on app.locked to locked_writer@'%'"
    );
    let created = raw_sql(AssertSqlSafe(user)).execute(&mut admin).await;
    created.expect("the user of the tests may create users");
    let mut options: MySqlConnectOptions = url.parse().unwrap();
    options = options.username("locked_writer");
    if !password.is_empty() {
        options = options.password(password);
    }
    let store = MySqlStore::new(options.clone());
    let absent = store.with_table("locked_absent").unwrap();
    let denied = absent.migrate().await.expect_err("no table, and no right");
    assert_eq!(denied.code(), Some("1142"), "{denied}");

    let store = MySqlStore::new(options).with_table("locked").unwrap();
    store.migrate().await.unwrap();
    store.check().await.unwrap();
    holds_a_lease(&store, || store.migrate()).await;
}

#[tokio::test]
async fn missing_table_is_named() {
    let store = PostgresStore::from_url(&postgres::shared().url()).unwrap();
    let store = store.with_table("nowhere").unwrap();
    let error = store.acquire(&claim()).await.unwrap_err();
    let cause = std::error::Error::source(&error).unwrap();
    assert!(cause.to_string().contains("\"nowhere\""), "{cause}");

    let store = MySqlStore::from_url(&mariadb::shared().url()).unwrap();
    let store = store.with_table("nowhere").unwrap();
    let error = store.acquire(&claim()).await.unwrap_err();
    let cause = std::error::Error::source(&error).unwrap();
    assert!(cause.to_string().contains("nowhere"), "{cause}");
}
