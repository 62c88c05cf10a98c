//! The rules for requests: which are covered, where the key comes from, and the limits of the body.

use std::{sync::Arc, time::Duration};

use http::{HeaderName, Method, StatusCode, request};

use super::{
    fingerprint::{By, Secret},
    key::KeyRules,
    principal::Principal,
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

/// Where the key comes from.
#[derive(Clone)]
pub(crate) enum KeyFrom {
    Header {
        name: HeaderName,
        alias: Option<HeaderName>,
    },
    Head(Arc<KeyFromHead>),
}

type KeyFromHead = dyn Fn(&request::Parts) -> Option<String> + Send + Sync;
type Predicate<T> = dyn Fn(&T) -> bool + Send + Sync;

/// The decisions about requests.
#[derive(Clone)]
pub(crate) struct Rules {
    pub(crate) methods: Arc<Predicate<Method>>,
    pub(crate) skip: Option<Arc<Predicate<request::Parts>>>,
    pub(crate) key_from: KeyFrom,
    pub(crate) key_rules: KeyRules,
    pub(crate) key_check: Option<Arc<Predicate<str>>>,
    pub(crate) missing_key: MissingKey,
    pub(crate) namespace: Arc<str>,
    pub(crate) secret: Option<Secret>,
    pub(crate) principal: Principal,
    pub(crate) fingerprint: By,
    pub(crate) key_reuse: KeyReuse,
    pub(crate) body_limit: usize,
    pub(crate) body_timeout: Duration,
}
