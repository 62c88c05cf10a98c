//! Opens the store of a URL.

#[cfg(feature = "redis")]
mod redis;

use tower_idempotency::MemoryStore;
#[cfg(feature = "sqlite")]
use tower_idempotency_sqlx::{
    SqliteStore,
    sqlx::{
        self, ConnectOptions as _,
        sqlite::{SqliteConnectOptions, SqliteSynchronous},
    },
};

#[cfg(feature = "redis")]
use self::redis::{open_redis, open_redis_cluster};
use crate::{AnyStore, OpenError, OpenErrorKind, OpenOptions};

impl AnyStore {
    /// Opens the store of a URL, and creates or migrates its table. [`OpenOptions`] has other settings.
    ///
    /// The [crate documentation](crate) lists the URLs. A SQL user without the right to create tables can open a store whose
    /// table is up to date.
    ///
    /// # Errors
    ///
    /// [`OpenError`] if the URL is invalid, if the program is built without the store, or if the store cannot be used.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the table may lack some of the migrations. The next call applies them.
    pub async fn open(url: &str) -> Result<Self, OpenError> {
        OpenOptions::new().open(url).await
    }

    pub(crate) async fn connect(url: &str, options: &OpenOptions) -> Result<Self, OpenError> {
        let scheme = match url.split_once(':') {
            Some((scheme, _)) => scheme,
            None if url == "memory" => return Ok(MemoryStore::new().into()),
            // The text may be a misplaced password.
            None => return Err(unknown("a text without a scheme")),
        };
        match scheme {
            "memory" => Err(OpenError::url("memory without a colon")),
            "redis" => open_redis(url, options).await,
            "redis+cluster" => open_redis_cluster(url, "redis", options).await,
            "rediss" | "rediss+cluster" if cfg!(not(feature = "tls")) => {
                Err(not_built(scheme, "tls"))
            }
            "rediss" => open_redis(url, options).await,
            "rediss+cluster" => open_redis_cluster(url, "rediss", options).await,
            "postgres" | "postgresql" => open_postgres(url, options).await,
            "mysql" | "mariadb" => open_mysql(url, options).await,
            "sqlite" => open_sqlite(url, options).await,
            "dynamodb" => open_dynamodb(url, options).await,
            // Anything before a colon may be a password, unless it has the form of a scheme.
            scheme if is_scheme(scheme) && url.contains("://") => Err(unknown(scheme)),
            _ => Err(unknown("another text")),
        }
    }
}

fn unknown(found: &str) -> OpenError {
    OpenError::url(format_args!(
        "the URL of a store: memory, redis, redis+cluster, postgres, mysql, sqlite or dynamodb; found {found}"
    ))
}

fn not_built(scheme: &str, feature: &str) -> OpenError {
    OpenError::new(
        OpenErrorKind::NotBuilt,
        format!(
            "this program is built without the store {scheme}: build it with the feature {feature}"
        ),
    )
}

/// Returns `true` for the syntax of a scheme (RFC 3986, section 3.1).
fn is_scheme(text: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    text.bytes().all(is_part) && text.starts_with(|first: char| first.is_ascii_alphabetic())
}

#[cfg(not(feature = "redis"))]
async fn open_redis(_: &str, _: &OpenOptions) -> Result<AnyStore, OpenError> {
    Err(not_built("redis", "redis"))
}

#[cfg(not(feature = "redis"))]
async fn open_redis_cluster(_: &str, _: &str, _: &OpenOptions) -> Result<AnyStore, OpenError> {
    Err(not_built("redis", "redis"))
}

