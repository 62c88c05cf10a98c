//! Operations for operators: list, read and resolve the entries of a store.
//!
//! A key can be stuck: its handler never ends, its process died and the layer refuses a takeover, or its execution [needs
//! attention](crate::NeedsAttention). [`Inspect`] finds such an entry on every store, and [`Inspect::resolve`] resolves it.
//! The layer uses only [`Store`](crate::Store), and cannot call this trait. Use the trait in another program with other
//! rights on the store, because only an operator may replace or delete the outcome of a key.
//!
//! An operator takes three steps:
//!
//! 1. Find the entry: [`Inspect::list`] by state, [`IdempotencyLayer::key_id`](crate::IdempotencyLayer::key_id) from a
//!    request, or [`Query::with_id_prefix`] from the eight digits in an event or in a client's report.
//! 2. Read it with [`Inspect::get`], and determine the effect of the execution.
//! 3. [Resolve](Inspect::resolve) it, on the condition that it has not changed since it was [`Seen`].
//!
//! # States and resolutions
//!
//! | resolution | in progress | orphaned | needs attention | completed, unreadable |
//! |---|---|---|---|---|
//! | [`BreakLease`](Resolution::BreakLease): the handler never ends | yes | | | |
//! | [`Free`](Resolution::Free): nothing happened | | yes | yes | |
//! | [`Retry`](Resolution::Retry): the handler may run once more | | yes | yes | |
//! | [`Complete`](Resolution::Complete): the response is known | | yes | yes | |
//! | [`NeedsAttention`](Resolution::NeedsAttention): nothing may execute until it is examined | | yes | yes | |
//! | [`DeleteRecord`](Resolution::DeleteRecord): the record must not be replayed | | | | yes |
//!
//! An entry in progress whose lease was broken is an orphan, and has the resolutions of an orphan. An *overdue* entry is one
//! that has been in progress for longer than the operator expects: see [`Query::overdue`].

//! # Examples
//!
//! ```
//! use std::time::Duration;
//! use tower_idempotency::{
//!     MemoryStore,
//!     inspect::{Inspect, Query, Resolution, State},
//!     store::{Claim, Fingerprint, KeyId, Store, Ttl},
//! };
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = MemoryStore::new().with_details();
//! let mut claim = Claim::new(KeyId::from_bytes([1; 32]), Fingerprint::from_bytes([2; 32]))?;
//! claim.operation = "POST /payments".into();
//! store.acquire(&claim).await?;
//! tokio::time::sleep(Duration::from_secs(16)).await; // The process died: no renewal.
//!
//! let page = store.list(&Query::new(State::Orphaned).with_operation("POST /pay")).await?;
//! let entry = &page.entries[0];
//! assert_eq!((entry.id(), entry.age), (&claim.id, Duration::from_secs(1)));
//! // The operator has checked that nothing was charged.
//! let outcome = store.resolve(entry.seen(), &Resolution::Free).await?;
//! assert!(outcome.is_applied());
//! assert!(store.get(&claim.id).await?.is_none());
//! # Ok(())
//! # }
//! ```

mod abilities;
mod contents;
mod entry;
mod error;
mod id_prefix;
mod inspector;
mod memory;
mod page_token;
mod query;
mod resolution;
mod seen;
mod state;
mod text;

#[cfg(test)]
mod tests;

use std::{future::Future, sync::Arc};

pub use self::{
    abilities::Abilities,
    contents::RecordContents,
    entry::{Count, Entry, EntryDetails, Page, Summary},
    error::{InspectError, InspectErrorKind},
    id_prefix::{IdPrefix, IdPrefixError},
    inspector::Inspector,
    page_token::PageToken,
    query::Query,
    resolution::{DEFAULT_ORPHAN_RETENTION, Resolution, ResolveOutcome},
    seen::Seen,
    state::State,
    text::ParseTokenError,
};
use crate::store::KeyId;

