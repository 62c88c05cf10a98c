//! The tests of every driver.

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::{Request, StatusCode};
use other_drivers::Handlers;
use tests::{
    Effects, TestResponse, app,
    barrier::within,
    created,
    database::{self, TestDatabase},
    post, send,
    servers::postgres,
    sql,
};
use tokio::{sync::Barrier, time::sleep};
use tower_idempotency::{Lease, Ttl};
use tower_idempotency_sql::{
    Driver, FencedTransaction, TransactionError, TransactionErrorKind as Kind,
};
use tower_idempotency_sqlx::PostgresStore;

pub(crate) use crate::faults::{
    client_error_after_failed_begin_is_not_recorded, cut_at_any_byte_has_one_effect,
    lost_commit_commits_nothing, lost_commit_reply_is_looked_up,
};

/// Instantiates the tests of this module for a driver.
macro_rules! suite {
    ($driver:ty) => {
        suite!($driver:
            effect_and_record_are_committed_together,
            value_is_committed_with_effect,
            commit_at_serializable_default,
            forgotten_commit_is_no_success,
            uncommitted_work_has_no_effect,
            aborted_transaction_is_no_success,
            deferred_constraint_rejects_commit,
            exception_rejects_commit,
            ended_transaction_records_nothing,
            commit_requires_lease,
            lost_lease_begins_nothing,
            overlapping_executions_commit_once,
            client_error_after_failed_begin_is_not_recorded,
            lost_commit_reply_is_looked_up,
            lost_commit_commits_nothing,
            cut_at_any_byte_has_one_effect,
        );
    };
    ($driver:ty: $($test:ident,)*) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            crate::suite::$test::<$driver>().await;
        }
    )*};
}

/// A store with its table of effects, and the handlers' pool in the same database.
#[derive(Clone)]
pub(crate) struct Bank<D: Handlers> {
    pub(crate) database: TestDatabase<PostgresStore>,
    pub(crate) pool: D,
}

impl<D: Handlers> Bank<D> {
    pub(crate) async fn open(test: &str) -> Self {
        Self::with_pool(test, D::pool(&postgres::shared().url(), 4)).await
    }

    pub(crate) async fn with_pool(test: &str, pool: D) -> Self {
        let database = database::on_postgres(&format!("{}_{test}", D::NAME)).await;
        Self { database, pool }
    }

    /// Returns a service on the bank. The handler gets the bank, its lease and the number of its execution.
    pub(crate) fn serve<H, F>(&self, handler: H) -> (Router, Effects)
    where
        H: Fn(Self, Lease, u64) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response> + Send + 'static,
    {
        let layer = sql::layer(self.database.store.clone());
        let bank = self.clone();
        app(layer, move |n, req: Request<Body>| {
            let lease = req.extensions().get::<Lease>().expect("a lease").clone();
            handler(bank.clone(), lease, n)
        })
    }

    /// Begins a transaction, and has the effect.
    pub(crate) async fn charged(
        &self,
        lease: &Lease,
        n: u64,
    ) -> Result<FencedTransaction<D::Driver>, TransactionError> {
        let mut tx = self.pool.begin(&self.database.store, lease).await?;
        match D::run(&mut *tx, &self.database.effect("charge", 1, n)).await {
            true => Ok(tx),
            false => Err(Kind::Database.into()),
        }
    }

    pub(crate) async fn count(&self) -> usize {
        self.database.count().await
    }
}

pub(crate) async fn committed(tx: FencedTransaction<impl Driver>, res: Response) -> Response {
    match tx.commit(res).await {
        Ok(res) => res.into_response(),
        Err(error) => match error.into_output() {
            Ok(res) => res.into_response(),
            Err(error) => failed(&error),
        },
    }
}

