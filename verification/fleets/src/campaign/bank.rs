//! The fleet of banks, whose handlers write effect and record in one transaction.

use std::{
    process::Command,
    sync::{Arc, Mutex},
};

use tests::database::{TestDatabase, TestDialect, pool_options, sqlite_pool};
use tower_idempotency_sqlx::{MySqlStore, PostgresStore, SqliteStore};
use verification::oracle::{Effect, History};

use super::{Campaign, Kind, Site, at, sibling_command};
use crate::fleet::{Fleet, Load};

pub(super) async fn run(campaign: &Campaign, site: &Arc<Mutex<Site>>, load: Load) -> History {
    let url = at(site).own_url();
    match campaign.kind {
        Kind::Postgres => {
            let pool = pool_options::<tower_idempotency_sqlx::sqlx::Postgres>()
                .connect_lazy(&url)
                .expect("an URL");
            let database: TestDatabase<PostgresStore> = TestDatabase::open(&url, pool, TABLE).await;
            run_with(campaign, site, load, database).await
        }
        Kind::MariaDb => {
            let pool = pool_options::<tower_idempotency_sqlx::sqlx::MySql>()
                .connect_lazy(&url)
                .expect("an URL");
            let database: TestDatabase<MySqlStore> = TestDatabase::open(&url, pool, TABLE).await;
            run_with(campaign, site, load, database).await
        }
        Kind::Sqlite => {
            let database: TestDatabase<SqliteStore> =
                TestDatabase::open(&url, sqlite_pool(&url), TABLE).await;
            run_with(campaign, site, load, database).await
        }
        Kind::Redis | Kind::RedisCluster | Kind::DynamoDb => {
            unreachable!("the campaign was checked")
        }
    }
}

async fn run_with<S: TestDialect>(
    campaign: &Campaign,
    site: &Arc<Mutex<Site>>,
    load: Load,
    database: TestDatabase<S>,
) -> History {
    let url = at(site).bank_url();
    let lease = load.lease.as_millis().to_string();
    let args = ["--store", &url, "--table", TABLE, "--lease", &lease];
    let args = [&args[..], &["--commit", "together"]].concat();
    let fleet = Fleet::of(bank, campaign.kind.members(), &args);
    let request = format!("POST {}", load.path);
    let mut history = campaign.run_with_fault(fleet, site, load).await;
    let effects = database.effects().await.into_iter().map(|row| Effect {
        pid: u32::try_from(row.pid).expect("a process id"),
        n: u64::try_from(row.n).expect("a number"),
        request: request.clone(),
        key: row.key,
    });
    history.effects = effects.collect();
    // A member that cannot begin or commit the transaction responds with an error, and its client retries.
    history.problems = &["503"];
    history
}

fn bank(args: &[&str]) -> Command {
    let mut command = sibling_command("bank");
    command.args(args);
    command
}

const TABLE: &str = "bank";
