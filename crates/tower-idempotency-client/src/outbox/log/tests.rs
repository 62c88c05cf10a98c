use ::tests::scratch::Scratch;
use http::Request;

use super::{format::HEADER, *};
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

/// Number of entries that [`store_and_remove`] stores. They use more than [`COMPACT_FROM`] bytes.
const REMOVED: usize = 8000;

/// Stores entries, and removes them without writing that.
fn store_and_remove(log: &mut Log) {
    store(log, names("removed", REMOVED));
    for key in names("removed", REMOVED) {
        log.remove(&key);
    }
}

const DAMAGED: &str = "a synced record of the outbox is damaged";

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
        let at = SystemTime::now();
        log.resume("key-0", Some(at), None).unwrap();
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
        assert!(!log.discard("key-0", at), "{is_removed}");
    }
}

/// Recovery continues after the position that it has reached.
#[test]
fn positions_increase_after_failed_write() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let mut log = Log::open(&path).unwrap();
    store_and_remove(&mut log);
    log.flush(true).unwrap();
    log.compact().unwrap();
    let file = std::mem::replace(&mut log.file, File::open(&path).unwrap());
    log.store(&entry("failed"), u64::MAX).unwrap();
    log.flush(true).unwrap_err();
    log.file = file;
    log.repair().unwrap();
    store(&mut log, names("kept", 1));
    let (position, _) = log.pending(0, 1).pop().unwrap();
    assert!(position > REMOVED as u64, "{position}");
}

/// The power failed before the first sync.
#[test]
fn zeroed_header_without_records_is_new_file() {
    for length in 0..=HEADER + 1 {
        let scratch = Scratch::new();
        let path = scratch.file("orders.outbox");
        fs::write(&path, vec![0; length]).unwrap();
        let opened = Log::open(&path).map(|log| keys(&log));
        assert_eq!(opened.ok(), (length <= HEADER).then(Vec::new), "{length}");
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
    for hole in [begin..begin + 4096, 20..30] {
        let error = open_with_hole(&bytes, hole).unwrap_err();
        assert_eq!(error.to_string(), DAMAGED);
    }
}

/// A later version stored an operation. After a rollback, the operation must not be lost.
#[test]
fn record_of_other_version_fails_open() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let mut log = Log::open(&path).unwrap();
    store(&mut log, names("key", 1));
    let (header, synced, bytes) = (log.header, log.synced, fs::read(&path).unwrap());
    drop(log);
    for (kind, content) in [(9, "later"), (STORED, "no entry"), (SENT, "no time")] {
        let mut bytes = bytes.clone();
        header.write_record(&mut bytes, kind, 2, synced, content.as_bytes());
        fs::write(&path, &bytes).unwrap();
        let error = Log::open(&path).map(drop).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a record of the outbox is of another version"
        );
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }
}

/// A power failure may leave zeros from any byte on.
#[test]
fn record_with_zeros_at_end_is_incomplete() {
    let header = Header::random().unwrap();
    let mut record = Vec::new();
    header.write_record(&mut record, STORED, 1, 0, b"content");
    assert!(header.next_record(&record).is_some());
    for begin in (0..record.len()).rev() {
        record[begin] = 0;
        assert!(header.next_record(&record).is_none(), "{begin}");
    }
}

/// The author of a request body does not know the salt. If the marker were a constant, a cut record could contain a million of
/// them, each with a checksum of half of the file.
#[test]
fn marker_differs_between_files() {
    let header = Header::random().unwrap();
    let mut other = header;
    other.0[8] ^= 1;
    let [record, other_record] = [header, other].map(|header| {
        let mut bytes = Vec::new();
        header.write_record(&mut bytes, STORED, 1, 0, b"content");
        bytes
    });
    assert_ne!(record[..8], other_record[..8]);
    assert!(header.next_record(&record).is_some());
    assert!(header.next_record(&other_record).is_none());
}

#[test]
fn damaged_header_is_error() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let mut log = Log::open(&path).unwrap();
    store(&mut log, names("key", 1));
    let mut bytes = fs::read(&path).unwrap();
    bytes[HEADER - 1] ^= 1;
    let error = open_with_hole(&bytes, 0..0).unwrap_err();
    assert_eq!(error.to_string(), "the header of the outbox is damaged");
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
    store_and_remove(&mut log);
    store(&mut log, names("kept", 3));
    let before = log.length;
    log.compact().unwrap();
    assert!(before > COMPACT_FROM && log.length < before);
    let bytes = fs::read(&path).unwrap();
    let error = open_with_hole(&bytes, 20..30).unwrap_err();
    assert_eq!(error.to_string(), DAMAGED);
    assert_eq!(open_with_hole(&bytes, 20..20).unwrap(), names("kept", 3));
}

/// The disk was full. Each attempt writes all entries, so the next one waits until the file has grown.
#[test]
fn failed_compaction_is_repeated_after_growth() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let mut log = Log::open(&path).unwrap();
    store_and_remove(&mut log);
    log.flush(true).unwrap();
    // No file can get the name of a directory.
    let path = std::mem::replace(&mut log.path, scratch.file("directory"));
    fs::create_dir(&log.path).unwrap();
    let new = with_suffix(&log.path, ".new");
    log.compact().unwrap_err();
    assert!(!new.exists());
    log.path = path;
    let length = log.length;
    log.compact().unwrap();
    assert_eq!(log.length, length);
    store_and_remove(&mut log);
    log.flush(true).unwrap();
    log.compact().unwrap();
    assert!(log.length < length);
}

