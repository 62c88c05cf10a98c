//! Requirements on a server, checked when the store connects. The eviction policy is checked again later.

use std::{
    error::Error,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::Duration,
};
#[cfg(feature = "metrics")]
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, PoisonError},
};

use redis::{ErrorKind, RedisError, RetryMethod, Value};
use tokio::time::Instant;
use tower_idempotency::store::{
    CheckError, CheckErrorKind, Claim, Fingerprint, KeyId, Store, StoreError, Token, Ttl,
};

use crate::{
    connection::Link,
    error::{ConnectError, ConnectErrorKind},
    options::Eviction,
    scripts::Scripts,
};

/// Checks the version, role and eviction policy of each node, and loads the scripts. Returns `true` if a node evicts
/// entries.
pub(crate) async fn check_server(
    link: &Link,
    deadline: Instant,
    scripts: &Scripts,
    eviction: Eviction,
) -> Result<bool, ConnectError> {
    let info = link
        .send(deadline, &redis::cmd("INFO"))
        .await
        .map_err(ConnectError::unreachable)?;
    let mut nodes = Vec::new();
    collect_texts(&info, &mut nodes);
    if nodes.is_empty() {
        return Err(unusable(
            "expected a reply to INFO that describes the server",
        ));
    }
    let mut is_evicting = false;
    for node in nodes {
        check_version_and_role(node)?;
        is_evicting |= check_eviction_policy(node, eviction)?;
    }
    for script in scripts.layer_scripts() {
        link.send(deadline, &script.load_command())
            .await
            .map_err(script_load_error)?;
    }
    Ok(is_evicting)
}

/// Repeats the checks of the connection, and acquires and releases the lease of a random key. Returns the ID of that key.
pub(crate) async fn check_store(
    store: &impl Store,
    link: &Link,
    deadline: Instant,
    scripts: &Scripts,
) -> Result<KeyId, CheckError> {
    // An operator sees the policy even if the options accept it.
    let checked = check_server(link, deadline, scripts, Eviction::Refuse).await;
    checked.map_err(|error| check_error(&error))?;
    // Shows rights on commands and keys, and that the server accepts writes.
    let probed = probe(store).await;
    probed.map_err(|error| CheckError::unreachable(&error, probe_remedy(&error)))
}

/// Returns the remedy for a call of the check that failed.
fn probe_remedy(error: &StoreError) -> &'static str {
    let Some(cause) = error.source() else {
        return RIGHTS;
    };
    let redis = cause.downcast_ref::<RedisError>();
    if redis.is_some_and(RedisError::is_io_error) {
        return REACHABLE;
    }
    let cause = cause.to_string();
    // Before Redis 7, the code of an error in a script is a part of the message. Too few replicas may have the write.
    let mut words = ["MISCONF", "NOREPLICAS", "OOM", "replicas"].into_iter();
    if words.any(|word| cause.contains(word)) {
        WRITES
    } else {
        RIGHTS
    }
}

/// Checks the reply of `scripts/rights.lua`: the names of commands that the server rejects.
pub(crate) fn check_rights(reply: Result<Value, StoreError>) -> Result<(), CheckError> {
    let reply = reply.map_err(|error| CheckError::unreachable(&error, probe_remedy(&error)))?;
    let mut names = Vec::new();
    collect_texts(&reply, &mut names);
    if names.is_empty() {
        return Ok(());
    }
    // A store with the indexes needs all of them.
    let (subject, remedy) = if names.iter().any(|name| ENTRY_COMMANDS.contains(name)) {
        ("the store needs", ENTRY_RIGHTS)
    } else if names == [COMPLETED_COMMAND] {
        ("the index of completed entries needs", COMPLETED_RIGHTS)
    } else {
        ("the indexes need", INDEX_RIGHTS)
    };
    let names = names.join(", ");
    let problem = format!("{subject} {names}, which the server rejects");
    Err(CheckError::new(CheckErrorKind::Denied, problem, remedy))
}

fn check_error(error: &ConnectError) -> CheckError {
    let remedy = match error.kind() {
        ConnectErrorKind::Address | ConnectErrorKind::Unreachable => {
            let remedy = if error.is_denied() { RIGHTS } else { REACHABLE };
            return CheckError::unreachable(error, remedy);
        }
        ConnectErrorKind::Unusable => {
            "connect to a primary of Redis 5 or later on which the user may run scripts"
        }
        ConnectErrorKind::EvictionPolicy => {
            "set maxmemory-policy to noeviction, because an evicted lease lets a request execute twice"
        }
    };
    CheckError::new(CheckErrorKind::Unsafe, error.to_string(), remedy)
}