/// Defines the function that opens the store on a database server. Without the feature, the function returns an error.
macro_rules! define_open_server {
    ($open:ident, $store:ident, $feature:literal) => {
        #[cfg(feature = $feature)]
        async fn $open(url: &str, options: &OpenOptions) -> Result<AnyStore, OpenError> {
            refuse_fragment(url)?;
            refuse_split_password(url)?;
            // Parsed before the connection, because an invalid URL is an error of another kind.
            let mut store = tower_idempotency_sqlx::$store::from_url(url)
                .map_err(|error| OpenError::new(OpenErrorKind::Url, error.to_string()))?;
            if let Some(table) = &options.table {
                store = store
                    .with_table(table)
                    .map_err(|error| invalid_table(&error))?;
            }
            if options.creates {
                let migrated = store.migrate().await;
                migrated.map_err(|error| OpenError::unusable($feature, &error))?;
            }
            Ok(store.into())
        }

        #[cfg(not(feature = $feature))]
        async fn $open(_: &str, _: &OpenOptions) -> Result<AnyStore, OpenError> {
            Err(not_built($feature, $feature))
        }
    };
}

define_open_server!(open_mysql, MySqlStore, "mysql");
define_open_server!(open_postgres, PostgresStore, "postgres");

#[cfg(feature = "sqlite")]
async fn open_sqlite(url: &str, options: &OpenOptions) -> Result<AnyStore, OpenError> {
    let path = url.strip_prefix("sqlite:").unwrap_or_default();
    if path.is_empty() {
        return Err(OpenError::url("a path after sqlite:, as in sqlite:keys.db"));
    }
    // A path may have a #. After the parameters, the driver would add a fragment to the last value.
    let query = path.split_once('?').map_or("", |(_, query)| query);
    if query.contains('#') {
        return Err(OpenError::url("no # after the ? of the URL"));
    }
    let unusable = |error: &dyn std::error::Error| OpenError::unusable("sqlite", error);
    let file: SqliteConnectOptions = url
        .parse()
        .map_err(|_| OpenError::url("a URL of the form sqlite:PATH"))?;
    let file = file.synchronous(SqliteSynchronous::Full);
    let mut store = match options.creates {
        true => SqliteStore::from_url(url).map_err(|error| unusable(&error))?,
        false => SqliteStore::new(file.clone().create_if_missing(false)),
    };
    if let Some(table) = &options.table {
        store = store
            .with_table(table)
            .map_err(|error| invalid_table(&error))?;
    }
    if options.creates {
        store.migrate().await.map_err(|error| unusable(&error))?;
    } else {
        let table = options.table.as_deref().unwrap_or("tower_idempotency");
        check_sqlite_table(&file, table).await?;
    }
    Ok(store.into())
}

/// Returns an error unless the file has the table. The store itself would change the journal mode of a wrong file.
#[cfg(feature = "sqlite")]
async fn check_sqlite_table(file: &SqliteConnectOptions, table: &str) -> Result<(), OpenError> {
    let unusable = |error: sqlx::Error| OpenError::unusable("sqlite", &error);
    let missing = |what| {
        let message = format!(
            "cannot use the sqlite store: {what}, and this program creates nothing: check the path and the table"
        );
        OpenError::new(OpenErrorKind::Unusable, message)
    };
    if !file.get_filename().exists() {
        return Err(missing("the file does not exist"));
    }
    let file = file.clone().create_if_missing(false);
    let mut connection = file.connect().await.map_err(unusable)?;
    let select = "select 1 from sqlite_master where type = 'table' and name = $1";
    let found = sqlx::query(select)
        .bind(table)
        .fetch_optional(&mut connection)
        .await
        .map_err(unusable)?;
    found
        .map(drop)
        .ok_or_else(|| missing("the file has no such table"))
}

/// Returns an error if the URL has a `#`. A driver would ignore all text after it, even if that is the rest of a password.
#[cfg(any(feature = "mysql", feature = "postgres"))]
fn refuse_fragment(url: &str) -> Result<(), OpenError> {
    if url.contains('#') {
        let expected = "no # in the URL: write %23 for a # in a user name, a password or a value";
        return Err(OpenError::url(expected));
    }
    Ok(())
}

