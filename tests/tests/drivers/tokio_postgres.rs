//! Effect and record in one transaction of tokio-postgres.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use deadpool_postgres::{
    Manager, ManagerConfig, Object, Pool, RecyclingMethod,
    tokio_postgres::{Client, Config, GenericClient, NoTls, Transaction},
};
use http::{Request, StatusCode};
use tests::{
    Effects, TestResponse, app,
    barrier::within,
    created,
    database::{self, TestDatabase},
    post,
    round_trips::RoundTrips,
    send,
    servers::postgres,
    sql,
};
use tokio::{sync::Barrier, time::sleep};
use tower_idempotency::{IdempotencyLayer, Lease, MissingKey, Ttl, transaction::NotRecordedReason};
use tower_idempotency_sqlx::PostgresStore;
use tower_idempotency_tokio_postgres::{
    FencedTransaction, TransactionError, TransactionErrorKind as Kind, begin,
};

/// A store with its table of effects, and the handlers' pool of tokio-postgres in the same database.
#[derive(Clone)]
pub(crate) struct Bank {
    pub(crate) database: TestDatabase<PostgresStore>,
    pub(crate) pool: Pool,
}

impl Bank {
    /// Opens the table on the shared server.
    pub(crate) async fn open(table: &str) -> Self {
        Self::with_pool(table, pool(&postgres::shared().url(), 4)).await
    }

    pub(crate) async fn with_pool(table: &str, pool: Pool) -> Self {
        let database = database::on_postgres(table).await;
        Self { database, pool }
    }

    /// Returns a service on the bank. The handler gets the bank, its lease and the number of its execution.
    pub(crate) fn serve<H, F>(&self, handler: H) -> (Router, Effects)
    where
        H: Fn(Self, Lease, u64) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response> + Send + 'static,
    {
        self.serve_behind(sql::layer(self.database.store.clone()), handler)
    }

    fn serve_behind<H, F>(&self, layer: IdempotencyLayer, handler: H) -> (Router, Effects)
    where
        H: Fn(Self, Lease, u64) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response> + Send + 'static,
    {
        let bank = self.clone();
        app(layer, move |n, req: Request<Body>| {
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            handler(bank.clone(), lease, n)
        })
    }

    pub(crate) async fn client(&self) -> Object {
        self.pool.get().await.expect("a connection")
    }

    /// Begins a transaction, and has the effect.
    pub(crate) async fn charged<'a>(
        &self,
        lease: &Lease,
        client: &'a mut Client,
        n: u64,
    ) -> Result<FencedTransaction<'a>, TransactionError> {
        let tx = begin(&self.database.store, lease, client).await?;
        let effect = tx
            .batch_execute(&self.database.effect("charge", 1, n))
            .await;
        effect.map_err(|_| Kind::Database)?;
        Ok(tx)
    }

    pub(crate) async fn count(&self) -> usize {
        self.database.count().await
    }
}

/// Creates a pool of this many connections, which are checked before each use.
pub(crate) fn pool(url: &str, size: usize) -> Pool {
    let config: Config = url.parse().expect("an URL");
    let recycling_method = RecyclingMethod::Verified;
    let manager = Manager::from_config(config, NoTls, ManagerConfig { recycling_method });
    let pool = Pool::builder(manager).max_size(size).build();
    pool.expect("a pool")
}

pub(crate) async fn committed(tx: FencedTransaction<'_>, res: Response) -> Response {
    match tx.commit(res).await {
        Ok(res) => res.into_response(),
        Err(error) => match error.into_output() {
            Ok(res) => res.into_response(),
            Err(error) => failed(&error),
        },
    }
}

pub(crate) async fn charge(bank: Bank, lease: Lease, n: u64) -> Response {
    let Ok(mut client) = bank.pool.get().await else {
        return (StatusCode::SERVICE_UNAVAILABLE, "no connection").into_response();
    };
    match bank.charged(&lease, &mut client, n).await {
        Ok(tx) => committed(tx, created(n)).await,
        Err(error) => failed(&error),
    }
}

pub(crate) fn failed(error: &TransactionError) -> Response {
    let kind = format!("{:?}", error.kind());
    (StatusCode::SERVICE_UNAVAILABLE, kind).into_response()
}

pub(crate) fn order() -> Request<Body> {
    post("/orders", "k", "tea")
}

