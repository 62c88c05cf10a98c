//! The routes of a configuration as services, and the choice of the route of a request.

use std::{borrow::Cow, collections::HashMap, sync::Arc};

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Version, header};
use rustls::ServerConfig;
use tower_idempotency::{
    ConcurrentRequests as Concurrent, ExecutionFailure, FingerprintBy, IDEMPOTENCY_KEY,
    Idempotency, IdempotencyLayer, JsonFingerprint, KeySyntax, MemoryStore, MissingKey,
    OrphanPolicy, Policy, Principal, RouteTemplate, Ttl, policy::StatusRange,
};
use tower_idempotency_any::AnyStore;
use tower_layer::Layer;

use crate::{
    config::{
        ConcurrentRequests, ConfigError, Identity, KeySyntaxName, MissingKeyName, Mode,
        OrphansName, PresetName, PrincipalName, RequestIdentity, RouteConfig, SAFE, Settings,
        UnknownOutcome, Upstream,
    },
    route::RouteMatch,
    telemetry::{self, Coverage, ResponseCounters, RouteCounters},
    tls,
    upstream::{Forwarding, Pool, Tunnels, UpstreamService},
};

/// The layers of a proxy, one for each preset. All routes share them, before and after a reload.
pub(crate) struct Layers(Vec<(PresetName, IdempotencyLayer)>);

impl Layers {
    pub(crate) fn new(store: &AnyStore) -> Self {
        let presets = PresetName::ALL.into_iter();
        Self(
            presets
                .map(|name| (name, store.layer(name.preset())))
                .collect(),
        )
    }

    fn get(&self, preset: PresetName) -> IdempotencyLayer {
        let found = self.0.iter().find(|(name, _)| *name == preset);
        found.expect("there is a layer for each preset").1.clone()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &IdempotencyLayer> {
        self.0.iter().map(|(_, layer)| layer)
    }
}

/// A configuration in use.
pub(crate) struct Live {
    pub(crate) config: Settings,
    pub(crate) routes: Vec<Route>,
    /// The counters of requests that match no route.
    pub(crate) without_route: ResponseCounters,
    pub(crate) tls: Option<Arc<ServerConfig>>,
    pools: HashMap<String, (serde_json::Value, Arc<Pool>)>,
}

/// A route as a service.
pub(crate) struct Route {
    pub(crate) counters: RouteCounters,
    key_header: HeaderName,
    preset: PresetName,
    /// `true` if the layer rejects requests without a key. It then protects gRPC and upgrades too.
    requires_key: bool,
    rule: RouteMatch,
    pub(crate) template: Option<RouteTemplate>,
    /// The policy of the layer in `service`. `None` if it is not enforced.
    policy: Option<Policy>,
    pub(crate) service: RouteService,
}

pub(crate) enum RouteService {
    Protected(Idempotency<UpstreamService>),
    Unprotected(UpstreamService),
}

impl Live {
    /// Builds the services of `config`. Upstreams without TLS that have the same settings as in `old` keep their connections.
    pub(crate) fn new(
        config: Settings,
        layers: &Layers,
        tunnels: &Tunnels,
        old: Option<&Self>,
    ) -> Result<Self, ConfigError> {
        let mut pools = HashMap::new();
        for (name, upstream) in &config.upstream {
            telemetry::register_upstream(name);
            pools.insert(name.clone(), pool(name, upstream, old)?);
        }
        let mut routes = Vec::with_capacity(config.route.len());
        for route in &config.route {
            let rule = route.rule();
            let upstream = route.upstream.get_ref();
            let settings = &config.upstream[upstream];
            let forwarding = Forwarding {
                name: upstream.as_str().into(),
                is_protected: route.mode() != Mode::Off,
                pool: Arc::clone(&pools[upstream].1),
                forwarded: config.listen.forwarded,
                host: settings.host,
                unknown: route.unknown,
                unknown_statuses: statuses(route),
                forward_key: route.forward_key,
                encoding: route.encoding,
                key_header: key_header(route),
                kept: kept_headers(route),
                is_key_quoted: is_key_quoted(route),
                tunnels: tunnels.clone(),
            };
            let service = UpstreamService(Arc::new(forwarding));
            let (service, policy) = match route.mode() {
                Mode::Off => (RouteService::Unprotected(service), None),
                Mode::Enforce | Mode::Observe => {
                    let layer = layer(layers.get(route.preset), &config, route)?;
                    let policy =
                        (route.mode() == Mode::Enforce).then(|| route_policy(&layer, route));
                    let layer = name_layer(layer, route)?;
                    (RouteService::Protected(layer.layer(service)), policy)
                }
            };
            routes.push(Route {
                counters: RouteCounters::new(&rule.to_string()),
                key_header: key_header(route),
                preset: route.preset,
                requires_key: requires_key(route),
                template: template(&rule),
                rule,
                policy,
                service,
            });
        }
        let tls = config
            .listen
            .tls
            .as_ref()
            .map(tls::server_config)
            .transpose()?;
        Ok(Self {
            config,
            routes,
            without_route: ResponseCounters::new("none"),
            tls,
            pools,
        })
    }

