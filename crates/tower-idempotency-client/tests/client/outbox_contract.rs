//! The contract of an outbox, on a file, SQLite and PostgreSQL.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tests::scratch::Scratch;
use tower::{Layer, service_fn};
use tower_idempotency_client::{
    Entry, FileOutbox, Operation, Outbox, OutboxError, OutboxLayer, RetryLayer,
};

pub(crate) fn entry(key: &str) -> Entry {
    let req = Request::post("https://api.example.com/orders?x=1")
        .header("content-type", "text/plain")
        .header(
            "x-tenant-id",
            http::HeaderValue::from_bytes(b"caf\xe9").unwrap(),
        )
        .header("authorization", "Bearer secret")
        .body(Bytes::from(format!("one \0 espresso for {key}")))
        .unwrap();
    let operation = Operation::with_key(key)
        .unwrap()
        .with_provider(u64::MAX - 3);
    Entry::new(&operation, &req)
}

/// Returns a URL that `http` builds from its parts, and does not parse.
pub(crate) fn long_uri() -> http::Uri {
    let uri = http::Uri::builder()
        .scheme("https")
        .authority("api.example.com");
    let path = format!("/{}", "x".repeat(65_530));
    uri.path_and_query(path).build().unwrap()
}

pub(crate) fn unreadable_entry() -> Entry {
    let req = Request::post(long_uri()).body(Bytes::new()).unwrap();
    Entry::new(&Operation::with_key("unreadable").unwrap(), &req)
}

/// Returns a time that an outbox stores exactly.
pub(crate) fn at(millis: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(millis)
}

async fn keys(outbox: &impl Outbox) -> Vec<String> {
    let entries = outbox.pending(0, 100).await.unwrap();
    entries
        .iter()
        .map(|(_, entry)| entry.key().to_owned())
        .collect()
}

/// Checks each method of an empty outbox.
async fn check_contract(outbox: &impl Outbox) {
    assert_eq!(outbox.pending(0, 100).await.unwrap(), []);
    // A stored entry is returned whole, and does not change.
    let [first, second, third] = ["first", "second", "third"].map(entry);
    let sent = first.clone().or_first_sent(at(1_700_000_000_123));
    assert_eq!(outbox.store(&sent).await.unwrap(), None);
    assert_eq!(outbox.store(&second).await.unwrap(), None);
    assert_eq!(outbox.store(&third).await.unwrap(), None);
    let pending = outbox.pending(0, 100).await.unwrap();
    let entries: Vec<_> = pending.iter().map(|(_, entry)| entry).collect();
    assert_eq!(entries, [&sent, &second, &third]);
    // Pages continue after a position, also after that of a removed entry.
    assert!(pending.is_sorted_by_key(|(position, _)| *position) && pending[0].0 > 0);
    assert_eq!(outbox.pending(0, 2).await.unwrap(), pending[..2]);
    outbox.remove("second").await.unwrap();
    assert_eq!(outbox.pending(pending[1].0, 2).await.unwrap(), pending[2..]);
    assert_eq!(outbox.pending(u64::MAX, 2).await.unwrap(), []);
    // The second caller gets the stored entry. The time of the first attempt is set once.
    let later = at(1_800_000_000_000);
    let again = first.clone().or_first_sent(later);
    assert_eq!(outbox.store(&again).await.unwrap(), Some(sent.clone()));
    let resumed = outbox.resume("third", later, None).await.unwrap().unwrap();
    assert_eq!(resumed, third.clone().or_first_sent(later));
    let resumed = outbox.resume("third", at(1), None).await.unwrap().unwrap();
    assert_eq!(resumed.first_sent(), Some(later));
    assert_eq!(outbox.resume("second", later, None).await.unwrap(), None);
    // An entry that was resumed, or is gone, is not discarded.
    for (key, at) in [
        ("first", at(1_700_000_000_123)),
        ("third", later),
        ("second", later),
    ] {
        assert!(!outbox.discard(key, at).await.unwrap(), "{key}");
    }
    assert_eq!(keys(outbox).await, ["first", "third"]);
    let again = second.or_first_sent(later);
    assert_eq!(outbox.store(&again).await.unwrap(), None);
    assert!(outbox.discard("second", later).await.unwrap());
    assert!(!outbox.discard("second", later).await.unwrap());
    // A removed key is free, and its entry is a new one.
    outbox.remove("first").await.unwrap();
    outbox.remove("first").await.unwrap();
    assert_eq!(outbox.store(&first).await.unwrap(), None);
    assert_eq!(keys(outbox).await, ["third", "first"]);
    check_later_entry(outbox).await;
    check_provider(outbox).await;
}

