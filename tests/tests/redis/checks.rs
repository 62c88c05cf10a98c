//! The text of each check of a Redis server. None contains a password.

use tests::servers::redis::RedisServer;
use tower_idempotency::store::{CheckErrorKind, Store};
use tower_idempotency_redis::RedisStore;

const SECRET: &str = "open-sesame";

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
    let remedy = ": permit the user to run EVALSHA, and to read and write the keys with the prefix of the store";
    assert!(
        text.starts_with("the store failed (") && text.ends_with(remedy),
        "{text}"
    );
    server.command(&["ACL", "SETUSER", "default", "allkeys", "-@scripting"]);
    let scripts = "the server does not accept scripts: \
                   connect to a primary of Redis 5 or later on which the user may run scripts";
    assert_eq!(
        problem(&store).await,
        (scripts.to_owned(), CheckErrorKind::Unsafe)
    );
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
