//! Begins an execution under a granted lease.

use std::sync::{Arc, atomic::AtomicBool};

use tokio::{task::yield_now, time::Instant};

use super::Attempt;
use crate::{
    execution::{Execution, background::spawn_release_unacknowledged, shared::Context},
    lease::state::Grant,
    limits::AdmissionError,
    record::ExecutionTrace,
    store::{KeyId, OrphanPolicy},
    telemetry,
};

/// A granted lease that is not in use yet.
pub(crate) struct GrantedAttempt {
    pub(super) attempt: Attempt,
    pub(super) generation: u64,
    pub(crate) takeover: bool,
    // When the successful call was sent. The lease lasts from then on.
    pub(super) sent: Instant,
    /// `true` if an earlier attempt got no reply. It may still acquire the key after its release.
    pub(super) may_acquire_late: bool,
}

/// Last step of a begin, which has to wait.
pub(crate) enum PendingBegin {
    /// The execution has begun, and the renewer was started or woken. It runs before the handler.
    RenewerWoken(Execution),
    /// The limits admit no more executions. [`wait`](Self::wait) releases the lease.
    Refused(Box<(GrantedAttempt, AdmissionError)>),
}

impl GrantedAttempt {
    /// Begins the execution: from now on the lease is renewed. `body_aborted` is set when a request body that the handler
    /// reads itself fails or ends early.
    ///
    /// Releases the lease if the limits admit no more executions.
    pub(crate) async fn begin(
        self,
        context: &Context,
        body_aborted: Option<Arc<AtomicBool>>,
        traceparent: Option<ExecutionTrace>,
    ) -> Result<Execution, AdmissionError> {
        match self.begin_now(context, body_aborted, traceparent) {
            Ok(execution) => Ok(execution),
            Err(pending) => pending.wait(context).await,
        }
    }

    /// Begins the execution like [`begin`](Self::begin), without waiting. The error is no failure: it is the last step, for
    /// which the caller [waits](PendingBegin::wait).
    pub(crate) fn begin_now(
        mut self,
        context: &Context,
        body_aborted: Option<Arc<AtomicBool>>,
        traceparent: Option<ExecutionTrace>,
    ) -> Result<Execution, PendingBegin> {
        let limits = &context.config.limits;
        let permit = &mut self.attempt.permit;
        // Only an operator allows this policy to take an orphan over.
        let is_allowed_retry = self.takeover && self.attempt.claim.orphans == OrphanPolicy::Refuse;
        let mut admitted = if is_allowed_retry {
            permit.begin_allowed_retry();
            Ok(())
        } else {
            permit.begin_execution(limits.max_in_flight)
        };
        // A takeover executes a key that was counted before.
        if admitted.is_ok() && !self.takeover {
            admitted = limits.check_fresh_key(permit.caller());
        }
        if let Err(error) = admitted {
            return Err(PendingBegin::Refused(Box::new((self, error))));
        }
        let Self {
            attempt:
                Attempt {
                    claim,
                    key,
                    principal,
                    is_nested,
                    permit,
                },
            generation,
            takeover,
            sent,
            may_acquire_late,
        } = self;
        telemetry::granted(context.config.warnings(), &claim.id, generation, takeover);
        let renewer = &context.shared.renewer;
        let (lease, renewer_woken) = renewer.register(Grant {
            config: Arc::clone(&context.config),
            renewer: Arc::clone(renewer),
            caller: Arc::clone(permit.caller()),
            claim,
            key,
            principal,
            is_nested,
            generation,
            takeover,
            body_aborted,
            traceparent,
            sent,
            may_acquire_late,
        });
        let execution = Execution { lease, permit };
        if renewer_woken {
            Err(PendingBegin::RenewerWoken(execution))
        } else {
            Ok(execution)
        }
    }

    /// Releases the lease without an execution.
    pub(crate) async fn release_unused(self, context: &Context) {
        let Attempt { claim, permit, .. } = self.attempt;
        let (store, lease) = (&context.shared.store, claim.lease_ref(self.generation));
        let timeout = context.config.execution.store_timeout;
        let warnings = context.config.warnings();
        if !store.release(&lease, timeout, warnings).await || self.may_acquire_late {
            spawn_release_unacknowledged(&context.config, store, &claim, permit);
        }
    }
}

impl PendingBegin {
    pub(crate) fn id(&self) -> &KeyId {
        match self {
            Self::RenewerWoken(execution) => execution.lease.id(),
            Self::Refused(refused) => &refused.0.attempt.claim.id,
        }
    }

    /// Lets the renewer run and returns the execution, or releases the lease and returns the error.
    pub(crate) async fn wait(self, context: &Context) -> Result<Execution, AdmissionError> {
        match self {
            Self::RenewerWoken(execution) => {
                // Lets the renewer run on this worker thread now. Later, the handler may block the thread.
                yield_now().await;
                Ok(execution)
            }
            Self::Refused(refused) => {
                let (unused, error) = *refused;
                Box::pin(unused.release_unused(context)).await;
                Err(error)
            }
        }
    }
}
