//! Presets of the settings. Each cell of the table at [`Preset`] is one field here and one setter of the layer.

use std::{sync::Arc, time::Duration};

use http::{HeaderName, HeaderValue, Method, StatusCode};

use crate::{
    config::Config,
    enforcement::EnforcementSwitch,
    execution,
    execution::rules::{ConcurrentRequests, StoreFailure},
    limits,
    record::replayed_by_default,
    request,
    request::fingerprint::FingerprintBy,
    request::json_fingerprint::JsonFingerprint,
    request::key::{IDEMPOTENCY_KEY, KeyRules, KeySyntax},
    request::principal::Principal,
    request::rules::{KeyFrom, KeyReuse, MissingKey},
    response,
    response::problem,
    response::replay::IDEMPOTENT_REPLAYED,
    response::rules::{ErrorResponse, Unrecordable, is_rejection_of_form},
    safe_methods::is_safe,
    store::{OrphanPolicy, Ttl},
};

/// Preset of the settings. Each setting can be changed afterwards.
///
/// | setting | `Recommended` | `Ietf` | `Stripe` | `Idempo` | `Acp` |
/// |---|---|---|---|---|---|
/// | header | `Idempotency-Key` | same | same | the same, else `X-Idempotency-Key` | the same, and in each response |
/// | [key syntax](KeySyntax) | `Lenient` | `Strict` | `Verbatim` | `Unquoted` | `Verbatim` |
/// | key length in bytes | 1 to 255 | 1 to 1,024 | 1 to 255 | 1 or more | 1 to 255 |
/// | request without a key | as without the layer | same | same | same | 400 |
/// | methods | all but GET, HEAD, OPTIONS, TRACE, QUERY, PROPFIND, REPORT, SEARCH | POST, PATCH | POST | all but GET, HEAD, OPTIONS | POST |
/// | body of a retry | the same bytes | same | same | same | the same JSON, numbers by value |
/// | [principal](Principal) | all credentials | same | same | `Authorization` alone | as `Recommended`; also the endpoint |
/// | the same key at another [host](crate::IdempotencyLayer::with_host_in_scope) | the same request | same | same | a separate request | as `Recommended` |
/// | key of another request | 422 | 422 | 400 | a separate request | 422 |
/// | duplicate during the execution | 409, `Retry-After: 1` | same | same | 429, `Retry-After: 2` | as `Recommended` |
/// | recorded statuses | 2xx to 4xx but 403, 408, 424, 425, 429 and \[1\] | 2xx to 5xx but 408, 425, 429, 503 and \[1\] | all but 403, 425, 429 and \[1\] | 2xx to 4xx but 425, 429 | as `Recommended` |
/// | too large or streamed | tombstone | tombstone | tombstone | release | tombstone |
/// | retention | 24 h | 24 h | 24 h | 30 s | 24 h |
/// | replay marker | `Idempotent-Replayed: true` | none | as `Recommended` | none | as `Recommended` |
/// | errors | problem+json | problem+json | `{"error":{..}}` | `{"ok":false,"error":{..}}` | `{"type":.., "code":.., "message":..}` |
///
/// \[1\]: 401, 406, 407, 411, 412, 413, 415, 416, 417, 419, 421, 423, 426, 428, 431 and 440. They reject the form of a
/// request. No preset records 307 and 308. The [setter](crate::IdempotencyLayer::with_recorded_statuses) gives the reasons.
///
/// All other settings are the same. The setters of [`IdempotencyLayer`](crate::IdempotencyLayer) document the defaults,
/// which are those of `Recommended`.
///
/// If you change the preset of a running service, you change each setting that differs. After a change from or to `Idempo`
/// or `Acp`, no record is found any more: retries execute again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Preset {
    /// Settings that this crate recommends.
    #[default]
    Recommended,
    /// Settings that follow draft-ietf-httpapi-idempotency-key-header-07 strictly.
    ///
    /// This preset records every 5xx but 503. Retries then get a temporary failure, or the 504 of a timeout inside the
    /// layer, for the complete retention, unless the response has [`Retention::NoStore`](crate::Retention::NoStore).
    Ietf,
    /// Settings that clients of Stripe's API expect. This preset records every 5xx, with the consequences described at
    /// [`Ietf`](Self::Ietf).
    Stripe,
    /// Settings of the Ruby gem idempo.
    Idempo,
    /// Settings that agents of the Agentic Commerce Protocol expect, in the version of 2026-04-17. See section 6 of its RFC
    /// "Agentic Checkout", and section 5 of "Delegate Payment".
    ///
    /// - A POST without a key gets 400 `idempotency_key_required`.
    /// - A key belongs to its caller and its endpoint: on another path it is another key.
    /// - Bodies are compared as JSON: `1.0` equals `1`, the order of members does not count, and `null` differs from an
    ///   absent member.
    /// - A duplicate during the execution gets 409 `idempotency_in_flight`, and another body gets 422
    ///   `idempotency_conflict`.
    ///
    /// Two settings are stricter than the protocol. A 4xx that a retry may correct, such as 429, is not recorded. The query,
    /// the media type and the [`ACTING_HEADERS`](crate::ACTING_HEADERS) are part of the fingerprint.
    Acp,
}

