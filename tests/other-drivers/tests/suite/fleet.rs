//! Several processes on one database, killed and paused at any moment while their handlers are in transactions.

use std::process::Command;

use other_drivers::{Diesel, Handlers, SeaOrm, Sqlx08};
use verification::exactly_once::survive_on_postgres;

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_driver-bank"));
    command.args(args);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_once_with_sqlx_08() {
    survive_on_postgres(program, Sqlx08::NAME).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_once_with_sea_orm() {
    survive_on_postgres(program, SeaOrm::NAME).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_once_with_diesel() {
    survive_on_postgres(program, Diesel::NAME).await;
}
