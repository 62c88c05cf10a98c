//! The file of an outbox: cut at every byte, damaged, compacted, locked, full.

use std::{error::Error as _, fs, io, path::Path};

use bytes::Bytes;
use http::Request;
use tests::scratch::Scratch;
use tower_idempotency_client::{Entry, FileOutbox, Operation, Outbox, OutboxError};

use crate::outbox_contract::{at, entry, join_all, unreadable_entry};

async fn entries(outbox: &FileOutbox) -> Vec<Entry> {
    let pending = outbox.pending(0, 10_000).await.unwrap();
    pending.into_iter().map(|(_, entry)| entry).collect()
}

/// Writes a file step by step. Returns its bytes, and after each step its length and its entries.
async fn steps(path: &Path) -> (Vec<u8>, Vec<(usize, Vec<Entry>)>) {
    let outbox = FileOutbox::open(path).unwrap();
    let length = || usize::try_from(fs::metadata(path).unwrap().len()).unwrap();
    let mut steps = vec![(length(), entries(&outbox).await)];
    let sent = at(1_700_000_000_000);
    for step in 0..6 {
        match step {
            0 | 1 => {
                outbox.store(&entry(&format!("key-{step}"))).await.unwrap();
            }
            2 => {
                outbox.resume("key-0", sent, None).await.unwrap();
            }
            3 => outbox.remove("key-1").await.unwrap(),
            4 => {
                let entry = entry("key-4").or_first_sent(sent);
                outbox.store(&entry).await.unwrap();
            }
            _ => assert!(outbox.discard("key-4", sent).await.unwrap()),
        }
        steps.push((length(), entries(&outbox).await));
    }
    (fs::read(path).unwrap(), steps)
}

/// A file that was cut at any byte has the entries of the last whole record, and can be written again.
#[tokio::test]
async fn file_cut_at_every_byte_is_read_up_to_last_record() {
    let scratch = Scratch::new();
    let (bytes, steps) = steps(&scratch.file("whole.outbox")).await;
    assert_eq!(steps.last().unwrap().0, bytes.len());
    for length in 0..=bytes.len() {
        let path = scratch.file(format!("cut-{length}.outbox"));
        fs::write(&path, &bytes[..length]).unwrap();
        let outbox = FileOutbox::open(&path).unwrap().without_fsync();
        let step = steps.iter().rfind(|(end, _)| *end <= length);
        let expected = step.map_or(&[][..], |(_, entries)| entries);
        assert_eq!(entries(&outbox).await, expected, "cut at {length}");
        // The next record follows the last whole one.
        outbox.store(&entry("next")).await.unwrap();
        drop(outbox);
        let read = entries(&FileOutbox::open(&path).unwrap()).await;
        assert_eq!(read.last().unwrap().key(), "next");
        assert_eq!(read.len(), expected.len() + 1, "cut at {length}");
        fs::remove_file(&path).unwrap();
    }
}

/// A crash of the machine may leave zeros or old blocks in place of the last record.
#[tokio::test]
async fn garbage_after_last_record_is_removed() {
    let scratch = Scratch::new();
    let (bytes, steps) = steps(&scratch.file("whole.outbox")).await;
    let (end, expected) = &steps[2];
    for garbage in [vec![0; 5000], vec![0xff; 5000], bytes[..40].to_vec()] {
        let path = scratch.file("garbage.outbox");
        fs::write(&path, [&bytes[..*end], &garbage[..]].concat()).unwrap();
        assert_eq!(&entries(&FileOutbox::open(&path).unwrap()).await, expected);
        assert_eq!(fs::metadata(&path).unwrap().len(), *end as u64);
    }
}

/// A body has the bytes of another outbox. An incomplete record with it is cut off like any other.
#[tokio::test]
async fn body_with_record_of_other_file_is_no_record() {
    let scratch = Scratch::new();
    let (bytes, _) = steps(&scratch.file("other.outbox")).await;
    let operation = Operation::with_key("hostile").unwrap();
    let req = Request::post("http://api.example.com/").body(Bytes::from(bytes));
    let hostile = Entry::new(&operation, &req.unwrap());
    let path = scratch.file("orders.outbox");
    let outbox = FileOutbox::open(&path).unwrap();
    outbox.store(&entry("first")).await.unwrap();
    outbox.store(&hostile).await.unwrap();
    drop(outbox);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let outbox = FileOutbox::open(&path).unwrap();
    assert_eq!(entries(&outbox).await, [entry("first")]);
}

