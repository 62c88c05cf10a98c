//! Batch requests: each item runs under a key of its own.
//!
//! One key for a request with 1,000 items does not make a retry safe. If the process dies in the middle, the retry repeats
//! all items. [`IdempotencyLayer::items`] runs each item like a [`run_once`](IdempotencyLayer::run_once) of the caller, so
//! that a retry runs only the items that are left.

mod result;
mod unique;

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    future::Future,
    sync::Arc,
};

use http::request;
use serde::{Serialize, de::DeserializeOwned};

pub use self::result::{Item, ItemOutcome, ItemResult};
use self::{result::SharedResult, unique::UniqueItem};
use crate::{
    config::Config,
    digest::{FieldDigest, VERSION},
    enforcement::Enforcement,
    error::{Error, ErrorKind},
    execution::{admission::enforcement, rules::StoreFailure, shared::Context},
    layer::IdempotencyLayer,
    lease::Lease,
    request::{
        credentials::{Identity, PrincipalError},
        find_key, find_scope, item_operation,
        key::IdempotencyKey,
        validate_item_key,
    },
    response::reject::count_rejection,
    run_once::{Outcome, WorkError},
    store::{Fingerprint, KeyId, ScopeDigest},
};

/// Batches.
impl IdempotencyLayer {
    /// Returns the runner of the items of a batch request. `head` is the head of the request.
    ///
    /// The caller of the request owns the keys of the items: the layer's namespace and
    /// [principal](Self::with_principal) apply, and so do [`with_host_in_scope`](Self::with_host_in_scope) and
    /// [`with_endpoint_in_scope`](Self::with_endpoint_in_scope). Keys of items, of requests and of
    /// [`run_once`](Self::run_once) never meet.
    ///
    /// The request may have a key of its own, or none. Call this in the handler, with a clone of the layer that wraps the
    /// route. `head` must still have the credentials or extensions of the principal. If the request has a key, the extensions
    /// of `head` must have its [`Lease`]. Without it, the response of a batch is recorded even if items failed. The layer
    /// then logs a warning, unless requests may run without a lease
    /// ([`DangerouslyExecuteUnprotected`](StoreFailure::DangerouslyExecuteUnprotected)), or a closure decides on the key
    /// ([`with_skip`](Self::with_skip), [`with_key_from`](Self::with_key_from)).
    ///
    /// The work of [`run_once`](Self::run_once) and of [`take_over`](Self::take_over) can run a batch too. Insert its lease into
    /// the extensions of `head`. Without it, the value or the response of the work is recorded even if items failed, and the
    /// layer logs no warning for `run_once`.
    ///
    /// # Errors
    ///
    /// The error with which the layer rejects a request without a valid principal:
    /// [`PrincipalMissing`](ErrorKind::PrincipalMissing) or [`PrincipalAmbiguous`](ErrorKind::PrincipalAmbiguous). Also
    /// `PrincipalMissing` if the head has another principal than the request, which has a key at this layer. A clone whose
    /// settings were changed is another layer. So call the clone that serves the route. The leases of
    /// [`take_over`](Self::take_over) and of [`run_once`](Self::run_once) have no principal: their caller chooses that of `head`.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use http::Request;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, items::Item, run_once::WorkError};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::new(MemoryStore::new());
    /// let (head, ()) = Request::post("/payments/batch").header("authorization", "Bearer of-alice").body(())?.into_parts();
    /// let batch = || ["a", "b", "a"].map(|key| Item::new(key, format!("pay {key}"), key.len())).into();
    /// let pay = async |cents: usize, _lease| Ok::<_, WorkError<Infallible>>(cents);
    ///
    /// let results = layer.items(&head)?.run(batch(), pay).await?;
    /// let statuses: Vec<_> = results.iter().map(|result| result.status().as_u16()).collect();
    /// assert_eq!(statuses, [200, 200, 200]);
    /// assert!(results[2].is_duplicate());
    /// # Ok(())
    /// # }
    /// ```
    pub fn items(&self, head: &request::Parts) -> Result<Items, Error> {
        let context = Context::for_values(&self.config, &self.shared);
        context
            .shared
            .registration
            .at_request(context.config.layer());
        let scope = find_scope(&context.config.request, head, false);
        let scope = scope.map_err(|error| {
            if matches!(error, PrincipalError::Missing(_)) {
                context.config.warnings().principal_missing();
            }
            error.into_error()
        })?;
        let request: Option<Lease> = head.extensions.get().cloned();
        if let Some(lease) = &request
            && belongs_to_other(lease, &context.config, scope.principal)
        {
            return Err(Error::new(
                ErrorKind::PrincipalMissing,
                "expected the principal of the request in the head of the batch, found another one",
            ));
        }
        // The layer has counted a request with a key.
        let is_counted = request
            .as_ref()
            .is_some_and(|lease| lease.0.grant.config.is_of_layer(&context.config));
        if scope.identity == Identity::Anonymous && !is_counted {
            context.config.warnings().anonymous();
        }
        if request.is_none() && should_have_lease(self, &context, head) {
            context.config.warnings().batch_without_lease();
        }
        // As for requests, the same content for another endpoint or account is another item.
        let rules = &context.config.request;
        let mut fingerprint = FieldDigest::new(rules.secret.as_ref());
        fingerprint.field(b"item fingerprint").field(VERSION);
        let layer = context.config.layer();
        rules
            .fingerprint
            .add_head_of_items(layer, head, &mut fingerprint);
        Ok(Items {
            context,
            scope: scope.hash,
            fingerprint,
            account: scope.account,
            principal: scope.principal,
            operation: item_operation(head),
            request,
            max_items: MAX_ITEMS,
            concurrency: CONCURRENCY,
        })
    }
}

