//! Several processes on one database, killed and paused at any moment. If their handlers commit effect and record in
//! one transaction, each key has one effect. With two transactions some keys have two effects, which shows that the
//! test can fail.

use std::process::Command;

use fleets::exactly_once::{
    Bank, HandlerLoad, delay_replies, find_second_effects, on_postgres as open_on_postgres,
    survive_kills, survive_on_postgres, survive_pauses,
};
use tests::{
    database::{TestDatabase, TestDialect, pool_options, sqlite_pool},
    proxy::Proxy,
    scratch::Scratch,
    servers::{mariadb::MariaDbServer, postgres::PostgresServer},
};
use tower_idempotency_sqlx::{MySqlStore, SqliteStore, sqlx};

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bank"));
    command.args(args);
    command
}

async fn each_key_has_one_effect<S: TestDialect>(
    database: TestDatabase<S>,
    url: &str,
    handlers: HandlerLoad,
) {
    let bank = Bank {
        program,
        url,
        commit: "together",
    };
    survive_kills(&database, bank, handlers).await;
    survive_pauses(&database, bank, handlers).await;
    let apart = Bank {
        commit: "apart",
        ..bank
    };
    find_second_effects(&database, apart, handlers).await;
}

// F-032, F-036
#[tokio::test(flavor = "multi_thread")]
async fn on_postgres() {
    let server = PostgresServer::start(&["max_connections=300"]);
    let proxy = Proxy::start(server.address());
    delay_replies(&proxy);
    let database = open_on_postgres(&server).await;
    let url = format!("postgres://app@{}/postgres", proxy.address());
    each_key_has_one_effect(database, &url, HandlerLoad::ON_SERVER).await;
}

// F-032, F-036
#[tokio::test(flavor = "multi_thread")]
async fn with_tokio_postgres() {
    survive_on_postgres(program, "tokio-postgres").await;
}

// F-032
#[tokio::test(flavor = "multi_thread")]
async fn on_mariadb() {
    let server = MariaDbServer::start(&[]);
    let proxy = Proxy::start(server.address());
    delay_replies(&proxy);
    let pool = pool_options::<sqlx::MySql>()
        .connect_lazy(&server.url())
        .expect("an URL");
    let database: TestDatabase<MySqlStore> = TestDatabase::open(&server.url(), pool, "bank").await;
    let url = format!("mysql://app:app@{}/app", proxy.address());
    each_key_has_one_effect(database, &url, HandlerLoad::ON_SERVER).await;
}

// F-032
#[tokio::test(flavor = "multi_thread")]
async fn on_sqlite_file() {
    let scratch = Scratch::new();
    let path = scratch.file("bank.db").display().to_string();
    let database: TestDatabase<SqliteStore> =
        TestDatabase::open(&path, sqlite_pool(&path), "bank").await;
    each_key_has_one_effect(database, &path, HandlerLoad::IN_FILE).await;
}
