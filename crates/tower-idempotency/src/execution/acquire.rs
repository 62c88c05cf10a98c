//! Acquires the lease of a request. Contains the only match over [`Acquired`] that decides whether to execute.

use std::{
    future::Future,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use crate::{
    execution::{
        Execution,
        detach::Detach,
        finish::spawn_release_unacknowledged,
        rules::{ConcurrentRequests, StoreFailure},
        shared::Context,
        waiters::wait,
    },
    lease::state::Grant,
    limits::InFlightPermit,
    store::{Acquired, Claim, KeyId},
    store_client::CallError,
    telemetry,
};

/// A claim, with the permit of the request that makes it.
pub(crate) struct Attempt {
    pub(crate) claim: Claim,
    pub(crate) permit: InFlightPermit,
}

/// Outcome of [`Attempt::acquire`].
pub(crate) enum AcquireOutcome {
    /// The store granted the lease.
    Granted(GrantedAttempt),
    /// The key was used with another request.
    Mismatch,
    /// Another execution holds the lease.
    InProgress { expires_in: Duration },
    /// An earlier execution ended without an outcome, and the orphan policy refuses a takeover.
    Orphaned { since: Duration },
    /// The request was executed before, with this record.
    Completed(Bytes),
    /// The store failed or timed out.
    Failed(FailedAttempt),
}

/// A granted lease that is not in use yet.
pub(crate) struct GrantedAttempt {
    attempt: Attempt,
    generation: u64,
    pub(crate) takeover: bool,
    // When the successful call was sent. The lease lasts from then on.
    sent: Instant,
}

/// An attempt that failed. The store may have granted the lease all the same.
pub(crate) struct FailedAttempt {
    attempt: Attempt,
    error: CallError,
    /// Action that the settings require. A request that waited for another one is always refused.
    pub(crate) policy: StoreFailure,
}

impl Attempt {
    /// Acquires the lease. If `waiting` is given and the settings say so, waits for a request in progress first.
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` stores every argument twice"
    )]
    pub(crate) fn acquire(
        self,
        context: &Context,
        waiting: Option<&Detach>,
    ) -> impl Future<Output = AcquireOutcome> {
        async move {
            let rules = &context.config.execution;
            let claim = &self.claim;
            let reply = context.shared.store.acquire(claim, rules.store_timeout);
            let (mut acquired, mut sent) = match reply.await {
                Ok(reply) => reply,
                Err(error) => {
                    return AcquireOutcome::Failed(FailedAttempt {
                        attempt: self,
                        error,
                        policy: rules.store_failure,
                    });
                }
            };
            if let (Some(detach), Acquired::InProgress { fingerprint, .. }) = (waiting, &acquired)
                && let ConcurrentRequests::Wait(limit) = rules.concurrent_requests
                && *fingerprint == claim.fingerprint
            {
                let waited = wait(context, claim, detach, limit, acquired, sent);
                match Box::pin(waited).await {
                    Ok(reply) => (acquired, sent) = reply,
                    // The first request was in progress, so this one must not be executed beside it, whatever the setting.
                    Err(error) => {
                        return AcquireOutcome::Failed(FailedAttempt {
                            attempt: self,
                            error,
                            policy: StoreFailure::Refuse,
                        });
                    }
                }
            }
            // The fingerprint is compared first: the state of another request under this key is of no concern to the client.
            if let Acquired::InProgress { fingerprint, .. }
            | Acquired::Orphaned { fingerprint, .. }
            | Acquired::Completed { fingerprint, .. } = &acquired
                && *fingerprint != self.claim.fingerprint
            {
                return AcquireOutcome::Mismatch;
            }
            match acquired {
                Acquired::Granted {
                    generation,
                    takeover,
                } => AcquireOutcome::Granted(GrantedAttempt {
                    attempt: self,
                    generation,
                    takeover,
                    sent,
                }),
                Acquired::InProgress { expires_in, .. } => {
                    AcquireOutcome::InProgress { expires_in }
                }
                Acquired::Orphaned { since, .. } => AcquireOutcome::Orphaned { since },
                Acquired::Completed { record, .. } => AcquireOutcome::Completed(record),
            }
        }
    }
}

impl AcquireOutcome {
    /// Logs and counts why the request is not executed. A replay is logged when its record is decoded.
    pub(crate) fn log(&self, id: &KeyId) {
        match self {
            Self::Mismatch => telemetry::mismatch(id),
            Self::InProgress { .. } => telemetry::in_progress(id),
            Self::Orphaned { .. } => telemetry::orphaned(id),
            Self::Granted(_) | Self::Completed(_) | Self::Failed(_) => {}
        }
    }
}

impl GrantedAttempt {
    /// Begins the execution: from now on the lease is renewed. `body_aborted` is set when a request body that the handler
    /// reads itself fails or ends early.
    pub(crate) fn begin(
        self,
        context: &Context,
        body_aborted: Option<Arc<AtomicBool>>,
    ) -> impl Future<Output = Execution> + use<> {
        let Self {
            attempt: Attempt { claim, permit },
            generation,
            takeover,
            sent,
        } = self;
        telemetry::granted(&claim.id, generation, takeover);
        let renewer = &context.shared.renewer;
        let registering = renewer.register(Grant {
            config: Arc::clone(&context.config),
            renewer: Arc::clone(renewer),
            limits: Arc::clone(&context.shared.limits),
            claim,
            generation,
            takeover,
            body_aborted,
            sent,
        });
        async move {
            let lease = registering.await;
            Execution { lease, permit }
        }
    }

    /// Releases the lease without an execution.
    pub(crate) async fn release_unused(self, context: &Context) {
        let Attempt { claim, permit } = self.attempt;
        let (store, lease) = (&context.shared.store, claim.lease_ref(self.generation));
        let timeout = context.config.execution.store_timeout;
        if !store.release(&lease, timeout).await {
            spawn_release_unacknowledged(&context.config, store, &claim, permit);
        }
    }
}

impl FailedAttempt {
    /// Releases the lease in the background, in case that the store granted it. Returns the error.
    pub(crate) fn release_in_background(self, context: &Context) -> CallError {
        self.attempt.release_in_background(context);
        self.error
    }

    /// Returns the attempt, for an execution without a lease.
    pub(crate) fn into_attempt(self) -> Attempt {
        self.attempt
    }
}

impl Attempt {
    /// Releases the lease in the background, in case that the store granted it.
    pub(crate) fn release_in_background(self, context: &Context) {
        let store = &context.shared.store;
        spawn_release_unacknowledged(&context.config, store, &self.claim, self.permit);
    }
}
