//! Handlers' transactions with lost replies, other isolation levels, other databases, and concurrent acquires.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tests::database::pool_options;

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::{Request, StatusCode};
use tests::{
    Effects, TestResponse, app,
    barrier::within,
    created,
    database::{self, TestDatabase, TestDialect},
    post,
    proxy::{ConnectionEnd, Fault, Proxy},
    scratch::Scratch,
    send,
    servers::{mariadb, pgbouncer::PgBouncer, postgres},
    sql::{self, claim, duplicate, retried},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::{
    Lease, Ttl,
    store::{Acquired, Claim, OrphanPolicy},
};
use tower_idempotency_sqlx::{
    Checkpoint, MySqlStore, PostgresStore, TransactionErrorKind as Kind,
    sqlx::{ConnectOptions, Executor, Pool, pool::PoolConnection, postgres::PgConnectOptions},
};

/// Returns a service that charges, and that reports a failed commit in its response.
fn bank<S: TestDialect>(database: &TestDatabase<S>) -> (Router, Effects) {
    bank_with_timeout(database, || sleep(Duration::from_secs(60)))
}

/// Like [`bank`], but a handler stops waiting when its `patience` resolves.
fn bank_with_timeout<S, P, F>(database: &TestDatabase<S>, patience: P) -> (Router, Effects)
where
    S: TestDialect,
    P: Fn() -> F + Clone + Send + Sync + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let database = database.clone();
    let layer = sql::layer(database.store.clone());
    app(layer, move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let (database, gives_up) = (database.clone(), patience());
        async move {
            let charged = tokio::select! {
                charged = charge(&database, &lease, n) => charged,
                () = gives_up => return failed("hung".to_owned()),
            };
            charged.unwrap_or_else(|kind| failed(format!("{kind:?}")))
        }
    })
}

async fn charge<S: TestDialect>(
    database: &TestDatabase<S>,
    lease: &Lease,
    n: u64,
) -> Result<Response, Kind> {
    let mut tx = database.begin(lease).await.map_err(|error| error.kind())?;
    let effect = S::run(&mut tx, database.effect("charge", 1, n)).await;
    effect.map_err(|_| Kind::Database)?;
    match tx.commit(created(n)).await {
        Ok(res) => Ok(res.into_response()),
        Err(error) => match error.into_output() {
            Ok(res) => Ok(res.into_response()),
            Err(error) => Err(error.kind()),
        },
    }
}

fn failed(why: String) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, why).into_response()
}

fn order() -> Request<Body> {
    post("/orders", "k", "tea")
}

/// Returns database whose handlers use a pool behind the proxy. The store connects directly.
async fn postgres_behind(proxy: &Proxy, table: &str) -> TestDatabase<PostgresStore> {
    let direct = database::on_postgres(table).await;
    let url = format!("postgres://app@{}/postgres", proxy.address());
    let pool = pool_options::<tower_idempotency_sqlx::sqlx::Postgres>()
        .connect_lazy(&url)
        .expect("an URL");
    TestDatabase { pool, ..direct }
}

async fn mariadb_behind(proxy: &Proxy, table: &str) -> TestDatabase<MySqlStore> {
    let direct = database::on_mariadb(table).await;
    let url = mariadb::url(proxy.address());
    let pool = pool_options::<tower_idempotency_sqlx::sqlx::MySql>()
        .connect_lazy(&url)
        .expect("an URL");
    TestDatabase { pool, ..direct }
}

// ---- Lost replies ----

/// Returns a bank, and its first response after a lost reply to the commit. `pool` creates the pool of handlers with
/// this patience. A handler stops waiting this long after the reply was lost. If it stopped before that, its commit
/// would lose the reply later.
async fn response_after_lost_reply<S: TestDialect>(
    database: &TestDatabase<S>,
    proxy: &Arc<Proxy>,
    then: ConnectionEnd,
    pool: impl Fn(Duration) -> Pool<S::Database>,
) -> (Router, Effects, TestResponse) {
    for patience in database::PATIENCE {
        database.admin("delete from {table}").await;
        database.admin("delete from {table}_effects").await;
        let pool = pool(patience);
        let database = TestDatabase {
            pool,
            ..database.clone()
        };
        let (hits, lost) = (proxy.injected_faults(), Arc::clone(proxy));
        let (app, executions) = bank_with_timeout(&database, move || {
            let lost = Arc::clone(&lost);
            async move {
                while lost.injected_faults() == hits {
                    sleep(Duration::from_millis(5)).await;
                }
                sleep(patience).await;
            }
        });
        proxy.once(Fault::reply_to("COMMIT"), then);
        let first = within(Duration::from_secs(120), send(&app, order())).await;
        if proxy.injected_faults() > hits {
            return (app, executions, first);
        }
    }
    panic!("no handler reached its commit");
}

