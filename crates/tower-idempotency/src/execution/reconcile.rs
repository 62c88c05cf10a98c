//! Queries the store for the state of an entry, after a lost lease or an unacknowledged commit.

use bytes::Bytes;

use crate::{
    execution::finish::spawn_release_unacknowledged,
    lease::state::LeaseState,
    limits::InFlightPermit,
    store::{Acquired, Claim, OrphanPolicy, Token},
};

/// State of the entry, as the store reports it.
pub(crate) enum EntryStatus {
    /// Completed, by this execution or by another one.
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
/// [`OrphanPolicy::Refuse`], so that it never takes over a newer execution.
pub(crate) async fn query_entry(lease: &LeaseState, claim: &Claim) -> EntryStatus {
    let claim = Claim {
        orphans: OrphanPolicy::Refuse,
        ..claim.clone()
    };
    match lease.store().acquire(&claim, lease.store_timeout()).await {
        Ok((
            Acquired::Completed {
                fingerprint,
                record,
            },
            _,
        )) if fingerprint == claim.fingerprint => EntryStatus::Completed(record),
        Ok((Acquired::Granted { generation, .. }, _)) => EntryStatus::Acquired(generation),
        Ok((Acquired::Orphaned { .. }, _)) => EntryStatus::Orphaned,
        Ok((Acquired::InProgress { .. } | Acquired::Completed { .. }, _)) => {
            EntryStatus::HeldElsewhere
        }
        Err(_) => EntryStatus::Unknown,
    }
}

/// Queries the entry of a finished lease under a new token, and releases what the query may have acquired.
///
/// Under the lease's own token the query would restore the lease, and a commit that is still on its way would then succeed.
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
    let status = query_entry(lease, &claim).await;
    let may_hold_lease = match status {
        EntryStatus::Acquired(generation) => {
            !store.release(&claim.lease_ref(generation), timeout).await
        }
        EntryStatus::Unknown => true,
        EntryStatus::Completed(_) | EntryStatus::Orphaned | EntryStatus::HeldElsewhere => false,
    };
    if may_hold_lease {
        spawn_release_unacknowledged(lease.config(), store, &claim, permit);
        return EntryStatus::Unknown;
    }
    status
}
