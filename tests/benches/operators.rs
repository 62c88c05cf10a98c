//! Listings and summaries of stores with 1,000,000 entries, and the costs of the indexes of Redis.
//!
//! A page has 50 entries. The times are those of one call after another, through the store: the first page of each state, and
//! pages that follow it. A state with fewer pages starts again with its second page. The last line of a store compares the
//! slowest p99 with the target.
//!
//! Half of the entries of Redis are in its index of completed entries. The summary is also measured without this index.
//!
//! `index` compares requests on a Redis store with and without its indexes, alternately. It reports the calls and the
//! microseconds that the server counts, and the time that the client measures. `completed` compares fresh keys on tables with
//! and without the index of completed entries, alternately.
//!
//! ```sh
//! cargo bench -p tests --bench operators                   # all
//! cargo bench -p tests --bench operators -- sqlite cluster # by name: postgres, mariadb, sqlite, redis, cluster, index, completed
//! ```

use std::{
    env,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tests::{
    scratch::Scratch,
    servers::{
        mariadb::{MariaDbServer, is_mysql},
        postgres::PostgresServer,
        redis::{RedisCluster, RedisServer},
    },
    sql,
};
use tokio::{runtime::Runtime, task::JoinSet, time::sleep};
use tower_idempotency::{
    NeedsAttention,
    inspect::{Inspect, InspectError, Query, Resolution, State},
    store::{Store, Ttl},
};
use tower_idempotency_redis::{ConnectError, RedisOptions, RedisStore};
use tower_idempotency_sqlx::sqlx::{self, AssertSqlSafe, Connection};

use self::fresh::{
    Record, Size, compare_fresh, complete_fresh, median_ratio, micros, random_claim, verdict,
};

mod fresh;

/// Settings that the command line chooses.
#[derive(Clone, Copy)]
struct Scale {
    entries: u32,
    /// Number of measured pages of each kind.
    pages: usize,
    /// Number of repetitions of each measurement.
    repetitions: usize,
}

fn main() {
    let args: Vec<_> = env::args().skip(1).collect();
    let scale = if args.iter().any(|arg| arg == "--bench") {
        Scale {
            entries: 1_000_000,
            pages: 200,
            repetitions: 3,
        }
    } else {
        Scale {
            // As many as are needed for one entry of each state.
            entries: SHARE,
            pages: 2,
            repetitions: 1,
        }
    };
    let names: Vec<_> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let is_chosen = |name: &str| names.is_empty() || names.iter().any(|it| *it == name);
    let runtime = Runtime::new().expect("a runtime");
    runtime.block_on(async {
        if is_chosen("postgres") {
            Box::pin(postgres(scale)).await;
        }
        if is_chosen("mariadb") {
            Box::pin(mariadb(scale)).await;
        }
        if is_chosen("sqlite") {
            Box::pin(sqlite(scale)).await;
        }
        if is_chosen("redis") {
            let server = RedisServer::start(&[]);
            let connect = async |options: RedisOptions| options.connect(&server.url()).await;
            Box::pin(redis("redis", connect, scale, TARGET)).await;
        }
        if is_chosen("cluster") {
            let cluster = RedisCluster::start();
            let urls = cluster.urls();
            let connect = async |options: RedisOptions| options.connect_cluster(&urls).await;
            Box::pin(redis("cluster", connect, scale, TARGET_OF_CLUSTER)).await;
        }
        if is_chosen("index") {
            Box::pin(index(scale)).await;
        }
        if is_chosen("completed") {
            Box::pin(index_of_completed(scale)).await;
        }
    });
}

/// Measures the listings of each state, and the summary.
async fn measure(name: &str, store: &impl Inspect, scale: Scale, target: Duration) {
    let mut slowest = Duration::ZERO;
    for &state in State::ALL {
        if !store.abilities().can_list(state) {
            continue;
        }
        let first = Query::new(state);
        for repetition in 0..scale.repetitions {
            let mut times = [Vec::new(), Vec::new()];
            for _ in 0..scale.pages {
                let (_, took) = timed(page(store, first.clone())).await;
                times[0].push(took);
            }
            let (second, _) = timed(page(store, first.clone())).await;
            let mut query = second.clone();
            while query.page().is_some() && times[1].len() < scale.pages {
                let (next, took) = timed(page(store, query)).await;
                times[1].push(took);
                query = if next.page().is_some() {
                    next
                } else {
                    second.clone()
                };
            }
            for (kind, times) in ["first page", "next pages"].iter().zip(&mut times) {
                times.sort();
                let at = |percent: usize| {
                    let last = times.len().saturating_sub(1);
                    times.get(last * percent / 100).copied().unwrap_or_default()
                };
                slowest = slowest.max(at(99));
                println!(
                    "{name}: {state}, {kind}, run {}: {} pages, p50 {:.2} ms, p99 {:.2} ms",
                    repetition + 1,
                    times.len(),
                    millis(at(50)),
                    millis(at(99))
                );
            }
        }
    }
    measure_summary(name, store, scale).await;
    println!(
        "{name}: slowest p99 {:.2} ms, target {:.0} ms: {}",
        millis(slowest),
        millis(target),
        verdict(slowest < target)
    );
}

/// Measures the summary of all states that the store lists.
async fn measure_summary(name: &str, store: &impl Inspect, scale: Scale) {
    for limit in [1_000, 100_000] {
        let mut times = Vec::new();
        for _ in 0..scale.repetitions.max(3) {
            times.push(timed(store.summary(limit)).await.1);
        }
        times.sort();
        let median = times[times.len() / 2];
        println!(
            "{name}: summary of {limit}: median {:.1} ms, target {:.0} ms: {}",
            millis(median),
            millis(TARGET_OF_SUMMARY),
            verdict(median < TARGET_OF_SUMMARY)
        );
    }
}

/// Reads a page of 50 entries. A call may return fewer, although more follow. Returns the query of the next page.
async fn page(store: &impl Inspect, mut query: Query) -> Result<Query, InspectError> {
    let mut missing = 50;
    loop {
        let page = store.list(&query.clone().with_limit(missing)).await?;
        missing -= page.entries.len() as u16;
        let has_more = page.next.is_some();
        query = query.with_page(page.next);
        if missing == 0 || !has_more {
            return Ok(query);
        }
    }
}

async fn timed<T, E: std::fmt::Debug>(call: impl Future<Output = Result<T, E>>) -> (T, Duration) {
    let start = Instant::now();
    let result = Box::pin(call).await.expect("the store replies");
    (result, start.elapsed())
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Target for p99 of a page.
const TARGET: Duration = Duration::from_millis(10);
const TARGET_OF_CLUSTER: Duration = Duration::from_millis(50);
const TARGET_OF_SUMMARY: Duration = Duration::from_millis(100);
/// Target for the time of a request with an index, relative to the time without it.
const TARGET_RATIO: f64 = 1.05;

// ---- SQL ----

/// Fills a table: of 2,000 entries, one each is in progress, an orphan, expired and needing attention. The others are
/// completed.
async fn postgres(scale: Scale) {
    let server = PostgresServer::start(&[]);
    let store = sql::postgres(&server, "tower_idempotency").await;
    let mut admin = sqlx::PgConnection::connect(&server.url())
        .await
        .expect("the server runs");
    let fill = format!(
        r"insert into tower_idempotency
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)
select sha256(n::text::bytea), substring(sha256(n::text::bytea) from 1 for 16), sha256('fingerprint'), 1,
  case n % {SHARE} when 0 then now + 6000000 + n else now - 600000 - n end, 3600000,
  case n % {SHARE} when 0 then now + 9600000 + n when 1 then now + 3000000 - n when 2 then now - 1000 - n else now + 86400000 + n end,
  now - 900000, case when n % {SHARE} > 2 then now - n end, 'host-1:4711', 'POST /orders/' || n,
  case when n % {SHARE} = 3 then '\x0102000000000161'::bytea when n % {SHARE} > 3 then '\x0100000000007061'::bytea end
from generate_series(1, {}) n, (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock;
vacuum analyze tower_idempotency",
        scale.entries
    );
    for statement in fill.split(";\n") {
        let filled = sqlx::raw_sql(AssertSqlSafe(statement.to_owned()))
            .execute(&mut admin)
            .await;
        filled.expect("the server runs");
    }
    measure("postgres", &store, scale, TARGET).await;
}

async fn mariadb(scale: Scale) {
    let server = MariaDbServer::start(&[]);
    let store = sql::mariadb(&server, "tower_idempotency").await;
    let mut admin = sqlx::MySqlConnection::connect(&server.url())
        .await
        .expect("the server runs");
    let now = "(timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000)";
    let fill = format!(
        "insert into tower_idempotency
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)
with recursive n (n) as (select 1 union all select n + 1 from n where n < {})
select unhex(sha2(n, 256)), left(unhex(sha2(n, 256)), 16), unhex(sha2('fingerprint', 256)), 1,
  if(n % {SHARE} = 0, {now} + 6000000 + n, {now} - 600000 - n), 3600000,
  case n % {SHARE} when 0 then {now} + 9600000 + n when 1 then {now} + 3000000 - n when 2 then {now} - 1000 - n
    else {now} + 86400000 + n end,
  {now} - 900000, if(n % {SHARE} > 2, {now} - n, null), 'host-1:4711', concat('POST /orders/', n),
  case when n % {SHARE} = 3 then x'0102000000000161' when n % {SHARE} > 3 then x'0100000000007061' end
from n;
analyze table tower_idempotency",
        scale.entries
    );
    // Both stop a recursion after 1,000 steps.
    let unlimited = if is_mysql() {
        "set session cte_max_recursion_depth = 10000000"
    } else {
        "set session max_recursive_iterations = 10000000"
    };
    let unlimited = sqlx::raw_sql(unlimited).execute(&mut admin).await;
    unlimited.expect("the server runs");
    let filled = sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut admin).await;
    filled.expect("the server runs");
    measure("mariadb", &store, scale, TARGET).await;
}

