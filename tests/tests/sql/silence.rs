//! Store calls without a layer, and so without its timeout, on a connection that no longer replies. They end
//! nevertheless, and the store can open its only connection again.
//!
//! The clock is paused, and advances by itself while all tasks wait.

use std::{pin::Pin, sync::Arc, time::Duration};

use axum::body::Body;
use http::{Request, StatusCode};
use tests::{
    app,
    barrier::within,
    created,
    database::{self, TestDatabase, TestDialect},
    post,
    proxy::{ConnectionEnd, Fault, Proxy},
    send,
    servers::{mariadb, postgres},
    sql::{self, claim},
};
use tokio::time::{pause, resume, sleep};
use tower_idempotency::{Lease, store::Ttl};
use tower_idempotency_sqlx::{
    Checkpoint, Completer, MySqlStore, Orphan, PostgresStore, Purger, SqlError,
    TransactionErrorKind as Kind,
};

/// Queries of the store go through a proxy, on one connection.
struct ProxiedStore<S: TestDialect> {
    database: TestDatabase<S>,
    proxy: Proxy,
    purger: fn(&S, Duration) -> Purger,
    purge: fn(S) -> Purging,
}

type Purging = Pin<Box<dyn Future<Output = Result<u64, SqlError>> + Send>>;

async fn by_postgres(table: &str) -> ProxiedStore<PostgresStore> {
    let proxy = Proxy::start(postgres::shared().address());
    let database = database::on_postgres(table).await;
    let url = format!("postgres://app@{}/postgres", proxy.address());
    let store = PostgresStore::open(&url, table).with_connections(1);
    ProxiedStore {
        database: TestDatabase { store, ..database },
        proxy,
        purger: PostgresStore::spawn_purger,
        purge: |store| Box::pin(async move { store.purge_expired(100).await }),
    }
}

async fn by_mariadb(table: &str) -> ProxiedStore<MySqlStore> {
    let proxy = Proxy::start(mariadb::shared().address());
    let database = database::on_mariadb(table).await;
    let url = mariadb::url(proxy.address());
    let store = MySqlStore::open(&url, table).with_connections(1);
    ProxiedStore {
        database: TestDatabase { store, ..database },
        proxy,
        purger: MySqlStore::spawn_purger,
        purge: |store| Box::pin(async move { store.purge_expired(100).await }),
    }
}

/// Loses the reply to the statement that contains `needle`, after which the connection no longer replies. Then pauses
/// the clock until the call ends.
async fn run_with_lost_reply<T: Send + 'static>(
    proxy: &Proxy,
    needle: &str,
    call: impl Future<Output = T> + Send + 'static,
) -> T {
    let hits = proxy.injected_faults();
    proxy.once(Fault::reply_to(needle), ConnectionEnd::Hang);
    let call = tokio::spawn(call);
    within(Duration::from_secs(60), async {
        while proxy.injected_faults() == hits {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    pause();
    let response = within(Duration::from_secs(120), call).await;
    resume();
    response.expect("no panic")
}

async fn checkpoint_query_ends<S: TestDialect>(proxied: ProxiedStore<S>) {
    let layer = sql::layer(proxied.database.store.clone()).with_lease_ttl(Ttl::from_secs(3_600));
    let (store, proxy) = (proxied.database.store.clone(), Arc::new(proxied.proxy));
    let (app, effects) = app(layer, move |_, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease").clone();
        let (store, proxy) = (store.clone(), Arc::clone(&proxy));
        async move {
            let looking = {
                let (store, lease) = (store.clone(), lease.clone());
                async move { Checkpoint::last(&store, &lease).await }
            };
            let refused = run_with_lost_reply(&proxy, "checkpoint_data", looking).await;
            assert_eq!(refused.expect_err("silence").kind(), Kind::Database);
            let response = Checkpoint::last(&store, &lease).await;
            assert!(response.expect("the lease is held").is_none());
            created(1)
        }
    });
    let res = within(
        Duration::from_secs(300),
        send(&app, post("/orders", "k", "tea")),
    )
    .await;
    assert_eq!((res.status, effects.count()), (StatusCode::CREATED, 1));
}

async fn orphan_query_ends<S: TestDialect>(proxied: ProxiedStore<S>) {
    let mut orphan = claim();
    orphan.lease = Ttl::MIN;
    orphan.operation = "POST /rides".into();
    proxied
        .database
        .store
        .acquire(&orphan)
        .await
        .expect("it runs");
    let layer = sql::layer(proxied.database.store.clone());
    let work = async |_: Orphan| Ok::<_, &str>(created(1));
    let completer =
        Completer::new(&proxied.database.store, &layer, work).with_min_age(Duration::ZERO);
    // Loses the reply to the query for a page, and then the one for the orphan.
    for needle in ["id limit", "generation = 1 and"] {
        let sweeping = completer.clone();
        let sweeping = async move { sweeping.sweep().await };
        let swept = run_with_lost_reply(&proxied.proxy, needle, sweeping).await;
        assert!(swept.is_err() || swept.is_ok_and(|it| it.failed == 1));
    }
    let swept = within(Duration::from_secs(60), completer.sweep()).await;
    assert_eq!(swept.expect("a sweep").executed, 1);
}

async fn background_purger_continues_after_lost_reply<S: TestDialect>(proxied: ProxiedStore<S>) {
    let mut over = claim();
    (over.lease, over.orphan_retention) = (Ttl::MIN, Ttl::MIN);
    proxied
        .database
        .store
        .acquire(&over)
        .await
        .expect("it runs");
    let purger = (proxied.purger)(&proxied.database.store, Duration::from_secs(1));
    let minute = sleep(Duration::from_secs(60));
    run_with_lost_reply(&proxied.proxy, "expires limit", minute).await;
    // The first call took effect.
    let mut next = claim();
    (next.lease, next.orphan_retention) = (over.lease, over.orphan_retention);
    let acquired = within(
        Duration::from_secs(60),
        proxied.database.store.acquire(&next),
    )
    .await;
    acquired.expect("it runs");
    let left = "update {table} set orphan_retention = orphan_retention + 1";
    within(Duration::from_secs(60), async {
        while proxied.database.admin(left).await > 0 {
            sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    drop(purger);
}

async fn manual_purge_batch_ends<S: TestDialect>(proxied: ProxiedStore<S>) {
    let store = proxied.database.store.clone();
    let purging = (proxied.purge)(store.clone());
    let purged = run_with_lost_reply(&proxied.proxy, "expires limit", purging).await;
    purged.expect_err("silence");
    let purged = within(Duration::from_secs(60), (proxied.purge)(store)).await;
    assert_eq!(purged.expect("it runs"), 0);
}

macro_rules! by_a_way {
    ($($case:ident)*) => {
        mod on_postgres {
            $(
                #[tokio::test]
                async fn $case() {
                    super::$case(super::by_postgres(super::table(stringify!($case))).await).await;
                }
            )*
        }

        mod on_mariadb {
            $(
                #[tokio::test]
                async fn $case() {
                    super::$case(super::by_mariadb(super::table(stringify!($case))).await).await;
                }
            )*
        }
    };
}

by_a_way! {
    // F-155
    checkpoint_query_ends
    // F-155
    orphan_query_ends
    // F-155
    background_purger_continues_after_lost_reply
    manual_purge_batch_ends
}

/// Returns a table name, which must be shorter than some test names.
fn table(case: &str) -> &str {
    &case[..case.len().min(20)]
}
