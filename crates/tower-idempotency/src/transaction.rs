//! The seam for stores whose database is also that of the handler: effect and record in one transaction.
//!
//! Between an effect and its record a process can die, be paused past its lease, or be taken for dead. Where both are
//! written in one transaction that is fenced by the lease, there is no between: that is exactly-once.
//!
//! This is for those who write a store. Whoever writes a handler uses what that store makes of it.
//!
//! # Contract
//!
//! 1. [`Lease::prepare`] makes a response the record that the layer would have stored, or says why the layer would store
//!    none: then roll back, and answer with the response all the same.
//! 2. In the handler's transaction, write the record where the lease is: one conditional write that finds the entry
//!    leased by [`lease_ref().token`](LeaseRef), its lease over or not, and makes it completed as
//!    [`Store::complete`](crate::Store::complete) does: token, retention, news for waiters. If it finds no such entry the
//!    lease is lost: roll back. Unlike `complete` it does *not* store the record where there is no entry or nobody holds
//!    it, so that nothing is committed under a lease that was released.
//! 3. Do this and commit inside of [`Prepared::commit`]. It tells the layer beforehand that a commit is on its way, and
//!    afterwards that there is nothing left to store, or that the lease is lost.
//!
//! Write the record last: renewals, and the questions of others, then wait for the commit and not for the handler. An
//! [`acquire`](crate::Store::acquire) that meets a transaction under way on its entry must wait for its end, as
//! conditional writes in a database do: it is what the layer asks when it has to know what became of a commit.
//!
//! # What the layer then does
//!
//! It answers what was committed, whatever the handler returns, and neither completes nor releases. Of the returned
//! response only that counts which no replay carries (cookies and the like): what comes between the commit and the layer
//! is not part of the record. When a commit began and nobody heard of its end (the future was dropped, the handler
//! panicked, the connection broke), the layer asks the store and answers what it holds; if that cannot be found out, 409
//! `outcome-unknown`. Commits are refused once the handler has answered.
//!
//! # Examples
//!
//! A handler as a store's guard would have it, on a toy of a database:
//!
//! ```
//! # use std::{collections::HashMap, sync::{Arc, Mutex}};
//! # use axum::{Router, body::Body, http::{Request, StatusCode}, response::{IntoResponse, Response}, routing::post};
//! # use tower::ServiceExt;
//! use tower_idempotency::{IdempotencyLayer, Lease, MemoryStore, Store, store::StoreError};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = MemoryStore::new();
//! let database = store.clone();
//! let pay = async move |lease: Lease| {
//!     // begin; insert into payments ..
//!     let prepared = match lease.prepare("paid".into_response()).await {
//!         Ok(prepared) => prepared,
//!         Err(unrecorded) => return unrecorded.into_answer().into_response(),
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
use http::{Response, StatusCode};
use serde::Serialize;

use crate::{
    body::{Body, Counted},
    execution::reconcile::{Found, look},
    lease::{Held, Lease},
    limits::Buffer,
    record::TombstoneReason,
    response::directives::Retention,
    response::disposition::{Then, code_alone, receive, tombstone_or_release, value},
    store::{LeaseRef, StoreError, Ttl},
};

pub use crate::response::disposition::NotRecordedReason;

