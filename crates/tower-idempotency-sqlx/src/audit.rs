//! The audit table: lines that a program for operators appends before and after it changes an entry.

use crate::{SqlError, timeout::with_timeout};

/// A store with an audit table. The table is `tower_idempotency_audit`, or the name of the store's table and `_audit`.
pub(crate) trait AuditTable: Sync {
    /// Returns the statements that append a line.
    fn append(&self, line: &str) -> String;

    /// Returns the statements that create the table. They may run repeatedly.
    fn create(&self) -> String;

    /// Returns `true` for the error of a table that does not exist.
    fn is_missing(error: &SqlError) -> bool;

    fn execute(&self, sql: String) -> impl Future<Output = Result<(), SqlError>> + Send;
}

/// Appends a line. Creates the table only if it is missing: an operator may have no right to create tables.
pub(crate) async fn append<T: AuditTable>(table: &T, line: &str) -> Result<(), SqlError> {
    let appended = with_timeout(table.execute(table.append(line))).await;
    match appended {
        Err(error) if T::is_missing(&error) => {
            with_timeout(table.execute(table.create())).await?;
            with_timeout(table.execute(table.append(line))).await
        }
        result => result,
    }
}

/// Adds the method to a store that implements [`AuditTable`].
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
        }
    };
}

pub(crate) use implement_audit;
