//! Rules for responses: which are recorded, how long they are stored, which headers are replayed, and the form of errors.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};

use super::problem;
#[cfg(feature = "grpc")]
use crate::grpc::{GrpcMethods, grpc_response};
use crate::{
    error::Error,
    layer_name::LayerName,
    record::{Codec, ExecutionTrace},
    store::{KeyId, Ttl},
    telemetry::{Warnings, catch_setting_panic},
};

/// Treatment of a response that cannot be recorded.
///
/// The client always gets the response. The setting decides about retries. A response cannot be recorded if it is:
/// - streamed;
/// - larger than the [response limit](crate::IdempotencyLayer::with_response_limit);
/// - larger than the rest of the [byte limit](crate::IdempotencyLayer::with_max_buffered);
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
    ProblemJson {
        described_by: HeaderValue,
    },
    Custom(Arc<RenderError>),
    #[cfg(feature = "grpc")]
    Grpc,
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
    pub(crate) has_trace_links: bool,
    /// Warnings of the layer, with its name. Clones of the layer share them, unless they have another name.
    pub(crate) warnings: Arc<Warnings>,
    /// `Some` in the settings for gRPC calls of protected methods.
    #[cfg(feature = "grpc")]
    pub(crate) grpc: Option<GrpcMethods>,
}

impl Rules {
    /// Returns the name of the layer.
    pub(crate) fn layer(&self) -> &LayerName {
        self.warnings.layer()
    }

    /// Returns the trace to store in the record of a request with these headers.
    pub(crate) fn trace(&self, headers: &HeaderMap) -> Option<ExecutionTrace> {
        if self.has_trace_links {
            ExecutionTrace::from_headers(headers)
        } else {
            None
        }
    }

    /// Returns the trace of the execution that produced the record.
    pub(crate) fn trace_in_record(&self, id: &KeyId, record: &Bytes) -> Option<ExecutionTrace> {
        if self.has_trace_links {
            ExecutionTrace::in_record(id, record)
        } else {
            None
        }
    }

    /// Returns the codec that encodes and decodes the records of this layer.
    pub(crate) fn codec(&self) -> Codec {
        Codec {
            compress_above: self.compress_above,
            // A record holds the body and a head, which servers limit to far less than 1 MiB. The lower bound of 16 MiB
            // keeps older records readable after the response limit was lowered.
            max_inflated: self.body_limit.saturating_add(MIB).max(16 * MIB),
        }
    }

    /// Returns `true` if the layer records responses with this status, and `None` if the setting panics.
    pub(crate) fn is_recorded(&self, status: StatusCode) -> Option<bool> {
        if !is_outcome(status) {
            return Some(false);
        }
        let is_recorded = || (self.recorded_statuses)(status);
        catch_setting_panic(self.layer(), "with_recorded_statuses", is_recorded)
    }

    /// Returns `true` if these are the settings for gRPC calls of protected methods.
    pub(crate) const fn is_grpc(&self) -> bool {
        #[cfg(feature = "grpc")]
        return self.grpc.is_some();
        #[cfg(not(feature = "grpc"))]
        false
    }

    /// Renders the response for `error`: problem+json if the setting panics.
    pub(crate) fn render_error(&self, error: &Error) -> Response<Bytes> {
        match &self.error_response {
            ErrorResponse::ProblemJson { described_by } => {
                problem::problem_json(error, described_by)
            }
            ErrorResponse::Custom(render) => {
                let rendered =
                    catch_setting_panic(self.layer(), "with_error_response", || render(error));
                rendered.unwrap_or_else(|| {
                    let described_by = HeaderValue::from_static(problem::DEFAULT_LINK);
                    problem::problem_json(error, &described_by)
                })
            }
            #[cfg(feature = "grpc")]
            ErrorResponse::Grpc => grpc_response(error),
        }
    }
}

/// Returns `true` if a response with this status can be the outcome of a request, regardless of the settings.
///
/// An informational response (1xx) precedes the final one. With 307 and 308 the client repeats the request at another URL.
/// That request has the same key, and would get the recorded redirect again, or a rejection.
fn is_outcome(status: StatusCode) -> bool {
    !status.is_informational()
        && ![
            StatusCode::TEMPORARY_REDIRECT,
            StatusCode::PERMANENT_REDIRECT,
        ]
        .contains(&status)
}

/// Returns `true` if the status rejects the form of a request and not its content.
///
/// The client corrects such a request by a header that the fingerprint does not cover, or the operator raises a limit. The
/// corrected request is then the same request, and must not get the old rejection.
///
/// 419 (Laravel) and 440 (IIS) reject an expired anti-forgery token or login.
pub(crate) fn is_rejection_of_form(status: StatusCode) -> bool {
    REJECTIONS_OF_FORM.contains(&status.as_u16())
}

const REJECTIONS_OF_FORM: &[u16] = &[
    401, 406, 407, 411, 412, 413, 415, 416, 417, 419, 421, 423, 426, 428, 431, 440,
];

const MIB: usize = 1024 * 1024;
