//! Operations for operators on PostgreSQL.

use sqlx::{Row, postgres::PgRow};
use tower_idempotency::{inspect::State, store::KeyId};

use super::{
    Inner, PostgresStore,
    statements::{BY_INDEX, NOW, PREFACE, bytes, needs_attention},
    unescape::unescape,
};
use crate::{
    SqlError,
    audit::{AuditTable, MAX_LINE, implement_audit},
    connection::Priority::{Acquire, Maintain},
    hex,
    inspect::{Dialect, EntryRow, InspectStatements, InspectTable, implement_inspect},
};

implement_inspect!(PostgresStore);
implement_audit!(PostgresStore);

pub(super) fn dialect() -> Dialect {
    let clock = format!("(select {NOW} as now) clock");
    Dialect {
        name: "postgres",
        quote: '"',
        bytes,
        record: bytes,
        select_bytes: |column| format!("encode({column}, 'hex')"),
        record_prefix: format!("substring(record from 1 for {})", State::RECORD_PREFIX),
        record_length: "octet_length(record)",
        needs_attention: needs_attention("record"),
        attention_key: "completed",
        completed_key: "expires",
        now: format!("(select {NOW})"),
        now_of_write: "now",
        index_hint: |_| String::new(),
        from: [format!(" from {clock}"), format!(" using {clock}")],
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
        let rows = self
            .query(Acquire, format!("{PREFACE}{BY_INDEX}\n{sql};"))
            .await?;
        rows.iter().map(read_entry_row).collect()
    }

    async fn read_counts(&self, sql: String) -> Result<(i64, i64), SqlError> {
        let rows = self
            .query(Acquire, format!("{PREFACE}{BY_INDEX}\n{sql};"))
            .await?;
        let row = rows.first().ok_or(SqlError::unreadable("no count"))?;
        Ok((row.try_get(0)?, row.try_get(1)?))
    }

    async fn update(
        &self,
        id: &KeyId,
        update: String,
        _record: Option<&[u8]>,
    ) -> Result<Option<EntryRow>, SqlError> {
        let (channel, read) = (self.statements.channel(), self.inspect_statements.read(id));
        let sql = format!(
            "{PREFACE}
with resolved as ({update} returning id, awaited)
select pg_notify('{channel}', encode(id, 'hex')) from resolved where awaited;
{read};"
        );
        let rows = self.query(Acquire, sql).await?;
        // The first row may belong to the notification.
        let row = rows.last().filter(|row| row.len() > 1);
        row.map(read_entry_row).transpose()
    }

    async fn delete(&self, id: &KeyId, delete: String) -> Result<bool, SqlError> {
        let (channel, id) = (self.statements.channel(), hex::encode(id.as_bytes()));
        let sql = format!(
            "{PREFACE}
with resolved as ({delete} returning awaited)
select case when awaited then pg_notify('{channel}', '{id}')::text end from resolved;"
        );
        Ok(!self.query(Acquire, sql).await?.is_empty())
    }
}

impl AuditTable for Inner {
    fn append(&self, line: &str) -> String {
        let (table, line) = (
            self.settings.table.audit().quoted('"'),
            bytes(line.as_bytes()),
        );
        format!("insert into {table} (line) values (convert_from({line}, 'UTF8'));")
    }

    fn create(&self) -> String {
        let table = self.settings.table.audit().quoted('"');
        // The lock of the migrations: two processes that create one table at the same time would fail.
        format!(
            "select pg_advisory_xact_lock(x'746f7765725f6964'::bigint);
create table if not exists {table} (
  n bigint generated always as identity primary key, at timestamptz not null default clock_timestamp(), line text not null);"
        )
    }

    fn select_last(&self, limit: u32) -> String {
        let table = self.settings.table.audit().quoted('"');
        format!(
            "{PREFACE}{BY_INDEX}\nselect left(line, {MAX_LINE}) from {table} order by n desc limit {limit};"
        )
    }

    async fn is_missing(&self, error: &SqlError) -> bool {
        error.code() == Some("42P01")
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

fn read_entry_row(row: &PgRow) -> Result<EntryRow, SqlError> {
    let bytes = |text| hex::decode(text).ok_or(SqlError::unreadable("no bytes"));
    let token: Option<&str> = row.try_get(1)?;
    let record: Option<&str> = row.try_get(11)?;
    let record_len: Option<i32> = row.try_get(12)?;
    Ok(EntryRow {
        id: bytes(row.try_get(0)?)?,
        token: token.map(bytes).transpose()?,
        fingerprint: bytes(row.try_get(2)?)?,
        generation: row.try_get(3)?,
        lease_ends: row.try_get(4)?,
        expires: row.try_get(5)?,
        created: row.try_get(6)?,
        completed: row.try_get(7)?,
        owner: unescape(row.try_get(8)?),
        operation: unescape(row.try_get(9)?),
        has_checkpoint: row.try_get(10)?,
        record: record.map(bytes).transpose()?,
        record_len: record_len.map(i64::from),
        now: row.try_get(13)?,
    })
}
