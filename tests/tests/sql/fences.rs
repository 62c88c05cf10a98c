//! The statements of the fences through plain connections, and the text of each version.

mod plain;
mod reused_connection;

use std::{fs, path::Path};

use axum::{
    Extension,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use tests::{
    created,
    database::{self, TestDatabase},
    scratch::Scratch,
    send,
};
use tower_idempotency::{
    Lease, NeedsAttention,
    inspect::{Inspect, Query, Resolution, State},
    store::Ttl,
};
use tower_idempotency_sql::{
    Driver, FencedTransaction, TransactionError, TransactionErrorKind as Kind,
};
use tower_idempotency_sqlx::{
    Checkpoint, MySqlFence, PostgresFence, SqliteFence, sqlx::query_scalar,
};

use self::plain::PlainDialect;
use crate::transactions::{assert_charged_once, bank, order};

// ---- Exactly once ----

/// Begins a transaction with the store's statements, and has the effect.
async fn charged<S: PlainDialect>(
    database: &TestDatabase<S>,
    lease: &Lease,
    n: u64,
) -> FencedTransaction<S::Plain> {
    let fence = database.store.store_fence().await;
    let begun = S::begin_plain(database, fence, lease).await;
    let mut tx = begun.expect("a transaction");
    let effect = S::run(&mut tx, database.effect("charge", 1, n)).await;
    effect.expect("the effect");
    tx
}

async fn committed(tx: FencedTransaction<impl Driver>, res: Response) -> Response {
    match tx.commit(res).await {
        Ok(res) => res.into_response(),
        Err(error) => failed(&error.into_output().expect_err("a recorded status")),
    }
}

fn failed(error: &TransactionError) -> Response {
    let kind = format!("{:?}", error.kind());
    (StatusCode::SERVICE_UNAVAILABLE, kind).into_response()
}

async fn statements_commit_exactly_once<S: PlainDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await;
        committed(tx, created(n)).await
    });
    let first = send(&app, order()).await;
    assert!(!first.is_replay());
    assert_charged_once(&database, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

/// The lease is lost, or the transaction has ended. The record and the effect are then both missing.
async fn statements_refuse_commit<S: PlainDialect>(database: TestDatabase<S>) {
    for (sql, kind) in [
        ("update {table} set token = null", Kind::LeaseLost),
        ("rollback", Kind::Ended),
    ] {
        let (app, executions) = bank(&database, move |database, lease, n| async move {
            let mut tx = charged(&database, &lease, n).await;
            if n == 1 {
                let sql = sql.replace("{table}", &database.table);
                S::run(&mut tx, sql).await.expect("it works");
            }
            committed(tx, created(n)).await
        });
        let refused = send(&app, order()).await;
        assert_eq!(refused.text(), format!("{kind:?}"), "{sql}");
        assert_eq!(database.count().await, 0, "{sql}");
        let first = send(&app, order()).await;
        assert_charged_once(&database, &app, &first).await;
        assert_eq!(executions.count(), 2, "{sql}");
        for table in [database.table.clone(), database.effects_table()] {
            database.admin(&format!("delete from {table}")).await;
        }
    }
}

async fn status_finds_no_entry<S: PlainDialect>(database: TestDatabase<S>) {
    let other_table = S::table_fence("absent");
    for (n, theft, kind) in [
        (1, None, Kind::NoEntry),
        (2, Some("delete from {table}"), Kind::NoEntry),
        (3, Some("update {table} set token = null"), Kind::LeaseLost),
    ] {
        let other_table = other_table.clone();
        let (app, _) = bank(&database, move |database, lease, _| {
            let other_table = other_table.clone();
            async move {
                let fence = match theft {
                    Some(theft) => {
                        database.admin(theft).await;
                        database.store.store_fence().await
                    }
                    None => other_table,
                };
                let begun = S::begin_plain(&database, fence, &lease).await;
                failed(&begun.expect_err("nothing begins"))
            }
        });
        let refused = send(&app, tests::post("/orders", &format!("key-{n}"), "tea")).await;
        match kind {
            Kind::LeaseLost => assert_eq!(refused.code(), "outcome-unknown"),
            _ => assert_eq!(refused.text(), format!("{kind:?}"), "{n}"),
        }
    }
    assert_eq!(database.count().await, 0);
}

/// The fence has the limit of the store.
async fn record_over_limit_is_tombstone<S: PlainDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await;
        committed(tx, tests::noise(2 << 20).into_response()).await
    });
    let first = send(&app, order()).await;
    assert_eq!((first.status, first.body.len()), (StatusCode::OK, 2 << 20));
    let retry = send(&app, order()).await;
    assert_eq!(retry.status, StatusCode::CONFLICT);
    assert_eq!(retry.code(), "response-not-retained");
    assert_eq!((database.count().await, executions.count()), (1, 1));
}

