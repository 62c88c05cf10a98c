//! What an execution left behind, to and from the versioned bytes a store keeps.
//!
//! Version 1:
//!
//! | bytes | |
//! |---|---|
//! | 0 | version: 1 |
//! | 1 | flags: 1 when the payload is deflated, 2 when somebody has to look at it, else 0 |
//! | 2..6 | CRC-32 of the key id, bytes 0 and 1, and bytes 6 to the end; little endian |
//! | 6.. | flags 0: the payload |
//! | | flags 1: its inflated length (four bytes, little endian), and it as a raw deflate stream |
//! | | flags 2: the length of a code (one byte), the code in ASCII, and the payload |
//!
//! The code is where a statement on a database finds it. The checksum covers the id, so a record found under another key is
//! refused like a damaged one.

use std::time::SystemTime;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode};

use self::{
    error::Problem,
    payload::{Kind, Lines, Payload},
};
use crate::store::KeyId;

mod attention;
mod deflate;
mod error;
mod headers;
mod payload;

pub use self::{attention::NeedsAttention, error::RecordError, headers::replayed_by_default};
pub(crate) use self::{
    headers::{PERSIST_FOR, POLICY, not_kept},
    payload::MAX_LINES,
};

/// An answer, as far as it is replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredResponse {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
    pub(crate) recorded_at: SystemTime,
}

/// Why there is a tombstone and no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TombstoneReason {
    TooLarge,
    Streamed,
}

/// What an execution left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Response(StoredResponse),
    Tombstone {
        status: StatusCode,
        reason: TombstoneReason,
    },
    /// A result of `run_once`: MessagePack of the caller's own type.
    Value(Bytes),
    /// Somebody has to look at what was done.
    Attention {
        /// That the handler answered, if it was one of HTTP.
        status: Option<StatusCode>,
        attention: NeedsAttention,
    },
}

/// Turns records into bytes and back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Codec {
    /// Payloads above this many bytes are deflated when that saves at least a sixteenth.
    pub(crate) compress_above: usize,
    /// The most that a record may inflate to; larger payloads are kept as they are.
    ///
    /// Lowering it makes the records that were written under the higher limit unreadable.
    pub(crate) max_inflated: usize,
}

impl Codec {
    /// The record of a response.
    ///
    /// `replayed` is asked once per header line, and never about the fields that belong to the connection or the
    /// message framing. A response that is beyond every sensible limit (more than 128 header lines, 4 GiB) becomes
    /// a tombstone, as one that is too large does.
    pub(crate) fn encode_response(
        &self,
        id: &KeyId,
        status: StatusCode,
        headers: &HeaderMap,
        replayed: &dyn Fn(&HeaderName) -> bool,
        body: &[u8],
        trailers: Option<&HeaderMap>,
    ) -> Bytes {
        self.encode_response_at(
            id,
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
        reason = "the clock is the eighth, so that tests write known bytes"
    )]
    fn encode_response_at(
        &self,
        id: &KeyId,
        status: StatusCode,
        headers: &HeaderMap,
        replayed: &dyn Fn(&HeaderName) -> bool,
        body: &[u8],
        trailers: Option<&HeaderMap>,
        now: SystemTime,
    ) -> Bytes {
        let mut sensitive = Vec::new();
        let lines = headers::kept(headers, replayed, 0, &mut sensitive);
        let trailers = trailers
            .map(|trailers| headers::kept(trailers, replayed, lines.len(), &mut sensitive))
            .filter(|trailers| !trailers.is_empty());
        let payload = Payload {
            status: Some(status.as_u16()),
            recorded_at: Some(payload::millis(now)),
            headers: Some(Lines(lines)),
            trailers: trailers.map(Lines),
            sensitive: (!sensitive.is_empty()).then_some(payload::Bin(&sensitive)),
            body: Some(payload::body(status, body)),
            ..Payload::of(Kind::Response)
        };
        if payload.fits() {
            self.seal(id, &payload)
        } else {
            self.encode_tombstone(id, status, TombstoneReason::TooLarge)
        }
    }

