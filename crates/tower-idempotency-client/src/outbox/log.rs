//! The file of an outbox: a log of changes to its entries.
//!
//! After the header, each record is a marker, its length, its CRC-32 and its payload. The payload has four parts: the kind,
//! the position of an entry, the synced length of the file before this record, and the content of that kind. Numbers are
//! big-endian.
//!
//! A power failure may lose any unsynced bytes, even if later bytes are on the disk. If a record is damaged, opening cuts it
//! and all later records off. If the synced length in a later record includes the damaged record, the disk has lost synced
//! data: opening fails.
//!
//! The header is a magic number, a random salt, and the CRC-32 of both. The salt is the initial value of all checksums. A
//! request body may contain the bytes of a record. Without the salt, a cut record with such a body would look like several
//! records.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::{OutboxError, entry::Entry};

/// The open file and its entries.
pub(super) struct Log {
    path: PathBuf,
    file: File,
    header: Header,
    /// Length of the acknowledged part of the file. Bytes after it are removed after a failed write.
    length: u64,
    /// Length of the part of the file that is on the disk.
    synced: u64,
    /// Records that are not written yet.
    buffer: Vec<u8>,
    /// The records of the buffer must be on the disk before they are acknowledged.
    needs_sync: bool,
    /// Keys of resumed entries whose removal is not written yet.
    removed_resumed: Vec<String>,
    /// A write failed, and the entries differ from those of the file.
    is_stale: bool,
    /// The file was renamed, and its new name may not be on the disk.
    is_renamed: bool,
    entries: Entries,
    /// Held until the file is closed, so that no other process opens it.
    lock: File,
}

/// First bytes of the file.
#[derive(Clone, Copy)]
struct Header([u8; HEADER]);

/// Entries that are not removed.
#[derive(Default)]
struct Entries {
    by_position: BTreeMap<u64, Slot>,
    by_key: HashMap<String, u64>,
    last_position: u64,
    bytes: u64,
}

struct Slot {
    entry: Entry,
    /// Bytes of its record.
    size: u64,
    /// Another call, or this process after a restart, sends the request again.
    is_resumed: bool,
}

