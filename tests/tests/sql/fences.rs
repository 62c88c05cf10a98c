//! The statements of the fences on MySQL and SQLite through plain connections, and the text of each version.

mod reused_connection;

use std::{fs, path::Path};

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use tests::{
    created,
    database::{self, TestDatabase, TestDialect},
    scratch::Scratch,
    send,
};
use tower_idempotency::{Lease, store::LeaseRef};
use tower_idempotency_sql::{
    Driver, FencedTransaction, LeaseStatus, RecordStatus, RecordWrite, SqlError, TransactionError,
    TransactionErrorKind as Kind,
};
use tower_idempotency_sqlx::{
    MySqlFence, MySqlStore, PostgresFence, SqliteFence, SqliteStore,
    sqlx::{
        AssertSqlSafe, Connection as _, Database, MySqlConnection, Row as _, SqliteConnection,
        query, query_scalar, raw_sql,
    },
};

use crate::transactions::{assert_charged_once, bank, order};

// ---- Drivers ----

/// A transaction on a plain connection of sqlx. The drop closes the connection, and the database rolls back.
struct Plain<C>(C);

impl Driver for Plain<MySqlConnection> {
    type Fence = MySqlFence;
    type Target = MySqlConnection;

    fn target(&self) -> &MySqlConnection {
        &self.0
    }

    fn target_mut(&mut self) -> &mut MySqlConnection {
        &mut self.0
    }

    async fn lease_status(
        &mut self,
        fence: &MySqlFence,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
        let (id, token) = (
            lease.id.as_bytes().as_slice(),
            lease.token.as_bytes().as_slice(),
        );
        let status = query(AssertSqlSafe(fence.lease_status_sql()))
            .bind(id)
            .bind(token)
            .bind(id)
            .fetch_optional(&mut self.0);
        let row = status.await?;
        let is_held = row.map(|row| row.try_get(0)).transpose()?;
        Ok(LeaseStatus::from_row(is_held))
    }

    async fn write_record(
        &mut self,
        fence: &MySqlFence,
        write: RecordWrite<'_>,
    ) -> Result<RecordStatus, SqlError> {
        let released = raw_sql(MySqlFence::RELEASE_MARK).execute(&mut self.0).await;
        if let Err(error) = released.map_err(SqlError::from) {
            return unmarked(error, MySqlFence::NO_MARK);
        }
        let needs_attention = MySqlFence::needs_attention(write.record());
        let written = query(AssertSqlSafe(fence.write_record_sql()))
            .bind(needs_attention)
            .bind(needs_attention)
            .bind(write.retention_millis())
            .bind(write.record())
            .bind(write.id())
            .bind(write.token())
            .execute(&mut self.0);
        let is_written = written.await?.rows_affected() > 0;
        Ok(RecordStatus::from_row(true, is_written))
    }

    async fn commit(mut self) -> Result<(), SqlError> {
        raw_sql("commit").execute(&mut self.0).await?;
        Ok(())
    }

    async fn rollback(mut self) -> Result<(), SqlError> {
        raw_sql("rollback").execute(&mut self.0).await?;
        Ok(())
    }
}

impl Driver for Plain<SqliteConnection> {
    type Fence = SqliteFence;
    type Target = SqliteConnection;

    fn target(&self) -> &SqliteConnection {
        &self.0
    }

    fn target_mut(&mut self) -> &mut SqliteConnection {
        &mut self.0
    }

    async fn lease_status(
        &mut self,
        fence: &SqliteFence,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
        raw_sql(SqliteFence::MARK).execute(&mut self.0).await?;
        let status = query(AssertSqlSafe(fence.lease_status_sql()))
            .bind(lease.id.as_bytes().as_slice())
            .bind(lease.token.as_bytes().as_slice())
            .fetch_optional(&mut self.0);
        let row = status.await?;
        let is_held = row.map(|row| row.try_get(0)).transpose()?;
        Ok(LeaseStatus::from_row(is_held))
    }

    async fn write_record(
        &mut self,
        fence: &SqliteFence,
        write: RecordWrite<'_>,
    ) -> Result<RecordStatus, SqlError> {
        let released = raw_sql(SqliteFence::RELEASE_MARK)
            .execute(&mut self.0)
            .await;
        if let Err(error) = released.map_err(SqlError::from) {
            return unmarked(error, SqliteFence::NO_MARK);
        }
        let written = query(AssertSqlSafe(fence.write_record_sql()))
            .bind(write.id())
            .bind(write.token())
            .bind(write.retention_millis())
            .bind(write.record())
            .fetch_all(&mut self.0);
        let is_written = !written.await?.is_empty();
        Ok(RecordStatus::from_row(true, is_written))
    }

    async fn commit(mut self) -> Result<(), SqlError> {
        raw_sql("commit").execute(&mut self.0).await?;
        Ok(())
    }

    async fn rollback(mut self) -> Result<(), SqlError> {
        raw_sql("rollback").execute(&mut self.0).await?;
        Ok(())
    }
}

