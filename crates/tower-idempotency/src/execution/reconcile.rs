//! Queries the store for the state of an entry, after a lost lease or an unacknowledged commit.

use bytes::Bytes;

use crate::{
    execution::{
        Execution, Finished, PendingRecord,
        background::{release_late_acquire, spawn_release_unacknowledged},
    },
    lease::state::LeaseState,
    limits::InFlightPermit,
    record::NeedsAttention,
    store::{Acquired, Claim, LeaseRef, OrphanPolicy, Token},
    store_client::{CompleteOutcome, RenewOutcome},
    telemetry,
};

/// State of the entry, as the store reports it.
pub(crate) enum EntryStatus {
    /// Completed with this record under the token of this execution: by the layer, or by a commit of the handler.
    CompletedHere(Bytes),
    /// Completed with this record by another execution.
    Completed(Bytes),
    /// The entry was absent. The query acquired a lease at this generation.
    Acquired(u64),
    /// Another execution took the entry over and ended without an outcome.
    Orphaned,
    /// Another execution holds the lease, or completed another request under this key.
    HeldElsewhere,
    /// The store failed or timed out.
    Unknown,
}

/// Queries the entry by acquiring it under the token of the lease.
///
/// The store contract has no read: `acquire` is the only call that reports the state. The query uses
/// [`OrphanPolicy::Never`], so that it never takes over a newer execution, nor uses a retry that an operator has allowed.
pub(crate) async fn query_entry(lease: &LeaseState) -> EntryStatus {
    let (status, may_acquire_late) = query(lease, lease.claim()).await;
    if may_acquire_late {
        lease.set_may_acquire_late();
    }
    status
}

/// Returns the status, and `true` if a late attempt of the query may acquire the entry.
async fn query(lease: &LeaseState, claim: &Claim) -> (EntryStatus, bool) {
    let claim = Claim {
        orphans: OrphanPolicy::Never,
        ..claim.clone()
    };
    let (store, timeout) = (lease.store(), lease.store_timeout());
    let Ok(reply) = store.acquire(&claim, timeout, lease.warnings()).await else {
        return (EntryStatus::Unknown, true);
    };
    let status = match reply.acquired {
        Acquired::Completed {
            fingerprint,
            record,
            token,
            ..
        } if fingerprint == claim.fingerprint => {
            if token == Some(lease.reference.token) {
                EntryStatus::CompletedHere(record)
            } else {
                EntryStatus::Completed(record)
            }
        }
        Acquired::Granted { generation, .. } => EntryStatus::Acquired(generation),
        Acquired::Orphaned { .. } => EntryStatus::Orphaned,
        Acquired::InProgress { .. } | Acquired::Completed { .. } => EntryStatus::HeldElsewhere,
    };
    (status, reply.may_acquire_late)
}

/// Queries the entry of a finished lease under a new token, and releases the lease that the query may have acquired.
///
/// Under the lease's own token the query would restore the lease, and a commit that has not reached the store yet would
/// then succeed.
pub(crate) async fn query_entry_with_new_token(
    lease: &LeaseState,
    permit: InFlightPermit,
) -> EntryStatus {
    let Ok(token) = Token::random() else {
        return EntryStatus::Unknown;
    };
    let claim = Claim {
        token,
        ..lease.claim().clone()
    };
    let (store, timeout) = (lease.store(), lease.store_timeout());
    let (status, may_acquire_late) = query(lease, &claim).await;
    let is_released = match status {
        EntryStatus::Acquired(generation) => {
            let reference = claim.lease_ref(generation);
            store.release(&reference, timeout, lease.warnings()).await
        }
        _ => true,
    };
    let may_hold_lease = match status {
        EntryStatus::Unknown => true,
        EntryStatus::Acquired(_) | EntryStatus::Orphaned | EntryStatus::HeldElsewhere => {
            may_acquire_late || !is_released
        }
        EntryStatus::CompletedHere(_) | EntryStatus::Completed(_) => false,
    };
    if may_hold_lease {
        spawn_release_unacknowledged(lease.config(), store, &claim, permit);
    }
    match status {
        EntryStatus::Acquired(_) if !is_released => EntryStatus::Unknown,
        status => status,
    }
}

