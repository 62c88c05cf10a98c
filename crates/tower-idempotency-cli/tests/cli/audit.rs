//! Without an audit line nothing is changed.

use tests::scratch::Scratch;
use tower_idempotency::inspect::{Inspect, State};
use tower_idempotency_any::AnyStore;

use crate::{run_in, scenario::Keys};

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_resolved_without_audit_line() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = AnyStore::open(&url).await.expect("a file");
    let keys = Keys::create(&store).await;
    // The device is always full. The others cannot be opened.
    for audit in ["/dev/full", "/no/such/directory/audit.jsonl", "."] {
        for args in [
            vec!["resolve", "bbbbbbbb", "free"],
            vec!["resolve", "aaaaaaaa", "break-lease", "--force"],
            vec!["resolve", "dddddddd", "delete-record", "--force"],
            vec!["purge"],
        ] {
            let change = ["--reason", "x", "--audit", audit, "--yes"];
            let ran = run_in(&scratch.file(""), &url, &[&args[..], &change].concat());
            assert_eq!(ran.code, 1, "{ran:?}");
            assert!(ran.err.contains("nothing was changed"), "{ran:?}");
        }
    }
    for (claim, state) in [
        (&keys.orphaned, State::Orphaned),
        (&keys.in_progress, State::InProgress),
        (&keys.completed, State::Completed),
    ] {
        let found = store.get(&claim.id).await.expect("a file");
        assert_eq!(found.map(|it| it.entry.state()), Some(state));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn change_needs_reason_log_and_confirmation() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = AnyStore::open(&url).await.expect("a file");
    let keys = Keys::create(&store).await;
    for (args, expected) in [
        (&["--audit", "log", "--yes"][..], "--reason"),
        (&["--reason", "x", "--yes"], "--audit"),
        (&["--reason", "x", "--audit", "log"], "--yes"),
    ] {
        let args = [&["resolve", "bbbbbbbb", "free"][..], args].concat();
        let ran = run_in(&scratch.file(""), &url, &args);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains(expected), "{ran:?}");
    }
    assert!(!scratch.file("log").exists());
    let found = store.get(&keys.orphaned.id).await.expect("a file");
    assert!(found.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn log_has_failed_outcome() {
    let server = tests::servers::redis::RedisServer::start(&[]);
    let store = AnyStore::open(&server.url())
        .await
        .expect("the server runs");
    Keys::create(&store).await;
    // The user may read, and the script that resolves is refused.
    server.command(&[
        "ACL", "SETUSER", "reader", "on", ">hush", "~*", "&*", "+@all", "-hdel", "-del",
    ]);
    let url = server.url().replace("redis://", "redis://reader:hush@");
    let scratch = Scratch::new();
    let change = ["--reason", "x", "--audit", "log", "--yes"];
    let args = [&["resolve", "bbbbbbbb", "retry"][..], &change].concat();
    let ran = run_in(&scratch.file(""), &url, &args);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(!ran.err.contains("hush"), "{ran:?}");
    let log = std::fs::read_to_string(scratch.file("log")).expect("the log");
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines.len(), 2, "{log}");
    assert!(lines[0].contains("\"line\":\"intent\""), "{log}");
    assert!(lines[1].contains("\"outcome\":\"unknown: "), "{log}");
}
