//! Writes payloads, and reads them in the form in which this version writes them.
//!
//! Reading with a general MessagePack reader would take longer than the rest of a replay's work on the record. This reader
//! returns `None` for every form that this version does not write. The general reader then reads the payload or reports the
//! error.
//!
//! The writer uses the shortest form of each length and number.

use super::{Bin, Lines, MAX_LINES, Payload};
use crate::record::headers::LineList;

/// Reads the fields of a payload into `fields`, which must be empty. Returns `None` if the general reader has to read them.
pub(in crate::record) fn read<'a>(payload: &'a [u8], fields: &mut Payload<'a>) -> Option<()> {
    let mut reader = PayloadReader(payload);
    let count = reader.byte()?.checked_sub(FIXMAP).filter(|n| *n <= 15)?;
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
    (has_kind && reader.0.is_empty()).then_some(())
}

/// Appends a payload to `out`. The caller checks that it [fits](Payload::size_if_fits).
pub(super) fn write(payload: &Payload<'_>, out: &mut Vec<u8>) {
    let at = out.len();
    out.push(FIXMAP);
    let mut fields = FieldWriter { out, count: 0 };
    fields.write("kind", Some(payload.kind), write_text);
    fields.write("status", payload.status.map(u64::from), write_number);
    fields.write("reason", payload.reason, write_text);
    fields.write("recorded_at", payload.recorded_at, write_number);
    fields.write("headers", payload.headers.as_ref(), write_lines);
    fields.write("trailers", payload.trailers.as_ref(), write_lines);
    fields.write("sensitive", payload.sensitive.as_ref(), write_bin);
    fields.write("body", payload.body.as_ref(), write_bin);
    fields.write("value", payload.value.as_ref(), write_bin);
    fields.write("traceparent", payload.traceparent, write_text);
    fields.out[at] += fields.count;
}

/// The fields of a payload that are written so far.
struct FieldWriter<'a> {
    out: &'a mut Vec<u8>,
    count: u8,
}

impl FieldWriter<'_> {
    /// Writes a field if it has a value.
    fn write<T>(
        &mut self,
        name: &str,
        value: Option<T>,
        write_value: impl FnOnce(&mut Vec<u8>, T),
    ) {
        if let Some(value) = value {
            write_text(self.out, name);
            write_value(self.out, value);
            self.count += 1;
        }
    }
}

fn write_number(out: &mut Vec<u8>, number: u64) {
    let bytes = number.to_be_bytes();
    match number {
        0..=0x7f => out.push(bytes[7]),
        0x80..=0xff => out.extend_from_slice(&[0xcc, bytes[7]]),
        0x100..=0xffff => out.extend_from_slice(&[0xcd, bytes[6], bytes[7]]),
        0x1_0000..=0xffff_ffff => {
            out.push(0xce);
            out.extend_from_slice(&bytes[4..]);
        }
        _ => {
            out.push(0xcf);
            out.extend_from_slice(&bytes);
        }
    }
}

fn write_text(out: &mut Vec<u8>, text: &str) {
    let [.., low] = text.len().to_be_bytes();
    if text.len() <= 0x1f {
        out.push(FIXSTR | low);
    } else {
        write_len(out, text.len(), [0xd9, 0xda, 0xdb]);
    }
    out.extend_from_slice(text.as_bytes());
}

fn write_bin(out: &mut Vec<u8>, Bin(bytes): &Bin<'_>) {
    write_len(out, bytes.len(), [0xc4, 0xc5, 0xc6]);
    out.extend_from_slice(bytes);
}

fn write_lines(out: &mut Vec<u8>, Lines(lines): &Lines<'_>) {
    let [.., high, low] = lines.len().to_be_bytes();
    if lines.len() <= 0xf {
        out.push(FIXARRAY | low);
    } else {
        out.extend_from_slice(&[0xdc, high, low]);
    }
    for (name, value) in lines {
        out.push(PAIR);
        write_text(out, name);
        write_bin(out, &Bin(value));
    }
}

/// Writes the marker of a length of one, two or four bytes, and the length.
fn write_len(out: &mut Vec<u8>, len: usize, [one, two, four]: [u8; 3]) {
    let [.., a, b, c, d] = len.to_be_bytes();
    match len {
        0..=0xff => out.extend_from_slice(&[one, d]),
        0x100..=0xffff => out.extend_from_slice(&[two, c, d]),
        _ => out.extend_from_slice(&[four, a, b, c, d]),
    }
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
