//! Two versions of a store on one table at the same time.
//!
//! The other version is frozen in `tests/golden/sql-v1`. A change of the statements or of the table that is incompatible with
//! deployed versions fails here. Do not edit these files. Statements that must work together with later ones get a new folder.

use std::time::Duration;

use bytes::Bytes;
use tests::{
    barrier::within,
    scratch::Scratch,
    servers::{mariadb::MariaDbServer, postgres::PostgresServer},
    versions::{EarlierVersion, FINGERPRINT, RECORD, Reply, claims, share_entries, take_over},
};
use tokio::{task::JoinHandle, time::sleep};
use tower_idempotency::store::{Acquired, Claim, KeyId, Store, Ttl};
use tower_idempotency_sqlx::{
    MySqlStore, PostgresStore, SqliteStore,
    sqlx::{
        self, AssertSqlSafe, ConnectOptions, Connection, MySqlConnection, PgConnection, Row,
        Sqlite, SqliteConnection,
        mysql::MySqlRow,
        postgres::{PgListener, PgRow},
        query::Query,
        sqlite::{SqliteArguments, SqliteConnectOptions, SqliteJournalMode, SqliteRow},
    },
};

/// [`RECORD`] in base64.
const RECORD_IN_BASE64: &str = "AHJlY29yZCBvZiD/DQo=";
const WORKS: &str = "the database works";

/// An entry after an acquire, as version 1 reads it.
struct EntryRow {
    is_completed: bool,
    has_own_token: bool,
    is_expired: bool,
    fingerprint: Vec<u8>,
    generation: i64,
    lease_left: i64,
    record: Option<Vec<u8>>,
}

impl EntryRow {
    /// Returns the reply, or `None` if the claim can acquire the entry.
    fn reply(&self) -> Option<Reply> {
        if self.has_own_token && !self.is_completed {
            return Some(Reply::Granted(self.generation.unsigned_abs()));
        }
        if self.is_expired {
            return None;
        }
        assert_eq!(self.fingerprint, FINGERPRINT.as_bytes());
        if self.is_completed {
            assert_eq!(self.record.as_deref(), Some(RECORD));
            return Some(Reply::Completed);
        }
        (self.lease_left > 0).then_some(Reply::InProgress)
    }
}

/// Inserts the values of a claim into frozen statements.
fn statements(frozen: &str, claim: &Claim, record: &str) -> String {
    let [lease, orphan_retention] =
        [claim.lease, claim.orphan_retention].map(|ttl| ttl.as_millis().to_string());
    frozen
        .replace("{id}", &hex(claim.id.as_bytes()))
        .replace("{token}", &hex(claim.token.as_bytes()))
        .replace("{fingerprint}", &hex(claim.fingerprint.as_bytes()))
        .replace("{lease}", &lease)
        .replace("{orphan_retention}", &orphan_retention)
        .replace("{owner}", &hex(b"other"))
        .replace("{operation}", &hex(b"POST /"))
        .replace("{generation}", "1")
        .replace("{retention}", "60000")
        .replace("{record}", record)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(digits: &str) -> Vec<u8> {
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).expect("two digits");
    (0..digits.len()).step_by(2).map(byte).collect()
}

// ---- PostgreSQL ----

struct PostgresOne(PgConnection);

impl PostgresOne {
    /// Connects, and creates the table.
    async fn connect(url: &str) -> Self {
        let mut connection = PgConnection::connect(url).await.expect(WORKS);
        let schema = include_str!("../../golden/sql-v1/postgres/schema.sql");
        let created = sqlx::raw_sql(schema).execute(&mut connection).await;
        created.expect(WORKS);
        Self(connection)
    }

    async fn run(&mut self, frozen: &str, claim: &Claim) -> Vec<PgRow> {
        let sql = AssertSqlSafe(statements(frozen, claim, &hex(RECORD)));
        let rows = sqlx::raw_sql(sql).fetch_all(&mut self.0).await;
        rows.expect(WORKS)
    }

    /// Requests a notification of the end of the lease.
    async fn watch(&mut self, claim: &Claim) {
        let frozen = include_str!("../../golden/sql-v1/postgres/watch.sql");
        let rows = self.run(frozen, claim).await;
        assert!(rows[0].get::<bool, _>(0), "in progress");
    }

    fn read(row: &PgRow) -> EntryRow {
        let record: Option<String> = row.get(6);
        EntryRow {
            is_completed: row.get(0),
            has_own_token: row.get(1),
            is_expired: row.get(2),
            fingerprint: unhex(row.get(3)),
            generation: row.get(4),
            lease_left: row.get(5),
            record: record.map(|digits| unhex(&digits)),
        }
    }
}

impl EarlierVersion for PostgresOne {
    async fn acquire(&mut self, claim: &Claim) -> Reply {
        let frozen = include_str!("../../golden/sql-v1/postgres/acquire.sql");
        let rows = self.run(frozen, claim).await;
        Self::read(&rows[0]).reply().expect("a reply")
    }

