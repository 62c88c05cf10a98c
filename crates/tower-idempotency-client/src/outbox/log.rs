//! The file of an outbox: a log of changes to its entries.
//!
//! A power failure may lose any unsynced bytes, even if later bytes are on the disk. If a record is damaged, opening cuts it
//! and all later records off. If the synced length in a later record includes the damaged record, the disk has lost synced
//! data: opening fails. It also fails if a record is whole, and this version cannot read it.

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
    format::{Header, PROVIDER, REMOVED, SENT, STORED},
};
use super::{
    OutboxError,
    entry::{Entry, millis},
};
use crate::telemetry::catch_report_panic;

/// The open file and its entries.
pub(super) struct Log {
    /// Absolute path without symbolic links, so that a link or another working directory does not lead to another file.
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
    /// `true` if the buffer has a discard, which must be on the disk even if the outbox does not sync its records.
    has_discard: bool,
    /// Keys of resumed entries whose removal is not written yet.
    removed_resumed: Vec<String>,
    /// `true` if a write failed, so that the entries differ from those of the file.
    is_stale: bool,
    /// `true` if a sync failed. The system may have dropped the bytes, and a second sync of this file would not report that.
    has_failed_sync: bool,
    /// Length of the file from which a failed compaction is repeated.
    repeat_compaction_from: u64,
    /// `true` if the file was renamed, and its new name may not be on the disk.
    is_renamed: bool,
    entries: Entries,
    /// Held until the log is dropped, so that no second log opens the file.
    lock: File,
}

impl Log {
    /// Opens or creates the file.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        // Only the path of an existing file can be resolved. Before the lock is held, another process may replace the file.
        drop(options().open(path)?);
        let path = fs::canonicalize(path)?;
        let lock = options().open(with_suffix(&path, ".lock"))?;
        lock.try_lock().map_err(|error| match error {
            fs::TryLockError::Error(error) => error,
            fs::TryLockError::WouldBlock => io::Error::new(
                io::ErrorKind::WouldBlock,
                "the outbox is already open, in this or another process",
            ),
        })?;
        let file = options().open(&path)?;
        let bytes = fs::read(&path)?;
        // A crash of the process that created the file may have cut the header.
        let is_new = Header::is_incomplete(&bytes);
        let header = match is_new {
            true => Header::random()?,
            false => Header::read(&bytes)?,
        };
        let mut log = Self {
            path,
            file,
            header,
            length: 0,
            synced: 0,
            removed_resumed: Vec::new(),
            buffer: Vec::new(),
            needs_sync: false,
            has_discard: false,
            is_stale: false,
            has_failed_sync: false,
            repeat_compaction_from: 0,
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
        // A process that was killed while it compacted the file may have left this one. If the file is damaged, this one may
        // be the only whole copy.
        let _ = fs::remove_file(with_suffix(&log.path, ".new"));
        log.file.sync_data()?;
        log.synced = log.length;
        sync_directory(&log.path)?;
        Ok(log)
    }

