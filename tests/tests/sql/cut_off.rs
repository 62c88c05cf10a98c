//! Handlers' transactions that are cut off or end early. They leave nothing behind, and nothing is recorded without its
//! effect.

use std::{
    fmt::Debug,
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
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
    Effects, app,
    barrier::within,
    created,
    database::{self, TestDatabase, TestDialect},
    post,
    proxy::{ConnectionEnd, Fault, Mode, Proxy},
    scratch::Scratch,
    send,
    servers::{
        mariadb::{self, MariaDbServer},
        postgres,
    },
    sql,
};
use tokio::time::sleep;
use tower_idempotency::{Lease, run_once::Outcome};
use tower_idempotency_sqlx::{
    CommitError, FencedTransaction, MySqlStore, PostgresStore, SqliteStore, TransactionError,
    TransactionErrorKind,
    sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection, query_scalar, raw_sql},
};

/// Returns a service on the database. The handler gets its lease and the number of its execution.
fn bank<S, H, F>(database: &TestDatabase<S>, handler: H) -> (Router, Effects)
where
    S: TestDialect,
    H: Fn(Lease, u64) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response> + Send + 'static,
{
    let layer = sql::layer(database.store.clone());
    app(layer, move |n, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        handler(lease, n)
    })
}

fn order() -> Request<Body> {
    post("/orders", "k", "tea")
}

async fn charged<S: TestDialect>(
    database: &TestDatabase<S>,
    lease: &Lease,
    n: u64,
) -> FencedTransaction<S> {
    let mut tx = database.begin(lease).await.expect("a transaction");
    let effect = S::run(&mut tx, database.effect("charge", 1, n)).await;
    effect.expect("the effect");
    tx
}

async fn committed<S: TestDialect>(tx: FencedTransaction<S>, n: u64) -> Response {
    let committed = tx.commit(created(n)).await;
    committed.expect("a commit").into_response()
}

/// The handlers' pool with one connection through a proxy, and a direct pool.
struct ProxiedPool<S: TestDialect> {
    database: TestDatabase<S>,
    direct: TestDatabase<S>,
    proxy: Arc<Proxy>,
}

impl<S: TestDialect> Clone for ProxiedPool<S> {
    fn clone(&self) -> Self {
        Self {
            database: self.database.clone(),
            direct: self.direct.clone(),
            proxy: Arc::clone(&self.proxy),
        }
    }
}

async fn by_postgres(table: &str) -> ProxiedPool<PostgresStore> {
    let proxy = Proxy::start(postgres::shared().address());
    let url = format!("postgres://app@{}/postgres", proxy.address());
    let direct = database::on_postgres(table).await;
    of_one(
        direct,
        pool_options::<tower_idempotency_sqlx::sqlx::Postgres>()
            .connect_lazy(&url)
            .expect("an URL"),
        proxy,
    )
    .await
}

async fn by_mariadb(table: &str) -> ProxiedPool<MySqlStore> {
    let proxy = Proxy::start(mariadb::shared().address());
    let url = mariadb::url(proxy.address());
    let direct = database::on_mariadb(table).await;
    let pool = pool_options::<tower_idempotency_sqlx::sqlx::MySql>()
        .connect_lazy(&url)
        .expect("an URL");
    of_one(direct, pool, proxy).await
}

/// Returns a connected pool that lends connections without a liveness check, so that the statement is cut off
/// first.
async fn of_one<S: TestDialect>(
    direct: TestDatabase<S>,
    pool: tower_idempotency_sqlx::sqlx::Pool<S::Database>,
    proxy: Proxy,
) -> ProxiedPool<S> {
    let options = pool_options().max_connections(1).test_before_acquire(false);
    let database = TestDatabase {
        pool: options.connect_lazy_with((*pool.connect_options()).clone()),
        ..direct.clone()
    };
    database.count().await;
    wait_until_idle(&database).await;
    ProxiedPool {
        database,
        direct,
        proxy: Arc::new(proxy),
    }
}

