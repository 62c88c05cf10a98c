//! The store. Each method runs one script.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use redis::{ErrorKind, RedisError, RedisResult, ServerErrorKind, ToRedisArgs, Value};
use tokio::time::Instant;
use tower_idempotency::store::{
    Acquired, CheckError, Claim, Fingerprint, KeyId, LeaseRef, OrphanPolicy, Store, StoreError,
    Token, Ttl,
};

use crate::{
    connection::Link,
    index::{Indexes, Keys},
    notifications::Notifications,
    options::{Eviction, RedisOptions, ReplicaWait},
    scripts::{Script, ScriptForm, Scripts},
    server_check::{EvictionWatch, check_rights, check_store, evicting_error},
};

/// A store of leases and records in Redis or Valkey, for any number of processes.
///
/// Clones share their connections.
///
/// # Cancellation
///
/// A dropped call may or may not reach the server. The server executes it completely or not at all. The connection remains
/// usable. With [`with_wait`](RedisOptions::with_wait), a dropped call continues in the background until its timeout. The
/// server may still execute it after a release.
#[derive(Clone)]
pub struct RedisStore {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    /// Link for acquires, and for the queries of waiters.
    pub(crate) acquire_link: Link,
    /// Link for renewals, completions and releases, so that these never queue behind acquires.
    pub(crate) lease_link: Link,
    /// Link for calls that wait for replicas. The server executes no other call on it meanwhile.
    pub(crate) replica_link: Option<Link>,
    pub(crate) scripts: Scripts,
    /// Indexes of leases, of records that need attention, and of other records if the options add it. `None` if the options
    /// disable them.
    pub(crate) indexes: Option<Indexes>,
    /// Notifications of completions and releases. Waiters poll if there are none.
    pub(crate) notifications: Option<Notifications>,
    /// `true` if completions and releases are published.
    pub(crate) can_publish: bool,
    pub(crate) eviction_watch: EvictionWatch,
    pub(crate) options: RedisOptions,
}

impl RedisStore {
    pub(crate) fn from_inner(inner: Inner) -> Self {
        Self {
            inner: Arc::new(inner),
        }
    }

    /// Checks the server's eviction policy in the background if that is due. Returns `true` if the last check found that the
    /// server evicts entries, and the options refuse that.
    fn watch_eviction_policy(&self) -> bool {
        let Inner {
            eviction_watch: watch,
            options,
            ..
        } = &*self.inner;
        if watch.take_due(options.eviction_check) {
            let inner = Arc::clone(&self.inner);
            tokio::spawn(async move {
                let watch = &inner.eviction_watch;
                watch.check(&inner.acquire_link, inner.deadline()).await;
            });
        }
        watch.is_evicting() && options.eviction == Eviction::Refuse
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("options", &self.inner.options)
            .finish_non_exhaustive()
    }
}

