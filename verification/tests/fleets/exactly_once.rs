//! Several processes on one database, killed and paused at any moment. If their handlers commit effect and record in
//! one transaction, each key has one effect. With two transactions some keys have two effects, which shows that the
//! test can fail.
//!
//! A strike at an idle process proves nothing: it must end executions, which are then taken over. The moments of
//! strikes are random, so each load is repeated until enough executions were taken over.
//!
//! `FULL=1` uses 300 kills and 30 pauses. The default uses fewer.

use std::{fmt, process::Command, time::Duration};
use tests::database::pool_options;

use tests::{
    database::{TestDatabase, TestDialect, sqlite_pool},
    few_or,
    proxy::{Mode, Proxy},
    scratch::Scratch,
    servers::{
        mariadb::{self, MariaDbServer},
        postgres::PostgresServer,
    },
};
use tower_idempotency_sqlx::{MySqlStore, PostgresStore, SqliteStore};
use verification::{
    fleet::{Case, Fleet, Load, StrikeKind, until_seen},
    oracle::{Effect, History, Sums},
};

const MEMBERS: usize = 4;
const LEASE: Duration = Duration::from_millis(700);

fn bank(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bank"));
    command.args(args);
    command
}

fn kills((handler, at_a_time): (u64, usize), seed: u64) -> Load {
    Load {
        path: format!("/charge/{handler}"),
        at_a_time,
        keys: 0,
        poll: Duration::from_millis(100),
        lease: LEASE,
        strike_count: few_or(12, 300),
        strike_kind: StrikeKind::Kill,
        at_once: 1,
        // A process must connect before a kill can end an execution.
        strike_interval: Duration::from_millis(450),
        seed,
    }
}

fn pauses(load: (u64, usize), seed: u64) -> Load {
    let lease = Duration::from_millis(500);
    Load {
        lease,
        strike_count: few_or(6, 30),
        strike_kind: StrikeKind::Pause(lease * 3 / 2),
        at_once: 1,
        strike_interval: Duration::from_millis(300),
        ..kills(load, seed)
    }
}

/// Delays the replies of the database, so that processes are often struck between a write and its reply.
fn delay_replies(proxy: &Proxy) {
    proxy.set(Mode::Delay {
        up: Duration::ZERO,
        down: Duration::from_millis(4),
    });
}

async fn run<S: TestDialect>(
    database: &TestDatabase<S>,
    url: &str,
    commit: &str,
    load: Load,
) -> History {
    database.admin("delete from {table}").await;
    database.admin("delete from {table}_effects").await;
    let lease = load.lease.as_millis().to_string();
    let (table, strike_kind) = (database.table.as_str(), load.strike_kind);
    let request = format!("POST {}", load.path);
    let args = [
        "--store", url, "--table", table, "--lease", &lease, "--commit", commit,
    ];
    let mut history = Fleet::of(bank, MEMBERS, &args).run(load).await;
    let effects = database.effects().await.into_iter().map(|row| Effect {
        pid: u32::try_from(row.pid).expect("a process id"),
        n: u64::try_from(row.n).expect("a number"),
        request: request.clone(),
        key: row.key,
    });
    history.effects = effects.collect();
    // A process that finds its lease lost before it writes responds with 503, and its client retries.
    history.problems = &["503"];
    println!("{commit}, {strike_kind:?}");
    history
}

/// Asserts that each key has exactly one effect and one response.
fn is_exactly_once(history: &History, strike_count: usize) {
    let sums = history.sums();
    assert_eq!(sums.strikes, strike_count, "{sums}");
    none("excess effects", &history.excess_effects());
    none("contradictions", &history.contradictions());
    assert_eq!(history.effects.len(), sums.keys, "{sums}");
    assert_eq!(
        (sums.refused_with_effect, sums.refused_without_effect),
        (0, 0),
        "{sums}"
    );
}

/// The behavior of other processes while a process is stopped in its transaction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    TheyTakeOver,
    /// The stopped process has locked the file. No other process can take over before the stopped one continues and
    /// commits.
    TheyWait,
}

/// The duration of handlers in milliseconds if their process is killed or stopped, and the number of keys requested at
/// a time.
#[derive(Clone, Copy)]
struct How {
    killed: (u64, usize),
    stopped: (u64, usize),
    meanwhile: Meanwhile,
}

const ON_A_SERVER: How = How {
    killed: (40, 16),
    stopped: (200, 24),
    meanwhile: Meanwhile::TheyTakeOver,
};
/// SQLite permits one writer at a time, so the transactions are short.
const IN_A_FILE: How = How {
    killed: (4, 8),
    stopped: (4, 8),
    meanwhile: Meanwhile::TheyWait,
};

/// The sums of a round, and the number of keys that were taken over.
struct Round {
    sums: Sums,
    taken_over: usize,
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} taken over; {}", self.taken_over, self.sums)
    }
}

const TAKEN_OVER: Case<Round> = ("taken over", |round| round.taken_over);
const LATE: Case<Round> = ("late", |round| round.sums.late);
/// Two effects of one key, which show that the test can fail.
const DOUBLE: Case<Round> = ("two effects", |round| round.sums.executed_twice);
const OUTRUN: Case<Round> = ("answered by another process", |round| {
    round.sums.late_and_outrun
});

