//! Exactly-once execution for stores that share a database with the handler: effect and record in one transaction.
//!
//! Between an effect and its record, a process can die or be paused past its lease. If one transaction writes both, and the
//! lease fences that transaction, the request is executed exactly once.
//!
//! This module is for authors of stores and of drivers. Authors of handlers use the API that the store builds on it. The
//! trait [`LeaseExt`] has the methods of a lease that only stores and drivers need.
//!
//! # Contract
//!
//! 1. [`LeaseExt::prepare`] turns a response into the record that the layer would store. If the layer would store none, it
//!    returns the reason. Then roll back, and return the response to the client.
//! 2. In the handler's transaction, write the record to the entry of the lease with one conditional write. The condition is
//!    that the entry is leased with [`lease_ref().token`](LeaseExt::lease_ref), expired or not. The write completes the
//!    entry like [`Store::complete`](crate::Store::complete): token, retention, notification of waiters. If there is no such
//!    entry, the lease is lost: roll back. Unlike `complete`, the write does *not* store the record if the entry is absent
//!    or orphaned. Nothing is then committed under a lease that was released.
//! 3. Do this and the commit inside [`Prepared::commit`]. It registers the commit with the layer before it begins, and
//!    afterwards its success or the loss of the lease.
//!
//! Write the record last. Renewals and concurrent requests then wait for the commit and not for the handler. An
//! [`acquire`](crate::Store::acquire) that finds an open transaction on its entry must wait for the end of that
//! transaction, as conditional writes in a database do. The layer uses `acquire` to query if a commit succeeded.
//!
//! # Behavior of the layer
//!
//! The layer responds with the committed record, even if the handler returns another response. It neither completes nor
//! releases the lease. From the returned response it takes only headers that no replay carries, such as cookies. Middleware
//! between the commit and the layer does not change the record.
//!
//! A commit is unacknowledged if its future was dropped, the handler panicked or the connection broke. The layer then
//! queries the store and responds with the stored record. If the store cannot report it, the response is 409
//! `outcome-unknown`. The response is the same if the key stays an orphan without a record, because the commit may still
//! succeed. A driver calls [`LeaseExt::reject_commit`] for a commit that the database rejected. No commit can begin after the
//! handler has returned.
//!
//! # Examples
//!
//! A handler that commits its response, with a memory store in place of a database:
//!
//! ```
//! # use std::{collections::HashMap, sync::{Arc, Mutex}};
//! # use axum::{Router, body::Body, http::{Request, StatusCode}, response::{IntoResponse, Response}, routing::post};
//! # use tower::ServiceExt;
//! use tower_idempotency::{IdempotencyLayer, Lease, MemoryStore, Store, store::StoreError, transaction::LeaseExt};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = MemoryStore::new();
//! let database = store.clone();
//! let pay = async move |lease: Lease| {
//!     // begin; insert into payments ..
//!     let prepared = match lease.prepare("paid".into_response()).await {
//!         Ok(prepared) => prepared,
//!         Err(unrecorded) => return unrecorded.into_output().into_response(),
//!     };
//!     // update leases set record = .. where id = .. and token = .. and state = 'leased'; commit
//!     let (lease_ref, record, retention) = (prepared.lease_ref(), prepared.record().clone(), prepared.retention());
//!     match prepared.commit(database.complete(&lease_ref, record, retention)).await {
//!         Ok(res) => res.into_response(),
//!         Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
//!     }
//! };
//! let app: Router = Router::new().route("/", post(pay)).route_layer(IdempotencyLayer::new(store));
//!
//! let req = || Request::post("/").header("idempotency-key", "8e03978e").body(Body::empty());
//! let first = app.clone().oneshot(req()?).await?;
//! assert!(first.status().is_success() && !first.headers().contains_key("idempotent-replayed"));
//! let retry = app.oneshot(req()?).await?;
//! assert_eq!(retry.headers()["idempotent-replayed"], "true");
//! # Ok(())
//! # }
//! ```

use std::{error, fmt, future::Future};

use bytes::Bytes;
use http::StatusCode;

