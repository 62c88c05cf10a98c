//! The payload of a record: MessagePack with named fields.
//!
//! Unknown fields are ignored, so that a later minor version may add fields. A field that is missing, duplicate or of
//! another type is rejected. Bytes are accepted as MessagePack bin only. An array of integers has 1.5 times the size
//! and 300 times the cost. A reader that accepted it would hide a faulty writer.

pub(super) mod plain;

use std::{
    fmt,
    marker::PhantomData,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use rmp_serde::decode::Error as MessagePackError;
use serde::{
    Deserialize, Deserializer,
    de::{SeqAccess, Visitor},
};

use super::{
    ExecutionTrace, Origin, Record, StoredResponse, TombstoneReason,
    error::{Problem, RecordError},
    headers::{self, LineList},
};

#[derive(Default, Deserialize)]
#[cfg_attr(test, derive(PartialEq, Debug))]
pub(super) struct Payload<'a> {
    pub(super) kind: &'a str,
    pub(super) status: Option<u16>,
    #[serde(borrow)]
    pub(super) reason: Option<&'a str>,
    /// Milliseconds since 1970.
    pub(super) recorded_at: Option<u64>,
    #[serde(borrow)]
    pub(super) headers: Option<Lines<'a>>,
    #[serde(borrow)]
    pub(super) trailers: Option<Lines<'a>>,
    /// The positions of lines with sensitive values, one byte each. Positions of trailers follow those of the headers.
    #[serde(borrow)]
    pub(super) sensitive: Option<Bin<'a>>,
    #[serde(borrow)]
    pub(super) body: Option<Bin<'a>>,
    #[serde(borrow)]
    pub(super) value: Option<Bin<'a>>,
    /// The trace of the execution: 55 characters.
    #[serde(borrow)]
    pub(super) traceparent: Option<&'a str>,
}

/// Header lines: a list of (name, bytes).
#[cfg_attr(test, derive(PartialEq, Debug))]
pub(super) struct Lines<'a>(pub(super) LineList<'a>);

/// Bytes, written and read as MessagePack bin only.
#[cfg_attr(test, derive(PartialEq, Debug))]
pub(super) struct Bin<'a>(pub(super) &'a [u8]);

#[derive(Clone, Copy)]
pub(super) enum PayloadKind {
    Response,
    Tombstone,
    Value,
    Attention,
}

impl<'a> Payload<'a> {
    pub(super) fn new(kind: PayloadKind, origin: Origin<'a>) -> Self {
        Self {
            traceparent: origin.traceparent.map(ExecutionTrace::as_str),
            kind: match kind {
                PayloadKind::Response => "response",
                PayloadKind::Tombstone => "tombstone",
                PayloadKind::Value => "value",
                PayloadKind::Attention => ATTENTION,
            },
            ..Self::default()
        }
    }

    /// Returns the encoded size, or `None` if the payload cannot be written in a form that can be decoded.
    pub(super) fn size_if_fits(&self) -> Option<usize> {
        let lines = |lines: &Option<Lines<'_>>| lines.as_ref().map_or(0, |lines| lines.0.len());
        let size = self.size();
        let fits = lines(&self.headers) <= MAX_LINES
            && lines(&self.trailers) <= MAX_LINES
            && u32::try_from(size).is_ok();
        fits.then_some(size)
    }

    /// Returns the encoded size.
    pub(super) fn size(&self) -> usize {
        let text = |name: &str, text: Option<&str>| {
            text.map_or(0, |text| text_size(name) + text_size(text))
        };
        let number = |name: &str, number: Option<u64>| {
            number.map_or(0, |number| text_size(name) + number_size(number))
        };
        let bin = |name: &str, bin: &Option<Bin<'_>>| {
            bin.as_ref()
                .map_or(0, |Bin(bytes)| text_size(name) + bin_size(bytes))
        };
        let lines = |name: &str, lines: &Option<Lines<'_>>| {
            lines
                .as_ref()
                .map_or(0, |lines| text_size(name) + lines.size())
        };
        // One byte for a map of at most 15 fields.
        1 + text("kind", Some(self.kind))
            + number("status", self.status.map(u64::from))
            + text("reason", self.reason)
            + number("recorded_at", self.recorded_at)
            + lines("headers", &self.headers)
            + lines("trailers", &self.trailers)
            + bin("sensitive", &self.sensitive)
            + bin("body", &self.body)
            + bin("value", &self.value)
            + text("traceparent", self.traceparent)
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        plain::write(self, out);
    }
}

impl Lines<'_> {
    fn size(&self) -> usize {
        let count = match self.0.len() {
            0..=0xf => 1,
            0x10..=0xffff => 3,
            _ => 5,
        };
        // One byte for each pair.
        let lines = self.0.iter();
        let size = |(name, value): &(&str, &[u8])| 1 + text_size(name) + bin_size(value);
        count + lines.map(size).sum::<usize>()
    }
}

/// Returns the encoded size of a text: a length of one to five bytes, and the text.
const fn text_size(text: &str) -> usize {
    text.len()
        + match text.len() {
            0..=0x1f => 1,
            0x20..=0xff => 2,
            0x100..=0xffff => 3,
            _ => 5,
        }
}

