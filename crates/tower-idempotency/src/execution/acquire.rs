//! Acquires the lease of a request. Contains the only match over [`Acquired`] that decides whether to execute.

mod begin;

use std::{future::Future, pin::pin, time::Duration};

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout, timeout_at};

pub(crate) use self::begin::{GrantedAttempt, PendingBegin};
use crate::{
    error::Error,
    execution::{
        background::spawn_release_unacknowledged,
        detach::DetachSwitch,
        rules::{ConcurrentRequests, StoreFailure},
        shared::Context,
        waiters::Wakeup,
    },
    limits::{AdmissionError, InFlightPermit},
    panics::catch_panic,
    request::key::RequestKey,
    response::reject::{admission_error, store_unavailable, unreadable_entry},
    retry::from_now,
    store::{Acquired, Claim, Fingerprint, KeyId, OrphanPolicy, ScopeDigest, StoreError},
    store_client::{AcquireError, AcquireReply, failure_source},
    telemetry::{self, Warnings},
};

/// A claim, with the permit of the request that makes it.
pub(crate) struct Attempt {
    pub(crate) claim: Claim,
    /// Key of the request. `None` outside HTTP.
    pub(crate) key: Option<RequestKey>,
    /// Digest of the principal of the request. `None` outside HTTP.
    pub(crate) principal: Option<ScopeDigest>,
    /// `true` if an outer layer holds a lease for the request.
    pub(crate) is_nested: bool,
    pub(crate) permit: InFlightPermit,
}

/// Outcome of [`Attempt::acquire`].
pub(crate) enum AcquireOutcome {
    /// The store granted the lease.
    Granted(GrantedAttempt),
    /// The key was used with another request. If that request is not `completed`, its key may become free.
    Mismatch { completed: bool },
    /// Another execution holds the lease.
    InProgress { expires_in: Duration },
    /// An earlier execution ended without an outcome, and the orphan policy refuses a takeover.
    Orphaned { since: Duration },
    /// The request was executed before, with this record.
    Completed(Bytes),
    /// The request has no lease, and the state of the entry is unknown.
    Failed(AcquireFailure),
}

/// Reason why an acquire has neither a lease nor the state of the entry.
#[expect(
    clippy::large_enum_variant,
    reason = "the outcome of an acquire has space for a lease of the same size"
)]
pub(crate) enum AcquireFailure {
    /// The caller uses up its share of the store.
    OverLimit(AdmissionError),
    /// An entry exists, and the store cannot read it. The request may have been executed before.
    Unreadable(Box<dyn std::error::Error + Send + Sync>),
    /// The store failed or timed out.
    Store(FailedAttempt),
}

/// An attempt that failed. The store may have granted the lease nevertheless.
pub(crate) struct FailedAttempt {
    attempt: Attempt,
    /// The error of the store, or `None` if it did not reply in time.
    error: Option<StoreError>,
    /// Action that the settings require. A request that waited for another one is always refused.
    pub(crate) policy: StoreFailure,
}

impl Attempt {
    /// Acquires the lease without waiting. Uses the reply that was `found` in memory, if there is one.
    ///
    /// Returns the attempt if [`acquire`](Self::acquire) must run. That call queries the store again.
    pub(crate) fn acquire_now(
        self,
        context: &Context,
        found: Option<AcquireReply>,
    ) -> Result<AcquireOutcome, Box<Self>> {
        let (store, layer) = (&context.shared.store, context.config.layer());
        let reply = found.or_else(|| store.acquire_now(&self.claim, layer));
        match reply {
            Some(reply)
                if !self.is_waiting(context, &reply) && !self.can_take_over_derived(&reply) =>
            {
                Ok(self.into_outcome(context, reply))
            }
            Some(_) | None => Err(Box::new(self)),
        }
    }

