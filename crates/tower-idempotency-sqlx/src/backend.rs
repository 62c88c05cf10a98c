//! Database operations behind transactions, checkpoints and completers. Each store implements them.

use std::time::Duration;

use sqlx::Database;
use tower_idempotency::store::{Fingerprint, KeyId, LeaseRef, Store, Ttl};
use tower_idempotency_sql::Fence;

use crate::{Checkpoint, LeaseStatus, SqlError};

/// A store of this crate, for code that is generic over its stores.
///
/// Other crates cannot implement it.
pub trait SqlStore: Store + Clone + Backend<<Self as SqlStore>::Database> {
    /// The database type of sqlx.
    type Database: Database;
}

/// Operations of a store on a database `D`, on the connections of handlers and on its own.
pub trait Backend<D: Database>: Sized {
    /// Statements that begin a handler's transaction.
    ///
    /// At their isolation level, a renewal of the lease on another connection cannot make the final write fail. Either
    /// these statements or [`lease_status`](Self::lease_status) mark the transaction. The mark proves later that the final
    /// write runs in the same transaction.
    const BEGIN: &'static str;

    /// The fence of the database, which classifies its error codes.
    type Fence: Fence;

    /// Returns the size of the largest record in bytes.
    fn record_limit(&self) -> impl Future<Output = Result<usize, SqlError>> + Send;

    /// Reads the status of the lease on the handler's connection, in a transaction that has just begun.
    fn lease_status(
        &self,
        connection: &mut D::Connection,
        lease: &LeaseRef,
    ) -> impl Future<Output = Result<LeaseStatus, SqlError>> + Send;

    /// Writes the record if the token holds the entry, even with an expired lease. Returns `false` if it does not.
    ///
    /// Fails with `SqlError::transaction_ended` if the transaction has already ended.
    fn write_record(
        &self,
        connection: &mut D::Connection,
        lease: &LeaseRef,
        record: &[u8],
        retention: Ttl,
    ) -> impl Future<Output = Result<bool, SqlError>> + Send;

    /// Writes the checkpoint if the token holds the entry. Fails like [`write_record`](Self::write_record).
    fn write_checkpoint(
        &self,
        connection: &mut D::Connection,
        lease: &LeaseRef,
        checkpoint: &Checkpoint,
    ) -> impl Future<Output = Result<CheckpointWrite, SqlError>> + Send;

    /// Reads the checkpoint on the store's own connections. Returns [`None`] if the token does not hold the entry.
    ///
    /// If `after_writers` is set, the read first waits for the end of a transaction that has written the entry.
    fn read_checkpoint(
        &self,
        lease: &LeaseRef,
        after_writers: bool,
    ) -> impl Future<Output = Result<Option<Option<Checkpoint>>, SqlError>> + Send;

    /// Returns a page of the orphans that are due, oldest first.
    fn orphans(
        &self,
        query: &OrphanQuery,
    ) -> impl Future<Output = Result<Vec<OrphanRow>, SqlError>> + Send;

    /// Returns `true` if the orphan is unchanged since it was read, and still due.
    fn is_due(
        &self,
        orphan: &OrphanRow,
        query: &OrphanQuery,
    ) -> impl Future<Output = Result<bool, SqlError>> + Send;
}

/// Result of a checkpoint write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointWrite {
    Changed,
    /// The entry already had the same checkpoint.
    Unchanged,
    /// The token does not hold the entry. Nothing was written.
    LeaseLost,
}

/// Query for a page of due orphans.
#[derive(Clone, Debug)]
pub struct OrphanQuery {
    /// Minimum time since the expiry of the lease. Doubles with each takeover, up to half of the orphan retention, and at most
    /// six times.
    pub min_age: Duration,
    /// Upper bound of the expiry, by the store's clock.
    pub ended_before: Option<i64>,
    /// Expiry and ID of the last orphan of the previous page.
    pub after: Option<(i64, KeyId)>,
    /// Maximum number of rows.
    pub limit: u32,
}

/// An orphan, as the store has read it.
#[derive(Clone, Debug)]
pub struct OrphanRow {
    pub id: KeyId,
    pub fingerprint: Fingerprint,
    pub generation: i64,
    pub lease_ends: i64,
    /// Time of the read, by the store's clock.
    pub read_at: i64,
    pub operation: String,
    /// The orphan retention in milliseconds. 0 if no claim has set it.
    pub orphan_retention: i64,
    pub created: i64,
}

impl OrphanRow {
    /// Returns the orphan retention, if a claim has set it.
    pub(crate) fn orphan_retention(&self) -> Option<Ttl> {
        let millis = u64::try_from(self.orphan_retention).ok()?;
        Ttl::try_from(Duration::from_millis(millis)).ok()
    }

    /// Returns the age of the entry at the time of the read.
    pub(crate) fn age(&self) -> Duration {
        let millis = self.read_at.saturating_sub(self.created);
        Duration::from_millis(u64::try_from(millis).unwrap_or(0))
    }
}

/// Converts a duration to the milliseconds that statements bind.
pub(crate) fn millis(ttl: Ttl) -> i64 {
    i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX)
}
