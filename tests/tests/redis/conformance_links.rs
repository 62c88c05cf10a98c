//! The Redis store passes the suite through each way to reach a server.

use std::fs;

use tests::{
    conformance::run_all_cases,
    servers::redis::{RedisServer, Sentinel, UNHURRIED, shared, until_connected},
};
use tower_idempotency::conformance::Subject;
use tower_idempotency_redis::{
    RedisOptions, RedisStore,
    redis::{
        Client, TlsCertificates,
        sentinel::{SentinelClient, SentinelServerType},
    },
};

use crate::pools::pool_to;

fn options() -> RedisOptions {
    RedisOptions::new().with_timeout(UNHURRIED)
}

/// Runs each case on a new store, many cases at a time.
fn assert_conforms(push: bool, store: impl AsyncFn() -> RedisStore + Sync) {
    let subject = async || Subject::new(store().await).with_push(push);
    run_all_cases(subject, |_| None);
}

#[test]
fn with_tls() {
    let server = RedisServer::start_with_tls();
    let certificates = TlsCertificates {
        client_tls: None,
        root_cert: Some(fs::read(server.certificates().ca()).unwrap()),
    };
    let client = Client::build_with_tls(server.tls_url(), certificates).unwrap();
    assert_conforms(true, async || {
        until_connected(|| options().connect_client(client.clone())).await
    });
}

#[test]
fn unix_socket() {
    let server = RedisServer::start(&["--unixsocket", "redis.sock"]);
    let directory = server.command(&["CONFIG", "GET", "dir"]);
    let directory = directory.lines().nth(1).unwrap();
    let client = Client::open(format!("redis+unix://{directory}/redis.sock")).unwrap();
    assert_conforms(true, async || {
        until_connected(|| options().connect_client(client.clone())).await
    });
}

#[test]
fn sentinel() {
    let primary = RedisServer::start(&[]);
    let sentinel = Sentinel::start(&primary, 0);
    assert_conforms(true, async || {
        until_connected(|| {
            let urls = vec![format!("redis://{}/", sentinel.address())];
            let name = Sentinel::NAME.to_owned();
            let client = SentinelClient::build(urls, name, None, SentinelServerType::Master);
            options().connect_sentinel(client.unwrap())
        })
        .await
    });
}

#[test]
fn through_pools_of_one_and_of_eight() {
    for size in [1, 8] {
        // No notifications arrive through a pool.
        assert_conforms(false, async || {
            let pool = pool_to(size, &shared().url());
            until_connected(|| options().connect_pool(pool.clone())).await
        });
    }
}

#[test]
fn replica_wait() {
    let primary = RedisServer::start(&[]);
    let _replica = RedisServer::replica_of(&primary);
    let (waiting, url) = (options().with_wait(1, UNHURRIED), primary.url());
    assert_conforms(true, async || {
        until_connected(|| waiting.clone().connect(&url)).await
    });
}