impl Store for RedisStore {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        // The layer may execute a request whose acquire fails, even if it has a record. So the script still runs, and returns
        // that record.
        let grants_nothing = self.watch_eviction_policy().then_some(1_u8);
        let inner = &*self.inner;
        let (script, keys) = (&inner.scripts.acquire, inner.keys(&claim.id));
        let arguments = (
            claim.token.as_bytes(),
            claim.fingerprint.as_bytes(),
            claim.lease.as_millis(),
            claim.orphan_retention.as_millis(),
            claim.owner,
            &*claim.operation,
            claim.id.as_bytes(),
            match claim.orphans {
                OrphanPolicy::TakeOver => 1,
                OrphanPolicy::Refuse => 2,
                OrphanPolicy::Never => 0,
            },
            grants_nothing,
        );
        let (deadline, replica_deadline) = (inner.deadline(), inner.replica_deadline());
        let reply = inner
            .run_script(&inner.acquire_link, deadline, script, &keys, &arguments)
            .await?;
        let first = parse_acquire_reply(reply)?;
        // Only a granted lease waits for replicas.
        let (Acquired::Granted { .. }, Some((link, wait))) = (&first, inner.replica_wait()) else {
            return Ok(first);
        };
        // The token is the same, so the server grants the same lease again. After a failover the new primary decides.
        let replicated =
            inner.run_script_and_wait(link, replica_deadline, script, &keys, &arguments, wait);
        parse_acquire_reply(Box::pin(replicated).await?)
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let (script, keys) = (&inner.scripts.renew, inner.keys(&lease.id));
        let deadline = inner.deadline();
        let arguments = (lease.token.as_bytes(), ttl.as_millis(), lease.id.as_bytes());
        let renewed = inner.run_script(&inner.lease_link, deadline, script, &keys, &arguments);
        parse_holder_reply(&renewed.await?)
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let limit = inner.options.record_limit;
        if record.len() > limit {
            return Err(StoreError::RecordTooLarge { limit });
        }
        let (script, keys) = (&inner.scripts.complete, inner.keys(&lease.id));
        let arguments = (
            lease.token.as_bytes(),
            lease.fingerprint.as_bytes(),
            lease.generation,
            &*record,
            retention.as_millis(),
            u8::from(inner.can_publish),
            lease.id.as_bytes(),
        );
        let (deadline, replica_deadline) = (inner.deadline(), inner.replica_deadline());
        let stored = inner.run_script(&inner.lease_link, deadline, script, &keys, &arguments);
        let Some((link, wait)) = inner.replica_wait() else {
            return parse_holder_reply(&stored.await?);
        };
        // Stores the record without delay on one link. On the other link it may queue behind calls that wait for replicas,
        // and the lease could expire before its turn.
        let replicated =
            inner.run_script_and_wait(link, replica_deadline, script, &keys, &arguments, wait);
        let replicated = Box::pin(replicated);
        let (stored, replicated) = tokio::join!(stored, replicated);
        if let Ok(reply) = stored {
            parse_holder_reply(&reply)?;
        }
        parse_holder_reply(&replicated?)
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let (script, keys) = (&inner.scripts.release, inner.keys(&lease.id));
        let deadline = inner.deadline();
        let arguments = (
            lease.token.as_bytes(),
            u8::from(inner.can_publish),
            lease.id.as_bytes(),
        );
        let released = inner.run_script(&inner.lease_link, deadline, script, &keys, &arguments);
        match parse_holder_reply(&released.await?) {
            // The token does not hold the entry, so there is nothing to release.
            Err(StoreError::LeaseLost) => Ok(()),
            result => result,
        }
    }

    async fn check(&self) -> Result<(), CheckError> {
        let inner = &*self.inner;
        let (link, deadline) = (&inner.lease_link, inner.deadline());
        let id = check_store(self, link, deadline, &inner.scripts).await?;
        let (script, keys, arguments) = (&inner.scripts.rights, inner.keys(&id), (id.as_bytes(),));
        let reply = inner.run_script(link, inner.deadline(), script, &keys, &arguments);
        check_rights(reply.await)
    }

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        let change = async {
            let Some(notifications) = &self.inner.notifications else {
                return std::future::pending().await;
            };
            let key = self.inner.key(id);
            let mut subscription = notifications.subscribe(&key);
            subscription.wait_until_subscribed().await;
            // The query finds changes made before the subscription. Later changes are published to it.
            if self.inner.is_in_progress(&key).await {
                subscription.wait_for_message().await;
            }
        };
        tokio::time::timeout(timeout, change).await.ok();
    }

    fn compress_above(&self) -> usize {
        1024
    }
}

impl Inner {
    /// Returns the entry's key, which is also the channel of its waiters.
    pub(crate) fn key(&self, id: &KeyId) -> String {
        let mut key = String::with_capacity(self.options.prefix.len() + 64);
        key.push_str(&self.options.prefix);
        key.push_str(&id.to_hex());
        key
    }

    /// Returns the keys of the entry and of its indexes.
    pub(crate) fn keys(&self, id: &KeyId) -> Keys {
        let entry = self.key(id);
        let indexes = self.indexes.as_ref().map(|indexes| indexes.of(&entry));
        Keys { entry, indexes }
    }

