//! Finishes an execution: stores the record or releases the key, then returns the result that is valid for the key.

use std::future::Future;

use bytes::Bytes;

use crate::{
    execution::{
        Execution, Failure, Finished, PendingRecord,
        background::{
            release_late_acquire, report_end, spawn_release, spawn_release_of_expired,
            spawn_release_unacknowledged,
        },
        reconcile::{
            EntryStatus, LostLeaseOutcome, Reconciled, may_contradict_expired_commit,
            query_entry_with_new_token, reconcile_after_lost_lease, reconcile_refused_renewal,
            report_committed, unknown_outcome, verify_stored_record,
        },
        rules::ExecutionFailure,
    },
    lease::{
        commits::CommitOutcome,
        state::{LeaseGuard, LeaseState},
    },
    limits::InFlightPermit,
    record::TombstoneReason,
    response::disposition::{
        Disposition, encode_oversized_value, strip_reason, tombstone_or_release,
    },
    retry::Backoff,
    store::LeaseRef,
    store_client::{CompleteOutcome, RenewOutcome},
    telemetry,
};

impl Execution {
    /// Stores the record and ends the lease.
    pub(super) fn finish(self, mut pending: PendingRecord) -> impl Future<Output = Finished> {
        self.lease.set_finishing(true);
        async move {
            let is_first = !self.lease.has_unacknowledged_commit();
            let completed = pending
                .complete(&self.lease, &self.lease.reference, is_first)
                .await;
            let completed = match completed {
                Ok(completed) => completed,
                Err(reason) => {
                    return Box::pin(self.release_without_record(released(reason))).await;
                }
            };
            match completed {
                // A commit of the handler may have been stored first. The completion then changed nothing.
                CompleteOutcome::Stored if self.lease.has_unacknowledged_commit() => {
                    Box::pin(verify_stored_record(&self.lease, self.permit, &pending)).await
                }
                CompleteOutcome::Stored => {
                    telemetry::recorded(self.lease.layer(), self.lease.id(), &pending.record);
                    Finished::Own
                }
                CompleteOutcome::LeaseLost => {
                    self.lease.mark_lost();
                    self.lease.set_finished();
                    let Self { lease, permit } = self;
                    let reconciled = reconcile_after_lost_lease(&lease, permit, &pending);
                    let finished = match Box::pin(reconciled).await {
                        LostLeaseOutcome::Finished(finished) => finished,
                        LostLeaseOutcome::Unstored(reference, permit) => {
                            let pending = pending.clone();
                            spawn_complete(&lease, reference, pending, permit, false);
                            unknown_outcome(&lease)
                        }
                    };
                    let (layer, id, record) = (lease.layer(), lease.id(), &pending.record);
                    match finished {
                        Finished::Own => telemetry::recorded(layer, id, record),
                        _ => telemetry::attention_not_stored(layer, id, record),
                    }
                    finished
                }
                // The effect has happened, and only this process has the response. It responds, and retries storing the
                // record. Retries get `in-progress` until the lease expires.
                CompleteOutcome::Failed | CompleteOutcome::TooLarge { .. } => {
                    let Self { lease, permit } = self;
                    // A renewal may have found no lease. If another process holds it, this response is not the valid one. If
                    // the completion itself has ended the lease, it is.
                    let mut unknown = lease.has_unacknowledged_commit() || lease.is_lost();
                    if !unknown && lease.is_renewal_refused() {
                        let reconciled = reconcile_refused_renewal(&lease, &pending.record);
                        if let Some(finished) = Box::pin(reconciled).await {
                            return finished;
                        }
                        unknown = true;
                    }
                    spawn_complete(&lease, lease.reference, pending, permit, !unknown);
                    if unknown {
                        unknown_outcome(&lease)
                    } else {
                        Finished::Own
                    }
                }
            }
        }
    }

    /// Releases the key without storing a record, unless the handler committed one itself. `report` reports the release.
    pub(super) async fn release_without_record(
        self,
        report: impl FnOnce(&LeaseState) + Send + 'static,
    ) -> Finished {
        match self.lease.close() {
            // The lease is known to be lost. Another execution may have stored a response.
            CommitOutcome::NotAttempted if self.lease.commits.has_refused() => {
                Box::pin(self.release_and_reconcile(report)).await
            }
            CommitOutcome::NotAttempted if self.lease.must_leave_orphan() => {
                // A retry can take the key over at once.
                self.leave_orphan(report).await
            }
            CommitOutcome::NotAttempted => {
                self.release(report).await;
                Finished::Own
            }
            // A commit that the handler reported may be one that the database refused: see `committed_record`.
            CommitOutcome::Committed(_) | CommitOutcome::Unacknowledged => {
                Box::pin(self.release_and_reconcile(report)).await
            }
        }
    }

