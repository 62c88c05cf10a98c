//! Encoding of execution records to and from the versioned bytes in a store.
//!
//! Version 1:
//!
//! | bytes | |
//! |---|---|
//! | 0 | version: 1 |
//! | 1 | flags: 1 when the payload is deflated, 2 when the execution needs attention, 4 when the record is sealed, else 0 |
//! | 2..6 | CRC-32 of the key id, bytes 0 and 1, and bytes 6 to the end; little endian |
//! | 6.. | flags 0: the payload |
//! | | flags 1: the inflated length of the payload (four bytes, little endian), and the payload as a raw deflate stream |
//! | | flags 2: the length of a code (one byte), the code in ASCII, and the payload |
//! | | flags 4, reserved: a key number (four bytes, little endian), a salt (16 bytes), and the bytes of flags 0 or 1, encrypted |
//!
//! This version writes no sealed records, and rejects them with an error of their own. The payload of flags 2 is sealed if
//! it begins with the byte 0xC1, which MessagePack never uses.
//!
//! The code has a fixed position, so that a database statement can find it. The checksum covers the key id, so a
//! record found under another key is rejected like a damaged one.

use std::time::SystemTime;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode};

use self::{
    error::Problem,
    payload::{Lines, Payload, PayloadKind},
};
use crate::store::KeyId;

mod attention;
mod deflate;
mod error;
mod headers;
mod origin;
mod payload;

pub use self::{
    attention::NeedsAttention, error::RecordError, headers::replayed_by_default,
    origin::ExecutionTrace,
};
pub(crate) use self::{
    headers::{PERSIST_FOR, POLICY, unrecorded_lines},
    origin::Origin,
    payload::MAX_LINES,
};

/// The replayed parts of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredResponse {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
    pub(crate) recorded_at: SystemTime,
    /// The `traceparent` of the request that was executed. No replay carries it.
    pub(crate) traceparent: Option<ExecutionTrace>,
}

/// The reason for a tombstone in place of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TombstoneReason {
    TooLarge,
    Streamed,
    /// A setting of the service panicked while the response was recorded.
    Panicked,
}

/// Record of an execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Response(StoredResponse),
    Tombstone {
        status: StatusCode,
        reason: TombstoneReason,
    },
    /// A result of `run_once`: MessagePack of the caller's type.
    Value(Bytes),
    /// A failed execution that an operator must resolve.
    Attention {
        /// The status of the response, if the execution was an HTTP request.
        status: Option<StatusCode>,
        attention: NeedsAttention,
    },
}

/// Kind of a record, as its first bytes show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordKind {
    /// A response, a tombstone or a value, possibly sealed.
    Outcome,
    NeedsAttention,
}

impl RecordKind {
    /// Reads the kind. Returns `None` for a record that this version cannot read.
    pub(crate) fn of(record: &[u8]) -> Option<Self> {
        match *record.first_chunk::<PREFIX>()? {
            [VERSION, 0 | DEFLATED | SEALED, ..] => Some(Self::Outcome),
            [VERSION, ATTENTION, ..] => {
                NeedsAttention::in_record(record).map(|_| Self::NeedsAttention)
            }
            _ => None,
        }
    }
}

/// Encoder and decoder of records.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Codec {
    /// Payloads above this many bytes are deflated if that saves at least a sixteenth.
    pub(crate) compress_above: usize,
    /// The maximum inflated size of a record. Larger payloads are stored without compression.
    ///
    /// If the limit is lowered, records written under the higher limit can become unreadable.
    pub(crate) max_inflated: usize,
}

