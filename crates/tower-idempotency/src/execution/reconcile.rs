//! Queries the store for the state of an entry, after a lost lease or an unacknowledged commit.

use bytes::Bytes;

use crate::{
    execution::background::spawn_release_unacknowledged,
    lease::state::LeaseState,
    limits::InFlightPermit,
    store::{Acquired, Claim, OrphanPolicy, Token},
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

/// Queries the entry by acquiring it with `claim`.
///
/// The store contract has no read: `acquire` is the only call that reports the state. The query uses
/// [`OrphanPolicy::Never`], so that it never takes over a newer execution, nor uses a retry that an operator has allowed.
pub(crate) async fn query_entry(lease: &LeaseState, claim: &Claim) -> EntryStatus {
    query(lease, claim).await.0
}

/// Returns the status, and `true` if a late attempt of the query may acquire the entry.
async fn query(lease: &LeaseState, claim: &Claim) -> (EntryStatus, bool) {
    let claim = Claim {
        orphans: OrphanPolicy::Never,
        ..claim.clone()
    };
    let Ok(reply) = lease.store().acquire(&claim, lease.store_timeout()).await else {
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
            store.release(&claim.lease_ref(generation), timeout).await
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
