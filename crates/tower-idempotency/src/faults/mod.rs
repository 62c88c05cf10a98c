//! Fault injector around a store.

mod hold;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, VecDeque},
    fmt, future,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::task::yield_now;

pub use self::hold::Hold;
use crate::{
    inspect::{
        Abilities, EntryDetails, Inspect, InspectError, Page, Query, Resolution, ResolveOutcome,
        Seen, Summary,
    },
    store::{Acquired, CheckError, Claim, KeyId, LeaseRef, Store, StoreError, Token, Ttl},
};

/// Store wrapper that injects faults into calls, and counts them.
///
/// The first of these sources that applies decides each call:
///
/// 1. The faults queued for its operation by [`enqueue`](Self::enqueue), one for each call.
/// 2. The fault of [`set_fault`](Self::set_fault) or [`set_fault_for_all`](Self::set_fault_for_all), until
///    [`clear_faults`](Self::clear_faults).
/// 3. The [script](Self::set_script).
/// 4. The [`Plan`].
///
/// Any other call reaches the store.
///
/// Clones share the store, the faults and the counts.
///
/// # Examples
///
/// ```
/// use tower_idempotency::{
///     store::{Acquired, Claim, Fingerprint, KeyId, MemoryStore, Store},
///     testing::{Fault, FaultInjector, Operation},
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
pub struct FaultInjector<S> {
    shared: Arc<InjectorState<S>>,
}

struct InjectorState<S> {
    inner: S,
    calls: [AtomicU64; Operation::ALL.len()],
    claims: Mutex<Vec<Claim>>,
    faults: Mutex<Faults>,
    // Has its own lock, so that a script may change the faults.
    script: Mutex<Option<Box<Script>>>,
}

/// The methods of [`Store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
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

/// Effect on a call. `wait_for_change` cannot fail: it returns at once instead.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// No fault: the call goes through.
    None,
    /// The call goes through, and yields to the caller's task before and after it.
    Yield,
    /// The call fails before it reaches the store.
    CallLost,
    /// The call takes effect, then fails.
    ReplyLost,
    /// The call goes through, with this delay before and after it.
    Slow(Duration),
    /// The call never reaches the store and never returns.
    HangCall,
    /// The call takes effect and never returns.
    HangReply,
    /// The call reaches the store when the hold ends.
    HoldCall(Hold),
    /// The call takes effect, and returns when the hold ends.
    HoldReply(Hold),
    /// The call fails with [`StoreError::LeaseLost`] before it reaches the store.
    LeaseLost,
    /// The call fails with [`StoreError::RecordTooLarge`] and this limit before it reaches the store.
    RecordTooLarge(usize),
    /// The call panics before it reaches the store, like a store with a bug.
    Panic,
}

/// Faults for all calls, such that each retried call eventually goes through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
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
    /// The calls of an operation under a token cycle through four effects: lost call, lost reply, delay, no fault.
    Alternating(Duration),
}

/// Source of an injected error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedFault {
    operation: Operation,
}

type Script = dyn FnMut(Operation, u64) -> Fault + Send;

#[derive(Default)]
struct Faults {
    queued: HashMap<Operation, VecDeque<Fault>>,
    persistent: HashMap<Operation, Fault>,
    plan: Plan,
    /// The number of calls of each operation under each token, counted for the plan.
    planned: HashMap<(Operation, Token), usize>,
    rewrite: Option<fn(Bytes) -> Bytes>,
}

impl<S> FaultInjector<S> {
    /// Creates a fault injector that passes every call through.
    pub fn new(inner: S) -> Self {
        Self {
            shared: Arc::new(InjectorState {
                inner,
                calls: Default::default(),
                claims: Mutex::default(),
                faults: Mutex::default(),
                script: Mutex::default(),
            }),
        }
    }

    /// Sets the plan for every call. Default: [`Plan::None`].
    #[must_use]
    pub fn with_plan(self, plan: Plan) -> Self {
        self.faults().plan = plan;
        self
    }

    /// Sets the script, like [`set_script`](Self::set_script).
    #[must_use]
    pub fn with_script(self, script: impl FnMut(Operation, u64) -> Fault + Send + 'static) -> Self {
        self.set_script(script);
        self
    }

    /// Sets a function that decides each call from its operation and its number, starting at 1 for each operation.
    /// Default: none.
    pub fn set_script(&self, script: impl FnMut(Operation, u64) -> Fault + Send + 'static) {
        *lock(&self.shared.script) = Some(Box::new(script));
    }

    /// Returns the inner store, whose calls do not fail and are not counted.
    #[must_use]
    pub fn inner(&self) -> &S {
        &self.shared.inner
    }

    /// Queues faults for the next calls of an operation, one fault for each call, after those already queued.
    pub fn enqueue(&self, operation: Operation, faults: impl IntoIterator<Item = Fault>) {
        let queued = &mut self.faults().queued;
        queued.entry(operation).or_default().extend(faults);
    }

    /// Applies a fault to every later call of every operation, until [`clear_faults`](Self::clear_faults).
    pub fn set_fault_for_all(&self, fault: &Fault) {
        for operation in Operation::ALL {
            self.set_fault(operation, fault.clone());
        }
    }

