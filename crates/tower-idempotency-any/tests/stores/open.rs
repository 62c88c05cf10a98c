//! URLs of stores, and the errors of those that cannot be opened.

use tower_idempotency_any::{AnyStore, OpenError, OpenErrorKind, OpenOptions};

async fn refusal(url: &str) -> OpenError {
    AnyStore::open(url).await.expect_err("no such store")
}

#[tokio::test]
async fn memory_opens_and_names_itself() {
    let store = AnyStore::open("memory").await.expect("memory");
    assert_eq!(format!("{store:?}"), r#"AnyStore("memory")"#);
}

/// A layer on the `AnyStore` compresses as a layer on the store behind the URL.
#[cfg(all(feature = "dynamodb", feature = "postgres"))]
#[tokio::test]
async fn compression_threshold_is_that_of_url() {
    use tests::servers::{
        dynamodb::{StandIn, shared},
        postgres,
    };
    use tower_idempotency::store::Store as _;

    let server = shared(StandIn::Dynoxide);
    let (table, address) = (server.new_table(), server.address());
    for (url, bytes) in [
        ("memory".to_owned(), 8 * 1024),
        (postgres::shared().url(), 1024),
        (format!("dynamodb://{table}?endpoint=http://{address}"), 512),
    ] {
        let options = OpenOptions::new().with_timeout(std::time::Duration::from_secs(20));
        let store = options.open(&url).await.expect("the server runs");
        assert_eq!(store.compress_above(), bytes, "{url}");
    }
}

#[cfg(not(feature = "redis"))]
#[tokio::test]
async fn missing_store_error_names_feature() {
    let error = refusal("redis://:hush@127.0.0.1:1/0").await;
    assert_eq!(error.kind(), OpenErrorKind::NotBuilt);
    let expected = "this program is built without the store redis: build it with the feature redis";
    assert_eq!(error.to_string(), expected);
}

/// The setting is in the URL or in the options. The stores on disk and in memory need none.
#[cfg(all(feature = "dynamodb", feature = "redis"))]
#[tokio::test]
async fn completed_index_is_setting_of_url_or_options() {
    use tests::servers::{
        dynamodb::{StandIn, shared},
        redis,
    };
    use tower_idempotency::inspect::{Inspect as _, State};

    let server = shared(StandIn::Dynoxide);
    let (table, address) = (server.new_table(), server.address());
    let redis = redis::shared().address();
    for (url, sign) in [
        (format!("dynamodb://{table}?endpoint=http://{address}"), '&'),
        (format!("redis://{redis}/0"), '?'),
    ] {
        let with_index = OpenOptions::new().with_completed_index(true);
        let in_url = |is_set: bool| format!("{url}{sign}completed-index={is_set}");
        for (options, url, is_listed) in [
            (OpenOptions::new(), url.clone(), false),
            (with_index.clone(), url.clone(), true),
            (OpenOptions::new(), in_url(true), true),
            // The last one counts.
            (
                OpenOptions::new(),
                format!("{}&completed-index=true", in_url(false)),
                true,
            ),
            (with_index, in_url(false), false),
        ] {
            let options = options.with_timeout(std::time::Duration::from_secs(20));
            let store = options.open(&url).await.expect("the server runs");
            let lists = store.abilities().can_list(State::Completed);
            assert_eq!(lists, is_listed, "{url}");
        }
    }
    // Without TLS the driver ignores the fragment.
    let url = format!("redis://{redis}/0?completed-index=true#insecure");
    let options = OpenOptions::new().with_timeout(std::time::Duration::from_secs(20));
    let store = options.open(&url).await.expect("the server runs");
    assert!(store.abilities().can_list(State::Completed));
    let memory = AnyStore::open("memory").await.expect("memory");
    assert!(memory.abilities().can_list(State::Completed));
}

/// No server listens on port 1, so the error of each URL comes from its store.
#[cfg(all(
    feature = "mysql",
    feature = "postgres",
    feature = "redis",
    feature = "sqlite",
    feature = "tls"
))]
#[tokio::test]
async fn unusable_store_error_hides_password() {
    for (url, store) in [
        ("redis://:hush@127.0.0.1:1/0", "redis"),
        ("rediss://:hush@127.0.0.1:1/0", "redis"),
        (
            "redis+cluster://:hush@127.0.0.1:1,:hush@127.0.0.1:2",
            "redis",
        ),
        ("rediss+cluster://:hush@127.0.0.1:1", "redis"),
        // The driver does not verify certificates only if the program enables that feature.
        (
            "rediss://:hush@127.0.0.1:1/0?completed-index=true#insecure",
            "redis",
        ),
        // The driver refuses nodes with other parameters than the first one as an invalid address.
        (
            "redis+cluster://:hush@127.0.0.1:1,:hush@127.0.0.1:2?protocol=resp3",
            "redis",
        ),
        (
            "rediss+cluster://:hush@127.0.0.1:1,:hush@127.0.0.1:2?completed-index=true#insecure",
            "redis",
        ),
        ("postgres://app:hush@127.0.0.1:1/app", "postgres"),
        ("postgres://app:hu%23sh@127.0.0.1:1/app", "postgres"),
        ("postgresql://app:hush@127.0.0.1:1/app", "postgres"),
        ("mysql://app:hush@127.0.0.1:1/app", "mysql"),
        ("mariadb://app:hush@127.0.0.1:1/app", "mysql"),
        ("sqlite:/no/such/directory/hush", "sqlite"),
    ] {
        let error = refusal(url).await;
        let message = error.to_string();
        assert_eq!(error.kind(), OpenErrorKind::Unusable, "{message}");
        let expected = format!("cannot use the {store} store: ");
        assert!(message.starts_with(&expected), "{message}");
        assert!(!message.contains("hush"), "{message}");
        assert!(!message.contains('\n'), "{message}");
        assert!(!format!("{error:?}").contains("hush"));
    }
}

