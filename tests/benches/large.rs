//! Fresh keys on a store with 10,000,000 completed records, against an empty store of the same kind, and beside a purge.
//!
//! Each of the two stores has a server of its own, with the same settings. Rounds of fresh keys alternate between both: one key
//! after another, and 64 at a time. A fresh key is an acquire and a completion of the store, without the layer. The client has
//! one processor, and the servers share another.
//!
//! A record has 100 bytes. On the SQL stores, one of ten has expired. After the comparison, the purger of the store deletes
//! these, while 64 tasks complete fresh keys. Their rate is measured before, beside and after the purge.
//!
//! SQLite runs in the process of the client. Work of the full server in the background also slows the empty one, so the ratio
//! is a lower bound.
//!
//! Unlike in the other benchmarks, a commit of PostgreSQL and MariaDB is on the disk before the server replies. Their caches
//! have 1 GB. SQLite has the settings of its store, and Redis has no persistence. The files are in the directory for temporary
//! files (`TMPDIR`), which must be on a disk with 20 GB. Redis takes some 10 GB of memory.
//!
//! ```sh
//! cargo bench -p tests --bench large -- postgres          # one store, or several: redis, postgres, mariadb, sqlite
//! cargo bench -p tests --bench large -- postgres 1000000  # with another number of records
//! ```

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use tests::{
    scratch::Scratch,
    servers::{mariadb::MariaDbServer, postgres::PostgresServer, redis::RedisServer},
    sql,
};
use tokio::{task::JoinSet, time::sleep};
use tower_idempotency::{
    inspect::{Inspect, Query, State},
    store::{Acquired, Store, Ttl},
};
use tower_idempotency_sqlx::{
    Purger,
    sqlx::{Connection, MySqlConnection, PgConnection, SqliteConnection},
};

use self::{
    fresh::{Record, Size, compare_fresh, complete_fresh, complete_many, random_claim, verdict},
    pace::Pace,
    table::{FilledTable, RECORD},
};

mod fresh;
#[allow(
    dead_code,
    reason = "only the processors are used: this benchmark has no layer to compare"
)]
mod pace;
mod table;

/// Settings that the command line chooses.
#[derive(Clone, Copy)]
struct Scale {
    records: u32,
    rounds: usize,
    /// Maximum number of keys that a task completes in a round.
    max_each: u32,
    /// Time for which the rate of fresh keys is measured without a purge.
    window: Duration,
}

fn main() {
    let args: Vec<_> = env::args().skip(1).collect();
    // `cargo test --all-targets` also runs benchmarks, to check that they work, but does not pass `--bench`.
    let is_bench = args.iter().any(|arg| arg == "--bench");
    let mut scale = if is_bench {
        Scale {
            records: 10_000_000,
            rounds: 40,
            max_each: u32::MAX,
            window: Duration::from_secs(30),
        }
    } else {
        Scale {
            records: 2_000,
            rounds: 1,
            max_each: 1,
            window: Duration::from_millis(50),
        }
    };
    let mut names = Vec::new();
    for arg in args.iter().filter(|arg| !arg.starts_with('-')) {
        match arg.parse() {
            Ok(records) => scale.records = records,
            Err(_) => names.push(arg.as_str()),
        }
    }
    if is_bench && names.is_empty() {
        println!(
            "name the stores: redis, postgres, mariadb, sqlite; each fills a disk with up to 20 GB"
        );
        return;
    }
    let stores: [(&str, fn(Scale)); 4] = [
        ("redis", redis),
        ("postgres", postgres),
        ("mariadb", mariadb),
        ("sqlite", sqlite),
    ];
    for (name, run) in stores {
        if names.is_empty() || names.contains(&name) {
            // A thread of its own, which is then pinned to one processor.
            thread::spawn(move || run(scale)).join().expect("no panic");
        }
    }
}

/// Compares fresh keys on the full store and on the empty one, one at a time and many at a time. `per_round` are the numbers of
/// keys that a task completes in a round. Returns the number of keys that were completed on each store.
async fn compare<S: Store + Clone>(
    name: &str,
    [full, empty]: &[S; 2],
    per_round: [u32; 2],
    scale: Scale,
) -> u64 {
    let title = format!("{name}, {} records", scale.records);
    let sides = [("on the full store", full), ("on the empty one", empty)];
    let mut completed = 0;
    for (tasks, each) in [1, MANY].into_iter().zip(per_round) {
        let size = Size {
            tasks,
            each: each.min(scale.max_each),
            rounds: scale.rounds,
        };
        completed += compare_fresh(&title, sides, FRESH, size, TARGET_RATIO).await;
    }
    completed
}