/// Returns the encoded size of bytes: a length of two to five bytes, and the bytes.
const fn bin_size(bytes: &[u8]) -> usize {
    bytes.len()
        + match bytes.len() {
            0..=0xff => 2,
            0x100..=0xffff => 3,
            _ => 5,
        }
}

const fn number_size(number: u64) -> usize {
    match number {
        0..=0x7f => 1,
        0x80..=0xff => 2,
        0x100..=0xffff => 3,
        0x1_0000..=0xffff_ffff => 5,
        _ => 9,
    }
}

/// Returns the body to record: empty if HTTP allows no body under this status.
pub(super) fn body(status: StatusCode, body: &[u8]) -> Bin<'_> {
    if is_bodiless(status) {
        Bin(&[])
    } else {
        Bin(body)
    }
}

pub(super) fn millis(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_millis().try_into().unwrap_or(u64::MAX))
}

/// Decodes the payload of a record that needs attention: the status of the response, and the reason.
pub(super) fn decode_attention(payload: &[u8]) -> Result<(Option<StatusCode>, &str), RecordError> {
    let mut fields = Payload::default();
    read_fields(payload, &mut fields)?;
    if fields.kind != ATTENTION {
        return Err(Problem::Kind.into());
    }
    let answered = match fields.status {
        Some(_) => Some(status(fields.status)?),
        None => None,
    };
    Ok((answered, required(fields.reason, "reason")?))
}

/// Returns the trace in a payload of any kind.
pub(super) fn traceparent(payload: &[u8]) -> Option<ExecutionTrace> {
    let mut fields = Payload::default();
    read_fields(payload, &mut fields).ok()?;
    ExecutionTrace::parse(fields.traceparent?.as_bytes())
}

/// Decodes any other payload, which is a part of `buffer`. Bodies and header values share the buffer.
pub(super) fn decode(buffer: &Bytes, payload: &[u8]) -> Result<Record, RecordError> {
    let mut fields = Payload::default();
    read_fields(payload, &mut fields)?;
    match fields.kind {
        "response" => response(buffer, &fields).map(Record::Response),
        "tombstone" => Ok(Record::Tombstone {
            status: status(fields.status)?,
            reason: TombstoneReason::from_name(required(fields.reason, "reason")?)?,
        }),
        "value" => {
            let Bin(value) = required(fields.value, "value")?;
            Ok(Record::Value(buffer.slice_ref(value)))
        }
        _ => Err(Problem::Kind.into()),
    }
}

/// Reads the fields of a payload into `fields`, which must be empty. A return value of their size would be copied.
fn read_fields<'a>(payload: &'a [u8], fields: &mut Payload<'a>) -> Result<(), RecordError> {
    if plain::read(payload, fields).is_none() {
        *fields = parse_any_fields(payload)?;
    }
    Ok(())
}

/// Parses a payload from any writer.
pub(super) fn parse_any_fields(payload: &[u8]) -> Result<Payload<'_>, RecordError> {
    if payload.first() == Some(&SEALED_PAYLOAD) {
        return Err(Problem::Sealed.into());
    }
    // The derived reader would also accept the fields as a bare list, by position.
    if !matches!(payload.first(), Some(0x80..=0x8f | 0xde | 0xdf)) {
        return Err(Problem::Payload {
            found: "no map of fields",
        }
        .into());
    }
    let mut deserializer = rmp_serde::Deserializer::from_read_ref(payload);
    deserializer.set_max_depth(MAX_DEPTH);
    let fields = Payload::deserialize(&mut deserializer).map_err(|error| payload_error(&error))?;
    // Reading a marker fails only if no bytes are left.
    if !matches!(
        bool::deserialize(&mut deserializer),
        Err(MessagePackError::InvalidMarkerRead(_))
    ) {
        return Err(Problem::AfterPayload.into());
    }
    Ok(fields)
}

fn response(buffer: &Bytes, fields: &Payload<'_>) -> Result<StoredResponse, RecordError> {
    let status = status(fields.status)?;
    // It precedes the final response, for which a client would wait.
    if status.is_informational() {
        let found = status.as_u16();
        return Err(Problem::Status { found }.into());
    }
    let millis = required(fields.recorded_at, "recorded_at")?;
    let recorded_at = SystemTime::UNIX_EPOCH
        .checked_add(Duration::from_millis(millis))
        .ok_or(Problem::RecordedAt { found: millis })?;
    let Bin(body) = required(fields.body.as_ref(), "body")?;
    if is_bodiless(status) && !body.is_empty() {
        return Err(Problem::BodyOf {
            status: status.as_u16(),
            found: body.len(),
        }
        .into());
    }
    let headers = required(fields.headers.as_ref(), "headers")?;
    let mut sensitive = [false; 2 * MAX_LINES];
    let places = fields.sensitive.as_ref();
    for place in places.map_or(&[][..], |Bin(places)| *places) {
        if let Some(sensitive) = sensitive.get_mut(usize::from(*place)) {
            *sensitive = true;
        }
    }
    let (of_headers, of_trailers) = sensitive.split_at(headers.0.len());
    Ok(StoredResponse {
        status,
        headers: header_map(buffer, headers, of_headers)?,
        body: buffer.slice_ref(body),
        trailers: match &fields.trailers {
            Some(lines) => Some(header_map(buffer, lines, of_trailers)?),
            None => None,
        },
        recorded_at,
        // A trace that cannot be read does not make the response unreadable.
        traceparent: fields
            .traceparent
            .and_then(|trace| ExecutionTrace::parse(trace.as_bytes())),
    })
}