/// Asserts that the response to `first` is stored, with one effect.
pub(crate) async fn assert_charged_once(bank: &Bank, app: &Router, first: &TestResponse) {
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    for _ in 0..2 {
        let retry = send(app, order()).await;
        assert!(retry.is_replay(), "{retry:?}");
        assert_eq!(
            (retry.status, &retry.body),
            (StatusCode::CREATED, &first.body)
        );
    }
    assert_eq!(bank.count().await, 1);
}

// ---- Committed ----

#[tokio::test(flavor = "multi_thread")]
async fn effect_and_record_are_committed_together() {
    let bank = Bank::open("pg_together").await;
    let (app, executions) = bank.serve(charge);
    let first = send(&app, order()).await;
    assert!(!first.is_replay());
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn value_is_committed_with_effect() {
    let bank = Bank::open("pg_value").await;
    let layer = sql::layer(bank.database.store.clone());
    for expected in ["Executed(7)", "Replayed(7)"] {
        let bank = bank.clone();
        let work = async move |lease: Lease| {
            let mut client = bank.client().await;
            let tx = bank.charged(&lease, &mut client, 1).await.expect("begun");
            let value = tx.commit_value(7).await.expect("a commit");
            Ok::<_, tower_idempotency::run_once::WorkError<()>>(value)
        };
        let outcome = layer.run_once("job", "payload", work).await;
        assert_eq!(format!("{:?}", outcome.expect("an outcome")), expected);
    }
    assert_eq!(bank.count().await, 1);
}

/// Functions of an application take the driver's own types.
#[tokio::test(flavor = "multi_thread")]
async fn helpers_keep_their_signatures() {
    async fn generic(client: &impl GenericClient, sql: &str) {
        client.batch_execute(sql).await.expect("the effect");
    }
    async fn nested(tx: &mut Transaction<'_>, sql: &str) {
        let savepoint = tx.transaction().await.expect("a savepoint");
        savepoint.batch_execute(sql).await.expect("the effect");
        savepoint.commit().await.expect("released");
        let savepoint = tx.transaction().await.expect("a savepoint");
        savepoint.batch_execute(sql).await.expect("the effect");
        drop(savepoint);
    }
    let bank = Bank::open("pg_helpers").await;
    let (app, _) = bank.serve(async |bank, lease, n| {
        let mut client = bank.client().await;
        let mut tx = begin(&bank.database.store, &lease, &mut client)
            .await
            .expect("a transaction");
        let sql = bank.database.effect("charge", 1, n);
        generic(&*tx, &sql).await;
        nested(&mut tx, &sql).await;
        nested(tx.as_mut(), &sql).await;
        committed(tx, created(n)).await
    });
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    // The savepoints that were dropped are rolled back.
    assert_eq!(bank.count().await, 3);
}

/// At each default level of the connection, the lease is renewed during the transaction, and the commit succeeds.
#[tokio::test(flavor = "multi_thread")]
async fn commit_at_every_isolation_level() {
    for level in ["read uncommitted", "repeatable read", "serializable"] {
        let table = format!("pg_at_{}", level.replace(' ', "_"));
        let mut config: Config = postgres::shared().url().parse().expect("an URL");
        config.options(format!(
            "-c default_transaction_isolation={} -c default_transaction_read_only=on",
            level.replace(' ', "\\ ")
        ));
        let manager = Manager::new(config, NoTls);
        let bank = Bank::with_pool(&table, Pool::builder(manager).build().expect("a pool")).await;
        let layer = sql::layer(bank.database.store.clone()).with_lease_ttl(Ttl::from_millis(600));
        let at = bank.clone();
        let (app, executions) = app(layer, move |n, req: Request<Body>| {
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            let bank = at.clone();
            async move {
                let mut client = bank.client().await;
                let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
                let ends = async || {
                    let ends =
                        "select lease_ends from {table}".replace("{table}", &bank.database.table);
                    let row = bank.client().await.query_one(&ends, &[]).await;
                    row.expect("an entry").get::<_, i64>(0)
                };
                let before = ends().await;
                within(Duration::from_secs(60), async {
                    while ends().await == before {
                        sleep(Duration::from_millis(20)).await;
                    }
                })
                .await;
                committed(tx, created(n)).await
            }
        });
        let first = send(&app, order()).await;
        assert_charged_once(&bank, &app, &first).await;
        assert_eq!(executions.count(), 1, "{level}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn begin_and_commit_take_two_round_trips_each() {
    let wire = Arc::new(RoundTrips::before(postgres::shared().address()));
    let url = format!("postgres://app@{}/postgres", wire.address());
    let bank = Bank::with_pool("pg_costs", pool(&url, 1)).await;
    let (app, _) = bank.serve(move |bank, lease, n| {
        let wire = Arc::clone(&wire);
        async move {
            let mut client = bank.client().await;
            assert!(wire.taken() > 0, "it has connected");
            let tx = begin(&bank.database.store, &lease, &mut client).await;
            let tx = tx.expect("begun");
            assert_eq!(wire.taken(), 2);
            let effect = bank.database.effect("charge", 1, n);
            tx.batch_execute(&effect).await.expect("the effect");
            assert_eq!(wire.taken(), 1);
            let res = committed(tx, created(n)).await;
            assert_eq!(wire.taken(), 2);
            res
        }
    });
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
}

// ---- Rolled back ----

#[tokio::test(flavor = "multi_thread")]
async fn forgotten_commit_is_no_success() {
    let bank = Bank::open("pg_forgotten").await;
    let (app, executions) = bank.serve(async |bank, lease, n| {
        let mut client = bank.client().await;
        let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
        drop(tx);
        match n {
            1 => created(n),
            _ => charge(bank.clone(), lease, n).await,
        }
    });
    let forgotten = send(&app, order()).await;
    assert_eq!(forgotten.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(forgotten.code(), "unfinished-transaction");
    assert_eq!(bank.count().await, 0);
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 2);
}

/// The pool has one connection, so a later transaction runs on the connection of an earlier one.
#[tokio::test(flavor = "multi_thread")]
async fn uncommitted_work_has_no_effect() {
    let bank = Bank::with_pool("pg_uncommitted", pool(&postgres::shared().url(), 1)).await;
    let (app, executions) = bank.serve(async |bank, lease, n| {
        let mut client = bank.client().await;
        if n == 4 {
            // The begin is dropped after its first statement was sent.
            tokio::select! {
                biased;
                _ = begin(&bank.database.store, &lease, &mut client) => {}
                () = std::future::ready(()) => {}
            }
        }
        let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
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
        assert_eq!(bank.count().await, 0);
    }
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn rolled_back_success_is_recorded() {
    let bank = Bank::open("pg_rolled_back").await;
    let (app, executions) = bank.serve(async |bank, lease, n| {
        let mut client = bank.client().await;
        let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
        tx.rollback().await.expect("a rollback");
        created(n)
    });
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert!(send(&app, order()).await.is_replay());
    assert_eq!((bank.count().await, executions.count()), (0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn unrecorded_response_is_rolled_back() {
    let bank = Bank::open("pg_unrecorded").await;
    let (app, executions) = bank.serve(async |bank, lease, n| {
        let mut client = bank.client().await;
        let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
        if n > 1 {
            return committed(tx, created(n)).await;
        }
        let res = (StatusCode::BAD_GATEWAY, "no provider").into_response();
        let error = tx.commit(res).await.expect_err("not recorded");
        assert_eq!(error.not_recorded_reason(), Some(NotRecordedReason::Status));
        error.into_output().expect("the answer").into_response()
    });
    assert_eq!(send(&app, order()).await.text(), "no provider");
    assert_eq!(bank.count().await, 0);
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 2);
}

/// The database replies to the commit of an aborted transaction with a rollback and no error.
#[tokio::test(flavor = "multi_thread")]
async fn aborted_transaction_is_no_success() {
    let bank = Bank::open("pg_aborted").await;
    let (app, executions) = bank.serve(async |bank, lease, n| {
        let mut client = bank.client().await;
        let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
        if n == 1 {
            // The handler ignores the error.
            tx.batch_execute("select 1 / 0").await.expect_err("aborts");
        }
        committed(tx, created(n)).await
    });
    let aborted = send(&app, order()).await;
    assert_eq!(aborted.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!((aborted.text(), bank.count().await), ("Database", 0));
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn deferred_constraint_rejects_commit() {
    let bank = Bank::open("pg_deferred").await;
    let numbers = "create table pg_deferred_numbers (n int unique deferrable initially deferred)";
    bank.database.admin(numbers).await;
    let (app, executions) = bank.serve(async |bank, lease, n| {
        let mut client = bank.client().await;
        let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
        // The first execution inserts the number twice.
        for _ in n..=2 {
            let insert = tx.batch_execute("insert into pg_deferred_numbers values (7)");
            insert.await.expect("the constraint is deferred");
        }
        match tx.commit(created(n)).await {
            Ok(res) => res.into_response(),
            Err(error) => {
                let error = error.into_output().expect_err("rejected");
                assert_eq!(error.code(), Some("23505"));
                failed(&error)
            }
        }
    });
    let rejected = send(&app, order()).await;
    assert_eq!(rejected.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!((rejected.text(), bank.count().await), ("Database", 0));
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn exception_rejects_commit() {
    let bank = Bank::open("pg_raised").await;
    bank.database.reject_first_commit().await;
    let (app, executions) = bank.serve(charge);
    let rejected = send(&app, order()).await;
    assert_eq!((rejected.text(), bank.count().await), ("Database", 0));
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 2);
}

// S-431
/// A service has been called under the derived key before the database rejects the commit.
#[tokio::test(flavor = "multi_thread")]
async fn rejected_commit_keeps_downstream_key() {
    let bank = Bank::open("pg_derived").await;
    let numbers = "create table pg_derived_numbers (n int unique deferrable initially deferred)";
    bank.database.admin(numbers).await;
    let layer = sql::layer(bank.database.store.clone()).with_missing_key(MissingKey::Derive);
    let (app, executions) = bank.serve_behind(layer, async |bank, lease, n| {
        let _ = lease.derive("charge");
        assert_eq!(lease.is_takeover(), n == 2);
        let mut client = bank.client().await;
        let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
        // The first execution inserts the number twice.
        for _ in n..=2 {
            let insert = tx.batch_execute("insert into pg_derived_numbers values (7)");
            insert.await.expect("the constraint is deferred");
        }
        committed(tx, created(n)).await
    });
    let keyless = || Request::post("/orders").body(Body::from("{}"));
    let rejected = send(&app, keyless().expect("a request")).await;
    assert_eq!(rejected.text(), "Database", "{rejected:?}");
    // The shortest lease, after which the key is an orphan.
    sleep(Duration::from_millis(50)).await;
    let second = send(&app, keyless().expect("a request")).await;
    assert_eq!(second.status, StatusCode::CREATED, "{second:?}");
    assert_eq!((bank.count().await, executions.count()), (1, 2));
}

/// A commit by the handler's own statement is not fenced, and is no success.
#[tokio::test(flavor = "multi_thread")]
async fn transaction_ended_by_statement_records_nothing() {
    for ending in ["commit", "rollback", "commit; begin"] {
        let table = format!("pg_ended_{}", ending.replace("; ", "_"));
        let bank = Bank::open(&table).await;
        let (app, _) = bank.serve(move |bank, lease, n| async move {
            let mut client = bank.client().await;
            let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
            tx.batch_execute(ending).await.expect("it ends");
            committed(tx, created(n)).await
        });
        let response = send(&app, order()).await;
        assert_eq!(response.text(), "Ended", "{ending}: {response:?}");
        let retry = send(&app, order()).await;
        assert!(!retry.is_replay(), "{ending}");
    }
}

// ---- Lost ----

#[tokio::test(flavor = "multi_thread")]
async fn commit_requires_lease() {
    let bank = Bank::open("pg_requires").await;
    let thefts = [
        "update pg_requires set token = null",
        "update pg_requires set completed = 1, record = fingerprint",
        "update pg_requires set expires = 0",
        "delete from pg_requires",
    ];
    for (n, theft) in thefts.into_iter().enumerate() {
        let (app, _) = bank.serve(move |bank, lease, n| async move {
            let mut client = bank.client().await;
            let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
            tx.batch_execute(theft).await.expect("a theft");
            committed(tx, created(n)).await
        });
        let response = send(&app, post("/orders", &format!("stolen-{n}"), "tea")).await;
        assert_eq!(response.text(), "LeaseLost", "{theft}: {response:?}");
        assert_eq!(bank.count().await, 0, "{theft}");
    }
}

/// The server ends the connection before the begin. The handler reports the temporary failure as a 409.
#[tokio::test(flavor = "multi_thread")]
async fn client_error_after_failed_begin_is_not_recorded() {
    let bank = Bank::open("pg_failed_begin").await;
    let (app, executions) = bank.serve(async |bank: Bank, lease, n| {
        let mut client = bank.client().await;
        if n == 1 {
            let end = "select pg_terminate_backend(pg_backend_pid())";
            client.batch_execute(end).await.expect_err("terminated");
        }
        match bank.charged(&lease, &mut client, n).await {
            Ok(tx) => committed(tx, created(n)).await,
            Err(error) => (StatusCode::CONFLICT, format!("{:?}", error.kind())).into_response(),
        }
    });
    let refused = send(&app, order()).await;
    assert_eq!((refused.text(), bank.count().await), ("Database", 0));
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_lease_begins_nothing() {
    let bank = Bank::open("pg_begins").await;
    for (theft, kind) in [
        ("update {table} set token = null", Kind::LeaseLost),
        ("delete from {table}", Kind::NoEntry),
        (
            "alter table {table} rename to pg_begins_away",
            Kind::NoEntry,
        ),
    ] {
        let (app, _) = bank.serve(move |bank, lease, n| async move {
            bank.database.admin(theft).await;
            let mut client = bank.client().await;
            let error = bank.charged(&lease, &mut client, n).await;
            let error = error.expect_err("no lease");
            // The client is not in a transaction.
            client
                .batch_execute("vacuum pg_begins_effects")
                .await
                .expect("no transaction");
            if theft.starts_with("alter") {
                bank.database
                    .admin("alter table pg_begins_away rename to {table}")
                    .await;
            }
            (StatusCode::CONFLICT, format!("{:?}", error.kind())).into_response()
        });
        let response = send(&app, order()).await;
        match kind {
            Kind::LeaseLost => assert_eq!(response.code(), "outcome-unknown"),
            _ => assert_eq!(response.text(), format!("{kind:?}"), "{theft}"),
        }
        let recorded = "delete from {table} where completed is not null";
        assert_eq!(bank.database.admin(recorded).await, 0, "{theft}");
        bank.database.admin("delete from {table}").await;
    }
    assert_eq!(bank.count().await, 0);
}

/// A second execution takes over while the first one is in its transaction. Both commit at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn overlapping_executions_commit_once() {
    let bank = Bank::open("pg_overlap").await;
    for round in 0..20 {
        let both = Arc::new(Barrier::new(2));
        let handler = {
            let both = Arc::clone(&both);
            move |bank: Bank, lease: Lease, n| {
                let both = Arc::clone(&both);
                async move {
                    let mut client = bank.client().await;
                    let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
                    if !lease.is_takeover() {
                        bank.database
                            .admin("update {table} set lease_ends = 0")
                            .await;
                    }
                    both.wait().await;
                    committed(tx, created(n)).await
                }
            }
        };
        let (one, first) = bank.serve(handler.clone());
        let (other, second) = bank.serve(handler);
        let key = format!("round-{round}");
        let request = || post("/orders", &key, "tea");
        let (first_app, first_request) = (one.clone(), request());
        let earlier = tokio::spawn(async move { send(&first_app, first_request).await });
        within(Duration::from_secs(60), async {
            while bank
                .database
                .admin("update {table} set awaited = false where lease_ends = 0")
                .await
                == 0
            {
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        let later = within(Duration::from_secs(60), send(&other, request())).await;
        let earlier = earlier.await.expect("a response");
        assert_eq!((first.count(), second.count()), (1, 1), "both executed");
        assert_eq!(later.status, StatusCode::CREATED, "{later:?}");
        // The client of the first execution retries if the second one had not committed yet.
        let earlier = within(Duration::from_secs(60), async {
            let mut response = earlier;
            while response.status != StatusCode::CREATED {
                response = send(&one, request()).await;
            }
            response
        })
        .await;
        assert_eq!((earlier.status, earlier.body), (later.status, later.body));
        assert_eq!(bank.count().await, round + 1);
        bank.database.admin("delete from {table}").await;
    }
}

/// Two transactions under one lease: the second one finds the record of the first.
#[tokio::test(flavor = "multi_thread")]
async fn one_lease_commits_once() {
    let bank = Bank::open("pg_one_lease").await;
    let (app, _) = bank.serve(async |bank, lease, n| {
        let (mut one, mut other) = (bank.client().await, bank.client().await);
        let first = bank.charged(&lease, &mut one, n).await.expect("begun");
        let second = bank.charged(&lease, &mut other, n).await.expect("begun");
        let (first, second) = tokio::join!(first.commit(created(n)), second.commit(created(n)));
        assert_ne!(first.is_ok(), second.is_ok(), "one is committed");
        let committed = first.or(second).ok();
        committed.expect("one is committed").into_response()
    });
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_record_becomes_tombstone() {
    let mut bank = Bank::open("pg_large").await;
    bank.database.store = bank.database.store.with_record_limit(0);
    let (app, executions) = bank.serve(async |bank, lease, n| {
        let mut client = bank.client().await;
        let tx = bank.charged(&lease, &mut client, n).await.expect("begun");
        committed(tx, tests::noise(10_000).into_response()).await
    });
    let first = send(&app, order()).await;
    assert_eq!(first.body.len(), 10_000, "{first:?}");
    let retry = send(&app, order()).await;
    assert_eq!(retry.code(), "response-not-retained");
    assert_eq!((bank.count().await, executions.count()), (1, 1));
}
