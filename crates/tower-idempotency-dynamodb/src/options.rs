//! What can be set.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use aws_sdk_dynamodb::{
    Client,
    config::{IdentityCache, retry::RetryConfig, timeout::TimeoutConfig},
};

use crate::{DynamoDbStore, clock::Clock, credentials::LoadedApart, store::Inner};

/// How a [`DynamoDbStore`] uses its table.
///
/// ```no_run
/// use std::time::Duration;
/// use tower_idempotency_dynamodb::DynamoDbOptions;
///
/// # fn f(client: &tower_idempotency_dynamodb::aws_sdk_dynamodb::Client) {
/// let store = DynamoDbOptions::new()
///     .with_clock_skew(Duration::from_millis(500))
///     .with_index_shards(32)
///     .store(client, "payments-idempotency");
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "options do nothing until there is a store with them"]
pub struct DynamoDbOptions {
    pub(crate) clock: Clock,
    pub(crate) record_limit: usize,
    pub(crate) shards: u16,
    timeout: Duration,
    attempts: u32,
}

impl DynamoDbOptions {
    /// The defaults, each of which is at its setter.
    pub fn new() -> Self {
        Self {
            clock: Clock {
                now: Arc::new(SystemTime::now),
                skew: Duration::from_secs(2),
            },
            record_limit: 350 * 1024,
            shards: 8,
            timeout: Duration::from_secs(1),
            attempts: 3,
        }
    }

    /// How far the clocks of two processes may be apart. Default 2 s.
    ///
    /// DynamoDB has no clock of its own, so a process compares what another one wrote with its own time, and takes a
    /// deadline for passed only that much later. An orphan waits that much longer for its takeover. Clocks that are
    /// further apart execute requests twice: a process that is ahead takes over leases that are still held.
    pub fn with_clock_skew(mut self, skew: Duration) -> Self {
        self.clock.skew = skew;
        self
    }

    /// Where the time comes from. Default [`SystemTime::now`]; for tests.
    pub fn with_clock(mut self, now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.clock.now = Arc::new(now);
        self
    }

    /// The largest record in bytes; for a larger one the layer stores a tombstone. Default 350 KiB.
    ///
    /// An item has room for 400 KB, names and all else included: with a limit close to that, such a record is neither stored
    /// nor replaced by a tombstone, and its request is executed again once its lease is over. A replay costs a write unit
    /// for each KB.
    pub fn with_record_limit(mut self, bytes: usize) -> Self {
        self.record_limit = bytes;
        self
    }

    /// Over how many partitions of the index the entries in progress are spread, and as many for those that need attention;
    /// 0 for no listing. Default 8.
    ///
    /// A partition takes 1,000 writes a second, and a fresh request makes two: 8 are enough for some 4,000 requests a
    /// second. With 0 a fresh request costs two write units less, and [`in_progress`](DynamoDbStore::in_progress) and
    /// [`needs_attention`](DynamoDbStore::needs_attention) find nothing. Who lists has to have as many as who writes, or more.
    pub fn with_index_shards(mut self, shards: u16) -> Self {
        self.shards = shards;
        self
    }

    /// How long a call may take, repetitions by the SDK included. Default 1 s.
    ///
    /// Credentials that take longer to load, a minute at most, are loaded all the same, and calls fail meanwhile. Too short, and a call that is throttled or connects anew answers 503. Too long, and the layer has no time for a
    /// second try: it gives all tries together twice its own [store timeout], 4 s unless set.
    ///
    /// [store timeout]: tower_idempotency::IdempotencyLayer::with_store_timeout
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How often the SDK makes a call that failed in passing or was throttled, within the
    /// [timeout](Self::with_timeout). Default 3 times, at least once.
    ///
    /// A repetition that meets its own write finds its own lease, or its own record. The layer repeats what still
    /// fails.
    pub fn with_attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts.max(1);
        self
    }

    /// The store, with a client of the application: its credentials, region and endpoint. Asks nobody yet.
    pub fn store(self, client: &Client, table: impl Into<String>) -> DynamoDbStore {
        let retries = RetryConfig::standard()
            .with_max_attempts(self.attempts)
            .with_initial_backoff(Duration::from_millis(25))
            .with_max_backoff(Duration::from_millis(250));
        let theirs = client.config().timeout_config().cloned();
        let timeouts = theirs
            .map_or_else(TimeoutConfig::builder, |it| it.to_builder())
            .operation_timeout(self.timeout)
            .build();
        let credentials = client.config().identity_cache();
        let credentials = credentials.unwrap_or_else(|| IdentityCache::lazy().build());
        let config = client.config().to_builder();
        let config = config.retry_config(retries).timeout_config(timeouts);
        let config = config.identity_cache(LoadedApart::new(credentials));
        DynamoDbStore::with(Inner {
            client: Client::from_conf(config.build()),
            theirs: client.clone(),
            table: table.into(),
            options: self,
        })
    }
}

impl Default for DynamoDbOptions {
    fn default() -> Self {
        Self::new()
    }
}
