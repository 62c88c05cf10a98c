//! Limits on requests in flight and on buffered bytes, shared by all clones of a layer.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use tokio::sync::Notify;

use crate::telemetry;

/// Limits of one layer.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) max_in_flight: usize,
    pub(crate) max_buffered: usize,
}

/// Counters of the requests in flight and of the bytes that they buffer.
#[derive(Default)]
pub(crate) struct Limits {
    in_flight: AtomicUsize,
    buffered: AtomicUsize,
    /// The part of `buffered` that waits for clients to read it.
    unsent: AtomicUsize,
    background_releases: AtomicUsize,
    /// The part of `background_releases` whose first call has not been answered yet.
    unanswered_releases: AtomicUsize,
    draining: AtomicBool,
    idle: Notify,
}

/// Permit of one request in flight. It is held until the execution ends, also if that continues in a background task.
pub(crate) struct InFlightPermit {
    pub(crate) buffer: Buffer,
}

/// Permit of a background task that releases a lease after its request was rejected.
///
/// These tasks are counted separately from the requests in flight. Otherwise a store that hangs would use up all permits.
pub(crate) struct BackgroundReleasePermit {
    limits: Arc<Limits>,
    is_answered: bool,
}

/// Bytes that one request has buffered. Dropping it returns them to the budget.
pub(crate) struct Buffer {
    limits: Arc<Limits>,
    bytes: usize,
}

/// Bytes of a streamed response that stay buffered until the client reads them.
///
/// They are counted twice, as buffered and as unsent, because a slow client decides how long they stay. Dropping it
/// returns them to both budgets.
pub(crate) struct UnsentBytes {
    buffer: Buffer,
}

/// Reason why a request gets no permit or no more buffer.
pub(crate) enum AdmissionError {
    Draining,
    TooManyRequests,
    TooManyBytes,
}

impl Limits {
    /// Returns one of at most `max` permits.
    pub(crate) fn admit(self: &Arc<Self>, max: usize) -> Result<InFlightPermit, AdmissionError> {
        let admitted = add_within(&self.in_flight, 1, max);
        let permit = admitted.then(|| {
            telemetry::in_flight(1.0);
            InFlightPermit {
                buffer: self.buffer(),
            }
        });
        // The request is counted before the flag is read: either it sees the drain, or the drain waits for it.
        if self.draining.load(Ordering::SeqCst) {
            return Err(AdmissionError::Draining);
        }
        permit.ok_or(AdmissionError::TooManyRequests)
    }

    /// Returns an empty buffer.
    pub(crate) fn buffer(self: &Arc<Self>) -> Buffer {
        Buffer {
            limits: Arc::clone(self),
            bytes: 0,
        }
    }

    /// Rejects all requests from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Returns the number of requests and background releases that a drain waits for.
    pub(crate) fn in_flight(&self) -> usize {
        // The order matters: a permit is counted as a background release before it is no longer counted as in flight.
        let in_flight = self.in_flight.load(Ordering::SeqCst);
        in_flight + self.unanswered_releases.load(Ordering::SeqCst)
    }

    /// Waits until nothing is in flight.
    pub(crate) async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            let mut idle = std::pin::pin!(idle);
            idle.as_mut().enable();
            if self.in_flight() == 0 {
                return;
            }
            idle.await;
        }
    }
}

impl InFlightPermit {
    /// Returns a second permit for other background work of the same request, whatever the limit.
    pub(crate) fn additional(&self) -> Self {
        let limits = &self.buffer.limits;
        limits.in_flight.fetch_add(1, Ordering::SeqCst);
        telemetry::in_flight(1.0);
        Self {
            buffer: limits.buffer(),
        }
    }

    /// Exchanges the permit for one of at most `max` permits for background releases. Returns `self` if none is left.
    pub(crate) fn into_background_release(
        self,
        max: usize,
    ) -> Result<BackgroundReleasePermit, Self> {
        let limits = &self.buffer.limits;
        if !add_within(&limits.background_releases, 1, max) {
            return Err(self);
        }
        limits.unanswered_releases.fetch_add(1, Ordering::SeqCst);
        Ok(BackgroundReleasePermit {
            limits: Arc::clone(limits),
            is_answered: false,
        })
    }
}

