//! A policy describes its layer: the tests provoke each field over HTTP, for each value of each setting.

mod claims;
mod outcomes;

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode};
use tests::random::Random;
use tower_idempotency::{
    ConcurrentRequests, ExecutionFailure, FingerprintBy, IdempotencyLayer, JsonFingerprint,
    KeyReuse, KeyScope, KeySyntax, MemoryStore, MissingKey, OrphanPolicy, Preset, Principal,
    StoreFailure, Ttl, Unrecordable, conformance::FaultInjector,
};

use self::claims::Claims;

type Change = fn(IdempotencyLayer) -> IdempotencyLayer;

/// The account that the authentication outside the layer finds.
#[derive(Clone)]
struct Account;

/// Each value of each setting. Settings of one line exclude each other.
const SETTINGS: &[&[(&str, Change)]] = &[
    &[
        ("required", |layer| {
            layer.with_missing_key(MissingKey::Reject)
        }),
        ("derived", |layer| {
            layer.with_missing_key(MissingKey::Derive)
        }),
    ],
    &[
        ("strict", |layer| layer.with_key_syntax(KeySyntax::Strict)),
        ("verbatim", |layer| {
            layer.with_key_syntax(KeySyntax::Verbatim)
        }),
        ("unquoted", |layer| {
            layer.with_key_syntax(KeySyntax::Unquoted)
        }),
    ],
    &[("length", |layer| layer.with_key_length(10..=20))],
    &[("check", |layer| {
        layer.with_key_check(|key| !key.starts_with("no"))
    })],
    &[("echo", |layer| layer.with_key_echo(true))],
    &[
        ("header", |layer| {
            layer.with_header(HeaderName::from_static("x-key"))
        }),
        ("alias", |layer| {
            layer.with_header_alias(HeaderName::from_static("x-alias"))
        }),
        ("service", |layer| {
            layer.with_key_from(KeyScope::EachCaller, |head| of_entity(&head.headers))
        }),
        ("shared", |layer| {
            layer.with_key_from(KeyScope::AllCallers, |head| of_entity(&head.headers))
        }),
    ],
    &[
        ("post", |layer| layer.with_methods([Method::POST])),
        ("every method", |layer| layer.with_methods_where(|_| true)),
        ("no method but post and put", |layer| {
            layer.with_methods_where(|method| method == Method::POST || method == Method::PUT)
        }),
    ],
    &[("skip", |layer| {
        layer.with_skip(|head| head.headers.contains_key("x-skip"))
    })],
    &[
        ("host", |layer| layer.with_host_in_scope(true)),
        ("no host", |layer| layer.with_host_in_scope(false)),
    ],
    &[("endpoint", |layer| layer.with_endpoint_in_scope(true))],
    &[
        ("unscoped", |layer| {
            layer.with_principal(Principal::unscoped())
        }),
        ("cookie", |layer| {
            layer.with_principal(Principal::cookie("session"))
        }),
        ("header principal", |layer| {
            layer.with_principal(Principal::header(HeaderName::from_static("x-user")))
        }),
        ("extension", |layer| {
            layer.with_principal(Principal::extension(|_: &Account| "account"))
        }),
        ("both", |layer| {
            let account = Principal::extension(|_: &Account| "account");
            layer.with_principal(account.and(Principal::authorization()))
        }),
    ],
    &[
        ("head only", |layer| {
            layer.with_fingerprint(FingerprintBy::head_only())
        }),
        ("json", |layer| {
            layer.with_fingerprint(FingerprintBy::canonical_json())
        }),
        ("json by value", |layer| {
            let by = JsonFingerprint::new().numbers_by_value();
            layer.with_fingerprint(FingerprintBy::json(by))
        }),
        ("json without", |layer| {
            let by = JsonFingerprint::new().without(["/id", "/items/*/id"]);
            layer.with_fingerprint(FingerprintBy::json(by.expect("valid")))
        }),
        ("form", |layer| {
            layer.with_fingerprint(FingerprintBy::multipart())
        }),
        ("own", |layer| {
            layer.with_fingerprint(FingerprintBy::custom(|_, body| body.to_vec()))
        }),
        ("no headers", |layer| {
            layer.with_fingerprint(FingerprintBy::raw_body().with_headers([]))
        }),
        ("header counts", |layer| {
            let name = HeaderName::from_static("x-branch");
            layer.with_fingerprint(FingerprintBy::raw_body().and_header(name))
        }),
    ],
    &[
        ("409 for reuse", |layer| {
            reuse(layer, KeyReuse::Refuse(StatusCode::CONFLICT))
        }),
        ("separate", |layer| reuse(layer, KeyReuse::Separate)),
    ],
    &[
        ("429", |layer| {
            layer.with_concurrent_requests(ConcurrentRequests::TooManyRequests)
        }),
        ("wait", |layer| {
            layer.with_concurrent_requests(ConcurrentRequests::Wait(Duration::from_secs(20)))
        }),
    ],
    &[("retry after", |layer| {
        layer.with_retry_after(Duration::from_millis(6_500))
    })],
    &[("lease", |layer| layer.with_lease_ttl(Ttl::from_secs(40)))],
    &[("refuse orphans", |layer| {
        layer.with_orphan_policy(OrphanPolicy::Refuse)
    })],
    &[
        ("failure releases", |layer| {
            layer.with_failure(ExecutionFailure::Release)
        }),
        ("failure orphans", |layer| {
            layer.with_failure(ExecutionFailure::Orphan)
        }),
        ("failure needs attention", |layer| {
            layer.with_failure(ExecutionFailure::NeedsAttention)
        }),
    ],
    &[("unprotected", |layer| {
        layer.with_store_failure(StoreFailure::DangerouslyExecuteUnprotected)
    })],
    &[
        ("every status", |layer| {
            layer.with_recorded_statuses(|_| true)
        }),
        ("successes", |layer| {
            layer.with_recorded_statuses(|status| status.is_success())
        }),
    ],
    &[("release", |layer| {
        layer.with_unrecordable(Unrecordable::Release)
    })],
    &[("retention", |layer| {
        layer.with_retention(Ttl::from_secs(600))
    })],
    &[("longest retention", |layer| {
        layer.with_max_retention(Ttl::from_secs(200_000))
    })],
    &[("orphan retention", |layer| {
        layer.with_orphan_retention(Ttl::from_secs(5_000))
    })],
    &[
        ("no marker", |layer| layer.with_replay_marker(None)),
        ("marker", |layer| {
            let marker = (
                HeaderName::from_static("x-cached"),
                HeaderValue::from_static("yes"),
            );
            layer.with_replay_marker(Some(marker))
        }),
    ],
    &[("request limit", |layer| layer.with_request_limit(5_000))],
    &[("request time", |layer| {
        layer.with_body_timeout(Duration::from_secs(7))
    })],
    &[("response limit", |layer| layer.with_response_limit(5_000))],
    &[
        ("own errors", |layer| {
            layer.with_error_response(|error| {
                let mut res = Response::new(Bytes::from(error.kind().code()));
                // The service also returns its own statuses.
                let status = 460 + u16::from(error.status() == 409);
                *res.status_mut() = StatusCode::from_u16(status).expect("a status");
                res
            })
        }),
        ("described by", |layer| {
            layer
                .with_described_by("https://example.com/errors")
                .expect("a URL")
        }),
    ],
];