    /// Applies a fault to every later call of one operation, until [`clear_faults`](Self::clear_faults).
    pub fn set_fault(&self, operation: Operation, fault: Fault) {
        self.faults().persistent.insert(operation, fault);
    }

    /// Removes all queued and persistent faults, but neither the script nor the plan. A call that hangs continues to hang.
    pub fn clear_faults(&self) {
        let mut faults = self.faults();
        faults.persistent.clear();
        faults.queued.clear();
    }

    /// Replaces each record that an acquire returns by the result of `rewrite`, like a store with damaged data.
    pub fn rewrite_records(&self, rewrite: fn(Bytes) -> Bytes) {
        self.faults().rewrite = Some(rewrite);
    }

    /// Returns the number of calls of the operation, with any results.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> u64 {
        self.shared.calls[operation as usize].load(Relaxed)
    }

    /// Returns the number of calls of all operations but `wait_for_change`, with any results.
    #[must_use]
    pub fn all_calls(&self) -> u64 {
        let all = Operation::ALL.into_iter();
        let counted = all.filter(|operation| *operation != Operation::WaitForChange);
        counted.map(|operation| self.calls(operation)).sum()
    }

    /// Returns the claims of all acquires, in order.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        lock(&self.shared.claims).clone()
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        lock(&self.shared.faults)
    }

    fn next_fault(&self, operation: Operation, token: Token) -> Fault {
        let nth = self.shared.calls[operation as usize].fetch_add(1, Relaxed) + 1;
        {
            let mut faults = self.faults();
            let queued = faults.queued.get_mut(&operation);
            if let Some(fault) = queued.and_then(VecDeque::pop_front) {
                return fault;
            }
            if let Some(fault) = faults.persistent.get(&operation) {
                return fault.clone();
            }
        }
        if let Some(script) = &mut *lock(&self.shared.script) {
            return script(operation, nth);
        }
        self.faults().next_planned(operation, token)
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
            Fault::Yield => {
                yield_now().await;
                let reply = call.await;
                yield_now().await;
                reply
            }
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
            Fault::HangCall => future::pending().await,
            Fault::HangReply => {
                let _reply = call.await;
                future::pending().await
            }
            Fault::HoldCall(hold) => {
                hold.wait().await;
                call.await
            }
            Fault::HoldReply(hold) => {
                let reply = call.await;
                hold.wait().await;
                reply
            }
            Fault::LeaseLost => Err(StoreError::LeaseLost),
            Fault::RecordTooLarge(limit) => Err(StoreError::RecordTooLarge { limit }),
            Fault::Panic => panic!("a panic was injected into {operation:?}"),
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store> Store for FaultInjector<S> {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        lock(&self.shared.claims).push(claim.clone());
        let call = self.inner().acquire(claim);
        let mut acquired = self.apply(Operation::Acquire, claim.token, call).await?;
        let rewrite = self.faults().rewrite;
        if let (Acquired::Completed { record, .. }, Some(rewrite)) = (&mut acquired, rewrite) {
            *record = rewrite(std::mem::take(record));
        }
        Ok(acquired)
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        let call = self.inner().renew(lease, ttl);
        self.apply(Operation::Renew, lease.token, call).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let call = self.inner().complete(lease, record, retention);
        self.apply(Operation::Complete, lease.token, call).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        let call = self.inner().release(lease);
        self.apply(Operation::Release, lease.token, call).await
    }

    async fn wait_for_change(&self, id: &KeyId, timeout: Duration) {
        let call = async {
            self.inner().wait_for_change(id, timeout).await;
            Ok(())
        };
        // A waiter has no token, so all waiters count as one.
        let no_token = Token::from_bytes([0; 16]);
        let _hint = self.apply(Operation::WaitForChange, no_token, call).await;
    }

    /// Returns `None`, so that each request calls the store and meets the faults.
    fn find_completed(&self, _id: &KeyId) -> Option<Acquired> {
        None
    }

    /// Checks the inner store. Meets no faults and is not counted.
    async fn check(&self) -> Result<(), CheckError> {
        self.inner().check().await
    }

    fn compress_above(&self) -> usize {
        self.inner().compress_above()
    }
}

/// Passes every call to the inner store: without faults and without counting it.
#[deny(clippy::missing_trait_methods)]
impl<S: Inspect> Inspect for FaultInjector<S> {
    fn abilities(&self) -> Abilities {
        self.inner().abilities()
    }

    async fn list(&self, query: &Query) -> Result<Page, InspectError> {
        self.inner().list(query).await
    }

    async fn get(&self, id: &KeyId) -> Result<Option<EntryDetails>, InspectError> {
        self.inner().get(id).await
    }

    async fn summary(&self, limit: u32) -> Result<Summary, InspectError> {
        self.inner().summary(limit).await
    }

    async fn resolve(
        &self,
        seen: &Seen,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, InspectError> {
        self.inner().resolve(seen, resolution).await
    }

    async fn purge(&self, batch: u32) -> Result<u64, InspectError> {
        self.inner().purge(batch).await
    }
}

impl<S: Default> Default for FaultInjector<S> {
    fn default() -> Self {
        Self::new(S::default())
    }
}

impl<S> Clone for FaultInjector<S> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<S> fmt::Debug for FaultInjector<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultInjector")
            .field("calls", &self.shared.calls)
            .finish_non_exhaustive()
    }
}

impl Faults {
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

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
