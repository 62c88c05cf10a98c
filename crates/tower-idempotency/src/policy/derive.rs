//! Derives the policy from the settings in use. Calls the predicates and renders the errors, so that no setting is
//! described twice.

use std::time::Duration;

use http::{HeaderValue, Method, StatusCode, header};

use super::{
    ConcurrentPolicy, ErrorPolicy, FingerprintPolicy, KeyPolicy, LimitPolicy, Marker, Policy,
    PolicySwitch, ScopePolicy, StatusRange,
};
use crate::{
    config::Config,
    error::{Error, ErrorKind},
    execution::rules::{ConcurrentRequests, ExecutionFailure, StoreFailure},
    layer::IdempotencyLayer,
    limits::AdmissionError,
    request::{
        is_method_covered,
        key::{KeyScope, KeySyntax},
        missing_key,
        rules::{KeyFrom, KeyReuse, MissingKey},
    },
    response::{
        reject::{admission_error, in_progress, key_reused, outcome_unknown, store_unavailable},
        rules::{ErrorResponse, Unrecordable},
    },
    store::{KeyId, OrphanPolicy},
};

const METHODS: [&str; 10] = [
    "CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE",
];

/// The policy, for clients and their documents.
impl IdempotencyLayer {
    /// Returns the policy of this layer, from its settings. Setters that are called later change it, so call it last.
    ///
    /// The predicates of [`with_methods_where`](Self::with_methods_where) and
    /// [`with_recorded_statuses`](Self::with_recorded_statuses) are called for each method and status, and
    /// [`with_error_response`](Self::with_error_response) renders an example of each error. A rejected client gets the same
    /// response.
    ///
    /// A clone with other settings has another policy.
    #[must_use]
    pub fn policy(&self) -> Policy {
        policy(&self.config)
    }
}

fn policy(config: &Config) -> Policy {
    let (request, response, execution) = (&config.request, &config.response, &config.execution);
    let is_streamed = request.fingerprint.is_head_only();
    Policy {
        version: 1,
        key: key(config),
        methods: METHODS
            .into_iter()
            .filter(|method| {
                Method::from_bytes(method.as_bytes())
                    .is_ok_and(|method| is_method_covered(request, &method))
            })
            .map(str::to_owned)
            .collect(),
        has_exceptions: request.skip.is_some(),
        enforced_percent: config.enforcement.get().enforced_percent(),
        scope: ScopePolicy {
            callers: request.principal.kinds(),
            is_shared: matches!(
                request.key_from,
                KeyFrom::Service {
                    scope: KeyScope::AllCallers,
                    ..
                }
            ),
            host: request.host_in_scope,
            endpoint: request.endpoint_in_scope,
        },
        fingerprint: fingerprint(config),
        key_reuse: match request.key_reuse {
            KeyReuse::Refuse(status) => {
                let res = response.render_error(&key_reused(status));
                Some(res.status().as_u16())
            }
            KeyReuse::Separate => None,
        },
        concurrent_requests: concurrent_requests(config),
        lease: execution.lease_ttl.as_duration(),
        orphans: match execution.orphan_policy {
            OrphanPolicy::TakeOver => "take-over",
            OrphanPolicy::Refuse | OrphanPolicy::Never => "refuse",
        },
        failure: match execution.failure() {
            ExecutionFailure::Release => "release",
            ExecutionFailure::Orphan => "orphan",
            ExecutionFailure::NeedsAttention => "needs-attention",
        },
        store_failure: match execution.store_failure {
            StoreFailure::Refuse => "refuse",
            StoreFailure::DangerouslyExecuteUnprotected => "execute-unprotected",
        },
        recorded_statuses: recorded_statuses(config),
        unrecordable: match response.unrecordable {
            Unrecordable::Tombstone => "refuse",
            Unrecordable::Release => "execute",
        },
        retention: response.retention.as_duration(),
        max_retention: response.max_retention.as_duration(),
        orphan_retention: config.orphan_retention().as_duration(),
        replay_marker: response.replay_marker.as_ref().map(|(name, value)| Marker {
            name: name.as_str().to_owned(),
            value: String::from_utf8_lossy(value.as_bytes()).into_owned(),
        }),
        limits: LimitPolicy {
            request_bytes: (!is_streamed).then_some(request.body_limit),
            request_time: (!is_streamed).then_some(request.body_timeout),
            response_bytes: response.body_limit,
        },
        errors: errors(config),
        switch: PolicySwitch(config.enforcement.clone()),
    }
}

fn key(config: &Config) -> KeyPolicy {
    let rules = &config.request;
    let (header, alias) = match &rules.key_from {
        KeyFrom::Header { name, alias } => (Some(name), alias.as_ref()),
        KeyFrom::Service { .. } => (None, None),
    };
    let text = |name: &http::HeaderName| name.as_str().to_owned();
    KeyPolicy {
        header: header.map(text),
        alias: alias.map(text),
        is_required: rules.missing_key == MissingKey::Reject,
        missing: match rules.missing_key {
            MissingKey::PassThrough => "pass-through",
            MissingKey::Reject => "reject",
            MissingKey::Derive => "derive",
        },
        syntax: header.map(|_| match rules.key_rules.syntax {
            KeySyntax::Lenient => "lenient",
            KeySyntax::Strict => "strict",
            KeySyntax::Verbatim => "verbatim",
            KeySyntax::Unquoted => "unquoted",
        }),
        // An empty key is always rejected.
        min_bytes: rules.key_rules.min.max(1),
        max_bytes: (rules.key_rules.max < usize::MAX).then_some(rules.key_rules.max),
        has_check: rules.key_check.is_some(),
        is_repeated: rules.echo_key && header.is_some(),
    }
}