impl Log {
    /// Opens or creates the file.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let lock = options().open(with_suffix(path, ".lock"))?;
        lock.try_lock().map_err(|error| match error {
            fs::TryLockError::Error(error) => error,
            fs::TryLockError::WouldBlock => io::Error::new(
                io::ErrorKind::WouldBlock,
                "another process has opened the file",
            ),
        })?;
        let file = options().open(path)?;
        let bytes = fs::read(path)?;
        // A crash of the process that created the file may have cut the header.
        let is_new =
            bytes.len() < HEADER && (MAGIC.starts_with(&bytes) || bytes.starts_with(MAGIC));
        let header = match is_new {
            true => Header::random()?,
            false => Header::read(&bytes)?,
        };
        let mut log = Self {
            path: path.to_owned(),
            file,
            header,
            length: 0,
            synced: 0,
            removed_resumed: Vec::new(),
            buffer: Vec::new(),
            needs_sync: false,
            is_stale: false,
            is_renamed: false,
            entries: Entries::default(),
            lock,
        };
        if is_new {
            log.file.set_len(0)?;
            log.append(&header.0)?;
        } else {
            log.load(&bytes)?;
        }
        log.file.sync_data()?;
        log.synced = log.length;
        sync_directory(path)?;
        Ok(log)
    }

    /// Replaces the entries by the ones in these bytes, and cuts incomplete records off the end of the file.
    fn load(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (entries, length) = Entries::read(self.header, bytes)?;
        if length < bytes.len() {
            tracing::warn!(
                bytes = bytes.len() - length,
                "incomplete records at the end of the outbox removed"
            );
            self.file.set_len(length as u64)?;
        }
        self.entries = entries;
        self.length = length as u64;
        Ok(())
    }

    /// Writes bytes to the end of the file.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Makes the records of the buffer durable. After an error, the buffer is lost, and the entries differ from the file
    /// until [`repair`](Self::repair).
    pub(super) fn flush(&mut self, is_synced: bool) -> io::Result<()> {
        let buffer = std::mem::take(&mut self.buffer);
        let needs_sync = std::mem::take(&mut self.needs_sync) && is_synced;
        let before = self.length;
        let result = self.append(&buffer).and_then(|()| match needs_sync {
            true => self.sync_name().and_then(|()| self.file.sync_data()),
            false => Ok(()),
        });
        match result {
            Ok(()) if needs_sync => self.synced = self.length,
            Ok(()) => {}
            Err(_) => {
                self.length = before;
                self.is_stale = true;
            }
        }
        if result.is_ok() {
            self.removed_resumed.clear();
        }
        result
    }

    /// Reads the file again if a write has failed.
    pub(super) fn repair(&mut self) -> io::Result<()> {
        if self.is_stale {
            self.buffer.clear();
            self.file.set_len(self.length)?;
            let mut resumed = self.entries.resumed();
            resumed.extend_from_slice(&self.removed_resumed);
            self.load(&fs::read(&self.path)?)?;
            // The file does not record which entries were resumed.
            self.entries.mark_resumed(&resumed);
            self.removed_resumed.clear();
            self.is_stale = false;
        }
        Ok(())
    }

    /// Replaces the file with a new one that has only the current entries, if removed entries use most of it.
    ///
    /// If the process is killed meanwhile, either the old file or the new one remains, and is complete.
    pub(super) fn compact(&mut self) -> io::Result<()> {
        if self.is_stale || self.length < COMPACT_FROM || self.length / 2 < self.entries.bytes {
            return Ok(());
        }
        let path = with_suffix(&self.path, ".new");
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        let mut file = options().open(&path)?;
        let mut bytes = self.header.0.to_vec();
        for (&position, slot) in &self.entries.by_position {
            // The file gets its name once all of it is on the disk.
            let synced = bytes.len() as u64;
            let content = slot.entry.encode();
            self.header
                .write_record(&mut bytes, STORED, position, synced, &content);
        }
        file.write_all(&bytes)?;
        file.sync_data()?;
        fs::rename(&path, &self.path)?;
        self.file = file;
        self.length = bytes.len() as u64;
        self.synced = self.length;
        self.is_renamed = true;
        self.sync_name()
    }

    /// Makes a rename durable. Until then a crash of the machine may bring the old file back.
    fn sync_name(&mut self) -> io::Result<()> {
        if self.is_renamed {
            sync_directory(&self.path)?;
            self.is_renamed = false;
        }
        Ok(())
    }

    /// Appends a record to the buffer.
    fn write(&mut self, kind: u8, position: u64, content: &[u8]) {
        self.header
            .write_record(&mut self.buffer, kind, position, self.synced, content);
    }

    pub(super) fn store(
        &mut self,
        entry: &Entry,
        max_bytes: u64,
    ) -> Result<Option<Entry>, OutboxError> {
        if let Some(stored) = self.resume(&entry.key, entry.first_sent()) {
            return Ok(Some(stored));
        }
        let position = self.entries.last_position + 1;
        let begin = self.buffer.len();
        self.write(STORED, position, &entry.encode());
        let size = (self.buffer.len() - begin) as u64;
        if self.entries.bytes + size > max_bytes {
            self.buffer.truncate(begin);
            return Err(OutboxError::with_message("the outbox is full"));
        }
        self.needs_sync = true;
        self.entries.insert(position, entry.clone(), size);
        Ok(None)
    }

    pub(super) fn resume(&mut self, key: &str, at: Option<SystemTime>) -> Option<Entry> {
        let position = *self.entries.by_key.get(key)?;
        let slot = self.entries.by_position.get_mut(&position)?;
        slot.is_resumed = true;
        let is_first = slot.entry.first_sent.is_none();
        if let Some(at) = at.filter(|_| is_first) {
            slot.entry = slot.entry.clone().or_first_sent(at);
        }
        let entry = slot.entry.clone();
        if let Some(millis) = entry.first_sent.filter(|_| is_first) {
            self.write(SENT, position, &millis.to_be_bytes());
            self.needs_sync = true;
        }
        Some(entry)
    }

    pub(super) fn discard(&mut self, key: &str) -> bool {
        let position = self.entries.by_key.get(key);
        let slot = position.and_then(|position| self.entries.by_position.get(position));
        if slot.is_none_or(|slot| slot.is_resumed) {
            return false;
        }
        self.remove(key);
        // The caller may forget the key. If a crash undid the removal, the request would be executed later.
        self.needs_sync = true;
        true
    }

    pub(super) fn remove(&mut self, key: &str) {
        if let Some((position, slot)) = self.entries.remove(key) {
            self.write(REMOVED, position, &[]);
            if slot.is_resumed {
                self.removed_resumed.push(slot.entry.key);
            }
        }
    }

    pub(super) fn pending(&self, after: u64, limit: u32) -> Vec<(u64, Entry)> {
        let from = after.saturating_add(1);
        let slots = self.entries.by_position.range(from..);
        let entries = slots.map(|(&position, slot)| (position, slot.entry.clone()));
        entries.take(limit as usize).collect()
    }
}

