//! The changes that a running proxy accepts.

use serde_json::{Value, json};
use tower_idempotency::{Enforcement, Rollout};

use super::{ConfigError, ForwardKey, Mode, RouteConfig, Settings};
use crate::route::RouteMatch;

impl RouteConfig {
    pub(crate) fn rule(&self) -> RouteMatch {
        RouteMatch {
            path: self.path.get_ref().clone(),
            methods: self.methods.iter().map(|method| method.0.clone()).collect(),
            host: self.host.clone(),
            ignores_case: self.mode() != Mode::Off,
        }
    }

    /// Returns the protection of the route.
    pub(crate) fn mode(&self) -> Mode {
        self.mode.unwrap_or_default()
    }

    /// Returns the enforcement of the layer of the route: enforced for its share of the callers, observed for the others.
    pub(crate) fn enforcement(&self) -> Rollout {
        let share = self.share.unwrap_or_default().get();
        match self.mode() {
            Mode::Off => Rollout::from(Enforcement::Off),
            Mode::Observe => Rollout::from(Enforcement::Observe),
            Mode::Enforce => Rollout::new(share, Enforcement::Enforce, Enforcement::Observe)
                .unwrap_or_else(|_| Enforcement::Enforce.into()),
        }
    }

    /// Returns the percentage of the callers that the route protects.
    fn enforced_percent(&self) -> u8 {
        match self.mode() {
            Mode::Enforce => self.share.unwrap_or_default().get(),
            Mode::Observe | Mode::Off => 0,
        }
    }

    /// Returns the settings that identify the entry of a request. If one of them changes, the proxy no longer finds the
    /// record.
    pub(crate) fn entry_identity(&self) -> Value {
        json!({
            "preset": self.preset,
            "principal": self.principal,
            "key_header": self.key_header,
            "key_syntax": self.key_syntax,
            "host_in_scope": self.host_in_scope,
            "fingerprint": self.fingerprint.unwrap_or(self.preset.fingerprint()),
        })
    }
}

impl Settings {
    /// Returns an error if a proxy that runs with `self` cannot continue with `new`, or would no longer find its records.
    /// `enforced` are the routes that it has enforced since its start.
    pub(crate) fn accepts(&self, new: &Self, enforced: &EnforcedRoutes) -> Result<(), ConfigError> {
        let fail = |message: String| Err(ConfigError::without_line(message));
        let token = |settings: &Self| settings.admin.as_ref().map(|admin| admin.token.clone());
        for (name, is_changed) in [
            (
                "the address of [listen]",
                self.listen.address != new.listen.address,
            ),
            (
                "TLS of [listen]",
                self.listen.tls.is_some() != new.listen.tls.is_some(),
            ),
            ("[admin]", json!(self.admin) != json!(new.admin)),
            ("the token of [admin]", token(self) != token(new)),
            (
                "max_connections",
                self.listen.max_connections.get_ref() != new.listen.max_connections.get_ref(),
            ),
        ] {
            if is_changed {
                return fail(format!("{name} has changed, which needs a restart"));
            }
        }
        for (name, is_changed) in [
            ("the URL of [store]", self.store_url() != new.store_url()),
            (
                "namespace",
                self.identity.namespace != new.identity.namespace,
            ),
            ("the secret", self.identity.secret != new.identity.secret),
        ] {
            if is_changed {
                return fail(format!(
                    "{name} has changed: the proxy would not find its records, and retries would execute again"
                ));
            }
        }
        for (index, old) in self.route.iter().enumerate() {
            if old.mode() == Mode::Enforce {
                self.accepts_route(index, old, new)?;
            }
        }
        enforced.accepts(new)
    }

    /// Returns an error if `old` is missing or off in `new`. Returns one too if another route gets requests of `old`, unless
    /// it enforces them for at least as many callers.
    fn accepts_route(
        &self,
        index: usize,
        old: &RouteConfig,
        new: &Self,
    ) -> Result<(), ConfigError> {
        let fail = |message: String| Err(ConfigError::without_line(message));
        let rule = old.rule();
        // The old configuration sent requests that match an earlier route to that route.
        let earlier: Vec<_> = self.route[..index].iter().map(RouteConfig::rule).collect();
        // The operator may explicitly lower the share of this route.
        let own = new.route.iter().find(|route| route.rule() == rule);
        let enforced_percent = own.map_or(old, |own| own).enforced_percent();
        let enforced_percent = enforced_percent.min(old.enforced_percent());
        for candidate in &new.route {
            let other = candidate.rule();
            let was_earlier = earlier.iter().any(|earlier| earlier.covers(&other));
            if other != rule && (was_earlier || !other.overlaps(&rule)) {
                continue;
            }
            // The operator explicitly sets this route to observe, and its records can still be found.
            let is_switched = other == rule && candidate.mode() == Mode::Observe;
            if candidate.mode() != Mode::Enforce && !is_switched {
                return fail(format!(
                    "the route {other} would no longer protect requests of {rule}, and their retries would execute again"
                ));
            }
            if other != rule && candidate.enforced_percent() < enforced_percent {
                return fail(format!(
                    "the route {other} would protect {rule} for a smaller share of the callers, and retries of the rest would execute again"
                ));
            }
            if other == rule {
                return Ok(());
            }
            // Later routes get none of its requests, so they are not the cause.
            let is_new = self.route.iter().all(|old| old.rule() != other);
            if own.is_none() && is_new && other.covers(&rule) {
                return fail(format!(
                    "the protected route {rule} has changed to {other}, which needs a restart"
                ));
            }
        }
        fail(format!(
            "the protected route {rule} is missing: retries of its requests would execute again"
        ))
    }
}

