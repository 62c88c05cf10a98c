//! SeaORM.

use http::StatusCode;
use other_drivers::SeaOrm;
use tests::{created, send};
use tower_idempotency_sea_orm::sea_orm::{ConnectionTrait, TransactionTrait};

use crate::suite::{Bank, assert_charged_once, committed, order};

suite!(SeaOrm);

/// SeaORM's own commit would release the savepoint of the nested transaction, report a success, and commit nothing.
#[tokio::test(flavor = "multi_thread")]
async fn open_nested_transaction_is_committed() {
    let bank = Bank::<SeaOrm>::open("nested").await;
    let (app, executions) = bank.serve(async |bank: Bank<SeaOrm>, lease, n| {
        let tx = bank.charged(&lease, n).await.expect("begun");
        let nested = tx.begin().await.expect("a savepoint");
        let res = committed(tx, created(n)).await;
        drop(nested);
        res
    });
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_nested_transaction_is_rolled_back() {
    let bank = Bank::<SeaOrm>::open("dropped_nested").await;
    let (app, _) = bank.serve(async |bank: Bank<SeaOrm>, lease, n| {
        let tx = bank.charged(&lease, n).await.expect("begun");
        let nested = tx.begin().await.expect("a savepoint");
        let effect = bank.database.effect("nested", 1, n);
        nested
            .execute_unprepared(&effect)
            .await
            .expect("the effect");
        drop(nested);
        committed(tx, created(n)).await
    });
    let first = send(&app, order()).await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert_charged_once(&bank, &app, &first).await;
}