fn fingerprint(config: &Config) -> FingerprintPolicy {
    let by = &config.request.fingerprint;
    let json = by.json_comparison();
    FingerprintPolicy {
        body: by.body_name(),
        numbers_by_value: json.is_some_and(|json| json.is_by_value()),
        without: json.map(|json| json.left_out()).unwrap_or_default(),
        headers: by
            .headers()
            .iter()
            .map(|name| name.as_str().to_owned())
            .collect(),
    }
}

fn concurrent_requests(config: &Config) -> ConcurrentPolicy {
    let (setting, rules) = (config.execution.concurrent_requests, &config.response);
    let res = rules.render_error(&in_progress(rules, setting.status()));
    let retry_after = res.headers().get(header::RETRY_AFTER);
    let retry_after = retry_after.and_then(|value| value.to_str().ok()?.parse().ok());
    ConcurrentPolicy {
        status: res.status().as_u16(),
        wait: match setting {
            ConcurrentRequests::Wait(wait) => wait,
            ConcurrentRequests::Conflict | ConcurrentRequests::TooManyRequests => Duration::ZERO,
        },
        retry_after: retry_after.map(Duration::from_secs),
    }
}

fn recorded_statuses(config: &Config) -> Vec<StatusRange> {
    let mut ranges: Vec<StatusRange> = Vec::new();
    let is_key_of_service = config.request.key_from.is_service();
    for code in 200..600 {
        let Ok(status) = StatusCode::from_u16(code) else {
            continue;
        };
        let is_recorded = config.response.is_recorded(status) == Some(true)
            && !(is_key_of_service && status.is_client_error());
        match ranges.last_mut() {
            _ if !is_recorded => {}
            Some(range) if range.last + 1 == code => range.last = code,
            _ => ranges.push(StatusRange {
                first: code,
                last: code,
            }),
        }
    }
    ranges
}

/// Returns the errors that a client can get, in the order of the decisions.
fn errors(config: &Config) -> Vec<ErrorPolicy> {
    let (request, response) = (&config.request, &config.response);
    let id = KeyId::from_bytes([0x5f; 32]);
    let mut errors = Vec::new();
    if request.missing_key == MissingKey::Reject {
        errors.push(missing_key(request));
    }
    errors.push(Error::new(ErrorKind::MalformedKey, "the key is empty"));
    if request.key_rules.max < usize::MAX {
        let max = request.key_rules.max;
        let detail = format!(
            "expected a key of at most {max} bytes, found {}",
            max.saturating_add(1)
        );
        errors.push(Error::new(ErrorKind::KeyTooLong, detail));
    }
    if request.principal.can_be_ambiguous() {
        let detail = "expected one line of each credential header, found several";
        errors.push(Error::new(ErrorKind::PrincipalAmbiguous, detail));
    }
    if request.principal.can_be_missing() {
        let detail =
            "expected the authentication outside this layer to set a principal, found none";
        errors.push(Error::new(ErrorKind::PrincipalMissing, detail));
    }
    if !request.fingerprint.is_head_only() {
        let limit = request.body_limit;
        let kinds = [
            (
                ErrorKind::BodyTooLarge,
                format!("expected a body of at most {limit} bytes"),
            ),
            (
                ErrorKind::BodyTimeout,
                "the body did not arrive in time".to_owned(),
            ),
            (
                ErrorKind::BodyUnreadable,
                "the body ended before its announced length".to_owned(),
            ),
        ];
        errors.extend(kinds.map(|(kind, detail)| Error::new(kind, detail)));
    }
    let concurrent = config.execution.concurrent_requests.status();
    let stored = [
        matches!(request.key_reuse, KeyReuse::Refuse(_))
            .then(|| key_reused(request.key_reuse.status())),
        Some(in_progress(response, concurrent)),
        Some(outcome_unknown()),
        Some(Error::new(
            ErrorKind::ResponseNotRetained,
            "the first request was executed with status 200, but its response was too large and was not recorded",
        )),
    ];
    errors.extend(
        stored
            .into_iter()
            .flatten()
            .map(|error| error.with_entry(&id)),
    );
    errors.push(admission_error(response, AdmissionError::CallerLimit));
    errors.push(store_unavailable(response, "an example").with_entry(&id));
    errors.push(admission_error(response, AdmissionError::RequestLimit));
    errors.push(admission_error(response, AdmissionError::Draining));
    errors
        .iter()
        .map(|error| error_policy(config, error))
        .collect()
}

fn error_policy(config: &Config, error: &Error) -> ErrorPolicy {
    let res = config.response.render_error(error);
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let media_type = res.headers().get(header::CONTENT_TYPE).map(text);
    let kind = error.kind();
    ErrorPolicy {
        code: kind.code(),
        status: res.status().as_u16(),
        is_retryable: error.is_retryable(),
        media_type: media_type.unwrap_or_default(),
        title: kind.title(),
        body: String::from_utf8_lossy(res.body()).into_owned(),
        has_retry_after: res.headers().contains_key(header::RETRY_AFTER),
        has_link: res.headers().contains_key(header::LINK),
        is_problem: matches!(
            config.response.error_response,
            ErrorResponse::ProblemJson { .. }
        ),
    }
}
