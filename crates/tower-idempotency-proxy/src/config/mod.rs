//! The configuration: one TOML file and environment variables, read as a whole or not at all.

mod check;
mod console;
mod error;
mod policy;
mod reload;
mod values;
mod variables;

use std::{borrow::Cow, collections::BTreeMap, ffi::OsString, fs, net::SocketAddr, path::Path};

use http::Method;
use serde::{Deserialize, Serialize};
use toml::{Spanned, de::DeTable};
use tower_idempotency::Policy;

use self::variables::{Sources, Variable};
pub(crate) use self::{
    check::SAFE,
    policy::{
        ConcurrentRequests, ConsoleMode, Encoding, ForwardKey, Forwarded, HostHeader,
        KeySyntaxName, MissingKeyName, Mode, OrphansName, PresetName, PrincipalName,
        RequestIdentity, UnknownOutcome,
    },
    reload::EnforcedRoutes,
    values::{Duration as HumanDuration, Secret, Size},
};
pub use self::{console::ConsoleConfig, error::ConfigError};
use crate::{
    route::{HostPattern, PathPattern},
    routes, tls,
    upstream::Pool,
};

/// The configuration of a proxy.
///
/// The reference of all settings is `docs/reference/proxy.md` in the repository.
///
/// ```
/// use tower_idempotency_proxy::Config;
///
/// let config = r#"
///     [listen]
///     address = "127.0.0.1:8080"
///     [store]
///     url = "memory"
///     [upstream.app]
///     url = "http://127.0.0.1:3000"
///     [[route]]
///     path = "/v1/charges"
///     upstream = "app"
/// "#;
/// assert!(Config::from_toml(config).is_ok());
///
/// let error = Config::from_toml(&config.replace("address", "adress")).unwrap_err();
/// assert_eq!(error.to_string(), "line 3: unknown setting `adress`, did you mean `address`?");
/// ```
#[derive(Clone, Debug)]
pub struct Config(pub(crate) Settings);

/// The sections of the file.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    pub(crate) listen: Listen,
    pub(crate) admin: Option<Admin>,
    pub(crate) store: StoreUrl,
    #[serde(default)]
    pub(crate) identity: Identity,
    #[serde(default)]
    pub(crate) limits: Limits,
    #[serde(default)]
    pub(crate) drain: Drain,
    #[serde(default)]
    pub(crate) rollout: Rollout,
    pub(crate) upstream: BTreeMap<String, Upstream>,
    pub(crate) route: Vec<RouteConfig>,
}

/// The default protection of all routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Rollout {
    pub(crate) mode: Mode,
    pub(crate) share: values::Percent,
}

/// The listener for clients.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Listen {
    pub(crate) address: SocketAddr,
    pub(crate) tls: Option<Tls>,
    #[serde(default)]
    pub(crate) forwarded: Forwarded,
    #[serde(default = "defaults::idle_timeout")]
    pub(crate) idle_timeout: Spanned<HumanDuration>,
    #[serde(default = "defaults::max_connections")]
    pub(crate) max_connections: Spanned<usize>,
}

/// The files of the certificate chain and its private key, both in PEM.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tls {
    pub(crate) certificate: Spanned<String>,
    pub(crate) key: Spanned<String>,
}

/// The listener for operators.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Admin {
    pub(crate) address: SocketAddr,
    #[serde(default = "defaults::console")]
    pub(crate) console: Spanned<ConsoleMode>,
    pub(crate) token_file: Option<Spanned<String>>,
    pub(crate) audit_file: Option<Spanned<String>>,
    pub(crate) audit_table: Option<Spanned<bool>>,
    /// The content of `token_file`.
    #[serde(skip)]
    pub(crate) token: Option<Secret>,
}

/// The URL of the store, or the file that contains it.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StoreUrl {
    pub(crate) url: Option<Spanned<Secret>>,
    pub(crate) url_file: Option<Spanned<String>>,
    #[serde(default = "defaults::store_timeout")]
    pub(crate) timeout: Spanned<HumanDuration>,
}

