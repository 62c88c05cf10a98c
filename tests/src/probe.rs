//! A store that counts its calls and injects faults.

use std::{
    fmt,
    future::{pending, poll_fn},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use tower_idempotency::store::{
    Acquired, Claim, KeyId, LeaseRef, MemoryStore, Store, StoreError, Token, Ttl,
};

use crate::gate::Gate;

/// A method of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are the store's")]
pub enum Op {
    Acquire,
    Renew,
    Complete,
    Release,
    WaitForChange,
}

/// The result of a call.
#[derive(Clone, Debug)]
pub enum Act {
    /// The call is forwarded.
    Forward,
    /// The call is forwarded, and yields to the caller before and after.
    Yield,
    /// The call fails without an effect.
    FailBefore,
    /// The call is forwarded, but fails: the reply is lost. A `wait_for_change` resolves at once.
    FailAfter,
    /// The call never returns, and has no effect.
    Hang,
    /// The call is forwarded, but never returns.
    HangAfter,
    /// The call is forwarded when the gate lets it.
    Gated(Gate),
    /// The call is forwarded, and the gate holds the reply.
    ReplyGated(Gate),
    /// The call is forwarded after this delay.
    Slow(Duration),
    /// The call panics, like a store with a bug.
    Panic,
    /// The call fails because the lease is lost, or allegedly lost.
    Lost,
    /// The record is larger than this, which is the most.
    TooLarge(usize),
}

type Script = dyn FnMut(Op, u64) -> Act + Send;

/// A [`MemoryStore`] behind a script that decides over every call. Clones are one store.
#[derive(Clone)]
pub struct Probe {
    inner: MemoryStore,
    counts: Arc<[AtomicU64; 5]>,
    script: Arc<Mutex<Box<Script>>>,
    // For each method, the result that overrides the script, and the number of calls it applies to.
    faults: Arc<Mutex<[Option<(Act, u64)>; 5]>>,
    claims: Arc<Mutex<Vec<Claim>>>,
    garble: Arc<Mutex<Option<Garble>>>,
}

type Garble = fn(Bytes) -> Bytes;

impl Probe {
    /// Creates a probe on a new store. `script` receives the method and the number of the call, starting at 1 for each method.
    #[must_use]
    pub fn new(script: impl FnMut(Op, u64) -> Act + Send + 'static) -> Self {
        Self::on(MemoryStore::new(), script)
    }

    /// Creates a probe in front of `inner`.
    #[must_use]
    pub fn on(inner: MemoryStore, script: impl FnMut(Op, u64) -> Act + Send + 'static) -> Self {
        Self {
            inner,
            counts: Arc::default(),
            script: Arc::new(Mutex::new(Box::new(script))),
            faults: Arc::default(),
            claims: Arc::default(),
            garble: Arc::default(),
        }
    }

    /// Creates a probe that forwards all calls to `inner`.
    #[must_use]
    pub fn over(inner: MemoryStore) -> Self {
        Self::on(inner, |_, _| Act::Forward)
    }

    /// Changes the script.
    pub fn set(&self, script: impl FnMut(Op, u64) -> Act + Send + 'static) {
        *lock(&self.script) = Box::new(script);
    }

    /// Applies `act` to every call of a method until [`recover`](Self::recover).
    pub fn fail(&self, op: Op, act: Act) {
        self.fail_next(u64::MAX, op, act);
    }

    /// Applies `act` to the next calls of a method.
    pub fn fail_next(&self, calls: u64, op: Op, act: Act) {
        lock(&self.faults)[op as usize] = Some((act, calls));
    }

    /// Removes all overrides, so that only the script injects faults.
    pub fn recover(&self) {
        *lock(&self.faults) = Default::default();
    }

    /// Modifies each returned record with `garble`.
    pub fn garble(&self, garble: fn(Bytes) -> Bytes) {
        *lock(&self.garble) = Some(garble);
    }

    /// Returns the number of calls of a method.
    #[must_use]
    pub fn count(&self, op: Op) -> u64 {
        self.counts[op as usize].load(Ordering::SeqCst)
    }

    /// Returns the number of calls of all methods except `wait_for_change`.
    #[must_use]
    pub fn all_calls(&self) -> u64 {
        let ops = [Op::Acquire, Op::Renew, Op::Complete, Op::Release];
        ops.map(|op| self.count(op)).iter().sum()
    }

    /// Returns the operations of all acquires, in order.
    #[must_use]
    pub fn operations(&self) -> Vec<String> {
        let claims = lock(&self.claims);
        claims
            .iter()
            .map(|claim| claim.operation.to_string())
            .collect()
    }

    /// Returns the tokens of all acquires, in order.
    #[must_use]
    pub fn tokens(&self) -> Vec<Token> {
        lock(&self.claims).iter().map(|claim| claim.token).collect()
    }

    /// Returns the claims of all acquires, in order.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        lock(&self.claims).clone()
    }

    /// Returns the inner store.
    pub fn inner(&self) -> MemoryStore {
        self.inner.clone()
    }

    fn act(&self, op: Op) -> Act {
        let nth = self.counts[op as usize].fetch_add(1, Ordering::SeqCst) + 1;
        if let Some((act, calls)) = &mut lock(&self.faults)[op as usize]
            && *calls > 0
        {
            *calls -= 1;
            return act.clone();
        }
        lock(&self.script)(op, nth)
    }

    async fn run<T>(
        &self,
        op: Op,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        match self.act(op) {
            Act::Forward => call.await,
            Act::Yield => {
                yield_once().await;
                let result = call.await;
                yield_once().await;
                result
            }
            Act::FailBefore => Err(StoreError::backend("it was told to fail")),
            Act::FailAfter => {
                call.await?;
                Err(StoreError::backend("it was told to lose the reply"))
            }
            Act::Hang => pending().await,
            Act::HangAfter => {
                call.await?;
                pending().await
            }
            Act::Gated(gate) => {
                gate.pass().await;
                call.await
            }
            Act::ReplyGated(gate) => {
                let result = call.await;
                gate.pass().await;
                result
            }
            Act::Slow(pause) => {
                tokio::time::sleep(pause).await;
                call.await
            }
            Act::Panic => panic!("the store panics as it was told"),
            Act::Lost => Err(StoreError::LeaseLost),
            Act::TooLarge(limit) => Err(StoreError::RecordTooLarge { limit }),
        }
    }
}