/// Checks that a call does not discard the entry of a later call, after another call has removed its own.
async fn check_later_entry(outbox: &impl Outbox) {
    let [before, after] = [1_700_000_000_123, 1_700_000_000_124].map(at);
    let [earlier, later] = [before, after].map(|at| entry("again").or_first_sent(at));
    assert_eq!(outbox.store(&earlier).await.unwrap(), None);
    outbox.remove("again").await.unwrap();
    assert_eq!(outbox.store(&later).await.unwrap(), None);
    assert!(!outbox.discard("again", before).await.unwrap());
    assert_eq!(keys(outbox).await, ["third", "first", "again"]);
    // The rest of a millisecond is not stored.
    let at = after + Duration::from_micros(900);
    assert!(outbox.discard("again", at).await.unwrap());
    assert_eq!(keys(outbox).await, ["third", "first"]);
}

/// Checks that the first provider of an entry without one is stored, and does not change.
async fn check_provider(outbox: &impl Outbox) {
    let req = Request::post("https://api.example.com/orders").body(Bytes::new());
    let entry = Entry::new(&Operation::with_key("advance").unwrap(), &req.unwrap());
    assert_eq!(outbox.store(&entry).await.unwrap(), None);
    let sent = at(1_700_000_000_123);
    for (chosen, stored) in [(None, None), (Some(3), Some(3)), (Some(8), Some(3))] {
        let resumed = outbox.resume("advance", sent, chosen).await.unwrap();
        assert_eq!(resumed.unwrap().provider(), stored, "{chosen:?}");
    }
    let again = outbox.store(&entry.clone().or_provider(8)).await.unwrap();
    assert_eq!(again.unwrap().provider(), Some(3));
    let pending = outbox.pending(0, 100).await.unwrap();
    let (_, last) = pending.last().unwrap();
    assert_eq!(last, &entry.or_first_sent(sent).or_provider(3));
}

/// Lets many calls store one key. One of them stores it, and then none may discard it.
async fn check_races(outbox: &impl Outbox) {
    for _ in 0..3 {
        let calls = (0..16).map(|_| async {
            let entry = entry("race").or_first_sent(at(1));
            let previous = outbox.store(&entry).await.unwrap();
            u32::from(previous.is_none())
        });
        let new: u32 = join_all(calls).await.into_iter().sum();
        assert_eq!(new, 1, "one call stores the entry");
        assert!(!outbox.discard("race", at(1)).await.unwrap());
        outbox.remove("race").await.unwrap();
    }
}

/// Checks that a recovery ends although another call stores an entry during each of its requests. The next recovery sends the
/// later entries.
pub(crate) async fn check_recovery_ends(outbox: impl Outbox) {
    let outbox = Arc::new(outbox);
    for key in keys(&*outbox).await {
        outbox.remove(&key).await.unwrap();
    }
    let mut pending: BTreeSet<_> = (0..20).map(|n| format!("pending-{n}")).collect();
    for key in &pending {
        outbox.store(&entry(key)).await.unwrap();
    }
    let other = outbox.clone();
    let server = service_fn(move |_: Request<Full<Bytes>>| {
        let other = other.clone();
        async move {
            let entry = entry(Operation::new().key());
            other.store(&entry).await?;
            Ok::<_, OutboxError>(Response::new(Full::<Bytes>::default()))
        }
    });
    let client = OutboxLayer::new(outbox, RetryLayer::new()).layer(server);
    let unchanged = |_: &mut Request<Full<Bytes>>| {};
    let mut recovery = client.recover();
    let mut sent = 0;
    while let Some(recovered) = recovery.next(unchanged).await.unwrap() {
        assert_eq!(recovered.result.unwrap().status(), 200);
        pending.remove(recovered.entry.key());
        sent += 1;
        assert!(sent < 100, "the recovery does not end");
    }
    assert!(pending.is_empty(), "{pending:?}");
    assert!(recovery.next(unchanged).await.unwrap().is_none());
    let later = client.recover().next(unchanged).await.unwrap();
    assert!(later.is_some());
}

