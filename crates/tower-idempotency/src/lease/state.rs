//! State of one lease: its deadline, its flags and the handler's commits.

use std::{
    future::Future,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

use crate::{
    config::Config,
    layer_name::LayerName,
    lease::{
        Lease,
        commits::{CommitAttempts, CommitOutcome},
        renewer::Renewer,
    },
    limits::{Buffer, Caller},
    record::{ExecutionTrace, Origin},
    request::key::RequestKey,
    store::{Claim, KeyId, LeaseRef, ScopeDigest, Ttl, is_operation_of_run_once},
    store_client::{RenewOutcome, StoreClient},
    telemetry::Warnings,
};

/// A lease that the store granted, and the layer that holds it.
pub(crate) struct Grant {
    pub(crate) config: Arc<Config>,
    pub(crate) renewer: Arc<Renewer>,
    pub(crate) caller: Arc<Caller>,
    pub(crate) claim: Claim,
    /// Key of the request. `None` outside HTTP.
    pub(crate) key: Option<RequestKey>,
    /// Digest of the principal of the request. `None` outside HTTP.
    pub(crate) principal: Option<ScopeDigest>,
    /// `true` if an outer layer holds a lease for the request.
    pub(crate) is_nested: bool,
    pub(crate) generation: u64,
    pub(crate) takeover: bool,
    /// Set when a request body that the handler reads itself fails or ends early.
    pub(crate) body_aborted: Option<Arc<AtomicBool>>,
    /// The `traceparent` of the request, for the record.
    pub(crate) traceparent: Option<ExecutionTrace>,
    /// Instant at which the successful `acquire` was sent.
    pub(crate) sent: Instant,
    /// `true` if an earlier attempt got no reply. It may still acquire the key after its release.
    pub(crate) may_acquire_late: bool,
}

/// State of one lease, shared by the execution, the renewer and the handler.
pub(crate) struct LeaseState {
    pub(crate) grant: Grant,
    pub(crate) reference: LeaseRef,
    pub(crate) commits: CommitAttempts,
    /// Number of transactions that the handler has begun and neither committed nor rolled back.
    open_transactions: AtomicUsize,
    has_lost_transaction: AtomicBool,
    /// Number of batches of which the handler has begun items, and whose results are not all final.
    unfinished_batches: AtomicUsize,
    /// Wakes when `lost` or `finished` changes.
    pub(super) changed: Notify,
    // Times are nanoseconds since the grant was sent. The deadline counts from before the acquiring or renewing
    // call was sent. While both clocks run alike, it is therefore never later than the deadline of the store.
    deadline: AtomicU64,
    // Time of the next renewal. With `sequence` it is the key in the renewer's queue; written under the lock of the queue.
    next_renewal: AtomicU64,
    sequence: u64,
    lost: AtomicBool,
    loss_reported: AtomicBool,
    overdue_reported: AtomicBool,
    // The outcome is being sent to the store. A renewal may find that the lease has ended before the outcome is acknowledged.
    finishing: AtomicBool,
    // A renewal found no lease while the outcome was sent.
    renewal_refused: AtomicBool,
    // An acquire under the token of this lease got no reply.
    may_acquire_late: AtomicBool,
    // The handler derived a key that would change if the entry were released.
    derived: AtomicBool,
    // The handler may have committed a checkpoint.
    has_checkpoint: AtomicBool,
    // The outcome of the last checkpoint is unknown.
    unresolved_checkpoint: AtomicBool,
    // Set under the lock of the renewer's queue, so that no renewal begins afterwards.
    finished: AtomicBool,
}

impl LeaseState {
    pub(super) fn new(grant: Grant, first_renewal: Duration, sequence: u64) -> Self {
        Self {
            reference: grant.claim.lease_ref(grant.generation),
            commits: CommitAttempts::default(),
            open_transactions: AtomicUsize::new(0),
            has_lost_transaction: AtomicBool::new(false),
            unfinished_batches: AtomicUsize::new(0),
            changed: Notify::new(),
            deadline: AtomicU64::new(nanos(grant.claim.lease.as_duration())),
            next_renewal: AtomicU64::new(nanos(first_renewal)),
            sequence,
            lost: AtomicBool::new(false),
            loss_reported: AtomicBool::new(false),
            overdue_reported: AtomicBool::new(false),
            finishing: AtomicBool::new(false),
            renewal_refused: AtomicBool::new(false),
            may_acquire_late: AtomicBool::new(grant.may_acquire_late),
            derived: AtomicBool::new(false),
            has_checkpoint: AtomicBool::new(false),
            unresolved_checkpoint: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            grant,
        }
    }

    pub(crate) fn id(&self) -> &KeyId {
        &self.reference.id
    }

    /// Returns the origin of the record that this execution produces.
    pub(crate) fn origin(&self) -> Origin<'_> {
        Origin {
            id: self.id(),
            traceparent: self.grant.traceparent.as_ref(),
        }
    }

    pub(crate) fn config(&self) -> &Config {
        &self.grant.config
    }

    pub(crate) fn claim(&self) -> &Claim {
        &self.grant.claim
    }

    pub(crate) fn store(&self) -> &StoreClient {
        self.grant.renewer.store()
    }

    /// Returns the warnings of the layer.
    pub(crate) fn warnings(&self) -> &Warnings {
        self.config().warnings()
    }

    /// Returns the name of the layer.
    pub(crate) fn layer(&self) -> &LayerName {
        self.config().layer()
    }

    /// Returns an empty buffer for response bodies of this caller.
    pub(crate) fn response_bytes(&self) -> Buffer {
        let max = self.config().limits.max_response_bytes;
        self.grant.caller.response_bytes(max)
    }

    /// Returns the timeout of a single store call.
    pub(crate) fn store_timeout(&self) -> Duration {
        self.grant.config.execution.store_timeout
    }

    /// Renews the lease in the store, for `ttl` from now. The lease keeps its deadline in this process.
    pub(crate) fn renew(&self, ttl: Ttl) -> impl Future<Output = RenewOutcome> {
        let (store, timeout) = (self.store(), self.store_timeout());
        store.renew(&self.reference, ttl, timeout, self.warnings())
    }

    /// Lets the lease expire at once, so that its key is an orphan.
    pub(crate) async fn expire_now(&self) -> RenewOutcome {
        // No later renewal may extend the lease again.
        self.set_finished();
        self.renew(Ttl::MIN).await
    }

    /// Releases the key. Returns `false` if the store failed.
    pub(crate) fn release(&self) -> impl Future<Output = bool> {
        let (store, timeout) = (self.store(), self.store_timeout());
        store.release(&self.reference, timeout, self.warnings())
    }

    /// Returns `true` if the handler read a request body that failed or ended early.
    pub(crate) fn request_body_incomplete(&self) -> bool {
        let aborted = self.grant.body_aborted.as_ref();
        aborted.is_some_and(|aborted| aborted.load(Ordering::Acquire))
    }

    /// Returns `true` if the record of this lease is a value, and not a response.
    pub(crate) fn records_value(&self) -> bool {
        is_operation_of_run_once(&self.claim().operation)
    }

    /// Returns `true` if the handler attempted a commit that may have succeeded without an acknowledgement.
    pub(crate) fn has_unacknowledged_commit(&self) -> bool {
        self.commits.has_begun()
    }

    /// Records that the handler derived a key for a call to another service.
    pub(super) fn set_derived(&self) {
        self.derived.store(true, Ordering::Relaxed);
    }

    /// Registers that the handler is about to commit a checkpoint. If the commit succeeds, a release leaves an orphan.
    pub(crate) fn set_checkpoint(&self) {
        self.has_checkpoint.store(true, Ordering::Relaxed);
        self.unresolved_checkpoint.store(true, Ordering::Relaxed);
    }

    /// Registers that the outcome of the last checkpoint is known.
    pub(crate) fn resolve_checkpoint(&self) {
        self.unresolved_checkpoint.store(false, Ordering::Relaxed);
    }

    /// Returns `true` if the handler may have committed a checkpoint without an acknowledgement.
    pub(crate) fn has_unresolved_checkpoint(&self) -> bool {
        self.unresolved_checkpoint.load(Ordering::Relaxed)
    }

    /// Returns `true` if a release would lose the keys that the handler derived.
    ///
    /// The key of the request is derived too, and changes if the entry is released. A retry after an error response must
    /// derive the same keys again.
    pub(crate) fn must_leave_orphan(&self) -> bool {
        // The release of a takeover leaves an orphan, and so the same keys.
        self.grant.key == Some(RequestKey::Derived)
            && !self.grant.takeover
            && self.derived.load(Ordering::Relaxed)
    }

    /// Returns `true` if a 4xx releases the key, because the service or the layer made the key. The client cannot choose another.
    ///
    /// Returns `false` if the layer made the key, and its release would leave an orphan: after a takeover, a checkpoint or derived
    /// downstream keys. An earlier phase or execution may have had an effect, and a completer would continue after the 4xx.
    pub(crate) fn is_released_by_client_error(&self) -> bool {
        if self.grant.key == Some(RequestKey::Derived) {
            let has_progress = self.grant.takeover
                || self.has_checkpoint.load(Ordering::Relaxed)
                || self.derived.load(Ordering::Relaxed);
            return !has_progress;
        }
        self.config().request.key_from.is_service()
    }

    pub(crate) fn begin_transaction(&self) {
        self.open_transactions.fetch_add(1, Ordering::AcqRel);
    }

    /// Registers that the handler has dropped a transaction that it neither committed nor rolled back.
    pub(crate) fn lose_transaction(&self) {
        self.has_lost_transaction.store(true, Ordering::Release);
    }

    pub(crate) fn has_lost_transaction(&self) -> bool {
        self.has_lost_transaction.load(Ordering::Acquire)
    }

    pub(crate) fn end_transaction(&self) {
        self.open_transactions.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns `true` if the handler has begun a transaction that it neither committed nor rolled back.
    pub(crate) fn has_open_transaction(&self) -> bool {
        self.open_transactions.load(Ordering::Acquire) != 0
    }

    pub(crate) fn begin_batch(&self) {
        self.unfinished_batches.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn end_batch(&self) {
        self.unfinished_batches.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns `true` if a retry of the request may change the result of an item. Its response is then no outcome.
    pub(crate) fn has_unfinished_batch(&self) -> bool {
        self.unfinished_batches.load(Ordering::Acquire) != 0
    }

    /// Sets whether an outcome is on its way to the store. The reply to the outcome then reports a lost lease. A renewal counts
    /// only if the outcome gets no reply.
    pub(crate) fn set_finishing(&self, finishing: bool) {
        self.finishing.store(finishing, Ordering::Release);
    }

    /// Registers that a renewal found no lease while an outcome was on its way to the store.
    pub(super) fn set_renewal_refused(&self) {
        self.renewal_refused.store(true, Ordering::Release);
    }

    /// Returns `true` if a renewal found no lease while an outcome was on its way to the store. Either the outcome has ended
    /// the lease, or another process holds it.
    pub(crate) fn is_renewal_refused(&self) -> bool {
        self.renewal_refused.load(Ordering::Acquire)
    }

    /// Registers that an acquire under the token of this lease got no reply.
    pub(crate) fn set_may_acquire_late(&self) {
        self.may_acquire_late.store(true, Ordering::Release);
    }

    /// Returns `true` if an acquire under the token of this lease got no reply. It may still acquire the key once the key is
    /// free.
    pub(crate) fn may_acquire_late(&self) -> bool {
        self.may_acquire_late.load(Ordering::Acquire)
    }

    /// Marks the lease as finished: it has its outcome and is not renewed any more.
    pub(crate) fn set_finished(&self) {
        self.stop_renewals();
        self.changed.notify_waiters();
    }

    /// Marks the lease as finished, and wakes no waiters.
    fn stop_renewals(&self) {
        let mut queue = self.grant.renewer.queue();
        self.finished.store(true, Ordering::Release);
        queue.remove(self.queue_key());
    }

    pub(super) fn is_finishing(&self) -> bool {
        self.finishing.load(Ordering::Acquire) || self.is_finished()
    }

    pub(super) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    /// Returns `true` if the store reported that this execution no longer holds the lease.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    pub(super) fn is_held(&self) -> bool {
        !self.is_lost() && !self.is_finished() && !self.has_expired()
    }

    /// Returns `true` if the lease has expired by the clock of this process.
    pub(crate) fn has_expired(&self) -> bool {
        Instant::now() >= self.deadline()
    }

    /// Returns the expiry of the lease by the clock of this process.
    pub(super) fn deadline(&self) -> Instant {
        self.grant.sent + Duration::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// Returns the deadline of background attempts: one lease duration from now, even if the lease itself expires sooner.
    ///
    /// A store that recovers later still accepts this lease's token unless another process took over.
    pub(crate) fn background_deadline(&self) -> Instant {
        Instant::now() + self.grant.claim.lease.as_duration()
    }

    /// Extends the lease, which was renewed by a call that was sent at `sent`.
    pub(super) fn extend_from(&self, sent: Instant) {
        let deadline = sent + self.grant.claim.lease.as_duration();
        self.deadline
            .store(nanos(deadline - self.grant.sent), Ordering::Release);
    }

    pub(super) fn queue_key(&self) -> (Instant, u64) {
        let next_renewal = Duration::from_nanos(self.next_renewal.load(Ordering::Relaxed));
        (self.grant.sent + next_renewal, self.sequence)
    }

    pub(super) fn set_next_renewal(&self, at: Instant) {
        let next_renewal = nanos(at - self.grant.sent);
        self.next_renewal.store(next_renewal, Ordering::Relaxed);
    }

    /// Marks the lease as lost to another execution, and reports it. A renewal and the completion may both detect the loss,
    /// and only the first one reports it.
    pub(crate) fn mark_lost(&self) {
        self.mark_not_held();
        if !self.loss_reported.swap(true, Ordering::AcqRel) {
            self.warnings().lease_lost(self.id());
        }
    }

    /// Reports the execution if it is overdue at `now`, once.
    pub(super) fn report_overdue(&self, now: Instant) {
        let age = now - self.grant.sent;
        if age >= self.config().execution.overdue_after()
            && !self.overdue_reported.swap(true, Ordering::AcqRel)
        {
            self.warnings().overdue(self.id(), age);
        }
    }

    /// Marks the lease as lost without a report. A commit of the handler may have ended the lease.
    pub(crate) fn mark_not_held(&self) {
        self.lost.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }
}

/// Owner of a lease, which is renewed as long as the guard lives.
///
/// Dropping the guard stops the renewals and nothing else. The lease ends by its outcome or its expiry.
pub(crate) struct LeaseGuard(Arc<LeaseState>);

impl LeaseGuard {
    pub(super) fn new(state: Arc<LeaseState>) -> Self {
        Self(state)
    }

    pub(crate) fn handle(&self) -> Lease {
        Lease(Arc::clone(&self.0))
    }

    /// Closes the handler's commits and returns their outcome. No commit can begin afterwards.
    pub(crate) fn close(&self) -> CommitOutcome {
        self.0.commits.close()
    }
}

impl Deref for LeaseGuard {
    type Target = LeaseState;

    fn deref(&self) -> &LeaseState {
        &self.0
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        self.stop_renewals();
        // Each waiter holds a handle. With one handle left there is no waiter, and no other thread can add one.
        if Arc::strong_count(&self.0) > 1 {
            self.changed.notify_waiters();
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