/// No bit of an entry changes without an error, unless the record is the last one.
#[tokio::test]
async fn damaged_record_before_others_fails_open() {
    let scratch = Scratch::new();
    let path = scratch.file("damaged.outbox");
    let (bytes, steps) = steps(&path).await;
    let last_record = steps[steps.len() - 2].0;
    for at in (0..bytes.len()).step_by(3) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(&path, &damaged).unwrap();
        match FileOutbox::open(&path) {
            Ok(outbox) => {
                assert!(at >= last_record, "byte {at} was not checked");
                assert_eq!(entries(&outbox).await, steps[steps.len() - 2].1);
            }
            Err(_) => {
                assert!(at < last_record, "byte {at} is of the last record");
                assert_eq!(fs::read(&path).unwrap(), damaged, "the file is unchanged");
            }
        }
    }
    let other = scratch.file("other.txt");
    fs::write(&other, "a file of another program").unwrap();
    let error = FileOutbox::open(&other).unwrap_err().to_string();
    assert_eq!(
        error,
        "the storage of the outbox failed: not the file of an outbox"
    );
    assert_eq!(fs::read(&other).unwrap(), b"a file of another program");
}

/// A compaction that was killed leaves the old file and a part of the new one.
#[tokio::test]
async fn compaction_keeps_entries_and_bounds_file() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    fs::write(scratch.file("orders.outbox.new"), "part of a new file").unwrap();
    let outbox = FileOutbox::open(&path).unwrap().without_fsync();
    let kept = entry("kept").or_first_sent(at(1_700_000_000_000));
    outbox.store(&kept).await.unwrap();
    let mut sizes = Vec::new();
    for round in 0..200 {
        let keys: Vec<_> = (0..100).map(|n| format!("key-{round}-{n}")).collect();
        let stored = join_all(keys.iter().map(async |key| outbox.store(&entry(key)).await)).await;
        assert!(stored.iter().all(Result::is_ok));
        join_all(keys.iter().map(|key| outbox.remove(key))).await;
        sizes.push(fs::metadata(&path).unwrap().len());
    }
    assert!(
        sizes.iter().all(|size| *size < 2 * 1024 * 1024),
        "{sizes:?}"
    );
    assert!(!sizes.is_sorted(), "the file was compacted: {sizes:?}");
    outbox.store(&entry("last")).await.unwrap();
    drop(outbox);
    let read = entries(&FileOutbox::open(&path).unwrap()).await;
    assert_eq!(read, [kept, entry("last")]);
}

/// Returns `true` if the file contains the key.
fn has_key(path: &Path, key: &str) -> bool {
    let bytes = fs::read(path).unwrap();
    bytes.windows(key.len()).any(|part| part == key.as_bytes())
}

/// A removed request may have data of cards or of persons.
#[tokio::test]
async fn removed_entry_is_erased_from_file() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let has = |key| has_key(&path, key);
    let outbox = FileOutbox::open(&path).unwrap();
    for key in ["kept", "removed"] {
        outbox.store(&entry(key)).await.unwrap();
    }
    outbox.remove("removed").await.unwrap();
    assert!(has("removed"));
    let killed = fs::read(&path).unwrap();
    drop(outbox);
    assert!(has("kept") && !has("removed"), "after a drop");
    // A process that was killed has erased nothing.
    fs::write(&path, killed).unwrap();
    let outbox = FileOutbox::open(&path).unwrap();
    assert!(has("kept") && !has("removed"), "after the next start");
    assert_eq!(entries(&outbox).await, [entry("kept")]);
}

/// A drop blocks its thread, and entries may have 1 GiB.
#[tokio::test]
async fn drop_does_not_rewrite_large_file() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let outbox = FileOutbox::open(&path).unwrap();
    let body = Bytes::from(vec![b'x'; 1024 * 1024]);
    let req = Request::post("https://api.example.com/").body(body);
    let large = Entry::new(&Operation::with_key("large").unwrap(), &req.unwrap());
    outbox.store(&large).await.unwrap();
    outbox.store(&entry("removed")).await.unwrap();
    outbox.remove("removed").await.unwrap();
    drop(outbox);
    assert!(has_key(&path, "removed"), "after a drop");
    let outbox = FileOutbox::open(&path).unwrap();
    assert!(!has_key(&path, "removed"), "after the next start");
    assert_eq!(entries(&outbox).await, [large]);
}

