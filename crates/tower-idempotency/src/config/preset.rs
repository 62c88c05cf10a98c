//! Presets of the settings. Each cell of the table at [`Preset`] is one field here and one setter of the layer.

use std::{sync::Arc, time::Duration};

use http::{HeaderName, HeaderValue, Method, StatusCode};

use crate::{
    config::Config,
    execution,
    execution::rules::{ConcurrentRequests, StoreFailure},
    limits,
    record::replayed_by_default,
    request,
    request::fingerprint::FingerprintMethod,
    request::key::{IDEMPOTENCY_KEY, KeyRules, KeySyntax},
    request::principal::Principal,
    request::rules::{KeyFrom, KeyReuse, MissingKey},
    response,
    response::problem,
    response::replay::IDEMPOTENT_REPLAYED,
    response::rules::{ErrorResponse, Unrecordable},
    store::{OrphanPolicy, Ttl},
};

/// Preset of the settings. Each setting can be changed afterwards.
///
/// | setting | `Recommended` | `Ietf` | `Stripe` | `Idempo` |
/// |---|---|---|---|---|
/// | header | `Idempotency-Key` | same | same | the same, else `X-Idempotency-Key` |
/// | [key syntax](KeySyntax) | `Lenient` | `Strict` | `Verbatim` | `Unquoted` |
/// | key length in bytes | 1 to 255 | 1 to 1,024 | 1 to 255 | 1 or more |
/// | methods | all but GET, HEAD, OPTIONS, TRACE, QUERY | POST, PATCH | POST | all but GET, HEAD, OPTIONS |
/// | key of another request | 422 | 422 | 400 | a separate request |
/// | duplicate during the execution | 409, `Retry-After: 1` | same | same | 429, `Retry-After: 2` |
/// | recorded statuses | 2xx, 3xx, 4xx but 401, 403, 407, 408, 421, 423, 424, 425, 429 | 2xx to 5xx but 408, 421, 425, 429, 503 | all but 401, 403, 429 | 2xx, 3xx, 4xx but 425, 429 |
/// | too large or streamed | tombstone | tombstone | tombstone | release |
/// | retention | 24 h | 24 h | 24 h | 30 s |
/// | replay marker | `Idempotent-Replayed: true` | none | as `Recommended` | none |
/// | errors | problem+json | problem+json | `{"error":{..}}` | `{"ok":false,"error":{..}}` |
///
/// All other settings are the same. The setters of [`IdempotencyLayer`](crate::IdempotencyLayer) document the defaults, which
/// are those of `Recommended`.
///
/// If you change the preset of a running service, you change each setting that differs. After a change from or to `Idempo`,
/// no record is found any more: retries execute again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Preset {
    /// Settings that this crate recommends.
    #[default]
    Recommended,
    /// Settings that follow draft-ietf-httpapi-idempotency-key-header-07 strictly.
    ///
    /// This preset records every 5xx but 503. Retries then get a temporary failure, or the 504 of a timeout inside the layer, for
    /// the complete retention, unless the response has [`Retention::NoStore`](crate::Retention::NoStore).
    Ietf,
    /// Settings that clients of Stripe's API expect. This preset records every 5xx, with the consequences described at
    /// [`Ietf`](Self::Ietf).
    Stripe,
    /// Settings of the Ruby gem idempo.
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
            fingerprint: FingerprintMethod::RawBody,
            key_reuse: KeyReuse::Refuse(StatusCode::UNPROCESSABLE_ENTITY),
            body_limit: 2 * 1024 * 1024,
            body_timeout: Duration::from_secs(30),
        },
        response: response::rules::Rules {
            retry_after: Duration::from_secs(1),
            body_limit: 4 * 1024 * 1024,
            collect_timeout: Duration::from_secs(10),
            recorded_statuses: Arc::new(|status| {
                (200..400).contains(&status.as_u16())
                    || status.is_client_error()
                        && ![401, 403, 407, 408, 421, 423, 424, 425, 429].contains(&status.as_u16())
            }),
            unrecordable: Unrecordable::Tombstone,
            retention: Ttl::from_secs(24 * 60 * 60),
            max_retention: Ttl::from_secs(365 * 24 * 60 * 60),
            replayed_headers: Arc::new(replayed_by_default),
            replay_marker: Some((IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"))),
            error_response: ErrorResponse::ProblemJson {
                described_by: problem::described_by(problem::DESCRIBED_BY)
                    .expect("the constant is a valid header value"),
            },
            compress_above: 8 * 1024,
        },
        execution: execution::rules::Rules {
            concurrent_requests: ConcurrentRequests::Conflict,
            waiters_per_key: 64,
            waiters: 1024,
            lease_ttl: Ttl::from_secs(15),
            orphan_policy: OrphanPolicy::TakeOver,
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
            recorded_statuses: Arc::new(|status| {
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
            recorded_statuses: Arc::new(|status| ![401, 403, 429].contains(&status.as_u16())),
            error_response: ErrorResponse::Custom(Arc::new(problem::stripe)),
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
            recorded_statuses: Arc::new(|status| {
                (200..500).contains(&status.as_u16()) && ![425, 429].contains(&status.as_u16())
            }),
            unrecordable: Unrecordable::Release,
            retention: Ttl::from_secs(30),
            replay_marker: None,
            error_response: ErrorResponse::Custom(Arc::new(problem::idempo)),
            ..base.response
        },
        execution: execution::rules::Rules {
            concurrent_requests: ConcurrentRequests::TooManyRequests,
            ..base.execution
        },
        ..base
    }
}
