//! Several processes on one database, and 64 clients at a time that request the same key. Each key is executed once.
//!
//! `FULL=1` uses 1,000 keys, the default 40.

use std::time::Duration;

use tests::{
    few_or,
    scratch::Scratch,
    servers::{mariadb::MariaDbServer, postgres::PostgresServer},
};

use crate::execute_keys_once;

async fn each_key_is_executed_once(store: &str, in_flight: &str) {
    let args = ["--store", store, "--in-flight", in_flight];
    let (poll, lease) = (Duration::from_millis(25), Duration::from_secs(15));
    execute_keys_once(3, &args, few_or(40, 1000), poll, lease).await;
}

// F-051, F-144
#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_clients_at_once_on_postgres() {
    let server = PostgresServer::start(&[]);
    each_key_is_executed_once(&server.url(), "wait").await;
}

// F-051, F-144
#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_clients_at_once_on_mariadb() {
    let server = MariaDbServer::start(&[]);
    each_key_is_executed_once(&server.url(), "conflict").await;
}

// F-051, F-171
#[tokio::test(flavor = "multi_thread")]
async fn keys_of_64_clients_execute_once_on_sqlite() {
    let scratch = Scratch::new();
    let store = format!("sqlite:{}", scratch.file("keys.db").display());
    each_key_is_executed_once(&store, "conflict").await;
}