/// Runner of the items of a batch request: see [`IdempotencyLayer::items`].
pub struct Items {
    context: Context,
    /// Digest to which the key of an item is added.
    scope: FieldDigest,
    /// Digest of the endpoint, to which the content of an item is added.
    fingerprint: FieldDigest,
    account: ScopeDigest,
    principal: ScopeDigest,
    operation: Box<str>,
    /// The lease of the batch request, if it has a key.
    request: Option<Lease>,
    max_items: usize,
    concurrency: usize,
}

/// Source of the result of an item.
enum ResultSource<T, E> {
    /// The run with this index.
    Run { index: usize, is_duplicate: bool },
    /// The item is not run.
    Decided(Arc<SharedResult<T, E>>),
}

impl Items {
    /// Sets the largest number of items of a batch. Default: 1,000.
    ///
    /// Clients choose the number of items. If it is too high, one request occupies a handler for a long time and writes that
    /// many entries. If it is too low, clients have to split their batches.
    #[must_use]
    pub fn with_max_items(self, max_items: usize) -> Self {
        Self { max_items, ..self }
    }

    /// Sets how many items of a batch run at the same time. Default: 16; 0 counts as 1.
    ///
    /// Each running item counts as one request in flight of its caller
    /// ([`with_max_in_flight`](IdempotencyLayer::with_max_in_flight)). If the share of the caller is used up, fewer items
    /// run at the same time. If it is too high, one batch delays the other requests of its caller. If it is too low, a batch
    /// takes long.
    #[must_use]
    pub fn with_concurrency(self, items: usize) -> Self {
        Self {
            concurrency: items.max(1),
            ..self
        }
    }

    /// Returns the ID of the entry of the item with this key, for operators.
    ///
    /// # Errors
    ///
    /// [`MalformedKey`](ErrorKind::MalformedKey) or [`KeyTooLong`](ErrorKind::KeyTooLong) if no item can have this key.
    pub fn key_id(&self, key: impl Into<String>) -> Result<KeyId, Error> {
        let key = validate_item_key(&self.context.config.request, key.into())?;
        Ok(self.id_of(&key))
    }

