//! Operators find and resolve entries that need attention with the statements of the documentation.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use tests::{
    attention::AttentionService,
    post,
    scratch::Scratch,
    send,
    servers::{mariadb, postgres, redis},
    sql,
};
use tower_idempotency::{
    NeedsAttention, Store,
    store::{Acquired, Claim, Fingerprint, KeyId},
};
use tower_idempotency_sqlx::sqlx::{
    AssertSqlSafe, Connection, MySqlConnection, PgConnection, Row, SqliteConnection, raw_sql,
};

const TABLE: &str = "attention_operators";

fn response() -> http::Response<Bytes> {
    http::Response::new(Bytes::from_static(b"refunded by hand"))
}

/// Returns the code block of a document that begins with these words, without that first line.
fn documented(document: &str, language: &str, words: &str) -> String {
    let rest = document.split_once(&format!("```{language}\n-- {words}"));
    let (_, rest) = rest.unwrap_or_else(|| panic!("no {words}"));
    let (block, _) = rest.split_once("```").expect("its end");
    let (_, code) = block.split_once('\n').expect("a first line");
    code.to_owned()
}

fn statement(words: &str) -> String {
    let docs = include_str!("../../../docs/operations/by-hand.md");
    documented(docs, "sql", words).replace("tower_idempotency", TABLE)
}

/// A row that the operator's query returns.
#[derive(Debug)]
struct Seen {
    id: String,
    owner: String,
    operation: String,
    generation: i64,
    completed: i64,
    /// Seconds, or `None` if the database has a type for intervals.
    overdue: Option<i64>,
    code: String,
    reason: String,
}

/// Waits until a record of the store gets a later time, which has milliseconds.
async fn next_millisecond() {
    tokio::time::sleep(Duration::from_millis(2)).await;
}

fn key_id(hex: &str) -> KeyId {
    let mut id = [0; 32];
    for (byte, digits) in id.iter_mut().zip(hex.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).expect("digits");
        *byte = u8::from_str_radix(digits, 16).expect("hexadecimal digits");
    }
    KeyId::from_bytes(id)
}

/// Resolves one entry after another, each in a different way; `find` and `run` use an operator's connection.
async fn operators_resolve<S: Store + Clone>(
    store: S,
    database: &str,
    free: &str,
    answer_with: &str,
    find: impl AsyncFn(String) -> Vec<Seen>,
    run: impl AsyncFn(String) -> u64,
) {
    let service = AttentionService::new(sql::layer(store));
    let list = async || find(statement(&format!("Find: {database}"))).await;
    for key in ["freed", "retried", "settled"] {
        assert_eq!(
            service.send_request(key).await.status,
            StatusCode::BAD_GATEWAY
        );
        service.assert_refused(key).await;
    }
    // Entries in progress and entries with a response are not listed.
    service.set_needs_attention(false);
    service.assert_executed("fine", 4, false).await;
    // 100 days ago. The greatest value of `time` is 35 days in MySQL and MariaDB.
    let age: i64 = 100 * 86400;
    let earlier = format!("lease_ends - {}", age * 1000);
    run(format!("update {TABLE} set lease_ends = {earlier}")).await;

    let mut seen = list().await;
    seen.sort_by_key(|it| it.reason.clone());
    assert_eq!(seen.len(), 3, "{seen:?}");
    for (n, it) in seen.iter().enumerate() {
        assert_eq!((&*it.operation, it.generation), ("POST /cancel", 1));
        assert!(it.owner.contains(&std::process::id().to_string()));
        assert_eq!(it.code, "refund-failed");
        assert!(it.overdue.is_none_or(|seconds| seconds > age / 2), "{it:?}");
        assert_eq!(it.overdue.is_none(), database == "PostgreSQL");
        assert!(
            it.reason.ends_with(&format!("refund re_{}", n + 1)),
            "{it:?}"
        );
    }
    let fill = |statement: String, it: &Seen| {
        let generation = it.generation.to_string();
        let statement = statement.replace("<generation>", &generation);
        let statement = statement.replace("<completed>", &it.completed.to_string());
        statement.replace("<id>", &it.id)
    };
    let record = |it: &Seen| {
        let id = key_id(&it.id);
        let record = service.layer.encode_response_record(&id, &response());
        let digits: String = record.iter().map(|byte| format!("{byte:02x}")).collect();
        let resolve = answer_with.replace("<record>", &digits);
        fill(resolve.replace("tower_idempotency", TABLE), it)
    };

    let delete = fill(statement(&format!("Free: {free}")), &seen[0]);
    assert_eq!(run(delete.clone()).await, 1);
    assert_eq!(run(delete.clone()).await, 0, "twice");
    // The entry of a later failure has the same generation.
    next_millisecond().await;
    service.set_needs_attention(true);
    assert_eq!(
        service.send_request("freed").await.status,
        StatusCode::BAD_GATEWAY
    );
    let retry = fill(statement(&format!("Retry: {database}")), &seen[0]);
    for earlier in [delete, retry, record(&seen[0])] {
        assert_eq!(run(earlier).await, 0, "of an earlier failure");
    }
    service.assert_refused("freed").await;
    let again = list().await;
    let again = again.iter().find(|it| it.id == seen[0].id);
    let again = again.expect("listed again");
    assert_eq!(again.generation, 1);
    assert_eq!(
        run(fill(statement(&format!("Free: {free}")), again)).await,
        1
    );
    service.set_needs_attention(false);
    service.assert_executed("freed", 6, false).await;

    let update = fill(statement(&format!("Retry: {database}")), &seen[1]);
    assert_eq!(run(update.clone()).await, 1);
    assert_eq!(run(update.clone()).await, 0, "twice");
    let other = send(&service.app, post("/cancel", "retried", "another")).await;
    assert_eq!(other.code(), "key-reused");
    service.set_needs_attention(true);
    assert_eq!(
        service.send_request("retried").await.status,
        StatusCode::BAD_GATEWAY
    );
    service.assert_refused("retried").await;
    assert_eq!(
        run(update).await,
        0,
        "the statement names an earlier generation"
    );
    let again = list().await;
    let again = again.iter().find(|it| it.id == seen[1].id);
    let again = again.expect("listed again");
    assert_eq!(again.generation, 2);
    service.set_needs_attention(false);
    let update = fill(statement(&format!("Retry: {database}")), again);
    assert_eq!(run(update).await, 1);
    service.assert_executed("retried", 8, true).await;

    assert_eq!(run(record(&seen[2])).await, 1);
    let replay = service.send_request("settled").await;
    assert_eq!(replay.text(), "refunded by hand");
    assert!(replay.is_replay());
    assert_eq!(list().await.len(), 0);
    assert_eq!(service.effects.count(), 8);
}

