//! Reads payloads in the form in which this version writes them.
//!
//! Reading with a general MessagePack reader would take longer than the rest of a replay's work on the record. This reader
//! returns `None` for every form that this version does not write. The general reader then reads the payload or reports the
//! error.

use super::{Bin, Lines, MAX_LINES, Payload};
use crate::record::headers::LineList;

/// Returns the fields of a payload, or `None` if the general reader has to read it.
pub(in crate::record) fn parse(payload: &[u8]) -> Option<Payload<'_>> {
    let mut reader = PayloadReader(payload);
    let count = reader.byte()?.checked_sub(FIXMAP).filter(|n| *n <= 15)?;
    let mut fields = Payload::default();
    let mut has_kind = false;
    for _ in 0..count {
        let is_new = match reader.text_bytes()? {
            b"kind" => {
                fields.kind = reader.text()?;
                !std::mem::replace(&mut has_kind, true)
            }
            b"status" => {
                let status = u16::try_from(reader.number()?).ok()?;
                fields.status.replace(status).is_none()
            }
            b"reason" => fields.reason.replace(reader.text()?).is_none(),
            b"recorded_at" => fields.recorded_at.replace(reader.number()?).is_none(),
            b"headers" => fields.headers.replace(reader.lines()?).is_none(),
            b"trailers" => fields.trailers.replace(reader.lines()?).is_none(),
            b"sensitive" => fields.sensitive.replace(reader.bin()?).is_none(),
            b"body" => fields.body.replace(reader.bin()?).is_none(),
            b"value" => fields.value.replace(reader.bin()?).is_none(),
            b"traceparent" => fields.traceparent.replace(reader.text()?).is_none(),
            _ => return None,
        };
        if !is_new {
            return None;
        }
    }
    (has_kind && reader.0.is_empty()).then_some(fields)
}

/// The rest of a payload. Each method returns `None` at a marker that the writer does not use, or at the end.
struct PayloadReader<'a>(&'a [u8]);

impl<'a> PayloadReader<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    /// Reads a number in big-endian order.
    fn integer(&mut self, width: usize) -> Option<u64> {
        let bytes = self.bytes(width)?;
        Some(
            bytes
                .iter()
                .fold(0, |number, byte| number << 8 | u64::from(*byte)),
        )
    }

    fn len(&mut self, width: usize) -> Option<usize> {
        usize::try_from(self.integer(width)?).ok()
    }

    fn number(&mut self) -> Option<u64> {
        match self.byte()? {
            number @ 0..=0x7f => Some(number.into()),
            0xcc => self.integer(1),
            0xcd => self.integer(2),
            0xce => self.integer(4),
            0xcf => self.integer(8),
            _ => None,
        }
    }

    fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.text_bytes()?).ok()
    }

    /// Reads a text that is compared with a known one, so that it need not be checked for UTF-8.
    fn text_bytes(&mut self) -> Option<&'a [u8]> {
        let len = match self.byte()? {
            marker @ FIXSTR..=0xbf => usize::from(marker - FIXSTR),
            0xd9 => self.len(1)?,
            0xda => self.len(2)?,
            0xdb => self.len(4)?,
            _ => return None,
        };
        self.bytes(len)
    }

    fn bin(&mut self) -> Option<Bin<'a>> {
        let len = match self.byte()? {
            0xc4 => self.len(1)?,
            0xc5 => self.len(2)?,
            0xc6 => self.len(4)?,
            _ => return None,
        };
        self.bytes(len).map(Bin)
    }

    fn lines(&mut self) -> Option<Lines<'a>> {
        let count = match self.byte()? {
            marker @ FIXARRAY..=0x9f => usize::from(marker - FIXARRAY),
            0xdc => self.len(2)?,
            _ => return None,
        };
        if count > MAX_LINES {
            return None;
        }
        let mut lines = LineList::new();
        for _ in 0..count {
            if self.byte()? != PAIR {
                return None;
            }
            let (name, Bin(value)) = (self.text()?, self.bin()?);
            lines.push((name, value));
        }
        Some(Lines(lines))
    }
}

const FIXMAP: u8 = 0x80;
const FIXARRAY: u8 = 0x90;
const FIXSTR: u8 = 0xa0;
/// An array of two.
const PAIR: u8 = FIXARRAY + 2;
