//! Rules for requests: which are covered, where the key comes from, and the limits of the body.

use std::{sync::Arc, time::Duration};

use http::{HeaderName, Method, StatusCode, request};

use super::{
    fingerprint::FingerprintBy,
    key::{KeyRules, KeyScope},
    principal::Principal,
};
use crate::{digest::Secret, error::ErrorKind};

/// Treatment of a request without a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingKey {
    /// The handler executes every such request, and the layer stores nothing.
    PassThrough,
    /// The layer responds with 400 `missing-key`. Nothing is executed.
    Reject,
    /// The fingerprint is used as the key: equal requests of one principal are one request while the record is stored.
    ///
    /// Two equal requests that a client means as two, such as the same order placed twice, also become one. Therefore set a
    /// short retention: FIFO queues use five minutes. All requests without a principal count as requests of one caller.
    /// With [`FingerprintBy::head_only`](crate::FingerprintBy::head_only), all requests to one path are equal.
    ///
    /// By default, `If-Match`, `If-None-Match`, `If-Unmodified-Since` and `If` of WebDAV are parts of such a fingerprint: see
    /// [`FingerprintBy`](crate::FingerprintBy#headers). `Accept` and `Accept-Language` are not: a client that wants another
    /// representation gets the recorded one. If a handler negotiates its response, add the header by
    /// [`and_header`](crate::FingerprintBy::and_header).
    ///
    /// A 4xx response under such a key is not recorded, regardless of the
    /// [recorded statuses](crate::IdempotencyLayer::with_recorded_statuses). The client cannot choose another key when it repeats
    /// a rejected request. There are two exceptions. A response that [needs attention](crate::NeedsAttention) blocks the key. In a
    /// takeover, and after a checkpoint or a call of [`Lease::derive`](crate::Lease::derive), the recorded statuses apply. A release
    /// would leave an orphan there, and a completer would continue after the 4xx.
    ///
    /// The handler gets a [`Lease`](crate::Lease), but no [`IdempotencyKey`](crate::IdempotencyKey).
    Derive,
}

/// Treatment of a request that reuses the key of another request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyReuse {
    /// The layer responds with `key-reused` and this status, which must be a 4xx. Nothing is executed.
    Refuse(StatusCode),
    /// The request is separate and has an entry of its own: the fingerprint becomes part of the entry's ID.
    ///
    /// A client that reuses a key by mistake is not notified.
    Separate,
}

impl KeyReuse {
    /// Returns the status of the rejection.
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::Refuse(status) => status,
            Self::Separate => ErrorKind::KeyReused.status(),
        }
    }
}

/// Source of the key.
#[derive(Clone)]
pub(crate) enum KeyFrom {
    Header {
        name: HeaderName,
        alias: Option<HeaderName>,
    },
    Service {
        scope: KeyScope,
        key: Arc<KeyFromHead>,
    },
}

impl KeyFrom {
    /// Returns `true` if the service makes or derives the key. A client then cannot choose another key for a corrected request.
    pub(crate) fn is_service(&self) -> bool {
        matches!(self, Self::Service { .. })
    }
}

type KeyFromHead = dyn Fn(&request::Parts) -> Option<String> + Send + Sync;
type Predicate<T> = dyn Fn(&T) -> bool + Send + Sync;

/// Settings for requests.
#[derive(Clone)]
pub(crate) struct Rules {
    pub(crate) methods: Arc<Predicate<Method>>,
    pub(crate) skip: Option<Arc<Predicate<request::Parts>>>,
    pub(crate) key_from: KeyFrom,
    pub(crate) key_rules: KeyRules,
    pub(crate) key_check: Option<Arc<Predicate<str>>>,
    pub(crate) missing_key: MissingKey,
    pub(crate) echo_key: bool,
    pub(crate) namespace: Arc<str>,
    pub(crate) secret: Option<Secret>,
    pub(crate) host_in_scope: bool,
    pub(crate) endpoint_in_scope: bool,
    pub(crate) principal: Principal,
    pub(crate) fingerprint: FingerprintBy,
    pub(crate) key_reuse: KeyReuse,
    pub(crate) body_limit: usize,
    pub(crate) body_timeout: Duration,
    /// `true` in the settings for gRPC calls of protected methods.
    #[cfg(feature = "grpc")]
    pub(crate) is_grpc: bool,
}

impl Rules {
    /// Returns `true` if these are the settings for gRPC calls of protected methods.
    pub(crate) const fn is_grpc(&self) -> bool {
        #[cfg(feature = "grpc")]
        return self.is_grpc;
        #[cfg(not(feature = "grpc"))]
        false
    }
}