/// The routes that the proxy has enforced since its start, with all its configurations.
///
/// Their records may be in the store, also if a route observes or is missing now. The proxy must find them when it enforces
/// the route again. The retention is not considered, so a route stays here until the process ends.
pub(crate) struct EnforcedRoutes(Vec<EnforcedRoute>);

struct EnforcedRoute {
    rule: RouteMatch,
    /// The settings that identify its entries.
    identity: Value,
    /// The key that the upstream has got for its requests.
    forward_key: ForwardKey,
    /// The routes that were in front whenever this one was enforced. It has no records of their requests.
    earlier: Vec<RouteMatch>,
}

impl EnforcedRoutes {
    /// Creates the routes that the first configuration enforces.
    pub(crate) fn new(first: &Settings) -> Self {
        let mut routes = Self(Vec::new());
        routes.add(first);
        routes
    }

    /// Adds the routes that an accepted configuration enforces.
    pub(crate) fn add(&mut self, settings: &Settings) {
        let rules: Vec<_> = settings.route.iter().map(RouteConfig::rule).collect();
        for (index, route) in settings.route.iter().enumerate() {
            if route.mode() != Mode::Enforce {
                continue;
            }
            let (rule, in_front) = (&rules[index], &rules[..index]);
            // A route that gets no requests has no records.
            if in_front.iter().any(|earlier| earlier.covers(rule)) {
                continue;
            }
            let known = self.0.iter_mut().find(|known| known.rule == *rule);
            if let Some(known) = known {
                known.earlier = in_both(&known.earlier, in_front);
            } else {
                self.0.push(EnforcedRoute {
                    rule: rule.clone(),
                    identity: route.entry_identity(),
                    forward_key: route.forward_key,
                    earlier: in_front.to_vec(),
                });
            }
        }
    }

    /// Returns the number of the routes that are known to be in front of others.
    #[cfg(test)]
    pub(super) fn known_in_front(&self) -> usize {
        self.0.iter().map(|known| known.earlier.len()).sum()
    }

    /// Checks each new route that can get a request of an enforced route. It would find the record of the request, and send the
    /// same key to the upstream. A route that is off reads no records.
    fn accepts(&self, new: &Settings) -> Result<(), ConfigError> {
        for enforced in &self.0 {
            for candidate in &new.route {
                let rule = candidate.rule();
                let was_earlier = enforced.earlier.iter().any(|earlier| earlier.covers(&rule));
                if was_earlier || !rule.overlaps(&enforced.rule) {
                    continue;
                }
                if candidate.mode() != Mode::Off && candidate.entry_identity() != enforced.identity
                {
                    return Err(ConfigError::without_line(format!(
                        "the route {rule} would not identify requests of {} as when the proxy enforced them: their records would not be found, and retries would execute again; this needs a restart",
                        enforced.rule
                    )));
                }
                if candidate.mode() != Mode::Off && candidate.forward_key != enforced.forward_key {
                    return Err(ConfigError::without_line(format!(
                        "forward_key of the route {rule} differs from that of {} when the proxy enforced it: the upstream would get two keys for one operation; this needs a restart",
                        enforced.rule
                    )));
                }
                // Later routes get none of its requests.
                if rule.covers(&enforced.rule) {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// Returns rules that match the requests that both lists match: of each two rules, the narrower one. No rule occurs twice, so
/// the list does not grow with each reload.
fn in_both(some: &[RouteMatch], others: &[RouteMatch]) -> Vec<RouteMatch> {
    let mut both: Vec<RouteMatch> = Vec::new();
    for one in some {
        for other in others {
            let narrower = if one.covers(other) {
                other
            } else if other.covers(one) {
                one
            } else {
                continue;
            };
            if !both.iter().any(|known| known.covers(narrower)) {
                both.push(narrower.clone());
            }
        }
    }
    both
}
