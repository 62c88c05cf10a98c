//! The policy of a layer, for its clients: derived from the settings in use.

mod cors;
mod derive;
mod display;
mod openapi;
mod service;

use std::time::Duration;

use http::Method;
use serde::{Serialize, Serializer};

pub use self::{
    cors::CorsHeaders,
    openapi::DescribeError,
    service::{PolicyBody, PolicyService},
};
use crate::enforcement::EnforcementSwitch;

/// The policy of a layer: everything that a client must know to send keys and to retry.
///
/// [`IdempotencyLayer::policy`](crate::IdempotencyLayer::policy) derives it from the settings in use. It contains no secret,
/// no namespace and no name of a header or cookie that identifies callers, so it may be published. The draft demands that a
/// server publishes its requirements (draft-ietf-httpapi-idempotency-key-header-07, section 2.5.2).
///
/// As JSON it follows the schema [`SCHEMA`](Self::SCHEMA). Durations are in seconds, sizes in bytes. `Display` shows the
/// same for humans.
///
/// ```
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, MissingKey};
///
/// let layer = IdempotencyLayer::new(MemoryStore::new()).with_missing_key(MissingKey::Reject);
/// let policy = layer.policy();
/// assert!(policy.key.is_required);
/// assert_eq!(policy.concurrent_requests.status, 409);
/// assert_eq!(serde_json::to_value(&policy)?["retention"], 86_400);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Policy {
    /// The version of the format: 1.
    pub version: u32,
    /// The key.
    pub key: KeyPolicy,
    /// The methods that are protected, among those of RFC 9110, PATCH and QUERY.
    pub methods: Vec<String>,
    /// `true` if some requests with these methods are not protected, as [`with_skip`](crate::IdempotencyLayer::with_skip)
    /// decides. gRPC calls and upgrades do not count: they pass through if the client may omit the key.
    pub has_exceptions: bool,
    /// The percentage of the callers for which the layer enforced the policy, at the time of the derivation. It is 0 if the
    /// layer observed or was off: see [`Enforcement`](crate::Enforcement). [`PolicyService`] publishes the current one.
    pub enforced_percent: u8,
    /// The callers, hosts and endpoints that have separate keys.
    pub scope: ScopePolicy,
    /// The parts of a request that must be equal in a retry.
    pub fingerprint: FingerprintPolicy,
    /// The status of another request under the same key, or `None` if such a request is a separate one.
    pub key_reuse: Option<u16>,
    /// The response to a duplicate while the first request is executed.
    pub concurrent_requests: ConcurrentPolicy,
    /// The time for which a key stays in progress after a crash of the service.
    #[serde(serialize_with = "seconds")]
    pub lease: Duration,
    /// The treatment of a key whose execution ended without an outcome: `take-over`, and then a retry executes again, or
    /// `refuse`.
    pub orphans: &'static str,
    /// The state in which a failed execution leaves its key: `release`, `orphan` or `needs-attention`.
    pub failure: &'static str,
    /// The treatment of requests if the store fails: `refuse`, or `execute-unprotected`.
    pub store_failure: &'static str,
    /// The statuses that are recorded and replayed, as single numbers and ranges. If [`KeyPolicy::missing`] is `derive`, a 4xx
    /// to a request without a key is not recorded, as [`MissingKey::Derive`](crate::MissingKey::Derive) describes.
    pub recorded_statuses: Vec<StatusRange>,
    /// The treatment of a retry if the response was too large or streamed: `refuse`, or `execute`.
    pub unrecordable: &'static str,
    /// The time for which a response is recorded, unless the handler chooses another one.
    #[serde(serialize_with = "seconds")]
    pub retention: Duration,
    /// The longest time that the handler may choose.
    #[serde(serialize_with = "seconds")]
    pub max_retention: Duration,
    /// The time after which an orphan is deleted. A retry then executes.
    #[serde(serialize_with = "seconds")]
    pub orphan_retention: Duration,
    /// The header that marks a replay.
    pub replay_marker: Option<Marker>,
    /// The limits of one request.
    pub limits: LimitPolicy,
    /// The errors of the layer.
    pub errors: Vec<ErrorPolicy>,
    #[serde(skip)]
    pub(crate) switch: PolicySwitch,
}

/// The switch of the layer, for the service. It is not a part of the policy, so all switches are equal.
#[derive(Clone, Debug)]
pub(crate) struct PolicySwitch(EnforcementSwitch);

impl PartialEq for PolicySwitch {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// The key of a [`Policy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct KeyPolicy {
    /// The header that carries the key, or `None` if the service makes it.
    pub header: Option<String>,
    /// The header that is read if the first one is absent.
    pub alias: Option<String>,
    /// `true` if a request without a key is rejected.
    pub is_required: bool,
    /// The treatment of a request without a key: `pass-through`, `reject`, or `derive`, which makes equal requests one.
    pub missing: &'static str,
    /// The syntax of the header: `lenient`, `strict`, `verbatim` or `unquoted`, as [`KeySyntax`](crate::KeySyntax)
    /// describes. `None` if the service makes the key.
    pub syntax: Option<&'static str>,
    /// The shortest length in bytes.
    pub min_bytes: usize,
    /// The longest length in bytes, or `None` if there is no limit.
    pub max_bytes: Option<usize>,
    /// `true` if the service checks the form of the key in addition.
    pub has_check: bool,
    /// `true` if responses repeat the header of the key.
    pub is_repeated: bool,
}