/// Polls all futures at the same time.
pub(crate) async fn join_all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(move |cx| {
        let mut is_ready = true;
        for (future, output) in &mut futures {
            if output.is_none() {
                match future.as_mut().poll(cx) {
                    std::task::Poll::Ready(value) => *output = Some(value),
                    std::task::Poll::Pending => is_ready = false,
                }
            }
        }
        if !is_ready {
            return std::task::Poll::Pending;
        }
        let outputs = futures.iter_mut().filter_map(|(_, output)| output.take());
        std::task::Poll::Ready(outputs.collect())
    })
    .await
}

#[tokio::test]
async fn file_keeps_contract() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let outbox = FileOutbox::open(&path).unwrap();
    check_contract(&outbox).await;
    check_races(&outbox).await;
    let pending = outbox.pending(0, 100).await.unwrap();
    drop(outbox);
    let outbox = FileOutbox::open(&path).unwrap();
    assert_eq!(outbox.pending(0, 100).await.unwrap(), pending);
    check_recovery_ends(outbox).await;
}

#[cfg(feature = "outbox-sqlite")]
mod sqlite {
    use tests::database::pool_options;
    use tower_idempotency_client::{
        SqliteOutbox,
        sqlx::{self, Sqlite, sqlite::SqliteConnectOptions},
    };

    use super::*;

    #[tokio::test]
    async fn sqlite_keeps_contract() {
        let scratch = Scratch::new();
        let url = format!("sqlite:{}?mode=rwc", scratch.file("outbox.db").display());
        let pool = pool_options::<Sqlite>().connect(&url).await.unwrap();
        let outbox = SqliteOutbox::new(pool.clone());
        outbox.migrate().await.unwrap();
        outbox.migrate().await.unwrap();
        check_contract(&outbox).await;
        check_races(&outbox).await;
        // A table of another name is another outbox.
        let other = SqliteOutbox::new(pool).with_table("other_2").unwrap();
        other.migrate().await.unwrap();
        assert_eq!(other.pending(0, 10).await.unwrap(), []);
        for name in ["", "1a", "a b", "a;drop table x", "A", &"a".repeat(49)] {
            let pool = sqlx_pool();
            let error = SqliteOutbox::new(pool).with_table(name).err();
            let text = error.map(|error| error.to_string());
            let expected =
                "expected a table name of 1 to 48 of a-z, 0-9 and _ without a leading digit";
            assert_eq!(text.as_deref(), Some(expected), "{name}");
        }
        check_recovery_ends(outbox).await;
    }

    /// A stored row whose URL cannot be read would be skipped by each recovery.
    #[tokio::test]
    async fn sqlite_rejects_unreadable_entry() {
        let scratch = Scratch::new();
        let url = format!("sqlite:{}?mode=rwc", scratch.file("outbox.db").display());
        let pool = pool_options::<Sqlite>().connect(&url).await.unwrap();
        let outbox = SqliteOutbox::new(pool);
        outbox.migrate().await.unwrap();
        outbox.store(&unreadable_entry()).await.unwrap_err();
        assert_eq!(outbox.store(&entry("first")).await.unwrap(), None);
        assert_eq!(keys(&outbox).await, ["first"]);
    }

    /// A row that another program has damaged does not hide the rows after it.
    #[tokio::test]
    async fn damaged_rows_are_skipped() {
        let scratch = Scratch::new();
        let url = format!("sqlite:{}?mode=rwc", scratch.file("outbox.db").display());
        let pool = pool_options::<Sqlite>().connect(&url).await.unwrap();
        let outbox = SqliteOutbox::new(pool.clone());
        outbox.migrate().await.unwrap();
        for n in 0..5 {
            outbox.store(&entry(&format!("key-{n}"))).await.unwrap();
        }
        let damage = "update idempotency_outbox set method = '(' where key <> 'key-3'";
        sqlx::raw_sql(damage).execute(&pool).await.unwrap();
        for limit in [1, 2, 100] {
            let pending = outbox.pending(0, limit).await.unwrap();
            let keys: Vec<_> = pending.iter().map(|(_, entry)| entry.key()).collect();
            assert_eq!(keys, ["key-3"], "{limit}");
            assert_eq!(outbox.pending(pending[0].0, limit).await.unwrap(), []);
        }
    }

