use std::{fmt, pin::Pin, sync::Arc};

/// Makes a call wait until the test releases it: see [`Fault::HoldCall`](super::Fault::HoldCall).
///
/// # Examples
///
/// An acquire that waits for a permit of the test:
///
/// ```
/// use std::sync::Arc;
///
/// use tokio::sync::Semaphore;
/// use tower_idempotency::{
///     store::{Claim, Fingerprint, KeyId, MemoryStore, Store},
///     testing::{Fault, FaultInjector, Hold, Operation},
/// };
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let permits = Arc::new(Semaphore::new(0));
/// let hold = Hold::new({
///     let permits = Arc::clone(&permits);
///     move || {
///         let permits = Arc::clone(&permits);
///         async move { permits.acquire().await.unwrap().forget() }
///     }
/// });
/// let store = FaultInjector::new(MemoryStore::new());
/// store.enqueue(Operation::Acquire, [Fault::HoldCall(hold)]);
///
/// let claim = Claim::new(KeyId::from_bytes([1; 32]), Fingerprint::from_bytes([2; 32])).unwrap();
/// let held = tokio::spawn({
///     let store = store.clone();
///     async move { store.acquire(&claim).await }
/// });
/// tokio::task::yield_now().await;
/// assert!(!held.is_finished());
/// permits.add_permits(1);
/// assert!(held.await.unwrap().is_ok());
/// # }
/// ```
#[derive(Clone)]
pub struct Hold(Arc<dyn Fn() -> Wait + Send + Sync>);

type Wait = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Hold {
    /// Creates a hold. Each held call gets a future from `wait`, and continues when that future resolves.
    pub fn new<F>(wait: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        Self(Arc::new(move || Box::pin(wait())))
    }

    pub(super) async fn wait(&self) {
        (self.0)().await;
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").finish_non_exhaustive()
    }
}