/// The scope of a key in a [`Policy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ScopePolicy {
    /// The kinds of sources that identify a caller, in order: `credentials`, `header`, `cookie`, `service`, `both` or
    /// `all`. `service` is the authentication of the service, and `both` are two combined sources. With `all`, all
    /// callers count as one.
    pub callers: Vec<&'static str>,
    /// `true` if all callers share their keys: see [`KeyScope::AllCallers`](crate::KeyScope::AllCallers).
    pub is_shared: bool,
    /// `true` if each host has separate keys.
    pub host: bool,
    /// `true` if each method and path has separate keys.
    pub endpoint: bool,
}

/// The fingerprint of a [`Policy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FingerprintPolicy {
    /// The part of the body in the fingerprint: `bytes`, `none`, `json`, `form` (without its boundary), or `service` (a
    /// function of the service). Unless it is `service`, method, path, query and media type count too.
    pub body: &'static str,
    /// `true` if numbers in JSON are compared by their value.
    pub numbers_by_value: bool,
    /// The JSON pointers to values that do not count. `*` stands for each item of an array.
    pub without: Vec<String>,
    /// The headers that count, if the request has them. A `_` in a name counts as `-`. If [`KeyPolicy::missing`] is `derive` and
    /// the request has no key, the preconditions of [`FingerprintBy`](crate::FingerprintBy#headers) also count. They are not in
    /// this list. They do not count if the fingerprint is a custom one, or if the service replaced the list.
    pub headers: Vec<String>,
}

/// The treatment of duplicates in a [`Policy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ConcurrentPolicy {
    /// The status.
    pub status: u16,
    /// The time for which a duplicate waits for the response before it gets the status. Zero if it does not wait.
    #[serde(serialize_with = "seconds")]
    pub wait: Duration,
    /// The value of `Retry-After`, as the response has it.
    #[serde(serialize_with = "optional_seconds")]
    pub retry_after: Option<Duration>,
}

/// Statuses from `first` to `last`, both included. As JSON `"200-204"`, or `"409"` if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatusRange {
    /// The lowest status.
    pub first: u16,
    /// The highest status.
    pub last: u16,
}

/// A header and its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Marker {
    /// The name.
    pub name: String,
    /// The value.
    pub value: String,
}

/// Limits of one request in a [`Policy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LimitPolicy {
    /// The largest request body in bytes, or `None` if bodies stream through.
    pub request_bytes: Option<usize>,
    /// The time for a request body, or `None` if bodies stream through.
    #[serde(serialize_with = "optional_seconds")]
    pub request_time: Option<Duration>,
    /// The largest response in bytes that is recorded. A store may have a lower limit for its records.
    pub response_bytes: usize,
}

/// An error of the layer in a [`Policy`].
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ErrorPolicy {
    /// The code, as [`ErrorKind::code`](crate::ErrorKind::code) returns it.
    pub code: &'static str,
    /// The status of the response.
    pub status: u16,
    /// `true` if the same request can succeed later.
    pub is_retryable: bool,
    /// The media type of the body.
    pub media_type: String,
    /// The title.
    #[serde(skip)]
    pub(crate) title: &'static str,
    /// A body as the layer sends it.
    #[serde(skip)]
    pub(crate) body: String,
    /// `true` if the response has `Retry-After`.
    #[serde(skip)]
    pub(crate) has_retry_after: bool,
    /// `true` if the response has `Link`.
    #[serde(skip)]
    pub(crate) has_link: bool,
    /// `true` if the layer renders its own form of problem details.
    #[serde(skip)]
    pub(crate) is_problem: bool,
}

impl Policy {
    /// The JSON schema of a policy (draft 2020-12).
    pub const SCHEMA: &str = include_str!("policy.schema.json");

    /// Returns `true` if requests with this method are protected. A method outside the list in [`methods`](Self::methods)
    /// counts as not protected, although the layer may protect it.
    #[must_use]
    pub fn covers(&self, method: &Method) -> bool {
        self.methods
            .iter()
            .any(|covered| covered == method.as_str())
    }

    /// Returns `true` if a response with this status is recorded and replayed.
    #[must_use]
    pub fn records(&self, status: u16) -> bool {
        let mut ranges = self.recorded_statuses.iter();
        ranges.any(|range| (range.first..=range.last).contains(&status))
    }
}

impl Serialize for StatusRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Serializes whole seconds as an integer.
fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    if duration.subsec_nanos() == 0 {
        serializer.serialize_u64(duration.as_secs())
    } else {
        serializer.serialize_f64(duration.as_secs_f64())
    }
}

fn optional_seconds<S: Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match duration {
        Some(duration) => seconds(duration, serializer),
        None => serializer.serialize_none(),
    }
}
