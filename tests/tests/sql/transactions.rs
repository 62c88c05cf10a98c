//! Effect and record in one transaction of the handler, on each database.

use std::{
    io,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use axum::{
    Extension, Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::{Request, StatusCode};
use tests::{
    Effects, app,
    barrier::{Barrier, bounded, within},
    created,
    database::{self, TestDatabase, TestDialect, pool_options},
    post,
    scratch::Scratch,
    send, sql,
};
use tokio::{sync::mpsc, time::sleep};
use tower::ServiceExt as _;
use tower_idempotency::{
    IdempotencyLayer, Lease, MissingKey, NeedsAttention, Ttl,
    inspect::{Inspect, Query, Resolution, State},
    store::StoreError,
    transaction::{LeaseExt, NotRecordedReason},
};
use tower_idempotency_sqlx::{
    Checkpoint, FencedTransaction, PostgresStore, SqliteStore, TransactionError,
    TransactionErrorKind as Kind,
    sqlx::{
        AssertSqlSafe, Connection as _, PgConnection, Postgres, Transaction, postgres::PgListener,
        query, query_as, query_scalar, sqlite::SqliteConnectOptions,
    },
};

/// Returns a service on the database. The handler gets the database, its lease and the number of its execution.
pub(crate) fn bank<S, H, F>(database: &TestDatabase<S>, handler: H) -> (Router, Effects)
where
    S: TestDialect,
    H: Fn(TestDatabase<S>, Lease, u64) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response> + Send + 'static,
{
    behind(sql::layer(database.store.clone()), database, handler)
}

fn behind<S, H, F>(
    layer: IdempotencyLayer,
    database: &TestDatabase<S>,
    handler: H,
) -> (Router, Effects)
where
    S: TestDialect,
    H: Fn(TestDatabase<S>, Lease, u64) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response> + Send + 'static,
{
    let database = database.clone();
    app(layer, move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        handler(database.clone(), lease, n)
    })
}

/// Begins a transaction, and has the effect.
pub(crate) async fn charged<S: TestDialect>(
    database: &TestDatabase<S>,
    lease: &Lease,
    n: u64,
) -> Result<FencedTransaction<S>, TransactionError> {
    let mut tx = database.begin(lease).await?;
    let effect = S::run(&mut tx, database.effect("charge", 1, n)).await;
    effect.expect("the effect");
    Ok(tx)
}

async fn committed<S: TestDialect>(tx: FencedTransaction<S>, res: Response) -> Response {
    match tx.commit(res).await {
        Ok(res) => res.into_response(),
        Err(error) => match error.into_output() {
            Ok(res) => res.into_response(),
            Err(error) => failed(&error),
        },
    }
}

async fn charge<S: TestDialect>(database: TestDatabase<S>, lease: Lease, n: u64) -> Response {
    match charged(&database, &lease, n).await {
        Ok(tx) => committed(tx, created(n)).await,
        Err(error) => failed(&error),
    }
}

fn failed(error: &TransactionError) -> Response {
    (
        StatusCode::SERVICE_UNAVAILABLE,
        format!("{:?}", error.kind()),
    )
        .into_response()
}

pub(crate) fn order() -> Request<Body> {
    post("/orders", "k", "tea")
}

/// Asserts that the response to `first` is stored, with one effect.
pub(crate) async fn assert_charged_once<S: TestDialect>(
    database: &TestDatabase<S>,
    app: &Router,
    first: &tests::TestResponse,
) {
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    for _ in 0..2 {
        let retry = send(app, order()).await;
        assert!(retry.is_replay(), "{retry:?}");
        assert_eq!(
            (retry.status, &retry.body),
            (StatusCode::CREATED, &first.body)
        );
    }
    assert_eq!(database.count().await, 1);
}

// ---- Committed ----

async fn effect_and_record_are_committed_together<S: TestDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, charge);
    let first = send(&app, order()).await;
    assert!(!first.is_replay());
    assert_charged_once(&database, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

/// The transaction takes longer than its lease, which is renewed meanwhile on other connections. A duplicate cannot acquire
/// the lease after its original expiry.
async fn transaction_outlasts_lease<S: TestDialect>(database: TestDatabase<S>) {
    // A stall of two seconds does not cost this lease.
    const LEASE: Duration = Duration::from_secs(6);
    let layer = sql::layer(database.store.clone());
    let layer = layer.with_lease_ttl(LEASE.try_into().expect("a valid lease"));
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let (app, executions) = behind(layer, &database, move |database, lease, n| {
        let barrier = held.clone();
        async move {
            let tx = charged(&database, &lease, n).await.expect("a transaction");
            barrier.pass().await;
            committed(tx, created(n)).await
        }
    });
    let first = tokio::spawn({
        let app = app.clone();
        async move { send(&app, order()).await }
    });
    bounded(barrier.arrival()).await;
    let began = Instant::now();
    let expiry = async || {
        let expiry = format!(
            "select 'expiry', lease_ends, generation from {}",
            database.table
        );
        S::rows(&database.pool, expiry).await[0].pid
    };
    let (mut last, mut renewals) = (expiry().await, 0);
    within(Duration::from_secs(60), async {
        // Until a renewal after the original expiry: the lease is then as long as a new one.
        let mut is_renewed = false;
        while renewals < 2 || began.elapsed() < LEASE || !is_renewed {
            sleep(Duration::from_millis(20)).await;
            let now = expiry().await;
            is_renewed = now > last;
            renewals += u32::from(is_renewed);
            last = now;
        }
    })
    .await;
    let duplicate = bounded(send(&app, order())).await;
    assert_eq!(duplicate.status, StatusCode::CONFLICT, "{duplicate:?}");
    assert_eq!(duplicate.code(), "in-progress");
    barrier.open_for_good();
    let first = bounded(first).await.expect("no panic");
    assert_charged_once(&database, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_outlasts_lease_on_postgres() {
    transaction_outlasts_lease(database::on_postgres("outlasts").await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_outlasts_lease_on_mariadb() {
    transaction_outlasts_lease(database::on_mariadb("outlasts").await).await;
}

/// During the transaction, SQLite permits no write on other connections: neither a renewal nor a takeover.
#[tokio::test(flavor = "multi_thread")]
async fn transaction_outlasts_lease_on_sqlite() {
    const LEASE: Duration = Duration::from_millis(150);
    let scratch = Scratch::new();
    let database = database::sqlite_file_database(&scratch, "keys").await;
    let layer = sql::layer(database.store.clone());
    let layer = layer.with_lease_ttl(LEASE.try_into().expect("a valid lease"));
    let (app, executions) = behind(layer, &database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await.expect("a transaction");
        // The last renewal was before the transaction, so the lease expires.
        sleep(2 * LEASE).await;
        committed(tx, created(n)).await
    });
    let first = send(&app, order()).await;
    assert_charged_once(&database, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

async fn value_is_committed_with_effect<S: TestDialect>(database: TestDatabase<S>) {
    let layer = sql::layer(database.store.clone());
    for run in 0..2 {
        let database = database.clone();
        let work = async move |lease: Lease| {
            let tx = charged(&database, &lease, 1).await.expect("a transaction");
            Ok::<_, tower_idempotency::run_once::WorkError<()>>(
                tx.commit_value(7).await.expect("a commit"),
            )
        };
        let outcome = layer.run_once("job", "payload", work).await;
        let outcome = format!("{:?}", outcome.expect("an outcome"));
        let expected = ["Executed(7)", "Replayed(7)"][run];
        assert_eq!(outcome, expected);
    }
    assert_eq!(database.count().await, 1);
}

/// The notification is sent in the same transaction as the record, and not before it.
#[tokio::test(flavor = "multi_thread")]
async fn postgres_commit_notifies_waiter() {
    let database = database::on_postgres("notified_by_commit").await;
    let mut listener = PgListener::connect_with(&database.pool)
        .await
        .expect("a connection");
    listener
        .listen("notified_by_commit")
        .await
        .expect("a channel");
    let (app, _) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await.expect("a transaction");
        database.admin("update {table} set awaited = true").await;
        committed(tx, created(n)).await
    });
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    let notification = within(Duration::from_secs(60), listener.recv()).await;
    let notification = notification.expect("a connection");
    assert_eq!(notification.payload().len(), 64, "an id");
}

// ---- Rolled back ----

async fn forgotten_commit_is_no_success<S: TestDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await.expect("a transaction");
        match n {
            1 => {
                drop(tx);
                created(n)
            }
            // The first transaction of this execution is dropped, and the second one is committed.
            _ => {
                drop(tx);
                charge(database, lease, n).await
            }
        }
    });
    let forgotten = send(&app, order()).await;
    assert_eq!(forgotten.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(forgotten.code(), "unfinished-transaction");
    assert_eq!(database.count().await, 0);
    let first = send(&app, order()).await;
    assert_charged_once(&database, &app, &first).await;
    assert_eq!(executions.count(), 2);
}

async fn rolled_back_success_is_recorded<S: TestDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await.expect("a transaction");
        tx.rollback().await.expect("a rollback");
        created(n)
    });
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert!(send(&app, order()).await.is_replay());
    assert_eq!((database.count().await, executions.count()), (0, 1));
}

