//! Retries that go to the provider of the first attempt.

use http::Request;

use crate::operation::Operation;

/// Choice of a provider or region that stays the same for all attempts of an operation.
///
/// A provider may have executed a request before it failed. Another provider does not know the key, and would execute the
/// request a second time. A service inside [`RetryLayer`](crate::RetryLayer) that picks a provider therefore lets
/// `ProviderChoice` choose:
///
/// ```
/// use http::Request;
/// use tower_idempotency_client::{Operation, ProviderChoice};
///
/// let request = Request::post("/charges").extension(Operation::new()).body(())?;
/// assert_eq!(ProviderChoice::of(&request).choose(|| 2), 2);
/// assert_eq!(ProviderChoice::of(&request).choose(|| 5), 2);
/// # Ok::<(), http::Error>(())
/// ```
///
/// `RetryLayer` puts the [`Operation`] into the extensions of each request that has a key. A request without a key is safe,
/// or is not sent again after an attempt that may have been executed. Each of its attempts may go to another provider.
#[derive(Clone, Debug)]
pub struct ProviderChoice(Option<Operation>);

impl ProviderChoice {
    /// Returns the choice for a request.
    #[must_use]
    pub fn of<B>(req: &Request<B>) -> Self {
        Self(req.extensions().get().cloned())
    }

    /// Returns the provider of the first attempt. Without one, calls `choose` and stores its result.
    pub fn choose(&self, choose: impl FnOnce() -> u64) -> u64 {
        match &self.0 {
            Some(operation) => operation.provider_or(choose),
            None => choose(),
        }
    }
}