async fn sqlite(scale: Scale) {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let mut admin = sqlx::SqliteConnection::connect(&url).await.expect("a file");
    let now = "cast((julianday('now') - 2440587.5) * 86400000 as integer)";
    let fill = format!(
        "insert into tower_idempotency
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)
with recursive n (n) as (select 1 union all select n + 1 from n where n < {})
select randomblob(32), randomblob(16), randomblob(32), 1,
  iif(n % {SHARE} = 0, {now} + 6000000 + n, {now} - 600000 - n), 3600000,
  case n % {SHARE} when 0 then {now} + 9600000 + n when 1 then {now} + 3000000 - n when 2 then {now} - 1000 - n
    else {now} + 86400000 + n end,
  {now} - 900000, iif(n % {SHARE} > 2, {now} - n, null), 'host-1:4711', 'POST /orders/' || n,
  case when n % {SHARE} = 3 then x'0102000000000161' when n % {SHARE} > 3 then x'0100000000007061' end
from n; analyze",
        scale.entries
    );
    let filled = sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut admin).await;
    filled.expect("a file");
    measure("sqlite", &store, scale, TARGET).await;
}

/// Number of entries of which one has each of the rarer states.
const SHARE: u32 = 2_000;

/// Compares fresh keys on tables with the index of completed entries and on tables without it.
async fn index_of_completed(scale: Scale) {
    let server = PostgresServer::start(&[]);
    let mut admin = sqlx::PgConnection::connect(&server.url())
        .await
        .expect("the server runs");
    let on = sql::postgres(&server, "with_index").await;
    let off = sql::postgres(&server, "without_index").await;
    let drop = sqlx::raw_sql("drop index without_index_completed");
    drop.execute(&mut admin).await.expect("the server runs");
    compare_indexed("postgres", [&on, &off], scale).await;

    let server = MariaDbServer::start(&[]);
    let mut admin = sqlx::MySqlConnection::connect(&server.url())
        .await
        .expect("the server runs");
    let on = sql::mariadb(&server, "with_index").await;
    let off = sql::mariadb(&server, "without_index").await;
    let drop = "alter table without_index drop index completed, drop column record_expires";
    let drop = sqlx::raw_sql(drop);
    drop.execute(&mut admin).await.expect("the server runs");
    compare_indexed("mariadb", [&on, &off], scale).await;

    let scratch = [Scratch::new(), Scratch::new()];
    let on = sql::sqlite(&scratch[0]).await;
    let off = sql::sqlite(&scratch[1]).await;
    let url = format!("sqlite:{}", scratch[1].file("keys.db").display());
    let mut admin = sqlx::SqliteConnection::connect(&url).await.expect("a file");
    let drop = sqlx::raw_sql("drop index tower_idempotency_completed");
    drop.execute(&mut admin).await.expect("a file");
    compare_indexed("sqlite", [&on, &off], scale).await;
}