/// Inserts a number. The first execution inserts it twice, which a deferred constraint rejects at the commit.
async fn number<S: TestDialect<Database = Postgres>>(
    database: &TestDatabase<S>,
    tx: &mut PgConnection,
    n: u64,
) {
    for _ in n..=2 {
        let insert = format!("insert into {}_numbers values (7)", database.table);
        let inserted = query(AssertSqlSafe(insert)).execute(&mut *tx).await;
        inserted.expect("the constraint is deferred");
    }
}

/// Returns the number of rows behind the deferred constraint.
async fn numbers<S: TestDialect<Database = Postgres>>(database: &TestDatabase<S>) -> usize {
    let select = format!("select n from {}_numbers", database.table);
    let rows = query(AssertSqlSafe(select)).fetch_all(&database.pool).await;
    rows.expect("a table").len()
}

// S-941, F-925
#[tokio::test(flavor = "multi_thread")]
async fn refused_deferred_constraint_is_not_reported() {
    for (is_fenced, is_early) in [(true, false), (false, true), (false, false)] {
        let database = database::on_postgres(&format!("deferred_{is_fenced}_{is_early}")).await;
        let create = format!(
            "create table {}_numbers (n int unique deferrable initially deferred)",
            database.table
        );
        let created_table = query(AssertSqlSafe(create)).execute(&database.pool).await;
        created_table.expect("a table");
        let (app, executions) = bank(&database, move |database, lease, n| async move {
            let refused = || (StatusCode::CONFLICT, "refused").into_response();
            if is_fenced {
                let mut tx = database.begin(&lease).await.expect("a transaction");
                number(&database, &mut tx, n).await;
                return match tx.commit(created(n)).await {
                    Ok(res) => res.into_response(),
                    Err(_) => refused(),
                };
            }
            let begin = "begin isolation level read committed";
            let mut tx = database
                .pool
                .begin_with(begin)
                .await
                .expect("a transaction");
            let (fence, at) = (database.store.fence(), lease.lease_ref());
            let (id, token) = (at.id.as_bytes().to_vec(), at.token.as_bytes().to_vec());
            let is_held = query_scalar::<_, bool>(AssertSqlSafe(fence.lease_status_sql()))
                .bind(id.clone())
                .bind(token.clone())
                .fetch_one(&mut *tx);
            assert!(is_held.await.expect("an entry"));
            number(&database, &mut tx, n).await;
            let prepared = lease.prepare(created(n)).await.expect("recorded");
            let record = prepared.record().to_vec();
            let retention = i64::try_from(prepared.retention().as_millis()).expect("it fits");
            let write = query_as::<_, (bool, bool)>(AssertSqlSafe(fence.write_record_sql()))
                .bind(id)
                .bind(token)
                .bind(record)
                .bind(retention)
                .fetch_one(&mut *tx);
            if is_early {
                // The handler reports the commit when the statement has succeeded, before the real commit.
                let write = async {
                    let written = write.await.map_err(StoreError::backend)?;
                    assert_eq!(written, (true, true));
                    Ok(())
                };
                let res = prepared.commit(write).await.expect("written");
                return match tx.commit().await {
                    Ok(()) => res.into_response(),
                    Err(_) => refused(),
                };
            }
            let begun = prepared.begin_commit().expect("the lease is held");
            assert_eq!(write.await.expect("written"), (true, true));
            match tx.commit().await {
                Ok(()) => begun.acknowledge().into_response(),
                Err(_) => refused(),
            }
        });
        let first = send(&app, order()).await;
        assert_eq!(first.status, StatusCode::CONFLICT, "{}", first.text());
        assert_eq!((first.text(), numbers(&database).await), ("refused", 0));
        let second = send(&app, order()).await;
        assert_eq!(
            (second.status, numbers(&database).await),
            (StatusCode::CREATED, 1)
        );
        assert!(send(&app, order()).await.is_replay());
        assert_eq!(executions.count(), 2);
    }
}

