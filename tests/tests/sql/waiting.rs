//! Waiters on PostgreSQL: who is told what, and what connections that takes.

use std::time::{Duration, Instant};

use tests::{
    proxy::{Mode, Proxy},
    servers::postgres::{self, PostgresServer},
    sql::{self, claim},
};
use tower_idempotency::store::Store;
use tower_idempotency_sqlx::{
    PostgresStore,
    sqlx::{self, AssertSqlSafe, Connection, Executor, PgConnection, postgres::PgListener},
};

/// Nobody is told what nobody waits for: on the server, notifications stand in line.
#[tokio::test(flavor = "multi_thread")]
async fn postgres_notifies_of_what_somebody_waits_for_and_of_nothing_else() {
    let url = postgres::shared().url();
    let store = || async { sql::postgres(postgres::shared(), "told").await };
    // As if they were of two processes.
    let (holding, waiting) = (store().await, store().await);
    let mut ear = PgListener::connect(&url).await.unwrap();
    ear.listen("told").await.unwrap();
    let (alone, awaited) = (claim(), claim());
    for claim in [&alone, &awaited] {
        holding.acquire(claim).await.unwrap();
    }
    let id = awaited.id;
    let began = Instant::now();
    let waiter = tokio::spawn(async move {
        waiting.changed(&id, Duration::from_secs(20)).await;
    });
    let mut admin = PgConnection::connect(&url).await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let awaited = sqlx::query("select 1 from told where awaited");
        if awaited.fetch_optional(&mut admin).await.unwrap().is_some() {
            break;
        }
        assert!(Instant::now() < deadline, "nobody waits");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for claim in [&alone, &awaited] {
        let lease = claim.lease_ref(1);
        holding
            .complete(&lease, "answer".into(), claim.keep)
            .await
            .unwrap();
    }
    waiter.await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(10), "woken late");
    let told = ear.recv().await.unwrap();
    assert!(
        told.payload().starts_with(&awaited.id.to_string()),
        "{told:?}"
    );
    let more = tokio::time::timeout(Duration::from_millis(200), ear.recv()).await;
    assert!(more.is_err(), "{more:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_woken_though_the_connection_that_listens_was_lost() {
    let server = PostgresServer::start(&[]);
    let store = sql::postgres(&server, "waited").await;
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    let (id, waiting) = (claim.id, store.clone());
    let began = Instant::now();
    let waiter = tokio::spawn(async move {
        waiting.changed(&id, Duration::from_secs(30)).await;
    });
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    let listening = "from pg_stat_activity where query like 'LISTEN%'";
    let kill = format!("select pg_terminate_backend(pid) {listening}");
    let mut killed = 0;
    let deadline = Instant::now() + Duration::from_secs(10);
    while killed == 0 {
        let kill = AssertSqlSafe(kill.as_str());
        killed = admin.fetch_all(sqlx::raw_sql(kill)).await.unwrap().len();
        assert!(Instant::now() < deadline, "nobody listens");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let lease = claim.lease_ref(1);
    store
        .complete(&lease, "answer".into(), claim.keep)
        .await
        .unwrap();
    waiter.await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(15), "woken late");
}

/// As after it was idle for longer than something on the way likes. On one thread, whose clock can be put forward.
#[tokio::test]
async fn a_waiter_is_woken_though_the_connection_that_listens_fell_silent() {
    let server = postgres::shared();
    let old = Proxy::start(server.address());
    let way = Proxy::start(old.address());
    let url = format!("postgres://app@{}/postgres", way.address());
    let store = sql::postgres(server, "silent_ear").await;
    let store = store.with_listener(url.parse().unwrap());
    // Nobody has this one: it ends once the channel is listened to.
    let nobodys = sql::claim().id;
    store.changed(&nobodys, Duration::from_secs(60)).await;
    old.set(Mode::Hold);
    way.lead_to(server.address());
    for _ in 0..20 {
        if way.counts().connections > 1 {
            break;
        }
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(31)).await;
        tokio::time::resume();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    store.changed(&nobodys, Duration::from_secs(60)).await;
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    let (id, waiting) = (claim.id, store.clone());
    let began = Instant::now();
    let waiter = tokio::spawn(async move {
        waiting.changed(&id, Duration::from_secs(30)).await;
    });
    // By then it has looked, and waits to be told.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!waiter.is_finished(), "it is in progress");
    let lease = claim.lease_ref(1);
    store
        .complete(&lease, "answer".into(), claim.keep)
        .await
        .unwrap();
    waiter.await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(15), "woken late");
}

/// Whoever looks again after less than a statement may take asks for no notification: it would be cut off each time, and
/// its connection closed.
#[tokio::test(flavor = "multi_thread")]
async fn early_looks_of_a_waiter_cost_no_connections() {
    sql::postgres(postgres::shared(), "early").await;
    let way = Proxy::start(postgres::shared().address());
    let url = format!("postgres://app@{}/postgres", way.address());
    let store = PostgresStore::from_url(&url).unwrap();
    let store = store.with_table("early").unwrap();
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    // Nobody has this one: it ends once the channel is listened to.
    let nobodys = sql::claim().id;
    store.changed(&nobodys, Duration::from_secs(60)).await;
    let before = way.counts().connections;
    let slow = Duration::from_millis(40);
    way.set(Mode::Delay {
        up: slow,
        down: slow,
    });
    for _ in 0..5 {
        store.changed(&claim.id, Duration::from_millis(25)).await;
    }
    assert_eq!(way.counts().connections, before);
    let lease = claim.lease_ref(1);
    store.renew(&lease, claim.lease).await.unwrap();
    assert_eq!(way.counts().connections, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_dropped_leaves_no_connection_behind() {
    let server = PostgresServer::start(&[]);
    let store = sql::postgres(&server, "waited").await;
    let claim = claim();
    store.acquire(&claim).await.unwrap();
    let waiting = tokio::spawn({
        let (store, id) = (store.clone(), claim.id);
        async move { store.changed(&id, Duration::from_secs(60)).await }
    });
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    let others = "select 1 from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()";
    let deadline = Instant::now() + Duration::from_secs(10);
    while admin.fetch_all(others).await.unwrap().len() != 2 {
        assert!(Instant::now() < deadline, "nobody listens");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    waiting.abort();
    // Cut off, or it has looked up already, as a listener has all do when it begins.
    let _ = waiting.await;
    drop(store);
    let deadline = Instant::now() + Duration::from_secs(10);
    while !admin.fetch_all(others).await.unwrap().is_empty() {
        assert!(Instant::now() < deadline, "connections stay open");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
