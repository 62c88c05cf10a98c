//! Counters of coverage and of observed requests, which show if a service is ready to be enforced.

use std::fmt::Display;

use http::Method;

use crate::{layer_name::LayerName, safe_methods::is_safe, store::KeyId};

/// The protection of an unsafe request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coverage {
    /// The request has a key.
    Keyed,
    /// The layer derives the key.
    Derived,
    NoKey,
    Method,
    Skip,
    Connect,
    Upgrade,
    Grpc,
    /// The layer is off.
    Off,
}

/// Counts a request with an unsafe method. Requests with other methods need no key.
pub(crate) fn unsafe_request(layer: &LayerName, method: &Method, coverage: Coverage) {
    if !is_safe(method) {
        coverage.count(layer);
    }
}

/// The treatment that an observed request would get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Observed {
    Fresh,
    WouldReplay,
    WouldMismatch,
    WouldConflict,
    WouldRefuseRetry,
    WouldRefuseKey,
    WouldExceed,
    NoKey,
    NotJudged,
}

/// Implements `name` and `count` for a type whose values are labels of a counter. Each name is a literal, because the counter of
/// a literal allocates nothing. An invocation repeats the form of `count!`, in which `scripts/check-docs` finds the metric.
macro_rules! name_counted {
    (
        $type:ident: count!($counter:literal, $label:literal => name, layer);
        $($value:ident: $name:literal,)*
    ) => {
        impl $type {
            pub(crate) const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)*
                }
            }

            fn count(self, layer: &LayerName) {
                match self {
                    $(Self::$value => {
                        count!($counter, $label => $name, layer);
                    })*
                }
            }
        }
    };
}

name_counted! {
    Coverage: count!("idempotency_unsafe_requests_total", "coverage" => name, layer);
    Keyed: "keyed",
    Derived: "derived",
    NoKey: "no_key",
    Method: "method",
    Skip: "skip",
    Connect: "connect",
    Upgrade: "upgrade",
    Grpc: "grpc",
    Off: "off",
}

name_counted! {
    Observed: count!("idempotency_observed_total", "outcome" => name, layer);
    Fresh: "fresh",
    WouldReplay: "would_replay",
    WouldMismatch: "would_mismatch",
    WouldConflict: "would_conflict",
    WouldRefuseRetry: "would_refuse_retry",
    WouldRefuseKey: "would_refuse_key",
    WouldExceed: "would_exceed",
    NoKey: "no_key",
    NotJudged: "not_judged",
}

/// Reports an observed request that has no entry.
pub(crate) fn observed(layer: &LayerName, outcome: Observed) {
    log!(
        debug,
        layer = layer.as_str(),
        outcome = outcome.name(),
        "request observed"
    );
    outcome.count(layer);
}

/// Reports an observed request.
pub(crate) fn observed_at(layer: &LayerName, id: &KeyId, outcome: Observed) {
    log!(debug, %id, layer = layer.as_str(), outcome = outcome.name(), "request observed");
    outcome.count(layer);
}

/// Reports a retry whose response is not the one that a replay would be.
pub(crate) fn observed_difference(layer: &LayerName, id: &KeyId, part: &'static str) {
    log!(debug, %id, layer = layer.as_str(), part, "replay would differ from the response of the handler");
    count!("idempotency_observed_differs_total", "part" => part, layer);
}

/// Reports a change of the enforcement. Several layers may share the switch, so the event has no name of a layer.
pub(crate) fn enforcement_changed(old: impl Display, new: impl Display) {
    log!(warn, %old, %new, "enforcement changed");
    let none = LayerName::default();
    count!("idempotency_enforcement_changed_total", none);
}