// S-431
/// A service has been called under the derived key before the database rejects the commit.
#[tokio::test(flavor = "multi_thread")]
async fn rejected_commit_keeps_downstream_key() {
    let database = database::on_postgres("deferred_derived").await;
    let create = "create table {table}_numbers (n int unique deferrable initially deferred)";
    database.admin(create).await;
    let layer = sql::layer(database.store.clone()).with_missing_key(MissingKey::Derive);
    let keys = Arc::new(Mutex::new(Vec::new()));
    let drawn = Arc::clone(&keys);
    let (app, _) = behind(layer, &database, move |database, lease, n| {
        let key = lease.derive("charge");
        drawn.lock().expect("a lock").push(key);
        async move {
            let mut tx = database.begin(&lease).await.expect("a transaction");
            number(&database, &mut tx, n).await;
            match tx.commit(created(n)).await {
                Ok(res) => res.into_response(),
                Err(_) => (StatusCode::CONFLICT, "refused").into_response(),
            }
        }
    });
    let keyless = || Request::post("/orders").body(Body::from("{}"));
    let first = send(&app, keyless().expect("a request")).await;
    assert_eq!(
        (first.status, first.text()),
        (StatusCode::CONFLICT, "refused")
    );
    // The shortest lease, after which the key is an orphan.
    sleep(Duration::from_millis(50)).await;
    let second = send(&app, keyless().expect("a request")).await;
    assert_eq!(second.status, StatusCode::CREATED, "{second:?}");
    assert_eq!(numbers(&database).await, 1);
    let keys = keys.lock().expect("a lock").clone();
    assert!(
        matches!(&keys[..], [first, second] if first == second),
        "{keys:?}"
    );
}

