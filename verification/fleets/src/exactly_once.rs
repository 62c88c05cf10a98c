//! Banks whose processes are killed and paused at any moment while their handlers are in transactions: each key has one effect.
//!
//! A strike at an idle process proves nothing: it must end executions, which are then taken over. The moments of strikes are
//! random, so each load is repeated until enough executions were taken over.
//!
//! `FULL=1` uses 300 kills and 300 pauses. The default uses fewer.

use std::{fmt, time::Duration};

use tests::{
    database::{TestDatabase, TestDialect, pool_options},
    few_or,
    proxy::{Mode, Proxy},
    servers::postgres::PostgresServer,
};
use tower_idempotency_sqlx::{PostgresStore, sqlx};
use verification::oracle::{Effect, History, Sums};

use crate::fleet::{Case, Fleet, Load, Program, StrikeKind, until_seen};

/// The processes of a bank, which share one database.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "settings, given whole")]
pub struct Bank<'a> {
    /// The program. It takes `--listen`, `--store`, `--table`, `--lease` and `--commit`, and serves `/charge/{ms}`.
    pub program: Program,
    /// The URL of the database for the processes.
    pub url: &'a str,
    /// The argument `--commit`: the driver, or the order of the transactions.
    pub commit: &'a str,
}

/// The handlers of a load, and the behavior of other processes while one is stopped.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "settings, given whole")]
pub struct HandlerLoad {
    /// The duration of handlers in milliseconds if their process is killed, and the number of keys requested at a time.
    pub killed: (u64, usize),
    /// The same if their process is stopped.
    pub stopped: (u64, usize),
    /// The behavior of other processes while a process is stopped in its transaction.
    pub other_processes: OtherProcesses,
}

impl HandlerLoad {
    /// The handlers on a server.
    pub const ON_SERVER: Self = Self {
        killed: (40, 16),
        stopped: (200, 24),
        other_processes: OtherProcesses::TakeOver,
    };
    /// The handlers on a file. SQLite permits one writer at a time, so the transactions are short.
    pub const IN_FILE: Self = Self {
        killed: (4, 8),
        stopped: (4, 8),
        other_processes: OtherProcesses::Wait,
    };
}

/// The behavior of other processes while a process is stopped in its transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "matched by the tests")]
pub enum OtherProcesses {
    /// They take over its keys.
    TakeOver,
    /// They wait: the stopped process has locked the file. No other process can take over before the stopped one continues
    /// and commits.
    Wait,
}

/// The sums of a round, and the number of keys that were taken over.
#[derive(Debug)]
#[non_exhaustive]
pub struct Round {
    /// The database, the value of `--commit` and the strikes.
    pub name: String,
    /// The sums.
    pub sums: Sums,
    /// The number of keys that were taken over from a process that was struck between its acquire and its commit.
    pub taken_over: usize,
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} taken over; {}",
            self.name, self.taken_over, self.sums
        )
    }
}

const TAKEN_OVER: Case<Round> = ("taken over", |round| round.taken_over);
const LATE: Case<Round> = ("late", |round| round.sums.late);
/// Two effects of one key, which show that the test can fail.
const DOUBLE: Case<Round> = ("two effects", |round| round.sums.executed_twice);
const OUTRUN: Case<Round> = ("answered by another process", |round| {
    round.sums.late_and_outrun
});

/// Kills the processes of banks on a PostgreSQL, and then pauses them, with each value of `--commit`. The replies of the
/// database are delayed.
///
/// # Panics
///
/// Panics if a key has no effect, more than one, or contradicting responses.
pub async fn survive_on_postgres(program: Program, commit: &str) {
    let server = PostgresServer::start(&["max_connections=300"]);
    let proxy = Proxy::start(server.address());
    delay_replies(&proxy);
    let database = on_postgres(&server).await;
    let url = format!("postgres://app@{}/postgres", proxy.address());
    let bank = Bank {
        program,
        url: &url,
        commit,
    };
    survive_kills(&database, bank, HandlerLoad::ON_SERVER).await;
    survive_pauses(&database, bank, HandlerLoad::ON_SERVER).await;
}

/// Opens the tables of the bank.
///
/// # Panics
///
/// Panics if the server does not create them.
pub async fn on_postgres(server: &PostgresServer) -> TestDatabase<PostgresStore> {
    let pool = pool_options::<sqlx::Postgres>()
        .connect_lazy(&server.url())
        .expect("an URL");
    TestDatabase::open(&server.url(), pool, "bank").await
}

/// Delays the replies of the database, so that processes are often struck between a write and its reply.
pub fn delay_replies(proxy: &Proxy) {
    proxy.set(Mode::Delay {
        up: Duration::ZERO,
        down: Duration::from_millis(4),
    });
}

/// Kills the processes: each key has one effect.
///
/// # Panics
///
/// Panics if a key has no effect, more than one, or contradicting responses, and if no key was taken over.
pub async fn survive_kills<S: TestDialect>(
    database: &TestDatabase<S>,
    bank: Bank<'_>,
    handlers: HandlerLoad,
) {
    until_seen(&[TAKEN_OVER], async |round| {
        exactly_once(database, bank, kills(handlers.killed, 1 + round * 100)).await
    })
    .await;
}