pub(crate) async fn charge<D: Handlers>(bank: Bank<D>, lease: Lease, n: u64) -> Response {
    match bank.charged(&lease, n).await {
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
pub(crate) async fn assert_charged_once<D: Handlers>(
    bank: &Bank<D>,
    app: &Router,
    first: &TestResponse,
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
    assert_eq!(bank.count().await, 1);
}

// ---- Committed ----

pub(crate) async fn effect_and_record_are_committed_together<D: Handlers>() {
    let bank = Bank::<D>::open("together").await;
    let (app, executions) = bank.serve(charge);
    let first = send(&app, order()).await;
    assert!(!first.is_replay());
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

pub(crate) async fn value_is_committed_with_effect<D: Handlers>() {
    let bank = Bank::<D>::open("value").await;
    let layer = sql::layer(bank.database.store.clone());
    for expected in ["Executed(7)", "Replayed(7)"] {
        let bank = bank.clone();
        let work = async move |lease: Lease| {
            let tx = bank.charged(&lease, 1).await.expect("begun");
            let value = tx.commit_value(7).await.expect("a commit");
            Ok::<_, tower_idempotency::run_once::WorkError<()>>(value)
        };
        let outcome = layer.run_once("job", "payload", work).await;
        assert_eq!(format!("{:?}", outcome.expect("an outcome")), expected);
    }
    assert_eq!(bank.count().await, 1);
}

/// The lease is renewed during the transaction, and the commit succeeds.
pub(crate) async fn commit_at_serializable_default<D: Handlers>() {
    let defaults =
        "-c%20default_transaction_isolation=serializable%20-c%20default_transaction_read_only=on";
    let url = format!("{}?options={defaults}", postgres::shared().url());
    let bank = Bank::with_pool("serializable", D::pool(&url, 4)).await;
    let layer = sql::layer(bank.database.store.clone()).with_lease_ttl(Ttl::from_millis(600));
    let at = bank.clone();
    let (app, executions) = app(layer, move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let bank = at.clone();
        async move {
            let effect = bank.database.effect("charge", 1, n);
            assert!(!bank.pool.run_alone(&effect).await, "it is read-only");
            let tx = bank.charged(&lease, n).await.expect("begun");
            // A renewal on a connection of the store undoes this change.
            bank.database
                .admin("update {table} set lease_ends = lease_ends + 1000000000")
                .await;
            let is_renewed = "update {table} set awaited = awaited where lease_ends < 500000000 + \
                floor(extract(epoch from clock_timestamp()) * 1000)::bigint";
            within(Duration::from_secs(60), async {
                while bank.database.admin(is_renewed).await == 0 {
                    sleep(Duration::from_millis(20)).await;
                }
            })
            .await;
            committed(tx, created(n)).await
        }
    });
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

// ---- Rolled back ----

pub(crate) async fn forgotten_commit_is_no_success<D: Handlers>() {
    let bank = Bank::<D>::open("forgotten").await;
    let (app, executions) = bank.serve(async |bank: Bank<D>, lease, n| {
        let tx = bank.charged(&lease, n).await.expect("begun");
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

/// The pool has one connection, so a later transaction runs on the connection of an earlier one, or waits for it.
pub(crate) async fn uncommitted_work_has_no_effect<D: Handlers>() {
    let pool = D::pool(&postgres::shared().url(), 1);
    let bank = Bank::with_pool("uncommitted", pool).await;
    let (app, executions) = bank.serve(async |bank: Bank<D>, lease, n| {
        if n == 4 {
            drop_begins(&bank, &lease).await;
        }
        let tx = bank.charged(&lease, n).await.expect("begun");
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
        assert_no_open_transaction(&bank).await;
    }
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 4);
}

/// Drops a begin after each number of polls, until a begin completes before its drop. Repeats this until a begin was dropped in
/// flight: the reply may arrive within the first poll.
async fn drop_begins<D: Handlers>(bank: &Bank<D>, lease: &Lease) {
    let (mut polls, mut was_in_flight) = (1, false);
    within(Duration::from_secs(60), async {
        loop {
            let begin = bank.pool.begin(&bank.database.store, lease);
            let begun = dropped_after(polls, begin).await;
            let is_complete = begun.is_some();
            drop(begun.map(|begun| begun.expect("begun")));
            assert_no_open_transaction(bank).await;
            if !is_complete {
                (polls, was_in_flight) = (polls + 1, true);
            } else if was_in_flight {
                return;
            }
        }
    })
    .await;
}

/// Asserts that a statement of the next user of the connection is not in an earlier transaction.
async fn assert_no_open_transaction<D: Handlers>(bank: &Bank<D>) {
    let alone = bank.database.effect("alone", 1, 1);
    assert!(bank.pool.run_alone(&alone).await);
    assert_eq!(bank.count().await, 1);
    let delete = format!("delete from {}", bank.database.effects_table());
    bank.database.admin(&delete).await;
}

/// Returns the output of the future. Drops the future if it is still pending after this number of polls.
async fn dropped_after<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = Box::pin(future);
    let mut left = polls;
    poll_fn(move |cx| {
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// The database replies to the commit of an aborted transaction with a rollback and no error.
pub(crate) async fn aborted_transaction_is_no_success<D: Handlers>() {
    let bank = Bank::<D>::open("aborted").await;
    let (app, executions) = bank.serve(async |bank: Bank<D>, lease, n| {
        let mut tx = bank.charged(&lease, n).await.expect("begun");
        if n == 1 {
            // The handler ignores the error.
            assert!(!D::run(&mut *tx, "select 1 / 0").await);
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

pub(crate) async fn deferred_constraint_rejects_commit<D: Handlers>() {
    let bank = Bank::<D>::open("deferred").await;
    let numbers = "create table {table}_numbers (n int unique deferrable initially deferred)";
    bank.database.admin(numbers).await;
    let (app, executions) = bank.serve(async |bank: Bank<D>, lease, n| {
        let mut tx = bank.charged(&lease, n).await.expect("begun");
        // The first execution inserts the number twice.
        for _ in n..=2 {
            let insert = format!("insert into {}_numbers values (7)", bank.database.table);
            assert!(
                D::run(&mut *tx, &insert).await,
                "the constraint is deferred"
            );
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

pub(crate) async fn exception_rejects_commit<D: Handlers>() {
    let bank = Bank::<D>::open("raised").await;
    bank.database.reject_first_commit().await;
    let (app, executions) = bank.serve(charge);
    let rejected = send(&app, order()).await;
    let kind = match D::REPORTS_CODE {
        true => "Database",
        false => "Unknown",
    };
    assert_eq!((rejected.text(), bank.count().await), (kind, 0));
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 2);
}

/// A commit by the handler's own statement is not fenced, and is no success.
pub(crate) async fn ended_transaction_records_nothing<D: Handlers>() {
    for ending in ["commit", "rollback", "commit; begin"] {
        let test = format!("ended_{}", ending.replace("; ", "_"));
        let bank = Bank::<D>::open(&test).await;
        let (app, _) = bank.serve(move |bank: Bank<D>, lease, n| async move {
            let mut tx = bank.charged(&lease, n).await.expect("begun");
            assert!(D::run(&mut *tx, ending).await, "it ends");
            committed(tx, created(n)).await
        });
        let response = send(&app, order()).await;
        assert_eq!(response.text(), "Ended", "{ending}: {response:?}");
        let retry = send(&app, order()).await;
        assert!(!retry.is_replay(), "{ending}");
    }
}

// ---- Lost ----

pub(crate) async fn commit_requires_lease<D: Handlers>() {
    let bank = Bank::<D>::open("requires").await;
    let thefts = [
        "update {table} set token = null",
        "update {table} set completed = 1, record = fingerprint",
        "update {table} set expires = 0",
        "delete from {table}",
    ];
    for (n, theft) in thefts.into_iter().enumerate() {
        let (app, _) = bank.serve(move |bank: Bank<D>, lease, n| async move {
            let mut tx = bank.charged(&lease, n).await.expect("begun");
            let theft = theft.replace("{table}", &bank.database.table);
            assert!(D::run(&mut *tx, &theft).await, "a theft");
            committed(tx, created(n)).await
        });
        let response = send(&app, post("/orders", &format!("stolen-{n}"), "tea")).await;
        assert_eq!(response.text(), "LeaseLost", "{theft}: {response:?}");
        assert_eq!(bank.count().await, 0, "{theft}");
    }
}

pub(crate) async fn lost_lease_begins_nothing<D: Handlers>() {
    let bank = Bank::<D>::open("begins").await;
    let missing = match D::REPORTS_CODE {
        true => Kind::NoEntry,
        false => Kind::Database,
    };
    for (theft, kind) in [
        ("update {table} set token = null", Kind::LeaseLost),
        ("delete from {table}", Kind::NoEntry),
        ("alter table {table} rename to {table}_away", missing),
    ] {
        let (app, _) = bank.serve(move |bank: Bank<D>, lease, n| async move {
            bank.database.admin(theft).await;
            let error = bank.charged(&lease, n).await.expect_err("no lease");
            if theft.starts_with("alter") {
                bank.database
                    .admin("alter table {table}_away rename to {table}")
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
pub(crate) async fn overlapping_executions_commit_once<D: Handlers>() {
    let bank = Bank::<D>::open("overlap").await;
    for round in 0..10 {
        let both = Arc::new(Barrier::new(2));
        let handler = {
            let both = Arc::clone(&both);
            move |bank: Bank<D>, lease: Lease, n| {
                let both = Arc::clone(&both);
                async move {
                    let tx = bank.charged(&lease, n).await.expect("begun");
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
        let is_expired = "update {table} set awaited = false where lease_ends = 0";
        within(Duration::from_secs(60), async {
            while bank.database.admin(is_expired).await == 0 {
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