// S-431
/// A service has been called under the derived key before the commit.
#[tokio::test(flavor = "multi_thread")]
async fn exception_at_commit_keeps_downstream_key() {
    let database = database::on_postgres("raised_derived").await;
    database.reject_first_commit().await;
    let layer = sql::layer(database.store.clone()).with_missing_key(MissingKey::Derive);
    let (app, executions) = behind(layer, &database, async |database, lease, n| {
        let _ = lease.derive("charge");
        assert_eq!(lease.is_takeover(), n == 2);
        let tx = charged(&database, &lease, n).await.expect("a transaction");
        match tx.commit(created(n)).await {
            Ok(res) => res.into_response(),
            Err(error) => {
                let error = error.into_output().expect_err("rejected");
                assert_eq!(
                    (error.kind(), error.code()),
                    (Kind::Database, Some("P0001"))
                );
                (StatusCode::CONFLICT, "refused").into_response()
            }
        }
    });
    let keyless = || Request::post("/orders").body(Body::from("{}"));
    let first = send(&app, keyless().expect("a request")).await;
    assert_eq!(
        (first.status, first.text()),
        (StatusCode::CONFLICT, "refused")
    );
    assert_eq!(database.count().await, 0);
    // The shortest lease, after which the key is an orphan.
    sleep(Duration::from_millis(50)).await;
    let second = send(&app, keyless().expect("a request")).await;
    assert_eq!(second.status, StatusCode::CREATED, "{second:?}");
    assert_eq!((database.count().await, executions.count()), (1, 2));
}

async fn uncommitted_work_has_no_effect<S: TestDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await.expect("a transaction");
        match n {
            1 => tx.rollback().await.expect("a rollback"),
            2 => drop(tx),
            3 => panic!("the intended panic"),
            _ => return committed(tx, created(n)).await,
        }
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    });
    for n in 1..=3 {
        let app = app.clone();
        let response = tokio::spawn(async move { send(&app, order()).await }).await;
        match response {
            Ok(response) => assert_eq!(response.status, StatusCode::INTERNAL_SERVER_ERROR),
            Err(error) => assert!(error.is_panic() && n == 3),
        }
        assert_eq!(database.count().await, 0);
    }
    let first = send(&app, order()).await;
    assert_charged_once(&database, &app, &first).await;
    assert_eq!(executions.count(), 4);
}

async fn unrecorded_work_is_rolled_back_and_released<S: TestDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await.expect("a transaction");
        let res = match n {
            1 => (StatusCode::BAD_GATEWAY, "no provider").into_response(),
            2 => ([("x-idempo-policy", "no-store")], "not recorded").into_response(),
            _ => return committed(tx, created(n)).await,
        };
        let error = tx.commit(res).await.expect_err("not recorded");
        let reasons = [NotRecordedReason::Status, NotRecordedReason::NoStore];
        let reason = reasons[usize::try_from(n - 1).expect("few")];
        assert_eq!(error.not_recorded_reason(), Some(reason));
        assert!(error.failure().is_none());
        error.into_output().expect("the answer").into_response()
    });
    let response = send(&app, order()).await;
    assert_eq!(response.status, StatusCode::BAD_GATEWAY);
    assert_eq!(response.text(), "no provider");
    let response = send(&app, order()).await;
    assert_eq!(
        (response.status, response.text()),
        (StatusCode::OK, "not recorded")
    );
    assert_eq!(database.count().await, 0);
    let first = send(&app, order()).await;
    assert_charged_once(&database, &app, &first).await;
    assert_eq!(executions.count(), 3);
}

// ---- Lost ----

/// Without the entry, the transaction commits nothing and creates no entry.
async fn commit_requires_lease<S: TestDialect>(database: TestDatabase<S>) {
    let thefts = [
        "update {table} set token = null",
        "update {table} set completed = 1, record = fingerprint",
        "update {table} set expires = 0",
        "delete from {table}",
    ];
    for (n, theft) in thefts.into_iter().enumerate() {
        let (app, _) = bank(&database, move |database, lease, n| async move {
            let mut tx = charged(&database, &lease, n).await.expect("a transaction");
            let theft = theft.replace("{table}", &database.table);
            S::run(&mut tx, theft).await.expect("a theft");
            let error = tx.commit(created(n)).await.expect_err("no lease");
            let error = error.into_output().expect_err("no lease");
            assert_eq!(error.kind(), Kind::LeaseLost);
            failed(&error)
        });
        let response = send(&app, post("/orders", &format!("stolen-{n}"), "tea")).await;
        assert_eq!(response.text(), "LeaseLost", "{theft}: {response:?}");
        assert_eq!(database.count().await, 0, "{theft}");
    }
}

async fn lost_lease_begins_nothing<S: TestDialect>(database: TestDatabase<S>) {
    for (theft, kind) in [
        ("update {table} set token = null", Kind::LeaseLost),
        (
            "update {table} set completed = 1, record = fingerprint",
            Kind::LeaseLost,
        ),
        ("delete from {table}", Kind::NoEntry),
    ] {
        let (app, _) = bank(&database, move |database, lease, n| async move {
            database.admin(theft).await;
            let error = charged(&database, &lease, n).await.expect_err("no lease");
            assert_eq!(error.kind(), kind, "{theft}");
            failed(&error)
        });
        let response = send(&app, order()).await;
        match kind {
            // The layer finds the record, and cannot read it.
            _ if theft.contains("completed") => assert_eq!(response.code(), "store-unavailable"),
            Kind::LeaseLost => assert_eq!(response.code(), "outcome-unknown"),
            _ => assert_eq!(response.text(), format!("{kind:?}")),
        }
        database.admin("delete from {table}").await;
    }
    assert_eq!(database.count().await, 0);
}