use crate::{
    execution::reconcile::{EntryStatus, query_entry},
    lease::{Lease, state::LeaseState},
    record::TombstoneReason,
    response::disposition::{Disposition, strip_reason, tombstone_or_release},
    store::{LeaseRef, StoreError, Ttl},
};

mod lease_ext;

pub use self::lease_ext::LeaseExt;
pub use crate::response::disposition::NotRecordedReason;

/// A transaction that the handler has begun: see [`LeaseExt::open_transaction`].
///
/// If it is dropped, it counts as neither committed nor rolled back.
#[derive(Debug)]
pub struct OpenTransaction(Option<Lease>);

impl OpenTransaction {
    /// Registers that the transaction was committed or rolled back, or that the handler knows that this failed.
    pub fn end(mut self) {
        if let Some(lease) = self.0.take() {
            lease.0.end_transaction();
        }
    }
}

impl Drop for OpenTransaction {
    fn drop(&mut self) {
        if let Some(lease) = &self.0 {
            lease.0.lose_transaction();
        }
    }
}

/// A record that can be committed under the lease for which it was prepared.
#[must_use = "nothing is stored before it is committed"]
pub struct Prepared<T> {
    lease: Lease,
    record: Bytes,
    retention: Ttl,
    status: StatusCode,
    output: T,
    /// Inserts [`CommittedResponse`](crate::lease::commits::CommittedResponse) into a response when its commit is reported.
    /// [`None`] for a value.
    mark: Option<fn(&mut T)>,
}

impl<T> Prepared<T> {
    fn new(
        lease: &Lease,
        disposition: Disposition,
        status: StatusCode,
        output: T,
        mark: Option<fn(&mut T)>,
    ) -> Result<Self, NotRecordable<T>> {
        match disposition {
            Disposition::Record {
                record, retention, ..
            } => Ok(Self {
                lease: lease.clone(),
                record,
                retention,
                status,
                output,
                mark,
            }),
            Disposition::Release(reason) => Err(NotRecordable { reason, output }),
        }
    }

    /// Returns the lease under which the record must be written.
    #[must_use]
    pub fn lease_ref(&self) -> LeaseRef {
        self.lease.lease_ref()
    }

    /// Returns the record to write: opaque bytes.
    #[must_use]
    pub fn record(&self) -> &Bytes {
        &self.record
    }

    /// Returns the retention of the record, counted from the commit.
    #[must_use]
    pub fn retention(&self) -> Ttl {
        self.retention
    }

    /// Replaces the record with a tombstone, for a store that cannot store a record of this size.
    ///
    /// Check the length before you write, since a statement that fails may end the transaction. A record of
    /// [`NeedsAttention`](crate::NeedsAttention) loses its reason instead.
    ///
    /// # Errors
    ///
    /// [`NotRecordable`], with [`NotRecordedReason::Unrecordable`], if the settings allow no tombstones.
    pub fn into_tombstone(self) -> Result<Self, NotRecordable<T>> {
        let state = &*self.lease.0;
        let (rules, reason) = (&state.config().response, TombstoneReason::TooLarge);
        let retention = self.retention;
        let disposition = match strip_reason(state.origin(), Some(self.status), &self.record) {
            Some(record) => Disposition::Record {
                record,
                retention,
                class: self.status,
            },
            None => tombstone_or_release(rules, state.origin(), self.status, reason, retention),
        };
        Self::new(
            &self.lease,
            disposition,
            self.status,
            self.output,
            self.mark,
        )
    }