/// The reply is lost, and the layer queries the store: the client receives the committed response.
async fn lost_commit_reply_is_looked_up<S: TestDialect>(
    database: TestDatabase<S>,
    proxy: Arc<Proxy>,
) {
    for then in [ConnectionEnd::Cut, ConnectionEnd::Hang] {
        let pool = |_| database.pool.clone();
        let (app, executions, first) =
            response_after_lost_reply(&database, &proxy, then, pool).await;
        assert_eq!(first.status, StatusCode::CREATED, "{then:?}: {first:?}");
        let retry = send(&app, order()).await;
        assert!(retry.is_replay() && retry.body == first.body, "{retry:?}");
        assert_eq!((database.count().await, executions.count()), (1, 1));
    }
}

/// The pool gets its permit back if another party closes the connection. The pool itself would wait indefinitely.
async fn hanging_connection_returns_pool_permit<S: TestDialect>(
    database: TestDatabase<S>,
    proxy: Arc<Proxy>,
) {
    let connect = database.pool.connect_options();
    let pool = |patience| {
        let pool = database::with_timeouts(pool_options(), patience).max_connections(1);
        pool.connect_lazy_with((*connect).clone())
    };
    let (app, executions, first) =
        response_after_lost_reply(&database, &proxy, ConnectionEnd::Hang, pool).await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    within(Duration::from_secs(120), async {
        while send(&app, post("/orders", "next", "tea")).await.status != StatusCode::CREATED {}
    })
    .await;
    assert_eq!(database.count().await, 2);
    assert!(executions.count() >= 2);
}

/// The commit never arrives: nothing is committed, and the retry executes.
async fn lost_commit_commits_nothing<S: TestDialect>(database: TestDatabase<S>, proxy: Arc<Proxy>) {
    // The other statement writes the record.
    for (needle, kind) in [("COMMIT", "Unknown"), ("{\"execution\":", "Database")] {
        database.admin("delete from {table}").await;
        database.admin("delete from {table}_effects").await;
        let (app, executions) = bank(&database);
        proxy.once(Fault::request(needle), ConnectionEnd::Cut);
        let first = send(&app, order()).await;
        assert_eq!(first.text(), kind, "{needle}: {first:?}");
        assert_eq!(database.count().await, 0, "{needle}");
        let retry = send(&app, order()).await;
        assert_eq!(retry.status, StatusCode::CREATED);
        assert!(send(&app, order()).await.is_replay());
        assert_eq!((database.count().await, executions.count()), (1, 2));
    }
}

