//! The audit table: lines that a program for operators appends before and after it changes an entry.

use crate::{SqlError, timeout::with_timeout};

/// A store with an audit table. The table is `tower_idempotency_audit`, or the name of the store's table and `_audit`.
pub(crate) trait AuditTable: Sync {
    /// Returns the statements that append a line.
    fn append(&self, line: &str) -> String;

    /// Returns the statements that create the table. They may run repeatedly.
    fn create(&self) -> String;

    /// Returns the statement that reads the last lines, the last one first. It reads the primary key from its end.
    fn select_last(&self, limit: u32) -> String;

    /// Returns `true` if the table does not exist, after a statement has failed with this error.
    fn is_missing(&self, error: &SqlError) -> impl Future<Output = bool> + Send;

    fn execute(&self, sql: String) -> impl Future<Output = Result<(), SqlError>> + Send;

    /// Returns the lines that a statement reads.
    fn read(&self, sql: String) -> impl Future<Output = Result<Vec<String>, SqlError>> + Send;
}

/// Largest part of a line that is read, in characters. Lines that a program for operators has appended are shorter.
pub(crate) const MAX_LINE: u32 = 64 * 1024;

/// Appends a line. Creates the table only if it is missing: an operator may have no right to create tables.
pub(crate) async fn append<T: AuditTable>(table: &T, line: &str) -> Result<(), SqlError> {
    let Err(error) = with_timeout(table.execute(table.append(line))).await else {
        return Ok(());
    };
    if !table.is_missing(&error).await {
        return Err(error);
    }
    with_timeout(table.execute(table.create())).await?;
    with_timeout(table.execute(table.append(line))).await
}

/// Returns the last lines, the last one first. A missing table has none: the first line creates it.
pub(crate) async fn read_last<T: AuditTable>(
    table: &T,
    limit: u32,
) -> Result<Vec<String>, SqlError> {
    let error = match with_timeout(table.read(table.select_last(limit))).await {
        Ok(lines) => return Ok(lines),
        Err(error) => error,
    };
    if table.is_missing(&error).await {
        Ok(Vec::new())
    } else {
        Err(error)
    }
}

/// Adds the methods to a store that implements [`AuditTable`].
macro_rules! implement_audit {
    ($store:ty) => {
        impl $store {
            /// Appends a line to the audit table, in a transaction of its own. Creates the table if it is missing.
            ///
            /// The name of the table is that of the store's table and `_audit`. Its columns are `n` (a number that grows),
            /// `at` (the time of the database) and `line`. A program for operators appends a line of JSON before it changes
            /// an entry, and another one afterwards. Do not include keys, principals or responses: every reader of the
            /// table sees them.
            ///
            /// # Errors
            ///
            /// If the server cannot be reached or reports an error. The line may be appended nevertheless.
            ///
            /// # Cancellation
            ///
            /// If the future is dropped, the line may be appended.
            pub async fn append_audit_line(&self, line: &str) -> Result<(), $crate::SqlError> {
                $crate::audit::append(&*self.inner, line).await
            }

            /// Returns at most `limit` of the last lines of the audit table, the last one first. A missing table has no
            /// lines.
            ///
            /// The call reads the primary key from its end, so its cost does not grow with the table. It cuts a line after
            /// 65,536 characters. The user of the database needs the right to select from the table.
            ///
            /// # Errors
            ///
            /// If the server cannot be reached or reports an error.
            ///
            /// # Cancellation
            ///
            /// If the future is dropped, there are no effects.
            pub async fn last_audit_lines(
                &self,
                limit: u32,
            ) -> Result<Vec<String>, $crate::SqlError> {
                $crate::audit::read_last(&*self.inner, limit).await
            }
        }
    };
}

pub(crate) use implement_audit;
