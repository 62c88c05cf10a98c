//! A check of the lengths of HTTP/1.1 requests, on the bytes of a connection.
//!
//! If a request also has `Transfer-Encoding: chunked`, hyper removes its `Content-Length`. It merges equal lengths. The request that
//! the service gets shows neither.

use std::{
    io::BufRead,
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// Bytes of a line that are read. The names and values that count are shorter.
const MAX_LINE: usize = 128;
/// The first line of a connection with HTTP/2 (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n";

/// The result of the check. The stream of a connection and its service share it.
#[derive(Debug)]
pub(crate) struct LengthCheck {
    /// The number of the first request with an ambiguous length. The check ends with it.
    ambiguous: AtomicU64,
    /// The number of requests that the service has received.
    received: AtomicU64,
    /// `true` if the client began with HTTP/2. There is no check then.
    is_http2: AtomicBool,
}

impl LengthCheck {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            ambiguous: AtomicU64::new(u64::MAX),
            received: AtomicU64::new(0),
            is_http2: AtomicBool::new(false),
        })
    }

    /// Returns `true` if the next request has several lengths, or a length and `chunked`. The service calls it once for each
    /// request, in their order.
    pub(crate) fn is_next_ambiguous(&self) -> bool {
        let number = self.received.fetch_add(1, Ordering::Relaxed);
        number == self.ambiguous.load(Ordering::Relaxed)
    }

    pub(crate) fn is_http2(&self) -> bool {
        self.is_http2.load(Ordering::Relaxed)
    }
}

/// Reads the heads of requests, and skips their bodies. Lines and bodies end where they end for hyper.
///
/// hyper closes the connection after bytes that are no request. After an upgrade the result does not count, because there is no
/// further request.
pub(crate) struct Reader {
    check: Arc<LengthCheck>,
    part: Part,
    /// The current line, up to [`MAX_LINE`].
    line: Vec<u8>,
    /// The last byte that was read as part of a line.
    last: u8,
    head: Head,
    /// The number of complete heads.
    heads: u64,
}

/// The part of a request to which the next byte belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Head,
    /// A body with a length, of which these bytes are left.
    Body(u64),
    ChunkSize,
    /// A chunk, of which these bytes are left, with the end of its line.
    Chunk(u64),
    Trailers,
    /// None: the check has ended.
    Ended,
}

/// The head that is read.
#[derive(Debug, Default)]
struct Head {
    has_request_line: bool,
    has_transfer_coding: bool,
    length: Option<u64>,
    is_ambiguous: bool,
}

impl Reader {
    pub(crate) fn new(check: Arc<LengthCheck>) -> Self {
        Self {
            check,
            part: Part::Head,
            line: Vec::new(),
            last: 0,
            head: Head::default(),
            heads: 0,
        }
    }

    pub(crate) fn read(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            bytes = match self.part {
                Part::Body(left) => {
                    let (left, rest) = skip(left, bytes);
                    self.part = if left > 0 {
                        Part::Body(left)
                    } else {
                        Part::Head
                    };
                    rest
                }
                Part::Chunk(left) => {
                    let (left, rest) = skip(left, bytes);
                    self.part = if left > 0 {
                        Part::Chunk(left)
                    } else {
                        Part::ChunkSize
                    };
                    rest
                }
                Part::Head | Part::ChunkSize | Part::Trailers => self.read_line(bytes),
                Part::Ended => return,
            };
        }
    }

    /// Reads to the end of the line, or all bytes. Returns the rest.
    fn read_line<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        // An iterator would compare one byte after another.
        let mut rest = bytes;
        let count = rest.skip_until(b'\n').expect("a slice has no errors");
        let piece = &bytes[..count];
        let limit = MAX_LINE.saturating_sub(self.line.len());
        self.line
            .extend_from_slice(&piece[..piece.len().min(limit)]);
        let before = match piece {
            [.., before, _] => *before,
            [] | [_] => self.last,
        };
        self.last = piece.last().copied().unwrap_or_default();
        // Trailers and sizes of chunks end with CR LF, and heads also with LF alone.
        if self.last == b'\n' && (self.part == Part::Head || before == b'\r') {
            self.end_line();
        }
        rest
    }

    fn end_line(&mut self) {
        let mut line = mem::take(&mut self.line);
        match self.part {
            Part::Head => self.end_head_line(&line),
            Part::ChunkSize => match parse_chunk_size(&line) {
                Some(0) => self.part = Part::Trailers,
                Some(size) => self.part = Part::Chunk(size.saturating_add(2)),
                // The next head cannot be found.
                None => self.end_check(),
            },
            Part::Trailers if line == b"\r\n" => self.part = Part::Head,
            Part::Trailers | Part::Body(_) | Part::Chunk(_) | Part::Ended => {}
        }
        line.clear();
        self.line = line;
    }

    fn end_head_line(&mut self, line: &[u8]) {
        let is_empty = matches!(line, b"\n" | b"\r\n");
        if !self.head.has_request_line {
            self.head.has_request_line = !is_empty;
            if line == HTTP2_PREFACE {
                self.check.is_http2.store(true, Ordering::Relaxed);
                self.part = Part::Ended;
            }
            return;
        }
        if is_empty {
            return self.end_head();
        }
        let head = &mut self.head;
        if field_value(line, b"transfer-encoding").is_some() {
            head.is_ambiguous |= head.length.is_some();
            head.has_transfer_coding = true;
        } else if let Some(value) = field_value(line, b"content-length") {
            let is_complete = line.ends_with(b"\n");
            let length = parse_number(value, 10).filter(|_| is_complete);
            head.is_ambiguous |=
                head.has_transfer_coding || head.length.is_some() || length.is_none();
            head.length = length;
        }
    }

    fn end_head(&mut self) {
        let head = mem::take(&mut self.head);
        if head.is_ambiguous {
            return self.end_check();
        }
        self.heads += 1;
        self.part = match head.length {
            _ if head.has_transfer_coding => Part::ChunkSize,
            Some(length @ 1..) => Part::Body(length),
            Some(0) | None => Part::Head,
        };
    }

    /// Ends the check: the length of the request after the complete heads is ambiguous.
    fn end_check(&mut self) {
        self.check.ambiguous.store(self.heads, Ordering::Relaxed);
        self.part = Part::Ended;
    }
}

