//! Outboxes of earlier builds, whose requests must always be recovered.
//!
//! `WRITE_GOLDEN=1 cargo test -p tower-idempotency-client golden` writes missing files and never overwrites one. The tables were
//! written by hand. A later format adds a folder.

use std::{env, fs, path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Request};
use http_body_util::Full;
use tests::scratch::Scratch;
use tower::{Layer, ServiceExt};
use tower_idempotency_client::{
    Entry, FileOutbox, IdempotencyKeyLayer, Operation, Outbox, OutboxLayer, OutboxService,
    Protocol, RetryLayer,
};

use crate::{
    harness::{Sent, Server, status},
    outbox_contract::at,
    outbox_memory::Memory,
};

const BODY: &[u8] = b"one \0 espresso";

fn request() -> Request<Bytes> {
    Request::post("https://api.example.com/orders?x=1")
        .header("content-type", "text/plain")
        .header("x-tenant-id", HeaderValue::from_bytes(b"caf\xe9").unwrap())
        .body(Bytes::from_static(BODY))
        .unwrap()
}

/// Returns the bytes of a golden file. With `WRITE_GOLDEN`, a file that is missing is written first.
fn golden(name: &str, bytes: &[u8]) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/outbox-v1");
    let path = folder.join(name);
    if env::var_os("WRITE_GOLDEN").is_some() && !path.exists() {
        fs::write(&path, bytes).unwrap();
    }
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Makes each change of an outbox: an entry that is stored in advance and resumed, one of a call, and one that is removed.
async fn change(outbox: &Arc<impl Outbox>) {
    let entry = |key: &str| Entry::new(&Operation::with_key(key).unwrap(), &request());
    assert_eq!(outbox.store(&entry("order-1")).await.unwrap(), None);
    let operation = Operation::with_key("order \"2\"").unwrap();
    let operation = operation
        .with_first_sent(at(1_700_000_000_123))
        .with_provider(u64::MAX - 3);
    let mut req = request().map(Full::new);
    req.extensions_mut().insert(operation);
    // The key has expired, so the call stores the request and sends nothing.
    let client = OutboxLayer::new(outbox.clone(), RetryLayer::new()).layer(Server::new([]));
    assert!(client.oneshot(req).await.unwrap_err().is_expired());
    assert_eq!(outbox.store(&entry("order-3")).await.unwrap(), None);
    outbox.remove("order-3").await.unwrap();
    let resumed = outbox.resume("order-1", at(1_700_000_000_456), Some(7));
    assert!(resumed.await.unwrap().is_some());
}

/// Checks the entries that [`change`] leaves, and recovers them.
async fn check(outbox: impl Outbox) {
    let outbox = Arc::new(outbox);
    let pending = outbox.pending(0, 10).await.unwrap();
    let entries: Vec<_> = pending
        .iter()
        .map(|(at, entry)| (*at, entry.key(), entry.first_sent(), entry.provider()))
        .collect();
    let (first, second) = (at(1_700_000_000_456), at(1_700_000_000_123));
    assert_eq!(
        entries,
        [
            (1, "order-1", Some(first), Some(7)),
            (2, "order \"2\"", Some(second), Some(u64::MAX - 3)),
        ]
    );
    for (_, entry) in &pending {
        assert_eq!(outbox.store(entry).await.unwrap().as_ref(), Some(entry));
    }
    // Only the entry of the call has its key header. The protocol decides on that of the other one.
    assert_eq!(
        recover(&outbox, Protocol::Stripe).await,
        ["order-1", "\"order \\\"2\\\"\""]
    );
    assert_eq!(outbox.pending(0, 10).await.unwrap(), []);
}

/// Returns the client of a later process. No key expires, because the golden entries are old.
fn later_client<O: Outbox>(
    outbox: &Arc<O>,
    protocol: Protocol,
    server: &Server,
) -> OutboxService<Server, O> {
    let keys = IdempotencyKeyLayer::new().with_protocol(protocol);
    let retries = RetryLayer::new().with_lifetime(Duration::MAX);
    OutboxLayer::new(outbox.clone(), retries.with_keys(keys)).layer(server.clone())
}

