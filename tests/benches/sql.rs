//! Requests on the SQL stores against a bare loop of the same statements, in one run and on separate servers.
//!
//! A fresh request consists of the statements of an acquire and a completion, a replay of those of an acquire. The bare loop
//! sends the observed statements of the store, with another id each time. It uses as many connections as the store, and
//! makes no other calls. In SQLite, which has no server to observe, it runs the statements from the store's source. Both
//! alternate, and the figure is the median over the rounds. Requests run one after another, and 64 at a time, like in
//! the bench `redis`.
//!
//! ```sh
//! cargo bench -p tests --bench sql             # all
//! cargo bench -p tests --bench sql -- "postgres, replays"
//! ```

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
};

use axum::Router;
use bytes::Bytes;
use tests::{
    scratch::Scratch,
    servers::{
        mariadb::{self, MariaDbServer},
        postgres::PostgresServer,
    },
};
use tokio::sync::{Semaphore, SemaphorePermit};
use tower_idempotency::store::Store;
use tower_idempotency_sqlx::{
    MySqlStore, PostgresStore, SqliteStore,
    sqlx::{
        self, AssertSqlSafe, ConnectOptions as _, Connection, Executor, MySqlConnection,
        PgConnection, SqlSafeStr as _, SqlStr, SqliteConnection, raw_sql,
        sqlite::{SqliteConnectOptions, SqliteSynchronous},
    },
};

use self::pace::{Pace, Sides, app, is_any_wanted, order, send_order};

mod pace;

fn main() {
    if is_any_wanted("postgres") {
        Pace::each(|pace| {
            let server = pace.server(|| PostgresServer::start(&[]));
            let runtime = pace.runtime();
            let sides = Arc::new(runtime.block_on(on_postgres(&server)));
            pace.compare("postgres", &runtime, &sides);
            let stored = runtime.block_on(async {
                let mut connections = connect::<PgConnection>(&server.url()).await;
                sqlx::query_scalar(STORED)
                    .fetch_one(&mut connections[0])
                    .await
            });
            sides.assert_records(stored.expect("a number"));
        });
    }
    if is_any_wanted("mariadb") {
        Pace::each(|pace| {
            let server = pace.server(|| MariaDbServer::start(&[]));
            let runtime = pace.runtime();
            let sides = Arc::new(runtime.block_on(on_mariadb(&server)));
            pace.compare("mariadb", &runtime, &sides);
            let stored = runtime.block_on(async {
                let mut connections = connect::<MySqlConnection>(&server.url()).await;
                sqlx::query_scalar(STORED)
                    .fetch_one(&mut connections[0])
                    .await
            });
            sides.assert_records(stored.expect("a number"));
        });
    }
    if is_any_wanted("sqlite") {
        Pace::each(|pace| {
            // There is no server: SQLite runs in the client's process.
            let scratch = pace.server(Scratch::new);
            let runtime = pace.runtime();
            let sides = Arc::new(runtime.block_on(on_sqlite(&scratch)));
            pace.compare("sqlite", &runtime, &sides);
            let stored = runtime.block_on(async {
                let (mut connection, _permit) = sides.bare.writer.take().await;
                sqlx::query_scalar(STORED).fetch_one(&mut connection).await
            });
            sides.assert_records(stored.expect("a number"));
        });
    }
}

struct Both<B> {
    app: Router,
    order: Bytes,
    bare: B,
    next: AtomicU64,
}

impl<B: Bare> Both<B> {
    fn new<S: Store>(store: S, bare: B) -> Self {
        Self {
            app: app(store),
            order: order(),
            bare,
            next: AtomicU64::new(0),
        }
    }
}

impl<B: Bare> Both<B> {
    /// Checks that every request of both sides left a record, in addition to the records that are replayed.
    fn assert_records(&self, stored: i64) {
        let sent = self.next.load(Relaxed) + self.bare.fresh_requests();
        assert_eq!(stored.unsigned_abs(), sent + B::REPLAYED, "records");
    }
}

impl<B: Bare> Sides for Both<B> {
    async fn layer(&self, replay: bool) {
        let key = match replay {
            true => "replayed".to_owned(),
            false => format!("{:032}", self.next.fetch_add(1, Relaxed)),
        };
        send_order(&self.app, &self.order, &key, replay).await;
    }

    async fn bare(&self, replay: bool) {
        self.bare.request(replay).await;
    }
}