    /// Returns the layer of the protected routes, if there are any and all of them identify requests by the same settings.
    /// Returns `None` too if the host of the request is one of them, because a key alone then identifies no entry.
    pub(crate) fn common_layer(&self, layers: &Layers) -> Option<IdempotencyLayer> {
        let routes = self.config.route.iter();
        let mut routes = routes.filter(|route| route.mode() != Mode::Off);
        let first = routes.next()?;
        let identity = first.entry_identity();
        if first.host_in_scope || routes.any(|route| route.entry_identity() != identity) {
            return None;
        }
        layer(layers.get(first.preset), &self.config, first).ok()
    }

    /// Returns the settings, and the policy of each route.
    pub(crate) fn policy(&self) -> serde_json::Value {
        let mut settings = self.config.to_json();
        let routes = self.routes.iter();
        settings["policies"] = routes
            .map(|route| serde_json::json!({ "route": route.rule.to_string(), "policy": route.policy }))
            .collect();
        settings
    }
}

/// Returns the path of a rule if it has a parameter, whose value in a request may be a secret.
fn template(rule: &RouteMatch) -> Option<RouteTemplate> {
    let path = rule.path.to_string();
    path.contains('{').then(|| RouteTemplate::new(path))
}

/// Returns the policy of a route, or `None` if it is not enforced.
pub(crate) fn policy(
    config: &Settings,
    route: &RouteConfig,
) -> Result<Option<Policy>, ConfigError> {
    match route.mode() {
        Mode::Off | Mode::Observe => Ok(None),
        Mode::Enforce => {
            // The settings do not depend on the store.
            let base = IdempotencyLayer::with_preset(MemoryStore::new(), route.preset.preset());
            let layer = layer(base, config, route)?;
            Ok(Some(route_policy(&layer, route)))
        }
    }
}

/// Returns the policy of a layer, without the statuses of the upstream that are no outcome. The proxy records none of them,
/// although the preset may.
fn route_policy(layer: &IdempotencyLayer, route: &RouteConfig) -> Policy {
    let mut policy = layer.policy();
    for status in route.unknown_statuses.get_ref() {
        let ranges = policy.recorded_statuses.into_iter();
        policy.recorded_statuses = ranges
            .flat_map(|range| without_status(range, *status))
            .collect();
    }
    policy
}

/// Returns the parts of a range before and after a status.
fn without_status(range: StatusRange, status: u16) -> impl Iterator<Item = StatusRange> {
    let (mut before, mut after) = (range, range);
    before.last = before.last.min(status.saturating_sub(1));
    after.first = after.first.max(status.saturating_add(1));
    let parts = [before, after].into_iter();
    parts.filter(|part| part.first <= part.last)
}

impl Route {
    /// Returns the protection of an unsafe request, and `None` for other requests.
    pub(crate) fn coverage<B>(&self, req: &Request<B>) -> Option<Coverage> {
        if SAFE.contains(&req.method().as_str()) {
            return None;
        }
        let headers = req.headers();
        Some(match self.service {
            RouteService::Unprotected(_) => Coverage::Off,
            RouteService::Protected(_) if !self.preset.covers(req.method()) => Coverage::Method,
            RouteService::Protected(_) if !self.requires_key && is_grpc(req.version(), headers) => {
                Coverage::Grpc
            }
            RouteService::Protected(_) if headers.contains_key(&self.key_header) => Coverage::Keyed,
            RouteService::Protected(_) => Coverage::NoKey,
        })
    }

