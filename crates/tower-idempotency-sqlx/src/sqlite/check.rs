//! The check of a SQLite file.

use sqlx::Row as _;
use tower_idempotency::store::{CheckError, CheckErrorKind};

use super::{Inner, SqliteStore};
use crate::{
    SqlError,
    check::{COLUMNS, IN_MEMORY, INDEXES, Missing, NAME_A_FILE},
};

impl SqliteStore {
    /// Checks the file, the table, the indexes, and that the file can be written. Changes nothing.
    pub(super) async fn check_file(&self) -> Result<(), CheckError> {
        let inner = &self.inner;
        let is_in_memory = inner.is_in_memory().await.map_err(|error| failed(&error))?;
        if is_in_memory {
            return Err(CheckError::new(
                CheckErrorKind::Unsafe,
                IN_MEMORY,
                NAME_A_FILE,
            ));
        }
        let table = inner.settings.table.quoted('"');
        let name = table.trim_matches('"');
        let parts = COLUMNS
            .map(|column| {
                (
                    "column",
                    column,
                    format!("pragma_table_info('{name}') where name = '{column}'"),
                )
            })
            .into_iter()
            .chain(INDEXES.map(|index| {
                let from = format!("pragma_index_list('{name}') where name = '{name}_{index}'");
                ("index", index, from)
            }))
            .map(|(kind, part, from)| {
                format!("(select '{kind} {part}' where not exists (select 1 from {from}))")
            })
            .collect::<Vec<_>>()
            .join(", ");
        let sql = format!(
            "select coalesce((select 'table' where not exists (select 1 from pragma_table_info('{name}'))), {parts}, '')"
        );
        let found = inner
            .select_text(sql)
            .await
            .map_err(|error| failed(&error))?;
        match found.as_str() {
            "" => {}
            "table" => return Err(Missing::Table.in_table(&table)),
            part => return Err(Missing::Part(part).in_table(&table)),
        }
        // Deletes no row, but fails if the file is read-only.
        let write = format!("delete from {table} where false");
        let written = inner.select_text(write).await;
        written.map(drop).map_err(|error| match error.code() {
            // The extended result codes of SQLITE_READONLY.
            Some(code) if code.parse().is_ok_and(|code: u32| code & 0xff == 8) => {
                Missing::Writes.in_table(&table)
            }
            _ => failed(&error),
        })
    }
}

impl Inner {
    /// Returns `true` if each connection has a database of its own, which ends with the connection.
    pub(super) async fn is_in_memory(&self) -> Result<bool, SqlError> {
        let sql = "select coalesce(max(file), '') from pragma_database_list where name = 'main'";
        Ok(self.select_text(sql.to_owned()).await?.is_empty())
    }

    /// Returns the text that the last statement selects, on the connection of the writer.
    async fn select_text(&self, sql: String) -> Result<String, SqlError> {
        let rows = self.writer.fetch_all_raw(sql).await?;
        let text = rows.last().map(|row| row.try_get::<String, _>(0));
        Ok(text.transpose()?.unwrap_or_default())
    }
}

fn failed(error: &SqlError) -> CheckError {
    CheckError::unreachable(
        error,
        "check the path, the rights of the process on the file and its directory, and that no writer holds the file",
    )
}