/// A loop of statements without the store.
trait Bare: Send + Sync + 'static {
    /// The number of records for replays.
    const REPLAYED: u64;

    fn request(&self, replay: bool) -> impl Future<Output = ()> + Send;

    /// Returns the number of requests with fresh keys.
    fn fresh_requests(&self) -> u64;
}

// ---- Servers: statements seen on the wire ----

/// The two statements of a fresh request, as the store has sent them, and the id of their entry.
struct Seen {
    acquire: String,
    complete: String,
    id: String,
}

/// The same number of connections as a store has.
struct Connections<C> {
    idle: Mutex<Vec<C>>,
    permits: Semaphore,
}

impl<C> Connections<C> {
    fn new(idle: Vec<C>) -> Self {
        Self {
            permits: Semaphore::new(idle.len()),
            idle: Mutex::new(idle),
        }
    }

    async fn take(&self) -> (C, SemaphorePermit<'_>) {
        let permit = self.permits.acquire().await.expect("it is never closed");
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        (idle.pop().expect("one for each permit"), permit)
    }

    fn give(&self, connection: C) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(connection);
    }
}

/// A loop that sends the observed statements repeatedly.
struct Loop<C> {
    seen: Seen,
    connections: Connections<C>,
    next: AtomicU64,
}

impl<C> Loop<C>
where
    C: Connection + Send + 'static,
    for<'c> &'c mut C: Executor<'c, Database = C::Database>,
{
    async fn send(&self, sql: String) {
        let (mut connection, _permit) = self.connections.take().await;
        let rows = raw_sql(AssertSqlSafe(sql)).fetch_all(&mut connection).await;
        assert!(!rows.expect("rows").is_empty());
        self.connections.give(connection);
    }
}

impl<C> Bare for Loop<C>
where
    C: Connection + Send + 'static,
    for<'c> &'c mut C: Executor<'c, Database = C::Database>,
{
    // Both sides replay the record of the observed request.
    const REPLAYED: u64 = 1;

    fn fresh_requests(&self) -> u64 {
        self.next.load(Relaxed)
    }

    async fn request(&self, replay: bool) {
        if replay {
            return self.send(self.seen.acquire.clone()).await;
        }
        let id = id(self.next.fetch_add(1, Relaxed));
        let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        self.send(self.seen.acquire.replace(&self.seen.id, &id))
            .await;
        self.send(self.seen.complete.replace(&self.seen.id, &id))
            .await;
    }
}

async fn on_postgres(server: &PostgresServer) -> Both<Loop<PgConnection>> {
    let recorder = StatementRecorder::start(server.address());
    let url = format!("postgres://app@{}/postgres", recorder.address);
    let recorded = PostgresStore::from_url(&url).expect("an URL");
    recorded.migrate().await.expect("the server runs");
    send_order(&app(recorded), &order(), "replayed", false).await;
    let mut connections = connect::<PgConnection>(&server.url()).await;
    let ids = sqlx::query_scalar("select encode(id, 'hex') from tower_idempotency");
    let id: String = ids.fetch_one(&mut connections[0]).await.expect("one");
    let store = PostgresStore::from_url(&server.url()).expect("an URL");
    Both::new(
        store,
        Loop {
            seen: Seen {
                acquire: recorder.statement("set transaction", b"with asked"),
                complete: recorder.statement("set transaction", b"with ended"),
                id,
            },
            connections: Connections::new(connections),
            next: AtomicU64::new(0),
        },
    )
}

async fn on_mariadb(server: &MariaDbServer) -> Both<Loop<MySqlConnection>> {
    let recorder = StatementRecorder::start(server.address());
    let url = mariadb::url(recorder.address);
    let recorded = MySqlStore::from_url(&url).expect("an URL");
    recorded.migrate().await.expect("the server runs");
    send_order(&app(recorded), &order(), "replayed", false).await;
    let mut connections = connect::<MySqlConnection>(&server.url()).await;
    let ids = sqlx::query_scalar("select lower(hex(id)) from tower_idempotency");
    let id: String = ids.fetch_one(&mut connections[0]).await.expect("one");
    let store = MySqlStore::from_url(&server.url()).expect("an URL");
    Both::new(
        store,
        Loop {
            seen: Seen {
                acquire: recorder.statement("set transaction", b"into @free"),
                complete: recorder.statement("set @record", b"@record"),
                id,
            },
            connections: Connections::new(connections),
            next: AtomicU64::new(0),
        },
    )
}