/// The disk may be full.
#[tokio::test]
async fn open_succeeds_if_removed_entry_stays() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let outbox = FileOutbox::open(&path).unwrap();
    // No new file can replace a directory.
    fs::create_dir(scratch.file("orders.outbox.new")).unwrap();
    for key in ["kept", "removed"] {
        outbox.store(&entry(key)).await.unwrap();
    }
    outbox.remove("removed").await.unwrap();
    drop(outbox);
    let outbox = FileOutbox::open(&path).unwrap();
    assert_eq!(entries(&outbox).await, [entry("kept")]);
    outbox.store(&entry("later")).await.unwrap();
    drop(outbox);
    let read = entries(&FileOutbox::open(&path).unwrap()).await;
    assert_eq!(read, [entry("kept"), entry("later")]);
}

/// A file with an entry that cannot be read would not open again.
#[tokio::test]
async fn unreadable_entry_is_rejected() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let outbox = FileOutbox::open(&path).unwrap();
    let error = outbox.store(&unreadable_entry()).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "an outbox cannot read this request once it is stored, for example because its URL is too long"
    );
    outbox.store(&entry("one")).await.unwrap();
    drop(outbox);
    let read = entries(&FileOutbox::open(&path).unwrap()).await;
    assert_eq!(read, [entry("one")]);
}

#[test]
fn source_of_error_is_error_of_storage() {
    let error = OutboxError::new(io::Error::from(io::ErrorKind::StorageFull));
    let source = error.source().unwrap();
    let source: Option<&io::Error> = source.downcast_ref();
    assert_eq!(source.unwrap().kind(), io::ErrorKind::StorageFull);
    let scratch = Scratch::new();
    let error = FileOutbox::open(scratch.file("absent/orders.outbox")).unwrap_err();
    assert!(error.source().unwrap().is::<io::Error>());
}

#[tokio::test]
async fn second_process_cannot_open_file() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let outbox = FileOutbox::open(&path).unwrap();
    let error: OutboxError = FileOutbox::open(&path).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the storage of the outbox failed: the outbox is already open, in this or another process"
    );
    outbox.store(&entry("one")).await.unwrap();
    drop(outbox);
    assert_eq!(entries(&FileOutbox::open(&path).unwrap()).await.len(), 1);
}

#[tokio::test]
async fn full_outbox_stores_nothing_until_entry_is_removed() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let outbox = FileOutbox::open(&path).unwrap().with_max_bytes(1000);
    let mut stored = 0;
    while outbox.store(&entry(&format!("key-{stored}"))).await.is_ok() {
        stored += 1;
        assert!(stored < 10);
    }
    assert!(stored > 1);
    let error = outbox.store(&entry("more")).await.unwrap_err();
    assert_eq!(error.to_string(), "the outbox is full");
    outbox.remove("key-0").await.unwrap();
    outbox.store(&entry("more")).await.unwrap();
    drop(outbox);
    let keys: Vec<_> = entries(&FileOutbox::open(&path).unwrap()).await;
    assert_eq!(keys.len(), stored);
    assert_eq!(keys.last().unwrap().key(), "more");
}

#[cfg(unix)]
#[tokio::test]
async fn only_owner_can_read_file() {
    use std::os::unix::fs::PermissionsExt;

    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let outbox = FileOutbox::open(&path).unwrap();
    outbox.store(&entry("one")).await.unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
    assert!(text.contains("espresso") && !text.contains("secret"));
}

/// Each call that returned has written its record, although the calls share writes.
#[tokio::test]
async fn concurrent_calls_are_all_stored() {
    let scratch = Scratch::new();
    let path = scratch.file("orders.outbox");
    let outbox = FileOutbox::open(&path).unwrap();
    let keys: Vec<_> = (0..500).map(|n| format!("key-{n}")).collect();
    let stored = join_all(keys.iter().map(async |key| outbox.store(&entry(key)).await)).await;
    assert!(stored.iter().all(|result| matches!(result, Ok(None))));
    let bytes = fs::read(&path).unwrap();
    let copy = scratch.file("copy.outbox");
    fs::write(&copy, bytes).unwrap();
    assert_eq!(entries(&FileOutbox::open(&copy).unwrap()).await.len(), 500);
}
