//! Operators on the SQL stores: the cases of the suite, and the plans of the listings.

use std::{sync::OnceLock, time::Duration};

use tests::{
    barrier::Barrier,
    conformance::run_all_inspect_cases,
    few_or,
    scratch::Scratch,
    servers::{
        mariadb::{self, MariaDbServer},
        postgres::{self, PostgresServer},
    },
    sql,
};
use tower_idempotency::{
    conformance::{Case, Subject},
    inspect::{Inspect, Query, State},
    store::{Store, Ttl},
};
use tower_idempotency_sqlx::{
    MySqlStore, PostgresStore,
    sqlx::{
        self, AssertSqlSafe, Connection, MySqlConnection, PgConnection, Row, SqliteConnection,
        postgres::PgConnectOptions,
    },
};

use crate::held_request::proxy_through;

#[test]
fn postgres_passes_every_case() {
    run_all_inspect_cases(async || {
        let store = sql::postgres(postgres::shared(), "operators").await;
        Subject::new(store).with_inspector()
    });
}

#[test]
fn serializable_postgres_passes_every_case() {
    run_all_inspect_cases(async || {
        let options: PgConnectOptions = postgres::shared().url().parse().expect("a URL");
        let options = options.options([("default_transaction_isolation", "serializable")]);
        let store = PostgresStore::new(options);
        let store = store.with_table("operators_2").expect("an identifier");
        store.migrate().await.expect("the test server runs");
        Subject::new(store).with_inspector()
    });
}

#[test]
fn mariadb_passes_every_case() {
    run_all_inspect_cases(async || {
        let store = sql::mariadb(mariadb::shared(), "operators").await;
        Subject::new(store).with_push(false).with_inspector()
    });
}

#[test]
fn sqlite_passes_every_case() {
    static SCRATCH: OnceLock<Scratch> = OnceLock::new();
    run_all_inspect_cases(async || {
        let store = sql::sqlite(SCRATCH.get_or_init(Scratch::new)).await;
        Subject::new(store).with_push(false).with_inspector()
    });
}

/// Other cases of the shared file purge expired entries, so this case has a file of its own.
#[test]
fn expired_entry_of_sqlite_keeps_no_operation() {
    let scratch = Scratch::new();
    let subject = async || {
        let store = sql::sqlite(&scratch).await;
        Subject::new(store).with_push(false).with_inspector()
    };
    Case::named("takeover_keeps_operation_if_it_has_none").run(false, subject, |_| None);
}

// ---- Plans ----

/// Returns the number of rows of each table whose listings are read: 20,000, or 1,000,000 with `FULL=1`. 16 of 20 are
/// completed. One of 20 is in progress, one an orphan, one needs attention, and one is an orphan that has expired.
fn rows() -> usize {
    few_or(20_000, 1_000_000)
}

/// The limit of the summary.
const COUNTED: u64 = 100_000;

/// Reads each listing: the first two pages, each filter, the beginning of an ID, and the summary.
async fn read_every_listing(store: &impl Inspect) {
    let of_20 = |share: usize| (rows() / 20 * share) as u64;
    for (state, count) in [
        (State::InProgress, of_20(1)),
        (State::Orphaned, of_20(1)),
        (State::NeedsAttention, of_20(1)),
        (State::Completed, of_20(16)),
    ] {
        let query = Query::new(state);
        let first = store.list(&query).await.expect("the database works");
        let next = first.next.expect("there is a second page");
        let second = query.clone().with_page(Some(next));
        let second = store.list(&second).await.expect("the database works");
        assert_eq!(second.entries.len(), 50, "{state}");
        assert!(first.entries.iter().all(|entry| entry.state() == state));
        assert!(
            first
                .entries
                .iter()
                .all(|entry| !second.entries.contains(entry))
        );
        let id = *second.entries[7].id();
        for query in [
            query.clone().with_operation("POST /nowhere"),
            query.clone().with_owner("nowhere"),
            query
                .clone()
                .with_older_than(Duration::from_secs(1_000_000)),
        ] {
            let page = store.list(&query).await.expect("the database works");
            assert!(page.entries.is_empty());
        }
        let query = query.with_id_prefix(id.into());
        let page = store.list(&query).await.expect("the database works");
        assert_eq!(page.entries.len(), 1, "{state}");
        let summary = store
            .summary(COUNTED as u32)
            .await
            .expect("the database works");
        let counted = summary.count(state).expect("it is listed");
        let expected = (count.min(COUNTED), count <= COUNTED);
        assert_eq!((counted.value, counted.is_exact), expected, "{state}");
    }
}

