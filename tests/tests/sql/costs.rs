//! Costs of a request on a database: round trips, counted on the wire.

use std::{sync::Arc, time::Duration};

use axum::Router;
use http::StatusCode;
use tests::{
    Effects, app,
    books::{Books, TestDialect},
    created, creating,
    gate::{Gate, within},
    post,
    round_trips::RoundTrips,
    send,
    servers::{mariadb, postgres},
    sql::layer,
};
use tokio::time::sleep;
use tower_idempotency::{Lease, store::Store};
use tower_idempotency_sqlx::{
    MySqlStore, PostgresStore,
    sqlx::{mysql::MySqlPoolOptions, postgres::PgPoolOptions, query},
};

async fn on_postgres() -> (PostgresStore, RoundTrips) {
    let trips = RoundTrips::before(postgres::shared().address());
    let url = format!("postgres://app@{}/postgres", trips.address());
    let store = PostgresStore::from_url(&url).expect("an URL");
    store.migrate().await.expect("the test server runs");
    (store, trips)
}

async fn on_mariadb() -> (MySqlStore, RoundTrips) {
    let trips = RoundTrips::before(mariadb::shared().address());
    let url = format!("mysql://app:app@{}/app", trips.address());
    let store = MySqlStore::from_url(&url).expect("an URL");
    store.migrate().await.expect("the test server runs");
    (store, trips)
}

async fn is_created(app: &Router, key: &str, body: &'static str) {
    let answer = send(app, post("/orders", key, body)).await;
    assert_eq!(answer.status, StatusCode::CREATED);
}

/// The tests of this binary share a table, so each has its own key.
async fn costs_two_when_fresh_and_one_when_replayed<S: Store>(store: S, trips: RoundTrips) {
    let (app, effects) = creating(layer(store));
    is_created(&app, "cost-before", "tea").await;
    let _ = trips.taken();
    is_created(&app, "cost", "tea").await;
    assert_eq!(trips.taken(), 2, "a fresh request");
    assert!(send(&app, post("/orders", "cost", "tea")).await.is_replay());
    assert_eq!(trips.taken(), 1, "a replay");
    let other = send(&app, post("/orders", "cost", "coffee")).await;
    assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(trips.taken(), 1, "another request under the key");
    assert_eq!(effects.count(), 2);
}

async fn costs_two_when_not_recorded<S: Store>(store: S, trips: RoundTrips) {
    let (app, effects) = app(layer(store), async |_, _| StatusCode::INTERNAL_SERVER_ERROR);
    for key in ["failing-before", "failing"] {
        let _ = trips.taken();
        send(&app, post("/orders", key, "tea")).await;
    }
    assert_eq!(trips.taken(), 2);
    assert_eq!(effects.count(), 2);
}

async fn costs_one_when_in_progress<S: Store>(store: S, trips: RoundTrips) {
    let gate = Gate::shut();
    let held = gate.clone();
    let (app, effects): (_, Effects) = app(layer(store), move |_, _| {
        let held = held.clone();
        async move { held.pass().await }
    });
    let first = tokio::spawn({
        let app = app.clone();
        async move { send(&app, post("/orders", "held", "tea")).await }
    });
    gate.arrival().await;
    let _ = trips.taken();
    let duplicate = send(&app, post("/orders", "held", "tea")).await;
    assert_eq!(duplicate.status, StatusCode::CONFLICT);
    assert_eq!(trips.taken(), 1);
    gate.open_for_good();
    first.await.expect("the first response");
    assert_eq!(effects.count(), 1);
}

macro_rules! each {
    ($($case:ident)*) => {
        mod postgres_answers {
            $(
                #[tokio::test]
                async fn $case() {
                    let (store, trips) = super::on_postgres().await;
                    super::$case(store, trips).await;
                }
            )*
        }

        mod mariadb_answers {
            $(
                #[tokio::test]
                async fn $case() {
                    let (store, trips) = super::on_mariadb().await;
                    super::$case(store, trips).await;
                }
            )*
        }
    };
}

each! {
    costs_two_when_fresh_and_one_when_replayed
    costs_two_when_not_recorded
    costs_one_when_in_progress
}

// ---- In the handler's transaction ----