/// Pauses the processes for longer than their leases: each key has one effect.
///
/// # Panics
///
/// Like [`survive_kills`].
pub async fn survive_pauses<S: TestDialect>(
    database: &TestDatabase<S>,
    bank: Bank<'_>,
    handlers: HandlerLoad,
) {
    let cases = match handlers.other_processes {
        OtherProcesses::TakeOver => &[LATE, TAKEN_OVER][..],
        OtherProcesses::Wait => &[LATE],
    };
    until_seen(cases, async |round| {
        let load = pauses(handlers.stopped, 2 + round * 100, few_or(6, 300));
        exactly_once(database, bank, load).await
    })
    .await;
}

/// Shows that the judge finds second effects: `bank` writes effect and record in two transactions.
///
/// # Panics
///
/// Panics if no key had two effects, or if neither a strike nor a slow process explains the second one.
pub async fn find_second_effects<S: TestDialect>(
    database: &TestDatabase<S>,
    bank: Bank<'_>,
    handlers: HandlerLoad,
) {
    if handlers.other_processes == OtherProcesses::TakeOver {
        until_seen(&[DOUBLE, OUTRUN], async |round| {
            let load = pauses(handlers.stopped, 4 + round * 100, few_or(6, 30));
            assert_effects_explained(database, bank, load).await
        })
        .await;
    }
    let (_, at_a_time) = handlers.killed;
    until_seen(&[DOUBLE], async |round| {
        let load = kills((40, at_a_time), 3 + round * 100);
        assert_effects_explained(database, bank, load).await
    })
    .await;
}

fn kills((handler, at_a_time): (u64, usize), seed: u64) -> Load {
    Load {
        path: format!("/charge/{handler}"),
        at_a_time,
        keys: 0,
        poll: Duration::from_millis(100),
        lease: Duration::from_millis(700),
        strike_count: few_or(12, 300),
        strike_kind: StrikeKind::Kill,
        at_once: 1,
        // A process must start and connect before a kill can end an execution, also on a busy machine.
        strike_interval: Duration::from_millis(900),
        seed,
    }
}

fn pauses(load: (u64, usize), seed: u64, count: usize) -> Load {
    let lease = Duration::from_millis(500);
    Load {
        lease,
        strike_count: count,
        strike_kind: StrikeKind::Pause(lease * 3 / 2),
        at_once: 1,
        strike_interval: Duration::from_millis(300),
        ..kills(load, seed)
    }
}

async fn run<S: TestDialect>(database: &TestDatabase<S>, bank: Bank<'_>, load: Load) -> History {
    database.admin("delete from {table}").await;
    database.admin("delete from {table}_effects").await;
    let lease = load.lease.as_millis().to_string();
    let table = database.table.as_str();
    let request = format!("POST {}", load.path);
    let Bank {
        program,
        url,
        commit,
    } = bank;
    let args = [
        "--store", url, "--table", table, "--lease", &lease, "--commit", commit,
    ];
    let mut history = Fleet::of(program, MEMBERS, &args).run(load).await;
    let effects = database.effects().await.into_iter().map(|row| Effect {
        pid: u32::try_from(row.pid).expect("a process id"),
        n: u64::try_from(row.n).expect("a number"),
        request: request.clone(),
        key: row.key,
    });
    history.effects = effects.collect();
    // A process that finds its lease lost before it writes responds with 503, and its client retries.
    history.problems = &["503"];
    history
}

/// Asserts that each key has exactly one effect and one response.
async fn exactly_once<S: TestDialect>(
    database: &TestDatabase<S>,
    bank: Bank<'_>,
    load: Load,
) -> Round {
    let (strike_count, strike_kind) = (load.strike_count, load.strike_kind);
    let history = run(database, bank, load).await;
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
    summed(database, bank, strike_kind, &history).await
}

/// Asserts that a strike at its process, or a process that was slower than its lease, explains each second effect of a key.
async fn assert_effects_explained<S: TestDialect>(
    database: &TestDatabase<S>,
    bank: Bank<'_>,
    load: Load,
) -> Round {
    let strike_kind = load.strike_kind;
    let history = run(database, bank, load).await;
    none("unexplained", &history.unexplained_effects());
    summed(database, bank, strike_kind, &history).await
}

async fn summed<S: TestDialect>(
    database: &TestDatabase<S>,
    bank: Bank<'_>,
    strike_kind: StrikeKind,
    history: &History,
) -> Round {
    // A store in a file has no scheme.
    let scheme = bank
        .url
        .split_once(':')
        .map_or("sqlite", |(scheme, _)| scheme);
    let sql = "select 'taken over', generation, generation from {table} where generation > 1";
    let sql = sql.replace("{table}", &database.table);
    Round {
        name: format!("{scheme}, {}, {strike_kind:?}", bank.commit),
        sums: history.sums(),
        taken_over: S::rows(&database.pool, sql).await.len(),
    }
}

fn none(what: &str, keys: &[String]) {
    let first: Vec<_> = keys.iter().take(3).map(String::as_str).collect();
    let n = keys.len();
    assert!(n == 0, "{what}: {n} keys, such as\n{}", first.join("\n"));
}

const MEMBERS: usize = 4;
