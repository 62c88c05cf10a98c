//! Executes an orphan again without its client.

use std::{future::Future, sync::Arc};

use http::Response;

use crate::{
    body::Body,
    digest::SERVICE_SCOPE,
    error::Error,
    execution::{
        acquire::{AcquireOutcome, Attempt},
        detach::Detachable,
        handler::run_handler,
        shared::Context,
    },
    layer::IdempotencyLayer,
    lease::Lease,
    request::is_operation_of_request,
    response::reject::{admission_error, count_rejection, store_unavailable},
    store::{Claim, OrphanPolicy, Token},
};

/// Outcome of a [`take_over`](IdempotencyLayer::take_over).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "the work may have failed: then the entry is an orphan again"]
pub enum TakeOverOutcome<T, E> {
    /// The work ran. Contains the response that a client would get. It is recorded by the rules for requests.
    Executed(T),
    /// The work failed. The entry is an orphan again.
    Failed(E),
    /// The entry is not an orphan of this request: it is in progress, completed or expired. Also returned if the claim has the
    /// operation of [`run_once`](IdempotencyLayer::run_once), of an item or of an observed request. Nothing ran.
    NoOrphan,
}

impl IdempotencyLayer {
    /// Takes over the orphan of a request and executes it again, like a retry of its client.
    ///
    /// Use it to finish abandoned requests from a store's list of orphans. It is safe to call in every process at once.
    ///
    /// `claim` contains the ID, the fingerprint and the operation of the entry, and optionally the scope. The layer sets the
    /// other fields, with a new token for each call. [`Lease::derive`] returns the same keys as in the first execution. The
    /// call takes over the entry regardless of the layer's orphan policy. It uses up a
    /// [retry](crate::inspect::Resolution::Retry) that an operator allowed, even if `work` fails or does not run.
    ///
    /// Skip the entries of [`run_once`](Self::run_once), of the items of a batch and of observed requests: the response of `work`
    /// would block their keys. A claim with their operation gets [`NoOrphan`](TakeOverOutcome::NoOrphan). If the operation is
    /// empty, the layer cannot recognize them. The entry then keeps its operation.
    ///
    /// The response of `work` is treated like that of a handler. It is recorded unless its status or a control header
    /// prevents that. If it is not recorded, or `work` fails, the entry is an orphan again, unless
    /// [`with_failure`](Self::with_failure) changes that. A gRPC response is judged by its HTTP status, which is always 200: return
    /// an error for a call that may succeed later. Its record has `grpc-status` only if
    /// [`with_replayed_headers`](Self::with_replayed_headers) keeps it. `work` may also commit in a transaction of its own: see
    /// [`transaction`](crate::transaction). Response headers and limits are those of this layer, so use the layer that serves
    /// the route.
    ///
    /// # Errors
    ///
    /// - [`StoreUnavailable`](crate::ErrorKind::StoreUnavailable) if no lease could be acquired, or the store cannot read the
    ///   entry. In the second case, another call does not help.
    /// - [`Overloaded`](crate::ErrorKind::Overloaded) and [`Draining`](crate::ErrorKind::Draining), as for requests.
    /// - [`CallerLimit`](crate::ErrorKind::CallerLimit) if the caller of the claim's scope uses up its share of a limit.
    ///   All calls without a scope count as one caller, together with [`run_once`](Self::run_once).
    ///
    /// The work did not run now.
    ///
    /// # Panics
    ///
    /// If `work` panics, after the entry became an orphan again. Also if the future is polled outside a Tokio runtime.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped after it was polled, it continues in a background task. [`drain`](Self::drain) waits for it.
    pub async fn take_over<B, E, W, F>(
        &self,
        claim: Claim,
        work: W,
    ) -> Result<TakeOverOutcome<Response<Body<B>>, E>, Error>
    where
        W: FnOnce(Lease) -> F + Send + 'static,
        F: Future<Output = Result<Response<B>, E>> + Send + 'static,
        B: http_body::Body + Send + 'static,
        B::Data: Send,
        B::Error: Send,
        E: Send + 'static,
    {
        if !is_operation_of_request(&claim.operation) {
            return Ok(TakeOverOutcome::NoOrphan);
        }
        let context = Context::for_values(&self.config, &self.shared);
        let config = &*context.config;
        let (rules, layer) = (&config.response, config.layer());
        context.shared.registration.at_request(layer);
        let caller = context
            .shared
            .limits
            .caller(claim.scope.unwrap_or(SERVICE_SCOPE));
        let permit = caller.admit(config.limits.max_in_flight, layer);
        let permit =
            permit.map_err(|error| count_rejection(rules, admission_error(rules, error)))?;
        let terms = config.lease_terms(context.shared.owner);
        let claim = Claim {
            // A second call with the same claim must not count as a retry of the first one.
            token: Token::random()
                .map_err(|error| count_rejection(rules, store_unavailable(rules, error)))?,
            lease: terms.ttl,
            orphans: OrphanPolicy::TakeOver,
            orphan_retention: terms.orphan_retention,
            owner: terms.owner,
            ..claim
        };
        let id = claim.id;
        let (caller, layer) = (Arc::clone(permit.caller()), layer.clone());
        let run = async move {
            let rules = &context.config.response;
            let attempt = Attempt {
                claim,
                key: None,
                principal: None,
                is_nested: false,
                permit,
            };
            let grant = match attempt.acquire(&context, None).await {
                AcquireOutcome::Granted(grant) if grant.takeover => grant,
                // There was no orphan. The release deletes the new entry.
                AcquireOutcome::Granted(grant) => {
                    grant.release_unused(&context).await;
                    return Ok(TakeOverOutcome::NoOrphan);
                }
                AcquireOutcome::Mismatch { .. }
                | AcquireOutcome::InProgress { .. }
                | AcquireOutcome::Orphaned { .. }
                | AcquireOutcome::Completed(_) => return Ok(TakeOverOutcome::NoOrphan),
                AcquireOutcome::Failed(failure) => {
                    let error = failure.into_error(&context).with_entry(&id);
                    return Err(count_rejection(rules, error));
                }
            };
            let begun = grant.begin(&context, None, None).await;
            let execution = begun.map_err(|error| {
                count_rejection(rules, admission_error(rules, error).with_entry(&id))
            })?;
            let handle = execution.lease.handle();
            let call = async move { work(handle).await };
            Ok(match run_handler(execution, Ok(call)).await {
                Ok(res) => TakeOverOutcome::Executed(res),
                Err(error) => TakeOverOutcome::Failed(error),
            })
        };
        Detachable::armed(run, caller, layer).await
    }
}