/// Skips at most `left` bytes. Returns the number of bytes that are still to be skipped, and the rest.
fn skip(left: u64, bytes: &[u8]) -> (u64, &[u8]) {
    let count = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
    (left - count as u64, &bytes[count..])
}

/// Returns the value of a line with this name, or `None` if the line has another name.
fn field_value<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (start, rest) = line.split_at_checked(name.len())?;
    let value = rest.strip_prefix(b":")?;
    start.eq_ignore_ascii_case(name).then(|| value.trim_ascii())
}

/// Returns the size in the first line of a chunk, before its extensions.
fn parse_chunk_size(line: &[u8]) -> Option<u64> {
    let end = line.iter().position(|byte| !byte.is_ascii_hexdigit())?;
    parse_number(&line[..end], 16)
}

fn parse_number(digits: &[u8], radix: u32) -> Option<u64> {
    let digits = std::str::from_utf8(digits).ok()?;
    u64::from_str_radix(digits, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &str = "content-length: 5\r\ntransfer-encoding: chunked\r\n";

    /// Returns the number of the first ambiguous request. All bytes at once and each byte alone must have the same result.
    fn ambiguous(bytes: impl AsRef<[u8]>) -> Option<u64> {
        let results = [usize::MAX, 1].map(|size| {
            let check = LengthCheck::new();
            let mut reader = Reader::new(Arc::clone(&check));
            for piece in bytes.as_ref().chunks(size) {
                reader.read(piece);
            }
            check.ambiguous.load(Ordering::Relaxed)
        });
        assert_eq!(results[0], results[1]);
        (results[0] < u64::MAX).then_some(results[0])
    }

    fn head(fields: &str) -> String {
        format!("POST /pay HTTP/1.1\r\nhost: a\r\n{fields}\r\n")
    }

    #[test]
    fn several_lengths_are_ambiguous() {
        for fields in [
            BOTH,
            "transfer-encoding: chunked\r\ncontent-length: 5\r\n",
            "Content-Length:5\r\nx: y\r\nTRANSFER-ENCODING:chunked\r\n",
            "content-length: 5\ntransfer-encoding: chunked\n",
            "content-length: 5\r\ncontent-length: 5\r\n",
            "content-length: 0\r\ncontent-length: 0\r\n",
        ] {
            assert_eq!(ambiguous(head(fields)), Some(0), "{fields:?}");
        }
        let long = format!("content-length: {}5\r\n", "0".repeat(MAX_LINE));
        assert_eq!(ambiguous(head(&long)), Some(0));
    }

    #[test]
    fn one_length_is_not_ambiguous() {
        let long = format!("x: {}\r\n", "content-length: 5".repeat(MAX_LINE));
        for fields in [
            "",
            "content-length: 5\r\n",
            "transfer-encoding: chunked\r\n",
            "transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
            "x-content-length: 5\r\ntransfer-encoding: chunked\r\n",
            "content-length: 5\r\nx: transfer-encoding: chunked\r\n",
            long.as_str(),
        ] {
            assert_eq!(ambiguous(head(fields)), None, "{fields:?}");
        }
    }

    /// A body may have the lines of a head.
    #[test]
    fn requests_are_counted_across_bodies() {
        let last = head(BOTH);
        let sized = head(&format!("content-length: {}\r\n", last.len())) + &last;
        let chunks = format!(
            "{:x};name=\"{}\"\r\n{last}\r\n000A\r\n0123456789\r\n0\r\nx: {BOTH}\r\n",
            last.len(),
            "v".repeat(MAX_LINE)
        );
        let chunked = head("transfer-encoding: chunked\r\n") + &chunks;
        let empty = head("transfer-encoding: chunked\r\n") + "0\r\n\r\n";
        let get = "GET / HTTP/1.1\r\nhost: a\r\n\r\n".to_owned();
        // hyper skips empty lines between requests.
        let requests = sized + &chunked + "\r\n" + &empty + "\n" + &get;
        assert_eq!(ambiguous(&requests), None);
        assert_eq!(ambiguous(requests + &last), Some(4));
    }

    /// hyper reads a line of trailers to its CR LF.
    #[test]
    fn line_of_trailers_ends_with_cr_lf() {
        let chunked = head("transfer-encoding: chunked\r\n") + "0\r\nx: 1\n\r\ny: 2\r\n\r\n";
        assert_eq!(ambiguous(chunked + &head(BOTH)), Some(1));
    }

    /// The next head begins after the number of bytes in the size, but the size of this chunk is not read to its end.
    #[test]
    fn size_of_many_digits_is_ambiguous() {
        let digits = "0".repeat(MAX_LINE);
        let chunked = head("transfer-encoding: chunked\r\n") + &digits + "1\r\na\r\n0\r\n\r\n";
        assert_eq!(ambiguous(chunked), Some(1));
    }

    #[test]
    fn http2_is_not_checked() {
        let frames = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned() + &head(BOTH);
        assert_eq!(ambiguous(frames), None);
        // Another request with this method is one of HTTP/1.1.
        let request = "PRI * HTTP/1.1\r\nhost: a\r\n\r\n".to_owned() + &head(BOTH);
        assert_eq!(ambiguous(request), Some(1));
    }
}
