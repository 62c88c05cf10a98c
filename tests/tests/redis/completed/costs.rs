//! The calls and the memory that the index of completed entries costs.

use std::collections::BTreeSet;

use bytes::Bytes;
use tests::servers::redis::RedisServer;
use tower_idempotency::inspect::{Inspect, Query, State};

use super::{HOUR, INDEX, RECORD, complete, connect, members};

/// Returns a record of this many bytes.
fn long_record(bytes: usize) -> Bytes {
    let mut record = RECORD.to_vec();
    record.resize(bytes, 0);
    record.into()
}

#[tokio::test]
async fn request_and_page_take_two_calls_each() {
    let server = RedisServer::start(&[]);
    let store = connect(&server, true).await;
    let query = Query::new(State::Completed).with_limit(50);
    for _ in 0..60 {
        complete(&store, RECORD, HOUR).await;
    }
    store.list(&query).await.expect("the server runs");
    let monitor = server.monitor();
    complete(&store, RECORD, HOUR).await;
    let page = store.list(&query).await.expect("the server runs");
    assert_eq!((page.entries.len(), page.next.is_some()), (50, true));
    let commands = monitor.into_commands();
    let names: Vec<_> = commands.iter().map(|it| &*it.name).collect();
    assert_eq!(names, ["evalsha"; 4]);
}

/// The server copies a whole record to read its beginning. So a call ends after a MiB of records, and a count reads no long
/// record.
#[tokio::test]
async fn long_records_are_listed_in_several_calls() {
    const RECORDS: usize = 60;
    let server = RedisServer::start(&[]);
    let store = connect(&server, true).await;
    let mut stored = BTreeSet::new();
    for _ in 0..RECORDS {
        let record = long_record(100_000);
        stored.insert(complete(&store, record, HOUR).await.id);
    }
    // One page, whose entries are read together.
    let query = Query::new(State::Completed).with_limit(63);
    store.list(&query).await.expect("the server runs");

    let monitor = server.monitor();
    let page = store.list(&query).await.expect("the server runs");
    let commands = monitor.into_commands();
    let ids: BTreeSet<_> = page.entries.iter().map(|entry| *entry.id()).collect();
    assert_eq!((page.entries.len(), page.next.is_some()), (RECORDS, false));
    assert_eq!(ids, stored);
    for entry in &page.entries {
        assert_eq!(entry.state(), State::Completed);
        assert_eq!(entry.record_bytes, Some(100_000));
    }
    // One for the members. Each of the others reads 11 records: the last one is over the limit.
    let names: Vec<_> = commands.iter().map(|it| &*it.name).collect();
    assert_eq!(names, ["evalsha"; 1 + RECORDS.div_ceil(11)]);

    let monitor = server.monitor();
    let summary = store.summary(1_000).await.expect("the server runs");
    let commands = monitor.into_commands();
    let count = summary.completed.expect("a listed state");
    assert_eq!((count.value, count.is_exact), (RECORDS as u64, true));
    // One for the members of each of four states, and one for all entries.
    let names: Vec<_> = commands.iter().map(|it| &*it.name).collect();
    assert_eq!(names, ["evalsha"; 5]);
}

/// The records are read instead.
#[tokio::test]
async fn summary_needs_no_right_to_record_lengths() {
    let server = RedisServer::start(&[]);
    let store = connect(&server, true).await;
    for _ in 0..12 {
        complete(&store, long_record(100_000), HOUR).await;
    }
    server.command(&["ACL", "SETUSER", "default", "-hstrlen"]);
    let summary = store.summary(1_000).await.expect("the server runs");
    let count = summary.completed.expect("a listed state");
    assert_eq!((count.value, count.is_exact), (12, true));
}

#[tokio::test]
async fn record_takes_at_most_155_bytes_of_index() {
    // The index has just grown: the most bytes for each.
    const RECORDS: usize = 520;
    let server = RedisServer::start(&[]);
    let store = connect(&server, true).await;
    for _ in 0..RECORDS {
        complete(&store, RECORD, HOUR).await;
    }
    assert_eq!(members(&server), RECORDS);
    let bytes = server.command(&["MEMORY", "USAGE", INDEX, "SAMPLES", "0"]);
    let bytes: usize = bytes.parse().expect("a number");
    println!("{} bytes for each of {RECORDS} records", bytes / RECORDS);
    assert!(bytes <= 155 * RECORDS, "{bytes}");
}
