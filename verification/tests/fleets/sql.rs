//! Several processes on one database, and 64 clients at a time that request the same key. Each key is executed once.
//!
//! `FULL=1` uses 1,000 keys, the default 100.

use std::time::Duration;

use tests::{
    few_or,
    scratch::Scratch,
    servers::{mariadb::MariaDbServer, postgres::PostgresServer},
};
use verification::fleet::{Fleet, Stampede};

async fn each_key_is_executed_once(store: &str, in_flight: &str) {
    let keys = few_or(100, 1000);
    let args = ["--store", store, "--in-flight", in_flight];
    let stampede = Stampede {
        path: "/orders".to_owned(),
        clients: 64,
        keys,
        poll: Duration::from_millis(25),
        lease: Duration::from_secs(15),
        seed: 6,
    };
    let history = Fleet::start(3, &args).stampede(&stampede).await;
    println!("{}", history.sums());
    none("excess effects", &history.excess_effects());
    none("contradictions", &history.contradictions());
    assert_eq!(history.effects.len(), keys);
    let responses = history.attempts.iter().filter_map(|it| it.response());
    assert_eq!(responses.count(), 64 * keys);
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

fn none(what: &str, keys: &[String]) {
    let first: Vec<_> = keys.iter().take(3).map(String::as_str).collect();
    let n = keys.len();
    assert!(n == 0, "{what}: {n} keys, such as\n{}", first.join("\n"));
}
