//! Store calls with timeouts, retries and counters. Every call to the store goes through here.
//!
//! | the store is down when the layer | then |
//! |---|---|
//! | acquires | The client gets 503. A background task releases the lease, because the store may have granted it. |
//! | acquires after a wait for another request | The same as in the first row happens. The setting below does not apply. |
//! | renews | The renewer repeats the call. The lease keeps its deadline. After that, `Lease::is_held` returns `false`. |
//! | completes | The client gets the response. A background task tries to store the record for one lease duration. |
//! | completes, and a renewal finds no lease | The layer queries the entry. The client gets the stored response, else 409. |
//! | releases | The client gets the response. A background task tries to release the key for one lease duration. |
//! | completes or queries with a lost lease | The client gets 409 `outcome-unknown`. A background task tries to store the record. |
//! | completes, releases or queries after a refused or unacknowledged commit | The client gets 409 `outcome-unknown`. After a query for an unacknowledged commit, no task stores a record. |
//!
//! An entry that the store cannot read is no outage. If an acquire finds one, the client gets 503 under every setting. No call
//! makes another attempt for it.
//!
//! With `StoreFailure::DangerouslyExecuteUnprotected` a failure in the first row leads to an execution without a lease.

use std::{
    any::Any,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use crate::{
    layer_name::LayerName,
    panics::catch_panic,
    retry::{Backoff, RetryBudget},
    store::{
        Acquired, Claim, KeyId, LeaseRef, MemoryStore, Store, StoreError, Token, Ttl,
        erased::ErasedStore,
    },
    telemetry::{self, Warnings},
};

/// Client of the store. Cheap to clone.
///
/// Calls are retried at most twice under one deadline of 2 x `timeout`, where `timeout` limits a single attempt. A panic of
/// the store counts as a failure. Failures are reported to the `warnings` of the layer that makes the call.
#[derive(Clone)]
pub(crate) struct StoreClient {
    target: Target,
}

/// The store behind a client.
#[derive(Clone)]
enum Target {
    /// The store in the memory of this process. Its calls return at once and allocate no future.
    Memory(MemoryStore),
    Other(Arc<dyn ErasedStore>),
}

/// Failure of an acquire after all its attempts.
#[derive(Debug)]
pub(crate) enum AcquireError {
    /// The error of the store, or `None` if it did not reply in time. The outcome is unknown.
    Failed(Option<StoreError>),
    /// The store cannot read the entry, for this reason, which is already reported. The last attempt stored nothing.
    Unreadable {
        source: Box<dyn std::error::Error + Send + Sync>,
        /// `true` if an earlier attempt got no reply. It may still reach the store.
        may_acquire_late: bool,
    },
    /// The caller uses up its share of the store. The last attempt stored nothing.
    CallerLimit {
        /// `true` if an earlier attempt got no reply. It may still reach the store.
        may_acquire_late: bool,
    },
}

impl AcquireError {
    /// Adds that an attempt of an earlier call may still reach the store, if `may_acquire_late` is `true`.
    pub(crate) fn after_attempt(mut self, may_acquire_late: bool) -> Self {
        match &mut self {
            Self::CallerLimit {
                may_acquire_late: own,
            }
            | Self::Unreadable {
                may_acquire_late: own,
                ..
            } => *own |= may_acquire_late,
            Self::Failed(_) => {}
        }
        self
    }
}

/// Reply to [`StoreClient::acquire`].
pub(crate) struct AcquireReply {
    pub(crate) acquired: Acquired,
    /// Instant at which the successful attempt was sent. A granted lease lasts from then on.
    pub(crate) sent: Instant,
    /// `true` if an earlier attempt got no reply. It may still reach the store, and acquire a key that is free by then.
    pub(crate) may_acquire_late: bool,
}

/// Outcome of [`StoreClient::complete`].
#[derive(Debug)]
pub(crate) enum CompleteOutcome {
    Stored,
    LeaseLost,
    TooLarge {
        limit: usize,
    },
    /// All attempts failed. Their errors are already reported.
    Failed,
}

/// Outcome of [`StoreClient::renew`].
#[derive(Debug)]
pub(crate) enum RenewOutcome {
    Renewed,
    LeaseLost,
    /// The call failed. Its error is already reported.
    Failed,
}

impl StoreClient {
    pub(crate) fn new<S: Store>(store: S) -> Self {
        let target = match (&store as &dyn Any).downcast_ref::<MemoryStore>() {
            Some(memory) => Target::Memory(memory.clone()),
            None => Target::Other(Arc::new(store)),
        };
        Self { target }
    }

    /// Returns `true` if the store stores the operations of claims.
    pub(crate) fn has_operations(&self) -> bool {
        match &self.target {
            Target::Memory(store) => store.has_details(),
            Target::Other(_) => true,
        }
    }

    /// Returns `true` if the store is in the memory of this process and replies at once.
    pub(crate) fn replies_at_once(&self) -> bool {
        matches!(self.target, Target::Memory(_))
    }

    /// Draws the token of a new claim.
    pub(crate) fn new_token(&self) -> Result<Token, StoreError> {
        match &self.target {
            Target::Memory(_) => Token::of_process(),
            Target::Other(_) => Token::random(),
        }
    }

    /// Returns the reply of a store that has the record of the entry in the memory of this process.
    pub(crate) fn find_completed(&self, id: &KeyId, layer: &LayerName) -> Option<AcquireReply> {
        let Target::Other(store) = &self.target else {
            return None;
        };
        let (sent, started) = (Instant::now(), telemetry::start());
        // Unwind safe: after a panic the store is called as if it had returned `None`.
        let found = catch_unwind(AssertUnwindSafe(|| store.find_completed(id)));
        let acquired = found.ok()??;
        if !matches!(acquired, Acquired::Completed { .. }) {
            return None;
        }
        telemetry::store_time(layer, "acquire", started);
        Some(AcquireReply {
            acquired,
            sent,
            may_acquire_late: false,
        })
    }

    /// Acquires a lease from a store that replies at once. Returns `None` if the store must be awaited, or if it failed.
    pub(crate) fn acquire_now(&self, claim: &Claim, layer: &LayerName) -> Option<AcquireReply> {
        let Target::Memory(store) = &self.target else {
            return None;
        };
        let (sent, started) = (Instant::now(), telemetry::start());
        // Unwind safe: a panic leaves the store in the same state as a panic in an awaited call.
        let reply = catch_unwind(AssertUnwindSafe(|| store.acquire_now(claim, sent)));
        let acquired = reply.ok()?.ok()?;
        telemetry::store_time(layer, "acquire", started);
        Some(AcquireReply {
            acquired,
            sent,
            may_acquire_late: false,
        })
    }

    /// Acquires a lease. All attempts use the same token, so that a retry after a lost reply finds its own lease.
    pub(crate) async fn acquire(
        &self,
        claim: &Claim,
        timeout: Duration,
        warnings: &Warnings,
    ) -> Result<AcquireReply, AcquireError> {
        let mut budget = RetryBudget::new(timeout);
        let mut may_acquire_late = false;
        loop {
            let sent = Instant::now();
            let started = telemetry::start();
            let call = catch_store_panic(self.call_acquire(claim));
            let reply = budget.attempt(call).await;
            telemetry::store_time(warnings.layer(), "acquire", started);
            let error = match reply {
                // The lease expired before its reply arrived, so another process may hold it. Another attempt with the same
                // token shows the holder.
                Some(Ok(Acquired::Granted { .. }))
                    if budget.has_waited() && sent.elapsed() >= claim.lease.as_duration() =>
                {
                    None
                }
                Some(Ok(acquired)) => {
                    return Ok(AcquireReply {
                        acquired,
                        sent,
                        may_acquire_late,
                    });
                }
                Some(Err(StoreError::CallerLimit)) => {
                    return Err(AcquireError::CallerLimit { may_acquire_late });
                }
                Some(Err(StoreError::Unreadable(source))) => {
                    telemetry::bad_record(warnings, &claim.id, &source);
                    return Err(AcquireError::Unreadable {
                        source,
                        may_acquire_late,
                    });
                }
                Some(Err(error)) => Some(error),
                None => None,
            };
            may_acquire_late = true;
            warnings.store_call_failed("acquire", &claim.id, error.as_ref());
            if !budget.backoff().await {
                return Err(AcquireError::Failed(error));
            }
        }
    }

    /// Renews a lease with a single attempt of at most `limit`. The renewer retries.
    pub(crate) async fn renew(
        &self,
        lease: &LeaseRef,
        ttl: Ttl,
        limit: Duration,
        warnings: &Warnings,
    ) -> RenewOutcome {
        let started = telemetry::start();
        let call = catch_store_panic(self.call_renew(lease, ttl));
        let reply = timeout(limit, call).await;
        telemetry::store_time(warnings.layer(), "renew", started);
        match reply {
            Ok(Ok(())) => RenewOutcome::Renewed,
            Ok(Err(StoreError::LeaseLost)) => RenewOutcome::LeaseLost,
            Ok(Err(StoreError::Unreadable(source))) => {
                telemetry::bad_record(warnings, &lease.id, &source);
                RenewOutcome::Failed
            }
            Ok(Err(error)) => {
                warnings.store_call_failed("renew", &lease.id, Some(&error));
                RenewOutcome::Failed
            }
            Err(_elapsed) => {
                warnings.store_call_failed("renew", &lease.id, None);
                RenewOutcome::Failed
            }
        }
    }

    /// Stores the record and ends the lease, in a store that replies at once. Takes the record out of `record` and returns
    /// `true` if it is stored. If the store must be awaited, or if it failed or refused, nothing has changed.
    pub(crate) fn complete_now(
        &self,
        lease: &LeaseRef,
        record: &mut Bytes,
        retention: Ttl,
        layer: &LayerName,
    ) -> bool {
        let Target::Memory(store) = &self.target else {
            return false;
        };
        let started = telemetry::start();
        let stored = catch_unwind(AssertUnwindSafe(|| {
            store.complete_now(lease, record, retention)
        }));
        let is_stored = matches!(stored, Ok(Ok(())));
        if is_stored {
            telemetry::store_time(layer, "complete", started);
        }
        is_stored
    }

    /// Stores the record and ends the lease. `is_first` is `true` if neither the layer nor the handler has tried to complete
    /// the entry under this lease before.
    pub(crate) async fn complete(
        &self,
        lease: &LeaseRef,
        is_first: bool,
        record: &Bytes,
        retention: Ttl,
        timeout: Duration,
        warnings: &Warnings,
    ) -> CompleteOutcome {
        let mut budget = RetryBudget::new(timeout);
        let mut lease = LeaseRef {
            is_first_completion: is_first,
            ..*lease
        };
        loop {
            let started = telemetry::start();
            let call = catch_store_panic(self.call_complete(&lease, record.clone(), retention));
            let reply = budget.attempt(call).await;
            telemetry::store_time(warnings.layer(), "complete", started);
            let error = match reply {
                Some(Ok(())) => return CompleteOutcome::Stored,
                Some(Err(StoreError::LeaseLost)) => return CompleteOutcome::LeaseLost,
                Some(Err(StoreError::RecordTooLarge { limit })) => {
                    return CompleteOutcome::TooLarge { limit };
                }
                Some(Err(StoreError::Unreadable(source))) => {
                    telemetry::bad_record(warnings, &lease.id, &source);
                    return CompleteOutcome::Failed;
                }
                Some(Err(error)) => Some(error),
                None => None,
            };
            warnings.store_call_failed("complete", &lease.id, error.as_ref());
            if !budget.backoff().await {
                return CompleteOutcome::Failed;
            }
            // The attempt may have taken effect.
            lease.is_first_completion = false;
        }
    }

    /// Releases the key. If the lease took over an orphan, the key becomes an orphan again. Returns `false` if all
    /// attempts failed.
    pub(crate) async fn release(
        &self,
        lease: &LeaseRef,
        timeout: Duration,
        warnings: &Warnings,
    ) -> bool {
        let mut budget = RetryBudget::new(timeout);
        loop {
            let started = telemetry::start();
            let call = catch_store_panic(self.call_release(lease));
            let reply = budget.attempt(call).await;
            telemetry::store_time(warnings.layer(), "release", started);
            let error = match reply {
                Some(Ok(()) | Err(StoreError::LeaseLost)) => return true,
                Some(Err(StoreError::Unreadable(source))) => {
                    telemetry::bad_record(warnings, &lease.id, &source);
                    return false;
                }
                Some(Err(error)) => Some(error),
                None => None,
            };
            warnings.store_call_failed("release", &lease.id, error.as_ref());
            if !budget.backoff().await {
                return false;
            }
        }
    }

    /// Releases the key in repeated calls, until one succeeds or `deadline` passes.
    pub(crate) async fn release_until(
        &self,
        lease: &LeaseRef,
        deadline: Instant,
        timeout: Duration,
        warnings: &Warnings,
    ) {
        let mut backoff = Backoff::new();
        while backoff.wait_until(deadline).await {
            if self.release(lease, timeout, warnings).await {
                return;
            }
        }
    }

    /// Waits until the store reports a change of the entry, for about `limit`. The report is a hint and may be wrong.
    ///
    /// The store is not trusted: the caller limits the time and catches a panic.
    pub(crate) async fn wait_for_change(&self, id: &KeyId, limit: Duration) {
        match &self.target {
            Target::Memory(store) => Store::wait_for_change(store, id, limit).await,
            Target::Other(store) => store.wait_for_change(id, limit).await,
        }
    }
}

/// Single calls.
impl StoreClient {
    async fn call_acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        match &self.target {
            Target::Memory(store) => Store::acquire(store, claim).await,
            Target::Other(store) => store.acquire(claim).await,
        }
    }

    async fn call_renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        match &self.target {
            Target::Memory(store) => Store::renew(store, lease, ttl).await,
            Target::Other(store) => store.renew(lease, ttl).await,
        }
    }

    async fn call_complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        match &self.target {
            Target::Memory(store) => Store::complete(store, lease, record, retention).await,
            Target::Other(store) => store.complete(lease, record, retention).await,
        }
    }

    async fn call_release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        match &self.target {
            Target::Memory(store) => Store::release(store, lease).await,
            Target::Other(store) => store.release(lease).await,
        }
    }
}

/// Returns the source of an error response, for the error of the store or for no reply.
pub(crate) fn failure_source(
    error: Option<StoreError>,
) -> Box<dyn std::error::Error + Send + Sync> {
    error.map_or_else(|| "the store did not reply in time".into(), Into::into)
}

/// Returns an error if the store panics, when it is called or when its future is polled. A panic of the store must not end the
/// execution: that would lose its lease or its record.
async fn catch_store_panic<T>(
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let caught = catch_panic(pin!(call)).await;
    caught.unwrap_or_else(|_panic| Err(StoreError::backend("the store panicked")))
}

#[cfg(test)]
mod tests;