/// Returns the status after the release of the mark has failed.
fn unmarked(error: SqlError, no_mark: &str) -> Result<RecordStatus, SqlError> {
    if error.code() == Some(no_mark) {
        return Ok(RecordStatus::TransactionEnded);
    }
    Err(error)
}

/// A database on which a driver of this file executes the statements.
trait PlainDialect: TestDialect {
    /// A transaction on a plain connection.
    type Plain: Driver<Target = <Self::Database as Database>::Connection> + 'static;

    /// Returns the statements of the store.
    fn store_fence(&self) -> impl Future<Output = <Self::Plain as Driver>::Fence> + Send;

    /// Returns the statements for a table.
    fn table_fence(table: &str) -> <Self::Plain as Driver>::Fence;

    /// Begins a transaction without the store.
    fn begin_plain(
        database: &TestDatabase<Self>,
        fence: <Self::Plain as Driver>::Fence,
        lease: &Lease,
    ) -> impl Future<Output = Result<FencedTransaction<Self::Plain>, TransactionError>> + Send;
}

impl PlainDialect for MySqlStore {
    type Plain = Plain<MySqlConnection>;

    async fn store_fence(&self) -> MySqlFence {
        self.fence().await.expect("the test server runs")
    }

    fn table_fence(table: &str) -> MySqlFence {
        MySqlFence::new(table).expect("an identifier")
    }

    async fn begin_plain(
        database: &TestDatabase<Self>,
        fence: MySqlFence,
        lease: &Lease,
    ) -> Result<FencedTransaction<Self::Plain>, TransactionError> {
        let options = database.pool.connect_options();
        let connection = Box::pin(MySqlConnection::connect_with(&options)).await;
        let mut connection = connection.map_err(SqlError::from)?;
        // One message for each statement, as some drivers send them.
        for statement in MySqlFence::BEGIN.split("; ") {
            let begun = raw_sql(statement).execute(&mut connection).await;
            begun.map_err(SqlError::from)?;
        }
        FencedTransaction::begin(fence, lease, Plain(connection)).await
    }
}

impl PlainDialect for SqliteStore {
    type Plain = Plain<SqliteConnection>;

    async fn store_fence(&self) -> SqliteFence {
        self.into()
    }

    fn table_fence(table: &str) -> SqliteFence {
        SqliteFence::new(table).expect("an identifier")
    }

    async fn begin_plain(
        database: &TestDatabase<Self>,
        fence: SqliteFence,
        lease: &Lease,
    ) -> Result<FencedTransaction<Self::Plain>, TransactionError> {
        let options = database.pool.connect_options();
        let connection = Box::pin(SqliteConnection::connect_with(&options)).await;
        let mut connection = connection.map_err(SqlError::from)?;
        let begun = raw_sql(SqliteFence::BEGIN).execute(&mut connection).await;
        begun.map_err(SqlError::from)?;
        FencedTransaction::begin(fence, lease, Plain(connection)).await
    }
}

// ---- Exactly once ----

/// Begins a transaction with the store's statements, and has the effect.
async fn charged<S: PlainDialect>(
    database: &TestDatabase<S>,
    lease: &Lease,
    n: u64,
) -> FencedTransaction<S::Plain> {
    let fence = database.store.store_fence().await;
    let begun = S::begin_plain(database, fence, lease).await;
    let mut tx = begun.expect("a transaction");
    let effect = S::run(&mut tx, database.effect("charge", 1, n)).await;
    effect.expect("the effect");
    tx
}

async fn committed(tx: FencedTransaction<impl Driver>, res: Response) -> Response {
    match tx.commit(res).await {
        Ok(res) => res.into_response(),
        Err(error) => failed(&error.into_output().expect_err("a recorded status")),
    }
}

fn failed(error: &TransactionError) -> Response {
    let kind = format!("{:?}", error.kind());
    (StatusCode::SERVICE_UNAVAILABLE, kind).into_response()
}

