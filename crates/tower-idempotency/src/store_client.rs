//! Store calls with timeouts, retries and counters. Every call to the store goes through here.

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use crate::{
    panics::catch_panic,
    retry::{Backoff, RetryBudget},
    store::{Acquired, Claim, KeyId, LeaseRef, StoreError, Ttl, erased::ErasedStore},
    telemetry,
};

/// Client of the store. Cheap to clone.
///
/// Calls are retried at most twice under one deadline of 2 x `timeout`, where `timeout` limits a single attempt. A store
/// that panics has failed like any other.
#[derive(Clone)]
pub(crate) struct StoreClient(Arc<dyn ErasedStore>);

/// Failure of a store call after all its attempts.
#[derive(Debug)]
pub(crate) enum CallError {
    /// The store returned an error.
    Store(StoreError),
    /// The store did not reply in time, so the outcome is unknown.
    TimedOut,
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
    pub(crate) fn new(store: Arc<dyn ErasedStore>) -> Self {
        Self(store)
    }

    /// Acquires a lease. All attempts use the same token, so that a retry after a lost reply finds its own lease.
    pub(crate) async fn acquire(
        &self,
        claim: &Claim,
        timeout: Duration,
    ) -> Result<AcquireReply, CallError> {
        let mut budget = RetryBudget::new(timeout);
        let mut may_acquire_late = false;
        loop {
            let sent = Instant::now();
            let started = telemetry::start();
            let call = catch_store_panic(async { self.0.acquire(claim).await });
            let reply = budget.attempt(call).await;
            telemetry::store_time("acquire", started);
            let error = match reply {
                // The lease expired before its reply arrived, so another process may hold it. Another attempt with the same
                // token finds out.
                Some(Ok(Acquired::Granted { .. }))
                    if budget.has_waited() && sent.elapsed() >= claim.lease.as_duration() =>
                {
                    CallError::TimedOut
                }
                Some(Ok(acquired)) => {
                    return Ok(AcquireReply {
                        acquired,
                        sent,
                        may_acquire_late,
                    });
                }
                Some(Err(error)) => CallError::Store(error),
                None => CallError::TimedOut,
            };
            may_acquire_late = true;
            telemetry::store_error("acquire", &claim.id, error.store_error());
            if !budget.backoff().await {
                return Err(error);
            }
        }
    }

    /// Renews a lease with a single attempt of at most `limit`. The renewer retries.
    pub(crate) async fn renew(&self, lease: &LeaseRef, ttl: Ttl, limit: Duration) -> RenewOutcome {
        let started = telemetry::start();
        let call = catch_store_panic(async { self.0.renew(lease, ttl).await });
        let reply = timeout(limit, call).await;
        telemetry::store_time("renew", started);
        match reply {
            Ok(Ok(())) => RenewOutcome::Renewed,
            Ok(Err(StoreError::LeaseLost)) => RenewOutcome::LeaseLost,
            Ok(Err(error)) => {
                telemetry::store_error("renew", &lease.id, Some(&error));
                RenewOutcome::Failed
            }
            Err(_elapsed) => {
                telemetry::store_error("renew", &lease.id, None);
                RenewOutcome::Failed
            }
        }
    }

    /// Stores the record and ends the lease.
    pub(crate) async fn complete(
        &self,
        lease: &LeaseRef,
        record: &Bytes,
        retention: Ttl,
        timeout: Duration,
    ) -> CompleteOutcome {
        let mut budget = RetryBudget::new(timeout);
        loop {
            let started = telemetry::start();
            let call = catch_store_panic(async {
                self.0.complete(lease, record.clone(), retention).await
            });
            let reply = budget.attempt(call).await;
            telemetry::store_time("complete", started);
            let error = match reply {
                Some(Ok(())) => return CompleteOutcome::Stored,
                Some(Err(StoreError::LeaseLost)) => return CompleteOutcome::LeaseLost,
                Some(Err(StoreError::RecordTooLarge { limit })) => {
                    return CompleteOutcome::TooLarge { limit };
                }
                Some(Err(error)) => CallError::Store(error),
                None => CallError::TimedOut,
            };
            telemetry::store_error("complete", &lease.id, error.store_error());
            if !budget.backoff().await {
                return CompleteOutcome::Failed;
            }
        }
    }

    /// Releases the key. If the lease took over an orphan, the key becomes an orphan again. Returns `false` if all
    /// attempts failed.
    pub(crate) async fn release(&self, lease: &LeaseRef, timeout: Duration) -> bool {
        let mut budget = RetryBudget::new(timeout);
        loop {
            let started = telemetry::start();
            let call = catch_store_panic(async { self.0.release(lease).await });
            let reply = budget.attempt(call).await;
            telemetry::store_time("release", started);
            let error = match reply {
                Some(Ok(()) | Err(StoreError::LeaseLost)) => return true,
                Some(Err(error)) => CallError::Store(error),
                None => CallError::TimedOut,
            };
            telemetry::store_error("release", &lease.id, error.store_error());
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
    ) {
        let mut backoff = Backoff::new();
        while backoff.wait_until(deadline).await {
            if self.release(lease, timeout).await {
                return;
            }
        }
    }

    /// Waits until the store reports a change of the entry, for about `limit`. The report is a hint and may be wrong.
    ///
    /// The store is not trusted: the caller limits the time and catches a panic.
    pub(crate) async fn wait_for_change(&self, id: &KeyId, limit: Duration) {
        self.0.wait_for_change(id, limit).await;
    }
}

impl CallError {
    /// Returns the error of the store, or `None` if the call timed out.
    pub(crate) fn store_error(&self) -> Option<&StoreError> {
        match self {
            Self::Store(error) => Some(error),
            Self::TimedOut => None,
        }
    }

    /// Returns the source for an error response.
    pub(crate) fn into_source(self) -> Box<dyn std::error::Error + Send + Sync> {
        match self {
            Self::Store(error) => error.into(),
            Self::TimedOut => "the store did not answer in time".into(),
        }
    }
}

/// Returns an error if the store panics, when it is called or when its future is polled. A panic of the store must not end the
/// execution: that would lose its lease or its record.
async fn catch_store_panic<T>(
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let caught = catch_panic(pin!(call)).await;
    caught.unwrap_or_else(|_panic| Err(StoreError::backend("the store panicked")))
}
