//! Operations for operators, through a tier.

use super::{Tiered, tier::Tier};
use crate::{
    inspect::{
        Abilities, EntryDetails, Inspect, InspectError, Page, Query, Resolution, ResolveOutcome,
        Seen, Summary,
    },
    store::KeyId,
};

/// Reads the store behind the tier, so an entry is shown as the store has it.
impl<S: Inspect> Inspect for Tiered<S> {
    fn abilities(&self) -> Abilities {
        self.store.abilities()
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        self.store.list(query).await
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        self.store.get(id).await
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        self.store.summary(limit).await
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        let _removal = RemoveOnDrop(&self.tier, *seen.id());
        self.store.resolve(seen, resolution).await
    }

    async fn purge(&self, batch: u32) -> Result<u64, InspectError> {
        self.store.purge(batch).await
    }
}

/// Removes a record from the tier when it is dropped. The decision may be applied after an error too, and if the future of the
/// resolution is dropped.
struct RemoveOnDrop<'a>(&'a Tier, KeyId);

impl Drop for RemoveOnDrop<'_> {
    fn drop(&mut self) {
        self.0.remove(&self.1);
    }
}
