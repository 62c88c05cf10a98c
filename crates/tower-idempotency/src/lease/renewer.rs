//! Renewal of all leases of a layer by one task.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    sync::Notify,
    task::JoinHandle,
    time::{Instant, sleep_until},
};

use crate::{
    lease::state::{Grant, LeaseGuard, LeaseState},
    store_client::{RenewOutcome, StoreClient},
    telemetry::{UncountedEvents, Warnings, report_rest},
};

/// Renews every lease of a layer from a single task, which starts with the first lease.
///
/// A lease is renewed after a third of its duration. A shorter request costs one insertion and one removal, and no renewal.
/// The task wakes at least every third of the shortest lease, even without leases, so that a new lease need not wake it. A
/// task that a worker thread wakes waits for that thread, and the handler may block it.
///
/// When the task wakes, it also reports the events about leases that no later event would count.
pub(crate) struct Renewer {
    store: StoreClient,
    queue: Mutex<Queue>,
    wake: Arc<Notify>,
}

/// Leases in the order of their next renewal.
pub(super) struct Queue {
    leases: BTreeMap<(Instant, u64), Arc<LeaseState>>,
    // Those of the layer and of its clones with another name, from their first lease on.
    warnings: Vec<Arc<Warnings>>,
    sequence: u64,
    task: Option<JoinHandle<()>>,
    // Instant at which the task wakes without a notification.
    wakes_at: Instant,
    // A third of the shortest lease so far.
    max_sleep: Duration,
}

impl Queue {
    pub(super) fn remove(&mut self, key: (Instant, u64)) {
        self.leases.remove(&key);
    }

    /// Adds the warnings of a lease to those whose rest the task reports.
    fn watch(&mut self, warnings: &Arc<Warnings>) {
        let mut known = self.warnings.iter();
        if !known.any(|known| Arc::ptr_eq(known, warnings)) {
            self.warnings.push(Arc::clone(warnings));
        }
    }
}

impl Renewer {
    pub(crate) fn new(store: StoreClient) -> Arc<Self> {
        Arc::new(Self {
            store,
            queue: Mutex::new(Queue {
                leases: BTreeMap::new(),
                warnings: Vec::new(),
                sequence: 0,
                task: None,
                wakes_at: Instant::now(),
                max_sleep: Duration::MAX,
            }),
            wake: Arc::default(),
        })
    }

    pub(super) fn store(&self) -> &StoreClient {
        &self.store
    }

    pub(super) fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a lease. Also returns `true` if the task was started or woken. The caller then yields, so that the task can
    /// run on this worker thread before the handler does.
    pub(crate) fn register(self: &Arc<Self>, grant: Grant) -> (LeaseGuard, bool) {
        let third = grant.claim.lease.as_duration() / 3;
        let mut queue = self.queue();
        queue.watch(grant.config.warnings());
        queue.sequence += 1;
        let lease = Arc::new(LeaseState::new(grant, third, queue.sequence));
        let key = lease.queue_key();
        queue.max_sleep = queue.max_sleep.min(third.max(MIN_SLEEP));
        // The task ends with its runtime. The next lease starts another task.
        let start = queue.task.as_ref().is_none_or(JoinHandle::is_finished);
        let wake = !start && key.0 < queue.wakes_at;
        if start {
            let task = run(Arc::downgrade(self), Arc::clone(&self.wake));
            queue.task = Some(tokio::spawn(task));
        }
        // The spawn panics outside a runtime. A lease in the queue would then be renewed without an execution. The new task does
        // not miss the lease, because it waits for the lock of the queue.
        queue.leases.insert(key, Arc::clone(&lease));
        if wake {
            self.wake.notify_one();
        }
        if start || wake {
            queue.wakes_at = key.0;
        }
        (LeaseGuard::new(lease), start || wake)
    }

    /// Removes the leases that are due. Also returns the instant at which the task wakes next.
    fn take_due(&self, now: Instant) -> (Vec<Arc<LeaseState>>, Instant) {
        let mut queue = self.queue();
        let mut due = Vec::new();
        while let Some(entry) = queue.leases.first_entry() {
            if entry.key().0 > now {
                break;
            }
            due.push(entry.remove());
        }
        let latest = now + queue.max_sleep;
        let next = queue.leases.first_key_value();
        queue.wakes_at = next.map_or(latest, |((at, _), _)| latest.min(*at));
        (due, queue.wakes_at)
    }

    /// Returns the events about leases that no later event would count. Removes the warnings of layers that no longer exist.
    fn take_rest(&self) -> Vec<UncountedEvents> {
        let mut rest = Vec::new();
        self.queue().warnings.retain(|warnings| {
            rest.extend(warnings.take_rest());
            // The layer, its clones and its leases hold the other references.
            Arc::strong_count(warnings) > 1 || warnings.has_rest()
        });
        rest
    }

    /// Logs the number of the events about leases that no line has counted. A drain calls this, because the process
    /// may end then.
    pub(crate) fn report_rest_now(&self) {
        let mut rest = Vec::new();
        for warnings in &self.queue().warnings {
            rest.extend(warnings.take_rest_now());
        }
        report_rest(&rest);
    }

