//! A database for each test, and the service and the provider in this process.

use std::{path::PathBuf, time::Duration};
use tests::database::pool_options;

use axum::{Router, body::Body, http::Request};
use rocket_rides::{
    Payments, Rides, app, completer, connect, migrate,
    provider::{self, Charge, Ledger, Mood},
};
use tests::{TestResponse, proxy::Proxy, scratch::Scratch, send, servers::postgres, wire::Server};
use tower_idempotency::{
    IdempotencyLayer, MissingKey, Preset,
    inspect::{Inspect, Query, Resolution, State},
};
use tower_idempotency_sqlx::{
    Completer, PostgresStore,
    sqlx::{self, AssertSqlSafe, PgPool},
};

/// The URL of a new database.
pub(crate) async fn database(name: &str) -> String {
    let server = postgres::shared().url();
    let pool = pool_options::<sqlx::Postgres>()
        .connect(&server)
        .await
        .expect("the server runs");
    let create = AssertSqlSafe(format!("create database {name}"));
    sqlx::raw_sql(create).execute(&pool).await.expect("created");
    let (server, _) = server.rsplit_once('/').expect("a URL");
    format!("{server}/{name}")
}

pub(crate) struct Harness {
    pub(crate) pool: PgPool,
    pub(crate) completer: Completer<PostgresStore>,
    app: Router,
    /// The same service, with a very short timeout for the provider.
    hasty: Router,
    provider: Router,
    _server: Server,
    scratch: Scratch,
}

impl Harness {
    pub(crate) async fn new(name: &str) -> Self {
        Self::start(name, Preset::Recommended, None).await
    }

    /// Starts a harness with another preset of recorded statuses.
    pub(crate) async fn with_preset(name: &str, preset: Preset) -> Self {
        Self::start(name, preset, None).await
    }

    /// Starts a harness whose handlers connect through a proxy, with a matching timeout.
    pub(crate) async fn with_proxy(name: &str, proxy: (&Proxy, Duration)) -> Self {
        Self::start(name, Preset::Recommended, Some(proxy)).await
    }

    async fn start(name: &str, preset: Preset, proxy: Option<(&Proxy, Duration)>) -> Self {
        let url = database(name).await;
        let pool = pool_options::<sqlx::Postgres>()
            .connect(&url)
            .await
            .expect("the server runs");
        let (target, limit) = match proxy {
            Some((proxy, limit)) => (format!("postgres://app@{}/{name}", proxy.address()), limit),
            None => (url.clone(), LIMIT),
        };
        let target = connect(&target, limit).await.expect("the server runs");
        migrate(&pool).await.expect("migrated");
        let store = PostgresStore::from_url(&url).expect("a URL");
        store.migrate().await.expect("migrated");

        let scratch = Scratch::new();
        let ledger = Ledger::open(&scratch.file("ledger")).expect("a file");
        let provider = provider::app(ledger, Duration::ZERO);
        let server = Server::start(provider.clone()).await;
        let url = format!("http://{}", server.addr());

        let layer = IdempotencyLayer::with_preset(store.clone(), preset);
        let layer = layer.with_missing_key(MissingKey::Reject);
        let rides = Rides {
            store,
            pool: target,
            payments: Payments::new(&url, LIMIT),
            limit,
        };
        let hasty = Rides {
            payments: Payments::new(&url, HASTE),
            ..rides.clone()
        };
        let completer = completer(&rides, &layer).with_min_age(Duration::ZERO);
        Self {
            pool,
            completer,
            hasty: app(hasty, layer.clone()),
            app: app(rides, layer),
            provider,
            _server: server,
            scratch,
        }
    }

    /// Requests a ride that is paid with this card.
    pub(crate) async fn ride(&self, key: &str, card: &str) -> TestResponse {
        Self::request_ride(&self.app, key, card).await
    }

    /// Requests a ride with a short timeout for the provider, which does not respond.
    pub(crate) async fn ride_without_provider(&self, key: &str, card: &str) -> TestResponse {
        Self::request_ride(&self.hasty, key, card).await
    }