const PRESETS: [Preset; 5] = [
    Preset::Recommended,
    Preset::Ietf,
    Preset::Stripe,
    Preset::Idempo,
    Preset::Acp,
];

fn of_entity(headers: &http::HeaderMap) -> Option<String> {
    Some(headers.get("x-entity")?.to_str().ok()?.to_owned())
}

fn reuse(layer: IdempotencyLayer, reuse: KeyReuse) -> IdempotencyLayer {
    layer.with_key_reuse(reuse).expect("a status of 4xx")
}

/// A preset and changes of its settings.
#[derive(Clone)]
struct Configuration {
    preset: Preset,
    changes: Vec<(&'static str, Change)>,
}

impl Configuration {
    fn name(&self) -> String {
        let names: Vec<_> = self.changes.iter().map(|(name, _)| *name).collect();
        format!("{:?} {}", self.preset, names.join(", "))
    }

    fn layer(&self, store: FaultInjector<MemoryStore>) -> IdempotencyLayer {
        let mut layer = IdempotencyLayer::with_preset(store, self.preset);
        if !self.changes.is_empty() {
            // Large bodies of each configuration would take most of the time.
            layer = layer.with_request_limit(20_000).with_response_limit(20_000);
        }
        self.changes
            .iter()
            .fold(layer, |layer, (_, change)| change(layer))
    }

    /// Returns a preset with about a quarter of the settings.
    fn random(random: &mut Random) -> Self {
        let preset = PRESETS[random.below(PRESETS.len())];
        let mut changes = Vec::new();
        for line in SETTINGS {
            if random.below(4) == 0 {
                changes.push(line[random.below(line.len())]);
            }
        }
        Self { preset, changes }
    }
}

// S-956
#[tokio::test(start_paused = true)]
async fn policy_of_each_preset_holds() {
    for preset in PRESETS {
        Claims::assert_all(&Configuration {
            preset,
            changes: Vec::new(),
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn policy_of_each_setting_holds() {
    let settings = SETTINGS.iter().flat_map(|line| line.iter());
    for (setting, preset) in settings.zip(PRESETS.into_iter().cycle()) {
        let changes = vec![*setting];
        Claims::assert_all(&Configuration { preset, changes }).await;
    }
}

/// `Idempo` is the only preset with the host in its scope.
#[tokio::test(start_paused = true)]
async fn policy_of_idempo_without_host_holds() {
    let preset = Preset::Idempo;
    let change: Change = |layer| layer.with_host_in_scope(false);
    let changes = vec![("no host", change)];
    Claims::assert_all(&Configuration { preset, changes }).await;
}

#[tokio::test(start_paused = true)]
async fn policy_of_random_settings_holds() {
    for seed in 1..=tests::few_or(15, 2_000) as u64 {
        let configuration = Configuration::random(&mut Random(seed));
        Claims::assert_all(&configuration).await;
    }
}