/// Access to the entries of a store for operators.
///
/// A store implements it in addition to [`Store`](crate::Store). The layer does not need it.
///
/// # Contract
///
/// An implementor follows these rules. The conformance suite of the feature `conformance` tests those that replies show. Rule 1,
/// and rule 7 for checkpoints, have no case:
///
/// 1. **Nothing scans the store.** A listing reads an index by state, or a structure that has only unresolved entries. A
///    page costs a bounded number of calls, and examines a bounded number of entries. If few of them match, the page has
///    fewer entries than the limit, or none, and a [`PageToken`] to continue. A state that no index covers is left out of
///    the [`Abilities`].
/// 2. **A listing misses no entry.** An entry that has the state from the first page to the last is on at least one page,
///    unless its position moves backwards. A position moves backwards if the lease is shortened. No page has an entry
///    twice. Two pages may have the same entry if it changed between them. The order is the store's own; if possible, the
///    oldest entry comes first.
/// 3. **An entry that cannot be read is listed**, with [`State::Unreadable`], in each listing that reads it, regardless of
///    the filters. Examples are a later format, a damaged row, and a record for which [`State::of_record`] returns this
///    state: it is listed with the completed entries. [`get`](Inspect::get) returns its bytes if possible.
/// 4. **Expiry is checked at every access**, by the clock of the backend, as for [`Store`](crate::Store). An expired entry
///    is not listed and not resolved. Ages and times are by the same clock, and never negative.
/// 5. **`resolve` is one conditional write.** It may read the entry before. The condition covers all parts of [`Seen`]: the
///    state at this moment, the generation, and the [version](Seen::version). The version is computed from the token, and
///    for an orphan also from the lease expiry. If several calls resolve the same [`Seen`], at most one is applied.
/// 6. **Each resolution that leaves the entry stores a new token**, which no execution holds: one of
///    [`Token::retry_allowed`] for [`Retry`](Resolution::Retry), else one of [`Token::random`]. All rules of the store
///    contract then hold unchanged: the former lease holder is replaced, and can neither renew, complete nor release. A
///    lease that was broken never completes the entry. Rule 4 of the store contract still applies to an entry without a
///    holder. After [`Free`](Resolution::Free), or after the release of a takeover, an execution that still runs may store
///    the first outcome.
/// 7. **The rest of the entry stays**: generation, fingerprint, owner, operation, and the checkpoint of a transaction.
///    [`Complete`](Resolution::Complete) deletes the checkpoint.
/// 8. **Waiters are woken** by each resolution that ends a lease or stores a record.
///
/// Effects of the resolutions, at the time *now* of the backend:
///
/// | resolution | entry afterwards |
/// |---|---|
/// | `BreakLease`, `Retry` | orphaned: its lease expires now, and the entry one orphan retention from now; no record |
/// | `Complete` | completed: the record of [`Resolution::record`], which expires one retention from now |
/// | `NeedsAttention` | the same, with the record that needs attention |
/// | `Free`, `DeleteRecord` | deleted |
///
/// Each write that changes the state of an entry also changes the listings. Renewals and takeovers are such writes. A released
/// takeover has no token, and is resolved like any other orphan. `Free` deletes it.
///
/// The orphan retention is the one that is stored with the entry, or [`DEFAULT_ORPHAN_RETENTION`] if there is none.
///
/// An implementor of this trait also applies one rule in its [`Store::acquire`](crate::Store::acquire). A claim with
/// [`OrphanPolicy::Refuse`](crate::OrphanPolicy::Refuse) takes over an orphan of the same request if its token [allows a
/// retry](crate::store::Token::allows_retry). The takeover stores the token of the claim, so one operator's decision allows
/// one execution. A claim with [`OrphanPolicy::Never`](crate::OrphanPolicy::Never) takes over nothing. A takeover by a claim
/// without an operation keeps the stored one.
///
/// # Cancellation
///
/// A dropped `resolve` may or may not have taken effect, and leaves no partial effect. A dropped `purge` may have deleted some of
/// its entries.
///
/// [`Token::retry_allowed`]: crate::store::Token::retry_allowed
/// [`Token::random`]: crate::store::Token::random
/// [allows a retry]: crate::store::Token::allows_retry
pub trait Inspect: Send + Sync + 'static {
    /// Returns the states that this store lists, and the details that it stores.
    fn abilities(&self) -> Abilities;

    /// Returns a page of the entries that match the query.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](InspectErrorKind::Unsupported) if the store does not list this state.
    /// [`InvalidPage`](InspectErrorKind::InvalidPage) if the page token is that of another store or of another query.
    /// [`Backend`](InspectErrorKind::Backend) if the backend failed.
    fn list(&self, query: &Query) -> impl Future<Output = Result<Page, InspectError>> + Send;

    /// Returns the entry with its record, or `None` if it is absent.
    ///
    /// # Errors
    ///
    /// [`Backend`](InspectErrorKind::Backend) if the backend failed.
    fn get(
        &self,
        id: &KeyId,
    ) -> impl Future<Output = Result<Option<EntryDetails>, InspectError>> + Send;

    /// Returns the number of entries in each state that the store lists. Counts at most `limit` entries of each state, and
    /// examines no more than a few times that number.
    ///
    /// # Errors
    ///
    /// [`Backend`](InspectErrorKind::Backend) if the backend failed.
    fn summary(&self, limit: u32) -> impl Future<Output = Result<Summary, InspectError>> + Send;

    /// Applies a decision to an entry, if the entry is still as it was seen.
    ///
    /// [`ResolveOutcome::Changed`] means that this call changed nothing. If a reply was lost and the driver repeated the
    /// call, the first attempt may have applied the decision: the outcome contains the present entry.
    ///
    /// # Errors
    ///
    /// [`WrongState`](InspectErrorKind::WrongState) if the resolution does not apply to the state that was seen.
    /// [`RecordTooLarge`](InspectErrorKind::RecordTooLarge) if the store cannot store the record. Both change nothing.
    /// [`Backend`](InspectErrorKind::Backend) if the backend failed; the decision may be applied nevertheless.
    fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> impl Future<Output = Result<ResolveOutcome, InspectError>> + Send;

    /// Deletes at most `batch` expired entries, and returns their number. Returns less than `batch` if no more expired
    /// entries are left, and always 0 if the backend deletes them itself.
    ///
    /// One step checks the expiry of an entry and deletes it. An entry that was read as expired may have a new lease or record
    /// by then.
    ///
    /// # Errors
    ///
    /// [`Backend`](InspectErrorKind::Backend) if the backend failed. Some entries may be deleted.
    fn purge(&self, batch: u32) -> impl Future<Output = Result<u64, InspectError>> + Send;
}

impl<T: Inspect> Inspect for Arc<T> {
    fn abilities(&self) -> Abilities {
        (**self).abilities()
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        (**self).list(query).await
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        (**self).get(id).await
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        (**self).summary(limit).await
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        (**self).resolve(seen, resolution).await
    }

    async fn purge(&self, batch: u32) -> Result<u64, InspectError> {
        (**self).purge(batch).await
    }
}
