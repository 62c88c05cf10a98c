//! Opens the store of a URL.

use std::time::Duration;

use tower_idempotency::MemoryStore;

use crate::{AnyStore, OpenError, OpenErrorKind};

impl AnyStore {
    /// Opens the store of a URL, and creates or migrates its table.
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
    /// If the future is dropped, each migration was applied as a whole or not at all.
    pub async fn open(url: &str) -> Result<Self, OpenError> {
        Self::open_within(url, None).await
    }

    /// Opens the store like [`open`](Self::open), with a timeout for each call of a Redis or DynamoDB store. SQL stores have
    /// timeouts of their own.
    ///
    /// Intended for programs of operators, which may wait for longer than a request. In a layer, set the timeout with
    /// [`with_store_timeout`](tower_idempotency::IdempotencyLayer::with_store_timeout) too. With a timeout that is too short, each
    /// call fails.
    ///
    /// # Errors
    ///
    /// Like [`open`](Self::open).
    ///
    /// # Cancellation
    ///
    /// Like [`open`](Self::open).
    pub async fn open_with_timeout(url: &str, timeout: Duration) -> Result<Self, OpenError> {
        Self::open_within(url, Some(timeout)).await
    }

    async fn open_within(url: &str, timeout: Option<Duration>) -> Result<Self, OpenError> {
        let scheme = match url.split_once(':') {
            Some((scheme, _)) => scheme,
            None if url == "memory" => return Ok(MemoryStore::new().into()),
            // It may be a password that the user put in the wrong place.
            None => return Err(unknown("a text without a scheme")),
        };
        match scheme {
            "memory" => Err(OpenError::url("memory without a colon")),
            "redis" => open_redis(url, timeout).await,
            "redis+cluster" => open_redis_cluster(url, "redis", timeout).await,
            "rediss" | "rediss+cluster" if cfg!(not(feature = "tls")) => {
                Err(not_built(scheme, "tls"))
            }
            "rediss" => open_redis(url, timeout).await,
            "rediss+cluster" => open_redis_cluster(url, "rediss", timeout).await,
            "postgres" | "postgresql" => open_postgres(url).await,
            "mysql" | "mariadb" => open_mysql(url).await,
            "sqlite" => open_sqlite(url).await,
            "dynamodb" => open_dynamodb(url, timeout).await,
            // Anything before a colon may be a password, unless it has the form of a scheme.
            scheme if is_scheme(scheme) && url.contains("://") => Err(unknown(scheme)),
            _ => Err(unknown("another text")),
        }
    }
}

fn unknown(found: &str) -> OpenError {
    OpenError::url(format_args!(
        "a store of memory, redis, redis+cluster, postgres, mysql, sqlite or dynamodb, found {found}"
    ))
}

fn not_built(scheme: &str, feature: &str) -> OpenError {
    OpenError::new(
        OpenErrorKind::NotBuilt,
        format!(
            "the store {scheme} is not built into this program: it needs the feature {feature}"
        ),
    )
}

/// Returns `true` for the syntax of a scheme (RFC 3986, section 3.1).
fn is_scheme(text: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    text.bytes().all(is_part) && text.starts_with(|first: char| first.is_ascii_alphabetic())
}

#[cfg(feature = "redis")]
async fn open_redis(url: &str, timeout: Option<Duration>) -> Result<AnyStore, OpenError> {
    let connected = redis_options(timeout).connect(url).await;
    let form = "redis://:PASSWORD@HOST:PORT/DB";
    Ok(connected.map_err(|error| redis_error(&error, form))?.into())
}

/// Connects to a cluster. The URL is `redis+cluster://HOST:PORT,HOST:PORT`, and `scheme` that of the nodes.
#[cfg(feature = "redis")]
async fn open_redis_cluster(
    url: &str,
    scheme: &str,
    timeout: Option<Duration>,
) -> Result<AnyStore, OpenError> {
    let Some((_, nodes)) = url.split_once("://") else {
        return Err(OpenError::url(
            "nodes, as in redis+cluster://HOST:PORT,HOST:PORT",
        ));
    };
    let nodes = nodes.split(',').map(|node| format!("{scheme}://{node}"));
    let connected = redis_options(timeout).connect_cluster(nodes).await;
    let form = "redis+cluster://HOST:PORT,HOST:PORT";
    Ok(connected.map_err(|error| redis_error(&error, form))?.into())
}