impl Store for Probe {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        lock(&self.claims).push(claim.clone());
        let mut acquired = self.run(Op::Acquire, self.inner.acquire(claim)).await?;
        if let (Acquired::Completed { record, .. }, Some(garble)) =
            (&mut acquired, *lock(&self.garble))
        {
            *record = garble(std::mem::take(record));
        }
        Ok(acquired)
    }

    async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<(), StoreError> {
        self.run(Op::Renew, self.inner.renew(lease, ttl)).await
    }

    async fn complete(
        &self,
        lease: &LeaseRef,
        record: Bytes,
        retention: Ttl,
    ) -> Result<(), StoreError> {
        let call = self.inner.complete(lease, record, retention);
        self.run(Op::Complete, call).await
    }

    async fn release(&self, lease: &LeaseRef) -> Result<(), StoreError> {
        self.run(Op::Release, self.inner.release(lease)).await
    }

    async fn wait_for_change(&self, id: &KeyId, within: Duration) {
        let call = async {
            self.inner.wait_for_change(id, within).await;
            Ok(())
        };
        let _ = self.run(Op::WaitForChange, call).await;
    }
}

impl Default for Probe {
    fn default() -> Self {
        Self::over(MemoryStore::new())
    }
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Probe")
            .field("counts", &self.counts)
            .finish_non_exhaustive()
    }
}

/// Is pending once, and wakes itself.
pub async fn yield_once() {
    let yielded = AtomicBool::new(false);
    poll_fn(|cx| {
        if yielded.swap(true, Ordering::Relaxed) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
