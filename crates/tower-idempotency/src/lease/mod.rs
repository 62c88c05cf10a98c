//! The lease that handlers see, and the one task per layer that keeps leases alive.

pub(crate) mod commits;

use std::{
    collections::BTreeMap,
    fmt,
    future::Future,
    ops::Deref,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::Notify,
    task::{JoinHandle, yield_now},
    time::{Instant, sleep_until, timeout},
};

use crate::{
    config::Config,
    execution::shared::{Engine, unless_it_panics},
    lease::commits::{Commit, Committed},
    request::fingerprint::derived_key,
    store::{Claim, KeyId, LeaseRef, StoreError, erased::ErasedStore},
    telemetry,
};

/// The right to execute, as a handler sees it: a request extension, and an extractor with the feature `axum`.
///
/// Clones are handles on the same lease. Dropping them ends nothing: a lease ends with the request's outcome or by its
/// expiry.
#[derive(Clone)]
pub struct Lease(pub(crate) Arc<Held>);

impl Lease {
    /// 1 for the first execution under this key, higher after each takeover.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.reference.generation
    }

    /// Whether an earlier execution lost its lease without an outcome: its effect may or may not have happened, so look
    /// before you repeat it.
    #[must_use]
    pub fn is_takeover(&self) -> bool {
        self.0.grant.takeover
    }

    /// Whether nobody else can be executing this request at this moment, as far as this process can know.
    ///
    /// Ask before an effect that cannot be undone; it narrows the window, it does not close it. False once the lease
    /// was lost, could not be renewed in time, or has ended with the outcome.
    ///
    /// Time is that of [`Instant`](std::time::Instant), which stands still on Linux while the machine is suspended, as a laptop
    /// or a virtual machine may be. After that this is true for as long as the lease had left, or until a renewal finds it lost,
    /// though its end has passed at the store.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.is_held()
    }

    /// Resolves when the lease is no longer held: lost, not renewed in time, or ended with the outcome.
    ///
    /// # Cancellation
    ///
    /// Safe to drop at any time.
    pub async fn lost(&self) {
        let held = &*self.0;
        loop {
            let changed = held.changed.notified();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            if !held.is_held() {
                return;
            }
            tokio::select! {
                biased;
                () = changed => {}
                () = sleep_until(held.deadline()) => {}
            }
        }
    }

    /// A key for a call to somebody else, the same on every execution of this request and different for every `name`:
    /// 64 hexadecimal digits.
    ///
    /// Give it to a provider that honours idempotency keys, and a takeover does not charge twice. It changes with the
    /// layer's namespace and secret, and with the principal: a deployment that changes one of them forgets the records
    /// and the derived keys alike. It depends on what the store knows of the entry, and on nothing else of the request.
    #[must_use]
    pub fn derive(&self, name: &str) -> String {
        derived_key(&self.0.reference.id, &self.0.reference.fingerprint, name)
    }

    /// The lease as the store knows it, for work that is fenced at the store itself.
    #[must_use]
    pub fn lease_ref(&self) -> LeaseRef {
        self.0.reference
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("id", &self.0.reference.id)
            .field("generation", &self.generation())
            .field("takeover", &self.is_takeover())
            .field("held", &self.is_held())
            .finish()
    }
}

/// A lease as it was granted, and whose layer it was granted to.
pub(crate) struct Grant {
    pub(crate) config: Arc<Config>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) claim: Claim,
    pub(crate) generation: u64,
    pub(crate) takeover: bool,
    /// Says whether a request body that the handler reads itself broke off.
    pub(crate) broke: Option<Arc<AtomicBool>>,
    /// When the call was sent that took it.
    pub(crate) sent: Instant,
}

/// What the exchange, the renewer and the handler share about one lease.
pub(crate) struct Held {
    pub(crate) grant: Grant,
    pub(crate) reference: LeaseRef,
    pub(crate) commit: Commit,
    // Times are nanoseconds since the grant was sent. The deadline counts from before the call that took or renewed the
    // lease was sent, so it is never later than the store's.
    deadline: AtomicU64,
    // When the renewer looks at it next, with `sequence` the place in its order; written under the renewer's lock.
    due: AtomicU64,
    sequence: u64,
    lost: AtomicBool,
    reported: AtomicBool,
    // The outcome is on its way to the store: a renewal may find the lease gone before we hear that it is.
    ending: AtomicBool,
    // It has its outcome; set under the renewer's lock, so that nothing renews it afterwards.
    ended: AtomicBool,
    changed: Notify,
}

impl Held {
    pub(crate) fn id(&self) -> &KeyId {
        &self.reference.id
    }

    /// Whether the handler found the request broken off.
    pub(crate) fn found_half(&self) -> bool {
        let broke = self.grant.broke.as_ref();
        broke.is_some_and(|broke| broke.load(Ordering::Acquire))
    }