/// Recovers all entries. Returns the key headers that the server received.
async fn recover(outbox: &Arc<impl Outbox>, protocol: Protocol) -> Vec<String> {
    let server = Server::new([status(201)]);
    let client = later_client(outbox, protocol, &server);
    let mut recovery = client.recover();
    while let Some(recovered) = recovery
        .next(|_: &mut Request<Full<Bytes>>| {})
        .await
        .unwrap()
    {
        assert_eq!(recovered.result.unwrap().status(), 201);
    }
    let log = server.take_log();
    for sent in &log {
        assert_eq!(sent.uri, *request().uri());
        assert_eq!(sent.headers["content-type"], "text/plain");
        assert_eq!(sent.headers["x-tenant-id"].as_bytes(), b"caf\xe9");
        assert_eq!(sent.body, BODY);
    }
    let keys = log.iter().map(|sent| sent.key().unwrap().to_owned());
    keys.collect()
}

/// Magic number, salt, and the checksum of both. A file without this header would get a random salt.
const HEADER: &[u8] = b"TIOUTBX3SALT\x22\x57\xdb\x9d";

/// The file has each kind of record.
#[tokio::test]
async fn golden_file_is_recovered() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    fs::write(&path, HEADER).unwrap();
    let outbox = Arc::new(FileOutbox::open(&path).unwrap());
    change(&outbox).await;
    // A drop erases the removed entry.
    let bytes = fs::read(&path).unwrap();
    drop(outbox);
    let golden = golden("file.outbox", &bytes);
    assert_eq!(bytes, golden);
    let copy = scratch.file("copy.outbox");
    fs::write(&copy, golden).unwrap();
    check(FileOutbox::open(&copy).unwrap()).await;
}

#[tokio::test]
async fn golden_entry_is_decoded() {
    let outbox = Arc::new(Memory::default());
    change(&outbox).await;
    let (_, entry) = outbox.pending(0, 2).await.unwrap().remove(1);
    let bytes = entry.encode();
    let golden = golden("entry.bin", &bytes);
    assert_eq!(Entry::decode(&golden).unwrap(), entry);
    assert_eq!(bytes, golden);
}

