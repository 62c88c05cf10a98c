//! Several processes on one database, killed at any moment while their handlers are in transactions.
//!
//! A strike at an idle process proves nothing: it must end executions, which are then taken over. `FULL=1` uses 300 kills
//! for each driver.

use std::{process::Command, time::Duration};
use tests::database::pool_options;

use other_drivers::{Diesel, Handlers, SeaOrm, Sqlx08};
use tests::{
    database::TestDatabase,
    few_or,
    proxy::{Mode, Proxy},
    servers::postgres::PostgresServer,
};
use tower_idempotency_sqlx::PostgresStore;
use verification::{
    fleet::{Fleet, Load, StrikeKind, until_seen},
    oracle::{Effect, Sums},
};

const MEMBERS: usize = 4;
const LEASE: Duration = Duration::from_millis(700);
const PATH: &str = "/charge/40";

fn bank(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_driver-bank"));
    command.args(args);
    command
}

fn kills(seed: u64) -> Load {
    Load {
        path: PATH.to_owned(),
        at_a_time: 16,
        keys: 0,
        poll: Duration::from_millis(100),
        lease: LEASE,
        strike_count: few_or(8, 300),
        strike_kind: StrikeKind::Kill,
        at_once: 1,
        // A process must start and connect before a kill can end an execution, also on a busy machine.
        strike_interval: Duration::from_millis(900),
        seed,
    }
}

/// The sums of a round, and the number of keys that were taken over.
struct Round {
    sums: Sums,
    taken_over: usize,
}

impl std::fmt::Display for Round {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} taken over; {}", self.taken_over, self.sums)
    }
}

async fn each_key_has_one_effect<D: Handlers>() {
    let server = PostgresServer::start(&["max_connections=300"]);
    let proxy = Proxy::start(server.address());
    // Processes are often killed between a write and its reply.
    proxy.set(Mode::Delay {
        up: Duration::ZERO,
        down: Duration::from_millis(4),
    });
    let pool = pool_options::<tower_idempotency_sqlx::sqlx::Postgres>()
        .connect_lazy(&server.url())
        .expect("an URL");
    let database: TestDatabase<PostgresStore> =
        TestDatabase::open(&server.url(), pool, "bank").await;
    let url = format!("postgres://app@{}/postgres", proxy.address());
    until_seen(
        &[("taken over", |round: &Round| round.taken_over)],
        async |round| {
            database.admin("delete from {table}").await;
            database.admin("delete from {table}_effects").await;
            let lease = LEASE.as_millis().to_string();
            let args = [
                "--store",
                &url,
                "--table",
                "bank",
                "--lease",
                &lease,
                "--commit",
                D::NAME,
            ];
            let load = kills(1 + round * 100);
            let mut history = Fleet::of(bank, MEMBERS, &args).run(load.clone()).await;
            let effects = database.effects().await.into_iter().map(|row| Effect {
                pid: u32::try_from(row.pid).expect("a process id"),
                n: u64::try_from(row.n).expect("a number"),
                request: format!("POST {PATH}"),
                key: row.key,
            });
            history.effects = effects.collect();
            // A process that finds its lease lost before it writes responds with 503, and its client retries.
            history.problems = &["503"];
            let sums = history.sums();
            assert_eq!(sums.strikes, load.strike_count, "{sums}");
            assert_eq!(history.excess_effects(), Vec::<String>::new(), "{sums}");
            assert_eq!(history.contradictions(), Vec::<String>::new(), "{sums}");
            assert_eq!(history.effects.len(), sums.keys, "{sums}");
            assert_eq!(
                (sums.refused_with_effect, sums.refused_without_effect),
                (0, 0),
                "{sums}"
            );
            let generations =
                "select 'taken over', generation, generation from {table} where generation > 1";
            let generations = generations.replace("{table}", &database.table);
            let taken_over =
                <PostgresStore as tests::database::TestDialect>::rows(&database.pool, generations);
            let taken_over = taken_over.await.len();
            println!("{}: {taken_over} taken over; {sums}", D::NAME);
            Round { sums, taken_over }
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_with_sqlx_08() {
    each_key_has_one_effect::<Sqlx08>().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_with_sea_orm() {
    each_key_has_one_effect::<SeaOrm>().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kills_with_diesel() {
    each_key_has_one_effect::<Diesel>().await;
}