    /// Begins a commit by a transaction that ends elsewhere, such as at the end of a closure.
    ///
    /// Call it before the record is written, and [`BegunCommit::acknowledge`] after the transaction was committed. If the
    /// transaction fails, drop the value: the layer then queries the store before it responds. If the database rejected it, also
    /// call [`LeaseExt::reject_commit`]. The whole transaction may be retried, from [`prepare`](LeaseExt::prepare) on, while the lease is held.
    ///
    /// ```no_run
    /// # use axum::{http::Response, response::IntoResponse};
    /// # use tower_idempotency::{Lease, store::{LeaseRef, StoreError}, transaction::LeaseExt};
    /// # struct Database;
    /// # impl Database {
    /// #     async fn transaction<T>(&self, f: impl AsyncFnOnce(&Self) -> Result<T, StoreError>) -> Result<T, StoreError> { f(self).await }
    /// #     async fn write_record(&self, _: LeaseRef, _: &[u8]) -> Result<(), StoreError> { Ok(()) }
    /// # }
    /// # async fn handler(database: Database, lease: Lease) -> Result<axum::response::Response, StoreError> {
    /// let begun = database
    ///     .transaction(async |tx| {
    ///         // insert into payments ..
    ///         let prepared = lease.prepare("paid".into_response()).await.expect("a 200 is recorded");
    ///         let (lease_ref, record) = (prepared.lease_ref(), prepared.record().clone());
    ///         let begun = prepared.begin_commit()?;
    ///         tx.write_record(lease_ref, &record).await?;
    ///         Ok(begun)
    ///     })
    ///     .await?;
    /// // The database has committed.
    /// Ok(begun.acknowledge().into_response())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError::LeaseLost`] if the lease is lost, has its outcome or ended with the handler's response.
    /// [`StoreError::Backend`] if the record is of the wrong kind. The lease of a request takes a response, and that of
    /// [`run_once`](crate::IdempotencyLayer::run_once) or of an item takes a value. Roll back.
    pub fn begin_commit(self) -> Result<BegunCommit<T>, StoreError> {
        let state = &*self.lease.0;
        // No call with the key could read such a record.
        if self.mark.is_none() != state.records_value() {
            state.commits.fail();
            return Err(StoreError::backend(WRONG_KIND));
        }
        if state.is_lost() {
            state.commits.refuse();
            return Err(StoreError::LeaseLost);
        }
        if !state.commits.begin(self.retention.as_duration()) {
            return Err(StoreError::LeaseLost);
        }
        Ok(BegunCommit {
            _finishing: FinishingGuard::new(&self.lease),
            lease: self.lease,
            record: self.record,
            output: self.output,
            mark: self.mark,
        })
    }

    /// Runs `commit`, which writes the record and ends the transaction, and returns the response or value. From here on the
    /// layer stores nothing itself.
    ///
    /// `commit` must end the transaction. If the transaction ends elsewhere, such as at the end of a closure, use
    /// [`begin_commit`](Self::begin_commit): the database can refuse a commit whose statements all succeeded.
    ///
    /// `commit` returns one of:
    ///
    /// - `Ok` if both effect and record are stored,
    /// - [`StoreError::LeaseLost`] if the lease was lost and neither is stored,
    /// - [`StoreError::Backend`] if the outcome is unknown. The layer then queries the store. If the database rejected the
    ///   transaction, call [`LeaseExt::reject_commit`] after this method has returned.
    ///
    /// After an error the whole transaction may be retried, from [`prepare`](LeaseExt::prepare) on, while the lease is held.
    ///
    /// # Errors
    ///
    /// [`StoreError::LeaseLost`] if the lease is lost, has its outcome or ended with the handler's response. This execution
    /// stored neither effect nor record. It may have stored both if the query succeeded only after the retention had passed
    /// and found no record.
    ///
    /// [`StoreError::Backend`] if the record is of the wrong kind, as in [`begin_commit`](Self::begin_commit). `commit` was not
    /// polled.
    ///
    /// Otherwise the error of `commit`. Effect and record may be stored only if it is a [`StoreError::Backend`] and the
    /// query failed too.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, both are stored or neither is. The layer queries the outcome before it responds.
    pub async fn commit(
        self,
        commit: impl Future<Output = Result<(), StoreError>>,
    ) -> Result<T, StoreError> {
        let is_retry = self.lease.0.commits.has_begun();
        let begun = self.begin_commit()?;
        let state = &*begun.lease.0;
        let mut committed = commit.await;
        if let Err(StoreError::Backend(error)) = committed {
            let resolving = resolve_unacknowledged_commit(state, &begun.record);
            committed = match Box::pin(resolving).await {
                Some(resolved) => resolved,
                None => Err(StoreError::Backend(error)),
            };
        }
        match committed {
            Ok(()) => Ok(begun.acknowledge()),
            Err(error) => {
                match error {
                    // An earlier attempt may have succeeded.
                    StoreError::LeaseLost if is_retry => state.mark_not_held(),
                    StoreError::LeaseLost => state.mark_lost(),
                    _ => {}
                }
                Err(error)
            }
        }
    }
}

