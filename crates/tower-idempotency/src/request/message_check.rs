//! Checks that the body of a protected gRPC call is exactly one message.

use std::sync::Arc;

#[cfg(feature = "grpc")]
use super::{body_incomplete, not_unary};
use crate::{error::Error, request::rules::Rules, telemetry::Warnings};
#[cfg(feature = "grpc")]
use crate::{
    grpc::{MessageReader, RequestShape, Side},
    telemetry,
};

/// Check of the messages in a request body.
#[cfg(feature = "grpc")]
pub(super) struct MessageCheck {
    reader: MessageReader,
    warnings: Arc<Warnings>,
}

#[cfg(feature = "grpc")]
impl MessageCheck {
    /// Creates the check, or returns `None` if the request is no protected gRPC call.
    pub(super) fn new(rules: &Rules, warnings: &Arc<Warnings>) -> Option<Self> {
        rules.is_grpc().then(|| Self {
            reader: MessageReader::default(),
            warnings: Arc::clone(warnings),
        })
    }

    /// Reads bytes. Returns an error if they do not belong to the first message.
    pub(super) fn read(&mut self, data: &[u8]) -> Result<(), Error> {
        if self.reader.read(data) {
            return Ok(());
        }
        telemetry::grpc_stream(&self.warnings, Side::Request);
        let detail =
            "expected one message in the request, found more; the method is protected as unary";
        Err(not_unary(detail))
    }

    /// Returns the error of a request with trailers. A server such as tonic adds them to the metadata, and the fingerprint does
    /// not contain them.
    #[expect(clippy::unused_self, reason = "only a check that exists rejects them")]
    pub(super) fn reject_trailers(&self) -> Error {
        not_unary("expected a request without trailers, found some")
    }

    /// Returns an error if a body that ends here is not one message.
    pub(super) fn end(&self) -> Result<(), Error> {
        match self.reader.request_shape() {
            RequestShape::Unary => Ok(()),
            RequestShape::Truncated => Err(body_incomplete()),
            RequestShape::Other(detail) => Err(not_unary(detail)),
        }
    }
}

/// No check, without the feature `grpc`.
#[cfg(not(feature = "grpc"))]
pub(super) enum MessageCheck {}

#[cfg(not(feature = "grpc"))]
impl MessageCheck {
    pub(super) fn new(_: &Rules, _: &Arc<Warnings>) -> Option<Self> {
        None
    }

    pub(super) fn read(&mut self, _: &[u8]) -> Result<(), Error> {
        match *self {}
    }

    pub(super) fn reject_trailers(&self) -> Error {
        match *self {}
    }

    pub(super) fn end(&self) -> Result<(), Error> {
        match *self {}
    }
}