    async fn request_ride(app: &Router, key: &str, card: &str) -> TestResponse {
        let body = format!(r#"{{"rider":"ann@example.com","destination":"Mars","card":"{card}"}}"#);
        let req = Request::post("/rides")
            .header("idempotency-key", key)
            .header("content-type", "application/json")
            .body(Body::from(body));
        send(app, req.expect("a request")).await
    }

    pub(crate) async fn set_mood(&self, mood: Mood) {
        let mood = serde_json::to_value(mood).expect("a name");
        let path = format!("/mood/{}", mood.as_str().expect("a name"));
        let req = Request::put(path).body(Body::empty());
        let response = send(&self.provider, req.expect("a request")).await;
        assert!(response.status.is_success(), "{response:?}");
    }

    /// Returns the charges of the provider.
    pub(crate) async fn charges(&self) -> Vec<Charge> {
        let req = Request::get("/charges").body(Body::empty());
        let response = send(&self.provider, req.expect("a request")).await;
        serde_json::from_slice(&response.body).expect("charges")
    }

    /// Makes all rides older.
    pub(crate) async fn age_rides(&self, by: &str) {
        let age = sqlx::query("update rides set created = created - $1::text::interval");
        age.bind(by).execute(&self.pool).await.expect("aged");
    }

    /// Executes the statement of the README on the only ride.
    pub(crate) async fn make_ride_recent(&self) {
        let (_, statement) = README.split_once("```sql\nupdate ").expect("a statement");
        let (statement, _) = statement.split_once(" = 42;").expect("a statement");
        let statement = AssertSqlSafe(format!("update {statement} = $1"));
        let ride = sqlx::query_scalar("select id from rides").fetch_one(&self.pool);
        let ride: i64 = ride.await.expect("a ride");
        let updated = sqlx::query(statement).bind(ride).execute(&self.pool).await;
        assert_eq!(updated.expect("updated").rows_affected(), 1);
    }

    /// Allows a retry of the only request that needs attention, as an operator does.
    pub(crate) async fn allow_retry(&self) {
        let store = PostgresStore::new((*self.pool.connect_options()).clone());
        let page = store.list(&Query::new(State::NeedsAttention)).await;
        let page = page.expect("a page");
        assert_eq!(page.entries.len(), 1, "{page:?}");
        let seen = page.entries[0].seen();
        let resolved = store.resolve(seen, &Resolution::Retry).await;
        assert!(resolved.expect("a decision").is_applied());
    }

    /// Makes the provider ignore its stored keys: from now on it charges for every request.
    pub(crate) async fn forget_keys(&self) {
        let req = Request::delete("/keys").body(Body::empty());
        let response = send(&self.provider, req.expect("a request")).await;
        assert!(response.status.is_success(), "{response:?}");
    }

    /// Leaves the entry of a request that was killed before its first checkpoint.
    pub(crate) async fn begin_request(&self) {
        let begun = "insert into tower_idempotency (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, \
             created, owner, operation) \
             select sha256('id'), substr(sha256('token'), 1, 16), sha256('fingerprint'), 1, now - 1000, 3600000, \
             now + 3600000, now - 2000, 'tests', 'POST /rides' \
             from (select (extract(epoch from now()) * 1000)::bigint as now) as clock";
        let begun = sqlx::query(begun).execute(&self.pool).await;
        assert_eq!(begun.expect("begun").rows_affected(), 1);
    }

    /// Returns the number of entries without a record.
    pub(crate) async fn unfinished_requests(&self) -> i64 {
        let count = "select count(*) from tower_idempotency where record is null";
        let count = sqlx::query_scalar(count).fetch_one(&self.pool);
        count.await.expect("a count")
    }

    /// Returns the states of all rides.
    pub(crate) async fn rides(&self) -> Vec<String> {
        let states = sqlx::query_scalar("select state from rides order by id");
        states.fetch_all(&self.pool).await.expect("rides")
    }

    /// Returns the number of receipts.
    pub(crate) async fn receipts(&self) -> i64 {
        let count = sqlx::query_scalar("select count(*) from receipts");
        count.fetch_one(&self.pool).await.expect("a count")
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.scratch.file(name)
    }
}

const README: &str = include_str!("../../README.md");
/// The timeout for a provider that gives no verdict.
const HASTE: Duration = Duration::from_millis(300);
/// Longer than any ride takes.
const LIMIT: Duration = Duration::from_secs(60);
