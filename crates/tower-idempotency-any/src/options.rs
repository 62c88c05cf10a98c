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
/// let options = OpenOptions::new().with_create_if_missing(false);
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
    pub(crate) has_completed_index: bool,
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
            has_completed_index: false,
        }
    }

    /// Sets whether opening creates a missing file, table or index, and migrates an existing table. Default: `true`.
    ///
    /// With `false`, opening writes nothing. It returns an error for `memory` and for a missing table. Operators' programs
    /// use this: a typing error in the URL then creates no table. A wrong Redis database is no error, because it is empty.
    ///
    /// A service with `false` starts only after another program has created the table. It also starts if the table lacks a
    /// migration, and listings and completers may then fail or read the whole table. [`Store::check`] returns an error for such a
    /// table.
    ///
    /// [`Store::check`]: tower_idempotency::store::Store::check
    #[must_use]
    pub fn with_create_if_missing(mut self, creates: bool) -> Self {
        self.creates = creates;
        self
    }

    /// Sets a timeout for each call of a Redis or DynamoDB store. Default: that of the store. SQL stores have their own
    /// timeouts.
    ///
    /// Operators' programs can wait longer than a request. If a layer uses the store, also set
    /// [`with_store_timeout`](tower_idempotency::IdempotencyLayer::with_store_timeout). If the timeout is too short, each
    /// call fails.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the table of a SQL store, such as `payments.idempotency`. Default: `tower_idempotency`.
    ///
    /// SQLite has no schema before the name. The URL of DynamoDB contains its table. With the table of another service, an
    /// operator resolves keys of that service.
    #[must_use]
    pub fn with_table(mut self, name: impl Into<Box<str>>) -> Self {
        self.table = Some(name.into());
        self
    }

    /// Sets the prefix of the keys of a Redis store. Default: `idempotency:`.
    ///
    /// With another prefix than that of the service, a program of operators finds no entries, and a service executes retries
    /// of earlier requests again.
    #[must_use]
    pub fn with_prefix(mut self, prefix: impl Into<Box<str>>) -> Self {
        self.prefix = Some(prefix.into());
        self
    }

    /// Sets whether a Redis or DynamoDB store also lists completed entries. Default: `false`. The other stores always list
    /// them, and ignore this setting.
    ///
    /// With `true`, the store adds each completed entry to an index. `RedisOptions::with_completed_index` and
    /// `DynamoDbOptions::with_completed_index` document the costs. A parameter `completed-index` of the URL replaces this
    /// setting.
    ///
    /// Set it in the service and in the programs of operators. If the service does not set it, a program lists none of the
    /// entries that the service completes.
    #[must_use]
    pub fn with_completed_index(mut self, has_completed_index: bool) -> Self {
        self.has_completed_index = has_completed_index;
        self
    }

    /// Opens the store of a URL. The [crate documentation](crate) lists the URLs.
    ///
    /// # Errors
    ///
    /// [`OpenError`] if the URL or a name is invalid, or if the store cannot be used. Also if the store has no such setting,
    /// or the program is built without it.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the table may lack some of the migrations. The next call applies them.
    pub async fn open(&self, url: &str) -> Result<AnyStore, OpenError> {
        let scheme = url.split_once(':').map_or(url, |(scheme, _)| scheme);
        let is_sql = ["postgres", "postgresql", "mysql", "mariadb", "sqlite"].contains(&scheme);
        for (is_set, has_setting, expected) in [
            (
                self.table.is_some(),
                is_sql,
                "a URL of PostgreSQL, MySQL or SQLite, because a table is set",
            ),
            (
                self.prefix.is_some(),
                scheme.starts_with("redis"),
                "a URL of Redis, because a prefix is set",
            ),
        ] {
            if is_set && !has_setting {
                return Err(OpenError::url(expected));
            }
        }
        if url == "memory" && !self.creates {
            return Err(OpenError::url(
                "a store that other processes can reach, found memory",
            ));
        }
        let store = AnyStore::connect(url, self).await?;
        if !self.creates {
            check_existing(&store).await?;
        }
        Ok(store)
    }
}

/// Returns an error unless the store can be read. The error names a missing table.
async fn check_existing(store: &AnyStore) -> Result<(), OpenError> {
    let Err(error) = store.get(&KeyId::from_bytes([0; 32])).await else {
        return Ok(());
    };
    // Redis has no tables. Its check would only acquire a lease.
    if store.name() == "redis" {
        return Err(OpenError::unusable(store.name(), &error));
    }
    let unusable = |reason: &dyn fmt::Display| {
        let message = format!("cannot use the {} store: {reason}", store.name());
        OpenError::new(OpenErrorKind::Unusable, message)
    };
    match store.check().await {
        // The remedy of the check is for a program that may create the table, so another one replaces it.
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