/// The message of a server may name the user of the URL.
#[cfg(feature = "postgres")]
#[tokio::test]
async fn server_error_names_user_and_hides_password() {
    let address = tests::servers::postgres::shared().address();
    let error = refusal(&format!("postgres://stranger:hush@{address}/postgres")).await;
    let message = error.to_string();
    assert_eq!(error.kind(), OpenErrorKind::Unusable, "{message}");
    assert!(message.contains("stranger"), "{message}");
    assert!(!message.contains("hush"), "{message}");
}

/// The users may read and write the table, but create none.
#[cfg(all(feature = "mysql", feature = "postgres"))]
#[tokio::test]
async fn users_without_right_to_create_open_current_tables() {
    use tests::servers::{mariadb, postgres};
    use tower_idempotency::store::Store as _;
    use tower_idempotency_sqlx::sqlx::{self, AssertSqlSafe, Connection as _};

    let rights = "select, insert, update, delete";
    let url = postgres::shared().url();
    AnyStore::open(&url).await.expect("the server runs");
    let mut admin = sqlx::PgConnection::connect(&url).await.expect("it runs");
    let role = format!("create role writer login; grant {rights} on tower_idempotency to writer");
    let created = sqlx::raw_sql(AssertSqlSafe(role)).execute(&mut admin).await;
    created.expect("the user of the tests may create roles");
    let of_postgres = url.replacen("app@", "writer@", 1);

    let (address, url) = (mariadb::shared().address(), mariadb::shared().url());
    AnyStore::open(&url).await.expect("the server runs");
    let mut admin = sqlx::MySqlConnection::connect(&url).await.expect("it runs");
    // Without TLS, the driver sends no password to MySQL.
    let (password, user) = match mariadb::is_mysql() {
        true => ("", "writer".to_owned()),
        false => ("hush", "writer:hush".to_owned()),
    };
    let role = format!(
        "create user writer@'%' identified by '{password}';
         grant {rights} on app.tower_idempotency to writer@'%'"
    );
    let created = sqlx::raw_sql(AssertSqlSafe(role)).execute(&mut admin).await;
    created.expect("the user of the tests may create users");
    let of_mariadb = format!("mysql://{user}@{address}/app");

    for url in [of_postgres, of_mariadb] {
        let store = AnyStore::open(&url).await.expect("an up-to-date table");
        store.check().await.expect("the rights of a service");
    }
}

/// The table of an earlier version has no index of completed entries.
#[cfg(feature = "sqlite")]
#[tokio::test]
async fn tool_opens_table_without_migration() {
    use tower_idempotency::store::{CheckErrorKind, Store as _};
    use tower_idempotency_sqlx::sqlx::{self, ConnectOptions as _, sqlite::SqliteConnectOptions};

    let scratch = tests::scratch::Scratch::new();
    let path = scratch.file("keys.db");
    let url = format!("sqlite:{}", path.display());
    AnyStore::open(&url).await.expect("a new file");
    let file = SqliteConnectOptions::new().filename(&path);
    let mut connection = file.connect().await.expect("the file exists");
    let dropped = sqlx::raw_sql("drop index tower_idempotency_completed");
    let dropped = dropped.execute(&mut connection).await;
    dropped.expect("the index exists");
    let tool = OpenOptions::new().with_create_if_missing(false);
    let store = tool.open(&url).await.expect("the table exists");
    let error = store.check().await.expect_err("no index");
    assert_eq!(error.kind(), CheckErrorKind::Incomplete, "{error}");
}

#[cfg(all(unix, feature = "sqlite"))]
#[tokio::test]
async fn new_sqlite_file_is_private() {
    use std::os::unix::fs::PermissionsExt as _;

    let scratch = tests::scratch::Scratch::new();
    let path = scratch.file("keys.db");
    let store = AnyStore::open(&format!("sqlite:{}", path.display())).await;
    store.expect("a new file");
    let metadata = std::fs::metadata(&path).expect("the file exists");
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
}