async fn lost_checkpoint_reply_is_looked_up<S: TestDialect>(
    database: TestDatabase<S>,
    proxy: Arc<Proxy>,
) {
    let (bank, at) = (database.clone(), Arc::clone(&proxy));
    let layer = sql::layer(database.store.clone());
    let (app, _) = app(layer, move |_, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let key = req.headers()["idempotency-key"].to_str().expect("text");
        let (database, proxy, key) = (bank.clone(), Arc::clone(&at), key.to_owned());
        async move {
            let phase = async |n| {
                let mut tx = database.begin(&lease).await.expect("a transaction");
                let effect = S::run(&mut tx, database.effect(&key, 1, n)).await;
                effect.expect("the effect");
                let committed = tx.checkpoint("phase", &n).await;
                committed.map_err(|error| error.kind())
            };
            // The lookup fails if the server has not ended the transaction of the lost connection yet.
            let inconclusive = || failed("inconclusive".to_owned());
            proxy.once(Fault::reply_to("COMMIT"), ConnectionEnd::Cut);
            match phase(1).await {
                Err(Kind::Unknown) => return inconclusive(),
                committed => assert_eq!(committed, Ok(()), "the commit arrived"),
            }
            proxy.once(Fault::request("COMMIT"), ConnectionEnd::Cut);
            match phase(2).await {
                Err(Kind::Unknown) => return inconclusive(),
                lost => assert_eq!(lost, Err(Kind::Database), "the commit did not arrive"),
            }
            // The checkpoint is the same as the stored one: the store cannot determine if the commit arrived.
            proxy.once(Fault::request("COMMIT"), ConnectionEnd::Cut);
            assert_eq!(phase(1).await, Err(Kind::Unknown));
            // The read fails if the server has not ended that transaction yet.
            let Ok(at) = Checkpoint::last(&database.store, &lease).await else {
                return inconclusive();
            };
            let at = at.expect("a checkpoint");
            assert_eq!(
                (at.name(), at.data::<u64>().expect("a number")),
                ("phase", 1)
            );
            "done".into_response()
        }
    });
    let began = Instant::now();
    for trial in 0.. {
        let (key, faults) = (format!("trial-{trial}"), proxy.injected_faults());
        let response = send(&app, post("/orders", &key, "tea")).await;
        if response.text() == "done" {
            let effects = database.effects().await;
            let phases = effects.iter().filter(|effect| effect.key == key).count();
            assert_eq!((phases, proxy.injected_faults() - faults), (1, 3));
            return;
        }
        assert_eq!(response.text(), "inconclusive", "{response:?}");
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "no trial is conclusive"
        );
    }
}

/// The call is dropped while it commits. A repetition is refused until the handler has read the checkpoint. That read waits for
/// the commit.
async fn phase_is_not_repeated<S: TestDialect>(database: TestDatabase<S>, proxy: Arc<Proxy>) {
    let (bank, at) = (database.clone(), Arc::clone(&proxy));
    let layer = sql::layer(database.store.clone());
    let (app, _) = app(layer, move |_, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let key = req.headers()["idempotency-key"].to_str().expect("text");
        let (database, proxy, key) = (bank.clone(), Arc::clone(&at), key.to_owned());
        async move {
            let phase = async |n: u64| {
                let mut tx = database.begin(&lease).await.expect("a transaction");
                let effect = S::run(&mut tx, database.effect(&key, 1, n)).await;
                effect.expect("the effect");
                let committed = tx.checkpoint("phase", &n).await;
                committed.map_err(|error| error.kind())
            };
            let (hits, arrives) = (proxy.injected_faults(), key == "arrives");
            let fault = if arrives {
                Fault::reply_to("COMMIT")
            } else {
                Fault::request("COMMIT")
            };
            proxy.once(fault, ConnectionEnd::Hang);
            let sent = async {
                while proxy.injected_faults() == hits {
                    sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::select! {
                committed = phase(1) => panic!("the reply is lost: {committed:?}"),
                () = sent => {}
            }
            assert_eq!(phase(2).await, Err(Kind::Unknown));
            let read = async || Checkpoint::last(&database.store, &lease).await;
            if !arrives {
                let error = read().await.expect_err("the transaction is open");
                assert_eq!(error.kind(), Kind::Database);
                assert_eq!(phase(2).await, Err(Kind::Unknown));
                return failed("open".to_owned());
            }
            let last = loop {
                match read().await {
                    Ok(last) => break last.expect("a checkpoint"),
                    // The server was slow to commit.
                    Err(error) => assert_eq!(error.kind(), Kind::Database),
                }
            };
            assert_eq!(last.data::<u64>().expect("a number"), 1);
            assert_eq!(phase(3).await, Ok(()));
            assert_eq!(phase(4).await, Ok(()));
            failed("resolved".to_owned())
        }
    });
    for (key, expected) in [("arrives", "resolved"), ("lost", "open")] {
        let request = send(&app, post("/orders", key, "tea"));
        let response = within(Duration::from_secs(120), request).await;
        assert_eq!(response.text(), expected, "{response:?}");
    }
    let mut phases: Vec<_> = database.effects().await.iter().map(|it| it.n).collect();
    phases.sort_unstable();
    assert_eq!(phases, [1, 3, 4]);
}

macro_rules! behind_a_proxy {
    ($($case:ident)*) => {
        mod on_postgres {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let proxy = super::Proxy::start(super::postgres::shared().address());
                    let table: String = stringify!($case).chars().take(36).collect();
                    super::$case(super::postgres_behind(&proxy, &table).await, super::Arc::new(proxy)).await;
                }
            )*
        }

        mod on_mariadb {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let proxy = super::Proxy::start(super::mariadb::shared().address());
                    let table: String = stringify!($case).chars().take(36).collect();
                    super::$case(super::mariadb_behind(&proxy, &table).await, super::Arc::new(proxy)).await;
                }
            )*
        }
    };
}

