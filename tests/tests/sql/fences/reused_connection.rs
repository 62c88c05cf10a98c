//! A driver for SQLite that uses a connection again after a commit that failed.

use std::sync::{Arc, Mutex};

use tests::{
    created,
    database::{self, TestDialect},
    scratch::Scratch,
    send,
};
use tower_idempotency::store::LeaseRef;
use tower_idempotency_sql::{
    Driver, FencedTransaction, LeaseStatus, RecordStatus, RecordWrite, SqlError,
};
use tower_idempotency_sqlx::{
    SqliteFence, SqliteStore,
    sqlx::{Connection as _, SqliteConnection, raw_sql},
};

use super::{committed, plain::Plain};
use crate::transactions::{assert_charged_once, bank, order};

/// The connections without a transaction.
type Idle = Arc<Mutex<Vec<SqliteConnection>>>;

/// Like [`Plain`], but the connection is used again after a commit, also after one that failed.
struct Pooled(Plain<SqliteConnection>, Idle);

impl Driver for Pooled {
    type Fence = SqliteFence;
    type Target = SqliteConnection;

    fn target(&self) -> &SqliteConnection {
        self.0.target()
    }

    fn target_mut(&mut self) -> &mut SqliteConnection {
        self.0.target_mut()
    }

    async fn lease_status(
        &mut self,
        fence: &SqliteFence,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
        self.0.lease_status(fence, lease).await
    }

    async fn write_record(
        &mut self,
        fence: &SqliteFence,
        write: RecordWrite<'_>,
    ) -> Result<RecordStatus, SqlError> {
        self.0.write_record(fence, write).await
    }

    async fn commit(self) -> Result<(), SqlError> {
        let Self(Plain(mut connection), idle) = self;
        let committed = raw_sql("commit").execute(&mut connection).await;
        if committed.is_err() {
            raw_sql("rollback").execute(&mut connection).await?;
        }
        idle.lock().expect("no panic").push(connection);
        committed?;
        Ok(())
    }

    async fn rollback(self) -> Result<(), SqlError> {
        self.0.rollback().await
    }
}

/// A deferred constraint rejects the commit, which leaves the transaction open. The next transaction uses the connection.
#[tokio::test(flavor = "multi_thread")]
async fn refused_sqlite_commit_frees_its_key() {
    let scratch = Scratch::new();
    let database = database::sqlite_file_database(&scratch, "fence_deferred").await;
    for sql in [
        "create table parents (id integer primary key)",
        "create table children (id integer references parents deferrable initially deferred)",
    ] {
        database.admin(sql).await;
    }
    let options = database.pool.connect_options();
    let connection = Box::pin(SqliteConnection::connect_with(&options)).await;
    let idle: Idle = Arc::new(Mutex::new(vec![connection.expect("a connection")]));
    let (app, executions) = bank(&database, move |database, lease, n| {
        let idle = Arc::clone(&idle);
        async move {
            let connection = idle.lock().expect("no panic").pop();
            let mut connection = connection.expect("a connection");
            let begun = SqliteStore::run(&mut connection, SqliteFence::BEGIN.to_owned()).await;
            begun.expect("no transaction is open");
            let driver = Pooled(Plain(connection), idle);
            let begun = FencedTransaction::begin(database.store.fence(), &lease, driver).await;
            let mut tx = begun.expect("a transaction");
            let effect = SqliteStore::run(&mut tx, database.effect("charge", 1, n)).await;
            effect.expect("the effect");
            if n == 1 {
                let orphan = "insert into children values (7)".to_owned();
                SqliteStore::run(&mut tx, orphan).await.expect("deferred");
            }
            committed(tx, created(n)).await
        }
    });
    assert_eq!(send(&app, order()).await.text(), "Database");
    assert_eq!(database.count().await, 0);
    let first = send(&app, order()).await;
    assert_charged_once(&database, &app, &first).await;
    assert_eq!(executions.count(), 2);
}
