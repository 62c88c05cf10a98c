//! Extractors for axum handlers: [`IdempotencyKey`] and [`Lease`], both also as an `Option`.

use axum_core::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use http::{StatusCode, request::Parts};

use crate::{lease::Lease, request::key::IdempotencyKey};

/// Rejection of the extractors: the request has no key or no lease.
///
/// That happens if:
/// - the layer does not wrap the handler;
/// - the request has no key and passed through;
/// - the layer does not cover the request: a method such as GET, gRPC, an upgrade, or a request that
///   [`with_skip`](crate::IdempotencyLayer::with_skip) excludes;
/// - the handler extracts a [`Lease`] during an outage, with
///   [`DangerouslyExecuteUnprotected`](crate::StoreFailure::DangerouslyExecuteUnprotected);
/// - the handler extracts an [`IdempotencyKey`], with [`MissingKey::Derive`](crate::MissingKey::Derive).
///
/// The status is 500, because only the service can fix this: require a key with
/// [`MissingKey::Reject`](crate::MissingKey::Reject), or extract an `Option`.
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
        f.write_str("expected a request with an idempotency key, found one without")
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