impl Lease {
    /// Makes a response the record that the layer would have stored for it: the same statuses, headers, limits and
    /// retention. Control headers, [`Retention`](crate::Retention) and [`NeedsAttention`](crate::NeedsAttention) are read
    /// and taken off.
    ///
    /// A response that is too large or streamed becomes a tombstone; its body goes on where it was left.
    ///
    /// For handlers of HTTP: the record of a response that is committed under a lease of
    /// [`run_once`](crate::IdempotencyLayer::run_once) cannot be read there, and its key is an error until it expires.
    ///
    /// # Errors
    ///
    /// [`NotRecordable`], with the response, when the layer would store nothing. What the transaction has done would be done
    /// again by a retry: roll it back.
    ///
    /// # Cancellation
    ///
    /// Dropped, the response is gone and nothing else has happened.
    pub async fn prepare<B: http_body::Body>(
        &self,
        res: Response<B>,
    ) -> Result<Prepared<Response<Body<B>>>, NotRecordable<Response<Body<B>>>> {
        let held = &*self.0;
        let (config, engine) = (&*held.grant.config, &held.grant.engine);
        let mut buffer = engine.limits.buffer();
        let half = held.found_half();
        let (mut res, then) = receive(config, &mut buffer, held.id(), res, half).await;
        if let Then::Free(
            NotRecordedReason::NoStore
            | NotRecordedReason::Unrecordable
            | NotRecordedReason::BrokenBody,
        ) = then
        {
            // The layer would not see it again: what said so has been taken off, it has begun to flow, or what is left of it
            // no longer says how long it should be.
            res.extensions_mut().insert(Retention::NoStore);
        }
        if res.body().is_counted() {
            res.extensions_mut().insert(Counted);
        }
        let status = res.status();
        Prepared::new(self, then, status, res, buffer)
    }

    /// Makes a value the record that [`run_once`](crate::IdempotencyLayer::run_once) would have stored for it. A value that
    /// is too large or cannot be serialised becomes a tombstone. `Some` of what is nil by itself, such as `Some(())`, is replayed
    /// as `None`.
    ///
    /// For work of `run_once`: the record of a value that is committed under the lease of a request cannot be read there, and
    /// the key is answered 503 until it expires.
    pub fn prepare_value<T: Serialize>(&self, of: T) -> Prepared<T> {
        let config = &*self.0.grant.config;
        Prepared {
            lease: self.clone(),
            record: value(config, self.0.id(), &of),
            retention: config.response.retention,
            status: StatusCode::OK,
            answer: of,
            buffer: self.0.grant.engine.limits.buffer(),
        }
    }
}

/// A record that can be committed under the lease that it was prepared under.
#[must_use = "nothing is stored before it is committed"]
pub struct Prepared<T> {
    lease: Lease,
    record: Bytes,
    retention: Ttl,
    status: StatusCode,
    answer: T,
    buffer: Buffer,
}

impl<T> Prepared<T> {
    fn new(
        lease: &Lease,
        then: Then,
        status: StatusCode,
        answer: T,
        buffer: Buffer,
    ) -> Result<Self, NotRecordable<T>> {
        match then {
            Then::Keep { record, retention } => Ok(Self {
                lease: lease.clone(),
                record,
                retention,
                status,
                answer,
                buffer,
            }),
            Then::Free(reason) => Err(NotRecordable { reason, answer }),
        }
    }

    /// Under which lease it is to be written, and nowhere else.
    #[must_use]
    pub fn lease_ref(&self) -> LeaseRef {
        self.lease.lease_ref()
    }

    /// What is to be written: opaque bytes.
    #[must_use]
    pub fn record(&self) -> &Bytes {
        &self.record
    }

    /// For how long it is kept, from the commit on.
    #[must_use]
    pub fn retention(&self) -> Ttl {
        self.retention
    }

    /// The tombstone of it, for a store that cannot keep a record this large: look at the length before you write, as a
    /// statement that fails may end the transaction. What needs attention loses its reason instead.
    ///
    /// # Errors
    ///
    /// [`NotRecordable`], with [`NotRecordedReason::Unrecordable`], where the layer leaves no tombstones.
    pub fn into_tombstone(self) -> Result<Self, NotRecordable<T>> {
        let held = &*self.lease.0;
        let (config, reason) = (&*held.grant.config, TombstoneReason::TooLarge);
        let retention = self.retention;
        let then = match code_alone(held.id(), Some(self.status), &self.record) {
            Some(record) => Then::Keep { record, retention },
            None => tombstone_or_release(config, held.id(), self.status, reason, retention),
        };
        Self::new(&self.lease, then, self.status, self.answer, self.buffer)
    }

