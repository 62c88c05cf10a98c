//! Operations for operators on MySQL and MariaDB.

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use sqlx::Row;
use tower_idempotency::{inspect::State, store::KeyId};

use super::{
    Inner, MySqlStore, read_entry_row,
    statements::{NOW, bytes, in_a_transaction},
};
use crate::{
    SqlError,
    audit::{AuditTable, MAX_LINE, implement_audit},
    connection::Priority::{Acquire, Maintain},
    inspect::{Dialect, EntryRow, InspectStatements, InspectTable, implement_inspect},
};

implement_inspect!(MySqlStore);
implement_audit!(MySqlStore);

pub(super) fn dialect() -> Dialect {
    Dialect {
        name: "mysql",
        quote: '`',
        bytes,
        // In base64, three bytes of a record take four bytes of the packet.
        record: |record| format!("from_base64('{}')", BASE64.encode(record)),
        select_bytes: str::to_owned,
        record_prefix: format!("left(record, {})", State::RECORD_PREFIX),
        record_length: "length(record)",
        needs_attention: "attention >= 0".to_owned(),
        attention_key: "attention",
        completed_key: "record_expires",
        now: NOW.to_owned(),
        now_of_write: NOW,
        index_hint: |index| format!(" force index ({index})"),
        from: [String::new(), String::new()],
    }
}

impl InspectTable for Inner {
    fn statements(&self) -> &InspectStatements {
        &self.inspect_statements
    }

    async fn max_record_len(&self) -> Result<usize, SqlError> {
        self.record_limit().await
    }

    async fn read_rows(&self, sql: String) -> Result<Vec<EntryRow>, SqlError> {
        let sql = in_a_transaction(&format!("\n{sql};"));
        let rows = self.query(Acquire, sql).await?;
        rows.iter().map(read_entry_row).collect()
    }

    async fn read_counts(&self, sql: String) -> Result<(i64, i64), SqlError> {
        let sql = in_a_transaction(&format!("\n{sql};"));
        let rows = self.query(Acquire, sql).await?;
        let row = rows.first().ok_or(SqlError::unreadable("no count"))?;
        Ok((row.try_get(0)?, row.try_get(1)?))
    }

    async fn update(
        &self,
        id: &KeyId,
        update: String,
        _record: Option<&[u8]>,
    ) -> Result<Option<EntryRow>, SqlError> {
        let read = self.inspect_statements.read(id);
        let sql = in_a_transaction(&format!("\n{update};\n{read};"));
        let rows = self.query(Acquire, sql).await?;
        rows.first().map(read_entry_row).transpose()
    }

    async fn delete(&self, _id: &KeyId, delete: String) -> Result<bool, SqlError> {
        let sql = in_a_transaction(&format!("\n{delete};\nselect row_count();"));
        let rows = self.query(Acquire, sql).await?;
        let row = rows.first().ok_or(SqlError::unreadable("no count"))?;
        let deleted: i64 = row.try_get(0)?;
        Ok(deleted == 1)
    }
}

impl AuditTable for Inner {
    fn append(&self, line: &str) -> String {
        let (table, line) = (
            self.settings.table.audit().quoted('`'),
            bytes(line.as_bytes()),
        );
        format!("insert into {table} (line) values (convert({line} using utf8mb4));")
    }

    fn create(&self) -> String {
        let table = self.settings.table.audit().quoted('`');
        format!(
            "create table if not exists {table} (
  n bigint not null auto_increment primary key, at timestamp(3) not null default current_timestamp(3),
  line longtext character set utf8mb4 not null);"
        )
    }

    fn select_last(&self, limit: u32) -> String {
        let table = self.settings.table.audit().quoted('`');
        in_a_transaction(&format!(
            "\nselect left(line, {MAX_LINE}) from {table} order by n desc limit {limit};"
        ))
    }

    async fn is_missing(&self, error: &SqlError) -> bool {
        error.code() == Some("1146")
    }

    async fn execute(&self, sql: String) -> Result<(), SqlError> {
        self.query(Maintain, sql).await.map(drop)
    }

    async fn read(&self, sql: String) -> Result<Vec<String>, SqlError> {
        let rows = self.query(Acquire, sql).await?;
        let lines = rows.iter().map(|row| row.try_get::<String, _>(0));
        Ok(lines.collect::<Result<_, _>>()?)
    }
}