    async fn renew(&mut self, claim: &Claim) -> bool {
        let frozen = include_str!("../../golden/sql-v1/postgres/renew.sql");
        !self.run(frozen, claim).await.is_empty()
    }

    async fn complete(&mut self, claim: &Claim) -> bool {
        let frozen = include_str!("../../golden/sql-v1/postgres/complete.sql");
        let rows = self.run(frozen, claim).await;
        // The first row may belong to the notification.
        let row = rows.last().expect("the entry");
        row.get(0) && row.get(1)
    }

    async fn release(&mut self, claim: &Claim) {
        let frozen = include_str!("../../golden/sql-v1/postgres/release.sql");
        self.run(frozen, claim).await;
    }
}

// ---- MySQL and MariaDB ----

struct MySqlOne(MySqlConnection);

impl MySqlOne {
    /// Connects, and creates the table.
    async fn connect(url: &str) -> Self {
        let mut connection = MySqlConnection::connect(url).await.expect(WORKS);
        let schema = include_str!("../../golden/sql-v1/mysql/schema.sql");
        let created = sqlx::raw_sql(schema).execute(&mut connection).await;
        created.expect(WORKS);
        Self(connection)
    }

    async fn run(&mut self, frozen: &str, claim: &Claim) -> Vec<MySqlRow> {
        let sql = AssertSqlSafe(statements(frozen, claim, RECORD_IN_BASE64));
        let rows = sqlx::raw_sql(sql).fetch_all(&mut self.0).await;
        rows.expect(WORKS)
    }

    fn read(row: &MySqlRow) -> EntryRow {
        EntryRow {
            is_completed: row.get(0),
            has_own_token: row.get(1),
            is_expired: row.get(2),
            fingerprint: row.get(3),
            generation: row.get(4),
            lease_left: row.get(5),
            record: row.get(6),
        }
    }
}

impl EarlierVersion for MySqlOne {
    async fn acquire(&mut self, claim: &Claim) -> Reply {
        let frozen = include_str!("../../golden/sql-v1/mysql/acquire.sql");
        let rows = self.run(frozen, claim).await;
        Self::read(&rows[0]).reply().expect("a reply")
    }

    async fn renew(&mut self, claim: &Claim) -> bool {
        let frozen = include_str!("../../golden/sql-v1/mysql/renew.sql");
        !self.run(frozen, claim).await.is_empty()
    }

    async fn complete(&mut self, claim: &Claim) -> bool {
        let frozen = include_str!("../../golden/sql-v1/mysql/complete.sql");
        let rows = self.run(frozen, claim).await;
        rows[0].get(0) && rows[0].get(1)
    }

    async fn release(&mut self, claim: &Claim) {
        let frozen = include_str!("../../golden/sql-v1/mysql/release.sql");
        self.run(frozen, claim).await;
    }
}

// ---- SQLite ----

struct SqliteOne(SqliteConnection);

impl SqliteOne {
    /// Opens the file, and creates the table.
    async fn open(options: SqliteConnectOptions) -> Self {
        let mut connection = options.connect().await.expect(WORKS);
        let schema = include_str!("../../golden/sql-v1/sqlite/schema.sql");
        let created = sqlx::raw_sql(schema).execute(&mut connection).await;
        created.expect(WORKS);
        Self(connection)
    }

    /// Executes a statement to its end, and returns its row.
    async fn run(&mut self, query: Query<'_, Sqlite, SqliteArguments>) -> Option<SqliteRow> {
        let rows = query.fetch_all(&mut self.0).await;
        rows.expect(WORKS).pop()
    }

    fn read(row: &SqliteRow) -> EntryRow {
        EntryRow {
            is_completed: row.get(0),
            has_own_token: row.get(1),
            is_expired: row.get(2),
            fingerprint: row.get(3),
            generation: row.get(4),
            lease_left: row.get(5),
            record: row.get(6),
        }
    }
}

/// Binds the ID and the token to a frozen statement.
fn bind<'q>(frozen: &'static str, claim: &'q Claim) -> Query<'q, Sqlite, SqliteArguments> {
    sqlx::query(frozen)
        .bind(claim.id.as_bytes().as_slice())
        .bind(claim.token.as_bytes().as_slice())
}

fn millis(ttl: Ttl) -> i64 {
    i64::try_from(ttl.as_millis()).expect("at most 100 years")
}

impl EarlierVersion for SqliteOne {
    async fn acquire(&mut self, claim: &Claim) -> Reply {
        let read = include_str!("../../golden/sql-v1/sqlite/read_entry.sql");
        let row = self.run(bind(read, claim)).await;
        let entry = row.map(|row| Self::read(&row));
        // Version 1 extends its own lease by the statement below.
        let is_held = |entry: &EntryRow| entry.has_own_token && !entry.is_completed;
        if let Some(entry) = entry.filter(|entry| !is_held(entry))
            && let Some(reply) = entry.reply()
        {
            return reply;
        }
        let acquire = bind(
            include_str!("../../golden/sql-v1/sqlite/acquire.sql"),
            claim,
        )
        .bind(claim.fingerprint.as_bytes().as_slice())
        .bind(millis(claim.lease))
        .bind(millis(claim.orphan_retention))
        .bind(true)
        .bind("other")
        .bind("POST /")
        .bind(None::<&[u8]>);
        let generation: i64 = self.run(acquire).await.expect("a lease").get(0);
        Reply::Granted(generation.unsigned_abs())
    }

