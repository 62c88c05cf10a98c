//! Drivers that execute the statements of a fence on a connection of sqlx, without the store.

use tests::database::{TestDatabase, TestDialect};
use tower_idempotency::{Lease, store::LeaseRef};
use tower_idempotency_sql::{
    Driver, FencedTransaction, LeaseStatus, RecordStatus, RecordWrite, SqlError, TransactionError,
};
use tower_idempotency_sqlx::{
    MySqlFence, MySqlStore, PostgresFence, PostgresStore, SqliteFence, SqliteStore,
    sqlx::{
        AssertSqlSafe, Connection as _, Database, MySqlConnection, PgConnection, Row as _,
        SqliteConnection, query, raw_sql,
    },
};

/// A transaction on a plain connection of sqlx. The drop closes the connection, and the database rolls back.
pub(super) struct Plain<C>(pub(super) C);

impl Driver for Plain<PgConnection> {
    type Fence = PostgresFence;
    type Target = PgConnection;

    fn target(&self) -> &PgConnection {
        &self.0
    }

    fn target_mut(&mut self) -> &mut PgConnection {
        &mut self.0
    }

    async fn lease_status(
        &mut self,
        fence: &PostgresFence,
        lease: &LeaseRef,
    ) -> Result<LeaseStatus, SqlError> {
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
        fence: &PostgresFence,
        write: RecordWrite<'_>,
    ) -> Result<RecordStatus, SqlError> {
        let written = query(AssertSqlSafe(fence.write_record_sql()))
            .bind(write.id())
            .bind(write.token())
            .bind(write.record())
            .bind(write.retention_millis())
            .fetch_one(&mut self.0);
        let row = written.await?;
        Ok(RecordStatus::from_row(row.try_get(0)?, row.try_get(1)?))
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
pub(super) trait PlainDialect: TestDialect {
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

impl PlainDialect for PostgresStore {
    type Plain = Plain<PgConnection>;

    async fn store_fence(&self) -> PostgresFence {
        self.into()
    }

    fn table_fence(table: &str) -> PostgresFence {
        PostgresFence::new(table).expect("an identifier")
    }

    async fn begin_plain(
        database: &TestDatabase<Self>,
        fence: PostgresFence,
        lease: &Lease,
    ) -> Result<FencedTransaction<Self::Plain>, TransactionError> {
        let connection = open(database, PostgresFence::BEGIN).await?;
        FencedTransaction::begin(fence, lease, Plain(connection)).await
    }
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
        let connection = open(database, MySqlFence::BEGIN).await?;
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
        let connection = open(database, SqliteFence::BEGIN).await?;
        FencedTransaction::begin(fence, lease, Plain(connection)).await
    }
}

/// Opens a connection, and begins a transaction on it. Sends one message for each statement, as some drivers do.
async fn open<S: TestDialect>(
    database: &TestDatabase<S>,
    begin: &str,
) -> Result<<S::Database as Database>::Connection, SqlError> {
    let options = database.pool.connect_options();
    let connecting = <S::Database as Database>::Connection::connect_with(&options);
    let mut connection = Box::pin(connecting).await?;
    for statement in begin.split("; ") {
        S::run(&mut connection, statement.to_owned()).await?;
    }
    Ok(connection)
}