/// Reads the only live orphan, among more expired orphans than a count examines.
async fn read_live_orphan(store: &impl Inspect) {
    let summary = store.summary(1_000).await.expect("the database works");
    let counted = summary.count(State::Orphaned).expect("it is listed");
    assert_eq!((counted.value, counted.is_exact), (1, false));
    let mut query = Query::new(State::Orphaned);
    let mut entries = Vec::new();
    loop {
        let page = store.list(&query).await.expect("the database works");
        entries.extend(page.entries);
        match page.next {
            Some(next) => query = query.with_page(Some(next)),
            None => break,
        }
    }
    assert_eq!(entries.len(), 1);
}

#[tokio::test]
async fn live_orphan_is_counted_on_postgres() {
    let store = sql::postgres(postgres::shared(), "expired_orphans").await;
    let mut admin = PgConnection::connect(&postgres::shared().url())
        .await
        .unwrap();
    let fill = r"insert into expired_orphans
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, owner, operation)
select sha256(n::text::bytea), substring(sha256(n::text::bytea) from 1 for 16), sha256('fingerprint'), 1,
  now - 3600000 - n, 600000, case n when 0 then now + 86400000 else now - 3000000 - n end, now - 4000000, '', ''
from generate_series(0, 7000) n, (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock";
    let filled = sqlx::raw_sql(fill).execute(&mut admin).await;
    assert_eq!(filled.unwrap().rows_affected(), 7_001);
    read_live_orphan(&store).await;
}

#[tokio::test]
async fn live_orphan_is_counted_on_sqlite() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let mut admin = SqliteConnection::connect(&url).await.unwrap();
    let fill = "with recursive n (n, now) as (
  select 0, cast(unixepoch('subsec') * 1000 as integer) union all select n + 1, now from n where n < 7000)
insert into tower_idempotency
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, owner, operation)
select randomblob(32), randomblob(16), randomblob(32), 1,
  now - 3600000 - n, 600000, iif(n = 0, now + 86400000, now - 3000000 - n), now - 4000000, '', '' from n";
    let filled = sqlx::raw_sql(fill).execute(&mut admin).await;
    assert_eq!(filled.unwrap().rows_affected(), 7_001);
    read_live_orphan(&store).await;
}

// ---- Completed entries ----

/// Number of orphans that expire before the first completed entry: more than a page examines.
const ORPHANS: usize = 9_000;

/// Reads the first page of completed entries, which expire after all orphans.
async fn first_page_is_full(store: &impl Inspect) {
    let page = store.list(&Query::new(State::Completed)).await;
    let page = page.expect("the database works");
    assert_eq!(page.entries.len(), 50);
    assert!(page.next.is_some());
    let summary = store.summary(1_000).await.expect("the database works");
    let counted = summary.count(State::Completed).expect("it is listed");
    assert_eq!((counted.value, counted.is_exact), (60, true));
}

#[tokio::test]
async fn completed_page_omits_orphans_on_postgres() {
    let store = sql::postgres(postgres::shared(), "behind_orphans").await;
    let url = postgres::shared().url();
    let mut admin = PgConnection::connect(&url).await.unwrap();
    let fill = format!(
        r"insert into behind_orphans
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)
select sha256(n::text::bytea), substring(sha256(n::text::bytea) from 1 for 16), sha256('fingerprint'), 1,
  now - 1000 - n, 3600000, case when n > {ORPHANS} then now + 86400000 else now + 3000000 end, now - 90000,
  case when n > {ORPHANS} then now end, '', '', case when n > {ORPHANS} then '\x0100000000007061'::bytea end
from generate_series(1, {ORPHANS} + 60) n, (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock"
    );
    let filled = sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut admin).await;
    filled.unwrap();
    first_page_is_full(&store).await;
}

