//! The check of a MySQL server.

use tower_idempotency::store::CheckError;

use super::{Maintain, MySqlStore, statements::in_a_transaction};
use crate::{
    SqlError,
    check::{COLUMNS, INDEXES, Missing, failed},
    timeout::with_timeout,
};

impl MySqlStore {
    /// Checks table, columns, rights and indexes, and that the server accepts writes. Changes no row.
    pub(super) async fn check_server(&self) -> Result<(), CheckError> {
        let table = &self.inner.settings.table;
        let name = table.quoted('`');
        // The server checks rights and columns of a statement even if no row matches. With `sql_safe_updates`, it rejects a
        // delete whose condition is constant. No row has an empty ID.
        let required = "id, fingerprint, generation, lease_ends, orphan_retention, expires, created, owner, operation";
        for (right, sql) in [
            (
                "select",
                format!("select {} from {name} where false", COLUMNS.join(", ")),
            ),
            (
                "insert",
                format!(
                    "insert into {name} ({required}) select {required} from {name} where false"
                ),
            ),
            (
                "update",
                format!("update {name} set generation = generation where false"),
            ),
            ("delete", format!("delete from {name} where id = x''")),
        ] {
            // A server that logs statements rejects writes only at the isolation level of the store.
            let sql = in_a_transaction(&format!("\n{sql};"));
            let called = with_timeout(self.inner.query(Maintain, sql)).await;
            let Err(error) = called else { continue };
            return Err(match error.code() {
                Some("1146") => Missing::Table.in_table(&name),
                Some("1044" | "1142" | "1143") => Missing::Right(right).in_table(&name),
                Some("1054") => Missing::Part("column of this version").in_table(&name),
                Some("1290" | "1792" | "1836") => Missing::Writes.in_table(&name),
                Some("1665") => Missing::RowLog.in_table(&name),
                _ => failed(&error),
            });
        }
        let indexes = INDEXES.map(|index| {
            format!(
                "(select 'index {index}' from dual where not exists (select 1 from information_schema.statistics
                  where table_schema = database() and table_name = 'tower_idempotency' and index_name = '{index}'))"
            )
        });
        // Users with SUPER, CONNECTION_ADMIN or READ_ONLY ADMIN may write to a replica. In MariaDB 12 the variable is an
        // enumeration, otherwise a number.
        let read_only =
            "(select 'read-only' from dual where concat(@@global.read_only) not in ('0', 'OFF'))";
        let sql = format!("select coalesce({read_only}, {}, '')", indexes.join(", "));
        // A proxy that sends reads to replicas sends a transaction to the primary.
        let sql = in_a_transaction(&format!("\n{};", table.in_migration(&sql, '`')));
        let called = with_timeout(self.inner.query(Maintain, sql)).await;
        let rows = called.map_err(|error| failed(&error))?;
        let found = rows
            .first()
            .map(|row| sqlx::Row::try_get::<String, _>(row, 0));
        let found = found
            .transpose()
            .map_err(|error| failed(&SqlError::from(error)))?;
        match found.unwrap_or_default().as_str() {
            "" => Ok(()),
            "read-only" => Err(Missing::Writes.in_table(&name)),
            part => Err(Missing::Part(part).in_table(&name)),
        }
    }
}
