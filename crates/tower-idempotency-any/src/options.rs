//! Settings for opening a store.

use std::{fmt, time::Duration};

use tower_idempotency::{
    inspect::Inspect as _,
    store::{CheckErrorKind, KeyId, Store as _},
};

use crate::{AnyStore, OpenError, OpenErrorKind};

/// Settings for opening the store of a URL.
///
/// ```
/// use tower_idempotency_any::OpenOptions;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// # #[cfg(feature = "sqlite")] {
/// // A tool for operators: a typing error in the URL must not create a table.
/// let options = OpenOptions::new().with_creation(false);
/// let error = options.open("sqlite:/no/such/file.db").await.unwrap_err();
/// assert!(error.to_string().starts_with("cannot use the sqlite store: "));
/// # }
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct OpenOptions {
    pub(crate) timeout: Option<Duration>,
    pub(crate) creates: bool,
    pub(crate) table: Option<Box<str>>,
    pub(crate) prefix: Option<Box<str>>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenOptions {
    /// Creates options that create or migrate the table of the store, like [`AnyStore::open`].
    #[must_use]
    pub fn new() -> Self {
        Self {
            timeout: None,
            creates: true,
            table: None,
            prefix: None,
        }
    }

    /// Sets whether opening creates a file, a table and its indexes, and migrates them. Default: `true`.
    ///
    /// With `false`, `memory` and a store without its table are errors, and opening writes nothing. Intended for programs of operators, which
    /// must not create a table in a wrong database. Redis has no tables: a wrong database of Redis is empty, and no error. If a
    /// service sets `false`, it does not start before another program has created or migrated the table.
    #[must_use]
    pub fn with_creation(mut self, creates: bool) -> Self {
        self.creates = creates;
        self
    }

    /// Sets a timeout for each call of a Redis or DynamoDB store. Default: that of the store. SQL stores have timeouts of their
    /// own.
    ///
    /// Intended for programs of operators, which can wait longer than a request. If a layer uses the store, also set
    /// [`with_store_timeout`](tower_idempotency::IdempotencyLayer::with_store_timeout). If the timeout is too short, each call
    /// fails.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the table of a SQL store, such as `payments.idempotency`. Default: `tower_idempotency`.
    ///
    /// SQLite has no schema before the name. The URL of DynamoDB contains its table. With the table of another service, an operator
    /// resolves keys of that service.
    #[must_use]
    pub fn with_table(mut self, name: impl Into<Box<str>>) -> Self {
        self.table = Some(name.into());
        self
    }

    /// Sets the prefix of the keys of a Redis store. Default: `idempotency:`.
    ///
    /// With another prefix than that of the service, a program of operators finds no entries, and a service executes retries of
    /// earlier requests again.
    #[must_use]
    pub fn with_prefix(mut self, prefix: impl Into<Box<str>>) -> Self {
        self.prefix = Some(prefix.into());
        self
    }

    /// Opens the store of a URL. The [crate documentation](crate) lists the URLs.
    ///
    /// # Errors
    ///
    /// [`OpenError`] if the URL or a name is invalid, if the store has no such setting, if the program is built without the store, or
    /// if the store cannot be used.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, each migration was applied as a whole or not at all.
    pub async fn open(&self, url: &str) -> Result<AnyStore, OpenError> {
        let scheme = url.split_once(':').map_or(url, |(scheme, _)| scheme);
        let is_sql = ["postgres", "postgresql", "mysql", "mariadb", "sqlite"].contains(&scheme);
        for (is_set, setting, has_setting) in [
            (self.table.is_some(), "table", is_sql),
            (self.prefix.is_some(), "prefix", scheme.starts_with("redis")),
        ] {
            if is_set && !has_setting {
                return Err(OpenError::url(format_args!(
                    "no {setting}, because the store of this URL has no such setting"
                )));
            }
        }
        if url == "memory" && !self.creates {
            return Err(OpenError::url(
                "a store that several processes reach, found memory, which only its own process reaches",
            ));
        }
        let store = AnyStore::connect(url, self).await?;
        if !self.creates {
            check_existing(&store).await?;
        }
        Ok(store)
    }
}

/// Returns an error unless the store can be read. A store without its table gets an error that says so.
async fn check_existing(store: &AnyStore) -> Result<(), OpenError> {
    let Err(error) = store.get(&KeyId::from_bytes([0; 32])).await else {
        return Ok(());
    };
    // Redis has no tables, and its check acquires a lease.
    if store.name() == "redis" {
        return Err(OpenError::unusable(store.name(), &error));
    }
    let unusable = |reason: &dyn fmt::Display| {
        let message = format!("cannot use the {} store: {reason}", store.name());
        OpenError::new(OpenErrorKind::Unusable, message)
    };
    match store.check().await {
        // The remedy is for programs that create tables.
        Err(check) if check.kind() == CheckErrorKind::Incomplete => {
            let problem = check.to_string();
            let problem = problem
                .trim_end_matches(check.remedy())
                .trim_end_matches(": ");
            Err(unusable(&format_args!(
                "{problem}, and this program creates nothing: check the database and the table, or start the service, which creates and migrates it"
            )))
        }
        _ => Err(OpenError::unusable(store.name(), &error)),
    }
}