    /// Runs `work` once for each item, and returns the results in the order of the batch. Await it before the handler
    /// returns.
    ///
    /// Each item runs under its own lease, like a [`run_once`](IdempotencyLayer::run_once): its value is recorded, and a
    /// later batch with the same item gets it. `work` gets the input of the item and its lease. It returns a [`WorkError`]
    /// to release or to hold the key. The settings that apply to `run_once` apply here. Each item runs in a task of its own,
    /// in the span of the caller. Task-locals do not reach it.
    ///
    /// - **Duplicates**: two items with the same key and fingerprint are one execution, and both get its result. If the
    ///   fingerprints differ, the first item runs and the later one is a [mismatch](Outcome::Mismatch).
    /// - **No waiting**: an item that is running elsewhere is [in progress](Outcome::InProgress). Two batches with the same
    ///   keys in another order cannot block each other.
    /// - **Failures**: work that fails or panics does not affect the other items.
    /// - **Store outage**: after the first item for which the store fails, no other item begins. They are rejected with
    ///   [`StoreUnavailable`](ErrorKind::StoreUnavailable). Running items end.
    /// - **Limits**: each item counts like a request of the caller. If the limit is used up and no item of the batch is
    ///   running, the next item is rejected with [`CallerLimit`](ErrorKind::CallerLimit) or
    ///   [`Overloaded`](ErrorKind::Overloaded). An item beyond the rate of fresh keys is rejected too.
    /// - **Shutdown**: items that have not begun are rejected with [`Draining`](ErrorKind::Draining).
    ///
    /// # The response
    ///
    /// If a result is not [final](ItemResult::is_final), the layer does not record the response of the batch request: it
    /// acts as if the response had [`Retention::NoStore`](crate::Retention::NoStore). A retry of the client then calls the
    /// handler again. It gets the recorded values, and runs the items that are left. So let all effects of the handler
    /// happen in items. A response that the handler commits in a [transaction](crate::transaction), or marks with
    /// [`NeedsAttention`](crate::NeedsAttention), is recorded all the same.
    ///
    /// Under a lease of [`run_once`](IdempotencyLayer::run_once), the value of the work is not recorded. The call returns
    /// [`Outcome::UnfinishedBatch`].
    ///
    /// # Errors
    ///
    /// [`BodyTooLarge`](ErrorKind::BodyTooLarge) if the batch has more items than
    /// [allowed](Self::with_max_items). Nothing ran.
    ///
    /// # Panics
    ///
    /// If the future is polled outside a Tokio runtime. A panic of `work` is the result of its item.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, items that are running continue in the background, and their values are recorded. The other
    /// items do not begin. If the batch request has a key, the layer continues its handler after a disconnect, and the batch
    /// ends as usual.
    pub async fn run<P, T, E, W, F>(
        &self,
        batch: Vec<Item<P>>,
        work: W,
    ) -> Result<Vec<ItemResult<T, E>>, Error>
    where
        P: Send + 'static,
        W: FnOnce(P, Lease) -> F + Clone + Send + 'static,
        F: Future<Output = Result<T, WorkError<E>>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + Sync + 'static,
        E: Send + Sync + 'static,
    {
        if batch.len() > self.max_items {
            let (max, found) = (self.max_items, batch.len());
            let detail = format!("expected a batch of at most {max} items, found {found}");
            return Err(Error::new(ErrorKind::BodyTooLarge, detail));
        }
        let unfinished = BatchGuard::begin(self.request.as_ref());
        let (sources, unique) = self.deduplicate(batch);
        let ended = self.run_unique(unique, work).await;
        let results: Vec<_> = sources
            .into_iter()
            .map(|source| match source {
                ResultSource::Run {
                    index,
                    is_duplicate,
                } => ended[index].share(is_duplicate),
                ResultSource::Decided(result) => result.share(false),
            })
            .collect();
        if results.iter().all(ItemResult::is_final) {
            unfinished.end();
        }
        Ok(results)
    }