impl Preset {
    pub(crate) fn config(self) -> Config {
        match self {
            Self::Recommended => recommended(),
            Self::Ietf => ietf(),
            Self::Stripe => stripe(),
            Self::Idempo => idempo(),
            Self::Acp => acp(),
        }
    }
}

fn recommended() -> Config {
    Config {
        request: request::rules::Rules {
            methods: Arc::new(|method| !is_safe(method)),
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
            echo_key: false,
            namespace: Arc::from(""),
            secret: None,
            host_in_scope: false,
            endpoint_in_scope: false,
            principal: Principal::credentials(),
            fingerprint: FingerprintBy::raw_body(),
            key_reuse: KeyReuse::Refuse(StatusCode::UNPROCESSABLE_ENTITY),
            body_limit: 2 * 1024 * 1024,
            body_timeout: Duration::from_secs(30),
            #[cfg(feature = "grpc")]
            is_grpc: false,
        },
        response: response::rules::Rules {
            retry_after: Duration::from_secs(1),
            body_limit: 4 * 1024 * 1024,
            collect_timeout: Duration::from_secs(10),
            recorded_statuses: Arc::new(|status| {
                (200..500).contains(&status.as_u16())
                    && ![403, 408, 424, 425, 429].contains(&status.as_u16())
                    && !is_rejection_of_form(status)
            }),
            unrecordable: Unrecordable::Tombstone,
            retention: Ttl::from_secs(24 * 60 * 60),
            max_retention: Ttl::from_secs(365 * 24 * 60 * 60),
            replayed_headers: Arc::new(replayed_by_default),
            replay_marker: Some((IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"))),
            error_response: ErrorResponse::ProblemJson {
                described_by: HeaderValue::from_static(problem::DEFAULT_LINK),
            },
            compress_above: 8 * 1024,
            has_trace_links: false,
            warnings: Arc::default(),
            #[cfg(feature = "grpc")]
            grpc: None,
        },
        execution: execution::rules::Rules {
            concurrent_requests: ConcurrentRequests::Conflict,
            waiters_per_key: 64,
            waiters: 1024,
            lease_ttl: Ttl::from_secs(15),
            orphan_policy: OrphanPolicy::TakeOver,
            failure: None,
            orphan_retention: None,
            overdue_after: None,
            store_timeout: Duration::from_secs(2),
            store_failure: StoreFailure::Refuse,
        },
        limits: limits::Rules {
            max_in_flight: 10_000,
            max_request_bytes: 128 * 1024 * 1024,
            max_response_bytes: 128 * 1024 * 1024,
            #[cfg(feature = "rate")]
            fresh_keys: None,
        },
        enforcement: EnforcementSwitch::default(),
        #[cfg(feature = "grpc")]
        grpc: None,
        #[cfg(feature = "grpc")]
        of_layer: None,
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
                    && ![408, 425, 429, 503].contains(&status.as_u16())
                    && !is_rejection_of_form(status)
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
            recorded_statuses: Arc::new(|status| {
                ![403, 425, 429].contains(&status.as_u16()) && !is_rejection_of_form(status)
            }),
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
            host_in_scope: true,
            principal: Principal::authorization(),
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

fn acp() -> Config {
    let base = recommended();
    let by = JsonFingerprint::new().numbers_by_value();
    Config {
        request: request::rules::Rules {
            methods: Arc::new(|method| method == Method::POST),
            key_rules: KeyRules {
                syntax: KeySyntax::Verbatim,
                min: 1,
                max: 255,
            },
            missing_key: MissingKey::Reject,
            echo_key: true,
            endpoint_in_scope: true,
            fingerprint: FingerprintBy::json(by),
            ..base.request
        },
        response: response::rules::Rules {
            error_response: ErrorResponse::Custom(Arc::new(problem::acp)),
            ..base.response
        },
        ..base
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// The setters and `docs/operations/threats.md` state these limits.
    #[test]
    fn presets_have_documented_limits() {
        for preset in [
            Preset::Recommended,
            Preset::Ietf,
            Preset::Stripe,
            Preset::Idempo,
            Preset::Acp,
        ] {
            let limits = preset.config().limits;
            assert_eq!(limits.max_in_flight, 10_000, "{preset:?}");
            let bytes = [limits.max_request_bytes, limits.max_response_bytes];
            assert_eq!(bytes, [128 * 1024 * 1024; 2], "{preset:?}");
        }
    }
}