behind_a_proxy! {
    // F-156
    hanging_connection_returns_pool_permit
    // F-146, F-156
    lost_commit_reply_is_looked_up
    // F-146
    lost_commit_commits_nothing
    lost_checkpoint_reply_is_looked_up
    // F-997
    phase_is_not_repeated
}

/// A deferred trigger raises an exception at the commit of the first phase, so nothing of it is written.
#[tokio::test(flavor = "multi_thread")]
async fn rejected_phase_can_be_repeated() {
    let database = database::on_postgres("rejected_phase").await;
    database.reject_first_commit().await;
    let bank = database.clone();
    let layer = sql::layer(database.store.clone());
    let (app, _) = app(layer, move |_, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let database = bank.clone();
        async move {
            let phase = async |n: u64| {
                let mut tx = database.begin(&lease).await.expect("a transaction");
                let effect = PostgresStore::run(&mut tx, database.effect("phase", 1, n)).await;
                effect.expect("the effect");
                let committed = tx.checkpoint("phase", &n).await;
                committed.map_err(|error| error.kind())
            };
            assert_eq!(phase(1).await, Err(Kind::Database));
            assert_eq!(phase(2).await, Ok(()));
            failed("done".to_owned())
        }
    });
    assert_eq!(send(&app, order()).await.text(), "done");
    assert_eq!(database.count().await, 1);
}

// ---- Isolation ----

/// At each default level of the pool, the lease is renewed during the transaction, and the commit succeeds.
async fn renewals_keep_fence<S: TestDialect>(database: TestDatabase<S>, direct: TestDatabase<S>) {
    let layer = sql::layer(database.store.clone()).with_lease_ttl(Ttl::from_millis(600));
    let bank = database.clone();
    let (app, executions) = app(layer, move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let (database, direct) = (bank.clone(), direct.clone());
        async move {
            let mut tx = database.begin(&lease).await.expect("a transaction");
            S::run(&mut tx, database.effect("charge", 1, n))
                .await
                .expect("the effect");
            let ends = async || {
                let ends = format!(
                    "select 'ends', lease_ends, generation from {}",
                    direct.table
                );
                S::rows(&direct.pool, ends).await[0].pid
            };
            let before = ends().await;
            within(Duration::from_secs(60), async {
                while ends().await == before {
                    sleep(Duration::from_millis(20)).await;
                }
            })
            .await;
            tx.commit(created(n))
                .await
                .expect("a commit")
                .into_response()
        }
    });
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert!(send(&app, order()).await.is_replay());
    assert_eq!((database.count().await, executions.count()), (1, 1));
}

// F-142
#[tokio::test(flavor = "multi_thread")]
async fn every_isolation_level_on_postgres() {
    for level in ["read uncommitted", "repeatable read", "serializable"] {
        let table = format!("at_{}", level.replace(' ', "_"));
        let database = database::on_postgres(&table).await;
        let options: PgConnectOptions = postgres::shared().url().parse().expect("an URL");
        let options = options.options([
            ("default_transaction_isolation", level),
            ("default_transaction_read_only", "on"),
        ]);
        let pool = pool_options::<tower_idempotency_sqlx::sqlx::Postgres>()
            .connect_lazy_with(options.disable_statement_logging());
        let direct = database.clone();
        renewals_keep_fence(TestDatabase { pool, ..database }, direct).await;
    }
}

