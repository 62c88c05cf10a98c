//! The commands of `docs/operations/resolving-keys.md`, typed on a terminal as they stand, on every store.

use std::{
    fs,
    io::Read as _,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::Value;
use tests::{
    environment::remove_settings,
    proxy::{ConnectionEnd, Fault, Proxy},
    scratch::Scratch,
    servers::postgres::PostgresServer,
    sql,
};
use tokio::time::{Duration, sleep};
use tower_idempotency::{
    NeedsAttention, OrphanPolicy,
    inspect::{Inspect, Resolution, State},
    store::{Acquired, Claim, KeyId, Store, Ttl},
};
use tower_idempotency_any::AnyStore;

use crate::{scenario, terminal::on_terminal, wait_for_end, wait_for_faults};

/// Returns the first commands in the section with this heading.
fn block(heading: &str) -> String {
    let page = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/operations/resolving-keys.md"
    );
    let page = fs::read_to_string(page).expect("a page");
    let (_, section) = page
        .split_once(&format!("\n## {heading}\n"))
        .expect("a section");
    let (section, _) = section.split_once("\n## ").expect("another section");
    let (_, block) = section.split_once("```sh\n").expect("commands");
    let (block, _) = block.split_once("```").expect("an end");
    block.to_owned()
}

/// Returns the commands in the section with this heading: three, one on each line.
fn commands(heading: &str) -> Vec<String> {
    let commands: Vec<_> = block(heading).lines().map(str::to_owned).collect();
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
    let log = fs::read_to_string(audit).expect("the log");
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

/// Replaces `jq` on a machine without it.
const JQ: &str = r#"command -v jq > /dev/null || jq() { python3 -c '
import json, sys
for line in open(sys.argv[1]):
    entry = json.loads(line)
    print(entry["id"], entry["seen"])
' "$3"; }"#;

/// Starts commands in a process group of their own, like a terminal.
fn start(directory: &Path, url: &str, commands: &str) -> Child {
    let tool = env!("CARGO_BIN_EXE_idempotency");
    let commands = commands.replace("idempotency ", &format!("{tool} "));
    let mut bash = Command::new("bash");
    bash.args(["-c", &format!("{JQ}\n{commands}")]);
    bash.current_dir(directory).process_group(0);
    remove_settings(&mut bash);
    bash.env("IDEMPOTENCY_STORE", url);
    bash.env("IDEMPOTENCY_AUDIT", directory.join("audit.jsonl"));
    bash.env("IDEMPOTENCY_TIMEOUT", "120s").env("USER", "alice");
    bash.stdin(Stdio::null()).stdout(Stdio::piped());
    bash.spawn().expect("bash")
}

/// Waits for the end of commands, and returns their output.
fn output(mut bash: Child) -> String {
    wait_for_end(&mut bash);
    let mut output = String::new();
    let stdout = bash.stdout.as_mut().expect("a pipe");
    stdout.read_to_string(&mut output).expect("text");
    output
}

/// Four keys need attention. The first one changes after the export, and Ctrl-C interrupts the decision about the second one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loop_over_keys_ends_at_failure() {
    let server = PostgresServer::start(&[]);
    let store = crate::open(&server.url()).await.expect("the server runs");
    let attention = Resolution::NeedsAttention(NeedsAttention::new("refund-failed"));
    for n in 1..=4 {
        let mut claim = scenario::claim(n);
        claim.operation = "POST /payments".into();
        scenario::acquire(&store, &claim).await;
        let (record, retention) = attention.record(&claim.id).expect("it stores a record");
        scenario::complete(&store, &claim, record, retention).await;
    }
    let scratch = Scratch::new();
    let block = block("Many keys");
    let (export, decide) = block.split_once('\n').expect("two commands");
    output(start(scratch.path(), &server.url(), export));
    let keys = fs::read_to_string(scratch.file("keys.jsonl")).expect("a file");
    let ids = keys.lines().map(|line| {
        let entry: Value = serde_json::from_str(line).expect("JSON");
        entry["id"].as_str().expect("an id").to_owned()
    });
    let ids: Vec<_> = ids.collect();
    assert_eq!(ids.len(), 4, "{keys}");
    let states = async || {
        let mut states = Vec::new();
        for id in &ids {
            let id = id.parse().expect("an id");
            let found = store.get(&id).await.expect("the server runs");
            states.push(found.map(|it| it.entry.state()));
        }
        states
    };

    let first = ids[0].parse().expect("an id");
    let first = store.get(&first).await.expect("the server runs");
    let first = first.expect("an entry").entry;
    let examined = Resolution::NeedsAttention(NeedsAttention::new("examined"));
    let changed = store.resolve(first.seen(), &examined).await;
    assert!(changed.expect("the server runs").is_applied());

    let proxy = Proxy::start(server.address());
    let (at, through) = (server.address().to_string(), proxy.address().to_string());
    let url = server.url().replace(&at, &through);
    proxy.once(Fault::request("with resolved as"), ConnectionEnd::Hang);
    let mut bash = start(scratch.path(), &url, decide);
    wait_for_faults(&proxy, 1, &mut bash);
    let group = format!("-{}", bash.id());
    let sent = Command::new("kill").args(["-INT", "--", &group]).status();
    assert!(sent.expect("kill").success());
    let shown = output(bash);
    for (id, code) in [(&ids[0], 4), (&ids[1], 130)] {
        let line = format!("{id}: exit code {code}\n");
        assert!(shown.contains(&line), "{shown}");
    }
    assert_eq!(states().await, [Some(State::NeedsAttention); 4], "{shown}");

    // The operator continues.
    let shown = output(start(scratch.path(), &url, decide));
    let expected = [Some(State::NeedsAttention), None, None, None];
    assert_eq!(states().await, expected, "{shown}");
    let shown = output(start(scratch.path(), &url, decide));
    assert_eq!(shown.matches(": exit code 4\n").count(), 4, "{shown}");
}
