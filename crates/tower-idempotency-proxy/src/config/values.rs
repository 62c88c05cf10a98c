//! Values of settings with a syntax of their own.

use std::{fmt, time};

use http::{HeaderName, Method};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// Maximum duration of a setting: ten years of 365.25 days, as the parser reads a year.
const LONGEST: time::Duration = time::Duration::from_secs(10 * 31_557_600);

/// A duration such as `30s`, `500ms` or `24h`, at most ten years.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Duration(time::Duration);

impl Duration {
    pub(crate) const fn from_secs(secs: u64) -> Self {
        Self(time::Duration::from_secs(secs))
    }

    pub(crate) fn get(self) -> time::Duration {
        self.0
    }

    pub(crate) fn is_zero(self) -> bool {
        self.0.is_zero()
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)
            .map_err(|_| D::Error::custom("expected a duration in quotes, such as \"30s\""))?;
        match humantime::parse_duration(&text) {
            Ok(duration) if duration <= LONGEST => Ok(Self(duration)),
            Ok(_) => Err(D::Error::custom(format!(
                "`{text}` is too long, expected at most ten years"
            ))),
            Err(_) => Err(D::Error::custom(format!(
                "`{text}` is no duration, expected one such as \"30s\""
            ))),
        }
    }
}

impl Serialize for Duration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A number of bytes such as `64KiB` or `2MiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(usize);

const UNITS: [(&str, usize); 4] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
];

impl Size {
    pub(crate) const fn mebibytes(count: usize) -> Self {
        Self(count << 20)
    }

    pub(crate) fn bytes(self) -> usize {
        self.0
    }

    fn parse(text: &str) -> Option<Self> {
        let (digits, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))?;
        let count: usize = digits.trim_end().parse().ok()?;
        count.checked_mul(unit).map(Self)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS
            .iter()
            .find(|(_, unit)| self.0 >= *unit && self.0.is_multiple_of(*unit));
        let (name, unit) = unit.unwrap_or(&("B", 1));
        write!(f, "{}{name}", self.0 / unit)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)
            .map_err(|_| D::Error::custom("expected a size in quotes, such as \"2MiB\""))?;
        Self::parse(&text).ok_or_else(|| {
            D::Error::custom(format!(
                "`{text}` is no size, expected a number with B, KiB, MiB or GiB, such as \"2MiB\""
            ))
        })
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A share of the callers, such as `10%`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Percent(u8);

impl Percent {
    pub(crate) fn get(self) -> u8 {
        self.0
    }
}

impl Default for Percent {
    fn default() -> Self {
        Self(100)
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

impl<'de> Deserialize<'de> for Percent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)
            .map_err(|_| D::Error::custom("expected a share in quotes, such as \"10%\""))?;
        let number = text.strip_suffix('%').and_then(|text| text.parse().ok());
        match number {
            Some(percent @ 0..=100) => Ok(Self(percent)),
            Some(_) | None => Err(D::Error::custom(format!(
                "`{text}` is no share, expected one from \"0%\" to \"100%\""
            ))),
        }
    }
}

impl Serialize for Percent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A method in capital letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MethodName(pub(crate) Method);

impl<'de> Deserialize<'de> for MethodName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let is_upper = !text.bytes().any(|byte| byte.is_ascii_lowercase());
        match Method::from_bytes(text.as_bytes()) {
            Ok(method) if is_upper => Ok(Self(method)),
            Ok(_) | Err(_) => Err(D::Error::custom(format!(
                "`{text}` is no method, expected one in capital letters, such as \"POST\""
            ))),
        }
    }
}

impl Serialize for MethodName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.as_str())
    }
}

/// The name of a route in the metrics and events of its layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RouteName(String);

impl RouteName {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for RouteName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if text.is_empty() || text.len() > 64 || !text.bytes().all(is_allowed) {
            return Err(D::Error::custom(format!(
                "`{text}` is no name of a route, expected 1 to 64 characters of a-z, A-Z, 0-9, _, . and -"
            )));
        }
        Ok(Self(text))
    }
}

/// The name of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header(pub(crate) HeaderName);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let name = HeaderName::from_bytes(text.as_bytes());
        name.map(Self)
            .map_err(|_| D::Error::custom(format!("`{text}` is no name of a header")))
    }
}

impl Serialize for Header {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.as_str())
    }
}

/// A text that may contain a password, and that no output shows.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl Secret {
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)
            .map(Self)
            .map_err(|_| D::Error::custom("expected a text in quotes"))
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("(secret)")
    }
}
