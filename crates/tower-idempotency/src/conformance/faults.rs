//! Fault injector around a store.

use std::{
    collections::{HashMap, VecDeque},
    fmt, future,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;

use crate::store::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Token, Ttl};

/// Store wrapper that injects faults into calls.
///
/// The first of these that applies decides each call: the faults queued for its operation by
/// [`enqueue`](Self::enqueue), one call each; [`fail_all`](Self::fail_all), until
/// [`clear_faults`](Self::clear_faults); the [`Plan`]. Any other call goes through.
///
/// # Examples
///
/// ```
/// use tower_idempotency::{
///     conformance::{Fault, FaultInjector, Operation},
///     store::{Acquired, Claim, Fingerprint, KeyId, MemoryStore, Store},
/// };
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let store = FaultInjector::new(MemoryStore::new());
/// store.enqueue(Operation::Acquire, [Fault::ReplyLost]);
///
/// let (id, fingerprint) = (KeyId::from_bytes([1; 32]), Fingerprint::from_bytes([2; 32]));
/// let claim = Claim::new(id, fingerprint).unwrap();
/// assert!(store.acquire(&claim).await.is_err());
///
/// let again = store.acquire(&claim).await.unwrap();
/// assert_eq!(again, Acquired::Granted { generation: 1, takeover: false });
/// assert_eq!(store.calls(Operation::Acquire), 2);
/// # }
/// ```
#[derive(Debug)]
pub struct FaultInjector<S> {
    inner: S,
    calls: [AtomicUsize; Operation::ALL.len()],
    script: Mutex<Script>,
}

/// The methods of [`Store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "the suite is not API-stable")]
pub enum Operation {
    /// [`Store::acquire`].
    Acquire,
    /// [`Store::renew`].
    Renew,
    /// [`Store::complete`].
    Complete,
    /// [`Store::release`].
    Release,
    /// [`Store::wait_for_change`].
    WaitForChange,
}

impl Operation {
    const ALL: [Self; 5] = [
        Self::Acquire,
        Self::Renew,
        Self::Complete,
        Self::Release,
        Self::WaitForChange,
    ];
}

/// Effect on a call. `wait_for_change` cannot fail: it returns at once in place of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the suite is not API-stable")]
pub enum Fault {
    /// No fault: the call goes through.
    None,
    /// The call fails before it reaches the store.
    CallLost,
    /// The call takes effect, then fails.
    ReplyLost,
    /// The call goes through, with this delay before and after it.
    Slow(Duration),
    /// The call never reaches the store and never returns.
    Hang,
    /// The call takes effect and never returns.
    HangAfter,
}

/// Faults for all calls, such that each retried call eventually goes through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the suite is not API-stable")]
pub enum Plan {
    /// No faults.
    #[default]
    None,
    /// The first, third, fifth call and so on of an operation under a token fails before it reaches the store.
    CallsLost,
    /// The same calls take effect, then fail.
    RepliesLost,
    /// Every call is delayed before and after.
    Slow(Duration),
    /// The calls of an operation under a token cycle through four effects: the call is lost, the reply is lost, the
    /// call is delayed, the call goes through.
    Alternating(Duration),
}

/// Source of an injected error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedFault {
    operation: Operation,
}

#[derive(Debug, Default)]
struct Script {
    queued: HashMap<Operation, VecDeque<Fault>>,
    persistent: HashMap<Operation, Fault>,
    plan: Plan,
    /// The number of calls of each operation under each token, counted for the plan.
    planned: HashMap<(Operation, Token), usize>,
}

