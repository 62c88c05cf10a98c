//! The connections of the SQL stores when the way to the server is slow, leads elsewhere, or has fallen silent.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use axum::body::Body;
use http::{Request, StatusCode};
use tests::{
    Effects, app, created, creating,
    gate::{bounded, within},
    post,
    proxy::{Mode, Proxy},
    scratch::Scratch,
    send,
    servers::{
        mariadb::{self, MariaDbServer},
        postgres::{self, PostgresServer},
    },
    sql::{self, claim},
};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::{
    IdempotencyLayer, Lease, OrphanPolicy,
    store::{Store, Ttl},
};
use tower_idempotency_sqlx::{
    MySqlStore, PostgresStore, SqliteStore,
    sqlx::{
        AssertSqlSafe, Connection, Executor, MySqlConnection, PgConnection, SqliteConnection,
        mysql::MySqlConnectOptions, postgres::PgConnectOptions, query_scalar,
        sqlite::SqliteConnectOptions,
    },
};

fn postgres_by(way: &Proxy, table: &str) -> PostgresStore {
    let url = format!("postgres://app@{}/postgres", way.address());
    let store = PostgresStore::from_url(&url).expect("an URL");
    store.with_table(table).expect("an identifier")
}

fn mariadb_by(way: &Proxy, table: &str) -> MySqlStore {
    let url = format!("mysql://app:app@{}/app", way.address());
    let store = MySqlStore::from_url(&url).expect("an URL");
    store.with_table(table).expect("an identifier")
}

/// 150 ms for a statement, more for a connection.
const SLOW: Mode = Mode::Delay {
    up: Duration::from_millis(75),
    down: Duration::from_millis(75),
};

/// Has the store make so many connections, all of which are idle then.
async fn warm<S: Store + Clone>(store: &S, connections: usize) {
    let mut calls = JoinSet::new();
    for _ in 0..connections {
        let store = store.clone();
        calls.spawn(async move { store.acquire(&claim()).await.map(drop) });
    }
    for made in bounded(calls.join_all()).await {
        made.expect("the test server runs");
    }
}

// ---- A flood of fresh keys ----

/// While more keys are asked for than the database can serve, a handler that runs for long keeps its lease, and completes.
/// `flooded` has few connections and a slow database; `other` is another process, which asks for the same key meanwhile.
async fn a_flood_costs_no_lease<S: Store, T: Store>(flooded: S, other: T) {
    const LONG: Duration = Duration::from_secs(8);
    let layer = |layer: IdempotencyLayer| layer.with_lease(Ttl::from_secs(3));
    let (long, held) = (Effects::default(), Arc::new(AtomicBool::new(true)));
    let (counted, kept) = (long.clone(), Arc::clone(&held));
    let handler = move |_, req: Request<Body>| {
        let (long, held) = (counted.clone(), Arc::clone(&kept));
        async move {
            if req.uri().path() == "/long" {
                let lease = req.extensions().get::<Lease>().expect("a lease").clone();
                long.happen();
                let lost = timeout(LONG, lease.lost()).await.is_ok();
                held.fetch_and(!lost, SeqCst);
            }
            created(0)
        }
    };
    let (busy, _) = app(layer(IdempotencyLayer::new(flooded)), handler.clone());
    let (idle, _) = app(layer(IdempotencyLayer::new(other)), handler);
    let began = Instant::now();
    let first = tokio::spawn({
        let busy = busy.clone();
        async move { send(&busy, post("/long", "long", "tea")).await }
    });
    while long.count() == 0 {
        assert!(!first.is_finished(), "it is executed");
        sleep(Duration::from_millis(10)).await;
    }
    let flood = tokio::spawn(async move {
        let (mut flood, mut n) = (JoinSet::new(), 0);
        while began.elapsed() < LONG {
            let (busy, req) = (busy.clone(), post("/orders", &format!("fresh-{n}"), "tea"));
            flood.spawn(async move { send(&busy, req).await });
            n += 1;
            sleep(Duration::from_millis(20)).await;
        }
        let answers = flood.join_all().await;
        let served = answers.iter().filter(|it| it.status == StatusCode::CREATED);
        (n, served.count())
    });
    sleep(Duration::from_secs(5)).await;
    let retry = bounded(send(&idle, post("/long", "long", "tea"))).await;
    let first = bounded(first).await.expect("no panic");
    let (asked, served) = bounded(flood).await.expect("no panic");
    assert_eq!((long.count(), held.load(SeqCst)), (1, true));
    assert_eq!(retry.status, StatusCode::CONFLICT);
    assert_eq!(first.status, StatusCode::CREATED);
    let retry = send(&idle, post("/long", "long", "tea")).await;
    assert!(retry.is_replay(), "{retry:?}");
    assert!(asked > 100 && served > 5, "{served} of {asked} were served");
    assert!(served < asked, "it was no flood");
}

