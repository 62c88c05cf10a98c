//! Rules for responses: which are recorded, how long they are stored, which headers are replayed, and the form of errors.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode};

use super::problem;
use crate::{error::Error, record::Codec, store::Ttl};

/// Treatment of a response that cannot be recorded.
///
/// The client gets the response in any case; the setting decides about retries. A response cannot be recorded if it is:
/// - streamed;
/// - larger than the [response limit](crate::IdempotencyLayer::with_response_limit);
/// - larger than the rest of the [byte budget](crate::IdempotencyLayer::with_max_in_flight);
/// - too large for the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unrecordable {
    /// The layer stores a tombstone. A retry gets 409 `response-not-retained`; nothing is executed.
    Tombstone,
    /// The layer releases the key. A retry executes again.
    Release,
}

/// Form of error responses.
#[derive(Clone)]
pub(crate) enum ErrorResponse {
    ProblemJson { described_by: HeaderValue },
    Custom(Arc<RenderError>),
}

type RenderError = dyn Fn(&Error) -> Response<Bytes> + Send + Sync;

/// Settings for responses.
#[derive(Clone)]
pub(crate) struct Rules {
    pub(crate) retry_after: Duration,
    pub(crate) body_limit: usize,
    pub(crate) collect_timeout: Duration,
    pub(crate) recorded_statuses: Arc<dyn Fn(StatusCode) -> bool + Send + Sync>,
    pub(crate) unrecordable: Unrecordable,
    pub(crate) retention: Ttl,
    pub(crate) max_retention: Ttl,
    pub(crate) replayed_headers: Arc<dyn Fn(&HeaderName) -> bool + Send + Sync>,
    pub(crate) replay_marker: Option<(HeaderName, HeaderValue)>,
    pub(crate) error_response: ErrorResponse,
    pub(crate) compress_above: usize,
}

impl Rules {
    /// Returns the codec that encodes and decodes the records of this layer.
    pub(crate) fn codec(&self) -> Codec {
        Codec {
            compress_above: self.compress_above,
            // A record holds the body and a head, which servers limit to far less than 1 MiB. The lower bound of 16 MiB
            // keeps older records readable after the response limit was lowered.
            max_inflated: self.body_limit.saturating_add(MIB).max(16 * MIB),
        }
    }

    /// Renders the response for `error`.
    pub(crate) fn render_error(&self, error: &Error) -> Response<Bytes> {
        match &self.error_response {
            ErrorResponse::ProblemJson { described_by } => {
                problem::problem_json(error, described_by)
            }
            ErrorResponse::Custom(render) => render(error),
        }
    }
}

const MIB: usize = 1024 * 1024;