impl Execution {
    /// Queries the store for the handler's commit, if there was one, and changes nothing. `renewed` is the outcome of a renewal
    /// before it: unless it found the lease lost, the database may still execute the commit. Marks the lease as lost if another
    /// process had it before the renewal.
    pub(super) async fn reconcile_commit(self, renewed: RenewOutcome) -> Reconciled {
        let Self { lease, permit } = self;
        if !lease.has_unacknowledged_commit() {
            return Reconciled::NotCommitted;
        }
        match Box::pin(query_entry_with_new_token(&lease, permit)).await {
            EntryStatus::CompletedHere(record) => {
                Reconciled::Finished(report_committed(&lease, record))
            }
            EntryStatus::Completed(record) => {
                // After a renewal that succeeded, the other execution began when this lease had ended.
                if !matches!(renewed, RenewOutcome::Renewed) {
                    lease.mark_lost();
                }
                Reconciled::Finished(Finished::Stored(record))
            }
            EntryStatus::Unknown => Reconciled::Finished(unknown_outcome(&lease)),
            status @ (EntryStatus::Acquired(_)
            | EntryStatus::Orphaned
            | EntryStatus::HeldElsewhere) => {
                let may_still_commit = match renewed {
                    RenewOutcome::Failed => true,
                    // The commit may still find its token in the entry.
                    RenewOutcome::Renewed => !matches!(status, EntryStatus::Acquired(_)),
                    RenewOutcome::LeaseLost => false,
                };
                if may_still_commit || lease.commits.record_may_have_expired() {
                    Reconciled::Finished(unknown_outcome(&lease))
                } else {
                    if matches!(renewed, RenewOutcome::LeaseLost) {
                        lease.mark_lost();
                    }
                    Reconciled::NotCommitted
                }
            }
        }
    }
}

/// Result of a query for the handler's commit.
pub(super) enum Reconciled {
    /// The store has a record, cannot report one, may get one, or had one that may have expired.
    Finished(Finished),
    /// The handler has committed nothing, and its commits can no longer succeed.
    NotCommitted,
}

/// Returns `true` if the handler's commit may have succeeded with a record that has expired since.
///
/// The handler's later claim that nothing was done may then be wrong, and the store cannot contradict it.
/// [`NeedsAttention`] makes no such claim.
pub(super) fn may_contradict_expired_commit(lease: &LeaseState, record: &[u8]) -> bool {
    lease.commits.record_may_have_expired() && NeedsAttention::in_record(record).is_none()
}

/// Queries the store for the record that it has. A successful completion changes nothing if a commit of the handler was
/// stored first.
pub(super) async fn verify_stored_record(
    lease: &LeaseState,
    permit: InFlightPermit,
    PendingRecord { record, .. }: &PendingRecord,
) -> Finished {
    // The store accepted this record, so the handler's was not stored, unless it had expired.
    let may_contradict = may_contradict_expired_commit(lease, record);
    match query_entry_with_new_token(lease, permit).await {
        EntryStatus::CompletedHere(stored) if stored == *record => {
            telemetry::recorded(lease.layer(), lease.id(), record);
            if may_contradict {
                unknown_outcome(lease)
            } else {
                Finished::Own
            }
        }
        // The same token completed the entry with another record, so the handler's commit was stored first.
        EntryStatus::CompletedHere(stored) => {
            telemetry::attention_not_stored(lease.layer(), lease.id(), record);
            report_committed(lease, stored)
        }
        EntryStatus::Completed(stored) => {
            telemetry::attention_not_stored(lease.layer(), lease.id(), record);
            Finished::Stored(stored)
        }
        EntryStatus::Acquired(_) | EntryStatus::Orphaned | EntryStatus::HeldElsewhere => {
            telemetry::attention_not_stored(lease.layer(), lease.id(), record);
            unknown_outcome(lease)
        }
        // The store accepted the record but cannot confirm it. Count it: a false alarm is better than a missed one.
        EntryStatus::Unknown => {
            telemetry::recorded(lease.layer(), lease.id(), record);
            unknown_outcome(lease)
        }
    }
}

