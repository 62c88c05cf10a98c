//! Settings of a store.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tower_idempotency::store::MIN_RECORD_LIMIT;

use crate::clock::Clock;

/// Settings of a [`DynamoDbStore`](crate::DynamoDbStore), and the ways to create one.
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
#[must_use = "options do nothing until a store is built with them"]
pub struct DynamoDbOptions {
    pub(crate) clock: Clock,
    pub(crate) record_limit: usize,
    pub(crate) shards: u16,
    pub(crate) has_completed_index: bool,
    pub(crate) timeout: Duration,
    pub(crate) attempts: u32,
}

impl DynamoDbOptions {
    /// Creates options with the default values. Each setter documents its default.
    pub fn new() -> Self {
        Self {
            clock: Clock {
                now: Arc::new(SystemTime::now),
                is_system: true,
                skew: Duration::from_secs(2),
            },
            record_limit: 350 * 1024,
            shards: 8,
            has_completed_index: false,
            timeout: Duration::from_secs(1),
            attempts: 3,
        }
    }

    /// Sets the maximum difference between the clocks of two processes. Default: 2 s.
    ///
    /// DynamoDB has no clock that the store can use. A process compares the deadlines of other processes with its own
    /// clock. It considers a deadline as passed only after this allowance. An orphan therefore waits that much longer for
    /// its takeover. If clocks differ by more, requests execute twice. A process whose clock is ahead takes over leases
    /// that are still held. It also treats a record as expired too early, by the difference beyond the allowance.
    ///
    /// [`check`](tower_idempotency::store::Store::check) and
    /// [`resolve`](tower_idempotency::inspect::Inspect::resolve) fail with
    /// [`ClockSkew`](crate::DynamoDbErrorKind::ClockSkew) if the clock differs from that of the service by more. The service
    /// reports its time in whole seconds, so up to one second more may pass unnoticed.
    pub fn with_clock_skew(mut self, skew: Duration) -> Self {
        self.clock.skew = skew;
        self
    }

    /// Sets the clock, for tests. It is not compared with the clock of the service. Default: [`SystemTime::now`].
    pub fn with_clock(mut self, now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.clock.now = Arc::new(now);
        self.clock.is_system = false;
        self
    }

    /// Sets the maximum size of a record in bytes. The layer stores a tombstone for a larger one. Default: 350 KiB. Minimum:
    /// [`MIN_RECORD_LIMIT`].
    ///
    /// An item may have 400 KB, including attribute names. If the limit is close to that, the layer can store neither such a
    /// record nor a tombstone. The request then executes again once its lease has expired. A replay costs a write unit for
    /// each KB.
    pub fn with_record_limit(mut self, bytes: usize) -> Self {
        self.record_limit = bytes.max(MIN_RECORD_LIMIT);
        self
    }

    /// Sets the number of index partitions for entries in progress. Entries that need attention get as many, and so do
    /// completed entries if the index [has them](Self::with_completed_index). Default: 8.
    ///
    /// A partition accepts 1,000 writes per second, and a new request makes two. Eight partitions support about 4,000 new
    /// requests per second.
    ///
    /// With 0 there is no index. A new request then costs two write units less, and operators cannot
    /// [list](tower_idempotency::inspect::Inspect::list) entries. A process that lists entries needs at least as many
    /// shards as the processes that write them. Its listings omit the entries of processes without an index, including entries
    /// that need attention.
    pub fn with_index_shards(mut self, shards: u16) -> Self {
        self.shards = shards;
        self
    }

    /// Sets whether the index also has completed entries, so that operators can
    /// [list](tower_idempotency::inspect::Inspect::list) and count them. Default: `false`.
    /// [`Inspect::get`](tower_idempotency::inspect::Inspect::get) reads them in either case.
    ///
    /// With `true`, each completion costs one more write unit of the index. Each record takes about 300 bytes of the index until
    /// the service deletes its item, so the clients determine the size of the index. The partitions of completed entries are
    /// `completed#0` to `completed#7` by default. Each gets half as many writes as a partition of entries in progress.
    ///
    /// Set it in each process of the service, and in the programs of operators. Processes with and without it may share a
    /// table. Listings omit the entries that a process without it completes, and those that were completed earlier. Without an
    /// index, this setting has no effect: see [`with_index_shards`](Self::with_index_shards).
    pub fn with_completed_index(mut self, has_completed_index: bool) -> Self {
        self.has_completed_index = has_completed_index;
        self
    }

    /// Sets the timeout of a call, including retries by the SDK. Default: 1 s.
    ///
    /// If the timeout is too short, requests get 503 while calls are throttled or reconnect. If it is too long, the layer
    /// has no time to retry. All its attempts together may take twice its own [store timeout]: 4 s by default (2 x 2 s).
    ///
    /// Calls about the table and listings have the timeouts of the application's client instead. If it has none except for
    /// connecting, each of their attempts gets this timeout, and at least 10 s.
    ///
    /// Loading credentials may take longer than this, at most 10 s. Calls fail until the credentials are loaded.
    ///
    /// [store timeout]: tower_idempotency::IdempotencyLayer::with_store_timeout
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the maximum number of attempts that the SDK makes for a call, at least one. Default: 3.
    ///
    /// The SDK retries after temporary errors and throttling, within the [timeout](Self::with_timeout). A retry that finds
    /// the write of an earlier attempt recognizes its own lease or record. The layer retries calls that still fail.
    ///
    /// An acquire whose reply was lost may be applied later. So the SDK retries an acquire only after throttling, and the
    /// layer retries it otherwise.
    pub fn with_attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts.max(1);
        self
    }
}

impl Default for DynamoDbOptions {
    fn default() -> Self {
        Self::new()
    }
}
