//! The connections of the SQL stores if the network is slow, leads to another server, or no longer delivers replies.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use axum::body::Body;
use http::{Request, StatusCode};
use tests::{
    Effects, app,
    barrier::{bounded, eventually, within},
    created, creating, post,
    proxy::{Mode, Proxy},
    scratch::Scratch,
    send,
    servers::{
        mariadb::{self, MariaDbServer},
        postgres::{self, PostgresServer},
    },
    sql::{self, claim, until_undisturbed},
};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::{
    IdempotencyLayer, Lease, OrphanPolicy,
    conformance::{Fault, FaultInjector, Hold, Operation},
    store::{Store, Ttl},
};
use tower_idempotency_sqlx::{
    MySqlStore, PostgresStore, SqliteStore,
    sqlx::{
        AssertSqlSafe, Connection, Executor, MySqlConnection, PgConnection, SqliteConnection,
        mysql::MySqlConnectOptions, postgres::PgConnectOptions, query_scalar, raw_sql,
        sqlite::SqliteConnectOptions,
    },
};

fn postgres_by(proxy: &Proxy, table: &str) -> PostgresStore {
    let url = format!("postgres://app@{}/postgres", proxy.address());
    let store = PostgresStore::from_url(&url).expect("an URL");
    store.with_table(table).expect("an identifier")
}

fn mariadb_by(proxy: &Proxy, table: &str) -> MySqlStore {
    let url = mariadb::url(proxy.address());
    let store = MySqlStore::from_url(&url).expect("an URL");
    store.with_table(table).expect("an identifier")
}

/// A statement takes 150 ms, and a new connection takes longer.
const SLOW: Mode = Mode::Delay {
    up: Duration::from_millis(75),
    down: Duration::from_millis(75),
};

/// Connects to the server and makes a query, as a probe of [`until_undisturbed`].
async fn probe_postgres(server: &PostgresServer) {
    if let Ok(mut connection) = PgConnection::connect(&server.url()).await {
        connection.execute("select 1").await.ok();
    }
}

/// Connects to the server and makes a query, as a probe of [`until_undisturbed`].
async fn probe_mariadb(server: &MariaDbServer) {
    if let Ok(mut connection) = MySqlConnection::connect(&server.url()).await {
        connection.execute("select 1").await.ok();
    }
}

/// Makes the store open this number of connections, which are all idle afterwards. No call gets its reply before all
/// are open.
async fn warm<S: Store + Clone>(store: &S, proxy: &Proxy, connections: u64) {
    let before = proxy.counts().connections;
    proxy.set(Mode::Hold);
    let mut calls = JoinSet::new();
    for _ in 0..connections {
        let store = store.clone();
        calls.spawn(async move { store.acquire(&claim()).await.map(drop) });
    }
    connect(proxy, before + connections).await;
    proxy.set(Mode::Pass);
    for made in bounded(calls.join_all()).await {
        made.expect("the test server runs");
    }
}