/// The effect is committed with the record. An operator allows a retry, which continues from the checkpoint of the store.
async fn attention_is_listed_and_keeps_checkpoint<S: PlainDialect + Inspect>(
    database: TestDatabase<S>,
) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        let last = Checkpoint::last(&database.store, &lease).await;
        let phase: u64 = match last.expect("the lease is held") {
            Some(checkpoint) => checkpoint.data().expect("the number"),
            None => {
                let tx = database.begin(&lease).await.expect("a transaction");
                tx.checkpoint("phase", &n).await.expect("a checkpoint");
                n
            }
        };
        let tx = charged(&database, &lease, n).await;
        let res = match n {
            1 => {
                let unclear = Extension(NeedsAttention::new("unclear"));
                (StatusCode::INTERNAL_SERVER_ERROR, unclear).into_response()
            }
            _ => created(phase),
        };
        committed(tx, res).await
    });
    let first = send(&app, order()).await;
    assert_eq!(first.status, StatusCode::INTERNAL_SERVER_ERROR, "{first:?}");
    let refused = send(&app, order()).await;
    assert_eq!(refused.status, StatusCode::CONFLICT, "{refused:?}");
    assert_eq!(refused.code(), "outcome-unknown");
    assert_eq!((database.count().await, executions.count()), (1, 1));

    let page = database
        .store
        .list(&Query::new(State::NeedsAttention))
        .await;
    let entries = page.expect("a page").entries;
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert_eq!(entries[0].attention_code.as_deref(), Some("unclear"));
    let expires = entries[0].expires.expect("a readable entry");
    let retention = expires.duration_since(entries[0].since);
    assert_eq!(retention.expect("a retention"), Ttl::MAX.as_duration());
    let resolved = database
        .store
        .resolve(entries[0].seen(), &Resolution::Retry)
        .await;
    assert!(resolved.expect("a decision").is_applied());

    let second = send(&app, order()).await;
    assert_eq!(second.text(), "{\"execution\":1}", "from the checkpoint");
    assert!(send(&app, order()).await.is_replay());
    assert_eq!((database.count().await, executions.count()), (2, 2));
    let left = "delete from {table} where checkpoint is not null or checkpoint_data is not null";
    assert_eq!(database.admin(left).await, 0, "a response deletes it");
}

macro_rules! each {
    ($($case:ident $table:literal)*) => {
        mod on_postgres {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let database = super::database::on_postgres($table).await;
                    let store = database.store.clone().with_record_limit(1 << 20);
                    super::$case(super::TestDatabase { store, ..database }).await;
                }
            )*
        }

        mod on_mariadb {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let database = super::database::on_mariadb($table).await;
                    let store = database.store.clone().with_record_limit(1 << 20);
                    super::$case(super::TestDatabase { store, ..database }).await;
                }
            )*
        }

        mod on_sqlite {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let scratch = super::Scratch::new();
                    let database = super::database::sqlite_file_database(&scratch, $table).await;
                    let store = database.store.clone().with_record_limit(1 << 20);
                    super::$case(super::TestDatabase { store, ..database }).await;
                }
            )*
        }
    };
}

each! {
    statements_commit_exactly_once "fence_commit"
    statements_refuse_commit "fence_refused"
    status_finds_no_entry "fence_status"
    record_over_limit_is_tombstone "fence_limit"
    attention_is_listed_and_keeps_checkpoint "fence_attention"
}

/// A record above this limit would be rejected by the server, and not become a tombstone.
#[tokio::test(flavor = "multi_thread")]
async fn mariadb_fence_has_limit_of_server() {
    let database = database::on_mariadb("fence_packet").await;
    let packet = query_scalar::<_, u64>("select @@max_allowed_packet").fetch_one(&database.pool);
    let packet = usize::try_from(packet.await.expect("a setting")).expect("it fits");
    let fence = database.store.fence().await.expect("the test server runs");
    assert_eq!(fence.record_limit(), (packet - 8192) / 4 * 3);
}

// ---- Versions ----

/// A driver's crate relies on the order of the statements, and on their parameters and results. A change of these increases the
/// version, in an incompatible release. If only a text changes, change its file.
#[test]
fn fences_have_texts_of_golden_files() {
    let postgres = [
        ("begin", PostgresFence::BEGIN),
        ("lease status", PostgresFence::LEASE_STATUS),
        ("write record", PostgresFence::WRITE_RECORD),
    ];
    let mysql = [
        ("begin", MySqlFence::BEGIN),
        ("lease status", MySqlFence::LEASE_STATUS),
        ("release mark", MySqlFence::RELEASE_MARK),
        ("write record", MySqlFence::WRITE_RECORD),
    ];
    let sqlite = [
        ("begin", SqliteFence::BEGIN),
        ("mark", SqliteFence::MARK),
        ("lease status", SqliteFence::LEASE_STATUS),
        ("release mark", SqliteFence::RELEASE_MARK),
        ("write record", SqliteFence::WRITE_RECORD),
    ];
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    for (database, version, statements) in [
        ("postgres", PostgresFence::VERSION, &postgres[..]),
        ("mysql", MySqlFence::VERSION, &mysql),
        ("sqlite", SqliteFence::VERSION, &sqlite),
    ] {
        let file = golden.join(format!("fence-v{version}/{database}.sql"));
        let text = fs::read_to_string(&file).expect("a file for each version");
        let blocks = statements
            .iter()
            .map(|(name, sql)| format!("-- {name}\n{sql};\n"));
        let blocks: Vec<_> = blocks.collect();
        assert_eq!(
            text,
            blocks.join("\n"),
            "update {file:?} if only the text changed, or else increase the version"
        );
    }
}
