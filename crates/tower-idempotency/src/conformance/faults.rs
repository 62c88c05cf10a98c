//! A store that fails on demand, around one that works.

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

/// Wraps a store and makes its calls fail as they are told to.
///
/// What happens to a call is decided in this order: the faults lined up for its operation by
/// [`enqueue`](Self::enqueue), one call each; the [`fail_all`](Self::fail_all), until it is healed; the
/// [`Plan`]. A call that nothing applies to goes through.
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

/// What happens to a call. `wait_for_change` cannot fail: where another call would, it returns at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the suite is not API-stable")]
pub enum Fault {
    /// Nothing: it goes through.
    None,
    /// It fails before it reaches the store.
    CallLost,
    /// It has its effect, then fails.
    ReplyLost,
    /// It goes through, with this pause before and after.
    Slow(Duration),
    /// It never reaches the store and never answers.
    Hang,
    /// It has its effect and never answers.
    HangAfter,
}

/// What happens to every call, so that each one that is made again goes through in the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the suite is not API-stable")]
pub enum Plan {
    /// Nothing.
    #[default]
    None,
    /// Of the calls that a token makes of an operation, every other one, beginning with the first, fails before it
    /// reaches the store.
    CallsLost,
    /// The same calls have their effect, then fail.
    RepliesLost,
    /// Every call pauses before and after.
    Slow(Duration),
    /// Of the calls that a token makes of an operation the first is lost, the reply of the second is lost, the third
    /// pauses, the fourth goes through, and so on.
    Alternating(Duration),
}

/// The source of an error that [`FaultInjector`] made up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedFault {
    operation: Operation,
}

#[derive(Debug, Default)]
struct Script {
    lined_up: HashMap<Operation, VecDeque<Fault>>,
    outages: HashMap<Operation, Fault>,
    plan: Plan,
    /// How often each token called each operation under the plan.
    planned: HashMap<(Operation, Token), usize>,
}

impl<S> FaultInjector<S> {
    /// Passes every call through until told otherwise.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            calls: Default::default(),
            script: Mutex::default(),
        }
    }

    /// Applies a plan to every call; [`Plan::None`] by default.
    #[must_use]
    pub fn with_plan(self, plan: Plan) -> Self {
        self.script().plan = plan;
        self
    }

    /// The store inside, whose calls do not fail and are not counted.
    pub const fn inner(&self) -> &S {
        &self.inner
    }

    /// Decides the next calls of an operation, one fault each, after those lined up before.
    pub fn enqueue(&self, operation: Operation, faults: impl IntoIterator<Item = Fault>) {
        let mut script = self.script();
        script.lined_up.entry(operation).or_default().extend(faults);
    }

    /// Does this to every call from now on, of every operation, until [`clear_faults`](Self::clear_faults).
    pub fn fail_all(&self, fault: Fault) {
        for operation in Operation::ALL {
            self.fail_each(operation, fault);
        }
    }

    /// Does this to every call of one operation from now on, until [`clear_faults`](Self::clear_faults).
    pub fn fail_each(&self, operation: Operation, fault: Fault) {
        self.script().outages.insert(operation, fault);
    }

    /// Ends every outage and forgets what is lined up. A call that hangs keeps hanging.
    pub fn clear_faults(&self) {
        let mut script = self.script();
        script.outages.clear();
        script.lined_up.clear();
    }

    /// How often the operation was called, whatever became of the calls.
    pub fn calls(&self, operation: Operation) -> usize {
        self.calls[operation as usize].load(Relaxed)
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self, operation: Operation, token: Token) -> Fault {
        self.calls[operation as usize].fetch_add(1, Relaxed);
        let mut script = self.script();
        let lined_up = script.lined_up.get_mut(&operation);
        if let Some(fault) = lined_up.and_then(VecDeque::pop_front) {
            return fault;
        }
        match script.outages.get(&operation) {
            Some(fault) => *fault,
            None => script.planned(operation, token),
        }
    }

    async fn run<T>(
        &self,
        operation: Operation,
        token: Token,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let failed = || Err(StoreError::backend(InjectedFault { operation }));
        match self.next(operation, token) {
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
        self.run(Operation::Acquire, claim.token, call).await
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        let call = self.inner.renew(lease, ttl);
        self.run(Operation::Renew, lease.token, call).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let call = self.inner.complete(lease, record, retention);
        self.run(Operation::Complete, lease.token, call).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let call = self.inner.release(lease);
        self.run(Operation::Release, lease.token, call).await
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        let call = async {
            self.inner.wait_for_change(id, within).await;
            Ok(())
        };
        // Whoever waits has no token to be told apart by.
        let nobody = Token::from_bytes([0; 16]);
        let _hint = self.run(Operation::WaitForChange, nobody, call).await;
    }
}

impl Script {
    fn planned(&mut self, operation: Operation, token: Token) -> Fault {
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
    async fn a_lost_call_has_no_effect_and_a_lost_reply_has() {
        let store = FaultInjector::new(MemoryStore::new());
        store.enqueue(Operation::Acquire, [Fault::CallLost]);
        assert_injected(store.acquire(&claim()).await, Operation::Acquire);
        assert!(!is_held(&store).await);

        store.enqueue(Operation::Acquire, [Fault::ReplyLost]);
        assert_injected(store.acquire(&claim()).await, Operation::Acquire);
        assert!(is_held(&store).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_hangs_never_answers_and_has_its_effect_or_not() {
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
    async fn faults_lined_up_happen_once_each_in_order_before_the_outage() {
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
    async fn a_slow_call_pauses_before_and_after() {
        let store = FaultInjector::new(MemoryStore::new()).with_plan(Plan::Slow(SECOND));
        let start = Instant::now();
        store.acquire(&claim()).await.unwrap();
        assert_eq!(start.elapsed(), 2 * SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_that_is_lost_is_over_at_once() {
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
    async fn a_plan_lets_every_call_through_in_the_end() {
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
