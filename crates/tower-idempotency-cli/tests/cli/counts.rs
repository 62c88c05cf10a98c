//! Counts among more expired orphans than a count examines.

use std::{
    io::{BufRead as _, BufReader},
    process::Stdio,
};

use tests::{GuardedChild, scratch::Scratch};
use tower_idempotency_sqlx::sqlx::{self, Connection as _, SqliteConnection};

use crate::{command, run};

/// Stores 9,500 orphans in the order of their leases, newest first. All but one have expired: the one of generation 2.
///
/// A count with a limit of 1 examines the 1,028 newest orphans. A page of a listing examines the 8,016 oldest ones. Neither
/// finds the orphan of generation 2.
const FILL: &str = "with recursive n (n, now) as (
  select 0, cast(unixepoch('subsec') * 1000 as integer) union all select n + 1, now from n where n < 9499)
insert into tower_idempotency
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, owner, operation)
select randomblob(32), randomblob(16), randomblob(32), iif(n = 1200, 2, 1), now - 3600000 - n, 600000,
  iif(n = 1200, now + 86400000, now - 3000000 - n), now - 4000000, '', '' from n";

const EXPIRE: &str =
    "update tower_idempotency set expires = lease_ends + 600000 where generation = 2";

/// Returns the URL of a file with these orphans, and a connection to the file.
async fn fill(scratch: &Scratch) -> (String, SqliteConnection) {
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    crate::open(&url).await.expect("a file");
    let mut connection = SqliteConnection::connect(&url).await.expect("a file");
    let filled = sqlx::raw_sql(FILL).execute(&mut connection).await;
    assert_eq!(filled.expect("a file").rows_affected(), 9_500);
    (url, connection)
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_count_is_not_zero() {
    let scratch = Scratch::new();
    let (url, _connection) = fill(&scratch).await;
    let ran = run(&url, &["stats", "--limit", "1"]);
    let mut lines = ran.out.lines();
    let is_unknown = lines.any(|line| line.split_whitespace().eq(["orphaned", "unknown"]));
    assert!(is_unknown, "{ran:?}");
    let ran = run(&url, &["stats", "--limit", "1", "--json"]);
    let count = r#""orphaned":{"count":0,"is_exact":false}"#;
    assert!(ran.out.contains(count), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn listing_decides_unknown_count() {
    let scratch = Scratch::new();
    let (url, mut connection) = fill(&scratch).await;
    let mut tool = command(scratch.path(), &url);
    tool.args(["watch", "--limit", "1", "--interval", "100ms"]);
    tool.args(["--exit-when-empty", "orphaned"]);
    let mut tool = GuardedChild::spawn(&tool, Stdio::piped(), Stdio::null());
    let mut counts = BufReader::new(tool.stdout()).lines();
    // The second count shows that the tool has not ended after the first one.
    for _ in 0..2 {
        let count = counts.next().expect("an orphan is left").expect("text");
        assert!(count.contains("orphaned unknown"), "{count}");
    }
    let expired = sqlx::raw_sql(EXPIRE).execute(&mut connection).await;
    assert_eq!(expired.expect("a file").rows_affected(), 1);
    let rest = counts.take(300).count();
    assert!(rest < 300, "the tool does not end");
    assert!(tool.wait().success());
}