// F-142
#[tokio::test(flavor = "multi_thread")]
async fn every_isolation_level_on_mariadb() {
    for level in ["read uncommitted", "repeatable read", "serializable"] {
        let table = format!("at_{}", level.replace(' ', "_"));
        let database = database::on_mariadb(&table).await;
        let setup = format!("set session transaction isolation level {level}, read only");
        let pool = pool_options::<tower_idempotency_sqlx::sqlx::MySql>()
            .after_connect(move |connection, _| {
                let setup = setup.clone();
                Box::pin(async move {
                    let setup = tower_idempotency_sqlx::sqlx::AssertSqlSafe(setup);
                    connection.execute(setup).await?;
                    Ok(())
                })
            })
            .connect_lazy(&mariadb::shared().url());
        let pool = pool.expect("an URL");
        let direct = database.clone();
        renewals_keep_fence(TestDatabase { pool, ..database }, direct).await;
    }
}

// F-140
/// PgBouncer is in transaction mode, with a server connection for each transaction.
#[tokio::test(flavor = "multi_thread")]
async fn pool_behind_pgbouncer() {
    let server = postgres::shared();
    let bouncer = PgBouncer::start(server, 2);
    let database = database::on_postgres("behind_pgbouncer").await;
    let options: PgConnectOptions = bouncer.url().parse().expect("an URL");
    let options = options.statement_cache_capacity(0);
    let pool = pool_options::<tower_idempotency_sqlx::sqlx::Postgres>().connect_lazy_with(options);
    let direct = database.clone();
    renewals_keep_fence(TestDatabase { pool, ..database }, direct).await;
}

/// A deferred constraint fails at the commit. Nothing is written, and the response reports the database's error.
#[tokio::test(flavor = "multi_thread")]
async fn constraint_failure_at_commit() {
    let database = database::on_postgres("deferred").await;
    let unique = "alter table {table}_effects add unique (effect) deferrable initially deferred";
    database.admin(unique).await;
    database
        .admin("insert into {table}_effects values ('charge', 0, 0)")
        .await;
    let (app, _) = bank(&database);
    assert_eq!(send(&app, order()).await.text(), "Database");
    assert_eq!(database.count().await, 1);
    database.admin("delete from {table}_effects").await;
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
}

/// Starts a proxy for the handler's pool. The proxy rolls the first commit back, and replies with `error`.
async fn refusing_the_first_commit(error: &'static [u8]) -> SocketAddr {
    let (server, refused) = (mariadb::shared().address(), AtomicBool::new(false));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound socket");
    tokio::spawn(async move {
        let refused = Arc::new(refused);
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(server).await.expect("a server");
            let refused = Arc::clone(&refused);
            tokio::spawn(async move {
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                let (mut question, mut response) = (Vec::new(), Vec::new());
                let mut refuses = false;
                // The protocol alternates between request and reply. A piece is a message, or a part of a long one.
                loop {
                    tokio::select! {
                        Ok(1..) = from_client.read_buf(&mut question) => {
                            let is_commit = question == b"\x07\0\0\0\x03COMMIT";
                            refuses = is_commit && !refused.swap(true, SeqCst);
                            let forwarded = if refuses { b"\x09\0\0\0\x03ROLLBACK" } else { &*question };
                            to_server.write_all(forwarded).await.expect("a server");
                            question.clear();
                        }
                        Ok(1..) = from_server.read_buf(&mut response) => {
                            let reply = if refuses { error } else { &*response };
                            to_client.write_all(reply).await.ok();
                            response.clear();
                        }
                        else => break,
                    }
                }
            });
        }
    });
    address
}

// F-147
/// Group replication certifies a transaction at its commit. The test has no such group, so a proxy sends the error.
#[tokio::test(flavor = "multi_thread")]
async fn uncertified_commit_writes_nothing_in_mysql() {
    // Error 3101 with SQLSTATE 40000.
    let refusal = b"\x0a\0\0\x01\xff\x1d\x0c#40000.";
    let database = database::on_mariadb("certified").await;
    let url = mariadb::url(refusing_the_first_commit(refusal).await);
    let pool = pool_options::<tower_idempotency_sqlx::sqlx::MySql>()
        .connect_lazy(&url)
        .expect("an URL");
    let (app, executions) = bank(&TestDatabase {
        pool,
        ..database.clone()
    });
    assert_eq!(send(&app, order()).await.text(), "Database");
    assert_eq!(database.count().await, 0);
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert_eq!((database.count().await, executions.count()), (1, 2));
}

