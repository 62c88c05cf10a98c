//! The SQL stores with a purge during traffic, and without any purge.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use tests::{
    barrier::{eventually, within},
    scratch::Scratch,
    servers::postgres,
    sql::{self, duplicate, retried},
};
use tokio::{runtime::Handle, task::JoinSet, time::sleep};
use tower_idempotency::store::{Acquired, Claim, Store, StoreError, Ttl};
use tower_idempotency_sqlx::{
    MySqlStore, PostgresStore, Purger, SqlError, SqliteStore,
    sqlx::{
        AssertSqlSafe, ConnectOptions as _, Connection as _, Executor as _, PgConnection,
        SqliteConnection, query_scalar, raw_sql, sqlite::SqliteConnectOptions,
    },
};

/// Operations that all three stores have in addition to `Store`.
trait Purged: Store + Clone {
    fn purge(&self, batch: u32) -> impl Future<Output = Result<u64, SqlError>> + Send;
    fn purger(&self, every: Duration) -> Purger;
}

macro_rules! purged {
    ($($store:ty),*) => { $(
        impl Purged for $store {
            async fn purge(&self, batch: u32) -> Result<u64, SqlError> {
                self.purge_expired(batch).await
            }

            fn purger(&self, every: Duration) -> Purger {
                self.spawn_purger(every)
            }
        }
    )* };
}

purged! { MySqlStore, PostgresStore, SqliteStore }

fn claim(lease: Ttl, keep: Ttl) -> Claim {
    let mut claim = sql::claim();
    (claim.lease, claim.orphan_retention) = (lease, keep);
    claim
}

async fn assert_granted<S: Store>(store: &S, claim: &Claim) {
    let acquired = retried(|| store.acquire(claim)).await;
    let acquired = acquired.expect(WORKS);
    let first = Acquired::Granted {
        generation: 1,
        takeover: false,
    };
    assert_eq!(acquired, first);
}

const LONG: Ttl = Ttl::from_secs(600);
const SHORT: Ttl = Ttl::from_millis(30);
/// The time after which an entry with a short lease and a short orphan retention may be deleted. The clocks of
/// databases round to milliseconds.
const BOTH: Duration = Duration::from_millis(59);

/// Two processes purge as fast as possible, a few rows at a time. Meanwhile other entries are about to expire:
/// leases that are renewed, and records that are replaced after their expiry.
async fn purge_keeps_live_entries<S: Purged>(store: S) {
    let over = Arc::new(AtomicBool::new(false));
    let deleted = Arc::new(AtomicU64::new(0));
    let mut purging = JoinSet::new();
    for _ in 0..2 {
        let (store, over) = (store.clone(), Arc::clone(&over));
        let deleted = Arc::clone(&deleted);
        purging.spawn(async move {
            while !over.load(SeqCst) {
                // The store retries after a deadlock with the traffic. After three deadlocks in a row, only this call
                // fails.
                if let Ok(purged) = store.purge(7).await {
                    deleted.fetch_add(purged, SeqCst);
                }
                sleep(Duration::from_millis(1)).await;
            }
        });
    }
    let mut living = JoinSet::new();
    // Runs for at least three seconds, and until enough entries were deleted and checked.
    let (began, seen) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    for _ in 0..8 {
        let store = store.clone();
        let (seen, deleted) = (Arc::clone(&seen), Arc::clone(&deleted));
        living.spawn(async move {
            while began.elapsed() < Duration::from_secs(3)
                || began.elapsed() < LONGEST
                    && (seen.load(SeqCst) < 50 || deleted.load(SeqCst) <= 20)
            {
                let claim = claim(SHORT, SHORT);
                let sent = Instant::now();
                assert_granted(&store, &claim).await;
                let lease = claim.lease_ref(1);
                let (began, held) = (Instant::now(), LONG.as_duration());
                match retried(|| store.renew(&lease, LONG)).await {
                    // The renewal was too late, so this round proves nothing.
                    Err(StoreError::LeaseLost) if sent.elapsed() >= BOTH => continue,
                    renewed => renewed.expect(WORKS),
                }
                // Sleeps for longer than the entry would have lived without the renewal.
                sleep(Duration::from_millis(70)).await;
                let other = duplicate(&claim);
                let found = retried(|| store.acquire(&other)).await;
                match found.expect(WORKS) {
                    Acquired::InProgress { expires_in, .. } => {
                        assert!(expires_in > held.saturating_sub(began.elapsed() * 2));
                    }
                    other => panic!("a lease was deleted, found {other:?}"),
                }
                retried(|| store.complete(&lease, "kept".into(), SHORT))
                    .await
                    .expect(WORKS);
                sleep(Duration::from_millis(40)).await;
                // The record has expired, and may be deleted. The key is free, and gets another record at once.
                let next = duplicate(&claim);
                assert_granted(&store, &next).await;
                let lease = next.lease_ref(1);
                retried(|| store.complete(&lease, "next".into(), LONG))
                    .await
                    .expect(WORKS);
                sleep(Duration::from_millis(5)).await;
                let other = duplicate(&claim);
                let found = retried(|| store.acquire(&other)).await;
                match found.expect(WORKS) {
                    Acquired::Completed { record, .. } => assert_eq!(record, "next"),
                    other => panic!("a record was deleted, found {other:?}"),
                }
                seen.fetch_add(1, SeqCst);
                // Creates an entry to delete.
                let forgotten = super_short();
                assert_granted(&store, &forgotten).await;
            }
        });
    }
    living.join_all().await;
    over.store(true, SeqCst);
    purging.join_all().await;
    assert!(seen.load(SeqCst) >= 50, "{seen:?} rounds were checked");
    assert!(
        deleted.load(SeqCst) > 20,
        "{deleted:?} entries were deleted"
    );
}

