//! Named sets of decisions. Each cell of the table at [`Preset`] is one field here and one setter of the layer.

use std::{sync::Arc, time::Duration};

use http::{HeaderName, HeaderValue, Method, StatusCode};

use crate::{
    config::Config,
    execution,
    execution::rules::{ConcurrentRequests, StoreFailure},
    limits,
    record::replayed_by_default,
    request,
    request::fingerprint::By,
    request::key::{IDEMPOTENCY_KEY, KeyRules, KeySyntax},
    request::principal::Principal,
    request::rules::{KeyFrom, KeyReuse, MissingKey},
    response,
    response::problem,
    response::replay::IDEMPOTENT_REPLAYED,
    response::rules::{Refusals, Unrecordable},
    store::{OrphanPolicy, Ttl},
};

/// A named set of decisions to start from; every one of them can be changed alone afterwards.
///
/// | decision | `Recommended` | `Ietf` | `Stripe` | `Idempo` |
/// |---|---|---|---|---|
/// | header | `Idempotency-Key` | same | same | the same, else `X-Idempotency-Key` |
/// | [key syntax](KeySyntax) | `Lenient` | `Strict` | `Verbatim` | `Unquoted` |
/// | key length in bytes | 1 to 255 | 1 to 1,024 | 1 to 255 | 1 or more |
/// | methods | all but GET, HEAD, OPTIONS, TRACE, QUERY | POST, PATCH | POST | all but GET, HEAD, OPTIONS |
/// | the key with another request | 422 | 422 | 400 | a separate request |
/// | the first is still running | 409, `Retry-After: 1` | same | same | 429, `Retry-After: 2` |
/// | recorded | 2xx, 3xx, 4xx but 401, 403, 407, 408, 421, 423, 424, 425, 429 | 2xx to 5xx but 408, 421, 425, 429, 503 | all but 401, 403, 429 | 2xx, 3xx, 4xx but 425, 429 |
/// | too large or streamed | tombstone | tombstone | tombstone | the key is freed |
/// | retention | 24 h | 24 h | 24 h | 30 s |
/// | replay marker | `Idempotent-Replayed: true` | none | as `Recommended` | none |
/// | refusals | problem+json | problem+json | `{"error":{..}}` | `{"ok":false,"error":{..}}` |
///
/// Another preset in a service that runs is a change of each decision that differs: from or to `Idempo` it forgets all records.
///
/// Everything else is the same: it is stated at each setter of [`IdempotencyLayer`](crate::IdempotencyLayer), whose
/// "Default" is that of `Recommended`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Preset {
    /// What this crate recommends.
    #[default]
    Recommended,
    /// What draft-ietf-httpapi-idempotency-key-header-07 says, strictly.
    ///
    /// It records every 5xx but 503: a passing failure, or the 504 of a timeout inside the layer, is what retries are answered for
    /// the whole retention, unless the answer has [`Retention::NoStore`](crate::Retention::NoStore) on it.
    Ietf,
    /// What clients of Stripe's API expect. It records every 5xx: see [`Ietf`](Self::Ietf) for what that means.
    Stripe,
    /// What the Ruby gem idempo does.
    Idempo,
}

impl Preset {
    pub(crate) fn config(self) -> Config {
        match self {
            Self::Recommended => recommended(),
            Self::Ietf => ietf(),
            Self::Stripe => stripe(),
            Self::Idempo => idempo(),
        }
    }
}

