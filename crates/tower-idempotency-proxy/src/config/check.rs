//! Checks that need more than one setting, and the files that settings name.

use std::{fs, ops::Range};

use http::{Method, Uri};
use toml::Spanned;

use super::{
    ConfigError, HumanDuration, MissingKeyName, Mode, PrincipalName, RouteConfig, Secret, Settings,
    Sources, Upstream, error::suggestion,
};

impl Settings {
    pub(super) fn check(&mut self, sources: &Sources<'_>) -> Result<(), ConfigError> {
        let check = Check { sources };
        check.positive("idle_timeout", &self.listen.idle_timeout)?;
        check.at_least_one(&self.listen.max_connections)?;
        check.at_least_one(&self.limits.max_in_flight)?;
        check.positive("timeout", &self.store.timeout)?;
        self.read_secrets(&check)?;
        if let Some(admin) = &self.admin
            && admin.address == self.listen.address
            && admin.address.port() != 0
        {
            let message = format!("listen and admin have the same address {}", admin.address);
            return Err(ConfigError::without_line(message));
        }
        if let Some(admin) = &mut self.admin {
            admin.check_console(&check)?;
        }
        if let Some(tls) = &self.listen.tls {
            check.file("certificate", &tls.certificate)?;
            check.file("key", &tls.key)?;
        }
        if self.upstream.is_empty() {
            return Err(ConfigError::without_line(
                "expected at least one [upstream.NAME]",
            ));
        }
        for upstream in self.upstream.values() {
            upstream.check(&check)?;
        }
        if self.route.is_empty() {
            return Err(ConfigError::without_line("expected at least one [[route]]"));
        }
        let rollout = self.rollout;
        for route in &mut self.route {
            let mode = *route.mode.get_or_insert(rollout.mode);
            if mode == Mode::Enforce {
                route.share.get_or_insert(rollout.share);
            }
        }
        let upstreams: Vec<_> = self.upstream.keys().map(String::as_str).collect();
        for (index, route) in self.route.iter().enumerate() {
            route.check(&check, &upstreams)?;
            let earlier = self.route[..index]
                .iter()
                .find(|earlier| earlier.rule() == route.rule());
            if earlier.is_some() {
                let message = format!("the route {} occurs twice", route.rule());
                return check.fail(&route.path.span(), message);
            }
            self.check_hosts(&check, index, route)?;
        }
        Ok(())
    }

    /// Returns an error if two services on two hosts share keys. A fingerprint does not contain the host, so the client of one
    /// service could get the response of the other one. Routes with different principals are not exempt, because two sources can
    /// find the same principal.
    fn check_hosts(
        &self,
        check: &Check<'_>,
        index: usize,
        route: &RouteConfig,
    ) -> Result<(), ConfigError> {
        let url = |route: &RouteConfig| self.upstream[route.upstream.get_ref()].url.get_ref();
        let shares_keys = |route: &RouteConfig| route.mode() != Mode::Off && !route.host_in_scope;
        let other = self.route[..index].iter().find(|other| {
            shares_keys(other)
                && url(other) != url(route)
                && other.rule().is_separated_by_host(&route.rule())
                && other.protects_method_of(route)
        });
        match other {
            Some(other) if shares_keys(route) => {
                let message = format!(
                    "the routes {} and {} have different upstreams and the same keys, expected host_in_scope = true in one of them",
                    other.rule(),
                    route.rule()
                );
                check.fail(&route.path.span(), message)
            }
            Some(_) | None => Ok(()),
        }
    }

    fn read_secrets(&mut self, check: &Check<'_>) -> Result<(), ConfigError> {
        match (&self.store.url, &self.store.url_file) {
            (Some(_), None) => {}
            (None, Some(file)) => {
                let url = check.read("url_file", file)?;
                self.store.url = Some(Spanned::new(0..0, Secret::from(url)));
            }
            (Some(url), Some(_)) => {
                return check.fail(&url.span(), "expected either url or url_file, found both");
            }
            (None, None) => {
                let message = "expected url or url_file in [store], or the variable IDEMPOTENCY_PROXY__STORE__URL";
                return Err(ConfigError::without_line(message));
            }
        }
        if let Some(file) = &self.identity.secret_file {
            let secret = check.read("secret_file", file)?;
            if secret.len() < 16 {
                return check.fail(&file.span(), "the secret is shorter than 16 bytes");
            }
            self.identity.secret = Some(Secret::from(secret));
        }
        Ok(())
    }
}

impl Upstream {
    fn check(&self, check: &Check<'_>) -> Result<(), ConfigError> {
        let url = self.url.get_ref();
        let form = "expected http://HOST:PORT or https://HOST:PORT without a path";
        let Ok(parsed) = url.parse::<Uri>() else {
            return check.fail(&self.url.span(), form);
        };
        let is_http = matches!(parsed.scheme_str(), Some("http" | "https"));
        let has_path = !matches!(parsed.path(), "" | "/") || parsed.query().is_some();
        let authority = parsed
            .authority()
            .map_or("", |authority| authority.as_str());
        if authority.contains('@') {
            return check.fail(
                &self.url.span(),
                "expected a URL without a user and a password",
            );
        }
        let host = parsed.host().unwrap_or_default();
        // `Uri` accepts a wrong port. Requests would go to port 80 or 443.
        let is_wrong_port = authority.len() > host.len() && parsed.port_u16().is_none();
        if !is_http || has_path || host.is_empty() || is_wrong_port {
            return check.fail(&self.url.span(), form);
        }
        if self.ca_file.is_some() && parsed.scheme_str() != Some("https") {
            return check.fail(
                &self.url.span(),
                "ca_file has no effect with http, expected https://HOST:PORT as the URL",
            );
        }
        if let Some(file) = &self.ca_file {
            check.file("ca_file", file)?;
        }
        check.positive("connect_timeout", &self.connect_timeout)?;
        check.positive("timeout", &self.timeout)
    }
}