/// Connects like the store does: inspecting each statement for a log takes extra time.
async fn connect<C: Connection>(url: &str) -> Vec<C> {
    let options: C::Options = url.parse().expect("an URL");
    let options = options.disable_statement_logging();
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        let connection = C::connect_with(&options).await;
        connections.push(connection.expect("the server runs"));
    }
    connections
}

/// Records the bytes that clients send to a server.
struct StatementRecorder {
    address: SocketAddr,
    received: Arc<Mutex<Vec<u8>>>,
}

impl StatementRecorder {
    fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        let received = Arc::<Mutex<Vec<u8>>>::default();
        let recording = Arc::clone(&received);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server = TcpStream::connect(server).expect("the server runs");
                let [from, to] = [&client, &server].map(|it| it.try_clone().expect("a socket"));
                let recording = Arc::clone(&recording);
                copy(from, to, move |bytes| {
                    let mut recording = recording.lock().unwrap_or_else(PoisonError::into_inner);
                    recording.extend_from_slice(bytes);
                });
                copy(server, client, |_| {});
            }
        });
        Self { address, received }
    }

    /// Returns a message that begins with `begins` and contains `has`. Its end follows from the length that precedes it.
    fn statement(&self, begins: &str, has: &[u8]) -> String {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let find = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).position(|it| it == what);
        let mut at = 0;
        loop {
            let next = find(&received[at..], begins.as_bytes());
            at += next.expect("the statement");
            let before: [u8; 5] = received[at - 5..at].try_into().expect("five bytes");
            let length = match before {
                // PostgreSQL: a Q and the length, with itself and the zero at the end.
                [b'Q', length @ ..] => u32::from_be_bytes(length) as usize - 5,
                // MySQL: the length of the rest, a sequence number, and the command.
                [a, b, c, _, 3] => u32::from_le_bytes([a, b, c, 0]) as usize - 1,
                _ => {
                    at += 1;
                    continue;
                }
            };
            let text = &received[at..at + length];
            if find(text, has).is_some() {
                return String::from_utf8(text.to_vec()).expect("text");
            }
            at += 1;
        }
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, seen: impl Fn(&[u8]) + Send + 'static) {
    to.set_nodelay(true).expect("a socket");
    thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            seen(&buffer[..length]);
            if to.write_all(&buffer[..length]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}

// ---- SQLite: statements in the source ----

struct File {
    readers: Connections<SqliteConnection>,
    writer: Connections<SqliteConnection>,
    statements: [SqlStr; 3],
    record: Vec<u8>,
    next: AtomicU64,
}

impl File {
    async fn run(&self, at: &Connections<SqliteConnection>, n: usize, id: &[u8], is_row: bool) {
        let (mut connection, _permit) = at.take().await;
        let query = sqlx::query(self.statements[n].clone()).bind(id).bind(TOKEN);
        let query = match n {
            0 => query,
            1 => query
                .bind(FINGERPRINT)
                .bind(15_000)
                .bind(86_400_000)
                .bind(true)
                .bind("host:1")
                .bind("POST /orders")
                .bind(None::<Vec<u8>>),
            _ => query
                .bind(FINGERPRINT)
                .bind(1)
                .bind(86_400_000)
                .bind(&self.record),
        };
        // Reads to the end, like the store: a query for a single row does not report a failed commit.
        let rows = query.fetch_all(&mut connection).await;
        assert_eq!(rows.expect("rows").len(), usize::from(is_row));
        at.give(connection);
    }

    async fn fresh(&self, id: &[u8]) {
        self.run(&self.readers, 0, id, false).await;
        self.run(&self.writer, 1, id, true).await;
        self.run(&self.writer, 2, id, true).await;
    }
}

impl Bare for File {
    const REPLAYED: u64 = 2;

    fn fresh_requests(&self) -> u64 {
        self.next.load(Relaxed)
    }

    async fn request(&self, replay: bool) {
        if replay {
            return self.run(&self.readers, 0, &[9; 32], true).await;
        }
        self.fresh(&id(self.next.fetch_add(1, Relaxed))).await;
    }
}