macro_rules! operators_resolve {
    ($store:expr, $connection:ty, $url:expr, $database:literal, $free:literal, $response:literal) => {{
        let url: String = $url;
        let find = async |statement: String| {
            let mut admin = <$connection>::connect(&url).await.expect("it runs");
            let rows = raw_sql(AssertSqlSafe(statement))
                .fetch_all(&mut admin)
                .await;
            let rows = rows.expect("a valid statement");
            let seen = rows.iter().map(|row| {
                // Operators' clients must be able to display these columns.
                row.try_get_raw("since").expect("a column");
                row.try_get_raw("overdue").expect("a column");
                let overdue = row.try_get("overdue").ok();
                Seen {
                    id: row.get("id"),
                    owner: row.get("owner"),
                    operation: row.get("operation"),
                    generation: row.get("generation"),
                    completed: row.get("completed"),
                    overdue,
                    code: row.get("code"),
                    // The reason is MessagePack, whose text is readable.
                    reason: row.try_get("reason").unwrap_or_else(|_| {
                        let bytes: Vec<u8> = row.get_unchecked("reason");
                        String::from_utf8_lossy(&bytes).into_owned()
                    }),
                }
            });
            seen.collect::<Vec<_>>()
        };
        let run = async |statement: String| {
            let mut admin = <$connection>::connect(&url).await.expect("it runs");
            let done = raw_sql(AssertSqlSafe(statement)).execute(&mut admin).await;
            done.expect("a valid statement").rows_affected()
        };
        operators_resolve($store, $database, $free, $response, find, run).await;
    }};
}

// S-244
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_resolve_attention_in_postgres() {
    let server = postgres::shared();
    operators_resolve!(
        sql::postgres(server, TABLE).await,
        PgConnection,
        server.url(),
        "PostgreSQL",
        "PostgreSQL",
        r"update tower_idempotency set record = '\x<record>', expires = completed + 86400000
          where id = '\x<id>' and generation = <generation> and completed = <completed>
            and substring(record from 2 for 1) = '\x02'"
    );
}