    /// Releases the key, and reports it or the loss of the lease. If the store fails, a background task repeats the release for
    /// one lease duration.
    async fn release(self, report: impl FnOnce(&LeaseState) + Send + 'static) {
        self.lease.set_finishing(true);
        let Self { lease, permit } = self;
        let has_unacknowledged_commit = lease.has_unacknowledged_commit();
        // Another process may hold the key. A release does not report that, a renewal does.
        if !has_unacknowledged_commit && !lease.is_lost() && lease.has_expired() {
            match Box::pin(lease.expire_now()).await {
                RenewOutcome::Renewed => {}
                RenewOutcome::LeaseLost => lease.mark_lost(),
                RenewOutcome::Failed => return spawn_release_of_expired(&lease, permit, report),
            }
        }
        let released = Box::pin(lease.release()).await;
        if !has_unacknowledged_commit {
            report_end(&lease, report);
        }
        if has_unacknowledged_commit || lease.may_acquire_late() {
            // A query of the handler's commit, or an earlier attempt of the acquire, may acquire the key that is free by then.
            spawn_release_unacknowledged(lease.config(), lease.store(), lease.claim(), permit);
        } else if !released {
            spawn_release(&lease, permit);
        }
    }

    /// Releases the key, then queries the store for a commit of the handler. In the reverse order, a commit that has not
    /// reached the store yet could succeed after the query.
    ///
    /// If the handler derived keys that a release would lose, leaves an orphan instead. A commit that has not reached the store
    /// yet may then succeed, so the outcome is unknown. A retry gets its record, or takes the key over.
    async fn release_and_reconcile(self, report: impl FnOnce(&LeaseState)) -> Finished {
        self.lease.set_finishing(true);
        let Self { lease, permit } = self;
        let mut is_lost = lease.is_lost();
        let (is_ended, released) = if lease.must_leave_orphan() {
            match lease.expire_now().await {
                RenewOutcome::Renewed => (true, false),
                RenewOutcome::LeaseLost => {
                    is_lost = true;
                    (true, true)
                }
                RenewOutcome::Failed => (false, false),
            }
        } else {
            let released = lease.release().await;
            (released, released)
        };
        let status = if is_ended {
            query_entry_with_new_token(&lease, permit.additional()).await
        } else {
            EntryStatus::Unknown
        };
        let is_completed = matches!(
            status,
            EntryStatus::CompletedHere(_) | EntryStatus::Completed(_)
        );
        // The handler's commit may still query the store, and acquire the key that is free by now. A commit that was refused
        // does not, so the release can be repeated. A commit that was sent may follow a release that failed.
        let may_repeat =
            !is_ended && !lease.must_leave_orphan() && !lease.has_unacknowledged_commit();
        if may_repeat || released && !is_completed {
            spawn_release_unacknowledged(lease.config(), lease.store(), lease.claim(), permit);
        }
        match status {
            // The layer has stored nothing under this lease, so the handler has.
            EntryStatus::CompletedHere(record) => report_committed(&lease, record),
            EntryStatus::Completed(record) => {
                if released || is_lost {
                    lease.mark_lost();
                } else {
                    // This execution left an orphan. The other one began after this lease had ended.
                    report(&lease);
                }
                Finished::Stored(record)
            }
            // The handler's commit found the lease lost. After a retry it reported no loss, because its first attempt may have
            // ended the lease. The query excludes that, unless the record has expired. The other execution may still respond.
            EntryStatus::Orphaned | EntryStatus::HeldElsewhere if lease.is_lost() => {
                if !lease.commits.record_may_have_expired() {
                    lease.mark_lost();
                }
                unknown_outcome(&lease)
            }
            // If this lease was held until now, any other holder acquired the key after it ended. The commit's record has expired,
            // or was never stored. It never will be, since the commit no longer finds its lease, unless this execution left an
            // orphan.
            EntryStatus::Acquired(_) | EntryStatus::Orphaned | EntryStatus::HeldElsewhere => {
                let may_have_expired = lease.commits.record_may_have_expired();
                if !is_lost {
                    report(&lease);
                } else if !may_have_expired {
                    lease.mark_lost();
                }
                let may_still_commit = !released && lease.has_unacknowledged_commit();
                if may_still_commit || may_have_expired {
                    unknown_outcome(&lease)
                } else {
                    Finished::Own
                }
            }
            EntryStatus::Unknown => {
                if !is_lost {
                    lease.warnings().key_held(lease.id());
                } else if !lease.has_unacknowledged_commit() {
                    lease.mark_lost();
                }
                unknown_outcome(&lease)
            }
        }
    }

