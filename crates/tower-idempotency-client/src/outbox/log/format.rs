//! The bytes of the file: a header, and records.
//!
//! Each record is a marker, its length, its CRC-32 and its payload. The payload has the kind, the position of an entry, the
//! synced length of the file before this record, and the content of that kind. Numbers are big-endian.
//!
//! The header is a magic number, a random salt, and the CRC-32 of both. Each marker contains the salt, which the author of a
//! request body does not know. Otherwise a cut record with such a body could look like several records. With a marker at every
//! few bytes, the search for later records would compute a checksum of most of the file for each of them.

use std::io;

/// First bytes of the file.
#[derive(Clone, Copy)]
pub(super) struct Header(pub(super) [u8; HEADER]);

impl Header {
    pub(super) fn random() -> io::Result<Self> {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(MAGIC);
        getrandom::fill(&mut header[8..12]).map_err(io::Error::other)?;
        let checksum = crc32fast::hash(&header[..12]);
        header[12..].copy_from_slice(&checksum.to_be_bytes());
        Ok(Self(header))
    }

    /// Returns `true` if the bytes are those of a file that a crash left without a complete header. A power failure may leave
    /// the length of the header without its bytes.
    pub(super) fn is_incomplete(bytes: &[u8]) -> bool {
        let is_cut = bytes.len() < HEADER && (MAGIC.starts_with(bytes) || bytes.starts_with(MAGIC));
        is_cut || bytes.len() <= HEADER && bytes.iter().all(|&byte| byte == 0)
    }

    /// Reads the header of a file.
    pub(super) fn read(bytes: &[u8]) -> io::Result<Self> {
        let error = |text| io::Error::new(io::ErrorKind::InvalidData, text);
        if !bytes.starts_with(MAGIC) {
            return Err(error("not the file of an outbox"));
        }
        let header = bytes.first_chunk().filter(|header: &&[u8; HEADER]| {
            header[12..] == crc32fast::hash(&header[..12]).to_be_bytes()
        });
        header
            .map(|header| Self(*header))
            .ok_or_else(|| error("the header of the outbox is damaged"))
    }

    fn salt(&self) -> &[u8] {
        &self.0[8..12]
    }

    pub(super) fn write_record(
        self,
        buffer: &mut Vec<u8>,
        kind: u8,
        position: u64,
        synced: u64,
        content: &[u8],
    ) {
        let begin = buffer.len();
        buffer.extend_from_slice(MARKER);
        buffer.extend_from_slice(self.salt());
        buffer.extend_from_slice(&[0; 8]);
        buffer.push(kind);
        buffer.extend_from_slice(&position.to_be_bytes());
        buffer.extend_from_slice(&synced.to_be_bytes());
        buffer.extend_from_slice(content);
        let payload = &buffer[begin + PREFIX..];
        // An entry is smaller than the limit of the outbox, which is below 4 GiB.
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let checksum = crc32fast::hash(payload);
        buffer[begin + 8..begin + 12].copy_from_slice(&length.to_be_bytes());
        buffer[begin + 12..begin + PREFIX].copy_from_slice(&checksum.to_be_bytes());
    }

    /// Returns the payload of the first record and the bytes after it, or `None` if there is no complete record.
    pub(super) fn next_record(self, bytes: &[u8]) -> Option<(&[u8], &[u8])> {
        let rest = bytes.strip_prefix(MARKER)?.strip_prefix(self.salt())?;
        let (length, rest) = rest.split_first_chunk()?;
        let (checksum, rest) = rest.split_first_chunk()?;
        // Lost bytes are zero, and 0 is also the checksum of a payload without bytes.
        let (payload, rest) = rest
            .split_at_checked(u32::from_be_bytes(*length) as usize)
            .filter(|(payload, _)| !payload.is_empty())?;
        (crc32fast::hash(payload) == u32::from_be_bytes(*checksum)).then_some((payload, rest))
    }
}

/// Returns the length of the file that was on the disk before the record of this payload was written.
pub(super) fn synced_before(payload: &[u8]) -> Option<u64> {
    let synced = payload.get(9..)?.first_chunk()?;
    Some(u64::from_be_bytes(*synced))
}

const MAGIC: &[u8] = b"TIOUTBX3";
/// Length of the header: magic number, salt and checksum.
pub(super) const HEADER: usize = 16;
/// Begin of a marker. The salt follows.
const MARKER: &[u8] = b"OBX\x01";
/// Length of marker, salt, length and checksum.
const PREFIX: usize = 16;

pub(super) const STORED: u8 = 1;
pub(super) const SENT: u8 = 2;
pub(super) const REMOVED: u8 = 3;
pub(super) const PROVIDER: u8 = 4;