/// The handler reports a begin that failed as a 409. First its pool is closed. Then another replica takes over, and ends
/// without an outcome.
async fn client_error_after_failed_begin_is_not_recorded<S: TestDialect>(
    database: TestDatabase<S>,
) {
    let options = (*database.pool.connect_options()).clone();
    let closed = TestDatabase {
        pool: pool_options::<S::Database>().connect_lazy_with(options),
        ..database.clone()
    };
    closed.pool.close().await;
    let (other, _) = bank(&database, async |_, _, _| {
        StatusCode::SERVICE_UNAVAILABLE.into_response()
    });
    let (app, executions) = bank(&database, move |database, lease, n| {
        let (other, closed) = (other.clone(), closed.clone());
        async move {
            let (begun, kind) = match n {
                1 => (charged(&closed, &lease, n).await, Kind::Database),
                2 => {
                    database.admin("update {table} set lease_ends = 0").await;
                    let released = send(&other, order()).await;
                    assert_eq!(released.status, StatusCode::SERVICE_UNAVAILABLE);
                    (charged(&database, &lease, n).await, Kind::LeaseLost)
                }
                _ => return charge(database, lease, n).await,
            };
            assert_eq!(begun.expect_err("nothing begins").kind(), kind);
            StatusCode::CONFLICT.into_response()
        }
    });
    for _ in 0..2 {
        let refused = send(&app, order()).await;
        assert_eq!(refused.status, StatusCode::CONFLICT, "{refused:?}");
        assert!(!refused.is_replay());
    }
    let first = send(&app, order()).await;
    assert_charged_once(&database, &app, &first).await;
    assert_eq!(executions.count(), 3);
}

/// Another replica has completed the request before the begin. The layer returns its response.
async fn lost_begin_returns_response_of_rival<S: TestDialect>(database: TestDatabase<S>) {
    let (other, _) = bank(&database, charge);
    let (app, _) = bank(&database, move |database, lease, n| {
        let other = other.clone();
        async move {
            database.admin("update {table} set lease_ends = 0").await;
            let response = send(&other, order()).await;
            assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
            let error = charged(&database, &lease, n).await.expect_err("no lease");
            failed(&error)
        }
    });
    let reply = send(&app, order()).await;
    assert!(reply.is_replay(), "{reply:?}");
    assert_charged_once(&database, &app, &reply).await;
}

/// Another replica still executes the request, so a 409 of the handler would be no outcome.
async fn lost_begin_beside_rival_is_unknown<S: TestDialect>(database: TestDatabase<S>) {
    let barrier = Barrier::closed();
    let (rival, mut responses) = mpsc::unbounded_channel();
    let held = barrier.clone();
    let (other, _) = bank(&database, move |database, lease, n| {
        let held = held.clone();
        async move {
            held.pass().await;
            charge(database, lease, n).await
        }
    });
    let held = barrier.clone();
    let (app, _) = bank(&database, move |database, lease, n| {
        let (other, rival, held) = (other.clone(), rival.clone(), held.clone());
        async move {
            database.admin("update {table} set lease_ends = 0").await;
            tokio::spawn(async move { rival.send(send(&other, order()).await) });
            held.arrival().await;
            let error = charged(&database, &lease, n).await.expect_err("no lease");
            assert_eq!(error.kind(), Kind::LeaseLost);
            StatusCode::CONFLICT.into_response()
        }
    });
    let refused = send(&app, order()).await;
    assert_eq!(refused.code(), "outcome-unknown");
    barrier.release(1);
    let response = responses.recv().await.expect("the rival responds");
    assert_charged_once(&database, &app, &response).await;
}

/// The handler moves its transaction to the schema of a tenant. The store's table is found only if its schema is named.
#[tokio::test(flavor = "multi_thread")]
async fn named_schema_survives_search_path_of_handler() {
    for (table, is_named) in [("public.tenant_named", true), ("tenant_unnamed", false)] {
        let database = database::on_postgres(table).await;
        database.admin("create schema if not exists tenant").await;
        let (app, _) = bank(&database, async |database, lease, n| {
            let mut tx = charged(&database, &lease, n).await.expect("a transaction");
            let path = "set local search_path = tenant".to_owned();
            PostgresStore::run(&mut tx, path).await.expect("a path");
            committed(tx, created(n)).await
        });
        let first = send(&app, order()).await;
        if is_named {
            assert_charged_once(&database, &app, &first).await;
        } else {
            assert_eq!((first.text(), database.count().await), ("Database", 0));
        }
    }
}

/// Nothing could read the record of a value under the lease of a request.
async fn value_of_request_is_not_committed<S: TestDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await.expect("a transaction");
        if n > 1 {
            return committed(tx, created(n)).await;
        }
        let error = tx.commit_value(7).await.expect_err("a value");
        let error = error.into_output().expect_err("a failure");
        assert_eq!(error.kind(), Kind::Database);
        let cause = std::error::Error::source(&error).expect("a cause");
        assert!(cause.to_string().starts_with("expected a response"));
        failed(&error)
    });
    let refused = send(&app, order()).await;
    assert_eq!((refused.text(), database.count().await), ("Database", 0));
    let first = send(&app, order()).await;
    assert_charged_once(&database, &app, &first).await;
    assert_eq!(executions.count(), 2);
}