#[test]
fn open_removes_incomplete_new_file() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let new = with_suffix(&path, ".new");
    fs::write(&new, "part of a new file").unwrap();
    drop(Log::open(&path).unwrap());
    assert!(!new.exists());
    // Nothing belongs to a file of another program.
    fs::write(&path, "a file of another program").unwrap();
    fs::write(&new, "another file").unwrap();
    assert!(Log::open(&path).is_err());
    assert!(new.exists());
}

/// A process was killed between the sync of the new file and its rename. Then the disk damaged the old file.
#[test]
fn open_of_damaged_file_keeps_new_file() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let mut log = Log::open(&path).unwrap();
    store(&mut log, names("first", 1));
    store(&mut log, names("second", 1));
    drop(log);
    let mut bytes = fs::read(&path).unwrap();
    let new = with_suffix(&path, ".new");
    fs::write(&new, &bytes).unwrap();
    bytes[20..30].fill(0);
    fs::write(&path, bytes).unwrap();
    let error = Log::open(&path).map(drop).unwrap_err();
    assert_eq!(error.to_string(), DAMAGED);
    assert!(new.exists());
}

/// The outbox is dropped after a failed write.
#[test]
fn erasure_follows_failed_write() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let mut log = Log::open(&path).unwrap();
    store(&mut log, ["kept", "removed"].map(str::to_owned));
    log.remove("removed");
    log.flush(true).unwrap();
    // This file cannot be written.
    let file = std::mem::replace(&mut log.file, File::open(&path).unwrap());
    log.store(&entry("failed"), u64::MAX).unwrap();
    log.flush(true).unwrap_err();
    log.file = file;
    log.erase_removed().unwrap();
    let bytes = fs::read(&path).unwrap();
    let has = |key: &str| bytes.windows(key.len()).any(|part| part == key.as_bytes());
    assert!(has("kept") && !has("removed") && !has("failed"));
    drop(log);
    assert_eq!(keys(&Log::open(&path).unwrap()), ["kept"]);
}

/// The caller may delete the key after a discard. A power failure must not bring the entry back.
#[test]
fn discard_is_synced_without_fsync() {
    let scratch = Scratch::new();
    let mut log = Log::open(&scratch.file("orders.outbox")).unwrap();
    let at = SystemTime::now();
    log.store(&entry("key").or_first_sent(at), u64::MAX)
        .unwrap();
    log.flush(false).unwrap();
    assert!(log.synced < log.length);
    assert!(log.discard("key", at));
    log.flush(false).unwrap();
    assert_eq!(log.synced, log.length);
}

/// The system may have dropped the bytes, and a second sync would succeed without them.
#[cfg(target_os = "linux")]
#[test]
fn failed_sync_replaces_file() {
    use std::os::unix::fs::MetadataExt;

    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let mut log = Log::open(&path).unwrap();
    store(&mut log, names("first", 2));
    let inode = || fs::metadata(&path).unwrap().ino();
    let before = inode();
    // This device takes all bytes, and cannot be synced.
    let device = OpenOptions::new().append(true).open("/dev/null").unwrap();
    let file = std::mem::replace(&mut log.file, device);
    log.store(&entry("failed"), u64::MAX).unwrap();
    log.flush(true).unwrap_err();
    log.file = file;
    // Nothing is acknowledged before there is a new file.
    let new = with_suffix(&log.path, ".new");
    fs::create_dir(&new).unwrap();
    for _ in 0..2 {
        log.repair().unwrap_err();
        log.store(&entry("unacknowledged"), u64::MAX).unwrap();
    }
    fs::remove_dir(&new).unwrap();
    log.repair().unwrap();
    assert_ne!(inode(), before);
    store(&mut log, names("second", 1));
    drop(log);
    let log = Log::open(&path).unwrap();
    assert_eq!(keys(&log), ["first-0", "first-1", "second-0"]);
}

/// Both names lead to one file, one lock and one new file.
#[cfg(unix)]
#[test]
fn symbolic_link_leads_to_same_outbox() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let link = scratch.file("link.outbox");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    // The target does not exist yet.
    let mut log = Log::open(&link).unwrap();
    assert!(Log::open(&path).is_err());
    store_and_remove(&mut log);
    store(&mut log, names("kept", 1));
    let length = log.length;
    log.compact().unwrap();
    assert!(log.length < length);
    store(&mut log, names("later", 1));
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    drop(log);
    assert_eq!(keys(&Log::open(&path).unwrap()), ["kept-0", "later-0"]);
    assert_eq!(keys(&Log::open(&link).unwrap()), ["kept-0", "later-0"]);
}

/// The process may change its working directory later.
#[cfg(unix)]
#[test]
fn relative_path_is_resolved_once() {
    let scratch = Scratch::new();
    let path = fs::canonicalize(scratch.path()).unwrap();
    let path = path.join("orders.outbox");
    let directory = std::env::current_dir().unwrap();
    let up: PathBuf = directory.components().skip(1).map(|_| "..").collect();
    let relative = up.join(path.strip_prefix("/").unwrap());
    assert!(relative.is_relative());
    let log = Log::open(&relative).unwrap();
    assert_eq!(log.path, path);
}