/// Compares fresh keys on both stores: the first has the index, and the second has not.
async fn compare_indexed<S: Store + Clone>(name: &str, [on, off]: [&S; 2], scale: Scale) {
    let size = Size {
        tasks: 1,
        each: PER_ROUND / 4,
        rounds: scale.pages * scale.repetitions,
    };
    let title = format!("completed: {name}");
    let sides = [("with the index", on), ("without it", off)];
    compare_fresh(&title, sides, RECORD, size, TARGET_RATIO).await;
}

/// The record of fresh keys.
const RECORD: Record = Record {
    bytes: b"\x01\x00\0\0\0\0",
    retention: Ttl::from_secs(60),
};

// ---- Redis ----

fn options() -> RedisOptions {
    RedisOptions::new().with_timeout(Duration::from_secs(20))
}

/// Fills the server: of 2,000 entries, one is an orphan and one needs attention. Half of the others are in progress, and half
/// are completed. The indexes have all of them.
async fn redis(
    name: &str,
    connect: impl AsyncFn(RedisOptions) -> Result<RedisStore, ConnectError>,
    scale: Scale,
    target: Duration,
) {
    let store = connect(options().with_completed_index(true)).await;
    let store = store.expect("the server runs");
    let mut workers = JoinSet::new();
    for worker in 0..CONCURRENT {
        let store = store.clone();
        workers.spawn(async move {
            for n in (worker..scale.entries).step_by(CONCURRENT as usize) {
                let mut claim = random_claim();
                claim.owner = "host-1:4711";
                claim.operation = "POST /orders".into();
                claim.lease = match n % SHARE {
                    0 => Ttl::from_millis(1),
                    _ => Ttl::from_secs(36_000),
                };
                store.acquire(&claim).await.expect("the server runs");
                let (record, retention) = match n % SHARE {
                    1 => {
                        let attention = NeedsAttention::new("refund-failed");
                        let attention = Resolution::NeedsAttention(attention);
                        attention.record(&claim.id).expect("a record")
                    }
                    odd if odd % 2 == 1 => (Bytes::from_static(RECORD.bytes), DAY),
                    _ => continue,
                };
                let lease = claim.lease_ref(1);
                let completed = store.complete(&lease, record, retention).await;
                completed.expect("the server runs");
            }
        });
    }
    workers.join_all().await;
    sleep(Duration::from_millis(10)).await;
    measure(name, &store, scale, target).await;
    let name = format!("{name} without the index of completed entries");
    let without = connect(options()).await.expect("the server runs");
    measure_summary(&name, &without, scale).await;
}