/// Returns an error if the URL has an `@` after its authority, and none in it.
///
/// A `/` or `?` in a password ends the authority. A driver would then connect to a host with the name of the user, and could log
/// the rest of the password.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "redis"))]
fn refuse_split_password(url: &str) -> Result<(), OpenError> {
    let (_, address) = url.split_once("://").unwrap_or_default();
    let end = address.find(['/', '?']).unwrap_or(address.len());
    let (authority, rest) = address.split_at(end);
    let path = rest.split('?').next().unwrap_or_default();
    let is_split = !authority.contains('@') && rest.contains('@');
    if is_split || path.contains('@') {
        let expected = "no @ after the first / or ? of the URL: \
                        write %2F for / and %3F for ? in a password, and elsewhere %40 for @";
        return Err(OpenError::url(expected));
    }
    Ok(())
}

#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
fn invalid_table(error: &tower_idempotency_sqlx::TableNameError) -> OpenError {
    OpenError::new(
        OpenErrorKind::Url,
        format!("the name of the table is invalid: {error}"),
    )
}

#[cfg(not(feature = "sqlite"))]
async fn open_sqlite(_: &str, _: &OpenOptions) -> Result<AnyStore, OpenError> {
    Err(not_built("sqlite", "sqlite"))
}

#[cfg(feature = "dynamodb")]
async fn open_dynamodb(url: &str, options: &OpenOptions) -> Result<AnyStore, OpenError> {
    use tower_idempotency_dynamodb::{DynamoDbErrorKind, DynamoDbOptions};

    if url.contains('#') {
        return Err(OpenError::url("no # in the URL of DynamoDB"));
    }
    let mut dynamodb = DynamoDbOptions::new().with_completed_index(options.has_completed_index);
    if let Some(timeout) = options.timeout {
        dynamodb = dynamodb.with_timeout(timeout);
    }
    let opened = match options.creates {
        true => dynamodb.connect(url).await,
        false => dynamodb.store_from_url(url).await,
    };
    let store = opened.map_err(|error| match error.kind() {
        DynamoDbErrorKind::Address => OpenError::new(OpenErrorKind::Url, error.to_string()),
        _ => OpenError::unusable("dynamodb", &error),
    })?;
    Ok(store.into())
}

