//! Limits on requests in flight and on the bytes that they hold, and the share of each caller in them.
//!
//! All clones of a layer share its limits. A caller that holds little of a resource can use all of it. A caller that holds
//! more must leave the last quarter to other callers. So one caller cannot use up a resource at the cost of other callers,
//! and a single caller can use most of it.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use hashbrown::HashMap;
use tokio::sync::Notify;

#[cfg(feature = "rate")]
use crate::{digest::SERVICE_SCOPE, rate::FreshKeyRate};
use crate::{layer_name::LayerName, store::ScopeDigest, telemetry};
#[cfg(feature = "rate")]
use std::time::Duration;

mod buffer;

pub(crate) use self::buffer::{Buffer, UNCOUNTED, is_uncounted};

/// Limits of one layer.
#[derive(Clone)]
pub(crate) struct Rules {
    pub(crate) max_in_flight: usize,
    pub(crate) max_request_bytes: usize,
    pub(crate) max_response_bytes: usize,
    #[cfg(feature = "rate")]
    pub(crate) fresh_keys: Option<Arc<FreshKeyRate>>,
}

impl Rules {
    /// Counts a fresh key of this caller.
    pub(crate) fn check_fresh_key(&self, caller: &Caller) -> Result<(), AdmissionError> {
        #[cfg(feature = "rate")]
        if let Some(rate) = &self.fresh_keys
            && caller.scope != SERVICE_SCOPE
        {
            return rate
                .check(caller.scope)
                .map_err(AdmissionError::FreshKeyRate);
        }
        let _ = caller;
        Ok(())
    }
}

/// A resource that requests use up. Each has a limit of its own.
#[derive(Clone, Copy)]
enum Resource {
    /// Requests that are not executing: their body is read, they acquire a lease, or they wait for another request.
    Arriving,
    /// Executions, including those in the background.
    Executing,
    /// Requests that wait for the response of another one. They are arriving, too.
    Waiting,
    RequestBytes,
    ResponseBytes,
}

const RESOURCES: usize = 5;

/// Counters of the resources that the requests of a layer hold, in total and for each caller.
#[derive(Default)]
pub(crate) struct Limits {
    totals: Arc<Totals>,
    callers: [Mutex<Callers>; SHARDS],
}

/// The callers of one shard. Callers without requests are removed from time to time. Most callers send further requests, so
/// they are not removed with their last request.
#[derive(Default)]
struct Callers {
    by_scope: HashMap<ScopeDigest, Arc<Caller>>,
    /// The number of callers at which those without requests are removed.
    full_at: usize,
}

/// Counters of the resources that all requests of a layer hold.
#[derive(Default)]
struct Totals {
    used: [AtomicUsize; RESOURCES],
    background_releases: AtomicUsize,
    /// The part of `background_releases` whose first call has no reply yet.
    unacknowledged_releases: AtomicUsize,
    draining: AtomicBool,
    idle: Notify,
}

/// Counters of the resources that the requests of one caller hold.
pub(crate) struct Caller {
    totals: Arc<Totals>,
    #[cfg(feature = "rate")]
    scope: ScopeDigest,
    held: [AtomicUsize; RESOURCES],
    /// Requests whose client has disconnected.
    detached: AtomicUsize,
}

/// Permit of one request in flight. It is held until the execution ends, even if the execution continues in a background
/// task.
pub(crate) struct InFlightPermit {
    caller: Arc<Caller>,
    /// The name of the layer that counts the request.
    layer: LayerName,
    /// [`Resource::Arriving`], or [`Resource::Executing`] from the execution on.
    stage: Resource,
}

/// Permit of a background task that releases a lease after its request was rejected.
///
/// These tasks are counted separately from the requests in flight. Otherwise a store that hangs would use up all permits.
pub(crate) struct BackgroundReleasePermit {
    totals: Arc<Totals>,
    is_acknowledged: bool,
}

/// Counts a request among the detached ones of its caller until it is dropped.
pub(crate) struct DetachedRequest(Arc<Caller>);

/// Permit of a waiting request.
pub(crate) struct WaiterPermit(Arc<Caller>);

/// Reason why a request gets no permit or no more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdmissionError {
    Draining,
    /// All callers together use up the limit of requests.
    RequestLimit,
    /// All callers together use up the limit of bytes.
    ByteLimit,
    /// The bytes of one response exceed the part of the limit that a caller can use, also if nothing else is in use.
    ResponseTooLarge {
        bytes: usize,
        limit: usize,
    },
    /// The caller holds more than its share of a limit that is almost used up.
    CallerLimit,
    /// The leases and orphans of the caller use up its share of the store.
    CallerStoreLimit,
    /// The caller sends fresh keys faster than its rate, and can send the next one after this time.
    #[cfg(feature = "rate")]
    FreshKeyRate(Duration),
}