/// The settings that identify the keys in the store, in addition to those of the route.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Identity {
    #[serde(default)]
    pub(crate) namespace: String,
    pub(crate) secret_file: Option<Spanned<String>>,
    /// The content of the file.
    #[serde(skip)]
    pub(crate) secret: Option<Secret>,
}

/// Limits of all routes together.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Limits {
    pub(crate) max_in_flight: Spanned<usize>,
    pub(crate) max_request_bytes: Size,
    pub(crate) max_response_bytes: Size,
}

/// Times of the shutdown.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Drain {
    pub(crate) delay: HumanDuration,
    pub(crate) timeout: HumanDuration,
}

/// A service behind the proxy.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Upstream {
    pub(crate) url: Spanned<String>,
    #[serde(default)]
    pub(crate) http2: bool,
    #[serde(default)]
    pub(crate) host: HostHeader,
    pub(crate) ca_file: Option<Spanned<String>>,
    #[serde(default = "defaults::connect_timeout")]
    pub(crate) connect_timeout: Spanned<HumanDuration>,
    #[serde(default = "defaults::timeout")]
    pub(crate) timeout: Spanned<HumanDuration>,
    #[serde(default = "defaults::keep_alive")]
    pub(crate) keep_alive: HumanDuration,
    #[serde(default = "defaults::max_idle")]
    pub(crate) max_idle: usize,
}

/// A set of requests, their upstream and their policy. The first route that matches a request applies.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RouteConfig {
    pub(crate) name: Option<values::RouteName>,
    pub(crate) path: Spanned<PathPattern>,
    #[serde(default)]
    pub(crate) methods: Vec<values::MethodName>,
    #[serde(default)]
    pub(crate) host: Option<HostPattern>,
    pub(crate) upstream: Spanned<String>,
    /// `None` until [`Settings::check`] sets it from `[rollout]`.
    pub(crate) mode: Option<Mode>,
    pub(crate) share: Option<values::Percent>,
    #[serde(default)]
    pub(crate) preset: PresetName,
    pub(crate) principal: Option<PrincipalName>,
    pub(crate) key_header: Option<values::Header>,
    pub(crate) key_syntax: Option<KeySyntaxName>,
    #[serde(default)]
    pub(crate) host_in_scope: bool,
    pub(crate) fingerprint: Option<RequestIdentity>,
    pub(crate) missing_key: Option<MissingKeyName>,
    pub(crate) concurrent_requests: Option<ConcurrentRequests>,
    pub(crate) retention: Option<Spanned<HumanDuration>>,
    pub(crate) lease: Option<Spanned<HumanDuration>>,
    #[serde(default)]
    pub(crate) orphans: OrphansName,
    pub(crate) orphan_retention: Option<Spanned<HumanDuration>>,
    #[serde(default)]
    pub(crate) unknown: UnknownOutcome,
    #[serde(default = "defaults::unknown_statuses")]
    pub(crate) unknown_statuses: Spanned<Vec<u16>>,
    #[serde(default)]
    pub(crate) forward_key: ForwardKey,
    #[serde(default)]
    pub(crate) encoding: Encoding,
    pub(crate) request_limit: Option<Size>,
    pub(crate) response_limit: Option<Size>,
}

