//! The execution that a record belongs to.

use std::{fmt, ops::Range};

use bytes::Bytes;
use http::{HeaderMap, HeaderName};

use crate::store::KeyId;

/// The entry of a record, and the trace of the execution that produced it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin<'a> {
    pub(crate) id: &'a KeyId,
    pub(crate) traceparent: Option<&'a ExecutionTrace>,
}

impl<'a> Origin<'a> {
    /// Sets the trace if there is none.
    pub(super) fn or_trace(self, trace: Option<&'a ExecutionTrace>) -> Self {
        Self {
            traceparent: self.traceparent.or(trace),
            ..self
        }
    }
}

impl<'a> From<&'a KeyId> for Origin<'a> {
    fn from(id: &'a KeyId) -> Self {
        let traceparent = None;
        Self { id, traceparent }
    }
}

/// Trace of the execution that produced a record: the `traceparent` of its request (W3C Trace Context, section 3.2).
///
/// With [`with_trace_links`](crate::IdempotencyLayer::with_trace_links) the layer stores the trace in the record. It
/// attaches the trace as an extension to each replay, and to each rejection because of the record. An outer layer can read
/// this extension, and link the span of the retry to the execution. With `tracing-opentelemetry`:
///
/// ```ignore
/// if let Some(execution) = response.extensions().get::<ExecutionTrace>() {
///     let headers = HashMap::from([("traceparent".to_owned(), execution.as_str().to_owned())]);
///     let context = TraceContextPropagator::new().extract(&headers);
///     Span::current().add_link(context.span().span_context().clone());
/// }
/// ```
///
/// The client of the first request chose the value, so the link proves nothing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ExecutionTrace([u8; LENGTH]);

impl ExecutionTrace {
    /// Reads the trace from a record. Returns `None` if the record has no trace or cannot be read. Intended for operators'
    /// tools.
    ///
    /// Inflates a compressed record, up to 17 MiB.
    #[must_use]
    pub fn in_record(id: &KeyId, record: &Bytes) -> Option<Self> {
        super::traceparent_in(id, record)
    }

    /// Returns the `traceparent`: 55 characters, as in `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }

    /// Returns the ID of the trace: 32 hexadecimal digits.
    #[must_use]
    pub fn trace_id(&self) -> &str {
        &self.as_str()[TRACE_ID]
    }

    /// Returns the ID of the span that sent the request: 16 hexadecimal digits.
    #[must_use]
    pub fn span_id(&self) -> &str {
        &self.as_str()[SPAN_ID]
    }

    /// Returns the `traceparent` of a request if there is exactly one and it is well-formed.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut lines = headers.get_all(&NAME).iter();
        let line = lines.next()?;
        if lines.next().is_some() {
            return None;
        }
        Self::parse(line.as_bytes())
    }

    /// Parses a value. Cuts fields that a later version adds after the flags.
    pub(super) fn parse(value: &[u8]) -> Option<Self> {
        let (first, rest) = value.split_first_chunk::<LENGTH>()?;
        let (version, trace, parent) = (&first[..2], &first[TRACE_ID], &first[SPAN_ID]);
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
}

impl fmt::Debug for ExecutionTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

static NAME: HeaderName = HeaderName::from_static("traceparent");
const TRACE_ID: Range<usize> = 3..35;
const SPAN_ID: Range<usize> = 36..52;
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
        let parse = |value: &str| ExecutionTrace::parse(value.as_bytes());
        let valid = parse(VALID).expect("valid");
        assert_eq!(valid.as_str(), VALID);
        assert_eq!(valid.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(valid.span_id(), "00f067aa0ba902b7");
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
        assert_eq!(ExecutionTrace::from_headers(&headers), None);
        headers.append(&NAME, HeaderValue::from_static(VALID));
        assert!(ExecutionTrace::from_headers(&headers).is_some());
        headers.append(&NAME, HeaderValue::from_static(VALID));
        assert_eq!(ExecutionTrace::from_headers(&headers), None, "two lines");
    }
}
