//! The same session on every store.

use tests::{
    scratch::Scratch,
    servers::{
        dynamodb::{StandIn, shared},
        mariadb::MariaDbServer,
        postgres::PostgresServer,
        redis::{RedisCluster, RedisServer},
    },
};

use crate::{
    cluster_url,
    scenario::{resolve_changed_entry, settle_every_kind},
};

/// Runs the session, and compares it with the snapshot. Stores with the same abilities have the same one.
async fn check(url: &str, snapshot: &str) {
    let session = settle_every_kind(url).await;
    let ages = [
        (r#""age_ms":\d+"#, r#""age_ms":N"#),
        (r"\(\d+\w+( \d+\w+)? ago\)", "(AGE ago)"),
    ];
    insta::with_settings!({filters => ages}, {
        insta::assert_snapshot!(snapshot, session);
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres() {
    let server = PostgresServer::start(&[]);
    check(&server.url(), "all_states").await;
    resolve_changed_entry(&server.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mariadb() {
    let server = MariaDbServer::start(&[]);
    check(&server.url(), "all_states").await;
    resolve_changed_entry(&server.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    check(&url, "all_states").await;
    resolve_changed_entry(&url).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis() {
    let server = RedisServer::start(&[]);
    check(&server.url(), "unresolved_states").await;
    resolve_changed_entry(&server.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_cluster() {
    let cluster = RedisCluster::start();
    let url = cluster_url(&cluster);
    check(&url, "unresolved_states").await;
    resolve_changed_entry(&url).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dynamodb() {
    let server = shared(StandIn::Dynoxide);
    let url = || {
        let (table, address) = (server.new_table(), server.address());
        // A lease of the test expires within this skew of clocks.
        format!("dynamodb://{table}?endpoint=http://{address}&skew=100ms")
    };
    // The index has the code of a record, and not its size.
    check(&url(), "unresolved_states_without_sizes").await;
    resolve_changed_entry(&url()).await;
}