    /// Runs a script by its hash. If the server does not have the script, sends the code once.
    ///
    /// While a slot is moved to another node of a cluster, a script runs on one key alone. The entry is then not in its
    /// index until the next renewal.
    pub(crate) async fn run_script(
        &self,
        link: &Link,
        deadline: Instant,
        script: &Script,
        keys: &Keys,
        arguments: &impl ToRedisArgs,
    ) -> Result<Value, StoreError> {
        let all = keys.all();
        let reply = match run_by_hash(link, deadline, script, &all, arguments).await {
            Err(error) if all.len() > 1 && is_slot_moving(&error) => {
                run_by_hash(link, deadline, script, &all[..1], arguments).await
            }
            reply => reply,
        };
        reply.map_err(|error| {
            // Another program has written the key. Before version 7 this is a part of the server's message.
            if error.to_string().contains("WRONGTYPE") {
                StoreError::unreadable(error)
            } else {
                StoreError::backend(error)
            }
        })
    }

    /// Runs a script and waits until enough replicas have its writes.
    ///
    /// Both commands are sent at once on one connection, because the server waits for the writes of that connection only.
    async fn run_script_and_wait(
        &self,
        link: &Link,
        deadline: Instant,
        script: &Script,
        keys: &Keys,
        arguments: &impl ToRedisArgs,
        wait: &ReplicaWait,
    ) -> Result<Value, StoreError> {
        let keys = keys.all();
        let send = |form| {
            let command = script.run_command(form, &keys, arguments);
            link.send_pair(deadline, command, wait.command())
        };
        let (reply, replicas) = match send(ScriptForm::Hash).await {
            Err(error) if is_unknown_script(&error) => send(ScriptForm::Code).await,
            replies => replies,
        }
        .map_err(StoreError::backend)?;
        match replicas {
            Value::Int(reached) if reached >= i64::from(wait.replicas) => Ok(reply),
            Value::Int(reached) => Err(StoreError::backend(format!(
                "expected the write on {} replicas, found it on {reached}",
                wait.replicas
            ))),
            _ => Err(unexpected_reply("a number of replicas")),
        }
    }

    /// Returns the link and the settings of calls that wait for replicas.
    fn replica_wait(&self) -> Option<(&Link, &ReplicaWait)> {
        self.replica_link
            .as_ref()
            .zip(self.options.replica_wait.as_ref())
    }

    /// Returns `true` if the entry is in progress, or if the query failed.
    async fn is_in_progress(&self, key: &str) -> bool {
        let script = &self.scripts.is_in_progress;
        let deadline = self.deadline();
        let keys = Keys {
            entry: key.to_owned(),
            indexes: None,
        };
        let reply = self.run_script(&self.acquire_link, deadline, script, &keys, &NO_ARGUMENTS);
        !matches!(reply.await, Ok(Value::Int(0)))
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.options.timeout
    }

    /// Returns the deadline of a call that waits for replicas.
    ///
    /// Other calls do not get that additional time: if one of them takes as long, its connection is unresponsive.
    fn replica_deadline(&self) -> Instant {
        Instant::now() + self.options.replica_call_timeout()
    }
}

/// Runs a script by its hash. If the server does not have the script, sends the code once.
pub(crate) async fn run_by_hash(
    link: &Link,
    deadline: Instant,
    script: &Script,
    keys: &[&str],
    arguments: &impl ToRedisArgs,
) -> RedisResult<Value> {
    let command = script.run_command(ScriptForm::Hash, keys, arguments);
    match link.deliver(deadline, &command, script.delivery).await {
        Err(error) if is_unknown_script(&error) => {
            let command = script.run_command(ScriptForm::Code, keys, arguments);
            link.deliver(deadline, &command, script.delivery).await
        }
        reply => reply,
    }
}

