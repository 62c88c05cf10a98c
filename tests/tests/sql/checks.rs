//! The text of each check and of each refused constructor. None contains a password.

use std::error::Error;

use tests::database::pool_options;
use tests::{
    observed::observed,
    scratch::Scratch,
    servers::{
        free_port,
        mariadb::{self, MariaDbServer},
        postgres,
    },
    sql::claim,
};
use tower_idempotency::store::{CheckErrorKind, Store, StoreError};
use tower_idempotency_sqlx::{
    MySqlFence, MySqlStore, PostgresFence, PostgresStore, SqlError, SqliteFence, SqliteStore,
    sqlx::{
        self, mysql::MySqlConnectOptions, postgres::PgConnectOptions, sqlite::SqliteConnectOptions,
    },
};

const SECRET: &str = "open-sesame";
const MIGRATE: &str = "call `migrate`, or execute the files in `migrations`";
const GRANT: &str = "grant select, insert, update and delete on the table";
const WRITABLE: &str = "connect to the primary, and to a database that is not read-only";
const REACH: &str = "check the address, the credentials and the network, and that the server runs";

/// Returns the text of the problem, and its kind.
async fn problem(store: &impl Store) -> (String, CheckErrorKind) {
    let error = store.check().await.expect_err("a problem");
    let text = error.to_string();
    for shown in [&text, &format!("{error:?}")] {
        assert!(!shown.contains(SECRET), "{shown}");
    }
    (text, error.kind())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_check_names_missing_parts() {
    use CheckErrorKind::{Denied, Incomplete};

    let url = postgres::shared().url();
    let pool = pool_options::<sqlx::Postgres>()
        .connect(&url)
        .await
        .unwrap();
    let run = async |sql: &'static str| sqlx::raw_sql(sql).execute(&pool).await.map(drop);
    let store = PostgresStore::from_url(&url)
        .unwrap()
        .with_table("checks")
        .unwrap();
    let missing = "the table \"checks\" is missing or not visible to the user";
    assert_eq!(
        problem(&store).await,
        (format!("{missing}: {MIGRATE}"), Incomplete)
    );

    store.migrate().await.unwrap();
    store.check().await.unwrap();
    for index in ["expires", "orphans", "attention"] {
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("drop index checks_{index}")))
            .execute(&pool)
            .await
            .unwrap();
        let missing = format!("the table \"checks\" has no index {index}: {MIGRATE}");
        assert_eq!(problem(&store).await, (missing, Incomplete));
        if index == "expires" {
            run("create index checks_expires on checks (expires, id)")
                .await
                .unwrap();
        } else {
            store.migrate().await.unwrap();
        }
        store.check().await.unwrap();
    }

    let read_only = url.parse::<PgConnectOptions>().unwrap();
    let read_only = read_only.options([("default_transaction_read_only", "on")]);
    let read_only = PostgresStore::new(read_only).with_table("checks").unwrap();
    let refused = format!("the database accepts no writes: {WRITABLE}");
    assert_eq!(problem(&read_only).await, (refused, CheckErrorKind::Unsafe));

    run("create role checks_reader login; grant select, insert, delete on checks to checks_reader")
        .await
        .unwrap();
    let reader = url
        .parse::<PgConnectOptions>()
        .unwrap()
        .username("checks_reader");
    let reader = PostgresStore::new(reader.password(SECRET))
        .with_table("checks")
        .unwrap();
    let denied = format!("the user may not update in the table \"checks\": {GRANT}");
    assert_eq!(problem(&reader).await, (denied, Denied));
    run("grant update on checks to checks_reader")
        .await
        .unwrap();
    reader.check().await.unwrap();

    run("alter table checks drop column awaited").await.unwrap();
    let missing = format!("the table \"checks\" has no column awaited: {MIGRATE}");
    assert_eq!(problem(&store).await, (missing, Incomplete));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_check_names_missing_parts() {
    use CheckErrorKind::{Denied, Incomplete};

    let url = mariadb::shared().url();
    let store = MySqlStore::from_url(&url)
        .unwrap()
        .with_table("checks")
        .unwrap();
    let missing = "the table `checks` is missing or not visible to the user";
    assert_eq!(
        problem(&store).await,
        (format!("{missing}: {MIGRATE}"), Incomplete)
    );

    store.migrate().await.unwrap();
    store.check().await.unwrap();
    let pool = pool_options::<sqlx::MySql>().connect(&url).await.unwrap();
    sqlx::raw_sql("drop index orphans on checks")
        .execute(&pool)
        .await
        .unwrap();
    let missing = format!("the table `checks` has no index orphans: {MIGRATE}");
    assert_eq!(problem(&store).await, (missing, Incomplete));
    store.migrate().await.unwrap();
    store.check().await.unwrap();

    // Without TLS, the driver sends no password to MySQL.
    if !mariadb::is_mysql() {
        let created = "create user checks_reader@'%' identified by 'open-sesame';
                   grant select, insert, update on app.checks to checks_reader@'%'";
        let created = sqlx::raw_sql(created).execute(&pool).await;
        created.expect("the user of the tests may create users");
        let reader = url
            .parse::<MySqlConnectOptions>()
            .unwrap()
            .username("checks_reader");
        let reader = MySqlStore::new(reader.password(SECRET))
            .with_table("checks")
            .unwrap();
        let denied = format!("the user may not delete in the table `checks`: {GRANT}");
        assert_eq!(problem(&reader).await, (denied, Denied));
    }

    sqlx::raw_sql("alter table checks drop column owner")
        .execute(&pool)
        .await
        .unwrap();
    let missing = format!("the table `checks` has no column of this version: {MIGRATE}");
    assert_eq!(problem(&store).await, (missing, Incomplete));
}