/// Target for the time of a fresh key, relative to that on an empty store.
const TARGET_RATIO: f64 = 1.2;
/// Target for the rate of fresh keys beside a purge, as a share of the rate before it.
const TARGET_SHARE: f64 = 0.8;
/// Number of tasks that complete keys at the same time.
const MANY: u32 = 64;
const FRESH: Record = Record {
    bytes: &RECORD,
    retention: Ttl::from_secs(24 * 60 * 60),
};

// ---- Redis ----

fn redis(scale: Scale) {
    let servers = Pace::One.server(|| [(); 2].map(|()| RedisServer::start(&[])));
    Pace::One.runtime().block_on(async {
        let stores = [servers[0].store().await, servers[1].store().await];
        let began = Instant::now();
        // With the calls of the store, so that the entries have its form.
        let each = scale.records.div_ceil(FILLERS);
        complete_many(&stores[0], FRESH, FILLERS, each).await;
        let [bytes, keys] = memory(&servers[0]);
        println!(
            "redis: filled in {:.0} s: {keys} keys, {:.1} GB, {} bytes for each",
            began.elapsed().as_secs_f64(),
            bytes as f64 / 1e9,
            bytes / keys.max(1)
        );
        assert!(keys >= u64::from(scale.records), "{keys} keys");
        Box::pin(compare("redis", &stores, [400, 40], scale)).await;
    });
}

/// Returns the memory in bytes, and the number of keys.
fn memory(server: &RedisServer) -> [u64; 2] {
    let info = server.command(&["INFO", "memory"]);
    let bytes = info
        .lines()
        .find_map(|line| line.strip_prefix("used_memory:"));
    let keys = server.command(&["DBSIZE"]);
    [bytes.expect("a number"), keys.as_str()].map(|number| number.trim().parse().expect("a number"))
}

/// Number of keys that are filled in at the same time.
const FILLERS: u32 = 256;

// ---- SQL ----

fn postgres(scale: Scale) {
    let servers = Pace::One.server(|| [(); 2].map(|()| PostgresServer::start(&POSTGRES)));
    Pace::One.runtime().block_on(async {
        let stores = [
            sql::postgres(&servers[0], TABLE).await,
            sql::postgres(&servers[1], TABLE).await,
        ];
        let connection = PgConnection::connect(&servers[0].url()).await;
        let mut table = FilledTable::Postgres(connection.expect("the server runs"));
        let purger = || stores[0].spawn_purger(PURGE_INTERVAL);
        let measured = measure("postgres", &stores, purger, &mut table, [100, 20], scale);
        Box::pin(measured).await;
    });
}

fn mariadb(scale: Scale) {
    let servers = Pace::One.server(|| [(); 2].map(|()| MariaDbServer::start(&MARIADB)));
    Pace::One.runtime().block_on(async {
        let stores = [
            sql::mariadb(&servers[0], TABLE).await,
            sql::mariadb(&servers[1], TABLE).await,
        ];
        let connection = MySqlConnection::connect(&servers[0].url()).await;
        let mut table = FilledTable::MariaDb(connection.expect("the server runs"));
        let purger = || stores[0].spawn_purger(PURGE_INTERVAL);
        let measured = measure("mariadb", &stores, purger, &mut table, [100, 20], scale);
        Box::pin(measured).await;
    });
}

fn sqlite(scale: Scale) {
    // There is no server: SQLite runs in the client's process, on its processor.
    let scratch = Pace::One.server(|| [(); 2].map(|()| Scratch::new()));
    Pace::One.runtime().block_on(async {
        let stores = [
            sql::sqlite(&scratch[0]).await,
            sql::sqlite(&scratch[1]).await,
        ];
        let url = format!("sqlite:{}", scratch[0].file("keys.db").display());
        let connection = SqliteConnection::connect(&url).await;
        let mut table = FilledTable::Sqlite(connection.expect("a file"));
        let purger = || stores[0].spawn_purger(PURGE_INTERVAL);
        let measured = measure("sqlite", &stores, purger, &mut table, [30, 3], scale);
        Box::pin(measured).await;
    });
}

