//! Choices of a policy, by the names that they have in the file.

use std::fmt;

use http::Method;
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error, MapAccess, Visitor},
};

use tower_idempotency::Preset;

use super::{
    check::SAFE,
    values::{Duration, Header},
};

/// The protection of a route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    #[default]
    Enforce,
    /// Counts how requests would be treated, and changes none.
    Observe,
    Off,
}

/// The console on the admin port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ConsoleMode {
    Off,
    /// Operators see the entries and the recorded responses.
    ReadOnly,
    /// Operators also resolve entries.
    Resolve,
}

/// A preset of the layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PresetName {
    #[default]
    Recommended,
    Ietf,
    Stripe,
    Acp,
}

impl PresetName {
    pub(crate) const ALL: [Self; 4] = [Self::Recommended, Self::Ietf, Self::Stripe, Self::Acp];

    pub(crate) fn preset(self) -> Preset {
        match self {
            Self::Recommended => Preset::Recommended,
            Self::Ietf => Preset::Ietf,
            Self::Stripe => Preset::Stripe,
            Self::Acp => Preset::Acp,
        }
    }

    /// Returns the methods that the layer protects, or `None` if it protects all unsafe ones.
    pub(crate) fn methods(self) -> Option<&'static [Method]> {
        match self {
            Self::Recommended => None,
            Self::Ietf => Some(&[Method::POST, Method::PATCH]),
            Self::Stripe | Self::Acp => Some(&[Method::POST]),
        }
    }

    /// Returns `true` if the layer protects requests with this method.
    pub(crate) fn covers(self, method: &Method) -> bool {
        match self.methods() {
            Some(methods) => methods.contains(method),
            None => !SAFE.contains(&method.as_str()),
        }
    }

    /// Returns the comparison of retries unless the route sets another one.
    pub(crate) fn fingerprint(self) -> RequestIdentity {
        match self {
            Self::Acp => RequestIdentity::JsonByValue,
            Self::Recommended | Self::Ietf | Self::Stripe => RequestIdentity::RawBody,
        }
    }
}

impl fmt::Display for PresetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Recommended => "recommended",
            Self::Ietf => "ietf",
            Self::Stripe => "stripe",
            Self::Acp => "acp",
        })
    }
}

/// The syntax of the key header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum KeySyntaxName {
    Lenient,
    Strict,
    Verbatim,
    Unquoted,
}

/// The parts of a request that must be equal in its retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RequestIdentity {
    RawBody,
    CanonicalJson,
    JsonByValue,
    Multipart,
}

/// The treatment of a request without a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MissingKeyName {
    Pass,
    Reject,
}

/// The treatment of a key whose execution ended without an outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OrphansName {
    #[default]
    Refuse,
    TakeOver,
}

/// The state in which an unknown outcome leaves its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UnknownOutcome {
    /// An operator must resolve it.
    #[default]
    Attention,
    /// An orphan, which expires.
    Orphan,
    /// A retry executes again.
    Free,
}

/// The key that the upstream gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ForwardKey {
    #[default]
    Derive,
    Pass,
    Drop,
}

/// The encoding of a response that is recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Encoding {
    /// The upstream gets `Accept-Encoding: identity`, so it does not compress.
    #[default]
    Identity,
    /// The upstream gets the `Accept-Encoding` of the first request.
    Pass,
}

/// The treatment of `Forwarded` and `X-Forwarded-*` of the client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Forwarded {
    /// They are removed, and the proxy sets its own.
    #[default]
    Replace,
    /// The address of the client is appended to `X-Forwarded-For`, and `Forwarded` is removed.
    Append,
    /// They pass unchanged.
    Pass,
}

/// The `Host` that the upstream gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HostHeader {
    #[default]
    Client,
    Upstream,
}

/// The source of the principal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PrincipalName {
    Credentials,
    Authorization,
    Unscoped,
    Header(Header),
    Cookie(String),
}

const PRINCIPALS: [&str; 3] = ["credentials", "authorization", "unscoped"];

impl<'de> Deserialize<'de> for PrincipalName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PrincipalVisitor;

        impl<'de> Visitor<'de> for PrincipalVisitor {
            type Value = PrincipalName;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"credentials\", { header = \"x-user\" } or { cookie = \"session\" }")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<PrincipalName, E> {
                match name {
                    "credentials" => Ok(PrincipalName::Credentials),
                    "authorization" => Ok(PrincipalName::Authorization),
                    "unscoped" => Ok(PrincipalName::Unscoped),
                    _ => Err(E::unknown_variant(name, &PRINCIPALS)),
                }
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PrincipalName, A::Error> {
                let name: Option<String> = map.next_key()?;
                let principal = match name.as_deref() {
                    Some("header") => PrincipalName::Header(map.next_value()?),
                    Some("cookie") => PrincipalName::Cookie(map.next_value()?),
                    Some(other) => {
                        return Err(A::Error::unknown_field(other, &["header", "cookie"]));
                    }
                    None => return Err(A::Error::custom("expected a header or a cookie")),
                };
                match map.next_key::<String>()? {
                    None => Ok(principal),
                    Some(_) => Err(A::Error::custom("expected one header or one cookie")),
                }
            }
        }

        deserializer.deserialize_any(PrincipalVisitor)
    }
}

/// The response to a duplicate that arrives during the execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConcurrentRequests {
    Conflict,
    TooManyRequests,
    Wait(Duration),
}

impl<'de> Deserialize<'de> for ConcurrentRequests {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.as_str() {
            "conflict" => return Ok(Self::Conflict),
            "too-many-requests" => return Ok(Self::TooManyRequests),
            _ => {}
        }
        let duration = text.strip_prefix("wait ").and_then(|duration| {
            let bytes = serde::de::value::StrDeserializer::<D::Error>::new(duration);
            Duration::deserialize(bytes).ok()
        });
        duration.map(Self::Wait).ok_or_else(|| {
            D::Error::unknown_variant(&text, &["conflict", "too-many-requests", "wait 5s"])
        })
    }
}

impl Serialize for ConcurrentRequests {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Conflict => serializer.serialize_str("conflict"),
            Self::TooManyRequests => serializer.serialize_str("too-many-requests"),
            Self::Wait(duration) => serializer.collect_str(&format_args!("wait {duration}")),
        }
    }
}