// ---- Other databases ----

async fn pool_of_other_database_begins_nothing<S: TestDialect>(
    database: TestDatabase<S>,
    other: TestDatabase<S>,
) {
    let elsewhere = TestDatabase {
        pool: other.pool.clone(),
        ..database.clone()
    };
    let (app, _) = bank(&elsewhere);
    assert_eq!(
        send(&app, order()).await.text(),
        "NoEntry",
        "an empty table"
    );
    other.admin("drop table {table}").await;
    assert_eq!(send(&app, order()).await.text(), "NoEntry", "no table");
    assert_eq!((database.count().await, other.count().await), (0, 0));
}

// F-172
#[tokio::test(flavor = "multi_thread")]
async fn another_database_of_postgres() {
    let database = database::on_postgres("elsewhere").await;
    database.admin("create database other").await;
    let url = postgres::shared().url().replace("/postgres", "/other");
    let pool = pool_options::<tower_idempotency_sqlx::sqlx::Postgres>()
        .connect_lazy(&url)
        .expect("an URL");
    let other = TestDatabase::open(&url, pool, "elsewhere").await;
    pool_of_other_database_begins_nothing(database, other).await;
}

// F-172
#[tokio::test(flavor = "multi_thread")]
async fn another_database_of_mariadb() {
    let database = database::on_mariadb("elsewhere").await;
    database.admin("create database other").await;
    let url = mariadb::url(mariadb::shared().address());
    let url = format!("{}other", url.trim_end_matches("app"));
    let pool = pool_options::<tower_idempotency_sqlx::sqlx::MySql>()
        .connect_lazy(&url)
        .expect("an URL");
    let other = TestDatabase::open(&url, pool, "elsewhere").await;
    pool_of_other_database_begins_nothing(database, other).await;
}

// F-172
#[tokio::test(flavor = "multi_thread")]
async fn another_file_of_sqlite() {
    let (here, there) = (Scratch::new(), Scratch::new());
    let database = database::sqlite_file_database(&here, "keys").await;
    let other = database::sqlite_file_database(&there, "keys").await;
    pool_of_other_database_begins_nothing(database, other).await;
}

// ---- Concurrent acquires ----

/// Completes the entry in an open transaction like a fence, until `commit` is called.
async fn open_fence<S: TestDialect>(database: &TestDatabase<S>, claim: &Claim) -> OpenFence<S> {
    let mut held = OpenFence(database.pool.acquire().await.expect("a connection"));
    let id = claim.id.as_bytes().iter();
    let id: String = id.map(|it| format!("{it:02x}")).collect();
    let fence = S::fence_statement(&database.table, &id);
    S::run(&mut held.0, fence).await.expect("the fence");
    held
}

struct OpenFence<S: TestDialect>(PoolConnection<S::Database>);

impl<S: TestDialect> OpenFence<S> {
    async fn commit(mut self) {
        let committed = S::run(&mut self.0, "commit".to_owned()).await;
        committed.expect("the commit");
    }
}

/// Returns a claim that queries the entry with the token of its lease.
fn query_claim(claim: &Claim) -> Claim {
    let mut query = claim.clone();
    query.orphans = OrphanPolicy::Refuse;
    query
}

/// An acquire under the lease's own token, as after a lost reply, waits for a transaction that has written the entry.
/// So does an acquire that wants to take over. Neither returns that the lease is held or is free.
async fn acquire_waits_for_transaction<S: TestDialect>(database: TestDatabase<S>) {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(120) {
        let mut mine = claim();
        mine.lease = Ttl::from_millis(1);
        let granted = retried(|| database.store.acquire(&mine)).await;
        assert!(matches!(
            granted.expect("an answer"),
            Acquired::Granted { .. }
        ));
        sleep(Duration::from_millis(5)).await;
        let held = open_fence(&database, &mine).await;
        let mut calls = JoinSet::new();
        for claim in [query_claim(&mine), duplicate(&mine)] {
            let store = database.store.clone();
            calls.spawn(async move { store.acquire(&claim).await });
        }
        let early = timeout(Duration::from_millis(300), calls.join_next()).await;
        if let Ok(Some(response)) = &early {
            assert!(matches!(response, Ok(Err(_))), "{response:?}");
        }
        held.commit().await;
        let responses = calls.join_all().await;
        for response in responses.iter().flatten() {
            assert!(
                matches!(response, Acquired::Completed { .. }),
                "{response:?}"
            );
        }
        // If an acquire timed out, the trial proves nothing.
        if early.is_err() && responses.iter().all(Result::is_ok) {
            return;
        }
    }
    panic!("an acquire timed out in each trial");
}