/// A server with `binlog_format = STATEMENT` rejects each write at READ COMMITTED, the level of the store. It accepts writes at
/// the default level of a session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_check_names_format_of_log() {
    // The tests start MySQL without a log.
    if mariadb::is_mysql() {
        return;
    }
    let server = MariaDbServer::start(&["log-bin", "server-id=1", "binlog-format=STATEMENT"]);
    let store = MySqlStore::connect(&server.url()).await.unwrap();
    let Err(StoreError::Backend(error)) = store.acquire(&claim()).await else {
        panic!("the server rejects the write");
    };
    assert!(error.to_string().contains(" 1665: "), "{error}");
    let cause = "the server has binlog_format = STATEMENT, and rejects writes at READ COMMITTED";
    let expected = format!("{cause}: set binlog_format to ROW or MIXED");
    assert_eq!(problem(&store).await, (expected, CheckErrorKind::Unsafe));

    let pool = pool_options::<sqlx::MySql>();
    let pool = pool.connect(&server.url()).await.unwrap();
    for format in ["MIXED", "ROW"] {
        let set = format!("set global binlog_format = {format}");
        let set = sqlx::raw_sql(sqlx::AssertSqlSafe(set)).execute(&pool).await;
        set.expect("the user of the tests may set it");
        // A session reads the format when it begins.
        let store = MySqlStore::from_url(&server.url()).unwrap();
        store.check().await.unwrap();
        store.acquire(&claim()).await.unwrap();
    }
}

/// With `sql_safe_updates`, a statement must select rows by a key. Those of the store do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_check_accepts_safe_updates() {
    if mariadb::is_mysql() {
        return;
    }
    let server = MariaDbServer::start(&[]);
    let store = MySqlStore::connect(&server.url()).await.unwrap();
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    let pool = pool_options::<sqlx::MySql>();
    let pool = pool.connect(&server.url()).await.unwrap();
    let set = sqlx::raw_sql("set global sql_safe_updates = 1");
    set.execute(&pool).await.unwrap();
    let store = MySqlStore::from_url(&server.url()).unwrap();
    store.check().await.unwrap();
    store.release(&claim.lease_ref(1)).await.unwrap();
}

