//! Executing an orphan again without its client.

use std::{future::Future, pin::pin, sync::Arc};

use http::Response;

use crate::{
    body::Body,
    error::Error,
    execution::shared::Failure,
    execution::{Shared, execute},
    future::{Detach, Detachable},
    layer::IdempotencyLayer,
    lease::{Grant, Lease},
    response::reject::{turned_away, unavailable},
    store::{Acquired, Claim, OrphanPolicy, Token},
    telemetry,
};

/// How a [`take_over`](IdempotencyLayer::take_over) ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "it may have failed: then it is an orphan again"]
pub enum TakeOverOutcome<T, E> {
    /// It ran, and this is what a client would have been answered: recorded as an answer to a request is, or not.
    Executed(T),
    /// It failed: it is an orphan again.
    Failed(E),
    /// It is not an orphan of this request (any more): it is in progress, has its outcome or was forgotten. Nothing ran.
    NoOrphan,
}

impl IdempotencyLayer {
    /// Takes the orphan of a request over and executes it again, as a retry of its client would: for whoever finishes what was
    /// abandoned, from a store's list of orphans. Safe to call in every process at once.
    ///
    /// `claim` names the entry: id and fingerprint as the store has them, and, for operators, the operation; the layer
    /// fills in the rest, a token for each call among it. [`Lease::derive`] gives the keys that it gave to the first
    /// execution. The entry is taken over whatever the layer's orphan policy says: to call this is to decide.
    ///
    /// What `work` returns is treated as the answer of a handler: recorded, unless its status or a control header says
    /// otherwise; then, and when it fails, the entry is an orphan again. It may commit in a transaction of its own, too:
    /// see [`transaction`](crate::transaction). Response headers and limits are those of this layer, so call it on the
    /// layer that serves the route.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::StoreUnavailable`](crate::ErrorKind::StoreUnavailable) when no lease could be taken,
    /// [`Overloaded`](crate::ErrorKind::Overloaded) and [`Draining`](crate::ErrorKind::Draining) as for requests. The
    /// work did not run now.
    ///
    /// # Panics
    ///
    /// When `work` panics, after the entry was made an orphan again; and when it is polled outside of a Tokio runtime.
    ///
    /// # Cancellation
    ///
    /// Dropped once it has been polled, it goes on in a task of its own. [`drain`](Self::drain) waits for it.
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
        let (config, engine) = (Arc::clone(&self.config), Arc::clone(&self.engine));
        let place = engine.limits.enter(config.limits.max_in_flight);
        let place = place.map_err(|no_place| turned_away(&config, &no_place))?;
        let claim = Claim {
            // Whoever asks again with the same claim is somebody else.
            token: Token::random().map_err(|error| unavailable(&config, Failure::Store(error)))?,
            lease: config.execution.lease,
            orphans: OrphanPolicy::TakeOver,
            orphan_retention: config.orphan_retention(),
            owner: engine.owner,
            ..claim
        };
        let detach = Arc::<Detach>::default();
        detach.arm();
        let run = async move {
            let asked = engine.acquire(&claim, config.execution.store_timeout).await;
            let (generation, sent) = match asked {
                Ok((
                    Acquired::Granted {
                        generation,
                        takeover: true,
                    },
                    sent,
                )) => (generation, sent),
                // There was nothing to take over, and there is to be nothing now.
                Ok((
                    Acquired::Granted {
                        takeover: false, ..
                    },
                    _,
                )) => {
                    let limit = config.execution.store_timeout;
                    if !engine.release(&claim.lease_ref(1), limit).await {
                        engine.give_back_later(&config, &claim, place);
                    }
                    return Ok(TakeOverOutcome::NoOrphan);
                }
                Ok((
                    Acquired::InProgress { .. }
                    | Acquired::Orphaned { .. }
                    | Acquired::Completed { .. },
                    _,
                )) => return Ok(TakeOverOutcome::NoOrphan),
                Err(failure) => {
                    engine.give_back_later(&config, &claim, place);
                    return Err(unavailable(&config, failure));
                }
            };
            telemetry::granted(&claim.id, generation, true);
            let grant = Grant {
                config: Arc::clone(&config),
                engine: Arc::clone(&engine),
                claim,
                generation,
                takeover: true,
                broke: None,
                sent,
            };
            let lease = engine.renewer.keep(grant).await;
            let handle = lease.handle();
            let call = pin!(async move { work(handle).await });
            let shared = Arc::new(Shared { config, engine });
            Ok(match execute(shared, lease, place, call).await {
                Ok(res) => TakeOverOutcome::Executed(res),
                Err(error) => TakeOverOutcome::Failed(error),
            })
        };
        Detachable::new(run, detach).await
    }
}
