//! The commands of `docs/operations/resolving-keys.md`, typed on a terminal as they stand, on every store.

use tests::{scratch::Scratch, sql};
use tokio::time::{Duration, sleep};
use tower_idempotency::{
    NeedsAttention, OrphanPolicy,
    inspect::{Inspect, Resolution, State},
    store::{Acquired, Claim, KeyId, Store, Ttl},
};
use tower_idempotency_any::AnyStore;

use crate::terminal::on_terminal;

/// Returns the commands in the section with this heading: at most three.
fn commands(heading: &str) -> Vec<String> {
    let page = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/operations/resolving-keys.md"
    );
    let page = std::fs::read_to_string(page).expect("a page");
    let (_, section) = page
        .split_once(&format!("\n## {heading}\n"))
        .expect("a section");
    let (section, _) = section.split_once("\n## ").expect("another section");
    let (_, block) = section.split_once("```sh\n").expect("commands");
    let (block, _) = block.split_once("```").expect("an end");
    let commands: Vec<_> = block.lines().map(str::to_owned).collect();
    assert_eq!(commands.len(), 3, "{heading}: {commands:?}");
    commands
}

/// Acquires the key of the page, and returns its claim.
async fn acquire(store: &AnyStore, lease: Ttl) -> Claim {
    let mut claim = sql::claim();
    let mut id = *claim.id.as_bytes();
    id[..4].copy_from_slice(&[0x6f, 0x1c, 0x0a, 0x2b]);
    claim.id = KeyId::from_bytes(id);
    claim.owner = "host-1:4711";
    claim.operation = "POST /payments".into();
    claim.lease = lease;
    let acquired = store.acquire(&claim).await.expect("the store replies");
    assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
    claim
}

/// Types the commands of a section. The operator confirms each question.
fn type_commands(url: &str, heading: &str) {
    let scratch = Scratch::new();
    let audit = scratch.file("audit.jsonl").display().to_string();
    let variables = [("IDEMPOTENCY_STORE", url), ("IDEMPOTENCY_AUDIT", &audit)];
    for command in commands(heading) {
        // The test does not wait for ten minutes.
        let command = command.replace("--older-than 10m", "--older-than 1ms");
        let (code, shown) = on_terminal(120, "yes\n", &variables, &command);
        assert_eq!(code, 0, "{command}\n{shown}");
        assert!(shown.contains("6f1c0a2b"), "{command}\n{shown}");
    }
    let log = std::fs::read_to_string(audit).expect("the log");
    assert_eq!(log.lines().count(), 2, "{log}");
}

/// Finds and resolves a key in progress, an orphan and a key that needs attention with the commands of the page.
pub(crate) async fn resolve_in_three_commands(url: &str) {
    let store = crate::open(url).await.expect("the server runs");
    let long = Ttl::from_secs(36_000);
    let state = async |claim: &Claim| {
        let found = store.get(&claim.id).await.expect("the store replies");
        found.map(|it| it.entry.state())
    };

    let stuck = acquire(&store, long).await;
    sleep(Duration::from_millis(10)).await;
    type_commands(url, "A handler never ends");
    // Longer than the clock skew of DynamoDB.
    sleep(Duration::from_millis(300)).await;
    assert_eq!(state(&stuck).await, Some(State::Orphaned));
    // The digits of the page name one key at a time.
    let found = store.get(&stuck.id).await.expect("the store replies");
    let freed = store
        .resolve(found.expect("it exists").entry.seen(), &Resolution::Free)
        .await;
    assert!(freed.expect("the store replies").is_applied());

    let orphan = acquire(&store, Ttl::from_millis(1)).await;
    sleep(Duration::from_millis(300)).await;
    type_commands(url, "A process died, and retries are refused");
    let mut retry = sql::duplicate(&orphan);
    retry.orphans = OrphanPolicy::Refuse;
    retry.lease = long;
    let acquired = store.acquire(&retry).await.expect("the store replies");
    assert!(
        matches!(
            acquired,
            Acquired::Granted {
                generation: 2,
                takeover: true
            }
        ),
        "{acquired:?}"
    );
    let record = b"\x01\x00\0\0\0\0".to_vec().into();
    let completed = store
        .complete(&retry.lease_ref(2), record, Ttl::from_millis(1))
        .await;
    completed.expect("the store replies");
    sleep(Duration::from_millis(300)).await;

    let examined = acquire(&store, long).await;
    let attention = NeedsAttention::new("refund-failed").with_reason("refund re_7");
    let record = Resolution::NeedsAttention(attention).record(&examined.id);
    let (record, retention) = record.expect("it stores a record");
    let completed = store
        .complete(&examined.lease_ref(1), record, retention)
        .await;
    completed.expect("the store replies");
    type_commands(url, "A key needs attention");
    assert_eq!(state(&examined).await, None);
}