impl Config {
    /// Reads a configuration from TOML.
    ///
    /// Ignores the environment. To apply its variables, use [`Config::load`].
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with the line, if the text is no valid configuration or if a file that it names cannot be read.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        Self::read(text, None, &[])
    }

    /// Reads a configuration from a file and from variables.
    ///
    /// `variables` are those of the environment, such as [`std::env::vars_os`]. A name
    /// `IDEMPOTENCY_PROXY__TABLE__SETTING` replaces a setting of the file. Variables without this prefix are ignored.
    ///
    /// `store`, such as the value of a flag, replaces the URL of the store in the file and in the variables.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the file cannot be read. If the configuration is not valid, the error has the line or the variable.
    pub fn load(
        path: &Path,
        store: Option<&str>,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|error| {
            ConfigError::without_line(format!("cannot read {}: {error}", path.display()))
        })?;
        Self::read(&text, store, &Variable::select(variables)?)
    }

    fn read(text: &str, store: Option<&str>, variables: &[Variable]) -> Result<Self, ConfigError> {
        let sources = Sources { text, variables };
        let of_toml = |error: toml::de::Error| ConfigError::of_toml(&sources, &error);
        let mut file = DeTable::parse(text).map_err(of_toml)?;
        sources.replace_settings(file.get_mut())?;
        let settings = Settings::deserialize(toml::Deserializer::from(file));
        let mut settings = settings.map_err(of_toml)?;
        if let Some(store) = store {
            settings.store.url = Some(Spanned::new(0..0, Secret::from(store.to_owned())));
            settings.store.url_file = None;
        }
        settings.check(&sources)?;
        Ok(Self(settings))
    }

    /// Replaces the address of the listener. For tests and for flags of a program.
    #[must_use]
    pub fn with_listen_address(mut self, address: SocketAddr) -> Self {
        self.0.listen.address = address;
        self
    }

    /// Returns the URL of the store. It may contain a password.
    #[must_use]
    pub fn store_url(&self) -> &str {
        self.0.store_url()
    }

    /// Returns the largest number of open connections of clients.
    ///
    /// Each of them may need a connection to an upstream. So the process needs twice as many file descriptors, and those of the
    /// store.
    #[must_use]
    pub fn max_connections(&self) -> usize {
        *self.0.listen.max_connections.get_ref()
    }

    /// Returns the requests and the policy of each route, in the order of the file. Routes that are not protected have no
    /// policy.
    ///
    /// A running proxy shows the same policies on its admin port.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if a duration is longer than a store accepts.
    pub fn policies(&self) -> Result<Vec<(String, Option<Policy>)>, ConfigError> {
        let routes = self.0.route.iter();
        routes
            .map(|route| Ok((route.rule().to_string(), routes::policy(&self.0, route)?)))
            .collect()
    }

    /// Reads the certificates and keys of TLS, as [`Proxy::bind`](crate::Proxy::bind) does.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if a file cannot be read or used.
    pub fn check_certificates(&self) -> Result<(), ConfigError> {
        if let Some(tls) = &self.0.listen.tls {
            tls::server_config(tls)?;
        }
        for upstream in self.0.upstream.values() {
            Pool::new(upstream)?;
        }
        Ok(())
    }

    /// Adds the policies of the routes to an OpenAPI document of the upstreams, as [`Policy::describe`] does.
    ///
    /// The first route that matches all requests of an operation applies. Paths begin with the path of the first server in
    /// the document. `host` is the host of the requests, for routes that have one.
    ///
    /// The errors of the proxy itself are not added: `upstream-unreachable`, `outcome-unknown` with 502 and 504, `no-route`,
    /// `bad-path`, `bad-host`, `bad-method`, `bad-length`, `too-many-headers` and `connect-not-supported`.
    ///
    /// ```
    /// use serde_json::json;
    /// use tower_idempotency_proxy::Config;
    ///
    /// let config = Config::from_toml(
    ///     r#"
    ///     listen = { address = "127.0.0.1:8080" }
    ///     store = { url = "memory" }
    ///     upstream.app = { url = "http://127.0.0.1:3000" }
    ///     [[route]]
    ///     path = "/v1/charges/**"
    ///     upstream = "app"
    ///     "#,
    /// )?;
    /// let mut document = json!({
    ///     "openapi": "3.1.0",
    ///     "info": { "title": "Charges", "version": "1" },
    ///     "servers": [{ "url": "https://api.example/v1" }],
    ///     "paths": { "/charges": { "post": {} }, "/refunds": { "post": {} } },
    /// });
    /// config.describe(&mut document, "")?;
    /// assert!(document["paths"]["/charges"]["post"]["x-idempotency"].is_object());
    /// assert!(document["paths"]["/refunds"]["post"]["x-idempotency"].is_null());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// An error of [`policies`](Self::policies), or with the text of
    /// [`DescribeError`](tower_idempotency::policy::DescribeError) if the document cannot be described. The document is then
    /// unchanged.
    pub fn describe(
        &self,
        document: &mut serde_json::Value,
        host: &str,
    ) -> Result<(), ConfigError> {
        let rules: Vec<_> = self.0.route.iter().map(RouteConfig::rule).collect();
        let base = base_path(document);
        let route_of = |path: &str, method: &Method| {
            let segments = base.split('/').chain(path.split('/'));
            let segments: Vec<_> = segments
                .filter(|segment| !segment.is_empty())
                .map(Cow::Borrowed)
                .collect();
            rules
                .iter()
                .position(|rule| rule.is_match(method, host, &segments))
        };
        let mut described = document.clone();
        for (index, (_, policy)) in self.policies()?.into_iter().enumerate() {
            if let Some(policy) = policy {
                let is_covered =
                    |path: &str, method: &Method| route_of(path, method) == Some(index);
                let result = policy.describe(&mut described, is_covered);
                result.map_err(|error| ConfigError::without_line(error.to_string()))?;
            }
        }
        *document = described;
        Ok(())
    }

    /// Returns the settings as JSON, with their defaults and without secrets.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        self.0.to_json()
    }
}