    /// Before the outcome is sent to the store, which then says whether the lease was lost; and when it was not.
    pub(crate) fn about_to_end(&self, ending: bool) {
        self.ending.store(ending, Ordering::Release);
    }

    /// It has its outcome: nothing renews it any more.
    pub(crate) fn end(&self) {
        let mut state = self.grant.engine.renewer.state();
        self.ended.store(true, Ordering::Release);
        state.order.remove(&self.place());
        drop(state);
        // Registering with a `Notify` nobody waits on is an atomic load.
        self.changed.notify_waiters();
    }

    /// Whether the store said that it is no longer ours.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    fn is_held(&self) -> bool {
        !self.is_lost() && !self.ended.load(Ordering::Acquire) && Instant::now() < self.deadline()
    }

    /// When it is over unless it is renewed, by this process's clock.
    fn deadline(&self) -> Instant {
        self.grant.sent + Duration::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// Until when it is tried to end it with its outcome: for as long as a lease from now, however little is left of this one.
    /// A store that fails for longer than the lease still has it when it is back, unless somebody took over, and knows us by
    /// our token.
    pub(crate) fn last_try(&self) -> Instant {
        Instant::now() + self.grant.claim.lease.as_duration()
    }

    fn held_from(&self, sent: Instant) {
        let until = sent + self.grant.claim.lease.as_duration();
        self.deadline
            .store(nanos(until - self.grant.sent), Ordering::Release);
    }

    fn place(&self) -> (Instant, u64) {
        (
            self.grant.sent + Duration::from_nanos(self.due.load(Ordering::Relaxed)),
            self.sequence,
        )
    }

    /// The store says that somebody else has it. A renewal and the completion may both find out: it is reported once.
    pub(crate) fn lose(&self) {
        self.lose_or_end();
        if !self.reported.swap(true, Ordering::AcqRel) {
            telemetry::lease_lost(self.id());
        }
    }

    /// The store says that nobody has it any more, or somebody else: a commit of the handler's may have ended it, and
    /// nothing need have gone wrong.
    pub(crate) fn lose_or_end(&self) {
        self.lost.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }
}

/// A lease that is kept for as long as this lives. Dropping it stops the renewals and nothing else: the lease ends by
/// its outcome, or expires.
pub(crate) struct Kept(Arc<Held>);

impl Kept {
    pub(crate) fn handle(&self) -> Lease {
        Lease(Arc::clone(&self.0))
    }

    /// Whether its handler may have committed what we have not heard of.
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.0.commit.has_begun()
    }

    /// What its handler committed; it commits nothing from here on.
    pub(crate) fn close(&self) -> Committed {
        self.0.commit.close()
    }
}

impl Deref for Kept {
    type Target = Held;

    fn deref(&self) -> &Held {
        &self.0
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.end();
    }
}

/// Renews every lease of a layer from a single task, which starts with the first lease.
///
/// Leases fall due a third of their length after they were taken or renewed, so a request shorter than that costs an
/// insertion and a removal here and no renewal. The task looks at least that often whether there are leases or not, so
/// that a new one need not wake it: a task woken from a worker waits for that worker, and the handler may block it.
pub(crate) struct Renewer {
    store: Arc<dyn ErasedStore>,
    state: Mutex<State>,
    wake: Arc<Notify>,
}

struct State {
    order: BTreeMap<(Instant, u64), Arc<Held>>,
    sequence: u64,
    task: Option<JoinHandle<()>>,
    // When the task wakes by itself.
    wakes_at: Instant,
    // A third of the shortest lease there was.
    look_every: Duration,
}