fn recommended() -> Config {
    Config {
        request: request::rules::Rules {
            methods: Arc::new(|method| {
                ![
                    &Method::GET,
                    &Method::HEAD,
                    &Method::OPTIONS,
                    &Method::TRACE,
                ]
                .contains(&method)
                    && method.as_str() != "QUERY"
            }),
            skip: None,
            key_from: KeyFrom::Header {
                name: IDEMPOTENCY_KEY,
                alias: None,
            },
            key_rules: KeyRules {
                syntax: KeySyntax::Lenient,
                min: 1,
                max: 255,
            },
            key_check: None,
            missing_key: MissingKey::PassThrough,
            namespace: Arc::from(""),
            secret: None,
            principal: Principal::authorization(),
            fingerprint: By::RawBody,
            key_reuse: KeyReuse::Refuse(StatusCode::UNPROCESSABLE_ENTITY),
            body_limit: 2 * 1024 * 1024,
            body_timeout: Duration::from_secs(30),
        },
        response: response::rules::Rules {
            retry_after: Duration::from_secs(1),
            body_limit: 4 * 1024 * 1024,
            collect_timeout: Duration::from_secs(10),
            recorded: Arc::new(|status| {
                (200..400).contains(&status.as_u16())
                    || status.is_client_error()
                        && ![401, 403, 407, 408, 421, 423, 424, 425, 429].contains(&status.as_u16())
            }),
            unrecordable: Unrecordable::Tombstone,
            retention: Ttl::from_secs(24 * 60 * 60),
            max_retention: Ttl::from_secs(365 * 24 * 60 * 60),
            replayed: Arc::new(replayed_by_default),
            replay_marker: Some((IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"))),
            refusals: Refusals::ProblemJson {
                described_by: problem::described_by(problem::DESCRIBED_BY)
                    .expect("a constant that a test renders"),
            },
            compress_above: 8 * 1024,
        },
        execution: execution::rules::Rules {
            concurrent_requests: ConcurrentRequests::Conflict,
            waiters_per_key: 64,
            waiters: 1024,
            lease: Ttl::from_secs(15),
            orphans: OrphanPolicy::TakeOver,
            orphan_retention: None,
            store_timeout: Duration::from_secs(2),
            store_failure: StoreFailure::Refuse,
        },
        limits: limits::Rules {
            max_in_flight: 10_000,
            max_buffered: 256 * 1024 * 1024,
        },
    }
}

fn ietf() -> Config {
    let base = recommended();
    Config {
        request: request::rules::Rules {
            methods: Arc::new(|method| method == Method::POST || method == Method::PATCH),
            key_rules: KeyRules {
                syntax: KeySyntax::Strict,
                min: 1,
                max: 1024,
            },
            ..base.request
        },
        response: response::rules::Rules {
            recorded: Arc::new(|status| {
                (200..600).contains(&status.as_u16())
                    && ![408, 421, 425, 429, 503].contains(&status.as_u16())
            }),
            replay_marker: None,
            ..base.response
        },
        ..base
    }
}

fn stripe() -> Config {
    let base = recommended();
    Config {
        request: request::rules::Rules {
            methods: Arc::new(|method| method == Method::POST),
            key_rules: KeyRules {
                syntax: KeySyntax::Verbatim,
                min: 1,
                max: 255,
            },
            key_reuse: KeyReuse::Refuse(StatusCode::BAD_REQUEST),
            ..base.request
        },
        response: response::rules::Rules {
            recorded: Arc::new(|status| ![401, 403, 429].contains(&status.as_u16())),
            refusals: Refusals::Custom(Arc::new(problem::stripe)),
            ..base.response
        },
        ..base
    }
}

fn idempo() -> Config {
    let base = recommended();
    Config {
        request: request::rules::Rules {
            methods: Arc::new(|method| {
                ![&Method::GET, &Method::HEAD, &Method::OPTIONS].contains(&method)
            }),
            key_from: KeyFrom::Header {
                name: IDEMPOTENCY_KEY,
                alias: Some(HeaderName::from_static("x-idempotency-key")),
            },
            key_rules: KeyRules {
                syntax: KeySyntax::Unquoted,
                min: 1,
                max: usize::MAX,
            },
            key_reuse: KeyReuse::Separate,
            ..base.request
        },
        response: response::rules::Rules {
            retry_after: Duration::from_secs(2),
            recorded: Arc::new(|status| {
                (200..500).contains(&status.as_u16()) && ![425, 429].contains(&status.as_u16())
            }),
            unrecordable: Unrecordable::Release,
            retention: Ttl::from_secs(30),
            replay_marker: None,
            refusals: Refusals::Custom(Arc::new(problem::idempo)),
            ..base.response
        },
        execution: execution::rules::Rules {
            concurrent_requests: ConcurrentRequests::TooManyRequests,
            ..base.execution
        },
        ..base
    }
}