// S-245
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_resolve_attention_in_mariadb() {
    let server = mariadb::shared();
    operators_resolve!(
        sql::mariadb(server, TABLE).await,
        MySqlConnection,
        server.url(),
        "MySQL, MariaDB",
        "MySQL, MariaDB, SQLite",
        r"update tower_idempotency set record = x'<record>', expires = completed + 86400000
          where id = x'<id>' and generation = <generation> and completed = <completed>
            and substr(record, 2, 1) = x'02'"
    );
}

// S-246
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_resolve_attention_in_sqlite() {
    let scratch = Scratch::new();
    let store = sql::sqlite(&scratch).await.with_table(TABLE);
    let store = store.expect("an identifier");
    store.migrate().await.expect("a file that can be written");
    operators_resolve!(
        store,
        SqliteConnection,
        format!("sqlite:{}", scratch.file("keys.db").display()),
        "SQLite",
        "MySQL, MariaDB, SQLite",
        r"update tower_idempotency set record = x'<record>', expires = completed + 86400000
          where id = x'<id>' and generation = <generation> and completed = <completed>
            and substr(record, 2, 1) = x'02'"
    );
}

// S-247
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_resolve_attention_in_redis() {
    let server = redis::RedisServer::start(&[]);
    let store = server.store().await;
    let service = AttentionService::new(sql::layer(store.clone()));
    for key in ["a", "b", "c"] {
        service.send_request(key).await;
        service.assert_refused(key).await;
    }
    service.set_needs_attention(false);
    service.assert_executed("fine", 4, false).await;
    let leased = Claim::new(KeyId::from_bytes([7; 32]), Fingerprint::from_bytes([7; 32]));
    let leased = store.acquire(&leased.expect("randomness")).await;
    assert!(matches!(leased, Ok(Acquired::Granted { .. })));

    let docs = include_str!("../../../docs/operations/by-hand.md");
    let [find, free, retry] = ["Find", "Free", "Retry"].map(|words| documented(docs, "lua", words));
    // The generation and the time of the record, or nothing.
    let find = |key: &str| server.list(&["EVAL", &find, "1", key]);
    let eval = |code: &str, key: &str, seen: &[Vec<u8>]| {
        let command = [b"EVAL", code.as_bytes(), b"1", key.as_bytes()];
        let arguments = seen.iter().map(Vec::as_slice);
        server.command(&command.into_iter().chain(arguments).collect::<Vec<_>>())
    };
    let keys = server.command(&["KEYS", "idempotency:[0-9a-f]*"]);
    let mut found: Vec<_> = keys.lines().filter(|key| !find(key).is_empty()).collect();
    assert_eq!((keys.lines().count(), found.len()), (5, 3));
    let record = |key: &str| {
        let record = server.list(&["HMGET", key, "b"]).remove(0);
        NeedsAttention::in_record(&record).expect("of this kind")
    };
    found.sort_by_key(|key| record(key).reason().to_owned());
    assert_eq!(record(found[0]).code(), "refund-failed");
    assert_eq!(record(found[0]).reason(), "refund re_1");

    let seen = find(found[0]);
    assert_eq!(eval(&free, found[0], &seen), "1");
    // The entry of a later failure has the same generation.
    next_millisecond().await;
    service.set_needs_attention(true);
    service.send_request("a").await;
    for earlier in [&free, &retry] {
        assert_eq!(eval(earlier, found[0], &seen), "0", "of an earlier failure");
    }
    service.assert_refused("a").await;
    let again = find(found[0]);
    assert_eq!(again[0], seen[0]);
    assert_eq!(eval(&free, found[0], &again), "1");
    service.set_needs_attention(false);
    service.assert_executed("a", 6, false).await;

    let seen = find(found[1]);
    assert_eq!(eval(&retry, found[1], &seen), "1");
    assert_eq!(eval(&retry, found[1], &seen), "0", "twice");
    assert_eq!(eval(&free, found[1], &seen), "0", "after a retry");
    let other = send(&service.app, post("/cancel", "b", "another")).await;
    assert_eq!(other.code(), "key-reused");
    service.assert_executed("b", 7, true).await;

    let id = found[2].strip_prefix("idempotency:").expect("the prefix");
    let settled = service
        .layer
        .encode_response_record(&key_id(id), &response());
    server.command(&[b"HSET", found[2].as_bytes(), b"b", &settled]);
    server.command(&["PEXPIRE", found[2], "60000"]);
    let replay = service.send_request("c").await;
    assert_eq!(replay.text(), "refunded by hand");
    assert!(replay.is_replay());
    assert!(keys.lines().all(|key| find(key).is_empty()));
    assert_eq!(service.effects.count(), 7);
}