#[tokio::test]
async fn completed_page_omits_orphans_on_mariadb() {
    let store = sql::mariadb(mariadb::shared(), "behind_orphans").await;
    let url = mariadb::shared().url();
    let mut admin = MySqlConnection::connect(&url).await.unwrap();
    let now = "(timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000)";
    let fill = format!(
        "insert into behind_orphans
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)
with recursive n (n) as (select 1 union all select n + 1 from n where n < {ORPHANS} + 60)
select unhex(sha2(n, 256)), left(unhex(sha2(n, 256)), 16), unhex(sha2('fingerprint', 256)), 1,
  {now} - 1000 - n, 3600000, if(n > {ORPHANS}, {now} + 86400000, {now} + 3000000), {now} - 90000,
  if(n > {ORPHANS}, {now}, null), '', '', if(n > {ORPHANS}, x'0100000000007061', null) from n"
    );
    permit_recursion(&mut admin).await;
    let filled = sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut admin).await;
    filled.unwrap();
    first_page_is_full(&store).await;
}

#[tokio::test]
async fn completed_page_omits_orphans_on_sqlite() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let mut admin = SqliteConnection::connect(&url).await.unwrap();
    let fill = format!(
        "with recursive n (n, now) as (
  select 1, cast(unixepoch('subsec') * 1000 as integer) union all select n + 1, now from n where n < {ORPHANS} + 60)
insert into tower_idempotency
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)
select randomblob(32), randomblob(16), randomblob(32), 1, now - 1000 - n, 3600000,
  iif(n > {ORPHANS}, now + 86400000, now + 3000000), now - 90000, iif(n > {ORPHANS}, now, null), '', '',
  iif(n > {ORPHANS}, x'0100000000007061', null) from n"
    );
    let filled = sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut admin).await;
    filled.unwrap();
    first_page_is_full(&store).await;
}

// ---- Renewals ----

/// A renewal moves the only match to the end of the order while a page is read in two calls. The second call is held.
async fn renewed_lease_is_listed_once<S: Store + Inspect>(
    direct: &S,
    proxied: &S,
    barrier: &Barrier,
) {
    let leased = |operation: &str, seconds| {
        let mut claim = sql::claim();
        (claim.lease, claim.operation) = (Ttl::from_secs(seconds), operation.into());
        claim
    };
    let moved = leased("POST /rides", 600);
    direct.acquire(&moved).await.expect("the database works");
    // More than one call reads.
    for _ in 0..550 {
        let other = leased("POST /orders", 900);
        direct.acquire(&other).await.expect("the database works");
    }
    let renewing = async {
        barrier.arrival().await;
        let lease = moved.lease_ref(1);
        let renewed = direct.renew(&lease, Ttl::from_secs(1_800)).await;
        renewed.expect("the lease is held");
        barrier.open_for_good();
    };
    let query = Query::new(State::InProgress).with_operation("POST /rides");
    let (page, ()) = tokio::join!(proxied.list(&query), renewing);
    let page = page.expect("the database works");
    let ids: Vec<_> = page.entries.iter().map(|entry| *entry.id()).collect();
    assert_eq!((ids, page.next), (vec![moved.id], None));
}

/// Part of the statement that reads the rows after a position.
const NEXT_ROWS: &[u8] = b"and lease_ends >= ";

