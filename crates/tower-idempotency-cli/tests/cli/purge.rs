//! A purge of a SQLite file that lasts longer than the timeout of a call.

use std::time::{Duration, Instant};

use tests::{scratch::Scratch, sql::claim};
use tokio::time::sleep;
use tower_idempotency::store::{Store as _, Ttl};
use tower_idempotency_sqlx::sqlx::{
    AssertSqlSafe, ConnectOptions as _, raw_sql, sqlite::SqliteConnectOptions,
};

/// Returns a query that SQLite executes in a time in proportion to `rows`.
fn slow_query(rows: u128) -> String {
    format!(
        "select count(*) from (with recursive n (n) as (select 1 union all select n + 1 from n where n < {rows}) \
         select n from n)"
    )
}

/// A trigger makes each deletion slow, and the purge then pauses four times as long.
#[tokio::test(flavor = "multi_thread")]
async fn purge_of_file_outlasts_timeout() {
    const SAMPLE: u128 = 1_000_000;
    let scratch = Scratch::new();
    let (file, log) = (scratch.file("keys.db"), scratch.file("log"));
    let url = format!("sqlite:{}", file.display());
    let store = crate::open(&url).await.expect("a file");
    for _ in 0..2 {
        let mut expired = claim();
        (expired.lease, expired.orphan_retention) = (Ttl::MIN, Ttl::MIN);
        store.acquire(&expired).await.expect("a file");
    }
    sleep(Duration::from_millis(20)).await;
    let options = SqliteConnectOptions::new().filename(&file);
    let mut connection = options.connect().await.expect("a file");
    let began = Instant::now();
    let sample = raw_sql(AssertSqlSafe(slow_query(SAMPLE)));
    sample.execute(&mut connection).await.expect("a file");
    // The deletion and the pause together take 7.5 s (5 x 1.5 s).
    let rows = SAMPLE * Duration::from_millis(1_500).as_nanos() / began.elapsed().as_nanos();
    let trigger = format!(
        "create trigger slow before delete on tower_idempotency begin {}; end",
        slow_query(rows)
    );
    let created = raw_sql(AssertSqlSafe(trigger)).execute(&mut connection);
    created.await.expect("a file");
    let log = log.display().to_string();
    let change = ["--reason", "x", "--audit", &log, "--yes"];
    // Bounds the opening of the file too.
    let args = ["purge", "--batch", "1", "--max", "1", "--timeout", "5s"];
    let ran = crate::run(&url, &[&args[..], &change].concat());
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("expired entries deleted: 1\n"), "{ran:?}");
}