    /// With the default mode, `synchronous = FULL` does not make a commit durable.
    #[tokio::test]
    async fn migration_sets_write_ahead_logging() {
        let scratch = Scratch::new();
        let url = format!("sqlite:{}?mode=rwc", scratch.file("outbox.db").display());
        let pool = pool_options::<Sqlite>().connect(&url).await.unwrap();
        let mode = async || {
            let mode = sqlx::query_scalar::<Sqlite, String>("pragma journal_mode");
            mode.fetch_one(&pool).await.unwrap()
        };
        assert_eq!(mode().await, "delete");
        let outboxes = [(); 8].map(|()| SqliteOutbox::new(pool.clone()));
        let migrated = join_all(outboxes.iter().map(SqliteOutbox::migrate)).await;
        assert!(migrated.iter().all(Result::is_ok), "{migrated:?}");
        assert_eq!(mode().await, "wal");
        // A database in memory is not durable in any mode. A temporary one would lose its entries.
        SqliteOutbox::new(sqlx_pool()).migrate().await.unwrap();
        let options = SqliteConnectOptions::new().filename("");
        let pool = pool_options::<Sqlite>().connect_lazy_with(options);
        let error = SqliteOutbox::new(pool).migrate().await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "the database of the outbox has no write-ahead logging"
        );
    }

    fn sqlx_pool() -> tower_idempotency_client::sqlx::SqlitePool {
        pool_options::<Sqlite>()
            .connect_lazy("sqlite::memory:")
            .unwrap()
    }
}

#[cfg(feature = "outbox-postgres")]
pub(crate) mod postgres {
    use tests::database::pool_options;
    use tower_idempotency_client::{
        PostgresOutbox,
        sqlx::{self, PgPool, Postgres},
    };

    use super::*;

    pub(crate) async fn open(table: &str) -> (PgPool, PostgresOutbox) {
        let url = tests::servers::postgres::shared().url();
        let pool = pool_options::<Postgres>().connect(&url).await.unwrap();
        let outbox = PostgresOutbox::new(pool.clone()).with_table(table).unwrap();
        outbox.migrate().await.unwrap();
        (pool, outbox)
    }

    #[tokio::test]
    async fn postgres_keeps_contract() {
        let (_pool, outbox) = open("outbox_contract").await;
        check_contract(&outbox).await;
        check_races(&outbox).await;
        let again = (0..8).map(|_| outbox.migrate());
        assert!(join_all(again).await.iter().all(Result::is_ok));
        check_recovery_ends(outbox).await;
    }

    /// A migration that fails leaves its connection usable. The user may write the table, and may not create one.
    #[tokio::test]
    async fn failed_migration_leaves_pool_usable() {
        let url = tests::servers::postgres::shared().url();
        let pool = pool_options::<Postgres>().max_connections(1);
        let pool = pool.connect(&url).await.unwrap();
        let table = "outbox_limited";
        let outbox = PostgresOutbox::new(pool.clone()).with_table(table).unwrap();
        let run = async |sql: &'static str| {
            let result = sqlx::raw_sql(sql).execute(&pool).await;
            result.map(drop).unwrap();
        };
        run("create schema limited; set search_path to limited").await;
        outbox.migrate().await.unwrap();
        run("create role limited; grant usage on schema limited to limited").await;
        run("grant select, insert on outbox_limited to limited; set role limited").await;
        assert!(outbox.migrate().await.is_err());
        assert_eq!(outbox.store(&entry("first")).await.unwrap(), None);
        run("reset role").await;
        assert_eq!(keys(&outbox).await, ["first"]);
    }

    /// Entry and order are in one transaction: both are there, or neither is.
    #[tokio::test]
    async fn entry_commits_with_transaction() {
        let (pool, outbox) = open("outbox_transaction").await;
        for (key, commits) in [("rolled-back", false), ("committed", true)] {
            let mut tx = pool.begin().await.unwrap();
            outbox.store_in(&mut tx, &entry(key)).await.unwrap();
            assert_eq!(outbox.pending(0, 10).await.unwrap(), []);
            match commits {
                true => tx.commit().await.unwrap(),
                false => tx.rollback().await.unwrap(),
            }
        }
        assert_eq!(keys(&outbox).await, ["committed"]);
        // It was never sent, and only the caller or a recovery may remove it.
        let pending = outbox.pending(0, 10).await.unwrap();
        assert_eq!(pending[0].1.first_sent(), None);
        for (commits, left) in [(false, 1), (true, 0)] {
            let mut tx = pool.begin().await.unwrap();
            outbox.remove_in(&mut tx, "committed").await.unwrap();
            match commits {
                true => tx.commit().await.unwrap(),
                false => tx.rollback().await.unwrap(),
            }
            assert_eq!(keys(&outbox).await.len(), left);
        }
    }
}