/// Acquires and releases the lease of a random key, and returns its ID. The entry expires two seconds later if the release
/// fails.
async fn probe(store: &impl Store) -> Result<KeyId, StoreError> {
    let (first, second) = (Token::random()?, Token::random()?);
    let mut id = [0; 32];
    id[..16].copy_from_slice(first.as_bytes());
    id[16..].copy_from_slice(second.as_bytes());
    let mut claim = Claim::new(KeyId::from_bytes(id), Fingerprint::from_bytes(id))?;
    claim.lease = Ttl::from_secs(1);
    claim.orphan_retention = Ttl::from_secs(1);
    store.acquire(&claim).await?;
    store.release(&claim.lease_ref(1)).await?;
    Ok(claim.id)
}

const REACHABLE: &str =
    "check the address, the credentials and the network, and that the server runs";
const RIGHTS: &str = "permit the user to run INFO and EVALSHA, and to read and write the keys with the prefix of the store";
const WRITES: &str = "free memory, fix the snapshots of the server or connect its replicas, so that it accepts writes";
/// The commands on entries that `scripts/rights.lua` tries.
const ENTRY_COMMANDS: [&str; 3] = ["hdel", "pttl", "pexpire"];
const ENTRY_RIGHTS: &str =
    "permit the user to run these commands on the keys with the prefix of the store";
const INDEX_RIGHTS: &str = "permit the user to run these commands on a sorted set, or use `with_indexes(false)` in all processes";
/// The command that only the index of completed entries needs.
const COMPLETED_COMMAND: &str = "zrangebyscore";
const COMPLETED_RIGHTS: &str =
    "permit the user to run this command on a sorted set, or use `with_completed_index(false)`";

/// Periodic check of the eviction policy, which an operator may change while the store is in use.
pub(crate) struct EvictionWatch {
    /// Milliseconds since `started` at which the next check is due.
    next_check: AtomicU64,
    started: Instant,
    is_evicting: AtomicBool,
}

impl EvictionWatch {
    /// Returns a watch whose first check is due after `interval`.
    pub(crate) fn new(interval: Duration, is_evicting: bool) -> Self {
        #[cfg(feature = "metrics")]
        count_evicting(false, is_evicting);
        Self {
            next_check: AtomicU64::new(millis(interval)),
            started: Instant::now(),
            is_evicting: AtomicBool::new(is_evicting),
        }
    }

    /// Returns `true` if a check is due, to one caller only.
    pub(crate) fn take_due(&self, interval: Duration) -> bool {
        let now = millis(self.started.elapsed());
        let due = self.next_check.load(Relaxed);
        let next = now.saturating_add(millis(interval));
        now >= due
            && self
                .next_check
                .compare_exchange(due, next, Relaxed, Relaxed)
                .is_ok()
    }

    /// Returns `true` if the last check found a policy that evicts entries.
    pub(crate) fn is_evicting(&self) -> bool {
        self.is_evicting.load(Relaxed)
    }

    /// Reads the policy and reports a change. Keeps the last result if the server does not reply.
    pub(crate) async fn check(&self, link: &Link, deadline: Instant) {
        let Ok(info) = link.send(deadline, &redis::cmd("INFO")).await else {
            return;
        };
        let mut nodes = Vec::new();
        collect_texts(&info, &mut nodes);
        if nodes.is_empty() {
            return;
        }
        let evicting = nodes
            .into_iter()
            .find(|node| policy_of(node) != NO_EVICTION);
        let before = self.is_evicting.swap(evicting.is_some(), Relaxed);
        #[cfg(feature = "metrics")]
        count_evicting(before, evicting.is_some());
        match evicting {
            Some(node) if !before => {
                let policy = policy_of(node);
                let maxmemory = field(node, "maxmemory").unwrap_or("unknown");
                tracing::error!(
                    policy,
                    maxmemory,
                    "server has begun to evict live leases when memory is full, requests may then execute twice: \
                     set maxmemory-policy to noeviction"
                );
            }
            None if before => tracing::debug!("server no longer evicts live leases"),
            Some(_) | None => {}
        }
    }
}

#[cfg(feature = "metrics")]
impl Drop for EvictionWatch {
    fn drop(&mut self) {
        if self.is_evicting() {
            count_evicting(true, false);
        }
    }
}

