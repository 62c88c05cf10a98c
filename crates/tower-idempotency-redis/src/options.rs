//! Settings of a store.

use std::{sync::Arc, time::Duration};

use redis::Cmd;
use tower_idempotency::{Ttl, store::MIN_RECORD_LIMIT};

/// Settings of a [`RedisStore`](crate::RedisStore), and the ways to connect one.
///
/// `RedisStore` has no `new`: [`connect_client`](Self::connect_client) takes a client of the application, and checks the server
/// before the store grants leases.
///
/// ```no_run
/// use std::time::Duration;
/// use tower_idempotency_redis::{Eviction, RedisOptions};
///
/// # async fn f() -> Result<(), tower_idempotency_redis::ConnectError> {
/// let store = RedisOptions::new()
///     .with_prefix("payments:idempotency:")
///     .with_timeout(Duration::from_millis(500))
///     .with_eviction(Eviction::Refuse)
///     .connect("redis://127.0.0.1:6379/0")
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "options do nothing until a store connects with them"]
pub struct RedisOptions {
    pub(crate) prefix: Arc<str>,
    pub(crate) timeout: Duration,
    pub(crate) record_limit: usize,
    pub(crate) eviction: Eviction,
    pub(crate) eviction_check: Duration,
    pub(crate) replica_wait: Option<ReplicaWait>,
    pub(crate) has_indexes: bool,
    pub(crate) has_completed_index: bool,
}

/// The reaction to a server that may evict entries: its `maxmemory-policy` is not `noeviction`, or it does not report one.
///
/// Every entry has a time to live, so the `volatile-*` policies evict leases as well as the `allkeys-*` policies. If a lease
/// is evicted, a retry executes the request a second time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Eviction {
    /// Connects, and logs a warning. Logs an error if the policy changes later.
    #[default]
    Warn,
    /// Does not connect. If the policy changes later, the store grants no lease until it is `noeviction` again: the layer
    /// responds to fresh keys with 503. With [`DangerouslyExecuteUnprotected`](tower_idempotency::StoreFailure) it executes them.
    /// Records are replayed, and leases in use are renewed and completed.
    Refuse,
}

/// The `WAIT` that follows a write.
#[derive(Clone, Debug)]
pub(crate) struct ReplicaWait {
    pub(crate) replicas: u32,
    timeout: Duration,
}

impl RedisOptions {
    /// Creates options with the default values. Each setter documents its default.
    pub fn new() -> Self {
        Self {
            prefix: Arc::from("idempotency:"),
            timeout: Duration::from_secs(1),
            record_limit: 16 * 1024 * 1024,
            eviction: Eviction::Warn,
            eviction_check: Duration::from_secs(120),
            replica_wait: None,
            has_indexes: true,
            has_completed_index: false,
        }
    }

