//! The statements that fence a handler's transaction.

use std::fmt;

use tower_idempotency::store::LeaseRef;

mod mysql;
mod postgres;
mod sqlite;

pub use self::{mysql::MySqlFence, postgres::PostgresFence, sqlite::SqliteFence};
use crate::Table;

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
}

/// Implements the traits of a fence with its own methods of the same names.
macro_rules! implement_fence {
    ($fence:ty) => {
        impl Default for $fence {
            fn default() -> Self {
                Self::for_table(&Table::default())
            }
        }

        impl From<&Self> for $fence {
            fn from(fence: &Self) -> Self {
                fence.clone()
            }
        }

        impl sealed::Sealed for $fence {}

        impl Fence for $fence {
            fn record_limit(&self) -> usize {
                self.record_limit()
            }

            fn is_missing_table(code: &str) -> bool {
                Self::is_missing_table(code)
            }

            fn is_commit_rejected(code: &str) -> bool {
                Self::is_commit_rejected(code)
            }
        }
    };
}

implement_fence!(MySqlFence);
implement_fence!(PostgresFence);
implement_fence!(SqliteFence);

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
