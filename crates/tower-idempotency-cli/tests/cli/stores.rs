//! The same session on every store.

use tests::{
    scratch::Scratch,
    servers::{
        mariadb::MariaDbServer,
        postgres::PostgresServer,
        redis::{RedisCluster, RedisServer},
    },
};

use crate::scenario::{resolve_changed_entry, settle_every_kind};

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
    let nodes: Vec<_> = cluster.urls();
    let nodes: Vec<_> = nodes
        .iter()
        .map(|url| url.trim_start_matches("redis://").trim_end_matches("/0"))
        .collect();
    let url = format!("redis+cluster://{}", nodes.join(","));
    check(&url, "unresolved_states").await;
    resolve_changed_entry(&url).await;
}
