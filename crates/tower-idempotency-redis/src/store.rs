//! The store: five methods, a script each.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use redis::{ErrorKind, RedisError, ServerErrorKind, ToRedisArgs, Value};
use tokio::time::{Instant, timeout};
use tower_idempotency::store::{
    Acquired, Claim, Fingerprint, KeyId, LeaseRef, OrphanPolicy, Store, StoreError, Ttl,
};

use crate::{
    ConnectError, RedisOptions,
    link::Link,
    listen::Listener,
    options::Wait,
    scripts::{By, Script, Scripts},
};

/// Leases and records in Redis or Valkey, for any number of processes.
///
/// Clones share their connections.
///
/// # Cancellation
///
/// A call that is dropped may or may not reach the server, where it happens as a whole or not at all. The connection
/// stays usable.
#[derive(Clone)]
pub struct RedisStore {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    /// For acquires, and for the looks of waiters.
    pub(crate) asking: Link,
    /// For renewals, completions and releases: they never queue behind acquires.
    pub(crate) keeping: Link,
    /// For what waits for replicas, if anything does: the server answers nothing else there meanwhile.
    pub(crate) waiting: Option<Link>,
    pub(crate) scripts: Scripts,
    /// Hears of completions and releases; without it waiters poll.
    pub(crate) listener: Option<Listener>,
    /// Whether completions and releases are published.
    pub(crate) publishes: bool,
    pub(crate) options: RedisOptions,
}

impl RedisStore {
    /// Connects to a server, as in `redis://:password@host:6379/0`, with the default [`RedisOptions`].
    ///
    /// With the feature `tls` also `rediss://`. Does what [`RedisOptions::connect`] does.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] when the URL is not one, or the server cannot be reached or cannot be used.
    ///
    /// # Cancellation
    ///
    /// Nothing is left behind: connections that were made are closed.
    pub async fn connect(url: &str) -> Result<Self, ConnectError> {
        RedisOptions::new().connect(url).await
    }

    pub(crate) fn new(inner: Inner) -> Self {
        Self {
            inner: Arc::new(inner),
        }
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
    const COMPRESS_ABOVE: usize = 1024;

    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let inner = &*self.inner;
        let (script, key) = (&inner.scripts.acquire, inner.key(&claim.id));
        let arguments = (
            claim.token.as_bytes(),
            claim.fingerprint.as_bytes(),
            claim.lease.as_millis(),
            claim.orphan_retention.as_millis(),
            u8::from(claim.orphans == OrphanPolicy::TakeOver),
            claim.owner,
            &*claim.operation,
        );
        let waited_by = inner.waited_by();
        let answer = inner
            .run(&inner.asking, inner.deadline(), script, &key, &arguments)
            .await?;
        let first = acquired(answer)?;
        // What is refused or replayed waits for nobody.
        let (Acquired::Granted { .. }, Some((link, wait))) = (&first, inner.waiting()) else {
            return Ok(first);
        };
        // Under the same token: granted again, as it was. Unless the server is another one by now, and has its own answer.
        let waited = inner.run_and_wait(link, waited_by, script, &key, &arguments, wait);
        acquired(Box::pin(waited).await?)
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let (script, key) = (&inner.scripts.renew, inner.key(&lease.id));
        let arguments = (lease.token.as_bytes(), ttl.as_millis());
        held(
            &inner
                .run(&inner.keeping, inner.deadline(), script, &key, &arguments)
                .await?,
        )
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
        let (script, key) = (&inner.scripts.complete, inner.key(&lease.id));
        let arguments = (
            lease.token.as_bytes(),
            lease.fingerprint.as_bytes(),
            lease.generation,
            &*record,
            retention.as_millis(),
            u8::from(inner.publishes),
        );
        let waited_by = inner.waited_by();
        let stored = inner.run(&inner.keeping, inner.deadline(), script, &key, &arguments);
        let Some((link, wait)) = inner.waiting() else {
            return held(&stored.await?);
        };
        // Stored at once, however many wait on the other connection before it: its lease would be over by then.
        let waited = inner.run_and_wait(link, waited_by, script, &key, &arguments, wait);
        let waited = Box::pin(waited);
        let (stored, waited) = tokio::join!(stored, waited);
        if let Ok(answer) = stored {
            held(&answer)?;
        }
        held(&waited?)
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let inner = &*self.inner;
        let (script, key) = (&inner.scripts.release, inner.key(&lease.id));
        let arguments = (lease.token.as_bytes(), u8::from(inner.publishes));
        let answer = inner
            .run(&inner.keeping, inner.deadline(), script, &key, &arguments)
            .await?;
        match held(&answer) {
            // What the token does not hold is not its to free.
            Err(StoreError::LeaseLost) => Ok(()),
            released => released,
        }
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        let wake = async {
            let Some(listener) = &self.inner.listener else {
                return std::future::pending().await;
            };
            let key = self.inner.key(id);
            let mut listening = listener.listen(&key);
            listening.ready().await;
            // What was published before we listened is found by looking; what is published after is heard.
            if self.inner.in_progress(&key).await {
                listening.heard().await;
            }
        };
        timeout(within, wake).await.ok();
    }
}

impl Inner {
    /// The entry's key, and the channel its waiters listen to.
    fn key(&self, id: &KeyId) -> String {
        let mut key = String::with_capacity(self.options.prefix.len() + 64);
        key.push_str(&self.options.prefix);
        for byte in id.as_bytes() {
            for digit in [byte >> 4, byte & 15] {
                key.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
            }
        }
        key
    }