impl<S> FaultInjector<S> {
    /// Creates a fault injector that passes every call through.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            calls: Default::default(),
            script: Mutex::default(),
        }
    }

    /// Sets the plan for every call. Default: [`Plan::None`].
    #[must_use]
    pub fn with_plan(self, plan: Plan) -> Self {
        self.script().plan = plan;
        self
    }

    /// Returns the inner store, whose calls do not fail and are not counted.
    pub const fn inner(&self) -> &S {
        &self.inner
    }

    /// Queues faults for the next calls of an operation, one fault for each call, after those already queued.
    pub fn enqueue(&self, operation: Operation, faults: impl IntoIterator<Item = Fault>) {
        let mut script = self.script();
        script.queued.entry(operation).or_default().extend(faults);
    }

    /// Applies a fault to every later call of every operation, until [`clear_faults`](Self::clear_faults).
    pub fn fail_all(&self, fault: Fault) {
        for operation in Operation::ALL {
            self.fail_each(operation, fault);
        }
    }

    /// Applies a fault to every later call of one operation, until [`clear_faults`](Self::clear_faults).
    pub fn fail_each(&self, operation: Operation, fault: Fault) {
        self.script().persistent.insert(operation, fault);
    }

    /// Removes all queued and persistent faults. A call that hangs keeps hanging.
    pub fn clear_faults(&self) {
        let mut script = self.script();
        script.persistent.clear();
        script.queued.clear();
    }

    /// Returns the number of calls of the operation, whatever their results.
    pub fn calls(&self, operation: Operation) -> usize {
        self.calls[operation as usize].load(Relaxed)
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_fault(&self, operation: Operation, token: Token) -> Fault {
        self.calls[operation as usize].fetch_add(1, Relaxed);
        let mut script = self.script();
        let queued = script.queued.get_mut(&operation);
        if let Some(fault) = queued.and_then(VecDeque::pop_front) {
            return fault;
        }
        match script.persistent.get(&operation) {
            Some(fault) => *fault,
            None => script.next_planned(operation, token),
        }
    }

    async fn apply<T>(
        &self,
        operation: Operation,
        token: Token,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let failed = || Err(StoreError::backend(InjectedFault { operation }));
        match self.next_fault(operation, token) {
            Fault::None => call.await,
            Fault::CallLost => failed(),
            Fault::ReplyLost => {
                let _reply = call.await;
                failed()
            }
            Fault::Slow(pause) => {
                tokio::time::sleep(pause).await;
                let reply = call.await;
                tokio::time::sleep(pause).await;
                reply
            }
            Fault::Hang => future::pending().await,
            Fault::HangAfter => {
                let _reply = call.await;
                future::pending().await
            }
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store> Store for FaultInjector<S> {
    const COMPRESS_ABOVE: usize = S::COMPRESS_ABOVE;

    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        let call = self.inner.acquire(claim);
        self.apply(Operation::Acquire, claim.token, call).await
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        let call = self.inner.renew(lease, ttl);
        self.apply(Operation::Renew, lease.token, call).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let call = self.inner.complete(lease, record, retention);
        self.apply(Operation::Complete, lease.token, call).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let call = self.inner.release(lease);
        self.apply(Operation::Release, lease.token, call).await
    }

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        let call = async {
            self.inner.wait_for_change(id, timeout).await;
            Ok(())
        };
        // A waiter has no token, so all waiters count as one.
        let no_token = Token::from_bytes([0; 16]);
        let _hint = self.apply(Operation::WaitForChange, no_token, call).await;
    }
}

impl Script {
    fn next_planned(&mut self, operation: Operation, token: Token) -> Fault {
        match self.plan {
            Plan::None => Fault::None,
            Plan::Slow(pause) => Fault::Slow(pause),
            Plan::CallsLost => match self.nth(operation, token) % 2 {
                0 => Fault::CallLost,
                _ => Fault::None,
            },
            Plan::RepliesLost => match self.nth(operation, token) % 2 {
                0 => Fault::ReplyLost,
                _ => Fault::None,
            },
            Plan::Alternating(pause) => match self.nth(operation, token) % 4 {
                0 => Fault::CallLost,
                1 => Fault::ReplyLost,
                2 => Fault::Slow(pause),
                _ => Fault::None,
            },
        }
    }

    fn nth(&mut self, operation: Operation, token: Token) -> usize {
        let count = self.planned.entry((operation, token)).or_default();
        *count += 1;
        *count - 1
    }
}

impl fmt::Display for InjectedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a fault was injected into {:?}", self.operation)
    }
}

