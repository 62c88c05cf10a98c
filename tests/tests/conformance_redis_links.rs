//! The Redis store passes the suite through each way to reach a server.

use std::{fs, time::Duration};

use deadpool_redis::{Config, Runtime};
use tests::servers::redis::{RedisServer, Sentinel, UNHURRIED, shared, until_connected};
use tower_idempotency::conformance::{Subject, Threads, every_case, run};
use tower_idempotency_redis::{
    RedisOptions, RedisStore,
    redis::{
        Client, TlsCertificates,
        sentinel::{SentinelClient, SentinelServerType},
    },
};

fn options() -> RedisOptions {
    RedisOptions::new().with_timeout(UNHURRIED)
}

async fn assert_conforms(store: RedisStore, push: bool) {
    let subject = Subject::new(store).with_unit(Duration::from_millis(100));
    every_case(&subject.with_push(push)).await;
}

#[test]
fn with_tls() {
    let server = RedisServer::start_with_tls();
    run(Threads::Four, async {
        let certificates = TlsCertificates {
            client_tls: None,
            root_cert: Some(fs::read(server.certificates().ca()).unwrap()),
        };
        let client = Client::build_with_tls(server.tls_url(), certificates).unwrap();
        let store = until_connected(|| options().connect_client(client.clone())).await;
        assert_conforms(store, true).await;
    });
}

#[test]
fn on_a_unix_socket() {
    let server = RedisServer::start(&["--unixsocket", "redis.sock"]);
    let directory = server.command(&["CONFIG", "GET", "dir"]);
    let directory = directory.lines().nth(1).unwrap();
    run(Threads::Four, async {
        let client = Client::open(format!("redis+unix://{directory}/redis.sock")).unwrap();
        let store = until_connected(|| options().connect_client(client.clone())).await;
        assert_conforms(store, true).await;
    });
}

#[test]
fn through_a_sentinel() {
    let primary = RedisServer::start(&[]);
    let sentinel = Sentinel::start(&primary, 0);
    run(Threads::Four, async {
        let url = format!("redis://{}/", sentinel.address());
        let name = Sentinel::NAME.to_owned();
        let store = until_connected(|| {
            let (urls, name) = (vec![url.clone()], name.clone());
            let client = SentinelClient::build(urls, name, None, SentinelServerType::Master);
            options().connect_sentinel(client.unwrap())
        });
        assert_conforms(store.await, true).await;
    });
}

#[test]
fn through_pools_of_one_and_of_eight() {
    for size in [1, 8] {
        run(Threads::Four, async {
            let builder = Config::from_url(shared().url()).builder().unwrap();
            let pool = builder.max_size(size).runtime(Runtime::Tokio1).build();
            let pool = pool.unwrap();
            let store = until_connected(|| options().connect_pool(pool.clone())).await;
            // Nothing is heard through a pool.
            assert_conforms(store, false).await;
        });
    }
}

#[test]
fn waiting_for_a_replica() {
    let primary = RedisServer::start(&[]);
    let _replica = RedisServer::replica_of(&primary);
    run(Threads::Four, async {
        let (waiting, url) = (options().with_wait(1, UNHURRIED), primary.url());
        let store = until_connected(|| waiting.clone().connect(&url)).await;
        assert_conforms(store, true).await;
    });
}
