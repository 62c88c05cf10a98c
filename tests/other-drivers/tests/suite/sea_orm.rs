//! SeaORM.

use std::sync::{Arc, Mutex};

use axum::response::IntoResponse;
use http::StatusCode;
use other_drivers::SeaOrm;
use tests::{created, send};
use tower_idempotency::store::LeaseRef;
use tower_idempotency_sea_orm::{
    OpenTransaction,
    sea_orm::{ConnectionTrait, DatabaseTransaction, IsolationLevel, TransactionTrait},
};
use tower_idempotency_sql::{
    Driver, FencedTransaction, LeaseStatus, PostgresFence, RecordStatus, RecordWrite, SqlError,
    TransactionErrorKind,
};

use crate::suite::{Bank, assert_charged_once, charge, committed, order};

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

/// End of the outer transaction while a nested one is open.
#[derive(Clone, Copy, Debug)]
enum OuterEnd {
    LostLease,
    RejectedCommit,
    Rollback,
    Drop,
}

impl OuterEnd {
    async fn apply(self, bank: &Bank<SeaOrm>, tx: FencedTransaction<OpenTransaction>) {
        match self {
            Self::LostLease => {
                bank.database.admin("delete from {table}").await;
                let lost = tx.commit(created(1)).await.expect_err("no lease");
                let lost = lost.into_output().expect_err("no lease");
                assert_eq!(lost.kind(), TransactionErrorKind::LeaseLost);
            }
            Self::RejectedCommit => {
                let insert = format!(
                    "insert into {}_numbers values (7), (7)",
                    bank.database.table
                );
                let inserted = tx.execute_unprepared(&insert).await;
                inserted.expect("the constraint is deferred");
                let rejected = tx.commit(created(1)).await.expect_err("rejected");
                let rejected = rejected.into_output().expect_err("rejected");
                assert_eq!(rejected.code(), Some("23505"));
            }
            Self::Rollback => tx.rollback().await.expect("a rollback"),
            Self::Drop => drop(tx),
        }
    }
}

/// SeaORM's own rollback would return to the savepoint, and the commit of the nested transaction would commit the charge.
#[tokio::test(flavor = "multi_thread")]
async fn nested_commit_after_outer_end_has_no_effect() {
    for end in [
        OuterEnd::LostLease,
        OuterEnd::RejectedCommit,
        OuterEnd::Rollback,
        OuterEnd::Drop,
    ] {
        let test = format!("outer_{end:?}").to_lowercase();
        let bank = Bank::<SeaOrm>::open(&test).await;
        let numbers = "create table {table}_numbers (n int unique deferrable initially deferred)";
        bank.database.admin(numbers).await;
        let (app, executions) = bank.serve(move |bank: Bank<SeaOrm>, lease, n| async move {
            if n > 1 {
                return charge(bank, lease, n).await;
            }
            let tx = bank.charged(&lease, n).await.expect("begun");
            let nested = tx.begin().await.expect("a savepoint");
            end.apply(&bank, tx).await;
            // The first statement may return the error of an earlier one.
            let effect = bank.database.effect("nested", 1, n);
            for _ in 0..2 {
                nested.execute_unprepared(&effect).await.ok();
            }
            // SeaORM panics if it drops a transaction while the rollback of the outer one uses the connection.
            tokio::spawn(nested.commit()).await.ok();
            StatusCode::SERVICE_UNAVAILABLE.into_response()
        });
        send(&app, order()).await;
        assert_eq!(bank.count().await, 0, "{end:?}");
        let last = send(&app, order()).await;
        assert_charged_once(&bank, &app, &last).await;
        assert_eq!(executions.count(), 2, "{end:?}");
    }
}

/// End of the nested transaction of another task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NestedEnd {
    Commit,
    Rollback,
    Drop,
}

/// A driver in whose transaction another task ends a nested one between the record and the commit.
struct Interrupted {
    open: OpenTransaction,
    nested: Arc<Mutex<Option<DatabaseTransaction>>>,
    end: NestedEnd,
}

impl Driver for Interrupted {
    type Fence = PostgresFence;
    type Target = DatabaseTransaction;

    fn target(&self) -> &DatabaseTransaction {
        self.open.target()
    }

    fn target_mut(&mut self) -> &mut DatabaseTransaction {
        self.open.target_mut()
    }

    async fn lease_status(
        &mut self,
        fence: &PostgresFence,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
        self.open.lease_status(fence, lease).await
    }

    async fn write_record(
        &mut self,
        fence: &PostgresFence,
        write: RecordWrite<'_>,
    ) -> Result<RecordStatus, SqlError> {
        self.open.write_record(fence, write).await
    }

    async fn commit(self) -> Result<(), SqlError> {
        let nested = self.nested.lock().expect("no panic").take();
        let nested = nested.expect("a nested transaction");
        match self.end {
            NestedEnd::Commit => nested.commit().await.expect("released"),
            NestedEnd::Rollback => nested.rollback().await.expect("rolled back"),
            NestedEnd::Drop => drop(nested),
        }
        self.open.commit().await
    }

    async fn rollback(self) -> Result<(), SqlError> {
        self.open.rollback().await
    }
}

/// A savepoint that is older than the record removes the record when it is rolled back. The effect is older than both.
#[tokio::test(flavor = "multi_thread")]
async fn rolled_back_record_commits_nothing() {
    for end in [NestedEnd::Commit, NestedEnd::Rollback, NestedEnd::Drop] {
        let test = format!("interrupted_{end:?}").to_lowercase();
        let bank = Bank::<SeaOrm>::open(&test).await;
        let (app, executions) = bank.serve(move |bank: Bank<SeaOrm>, lease, n| async move {
            if n > 1 {
                return charge(bank, lease, n).await;
            }
            let level = Some(IsolationLevel::ReadCommitted);
            let open = bank.pool.0.begin_with_config(level, None).await;
            let nested = Arc::new(Mutex::new(None));
            let driver = Interrupted {
                open: open.expect("begun").into(),
                nested: Arc::clone(&nested),
                end,
            };
            let fence = (&bank.database.store).into();
            let tx = FencedTransaction::begin(fence, &lease, driver).await;
            let tx = tx.expect("begun");
            let effect = bank.database.effect("charge", 1, n);
            tx.execute_unprepared(&effect).await.expect("the effect");
            let savepoint = tx.begin().await.expect("a savepoint");
            *nested.lock().expect("no panic") = Some(savepoint);
            let later = tx.begin().await.expect("a savepoint");
            let res = committed(tx, created(n)).await;
            later.commit().await.ok();
            res
        });
        let first = send(&app, order()).await;
        let mut expected = 1;
        if end != NestedEnd::Commit {
            assert_eq!((first.text(), bank.count().await), ("Database", 0));
            expected = 2;
        }
        let last = send(&app, order()).await;
        assert_charged_once(&bank, &app, &last).await;
        assert_eq!(executions.count(), expected, "{end:?}");
    }
}