impl std::error::Error for InjectedFault {}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::store::{Fingerprint, MemoryStore};

    const SECOND: Duration = Duration::from_secs(1);
    const ID: KeyId = KeyId::from_bytes([1; 32]);

    fn claim() -> Claim {
        Claim::new(ID, Fingerprint::from_bytes([2; 32])).unwrap()
    }

    async fn is_held(store: &FaultInjector<MemoryStore>) -> bool {
        let claim = claim();
        let acquired = store.inner().acquire(&claim).await.unwrap();
        if let Acquired::Granted { generation, .. } = acquired {
            let lease = claim.lease_ref(generation);
            store.inner().release(&lease).await.unwrap();
            return false;
        }
        true
    }

    fn assert_injected<T: fmt::Debug>(result: Result<T, StoreError>, operation: Operation) {
        match result.unwrap_err() {
            StoreError::Backend(source) => {
                let fault = source.downcast_ref::<InjectedFault>();
                assert_eq!(fault, Some(&InjectedFault { operation }));
            }
            other => panic!("expected an injected fault, found {other}"),
        }
    }

    #[tokio::test]
    async fn lost_call_has_no_effect_but_lost_reply_has() {
        let store = FaultInjector::new(MemoryStore::new());
        store.enqueue(Operation::Acquire, [Fault::CallLost]);
        assert_injected(store.acquire(&claim()).await, Operation::Acquire);
        assert!(!is_held(&store).await);

        store.enqueue(Operation::Acquire, [Fault::ReplyLost]);
        assert_injected(store.acquire(&claim()).await, Operation::Acquire);
        assert!(is_held(&store).await);
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_call_never_returns() {
        let store = FaultInjector::new(MemoryStore::new());
        let faults = [Fault::Hang, Fault::HangAfter];
        store.enqueue(Operation::Acquire, faults);
        for held in [false, true] {
            let hanging = timeout(SECOND, store.acquire(&claim())).await;
            assert!(hanging.is_err());
            assert_eq!(is_held(&store).await, held);
        }
        assert_eq!(store.calls(Operation::Acquire), 2);
    }

    #[tokio::test]
    async fn queued_faults_precede_fail_all_in_order() {
        let store = FaultInjector::new(MemoryStore::new());
        store.fail_all(Fault::CallLost);
        store.enqueue(Operation::Release, [Fault::None, Fault::ReplyLost]);
        let lease = claim().lease_ref(1);
        store.release(&lease).await.unwrap();
        assert_injected(store.release(&lease).await, Operation::Release);
        assert_injected(store.release(&lease).await, Operation::Release);
        assert_injected(store.renew(&lease, Ttl::MIN).await, Operation::Renew);
        let completed = store.complete(&lease, Bytes::new(), Ttl::MAX).await;
        assert_injected(completed, Operation::Complete);

        store.clear_faults();
        store.fail_each(Operation::Renew, Fault::CallLost);
        store.release(&lease).await.unwrap();
        assert_injected(store.renew(&lease, Ttl::MIN).await, Operation::Renew);

        store.enqueue(Operation::Release, [Fault::CallLost]);
        store.clear_faults();
        store.release(&lease).await.unwrap();
        assert!(matches!(
            store.renew(&lease, Ttl::MIN).await,
            Err(StoreError::LeaseLost)
        ));
        assert_eq!(store.calls(Operation::Release), 5);
        assert_eq!(store.calls(Operation::WaitForChange), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn slow_call_is_delayed_before_and_after() {
        let store = FaultInjector::new(MemoryStore::new()).with_plan(Plan::Slow(SECOND));
        let start = Instant::now();
        store.acquire(&claim()).await.unwrap();
        assert_eq!(start.elapsed(), 2 * SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn lost_wait_returns_at_once() {
        let store = FaultInjector::new(MemoryStore::new());
        store.acquire(&claim()).await.unwrap();
        store.fail_all(Fault::CallLost);
        let start = Instant::now();
        store.wait_for_change(&ID, SECOND).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        store.clear_faults();
        store.wait_for_change(&ID, SECOND).await;
        assert_eq!(start.elapsed(), SECOND);
    }

    #[tokio::test]
    async fn plan_lets_every_call_through_eventually() {
        let plans = [
            (Plan::CallsLost, 2),
            (Plan::RepliesLost, 2),
            (Plan::Alternating(Duration::ZERO), 3),
        ];
        for (plan, attempts) in plans {
            let store = FaultInjector::new(MemoryStore::new()).with_plan(plan);
            let claims = [claim(), claim()];
            for attempt in 1..=attempts {
                for claim in &claims {
                    let through = store.acquire(claim).await.is_ok();
                    assert_eq!(through, attempt == attempts, "{plan:?}, {attempt}");
                }
            }
        }
    }
}
