//! Requirements on a server, and the texts of failed checks.

use super::*;

#[test]
fn server_is_usable_from_version_5_as_primary() {
    assert!(check_version_and_role("# Server\r\nredis_version:5.0.0\r\nrole:master\r\n").is_ok());
    assert!(check_version_and_role("redis_version:10.2.1\r\n").is_ok());
    for (info, expected) in [
        (
            "redis_version:4.0.14\r\nrole:master\r\n",
            "expected Redis 5 or later, found version \"4.0.14\"",
        ),
        (
            "server:something else\r\n",
            "expected Redis 5 or later, found version \"\"",
        ),
        (
            "redis_version:7.0.15\r\nrole:slave\r\n",
            "expected a primary, found a slave",
        ),
    ] {
        let error = check_version_and_role(info).expect_err(info);
        assert_eq!(error.kind(), ConnectErrorKind::Unusable);
        assert_eq!(error.to_string(), expected);
    }
}

/// Valkey reports the Redis version that it is compatible with.
#[test]
fn valkey_is_usable() {
    let info =
        "redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.0.1\r\nrole:master\r\n";
    assert!(check_version_and_role(info).is_ok());
}

#[test]
fn texts_of_all_cluster_nodes_are_collected() {
    let text = |text: &str| Value::BulkString(text.into());
    let nodes = Value::Map(vec![
        (text("127.0.0.1:1"), text("a")),
        (text("127.0.0.1:2"), text("b")),
    ]);
    let mut texts = Vec::new();
    collect_texts(&nodes, &mut texts);
    assert_eq!(texts, ["a", "b"]);
}

#[test]
fn every_policy_except_noeviction_is_refused() {
    for policy in [
        "allkeys-lru",
        "allkeys-random",
        "volatile-ttl",
        "volatile-lfu",
    ] {
        let info = format!("maxmemory:0\r\nmaxmemory_policy:{policy}\r\n");
        let error = check_eviction_policy(&info, Eviction::Refuse).expect_err(policy);
        assert_eq!(error.kind(), ConnectErrorKind::EvictionPolicy);
        let expected = format!("expected maxmemory-policy noeviction, found {policy}");
        assert_eq!(error.to_string(), expected);
    }
    let info = "maxmemory_policy:noeviction\r\n";
    assert!(check_eviction_policy(info, Eviction::Refuse).is_ok());
}

#[test]
fn change_of_policy_has_this_text() {
    assert_eq!(
        evicting_error().to_string(),
        "expected maxmemory-policy noeviction, found another one since the store connected"
    );
}

#[test]
fn missing_policy_counts_as_evicting() {
    let info = "maxmemory:0\r\n";
    let error = check_eviction_policy(info, Eviction::Refuse).expect_err(info);
    assert_eq!(error.kind(), ConnectErrorKind::EvictionPolicy);
    assert!(error.to_string().ends_with("unknown"), "{error}");
    assert!(check_eviction_policy(info, Eviction::Warn).is_ok());
}

#[test]
fn rejected_commands_have_these_texts() {
    let reply = |names: &[&str]| {
        let texts = names.iter().map(|name| Value::BulkString((*name).into()));
        Ok(Value::Array(texts.collect()))
    };
    assert_eq!(check_rights(reply(&[])), Ok(()));
    for (names, expected) in [
        (
            &["zadd", "zrem"][..],
            "the indexes need zadd, zrem, which the server rejects: \
             permit the user to run these commands on a sorted set, or use `with_indexes(false)` in all processes",
        ),
        (
            &["zrem", "zrangebyscore"][..],
            "the indexes need zrem, zrangebyscore, which the server rejects: \
             permit the user to run these commands on a sorted set, or use `with_indexes(false)` in all processes",
        ),
        (
            &["zrangebyscore"][..],
            "the index of completed entries needs zrangebyscore, which the server rejects: \
             permit the user to run this command on a sorted set, or use `with_completed_index(false)`",
        ),
        (
            &["pexpire", "zrem"][..],
            "the store needs pexpire, zrem, which the server rejects: \
             permit the user to run these commands on the keys with the prefix of the store",
        ),
    ] {
        let error = check_rights(reply(names)).unwrap_err();
        assert_eq!(error.kind(), CheckErrorKind::Denied);
        assert_eq!(error.to_string(), expected);
    }
    let error = check_rights(Err(StoreError::backend("no reply"))).unwrap_err();
    assert_eq!(error.kind(), CheckErrorKind::Unreachable);
}

#[test]
fn busy_server_is_unreachable_and_not_unusable() {
    for (reply, kind) in [
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
        let parsed = redis::parse_redis_value(format!("{reply}\r\n").as_bytes());
        let source = parsed.and_then(Value::extract_error).expect_err(reply);
        assert_eq!(script_load_error(source).kind(), kind, "{reply}");
    }
}