    /// Acquires the lease. With a `switch`, waits for a request in progress first if the settings say so.
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` stores every argument twice"
    )]
    pub(crate) fn acquire(
        mut self,
        context: &Context,
        switch: Option<&DetachSwitch>,
    ) -> impl Future<Output = AcquireOutcome> {
        async move {
            let rules = &context.config.execution;
            let (store, warnings) = (&context.shared.store, context.config.warnings());
            let claim = &self.claim;
            let reply = store.acquire(claim, rules.store_timeout, warnings);
            let mut reply = match reply.await {
                Ok(reply) => reply,
                Err(error) => return self.failed(context, error, rules.store_failure),
            };
            if let Some(switch) = switch
                && let ConcurrentRequests::Wait(limit) = rules.concurrent_requests
                && self.is_waiting(context, &reply)
            {
                let waited = self.wait(context, switch, limit, reply);
                match Box::pin(waited).await {
                    Ok(waited) => reply = waited,
                    // The first request was in progress. This one must not be executed concurrently, regardless of the
                    // setting.
                    Err(error) => return self.failed(context, error, StoreFailure::Refuse),
                }
            }
            if let Acquired::Orphaned { fingerprint, .. } = &reply.acquired
                && self.can_take_over_derived(&reply)
            {
                // A takeover must send the stored fingerprint. Another claim may have taken the entry over meanwhile.
                self.claim.fingerprint = *fingerprint;
                let taking_over = store.acquire(&self.claim, rules.store_timeout, warnings);
                match taking_over.await {
                    Ok(taken_over) => {
                        let may_acquire_late =
                            reply.may_acquire_late || taken_over.may_acquire_late;
                        reply = AcquireReply {
                            may_acquire_late,
                            ..taken_over
                        };
                    }
                    Err(error) => {
                        let error = error.after_attempt(reply.may_acquire_late);
                        // The store has just reported an orphan, which only one policy executes without an operator.
                        let policy = match self.claim.orphans {
                            OrphanPolicy::TakeOver => rules.store_failure,
                            OrphanPolicy::Refuse | OrphanPolicy::Never => StoreFailure::Refuse,
                        };
                        return self.failed(context, error, policy);
                    }
                }
            }
            self.into_outcome(context, reply)
        }
    }

    /// Waits until the first request has a record or this one acquires the lease, for at most `limit` and one call of the store.
    /// Returns the last reply of the store.
    async fn wait(
        &self,
        context: &Context,
        detach: &DetachSwitch,
        limit: Duration,
        mut reply: AcquireReply,
    ) -> Result<AcquireReply, AcquireError> {
        let (rules, shared) = (&context.config.execution, &context.shared);
        let (claim, caller) = (&self.claim, self.permit.caller());
        let deadline = from_now(limit);
        if detach.is_detached() {
            return Ok(reply);
        }
        let Some(_permit) = caller.admit_waiter(rules.waiters) else {
            return Ok(reply);
        };
        let Some(waiter) = shared.waiters.join(claim.id, rules.waiters_per_key) else {
            return Ok(reply);
        };
        telemetry::waiting(context.config.layer(), &claim.id);
        disarm_unless_late(detach, &reply);
        let wakeup = timeout_at(deadline, waiter.turn_or_record()).await;
        detach.arm();
        let turn = match wakeup {
            Ok(Wakeup::Turn(turn)) => turn,
            Ok(Wakeup::Record(completed)) => {
                reply.acquired = completed;
                return Ok(reply);
            }
            Err(_elapsed) => return Ok(reply),
        };
        let mut poll_interval = MIN_INTERVAL;
        let mut notification_backoff = Duration::ZERO;
        while let Acquired::InProgress {
            fingerprint,
            expires_in,
        } = &reply.acquired
        {
            let timed_out = Instant::now() >= deadline;
            if !self.is_same_request(fingerprint) || timed_out || detach.is_detached() {
                break;
            }
            disarm_unless_late(detach, &reply);
            // After a notification without a result, the waiter delays its next query. A store that notifies without end is
            // then not flooded with queries.
            if !notification_backoff.is_zero() {
                timeout_at(deadline, sleep(notification_backoff)).await.ok();
            }
            // The notification is a hint. Without one, the waiter queries the store again, at the expiry of the lease at the
            // latest.
            let listening = Instant::now();
            let poll_timeout = poll_interval
                .min(deadline.saturating_duration_since(listening))
                .min(*expires_in)
                .max(Duration::from_millis(1));
            // A panic of the store counts as a notification: it must not end a wait on which other waiters depend.
            let changed = pin!(shared.store.wait_for_change(&claim.id, poll_timeout));
            timeout(poll_timeout, catch_panic(changed)).await.ok();
            notification_backoff = if listening.elapsed() < poll_timeout {
                (notification_backoff * 2).clamp(MIN_INTERVAL, MAX_INTERVAL)
            } else {
                Duration::ZERO
            };
            // The call may acquire the lease. A future that is dropped meanwhile continues in the background.
            detach.arm();
            if detach.is_detached() {
                break;
            }
            let earlier = reply.may_acquire_late;
            let warnings = context.config.warnings();
            let acquired = shared.store.acquire(claim, rules.store_timeout, warnings);
            let acquired = acquired.await;
            reply = acquired.map_err(|error| error.after_attempt(earlier))?;
            reply.may_acquire_late |= earlier;
            poll_interval = (poll_interval * 8 / 5).min(MAX_INTERVAL);
        }
        if let Acquired::Completed { .. } = reply.acquired {
            waiter.deliver(reply.acquired.clone());
        }
        drop(turn);
        Ok(reply)
    }

    /// Returns `true` if the request waits for another one, which is in progress.
    fn is_waiting(&self, context: &Context, reply: &AcquireReply) -> bool {
        let rules = &context.config.execution;
        matches!(&reply.acquired, Acquired::InProgress { fingerprint, .. }
            if matches!(rules.concurrent_requests, ConcurrentRequests::Wait(_))
                && self.is_same_request(fingerprint))
    }

    /// Returns `true` if the entry is an orphan with a derived key, and this request may take it over.
    ///
    /// The stored fingerprint of such an entry identifies its life. A takeover must send it, so it needs a second claim.
    fn can_take_over_derived(&self, reply: &AcquireReply) -> bool {
        matches!(reply.acquired, Acquired::Orphaned { .. })
            && self.is_derived()
            && self.claim.orphans != OrphanPolicy::Never
    }

    /// Returns the outcome of the last reply of the store.
    fn into_outcome(self, context: &Context, reply: AcquireReply) -> AcquireOutcome {
        let AcquireReply {
            acquired,
            sent,
            may_acquire_late,
        } = reply;
        let (fingerprint, outcome) = match acquired {
            Acquired::Granted {
                generation,
                takeover,
            } => {
                return AcquireOutcome::Granted(GrantedAttempt {
                    attempt: self,
                    generation,
                    takeover,
                    sent,
                    may_acquire_late,
                });
            }
            Acquired::InProgress {
                fingerprint,
                expires_in,
            } => (fingerprint, AcquireOutcome::InProgress { expires_in }),
            Acquired::Orphaned { fingerprint, since } => {
                (fingerprint, AcquireOutcome::Orphaned { since })
            }
            Acquired::Completed {
                fingerprint,
                record,
                ..
            } => (fingerprint, AcquireOutcome::Completed(record)),
        };
        let completed = matches!(outcome, AcquireOutcome::Completed(_));
        // A client gets the state of the entry only if the fingerprint is that of its request.
        let outcome = if self.is_same_request(&fingerprint) {
            outcome
        } else {
            AcquireOutcome::Mismatch { completed }
        };
        if may_acquire_late && !completed {
            // Otherwise a late attempt of this request could block the key after the other execution has released it.
            self.release_in_background(context);
        }
        outcome
    }

    /// Returns the outcome of an acquire without a reply, or of one that the store rejected.
    #[cold]
    fn failed(
        self,
        context: &Context,
        error: AcquireError,
        policy: StoreFailure,
    ) -> AcquireOutcome {
        let (failure, may_acquire_late) = match error {
            AcquireError::Failed(error) => {
                return AcquireOutcome::Failed(AcquireFailure::Store(FailedAttempt {
                    attempt: self,
                    error,
                    policy,
                }));
            }
            // After the other errors the store works, so no policy for its failures applies.
            AcquireError::CallerLimit { may_acquire_late } => {
                let error = AdmissionError::CallerStoreLimit;
                (AcquireFailure::OverLimit(error), may_acquire_late)
            }
            AcquireError::Unreadable {
                source,
                may_acquire_late,
            } => (AcquireFailure::Unreadable(source), may_acquire_late),
        };
        if may_acquire_late {
            self.release_in_background(context);
        }
        AcquireOutcome::Failed(failure)
    }

    fn is_derived(&self) -> bool {
        self.key == Some(RequestKey::Derived)
    }

    /// Returns `true` if an entry with this fingerprint belongs to the same request. A derived key has only one request.
    fn is_same_request(&self, fingerprint: &Fingerprint) -> bool {
        *fingerprint == self.claim.fingerprint || self.is_derived()
    }

    /// Releases the lease in the background, in case the store granted it.
    pub(crate) fn release_in_background(self, context: &Context) {
        let store = &context.shared.store;
        spawn_release_unacknowledged(&context.config, store, &self.claim, self.permit);
    }
}

/// Lets a client that disconnects cancel its waiter, which has had no effect, and free its permit.
///
/// A waiter whose call may still acquire the lease continues instead, to release it.
fn disarm_unless_late(detach: &DetachSwitch, reply: &AcquireReply) {
    if !reply.may_acquire_late {
        detach.disarm();
    }
}

impl AcquireOutcome {
    /// Logs and counts the reason why the request is not executed. A replay is logged when its record is decoded, and an
    /// unreadable entry when the store reports it.
    pub(crate) fn log(&self, warnings: &Warnings, id: &KeyId) {
        match self {
            Self::Mismatch { .. } => telemetry::mismatch(warnings.layer(), id),
            Self::InProgress { .. } => telemetry::in_progress(warnings.layer(), id),
            Self::Orphaned { .. } => warnings.orphaned(id),
            Self::Granted(_) | Self::Completed(_) | Self::Failed(_) => {}
        }
    }
}

impl AcquireFailure {
    /// Returns the error of a request that is not executed. After a failure, releases the lease in the background, in case the
    /// store granted it.
    pub(crate) fn into_error(self, context: &Context) -> Error {
        let rules = &context.config.response;
        match self {
            Self::OverLimit(error) => admission_error(rules, error),
            Self::Unreadable(source) => unreadable_entry(source),
            Self::Store(FailedAttempt { attempt, error, .. }) => {
                attempt.release_in_background(context);
                store_unavailable(rules, failure_source(error))
            }
        }
    }
}

impl FailedAttempt {
    /// Returns the attempt, for an execution without a lease.
    pub(crate) fn into_attempt(self) -> Attempt {
        self.attempt
    }
}

/// First and last interval at which a waiter queries the store without a notification.
const MIN_INTERVAL: Duration = Duration::from_millis(25);
const MAX_INTERVAL: Duration = Duration::from_secs(1);