async fn on_sqlite(scratch: &Scratch) -> Both<File> {
    let path = scratch.file("keys.db");
    let store = SqliteStore::in_file(&path);
    store.migrate().await.expect("a file that can be written");
    send_order(&app(store.clone()), &order(), "replayed", false).await;
    let options = SqliteConnectOptions::new()
        .filename(&path)
        .synchronous(SqliteSynchronous::Full)
        .disable_statement_logging();
    let connect = async || {
        let connection = SqliteConnection::connect_with(&options).await;
        connection.expect("the file is there")
    };
    let mut writer = connect().await;
    let records = sqlx::query_scalar("select record from tower_idempotency");
    let record = records.fetch_one(&mut writer).await.expect("a record");
    let statements = [
        ("read_entry", LOOK),
        ("acquire", ACQUIRE),
        ("complete", COMPLETE),
    ];
    let bare = File {
        readers: Connections::new(vec![
            connect().await,
            connect().await,
            connect().await,
            connect().await,
        ]),
        writer: Connections::new(vec![writer]),
        statements: statements.map(|(name, sql)| {
            let stands = SOURCE.contains(&format!(
                "{name}: statement(format!(\n                \"{sql}\""
            ));
            assert!(stands, "the store has another statement to {name}");
            let sql = sql.replace("{table}", "tower_idempotency");
            let sql = sql.replace("{keeps_checkpoint}", KEEPS_CHECKPOINT);
            AssertSqlSafe(Arc::<str>::from(sql.replace("{NOW}", NOW))).into_sql_str()
        }),
        record,
        next: AtomicU64::new(0),
    };
    bare.fresh(&[9; 32]).await;
    Both::new(store, bare)
}

const SOURCE: &str = include_str!("../../crates/tower-idempotency-sqlx/src/sqlite/statements.rs");
const NOW: &str = "cast(unixepoch('subsec') * 1000 as integer)";
const LOOK: &str =
    "select completed is not null, token is ?2, expires <= {NOW}, fingerprint, generation,
  lease_ends - {NOW}, record, expires - {NOW}, token
from {table} where id = ?1";
const ACQUIRE: &str = "insert into {table} as e
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, owner, operation)
select ?1, ?2, ?3, 1, now + ?4, ?5, now + ?4 + ?5, now, ?7, ?8 from (select {NOW} as now) where true
on conflict (id) do update set
  token = excluded.token,
  fingerprint = case when e.expires > excluded.created then e.fingerprint else excluded.fingerprint end,
  generation = case when e.expires <= excluded.created then 1
                    when e.token = excluded.token then e.generation
                    else e.generation + 1 end,
  lease_ends = excluded.lease_ends,
  orphan_retention = excluded.orphan_retention,
  expires = excluded.expires,
  created = case when e.expires <= excluded.created then excluded.created else e.created end,
  completed = null,
  record = null,
  owner = excluded.owner,
  operation = case when excluded.operation = '' and e.expires > excluded.created then e.operation else excluded.operation end,
  checkpoint = case when e.expires > excluded.created then e.checkpoint end,
  checkpoint_data = case when e.expires > excluded.created then e.checkpoint_data end
where e.expires <= excluded.created
  or e.completed is null and (e.token = excluded.token
    or (?6 or substr(e.token, 1, length(?9)) = ?9)
      and e.lease_ends <= excluded.created and e.fingerprint = excluded.fingerprint)
returning generation";
const COMPLETE: &str = "insert into {table} as e
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, record, owner, operation)
select ?1, ?2, ?3, ?4, now, 0, now + ?5, now, now, ?6, '', '' from (select {NOW} as now) where true
on conflict (id) do update set
  token = excluded.token,
  fingerprint = excluded.fingerprint,
  generation = case when e.token = excluded.token then e.generation else excluded.generation end,
  expires = excluded.expires,
  created = case when e.expires <= excluded.created then excluded.created else e.created end,
  completed = excluded.completed,
  record = excluded.record,
  owner = case when e.expires <= excluded.created then '' else e.owner end,
  operation = case when e.expires <= excluded.created then '' else e.operation end,
  checkpoint = case when {keeps_checkpoint} then e.checkpoint end,
  checkpoint_data = case when {keeps_checkpoint} then e.checkpoint_data end
where e.expires <= excluded.created
  or e.completed is null and (e.token = excluded.token or e.token is null)
returning 1";
const KEEPS_CHECKPOINT: &str =
    "e.expires > excluded.created and substr(excluded.record, 2, 1) = x'02'";
const STORED: &str = "select count(*) from tower_idempotency where completed is not null";
const CONNECTIONS: usize = 10;
const TOKEN: &[u8] = &[7; 16];
const FINGERPRINT: &[u8] = &[9; 32];

/// Returns an id that is scattered like a digest, because rows in order are cheaper to insert.
fn id(n: u64) -> [u8; 32] {
    let mut id = [7; 32];
    let scattered = n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    id[..8].copy_from_slice(&scattered.swap_bytes().to_le_bytes());
    id
}