async fn a_flood_costs_no_lease_in_postgres(connections: usize) {
    let table = format!("flood_{connections}");
    let other = sql::postgres(postgres::shared(), &table).await;
    let way = Proxy::start(postgres::shared().address());
    way.set(SLOW);
    let flooded = postgres_by(&way, &table).with_connections(connections);
    a_flood_costs_no_lease(flooded, other).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_fresh_keys_costs_no_lease_in_postgres() {
    a_flood_costs_no_lease_in_postgres(3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_fresh_keys_on_one_connection_costs_no_lease_in_postgres() {
    a_flood_costs_no_lease_in_postgres(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_fresh_keys_costs_no_lease_in_mariadb() {
    let other = sql::mariadb(mariadb::shared(), "flood").await;
    let way = Proxy::start(mariadb::shared().address());
    way.set(SLOW);
    let flooded = mariadb_by(&way, "flood").with_connections(3);
    a_flood_costs_no_lease(flooded, other).await;
}

/// The disk is slow, say: here it is a trigger that counts for a tenth of a second.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_fresh_keys_costs_no_lease_in_sqlite() {
    let scratch = Scratch::new();
    let flooded = sql::sqlite(&scratch).await;
    let other = SqliteStore::new(scratch.file("keys.db"));
    let options = SqliteConnectOptions::new().filename(scratch.file("keys.db"));
    let mut admin = SqliteConnection::connect_with(&options).await.unwrap();
    let count = |most: u128| {
        format!(
            "select count(*) from (with recursive counted(n) as \
             (select 1 union all select n + 1 from counted where n < {most}) select n from counted)"
        )
    };
    let counting = Instant::now();
    let many = AssertSqlSafe(count(50_000));
    admin.execute(many).await.unwrap();
    let in_a_tenth = 50_000 * 100_000 / counting.elapsed().as_micros();
    let slow = format!(
        "create trigger slow before insert on tower_idempotency begin {}; end",
        count(in_a_tenth)
    );
    admin.execute(AssertSqlSafe(slow)).await.unwrap();
    a_flood_costs_no_lease(flooded, other).await;
}

// ---- Connections that lead to where nobody can write any more ----

/// The server becomes a replica; then new connections lead to the one that was promoted.
async fn a_failover_is_followed<S: Store + Clone>(
    store: S,
    demote: impl AsyncFnOnce(),
    lead_on: impl FnOnce(),
) {
    warm(&store, 8).await;
    let (app, effects) = creating(IdempotencyLayer::new(store));
    demote().await;
    let refused = bounded(send(&app, post("/orders", "k", "tea"))).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    lead_on();
    let served = bounded(send(&app, post("/orders", "k", "tea"))).await;
    assert_eq!(served.status, StatusCode::CREATED, "{}", served.text());
    assert_eq!(effects.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_has_become_read_only_is_left_for_its_successor_in_postgres() {
    let demoted = PostgresServer::start(&[]);
    sql::postgres(&demoted, "failover").await;
    sql::postgres(postgres::shared(), "failover").await;
    let way = Proxy::start(demoted.address());
    let demote = async || {
        let mut admin = PgConnection::connect(&demoted.url()).await.unwrap();
        set(&mut admin, "default_transaction_read_only = on").await;
    };
    let lead_on = || way.lead_to(postgres::shared().address());
    a_failover_is_followed(postgres_by(&way, "failover"), demote, lead_on).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_has_become_read_only_is_left_for_its_successor_in_mariadb() {
    let demoted = MariaDbServer::start(&[]);
    for server in [&demoted, mariadb::shared()] {
        sql::mariadb(server, "failover").await;
        // `app` may write all the same.
        let mut admin = MySqlConnection::connect(&server.url()).await.unwrap();
        let users = "create user if not exists plain@'%' identified by 'plain'";
        admin.execute(users).await.unwrap();
        let grant = "grant select, insert, update, delete on app.* to plain@'%'";
        admin.execute(grant).await.unwrap();
    }
    let way = Proxy::start(demoted.address());
    let demote = async || {
        let mut admin = MySqlConnection::connect(&demoted.url()).await.unwrap();
        admin.execute("set global read_only = 1").await.unwrap();
    };
    let lead_on = || way.lead_to(mariadb::shared().address());
    let options = MySqlConnectOptions::new()
        .host("127.0.0.1")
        .port(way.address().port())
        .username("plain")
        .password("plain")
        .database("app");
    let store = MySqlStore::new(options).with_table("failover").unwrap();
    a_failover_is_followed(store, demote, lead_on).await;
}

// ---- Connections that have fallen silent ----

/// What was connected by `old` gets no answer any more; by `way` new connections get through.
async fn silent_connections_are_left_together<S: Store + Clone>(
    store: S,
    fall_silent: impl FnOnce(),
) {
    warm(&store, 8).await;
    let (app, effects) = creating(IdempotencyLayer::new(store));
    fall_silent();
    let first = bounded(send(&app, post("/orders", "first", "tea"))).await;
    let second = bounded(send(&app, post("/orders", "second", "tea"))).await;
    assert_eq!(second.status, StatusCode::CREATED, "{}", second.text());
    assert_eq!(first.status, StatusCode::CREATED, "{}", first.text());
    assert_eq!(effects.count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_fell_silent_are_left_together_in_postgres() {
    let server = postgres::shared();
    sql::postgres(server, "silent").await;
    let old = Proxy::start(server.address());
    let way = Proxy::start(old.address());
    silent_connections_are_left_together(postgres_by(&way, "silent"), || {
        old.set(Mode::Hold);
        way.lead_to(server.address());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_fell_silent_are_left_together_in_mariadb() {
    let server = mariadb::shared();
    sql::mariadb(server, "silent").await;
    let old = Proxy::start(server.address());
    let way = Proxy::start(old.address());
    silent_connections_are_left_together(mariadb_by(&way, "silent"), || {
        old.set(Mode::Hold);
        way.lead_to(server.address());
    })
    .await;
}

/// Whoever loses interest soon has learned nothing about the other connections.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_dropped_soon_costs_its_own_connection_only() {
    let server = postgres::shared();
    sql::postgres(server, "dropped").await;
    let way = Proxy::start(server.address());
    let store = postgres_by(&way, "dropped");
    warm(&store, 4).await;
    assert_eq!(way.counts().connections, 4);
    way.set(SLOW);
    let dropped = timeout(Duration::from_millis(50), store.acquire(&claim())).await;
    assert!(dropped.is_err());
    way.set(Mode::Pass);
    warm(&store, 4).await;
    assert_eq!(way.counts().connections, 5);
}

// ---- A server that does not commit ----

const SERVES: &str = "the test server runs";

async fn set(admin: &mut PgConnection, setting: &str) {
    let set = AssertSqlSafe(format!("alter system set {setting}"));
    admin.execute(set).await.expect(SERVES);
    admin
        .execute("select pg_reload_conf()")
        .await
        .expect(SERVES);
}

/// Commits wait for a standby that there is not, from when this returns on.
async fn stall(server: &PostgresServer, admin: &mut PgConnection) {
    let table = "create table if not exists probe (n integer)";
    admin.execute(table).await.expect(SERVES);
    set(admin, "synchronous_standby_names = '*'").await;
    for _ in 0..100 {
        let mut probe = PgConnection::connect(&server.url()).await.expect(SERVES);
        let insert = probe.execute("insert into probe values (1)");
        if timeout(Duration::from_millis(300), insert).await.is_err() {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("the server commits");
}

async fn go_on(admin: &mut PgConnection) {
    set(admin, "synchronous_standby_names = ''").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_committed_after_its_client_was_refused_is_given_back() {
    let server = PostgresServer::start(&[]);
    let store = sql::postgres(&server, "late").await;
    let layer = IdempotencyLayer::new(store)
        .with_orphans(OrphanPolicy::Refuse)
        .with_lease(Ttl::from_secs(12));
    let (app, effects) = creating(layer);
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    stall(&server, &mut admin).await;
    let refused = bounded(send(&app, post("/orders", "k", "tea"))).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    // The first release has found nothing.
    sleep(Duration::from_millis(1_500)).await;
    go_on(&mut admin).await;
    let began = Instant::now();
    loop {
        let answer = bounded(send(&app, post("/orders", "k", "tea"))).await;
        if answer.status == StatusCode::CREATED {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(7), "{answer:?}");
        sleep(Duration::from_millis(250)).await;
    }
    assert_eq!(effects.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stall_leaves_few_backends_behind() {
    let server = PostgresServer::start(&[]);
    sql::postgres(&server, "stall").await;
    let options: PgConnectOptions = server.url().parse().unwrap();
    let store = PostgresStore::new(options.application_name("store"));
    let store = store.with_table("stall").unwrap().with_connections(2);
    let (app, effects) = creating(IdempotencyLayer::new(store));
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    stall(&server, &mut admin).await;
    let mut asking = JoinSet::new();
    let mut most = 0;
    for n in 0..20 {
        let (app, req) = (app.clone(), post("/orders", &format!("k{n}"), "tea"));
        asking.spawn(async move { send(&app, req).await.status });
        sleep(Duration::from_millis(750)).await;
        let count = "select count(*) from pg_stat_activity where application_name = 'store'";
        let held: i64 = query_scalar(count).fetch_one(&mut admin).await.unwrap();
        most = most.max(held);
    }
    go_on(&mut admin).await;
    let refused = bounded(asking.join_all()).await;
    assert!(
        refused.iter().any(StatusCode::is_server_error),
        "it was no stall"
    );
    assert!(most <= 5, "{most} backends");
    let served = async {
        while send(&app, post("/orders", "after", "tea")).await.status != StatusCode::CREATED {
            sleep(Duration::from_millis(100)).await;
        }
    };
    within(Duration::from_secs(8), served).await;
    assert!(effects.count() >= 1);
}