    /// Runs a script; a server that does not know it is sent it, once.
    async fn run(
        &self,
        link: &Link,
        deadline: Instant,
        script: &Script,
        key: &str,
        arguments: &impl ToRedisArgs,
    ) -> Result<Value, StoreError> {
        match link
            .send(deadline, &script.call(By::Sha, key, arguments))
            .await
        {
            Err(error) if is_unknown_script(&error) => {
                link.send(deadline, &script.call(By::Code, key, arguments))
                    .await
            }
            answer => answer,
        }
        .map_err(StoreError::backend)
    }

    /// Runs a script and waits until enough replicas have what it wrote. Both go out at once and on one connection: the
    /// server waits for what this very connection wrote.
    async fn run_and_wait(
        &self,
        link: &Link,
        deadline: Instant,
        script: &Script,
        key: &str,
        arguments: &impl ToRedisArgs,
        wait: &Wait,
    ) -> Result<Value, StoreError> {
        let waiting = wait.command();
        let call = script.call(By::Sha, key, arguments);
        let (answer, replicas) = match link.send_both(deadline, &call, &waiting).await {
            Err(error) if is_unknown_script(&error) => {
                let call = script.call(By::Code, key, arguments);
                link.send_both(deadline, &call, &waiting).await
            }
            answers => answers,
        }
        .map_err(StoreError::backend)?;
        match replicas {
            Value::Int(reached) if reached >= i64::from(wait.replicas) => Ok(answer),
            Value::Int(reached) => Err(StoreError::backend(format!(
                "expected the write on {} replicas, found it on {reached}",
                wait.replicas
            ))),
            _ => Err(unexpected("a number of replicas")),
        }
    }

    /// What is waited for, and where.
    fn waiting(&self) -> Option<(&Link, &Wait)> {
        self.waiting.as_ref().zip(self.options.wait.as_ref())
    }

    /// Whether the entry is in progress; true when the server does not say.
    async fn in_progress(&self, key: &str) -> bool {
        let script = &self.scripts.look;
        let look = self.run(&self.asking, self.deadline(), script, key, &NOTHING);
        !matches!(look.await, Ok(Value::Int(0)))
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.options.timeout
    }

    /// Of what waits for replicas. The time for that is no other call's: one that takes as long has found a silent connection.
    fn waited_by(&self) -> Instant {
        Instant::now() + self.options.call_limit()
    }
}

/// What the script for acquires answered.
fn acquired(answer: Value) -> Result<Acquired, StoreError> {
    let Value::Array(parts) = answer else {
        return Err(unexpected("an array"));
    };
    let mut parts = parts.into_iter();
    match (parts.next(), parts.next(), parts.next()) {
        (Some(Value::Int(GRANTED)), Some(Value::Int(generation)), None) => {
            let generation =
                u64::try_from(generation).map_err(|_| unexpected("a generation of 1 or more"))?;
            Ok(Acquired::Granted {
                generation,
                takeover: generation > 1,
            })
        }
        (Some(Value::Int(IN_PROGRESS)), Some(owner), Some(Value::Int(left))) => {
            Ok(Acquired::InProgress {
                fingerprint: fingerprint(owner)?,
                expires_in: millis(left),
            })
        }
        (Some(Value::Int(ORPHANED)), Some(owner), Some(Value::Int(since))) => {
            Ok(Acquired::Orphaned {
                fingerprint: fingerprint(owner)?,
                since: millis(since),
            })
        }
        (Some(Value::Int(COMPLETED)), Some(owner), Some(Value::BulkString(record))) => {
            Ok(Acquired::Completed {
                fingerprint: fingerprint(owner)?,
                record: record.into(),
            })
        }
        (Some(Value::Int(NEWER)), None, None) => Err(newer()),
        _ => Err(unexpected("an answer of the script for acquires")),
    }
}

/// What a script answered that only the holder of a token may run.
fn held(answer: &Value) -> Result<(), StoreError> {
    match answer {
        Value::Int(1) => Ok(()),
        Value::Int(0) => Err(StoreError::LeaseLost),
        Value::Int(-1) => Err(newer()),
        _ => Err(unexpected("1, 0 or -1")),
    }
}

fn fingerprint(value: Value) -> Result<Fingerprint, StoreError> {
    let Value::BulkString(bytes) = value else {
        return Err(unexpected("a fingerprint"));
    };
    let bytes = bytes
        .try_into()
        .map_err(|_| unexpected("a fingerprint of 32 bytes"))?;
    Ok(Fingerprint::from_bytes(bytes))
}

fn millis(value: i64) -> Duration {
    Duration::from_millis(value.max(0).unsigned_abs())
}

/// Says what was expected and not what was found, which may be a record.
fn unexpected(expected: &str) -> StoreError {
    StoreError::backend(format!("expected {expected}, found something else"))
}

fn newer() -> StoreError {
    StoreError::backend("expected an entry of this version, found one of a newer version")
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

// As in `scripts/acquire.lua`.
const NEWER: i64 = 0;
const GRANTED: i64 = 1;
const IN_PROGRESS: i64 = 2;
const ORPHANED: i64 = 3;
const COMPLETED: i64 = 4;
/// No arguments.
const NOTHING: &[&str; 0] = &[];