const CONCURRENT: u32 = 128;
const DAY: Ttl = Ttl::from_secs(24 * 60 * 60);

/// Compares fresh keys and replays on a store with indexes and on one without, alternately.
async fn index(scale: Scale) {
    let server = RedisServer::start(&[]);
    let url = server.url();
    let mut sides = Vec::new();
    for has_indexes in [true, false] {
        let options = options().with_indexes(has_indexes);
        let store = options
            .with_prefix(&format!("{has_indexes}:"))
            .connect(&url)
            .await;
        sides.push((has_indexes, store.expect("the server runs")));
    }
    let rounds = (scale.pages / 5).max(1);
    // The first of each pair has indexes, and the second has none.
    let mut fresh = [Vec::new(), Vec::new()];
    let mut replays = [Vec::new(), Vec::new()];
    let mut ratios = [Vec::new(), Vec::new()];
    let mut counted = [[Counted::default(); 2]; 2];
    let ratio = |[on, off]: [Duration; 2]| on.as_secs_f64() / off.as_secs_f64();
    for round in 0..rounds * scale.repetitions {
        let (mut of_fresh, mut of_replays) = ([Duration::ZERO; 2], [Duration::ZERO; 2]);
        // Each side is the first one in half of the rounds.
        for side in [round % 2, 1 - round % 2] {
            let store = &sides[side].1;
            let claims: Vec<_> = (0..PER_ROUND).map(|_| random_claim()).collect();
            let before = Counted::read(&server);
            let start = Instant::now();
            for claim in &claims {
                complete_fresh(store, claim, RECORD).await;
            }
            of_fresh[side] = start.elapsed() / PER_ROUND;
            fresh[side].push(of_fresh[side]);
            let between = Counted::read(&server);
            let start = Instant::now();
            for claim in &claims {
                store.acquire(claim).await.expect("the server runs");
            }
            of_replays[side] = start.elapsed() / PER_ROUND;
            replays[side].push(of_replays[side]);
            let after = Counted::read(&server);
            counted[side][0].add(before, between);
            counted[side][1].add(between, after);
        }
        ratios[0].push(ratio(of_fresh));
        ratios[1].push(ratio(of_replays));
    }
    let kinds = [("fresh key", fresh), ("replay", replays)];
    for (at, ((kind, mut times), ratios)) in kinds.into_iter().zip(ratios).enumerate() {
        for (side, times) in times.iter_mut().enumerate() {
            times.sort();
            let counted = counted[side][at];
            let requests = (rounds * scale.repetitions) as f64 * f64::from(PER_ROUND);
            println!(
                "index {}: {kind}: {:.2} calls, {:.2} us of the server, median {:.1} us",
                if sides[side].0 { "on" } else { "off" },
                counted.calls as f64 / requests,
                counted.micros as f64 / requests,
                micros(times[times.len() / 2]),
            );
        }
        println!("index: {kind}: {}", median_ratio(ratios, TARGET_RATIO));
    }
}

/// Calls of scripts, and the microseconds that they took, by the count of the server.
#[derive(Clone, Copy, Default)]
struct Counted {
    calls: u64,
    micros: u64,
}

impl Counted {
    fn read(server: &RedisServer) -> Self {
        let stats = server.command(&["INFO", "commandstats"]);
        let line = stats
            .lines()
            .find(|line| line.starts_with("cmdstat_evalsha:"));
        let field = |name: &str| {
            let (_, rest) = line?.split_once(name)?;
            rest.split(',').next()?.trim().parse().ok()
        };
        Self {
            calls: field("calls=").unwrap_or_default(),
            micros: field("usec=").unwrap_or_default(),
        }
    }

    fn add(&mut self, before: Self, after: Self) {
        self.calls += after.calls - before.calls;
        self.micros += after.micros - before.micros;
    }
}

const PER_ROUND: u32 = 200;
