//! Costs of a request on a database: round trips, counted on the wire.

use std::{sync::Arc, time::Duration};
use tests::database::pool_options;

use axum::Router;
use http::StatusCode;
use tests::{
    Effects, app,
    barrier::{Barrier, within},
    created, creating,
    database::{TestDatabase, TestDialect},
    post,
    round_trips::RoundTrips,
    send,
    servers::{mariadb, postgres},
    sql::layer,
};
use tokio::time::sleep;
use tower_idempotency::{Lease, store::Store};
use tower_idempotency_sqlx::{MySqlStore, PostgresStore, sqlx::query};

async fn on_postgres() -> (PostgresStore, RoundTrips) {
    let trips = RoundTrips::before(postgres::shared().address());
    let url = format!("postgres://app@{}/postgres", trips.address());
    let store = PostgresStore::from_url(&url).expect("an URL");
    store.migrate().await.expect("the test server runs");
    (store, trips)
}

async fn on_mariadb() -> (MySqlStore, RoundTrips) {
    let trips = RoundTrips::before(mariadb::shared().address());
    let url = mariadb::url(trips.address());
    let store = MySqlStore::from_url(&url).expect("an URL");
    store.migrate().await.expect("the test server runs");
    (store, trips)
}

async fn assert_created(app: &Router, key: &str, body: &'static str) {
    let response = send(app, post("/orders", key, body)).await;
    assert_eq!(response.status, StatusCode::CREATED);
}

/// The tests of this binary share a table, so each has its own key.
async fn costs_two_when_fresh_and_one_when_replayed<S: Store>(store: S, trips: RoundTrips) {
    let (app, effects) = creating(layer(store));
    assert_created(&app, "cost-before", "tea").await;
    let _ = trips.taken();
    assert_created(&app, "cost", "tea").await;
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
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let (app, effects): (_, Effects) = app(layer(store), move |_, _| {
        let held = held.clone();
        async move { held.pass().await }
    });
    let first = tokio::spawn({
        let app = app.clone();
        async move { send(&app, post("/orders", "held", "tea")).await }
    });
    barrier.arrival().await;
    let _ = trips.taken();
    let duplicate = send(&app, post("/orders", "held", "tea")).await;
    assert_eq!(duplicate.status, StatusCode::CONFLICT);
    assert_eq!(trips.taken(), 1);
    barrier.open_for_good();
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
async fn wait_until_idle<S: TestDialect>(database: &TestDatabase<S>) {
    within(Duration::from_secs(60), async {
        while database.pool.num_idle() < 1 {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Counts the calls of the store, and the statements on the handler's connection.
async fn costs_of_a_transaction<S: TestDialect>(
    database: TestDatabase<S>,
    trips: [RoundTrips; 2],
    expected: (u64, &str),
) {
    let layer = layer(database.store.clone());
    let bank = database.clone();
    let (app, effects) = app(layer, move |n, req: http::Request<axum::body::Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let database = bank.clone();
        async move {
            let mut tx = database.begin(&lease).await.expect("a transaction");
            let effect = S::run(&mut tx, database.effect("charge", 1, n)).await;
            effect.expect("the effect");
            tx.commit(created(n)).await.expect("a commit")
        }
    });
    assert_created(&app, "tx-before", "tea").await;
    wait_until_idle(&database).await;
    let _ = trips.each_ref().map(RoundTrips::taken);
    assert_created(&app, "tx", "tea").await;
    wait_until_idle(&database).await;
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
async fn check_postgres_transaction_costs(keeps: bool, table: &str, expected: (u64, &str)) {
    let trips = || RoundTrips::before(postgres::shared().address());
    let trips = [trips(), trips()];
    let [store, pool] = trips
        .each_ref()
        .map(|it| format!("postgres://app@{}/postgres", it.address()));
    let one = pool_options::<tower_idempotency_sqlx::sqlx::Postgres>().max_connections(1);
    let one = one.after_connect(move |connection, _| {
        Box::pin(async move {
            if keeps {
                query("select 1").execute(connection).await?;
            }
            Ok(())
        })
    });
    let pool = one.connect_lazy(&pool).expect("an URL");
    let database = TestDatabase::open(&store, pool, table).await;
    costs_of_a_transaction::<PostgresStore>(database, trips, expected).await;
}

#[tokio::test]
async fn postgres_transaction_costs_four_round_trips() {
    let all = "begin, lease, effect, record, commit";
    check_postgres_transaction_costs(true, "tx_costs", (5, all)).await;
}

#[tokio::test]
async fn postgres_without_statement_cache_costs_six() {
    let all = "begin, lease, lease, effect, record, record, commit";
    check_postgres_transaction_costs(false, "tx_costs_again", (7, all)).await;
}

#[tokio::test]
async fn mariadb_transaction_costs_five_round_trips() {
    let trips = || RoundTrips::before(mariadb::shared().address());
    let trips = [trips(), trips()];
    let [store, pool] = trips.each_ref().map(|it| mariadb::url(it.address()));
    let one = pool_options::<tower_idempotency_sqlx::sqlx::MySql>().max_connections(1);
    let pool = one.connect_lazy(&pool).expect("an URL");
    let database = TestDatabase::open(&store, pool, "tx_costs").await;
    let all = "begin, lease, effect, savepoint, record, commit";
    costs_of_a_transaction::<MySqlStore>(database, trips, (6, all)).await;
}

/// A checkpoint costs the same on a new connection, because it prepares no statements. A driver that is cut off during
/// a prepare loses its position in the protocol.
#[tokio::test]
async fn mariadb_checkpoint_prepares_nothing() {
    let trips = Arc::new(RoundTrips::before(mariadb::shared().address()));
    let url = mariadb::url(trips.address());
    let pool = pool_options::<tower_idempotency_sqlx::sqlx::MySql>()
        .connect_lazy(&url)
        .expect("an URL");
    let database =
        TestDatabase::<MySqlStore>::open(&mariadb::shared().url(), pool, "tx_prepares").await;
    let layer = layer(database.store.clone());
    let (bank, counted) = (database.clone(), Arc::clone(&trips));
    let (app, _) = app(layer, move |n, req: http::Request<axum::body::Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let (database, trips) = (bank.clone(), Arc::clone(&counted));
        async move {
            let tx = database.begin(&lease).await.expect("a transaction");
            let _ = trips.taken();
            tx.checkpoint("phase", &n).await.expect("a phase");
            let taken = trips.taken();
            // The pool may have checked the connection already.
            assert!(taken <= 5, "{taken}: savepoint, before, checkpoint, commit");
            created(n)
        }
    });
    assert_created(&app, "prepares", "tea").await;
}
