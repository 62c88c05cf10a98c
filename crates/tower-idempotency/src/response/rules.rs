//! The rules for responses: which are recorded, for how long, what a replay carries, and how errors look.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode};

use super::problem;
use crate::{error::Error, record::Codec, store::Ttl};

/// What to do about a response that cannot be kept: larger than the limit or than what
/// [may be buffered](crate::IdempotencyLayer::with_max_in_flight), or streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unrecordable {
    /// Keep a tombstone: a retry is told 409 `response-not-retained`.
    Tombstone,
    /// Free the key: a retry executes again.
    Release,
}

/// What a refusal looks like.
#[derive(Clone)]
pub(crate) enum Refusals {
    ProblemJson { described_by: HeaderValue },
    Custom(Arc<RenderError>),
}

type RenderError = dyn Fn(&Error) -> Response<Bytes> + Send + Sync;

/// The decisions about responses.
#[derive(Clone)]
pub(crate) struct Rules {
    pub(crate) retry_after: Duration,
    pub(crate) body_limit: usize,
    pub(crate) collect_timeout: Duration,
    pub(crate) recorded: Arc<dyn Fn(StatusCode) -> bool + Send + Sync>,
    pub(crate) unrecordable: Unrecordable,
    pub(crate) retention: Ttl,
    pub(crate) max_retention: Ttl,
    pub(crate) replayed: Arc<dyn Fn(&HeaderName) -> bool + Send + Sync>,
    pub(crate) replay_marker: Option<(HeaderName, HeaderValue)>,
    pub(crate) refusals: Refusals,
    pub(crate) compress_above: usize,
}

impl Rules {
    /// How records are written and read here.
    pub(crate) fn codec(&self) -> Codec {
        Codec {
            compress_above: self.compress_above,
            // A record holds the body and a head that servers bound far below this. Lowering the response limit must not
            // make the records unreadable that were written before: hence the floor.
            max_inflated: self.body_limit.saturating_add(MIB).max(16 * MIB),
        }
    }

    pub(crate) fn refusal(&self, error: &Error) -> Response<Bytes> {
        match &self.refusals {
            Refusals::ProblemJson { described_by } => problem::problem_json(error, described_by),
            Refusals::Custom(render) => render(error),
        }
    }
}

const MIB: usize = 1024 * 1024;