/// Returns the result if the store has a record of this execution or of another one. Returns `None` if it has none, or does
/// not reply. Marks the lease as lost, except if the store has a record of this execution or does not reply.
///
/// Call it for a record that was sent without a reply, after a renewal has found no lease. An attempt to store the record may
/// have ended the lease. The handler must have begun no commit. Each record under the token of the lease then comes from the
/// same response. It may be smaller than the whole record if the store rejects the size.
pub(super) async fn reconcile_refused_renewal(
    lease: &LeaseState,
    record: &Bytes,
) -> Option<Finished> {
    let (layer, id) = (lease.layer(), lease.id());
    match query_entry(lease).await {
        EntryStatus::CompletedHere(stored) => {
            telemetry::recorded(layer, id, &stored);
            Some(Finished::Own)
        }
        EntryStatus::Completed(stored) => {
            lease.mark_lost();
            telemetry::attention_not_stored(layer, id, record);
            Some(Finished::Stored(stored))
        }
        EntryStatus::Acquired(_) | EntryStatus::Orphaned | EntryStatus::HeldElsewhere => {
            lease.mark_lost();
            None
        }
        EntryStatus::Unknown => None,
    }
}

/// Returns the record of the handler's commit as the result, and counts it, because no other path does.
pub(super) fn report_committed(lease: &LeaseState, record: Bytes) -> Finished {
    telemetry::recorded(lease.layer(), lease.id(), &record);
    Finished::Committed {
        record,
        is_reported: false,
    }
}

/// Result of an execution that has lost its lease.
pub(super) enum LostLeaseOutcome {
    Finished(Finished),
    /// The outcome is unknown, and the store may have no record. The caller stores the record of this execution under this
    /// reference, in the background.
    Unstored(LeaseRef, InFlightPermit),
}

/// Returns the result after a lost lease. Only the stored record is valid, because all clients must get the same response.
/// If nothing is stored, stores the record of this execution.
pub(super) async fn reconcile_after_lost_lease(
    lease: &LeaseState,
    permit: InFlightPermit,
    pending: &PendingRecord,
) -> LostLeaseOutcome {
    if lease.has_unacknowledged_commit() {
        // Does not complete: under this token, a commit that has not reached the store yet would find its lease again.
        let status = query_entry_with_new_token(lease, permit.additional()).await;
        return LostLeaseOutcome::Finished(match status {
            EntryStatus::CompletedHere(stored) | EntryStatus::Completed(stored) => {
                Finished::Stored(stored)
            }
            EntryStatus::Acquired(_)
            | EntryStatus::Orphaned
            | EntryStatus::HeldElsewhere
            | EntryStatus::Unknown => {
                // The handler's commit may have queried the entry under the token of the lease.
                release_late_acquire(lease, permit);
                unknown_outcome(lease)
            }
        });
    }
    let claim = lease.claim();
    let generation = match query_entry(lease).await {
        EntryStatus::CompletedHere(stored) | EntryStatus::Completed(stored) => {
            return LostLeaseOutcome::Finished(Finished::Stored(stored));
        }
        EntryStatus::Acquired(generation) => generation,
        // If another execution holds the lease after all, the store refuses the completion.
        EntryStatus::Orphaned => 1,
        EntryStatus::HeldElsewhere => {
            release_late_acquire(lease, permit);
            return LostLeaseOutcome::Finished(unknown_outcome(lease));
        }
        // Completes once the store is back. The entry may be absent or orphaned by then.
        EntryStatus::Unknown => {
            return LostLeaseOutcome::Unstored(claim.lease_ref_unknown(), permit);
        }
    };
    // The execution that took over may have ended without a record. This execution's record is then the only one.
    let reference = claim.lease_ref(generation);
    let (record, retention) = (&pending.record, pending.retention);
    let (store, timeout) = (lease.store(), lease.store_timeout());
    let warnings = lease.warnings();
    let completed = store.complete(&reference, false, record, retention, timeout, warnings);
    match completed.await {
        CompleteOutcome::Stored => LostLeaseOutcome::Finished(Finished::Own),
        CompleteOutcome::LeaseLost => {
            release_late_acquire(lease, permit);
            LostLeaseOutcome::Finished(unknown_outcome(lease))
        }
        // No record is stored so far. Without the record of this execution, a retry would execute again.
        CompleteOutcome::Failed | CompleteOutcome::TooLarge { .. } => {
            LostLeaseOutcome::Unstored(reference, permit)
        }
    }
}

/// Returns an unknown outcome. A retry gets the record that is stored by then, or executes if there is none.
///
/// It is not retryable if the record of the handler's commit may have expired: a retry would repeat the effect.
pub(super) fn unknown_outcome(lease: &LeaseState) -> Finished {
    let retryable = !lease.commits.record_may_have_expired();
    Finished::Unknown { retryable }
}