    /// The record that says there was an answer and that it was not kept.
    pub(crate) fn encode_tombstone(
        &self,
        id: &KeyId,
        status: StatusCode,
        reason: TombstoneReason,
    ) -> Bytes {
        let payload = Payload {
            status: Some(status.as_u16()),
            reason: Some(reason.name()),
            ..Payload::of(Kind::Tombstone)
        };
        self.seal(id, &payload)
    }

    /// The record of a result of `run_once`.
    pub(crate) fn encode_value(&self, id: &KeyId, value: &[u8]) -> Bytes {
        let payload = Payload {
            value: Some(payload::Bin(value)),
            ..Payload::of(Kind::Value)
        };
        if payload.fits() {
            self.seal(id, &payload)
        } else {
            self.encode_tombstone(id, StatusCode::OK, TombstoneReason::TooLarge)
        }
    }

    /// The record that says that somebody has to look at what was done. Never deflated, so that people can read it.
    pub(crate) fn encode_attention(
        id: &KeyId,
        status: Option<StatusCode>,
        attention: &NeedsAttention,
    ) -> Bytes {
        let payload = Payload {
            status: status.map(|status| status.as_u16()),
            reason: Some(attention.reason()),
            ..Payload::of(Kind::Attention)
        };
        let mut record = Vec::with_capacity(PREFIX + 1 + attention.code().len() + payload.size());
        record.extend_from_slice(&[VERSION, ATTENTION, 0, 0, 0, 0]);
        attention.write_code(&mut record);
        payload.write(&mut record);
        sealed(id, record)
    }

    /// Reads a record back, whoever wrote it.
    ///
    /// Nothing is allocated for a length before as many bytes were seen, and an uncompressed body shares `bytes`.
    pub(crate) fn decode(&self, id: &KeyId, bytes: &Bytes) -> Result<Record, RecordError> {
        let Some((&[version, flags, checksum @ ..], rest)) = bytes.split_first_chunk::<PREFIX>()
        else {
            let found = bytes.len();
            return Err(Problem::Short { found }.into());
        };
        if version != VERSION {
            return Err(Problem::Version { found: version }.into());
        }
        if !matches!(flags, 0 | DEFLATED | ATTENTION) {
            return Err(Problem::Flags { found: flags }.into());
        }
        let written = u32::from_le_bytes(checksum);
        let computed = self::checksum(id, flags, rest);
        if written != computed {
            return Err(Problem::Checksum { written, computed }.into());
        }
        match flags {
            DEFLATED => payload::decode(&deflate::inflate(rest, self.max_inflated)?.into()),
            ATTENTION => attention::decode(&bytes.slice(PREFIX..)),
            _ => payload::decode(&bytes.slice(PREFIX..)),
        }
    }

    fn seal(&self, id: &KeyId, payload: &Payload<'_>) -> Bytes {
        let mut plain = Vec::with_capacity(PREFIX + payload.size());
        plain.extend_from_slice(&[VERSION, 0, 0, 0, 0, 0]);
        payload.write(&mut plain);

        sealed(id, self.deflated(&plain).unwrap_or(plain))
    }

    /// The same record deflated, if that is wanted and pays.
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

/// The record with its checksum.
fn sealed(id: &KeyId, mut record: Vec<u8>) -> Bytes {
    let checksum = checksum(id, record[1], &record[PREFIX..]);
    record[2..PREFIX].copy_from_slice(&checksum.to_le_bytes());
    // A store keeps and counts what it is given: it is not given spare room.
    Bytes::from(record.into_boxed_slice())
}

fn checksum(id: &KeyId, flags: u8, rest: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(id.as_bytes());
    hasher.update(&[VERSION, flags]);
    hasher.update(rest);
    hasher.finalize()
}

const VERSION: u8 = 1;
const DEFLATED: u8 = 1;
const ATTENTION: u8 = 2;
/// Version, flags and checksum.
const PREFIX: usize = 6;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
