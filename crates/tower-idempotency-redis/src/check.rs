//! What a server must be like, looked at once when the store connects.

use redis::{ErrorKind, RedisError, RetryMethod, Value};
use tokio::time::Instant;

use crate::{ConnectError, ConnectErrorKind, Eviction, link::Link, scripts::Scripts};

/// Looks at the server's version, role and eviction policy, and teaches it the scripts.
pub(crate) async fn check(
    link: &Link,
    deadline: Instant,
    scripts: &Scripts,
    eviction: Eviction,
) -> Result<(), ConnectError> {
    let info = link
        .send(deadline, &redis::cmd("INFO"))
        .await
        .map_err(ConnectError::unreachable)?;
    let mut nodes = Vec::new();
    texts(&info, &mut nodes);
    if nodes.is_empty() {
        return Err(unusable("expected the server to describe itself"));
    }
    for node in nodes {
        usable(node)?;
        keeps_leases(node, eviction)?;
    }
    for script in scripts.all() {
        link.send(deadline, &script.load())
            .await
            .map_err(no_scripts)?;
    }
    Ok(())
}

fn usable(info: &str) -> Result<(), ConnectError> {
    let version = field(info, "redis_version").unwrap_or_default();
    let major = version
        .split('.')
        .next()
        .and_then(|it| it.parse::<u32>().ok());
    if major.is_none_or(|major| major < OLDEST) {
        return Err(unusable(format!(
            "expected Redis {OLDEST} or later, found version {version:?}"
        )));
    }
    match field(info, "role") {
        Some("master") | None => Ok(()),
        Some(role) => Err(unusable(format!("expected a primary, found a {role}"))),
    }
}

/// Whether it may evict an entry before its time. Every entry has one, so `volatile-*` evicts leases too. So may a server that
/// does not say what it does.
fn keeps_leases(info: &str, eviction: Eviction) -> Result<(), ConnectError> {
    let policy = field(info, "maxmemory_policy").unwrap_or("unknown");
    if policy == "noeviction" {
        return Ok(());
    }
    let maxmemory = field(info, "maxmemory").unwrap_or("unknown");
    match eviction {
        Eviction::Refuse => Err(ConnectError::new(
            ConnectErrorKind::Evicts,
            format!("expected maxmemory-policy noeviction, found {policy}"),
        )),
        Eviction::Warn => {
            tracing::warn!(
                policy,
                maxmemory,
                "this server may evict live leases when its memory is full, and then requests are executed twice: \
                 set maxmemory-policy to noeviction"
            );
            Ok(())
        }
    }
}

/// The value of a line `name:value`.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .map(str::trim_end)
}

/// What each node said: one text of one server, a map of them of a cluster.
fn texts<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::BulkString(bytes) => found.extend(std::str::from_utf8(bytes)),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => found.push(text),
        Value::Map(nodes) => nodes.iter().for_each(|(_node, info)| texts(info, found)),
        Value::Array(nodes) => nodes.iter().for_each(|info| texts(info, found)),
        _ => {}
    }
}

fn unusable(message: impl Into<String>) -> ConnectError {
    ConnectError::new(ConnectErrorKind::Unusable, message)
}

/// What the server says is about scripts, unless it takes nothing for now; that it says nothing is not.
fn no_scripts(source: RedisError) -> ConnectError {
    let is_refusal = match source.kind() {
        ErrorKind::Server(_) => matches!(source.retry_method(), RetryMethod::NoRetry),
        // A script that runs for too long has no kind of its own.
        ErrorKind::Extension => source.code() != Some("BUSY"),
        _ => false,
    };
    if is_refusal {
        unusable("the server does not take scripts").because(source)
    } else {
        ConnectError::unreachable(source)
    }
}

/// From here on a script may read the clock before it writes.
const OLDEST: u32 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_usable_from_version_5_on_and_as_a_primary() {
        assert!(usable("# Server\r\nredis_version:5.0.0\r\nrole:master\r\n").is_ok());
        assert!(usable("redis_version:10.2.1\r\n").is_ok());
        for (info, said) in [
            (
                "redis_version:4.0.14\r\nrole:master\r\n",
                "found version \"4.0.14\"",
            ),
            ("server:something else\r\n", "found version \"\""),
            ("redis_version:7.0.15\r\nrole:slave\r\n", "found a slave"),
        ] {
            let error = usable(info).expect_err(info);
            assert_eq!(error.kind(), ConnectErrorKind::Unusable);
            assert!(error.to_string().ends_with(said), "{error}");
        }
    }

    /// Valkey names the version of Redis that it can stand in for.
    #[test]
    fn valkey_is_usable() {
        let info =
            "redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.0.1\r\nrole:master\r\n";
        assert!(usable(info).is_ok());
    }

    #[test]
    fn each_node_of_a_cluster_is_looked_at() {
        let text = |text: &str| Value::BulkString(text.into());
        let nodes = Value::Map(vec![
            (text("127.0.0.1:1"), text("a")),
            (text("127.0.0.1:2"), text("b")),
        ]);
        let mut found = Vec::new();
        texts(&nodes, &mut found);
        assert_eq!(found, ["a", "b"]);
    }

    #[test]
    fn every_policy_but_one_evicts_leases() {
        for policy in [
            "allkeys-lru",
            "allkeys-random",
            "volatile-ttl",
            "volatile-lfu",
        ] {
            let info = format!("maxmemory:0\r\nmaxmemory_policy:{policy}\r\n");
            let error = keeps_leases(&info, Eviction::Refuse).expect_err(policy);
            assert_eq!(error.kind(), ConnectErrorKind::Evicts);
            assert!(error.to_string().ends_with(policy), "{error}");
        }
        let info = "maxmemory_policy:noeviction\r\n";
        assert!(keeps_leases(info, Eviction::Refuse).is_ok());
    }

    #[test]
    fn who_does_not_say_its_policy_is_taken_for_one_that_evicts() {
        let info = "maxmemory:0\r\n";
        let error = keeps_leases(info, Eviction::Refuse).expect_err(info);
        assert_eq!(error.kind(), ConnectErrorKind::Evicts);
        assert!(error.to_string().ends_with("unknown"), "{error}");
        assert!(keeps_leases(info, Eviction::Warn).is_ok());
    }

    #[test]
    fn a_server_that_takes_nothing_for_now_is_not_one_that_takes_no_scripts() {
        for (said, kind) in [
            (
                "-LOADING Redis is loading the dataset in memory",
                ConnectErrorKind::Unreachable,
            ),
            (
                "-BUSY Redis is busy running a script",
                ConnectErrorKind::Unreachable,
            ),
            (
                "-CLUSTERDOWN The cluster is down",
                ConnectErrorKind::Unreachable,
            ),
            (
                "-NOPERM this user has no permissions to run it",
                ConnectErrorKind::Unusable,
            ),
            ("-ERR unknown command 'SCRIPT'", ConnectErrorKind::Unusable),
        ] {
            let answer = redis::parse_redis_value(format!("{said}\r\n").as_bytes());
            let source = answer.and_then(Value::extract_error).expect_err(said);
            assert_eq!(no_scripts(source).kind(), kind, "{said}");
        }
    }
}
