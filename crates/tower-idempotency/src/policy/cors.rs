//! The headers that a browser must be allowed to send and to read.

use http::{HeaderName, header};

use crate::{layer::IdempotencyLayer, request::rules::KeyFrom, response::rules::ErrorResponse};

/// The headers of a layer for cross-origin requests (CORS, in the standard Fetch).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CorsHeaders {
    /// Request headers for `Access-Control-Allow-Headers`: the header of the key, and its alias. Without them the preflight
    /// of a request with a key fails.
    pub allow: Vec<HeaderName>,
    /// Response headers for `Access-Control-Expose-Headers`: the marker of replays, `Retry-After`, the link of errors, and
    /// the key if responses repeat it. Without them a script does not see these headers.
    pub expose: Vec<HeaderName>,
}

/// Cross-origin requests of browsers.
impl IdempotencyLayer {
    /// Returns the headers of this layer for the CORS configuration of the service, from its settings.
    ///
    /// Add the headers of the service itself to both lists, such as `Content-Type` and `Location`. Place the CORS layer
    /// outside this one: a preflight has no key, and its response must not be recorded.
    ///
    /// ```
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore};
    ///
    /// let layer = IdempotencyLayer::new(MemoryStore::new());
    /// let cors = layer.cors();
    /// assert_eq!(cors.allow, ["idempotency-key"]);
    /// assert_eq!(cors.expose, ["idempotent-replayed", "retry-after", "link"]);
    /// ```
    ///
    /// With tower-http:
    /// `CorsLayer::new().allow_headers(cors.allow.into_iter().chain([header::CONTENT_TYPE]).collect::<Vec<_>>())`, and
    /// `expose_headers` in the same way. `docs/guide/describing-the-api.md` has the complete example.
    #[must_use]
    pub fn cors(&self) -> CorsHeaders {
        let (request, response) = (&self.config.request, &self.config.response);
        let allow: Vec<_> = match &request.key_from {
            KeyFrom::Header { name, alias } => [Some(name), alias.as_ref()]
                .into_iter()
                .flatten()
                .cloned()
                .collect(),
            KeyFrom::Service { .. } => Vec::new(),
        };
        let marker = response
            .replay_marker
            .as_ref()
            .map(|(name, _)| name.clone());
        let link = matches!(response.error_response, ErrorResponse::ProblemJson { .. })
            .then_some(header::LINK);
        let mut expose: Vec<_> = [marker, Some(header::RETRY_AFTER), link]
            .into_iter()
            .flatten()
            .collect();
        if request.echo_key {
            expose.extend(allow.iter().cloned());
        }
        CorsHeaders { allow, expose }
    }
}