impl RouteConfig {
    fn check(&self, check: &Check<'_>, upstreams: &[&str]) -> Result<(), ConfigError> {
        let name = self.upstream.get_ref().as_str();
        if !upstreams.contains(&name) {
            let message = format!("unknown upstream `{name}`{}", suggestion(name, upstreams));
            return check.fail(&self.upstream.span(), message);
        }
        let repeats = "later retries execute again";
        let suspended = "a process that is suspended longer loses its leases";
        for (setting, duration, reason) in [
            ("a retention", &self.retention, repeats),
            ("a lease", &self.lease, suspended),
            ("an orphan_retention", &self.orphan_retention, repeats),
        ] {
            if let Some(duration) = duration
                && *duration.get_ref() < MIN_ROUTE_DURATION
            {
                let message = format!("expected {setting} of at least 1s, because {reason}");
                return check.fail(&duration.span(), message);
            }
        }
        let statuses = self.unknown_statuses.get_ref();
        if let Some(status) = statuses.iter().find(|status| !(500..600).contains(*status)) {
            let message =
                format!("expected statuses of 500 to 599 in unknown_statuses, found {status}");
            return check.fail(&self.unknown_statuses.span(), message);
        }
        if self.mode() != Mode::Off {
            self.check_methods(check)?;
        }
        if self.mode() != Mode::Enforce && self.share.is_some() {
            let message = "share has no effect without mode = \"enforce\"";
            return check.fail(&self.path.span(), message);
        }
        if self.mode() == Mode::Off && self.missing_key == Some(MissingKeyName::Reject) {
            let message = "missing_key = \"reject\" has no effect with mode = \"off\"";
            return check.fail(&self.path.span(), message);
        }
        if let Some(PrincipalName::Cookie(name)) = &self.principal
            && name.is_empty()
        {
            return check.fail(
                &self.path.span(),
                "expected a name of the cookie of the principal, found an empty one",
            );
        }
        Ok(())
    }

    /// Returns `true` if both routes protect requests with one method.
    fn protects_method_of(&self, other: &Self) -> bool {
        let named = [self, other].into_iter().flat_map(|route| &route.methods);
        let usual = [Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
        let mut methods = named.map(|method| &method.0).chain(&usual);
        methods.any(|method| self.protects(method) && other.protects(method))
    }

    fn protects(&self, method: &Method) -> bool {
        let is_listed = self.methods.is_empty() || self.methods.iter().any(|it| it.0 == *method);
        is_listed && !SAFE.contains(&method.as_str()) && self.preset.covers(method)
    }

    /// Checks that the preset protects each unsafe method of the route.
    fn check_methods(&self, check: &Check<'_>) -> Result<(), ConfigError> {
        let mut methods = self.methods.iter().map(|method| &method.0);
        let uncovered =
            methods.find(|method| !SAFE.contains(&method.as_str()) && !self.preset.covers(method));
        let (Some(method), Some(protected)) = (uncovered, self.preset.methods()) else {
            return Ok(());
        };
        let protected: Vec<_> = protected.iter().map(Method::as_str).collect();
        let message = format!(
            "the preset {} protects only {}, found {method} in methods",
            self.preset,
            protected.join(" and ")
        );
        check.fail(&self.path.span(), message)
    }
}

/// Shortest retention, lease and orphan retention of a route.
const MIN_ROUTE_DURATION: HumanDuration = HumanDuration::from_secs(1);

/// Methods without effects.
pub(crate) const SAFE: [&str; 8] = [
    "GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "PROPFIND", "REPORT", "SEARCH",
];

/// The sources of the settings, from which errors get their lines and variables.
pub(super) struct Check<'a> {
    sources: &'a Sources<'a>,
}

impl Check<'_> {
    pub(super) fn fail<T>(
        &self,
        span: &Range<usize>,
        message: impl Into<String>,
    ) -> Result<T, ConfigError> {
        Err(ConfigError::at(self.sources, span, message))
    }

    fn at_least_one(&self, count: &Spanned<usize>) -> Result<(), ConfigError> {
        if *count.get_ref() == 0 {
            return self.fail(&count.span(), "expected at least 1");
        }
        Ok(())
    }

    fn positive(&self, name: &str, duration: &Spanned<HumanDuration>) -> Result<(), ConfigError> {
        if duration.get_ref().is_zero() {
            return self.fail(
                &duration.span(),
                format!("expected {name} to be longer than zero"),
            );
        }
        Ok(())
    }

    /// Returns an error if a variable names a file that does not exist. The variable may contain the key itself in place of its
    /// file, and a later error would quote it.
    fn file(&self, setting: &str, file: &Spanned<String>) -> Result<(), ConfigError> {
        match fs::metadata(file.get_ref()) {
            Err(error) if self.sources.variable(&file.span()).is_some() => {
                let message = format!("cannot read the file of {setting}: {error}");
                self.fail(&file.span(), message)
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Reads a file without the line break at its end.
    pub(super) fn read(
        &self,
        setting: &str,
        file: &Spanned<String>,
    ) -> Result<String, ConfigError> {
        match fs::read_to_string(file.get_ref()) {
            Ok(content) => Ok(content.trim_end_matches(['\r', '\n']).to_owned()),
            // A variable may contain the secret itself in place of its file.
            Err(error) if self.sources.variable(&file.span()).is_some() => {
                let message = format!("cannot read the file of {setting}: {error}");
                self.fail(&file.span(), message)
            }
            Err(error) => {
                let message = format!("cannot read {setting} {}: {error}", file.get_ref());
                self.fail(&file.span(), message)
            }
        }
    }
}
