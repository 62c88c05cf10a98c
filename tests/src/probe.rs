//! A store that counts what it is asked, and fails as it is told.

use std::{
    fmt,
    future::{pending, poll_fn},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use tower_idempotency::store::{
    Acquired, Claim, KeyId, LeaseRef, MemoryStore, Store, StoreError, Ttl,
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
    Changed,
}

/// What becomes of a call.
#[derive(Clone, Debug)]
pub enum Act {
    /// It goes through.
    Forward,
    /// It goes through, and yields to the caller before and after.
    Yield,
    /// It fails, and nothing happened.
    FailBefore,
    /// It fails, though it went through: the reply is lost. A `changed` resolves at once.
    FailAfter,
    /// It never ends, and nothing happened.
    Hang,
    /// It never ends, though it went through.
    HangAfter,
    /// It goes through when the gate lets it.
    Gated(Gate),
    /// It goes through, and the gate lets the reply out.
    ReplyGated(Gate),
    /// It takes this long and then goes through.
    Slow(Duration),
    /// The lease is lost, or so it says.
    Lost,
    /// The record is larger than this, which is the most.
    TooLarge(usize),
}

type Script = dyn FnMut(Op, u64) -> Act + Send;

/// A [`MemoryStore`] behind a script that decides over every call.
#[derive(Clone)]
pub struct Probe {
    inner: MemoryStore,
    counts: Arc<[AtomicU64; 5]>,
    script: Arc<Mutex<Box<Script>>>,
}

impl Probe {
    /// A store of its own; `script` is given the method and which call of it this is, from 1.
    #[must_use]
    pub fn new(script: impl FnMut(Op, u64) -> Act + Send + 'static) -> Self {
        Self::on(MemoryStore::new(), script)
    }

    /// In front of `inner`.
    #[must_use]
    pub fn on(inner: MemoryStore, script: impl FnMut(Op, u64) -> Act + Send + 'static) -> Self {
        Self {
            inner,
            counts: Arc::default(),
            script: Arc::new(Mutex::new(Box::new(script))),
        }
    }

    /// Changes the script.
    pub fn set(&self, script: impl FnMut(Op, u64) -> Act + Send + 'static) {
        *self.script.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(script);
    }

    /// How many calls of a method there were.
    #[must_use]
    pub fn count(&self, op: Op) -> u64 {
        self.counts[op as usize].load(Ordering::SeqCst)
    }

    /// The store behind it.
    pub fn inner(&self) -> MemoryStore {
        self.inner.clone()
    }

    fn act(&self, op: Op) -> Act {
        let nth = self.counts[op as usize].fetch_add(1, Ordering::SeqCst) + 1;
        (self.script.lock().unwrap_or_else(PoisonError::into_inner))(op, nth)
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
            Act::Lost => Err(StoreError::LeaseLost),
            Act::TooLarge(limit) => Err(StoreError::RecordTooLarge { limit }),
        }
    }
}

impl Store for Probe {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        self.run(Op::Acquire, self.inner.acquire(claim)).await
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

    async fn changed(&self, id: &KeyId, within: Duration) {
        let call = async {
            self.inner.changed(id, within).await;
            Ok(())
        };
        let _ = self.run(Op::Changed, call).await;
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