fn super_short() -> Claim {
    claim(Ttl::MIN, Ttl::MIN)
}

/// No process purges.
async fn expired_entry_is_absent_before_purge<S: Purged>(store: S) {
    let claims = [claim(SHORT, SHORT), claim(LONG, LONG)];
    for claim in &claims {
        assert_granted(&store, claim).await;
    }
    let lease = claims[1].lease_ref(1);
    store
        .complete(&lease, "old".into(), SHORT)
        .await
        .expect(WORKS);
    sleep(Duration::from_millis(100)).await;
    for claim in &claims {
        let mut next = duplicate(claim);
        (next.lease, next.orphan_retention) = (LONG, LONG);
        assert_granted(&store, &next).await;
    }
    assert_eq!(store.purge(100).await.expect(WORKS), 0, "nothing was left");
}

/// A call deletes at most one batch of this size, and returns the number of deleted entries.
async fn purge_returns_number_of_deleted_entries<S: Purged>(store: S) {
    for _ in 0..10 {
        assert_granted(&store, &super_short()).await;
    }
    let living = claim(LONG, LONG);
    assert_granted(&store, &living).await;
    sleep(Duration::from_millis(20)).await;
    let mut purged = Vec::new();
    for _ in 0..4 {
        purged.push(store.purge(4).await.expect(WORKS));
    }
    assert_eq!(purged, [4, 4, 2, 0]);
    assert!(store.renew(&living.lease_ref(1), LONG).await.is_ok());
}

/// A purger runs until it is dropped. It purges more than one batch at a time, on several replicas at once.
async fn background_purger_runs_until_dropped<S: Purged>(store: S) {
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let purgers = [(); 3].map(|()| store.purger(Duration::from_millis(20)));
    assert!(tasks() > before, "each purger is a task");
    let deadline = Instant::now() + LONGEST;
    loop {
        for _ in 0..5 {
            assert_granted(&store, &super_short()).await;
        }
        sleep(Duration::from_millis(100)).await;
        // Deletes the entries that the purgers have not reached.
        if store.purge(100).await.expect(WORKS) == 0 {
            break;
        }
        assert!(Instant::now() < deadline, "no process purges");
    }
    drop(purgers);
    eventually("the purgers end", || tasks() <= before).await;
}