async fn statements_commit_exactly_once<S: PlainDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await;
        committed(tx, created(n)).await
    });
    let first = send(&app, order()).await;
    assert!(!first.is_replay());
    assert_charged_once(&database, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

/// The lease is lost, or the transaction has ended. The record and the effect are then both missing.
async fn statements_refuse_commit<S: PlainDialect>(database: TestDatabase<S>) {
    for (sql, kind) in [
        ("update {table} set token = null", Kind::LeaseLost),
        ("rollback", Kind::Ended),
    ] {
        let (app, executions) = bank(&database, move |database, lease, n| async move {
            let mut tx = charged(&database, &lease, n).await;
            if n == 1 {
                let sql = sql.replace("{table}", &database.table);
                S::run(&mut tx, sql).await.expect("it works");
            }
            committed(tx, created(n)).await
        });
        let refused = send(&app, order()).await;
        assert_eq!(refused.text(), format!("{kind:?}"), "{sql}");
        assert_eq!(database.count().await, 0, "{sql}");
        let first = send(&app, order()).await;
        assert_charged_once(&database, &app, &first).await;
        assert_eq!(executions.count(), 2, "{sql}");
        for table in [database.table.clone(), database.effects_table()] {
            database.admin(&format!("delete from {table}")).await;
        }
    }
}

async fn status_finds_no_entry<S: PlainDialect>(database: TestDatabase<S>) {
    let other_table = S::table_fence("absent");
    for (n, theft, kind) in [
        (1, None, Kind::NoEntry),
        (2, Some("delete from {table}"), Kind::NoEntry),
        (3, Some("update {table} set token = null"), Kind::LeaseLost),
    ] {
        let other_table = other_table.clone();
        let (app, _) = bank(&database, move |database, lease, _| {
            let other_table = other_table.clone();
            async move {
                let fence = match theft {
                    Some(theft) => {
                        database.admin(theft).await;
                        database.store.store_fence().await
                    }
                    None => other_table,
                };
                let begun = S::begin_plain(&database, fence, &lease).await;
                failed(&begun.expect_err("nothing begins"))
            }
        });
        let refused = send(&app, tests::post("/orders", &format!("key-{n}"), "tea")).await;
        assert_eq!(refused.text(), format!("{kind:?}"), "{n}");
    }
    assert_eq!(database.count().await, 0);
}

/// The fence has the limit of the store.
async fn record_over_limit_is_tombstone<S: PlainDialect>(database: TestDatabase<S>) {
    let (app, executions) = bank(&database, async |database, lease, n| {
        let tx = charged(&database, &lease, n).await;
        committed(tx, tests::noise(2 << 20).into_response()).await
    });
    let first = send(&app, order()).await;
    assert_eq!((first.status, first.body.len()), (StatusCode::OK, 2 << 20));
    let retry = send(&app, order()).await;
    assert_eq!(retry.status, StatusCode::CONFLICT);
    assert_eq!(retry.code(), "response-not-retained");
    assert_eq!((database.count().await, executions.count()), (1, 1));
}

macro_rules! each {
    ($($case:ident $table:literal)*) => {
        mod on_mariadb {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let database = super::database::on_mariadb($table).await;
                    let store = database.store.clone().with_record_limit(1 << 20);
                    super::$case(super::TestDatabase { store, ..database }).await;
                }
            )*
        }

        mod on_sqlite {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    let scratch = super::Scratch::new();
                    let database = super::database::sqlite_file_database(&scratch, $table).await;
                    let store = database.store.clone().with_record_limit(1 << 20);
                    super::$case(super::TestDatabase { store, ..database }).await;
                }
            )*
        }
    };
}

each! {
    statements_commit_exactly_once "fence_commit"
    statements_refuse_commit "fence_refused"
    status_finds_no_entry "fence_status"
    record_over_limit_is_tombstone "fence_limit"
}

/// A record above this limit would be rejected by the server, and not become a tombstone.
#[tokio::test(flavor = "multi_thread")]
async fn mariadb_fence_has_limit_of_server() {
    let database = database::on_mariadb("fence_packet").await;
    let packet = query_scalar::<_, u64>("select @@max_allowed_packet").fetch_one(&database.pool);
    let packet = usize::try_from(packet.await.expect("a setting")).expect("it fits");
    let fence = database.store.fence().await.expect("the test server runs");
    assert_eq!(fence.record_limit(), (packet - 8192) / 4 * 3);
}

// ---- Versions ----

/// A driver's crate relies on the statements of a version. A changed statement needs a new version with new files. Files of
/// an earlier version stay as they are.
#[test]
fn changed_statement_has_new_version() {
    let postgres = [
        ("begin", PostgresFence::BEGIN),
        ("lease status", PostgresFence::LEASE_STATUS),
        ("write record", PostgresFence::WRITE_RECORD),
    ];
    let mysql = [
        ("begin", MySqlFence::BEGIN),
        ("lease status", MySqlFence::LEASE_STATUS),
        ("release mark", MySqlFence::RELEASE_MARK),
        ("write record", MySqlFence::WRITE_RECORD),
    ];
    let sqlite = [
        ("begin", SqliteFence::BEGIN),
        ("mark", SqliteFence::MARK),
        ("lease status", SqliteFence::LEASE_STATUS),
        ("release mark", SqliteFence::RELEASE_MARK),
        ("write record", SqliteFence::WRITE_RECORD),
    ];
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    for (database, version, statements) in [
        ("postgres", PostgresFence::VERSION, &postgres[..]),
        ("mysql", MySqlFence::VERSION, &mysql),
        ("sqlite", SqliteFence::VERSION, &sqlite),
    ] {
        let file = golden.join(format!("fence-v{version}/{database}.sql"));
        let text = fs::read_to_string(&file).expect("a file for each version");
        let blocks = statements
            .iter()
            .map(|(name, sql)| format!("-- {name}\n{sql};\n"));
        assert_eq!(text, blocks.collect::<Vec<_>>().join("\n"), "{file:?}");
    }
}