    pub(crate) fn is_match(&self, method: &Method, host: &str, path: &[Cow<'_, str>]) -> bool {
        self.rule.is_match(method, host, path)
    }
}

/// Returns `true` for gRPC, as the layer recognizes it. Extractors of JSON accept `application/grpc+json`.
fn is_grpc(version: Version, headers: &HeaderMap) -> bool {
    let media_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    let media_type = media_type.and_then(|value| value.split(|byte| *byte == b';').next());
    let media_type = media_type
        .unwrap_or_default()
        .trim_ascii()
        .to_ascii_lowercase();
    let subtype = media_type.strip_prefix(b"application/grpc");
    version == Version::HTTP_2
        && subtype.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"+"))
        && !media_type.ends_with(b"+json")
}

/// Reports each route whose enforcement a reload changes.
pub(crate) fn report_switches(old: &Settings, new: &Settings) {
    for route in &new.route {
        let rule = route.rule();
        let before = old.route.iter().find(|before| before.rule() == rule);
        if let Some(before) = before
            && before.enforcement() != route.enforcement()
        {
            telemetry::switched(&rule, before.enforcement(), route.enforcement());
        }
    }
}

fn pool(
    name: &str,
    upstream: &Upstream,
    old: Option<&Live>,
) -> Result<(serde_json::Value, Arc<Pool>), ConfigError> {
    let settings = serde_json::json!(upstream);
    if let Some((old_settings, pool)) = old.and_then(|old| old.pools.get(name))
        && *old_settings == settings
        // The certificates, of the file or of the system, may have changed.
        && pool.target.scheme == "http"
    {
        return Ok((settings, Arc::clone(pool)));
    }
    Ok((settings, Arc::new(Pool::new(upstream)?)))
}

fn statuses(route: &RouteConfig) -> Vec<StatusCode> {
    let statuses = route.unknown_statuses.get_ref().iter();
    statuses
        .filter_map(|status| StatusCode::from_u16(*status).ok())
        .collect()
}

fn is_key_quoted(route: &RouteConfig) -> bool {
    match route.key_syntax {
        Some(syntax) => syntax == KeySyntaxName::Strict,
        None => route.preset == PresetName::Ietf,
    }
}

fn requires_key(route: &RouteConfig) -> bool {
    let default = || route.preset == PresetName::Acp;
    let missing_key = route.missing_key;
    missing_key.map_or_else(default, |it| it == MissingKeyName::Reject)
}

fn key_header(route: &RouteConfig) -> HeaderName {
    let header = route.key_header.as_ref();
    header.map_or(IDEMPOTENCY_KEY, |header| header.0.clone())
}

/// Returns the headers that the client must not remove or replace in the forwarded request.
fn kept_headers(route: &RouteConfig) -> Arc<[HeaderName]> {
    let principal = match &route.principal {
        Some(PrincipalName::Header(header)) => Some(header.0.clone()),
        _ => None,
    };
    [key_header(route)].into_iter().chain(principal).collect()
}

/// Applies the policy of a route to the layer of its preset.
fn layer(
    base: IdempotencyLayer,
    config: &Settings,
    route: &RouteConfig,
) -> Result<IdempotencyLayer, ConfigError> {
    let limits = &config.limits;
    let mut layer = identify(base, &config.identity, route)?
        .with_enforcement(route.enforcement())
        .with_store_timeout(config.store.timeout.get_ref().get())
        .with_max_in_flight(*limits.max_in_flight.get_ref())
        .with_max_buffered(
            limits.max_request_bytes.bytes(),
            limits.max_response_bytes.bytes(),
        )
        .with_orphan_policy(match route.orphans {
            OrphansName::Refuse => OrphanPolicy::Refuse,
            OrphansName::TakeOver => OrphanPolicy::TakeOver,
        })
        .with_failure(match route.unknown {
            UnknownOutcome::Attention => ExecutionFailure::NeedsAttention,
            UnknownOutcome::Orphan => ExecutionFailure::Orphan,
            UnknownOutcome::Free => ExecutionFailure::Release,
        });
    if let Some(missing_key) = route.missing_key {
        layer = layer.with_missing_key(match missing_key {
            MissingKeyName::Pass => MissingKey::PassThrough,
            MissingKeyName::Reject => MissingKey::Reject,
        });
    }
    let ttl = |duration: &toml::Spanned<crate::config::HumanDuration>| {
        let ttl = Ttl::try_from(duration.get_ref().get());
        ttl.map_err(|error| ConfigError::without_line(error.to_string()))
    };
    if let Some(concurrent) = route.concurrent_requests {
        layer = layer.with_concurrent_requests(match concurrent {
            ConcurrentRequests::Conflict => Concurrent::Conflict,
            ConcurrentRequests::TooManyRequests => Concurrent::TooManyRequests,
            ConcurrentRequests::Wait(duration) => Concurrent::Wait(duration.get()),
        });
    }
    if let Some(retention) = &route.retention {
        let retention = ttl(retention)?;
        layer = layer
            .with_retention(retention)
            .with_max_retention(retention.max(Ttl::from_secs(365 * 24 * 60 * 60)));
    }
    if let Some(lease) = &route.lease {
        layer = layer.with_lease_ttl(ttl(lease)?);
    }
    if let Some(retention) = &route.orphan_retention {
        layer = layer.with_orphan_retention(ttl(retention)?);
    }
    if let Some(limit) = route.request_limit {
        layer = layer.with_request_limit(limit.bytes());
    }
    if let Some(limit) = route.response_limit {
        layer = layer.with_response_limit(limit.bytes());
    }
    Ok(layer)
}

