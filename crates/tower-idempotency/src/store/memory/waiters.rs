//! Calls that wait until an entry changes.

use std::{hash::BuildHasher, sync::Arc};

use tokio::sync::Semaphore;

use super::{entry::EntryState, table::Table};
use crate::store::KeyId;

/// Registration of a waiter. Dropping it removes the waiter.
pub(super) struct WaiterRegistration<'a> {
    table: &'a Table,
    hash: u64,
    slot: u32,
    event: Arc<Semaphore>,
    lease_expires: u64,
}

impl WaiterRegistration<'_> {
    /// Waits until the entry is completed, released or resolved, or until its lease is shortened.
    pub(super) async fn changed(&self) {
        // The semaphore has no permits, so the wait ends only when it is closed.
        let _closed = self.event.acquire().await;
    }

    #[cfg(all(test, shuttle))]
    pub(super) fn is_changed(&self) -> bool {
        self.event.is_closed()
    }

    /// Returns the time at which the lease expires unless it is renewed.
    pub(super) const fn lease_expires(&self) -> u64 {
        self.lease_expires
    }
}

impl Drop for WaiterRegistration<'_> {
    fn drop(&mut self) {
        self.table
            .shard(self.hash)
            .remove_waiter(self.slot, &self.event);
    }
}

impl Table {
    /// Registers a waiter in the same step as the query of the entry. Returns `None` unless the entry is in progress.
    pub(super) fn watch(&self, id: &KeyId, now: u64) -> Option<WaiterRegistration<'_>> {
        let hash = self.shared.hasher.hash_one(id);
        let mut shard = self.shard(hash);
        let slot = shard.find(&self.shared, hash, id, now)?;
        match shard.entry(slot).state {
            EntryState::Leased { lease_expires, .. } if lease_expires > now => {
                Some(WaiterRegistration {
                    table: self,
                    hash,
                    slot,
                    event: shard.add_waiter(slot),
                    lease_expires,
                })
            }
            EntryState::Leased { .. } | EntryState::Completed { .. } => None,
        }
    }
}