/// A commit that has begun, in a transaction that ends after the record was written: see [`Prepared::begin_commit`].
#[must_use = "the layer queries the store for a commit that is not acknowledged"]
pub struct BegunCommit<T> {
    lease: Lease,
    record: Bytes,
    output: T,
    mark: Option<fn(&mut T)>,
    _finishing: FinishingGuard,
}

impl<T> BegunCommit<T> {
    /// Registers that the database has acknowledged the commit, and returns the response or value.
    #[must_use = "this is the response of the handler"]
    pub fn acknowledge(mut self) -> T {
        let state = &*self.lease.0;
        state.commits.succeed(self.record);
        state.set_finished();
        if let Some(mark) = self.mark {
            mark(&mut self.output);
        }
        self.output
    }
}

/// Shows neither the record nor the response.
impl<T> fmt::Debug for BegunCommit<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BegunCommit")
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

/// Marks the lease as finishing during a commit. A renewal after the commit finds no lease, and must not report a loss.
struct FinishingGuard(Lease);

impl FinishingGuard {
    fn new(lease: &Lease) -> Self {
        lease.0.set_finishing(true);
        Self(lease.clone())
    }
}

impl Drop for FinishingGuard {
    fn drop(&mut self) {
        self.0.0.set_finishing(false);
    }
}

/// Queries the store for the outcome of a commit without a reply. Returns `None` if the commit was not stored and may be
/// retried, or if its outcome is unknown.
async fn resolve_unacknowledged_commit(
    lease: &LeaseState,
    record: &Bytes,
) -> Option<Result<(), StoreError>> {
    if lease.commits.is_closed() {
        // The layer queries the store itself. A query under this token could acquire the key for an execution that has
        // ended.
        return None;
    }
    match query_entry(lease).await {
        // The record is compared too: an earlier commit of this handler has the same token.
        EntryStatus::CompletedHere(stored) if stored == record => Some(Ok(())),
        EntryStatus::CompletedHere(_)
        | EntryStatus::Completed(_)
        | EntryStatus::Orphaned
        | EntryStatus::HeldElsewhere => Some(Err(StoreError::LeaseLost)),
        // The record was stored and has expired, or it was never stored. A retry could repeat the effect.
        EntryStatus::Acquired(_) if lease.commits.record_may_have_expired() => {
            Some(Err(StoreError::LeaseLost))
        }
        EntryStatus::Acquired(_) | EntryStatus::Unknown => None,
    }
}

/// Shows neither the record nor the response.
impl<T> fmt::Debug for Prepared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("lease", &self.lease)
            .field("record_bytes", &self.record.len())
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

/// A response or value that the layer does not record, and that therefore cannot be committed.
pub struct NotRecordable<T> {
    reason: NotRecordedReason,
    output: T,
}

impl<T> NotRecordable<T> {
    /// Returns the reason.
    #[must_use]
    pub fn reason(&self) -> NotRecordedReason {
        self.reason
    }

    /// Returns the response or value. Roll the transaction back before you return it to the client.
    #[must_use]
    pub fn into_output(self) -> T {
        self.output
    }
}

/// Does not show the response.
impl<T> fmt::Debug for NotRecordable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotRecordable")
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Display for NotRecordable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "expected a response that is recorded, found one that is not: {}",
            self.reason.name()
        )
    }
}

impl<T> error::Error for NotRecordable<T> {}

const WRONG_KIND: &str = "expected a response under the lease of a request, or a value under that of `run_once` or of an item";

#[cfg(all(test, not(shuttle)))]
mod tests;
