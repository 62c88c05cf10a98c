//! Several processes on one database, killed and paused at any moment while their handlers are in transactions.

use std::process::Command;

use fleets::exactly_once::survive_on_postgres;
use other_drivers::{Diesel, Handlers, SeaOrm, Sqlx08};
use tokio::sync::Mutex;

/// Processes with short leases run one after another: in parallel they could delay each other's renewals.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

async fn survive(driver: &str) {
    let _turn = ONE_AT_A_TIME.lock().await;
    survive_on_postgres(program, driver).await;
}

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_driver-bank"));
    command.args(args);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_once_with_sqlx_08() {
    survive(Sqlx08::NAME).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_once_with_sea_orm() {
    survive(SeaOrm::NAME).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_once_with_diesel() {
    survive(Diesel::NAME).await;
}