/// Waits until this number of connections was made through the proxy.
async fn connect(proxy: &Proxy, connections: u64) {
    within(Duration::from_secs(60), async {
        while proxy.counts().connections < connections {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

// ---- A flood of fresh keys ----

/// A long execution keeps its lease and completes while clients request more keys than the database can serve.
/// `flooded` has few connections and a slow database. `other` is another process, which requests the same key
/// meanwhile.
///
/// A stall of the machine costs the lease as well. Calls that a trial leaves behind delay only the store of that trial.
async fn check_flood_costs_no_lease<S: Store, T: Store>(flooded: S, other: T) {
    const LONG: Duration = Duration::from_secs(12);
    let layer = |layer: IdempotencyLayer| layer.with_lease_ttl(Ttl::from_secs(6));
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
    // Trials may share a table.
    let trial = claim().id;
    let key = format!("long-{trial}");
    let long_request = || post("/long", &key, "tea");
    let first = tokio::spawn({
        let (busy, req) = (busy.clone(), long_request());
        async move { send(&busy, req).await }
    });
    while long.count() == 0 {
        assert!(!first.is_finished(), "the request is executed");
        sleep(Duration::from_millis(10)).await;
    }
    let flood = tokio::spawn(async move {
        let (mut flood, mut n) = (JoinSet::new(), 0);
        while began.elapsed() < LONG {
            let key = format!("fresh-{trial}-{n}");
            let (busy, req) = (busy.clone(), post("/orders", &key, "tea"));
            flood.spawn(async move { send(&busy, req).await });
            n += 1;
            sleep(Duration::from_millis(20)).await;
        }
        let responses = flood.join_all().await;
        let served = responses
            .iter()
            .filter(|it| it.status == StatusCode::CREATED);
        (n, served.count())
    });
    // Without renewals the lease would have expired by now.
    sleep(Duration::from_secs(9)).await;
    let retry = bounded(send(&idle, long_request())).await;
    let first = bounded(first).await.expect("no panic");
    let (sent, served) = bounded(flood).await.expect("no panic");
    assert_eq!((long.count(), held.load(SeqCst)), (1, true));
    assert_eq!(retry.status, StatusCode::CONFLICT);
    assert_eq!(first.status, StatusCode::CREATED);
    let retry = send(&idle, long_request()).await;
    assert!(retry.is_replay(), "{retry:?}");
    assert!(served > 0, "{served} of {sent} requests were served");
    assert!(served < sent, "the database served all requests");
}

async fn check_flood_in_postgres(connections: usize) {
    let table = format!("flood_{connections}");
    let probe = async || probe_postgres(postgres::shared()).await;
    until_undisturbed(probe, async || {
        let other = sql::postgres(postgres::shared(), &table).await;
        let proxy = Proxy::start(postgres::shared().address());
        proxy.set(SLOW);
        let flooded = postgres_by(&proxy, &table).with_connections(connections);
        check_flood_costs_no_lease(flooded, other).await;
    })
    .await;
}

// F-164
#[tokio::test(flavor = "multi_thread")]
async fn fresh_key_flood_loses_no_lease_in_postgres() {
    check_flood_in_postgres(3).await;
}

// F-164
#[tokio::test(flavor = "multi_thread")]
async fn flood_on_one_connection_loses_no_lease() {
    check_flood_in_postgres(1).await;
}

// F-164
#[tokio::test(flavor = "multi_thread")]
async fn fresh_key_flood_loses_no_lease_in_mariadb() {
    let probe = async || probe_mariadb(mariadb::shared()).await;
    until_undisturbed(probe, async || {
        let other = sql::mariadb(mariadb::shared(), "flood").await;
        let proxy = Proxy::start(mariadb::shared().address());
        proxy.set(SLOW);
        let flooded = mariadb_by(&proxy, "flood").with_connections(3);
        check_flood_costs_no_lease(flooded, other).await;
    })
    .await;
}

// F-164
/// A trigger that counts for a tenth of a second simulates a slow disk.
#[tokio::test(flavor = "multi_thread")]
async fn fresh_key_flood_loses_no_lease_in_sqlite() {
    // SQLite runs in this process.
    until_undisturbed(async || {}, async || check_flood_in_sqlite().await).await;
}

async fn check_flood_in_sqlite() {
    let scratch = Scratch::new();
    let flooded = sql::sqlite(&scratch).await;
    let other = SqliteStore::in_file(scratch.file("keys.db"));
    let options = SqliteConnectOptions::new().filename(scratch.file("keys.db"));
    let admin = SqliteConnection::connect_with(&options).await;
    let mut admin = admin.expect(SERVES);
    let count = |most: u128| {
        format!(
            "select count(*) from (with recursive counted(n) as \
             (select 1 union all select n + 1 from counted where n < {most}) select n from counted)"
        )
    };
    let counting = Instant::now();
    let many = AssertSqlSafe(count(50_000));
    admin.execute(many).await.expect(SERVES);
    let in_a_tenth = 50_000 * 100_000 / counting.elapsed().as_micros();
    let slow = format!(
        "create trigger slow before insert on tower_idempotency begin {}; end",
        count(in_a_tenth)
    );
    admin.execute(AssertSqlSafe(slow)).await.expect(SERVES);
    check_flood_costs_no_lease(flooded, other).await;
}

// ---- Connections to a server that no longer accepts writes ----

/// The server becomes a replica, and new connections lead to the promoted server.
async fn check_failover_is_followed<S: Store + Clone>(
    store: S,
    proxy: &Proxy,
    demote: impl AsyncFnOnce(),
    lead_on: impl FnOnce(),
) {
    warm(&store, proxy, 8).await;
    let (app, effects) = creating(sql::layer(store));
    demote().await;
    // Each backend applies the change separately, and may write until then.
    let mut served = 0;
    let key = within(Duration::from_secs(60), async {
        loop {
            let key = format!("k{served}");
            let response = send(&app, post("/orders", &key, "tea")).await;
            if response.status == StatusCode::SERVICE_UNAVAILABLE {
                return key;
            }
            assert_eq!(response.status, StatusCode::CREATED, "{}", response.text());
            served += 1;
        }
    })
    .await;
    lead_on();
    let response = within(
        Duration::from_secs(60),
        send(&app, post("/orders", &key, "tea")),
    )
    .await;
    assert_eq!(response.status, StatusCode::CREATED, "{}", response.text());
    assert_eq!(effects.count(), served + 1);
}

// F-165
#[tokio::test(flavor = "multi_thread")]
async fn read_only_server_is_left_in_postgres() {
    let demoted = PostgresServer::start(&[]);
    sql::postgres(&demoted, "failover").await;
    sql::postgres(postgres::shared(), "failover").await;
    let proxy = Proxy::start(demoted.address());
    let demote = async || {
        let mut admin = PgConnection::connect(&demoted.url()).await.unwrap();
        set(&mut admin, "default_transaction_read_only = on").await;
    };
    let lead_on = || proxy.set_upstream(postgres::shared().address());
    check_failover_is_followed(postgres_by(&proxy, "failover"), &proxy, demote, lead_on).await;
}

// F-165
#[tokio::test(flavor = "multi_thread")]
async fn read_only_server_is_left_in_mariadb() {
    let demoted = MariaDbServer::start(&[]);
    for server in [&demoted, mariadb::shared()] {
        sql::mariadb(server, "failover").await;
        // The user `app` may write in spite of `read_only`.
        let mut admin = MySqlConnection::connect(&server.url()).await.unwrap();
        let users = "create user if not exists plain@'%' identified by 'plain'";
        admin.execute(users).await.unwrap();
        let grant = "grant select, insert, update, delete on app.* to plain@'%'";
        admin.execute(grant).await.unwrap();
    }
    let proxy = Proxy::start(demoted.address());
    let demote = async || {
        let mut admin = MySqlConnection::connect(&demoted.url()).await.unwrap();
        admin.execute("set global read_only = 1").await.unwrap();
    };
    let lead_on = || proxy.set_upstream(mariadb::shared().address());
    let options = MySqlConnectOptions::new()
        .host("127.0.0.1")
        .port(proxy.address().port())
        .username("plain")
        .password("plain")
        .database("app");
    let store = MySqlStore::new(options).with_table("failover").unwrap();
    check_failover_is_followed(store, &proxy, demote, lead_on).await;
}

// ---- Unresponsive connections ----

/// Calls on connections of the old proxy get no reply any more. New connections through `proxy` succeed. The layer has
/// its default timeouts, which the test depends on.
async fn unresponsive_connections_are_closed_together<S: Store + Clone>(
    open: impl Fn(&Proxy) -> S,
    server: SocketAddr,
    connections: u64,
) {
    let old = Proxy::start(server);
    let proxy = &Proxy::start(old.address());
    let store = open(proxy);
    warm(&store, proxy, connections).await;
    let (app, effects) = creating(IdempotencyLayer::new(store));
    old.set(Mode::Hold);
    proxy.set_upstream(server);
    // All trials share the table.
    let ask = async |name: &str| {
        let key = format!("{name}-{}", proxy.address());
        bounded(send(&app, post("/orders", &key, "tea"))).await
    };
    let (first, second) = (ask("first").await, ask("second").await);
    assert_eq!(second.status, StatusCode::CREATED, "{}", second.text());
    assert_eq!(first.status, StatusCode::CREATED, "{}", first.text());
    assert_eq!(effects.count(), 2);
}

async fn closed_together_in_postgres(most: usize, connections: u64) {
    let (server, table) = (postgres::shared(), format!("silent_{most}"));
    sql::postgres(server, &table).await;
    let probe = async || probe_postgres(server).await;
    until_undisturbed(probe, async || {
        let open = |proxy: &Proxy| postgres_by(proxy, &table).with_connections(most);
        unresponsive_connections_are_closed_together(open, server.address(), connections).await;
    })
    .await;
}

async fn closed_together_in_mariadb(most: usize, connections: u64) {
    let (server, table) = (mariadb::shared(), format!("silent_{most}"));
    sql::mariadb(server, &table).await;
    let probe = async || probe_mariadb(server).await;
    until_undisturbed(probe, async || {
        let open = |proxy: &Proxy| mariadb_by(proxy, &table).with_connections(most);
        unresponsive_connections_are_closed_together(open, server.address(), connections).await;
    })
    .await;
}

// F-166
#[tokio::test(flavor = "multi_thread")]
async fn stalled_connections_are_closed_in_postgres() {
    closed_together_in_postgres(10, 8).await;
}

// F-166
#[tokio::test(flavor = "multi_thread")]
async fn stalled_connections_are_closed_in_mariadb() {
    closed_together_in_mariadb(10, 8).await;
}

// F-166
/// Renewals have one of the two connections reserved, so the call that was dropped had the only permit.
#[tokio::test(flavor = "multi_thread")]
async fn two_stalled_connections_are_closed_in_postgres() {
    closed_together_in_postgres(2, 1).await;
}

// F-166
#[tokio::test(flavor = "multi_thread")]
async fn two_stalled_connections_are_closed_in_mariadb() {
    closed_together_in_mariadb(2, 1).await;
}

/// A call without a reply for more than a second would count as a stall when it is dropped. But its connection breaks, so
/// the next call is not delayed.
async fn server_exit_is_not_stall<S: Store + Clone>(
    open: impl Fn(&Proxy) -> S,
    server: SocketAddr,
) {
    let is_undelayed = async || {
        // Only the connection of the first call leads through this proxy.
        let proxy = Proxy::start(server);
        let store = open(&proxy);
        warm(&store, &proxy, 1).await;
        proxy.set(Mode::Hold);
        let (caller, received) = (store.clone(), proxy.received());
        let call = tokio::spawn(async move { caller.acquire(&claim()).await });
        within(Duration::from_secs(60), async {
            while proxy.received() == received {
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
        sleep(Duration::from_millis(1_100)).await;
        // A stall would delay the next call until 1.5 s after the cut.
        let cut = Instant::now();
        proxy.set(Mode::Cut);
        assert!(bounded(call).await.expect("no panic").is_err());
        proxy.set(Mode::Pass);
        bounded(store.acquire(&claim())).await.expect("it runs");
        cut.elapsed() < Duration::from_secs(1)
    };
    let (began, mut undelayed) = (Instant::now(), 0);
    while undelayed < 3 {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "the next call is delayed"
        );
        let trials: [bool; 3] = tokio::join!(
            Box::pin(is_undelayed()),
            Box::pin(is_undelayed()),
            Box::pin(is_undelayed()),
        )
        .into();
        undelayed += trials.into_iter().filter(|it| *it).count();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn server_exit_is_not_stall_in_postgres() {
    let server = postgres::shared();
    sql::postgres(server, "goes").await;
    let open = |proxy: &Proxy| postgres_by(proxy, "goes").with_connections(2);
    server_exit_is_not_stall(open, server.address()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn server_exit_is_not_stall_in_mariadb() {
    let server = mariadb::shared();
    sql::mariadb(server, "goes").await;
    let open = |proxy: &Proxy| mariadb_by(proxy, "goes").with_connections(2);
    server_exit_is_not_stall(open, server.address()).await;
}

// F-166
/// A call that is dropped early provides no information about the other connections.
#[tokio::test(flavor = "multi_thread")]
async fn dropped_call_closes_only_own_connection() {
    let server = postgres::shared();
    sql::postgres(server, "dropped").await;
    for _ in 0..100 {
        let proxy = Proxy::start(server.address());
        let store = postgres_by(&proxy, "dropped");
        warm(&store, &proxy, 4).await;
        assert_eq!(proxy.counts().connections, 4);
        proxy.set(Mode::Hold);
        let began = Instant::now();
        let dropped = timeout(Duration::from_millis(50), store.acquire(&claim())).await;
        assert!(dropped.is_err());
        // The call was dropped late, so this trial proves nothing.
        if began.elapsed() > Duration::from_millis(200) {
            continue;
        }
        let mut calls = JoinSet::new();
        for _ in 0..4 {
            let store = store.clone();
            calls.spawn(async move { store.acquire(&claim()).await.map(drop) });
        }
        connect(&proxy, 5).await;
        sleep(Duration::from_millis(100)).await;
        proxy.set(Mode::Pass);
        for made in bounded(calls.join_all()).await {
            made.expect("the test server runs");
        }
        assert_eq!(proxy.counts().connections, 5);
        return;
    }
    panic!("no call was dropped early");
}

// F-167
/// The server closes idle connections after its timeout, and the next statement gets an error.
#[tokio::test(flavor = "multi_thread")]
async fn idle_closed_connections_are_left_in_mariadb() {
    let server = MariaDbServer::start(&[]);
    sql::mariadb(&server, "idle").await;
    let mut admin = MySqlConnection::connect(&server.url()).await.unwrap();
    // The timeout is longer than a stall, during which the server would close connections in use.
    admin.execute("set global wait_timeout = 6").await.unwrap();
    let proxy = Proxy::start(server.address());
    let store = mariadb_by(&proxy, "idle");
    warm(&store, &proxy, 8).await;
    let others = "select count(*) from information_schema.processlist
        where user = 'app' and id <> connection_id()";
    within(Duration::from_secs(60), async {
        while query_scalar::<_, i64>(others)
            .fetch_one(&mut admin)
            .await
            .unwrap()
            > 0
        {
            sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
    let (app, effects) = creating(sql::layer(store));
    let served = within(
        Duration::from_secs(60),
        send(&app, post("/orders", "k", "tea")),
    )
    .await;
    assert_eq!(served.status, StatusCode::CREATED, "{}", served.text());
    assert_eq!(effects.count(), 1);
}

// F-167
/// Each code is an error of a closed connection. A trigger raises it on existing connections, in place of servers that
/// the test does not have.
#[tokio::test(flavor = "multi_thread")]
async fn reported_closed_connections_are_left_in_mysql() {
    tokio::join!(
        assert_closed_connections_are_left(1159),
        assert_closed_connections_are_left(1160),
        assert_closed_connections_are_left(1927),
        assert_closed_connections_are_left(3032),
        assert_closed_connections_are_left(3169),
        assert_closed_connections_are_left(4031),
    );
}

async fn assert_closed_connections_are_left(code: u16) {
    let (server, table) = (mariadb::shared(), format!("closed_{code}"));
    sql::mariadb(server, &table).await;
    let proxy = Proxy::start(server.address());
    let store = mariadb_by(&proxy, &table);
    warm(&store, &proxy, 8).await;
    let mut admin = MySqlConnection::connect(&server.url()).await.expect(SERVES);
    let says = format!(
        "create trigger says_{code} before insert on {table} for each row
        if connection_id() < (select connection_id from {table}_before) then
          signal sqlstate '08S01' set mysql_errno = {code}; end if"
    );
    for setup in [
        format!("create table {table}_before (connection_id bigint)"),
        format!("insert into {table}_before select connection_id()"),
        says,
    ] {
        admin
            .execute(raw_sql(AssertSqlSafe(setup)))
            .await
            .expect(SERVES);
    }
    let (app, effects) = creating(sql::layer(store));
    let served = within(
        Duration::from_secs(60),
        send(&app, post("/orders", "k", "tea")),
    )
    .await;
    assert_eq!(served.status, StatusCode::CREATED, "{code}");
    assert_eq!(effects.count(), 1);
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

/// Makes commits wait for a standby that does not exist, as soon as this returns.
async fn stall(server: &PostgresServer, admin: &mut PgConnection) {
    permit_commits(admin).await;
    let table = "create table if not exists probe (n integer)";
    admin.execute(table).await.expect(SERVES);
    set(admin, "synchronous_standby_names = '*'").await;
    let waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'";
    let began = Instant::now();
    while query_scalar::<_, i64>(waiting)
        .fetch_one(&mut *admin)
        .await
        .expect(SERVES)
        == 0
    {
        assert!(began.elapsed() < Duration::from_secs(60), "it commits");
        let mut probe = PgConnection::connect(&server.url()).await.expect(SERVES);
        let insert = probe.execute("insert into probe values (1)");
        timeout(Duration::from_millis(300), insert).await.ok();
    }
}

async fn permit_commits(admin: &mut PgConnection) {
    set(admin, "synchronous_standby_names = ''").await;
}

// F-097
#[tokio::test(flavor = "multi_thread")]
async fn late_committed_lease_is_released() {
    let server = PostgresServer::start(&[]);
    sql::postgres(&server, "late").await;
    let options: PgConnectOptions = server.url().parse().expect("an URL");
    let store = PostgresStore::new(options.application_name("late_store"));
    let store = FaultInjector::new(store.with_table("late").expect("an identifier"));
    // Counts the releases that have returned, and delays none of them.
    let returned = Effects::default();
    let counted = returned.clone();
    let counting = Hold::new(move || {
        counted.happen();
        async {}
    });
    store.set_fault(Operation::Release, Fault::HoldReply(counting));
    let layer = IdempotencyLayer::new(store.clone())
        .with_orphan_policy(OrphanPolicy::Refuse)
        .with_lease_ttl(Ttl::from_secs(600));
    let (app, effects) = creating(layer);
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    stall(&server, &mut admin).await;
    let refused = bounded(send(&app, post("/orders", "k", "tea"))).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
    // The server has executed an acquire, and waits with its commit.
    let waiting = "select count(*) from pg_stat_activity
        where wait_event = 'SyncRep' and application_name = 'late_store'";
    within(Duration::from_secs(60), async {
        while query_scalar::<_, i64>(waiting)
            .fetch_one(&mut admin)
            .await
            .expect(SERVES)
            == 0
        {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    eventually("a release returns", || returned.count() > 0).await;
    // This release found no lease, because the acquire is not committed.
    permit_commits(&mut admin).await;
    // The key is free long before the lease would expire.
    let released = async {
        while send(&app, post("/orders", "k", "tea")).await.status != StatusCode::CREATED {
            sleep(Duration::from_millis(250)).await;
        }
    };
    within(Duration::from_secs(240), released).await;
    assert_eq!(effects.count(), 1);
    assert!(store.calls(Operation::Release) >= 2);
}

// F-168
#[tokio::test(flavor = "multi_thread")]
async fn stall_leaves_few_backends() {
    let server = PostgresServer::start(&[]);
    sql::postgres(&server, "stall").await;
    let probe = async || probe_postgres(&server).await;
    let trials = AtomicU64::new(0);
    until_undisturbed(probe, async || {
        stall_leaves_only_few_backends(&server, trials.fetch_add(1, SeqCst)).await;
    })
    .await;
}

async fn stall_leaves_only_few_backends(server: &PostgresServer, trial: u64) {
    let name = format!("store_{trial}");
    let options: PgConnectOptions = server.url().parse().expect("an URL");
    let store = PostgresStore::new(options.application_name(&name));
    let store = store.with_table("stall").expect("an identifier");
    let store = store.with_connections(2);
    let (app, effects) = creating(IdempotencyLayer::new(store));
    let mut admin = PgConnection::connect(&server.url()).await.expect(SERVES);
    stall(server, &mut admin).await;
    let (mut requests, began) = (JoinSet::new(), Instant::now());
    let mut most = 0;
    for n in 0..20 {
        let key = format!("{name}-{n}");
        let (app, req) = (app.clone(), post("/orders", &key, "tea"));
        requests.spawn(async move { send(&app, req).await.status });
        sleep(Duration::from_millis(750)).await;
        let count = "select count(*) from pg_stat_activity where application_name = $1";
        let count = query_scalar(count).bind(&name);
        let held: i64 = count.fetch_one(&mut admin).await.expect(SERVES);
        most = most.max(held);
    }
    // One connection each time that the permit is free: after the layer's timeout and the linger time.
    let turns = i64::try_from(began.elapsed().as_millis() / 3_500).expect("few") + 1;
    permit_commits(&mut admin).await;
    let refused = bounded(requests.join_all()).await;
    assert!(
        refused.iter().any(StatusCode::is_server_error),
        "the server did not stall"
    );
    assert!(most <= turns + 1, "{most} backends in {turns} turns");
    let after = format!("{name}-after");
    let served = async {
        while send(&app, post("/orders", &after, "tea")).await.status != StatusCode::CREATED {
            sleep(Duration::from_millis(100)).await;
        }
    };
    within(Duration::from_secs(60), served).await;
    assert!(effects.count() >= 1);
}

// ---- A server that completes no handshake ----

/// The server accepts connections and sends nothing, so there is no statement that could be cancelled.
async fn handshakes_that_hang_are_few<S: Store>(store: S, proxy: &Proxy) {
    proxy.set(Mode::Hold);
    let (app, effects) = creating(IdempotencyLayer::new(store));
    let (mut requests, began) = (JoinSet::new(), Instant::now());
    for n in 0..20 {
        let key = format!("k{n}-{}", proxy.address());
        let (app, req) = (app.clone(), post("/orders", &key, "tea"));
        requests.spawn(async move { send(&app, req).await.status });
        sleep(Duration::from_millis(750)).await;
    }
    // The store tries one connection each time that the permit is free. A caller has the permit for its remaining
    // timeout, of which at most 750 ms have passed, and then for the linger time.
    let turns = began.elapsed().as_millis() / 2_750 + 1;
    let tried = proxy.counts().connections;
    proxy.set(Mode::Pass);
    let refused = bounded(requests.join_all()).await;
    assert!(
        refused.iter().any(StatusCode::is_server_error),
        "the server did not stall"
    );
    assert!(
        u128::from(tried) <= turns,
        "{tried} handshakes in {turns} turns"
    );
    let after = format!("after-{}", proxy.address());
    let served = bounded(send(&app, post("/orders", &after, "tea"))).await;
    assert_eq!(served.status, StatusCode::CREATED, "{}", served.text());
    assert!(effects.count() >= 1);
}

// F-169
#[tokio::test(flavor = "multi_thread")]
async fn silent_server_gets_few_connections_in_postgres() {
    sql::postgres(postgres::shared(), "greets").await;
    let probe = async || probe_postgres(postgres::shared()).await;
    until_undisturbed(probe, async || {
        let proxy = Proxy::start(postgres::shared().address());
        let store = postgres_by(&proxy, "greets").with_connections(2);
        handshakes_that_hang_are_few(store, &proxy).await;
    })
    .await;
}

// F-169
#[tokio::test(flavor = "multi_thread")]
async fn silent_server_gets_few_connections_in_mariadb() {
    sql::mariadb(mariadb::shared(), "greets").await;
    let probe = async || probe_mariadb(mariadb::shared()).await;
    until_undisturbed(probe, async || {
        let proxy = Proxy::start(mariadb::shared().address());
        let store = mariadb_by(&proxy, "greets").with_connections(2);
        handshakes_that_hang_are_few(store, &proxy).await;
    })
    .await;
}