    /// Separates the items that run from duplicates, mismatches and malformed keys.
    fn deduplicate<P, T, E>(
        &self,
        batch: Vec<Item<P>>,
    ) -> (Vec<ResultSource<T, E>>, Vec<UniqueItem<P>>) {
        let config = &self.context.config;
        let mut sources = Vec::with_capacity(batch.len());
        let mut unique: Vec<UniqueItem<P>> = Vec::with_capacity(batch.len());
        let mut index_of = HashMap::with_capacity(batch.len());
        for item in batch {
            let key = match validate_item_key(&config.request, item.key) {
                Ok(key) => key,
                Err(error) => {
                    let error = count_rejection(&config.response, error);
                    sources.push(ResultSource::Decided(Arc::new(SharedResult::rejected(
                        error,
                    ))));
                    continue;
                }
            };
            let id = self.id_of(&key);
            let fingerprint = self.fingerprint_of(&item.fingerprint);
            sources.push(match index_of.entry(id) {
                Entry::Vacant(vacant) => {
                    let index = *vacant.insert(unique.len());
                    let input = item.input;
                    unique.push(UniqueItem {
                        id,
                        fingerprint,
                        input,
                    });
                    ResultSource::Run {
                        index,
                        is_duplicate: false,
                    }
                }
                Entry::Occupied(index) if unique[*index.get()].fingerprint == fingerprint => {
                    ResultSource::Run {
                        index: *index.get(),
                        is_duplicate: true,
                    }
                }
                Entry::Occupied(_) => {
                    let outcome = ItemOutcome::Returned(Outcome::Mismatch);
                    let result = SharedResult::new(config, &id, outcome, false);
                    ResultSource::Decided(Arc::new(result))
                }
            });
        }
        (sources, unique)
    }

    fn id_of(&self, key: &IdempotencyKey) -> KeyId {
        let mut hash = self.scope.clone();
        hash.field(b"item").field(key.as_bytes());
        KeyId::from_bytes(hash.finish())
    }

    fn fingerprint_of(&self, content: &[u8]) -> Fingerprint {
        let mut hash = self.fingerprint.clone();
        hash.field(content);
        Fingerprint::from_bytes(hash.finish())
    }
}

impl fmt::Debug for Items {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Items")
            .field("operation", &self.operation)
            .field("max_items", &self.max_items)
            .field("concurrency", &self.concurrency)
            .finish_non_exhaustive()
    }
}

/// Returns `true` if the request with this lease has another principal.
///
/// A middleware may have removed credentials. All callers without them would share their items. The leases of `take_over` and of
/// `run_once` have no principal.
fn belongs_to_other(lease: &Lease, config: &Arc<Config>, principal: ScopeDigest) -> bool {
    let grant = &lease.0.grant;
    grant.config.is_of_layer(config) && grant.principal.is_some_and(|it| it != principal)
}

/// Returns `true` if the layer executes the request with this head under a lease.
///
/// A service may rebuild the head without its extensions. The layer then cannot know that the request ran a batch. Closures of
/// the settings may need these extensions, so the result is `false` if they decide on the key.
fn should_have_lease(layer: &IdempotencyLayer, context: &Context, head: &request::Parts) -> bool {
    let config = &context.config;
    let has_key = || layer.covers(head) && matches!(find_key(&config.request, head), Ok(Some(_)));
    let has_closure = config.request.skip.is_some() || config.request.key_from.is_service();
    // With the other setting, the layer may have executed the request without a lease.
    config.execution.store_failure == StoreFailure::Refuse
        && !has_closure
        && enforcement(context, head) == Enforcement::Enforce
        && has_key()
}

/// Prevents that the response of the batch request is recorded, unless the batch ends. A batch that is dropped does not end.
struct BatchGuard<'a>(Option<&'a Lease>);

impl<'a> BatchGuard<'a> {
    fn begin(request: Option<&'a Lease>) -> Self {
        if let Some(lease) = request {
            lease.0.begin_batch();
        }
        Self(request)
    }

    fn end(self) {
        if let Some(lease) = self.0 {
            lease.0.end_batch();
        }
    }
}

const MAX_ITEMS: usize = 1000;
const CONCURRENCY: usize = 16;
