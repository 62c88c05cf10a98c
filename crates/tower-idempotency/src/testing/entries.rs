use http::Request;

use crate::{
    inspect::{Entry, Inspect, Query, Resolution, State},
    layer::IdempotencyLayer,
    store::{Acquired, Store, Ttl},
};

/// The entries of a store, for a test that reads or changes them.
///
/// Works with every store that implements [`Inspect`], also inside a [`FaultInjector`](super::FaultInjector). It calls the
/// store as an operator does: injected faults do not apply.
///
/// The methods panic if the store fails.
#[derive(Clone, Debug)]
pub struct Entries<S> {
    store: S,
}

impl<S: Inspect> Entries<S> {
    /// Creates the entries of `store`. Pass a clone, which shares the entries with the store of the layer.
    pub const fn new(store: S) -> Self {
        Self { store }
    }

    /// Returns all entries in this state, in the order of the store.
    ///
    /// # Panics
    ///
    /// If the store fails, or does not list this state. See [`Inspect::abilities`].
    pub async fn list(&self, state: State) -> Vec<Entry> {
        let mut query = Query::new(state).with_limit(1_000);
        let mut entries = Vec::new();
        loop {
            let page = self.store.list(&query).await;
            let page = page.expect("the store lists its entries");
            entries.extend(page.entries);
            match page.next {
                Some(next) => query = query.with_page(Some(next)),
                None => return entries,
            }
        }
    }

    /// Ends every lease, as if its process had died and the lease had expired. Returns the number of the leases.
    ///
    /// The entries are then orphans. Under [`OrphanPolicy::TakeOver`](crate::OrphanPolicy::TakeOver) a retry takes them
    /// over. A handler that still runs has lost its lease: [`Lease::is_held`](crate::Lease::is_held) becomes `false` at the
    /// next renewal, and its record is not stored.
    ///
    /// # Panics
    ///
    /// If the store fails.
    pub async fn expire_leases(&self) -> usize {
        self.resolve(State::InProgress, &Resolution::BreakLease)
            .await
    }

    /// Applies the decision of an operator to every entry in this state. Returns the number of entries that it was applied
    /// to.
    ///
    /// # Panics
    ///
    /// If the store fails, or if the resolution does not [apply](Resolution::applies_to) to this state.
    pub async fn resolve(&self, state: State, resolution: &Resolution) -> usize {
        assert!(
            resolution.applies_to(state),
            "expected a resolution of entries that are {state}, found {}",
            resolution.name()
        );
        let mut applied = 0;
        for entry in self.list(state).await {
            let resolved = self.store.resolve(entry.seen(), resolution).await;
            let resolved = resolved.expect("the store resolves its entries");
            applied += usize::from(resolved.is_applied());
        }
        applied
    }
}

impl<S: Store + Inspect> Entries<S> {
    /// Acquires the lease of a request, as if another process executed it. The lease lasts an hour.
    ///
    /// The same request then gets the response to a duplicate. [`expire_leases`](Self::expire_leases) ends the lease: the
    /// entry is then the orphan of a process that died.
    ///
    /// The request must have everything that identifies it to the layer: method, path, key, credentials and body, and the
    /// extensions that other layers set. Inside `Router::nest` the layer sees the path without the prefix.
    ///
    /// # Panics
    ///
    /// If the layer rejects the request or does not protect it, if its key is in use, or if the store fails.
    pub async fn add_lease<B: AsRef<[u8]>>(&self, layer: &IdempotencyLayer, request: &Request<B>) {
        let (mut head, ()) = Request::new(()).into_parts();
        head.method = request.method().clone();
        head.uri = request.uri().clone();
        head.headers = request.headers().clone();
        head.extensions = request.extensions().clone();
        let claim = layer.claim_of_other_process(&head, request.body().as_ref());
        let claim = claim.expect("the layer accepts the request");
        let mut claim = claim.expect("the layer protects the request");
        claim.lease = Ttl::from_secs(60 * 60);
        let acquired = self.store.acquire(&claim).await;
        let acquired = acquired.expect("the store grants the lease");
        assert!(
            matches!(
                acquired,
                Acquired::Granted {
                    takeover: false,
                    ..
                }
            ),
            "expected a key that is not in use, found {acquired:?}"
        );
    }
}