impl Codec {
    /// Encodes the record of a response.
    ///
    /// Calls `replayed` once per header line, but never for fields of the connection or the message framing. A
    /// response with more than 128 header lines or 4 GiB becomes a tombstone, like any other response that is too
    /// large.
    pub(crate) fn encode_response<'a>(
        &self,
        origin: impl Into<Origin<'a>>,
        status: StatusCode,
        headers: &HeaderMap,
        replayed: &dyn Fn(&HeaderName) -> bool,
        body: &[u8],
        trailers: Option<&HeaderMap>,
    ) -> Bytes {
        self.encode_response_at(
            origin.into(),
            status,
            headers,
            replayed,
            body,
            trailers,
            crate::clock::now(),
        )
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the clock is the eighth argument, so that tests write known bytes"
    )]
    fn encode_response_at(
        &self,
        origin: Origin<'_>,
        status: StatusCode,
        headers: &HeaderMap,
        replayed: &dyn Fn(&HeaderName) -> bool,
        body: &[u8],
        trailers: Option<&HeaderMap>,
        now: SystemTime,
    ) -> Bytes {
        let mut sensitive = Vec::new();
        let lines = headers::recorded_lines(headers, replayed, 0, &mut sensitive);
        let trailers = trailers
            .map(|trailers| {
                headers::recorded_lines(trailers, replayed, lines.len(), &mut sensitive)
            })
            .filter(|trailers| !trailers.is_empty());
        let payload = Payload {
            status: Some(status.as_u16()),
            recorded_at: Some(payload::millis(now)),
            headers: Some(Lines(lines)),
            trailers: trailers.map(Lines),
            sensitive: (!sensitive.is_empty()).then_some(payload::Bin(&sensitive)),
            body: Some(payload::body(status, body)),
            ..Payload::new(PayloadKind::Response, origin)
        };
        match payload.size_if_fits() {
            Some(size) => self.finish(origin.id, &payload, size),
            None => self.encode_tombstone(origin, status, TombstoneReason::TooLarge),
        }
    }

    /// Encodes the record of a response that was not recorded.
    pub(crate) fn encode_tombstone<'a>(
        &self,
        origin: impl Into<Origin<'a>>,
        status: StatusCode,
        reason: TombstoneReason,
    ) -> Bytes {
        let origin = origin.into();
        let payload = Payload {
            status: Some(status.as_u16()),
            reason: Some(reason.name()),
            ..Payload::new(PayloadKind::Tombstone, origin)
        };
        self.finish(origin.id, &payload, payload.size())
    }

    /// Encodes the record of a result of `run_once`.
    pub(crate) fn encode_value<'a>(&self, origin: impl Into<Origin<'a>>, value: &[u8]) -> Bytes {
        let origin = origin.into();
        let payload = Payload {
            value: Some(payload::Bin(value)),
            ..Payload::new(PayloadKind::Value, origin)
        };
        match payload.size_if_fits() {
            Some(size) => self.finish(origin.id, &payload, size),
            None => self.encode_tombstone(origin, StatusCode::OK, TombstoneReason::TooLarge),
        }
    }

    /// Encodes the record of an execution that needs attention. It is never deflated, so that operators can read it.
    pub(crate) fn encode_attention<'a>(
        origin: impl Into<Origin<'a>>,
        status: Option<StatusCode>,
        attention: &'a NeedsAttention,
    ) -> Bytes {
        let origin = origin.into().or_trace(attention.trace());
        let payload = Payload {
            status: status.map(|status| status.as_u16()),
            reason: Some(attention.reason()),
            ..Payload::new(PayloadKind::Attention, origin)
        };
        let mut record = Vec::with_capacity(PREFIX + 1 + attention.code().len() + payload.size());
        record.extend_from_slice(&[VERSION, ATTENTION, 0, 0, 0, 0]);
        attention.write_code(&mut record);
        payload.write(&mut record);
        with_checksum(origin.id, record)
    }

    /// Decodes a record from any writer.
    ///
    /// Allocates nothing for a declared length before that many bytes were read. An uncompressed body shares the
    /// buffer of `bytes`.
    pub(crate) fn decode(&self, id: &KeyId, bytes: &Bytes) -> Result<Record, RecordError> {
        let Some((&[version, flags, checksum @ ..], rest)) = bytes.split_first_chunk::<PREFIX>()
        else {
            let found = bytes.len();
            return Err(Problem::Short { found }.into());
        };
        if version != VERSION {
            return Err(Problem::Version { found: version }.into());
        }
        if !matches!(flags, 0 | DEFLATED | ATTENTION | SEALED) {
            return Err(Problem::Flags { found: flags }.into());
        }
        let written = u32::from_le_bytes(checksum);
        let computed = self::checksum(id, flags, rest);
        if written != computed {
            return Err(Problem::Checksum { written, computed }.into());
        }
        match flags {
            DEFLATED => {
                let inflated = Bytes::from(deflate::inflate(rest, self.max_inflated)?);
                payload::decode(&inflated, &inflated)
            }
            ATTENTION => attention::decode(rest),
            SEALED => Err(Problem::Sealed.into()),
            _ => payload::decode(bytes, rest),
        }
    }

    /// Returns the length to which [`decode`](Self::decode) inflates the record, or `None` if the record is not compressed.
    pub(crate) fn inflated_len(&self, bytes: &[u8]) -> Option<usize> {
        let (&[version, flags, ..], rest) = bytes.split_first_chunk::<PREFIX>()?;
        let (declared, _) = rest.split_first_chunk::<4>()?;
        let declared = usize::try_from(u32::from_le_bytes(*declared)).ok()?;
        let inflates = version == VERSION && flags == DEFLATED && declared <= self.max_inflated;
        inflates.then_some(declared)
    }

    /// Encodes a payload, whose encoded size is `size`.
    fn finish(&self, id: &KeyId, payload: &Payload<'_>, size: usize) -> Bytes {
        let mut plain = Vec::with_capacity(PREFIX + size);
        plain.extend_from_slice(&[VERSION, 0, 0, 0, 0, 0]);
        payload.write(&mut plain);

        with_checksum(id, self.deflated(&plain).unwrap_or(plain))
    }

    /// Returns the record in deflated form, if the settings allow it and it is smaller by at least a sixteenth.
    fn deflated(&self, plain: &[u8]) -> Option<Vec<u8>> {
        let payload = &plain[PREFIX..];
        if payload.len() <= self.compress_above || payload.len() > self.max_inflated {
            return None;
        }
        let length = u32::try_from(payload.len()).ok()?;
        let mut record = vec![VERSION, DEFLATED, 0, 0, 0, 0];
        record.extend_from_slice(&length.to_le_bytes());
        let pays = deflate::deflate(payload, &mut record)
            && record.len() <= plain.len() - plain.len() / 16;
        pays.then_some(record)
    }
}