/// Fills the table of the first store, compares both stores, and measures a purge of the first one.
async fn measure<S: Store + Inspect + Clone>(
    name: &str,
    stores: &[S; 2],
    purger: impl FnOnce() -> Purger,
    table: &mut FilledTable,
    per_round: [u32; 2],
    scale: Scale,
) {
    let (began, expired) = (Instant::now(), scale.records / 10);
    table.fill(scale.records, expired).await;
    println!(
        "{name}: filled with {} records in {:.0} s",
        scale.records,
        began.elapsed().as_secs_f64()
    );
    Box::pin(assert_replayed(&stores[0])).await;
    let mut completed = Box::pin(compare(name, stores, per_round, scale)).await;
    completed += Box::pin(measure_purge(name, &stores[0], purger, table, scale)).await;
    // The purge has deleted the expired records, and no other one.
    let stored = u64::from(scale.records - expired) + completed;
    assert_eq!(table.count_completed().await, stored, "records");
}

/// Checks that the store replays a record that the fill has inserted.
async fn assert_replayed(store: &(impl Store + Inspect)) {
    let page = store.list(&Query::new(State::Completed)).await;
    let page = page.expect("the store replies");
    let mut claim = random_claim();
    claim.id = *page.entries[0].id();
    match store.acquire(&claim).await.expect("the store replies") {
        Acquired::Completed { record, .. } => assert_eq!(record[..], RECORD),
        other => panic!("the record is not replayed, found {other:?}"),
    }
}

/// Measures the rate of fresh keys before, beside and after a purge. Returns the number of keys that were completed.
async fn measure_purge<S: Store + Clone>(
    name: &str,
    store: &S,
    purger: impl FnOnce() -> Purger,
    table: &mut FilledTable,
    scale: Scale,
) -> u64 {
    let load = Load::start(store);
    let before = load.rate(sleep(scale.window)).await;
    let (began, purger) = (Instant::now(), purger());
    let purge = async {
        while table.has_expired().await {
            assert!(began.elapsed() < MAX_PURGE, "the purge does not end");
            sleep(POLL_INTERVAL).await;
        }
    };
    let beside = load.rate(purge).await;
    let took = began.elapsed();
    drop(purger);
    let after = load.rate(sleep(scale.window)).await;
    let share = beside / before;
    println!(
        "{name}: purge of {} records of {}: {:.1} s; fresh keys in a second: {before:.0} before, {beside:.0} beside, \
         {after:.0} after; share {share:.3}, target {TARGET_SHARE}: {}",
        scale.records / 10,
        scale.records,
        took.as_secs_f64(),
        verdict(share >= TARGET_SHARE)
    );
    load.stop().await
}

/// Tasks that complete fresh keys until they are stopped.
struct Load {
    completed: Arc<AtomicU64>,
    is_stopped: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

impl Load {
    fn start<S: Store + Clone>(store: &S) -> Self {
        let mut load = Self {
            completed: Arc::default(),
            is_stopped: Arc::default(),
            tasks: JoinSet::new(),
        };
        for _ in 0..MANY {
            let store = store.clone();
            let (completed, is_stopped) =
                (Arc::clone(&load.completed), Arc::clone(&load.is_stopped));
            load.tasks.spawn(async move {
                while !is_stopped.load(Relaxed) {
                    complete_fresh(&store, &random_claim(), FRESH).await;
                    completed.fetch_add(1, Relaxed);
                }
            });
        }
        load
    }

    /// Returns the number of keys that are completed in a second, during this future.
    async fn rate(&self, during: impl Future<Output = ()>) -> f64 {
        let (began, before) = (Instant::now(), self.completed.load(Relaxed));
        during.await;
        let completed = self.completed.load(Relaxed) - before;
        completed as f64 / began.elapsed().as_secs_f64()
    }

    /// Waits for the last keys, and returns the number of all.
    async fn stop(self) -> u64 {
        self.is_stopped.store(true, Relaxed);
        self.tasks.join_all().await;
        self.completed.load(Relaxed)
    }
}

const TABLE: &str = "tower_idempotency";
/// Settings of production, which the servers of tests do not have.
const POSTGRES: [&str; 4] = [
    "fsync=on",
    "full_page_writes=on",
    "shared_buffers=1GB",
    "max_wal_size=4GB",
];
const MARIADB: [&str; 2] = [
    "innodb-flush-log-at-trx-commit=1",
    "innodb-buffer-pool-size=1G",
];
/// Interval of the purger. The first purge begins at once. A long interval would add idle time after a batch that failed.
const PURGE_INTERVAL: Duration = Duration::from_millis(100);
/// Time between two checks if the purge has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Only detects a purge that does not end.
const MAX_PURGE: Duration = Duration::from_secs(3 * 60 * 60);
