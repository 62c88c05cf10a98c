//! Operations for operators on SQLite.

use sqlx::{AssertSqlSafe, Row, SqlSafeStr as _, sqlite::SqliteRow};
use tower_idempotency::{inspect::State, store::KeyId};

use super::{
    Inner, SqliteStore,
    busy::FileConnections,
    read_entry_row,
    statements::{NOW, needs_attention},
};
use crate::{
    SqlError,
    audit::{AuditTable, MAX_LINE, implement_audit},
    connection::Priority::Acquire,
    hex,
    inspect::{Dialect, EntryRow, InspectStatements, InspectTable, implement_inspect},
    timeout::with_timeout,
};

implement_inspect!(SqliteStore);
implement_audit!(SqliteStore);

pub(super) fn dialect() -> Dialect {
    Dialect {
        name: "sqlite",
        quote: '"',
        bytes: |bytes| format!("x'{}'", hex::encode(bytes)),
        // A bound value, because a record can be longer than a statement.
        record: |_| "?1".to_owned(),
        select_bytes: str::to_owned,
        record_prefix: format!("substr(record, 1, {})", State::RECORD_PREFIX),
        record_length: "length(record)",
        needs_attention: needs_attention("record"),
        attention_key: "completed",
        completed_key: "expires",
        now: NOW.to_owned(),
        now_of_write: NOW,
        index_hint: |_| String::new(),
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

impl AuditTable for Inner {
    fn append(&self, line: &str) -> String {
        let (table, line) = (
            self.settings.table.audit().quoted('"'),
            hex::encode(line.as_bytes()),
        );
        format!("insert into {table} (line) values (cast(x'{line}' as text))")
    }

    fn create(&self) -> String {
        let table = self.settings.table.audit().quoted('"');
        format!(
            "create table if not exists {table} (n integer primary key autoincrement, \
             at text not null default (strftime('%Y-%m-%dT%H:%M:%fZ')), line text not null)"
        )
    }

    fn select_last(&self, limit: u32) -> String {
        let table = self.settings.table.audit().quoted('"');
        format!("select substr(line, 1, {MAX_LINE}) from {table} order by n desc limit {limit}")
    }

    /// SQLite has no code of its own for this error. A table without the column `line` has the same one.
    async fn is_missing(&self, error: &SqlError) -> bool {
        if error.code() != Some("1") {
            return false;
        }
        let table = self.settings.table.audit();
        let select = format!(
            "select 1 from sqlite_master where name = '{}' collate nocase",
            table.name()
        );
        let found = with_timeout(fetch(&self.readers, select, None)).await;
        found.is_ok_and(|rows| rows.is_empty())
    }

    async fn execute(&self, sql: String) -> Result<(), SqlError> {
        fetch(&self.writer, sql, None).await.map(drop)
    }

    async fn read(&self, sql: String) -> Result<Vec<String>, SqlError> {
        let rows = fetch(&self.readers, sql, None).await?;
        let lines = rows.iter().map(|row| row.try_get::<String, _>(0));
        Ok(lines.collect::<Result<_, _>>()?)
    }
}

/// Executes one statement, with a record as its parameter.
async fn fetch(
    connections: &FileConnections,
    sql: String,
    record: Option<&[u8]>,
) -> Result<Vec<SqliteRow>, SqlError> {
    // Safe: values are in the text as digits only. The text differs in each call, so no statement is cached.
    let mut query = sqlx::query(AssertSqlSafe(sql).into_sql_str()).persistent(false);
    if let Some(record) = record {
        query = query.bind(record);
    }
    connections.fetch_all(Acquire, query).await
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use tower_idempotency::inspect::{Inspect as _, Query};

    use super::*;

    /// A directory for throwaway files. Its drop deletes it.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let name = format!("tower-idempotency-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).expect("a directory for throwaway files");
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).ok();
        }
    }

    /// Returns the plan of a statement, a line for each step.
    async fn plan(store: &SqliteStore, sql: &str) -> String {
        let explain = format!("explain query plan {sql}");
        let rows = fetch(&store.inner.readers, explain, None).await;
        let rows = rows.expect("the file can be read");
        let steps = rows.iter().map(|row| row.get::<String, _>("detail"));
        steps.collect::<Vec<_>>().join("\n")
    }

    /// Asserts that the statements of each listing read its index, and sort nothing. Asserts that a purge reads indexes.
    async fn check_plans(store: &SqliteStore) {
        let statements = &store.inner.statements;
        let read = plan(store, statements.read_expired.as_str()).await;
        let expected = "SEARCH tower_idempotency USING INDEX tower_idempotency_expires (expires<?)";
        assert_eq!(read, expected);
        let delete = plan(store, statements.delete_expired.as_str()).await;
        assert!(!delete.contains("SCAN tower_idempotency"), "{delete}");
        assert!(!delete.contains("TEMP B-TREE"), "{delete}");
        // Reads no expired row after the last one of the batch.
        assert!(delete.contains("((expires,id)<(?,?))"), "{delete}");
        for (state, index) in [
            (State::InProgress, "orphans"),
            (State::Orphaned, "orphans"),
            (State::NeedsAttention, "attention"),
            (State::Completed, "completed"),
        ] {
            let first = store.list(&Query::new(state)).await;
            let first = first.expect("the file can be read").entries;
            assert_eq!(first.len(), 50, "{state}");
            let [first, next, prefix, count] =
                crate::inspect::listing_statements(&*store.inner, state, &first[49]);
            let index = format!("USING INDEX tower_idempotency_{index}");
            for (sql, index) in [
                (first, &*index),
                (next, &*index),
                (count, &*index),
                (prefix, "USING INDEX sqlite_autoindex_tower_idempotency_1"),
            ] {
                let plan = plan(store, &sql).await;
                assert!(plan.contains(index), "{sql}\n{plan}");
                // All rows of this index are in the listing.
                let plan = plan.replace(
                    "SCAN tower_idempotency USING INDEX tower_idempotency_attention",
                    "",
                );
                for step in ["SCAN tower_idempotency", "TEMP B-TREE"] {
                    assert!(!plan.contains(step), "{sql}\n{plan}");
                }
            }
        }
    }

    #[tokio::test]
    async fn audit_lines_are_read_by_primary_key() {
        let directory = Directory::new("audit-plan");
        let store = SqliteStore::in_file(directory.0.join("keys.db"));
        store.migrate().await.expect("the file can be written");
        let missing = store.last_audit_lines(2).await;
        assert!(missing.expect("the file can be read").is_empty());
        for line in ["a", "b", "c"] {
            let appended = store.append_audit_line(line).await;
            appended.expect("the file can be written");
        }
        let lines = store.last_audit_lines(2).await;
        assert_eq!(lines.expect("the file can be read"), ["c", "b"]);
        let plan = plan(&store, &store.inner.select_last(2)).await;
        assert_eq!(plan, "SCAN tower_idempotency_audit");
    }

    #[tokio::test]
    async fn listings_use_indexes() {
        let directory = Directory::new("plans");
        let store = SqliteStore::in_file(directory.0.join("keys.db"));
        store.migrate().await.expect("the file can be written");
        let rows = if std::env::var_os("FULL").is_some() {
            1_000_000
        } else {
            20_000
        };
        execute(&store, fill(rows)).await;
        // The plans must not depend on statistics.
        check_plans(&store).await;
        execute(&store, "analyze".to_owned()).await;
        check_plans(&store).await;
    }

    /// The application calls `analyze` while the table of the store is small.
    #[tokio::test]
    async fn plans_ignore_analysis_of_small_table() {
        let directory = Directory::new("small");
        for small in [1, 5] {
            let file = directory.0.join(format!("{small}.db"));
            let store = SqliteStore::in_file(&file);
            store.migrate().await.expect("the file can be written");
            execute(&store, fill(small)).await;
            execute(&store, "analyze".to_owned()).await;
            execute(&store, fill(20_000)).await;
            // A connection reads the statistics when it opens the file.
            check_plans(&SqliteStore::in_file(&file)).await;
        }
    }

    async fn execute(store: &SqliteStore, sql: String) {
        let executed = fetch(&store.inner.writer, sql, None).await;
        executed.expect("the file can be written");
    }

    /// Returns a statement that adds this number of rows, of all states.
    fn fill(rows: u32) -> String {
        format!(
            "insert into tower_idempotency
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, owner, operation, record)
with recursive n (n) as (select 1 union all select n + 1 from n where n < {rows})
select randomblob(32), randomblob(16), randomblob(32), 1, {NOW} + (n % 3 - 1) * 1000000 + n % 977, 3600000,
  {NOW} + 3000000 + n, {NOW} - 900000, iif(n % 20 > 2, {NOW} - n, null), '', '',
  case when n % 20 = 3 then x'0102000000000161' when n % 20 > 3 then x'0100000000007061' end
from n"
        )
    }
}
