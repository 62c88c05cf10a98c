//! A change whose output cannot be written: the error has the outcome.

use std::{
    fs::{self, File},
    process::Stdio,
};

use tests::scratch::Scratch;
use tower_idempotency::inspect::Inspect as _;

use crate::{command, scenario::Keys};

#[tokio::test(flavor = "multi_thread")]
async fn error_of_output_has_outcome() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = crate::open(&url).await.expect("a file");
    let keys = Keys::create(&store).await;
    let found = store.get(&keys.orphaned.id).await.expect("a file");
    let seen = found.expect("an entry").entry.seen().to_string();
    let free = ["resolve", "bbbbbbbb", "free", "--seen", &seen];
    let applied = format!("; free was applied to {}", keys.orphaned.id.to_hex());
    for (args, expected) in [
        (&free[..], &*applied),
        (&free, "; nothing was changed: the entry is no longer"),
        (&["purge"], "; expired entries deleted: 0"),
    ] {
        let mut tool = command(scratch.path(), &url);
        tool.args(args);
        tool.args(["--reason", "x", "--audit", "log", "--yes"]);
        let full = File::options().write(true).open("/dev/full");
        let tool = tool.stdin(Stdio::null()).stdout(full.expect("a device"));
        let ran = tool.output().expect("the tool runs");
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(1), "{args:?}: {errors}");
        assert!(errors.contains("cannot write the output"), "{errors}");
        assert!(errors.contains(expected), "{args:?}: {errors}");
    }
    // The second decision found another state, so it has no lines.
    let log = fs::read_to_string(scratch.file("log")).expect("the log");
    assert_eq!(log.lines().count(), 4, "{log}");
}
