//! Waiters on PostgreSQL: the notifications that each waiter receives, and the connections that they require.

use std::time::{Duration, Instant};

use tests::{
    barrier::within,
    proxy::{Mode, Proxy},
    servers::postgres::{self, PostgresServer},
    sql::{self, claim},
};
use tower_idempotency::store::Store;
use tower_idempotency_sqlx::{
    PostgresStore,
    sqlx::{self, AssertSqlSafe, Connection, Executor, PgConnection, postgres::PgListener},
};

/// The timeout of a waiter that is not notified.
const LONG: Duration = Duration::from_secs(600);
/// The time in which a notified waiter returns, even on a slow machine.
const SOON: Duration = Duration::from_secs(90);

/// Waits until a waiter has requested a notification.
async fn wait_until_awaited(admin: &mut PgConnection, table: &str) {
    let awaited = format!("select 1 from {table} where awaited");
    within(SOON, async {
        loop {
            let awaited = sqlx::query(AssertSqlSafe(awaited.as_str()));
            let row = awaited.fetch_optional(&mut *admin).await;
            if row.expect("the test server runs").is_some() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// The store sends a notification only if a waiter waits for it, because the server queues notifications.
#[tokio::test(flavor = "multi_thread")]
async fn postgres_notifies_only_awaited_keys() {
    let url = postgres::shared().url();
    let store = || async { sql::postgres(postgres::shared(), "notified").await };
    // The two stores act like two processes.
    let (holding, waiting) = (store().await, store().await);
    let mut listener = PgListener::connect(&url).await.unwrap();
    listener.listen("notified").await.unwrap();
    let (alone, awaited) = (claim(), claim());
    for claim in [&alone, &awaited] {
        holding.acquire(claim).await.unwrap();
    }
    let id = awaited.id;
    let waiter = tokio::spawn(async move {
        waiting.wait_for_change(&id, LONG).await;
    });
    let mut admin = PgConnection::connect(&url).await.unwrap();
    wait_until_awaited(&mut admin, "notified").await;
    for claim in [&alone, &awaited] {
        let lease = claim.lease_ref(1);
        holding
            .complete(&lease, "answer".into(), claim.orphan_retention)
            .await
            .unwrap();
    }
    within(SOON, waiter).await.unwrap();
    let notification = within(SOON, listener.recv()).await.unwrap();
    assert!(
        notification.payload().starts_with(&awaited.id.to_string()),
        "{notification:?}"
    );
    let more = tokio::time::timeout(Duration::from_millis(200), listener.recv()).await;
    assert!(more.is_err(), "{more:?}");
}

// F-057
#[tokio::test(flavor = "multi_thread")]
async fn waiter_wakes_after_listener_loss() {
    let server = PostgresServer::start(&[]);
    let store = sql::postgres(&server, "waited").await;
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    let (id, waiting) = (claim.id, store.clone());
    let waiter = tokio::spawn(async move {
        waiting.wait_for_change(&id, LONG).await;
    });
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    let listening = "from pg_stat_activity where query like 'LISTEN%'";
    let kill = format!("select pg_terminate_backend(pid) {listening}");
    let mut killed = 0;
    let deadline = Instant::now() + SOON;
    while killed == 0 {
        let kill = AssertSqlSafe(kill.as_str());
        killed = admin.fetch_all(sqlx::raw_sql(kill)).await.unwrap().len();
        assert!(Instant::now() < deadline, "no connection listens");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let lease = claim.lease_ref(1);
    store
        .complete(&lease, "answer".into(), claim.orphan_retention)
        .await
        .unwrap();
    within(SOON, waiter).await.unwrap();
}

// F-057
/// The listener stalls as after an idle timeout in the network. The test runs on one thread, whose clock can be
/// advanced.
#[tokio::test]
async fn waiter_wakes_after_listener_stall() {
    let server = postgres::shared();
    let old = Proxy::start(server.address());
    let proxy = Proxy::start(old.address());
    let url = format!("postgres://app@{}/postgres", proxy.address());
    let store = sql::postgres(server, "stalled_listener").await;
    let store = store.with_listener(url.parse().unwrap());
    // No process holds this key, so the call returns when the store listens to the channel.
    let nobodys = sql::claim().id;
    store
        .wait_for_change(&nobodys, Duration::from_secs(60))
        .await;
    old.set(Mode::Hold);
    proxy.set_upstream(server.address());
    // Each advance of the clock cuts off calls in flight. Each round therefore leaves more time for a new connection.
    let mut time = Duration::from_millis(100);
    while proxy.counts().connections < 2 && time < Duration::from_secs(20) {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(31)).await;
        tokio::time::resume();
        let began = Instant::now();
        while proxy.counts().connections < 2 && began.elapsed() < time {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        time = time * 3 / 2;
    }
    assert!(
        proxy.counts().connections > 1,
        "the listener does not reconnect"
    );
    store
        .wait_for_change(&nobodys, Duration::from_secs(60))
        .await;
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    let (id, waiting) = (claim.id, store.clone());
    let waiter = tokio::spawn(async move {
        waiting.wait_for_change(&id, LONG).await;
    });
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    wait_until_awaited(&mut admin, "stalled_listener").await;
    assert!(!waiter.is_finished(), "the request is in progress");
    let lease = claim.lease_ref(1);
    store
        .complete(&lease, "answer".into(), claim.orphan_retention)
        .await
        .unwrap();
    within(SOON, waiter).await.unwrap();
}

/// A waiter that queries again within the time of one statement requests no notification: each request would be cut
/// off, and its connection closed.
#[tokio::test(flavor = "multi_thread")]
async fn early_waiter_queries_open_no_connections() {
    sql::postgres(postgres::shared(), "early").await;
    let proxy = Proxy::start(postgres::shared().address());
    let url = format!("postgres://app@{}/postgres", proxy.address());
    let store = PostgresStore::from_url(&url).unwrap();
    let store = store.with_table("early").unwrap();
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    // No process holds this key, so the call returns when the store listens to the channel.
    let nobodys = sql::claim().id;
    store
        .wait_for_change(&nobodys, Duration::from_secs(60))
        .await;
    let before = proxy.counts().connections;
    let slow = Duration::from_millis(40);
    proxy.set(Mode::Delay {
        up: slow,
        down: slow,
    });
    for _ in 0..5 {
        store
            .wait_for_change(&claim.id, Duration::from_millis(25))
            .await;
    }
    assert_eq!(proxy.counts().connections, before);
    let lease = claim.lease_ref(1);
    store.renew(&lease, claim.lease).await.unwrap();
    assert_eq!(proxy.counts().connections, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_store_closes_connections() {
    let server = PostgresServer::start(&[]);
    let store = sql::postgres(&server, "waited").await;
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    let waiting = tokio::spawn({
        let (store, id) = (store.clone(), claim.id);
        async move { store.wait_for_change(&id, Duration::from_secs(60)).await }
    });
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    let others = "select 1 from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()";
    let deadline = Instant::now() + SOON;
    while admin.fetch_all(others).await.unwrap().len() != 2 {
        assert!(Instant::now() < deadline, "no connection listens");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    waiting.abort();
    // The waiter is cut off, or has already queried, as all waiters do when a listener begins.
    let _ = waiting.await;
    drop(store);
    let deadline = Instant::now() + SOON;
    while !admin.fetch_all(others).await.unwrap().is_empty() {
        assert!(Instant::now() < deadline, "connections stay open");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