/// Many callers at once, at any moment, as in production. Each acquire after the write of the entry returns that it is
/// completed, or times out.
async fn acquire_after_fence_sees_record<S: TestDialect>(database: TestDatabase<S>) {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(120) {
        // If each acquire timed out, the trial proves nothing.
        if race_acquires_with_fences(&database).await > 0 {
            return;
        }
    }
    panic!("each acquire timed out in each trial");
}

/// Returns the number of acquires that did not time out.
async fn race_acquires_with_fences<S: TestDialect>(database: &TestDatabase<S>) -> u64 {
    let mut racing = JoinSet::new();
    for n in 0..32 {
        let database = database.clone();
        racing.spawn(async move {
            let mut completed = 0_u64;
            for round in 0..6_u64 {
                let mine = claim();
                let granted = retried(|| database.store.acquire(&mine)).await;
                let granted = granted.expect("an answer");
                assert!(matches!(granted, Acquired::Granted { .. }));
                let held = open_fence(&database, &mine).await;
                let call = {
                    let (store, query) = (database.store.clone(), query_claim(&mine));
                    tokio::spawn(async move { store.acquire(&query).await })
                };
                sleep(Duration::from_micros((n * 131 + round * 977) % 4000)).await;
                held.commit().await;
                match call.await.expect("no panic") {
                    Ok(Acquired::Completed { .. }) => completed += 1,
                    Ok(other) => panic!("{other:?}"),
                    Err(_) => {}
                }
            }
            completed
        });
    }
    racing.join_all().await.into_iter().sum()
}

/// The acquire waits for a second at most, and then returns an unknown outcome; the layer retries.
async fn long_acquire_ends_with_unknown_outcome<S: TestDialect>(database: TestDatabase<S>) {
    let mine = claim();
    database.store.acquire(&mine).await.expect("an answer");
    let held = open_fence(&database, &mine).await;
    let query = query_claim(&mine);
    let response = within(Duration::from_secs(60), database.store.acquire(&query)).await;
    let error = response.expect_err("the row is locked");
    // The database stopped waiting for the row.
    let codes = ["55P03", "1205"];
    let message = format!("{error:?}");
    assert!(codes.iter().any(|code| message.contains(code)), "{message}");
    held.commit().await;
    let response = database.store.acquire(&query).await.expect("an answer");
    assert!(
        matches!(response, Acquired::Completed { .. }),
        "{response:?}"
    );
}

macro_rules! acquire_tests {
    ($($case:ident)*) => {
        mod acquire_on_postgres {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let database = super::database::on_postgres(stringify!($case)).await;
                    let pool = super::pool_options::<tower_idempotency_sqlx::sqlx::Postgres>().max_connections(40);
                    let pool = pool.connect_lazy(&super::postgres::shared().url()).expect("an URL");
                    super::$case(super::TestDatabase { pool, ..database }).await;
                }
            )*
        }

        mod acquire_on_mariadb {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let database = super::database::on_mariadb(stringify!($case)).await;
                    let pool = super::pool_options::<tower_idempotency_sqlx::sqlx::MySql>().max_connections(40);
                    let pool = pool.connect_lazy(&super::mariadb::shared().url()).expect("an URL");
                    super::$case(super::TestDatabase { pool, ..database }).await;
                }
            )*
        }
    };
}

acquire_tests! {
    acquire_waits_for_transaction
    acquire_after_fence_sees_record
    long_acquire_ends_with_unknown_outcome
}

// F-171
#[tokio::test(flavor = "multi_thread")]
async fn sqlite_acquire_waits_for_transaction() {
    let scratch = Scratch::new();
    acquire_waits_for_transaction(database::sqlite_file_database(&scratch, "keys").await).await;
}
