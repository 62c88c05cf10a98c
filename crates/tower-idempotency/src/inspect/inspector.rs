use std::{fmt, future::Future, pin::Pin, sync::Arc};

use super::{
    Abilities, EntryDetails, Inspect, InspectError, Page, Query, Resolution, ResolveOutcome, Seen,
    Summary,
};
use crate::store::KeyId;

/// A store of any type that implements [`Inspect`], for programs that open a store by its URL. Clones share it.
#[derive(Clone)]
pub struct Inspector(Arc<dyn ErasedInspect>);

impl Inspector {
    /// Creates an inspector of a store.
    pub fn new(store: impl Inspect) -> Self {
        Self(Arc::new(store))
    }
}

impl Inspect for Inspector {
    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        self.0.list(query).await
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        self.0.get(id).await
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        self.0.summary(limit).await
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        self.0.resolve(seen, resolution).await
    }

    async fn purge(&self, batch: u32) -> Result<u64, InspectError> {
        self.0.purge(batch).await
    }
}

impl fmt::Debug for Inspector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inspector")
            .field("abilities", &self.0.abilities())
            .finish_non_exhaustive()
    }
}

type InspectFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, InspectError>> + Send + 'a>>;

trait ErasedInspect: Send + Sync {
    fn abilities(&self) -> Abilities;
    fn list<'a>(&'a self, query: &'a Query) -> InspectFuture<'a, Page>;
    fn get<'a>(&'a self, id: &'a KeyId) -> InspectFuture<'a, Option<EntryDetails>>;
    fn summary(&self, limit: u32) -> InspectFuture<'_, Summary>;
    fn resolve<'a>(
        &'a self,
        seen: &'a Seen,
        resolution: &'a Resolution,
    ) -> InspectFuture<'a, ResolveOutcome>;
    fn purge(&self, batch: u32) -> InspectFuture<'_, u64>;
}

impl<T: Inspect> ErasedInspect for T {
    fn abilities(&self) -> Abilities {
        Inspect::abilities(self)
    }

    fn list<'a>(&'a self, query: &'a Query) -> InspectFuture<'a, Page> {
        Box::pin(Inspect::list(self, query))
    }

    fn get<'a>(&'a self, id: &'a KeyId) -> InspectFuture<'a, Option<EntryDetails>> {
        Box::pin(Inspect::get(self, id))
    }

    fn summary(&self, limit: u32) -> InspectFuture<'_, Summary> {
        Box::pin(Inspect::summary(self, limit))
    }

    fn resolve<'a>(
        &'a self,
        seen: &'a Seen,
        resolution: &'a Resolution,
    ) -> InspectFuture<'a, ResolveOutcome> {
        Box::pin(Inspect::resolve(self, seen, resolution))
    }

    fn purge(&self, batch: u32) -> InspectFuture<'_, u64> {
        Box::pin(Inspect::purge(self, batch))
    }
}