    /// Returns the record that the handler committed. If `is_confirmed` is `false`, returns it only if the store has it.
    ///
    /// A handler can report a commit too early, for example inside a closure after which the database refuses to commit. It
    /// then returns another output than the committed one, or panics.
    pub(crate) async fn committed_record(
        &self,
        commits: CommitOutcome,
        is_confirmed: bool,
    ) -> Option<Bytes> {
        match commits {
            CommitOutcome::Committed(record) if is_confirmed => Some(record),
            CommitOutcome::Committed(_) => Box::pin(self.confirm_commit()).await,
            CommitOutcome::NotAttempted | CommitOutcome::Unacknowledged => None,
        }
    }

    pub(super) async fn confirm_commit(&self) -> Option<Bytes> {
        let permit = self.permit.additional();
        match query_entry_with_new_token(&self.lease, permit).await {
            EntryStatus::CompletedHere(record) => Some(record),
            EntryStatus::Completed(_)
            | EntryStatus::Acquired(_)
            | EntryStatus::Orphaned
            | EntryStatus::HeldElsewhere
            | EntryStatus::Unknown => None,
        }
    }

    /// Ends the lease of a failed execution as the settings say.
    pub(super) async fn fail(self, failure: Failure) -> Finished {
        match self.lease.config().execution.failure() {
            // After a panic there is no response, so the outcome of an unacknowledged commit is not needed.
            ExecutionFailure::Release
                if matches!(failure, Failure::Panic) && !self.lease.must_leave_orphan() =>
            {
                self.release(released(failure.name())).await;
                Finished::Own
            }
            // The store makes an orphan of a released takeover.
            ExecutionFailure::Orphan if self.lease.grant.takeover => {
                Box::pin(self.release_without_record(orphan_left(failure))).await
            }
            ExecutionFailure::Release => {
                self.release_without_record(released(failure.name())).await
            }
            ExecutionFailure::Orphan => Box::pin(self.leave_orphan(orphan_left(failure))).await,
            ExecutionFailure::NeedsAttention => {
                let record = failure.into_record(self.lease.origin());
                Box::pin(self.finish(record)).await
            }
        }
    }

    /// Leaves the key as an orphan at once, and reports it. If the store fails, the lease expires by itself.
    async fn leave_orphan(self, report: impl FnOnce(&LeaseState)) -> Finished {
        let lease = self.lease.handle();
        let renewed = lease.0.expire_now().await;
        let has_failed = matches!(renewed, RenewOutcome::Failed);
        match renewed {
            RenewOutcome::Renewed => report_end(&lease.0, report),
            RenewOutcome::LeaseLost if !lease.0.has_unacknowledged_commit() => lease.0.mark_lost(),
            // The query decides: the handler's commit may have ended the lease.
            RenewOutcome::LeaseLost | RenewOutcome::Failed => {}
        }
        match self.reconcile_commit(renewed).await {
            Reconciled::Finished(finished @ Finished::Unknown { .. })
                if has_failed && !lease.0.is_lost() =>
            {
                lease.0.warnings().key_held(lease.0.id());
                finished
            }
            Reconciled::Finished(finished) => finished,
            Reconciled::NotCommitted => {
                if has_failed {
                    report_held(&lease.0);
                }
                Finished::Own
            }
        }
    }

    /// Leaves the lease to expire. Queries the store first if the handler's commit may be stored.
    pub(super) async fn hold(self) -> Finished {
        let lease = self.lease.handle();
        let mut renewed = RenewOutcome::Renewed;
        if lease.0.has_unacknowledged_commit() {
            // The renewal waits for the row lock of a commit that the database still executes.
            renewed = lease.0.renew(lease.0.claim().lease).await;
        }
        let is_lost = lease.0.is_lost() || matches!(renewed, RenewOutcome::LeaseLost);
        match self.reconcile_commit(renewed).await {
            Reconciled::Finished(finished @ Finished::Unknown { .. }) if !is_lost => {
                lease.0.warnings().key_held(lease.0.id());
                finished
            }
            Reconciled::Finished(finished @ Finished::Stored(_)) => {
                report_held(&lease.0);
                finished
            }
            Reconciled::Finished(finished) => finished,
            Reconciled::NotCommitted => {
                report_held(&lease.0);
                Finished::Own
            }
        }
    }
}

/// Returns the report of a key that was released for this reason.
pub(super) fn released(reason: &'static str) -> impl FnOnce(&LeaseState) {
    move |lease: &LeaseState| telemetry::released(lease.layer(), lease.id(), reason)
}

