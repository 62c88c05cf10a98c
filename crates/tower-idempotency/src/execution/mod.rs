//! An execution under its lease: acquire, run, finish.
//!
//! [`Attempt::acquire`](acquire::Attempt::acquire) acquires the lease. An [`Execution`] then runs the work under it and
//! finishes it: [`Execution::run`] for [`run_once`](crate::IdempotencyLayer::run_once), [`handler`] for HTTP requests and
//! for [`take_over`](crate::IdempotencyLayer::take_over). All of them end in [`Execution::conclude`], except an HTTP request
//! or a takeover whose record [`Execution::complete_now`] stores.
//!
//! The caller can drop the future at every await. If [`Detach::continues_for`](detach::Detach::continues_for) then returns
//! `None`, the drop cancels the request. Otherwise the whole future continues in a background task. While a request waits
//! for another one, a drop cancels it, unless an earlier acquire may still succeed.

pub(crate) mod acquire;
pub(crate) mod admission;
mod background;
pub(crate) mod detach;
pub(crate) mod finish;
pub(crate) mod handler;
pub(crate) mod http;
pub(crate) mod observe;
pub(crate) mod reconcile;
mod respond;
pub(crate) mod rules;
pub(crate) mod shared;
pub(crate) mod waiters;

use std::{panic::resume_unwind, pin::pin};

use ::http::StatusCode;
use bytes::Bytes;

use crate::{
    lease::state::LeaseGuard,
    limits::InFlightPermit,
    panics::{Panic, catch_panic},
    record::{Codec, NeedsAttention, Origin},
    response::disposition::NotRecordedReason,
    store::Ttl,
    telemetry,
};

/// An execution: its lease and the permit of its request.
pub(crate) struct Execution {
    pub(crate) lease: LeaseGuard,
    pub(crate) permit: InFlightPermit,
}

/// Output of a handler, and the way in which its lease ends.
pub(crate) enum HandlerOutcome<T> {
    /// The handler committed this record itself.
    Committed(T, Bytes),
    /// The layer stores this record.
    Record(T, PendingRecord),
    /// The layer releases the key for this reason.
    Release(T, &'static str),
    /// The execution failed. The settings decide about the key.
    Failed(T, Failure),
    /// The lease is left to expire.
    Hold(T),
}

/// Reason why an execution failed.
#[derive(Clone, Copy)]
pub(crate) enum Failure {
    /// The handler panicked.
    Panic,
    /// The inner service returned an error.
    Error,
    /// The body of the response failed, or its length differs from the announced one.
    BrokenBody(StatusCode),
}

impl Failure {
    /// Returns the name of the reason in events and counters.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Panic => "panic",
            Self::Error => "error",
            Self::BrokenBody(_) => NotRecordedReason::BrokenBody.name(),
        }
    }

    /// Returns the record of a failure that an operator must resolve.
    fn into_record(self, origin: Origin<'_>) -> PendingRecord {
        const PANICKED: NeedsAttention = NeedsAttention::new("handler-panicked");
        const FAILED: NeedsAttention = NeedsAttention::new("handler-failed");
        const BODY_FAILED: NeedsAttention = NeedsAttention::new("body-failed");
        let (status, attention) = match self {
            Self::Panic => (None, PANICKED),
            Self::Error => (None, FAILED),
            Self::BrokenBody(status) => (Some(status), BODY_FAILED),
        };
        PendingRecord {
            status,
            record: Codec::encode_attention(origin, status, &attention),
            retention: Ttl::MAX,
        }
    }
}

/// A record that is about to be stored.
#[derive(Clone)]
pub(crate) struct PendingRecord {
    /// Status of the response. `None` for a value of `run_once`.
    pub(crate) status: Option<StatusCode>,
    pub(crate) record: Bytes,
    pub(crate) retention: Ttl,
}

/// Result of a finished execution: the response or value that is valid for the key.
pub(crate) enum Finished {
    /// The handler's own output is valid.
    Own,
    /// The record that the handler committed is valid.
    Committed {
        record: Bytes,
        /// `true` if the handler reported the commit before it returned. `false` if only a query found the record.
        is_reported: bool,
    },
    /// The record of another execution is valid.
    Stored(Bytes),
    /// The stored outcome is unknown. If `retryable`, a retry can get it, or executes only if nothing is stored.
    Unknown { retryable: bool },
}

impl Execution {
    /// Runs `work` under the lease, finishes the lease, and returns the output of `work` with the result.
    ///
    /// # Panics
    ///
    /// If `work` panics, after the key was treated as the settings say.
    pub(crate) async fn run<T>(
        self,
        work: impl AsyncFnOnce(&Self) -> HandlerOutcome<T>,
    ) -> (T, Finished) {
        let ran = catch_panic(pin!(work(&self))).await;
        self.conclude(ran).await
    }

    /// Finishes the lease according to `ran`. Returns the output with the result.
    ///
    /// # Panics
    ///
    /// Resumes the panic in `ran`, after the key was treated as the settings say.
    pub(crate) async fn conclude<T>(self, ran: Result<HandlerOutcome<T>, Panic>) -> (T, Finished) {
        match ran {
            Ok(HandlerOutcome::Committed(output, record)) => {
                telemetry::recorded(self.lease.layer(), self.lease.id(), &record);
                let finished = Finished::Committed {
                    record,
                    is_reported: true,
                };
                (output, finished)
            }
            Ok(HandlerOutcome::Record(output, record)) => (output, self.finish(record).await),
            Ok(HandlerOutcome::Release(output, reason)) => {
                let report = finish::released(reason);
                (output, self.release_without_record(report).await)
            }
            Ok(HandlerOutcome::Failed(output, failure)) => (output, self.fail(failure).await),
            Ok(HandlerOutcome::Hold(output)) => (output, self.hold().await),
            Err(panic) => {
                // A record that the handler committed before it panicked stays. A release does not affect a commit that may
                // have succeeded.
                let closed = self.lease.close();
                match self.committed_record(closed, false).await {
                    Some(record) => {
                        telemetry::recorded(self.lease.layer(), self.lease.id(), &record);
                    }
                    None => drop(self.fail(Failure::Panic).await),
                }
                // The caller does not poll this future again: see `Detachable`.
                resume_unwind(panic)
            }
        }
    }

    /// Stores the record and ends the lease, in a store that replies at once. Returns `false` if [`finish`](Self::finish) has
    /// to do it.
    pub(super) fn complete_now(&self, pending: &mut PendingRecord) -> bool {
        let (lease, retention) = (&self.lease, pending.retention);
        lease.set_finishing(true);
        if lease.has_unacknowledged_commit() {
            return false;
        }
        let recorded = telemetry::Recorded::new(&pending.record);
        let record = &mut pending.record;
        let (store, layer) = (lease.store(), lease.layer());
        let is_stored = store.complete_now(&lease.reference, record, retention, layer);
        if is_stored {
            recorded.report(layer, lease.id());
        }
        is_stored
    }
}