impl BackgroundReleasePermit {
    /// Marks the first release as answered. A drain no longer waits for the task.
    pub(crate) fn set_answered(&mut self) {
        if !std::mem::replace(&mut self.is_answered, true)
            && self
                .limits
                .unanswered_releases
                .fetch_sub(1, Ordering::SeqCst)
                == 1
        {
            self.limits.idle.notify_waiters();
        }
    }
}

impl Drop for BackgroundReleasePermit {
    fn drop(&mut self) {
        self.set_answered();
        self.limits
            .background_releases
            .fetch_sub(1, Ordering::SeqCst);
    }
}

impl Buffer {
    /// Reserves `bytes` more if all buffers together then hold at most `max`. Returns `false` otherwise.
    pub(crate) fn reserve(&mut self, bytes: usize, max: usize) -> bool {
        let reserved = add_within(&self.limits.buffered, bytes, max);
        if reserved {
            self.bytes += bytes;
        }
        reserved
    }

    /// Returns empty unsent bytes of the same layer.
    pub(crate) fn unsent(&self) -> UnsentBytes {
        UnsentBytes {
            buffer: self.limits.buffer(),
        }
    }

    /// Sets the buffer to `bytes`. Adds missing bytes without a check of the limit.
    pub(crate) fn resize_unchecked(&mut self, bytes: usize) {
        let missing = bytes.saturating_sub(self.bytes);
        if missing > 0 {
            self.bytes += missing;
            self.limits.buffered.fetch_add(missing, Ordering::Relaxed);
        }
        self.shrink(bytes);
    }

    /// Returns all but `bytes` to the budget.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        let excess = self.bytes.saturating_sub(bytes);
        if excess > 0 {
            self.bytes -= excess;
            self.limits.buffered.fetch_sub(excess, Ordering::Relaxed);
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.resize_unchecked(0);
    }
}

impl UnsentBytes {
    /// Reserves `bytes` more. Returns `false` if they exceed the limit for unsent bytes.
    ///
    /// Unsent bytes may use half of `max`, so that slow clients leave room for uploads. They never use the last eighth,
    /// which is left for responses in one piece: without it, those could not be recorded.
    pub(crate) fn reserve(&mut self, bytes: usize, max: usize) -> bool {
        let unsent = &self.buffer.limits.unsent;
        if !add_within(unsent, bytes, max / 2) {
            return false;
        }
        let reserved = self.buffer.reserve(bytes, max - max / 8);
        if !reserved {
            self.buffer.limits.unsent.fetch_sub(bytes, Ordering::SeqCst);
        }
        reserved
    }

    /// Reserves `bytes` without a check of the limit, in place of unsent bytes that passed the check.
    pub(crate) fn reserve_unchecked(mut self, bytes: usize) -> Self {
        self.buffer.limits.unsent.fetch_add(bytes, Ordering::SeqCst);
        self.buffer.resize_unchecked(bytes);
        self
    }

    /// Returns all but `bytes` to the budgets.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        let excess = self.buffer.bytes.saturating_sub(bytes);
        self.buffer.shrink(bytes);
        if excess > 0 {
            self.buffer
                .limits
                .unsent
                .fetch_sub(excess, Ordering::SeqCst);
        }
    }
}

impl Drop for UnsentBytes {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

impl Drop for InFlightPermit {
    fn drop(&mut self) {
        let limits = &self.buffer.limits;
        telemetry::in_flight(-1.0);
        if limits.in_flight.fetch_sub(1, Ordering::SeqCst) == 1 {
            limits.idle.notify_waiters();
        }
    }
}

/// Adds `n` to the counter unless the sum exceeds `max`. Returns `true` if it was added.
fn add_within(counter: &AtomicUsize, n: usize, max: usize) -> bool {
    counter
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |used| {
            used.checked_add(n).filter(|sum| *sum <= max)
        })
        .is_ok()
}