#[cfg(not(feature = "dynamodb"))]
async fn open_dynamodb(_: &str, _: &OpenOptions) -> Result<AnyStore, OpenError> {
    Err(not_built("dynamodb", "dynamodb"))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn refusal(options: &OpenOptions, url: &str) -> String {
        let error = options.open(url).await.expect_err(url);
        assert_eq!(error.kind(), OpenErrorKind::Url, "{error}");
        error.to_string()
    }

    /// Each URL without a store, and each setting that the store does not have.
    #[tokio::test]
    async fn refused_urls_have_these_texts() {
        let options = OpenOptions::new();
        let stores = "expected the URL of a store: memory, redis, redis+cluster, postgres, mysql, sqlite or dynamodb; found";
        for (options, url, text) in [
            (
                options.clone(),
                "mongodb://app:hush@host",
                format!("{stores} mongodb"),
            ),
            (
                options.clone(),
                "hush",
                format!("{stores} a text without a scheme"),
            ),
            (
                options.clone(),
                "",
                format!("{stores} a text without a scheme"),
            ),
            (options.clone(), "hush:", format!("{stores} another text")),
            (
                options.clone(),
                "hush hush://localhost",
                format!("{stores} another text"),
            ),
            (
                options.clone(),
                "memory:",
                "expected memory without a colon".to_owned(),
            ),
            (
                options.clone().with_table("keys"),
                "memory",
                "expected a URL of PostgreSQL, MySQL or SQLite, because a table is set".to_owned(),
            ),
            (
                options.clone().with_prefix("keys:"),
                "memory",
                "expected a URL of Redis, because a prefix is set".to_owned(),
            ),
            // Another process has another memory, in which a tool finds no entry.
            (
                options.with_create_if_missing(false),
                "memory",
                "expected a store that other processes can reach, found memory".to_owned(),
            ),
        ] {
            assert_eq!(refusal(&options, url).await, text);
        }
    }

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn refused_sqlite_urls_have_these_texts() {
        let options = OpenOptions::new();
        let text = refusal(&options, "sqlite:").await;
        assert_eq!(text, "expected a path after sqlite:, as in sqlite:keys.db");
        for (url, expected) in [
            (
                "sqlite:keys.db?hush=1",
                "expected a URL of the form sqlite:PATH",
            ),
            (
                "sqlite:keys.db?mode=",
                "expected a URL of the form sqlite:PATH",
            ),
            (
                "sqlite:keys.db?mode=ro?cache=private",
                "expected a URL of the form sqlite:PATH",
            ),
            (
                "sqlite:keys.db?mode=ro#hush",
                "expected no # after the ? of the URL",
            ),
            (
                "sqlite:keys.db?#hush",
                "expected no # after the ? of the URL",
            ),
        ] {
            assert_eq!(refusal(&options, url).await, expected, "{url}");
        }
        let text = refusal(&options.clone().with_table("a b"), "sqlite:keys.db").await;
        let start = "the name of the table is invalid: expected a table name, or a schema";
        assert!(text.starts_with(start), "{text}");
        assert!(text.ends_with("found \"a b\""), "{text}");
        let tool = options.with_create_if_missing(false);
        let error = tool.open("sqlite:/absent/keys.db").await;
        let error = error.expect_err("no such file");
        assert_eq!(error.kind(), OpenErrorKind::Unusable);
        let expected = "cannot use the sqlite store: the file does not exist, and this program creates nothing: \
                        check the path and the table";
        assert_eq!(error.to_string(), expected);
    }

    #[cfg(feature = "dynamodb")]
    #[tokio::test]
    async fn refused_dynamodb_urls_have_these_texts() {
        let options = OpenOptions::new();
        let parameters =
            "expected endpoint=URL, skew=DURATION, shards=N or completed-index=BOOL after the ?";
        for (url, text) in [
            (
                "dynamodb://?endpoint=hush",
                "expected a table, as in dynamodb://TABLE?endpoint=URL",
            ),
            ("dynamodb://keys?hush=hush", parameters),
            ("dynamodb://keys?completed%2Dindex=true", parameters),
            ("dynamodb://keys?completed-index", parameters),
            (
                "dynamodb://keys?completed-index=",
                "expected true or false after completed-index=",
            ),
            (
                "dynamodb://keys?completed-index=true?skew=1s",
                "expected true or false after completed-index=",
            ),
            (
                "dynamodb://keys?completed-index=true&completed-index=hush",
                "expected true or false after completed-index=",
            ),
            (
                "dynamodb://keys#hush",
                "expected no # in the URL of DynamoDB",
            ),
            (
                "dynamodb://keys?completed-index=true#hush",
                "expected no # in the URL of DynamoDB",
            ),
            (
                "dynamodb://keys?endpoint=http://host#hush",
                "expected no # in the URL of DynamoDB",
            ),
            (
                "dynamodb://keys?endpoint=https://hush@host",
                "expected an HTTP or HTTPS URL without credentials after endpoint=",
            ),
            (
                "dynamodb://keys?completed-index=hush",
                "expected true or false after completed-index=",
            ),
        ] {
            let error = options.open(url).await.expect_err(url);
            assert_eq!(error.kind(), OpenErrorKind::Url);
            assert_eq!(error.to_string(), text);
        }
    }

    #[cfg(all(feature = "mysql", feature = "postgres", feature = "redis"))]
    #[tokio::test]
    async fn refused_server_urls_have_these_texts() {
        let options = OpenOptions::new();
        let fragment =
            "expected no # in the URL: write %23 for a # in a user name, a password or a value";
        let split = "expected no @ after the first / or ? of the URL: \
                     write %2F for / and %3F for ? in a password, and elsewhere %40 for @";
        let parameters = "expected only parameters of the driver after the ? of the URL: sslmode, sslrootcert, sslcert, sslkey, \
                          host, hostaddr, port, dbname, user, password, application_name, options or statement-cache-capacity";
        let (postgres, mysql) = (
            "expected a URL of the form postgres://USER:PASSWORD@HOST/DATABASE",
            "expected a URL of the form mysql://USER:PASSWORD@HOST/DATABASE",
        );
        let redis = "expected an address of the form redis://:PASSWORD@HOST:PORT/DB";
        for (url, text) in [
            // The driver quotes the part of the URL that it cannot read, which may be a password.
            ("redis://:hush@[::hush/0", redis),
            ("redis://:hush@127.0.0.1:1/hush", redis),
            (
                "redis+cluster://:hush@[::hush",
                "expected an address of the form redis+cluster://HOST:PORT,HOST:PORT",
            ),
            (
                "redis+cluster:hush",
                "expected nodes, as in redis+cluster://HOST:PORT,HOST:PORT",
            ),
            ("postgres://app:hush@:hush", postgres),
            ("postgres://app:hush@host:hush/app", postgres),
            ("postgres://host/app?sslmode=hush", postgres),
            ("mysql://app:hush@:hush", mysql),
            ("mysql://host/app?ssl-mode=hush", mysql),
            // The driver would ignore the parameter, and log its value.
            ("postgres://app@host/app?sslpassword=hush", parameters),
            ("postgresql://host/app?sslmode=disable&hush", parameters),
            ("postgresql://host/app?sslmode=require&hush", parameters),
            (
                "mysql://host/app?sslMode=hush",
                "expected only parameters of the driver after the ? of the URL: ssl-mode, ssl-ca, ssl-cert, ssl-key, charset, \
                 collation, statement-cache-capacity, socket or timezone",
            ),
            (
                "redis://host?db=hush",
                "expected only completed-index and protocol after the ? of the URL",
            ),
            // The drivers would connect to the host `app`, and ignore the text after the #.
            ("postgres://app:1#hush@host/app", fragment),
            ("postgresql://host/app?sslmode=require#hush", fragment),
            ("mysql://app:1#hush@host/app", fragment),
            ("mariadb://host/app#", fragment),
            // The drivers would connect to the host `app`.
            ("postgres://app:?hush@host/app", split),
            ("postgres://app:1/hush@host/app", split),
            ("postgres://app:1@2/hush@host/app", split),
            ("postgresql:///app?host=/run/hush@host", split),
            ("mysql://app:1?hush@host/app", split),
            ("mariadb://app:/hush@host/app", split),
            ("redis://app:?hush@host/0", split),
            ("redis+cluster://app:1/hush@host:1", split),
            ("redis+cluster://:hush@a:1,app:1/hush@b:2", split),
        ] {
            assert_eq!(refusal(&options, url).await, text, "{url}");
        }
    }

    #[cfg(any(feature = "mysql", feature = "postgres", feature = "redis"))]
    #[test]
    fn urls_with_whole_password_are_accepted() {
        for url in [
            "postgres://app:a%2Fb%3Fc%40d@host/app",
            "postgres://app:hush@host/app?application_name=a@b",
            "postgres:///app?host=/run/postgresql",
            "postgres://app@/app?host=/run/a@b",
            "postgres:///app?host=/run/a%40b",
            "postgres://%2Frun%2Fpostgresql/app",
            "mysql://host/app?socket=/run/mysqld.sock",
            "redis://:hush@host/0?a=b@c",
            "redis+cluster://:hush@a:1,:hush@b:2",
            "redis://host",
        ] {
            assert_eq!(refuse_split_password(url), Ok(()), "{url}");
        }
    }
}
