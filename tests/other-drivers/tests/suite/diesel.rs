//! Diesel-async.

use std::{
    future::pending,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use diesel_async::{AsyncConnection, SimpleAsyncConnection};
use other_drivers::Diesel;
use tests::{created, send};
use tower_idempotency_diesel_async::diesel::result::Error;

use crate::suite::{Bank, assert_charged_once, committed, order};

suite!(Diesel);

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