impl Limits {
    /// Returns the counters of the caller that has this scope.
    pub(crate) fn caller(&self, scope: ScopeDigest) -> Arc<Caller> {
        let shard = usize::from(scope.as_bytes()[0]) % SHARDS;
        let mut callers = self.callers[shard]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(caller) = callers.by_scope.get(&scope) {
            return Arc::clone(caller);
        }
        if callers.by_scope.len() >= callers.full_at {
            callers.remove_idle();
        }
        let caller = Arc::new(Caller {
            totals: Arc::clone(&self.totals),
            #[cfg(feature = "rate")]
            scope,
            held: Default::default(),
            detached: AtomicUsize::new(0),
        });
        callers.by_scope.insert(scope, Arc::clone(&caller));
        caller
    }

    /// Rejects all requests from now on.
    pub(crate) fn drain(&self) {
        self.totals.draining.store(true, Ordering::SeqCst);
    }

    /// Returns the number of requests and background releases that a drain waits for.
    pub(crate) fn in_flight(&self) -> usize {
        self.totals.in_flight()
    }

    /// Waits until nothing is in flight.
    pub(crate) async fn wait_until_idle(&self) {
        loop {
            let idle = self.totals.idle.notified();
            let mut idle = std::pin::pin!(idle);
            idle.as_mut().enable();
            if self.in_flight() == 0 {
                return;
            }
            idle.await;
        }
    }
}

impl Callers {
    /// Removes the callers without requests. The next removal is due when the number of callers has doubled.
    fn remove_idle(&mut self) {
        // Permits, buffers and leases hold the `Arc`. A count of 1 means that the caller has none.
        self.by_scope
            .retain(|_, caller| Arc::strong_count(caller) > 1);
        self.full_at = (self.by_scope.len() * 2).max(FULL_AT_LEAST);
    }
}

impl Totals {
    fn in_flight(&self) -> usize {
        // The order matters: a request that goes on to its execution, or to a background release, is counted there first.
        self.used(Resource::Arriving).load(Ordering::SeqCst)
            + self.used(Resource::Executing).load(Ordering::SeqCst)
            + self.unacknowledged_releases.load(Ordering::SeqCst)
    }

    fn used(&self, resource: Resource) -> &AtomicUsize {
        &self.used[resource as usize]
    }

    /// Wakes a drain if nothing is in flight. Called after every request that ends.
    fn notify_if_idle(&self) {
        if self.draining.load(Ordering::SeqCst) && self.in_flight() == 0 {
            self.idle.notify_waiters();
        }
    }
}

impl Caller {
    /// Returns a permit for one request, of at most `max` in the layer.
    pub(crate) fn admit(
        self: Arc<Self>,
        max: usize,
        layer: &LayerName,
    ) -> Result<InFlightPermit, AdmissionError> {
        let taken = self.take(Resource::Arriving, 1, max);
        // Counted before the flag is read: either the request sees the drain, or the drain waits for the request.
        let is_draining = self.totals.draining.load(Ordering::SeqCst);
        let permit = taken.map(|()| InFlightPermit::new(self, layer, Resource::Arriving));
        if is_draining {
            return Err(AdmissionError::Draining);
        }
        permit
    }

    /// Returns an empty buffer for request bodies, which hold at most `max` bytes in the layer.
    pub(crate) fn request_bytes(self: &Arc<Self>, max: usize) -> Buffer {
        self.buffer(Resource::RequestBytes, max)
    }

    /// Returns an empty buffer for response bodies, which hold at most `max` bytes in the layer.
    pub(crate) fn response_bytes(self: &Arc<Self>, max: usize) -> Buffer {
        self.buffer(Resource::ResponseBytes, max)
    }

    fn buffer(self: &Arc<Self>, resource: Resource, max: usize) -> Buffer {
        Buffer::new(Arc::clone(self), resource, max)
    }

    /// Returns a permit for one waiting request, of at most `max` in the layer.
    pub(crate) fn admit_waiter(self: &Arc<Self>, max: usize) -> Option<WaiterPermit> {
        let taken = self.take(Resource::Waiting, 1, max);
        taken.ok().map(|()| WaiterPermit(Arc::clone(self)))
    }

    /// Counts a request whose client has disconnected.
    pub(crate) fn detach(self: &Arc<Self>) -> DetachedRequest {
        self.detached.fetch_add(1, Ordering::SeqCst);
        DetachedRequest(Arc::clone(self))
    }

    /// Takes `n` of the resource if its limit and the share of this caller allow it.
    ///
    /// A caller that then holds at most an eighth can use all of the resource. Any other caller leaves the last quarter to
    /// such callers. Both bounds are rounded so that a limit of 1 still admits one request.
    fn take(&self, resource: Resource, n: usize, max: usize) -> Result<(), AdmissionError> {
        let held = &self.held[resource as usize];
        let small = held.fetch_add(n, Ordering::SeqCst).saturating_add(n) <= (max / 8).max(1);
        let open = if small { max } else { max - max / 4 };
        if add_within(self.totals.used(resource), n, open) {
            return Ok(());
        }
        held.fetch_sub(n, Ordering::SeqCst);
        Err(match resource {
            _ if !small && n <= open => AdmissionError::CallerLimit,
            Resource::ResponseBytes if !small => AdmissionError::ResponseTooLarge {
                bytes: n,
                limit: open,
            },
            Resource::RequestBytes | Resource::ResponseBytes => AdmissionError::ByteLimit,
            Resource::Arriving | Resource::Executing | Resource::Waiting => {
                AdmissionError::RequestLimit
            }
        })
    }