#[cfg(feature = "redis")]
fn redis_options(timeout: Option<Duration>) -> tower_idempotency_redis::RedisOptions {
    let options = tower_idempotency_redis::RedisOptions::new();
    match timeout {
        Some(timeout) => options.with_timeout(timeout),
        None => options,
    }
}

/// Returns the error of a store that did not connect. The source of an invalid address may quote the address.
#[cfg(feature = "redis")]
fn redis_error(error: &tower_idempotency_redis::ConnectError, form: &str) -> OpenError {
    use tower_idempotency_redis::ConnectErrorKind;
    match error.kind() {
        ConnectErrorKind::Address => OpenError::url(format_args!("an address of the form {form}")),
        _ => OpenError::unusable("redis", error),
    }
}

#[cfg(not(feature = "redis"))]
async fn open_redis(_: &str, _: Option<Duration>) -> Result<AnyStore, OpenError> {
    Err(not_built("redis", "redis"))
}

#[cfg(not(feature = "redis"))]
async fn open_redis_cluster(_: &str, _: &str, _: Option<Duration>) -> Result<AnyStore, OpenError> {
    Err(not_built("redis", "redis"))
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: &str) -> Result<AnyStore, OpenError> {
    // Apart from the connection: an invalid URL is an error of another kind.
    let form = "a URL of the form postgres://USER:PASSWORD@HOST/DATABASE";
    let store =
        tower_idempotency_sqlx::PostgresStore::from_url(url).map_err(|_| OpenError::url(form))?;
    let migrated = store.migrate().await;
    migrated.map_err(|error| OpenError::unusable("postgres", &error))?;
    Ok(store.into())
}

#[cfg(not(feature = "postgres"))]
async fn open_postgres(_: &str) -> Result<AnyStore, OpenError> {
    Err(not_built("postgres", "postgres"))
}

#[cfg(feature = "mysql")]
async fn open_mysql(url: &str) -> Result<AnyStore, OpenError> {
    // Apart from the connection: an invalid URL is an error of another kind.
    let form = "a URL of the form mysql://USER:PASSWORD@HOST/DATABASE";
    let store =
        tower_idempotency_sqlx::MySqlStore::from_url(url).map_err(|_| OpenError::url(form))?;
    let migrated = store.migrate().await;
    migrated.map_err(|error| OpenError::unusable("mysql", &error))?;
    Ok(store.into())
}

#[cfg(not(feature = "mysql"))]
async fn open_mysql(_: &str) -> Result<AnyStore, OpenError> {
    Err(not_built("mysql", "mysql"))
}

#[cfg(feature = "sqlite")]
async fn open_sqlite(url: &str) -> Result<AnyStore, OpenError> {
    let path = url.strip_prefix("sqlite:").unwrap_or_default();
    if path.is_empty() {
        return Err(OpenError::url("a path after sqlite:, as in sqlite:keys.db"));
    }
    let connected = tower_idempotency_sqlx::SqliteStore::connect(url).await;
    let store = connected.map_err(|error| OpenError::unusable("sqlite", &error))?;
    Ok(store.into())
}

#[cfg(not(feature = "sqlite"))]
async fn open_sqlite(_: &str) -> Result<AnyStore, OpenError> {
    Err(not_built("sqlite", "sqlite"))
}

#[cfg(feature = "dynamodb")]
async fn open_dynamodb(url: &str, timeout: Option<Duration>) -> Result<AnyStore, OpenError> {
    crate::dynamodb::open(url, timeout)
        .await
        .map(AnyStore::from)
}

#[cfg(not(feature = "dynamodb"))]
async fn open_dynamodb(_: &str, _: Option<Duration>) -> Result<AnyStore, OpenError> {
    Err(not_built("dynamodb", "dynamodb"))
}