/// Entries from before the key header was stored. A line that the caller had set in another form was stored without a mark.
#[tokio::test]
async fn entry_without_marked_key_is_recovered() {
    for (line, key) in [
        ("", "order-1"),
        (r#",["idempotency-key","\"order-1\""]"#, "\"order-1\""),
    ] {
        let head = [
            r#"{"first_sent":1700000000123,"headers":[["content-type","text/plain"],"#,
            r#"["x-tenant-id","café"]"#,
            line,
            r#"],"key":"order-1","method":"POST","provider":null,"#,
            r#""url":"https://api.example.com/orders?x=1"}"#,
        ]
        .concat();
        let length = u32::try_from(head.len()).unwrap().to_be_bytes();
        let bytes = [&length[..], head.as_bytes(), BODY].concat();
        let entry = Entry::decode(&bytes).unwrap();
        assert_eq!(entry.encode(), bytes);
        let outbox = Arc::new(Memory::default());
        outbox.store(&entry).await.unwrap();
        let keys = recover(&outbox, Protocol::TowerIdempotency).await;
        assert_eq!(keys, [key]);
        // The application sends the operation again.
        outbox.store(&entry).await.unwrap();
        let server = Server::new([status(201)]);
        let client = later_client(&outbox, Protocol::TowerIdempotency, &server);
        let mut req = request().map(Full::new);
        req.extensions_mut()
            .insert(Operation::with_key("order-1").unwrap());
        assert_eq!(client.oneshot(req).await.unwrap().status(), 201);
        let log = server.take_log();
        assert_eq!(log.iter().map(Sent::key).collect::<Vec<_>>(), [Some(key)]);
    }
}

/// Row of a table: position, key, method, URL, headers, body, time, provider, and the mark of a resumed entry.
#[cfg(any(feature = "outbox-postgres", feature = "outbox-sqlite"))]
type Row = (
    i64,
    String,
    String,
    String,
    String,
    String,
    Option<i64>,
    Option<i64>,
    bool,
);

#[cfg(feature = "outbox-sqlite")]
mod sqlite {
    use tests::database::pool_options;
    use tower_idempotency_client::{
        SqliteOutbox,
        sqlx::{self, Sqlite, SqlitePool},
    };

    use super::*;

    async fn open(scratch: &Scratch, name: &str) -> SqlitePool {
        let url = format!("sqlite:{}?mode=rwc", scratch.file(name).display());
        pool_options::<Sqlite>().connect(&url).await.unwrap()
    }

    /// Returns the statement that created the table, and its rows.
    async fn content(pool: &SqlitePool) -> (String, Vec<Row>) {
        let sql = "select sql from sqlite_master where name = 'idempotency_outbox'";
        let table = sqlx::query_scalar::<Sqlite, String>(sql);
        let table = table.fetch_one(pool).await.unwrap();
        let words: Vec<_> = table.split_whitespace().collect();
        let sql = "select position, key, method, url, headers, hex(body), first_sent, provider, \
            resumed from idempotency_outbox order by position";
        let rows = sqlx::query_as::<Sqlite, Row>(sql).fetch_all(pool).await;
        (words.join(" "), rows.unwrap())
    }

    #[tokio::test]
    async fn golden_table_of_sqlite_is_recovered() {
        let scratch = Scratch::new();
        let golden = open(&scratch, "golden.db").await;
        let changed = open(&scratch, "changed.db").await;
        let sql = include_str!("../golden/outbox-v1/sqlite.sql");
        sqlx::raw_sql(sql).execute(&golden).await.unwrap();
        let outbox = Arc::new(SqliteOutbox::new(changed.clone()));
        outbox.migrate().await.unwrap();
        change(&outbox).await;
        assert_eq!(content(&changed).await, content(&golden).await);
        let outbox = SqliteOutbox::new(golden);
        outbox.migrate().await.unwrap();
        check(outbox).await;
    }
}

#[cfg(feature = "outbox-postgres")]
mod postgres {
    use tests::database::pool_options;
    use tower_idempotency_client::{
        PostgresOutbox,
        sqlx::{self, PgPool, Postgres, postgres::PgConnectOptions},
    };

    use super::*;

    /// Creates a schema, and returns a pool whose connections use it.
    async fn open(schema: &'static str, create: &'static str) -> PgPool {
        let url = tests::servers::postgres::shared().url();
        let options: PgConnectOptions = url.parse().unwrap();
        let options = options.options([("search_path", schema)]);
        let pool = pool_options::<Postgres>().connect_with(options).await;
        let pool = pool.unwrap();
        sqlx::raw_sql(create).execute(&pool).await.unwrap();
        pool
    }

    /// Returns the columns of the table, and its rows.
    async fn content(pool: &PgPool) -> (Vec<String>, Vec<Row>) {
        let sql = "select concat_ws(' ', column_name, data_type, is_nullable, column_default, \
            is_identity, identity_generation) from information_schema.columns \
            where table_schema = current_schema() order by ordinal_position";
        let columns = sqlx::query_scalar::<Postgres, String>(sql);
        let columns = columns.fetch_all(pool).await.unwrap();
        let sql = "select position, key, method, url, headers, encode(body, 'hex'), first_sent, \
            provider, resumed from idempotency_outbox order by position";
        let rows = sqlx::query_as::<Postgres, Row>(sql).fetch_all(pool).await;
        (columns, rows.unwrap())
    }

    #[tokio::test]
    async fn golden_table_of_postgres_is_recovered() {
        let golden = open("golden", "create schema golden").await;
        let changed = open("changed", "create schema changed").await;
        let sql = include_str!("../golden/outbox-v1/postgres.sql");
        sqlx::raw_sql(sql).execute(&golden).await.unwrap();
        let outbox = Arc::new(PostgresOutbox::new(changed.clone()));
        outbox.migrate().await.unwrap();
        change(&outbox).await;
        assert_eq!(content(&changed).await, content(&golden).await);
        let outbox = PostgresOutbox::new(golden);
        outbox.migrate().await.unwrap();
        check(outbox).await;
    }
}