impl Entries {
    /// Reads the records up to the first incomplete one. Returns the entries, and the length of these records.
    fn read(header: Header, bytes: &[u8]) -> io::Result<(Self, usize)> {
        let mut rest = bytes.get(HEADER..).unwrap_or_default();
        let mut entries = Self::default();
        while let Some((payload, following)) = header.next_record(rest) {
            if entries
                .apply(payload, rest.len() - following.len())
                .is_none()
            {
                break;
            }
            rest = following;
        }
        // A later record may show that this part was on the disk. Then no crash has damaged it.
        let length = bytes.len() - rest.len();
        let was_synced = (1..rest.len())
            .filter_map(|at| header.next_record(&rest[at..]))
            .any(|(payload, _)| {
                synced_before(payload).is_some_and(|synced| synced > length as u64)
            });
        if was_synced {
            let damaged = "a record of the outbox is damaged, and later records follow it";
            return Err(io::Error::new(io::ErrorKind::InvalidData, damaged));
        }
        Ok((entries, length))
    }

    /// Applies a record. Returns `None` if its content is damaged.
    fn apply(&mut self, payload: &[u8], size: usize) -> Option<()> {
        let (&kind, rest) = payload.split_first()?;
        let (position, rest) = rest.split_first_chunk()?;
        let position = u64::from_be_bytes(*position);
        let (_synced, content) = rest.split_first_chunk::<8>()?;
        match kind {
            STORED => {
                self.insert(position, Entry::decode(content).ok()?, size as u64);
            }
            SENT => {
                let millis = u64::from_be_bytes(content.try_into().ok()?);
                if let Some(slot) = self.by_position.get_mut(&position) {
                    slot.entry.first_sent.get_or_insert(millis);
                }
            }
            REMOVED => {
                let slot = self.by_position.get(&position);
                if let Some(key) = slot.map(|slot| slot.entry.key.clone()) {
                    self.remove(&key);
                }
            }
            _ => return None,
        }
        Some(())
    }

    fn insert(&mut self, position: u64, entry: Entry, size: u64) {
        self.last_position = self.last_position.max(position);
        self.bytes += size;
        self.by_key.insert(entry.key.clone(), position);
        let slot = Slot {
            entry,
            size,
            is_resumed: false,
        };
        self.by_position.insert(position, slot);
    }

    fn remove(&mut self, key: &str) -> Option<(u64, Slot)> {
        let position = self.by_key.remove(key)?;
        let slot = self.by_position.remove(&position)?;
        self.bytes -= slot.size;
        Some((position, slot))
    }

    /// Returns the keys of the resumed entries.
    fn resumed(&self) -> Vec<String> {
        let slots = self.by_position.values().filter(|slot| slot.is_resumed);
        slots.map(|slot| slot.entry.key.clone()).collect()
    }