/// Gives the layer of a route the name of the route, if it has one.
fn name_layer(
    layer: IdempotencyLayer,
    route: &RouteConfig,
) -> Result<IdempotencyLayer, ConfigError> {
    let Some(name) = &route.name else {
        return Ok(layer);
    };
    let named = layer.with_name(name.as_str());
    named.map_err(|error| ConfigError::without_line(error.to_string()))
}

/// Applies the settings that identify the entry of a request in the store.
fn identify(
    base: IdempotencyLayer,
    identity: &Identity,
    route: &RouteConfig,
) -> Result<IdempotencyLayer, ConfigError> {
    let mut layer = base
        .with_namespace(identity.namespace.as_str())
        .with_host_in_scope(route.host_in_scope)
        .with_fingerprint(
            match route.fingerprint.unwrap_or(route.preset.fingerprint()) {
                RequestIdentity::JsonByValue => {
                    FingerprintBy::json(JsonFingerprint::new().numbers_by_value())
                }
                RequestIdentity::RawBody => FingerprintBy::raw_body(),
                RequestIdentity::CanonicalJson => FingerprintBy::canonical_json(),
                RequestIdentity::Multipart => FingerprintBy::multipart(),
            },
        );
    if let Some(secret) = &identity.secret {
        let keyed = layer.with_secret(secret.expose());
        layer = keyed.map_err(|error| ConfigError::without_line(error.to_string()))?;
    }
    if let Some(header) = &route.key_header {
        layer = layer.with_header(header.0.clone());
    }
    if let Some(syntax) = route.key_syntax {
        layer = layer.with_key_syntax(match syntax {
            KeySyntaxName::Lenient => KeySyntax::Lenient,
            KeySyntaxName::Strict => KeySyntax::Strict,
            KeySyntaxName::Verbatim => KeySyntax::Verbatim,
            KeySyntaxName::Unquoted => KeySyntax::Unquoted,
        });
    }
    if let Some(principal) = &route.principal {
        layer = layer.with_principal(match principal {
            PrincipalName::Credentials => Principal::credentials(),
            PrincipalName::Authorization => Principal::authorization(),
            PrincipalName::Unscoped => Principal::unscoped(),
            PrincipalName::Header(header) => Principal::header(header.0.clone()),
            PrincipalName::Cookie(name) => Principal::cookie(name.as_str()),
        });
    }
    Ok(layer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::minimal;

    #[tokio::test]
    async fn reload_keeps_only_connections_without_tls() {
        for (scheme, is_kept) in [("http", true), ("https", false)] {
            let url = format!("{scheme}://127.0.0.1:3000");
            let layers = Layers::new(&AnyStore::from(MemoryStore::new()));
            let build = |old: Option<&Live>| {
                Live::new(minimal(&url).0, &layers, &Tunnels::default(), old).unwrap()
            };
            let before = build(None);
            let after = build(Some(&before));
            let [before, after] = [&before, &after].map(|live| &live.pools["app"].1);
            assert_eq!(Arc::ptr_eq(before, after), is_kept, "{scheme}");
        }
    }
}
