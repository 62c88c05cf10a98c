//! The check of a PostgreSQL server.

use tower_idempotency::store::CheckError;

use super::{Maintain, PostgresStore};
use crate::{
    SqlError,
    check::{COLUMNS, INDEXES, Missing, failed},
    timeout::with_timeout,
};

impl PostgresStore {
    /// Checks table, columns, rights and indexes, and that the store's transactions may write. Writes nothing.
    pub(super) async fn check_server(&self) -> Result<(), CheckError> {
        let table = self.inner.settings.table.quoted('"');
        let names = |names: &[&str]| format!("array['{}']", names.join("', '"));
        let (columns, indexes) = (names(&COLUMNS), names(&INDEXES));
        let rights = names(&["select", "insert", "update", "delete"]);
        let sql = format!(
            "with store as (select to_regclass('{table}')::oid as relation)
select coalesce(
  (select 'writes' where pg_is_in_recovery() or current_setting('transaction_read_only')::boolean),
  (select 'table' from store where relation is null),
  (select 'column ' || name from store, unnest({columns} || array['awaited']) name where not exists (
    select from pg_attribute where attrelid = relation and attname = name and not attisdropped) limit 1),
  (select 'right ' || name from store, unnest({rights}) name where not has_table_privilege(relation, name) limit 1),
  (select 'index ' || name from store, unnest({indexes}) name where not exists (
    select from pg_index join pg_class on pg_class.oid = indexrelid
    where indrelid = relation and right(relname, length(name)) = name) limit 1),
  '')"
        );
        let rows = with_timeout(self.inner.query(Maintain, sql)).await;
        let rows = rows.map_err(|error| failed(&error))?;
        let row = rows.first();
        let found = row.map(|row| sqlx::Row::try_get::<&str, _>(row, 0));
        let found = found
            .transpose()
            .map_err(|error| failed(&SqlError::from(error)))?;
        let missing = match found.unwrap_or_default() {
            "" => return Ok(()),
            "writes" => Missing::Writes,
            "table" => Missing::Table,
            part => match part.strip_prefix("right ") {
                Some(right) => Missing::Right(right),
                None => Missing::Part(part),
            },
        };
        Err(missing.in_table(&table))
    }
}
