use std::sync::{Arc, Mutex};

use ::tests::{observed::paused, scratch::Scratch};
use tower_idempotency::MemoryStore;
use tracing::{
    Dispatch,
    subscriber::{NoSubscriber, set_default},
};

use super::*;

const INTENT: Intent<'static> = Intent {
    change: "0123456789abcdef",
    store: "sqlite",
    actor: "alice",
    source: "console",
    decision: "free",
    reason: "line\nbreak",
    id: Some("id"),
    before: &Value::Null,
};

async fn store(scratch: &Scratch) -> AnyStore {
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    AnyStore::open(&url).await.unwrap()
}

fn table(store: &AnyStore) -> AuditLog {
    AuditLog::in_table(store.clone()).unwrap()
}

#[tokio::test]
async fn file_and_table_have_same_lines() {
    let scratch = Scratch::new();
    let store = store(&scratch).await;
    let log = table(&store).with_file(scratch.file("log"));
    let change = log.begin(&INTENT).await.unwrap();
    change.finish("applied", Value::Null).await.unwrap();
    let lines = log.recent(10).await.unwrap();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0]["outcome"], "applied");
    assert_eq!(lines[1]["why"], "line\nbreak");
    assert_eq!(table(&store).recent(10).await.unwrap(), lines);
    assert_ne!(change_id(), change_id());
}

#[test]
fn lines_are_written_before_events() {
    // With one subscriber in the program, a thread without a subscriber could disable the events for all threads.
    let _another = Dispatch::new(NoSubscriber::new());
    let scratch = Scratch::new();
    let (file, counts) = (scratch.file("log"), Arc::new(Mutex::new(Vec::new())));
    let log = AuditLog::new(&file);
    let seen = Arc::clone(&counts);
    // The subscriber makes a writer for each event.
    let writer = move || {
        let lines = std::fs::read_to_string(&file).unwrap();
        seen.lock().unwrap().push(lines.lines().count());
        std::io::sink()
    };
    let _default = set_default(tracing_subscriber::fmt().with_writer(writer).finish());
    paused().block_on(async {
        let change = log.begin(&INTENT).await.unwrap();
        change.finish("applied", Value::Null).await.unwrap();
    });
    assert_eq!(*counts.lock().unwrap(), [1, 2]);
}

#[tokio::test]
async fn check_writes_no_line() {
    let scratch = Scratch::new();
    let file = scratch.file("log");
    AuditLog::new(&file).check().await.unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "");
    let missing = scratch.file("no-such-directory/log");
    let error = AuditLog::new(&missing).check().await.unwrap_err();
    let expected = format!("cannot write the audit log {}: ", missing.display());
    assert!(error.to_string().starts_with(&expected), "{error}");
    let store = store(&scratch).await;
    table(&store).check().await.unwrap();
    assert!(table(&store).recent(10).await.unwrap().is_empty());
}

#[tokio::test]
async fn interrupted_intent_has_failed_outcome() {
    let scratch = Scratch::new();
    let store = store(&scratch).await;
    let log = table(&store).with_file(scratch.file("log"));
    let interrupted = async { "interrupted by SIGINT".to_owned() };
    let begun = log.begin_unless(&INTENT, interrupted).await;
    let error = begun.unwrap_err().to_string();
    assert_eq!(
        error,
        "cannot write the audit table, so nothing was changed: interrupted by SIGINT"
    );
    let in_file = log.recent(10).await.unwrap();
    let in_table = table(&store).recent(10).await.unwrap();
    assert_eq!((in_file.len(), in_table.len()), (2, 0));
    assert_eq!(in_file[0]["outcome"], format!("failed: {error}"));
}

#[tokio::test]
async fn unwritable_file_leaves_table_empty() {
    let scratch = Scratch::new();
    let store = store(&scratch).await;
    let log = table(&store).with_file("/dev/full");
    let error = log.begin(&INTENT).await.unwrap_err().to_string();
    let expected = "cannot write the audit log /dev/full, so nothing was changed: ";
    assert!(error.starts_with(expected), "{error}");
    assert!(table(&store).recent(10).await.unwrap().is_empty());
}

#[tokio::test]
async fn only_last_lines_of_table_are_read() {
    let scratch = Scratch::new();
    let store = store(&scratch).await;
    for n in 0..401 {
        let line = json!({ "n": n }).to_string();
        store.append_audit_line(&line).await.unwrap();
    }
    store.append_audit_line("cut of").await.unwrap();
    let (lines, is_whole) = table(&store).tail(usize::MAX).await.unwrap();
    assert_eq!((lines.len(), is_whole), (399, false));
    assert_eq!((&lines[0]["n"], &lines[398]["n"]), (&json!(400), &json!(2)));
    let lines = table(&store).recent(2).await.unwrap();
    assert_eq!(lines, [json!({ "n": 400 })]);
}

#[test]
fn memory_store_has_no_audit_table() {
    let error = AuditLog::in_table(MemoryStore::new()).unwrap_err();
    assert_eq!(error.to_string(), "the memory store has no audit table");
}
