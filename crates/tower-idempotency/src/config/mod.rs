//! Every decision of the layer as a plain value: one field, one setter, one use in `exchange.rs`.

pub(crate) mod preset;

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode, request};

use crate::{
    error::Error,
    record::Codec,
    request::fingerprint::{By, Secret},
    request::key::KeyRules,
    request::principal::Principal,
    response::problem,
    store::{OrphanPolicy, Ttl},
};

/// What to do with a request that should carry a key and does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingKey {
    /// The handler runs every time and nothing is stored.
    PassThrough,
    /// 400 `missing-key`; nothing is executed.
    Reject,
    /// The fingerprint is the key: equal requests of one principal within the retention are one. Two that are meant to
    /// be two (the same order placed twice) become one as well, so keep the retention short: queues of this kind use
    /// five minutes. Callers without a principal count as one, and with
    /// [`FingerprintBy::head_only`](crate::FingerprintBy::head_only) every body sent to one path is equal. The handler
    /// finds a [`Lease`](crate::Lease) and no [`IdempotencyKey`](crate::IdempotencyKey).
    Derive,
}

/// What to do when a key comes back with another request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyReuse {
    /// `key-reused` with this status, one of 4xx; nothing is executed.
    Refuse(StatusCode),
    /// It is a separate request with an entry of its own: the fingerprint joins the id. A client that mistakenly reuses
    /// a key is not told so.
    Separate,
}

/// What to answer while the first request with the key is still being executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConcurrentRequests {
    /// 409 `in-progress`, with `Retry-After`.
    Conflict,
    /// 429 `in-progress`, with `Retry-After`.
    TooManyRequests,
    /// Wait for the answer for at most this long, then 409. Waiting requests hold their connection, their body and a
    /// place among the requests in flight.
    Wait(Duration),
}

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

/// What to do with a request whose lease cannot be taken because the store fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreFailure {
    /// 503 `store-unavailable`; nothing is executed.
    Refuse,
    /// Execute without a lease and without a record: retries during the outage execute again, also beside one another,
    /// and the first retry after it executes once more. Who waits for a request that is known to be running is refused
    /// all the same. There is no [`Lease`](crate::Lease): with the feature `axum`, a handler that extracts one answers 500,
    /// so extract an `Option<Lease>` instead.
    DangerouslyExecuteUnprotected,
}

/// Where the key comes from.
#[derive(Clone)]
pub(crate) enum KeyFrom {
    Header {
        name: HeaderName,
        alias: Option<HeaderName>,
    },
    Head(Arc<KeyFromHead>),
}

/// What a refusal looks like.
#[derive(Clone)]
pub(crate) enum Refusals {
    ProblemJson { described_by: HeaderValue },
    Custom(Arc<RenderError>),
}

type KeyFromHead = dyn Fn(&request::Parts) -> Option<String> + Send + Sync;
type RenderError = dyn Fn(&Error) -> Response<Bytes> + Send + Sync;
type Predicate<T> = dyn Fn(T) -> bool + Send + Sync;
/// As [`Predicate`], of something borrowed.
type PredicateOf<T> = dyn Fn(&T) -> bool + Send + Sync;

#[derive(Clone)]
pub(crate) struct Config {
    pub(crate) methods: Arc<PredicateOf<Method>>,
    pub(crate) skip: Option<Arc<PredicateOf<request::Parts>>>,
    pub(crate) key_from: KeyFrom,
    pub(crate) key_rules: KeyRules,
    pub(crate) key_check: Option<Arc<PredicateOf<str>>>,
    pub(crate) missing_key: MissingKey,
    pub(crate) namespace: Arc<str>,
    pub(crate) secret: Option<Secret>,
    pub(crate) principal: Principal,
    pub(crate) fingerprint: By,
    pub(crate) key_reuse: KeyReuse,
    pub(crate) concurrent_requests: ConcurrentRequests,
    pub(crate) retry_after: Duration,
    pub(crate) waiters_per_key: usize,
    pub(crate) waiters: usize,
    pub(crate) lease: Ttl,
    pub(crate) orphans: OrphanPolicy,
    pub(crate) orphan_retention: Option<Ttl>,
    pub(crate) store_timeout: Duration,
    pub(crate) store_failure: StoreFailure,
    pub(crate) request_limit: usize,
    pub(crate) body_timeout: Duration,
    pub(crate) response_limit: usize,
    pub(crate) collect_timeout: Duration,
    pub(crate) recorded: Arc<Predicate<StatusCode>>,
    pub(crate) unrecordable: Unrecordable,
    pub(crate) retention: Ttl,
    pub(crate) max_retention: Ttl,
    pub(crate) replayed: Arc<PredicateOf<HeaderName>>,
    pub(crate) replay_marker: Option<(HeaderName, HeaderValue)>,
    pub(crate) refusals: Refusals,
    pub(crate) compress_above: usize,
    pub(crate) max_in_flight: usize,
    pub(crate) max_buffered: usize,
}

impl Config {
    /// How records are written and read here.
    pub(crate) fn codec(&self) -> Codec {
        Codec {
            compress_above: self.compress_above,
            // A record holds the body and a head that servers bound far below this. Lowering the response limit must not
            // make the records unreadable that were written before: hence the floor.
            max_inflated: self.response_limit.saturating_add(MIB).max(16 * MIB),
        }
    }

    pub(crate) fn refusal(&self, error: &Error) -> Response<Bytes> {
        match &self.refusals {
            Refusals::ProblemJson { described_by } => problem::problem_json(error, described_by),
            Refusals::Custom(render) => render(error),
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("missing_key", &self.missing_key)
            .field("principal", &self.principal)
            .field("key_reuse", &self.key_reuse)
            .field("concurrent_requests", &self.concurrent_requests)
            .field("lease", &self.lease)
            .field("orphans", &self.orphans)
            .field("store_failure", &self.store_failure)
            .field("request_limit", &self.request_limit)
            .field("response_limit", &self.response_limit)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

const MIB: usize = 1024 * 1024;