/// Reports a key that stays held until its lease expires, unless the lease is lost.
fn report_held(lease: &LeaseState) {
    report_end(lease, |lease| lease.warnings().key_held(lease.id()));
}

/// Returns the report of a failed execution that leaves an orphan.
fn orphan_left(failure: Failure) -> impl FnOnce(&LeaseState) {
    move |lease: &LeaseState| lease.warnings().orphan_left(lease.id(), failure.name())
}

impl PendingRecord {
    /// Stores the record, or a smaller one if the store rejects its size. Returns the reason if the layer records nothing in
    /// its place. `is_first` is `true` if nothing has tried to complete the entry under this lease before.
    async fn complete(
        &mut self,
        lease: &LeaseState,
        reference: &LeaseRef,
        is_first: bool,
    ) -> Result<CompleteOutcome, &'static str> {
        let Self {
            status,
            ref mut record,
            retention,
        } = *self;
        if may_contradict_expired_commit(lease, record) {
            return Err("outcome_unknown");
        }
        let (rules, store, id) = (&lease.config().response, lease.store(), lease.id());
        let timeout = lease.store_timeout();
        let warnings = lease.warnings();
        let completed = store.complete(reference, is_first, record, retention, timeout, warnings);
        let completed = completed.await;
        let CompleteOutcome::TooLarge { limit } = completed else {
            return Ok(completed);
        };
        warnings.record_too_large(id, record.len(), limit);
        *record = match (strip_reason(lease.origin(), status, record), status) {
            (Some(without_reason), _) => without_reason,
            (None, Some(status)) => {
                let reason = TombstoneReason::TooLarge;
                match tombstone_or_release(rules, lease.origin(), status, reason, retention) {
                    Disposition::Record { record, .. } => record,
                    Disposition::Release(reason) => return Err(reason.name()),
                }
            }
            (None, None) => encode_oversized_value(rules, id),
        };
        let completed = store.complete(reference, false, record, retention, timeout, warnings);
        Ok(completed.await)
    }
}

// ---- Background work ----

/// Retries storing the record in a background task, for one lease duration.
///
/// The lease is not renewed meanwhile. Otherwise a store that renews leases but rejects records would block the key
/// forever. The permit makes [`drain`](crate::IdempotencyLayer::drain) wait for the task. `responded` is `true` if the
/// client gets the response that belongs to the record.
fn spawn_complete(
    lease: &LeaseGuard,
    reference: LeaseRef,
    mut pending: PendingRecord,
    permit: InFlightPermit,
    responded: bool,
) {
    let (lease, deadline) = (lease.handle(), lease.background_deadline());
    let mut held = lease.0.response_bytes();
    held.resize_unchecked(pending.record.len());
    tokio::spawn(async move {
        let _held = held;
        let lease = &*lease.0;
        let mut backoff = Backoff::new();
        let mut is_refused = false;
        while backoff.wait_until(deadline).await {
            match pending.complete(lease, &reference, false).await {
                Ok(CompleteOutcome::Failed) => {}
                Ok(CompleteOutcome::Stored) if lease.has_unacknowledged_commit() => {
                    // The client has its response. The query is for the counters and alarms of operators.
                    verify_stored_record(lease, permit, &pending).await;
                    return;
                }
                Ok(CompleteOutcome::Stored) => {
                    return telemetry::recorded(lease.layer(), lease.id(), &pending.record);
                }
                Ok(CompleteOutcome::LeaseLost) => {
                    // Reports the loss that a renewal found, unless a query has reported it. After a response, the execution
                    // counts as unrecorded instead.
                    if !responded && lease.is_renewal_refused() {
                        lease.mark_lost();
                    }
                    is_refused = true;
                    break;
                }
                // The lease may still be held. It prevents another execution until it expires.
                Ok(CompleteOutcome::TooLarge { .. }) => break,
                Err(reason) => {
                    // If a renewal found no lease, the handler's commit may have ended it. This is no loss.
                    if lease.has_unacknowledged_commit() {
                        released(reason)(lease);
                    } else {
                        report_end(lease, released(reason));
                    }
                    if lease.must_leave_orphan() {
                        // Without renewals, the lease expires by itself.
                        return;
                    }
                    let (store, timeout) = (lease.store(), lease.store_timeout());
                    let warnings = lease.warnings();
                    let released = store.release_until(&reference, deadline, timeout, warnings);
                    released.await;
                    release_late_acquire(lease, permit);
                    return;
                }
            }
        }
        telemetry::attention_not_stored(lease.layer(), lease.id(), &pending.record);
        if responded {
            lease.warnings().unrecorded(lease.id());
        }
        // A drain waits for the permit, so the loss is counted before.
        if is_refused {
            release_late_acquire(lease, permit);
        }
    });
}
