use std::fmt;

/// Error of a stored record that cannot be read: damaged, found under another key, or written by an unsupported
/// version.
///
/// The message states the expected and the actual format, never the contents of the record.
#[derive(Debug)]
pub struct RecordError(Problem);

#[derive(Debug)]
pub(super) enum Problem {
    Short { found: usize },
    Version { found: u8 },
    Flags { found: u8 },
    Sealed,
    Checksum { written: u32, computed: u32 },
    InflatedLimit { declared: usize, limit: usize },
    InflatedLength { declared: usize, found: usize },
    Deflate,
    AfterDeflate { found: usize },
    Payload { found: &'static str },
    AfterPayload,
    Missing { field: &'static str },
    Kind,
    Code,
    Reason,
    Status { found: u16 },
    RecordedAt { found: u64 },
    BodyOf { status: u16, found: usize },
    HeaderLines { limit: usize },
    HeaderName,
    HeaderValue,
}

impl From<Problem> for RecordError {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unreadable record: ")?;
        match self.0 {
            Problem::Short { found } => {
                write!(f, "expected at least 6 bytes, found {found}")
            }
            Problem::Version { found } => write!(f, "expected version 1, found {found}"),
            Problem::Flags { found } => {
                write!(f, "expected the flags 0, 1, 2 or 4, found {found}")
            }
            Problem::Sealed => f.write_str(
                "expected a record in clear, found a sealed one, which a later version wrote",
            ),
            Problem::Checksum { written, computed } => write!(
                f,
                "expected the checksum {written:08x} under this key, found {computed:08x}"
            ),
            Problem::InflatedLimit { declared, limit } => write!(
                f,
                "expected an inflated length of at most {limit} bytes, found {declared}"
            ),
            Problem::InflatedLength { declared, found } => write!(
                f,
                "expected {declared} bytes after inflating, found {found}{}",
                if found > declared { " or more" } else { "" }
            ),
            Problem::Deflate => f.write_str("expected a deflate stream, found something else"),
            Problem::AfterDeflate { found } => write!(
                f,
                "expected nothing after the deflate stream, found {found} bytes"
            ),
            Problem::Payload { found } => {
                write!(f, "expected MessagePack with named fields, found {found}")
            }
            Problem::AfterPayload => f.write_str("expected nothing after the payload, found more"),
            Problem::Missing { field } => write!(f, "expected the field {field}, found none"),
            Problem::Kind => f.write_str(
                "expected one of the kinds response, tombstone, value and attention, each under its flags, found another",
            ),
            Problem::Code => {
                f.write_str("expected a code of 1 to 64 of a-z, 0-9 and -, found something else")
            }
            Problem::Reason => {
                f.write_str("expected one of the reasons too_large, streamed and panicked, found another")
            }
            Problem::Status { found } => {
                write!(f, "expected a status from 200 to 999, found {found}")
            }
            Problem::RecordedAt { found } => write!(
                f,
                "expected a time the system clock can show, found {found} ms"
            ),
            Problem::BodyOf { status, found } => write!(
                f,
                "expected no body under the status {status}, found {found} bytes"
            ),
            Problem::HeaderLines { limit } => {
                write!(f, "expected at most {limit} header lines, found more")
            }
            Problem::HeaderName => {
                f.write_str("expected lower-case header names, found something else")
            }
            Problem::HeaderValue => {
                f.write_str("expected valid header values, found something else")
            }
        }
    }
}

impl std::error::Error for RecordError {}