    /// Inserts a lease again, to be renewed at `at`, unless it has finished.
    fn requeue(&self, lease: Arc<LeaseState>, at: Instant) {
        let mut queue = self.queue();
        if lease.is_finished() {
            return;
        }
        lease.set_next_renewal(at);
        queue.leases.insert(lease.queue_key(), lease);
        if at < queue.wakes_at {
            queue.wakes_at = at;
            self.wake.notify_one();
        }
    }

    /// Renews the lease. Returns the instant of its next renewal, or `None` if there is none.
    async fn renew(&self, lease: &LeaseState) -> Option<Instant> {
        let ttl = lease.claim().lease.as_duration();
        let sent = Instant::now();
        if sent > lease.queue_key().0 + ttl / 3 {
            lease.warnings().renew_late(lease.id());
        }
        lease.report_overdue(sent);
        // At most a third of the lease, so that a call that hangs leaves time for another one.
        let limit = lease.store_timeout().min(ttl / 3);
        let (reference, lease_ttl) = (&lease.reference, lease.claim().lease);
        let renewed = self
            .store
            .renew(reference, lease_ttl, limit, lease.warnings());
        match renewed.await {
            RenewOutcome::Renewed => {
                lease.extend_from(sent);
                Some(sent + ttl / 3)
            }
            // The outcome was sent during the renewal, and may have ended the lease.
            RenewOutcome::LeaseLost if lease.is_finishing() => {
                lease.set_renewal_refused();
                None
            }
            // A commit of the handler may have ended the lease, even if its reply was lost.
            RenewOutcome::LeaseLost if lease.has_unacknowledged_commit() => {
                lease.mark_not_held();
                None
            }
            RenewOutcome::LeaseLost => {
                lease.mark_lost();
                None
            }
            RenewOutcome::Failed => Some(Instant::now() + ttl / 12),
        }
    }
}

/// A lease that is being renewed, and therefore not in the queue.
///
/// A runtime that shuts down drops its renewals. The handler may run in another runtime, so the lease is then put back.
struct PendingRenewal {
    renewer: Arc<Renewer>,
    lease: Option<Arc<LeaseState>>,
}

impl PendingRenewal {
    async fn renew(mut self) {
        let Some(lease) = self.lease.clone() else {
            return;
        };
        let next = self.renewer.renew(&lease).await;
        self.lease = None;
        if let Some(next) = next {
            self.renewer.requeue(lease, next);
        }
    }
}

impl Drop for PendingRenewal {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            // The same delay as after a failed renewal.
            let delay = lease.claim().lease.as_duration() / 12;
            self.renewer.requeue(lease, Instant::now() + delay);
        }
    }
}

impl Drop for Renewer {
    fn drop(&mut self) {
        if let Some(task) = self.queue().task.take() {
            task.abort();
        }
    }
}

/// Renews leases when they are due. Runs in its own task, so that a handler that blocks its thread cannot delay its own
/// renewals.
///
/// The task holds no reference to the renewer while it sleeps. Dropping the last other reference ends the task.
async fn run(renewer: Weak<Renewer>, wake: Arc<Notify>) {
    while let Some(renewer) = renewer.upgrade() {
        let (due, next) = renewer.take_due(Instant::now());
        for lease in due {
            // One task for each renewal: a slow one must not delay the others. Each lease has at most one in flight.
            let renewal = PendingRenewal {
                renewer: Arc::clone(&renewer),
                lease: Some(lease),
            };
            tokio::spawn(renewal.renew());
        }
        let rest = renewer.take_rest();
        if !rest.is_empty() {
            // In a task of its own: a subscriber is foreign code, and may block its thread.
            tokio::spawn(async move { report_rest(&rest) });
        }
        drop(renewer);
        tokio::select! {
            // Polled in order, not at random. Either branch leads to the same step.
            biased;
            () = wake.notified() => {}
            () = sleep_until(next) => {}
        }
    }
}

/// Minimum time between two checks of the queue, unless a lease is due. Leases of a few milliseconds exist in tests only.
const MIN_SLEEP: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{KeyId, MemoryStore};

    #[tokio::test(start_paused = true)]
    async fn warnings_of_dropped_layers_are_removed() {
        let renewer = Renewer::new(StoreClient::new(MemoryStore::new()));
        let known = || renewer.queue().warnings.len();
        let (without, with_rest) = (Arc::<Warnings>::default(), Arc::<Warnings>::default());
        let id = KeyId::from_bytes([1; 32]);
        for _ in 0..2 {
            // Only the first event has a line at once.
            with_rest.key_held(&id);
        }
        for warnings in [&without, &with_rest, &without] {
            renewer.queue().watch(warnings);
        }
        assert!(renewer.take_rest().is_empty());
        assert_eq!(known(), 2, "the layers exist");
        drop((without, with_rest));
        assert!(renewer.take_rest().is_empty());
        assert_eq!(known(), 1, "an event is reported later");
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(renewer.take_rest().len(), 1);
        assert_eq!(known(), 0);
    }
}
