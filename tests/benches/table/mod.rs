//! Tables of the SQL stores with a large number of completed records.

use std::time::{SystemTime, UNIX_EPOCH};

use tests::servers::mariadb::is_mysql;
use tower_idempotency_sqlx::sqlx::{
    self, AssertSqlSafe, MySqlConnection, PgConnection, SqliteConnection,
};

/// The table of a store, over a connection beside those of the store.
pub(crate) enum FilledTable {
    Postgres(PgConnection),
    MariaDb(MySqlConnection),
    Sqlite(SqliteConnection),
}

impl FilledTable {
    /// Inserts completed records into the empty table, in the order of their expiry. The first `expired` of them expired an
    /// hour ago or earlier, and the others expire in 12 hours or later.
    ///
    /// The rows have the columns that an acquire and a completion write. IDs are random, like digests. The table and its
    /// indexes therefore grow as they do under requests.
    pub(crate) async fn fill(&mut self, records: u32, expired: u32) {
        let (now, mut first) = (now(), 1);
        for statement in self.before() {
            self.execute((*statement).to_owned()).await;
        }
        while first <= records {
            let last = records.min(first.saturating_add(CHUNK - 1));
            let insert = self.insert(first, last, &self.expiry(records, expired, now));
            self.execute(insert).await;
            first = last + 1;
        }
        for statement in self.after() {
            self.execute((*statement).to_owned()).await;
        }
    }

    /// Returns the number of completed entries, with those that have expired.
    pub(crate) async fn count_completed(&mut self) -> u64 {
        let sql = "select count(*) from tower_idempotency where completed is not null";
        self.number(sql.to_owned()).await
    }

    /// Returns `true` if the table has entries that have expired.
    pub(crate) async fn has_expired(&mut self) -> bool {
        let now = now();
        // With this order, each database searches the index on the expiry.
        let sql = format!(
            "select count(*) from (
  select expires from tower_idempotency where expires <= {now} order by expires limit 1
) expired"
        );
        self.number(sql).await > 0
    }

    /// Returns the settings of the session that fills the table.
    fn before(&self) -> &'static [&'static str] {
        match self {
            Self::Postgres(_) => &[],
            // Both stop a recursion after 1,000 steps.
            Self::MariaDb(_) if is_mysql() => &["set session cte_max_recursion_depth = 10000000"],
            Self::MariaDb(_) => &["set session max_recursive_iterations = 10000000"],
            // The cache has all pages of the index of the primary key.
            Self::Sqlite(_) => &["pragma synchronous = off", "pragma cache_size = -1000000"],
        }
    }

    /// Returns the statements after the last row, so that the database does their work before the measurements.
    fn after(&self) -> &'static [&'static str] {
        match self {
            Self::Postgres(_) => &["vacuum analyze tower_idempotency", "checkpoint"],
            // The second statement writes all changed pages to the disk.
            Self::MariaDb(_) => &[
                "analyze table tower_idempotency",
                "flush tables tower_idempotency for export",
                "unlock tables",
            ],
            Self::Sqlite(_) => &[
                "pragma synchronous = full",
                "pragma wal_checkpoint(truncate)",
                "pragma cache_size = -2000",
            ],
        }
    }

    /// Returns the expression for the expiry of row `n`, in milliseconds.
    fn expiry(&self, records: u32, expired: u32, now: i64) -> String {
        let divided_by = match self {
            Self::MariaDb(_) => "div",
            Self::Postgres(_) | Self::Sqlite(_) => "/",
        };
        let (past, future) = (now - 2 * HOUR, now + 12 * HOUR);
        format!(
            "case when n <= {expired} then {past} + n * {HOUR} {divided_by} {records} \
             else {future} + n * {SPREAD} {divided_by} {records} end"
        )
    }

    /// Returns the statement that inserts the rows of these numbers.
    fn insert(&self, first: u32, last: u32, expiry: &str) -> String {
        let record: String = RECORD.iter().map(|byte| format!("{byte:02x}")).collect();
        // The times that a request writes whose record expires after a day.
        let times = format!(
            "1, expires - {DAY} - {HANDLER} + {LEASE}, {DAY}, expires, expires - {DAY} - {HANDLER}, expires - {DAY}"
        );
        let numbers = format!(
            "with recursive n (n) as (select {first} union all select n + 1 from n where n < {last})"
        );
        match self {
            Self::Postgres(_) => format!(
                "{COLUMNS}
select sha256(n::text::bytea), substring(sha256(n::text::bytea) from 1 for 16), sha256('fingerprint'), {times}, {DETAILS},
  decode('{record}', 'hex')
from (select n, {expiry} as expires from generate_series({first}::bigint, {last}::bigint) n) entries"
            ),
            // Rows in the order of their IDs: each page of the table is read and written once for the statement. The order does
            // not change the rows of a page.
            Self::MariaDb(_) => format!(
                "{COLUMNS}
{numbers}
select id, left(id, 16), unhex(sha2('fingerprint', 256)), {times}, {DETAILS}, x'{record}'
from (select unhex(sha2(n, 256)) as id, {expiry} as expires from n) entries order by id"
            ),
            Self::Sqlite(_) => format!(
                "{COLUMNS}
{numbers}
select randomblob(32), randomblob(16), randomblob(32), {times}, {DETAILS}, x'{record}'
from (select {expiry} as expires from n) entries"
            ),
        }
    }

    async fn execute(&mut self, sql: String) {
        let sql = sqlx::raw_sql(AssertSqlSafe(sql));
        let executed = match self {
            Self::Postgres(connection) => sql.execute(connection).await.map(drop),
            Self::MariaDb(connection) => sql.execute(connection).await.map(drop),
            Self::Sqlite(connection) => sql.execute(connection).await.map(drop),
        };
        executed.expect("the server runs");
    }

    async fn number(&mut self, sql: String) -> u64 {
        let sql = AssertSqlSafe(sql);
        let number: sqlx::Result<i64> = match self {
            Self::Postgres(connection) => sqlx::query_scalar(sql).fetch_one(connection).await,
            Self::MariaDb(connection) => sqlx::query_scalar(sql).fetch_one(connection).await,
            Self::Sqlite(connection) => sqlx::query_scalar(sql).fetch_one(connection).await,
        };
        number.expect("the server runs").unsigned_abs()
    }
}

/// Returns the milliseconds since 1970. The servers run on the same machine.
fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.expect("a time after 1970").as_millis();
    i64::try_from(now).expect("milliseconds fit")
}

/// The bytes of each record: the version, the flags, and a checksum and a response that nothing reads.
pub(crate) const RECORD: [u8; 100] = {
    let mut record = [b'r'; 100];
    record[0] = 1;
    record[1] = 0;
    record
};
/// Number of rows of a statement.
const CHUNK: u32 = 500_000;
const COLUMNS: &str = "insert into tower_idempotency
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)";
const DETAILS: &str = "'host-1:4711', 'POST /orders'";
// Milliseconds.
const HOUR: i64 = 3_600_000;
const DAY: i64 = 24 * HOUR;
const LEASE: i64 = 15_000;
/// Time between an acquire and its completion.
const HANDLER: i64 = 100;
/// Time between the first and the last expiry of the records that have not expired.
const SPREAD: i64 = 43_000_000;