    async fn renew(&mut self, claim: &Claim) -> bool {
        let frozen = include_str!("../../golden/sql-v1/sqlite/renew.sql");
        let renewed = self.run(bind(frozen, claim).bind(millis(claim.lease)));
        renewed.await.is_some()
    }

    async fn complete(&mut self, claim: &Claim) -> bool {
        let complete = bind(
            include_str!("../../golden/sql-v1/sqlite/complete.sql"),
            claim,
        )
        .bind(claim.fingerprint.as_bytes().as_slice())
        .bind(1_i64)
        .bind(60_000_i64)
        .bind(RECORD);
        if self.run(complete).await.is_some() {
            return true;
        }
        let read = include_str!("../../golden/sql-v1/sqlite/read_completion.sql");
        let row = self.run(bind(read, claim)).await.expect("the entry");
        row.get(0) && row.get(1)
    }

    async fn release(&mut self, claim: &Claim) {
        for frozen in [
            include_str!("../../golden/sql-v1/sqlite/delete_released.sql"),
            include_str!("../../golden/sql-v1/sqlite/release_as_orphan.sql"),
        ] {
            if self.run(bind(frozen, claim)).await.is_some() {
                return;
            }
        }
    }
}

// ---- Both versions ----

/// Waits until a lease of 1 ms has expired.
async fn expire() {
    sleep(Duration::from_millis(3)).await;
}

const SOON: Duration = Duration::from_secs(60);

/// Returns a call that waits for a change of the entry, when the entry has the mark of a waiter.
///
/// A call returns early if the connection that listens was lost before.
async fn wait_in_entry(
    store: &PostgresStore,
    other: &mut PostgresOne,
    id: KeyId,
) -> JoinHandle<()> {
    loop {
        let unmark = "update tower_idempotency set awaited = false where completed is null";
        let unmarked = sqlx::query(unmark).execute(&mut other.0).await;
        unmarked.expect(WORKS);
        let waiting = store.clone();
        let waiter = tokio::spawn(async move { waiting.wait_for_change(&id, SOON * 10).await });
        while !waiter.is_finished() {
            let is_awaited =
                "select bool_or(awaited) from tower_idempotency where completed is null";
            let row = sqlx::query(is_awaited).fetch_one(&mut other.0).await;
            if row.expect(WORKS).get(0) {
                return waiter;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Asserts that each version notifies waiters of the other one.
async fn notify_waiters(server: &PostgresServer, store: &PostgresStore, other: &mut PostgresOne) {
    let (claim, _) = claims(200);
    assert_eq!(other.acquire(&claim).await, Reply::Granted(1));
    let waiter = within(SOON, wait_in_entry(store, other, claim.id)).await;
    assert!(other.complete(&claim).await);
    within(SOON, waiter).await.expect("no panic");

    let mut listener = PgListener::connect(&server.url()).await.expect(WORKS);
    listener.listen("tower_idempotency").await.expect(WORKS);
    let (claim, _) = claims(201);
    let acquired = store.acquire(&claim).await.expect(WORKS);
    assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
    other.watch(&claim).await;
    let (lease, record) = (claim.lease_ref(1), Bytes::from_static(RECORD));
    let completed = store.complete(&lease, record, Ttl::from_secs(60));
    completed.await.expect(WORKS);
    let notified = within(SOON, listener.recv()).await.expect(WORKS);
    assert_eq!(notified.payload(), hex(claim.id.as_bytes()));
}

// F-992
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_of_postgres_store_share_table() {
    let server = PostgresServer::start(&[]);
    let mut other = PostgresOne::connect(&server.url()).await;
    let store = PostgresStore::connect(&server.url()).await.expect(WORKS);
    store.check().await.expect("the table is migrated");
    share_entries(&store, &mut other).await;
    take_over(&store, &mut other, expire).await;
    notify_waiters(&server, &store, &mut other).await;
}

// F-992
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_of_mysql_store_share_table() {
    let server = MariaDbServer::start(&[]);
    let mut other = MySqlOne::connect(&server.url()).await;
    let store = MySqlStore::connect(&server.url()).await.expect(WORKS);
    store.check().await.expect("the table is migrated");
    share_entries(&store, &mut other).await;
    take_over(&store, &mut other, expire).await;
}

// F-992
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_of_sqlite_store_share_table() {
    let scratch = Scratch::new();
    let file = scratch.file("keys.db");
    let options = SqliteConnectOptions::new().filename(&file);
    let options = options.create_if_missing(true);
    let mut other = SqliteOne::open(options.journal_mode(SqliteJournalMode::Wal)).await;
    let store = SqliteStore::in_file(&file);
    store.migrate().await.expect(WORKS);
    store.check().await.expect("the table is migrated");
    share_entries(&store, &mut other).await;
    take_over(&store, &mut other, expire).await;
}