macro_rules! each {
    ($($case:ident)*) => {
        mod in_postgres {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    super::$case(tests::sql::postgres(tests::servers::postgres::shared(), stringify!($case)).await).await;
                }
            )*
        }

        mod in_mariadb {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    super::$case(tests::sql::mariadb(tests::servers::mariadb::shared(), stringify!($case)).await).await;
                }
            )*
        }

        mod in_sqlite {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let scratch = super::Scratch::new();
                    super::$case(tests::sql::sqlite(&scratch).await).await;
                }
            )*
        }
    };
}

each! {
    // F-161
    purge_keeps_live_entries
    // F-103
    expired_entry_is_absent_before_purge
    purge_returns_number_of_deleted_entries
    background_purger_runs_until_dropped
}

// F-161
/// Another transaction renews an expired row, and commits while the purge runs. A purge that waits for the row would delete it.
#[tokio::test(flavor = "multi_thread")]
async fn postgres_purge_skips_locked_row() {
    const TABLE: &str = "purge_skips_locked_row";
    let server = postgres::shared();
    let store = sql::postgres(server, TABLE).await;
    let expired = super_short();
    assert_granted(&store, &expired).await;
    sleep(Duration::from_millis(20)).await;
    let connect = async || PgConnection::connect(&server.url()).await.expect(WORKS);
    let (mut other, mut watch) = (connect().await, connect().await);
    let pid = query_scalar::<_, i32>("select pg_backend_pid()").fetch_one(&mut other);
    let pid = pid.await.expect(WORKS);
    let renew = format!(
        "begin; update {TABLE} set lease_ends = lease_ends + 600000, expires = expires + 600000"
    );
    let renewed = other.execute(raw_sql(AssertSqlSafe(renew))).await;
    assert_eq!(renewed.expect(WORKS).rows_affected(), 1);
    let purging = tokio::spawn({
        let store = store.clone();
        async move { store.purge_expired(10).await }
    });
    let waiting =
        "select count(*) from pg_locks where not granted and $1 = any (pg_blocking_pids(pid))";
    while !purging.is_finished() {
        let waiting = query_scalar::<_, i64>(waiting).bind(pid);
        if waiting.fetch_one(&mut watch).await.expect(WORKS) > 0 {
            break;
        }
        sleep(Duration::from_millis(5)).await;
    }
    other.execute(raw_sql("commit")).await.expect(WORKS);
    let purged = within(LONGEST, purging).await.expect("no panic");
    assert_eq!(purged.expect(WORKS), 0);
    let found = store.acquire(&duplicate(&expired)).await.expect(WORKS);
    assert!(matches!(found, Acquired::InProgress { .. }), "{found:?}");
}

/// Adds 10 expired entries with records of 1 MiB. One statement deletes 4 of them. Returns a connection to the file.
async fn add_large_expired(store: &SqliteStore, scratch: &Scratch) -> SqliteConnection {
    for _ in 0..10 {
        let claim = claim(LONG, LONG);
        assert_granted(store, &claim).await;
        let record = vec![b'x'; 1 << 20].into();
        let completed = store.complete(&claim.lease_ref(1), record, Ttl::MIN).await;
        completed.expect(WORKS);
    }
    sleep(Duration::from_millis(20)).await;
    let options = SqliteConnectOptions::new().filename(scratch.file("keys.db"));
    options.connect().await.expect(WORKS)
}

async fn count_entries(connection: &mut SqliteConnection) -> i64 {
    let count = query_scalar("select count(*) from tower_idempotency");
    count.fetch_one(connection).await.expect(WORKS)
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_purger_deletes_large_entries_in_interval() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    let mut connection = add_large_expired(&store, &scratch).await;
    let _purger = store.spawn_purger(Duration::from_secs(3600));
    let began = Instant::now();
    while count_entries(&mut connection).await > 0 {
        assert!(began.elapsed() < LONGEST, "no second batch");
        sleep(Duration::from_millis(5)).await;
    }
}

/// The time limit of a test.
const LONGEST: Duration = Duration::from_secs(120);
const WORKS: &str = "the database works";