/// Number of lines that a replay adds: its marker, and the length of its body.
const REPLAY_LINES: usize = 2;

fn header_map(
    buffer: &Bytes,
    Lines(lines): &Lines<'_>,
    sensitive: &[bool],
) -> Result<HeaderMap, RecordError> {
    let too_many = |_| Problem::HeaderLines { limit: MAX_LINES };
    let mut map = HeaderMap::try_with_capacity(lines.len() + REPLAY_LINES).map_err(too_many)?;
    for ((name, value), sensitive) in lines.iter().zip(sensitive) {
        let name = HeaderName::from_lowercase(name.as_bytes()).map_err(|_| Problem::HeaderName)?;
        // A record must not set the framing of a message, even if another program wrote the record.
        if headers::is_never_recorded(&name) {
            continue;
        }
        let mut value = HeaderValue::from_maybe_shared(buffer.slice_ref(value))
            .map_err(|_| Problem::HeaderValue)?;
        value.set_sensitive(*sensitive);
        map.try_append(name, value).map_err(too_many)?;
    }
    Ok(map)
}

fn status(found: Option<u16>) -> Result<StatusCode, RecordError> {
    let found = required(found, "status")?;
    StatusCode::from_u16(found).map_err(|_| Problem::Status { found }.into())
}

fn required<T>(field: Option<T>, name: &'static str) -> Result<T, RecordError> {
    field.ok_or_else(|| Problem::Missing { field: name }.into())
}

fn is_bodiless(status: StatusCode) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

/// Returns an error with the class of the parser's error. The parser's own message may quote the record.
fn payload_error(error: &MessagePackError) -> RecordError {
    let found = match error {
        MessagePackError::InvalidMarkerRead(_) | MessagePackError::InvalidDataRead(_) => {
            "an early end"
        }
        MessagePackError::TypeMismatch(_) | MessagePackError::Syntax(_) => {
            "a field missing, given twice or of another type"
        }
        MessagePackError::OutOfRange => "a number out of range",
        MessagePackError::LengthMismatch(_) => "a list of another length",
        MessagePackError::Utf8Error(_) => "text that is not UTF-8",
        MessagePackError::DepthLimitExceeded => "fields nested too deep",
        MessagePackError::Uncategorized(_) => "something else",
    };
    Problem::Payload { found }.into()
}

impl TombstoneReason {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::TooLarge => "too_large",
            Self::Streamed => "streamed",
            Self::Panicked => "panicked",
        }
    }

    fn from_name(name: &str) -> Result<Self, RecordError> {
        match name {
            "too_large" => Ok(Self::TooLarge),
            "streamed" => Ok(Self::Streamed),
            "panicked" => Ok(Self::Panicked),
            _ => Err(Problem::Reason.into()),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Lines<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect<'a>(PhantomData<Lines<'a>>);

        impl<'de: 'a, 'a> Visitor<'de> for Collect<'a> {
            type Value = Lines<'a>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_LINES} header lines")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Lines<'a>, A::Error> {
                // The declared length is ignored: the list grows with the lines that are present.
                let mut lines = LineList::new();
                while let Some((name, Bin(value))) = seq.next_element()? {
                    if lines.len() == MAX_LINES {
                        return Err(serde::de::Error::invalid_length(lines.len() + 1, &self));
                    }
                    lines.push((name, value));
                }
                Ok(Lines(lines))
            }
        }

        deserializer.deserialize_seq(Collect(PhantomData))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Bin<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Borrow;

        impl<'de> Visitor<'de> for Borrow {
            type Value = Bin<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_borrowed_bytes<E>(self, bytes: &'de [u8]) -> Result<Bin<'de>, E> {
                Ok(Bin(bytes))
            }
        }

        deserializer.deserialize_bytes(Borrow)
    }
}

/// The maximum number of header lines, and of trailer lines. A line may take only a few bytes in a record, so the limit
/// also bounds the memory of a reader. One byte can count headers and trailers together. Clients accept fewer lines (hyper
/// reads 100 by default).
pub(crate) const MAX_LINES: usize = 128;

/// The payload, a list, a line, and levels for additions of a later version.
const MAX_DEPTH: usize = 16;

const ATTENTION: &str = "attention";

/// First byte of a sealed payload of flags 2. MessagePack never uses it.
const SEALED_PAYLOAD: u8 = 0xc1;

#[cfg(all(test, not(shuttle)))]
mod tests;
