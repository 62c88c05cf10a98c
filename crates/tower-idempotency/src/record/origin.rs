//! The execution that a record belongs to.

use std::fmt;

use http::{HeaderMap, HeaderName};

use crate::store::KeyId;

/// The entry of a record, and the trace of the execution that produced it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'a> {
    pub(crate) id: &'a KeyId,
    pub(crate) traceparent: Option<&'a Traceparent>,
}

impl<'a> From<&'a KeyId> for Origin<'a> {
    fn from(id: &'a KeyId) -> Self {
        let traceparent = None;
        Self { id, traceparent }
    }
}

/// A well-formed `traceparent` of W3C Trace Context: version, trace id, parent id and flags in lower-case hexadecimal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Traceparent([u8; LENGTH]);

impl Traceparent {
    /// Returns the `traceparent` of a request if there is exactly one and it is well-formed.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut lines = headers.get_all(&NAME).iter();
        let line = lines.next()?;
        if lines.next().is_some() {
            return None;
        }
        Self::parse(line.as_bytes())
    }

    /// Parses a value. Cuts what a later version adds after the flags.
    pub(super) fn parse(value: &[u8]) -> Option<Self> {
        let (first, rest) = value.split_first_chunk::<LENGTH>()?;
        let (version, trace, parent) = (&first[..2], &first[3..35], &first[36..52]);
        let is_well_formed = first.iter().enumerate().all(|(at, byte)| match at {
            2 | 35 | 52 => *byte == b'-',
            _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
        });
        let is_zero = |digits: &[u8]| digits.iter().all(|digit| *digit == b'0');
        let may_end = match rest.first() {
            None => true,
            Some(next) => version != b"00" && *next == b'-',
        };
        let is_valid =
            is_well_formed && may_end && version != b"ff" && !is_zero(trace) && !is_zero(parent);
        is_valid.then_some(Self(*first))
    }

    pub(crate) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Debug for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

static NAME: HeaderName = HeaderName::from_static("traceparent");
/// Version, trace id, parent id and flags, with a hyphen between each two.
const LENGTH: usize = 2 + 1 + 32 + 1 + 16 + 1 + 2;

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    // S-963
    #[test]
    fn malformed_traceparent_is_ignored() {
        let parse = |value: &str| Traceparent::parse(value.as_bytes());
        assert_eq!(parse(VALID).expect("valid").as_str(), VALID);
        let later = VALID.replacen("00", "01", 1);
        for value in [later.clone(), format!("{later}-more")] {
            assert_eq!(parse(&value).expect("a later version").as_str(), later);
        }
        for value in [
            String::new(),
            VALID[1..].to_owned(),
            format!("{VALID}-more"),
            format!("{later}more"),
            VALID.to_uppercase(),
            VALID.replacen("00", "ff", 1),
            VALID.replacen('-', "_", 1),
            VALID.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            VALID.replace("00f067aa0ba902b7", &"0".repeat(16)),
            VALID.replace('4', "\u{e9}"),
        ] {
            assert_eq!(parse(&value), None, "{value}");
        }
        let mut headers = HeaderMap::new();
        assert_eq!(Traceparent::from_headers(&headers), None);
        headers.append(&NAME, HeaderValue::from_static(VALID));
        assert!(Traceparent::from_headers(&headers).is_some());
        headers.append(&NAME, HeaderValue::from_static(VALID));
        assert_eq!(Traceparent::from_headers(&headers), None, "two lines");
    }
}
