//! Extractors for axum handlers.

use axum_core::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use http::{StatusCode, request::Parts};

use crate::{lease::Lease, request::key::IdempotencyKey};

/// The handler was reached without what it extracts.
///
/// That is so where the layer is not there; where it passed the request on, for want of a key or as one that it never
/// protects (a method such as GET, gRPC, an upgrade, what [`with_skip`](crate::IdempotencyLayer::with_skip) names); for a
/// [`Lease`], in an outage under
/// [`DangerouslyExecuteUnprotected`](crate::StoreFailure::DangerouslyExecuteUnprotected); and for an [`IdempotencyKey`], under
/// [`MissingKey::Derive`](crate::MissingKey::Derive).
///
/// Answered 500, since only the service can mend it: require the key
/// ([`MissingKey::Reject`](crate::MissingKey::Reject)), or extract an `Option`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NoIdempotencyKey;

impl IntoResponse for NoIdempotencyKey {
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}

impl std::fmt::Display for NoIdempotencyKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("expected a request under an idempotency key, found one without")
    }
}

impl std::error::Error for NoIdempotencyKey {}

impl<S: Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = NoIdempotencyKey;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoIdempotencyKey> {
        parts.extensions.get().cloned().ok_or(NoIdempotencyKey)
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for IdempotencyKey {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get().cloned())
    }
}

impl<S: Sync> FromRequestParts<S> for Lease {
    type Rejection = NoIdempotencyKey;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoIdempotencyKey> {
        parts.extensions.get().cloned().ok_or(NoIdempotencyKey)
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Lease {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get().cloned())
    }
}