async fn wait_until_idle<S: TestDialect>(database: &TestDatabase<S>) {
    within(Duration::from_secs(60), async {
        while database.pool.num_idle() == 0 {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Drops a call when its first bytes have reached the proxy, which holds them. All earlier calls through the proxy must have
/// ended.
async fn drop_in_flight<T: Debug>(proxy: &Proxy, call: impl Future<Output = T>) {
    proxy.set(Mode::Hold);
    let received = proxy.received();
    let is_held = async {
        while proxy.received() == received {
            sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        biased;
        result = call => panic!("the proxy holds the call: {result:?}"),
        () = is_held => {}
    }
}

// ---- Transactions without a caller ----

/// Later writes of other code on the connection are visible at once, and the next transaction can begin.
async fn cut_off_begin_leaves_no_transaction<S: TestDialect>(proxied: ProxiedPool<S>) {
    let at = proxied.clone();
    let (app, _) = bank(&proxied.database, move |lease, n| {
        let proxied = at.clone();
        async move {
            wait_until_idle(&proxied.database).await;
            drop_in_flight(&proxied.proxy, proxied.database.begin(&lease)).await;
            // If the begin were dropped with its caller, it would be dropped before its reply.
            sleep(Duration::from_millis(50)).await;
            proxied.proxy.set(Mode::Pass);
            let plain = S::run_alone(
                &proxied.database.pool,
                proxied.database.effect("plain", 1, n),
            )
            .await;
            plain.expect("the effect");
            assert_eq!(proxied.direct.count().await, 1, "seen by others");
            committed(charged(&proxied.database, &lease, n).await, n).await
        }
    });
    let first = within(Duration::from_secs(60), send(&app, order())).await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert!(send(&app, order()).await.is_replay());
    assert_eq!(proxied.direct.count().await, 2);
}

/// The pool gets its permit back if another party closes the connection, as with a commit.
async fn hanging_begin_returns_pool_permit<S: TestDialect>(proxied: ProxiedPool<S>) {
    let connect = proxied.database.pool.connect_options();
    for patience in database::PATIENCE {
        let pool = database::with_timeouts(pool_options(), patience).max_connections(1);
        let database = TestDatabase {
            pool: pool.connect_lazy_with((*connect).clone()),
            ..proxied.database.clone()
        };
        let (at, proxy) = (database.clone(), Arc::clone(&proxied.proxy));
        let (app, _) = bank(&database, move |lease, n| {
            let (database, proxy) = (at.clone(), Arc::clone(&proxy));
            async move {
                let charged = async {
                    let mut tx = database.begin(&lease).await.ok()?;
                    S::run(&mut tx, database.effect("charge", 1, n))
                        .await
                        .ok()?;
                    tx.commit(created(n)).await.ok()
                };
                // If a handler stopped waiting before the reply was lost, its begin would lose the reply later.
                let gives_up = async {
                    while proxy.injected_faults() == 0 {
                        sleep(Duration::from_millis(5)).await;
                    }
                    sleep(patience).await;
                };
                let charged = tokio::select! {
                    charged = charged => charged,
                    () = gives_up => None,
                };
                match charged {
                    Some(res) => res.into_response(),
                    None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
                }
            }
        });
        proxied
            .proxy
            .once(Fault::reply_to("read write"), ConnectionEnd::Hang);
        let first = within(Duration::from_secs(120), send(&app, order())).await;
        assert_eq!(first.status, StatusCode::SERVICE_UNAVAILABLE);
        if proxied.proxy.injected_faults() == 0 {
            continue;
        }
        within(Duration::from_secs(120), async {
            while send(&app, order()).await.status != StatusCode::CREATED {}
        })
        .await;
        assert_eq!(proxied.direct.count().await, 1);
        return;
    }
    panic!("nothing comes to its begin");
}

// ---- Transactions that end early ----

/// The end of a phase, or of the request.
#[derive(Clone, Copy, Debug)]
enum End {
    Commit,
    Checkpoint,
}

impl End {
    /// Returns the error for a transaction that has ended.
    async fn refused<S: TestDialect>(self, tx: FencedTransaction<S>, n: u64) -> TransactionError {
        match self {
            Self::Commit => {
                let error = tx
                    .commit(created(n))
                    .await
                    .expect_err("an ended transaction");
                error.into_output().expect_err("an ended transaction")
            }
            Self::Checkpoint => tx
                .checkpoint("phase", &n)
                .await
                .expect_err("an ended transaction"),
        }
    }
}

/// Asserts that the first execution left nothing, that its handler got the reason, and that the next execution
/// succeeds.
async fn assert_refused<S: TestDialect>(
    database: &TestDatabase<S>,
    app: &Router,
    effects: usize,
    what: &str,
) {
    let refused = within(Duration::from_secs(60), send(app, order())).await;
    assert_eq!(refused.text(), "Ended", "{what}: {refused:?}");
    assert_eq!(database.count().await, effects, "{what}");
    let stored = "delete from {table} where completed is not null or checkpoint is not null";
    assert_eq!(database.admin(stored).await, 0, "{what}");
    let next = send(app, order()).await;
    assert_eq!(next.status, StatusCode::CREATED, "{what}: {next:?}");
    assert!(send(app, order()).await.is_replay(), "{what}");
    assert_eq!(database.count().await, effects + 1, "{what}");
    database.admin("delete from {table}").await;
    database.admin("delete from {table}_effects").await;
}

fn ended(error: &TransactionError) -> Response {
    let kind = format!("{:?}", error.kind());
    (StatusCode::SERVICE_UNAVAILABLE, kind).into_response()
}

/// Cuts off a savepoint, after which the driver rolls back the whole transaction. Without a proxy, drops the future
/// while the savepoint is in flight.
async fn cut_off_savepoint<S: TestDialect>(tx: &mut FencedTransaction<S>, proxy: Option<&Proxy>) {
    if let Some(proxy) = proxy {
        drop_in_flight(proxy, Connection::begin(&mut **tx)).await;
        proxy.set(Mode::Pass);
        return;
    }
    for _ in 0..1_000 {
        let mut begin = pin!(Connection::begin(&mut **tx));
        let begun = poll_fn(|cx| Poll::Ready(begin.as_mut().poll(cx).is_ready())).await;
        // Otherwise the savepoint was created at once, and is rolled back alone.
        if !begun {
            return;
        }
    }
    panic!("it is never in flight");
}

async fn check_cut_off_savepoint<S: TestDialect>(
    database: TestDatabase<S>,
    proxy: Option<Arc<Proxy>>,
) {
    for end in [End::Commit, End::Checkpoint] {
        let (at, proxy) = (database.clone(), proxy.clone());
        let (app, _) = bank(&database, move |lease, n| {
            let (database, proxy) = (at.clone(), proxy.clone());
            async move {
                let mut tx = charged(&database, &lease, n).await;
                if n > 1 {
                    return committed(tx, n).await;
                }
                cut_off_savepoint(&mut tx, proxy.as_deref()).await;
                ended(&end.refused(tx, n).await)
            }
        });
        assert_refused(&database, &app, 0, &format!("{end:?}")).await;
    }
}

// F-149
#[tokio::test(flavor = "multi_thread")]
async fn cut_off_savepoint_prevents_commit_on_postgres() {
    let proxied = by_postgres("savepoint").await;
    check_cut_off_savepoint(proxied.database, Some(proxied.proxy)).await;
}

// F-149
#[tokio::test(flavor = "multi_thread")]
async fn cut_off_savepoint_prevents_commit_on_mariadb() {
    let proxied = by_mariadb("savepoint").await;
    check_cut_off_savepoint(proxied.database, Some(proxied.proxy)).await;
}

// F-149
#[tokio::test(flavor = "multi_thread")]
async fn cut_off_savepoint_prevents_commit_on_sqlite() {
    let scratch = Scratch::new();
    check_cut_off_savepoint(database::sqlite_file_database(&scratch, "keys").await, None).await;
}

/// Statements that the handler committed itself are stored, and the handler receives the error that they were not
/// fenced.
async fn check_handler_ends_transaction<S: TestDialect>(
    database: TestDatabase<S>,
    statements: &[&str],
) {
    for end in [End::Commit, End::Checkpoint] {
        let (at, ends) = (database.clone(), statements.join("|"));
        let (app, _) = bank(&database, move |lease, n| {
            let (database, ends) = (at.clone(), ends.clone());
            async move {
                let mut tx = charged(&database, &lease, n).await;
                if n > 1 {
                    return committed(tx, n).await;
                }
                for sql in ends.split('|') {
                    S::run(&mut tx, sql.to_owned()).await.expect("it works");
                }
                ended(&end.refused(tx, n).await)
            }
        });
        assert_refused(&database, &app, 1, &format!("{end:?} after {statements:?}")).await;
    }
}

// F-149
#[tokio::test(flavor = "multi_thread")]
async fn handler_end_prevents_commit_on_postgres() {
    let database = database::on_postgres("own_commit").await;
    for statements in [&["commit"][..], &["commit", "begin"]] {
        check_handler_ends_transaction(database.clone(), statements).await;
    }
}

// F-149
#[tokio::test(flavor = "multi_thread")]
async fn handler_end_prevents_commit_on_mariadb() {
    let database = database::on_mariadb("own_commit").await;
    let ddl = ["drop table if exists ddl", "create table ddl (n int)"];
    for statements in [&["commit"][..], &["commit", "begin"], &ddl] {
        check_handler_ends_transaction(database.clone(), statements).await;
    }
}

// F-149
#[tokio::test(flavor = "multi_thread")]
async fn handler_end_prevents_commit_on_sqlite() {
    let scratch = Scratch::new();
    let database = database::sqlite_file_database(&scratch, "own_commit").await;
    for statements in [&["commit"][..], &["commit", "begin"]] {
        check_handler_ends_transaction(database.clone(), statements).await;
    }
}

/// The statement after the end is committed, and a later call does not repeat it.
async fn check_work_ends_transaction<S: TestDialect>(database: TestDatabase<S>) {
    let layer = sql::layer(database.store.clone());
    for call in 0..2 {
        let at = database.clone();
        let work = async move |lease: Lease| {
            let mut tx = charged(&at, &lease, 1).await;
            let ended = S::run(&mut tx, "commit".to_owned()).await;
            ended.expect("it works");
            let late = S::run(&mut tx, at.effect("late", 1, 1)).await;
            late.expect("the effect");
            let committed = tx.commit_value(7).await;
            committed.map_err(CommitError::into_work_error)
        };
        let outcome = layer.run_once("job", "payload", work).await;
        let outcome: Outcome<i32, CommitError<i32>> = outcome.expect("an outcome");
        match (call, outcome) {
            (0, Outcome::Failed(error)) => {
                let failure = error.failure().expect("a failed transaction");
                assert_eq!(failure.kind(), TransactionErrorKind::Ended);
            }
            (1, Outcome::NeedsAttention { code }) => assert_eq!(code, "transaction-ended"),
            (_, other) => panic!("unexpected outcome: {other:?}"),
        }
        assert_eq!(database.count().await, 2);
    }
}

// S-425
#[tokio::test(flavor = "multi_thread")]
async fn ended_work_needs_attention_on_postgres() {
    check_work_ends_transaction(database::on_postgres("work_end").await).await;
}

// S-425
#[tokio::test(flavor = "multi_thread")]
async fn ended_work_needs_attention_on_mariadb() {
    check_work_ends_transaction(database::on_mariadb("work_end").await).await;
}

// S-425
#[tokio::test(flavor = "multi_thread")]
async fn ended_work_needs_attention_on_sqlite() {
    let scratch = Scratch::new();
    check_work_ends_transaction(database::sqlite_file_database(&scratch, "keys").await).await;
}

// F-151
/// SQLite rolls a transaction back if it cannot commit it, as on a full disk. The connection can still execute the next
/// transaction.
#[tokio::test(flavor = "multi_thread")]
async fn sqlite_rollback_leaves_connection_usable() {
    let refuse = "begin select raise(rollback, 'full'); end";
    for (end, column) in [(End::Commit, "completed"), (End::Checkpoint, "checkpoint")] {
        let scratch = Scratch::new();
        let database = database::sqlite_file_database(&scratch, "keys").await;
        let pool = pool_options().max_connections(1);
        let pool = pool.connect_lazy_with((*database.pool.connect_options()).clone());
        let database = TestDatabase { pool, ..database };
        let trigger = format!(
            "create trigger full before update on {{table}} when new.{column} is not null {refuse}"
        );
        database.admin(&trigger).await;
        let at = database.clone();
        let (app, _) = bank(&database, move |lease, n| {
            let database = at.clone();
            async move {
                let tx = charged(&database, &lease, n).await;
                if n > 1 {
                    return committed(tx, n).await;
                }
                ended(&end.refused(tx, n).await)
            }
        });
        let refused = send(&app, order()).await;
        assert_eq!(refused.text(), "Database", "{end:?}");
        database.admin("drop trigger full").await;
        let next = send(&app, order()).await;
        assert_eq!(next.status, StatusCode::CREATED, "{end:?}: {next:?}");
        assert_eq!(database.count().await, 1, "{end:?}");
    }
}

// F-151
/// The commit itself is rejected.
#[tokio::test(flavor = "multi_thread")]
async fn refused_sqlite_commit_leaves_connection_usable() {
    let scratch = Scratch::new();
    let database = database::sqlite_file_database(&scratch, "keys").await;
    let pool = pool_options().max_connections(1);
    let pool = pool.connect_lazy_with((*database.pool.connect_options()).clone());
    let database = TestDatabase { pool, ..database };
    for sql in [
        "create table parents (id integer primary key)",
        "create table children (id integer references parents deferrable initially deferred)",
    ] {
        database.admin(sql).await;
    }
    for end in [End::Commit, End::Checkpoint] {
        let at = database.clone();
        let (app, _) = bank(&database, move |lease, n| {
            let database = at.clone();
            async move {
                let mut tx = charged(&database, &lease, n).await;
                if n > 1 {
                    return committed(tx, n).await;
                }
                let orphan = "insert into children values (7)".to_owned();
                SqliteStore::run(&mut tx, orphan).await.expect("deferred");
                ended(&end.refused(tx, n).await)
            }
        });
        assert_eq!(send(&app, order()).await.text(), "Database", "{end:?}");
        assert_eq!(database.count().await, 0, "{end:?}");
        assert_eq!(
            send(&app, order()).await.status,
            StatusCode::CREATED,
            "{end:?}"
        );
        database.admin("delete from {table}").await;
        database.admin("delete from {table}_effects").await;
    }
}

// F-150
/// sqlx rolls back the cut-off statement before it executes the next one. It reports the outcome of the rollback as the
/// outcome of the next statement.
#[tokio::test(flavor = "multi_thread")]
async fn cut_off_savepoint_release_keeps_transaction() {
    let proxied = by_mariadb("savepoint_end").await;
    let (database, proxy) = (proxied.database.clone(), Arc::clone(&proxied.proxy));
    let (app, _) = bank(&database.clone(), move |lease, n| {
        let (database, proxy) = (database.clone(), Arc::clone(&proxy));
        async move {
            let mut tx = charged(&database, &lease, n).await;
            if n > 1 {
                return committed(tx, n).await;
            }
            let savepoint = Connection::begin(&mut *tx).await.expect("a savepoint");
            drop_in_flight(&proxy, savepoint.commit()).await;
            proxy.set(Mode::Pass);
            ended(&End::Commit.refused(tx, n).await)
        }
    });
    let refused = within(Duration::from_secs(60), send(&app, order())).await;
    assert_eq!(refused.text(), "Database");
    assert_eq!(proxied.direct.count().await, 0);
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    assert_eq!(proxied.direct.count().await, 1);
}

// F-149
/// The server rolls back the whole transaction, and executes later statements outside a transaction.
#[tokio::test(flavor = "multi_thread")]
async fn swallowed_deadlock_prevents_commit_on_mariadb() {
    let server = MariaDbServer::start(&[]);
    let pool = pool_options::<tower_idempotency_sqlx::sqlx::MySql>()
        .connect(&server.url())
        .await
        .expect("it runs");
    let database = TestDatabase::<MySqlStore>::open(&server.url(), pool, "swallowed").await;
    for setup in [
        "create table accounts (id int primary key, n int not null)",
        "insert into accounts values (1, 0), (2, 0)",
        "create table ballast (n int not null)",
    ] {
        database.admin(setup).await;
    }
    let (at, url) = (database.clone(), server.url());
    let (app, _) = bank(&database, move |lease, n| {
        let (database, url) = (at.clone(), url.clone());
        async move {
            let mut tx = charged(&database, &lease, n).await;
            if n > 1 {
                return committed(tx, n).await;
            }
            update(&mut tx, 1).await.expect("no transaction holds it");
            let circle = tokio::spawn(deadlock(url.clone()));
            let mut watch = MySqlConnection::connect(&url).await.expect("it runs");
            within(
                Duration::from_secs(60),
                wait_until_transaction_waits(&mut watch),
            )
            .await;
            let swallowed = update(&mut tx, 2).await.expect_err("a deadlock");
            assert!(swallowed.to_string().contains("1213"), "{swallowed}");
            circle.await.expect("the other transaction continues");
            ended(&End::Commit.refused(tx, n).await)
        }
    });
    assert_refused(&database, &app, 0, "a deadlock").await;
}

async fn update(
    tx: &mut FencedTransaction<MySqlStore>,
    id: u8,
) -> tower_idempotency_sqlx::sqlx::Result<u64> {
    let update = format!("update accounts set n = n + 1 where id = {id}");
    MySqlStore::run(tx, update).await
}

/// Locks the second account, and requests the first.
async fn deadlock(url: String) {
    let mut other = MySqlConnection::connect(&url).await.expect("it runs");
    for sql in [
        "begin",
        // The server aborts the transaction with fewer changes.
        "insert into ballast with recursive rows_of (n) as \
         (select 1 union all select n + 1 from rows_of where n < 1000) select n from rows_of",
        "update accounts set n = n + 10 where id = 2",
        "update accounts set n = n + 10 where id = 1",
        "commit",
    ] {
        let sql = raw_sql(AssertSqlSafe(sql));
        other
            .execute(sql)
            .await
            .expect("the transaction is not aborted");
    }
}

async fn wait_until_transaction_waits(watch: &mut MySqlConnection) {
    let waiting =
        "select count(*) from information_schema.innodb_trx where trx_state = 'LOCK WAIT'";
    let began = Instant::now();
    while query_scalar::<_, i64>(waiting)
        .fetch_one(&mut *watch)
        .await
        .expect("it runs")
        == 0
    {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "no transaction waits"
        );
        // The server refreshes this table only after 100 ms without a query.
        sleep(Duration::from_millis(150)).await;
    }
}

macro_rules! by_a_way {
    ($($case:ident)*) => {
        mod on_postgres {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    super::$case(super::by_postgres(&stringify!($case).chars().take(30).collect::<String>()).await).await;
                }
            )*
        }

        mod on_mariadb {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    super::$case(super::by_mariadb(&stringify!($case).chars().take(30).collect::<String>()).await).await;
                }
            )*
        }
    };
}

by_a_way! {
    // F-148
    cut_off_begin_leaves_no_transaction
    // F-148
    hanging_begin_returns_pool_permit
}