    /// Runs `commit`, which writes the record and ends the transaction, and gives the answer back. From here on the layer
    /// stores nothing itself.
    ///
    /// `commit` returns `Ok` when both effect and record are stored, [`StoreError::LeaseLost`] when the lease was found
    /// lost and neither is, and [`StoreError::Backend`] when it does not know: then the store is asked. After an error the
    /// whole transaction may be tried again, from [`prepare`](Lease::prepare) on, while the lease is held.
    ///
    /// # Errors
    ///
    /// [`StoreError::LeaseLost`] when the lease is lost, has its outcome or ended with the handler's answer: neither effect
    /// nor record is stored, unless by somebody else. Also when it could only be found out after the record's retention that
    /// there is none: then both may have been stored. What `commit` returned, otherwise; only if it is a
    /// [`StoreError::Backend`] and the store could not be asked either may both be stored all the same.
    ///
    /// # Cancellation
    ///
    /// Dropped, both are stored or neither: the layer finds out which before it answers.
    pub async fn commit(
        self,
        commit: impl Future<Output = Result<(), StoreError>>,
    ) -> Result<T, StoreError> {
        let held = &*self.lease.0;
        let retention = self.retention.as_duration();
        let is_second = held.commit.has_begun();
        if held.is_lost() || !held.commit.begin(&self.record, retention) {
            return Err(StoreError::LeaseLost);
        }
        // A renewal that comes after the commit finds no lease, and must not take it for lost.
        let _ending = Ending::of(held);
        let mut committed = commit.await;
        if let Err(StoreError::Backend(error)) = committed {
            committed = match Box::pin(find_out(held, &self.record)).await {
                Some(known) => known,
                None => Err(StoreError::Backend(error)),
            };
        }
        match committed {
            Ok(()) => {
                held.commit.succeed(self.record);
                held.end();
                Ok(self.answer)
            }
            Err(error) => {
                match error {
                    // An earlier try may have come through.
                    StoreError::LeaseLost if is_second => held.lose_or_end(),
                    StoreError::LeaseLost => held.lose(),
                    _ => {}
                }
                Err(error)
            }
        }
    }
}

/// While a commit is on its way, heard of or not.
struct Ending<'a>(&'a Held);

impl<'a> Ending<'a> {
    fn of(held: &'a Held) -> Self {
        held.about_to_end(true);
        Self(held)
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.about_to_end(false);
    }
}

/// What became of a commit whose reply did not come; `None` when nothing did, or nobody knows.
async fn find_out(held: &Held, record: &Bytes) -> Option<Result<(), StoreError>> {
    if held.commit.is_closed() {
        // The layer finds out by itself. To ask under this token would be to take the key for nobody, if it is free by now.
        return None;
    }
    let grant = &held.grant;
    match look(&grant.config, &grant.engine, &grant.claim).await {
        Found::Record(stored) if stored == record => Some(Ok(())),
        Found::Record(_) | Found::Orphan | Found::Lost => Some(Err(StoreError::LeaseLost)),
        // It was stored and is over, or it was not: to try again might be to do it again.
        Found::Held(_) if held.commit.may_be_over() => Some(Err(StoreError::LeaseLost)),
        Found::Held(_) | Found::Unknown => None,
    }
}

/// Shows no record and no answer.
impl<T> fmt::Debug for Prepared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("lease", &self.lease)
            .field("record_bytes", &self.record.len())
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

/// The layer would not record this answer, and so it cannot be committed.
pub struct NotRecordable<T> {
    reason: NotRecordedReason,
    answer: T,
}

impl<T> NotRecordable<T> {
    /// Why.
    #[must_use]
    pub fn reason(&self) -> NotRecordedReason {
        self.reason
    }

    /// The answer, to be sent once the transaction is rolled back.
    #[must_use]
    pub fn into_answer(self) -> T {
        self.answer
    }
}

/// Shows no answer.
impl<T> fmt::Debug for NotRecordable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotRecorded")
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Display for NotRecordable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "expected an answer to record, found one that is not: {}",
            self.reason.name()
        )
    }
}

impl<T> error::Error for NotRecordable<T> {}
