//! Operations for operators on SQLite.

use sqlx::{AssertSqlSafe, Row, SqlSafeStr as _, Sqlite, sqlite::SqliteRow};
use tower_idempotency::{inspect::State, store::KeyId};

use super::{Inner, SqliteStore, statements::NOW};
use crate::{
    SqlError,
    connection::{Connections, Priority::Acquire},
    hex,
    inspect::{Dialect, EntryRow, InspectStatements, InspectTable, implement_inspect},
};

implement_inspect!(SqliteStore);

pub(super) fn dialect() -> Dialect {
    Dialect {
        name: "sqlite",
        quote: '"',
        bytes: |bytes| format!("x'{}'", hex::encode(bytes)),
        // A statement may be too short for a record.
        record: |_| "?1".to_owned(),
        select_bytes: str::to_owned,
        record_prefix: format!("substr(record, 1, {})", State::RECORD_PREFIX),
        record_length: "length(record)",
        needs_attention: "substr(record, 2, 1) = x'02'",
        attention_key: "completed",
        now: NOW.to_owned(),
        now_of_write: NOW,
        from: [String::new(), String::new()],
    }
}

impl InspectTable for Inner {
    fn statements(&self) -> &InspectStatements {
        &self.inspect_statements
    }

    async fn max_record_len(&self) -> Result<usize, SqlError> {
        Ok(self.settings.record_limit)
    }

    async fn read_rows(&self, sql: String) -> Result<Vec<EntryRow>, SqlError> {
        let rows = fetch(&self.readers, sql, None).await?;
        rows.iter().map(read_entry_row).collect()
    }

    async fn read_counts(&self, sql: String) -> Result<(i64, i64), SqlError> {
        let rows = fetch(&self.readers, sql, None).await?;
        let row = rows.first().ok_or(SqlError::unreadable("no count"))?;
        Ok((row.try_get(0)?, row.try_get(1)?))
    }

    async fn update(
        &self,
        _id: &KeyId,
        update: String,
        record: Option<&[u8]>,
    ) -> Result<Option<EntryRow>, SqlError> {
        let columns = self.inspect_statements.entry_columns();
        let update = format!("{update} returning {columns}");
        let rows = fetch(&self.writer, update, record).await?;
        rows.first().map(read_entry_row).transpose()
    }

    async fn delete(&self, _id: &KeyId, delete: String) -> Result<bool, SqlError> {
        let rows = fetch(&self.writer, format!("{delete} returning 1"), None).await?;
        Ok(!rows.is_empty())
    }
}

/// Executes one statement, with a record as its parameter. Reads to the end of the result, after which SQLite commits.
async fn fetch(
    connections: &Connections<Sqlite>,
    sql: String,
    record: Option<&[u8]>,
) -> Result<Vec<SqliteRow>, SqlError> {
    let (mut pooled, _) = connections.checkout(Acquire).await?;
    // Safe: values are in the text as digits only. The text differs from call to call, so it is not cached.
    let mut query = sqlx::query(AssertSqlSafe(sql).into_sql_str()).persistent(false);
    if let Some(record) = record {
        query = query.bind(record);
    }
    let rows = query.fetch_all(&mut pooled.connection).await?;
    pooled.return_to_pool();
    Ok(rows)
}

fn read_entry_row(row: &SqliteRow) -> Result<EntryRow, SqlError> {
    Ok(EntryRow {
        id: row.try_get(0)?,
        token: row.try_get(1)?,
        fingerprint: row.try_get(2)?,
        generation: row.try_get(3)?,
        lease_ends: row.try_get(4)?,
        forgotten_at: row.try_get(5)?,
        created: row.try_get(6)?,
        completed: row.try_get(7)?,
        owner: row.try_get(8)?,
        operation: row.try_get(9)?,
        has_checkpoint: row.try_get(10)?,
        record: row.try_get(11)?,
        record_len: row.try_get(12)?,
        now: row.try_get(13)?,
    })
}