/// Returns the trace of the execution that produced the record, or `None` if the record has no trace or cannot be read.
fn traceparent_in(id: &KeyId, record: &Bytes) -> Option<ExecutionTrace> {
    let (&[version, flags, checksum @ ..], rest) = record.split_first_chunk::<PREFIX>()?;
    if version != VERSION || u32::from_le_bytes(checksum) != self::checksum(id, flags, rest) {
        return None;
    }
    match flags {
        0 => payload::traceparent(rest),
        DEFLATED => payload::traceparent(&deflate::inflate(rest, MAX_INFLATED_TO_TRACE).ok()?),
        ATTENTION => attention::traceparent(rest),
        _ => None,
    }
}

/// Writes the checksum into a record.
fn with_checksum(id: &KeyId, mut record: Vec<u8>) -> Bytes {
    let checksum = checksum(id, record[1], &record[PREFIX..]);
    record[2..PREFIX].copy_from_slice(&checksum.to_le_bytes());
    // A store retains and counts this buffer, so it must have no spare capacity.
    Bytes::from(record.into_boxed_slice())
}

/// Returns `true` for an undamaged record of a known version that is neither sealed nor needs attention. Does not inflate
/// or decode the record.
#[cfg(feature = "tiered")]
pub(crate) fn is_replayable(id: &KeyId, record: &[u8]) -> bool {
    record
        .split_first_chunk::<PREFIX>()
        .is_some_and(|(&[version, flags, written @ ..], rest)| {
            version == VERSION
                && matches!(flags, 0 | DEFLATED)
                && u32::from_le_bytes(written) == checksum(id, flags, rest)
        })
}

fn checksum(id: &KeyId, flags: u8, rest: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(id.as_bytes());
    hasher.update(&[VERSION, flags]);
    hasher.update(rest);
    hasher.finalize()
}

/// Maximum inflated size of a record whose trace is read. Higher than the limit of a layer with the default settings
/// (16 MiB).
const MAX_INFLATED_TO_TRACE: usize = 17 * 1024 * 1024;
const VERSION: u8 = 1;
const DEFLATED: u8 = 1;
const ATTENTION: u8 = 2;
/// Reserved for encrypted records.
const SEALED: u8 = 4;
/// Version, flags and checksum.
const PREFIX: usize = 6;

#[cfg(all(test, not(shuttle)))]
mod fuzz;
#[cfg(all(test, not(shuttle)))]
mod golden;
#[cfg(all(test, not(shuttle)))]
mod tests;
