//! Diesel-async.

use std::{
    future::pending,
    ops::{Deref, DerefMut},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{
    Extension,
    extract::State,
    response::{IntoResponse, Response},
    routing::{MethodRouter, post},
};
use diesel_async::{
    AnsiTransactionManager, AsyncConnection, AsyncPgConnection, SimpleAsyncConnection,
    TransactionManager,
    pooled_connection::{bb8::Pool, deadpool::Object},
};
use http::StatusCode;
use other_drivers::{Diesel, Handlers};
use tests::{
    Effects,
    barrier::within,
    created,
    proxy::{ConnectionEnd, Fault, Proxy},
    send,
    servers::postgres,
};
use tokio::time::sleep;
use tower_idempotency::Lease;
use tower_idempotency_diesel_async::{begin, diesel::result::Error};
use tower_idempotency_sqlx::PostgresStore;

use crate::suite::{Bank, assert_charged_once, charge, committed, order};

suite!(Diesel);

/// The type of a connection of bb8 has a lifetime. This compiles only if the future of the handler is `Send`.
#[test]
fn connection_of_bb8_is_permitted_in_handler() {
    async fn handler(
        State(pool): State<Pool<AsyncPgConnection>>,
        Extension(store): Extension<PostgresStore>,
        lease: Lease,
    ) -> Result<Response, (StatusCode, String)> {
        let connection = pool.get_owned().await.map_err(failed)?;
        let tx = begin(&store, &lease, connection).await.map_err(failed)?;
        let committed = tx.commit(StatusCode::CREATED.into_response()).await;
        Ok(committed.map_err(failed)?.into_response())
    }
    fn failed(error: impl std::fmt::Display) -> (StatusCode, String) {
        (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    }
    let _: MethodRouter<Pool<AsyncPgConnection>> = post(handler);
}

/// Diesel's own commit would release the savepoint of the nested transaction, report a success, and commit nothing.
#[tokio::test(flavor = "multi_thread")]
async fn open_nested_transaction_is_no_success() {
    let bank = Bank::<Diesel>::open("nested").await;
    let (app, executions) = bank.serve(async |bank: Bank<Diesel>, lease, n| {
        let mut tx = bank.charged(&lease, n).await.expect("begun");
        if n == 1 {
            let begun = AtomicBool::new(false);
            let nested = tx.transaction(async |_| {
                begun.store(true, Relaxed);
                pending::<Result<(), Error>>().await
            });
            let begun = async {
                while !begun.load(Relaxed) {
                    tokio::task::yield_now().await;
                }
            };
            tokio::select! {
                _ = nested => unreachable!("it is pending"),
                () = begun => {}
            }
        }
        committed(tx, created(n)).await
    });
    let refused = send(&app, order()).await;
    assert_eq!((refused.text(), bank.count().await), ("Database", 0));
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 2);
}

/// A nested transaction is a savepoint, and its closure may fail alone.
#[tokio::test(flavor = "multi_thread")]
async fn nested_closures_are_savepoints() {
    let bank = Bank::<Diesel>::open("closures").await;
    let (app, _) = bank.serve(async |bank: Bank<Diesel>, lease, n| {
        let mut tx = bank.charged(&lease, n).await.expect("begun");
        let effect = bank.database.effect("nested", 1, n);
        let failed = tx.transaction(async |connection| {
            connection.batch_execute(&effect).await?;
            Err::<(), _>(Error::RollbackTransaction)
        });
        failed.await.expect_err("rolled back");
        committed(tx, created(n)).await
    });
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
}

/// Diesel's transaction manager ends the transaction, and then knows that none is open.
#[tokio::test(flavor = "multi_thread")]
async fn transaction_ended_by_manager_is_reported() {
    for is_committed in [true, false] {
        let bank = Bank::<Diesel>::open(&format!("manager_{is_committed}")).await;
        let (app, _) = bank.serve(move |bank: Bank<Diesel>, lease, n| async move {
            let mut tx = bank.charged(&lease, n).await.expect("begun");
            let ended = match is_committed {
                true => AnsiTransactionManager::commit_transaction(&mut *tx).await,
                false => AnsiTransactionManager::rollback_transaction(&mut *tx).await,
            };
            ended.expect("it ends");
            committed(tx, created(n)).await
        });
        let response = send(&app, order()).await;
        let expected = ("Ended", usize::from(is_committed));
        assert_eq!((response.text(), bank.count().await), expected);
        assert!(!send(&app, order()).await.is_replay());
    }
}

/// A connection of the pool that counts its drop.
struct Watched {
    connection: Object<AsyncPgConnection>,
    drops: Effects,
}

impl Deref for Watched {
    type Target = AsyncPgConnection;

    fn deref(&self) -> &AsyncPgConnection {
        &self.connection
    }
}

impl DerefMut for Watched {
    fn deref_mut(&mut self) -> &mut AsyncPgConnection {
        &mut self.connection
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.drops.happen();
    }
}

/// Diesel cannot use the connection of a cancelled commit or rollback. No task rolls back on it: in one thread, such a task
/// would still have the connection. The pool has one connection, and replaces it.
#[tokio::test]
async fn connection_of_cancelled_end_is_replaced() {
    for (end, effects) in [(Diesel::COMMIT, 1), ("ROLLBACK\0", 0)] {
        let proxy = Arc::new(Proxy::start(postgres::shared().address()));
        let url = format!("postgres://app@{}/postgres", proxy.address());
        let bank = Bank::with_pool(&format!("cancelled_{effects}"), Diesel::pool(&url, 1)).await;
        let (app, executions) = bank.serve(move |bank: Bank<Diesel>, lease, n| {
            let proxy = Arc::clone(&proxy);
            async move {
                if n > 1 {
                    return charge(bank, lease, n).await;
                }
                let drops = Effects::default();
                let connection = Watched {
                    connection: bank.pool.0.get().await.expect("a connection"),
                    drops: drops.clone(),
                };
                let begun = begin(&bank.database.store, &lease, connection).await;
                let mut tx = begun.expect("begun");
                let effect = bank.database.effect("charge", 1, n);
                assert!(Diesel::run(&mut *tx, &effect).await);
                proxy.once(Fault::reply_to(end), ConnectionEnd::Hang);
                let ended = async {
                    match end {
                        Diesel::COMMIT => tx.commit(created(n)).await.is_ok(),
                        _ => tx.rollback().await.is_ok(),
                    }
                };
                let is_sent = async {
                    while proxy.injected_faults() == 0 {
                        sleep(Duration::from_millis(5)).await;
                    }
                };
                tokio::select! {
                    ended = ended => panic!("without a reply: {ended}"),
                    () = is_sent => {}
                }
                assert_eq!(drops.count(), 1, "{end}");
                within(Duration::from_secs(60), async {
                    while bank.count().await != effects {
                        sleep(Duration::from_millis(5)).await;
                    }
                    assert!(bank.pool.run_alone("select 1").await);
                })
                .await;
                StatusCode::SERVICE_UNAVAILABLE.into_response()
            }
        });
        let mut response = send(&app, order()).await;
        assert_eq!(bank.count().await, effects);
        if effects == 0 {
            response = send(&app, order()).await;
        }
        assert_charged_once(&bank, &app, &response).await;
        assert_eq!(executions.count(), 2 - effects as u64, "{end}");
    }
}
