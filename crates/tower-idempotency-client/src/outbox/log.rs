//! The file of an outbox: a log of changes to its entries.
//!
//! A power failure may lose any unsynced bytes, even if later bytes are on the disk. If a record is damaged, opening cuts it
//! and all later records off. If the synced length in a later record includes the damaged record, the disk has lost synced
//! data: opening fails.

mod entries;
mod format;
#[cfg(test)]
mod tests;

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

use self::{
    entries::Entries,
    format::{Header, REMOVED, SENT, STORED},
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
    /// `true` if the records of the buffer must be on the disk before they are acknowledged.
    needs_sync: bool,
    /// Keys of resumed entries whose removal is not written yet.
    removed_resumed: Vec<String>,
    /// `true` if a write failed, so that the entries differ from those of the file.
    is_stale: bool,
    /// `true` if the file was renamed, and its new name may not be on the disk.
    is_renamed: bool,
    entries: Entries,
    /// Held until the log is dropped, so that no second log opens the file.
    lock: File,
}

impl Log {
    /// Opens or creates the file.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let lock = options().open(with_suffix(path, ".lock"))?;
        lock.try_lock().map_err(|error| match error {
            fs::TryLockError::Error(error) => error,
            fs::TryLockError::WouldBlock => io::Error::new(
                io::ErrorKind::WouldBlock,
                "the outbox is already open, in this or another process",
            ),
        })?;
        let file = options().open(path)?;
        let bytes = fs::read(path)?;
        // A crash of the process that created the file may have cut the header.
        let is_new = Header::is_incomplete(&bytes);
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
            log.write_to_file(&header.0)?;
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
        // A compacted file has lost the positions of removed entries. A recovery that has passed them continues after them.
        let last_position = self.entries.last_position.max(entries.last_position);
        self.entries = entries;
        self.entries.last_position = last_position;
        self.length = length as u64;
        Ok(())
    }

    /// Writes bytes to the end of the file.
    fn write_to_file(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Writes the buffer to the file. Syncs the file if a record of the buffer needs it and `may_sync` is `true`. After an
    /// error, the buffer is lost, and the entries differ from the file until [`repair`](Self::repair).
    pub(super) fn flush(&mut self, may_sync: bool) -> io::Result<()> {
        let buffer = std::mem::take(&mut self.buffer);
        let needs_sync = std::mem::take(&mut self.needs_sync) && may_sync;
        let before = self.length;
        let result = self.write_to_file(&buffer).and_then(|()| match needs_sync {
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
    fn buffer_record(&mut self, kind: u8, position: u64, content: &[u8]) {
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
        self.buffer_record(STORED, position, &entry.encode());
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
            self.buffer_record(SENT, position, &millis.to_be_bytes());
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
            self.buffer_record(REMOVED, position, &[]);
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

impl Drop for Log {
    fn drop(&mut self) {
        // A child process that is being started holds copies of all open files for a moment. A close alone would leave the
        // lock with it.
        let _ = self.lock.unlock();
    }
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

/// Size from which a file is compacted.
const COMPACT_FROM: u64 = 1024 * 1024;