    fn mark_resumed(&mut self, keys: &[String]) {
        for key in keys {
            let position = self.by_key.get(key);
            if let Some(slot) = position.and_then(|position| self.by_position.get_mut(position)) {
                slot.is_resumed = true;
            }
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // A child process that is being started holds copies of all open files for a moment. A close alone would leave the
        // lock with it.
        let _ = self.lock.unlock();
    }
}

impl Header {
    fn random() -> io::Result<Self> {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(MAGIC);
        getrandom::fill(&mut header[8..12]).map_err(io::Error::other)?;
        let checksum = crc32fast::hash(&header[..12]);
        header[12..].copy_from_slice(&checksum.to_be_bytes());
        Ok(Self(header))
    }

    /// Reads the header of a file.
    fn read(bytes: &[u8]) -> io::Result<Self> {
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

    fn checksum(self, payload: &[u8]) -> u32 {
        let [.., a, b, c, d, _, _, _, _] = self.0;
        let salt = u32::from_be_bytes([a, b, c, d]);
        let mut hasher = crc32fast::Hasher::new_with_initial(salt);
        hasher.update(payload);
        hasher.finalize()
    }

    fn write_record(
        self,
        buffer: &mut Vec<u8>,
        kind: u8,
        position: u64,
        synced: u64,
        content: &[u8],
    ) {
        let begin = buffer.len();
        buffer.extend_from_slice(MARKER);
        buffer.extend_from_slice(&[0; PREFIX - MARKER.len()]);
        buffer.push(kind);
        buffer.extend_from_slice(&position.to_be_bytes());
        buffer.extend_from_slice(&synced.to_be_bytes());
        buffer.extend_from_slice(content);
        let payload = &buffer[begin + PREFIX..];
        // An entry is smaller than the limit of the outbox, which is below 4 GiB.
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let checksum = self.checksum(payload);
        buffer[begin + 4..begin + 8].copy_from_slice(&length.to_be_bytes());
        buffer[begin + 8..begin + PREFIX].copy_from_slice(&checksum.to_be_bytes());
    }

    /// Returns the payload of the first record and the bytes after it, or `None` if there is no complete record.
    fn next_record(self, bytes: &[u8]) -> Option<(&[u8], &[u8])> {
        let rest = bytes.strip_prefix(MARKER)?;
        let (length, rest) = rest.split_first_chunk()?;
        let (checksum, rest) = rest.split_first_chunk()?;
        let (payload, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        (self.checksum(payload) == u32::from_be_bytes(*checksum)).then_some((payload, rest))
    }
}

/// Returns the length of the file that was on the disk before the record of this payload was written.
fn synced_before(payload: &[u8]) -> Option<u64> {
    let synced = payload.get(9..)?.first_chunk()?;
    Some(u64::from_be_bytes(*synced))
}

/// Returns options for a file that only its owner may read.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).append(true).read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// Makes the name of a new file durable.
fn sync_directory(path: &Path) -> io::Result<()> {
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    if cfg!(unix) {
        File::open(directory)?.sync_all()?;
    }
    Ok(())
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

const MAGIC: &[u8] = b"TIOUTBX2";
/// Length of the header: magic number, salt and checksum.
const HEADER: usize = 16;
const MARKER: &[u8] = b"OBX\x01";
/// Marker, length and checksum.
const PREFIX: usize = 12;

const STORED: u8 = 1;
const SENT: u8 = 2;
const REMOVED: u8 = 3;

/// Size from which a file is compacted.
const COMPACT_FROM: u64 = 1024 * 1024;

#[cfg(test)]
mod tests {
    use ::tests::scratch::Scratch;
    use http::Request;

    use super::*;
    use crate::operation::Operation;

    fn entry(key: &str) -> Entry {
        let req = Request::post("https://api.example.com/orders").body("one espresso".into());
        Entry::new(&Operation::with_key(key).unwrap(), &req.unwrap())
    }

    /// Stores entries by one write.
    fn store(log: &mut Log, keys: impl IntoIterator<Item = String>) {
        for key in keys {
            assert_eq!(log.store(&entry(&key), u64::MAX).unwrap(), None);
        }
        log.flush(true).unwrap();
    }

    fn keys(log: &Log) -> Vec<String> {
        let pending = log.pending(0, u32::MAX);
        pending.into_iter().map(|(_, entry)| entry.key).collect()
    }

    fn names(prefix: &str, count: usize) -> Vec<String> {
        (0..count).map(|n| format!("{prefix}-{n}")).collect()
    }

    /// Opens a file whose bytes in this range were lost.
    fn open_with_hole(bytes: &[u8], hole: std::ops::Range<usize>) -> io::Result<Vec<String>> {
        let scratch = Scratch::new();
        let path = scratch.file("hole.outbox");
        let mut bytes = bytes.to_vec();
        bytes[hole].fill(0);
        fs::write(&path, bytes).unwrap();
        Log::open(&path).map(|log| keys(&log))
    }

    /// Another call may have sent the request of a resumed entry. A failed write does not change that.
    #[test]
    fn failed_write_keeps_resumed_mark() {
        for is_removed in [false, true] {
            let scratch = Scratch::new();
            let path = scratch.file("orders.outbox");
            let mut log = Log::open(&path).unwrap();
            store(&mut log, names("key", 1));
            log.resume("key-0", Some(SystemTime::now())).unwrap();
            log.flush(true).unwrap();
            // This file cannot be written.
            let file = std::mem::replace(&mut log.file, File::open(&path).unwrap());
            match is_removed {
                true => log.remove("key-0"),
                false => drop(log.store(&entry("other"), u64::MAX)),
            }
            log.flush(true).unwrap_err();
            log.file = file;
            log.repair().unwrap();
            assert_eq!(keys(&log), ["key-0"]);
            assert!(!log.discard("key-0"), "{is_removed}");
        }
    }

    /// A power failure loses any pages that were not synced. The records after them were not acknowledged.
    #[test]
    fn hole_in_last_write_is_cut_off() {
        let scratch = Scratch::new();
        let path = scratch.file("orders.outbox");
        let mut log = Log::open(&path).unwrap();
        store(&mut log, names("first", 3));
        let begin = fs::read(&path).unwrap().len();
        store(&mut log, names("second", 50));
        let bytes = fs::read(&path).unwrap();
        assert!(bytes.len() > begin + 8192);
        for hole in [begin..begin + 4096, begin + 4096..begin + 8192] {
            let read = open_with_hole(&bytes, hole.clone()).unwrap();
            assert!((3..53).contains(&read.len()), "{hole:?}");
            assert_eq!(read[..3], names("first", 3)[..]);
            assert!(!read.contains(&"second-49".to_owned()), "{hole:?}");
        }
        // A later write began after this one was on the disk.
        store(&mut log, names("third", 1));
        let bytes = fs::read(&path).unwrap();
        assert!(open_with_hole(&bytes, begin..begin + 4096).is_err());
        assert!(open_with_hole(&bytes, 20..30).is_err());
    }

    /// Removals are not synced, and may be lost out of order.
    #[test]
    fn hole_in_removals_is_cut_off() {
        let scratch = Scratch::new();
        let path = scratch.file("orders.outbox");
        let mut log = Log::open(&path).unwrap();
        store(&mut log, names("key", 3));
        let begin = fs::read(&path).unwrap().len();
        for key in names("key", 2) {
            log.remove(&key);
            log.flush(true).unwrap();
        }
        let bytes = fs::read(&path).unwrap();
        let read = open_with_hole(&bytes, begin..begin + 8).unwrap();
        assert_eq!(read, names("key", 3));
    }

    /// All of a compacted file was on the disk before it got its name.
    #[test]
    fn hole_in_compacted_file_is_error() {
        let scratch = Scratch::new();
        let path = scratch.file("orders.outbox");
        let mut log = Log::open(&path).unwrap();
        store(&mut log, names("removed", 8000));
        for key in names("removed", 8000) {
            log.remove(&key);
        }
        store(&mut log, names("kept", 3));
        let before = log.length;
        log.compact().unwrap();
        assert!(before > COMPACT_FROM && log.length < before);
        let bytes = fs::read(&path).unwrap();
        assert!(open_with_hole(&bytes, 20..30).is_err());
        assert_eq!(open_with_hole(&bytes, 20..20).unwrap(), names("kept", 3));
    }
}