/// In WAL mode, a crash may leave the commit in one of several attached files.
#[tokio::test(flavor = "multi_thread")]
async fn table_in_attached_file_is_no_entry() {
    let scratch = Scratch::new();
    let database = database::sqlite_file_database(&scratch, "attached").await;
    let attach = format!(
        "attach '{}' as store",
        scratch.file("database.db").display()
    );
    let pool = pool_options().after_connect(move |connection, _| {
        let attach = attach.clone();
        Box::pin(async move { SqliteStore::run(connection, attach).await.map(drop) })
    });
    let effects = SqliteConnectOptions::new().filename(scratch.file("effects.db"));
    let other = TestDatabase {
        pool: pool.connect_lazy_with(effects.create_if_missing(true)),
        ..database.clone()
    };
    let (app, _) = bank(&database, move |database, lease, n| {
        let database = if n == 1 { other.clone() } else { database };
        charge(database, lease, n)
    });
    let refused = send(&app, order()).await;
    assert_eq!((refused.text(), database.count().await), ("NoEntry", 0));
    let first = send(&app, order()).await;
    assert_charged_once(&database, &app, &first).await;
}

/// Another replica acquired the lease and finished meanwhile. This one returns that response, and has no effect.
async fn superseded_handler_commits_nothing<S: TestDialect>(database: TestDatabase<S>) {
    let (other, _) = bank(&database, charge);
    let (app, _) = bank(&database, move |database, lease, _| {
        let other = other.clone();
        async move {
            let tx = charged(&database, &lease, 100)
                .await
                .expect("a transaction");
            database.admin("update {table} set lease_ends = 0").await;
            let response = send(&other, order()).await;
            assert_eq!(response.status, StatusCode::CREATED, "{response:?}");
            let error = tx.commit(created(100)).await.expect_err("no lease");
            let error = error.into_output().expect_err("no lease");
            assert_eq!(error.kind(), Kind::LeaseLost);
            failed(&error)
        }
    });
    let reply = send(&app, order()).await;
    assert!(reply.is_replay(), "{reply:?}");
    assert_charged_once(&database, &app, &reply).await;
    assert_eq!(database.effects().await[0].n, 1);
}

// F-036
#[tokio::test(flavor = "multi_thread")]
async fn takeover_during_transaction_on_postgres() {
    superseded_handler_commits_nothing(database::on_postgres("taken_over").await).await;
}

// F-036
/// In SQLite no process takes over before the transaction ends.
#[tokio::test(flavor = "multi_thread")]
async fn takeover_during_transaction_on_mariadb() {
    superseded_handler_commits_nothing(database::on_mariadb("taken_over").await).await;
}

// ---- Too large ----

async fn oversized_record_becomes_tombstone<S: TestDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await.expect("a transaction");
        committed(tx, tests::noise(2 << 20).into_response()).await
    });
    let first = send(&app, order()).await;
    assert_eq!((first.status, first.body.len()), (StatusCode::OK, 2 << 20));
    for _ in 0..2 {
        let retry = send(&app, order()).await;
        assert_eq!(retry.status, StatusCode::CONFLICT);
        assert_eq!(retry.code(), "response-not-retained");
    }
    assert_eq!((database.count().await, executions.count()), (1, 1));
}

// ---- Checkpoints ----

/// Executes the first phase unless it is done, and then the second one if the provider is available.
async fn in_phases<S: TestDialect>(
    database: &TestDatabase<S>,
    lease: &Lease,
    n: u64,
    goes_on: bool,
) -> Response {
    let at = Checkpoint::last(&database.store, lease)
        .await
        .expect("held");
    let ride: u64 = match &at {
        None => {
            let tx = charged(database, lease, n).await.expect("a transaction");
            tx.checkpoint("ride-created", &n).await.expect("a phase");
            n
        }
        Some(at) => {
            assert_eq!(at.name(), "ride-created");
            at.data().expect("what was written")
        }
    };
    if !goes_on {
        return StatusCode::BAD_GATEWAY.into_response();
    }
    let mut tx = database.begin(lease).await.expect("a transaction");
    let paid = S::run(&mut tx, database.effect("paid", 1, ride)).await;
    paid.expect("the effect");
    committed(tx, created(ride)).await
}

async fn retry_continues_from_checkpoint<S: TestDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        assert_eq!(lease.generation(), n, "each phase reads the previous one");
        in_phases(&database, &lease, n, n == 3).await
    });
    for _ in 0..2 {
        let response = send(&app, order()).await;
        assert_eq!(response.status, StatusCode::BAD_GATEWAY);
        assert_eq!(database.count().await, 1, "the first phase");
    }
    let other = send(&app, post("/orders", "k", "coffee")).await;
    assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY);
    let first = send(&app, order()).await;
    assert_eq!(first.text(), "{\"execution\":1}");
    assert!(send(&app, order()).await.is_replay());
    assert_eq!((database.count().await, executions.count()), (2, 3));
    let left = "delete from {table} where checkpoint is not null or checkpoint_data is not null";
    assert_eq!(database.admin(left).await, 0, "a record empties it");
}

