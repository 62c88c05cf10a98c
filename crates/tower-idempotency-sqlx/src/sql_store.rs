//! What a database has to offer for transactions, checkpoints and completers.

use sqlx::Database;
use tower_idempotency::store::{LeaseRef, Store, Ttl};

use crate::{
    Checkpoint, SqlError,
    completer::{Found, Page},
};

/// A connection of a store's database, which may be a handler's.
pub(crate) type ConnectionOf<S> = <<S as SqlStore>::Database as Database>::Connection;

/// One of this crate's stores, for code that is generic over them. Nobody else can implement it, and nothing of it is for
/// others to call.
pub trait SqlStore: Store + Clone {
    /// What sqlx calls its database.
    type Database: Database;

    /// Begins a transaction in which no renewal of the lease, by another connection, makes the fence fail.
    ///
    /// The transaction is marked, by this or by [`standing`](Self::standing), so that what is written last is known to be
    /// written in it.
    #[doc(hidden)]
    const BEGIN: &'static str;

    /// The largest record.
    #[doc(hidden)]
    fn largest_record(&self) -> impl Future<Output = Result<usize, SqlError>> + Send;

    /// How the lease stands, as the handler's connection sees it, in a transaction that has just begun.
    #[doc(hidden)]
    fn standing(
        &self,
        on: &mut ConnectionOf<Self>,
        lease: &LeaseRef,
    ) -> impl Future<Output = Result<Standing, SqlError>> + Send;

    /// Writes the record if the token holds the entry, its lease over or not; false if not. An error that
    /// says so if the transaction has ended before.
    #[doc(hidden)]
    fn write_record(
        &self,
        on: &mut ConnectionOf<Self>,
        lease: &LeaseRef,
        record: &[u8],
        retention: Ttl,
    ) -> impl Future<Output = Result<bool, SqlError>> + Send;

    /// Writes the checkpoint if the token holds the entry. An error as of [`write_record`](Self::write_record).
    #[doc(hidden)]
    fn write_checkpoint(
        &self,
        on: &mut ConnectionOf<Self>,
        lease: &LeaseRef,
        checkpoint: &Checkpoint,
    ) -> impl Future<Output = Result<Written, SqlError>> + Send;

    /// The checkpoint, on the store's own connections; [`None`] if the token does not hold the entry. `settled` waits for
    /// the end of a transaction that has written it.
    #[doc(hidden)]
    fn read_checkpoint(
        &self,
        lease: &LeaseRef,
        settled: bool,
    ) -> impl Future<Output = Result<Option<Option<Checkpoint>>, SqlError>> + Send;

    /// Orphans that are due, oldest first.
    #[doc(hidden)]
    fn orphans(&self, page: &Page) -> impl Future<Output = Result<Vec<Found>, SqlError>> + Send;

    /// Whether an orphan is still there as it was found, and due.
    #[doc(hidden)]
    fn is_due(
        &self,
        orphan: &Found,
        page: &Page,
    ) -> impl Future<Output = Result<bool, SqlError>> + Send;

    /// Whether an error with this code, of a statement on one table, says that the table is not there.
    #[doc(hidden)]
    fn is_missing_table(code: &str) -> bool;

    /// Whether an error with this code, of a commit, says that nothing was committed.
    #[doc(hidden)]
    fn is_refusal(code: &str) -> bool;
}

/// How a lease stands.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Held,
    Lost,
    /// There is no entry.
    Absent,
}

/// What became of a checkpoint that was written.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    Changed,
    /// The same was there before.
    Same,
    /// The token does not hold the entry: nothing was written.
    Lost,
}

/// As it is bound.
pub(crate) fn millis(ttl: Ttl) -> i64 {
    i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX)
}
