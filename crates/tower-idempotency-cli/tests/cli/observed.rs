//! Entries of requests that were only observed.

use std::time::Duration;

use tests::scratch::Scratch;
use tokio::time::sleep;
use tower_idempotency::store::Ttl;

use crate::{
    run_in,
    scenario::{RECORD, acquire, claim, complete},
};

#[tokio::test(flavor = "multi_thread")]
async fn observed_entry_stops_no_retry() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("keys.db").display());
    let store = crate::open(&url).await.expect("a file");
    let hours = Ttl::from_secs(36_000);
    for (n, lease) in [(0xaa, hours), (0xbb, Ttl::from_millis(1)), (0xdd, hours)] {
        let mut claim = claim(n);
        claim.operation = "observed: POST /orders".into();
        claim.lease = lease;
        acquire(&store, &claim).await;
        if n == 0xdd {
            complete(&store, &claim, RECORD.into(), hours).await;
        }
    }
    // The lease of one millisecond expires.
    sleep(Duration::from_millis(20)).await;
    let run = |args: &[&str]| run_in(scratch.path(), &url, args);
    for (id, decisions) in [
        ("aaaaaaaa", "break-lease"),
        ("bbbbbbbb", "free"),
        ("dddddddd", "delete-record"),
    ] {
        let shown = run(&["show", id]);
        assert_eq!(shown.code, 0, "{shown:?}");
        let next = "each executes while the service observes";
        assert!(shown.out.contains(next), "{shown:?}");
        let last = shown.out.lines().next_back();
        assert_eq!(last, Some(&*format!("decisions: {decisions}")), "{shown:?}");
    }
    for state in ["in-progress", "orphaned", "completed"] {
        let listed = run(&["list", state]);
        assert!(
            listed.out.contains("observed: stops no retry"),
            "{listed:?}"
        );
    }
    let audited = ["--reason", "x", "--audit", "log", "--yes"];
    let resolve = |decision: &[&str]| {
        let args = [&["resolve", "bbbbbbbb"][..], decision, &audited[..]];
        run(&args.concat())
    };
    for decision in [
        &["retry"][..],
        &["complete", "--status", "201"],
        &["needs-attention"],
    ] {
        let ran = resolve(decision);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains("only observed"), "{ran:?}");
    }
    assert!(!scratch.file("log").exists());
    let ran = resolve(&["free"]);
    assert_eq!(ran.code, 0, "{ran:?}");
}