/// Parses the reply of the acquire script.
fn parse_acquire_reply(reply: Value) -> Result<Acquired, StoreError> {
    let Value::Array(parts) = reply else {
        return Err(unexpected_reply("an array"));
    };
    let mut parts = parts.into_iter();
    match (parts.next(), parts.next(), parts.next()) {
        (Some(Value::Int(GRANTED)), Some(Value::Int(generation)), None) => {
            let generation = u64::try_from(generation)
                .map_err(|_| unexpected_reply("a generation of 1 or more"))?;
            Ok(Acquired::Granted {
                generation,
                takeover: generation > 1,
            })
        }
        (Some(Value::Int(IN_PROGRESS)), Some(fingerprint), Some(Value::Int(left))) => {
            Ok(Acquired::InProgress {
                fingerprint: parse_fingerprint(fingerprint)?,
                expires_in: millis(left),
            })
        }
        (Some(Value::Int(ORPHANED)), Some(fingerprint), Some(Value::Int(since))) => {
            Ok(Acquired::Orphaned {
                fingerprint: parse_fingerprint(fingerprint)?,
                since: millis(since),
            })
        }
        (Some(Value::Int(COMPLETED)), Some(fingerprint), Some(Value::BulkString(record))) => {
            let (Some(Value::Int(left)), Some(token)) = (parts.next(), parts.next()) else {
                return Err(unexpected_reply("the expiry and the token of a record"));
            };
            Ok(Acquired::Completed {
                fingerprint: parse_fingerprint(fingerprint)?,
                record: record.into(),
                // The server rounds down. -1: a client has removed the expiry.
                expires_in: match left {
                    -1 => Ttl::MAX.as_duration(),
                    left => millis(left.max(1)),
                },
                token: parse_token(token)?,
            })
        }
        (Some(Value::Int(COMPLETED)), Some(_), Some(Value::Nil)) => {
            Err(unreadable_entry("a record"))
        }
        (Some(Value::Int(NOT_GRANTED)), None, None) => Err(StoreError::backend(evicting_error())),
        (Some(Value::Int(UNREADABLE)), None, None) => Err(unreadable_entry(OF_THIS_VERSION)),
        _ => Err(unexpected_reply("a reply of the acquire script")),
    }
}

/// Parses the reply of a script that only the lease holder may run.
fn parse_holder_reply(reply: &Value) -> Result<(), StoreError> {
    match reply {
        Value::Int(1) => Ok(()),
        Value::Int(0) => Err(StoreError::LeaseLost),
        Value::Int(-1) => Err(unreadable_entry(OF_THIS_VERSION)),
        _ => Err(unexpected_reply("1, 0 or -1")),
    }
}

fn parse_fingerprint(value: Value) -> Result<Fingerprint, StoreError> {
    let Value::BulkString(bytes) = value else {
        return Err(unreadable_entry("a fingerprint"));
    };
    let bytes = bytes
        .try_into()
        .map_err(|_| unreadable_entry("a fingerprint of 32 bytes"))?;
    Ok(Fingerprint::from_bytes(bytes))
}

fn parse_token(value: Value) -> Result<Option<Token>, StoreError> {
    let expected = "a token of 16 bytes, or none";
    match value {
        Value::Nil => Ok(None),
        Value::BulkString(bytes) => match bytes.try_into() {
            Ok(bytes) => Ok(Some(Token::from_bytes(bytes))),
            Err(_) => Err(unreadable_entry(expected)),
        },
        _ => Err(unreadable_entry(expected)),
    }
}

fn millis(value: i64) -> Duration {
    Duration::from_millis(value.max(0).unsigned_abs())
}

/// Returns an error that names the expected reply. It omits the reply itself, which may contain a record.
pub(crate) fn unexpected_reply(expected: &str) -> StoreError {
    StoreError::backend(format!("expected {expected}, found something else"))
}

/// Returns the error of an entry that exists and cannot be read. It names the expected value, and omits the value found.
fn unreadable_entry(expected: &str) -> StoreError {
    StoreError::unreadable(format!("expected {expected}, found something else"))
}

/// Returns `true` if the keys of a script are on two nodes of a cluster, because their slot is being moved.
pub(crate) fn is_slot_moving(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::TryAgain)
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

// First element of the reply of `scripts/acquire.lua`.
const UNREADABLE: i64 = 0;
const GRANTED: i64 = 1;
const IN_PROGRESS: i64 = 2;
const ORPHANED: i64 = 3;
const COMPLETED: i64 = 4;
const NOT_GRANTED: i64 = 5;
/// Expected in place of an entry that a script cannot read.
const OF_THIS_VERSION: &str = "an entry of this version";
/// Arguments of a script without arguments.
const NO_ARGUMENTS: &[&str; 0] = &[];

#[cfg(test)]
mod tests;
