//! The operations of a driver.

use tower_idempotency::store::LeaseRef;

use crate::{
    SqlError,
    fence::{Fence, RecordWrite},
};

/// An open transaction of a driver.
///
/// The crate of a driver implements this trait. If the value is dropped, it must roll the transaction back before another
/// caller gets the connection.
pub trait Driver: Send + Sized {
    /// The statements.
    type Fence: Fence;

    /// The transaction or connection of the driver, on which handlers execute statements.
    type Target: ?Sized;

    /// Returns the transaction for the handler.
    fn target(&self) -> &Self::Target;

    /// Returns the transaction for the handler.
    fn target_mut(&mut self) -> &mut Self::Target;

    /// Executes the status statement.
    fn lease_status(
        &mut self,
        fence: &Self::Fence,
        lease: &LeaseRef,
    ) -> impl Future<Output = Result<LeaseStatus, SqlError>> + Send;

    /// Executes the statement that writes the record.
    fn write_record(
        &mut self,
        fence: &Self::Fence,
        write: RecordWrite<'_>,
    ) -> impl Future<Output = Result<RecordStatus, SqlError>> + Send;

    /// Commits the transaction.
    ///
    /// It must not return [`Ok`] unless the database has committed. If the commit fails and leaves the transaction open, as in
    /// SQLite, it must roll back before another caller gets the connection.
    fn commit(self) -> impl Future<Output = Result<(), SqlError>> + Send;

    /// Rolls the transaction back.
    fn rollback(self) -> impl Future<Output = Result<(), SqlError>> + Send;
}

/// Status of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseStatus {
    /// The token holds the entry.
    Held,
    /// Another token holds the entry, or it is completed or expired.
    Lost,
    /// There is no entry.
    Absent,
}

impl LeaseStatus {
    /// Returns the status from the first column of the row, or from [`None`] if there is no row.
    #[must_use]
    pub fn from_row(is_held: Option<bool>) -> Self {
        match is_held {
            Some(true) => Self::Held,
            Some(false) => Self::Lost,
            None => Self::Absent,
        }
    }
}

/// Result of the statement that writes the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordStatus {
    /// The record is written, and not yet committed.
    Written,
    /// The token does not hold the entry. Nothing was written.
    LeaseLost,
    /// The statement ran outside of the marked transaction. Nothing was written.
    TransactionEnded,
}

impl RecordStatus {
    /// Returns the status from the first two columns of the row.
    #[must_use]
    pub fn from_row(is_marked: bool, is_written: bool) -> Self {
        match (is_marked, is_written) {
            (false, _) => Self::TransactionEnded,
            (true, true) => Self::Written,
            (true, false) => Self::LeaseLost,
        }
    }
}
