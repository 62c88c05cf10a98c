//! Runs the items of a batch, each key once.

use std::{future::Future, pin::pin, sync::Arc};

use serde::{Serialize, de::DeserializeOwned};
use tokio::task::JoinSet;
use tracing::Instrument;

use super::{
    Items,
    result::{ItemOutcome, SharedResult},
};
use crate::{
    error::{Error, ErrorKind},
    execution::{acquire::Attempt, detach::Detachable, shared::Context},
    lease::Lease,
    limits::{Caller, InFlightPermit},
    panics::catch_panic,
    response::reject::{admission_error, count_rejection, store_unavailable},
    run_once::{self, RunOutcome, WorkError},
    store::{Claim, Fingerprint, KeyId, Token},
};

/// An item that is run: the first one with its key.
pub(super) struct UniqueItem<P> {
    pub(super) id: KeyId,
    pub(super) fingerprint: Fingerprint,
    pub(super) input: P,
}

impl Items {
    /// Runs the items in their order, at most [`concurrency`](Self::with_concurrency) at the same time. Returns their
    /// results in the same order.
    pub(super) async fn run_unique<P, T, E, W, F>(
        &self,
        unique: Vec<UniqueItem<P>>,
        work: W,
    ) -> Vec<Arc<SharedResult<T, E>>>
    where
        P: Send + 'static,
        W: FnOnce(P, Lease) -> F + Clone + Send + 'static,
        F: Future<Output = Result<T, WorkError<E>>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + Sync + 'static,
        E: Send + Sync + 'static,
    {
        let config = &self.context.config;
        let caller = self.context.shared.limits.caller(self.account);
        let ids: Vec<_> = unique.iter().map(|first| first.id).collect();
        let mut ended: Vec<_> = ids.iter().map(|_| None).collect();
        let mut waiting = unique.into_iter().enumerate().peekable();
        let mut running = JoinSet::new();
        let mut is_store_down = false;
        loop {
            while running.len() < self.concurrency && waiting.peek().is_some() {
                let permit = self.admit(&caller, is_store_down);
                if permit.as_ref().is_err_and(is_over_limit) && !running.is_empty() {
                    // An item of this batch that ends returns its permit.
                    break;
                }
                let Some((index, first)) = waiting.next() else {
                    break;
                };
                match permit.and_then(|permit| self.start(permit, first, work.clone())) {
                    // A panic is caught in the task, so that it keeps its index.
                    Ok(item) => drop(running.spawn(
                        async move { (index, catch_panic(pin!(item)).await) }.in_current_span(),
                    )),
                    Err(error) => {
                        let error = count_rejection(&config.response, error);
                        ended[index] = Some((ItemOutcome::Rejected(error), true));
                    }
                }
            }
            let Some(joined) = running.join_next().await else {
                break;
            };
            // A task is cancelled only if the runtime shuts down, which cancels this future too.
            let Ok((index, result)) = joined else {
                continue;
            };
            ended[index] = Some(match result {
                Ok(Ok(ended)) => (ItemOutcome::Returned(ended.outcome), ended.can_change),
                Ok(Err(error)) => {
                    is_store_down |= is_outage(&error);
                    (ItemOutcome::Rejected(error), true)
                }
                Err(_panic) => (ItemOutcome::Panicked, true),
            });
        }
        let results = ids.iter().zip(ended);
        let results = results.map(|(id, ended)| {
            let (outcome, can_change) = ended.unwrap_or((ItemOutcome::Panicked, true));
            Arc::new(SharedResult::new(config, id, outcome, can_change))
        });
        results.collect()
    }

    /// Returns the permit of an item, or the error of an item that may not begin.
    fn admit(&self, caller: &Arc<Caller>, is_store_down: bool) -> Result<InFlightPermit, Error> {
        let config = &self.context.config;
        if is_store_down {
            let source = "the store failed for another item of the batch";
            return Err(store_unavailable(&config.response, source));
        }
        let max = config.limits.max_in_flight;
        // Both permits at once, so that the item waits here and is not rejected after it was admitted.
        let permit = Arc::clone(caller)
            .admit(max, config.layer())
            .and_then(|mut permit| permit.begin_execution(max).map(|()| permit));
        permit.map_err(|error| admission_error(&config.response, error))
    }

    /// Returns the future of an item. A dropped future continues in the background once it was polled.
    fn start<P, T, E, W, F>(
        &self,
        permit: InFlightPermit,
        first: UniqueItem<P>,
        work: W,
    ) -> Result<Detachable<Result<RunOutcome<T, E>, Error>>, Error>
    where
        P: Send + 'static,
        W: FnOnce(P, Lease) -> F + Send + 'static,
        F: Future<Output = Result<T, WorkError<E>>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
    {
        let (config, shared) = (&self.context.config, &self.context.shared);
        let UniqueItem {
            id,
            fingerprint,
            input,
        } = first;
        let caller = Arc::clone(permit.caller());
        let token = Token::random().map_err(|error| store_unavailable(&config.response, error))?;
        let terms = config.lease_terms(shared.owner);
        let claim = Claim {
            id,
            fingerprint,
            token,
            lease: terms.ttl,
            orphans: terms.orphan_policy,
            orphan_retention: terms.orphan_retention,
            owner: terms.owner,
            operation: self.operation.clone(),
            scope: Some(self.account),
        };
        let attempt = Attempt {
            claim,
            key: None,
            principal: Some(self.principal),
            is_nested: false,
            permit,
        };
        let context = Context::for_values(config, shared);
        let run = run_once::execute(context, attempt, move |lease| work(input, lease));
        Ok(Detachable::armed(run, caller, config.layer().clone()))
    }
}

/// Returns `true` if the limits of the layer admit no more requests of the caller at the moment.
fn is_over_limit(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::CallerLimit | ErrorKind::Overloaded)
}

/// Returns `true` if the store did not reply. The error of an unreadable record is not retryable: it concerns one item alone.
fn is_outage(error: &Error) -> bool {
    error.kind() == ErrorKind::StoreUnavailable && error.is_retryable()
}