    /// Takes `n` of the resource without a check of the limit.
    fn take_unchecked(&self, resource: Resource, n: usize) {
        self.held[resource as usize].fetch_add(n, Ordering::SeqCst);
        self.totals.used(resource).fetch_add(n, Ordering::SeqCst);
    }

    fn release(&self, resource: Resource, n: usize) {
        self.totals.used(resource).fetch_sub(n, Ordering::SeqCst);
        self.held[resource as usize].fetch_sub(n, Ordering::SeqCst);
    }
}

impl InFlightPermit {
    /// Creates the permit of a request that is counted at this stage.
    fn new(caller: Arc<Caller>, layer: &LayerName, stage: Resource) -> Self {
        let permit = Self {
            caller,
            layer: layer.clone(),
            stage,
        };
        telemetry::in_flight(layer, 1.0);
        permit
    }

    pub(crate) fn caller(&self) -> &Arc<Caller> {
        &self.caller
    }

    /// Counts the request as an execution, of at most `max` in the layer.
    ///
    /// If disconnected clients of this caller use more than half of `max`, the caller gets no new execution.
    pub(crate) fn begin_execution(&mut self, max: usize) -> Result<(), AdmissionError> {
        // The item of a batch counts as an execution from the start.
        if matches!(self.stage, Resource::Executing) {
            return Ok(());
        }
        let caller = &self.caller;
        if caller.detached.load(Ordering::SeqCst) > max - max / 2 {
            return Err(AdmissionError::CallerLimit);
        }
        caller.take(Resource::Executing, 1, max)?;
        caller.release(self.stage, 1);
        self.stage = Resource::Executing;
        Ok(())
    }

    /// Counts the request as an execution regardless of the limits, for a retry that an operator has allowed. A rejection would
    /// use up the permission without an execution.
    pub(crate) fn begin_allowed_retry(&mut self) {
        if matches!(self.stage, Resource::Executing) {
            return;
        }
        self.caller.take_unchecked(Resource::Executing, 1);
        self.caller.release(self.stage, 1);
        self.stage = Resource::Executing;
    }

    /// Returns a second permit for other background work of the same request, regardless of the limit.
    pub(crate) fn additional(&self) -> Self {
        self.caller.take_unchecked(self.stage, 1);
        Self::new(Arc::clone(&self.caller), &self.layer, self.stage)
    }

    /// Exchanges the permit for one of at most `max` permits for background releases. Returns `self` if none is left.
    pub(crate) fn into_background_release(
        self,
        max: usize,
    ) -> Result<BackgroundReleasePermit, Self> {
        let totals = &self.caller.totals;
        if !add_within(&totals.background_releases, 1, max) {
            return Err(self);
        }
        totals
            .unacknowledged_releases
            .fetch_add(1, Ordering::SeqCst);
        Ok(BackgroundReleasePermit {
            totals: Arc::clone(totals),
            is_acknowledged: false,
        })
    }
}

impl Drop for InFlightPermit {
    fn drop(&mut self) {
        // A drain that ends with this request must find the gauge at 0.
        telemetry::in_flight(&self.layer, -1.0);
        self.caller.release(self.stage, 1);
        self.caller.totals.notify_if_idle();
    }
}

impl BackgroundReleasePermit {
    /// Marks the first release as acknowledged or failed. A drain no longer waits for the task.
    pub(crate) fn set_acknowledged(&mut self) {
        if !std::mem::replace(&mut self.is_acknowledged, true) {
            let totals = &self.totals;
            totals
                .unacknowledged_releases
                .fetch_sub(1, Ordering::SeqCst);
            totals.notify_if_idle();
        }
    }
}

impl Drop for BackgroundReleasePermit {
    fn drop(&mut self) {
        self.set_acknowledged();
        self.totals
            .background_releases
            .fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for DetachedRequest {
    fn drop(&mut self) {
        self.0.detached.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for WaiterPermit {
    fn drop(&mut self) {
        self.0.release(Resource::Waiting, 1);
    }
}

/// Adds `n` to the counter unless the sum exceeds `max`. Returns `true` if it was added.
pub(crate) fn add_within(counter: &AtomicUsize, n: usize, max: usize) -> bool {
    counter
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |used| {
            used.checked_add(n).filter(|sum| *sum <= max)
        })
        .is_ok()
}

/// Minimum number of callers in a shard before those without requests are removed.
const FULL_AT_LEAST: usize = 64;

const SHARDS: usize = 16;

#[cfg(test)]
mod tests;