/// Counts a store whose last two checks had these results, and sets the gauge to the number of stores that evict.
///
/// Also describes and sets an unchanged gauge, because the recorder may have been installed since the last check.
#[cfg(feature = "metrics")]
fn count_evicting(before: bool, is_evicting: bool) {
    // Below 0 if the second of two concurrent checks of a store arrives here first.
    static EVICTING_STORES: Mutex<i32> = Mutex::new(0);

    // The lock also orders the values of the gauge.
    let mut stores = EVICTING_STORES
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    *stores += i32::from(is_evicting) - i32::from(before);
    // A recorder is foreign code. If it panics while a store is dropped, it could end the process.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        metrics::describe_gauge!(
            "idempotency_redis_evicting",
            metrics::Unit::Count,
            "Number of Redis stores of the process whose last check found a policy that evicts entries."
        );
        metrics::gauge!("idempotency_redis_evicting").set(f64::from(*stores));
    }));
}

/// Returns the error of an acquire on a server that evicts entries.
pub(crate) fn evicting_error() -> ConnectError {
    ConnectError::new(
        ConnectErrorKind::EvictionPolicy,
        "expected maxmemory-policy noeviction, found another one since the store connected",
    )
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn policy_of(info: &str) -> &str {
    field(info, "maxmemory_policy").unwrap_or("unknown")
}

fn check_version_and_role(info: &str) -> Result<(), ConnectError> {
    let version = field(info, "redis_version").unwrap_or_default();
    let major = version
        .split('.')
        .next()
        .and_then(|it| it.parse::<u32>().ok());
    if major.is_none_or(|major| major < MIN_VERSION) {
        return Err(unusable(format!(
            "expected Redis {MIN_VERSION} or later, found version {version:?}"
        )));
    }
    match field(info, "role") {
        Some("master") | None => Ok(()),
        Some(role) => Err(unusable(format!("expected a primary, found a {role}"))),
    }
}

/// Checks that the server does not evict entries before they expire. Returns `true` if it does and the options allow that.
///
/// Every entry has a time to live, so the `volatile-*` policies evict leases too. A server that does not report its policy
/// counts as one that evicts.
fn check_eviction_policy(info: &str, eviction: Eviction) -> Result<bool, ConnectError> {
    let policy = policy_of(info);
    if policy == NO_EVICTION {
        return Ok(false);
    }
    let maxmemory = field(info, "maxmemory").unwrap_or("unknown");
    match eviction {
        Eviction::Refuse => Err(ConnectError::new(
            ConnectErrorKind::EvictionPolicy,
            format!("expected maxmemory-policy noeviction, found {policy}"),
        )),
        Eviction::Warn => {
            tracing::warn!(
                policy,
                maxmemory,
                "server may evict live leases when memory is full, requests may then execute twice: \
                 set maxmemory-policy to noeviction"
            );
            Ok(true)
        }
    }
}

/// Returns the value of the line `name:value`.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim_end)
}

/// Collects the texts in a reply to `INFO`: one text from a single server, a map of texts from a cluster.
fn collect_texts<'a>(value: &'a Value, texts: &mut Vec<&'a str>) {
    match value {
        Value::BulkString(bytes) => texts.extend(std::str::from_utf8(bytes)),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => texts.push(text),
        Value::Map(nodes) => nodes
            .iter()
            .for_each(|(_node, info)| collect_texts(info, texts)),
        Value::Array(nodes) => nodes.iter().for_each(|info| collect_texts(info, texts)),
        _ => {}
    }
}

fn unusable(message: impl Into<String>) -> ConnectError {
    ConnectError::new(ConnectErrorKind::Unusable, message)
}

/// Returns the error for a script that could not be loaded.
///
/// An error reply means that the server does not accept scripts, unless the server is temporarily busy. A missing reply
/// is no statement about scripts.
fn script_load_error(source: RedisError) -> ConnectError {
    let is_about_scripts = match source.kind() {
        ErrorKind::Server(_) => matches!(source.retry_method(), RetryMethod::NoRetry),
        // The reply of a server that is busy with a slow script has no kind of its own in the driver.
        ErrorKind::Extension => source.code() != Some("BUSY"),
        _ => false,
    };
    if is_about_scripts {
        unusable("the server does not accept scripts").with_source(source)
    } else {
        ConnectError::unreachable(source)
    }
}

const NO_EVICTION: &str = "noeviction";
/// The first major version in which a script may read the clock before it writes.
const MIN_VERSION: u32 = 5;

#[cfg(test)]
mod tests;
