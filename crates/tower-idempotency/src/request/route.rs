//! The route of a request, for its entry in the store.

use std::sync::Arc;

/// Route of a request, such as `/orders/{id}`, for its entry in the store.
///
/// An entry contains the route that axum matched, in clear text. Without one, the entry contains the path, which may have
/// secrets or personal data. With another router, insert this value into the extensions of the request before the layer
/// handles it. The entry then contains this route, also if axum matched one. Operators see it, and a completer gets it.
///
/// The route is not part of the fingerprint. If you change it, records are still found.
///
/// ```
/// use tower_idempotency::RouteTemplate;
///
/// let mut req = http::Request::post("/reset/a-secret").body(())?;
/// req.extensions_mut().insert(RouteTemplate::new("/reset/{token}"));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteTemplate(Arc<str>);

impl RouteTemplate {
    /// Returns the route with this text. An entry contains at most 128 bytes of method and route.
    #[must_use]
    pub fn new(route: impl Into<Arc<str>>) -> Self {
        Self(route.into())
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}