#[tokio::test(flavor = "multi_thread")]
async fn renewed_lease_is_listed_once_on_postgres() {
    let (server, barrier) = (postgres::shared(), Barrier::closed());
    let direct = sql::postgres(server, "renewed").await;
    let address = proxy_through(&barrier, NEXT_ROWS, server.address()).await;
    let url = format!("postgres://app@{address}/postgres");
    let proxied = PostgresStore::from_url(&url).expect("a URL");
    let proxied = proxied.with_table("renewed").expect("an identifier");
    renewed_lease_is_listed_once(&direct, &proxied, &barrier).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn renewed_lease_is_listed_once_on_mariadb() {
    let (server, barrier) = (mariadb::shared(), Barrier::closed());
    let direct = sql::mariadb(server, "renewed").await;
    let address = proxy_through(&barrier, NEXT_ROWS, server.address()).await;
    let proxied = MySqlStore::from_url(&mariadb::url(address)).expect("a URL");
    let proxied = proxied.with_table("renewed").expect("an identifier");
    renewed_lease_is_listed_once(&direct, &proxied, &barrier).await;
}

#[tokio::test]
async fn listings_of_postgres_use_indexes() {
    let server = PostgresServer::start(&[
        "session_preload_libraries=auto_explain",
        "auto_explain.log_min_duration=0",
        "autovacuum=off",
    ]);
    let store = sql::postgres(&server, "planned").await;
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    let rows = rows();
    let fill = format!(
        r"insert into planned
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)
select sha256(n::text::bytea), substring(sha256(n::text::bytea) from 1 for 16), sha256('fingerprint'), 1,
  case n % 20 when 0 then now + 600000 + n else now - 600000 - n end, 3600000,
  case n % 20 when 0 then now + 4200000 + n when 1 then now + 3000000 - n when 2 then now - 1000 - n else now + 86400000 + n end,
  now - 900000, case when n % 20 > 2 then now - n end, 'host-1:4711', 'POST /orders/' || n,
  case when n % 20 = 3 then '\x0102000000000161'::bytea when n % 20 > 3 then '\x0100000000007061'::bytea end
from generate_series(1, {rows}) n, (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock;
analyze planned"
    );
    sqlx::raw_sql(AssertSqlSafe(fill))
        .execute(&mut admin)
        .await
        .unwrap();
    let before = server.log().len();
    read_every_listing(&store).await;
    let log = server.log();
    let log = &log[before..];
    for node in ["Seq Scan on planned", "Sort", "Bitmap", "planned_expires"] {
        assert!(!log.contains(node), "{node}:\n{log}");
    }
    for index in [
        "planned_orphans",
        "planned_attention",
        "planned_completed",
        "planned_pkey",
    ] {
        assert!(
            log.contains(&format!("using {index} on planned")),
            "{index}:\n{log}"
        );
    }
}

/// Permits recursive queries with a million steps. MariaDB and MySQL stop after 1,000 steps by default.
async fn permit_recursion(admin: &mut MySqlConnection) {
    let permit = if mariadb::is_mysql() {
        "set session cte_max_recursion_depth = 1000000"
    } else {
        "set session max_recursive_iterations = 1000000"
    };
    let permitted = sqlx::raw_sql(permit).execute(&mut *admin).await;
    permitted.expect("the server runs");
}

/// Returns the statements in the server's general log that read the table `planned`.
///
/// The store sends several statements in one message. MariaDB logs the whole message, and MySQL logs each statement.
async fn logged_listings(admin: &mut MySqlConnection) -> Vec<String> {
    let log = "select argument from mysql.general_log where command_type = 'Query'";
    let logged = sqlx::raw_sql(log)
        .fetch_all(&mut *admin)
        .await
        .expect("the server runs");
    let mut listings = Vec::new();
    for row in logged {
        let message: String = row.get(0);
        // No value contains a semicolon.
        for statement in message.split(';').map(str::trim) {
            if statement.starts_with("select ") && statement.contains("from `planned`") {
                listings.push(statement.to_owned());
            }
        }
    }
    listings
}

/// The plan for the rows of the table `planned`, from the columns of `explain`.
#[derive(Debug)]
struct Plan {
    access: String,
    index: String,
    extra: String,
}

/// Returns the plan of a listing.
async fn explain(admin: &mut MySqlConnection, listing: &str) -> Plan {
    // MySQL 9 has another default format.
    let explain = format!("explain format=traditional {listing}");
    let explain = sqlx::raw_sql(AssertSqlSafe(explain));
    let rows = explain
        .fetch_all(&mut *admin)
        .await
        .expect("the server runs");
    let mut plans = Vec::new();
    for row in &rows {
        let column = |name: &str| row.get::<Option<String>, _>(name).unwrap_or_default();
        // A count has a second row, for its result.
        if column("table") == "planned" {
            plans.push(Plan {
                access: column("type"),
                index: column("key"),
                extra: column("Extra"),
            });
        }
    }
    assert_eq!(plans.len(), 1, "{plans:?}: {listing}");
    plans.remove(0)
}

/// Explains the statements of the store, because MySQL logs no plans.
#[tokio::test]
async fn listings_of_mariadb_use_indexes() {
    let server = MariaDbServer::start(&["general-log=1", "log-output=TABLE"]);
    let store = sql::mariadb(&server, "planned").await;
    let mut admin = MySqlConnection::connect(&server.url()).await.unwrap();
    let now = "(timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000)";
    let rows = rows();
    let fill = format!(
        "insert into planned
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)
with recursive n (n) as (select 1 union all select n + 1 from n where n < {rows})
select unhex(sha2(n, 256)), left(unhex(sha2(n, 256)), 16), unhex(sha2('fingerprint', 256)), 1,
  if(n % 20 = 0, {now} + 600000 + n, {now} - 600000 - n), 3600000,
  case n % 20 when 0 then {now} + 4200000 + n when 1 then {now} + 3000000 - n when 2 then {now} - 1000 - n
    else {now} + 86400000 + n end,
  {now} - 900000, if(n % 20 > 2, {now} - n, null), 'host-1:4711', concat('POST /orders/', n),
  case when n % 20 = 3 then x'0102000000000161' when n % 20 > 3 then x'0100000000007061' end
from n;
analyze table planned"
    );
    permit_recursion(&mut admin).await;
    sqlx::raw_sql(AssertSqlSafe(fill))
        .execute(&mut admin)
        .await
        .unwrap();
    read_every_listing(&store).await;
    let mut plans = Vec::new();
    for listing in logged_listings(&mut admin).await {
        let plan = explain(&mut admin, &listing).await;
        let sorts = ["filesort", "temporary"].map(|it| plan.extra.contains(it));
        assert_eq!(
            (&*plan.access, sorts),
            ("range", [false; 2]),
            "{plan:?}: {listing}"
        );
        plans.push(plan);
    }
    for index in ["orphans", "attention", "completed", "PRIMARY"] {
        let used = plans.iter().filter(|plan| plan.index == index).count();
        assert!(used >= 4, "{index} is used {used} times: {plans:?}");
    }
}

/// The plans are tested in the crate, because a SQLite file has no log of statements.
#[tokio::test]
async fn listings_of_sqlite_are_exact() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await;
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let mut admin = SqliteConnection::connect(&url).await.unwrap();
    let rows = rows();
    let fill = format!(
        "with recursive n (n, now) as (
  select 1, cast(unixepoch('subsec') * 1000 as integer) union all select n + 1, now from n where n < {rows})
insert into tower_idempotency
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)
select randomblob(32), randomblob(16), randomblob(32), 1, iif(n % 20 = 0, now + 600000 + n, now - 600000 - n), 3600000,
  case n % 20 when 0 then now + 4200000 + n when 1 then now + 3000000 - n when 2 then now - 1000 - n
    else now + 86400000 + n end,
  now - 900000, iif(n % 20 > 2, now - n, null), 'host-1:4711', 'POST /orders/' || n,
  case when n % 20 = 3 then x'0102000000000161' when n % 20 > 3 then x'0100000000007061' end
from n"
    );
    let filled = sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut admin).await;
    filled.unwrap();
    read_every_listing(&store).await;
}