/// An execution needs attention after its first phase, and an operator allows a retry.
async fn allowed_retry_continues_from_checkpoint<S: TestDialect + Inspect>(
    database: TestDatabase<S>,
) {
    for is_committed in [false, true] {
        let (app, executions) = bank(&database, move |database, lease, n| async move {
            let res = in_phases(&database, &lease, n, n > 1).await;
            if n > 1 {
                return res;
            }
            let unclear = Extension(NeedsAttention::new("unclear"));
            let res = (StatusCode::INTERNAL_SERVER_ERROR, unclear).into_response();
            if !is_committed {
                return res;
            }
            let tx = database.begin(&lease).await.expect("a transaction");
            committed(tx, res).await
        });
        let order = || post("/orders", &format!("committed-{is_committed}"), "tea");
        let first = send(&app, order()).await;
        assert_eq!(first.status, StatusCode::INTERNAL_SERVER_ERROR, "{first:?}");
        let query = Query::new(State::NeedsAttention);
        let page = database.store.list(&query).await.expect("a page");
        assert_eq!(page.entries.len(), 1, "{page:?}");
        let seen = page.entries[0].seen();
        let resolved = database.store.resolve(seen, &Resolution::Retry).await;
        assert!(resolved.expect("a decision").is_applied());

        let second = send(&app, order()).await;
        assert_eq!(second.text(), "{\"execution\":1}");
        assert!(send(&app, order()).await.is_replay());
        assert_eq!(executions.count(), 2);
        let left = "delete from {table} where checkpoint is not null";
        assert_eq!(database.admin(left).await, 0, "a response empties it");
    }
    assert_eq!(database.count().await, 4, "two phases of two requests");
}

/// An entry that has expired is absent, with its checkpoint.
async fn attention_record_keeps_checkpoint<S: TestDialect>(database: TestDatabase<S>) {
    let attention = Resolution::NeedsAttention(NeedsAttention::new("unclear"));
    for (expires, needs_attention, kept) in
        [("expires", true, 1), ("expires", false, 0), ("0", true, 0)]
    {
        let claim = sql::claim();
        let acquired = database.store.acquire(&claim).await;
        acquired.expect("the database works");
        let phase = format!(
            "update {{table}} set checkpoint = 'phase', checkpoint_data = fingerprint, expires = {expires}"
        );
        assert_eq!(database.admin(&phase).await, 1);
        let record = match needs_attention {
            true => attention.record(&claim.id).expect("it stores a record").0,
            false => b"\x01\x00\0\0\0\0".to_vec().into(),
        };
        let (lease, retention) = (claim.lease_ref(1), Ttl::from_secs(600));
        let completed = database.store.complete(&lease, record, retention).await;
        completed.expect("the database works");
        let with_checkpoint = "delete from {table} where completed is not null \
                               and checkpoint = 'phase' and checkpoint_data is not null";
        let case = format!("{expires} {needs_attention}");
        assert_eq!(database.admin(with_checkpoint).await, kept, "{case}");
        let without = "delete from {table} where completed is not null \
                       and checkpoint is null and checkpoint_data is null";
        assert_eq!(database.admin(without).await, 1 - kept, "{case}");
    }
}

async fn lost_lease_writes_no_checkpoint<S: TestDialect>(database: TestDatabase<S>) {
    let (app, _) = bank(&database, async |database, lease, n| {
        let mut tx = charged(&database, &lease, n).await.expect("a transaction");
        let theft = "update {table} set token = null".replace("{table}", &database.table);
        S::run(&mut tx, theft).await.expect("a theft");
        let error = tx.checkpoint("phase", &1).await.expect_err("no lease");
        assert_eq!(error.kind(), Kind::LeaseLost);
        let last = Checkpoint::last(&database.store, &lease).await;
        assert!(last.expect("held").is_none());

        let tx = charged(&database, &lease, n).await.expect("a transaction");
        let error = tx.checkpoint("two words", &1).await.expect_err("no name");
        assert_eq!(error.kind(), Kind::Checkpoint);

        database.admin("update {table} set token = null").await;
        let error = Checkpoint::last(&database.store, &lease).await;
        assert_eq!(error.expect_err("no lease").kind(), Kind::LeaseLost);
        StatusCode::BAD_GATEWAY.into_response()
    });
    let refused = send(&app, order()).await;
    assert_eq!(refused.code(), "outcome-unknown");
    assert_eq!(database.count().await, 0);
}

// ---- Logs ----

/// The log of this process while a test reads it. It also contains events of other tests.
#[derive(Clone, Default)]
struct Log(Arc<(Mutex<Vec<u8>>, AtomicUsize)>);

/// Captures the log until the reader is dropped.
struct Reader(Log);

impl Log {
    fn read(&self) -> Reader {
        self.0.1.fetch_add(1, SeqCst);
        Reader(self.clone())
    }