// F-165
/// The server accepts the writes of users with SUPER, CONNECTION_ADMIN or READ_ONLY ADMIN, so no probe of a right fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_check_names_replica_of_administrator() {
    let server = MariaDbServer::start(&[]);
    let store = MySqlStore::connect(&server.url()).await.unwrap();
    store.check().await.unwrap();
    let pool = pool_options::<sqlx::MySql>();
    let pool = pool.connect(&server.url()).await.unwrap();
    let run = async |sql: &'static str| sqlx::raw_sql(sql).execute(&pool).await.unwrap();
    run("set global read_only = 1").await;
    store.acquire(&claim()).await.unwrap();
    let refused = format!("the database accepts no writes: {WRITABLE}");
    assert_eq!(problem(&store).await, (refused, CheckErrorKind::Unsafe));
    run("set global read_only = 0").await;
    store.check().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_check_names_missing_parts() {
    use CheckErrorKind::{Incomplete, Unsafe};

    let scratch = Scratch::new();
    let path = scratch.file("checks.db");
    let store = SqliteStore::in_file(&path);
    let table = "the table \"tower_idempotency\"";
    let missing = format!("{table} is missing or not visible to the user: {MIGRATE}");
    assert_eq!(problem(&store).await, (missing, Incomplete));

    store.migrate().await.unwrap();
    store.check().await.unwrap();
    let options = SqliteConnectOptions::new().filename(&path);
    // A second connection would compare a new column with the schema that it read earlier.
    let pool = pool_options::<sqlx::Sqlite>()
        .max_connections(1)
        .connect_with(options.clone())
        .await
        .unwrap();
    let run = async |sql: &'static str| sqlx::raw_sql(sql).execute(&pool).await.unwrap();
    run("drop index tower_idempotency_attention").await;
    let missing = format!("{table} has no index attention: {MIGRATE}");
    assert_eq!(problem(&store).await, (missing, Incomplete));
    store.migrate().await.unwrap();
    run("alter table tower_idempotency drop column checkpoint_data").await;
    let missing = format!("{table} has no column checkpoint_data: {MIGRATE}");
    assert_eq!(problem(&store).await, (missing, Incomplete));
    run("alter table tower_idempotency add column checkpoint_data blob").await;
    store.check().await.unwrap();

    let read_only = SqliteStore::new(options.read_only(true));
    let refused = format!("the database accepts no writes: {WRITABLE}");
    assert_eq!(problem(&read_only).await, (refused, Unsafe));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_check_names_unusable_file() {
    let remedy = "check the path, the rights of the process on the file and its directory, and that no writer holds the file";
    let scratch = Scratch::new();
    let text = scratch.file("text");
    std::fs::write(&text, "no database".repeat(100)).unwrap();
    for (path, cause) in [
        (
            scratch.file("absent/keys.db"),
            "14: unable to open database file",
        ),
        (text, "26: file is not a database"),
    ] {
        let found = problem(&SqliteStore::in_file(&path)).await;
        let expected = format!("the database reported {cause}: {remedy}");
        assert_eq!(found, (expected, CheckErrorKind::Unreachable), "{path:?}");
    }
}

/// Each connection would have a separate database, and execute the same request once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_refuses_databases_in_memory() {
    let refused = "the database is in memory or in an unnamed file, so each connection would have a database of its own: \
                   name a file, or use MemoryStore";
    for url in [
        "sqlite::memory:",
        "sqlite://:memory:",
        "sqlite:",
        "sqlite:keys?mode=memory",
        "sqlite:keys?mode=memory&cache=shared",
    ] {
        let error = SqliteStore::connect(url).await.expect_err(url);
        assert_eq!(error.to_string(), refused, "{url}");
    }
    for path in ["", ":memory:", "file::memory:", "file:keys?mode=memory"] {
        let store = SqliteStore::in_file(path);
        assert_eq!(
            store.migrate().await.expect_err(path).to_string(),
            refused,
            "{path}"
        );
        let found = problem(&store).await;
        assert_eq!(
            found,
            (refused.to_owned(), CheckErrorKind::Unsafe),
            "{path}"
        );
    }
    for name in ["keys", ":memory:", "file:keys?mode=memory"] {
        let removed = std::fs::remove_file(name);
        assert!(removed.is_err(), "a file {name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_constructors_open_no_file() {
    let scratch = Scratch::new();
    let [by_url, by_path] = ["url.db", "path.db"].map(|name| scratch.file(name));
    let url = format!("sqlite:{}", by_url.display());
    let stores = [
        (SqliteStore::from_url(&url).unwrap(), by_url),
        (SqliteStore::in_file(&by_path), by_path),
    ];
    for (store, path) in stores {
        assert!(!path.exists(), "{path:?}");
        store.migrate().await.unwrap();
        store.check().await.unwrap();
        assert!(path.exists(), "{path:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_that_connects_is_ready() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("ready.db").display());
    SqliteStore::connect(&url)
        .await
        .unwrap()
        .check()
        .await
        .unwrap();
    let postgres = PostgresStore::connect(&postgres::shared().url())
        .await
        .unwrap();
    postgres.check().await.unwrap();
    let mariadb = MySqlStore::connect(&mariadb::shared().url()).await.unwrap();
    mariadb.check().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_server_is_named_without_password() {
    let port = free_port();
    let url = format!("postgres://app:{SECRET}@127.0.0.1:{port}/app");
    let (text, kind) = problem(&PostgresStore::from_url(&url).unwrap()).await;
    let failed = "the call to the database failed (";
    assert!(
        text.starts_with(failed) && text.ends_with(&format!("): {REACH}")),
        "{text}"
    );
    assert_eq!(kind, CheckErrorKind::Unreachable);
    let url = format!("mysql://app:{SECRET}@127.0.0.1:{port}/app");
    let (text, kind) = problem(&MySqlStore::from_url(&url).unwrap()).await;
    assert!(
        text.starts_with(failed) && text.ends_with(&format!("): {REACH}")),
        "{text}"
    );
    assert_eq!(kind, CheckErrorKind::Unreachable);
}

#[tokio::test]
async fn invalid_url_is_not_quoted() {
    let of_postgres = [
        PostgresStore::from_url("postgres://app:open-sesame@host:no-port/app").unwrap_err(),
        PostgresStore::connect("open-sesame").await.unwrap_err(),
    ];
    let of_mysql = [
        MySqlStore::from_url("mysql://app:open-sesame@host:no-port/app").unwrap_err(),
        MySqlStore::connect("open-sesame").await.unwrap_err(),
    ];
    let url_of_sqlite = "sqlite:keys.db?open-sesame=1";
    let of_sqlite = [
        SqliteStore::from_url(url_of_sqlite).unwrap_err(),
        SqliteStore::connect(url_of_sqlite).await.unwrap_err(),
    ];
    for (errors, form) in [
        (&of_postgres[..], "postgres://USER:PASSWORD@HOST/DATABASE"),
        (&of_mysql[..], "mysql://USER:PASSWORD@HOST/DATABASE"),
        (&of_sqlite[..], "sqlite:PATH"),
    ] {
        for error in errors {
            assert_eq!(
                error.to_string(),
                format!("expected a URL of the form {form}")
            );
            assert!(!format!("{error:?}").contains(SECRET), "{error:?}");
        }
    }
}

/// The driver ignores a parameter that it does not know, and logs its name and value.
#[test]
fn unknown_postgres_parameters_are_not_logged() {
    let url = |parameters: &str| format!("postgres://app@host/app?{parameters}");
    let (_, log) = observed("warn", async {
        for parameters in [
            "sslpassword=open-sesame",
            "sslmode=disable&pass=open-sesame",
            "open-sesame",
        ] {
            let error = PostgresStore::from_url(&url(parameters)).unwrap_err();
            let text = error.to_string();
            let expected =
                "expected only parameters of the driver after the ? of the URL: sslmode, ";
            assert!(text.starts_with(expected), "{text}");
            assert!(!text.contains(SECRET), "{text}");
        }
        // Each parameter that the store accepts.
        for parameter in [
            "sslmode=disable",
            "ssl-mode=disable",
            "sslrootcert=open-sesame",
            "ssl-root-cert=open-sesame",
            "ssl-ca=open-sesame",
            "sslcert=open-sesame",
            "ssl-cert=open-sesame",
            "sslkey=open-sesame",
            "ssl-key=open-sesame",
            "statement-cache-capacity=1",
            "host=open-sesame",
            "hostaddr=127.0.0.1",
            "port=1",
            "dbname=open-sesame",
            "user=open-sesame",
            "password=open-sesame",
            "application_name=open-sesame",
            "options=open-sesame",
            "options[search_path]=open-sesame",
            "options%5Bsearch_path%5D=open-sesame",
        ] {
            PostgresStore::from_url(&url(parameter)).expect(parameter);
        }
    });
    assert!(!log.contains("parameter"), "{log}");
    assert!(!log.contains(SECRET), "{log}");
}

/// Returns the messages of the error and of its sources.
fn messages(error: &SqlError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = format!(" ({error})");
        if !text.contains(&cause) {
            text += &cause;
        }
        source = error.source();
    }
    text
}

/// Each way to a store that cannot be used. The ports differ in each run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_constructors_have_these_texts() {
    let mut lines = Vec::new();
    let mut note =
        |name: &str, error: &SqlError| lines.push(format!("{name}: {}", messages(error)));
    let (unused, scratch) = (free_port(), Scratch::new());
    let url = postgres::shared().url();
    let at = url.rsplit_once('@').map_or("", |(_, at)| at);
    let at = at.split_once('/').map_or(at, |(at, _)| at);
    let server = url.strip_suffix("/app").unwrap_or(&url);
    for (name, url) in [
        ("postgres, no URL", "postgres".to_owned()),
        (
            "postgres, no server",
            format!("postgres://app:{SECRET}@127.0.0.1:{unused}/app"),
        ),
        ("postgres, no database", format!("{server}/absent")),
        (
            "postgres, no user",
            format!("postgres://absent:{SECRET}@{at}/app"),
        ),
        ("postgres, no TLS", format!("{url}?sslmode=require")),
    ] {
        note(name, &PostgresStore::connect(&url).await.expect_err(name));
    }
    let url = mariadb::shared().url();
    let at = url.rsplit_once('@').map_or("", |(_, at)| at);
    let at = at.split_once('/').map_or(at, |(at, _)| at);
    let server = url.strip_suffix("/app").unwrap_or(&url);
    for (name, url) in [
        ("mysql, no URL", "mysql".to_owned()),
        (
            "mysql, no server",
            format!("mysql://app:{SECRET}@127.0.0.1:{unused}/app"),
        ),
        ("mysql, no database", format!("{server}/absent")),
        (
            "mysql, no user",
            format!("mysql://absent:{SECRET}@{at}/app"),
        ),
        ("mysql, no TLS", format!("{url}?ssl-mode=REQUIRED")),
    ] {
        note(name, &MySqlStore::connect(&url).await.expect_err(name));
    }
    std::fs::write(scratch.file("text"), "no database".repeat(100)).unwrap();
    let text = format!("sqlite:{}", scratch.file("text").display());
    for (name, url) in [
        ("sqlite, a wrong setting", "sqlite:keys.db?open-sesame=1"),
        ("sqlite, in memory", "sqlite::memory:"),
        ("sqlite, no folder", "sqlite:/absent/keys.db"),
        ("sqlite, another file", &text),
    ] {
        note(name, &SqliteStore::connect(url).await.expect_err(name));
    }
    for name in ["", "a b", "a.b.c"] {
        let error = SqliteStore::in_file("keys.db")
            .with_table(name)
            .unwrap_err();
        lines.push(format!("the table {name:?}: {error}"));
    }
    insta::assert_snapshot!(lines.join("\n"));
}

/// All stores and the statements for other drivers refuse the same names, in the same words.
#[tokio::test]
async fn refused_table_names_have_one_text() {
    let postgres = PostgresStore::from_url("postgres://app@host/app").unwrap();
    let mysql = MySqlStore::from_url("mysql://app@host/app").unwrap();
    for name in ["", "a b", "a.b.c", "Keys", "1a"] {
        let expected = SqliteStore::in_file("keys.db")
            .with_table(name)
            .unwrap_err();
        let errors = [
            postgres.clone().with_table(name).unwrap_err(),
            mysql.clone().with_table(name).unwrap_err(),
            PostgresFence::new(name).unwrap_err(),
            MySqlFence::new(name).unwrap_err(),
            SqliteFence::new(name).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.to_string(), expected.to_string());
        }
    }
}
