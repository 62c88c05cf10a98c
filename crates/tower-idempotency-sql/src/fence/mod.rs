//! The statements that fence a handler's transaction.

use std::fmt;

use tower_idempotency::store::LeaseRef;

mod mysql;
mod postgres;
mod sqlite;

pub use self::{mysql::MySqlFence, postgres::PostgresFence, sqlite::SqliteFence};

/// The statements that fence a transaction on one database.
///
/// Other crates cannot implement this trait.
pub trait Fence: Clone + Send + Sync + sealed::Sealed {
    /// Returns the size of the largest record in bytes.
    fn record_limit(&self) -> usize;

    /// Returns `true` if the error code of the status statement means that the table is missing.
    fn is_missing_table(code: &str) -> bool;

    /// Returns `true` if the error code of a commit means that nothing was committed.
    ///
    /// After any other error of a commit, its outcome is unknown.
    fn is_commit_rejected(code: &str) -> bool;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::MySqlFence {}
    impl Sealed for super::PostgresFence {}
    impl Sealed for super::SqliteFence {}
}

/// Parameters of the statement that writes the record.
#[derive(Clone, Copy)]
pub struct RecordWrite<'a> {
    lease: &'a LeaseRef,
    record: &'a [u8],
    retention: i64,
}

impl<'a> RecordWrite<'a> {
    pub(crate) fn new(lease: &'a LeaseRef, record: &'a [u8], retention: i64) -> Self {
        Self {
            lease,
            record,
            retention,
        }
    }

    /// Returns the ID of the entry: 32 bytes.
    #[must_use]
    pub fn id(&self) -> &'a [u8] {
        self.lease.id.as_bytes()
    }

    /// Returns the token of the lease: 16 bytes.
    #[must_use]
    pub fn token(&self) -> &'a [u8] {
        self.lease.token.as_bytes()
    }

    /// Returns the record.
    #[must_use]
    pub fn record(&self) -> &'a [u8] {
        self.record
    }

    /// Returns the retention of the record in milliseconds, counted from the write.
    #[must_use]
    pub fn retention_millis(&self) -> i64 {
        self.retention
    }
}

/// Omits the values.
impl fmt::Debug for RecordWrite<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordWrite").finish_non_exhaustive()
    }
}