    /// Sets the prefix of all entries' keys and of their waiters' channels. Default: `idempotency:`.
    ///
    /// Two services that share a server and a prefix share an entry if namespace, principal and key are equal. A service
    /// that changes its prefix no longer finds its entries: retries of earlier requests execute again. If the prefix
    /// contains a hash tag (`{..}`), one node of a cluster stores all entries.
    pub fn with_prefix(mut self, prefix: &str) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the timeout of a call, from getting a connection to the reply. Default: 1 s.
    ///
    /// If the timeout is too short, requests get 503 while the server pauses to fork. If it is too long, the layer has no
    /// time to retry. All its attempts together may take twice its own [store timeout]: 4 s by default (2 x 2 s).
    ///
    /// [store timeout]: tower_idempotency::IdempotencyLayer::with_store_timeout
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.min(Ttl::MAX.as_duration());
        self
    }

    /// Sets the maximum size of a record in bytes. The layer stores a tombstone for a larger one. Default: 16 MiB. Minimum:
    /// [`MIN_RECORD_LIMIT`].
    ///
    /// A server transfers one record at a time, so large records delay all clients. A server rejects values above its own
    /// `proto-max-bulk-len` (512 MiB by default). If this limit is higher, the layer can store neither such a record nor a
    /// tombstone. The request then executes again once its lease has expired.
    ///
    /// So does a request whose record takes longer to transfer than the [timeout](Self::with_timeout). 16 MiB within 1 s need
    /// 134 Mbit/s. Raise the timeout together with this limit, and for a slow network.
    pub fn with_record_limit(mut self, bytes: usize) -> Self {
        self.record_limit = bytes.max(MIN_RECORD_LIMIT);
        self
    }

    /// Sets the reaction to a server that may evict entries. Default: [`Eviction::Warn`].
    pub fn with_eviction(mut self, eviction: Eviction) -> Self {
        self.eviction = eviction;
        self
    }

    /// Sets the minimum time between two checks of the server's eviction policy. Default: 2 minutes.
    ///
    /// The store checks the policy in the background, and only while it is used. Each check reads the whole `INFO` of each
    /// node, so a value of milliseconds loads the server. If the value is long, an operator who makes the server evict
    /// entries learns late that requests may be executed twice.
    pub fn with_eviction_check(mut self, interval: Duration) -> Self {
        self.eviction_check = interval;
        self
    }

    /// Sets whether the store has the indexes from which [operators](tower_idempotency::inspect) list entries. Default:
    /// `true`.
    ///
    /// The indexes are two sorted sets, or two for each slot of a cluster that is in use. They change in the scripts that
    /// change the entries, without a round trip. Without them, operators read and resolve entries by their ID alone. All
    /// processes that share a prefix need the same value. Otherwise listings miss entries.
    pub fn with_indexes(mut self, has_indexes: bool) -> Self {
        self.has_indexes = has_indexes;
        self
    }

    /// Sets whether the store also has an index of completed entries, so that [operators](tower_idempotency::inspect) can
    /// list and count them. Default: `false`. It has no effect without [indexes](Self::with_indexes).
    ///
    /// The index is one more sorted set, or one for each slot of a cluster that is in use. A completion adds a member without
    /// a round trip, and removes at most four members whose records have expired.
    ///
    /// Each stored record has a member of 135 to 150 bytes: up to 150 MB for a million records. Clients choose the number of
    /// records, and so the size. A server whose memory is sized for the records alone rejects new keys earlier.
    ///
    /// The user needs the right to run `zrangebyscore`. Without it, records are stored and not listed. The
    /// [check](tower_idempotency::store::Store::check) of the store then fails.
    ///
    /// Processes with and without this setting can share a prefix: a listing then misses the records of the processes without
    /// it. Records from before the setting, and those that were stored while their slot moved to another node, are listed
    /// after a [repair](crate::RedisStore::repair_indexes).
    ///
    /// If no process completes entries with this setting any more, the index expires within twice the longest retention of its
    /// records. This also happens when the traffic stops. The server then deletes it in one step, during which it serves no
    /// other client: 200 ms for a million members. With `lazyfree-lazy-expire yes` the server deletes it in the background.
    /// After the last process has turned the setting off, you can also delete it with `UNLINK`.
    pub fn with_completed_index(mut self, has_completed_index: bool) -> Self {
        self.has_completed_index = has_completed_index;
        self
    }

    /// Makes each granted acquire and each completion wait until `replicas` replicas have the write. Default: no waiting.
    ///
    /// The wait takes at most `timeout`, in whole milliseconds and at least one, in addition to the
    /// [timeout](Self::with_timeout) of the call. If too few replicas have the write by then, the call fails. The layer
    /// responds to an acquire with 503, and retries a completion until the lease has expired.
    ///
    /// A failover to a replica that has confirmed the writes loses no lease and no record. A failover to another replica may
    /// lose some, so wait for as many replicas as can be promoted. A primary that restarts before a failover has what its disk
    /// has, and its replicas discard the rest.
    ///
    /// Each new request costs one more round trip, and each record is sent twice. While fewer than `replicas` replicas confirm
    /// writes, new requests get 503. Calls that wait for replicas use a connection of their own, one after the other. If one of
    /// them times out, the store replaces that connection. Once the other calls on the former one have ended, it closes, and
    /// the server discards the calls that it has not executed.
    ///
    /// The timeout of the call and the wait together should be shorter than half of the [lease]. The server may execute an
    /// acquire until twice that time after its call began. The layer releases a late lease only until the lease would have
    /// expired. An acquire that is executed later blocks its key: for a lease, or with [`OrphanPolicy::Refuse`] for the orphan
    /// retention.
    ///
    /// The layer's [store timeout] should be longer than the timeout of the call and the wait together. Otherwise attempts that
    /// the layer has dropped continue in the background, and each holds a copy of its record in memory.
    ///
    /// Renewals do not wait for replicas: the new primary has the renewals that reached it. If the new primary is behind by
    /// a lease duration or more, leases that are still held may expire there. Clusters do not support this setting.
    ///
    /// [lease]: tower_idempotency::IdempotencyLayer::with_lease_ttl
    /// [`OrphanPolicy::Refuse`]: tower_idempotency::OrphanPolicy::Refuse
    /// [store timeout]: tower_idempotency::IdempotencyLayer::with_store_timeout
    pub fn with_wait(mut self, replicas: u32, timeout: Duration) -> Self {
        let timeout = timeout.min(Ttl::MAX.as_duration());
        self.replica_wait = (replicas > 0).then_some(ReplicaWait { replicas, timeout });
        self
    }

    /// Returns the timeout of a call that waits for replicas.
    pub(crate) fn replica_call_timeout(&self) -> Duration {
        self.replica_wait.as_ref().map_or(self.timeout, |wait| {
            self.timeout.saturating_add(wait.timeout)
        })
    }
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl ReplicaWait {
    /// Returns the `WAIT` command. Its timeout is at least 1 ms, because a server waits without limit if it is 0.
    pub(crate) fn command(&self) -> Cmd {
        let millis = u64::try_from(self.timeout.as_millis())
            .unwrap_or(u64::MAX)
            .max(1);
        let mut command = redis::cmd("WAIT");
        command.arg(self.replicas).arg(millis);
        command
    }
}