/// Waits until the only connection of the pool is idle. The pool checks a returned connection first.
async fn is_back<S: TestDialect>(books: &Books<S>) {
    within(Duration::from_secs(60), async {
        while books.pool.num_idle() < 1 {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Counts the calls of the store, and the statements on the handler's connection.
async fn costs_of_a_transaction<S: TestDialect>(
    books: Books<S>,
    trips: [RoundTrips; 2],
    expected: (u64, &str),
) {
    let layer = layer(books.store.clone());
    let bank = books.clone();
    let (app, effects) = app(layer, move |n, req: http::Request<axum::body::Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let books = bank.clone();
        async move {
            let mut tx = books.begin(&lease).await.expect("a transaction");
            let effect = S::run(&mut tx, books.effect("charge", 1, n)).await;
            effect.expect("the effect");
            tx.commit(created(n)).await.expect("a commit")
        }
    });
    is_created(&app, "tx-before", "tea").await;
    is_back(&books).await;
    let _ = trips.each_ref().map(RoundTrips::taken);
    is_created(&app, "tx", "tea").await;
    is_back(&books).await;
    let [store, handler] = trips.each_ref().map(RoundTrips::taken);
    assert_eq!(store, 1, "to acquire");
    let pool = 2;
    assert_eq!(handler - pool, expected.0, "{}", expected.1);
    assert!(send(&app, post("/orders", "tx", "tea")).await.is_replay());
    assert_eq!(trips.each_ref().map(RoundTrips::taken), [1, 0]);
    assert_eq!(effects.count(), 2);
}

/// Counts the costs on one connection. The connection caches statements of the handler, as by default, if `keeps` is
/// set.
async fn a_transaction_on_postgres_costs(keeps: bool, table: &str, expected: (u64, &str)) {
    let trips = || RoundTrips::before(postgres::shared().address());
    let trips = [trips(), trips()];
    let [store, pool] = trips
        .each_ref()
        .map(|it| format!("postgres://app@{}/postgres", it.address()));
    let one = PgPoolOptions::new().max_connections(1);
    let one = one.after_connect(move |connection, _| {
        Box::pin(async move {
            if keeps {
                query("select 1").execute(connection).await?;
            }
            Ok(())
        })
    });
    let pool = one.connect_lazy(&pool).expect("an URL");
    let books = Books::open(&store, pool, table).await;
    costs_of_a_transaction::<PostgresStore>(books, trips, expected).await;
}

#[tokio::test]
async fn postgres_transaction_costs_four_round_trips() {
    let all = "begin, lease, effect, record, commit";
    a_transaction_on_postgres_costs(true, "tx_costs", (5, all)).await;
}

#[tokio::test]
async fn postgres_without_statement_cache_costs_six() {
    let all = "begin, lease, lease, effect, record, record, commit";
    a_transaction_on_postgres_costs(false, "tx_costs_again", (7, all)).await;
}

#[tokio::test]
async fn mariadb_transaction_costs_five_round_trips() {
    let trips = || RoundTrips::before(mariadb::shared().address());
    let trips = [trips(), trips()];
    let [store, pool] = trips
        .each_ref()
        .map(|it| format!("mysql://app:app@{}/app", it.address()));
    let one = MySqlPoolOptions::new().max_connections(1);
    let pool = one.connect_lazy(&pool).expect("an URL");
    let books = Books::open(&store, pool, "tx_costs").await;
    let all = "begin, lease, effect, savepoint, record, commit";
    costs_of_a_transaction::<MySqlStore>(books, trips, (6, all)).await;
}

/// A checkpoint costs the same on a new connection, because it prepares no statements. A driver that is cut off during
/// a prepare loses its place in the protocol.
#[tokio::test]
async fn mariadb_checkpoint_prepares_nothing() {
    let trips = Arc::new(RoundTrips::before(mariadb::shared().address()));
    let url = format!("mysql://app:app@{}/app", trips.address());
    let pool = MySqlPoolOptions::new().connect_lazy(&url).expect("an URL");
    let books = Books::<MySqlStore>::open(&mariadb::shared().url(), pool, "tx_prepares").await;
    let layer = layer(books.store.clone());
    let (bank, counted) = (books.clone(), Arc::clone(&trips));
    let (app, _) = app(layer, move |n, req: http::Request<axum::body::Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let (books, trips) = (bank.clone(), Arc::clone(&counted));
        async move {
            let tx = books.begin(&lease).await.expect("a transaction");
            let _ = trips.taken();
            tx.checkpoint("phase", &n).await.expect("a phase");
            let taken = trips.taken();
            // The pool may have checked the connection already.
            assert!(taken <= 5, "{taken}: savepoint, before, checkpoint, commit");
            created(n)
        }
    });
    is_created(&app, "prepares", "tea").await;
}