    fn text(&self) -> String {
        let log = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&log).to_lowercase()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let Log(shared) = &self.0;
        let (log, readers) = &**shared;
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        if readers.fetch_sub(1, SeqCst) == 1 {
            log.clear();
        }
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (log, readers) = &*self.0;
        if readers.load(SeqCst) > 0 {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            log.extend_from_slice(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Captures the log of all threads. The first thread's check for a subscriber is cached for all threads.
fn everything_logged() -> Log {
    static LOG: OnceLock<Log> = OnceLock::new();
    let log = LOG.get_or_init(|| {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .finish();
        tracing::subscriber::set_global_default(subscriber).expect("there is none yet");
        log
    });
    log.clone()
}

/// On the connections of handlers, sqlx logs each statement, also the statements of the store.
async fn sqlx_logs_show_no_transaction_content<S: TestDialect>(database: TestDatabase<S>) {
    let log = everything_logged().read();
    let (app, executions) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await.expect("a transaction");
        let written = tx.checkpoint("phase", &HUSH.repeat(64)).await;
        written.expect("a phase");
        let tx = charged(&database, &lease, n).await.expect("a transaction");
        let mut res = committed(tx, HUSH.repeat(64).into_response()).await;
        res.extensions_mut().insert(lease);
        res
    });
    let res = app.clone().oneshot(order()).await.expect("an answer");
    assert_eq!((res.status(), executions.count()), (StatusCode::OK, 1));
    let lease = res
        .extensions()
        .get::<Lease>()
        .expect("a lease")
        .lease_ref();
    let hex = |bytes: &[u8]| {
        bytes
            .iter()
            .map(|it| format!("{it:02x}"))
            .collect::<String>()
    };
    let (id, token) = (hex(lease.id.as_bytes()), hex(lease.token.as_bytes()));
    let log = log.0.text();
    let is_the_fence = |line: &str| {
        [&database.table, "sqlx::query", "completed = "]
            .iter()
            .all(|it| line.contains(*it))
    };
    assert!(log.lines().any(is_the_fence), "{log}");
    // The content may be in hexadecimal, or in base64 at any of three alignments.
    for secret in [
        &id,
        &token,
        HUSH,
        "7a7974686f70",
        "enl0ag9w",
        "5dghvchp",
        "6exrob3b",
    ] {
        let line = log.lines().find(|line| line.contains(secret));
        assert_eq!(line, None);
    }
}

/// A word that no other test of the binary uses.
const HUSH: &str = "zythop";

// F-184
#[tokio::test]
async fn sqlx_log_shows_no_data_on_postgres() {
    let database = database::on_postgres("logged_on_postgres").await;
    sqlx_logs_show_no_transaction_content(database).await;
}

// F-184
#[tokio::test]
async fn sqlx_log_shows_no_data_on_mariadb() {
    let database = database::on_mariadb("logged_on_mariadb").await;
    sqlx_logs_show_no_transaction_content(database).await;
}

// ---- On each database ----

macro_rules! each {
    ($($case:ident)*) => {
        mod on_postgres {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let database = super::database::on_postgres(&super::table(stringify!($case))).await;
                    super::$case(super::limited(database, |store| store.with_record_limit(1 << 20))).await;
                }
            )*
        }

        mod on_mariadb {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let database = super::database::on_mariadb(&super::table(stringify!($case))).await;
                    super::$case(super::limited(database, |store| store.with_record_limit(1 << 20))).await;
                }
            )*
        }

        mod on_sqlite {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let scratch = super::Scratch::new();
                    let database = super::database::sqlite_file_database(&scratch, "keys").await;
                    super::$case(super::limited(database, |store| store.with_record_limit(1 << 20))).await;
                }
            )*
        }
    };
}

each! {
    effect_and_record_are_committed_together
    value_is_committed_with_effect
    uncommitted_work_has_no_effect
    forgotten_commit_is_no_success
    rolled_back_success_is_recorded
    unrecorded_work_is_rolled_back_and_released
    commit_requires_lease
    lost_lease_begins_nothing
    // F-924
    client_error_after_failed_begin_is_not_recorded
    lost_begin_returns_response_of_rival
    lost_begin_beside_rival_is_unknown
    // S-430
    value_of_request_is_not_committed
    oversized_record_becomes_tombstone
    // S-209
    retry_continues_from_checkpoint
    // S-372
    allowed_retry_continues_from_checkpoint
    attention_record_keeps_checkpoint
    // S-210
    lost_lease_writes_no_checkpoint
}

/// Returns a table name, which must be shorter than some test names.
fn table(case: &str) -> String {
    case.chars().take(40).collect()
}

fn limited<S: TestDialect>(
    database: TestDatabase<S>,
    limit: impl FnOnce(S) -> S,
) -> TestDatabase<S> {
    TestDatabase {
        store: limit(database.store.clone()),
        ..database
    }
}

/// Functions of an application take the driver's own transaction.
#[tokio::test(flavor = "multi_thread")]
async fn helpers_keep_their_signatures() {
    async fn nested(tx: &mut Transaction<'_, Postgres>, sql: &str) {
        for is_released in [true, false] {
            let mut savepoint = tx.begin().await.expect("a savepoint");
            let effect = PostgresStore::run(&mut savepoint, sql.to_owned()).await;
            effect.expect("the effect");
            if is_released {
                savepoint.commit().await.expect("released");
            }
        }
    }
    let database = database::on_postgres("helpers").await;
    let (app, _) = bank(&database, async |database, lease, n| {
        let mut tx = charged(&database, &lease, n).await.expect("a transaction");
        nested(tx.as_transaction_mut(), &database.effect("charge", 1, n)).await;
        committed(tx, created(n)).await
    });
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    // The savepoint that was dropped is rolled back.
    assert_eq!(database.count().await, 2);
}
