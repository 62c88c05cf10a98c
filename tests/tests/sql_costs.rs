//! What a request costs a database, counted on the wire.

use axum::Router;
use http::StatusCode;
use tests::{
    Effects, app, creating,
    gate::Gate,
    post,
    round_trips::RoundTrips,
    send,
    servers::{mariadb, postgres},
};
use tower_idempotency::{IdempotencyLayer, store::Store};
use tower_idempotency_sqlx::{MySqlStore, PostgresStore};

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

/// Keys are shared by the tests of this binary, so each has its own.
async fn costs_two_when_fresh_and_one_when_replayed<S: Store>(store: S, trips: RoundTrips) {
    let (app, effects) = creating(IdempotencyLayer::new(store));
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
    let (app, effects) = app(IdempotencyLayer::new(store), async |_, _| {
        StatusCode::INTERNAL_SERVER_ERROR
    });
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
    let (app, effects): (_, Effects) = app(IdempotencyLayer::new(store), move |_, _| {
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
    first.await.expect("the first answer");
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