    /// Replaces the entries by the ones in these bytes, and cuts incomplete records off the end of the file.
    fn load(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (entries, length) = Entries::read(self.header, bytes)?;
        if length < bytes.len() {
            catch_report_panic(|| {
                tracing::warn!(
                    bytes = bytes.len() - length,
                    "incomplete records at the end of the outbox removed"
                );
            });
            self.file.set_len(length as u64)?;
        }
        // A compacted file does not contain the positions of removed entries. New entries must not get them, because a recovery
        // that has passed them continues after them.
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

    /// Writes the buffer to the file. Syncs the file if the buffer has a discard, or if another record needs it and `may_sync` is
    /// `true`. After an error, the buffer is lost, and the entries differ from the file until [`repair`](Self::repair).
    pub(super) fn flush(&mut self, may_sync: bool) -> io::Result<()> {
        let buffer = std::mem::take(&mut self.buffer);
        let has_discard = std::mem::take(&mut self.has_discard);
        let needs_sync = std::mem::take(&mut self.needs_sync) && may_sync || has_discard;
        let before = self.length;
        let result = self.write_to_file(&buffer).and_then(|()| match needs_sync {
            true => self.sync(),
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

    /// Makes the records of the file durable.
    fn sync(&mut self) -> io::Result<()> {
        self.sync_name()?;
        let synced = self.file.sync_data();
        self.has_failed_sync |= synced.is_err();
        synced
    }

    /// Reads the file again if a write has failed. Replaces the file if a sync has failed.
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
        if self.has_failed_sync {
            let replaced = self.replace_file();
            // The next calls change the entries, and are not acknowledged.
            self.is_stale = replaced.is_err();
            replaced?;
        }
        Ok(())
    }

    /// Replaces the file with a new one that has only the current entries, if removed entries use most of it. After an error,
    /// the file grows before the next attempt.
    pub(super) fn compact(&mut self) -> io::Result<()> {
        if self.is_stale || self.length < COMPACT_FROM || self.length / 2 < self.entries.bytes {
            return Ok(());
        }
        if self.length < self.repeat_compaction_from {
            return Ok(());
        }
        self.repeat_compaction_from = self.length + COMPACT_FROM;
        self.replace_file()
    }

    /// Returns `true` if the file can be replaced as fast as a batch is written.
    pub(super) fn is_small(&self) -> bool {
        self.length <= COMPACT_FROM
    }

    /// Repairs the log. Then replaces the file with a new one that has only the current entries, if it has records of removed
    /// ones.
    pub(super) fn erase_removed(&mut self) -> io::Result<()> {
        self.repair()?;
        match self.entries.has_removed {
            true => self.replace_file(),
            false => Ok(()),
        }
    }

    /// Replaces the file with a new one that has only the current entries.
    ///
    /// If the process is killed meanwhile, either the old file or the new one remains, and is complete.
    fn replace_file(&mut self) -> io::Result<()> {
        let path = with_suffix(&self.path, ".new");
        remove_if_exists(&path)?;
        let (file, length) = self.write_file(&path).inspect_err(|_| {
            // The disk may be full.
            let _ = fs::remove_file(&path);
        })?;
        self.file = file;
        self.length = length;
        self.synced = length;
        self.has_failed_sync = false;
        self.repeat_compaction_from = 0;
        self.entries.has_removed = false;
        self.is_renamed = true;
        self.sync_name()
    }

    /// Writes the current entries to a file, and gives it the name of the log. Returns the file and its length.
    fn write_file(&self, path: &Path) -> io::Result<(File, u64)> {
        let mut file = options().open(path)?;
        let mut bytes = self.header.0.to_vec();
        for (&position, slot) in &self.entries.by_position {
            // The file is renamed once all of it is on the disk, so the bytes before each record count as synced.
            let synced = bytes.len() as u64;
            let content = slot.entry.encode();
            self.header
                .write_record(&mut bytes, STORED, position, synced, &content);
        }
        file.write_all(&bytes)?;
        file.sync_data()?;
        fs::rename(path, &self.path)?;
        Ok((file, bytes.len() as u64))
    }

    /// Makes a rename durable. Until then a crash of the machine may bring the old file back.
    fn sync_name(&mut self) -> io::Result<()> {
        if self.is_renamed {
            sync_directory(&self.path).inspect_err(|_| self.has_failed_sync = true)?;
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
        entry.check()?;
        if let Some(stored) = self.resume(&entry.key, entry.first_sent(), entry.provider) {
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

    pub(super) fn resume(
        &mut self,
        key: &str,
        at: Option<SystemTime>,
        provider: Option<u64>,
    ) -> Option<Entry> {
        let position = *self.entries.by_key.get(key)?;
        let slot = self.entries.by_position.get_mut(&position)?;
        slot.is_resumed = true;
        let entry = &mut slot.entry;
        let is_first = entry.first_sent.is_none();
        let has_provider = entry.provider.is_some();
        entry.first_sent = entry.first_sent.or(at.map(millis));
        entry.provider = entry.provider.or(provider);
        let entry = entry.clone();
        if let Some(millis) = entry.first_sent.filter(|_| is_first) {
            self.buffer_record(SENT, position, &millis.to_be_bytes());
            self.needs_sync = true;
        }
        if let Some(provider) = entry.provider.filter(|_| !has_provider) {
            self.buffer_record(PROVIDER, position, &provider.to_be_bytes());
            self.needs_sync = true;
        }
        Some(entry)
    }

    pub(super) fn discard(&mut self, key: &str, first_sent: SystemTime) -> bool {
        let position = self.entries.by_key.get(key);
        let slot = position.and_then(|position| self.entries.by_position.get(position));
        let first_sent = Some(millis(first_sent));
        if slot.is_none_or(|slot| slot.is_resumed || slot.entry.first_sent != first_sent) {
            return false;
        }
        self.remove(key);
        // The caller may delete the key. If a crash undid the removal, the request would be executed later.
        self.has_discard = true;
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

fn remove_if_exists(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Length from which a file is compacted, and growth after which a failed compaction is repeated. A larger file is not replaced
/// when the outbox is dropped.
const COMPACT_FROM: u64 = 1024 * 1024;