/// Kills processes, and then stops them. `commit` is that of the bank.
async fn survives_kills_and_pauses<S: TestDialect>(
    database: &TestDatabase<S>,
    url: &str,
    commit: &str,
    how: How,
) {
    let exactly_once = async |load: Load| {
        let history = run(database, url, commit, load.clone()).await;
        is_exactly_once(&history, load.strike_count);
        Round {
            sums: history.sums(),
            taken_over: taken_over(database).await,
        }
    };

    until_seen(&[TAKEN_OVER], async |round| {
        exactly_once(kills(how.killed, 1 + round * 100)).await
    })
    .await;

    let cases = match how.meanwhile {
        Meanwhile::TheyTakeOver => &[LATE, TAKEN_OVER][..],
        Meanwhile::TheyWait => &[LATE],
    };
    until_seen(cases, async |round| {
        exactly_once(pauses(how.stopped, 2 + round * 100)).await
    })
    .await;
}

async fn each_key_has_one_effect<S: TestDialect>(database: TestDatabase<S>, url: &str, how: How) {
    let apart = async |load: Load| {
        let history = run(&database, url, "apart", load).await;
        Round {
            sums: history.sums(),
            taken_over: taken_over(&database).await,
        }
    };

    survives_kills_and_pauses(&database, url, "together", how).await;
    if how.meanwhile == Meanwhile::TheyTakeOver {
        until_seen(&[DOUBLE, OUTRUN], async |round| {
            apart(pauses(how.stopped, 4 + round * 100)).await
        })
        .await;
    }

    let (_, at_a_time) = how.killed;
    until_seen(&[DOUBLE], async |round| {
        let load = kills((40, at_a_time), 3 + round * 100);
        let history = run(&database, url, "apart", load).await;
        none("unexplained", &history.unexplained());
        Round {
            sums: history.sums(),
            taken_over: taken_over(&database).await,
        }
    })
    .await;
}

/// Returns the number of keys whose process was struck between its acquire and its commit, and that were taken over.
async fn taken_over<S: TestDialect>(database: &TestDatabase<S>) -> usize {
    let sql = "select 'taken over', generation, generation from {table} where generation > 1";
    let sql = sql.replace("{table}", &database.table);
    S::rows(&database.pool, sql).await.len()
}

/// A PostgreSQL server behind a proxy that delays its replies.
struct ProxiedPostgres {
    database: TestDatabase<PostgresStore>,
    /// URL through the proxy.
    url: String,
    _proxy: Proxy,
    _server: PostgresServer,
}

impl ProxiedPostgres {
    async fn start() -> Self {
        let server = PostgresServer::start(&["max_connections=300"]);
        let proxy = Proxy::start(server.address());
        delay_replies(&proxy);
        let pool = pool_options::<tower_idempotency_sqlx::sqlx::Postgres>()
            .connect_lazy(&server.url())
            .expect("an URL");
        let database: TestDatabase<PostgresStore> =
            TestDatabase::open(&server.url(), pool, "bank").await;
        let url = format!("postgres://app@{}/postgres", proxy.address());
        Self {
            database,
            url,
            _proxy: proxy,
            _server: server,
        }
    }
}

// F-032, F-036
#[tokio::test(flavor = "multi_thread")]
async fn on_postgres() {
    let server = ProxiedPostgres::start().await;
    each_key_has_one_effect(server.database, &server.url, ON_A_SERVER).await;
}

// F-032, F-036
#[tokio::test(flavor = "multi_thread")]
async fn with_tokio_postgres() {
    let server = ProxiedPostgres::start().await;
    survives_kills_and_pauses(&server.database, &server.url, "tokio-postgres", ON_A_SERVER).await;
}

// F-032
#[tokio::test(flavor = "multi_thread")]
async fn on_mariadb() {
    let server = MariaDbServer::start(&[]);
    let proxy = Proxy::start(server.address());
    delay_replies(&proxy);
    let pool = pool_options::<tower_idempotency_sqlx::sqlx::MySql>()
        .connect_lazy(&server.url())
        .expect("an URL");
    let database: TestDatabase<MySqlStore> = TestDatabase::open(&server.url(), pool, "bank").await;
    let url = mariadb::url(proxy.address());
    each_key_has_one_effect(database, &url, ON_A_SERVER).await;
}

// F-032
#[tokio::test(flavor = "multi_thread")]
async fn on_sqlite_file() {
    let scratch = Scratch::new();
    let path = scratch.file("bank.db").display().to_string();
    let database: TestDatabase<SqliteStore> =
        TestDatabase::open(&path, sqlite_pool(&path), "bank").await;
    each_key_has_one_effect(database, &path, IN_A_FILE).await;
}

fn none(what: &str, keys: &[String]) {
    let first: Vec<_> = keys.iter().take(3).map(String::as_str).collect();
    let n = keys.len();
    assert!(n == 0, "{what}: {n} keys, such as\n{}", first.join("\n"));
}
