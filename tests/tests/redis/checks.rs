//! The text of each check of a Redis server. None contains a password.

use std::{error::Error, time::Duration};

use tests::servers::{free_port, redis::RedisServer};
use tower_idempotency::store::{CheckErrorKind, Claim, Fingerprint, KeyId, Store};
use tower_idempotency_redis::{ConnectError, Eviction, RedisOptions, RedisStore};

const SECRET: &str = "open-sesame";
/// The rights of a store with the index of completed entries, as documented.
const RIGHTS: &str = "reset on >open-sesame ~idempotency:* &idempotency:* +@scripting +info +hmget +hset +hdel +del \
                      +pexpire +pexpireat +pttl +time +publish +subscribe +unsubscribe +zadd +zrem \
                      +zremrangebyscore +zrangebyscore";

/// Returns the text of the problem, and its kind.
async fn problem(store: &RedisStore) -> (String, CheckErrorKind) {
    let error = store.check().await.expect_err("a problem");
    let text = error.to_string();
    assert!(
        !text.contains(SECRET) && !format!("{error:?}").contains(SECRET),
        "{error:?}"
    );
    (text, error.kind())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_eviction_policy_and_rights() {
    let server = RedisServer::start(&["--requirepass", SECRET]);
    let store = server.store().await;
    store.check().await.unwrap();
    assert_eq!(server.command(&["DBSIZE"]), "0");

    server.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let evicting = "expected maxmemory-policy noeviction, found allkeys-lru: \
                    set maxmemory-policy to noeviction, because an evicted lease lets a request execute twice";
    assert_eq!(
        problem(&store).await,
        (evicting.to_owned(), CheckErrorKind::Unsafe)
    );
    server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    store.check().await.unwrap();

    server.command(&["ACL", "SETUSER", "default", "resetkeys", "~another:*"]);
    let (text, _) = problem(&store).await;
    let remedy = ": permit the user to run INFO and EVALSHA, and to read and write the keys with the prefix of the store";
    assert!(
        text.starts_with("the store failed (") && text.ends_with(remedy),
        "{text}"
    );
    server.command(&["ACL", "SETUSER", "default", "allkeys", "-info"]);
    let (text, kind) = problem(&store).await;
    assert!(text.ends_with(remedy), "{text}");
    assert_eq!(kind, CheckErrorKind::Unreachable);
    server.command(&["ACL", "SETUSER", "default", "+info", "-@scripting"]);
    let scripts = "the server does not accept scripts: \
                   connect to a primary of Redis 5 or later on which the user may run scripts";
    assert_eq!(
        problem(&store).await,
        (scripts.to_owned(), CheckErrorKind::Unsafe)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_refused_writes() {
    let server = RedisServer::start(&[]);
    let store = server.store().await;
    let remedy = ": free memory, fix the snapshots of the server or connect its replicas, so that it accepts writes";
    for setting in ["min-replicas-to-write", "maxmemory"] {
        server.command(&["CONFIG", "SET", setting, "1"]);
        let (text, kind) = problem(&store).await;
        assert!(
            text.starts_with("the store failed (") && text.ends_with(remedy),
            "{text}"
        );
        assert_eq!(kind, CheckErrorKind::Unreachable);
        server.command(&["CONFIG", "SET", setting, "0"]);
        store.check().await.unwrap();
    }
    let options = RedisOptions::new().with_wait(1, Duration::from_millis(1));
    let waiting = options.connect(&server.url()).await.unwrap();
    let (text, _) = problem(&waiting).await;
    assert!(
        text.contains("replicas") && text.ends_with(remedy),
        "{text}"
    );
}

/// Without one of these commands, a request executes and its record is not stored, or no retry gets the record. The user lacks
/// each of them once. A store with the index of completed entries names the commands of the index too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_missing_rights_on_entries() {
    let server = RedisServer::start(&[]);
    server.permit(RIGHTS);
    let url = format!("redis://service:{SECRET}@{}/0", server.address());
    let options = RedisOptions::new().with_timeout(Duration::from_secs(20));
    let with_index = options.clone().with_completed_index(true);
    for (options, missing, names) in [
        (&options, "-hdel", "hdel"),
        (&options, "-pttl", "pttl"),
        (&options, "-pexpire", "pexpire"),
        (
            &options,
            "-hdel -pttl -pexpire -zrangebyscore",
            "hdel, pttl, pexpire",
        ),
        (&options.clone().with_indexes(false), "-hdel", "hdel"),
        (&with_index, "-pttl", "pttl"),
        (
            &with_index,
            "-pexpire -zrangebyscore",
            "pexpire, zrangebyscore",
        ),
    ] {
        let store = options.clone().connect(&url).await.unwrap();
        server.permit(missing);
        let expected = format!(
            "the store needs {names}, which the server rejects: \
             permit the user to run these commands on the keys with the prefix of the store"
        );
        assert_eq!(problem(&store).await, (expected, CheckErrorKind::Denied));
        server.permit(&missing.replace('-', "+"));
        store.check().await.expect(missing);
    }
    assert_eq!(server.command(&["DBSIZE"]), "0");
}

/// The user lacks each command of the indexes once. Executions would go on without them, and listings would have no entry. A
/// store without an index passes without its commands.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_missing_rights_on_index() {
    const INDEX: &str = "idempotency:~completed";
    let server = RedisServer::start(&[]);
    server.permit(RIGHTS);
    let url = format!("redis://service:{SECRET}@{}/0", server.address());
    let options = RedisOptions::new().with_timeout(Duration::from_secs(20));
    let without_indexes = options.clone().with_indexes(false);
    let without_indexes = without_indexes.connect(&url).await.unwrap();
    let by_default = options.clone().connect(&url).await.unwrap();
    let store = options.with_completed_index(true);
    let store = store.connect(&url).await.unwrap();
    store.check().await.unwrap();
    by_default.check().await.unwrap();
    assert_eq!(server.command(&["DBSIZE"]), "0");
    server.command(&["ZADD", INDEX, "1", "expired", "9999999999999", "stored"]);
    server.command(&["PEXPIREAT", INDEX, "9999999999999"]);
    for (missing, names) in [
        ("-zadd", "zadd"),
        ("-zrem", "zrem"),
        ("-zremrangebyscore", "zremrangebyscore"),
        (
            "-zadd -zrem -zremrangebyscore",
            "zadd, zrem, zremrangebyscore",
        ),
    ] {
        server.permit(missing);
        let expected = format!(
            "the indexes need {names}, which the server rejects: \
             permit the user to run these commands on a sorted set, or use `with_indexes(false)` in all processes"
        );
        for store in [&store, &by_default] {
            let expected = (expected.clone(), CheckErrorKind::Denied);
            assert_eq!(problem(store).await, expected);
        }
        without_indexes.check().await.expect(missing);
        server.permit(&missing.replace('-', "+"));
        store.check().await.expect(missing);
    }
    server.permit("-zrangebyscore");
    let expected = "the index of completed entries needs zrangebyscore, which the server rejects: \
                    permit the user to run this command on a sorted set, or use `with_completed_index(false)`";
    let expected = (expected.to_owned(), CheckErrorKind::Denied);
    assert_eq!(problem(&store).await, expected);
    by_default.check().await.expect("no such index");
    // No check has changed the index of completed entries.
    let members = server.command(&["ZRANGE", INDEX, "0", "-1", "WITHSCORES"]);
    assert_eq!(
        members.split_whitespace().collect::<Vec<_>>(),
        ["expired", "1", "stored", "9999999999999"]
    );
    let left: u64 = server.command(&["PTTL", INDEX]).parse().unwrap();
    assert!(left > 1_000_000_000_000, "{left}");
    // Without `zrem`, the release of a check leaves its member in the index of leases.
    server.command(&["DEL", "idempotency:~leases"]);
    assert_eq!(server.command(&["DBSIZE"]), "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_stopped_server() {
    let mut server = RedisServer::start(&["--requirepass", SECRET]);
    let store = server.store().await;
    server.kill();
    let (text, kind) = problem(&store).await;
    let remedy = ": check the address, the credentials and the network, and that the server runs";
    assert!(
        text.starts_with("cannot reach the server (") && text.ends_with(remedy),
        "{text}"
    );
    assert_eq!(kind, CheckErrorKind::Unreachable);
}

/// Returns the messages of the error and of its sources.
fn messages(error: &ConnectError, port: u16) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = format!(" ({error})");
        if !text.contains(&cause) {
            text += &cause;
        }
        source = error.source();
    }
    text.replace(&port.to_string(), "PORT")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_constructors_have_these_texts() {
    let server = RedisServer::start(&["--requirepass", SECRET]);
    let (replica, tls) = (
        RedisServer::replica_of(&server),
        RedisServer::start_with_tls(),
    );
    let port = server.address().port();
    let unused = free_port();
    let options = || RedisOptions::new().with_timeout(Duration::from_secs(20));
    let mut lines = Vec::new();
    for (name, url, of) in [
        ("no URL", "redis".to_owned(), port),
        ("a wrong port", "redis://127.0.0.1:port/0".to_owned(), port),
        (
            "no server",
            format!("redis://:{SECRET}@127.0.0.1:{unused}/"),
            unused,
        ),
        ("no password", format!("redis://127.0.0.1:{port}/"), port),
        (
            "a wrong password",
            format!("redis://:open@127.0.0.1:{port}/"),
            port,
        ),
        (
            "TLS to a server without",
            format!("rediss://:{SECRET}@127.0.0.1:{port}/"),
            port,
        ),
        (
            "an unknown certificate",
            tls.tls_url(),
            tls.address().port(),
        ),
        ("a replica", replica.url(), replica.address().port()),
    ] {
        // A server without TLS never replies.
        let seconds = if name.starts_with("TLS") { 2 } else { 20 };
        let options = options().with_timeout(Duration::from_secs(seconds));
        let error = options.connect(&url).await.expect_err(name);
        lines.push(format!("{name}: {}", messages(&error, of)));
    }
    let none: [&str; 0] = [];
    let error = options().connect_cluster(none).await.unwrap_err();
    lines.push(format!(
        "a cluster without nodes: {}",
        messages(&error, port)
    ));
    let waiting = options().with_wait(1, Duration::from_secs(1));
    let error = waiting.connect_cluster([server.url()]).await.unwrap_err();
    lines.push(format!("a cluster with a wait: {}", messages(&error, port)));
    let prefixed = options().with_prefix("{a");
    let error = prefixed.connect_cluster([server.url()]).await.unwrap_err();
    lines.push(format!(
        "a cluster with this prefix: {}",
        messages(&error, port)
    ));
    server.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let refusing = options().with_eviction(Eviction::Refuse);
    let error = refusing.connect(&server.url()).await.unwrap_err();
    lines.push(format!("eviction: {}", messages(&error, port)));
    insta::assert_snapshot!(lines.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn write_without_replica_has_this_text() {
    let server = RedisServer::start(&[]);
    let options = RedisOptions::new()
        .with_timeout(Duration::from_secs(20))
        .with_wait(1, Duration::from_millis(1));
    let store = options.connect(&server.url()).await.unwrap();
    let id = KeyId::from_bytes([1; 32]);
    let claim = Claim::new(id, Fingerprint::from_bytes([2; 32])).unwrap();
    let error = store.acquire(&claim).await.unwrap_err();
    let source = error.source().map(ToString::to_string);
    let expected = "expected the write on 1 replicas, found it on 0";
    assert_eq!(source.as_deref(), Some(expected));
}
