//! Servers that cannot be a store are rejected when the store connects.

use std::{error::Error, net::TcpListener, path::Path, time::Duration};

use tests::servers::{free_port, redis::RedisServer};
use tokio::time::Instant;
use tower_idempotency_redis::{
    ConnectError, ConnectErrorKind, RedisOptions, RedisStore,
    redis::{
        Client,
        sentinel::{SentinelClient, SentinelServerType},
    },
};

use crate::{
    faults::node::{BOUND, Node, connect, options, options_with_long_timeout, until_connected},
    pools::pool_to,
};

const SECRET: &str = "open-sesame";

/// Connects to a server in each possible way. All must fail.
async fn refused_by(url: &str) -> Vec<ConnectError> {
    let began = Instant::now();
    let sentinel = async || {
        let name = "main".to_owned();
        let kind = SentinelServerType::Master;
        let client = SentinelClient::build(vec![url.to_owned()], name, None, kind);
        let client = client.expect("an address");
        options().connect_sentinel(client).await
    };
    let refused: (_, _, _, _) = tokio::join!(
        options().connect(url),
        options().connect_pool(pool_to(4, url)),
        options().connect_cluster([url]),
        sentinel(),
    );
    let refused: [Result<RedisStore, ConnectError>; 4] = refused.into();
    // The attempt may make two connections one after the other, and a check of the server.
    assert!(began.elapsed() < BOUND, "{:?}", began.elapsed());
    refused
        .map(|it| it.expect_err("no store"))
        .into_iter()
        .collect()
}

/// Returns the error's message, with all its causes.
fn error_text(error: &ConnectError) -> String {
    let mut message = format!("{error} {error:?}");
    let mut source = error.source();
    while let Some(error) = source {
        message += &format!(" {error} {error:?}");
        source = error.source();
    }
    message
}

fn assert_all(kind: ConnectErrorKind, errors: &[ConnectError]) {
    for error in errors {
        assert_eq!(error.kind(), kind, "{error:?}");
        let message = error_text(error);
        assert!(!message.contains(SECRET), "{message}");
    }
}

// F-130
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_is_refused() {
    let primary = RedisServer::start(&["--requirepass", SECRET]);
    let replica = RedisServer::replica_of(&primary);
    let refused = [
        options_with_long_timeout()
            .connect(&replica.url())
            .await
            .unwrap_err(),
        options_with_long_timeout()
            .connect_pool(pool_to(4, &replica.url()))
            .await
            .unwrap_err(),
    ];
    assert_all(ConnectErrorKind::Unusable, &refused);
    assert!(refused[0].to_string().contains("expected a primary"));
    assert_eq!(primary.command(&["DBSIZE"]), "0");
}

// F-131
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_scripts_is_refused() {
    let server = RedisServer::start(&["--requirepass", SECRET]);
    server.command(&["ACL", "SETUSER", "default", "-@scripting"]);
    let refused = [
        options_with_long_timeout()
            .connect(&server.url())
            .await
            .unwrap_err(),
        options_with_long_timeout()
            .connect_pool(pool_to(4, &server.url()))
            .await
            .unwrap_err(),
    ];
    assert_all(ConnectErrorKind::Unusable, &refused);
    for error in &refused {
        assert_eq!(error.to_string(), "the server does not accept scripts");
        let source = error
            .source()
            .expect("the message of the server")
            .to_string();
        assert!(source.contains("permissions to run"), "{source}");
    }
    assert_eq!(server.command(&["DBSIZE"]), "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_password_is_not_retried() {
    let server = RedisServer::start(&["--requirepass", "another"]);
    let url = format!("redis://:{SECRET}@{}/0", server.address());
    assert_all(ConnectErrorKind::Unreachable, &refused_by(&url).await);
    // A missing replica is not accepted either.
    let url = format!("redis://{}/0", server.address());
    assert_all(ConnectErrorKind::Unreachable, &refused_by(&url).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unused_port_is_unreachable() {
    let url = format!("redis://:{SECRET}@127.0.0.1:{}/0", free_port());
    assert_all(ConnectErrorKind::Unreachable, &refused_by(&url).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unresponsive_server_is_unreachable() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://:{SECRET}@{}/0", silent.local_addr().unwrap());
    assert_all(ConnectErrorKind::Unreachable, &refused_by(&url).await);
    // A server that accepts connections but does not read commands is unreachable, too.
    let server = RedisServer::start(&[]);
    server.pause();
    assert_all(
        ConnectErrorKind::Unreachable,
        &refused_by(&server.url()).await,
    );
}

#[tokio::test]
async fn invalid_address_is_not_retried() {
    for url in [
        format!("redis://:{SECRET}@"),
        format!("redis://:{SECRET}@host:port/0"),
        format!("redis://:{SECRET}@host/none"),
        format!("http://:{SECRET}@host/"),
        format!("{SECRET}@host"),
        format!("://{SECRET}"),
        String::new(),
    ] {
        let refused = options().connect(&url).await.unwrap_err();
        assert_all(ConnectErrorKind::Address, &[refused]);
        let refused = options().connect_cluster([&url]).await.unwrap_err();
        assert_all(ConnectErrorKind::Address, &[refused]);
    }
    let waiting = RedisOptions::new().with_wait(1, Duration::from_secs(1));
    let refused = waiting.connect_cluster(["redis://127.0.0.1/"]).await;
    assert_all(ConnectErrorKind::Unusable, &[refused.unwrap_err()]);
}

#[tokio::test]
async fn missing_socket_is_unreachable() {
    let none = Path::new("/tmp").join(format!("no-such-socket-{}", free_port()));
    let client = Client::open(format!("redis+unix://{}", none.display())).unwrap();
    let refused = options().connect_client(client).await.unwrap_err();
    assert_all(ConnectErrorKind::Unreachable, &[refused]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_debug_shows_no_password() {
    let server = RedisServer::start(&["--requirepass", SECRET]);
    let store = connect(&server.url()).await;
    let shown = format!("{store:?}");
    assert!(!shown.contains(SECRET), "{shown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn maximum_timeouts_are_accepted() {
    let primary = RedisServer::start(&[]);
    let _replica = RedisServer::replica_of(&primary);
    let (url, end) = (primary.url(), Duration::MAX);
    let options = RedisOptions::new().with_timeout(end).with_wait(1, end);
    let store = until_connected(|| options.clone().connect(&url)).await;
    let node = Node::new(store);
    let first = node.post("/orders", "k").await;
    node.assert_replays("/orders", "k", &first).await;
}