/// Returns the path of the first server of an OpenAPI document.
fn base_path(document: &serde_json::Value) -> String {
    let url = document
        .pointer("/servers/0/url")
        .and_then(serde_json::Value::as_str);
    let url = url.unwrap_or_default();
    let behind_scheme = url.split_once("://").map_or(url, |(_, rest)| {
        rest.find('/').map_or("", |path| &rest[path..])
    });
    behind_scheme.to_owned()
}

impl Settings {
    pub(crate) fn store_url(&self) -> &str {
        let url = self.store.url.as_ref();
        url.map_or("", |url| url.get_ref().expose())
    }

    pub(crate) fn to_json(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("settings have names and plain values")
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_in_flight: Spanned::new(0..0, 10_000),
            max_request_bytes: Size::mebibytes(128),
            max_response_bytes: Size::mebibytes(128),
        }
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self {
            delay: HumanDuration::from_secs(0),
            timeout: HumanDuration::from_secs(30),
        }
    }
}

mod defaults {
    use super::{ConsoleMode, HumanDuration, Spanned};

    pub(super) fn console() -> Spanned<ConsoleMode> {
        Spanned::new(0..0, ConsoleMode::Off)
    }

    pub(super) fn idle_timeout() -> Spanned<HumanDuration> {
        Spanned::new(0..0, HumanDuration::from_secs(60))
    }

    pub(super) fn max_connections() -> Spanned<usize> {
        Spanned::new(0..0, 10_000)
    }

    pub(super) fn store_timeout() -> Spanned<HumanDuration> {
        Spanned::new(0..0, HumanDuration::from_secs(2))
    }

    pub(super) fn connect_timeout() -> Spanned<HumanDuration> {
        Spanned::new(0..0, HumanDuration::from_secs(2))
    }

    pub(super) fn timeout() -> Spanned<HumanDuration> {
        Spanned::new(0..0, HumanDuration::from_secs(30))
    }

    pub(super) fn keep_alive() -> HumanDuration {
        HumanDuration::from_secs(1)
    }

    pub(super) fn max_idle() -> usize {
        256
    }

    pub(super) fn unknown_statuses() -> Spanned<Vec<u16>> {
        Spanned::new(0..0, vec![502, 504, 520, 524])
    }
}

#[cfg(test)]
pub(crate) mod tests;