impl Renewer {
    pub(crate) fn new(store: Arc<dyn ErasedStore>) -> Arc<Self> {
        Arc::new(Self {
            store,
            state: Mutex::new(State {
                order: BTreeMap::new(),
                sequence: 0,
                task: None,
                wakes_at: Instant::now(),
                look_every: Duration::MAX,
            }),
            wake: Arc::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a lease from the call on, and hands it over when the task knows of it.
    pub(crate) fn keep(self: &Arc<Self>, grant: Grant) -> impl Future<Output = Kept> + use<> {
        let (kept, woken) = self.insert(grant);
        async move {
            if woken {
                // The task runs on this worker now; later, the handler may block it.
                yield_now().await;
            }
            kept
        }
    }

    /// Also says whether the task was started or woken.
    fn insert(self: &Arc<Self>, grant: Grant) -> (Kept, bool) {
        let ttl = grant.claim.lease.as_duration();
        let third = ttl / 3;
        let mut state = self.state();
        state.sequence += 1;
        let held = Arc::new(Held {
            reference: grant.claim.lease_ref(grant.generation),
            grant,
            commit: Commit::default(),
            deadline: AtomicU64::new(nanos(ttl)),
            due: AtomicU64::new(nanos(third)),
            sequence: state.sequence,
            lost: AtomicBool::new(false),
            reported: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            changed: Notify::new(),
        });
        let due = held.place();
        state.order.insert(due, Arc::clone(&held));
        state.look_every = state.look_every.min(third.max(MIN_LOOK));
        // A task whose runtime is gone has finished; the next lease starts another.
        let start = state.task.as_ref().is_none_or(JoinHandle::is_finished);
        let wake = !start && due.0 < state.wakes_at;
        if start {
            let task = run(Arc::downgrade(self), Arc::clone(&self.wake));
            state.task = Some(tokio::spawn(task));
        }
        if wake {
            self.wake.notify_one();
        }
        if start || wake {
            state.wakes_at = due.0;
        }
        (Kept(held), start || wake)
    }

    /// Takes out what is due, and says when to look again.
    fn take_due(&self, now: Instant) -> (Vec<Arc<Held>>, Instant) {
        let mut state = self.state();
        let mut due = Vec::new();
        while let Some(entry) = state.order.first_entry() {
            if entry.key().0 > now {
                break;
            }
            due.push(entry.remove());
        }
        let look = now + state.look_every;
        let next = state.order.first_key_value();
        state.wakes_at = next.map_or(look, |((at, _), _)| look.min(*at));
        (due, state.wakes_at)
    }

    fn put_back(&self, held: Arc<Held>, due: Instant) {
        let mut state = self.state();
        if held.ended.load(Ordering::Acquire) {
            return;
        }
        let after = nanos(due - held.grant.sent);
        held.due.store(after, Ordering::Relaxed);
        state.order.insert(held.place(), held);
        if due < state.wakes_at {
            state.wakes_at = due;
            self.wake.notify_one();
        }
    }

    async fn renew(&self, held: &Arc<Held>) -> Option<Instant> {
        let lease = held.grant.claim.lease;
        let ttl = lease.as_duration();
        let sent = Instant::now();
        if sent > held.place().0 + ttl / 3 {
            telemetry::renew_late(held.id());
        }
        let started = telemetry::start();
        // No longer than a third of the lease either: a call that hangs must leave time for another.
        let limit = held.grant.config.execution.store_timeout.min(ttl / 3);
        let call = unless_it_panics(async { self.store.renew(&held.reference, lease).await });
        let renewed = timeout(limit, call).await;
        telemetry::store_time("renew", started);
        match renewed {
            Ok(Ok(())) => {
                held.held_from(sent);
                Some(sent + ttl / 3)
            }
            // An outcome that came while the renewal was under way ends the lease too.
            Ok(Err(StoreError::LeaseLost))
                if held.ending.load(Ordering::Acquire) || held.ended.load(Ordering::Acquire) =>
            {
                None
            }
            // So does a commit of the handler's, of which it may not have heard.
            Ok(Err(StoreError::LeaseLost)) if held.commit.has_begun() => {
                held.lose_or_end();
                None
            }
            Ok(Err(StoreError::LeaseLost)) => {
                held.lose();
                None
            }
            Ok(Err(error)) => {
                telemetry::store_error("renew", held.id(), Some(&error));
                Some(Instant::now() + ttl / 12)
            }
            Err(_elapsed) => {
                telemetry::store_error("renew", held.id(), None);
                Some(Instant::now() + ttl / 12)
            }
        }
    }
}

/// A lease that is not in the order while it is renewed. A runtime that ends drops its renewals, begun or not, and what they
/// were for may run in another.
struct TakenOut {
    renewer: Arc<Renewer>,
    held: Option<Arc<Held>>,
}

impl TakenOut {
    async fn renew(mut self) {
        let Some(held) = self.held.clone() else {
            return;
        };
        let again = self.renewer.renew(&held).await;
        self.held = None;
        if let Some(again) = again {
            self.renewer.put_back(held, again);
        }
    }
}

impl Drop for TakenOut {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            // As after a failure.
            let pause = held.grant.claim.lease.as_duration() / 12;
            self.renewer.put_back(held, Instant::now() + pause);
        }
    }
}

impl Drop for Renewer {
    fn drop(&mut self) {
        if let Some(task) = self.state().task.take() {
            task.abort();
        }
    }
}

/// A task of its own, so that a handler that blocks its worker does not starve its own lease.
///
/// It holds the renewer only while it looks: between looks the last owner may drop it, which ends this task.
async fn run(renewer: Weak<Renewer>, wake: Arc<Notify>) {
    while let Some(renewer) = renewer.upgrade() {
        let (due, next) = renewer.take_due(Instant::now());
        for held in due {
            // Each on its own: one slow renewal must not delay the others. There is one per lease in flight at most.
            let taken_out = TakenOut {
                renewer: Arc::clone(&renewer),
                held: Some(held),
            };
            tokio::spawn(taken_out.renew());
        }
        drop(renewer);
        tokio::select! {
            // In turn, not at random: either way it looks at what is due.
            biased;
            () = wake.notified() => {}
            () = sleep_until(next) => {}
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Leases of a few milliseconds are for tests, and do not make the task look all the time when they are over.
const MIN_LOOK: Duration = Duration::from_millis(10);
