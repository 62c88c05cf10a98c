//! The commands of an operator for each kind of key, and their output.

use std::fmt::Write as _;

use tests::{scratch::Scratch, sql};
use tokio::time::{Duration, sleep};
use tower_idempotency::{
    NeedsAttention, OrphanPolicy,
    inspect::{Inspect as _, Resolution},
    store::{Acquired, Claim, KeyId, Store, Ttl},
};
use tower_idempotency_any::AnyStore;

use crate::{CommandOutput, run_in};

/// The keys of a store: one in each state.
pub(crate) struct Keys {
    pub(crate) in_progress: Claim,
    pub(crate) orphaned: Claim,
    pub(crate) attention: Claim,
    pub(crate) completed: Claim,
}

fn claim(n: u8) -> Claim {
    let mut claim = sql::claim();
    // The first digits of each are known, and the rest is random.
    let mut id = *claim.id.as_bytes();
    id[..4].copy_from_slice(&[n; 4]);
    claim.id = KeyId::from_bytes(id);
    claim.owner = "host-1:4711";
    claim.operation = format!("POST /orders/{n:x}").into();
    claim.lease = Ttl::from_secs(36_000);
    claim
}

fn orphan(n: u8) -> Claim {
    let mut claim = claim(n);
    claim.lease = Ttl::from_millis(1);
    claim
}

impl Keys {
    pub(crate) async fn create(store: &AnyStore) -> Self {
        let keys = Self {
            in_progress: claim(0xaa),
            orphaned: orphan(0xbb),
            attention: claim(0xcc),
            completed: claim(0xdd),
        };
        for claim in [
            &keys.in_progress,
            &keys.orphaned,
            &keys.attention,
            &keys.completed,
        ] {
            let acquired = store.acquire(claim).await.expect("the store replies");
            assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
        }
        let attention = NeedsAttention::new("refund-failed").with_reason("refund re_7");
        let record = Resolution::NeedsAttention(attention).record(&keys.attention.id);
        let (record, retention) = record.expect("it stores a record");
        let lease = keys.attention.lease_ref(1);
        let completed = store.complete(&lease, record, retention).await;
        completed.expect("the store replies");
        let lease = keys.completed.lease_ref(1);
        let record = b"\x01\x00\0\0\0\0".to_vec().into();
        let completed = store.complete(&lease, record, Ttl::from_secs(36_000)).await;
        completed.expect("the store replies");
        // Longer than the clock skew of DynamoDB.
        sleep(Duration::from_millis(300)).await;
        keys
    }
}

/// Runs commands in a directory, and notes them with what they print.
struct Session<'a> {
    store: &'a str,
    scratch: Scratch,
    notes: String,
}

impl Session<'_> {
    fn run(&mut self, args: &[&str]) -> CommandOutput {
        let ran = run_in(&self.scratch.file(""), self.store, args);
        let line = format!("$ idempotency {}\n", args.join(" "));
        self.notes.push_str(&plain(&line));
        self.notes.push_str(&plain(&ran.out));
        self.notes.push_str(&plain(&ran.err));
        writeln!(self.notes, "exit {}\n", ran.code).expect("memory");
        ran
    }
}

/// Returns the text without what differs from run to run: times, ages, and the random digits.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    for word in text.split_inclusive([' ', '\n', ',', '"']) {
        let (word, end) = word.split_at(word.len() - usize::from(!word.is_empty()));
        let is_hex = word.len() == 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_time = word.len() == 24 && word.ends_with('Z');
        let word = match word {
            word if is_hex => format!("{}..", &word[..8]),
            _ if is_time => "TIME".to_owned(),
            word if word.len() == 67 => "SEEN".to_owned(),
            word => word.to_owned(),
        };
        plain.push_str(&word);
        plain.push_str(end);
    }
    plain
}

/// Settles a key of each kind. Returns what the operator typed and read.
pub(crate) async fn settle_every_kind(url: &str) -> String {
    let store = crate::open(url).await.expect("the server runs");
    let keys = Keys::create(&store).await;
    let mut session = Session {
        store: url,
        scratch: Scratch::new(),
        notes: String::new(),
    };
    let change = ["--reason", "ticket 17", "--audit", "audit.jsonl", "--yes"];
    let with = |args: &[&'static str]| [args, &change].concat();

    for (state, id) in [
        ("in-progress", "aaaaaaaa"),
        ("orphaned", "bbbbbbbb"),
        ("attention", "cccccccc"),
    ] {
        let listed = session.run(&["list", state, "--json"]);
        assert_eq!(listed.code, 0, "{listed:?}");
        assert_eq!(listed.out.lines().count(), 1, "{listed:?}");
        assert!(listed.out.contains(&format!("\"id\":\"{id}")), "{listed:?}");
        let text = run_in(&session.scratch.file(""), url, &["list", state]);
        assert!(text.out.starts_with("ID        STATE"), "{text:?}");
        assert!(
            text.out.contains(id) && text.out.contains("host-1:4711"),
            "{text:?}"
        );
        let shown = session.run(&["show", id]);
        assert_eq!(shown.code, 0, "{shown:?}");
    }
    // A key that is held is broken first.
    let free = session.run(&with(&["resolve", "aaaaaaaa", "free"]));
    assert_eq!(free.code, 2);
    let unforced = session.run(&with(&["resolve", "aaaaaaaa", "break-lease"]));
    assert_eq!(unforced.code, 2);
    let broken = session.run(&with(&["resolve", "aaaaaaaa", "break-lease", "--force"]));
    assert_eq!(broken.code, 0, "{broken:?}");
    let retried = session.run(&with(&["resolve", "bbbbbbbb", "retry"]));
    assert_eq!(retried.code, 0, "{retried:?}");
    let mut retry = sql::duplicate(&keys.orphaned);
    retry.orphans = OrphanPolicy::Refuse;
    retry.lease = Ttl::from_secs(36_000);
    let acquired = store.acquire(&retry).await.expect("the store replies");
    let takeover = Acquired::Granted {
        generation: 2,
        takeover: true,
    };
    assert_eq!(acquired, takeover);
    let completed = session.run(&with(&[
        "resolve", "cccccccc", "complete", "--status", "201",
    ]));
    assert_eq!(completed.code, 0, "{completed:?}");
    let retry = sql::duplicate(&keys.attention);
    let acquired = store.acquire(&retry).await.expect("the store replies");
    assert!(
        matches!(acquired, Acquired::Completed { .. }),
        "{acquired:?}"
    );

    let audit = std::fs::read_to_string(session.scratch.file("audit.jsonl"));
    let audit = audit.expect("the audit log");
    let lines: Vec<_> = audit.lines().collect();
    assert_eq!(lines.len(), 6, "{audit}");
    for (line, kind) in lines.iter().zip(["intent", "outcome"].iter().cycle()) {
        assert!(line.contains(&format!("\"line\":\"{kind}\"")), "{line}");
        assert!(
            line.contains("\"actor\":\"alice\"") && line.contains("\"why\":\"ticket 17\""),
            "{line}"
        );
    }
    let id = keys.completed.id.to_hex();
    let shown = session.run(&["show", &id]);
    assert_eq!(shown.code, 0, "{shown:?}");
    let gone = session.run(&with(&["resolve", "eeeeeeee", "free"]));
    assert_eq!(gone.code, 3);
    let stats = session.run(&["stats", "--json"]);
    assert_eq!(stats.code, 0);
    session.notes
}

/// Returns an entry as it was seen, changes it, and resolves what was seen.
pub(crate) async fn resolve_changed_entry(url: &str) {
    let store = crate::open(url).await.expect("the server runs");
    let keys = Keys::create(&store).await;
    let scratch = Scratch::new();
    let id = keys.orphaned.id.to_hex();
    let shown = run_in(&scratch.file(""), url, &["show", &id, "--json"]);
    let (_, seen) = shown.out.split_once("\"seen\":\"").expect("a member");
    let (seen, _) = seen.split_once('"').expect("a string");
    let mut retry = sql::duplicate(&keys.orphaned);
    retry.lease = Ttl::from_secs(36_000);
    let taken = store.acquire(&retry).await;
    assert!(matches!(taken, Ok(Acquired::Granted { generation: 2, .. })));
    let args = [
        "resolve",
        &id,
        "free",
        "--seen",
        seen,
        "--reason",
        "x",
        "--audit",
        "audit.jsonl",
        "--yes",
    ];
    let stale = run_in(&scratch.file(""), url, &args);
    assert_eq!(stale.code, 4, "{stale:?}");
    assert!(stale.out.contains("it is in-progress now"), "{stale:?}");
    assert!(
        !scratch.file("audit.jsonl").exists(),
        "nothing was intended"
    );
}

/// Two operators resolve the same orphan as they saw it. The first one removes the entry.
pub(crate) async fn resolve_removed_entry(url: &str) {
    let store = crate::open(url).await.expect("the server runs");
    let keys = Keys::create(&store).await;
    let scratch = Scratch::new();
    let found = store.get(&keys.orphaned.id).await.expect("it runs");
    let seen = found.expect("an entry").entry.seen().to_string();
    let change = ["--reason", "x", "--audit", "audit.jsonl", "--yes"];
    let free = |id: &str, form: &[&str]| {
        let args = [&["resolve", id, "free", "--seen", &seen], &change[..], form].concat();
        run_in(&scratch.file(""), url, &args)
    };
    let other = free("aaaaaaaa", &[]);
    assert_eq!(other.code, 2, "{other:?}");
    assert!(other.err.contains("that of another entry"), "{other:?}");
    let first = free("bbbbbbbb", &[]);
    assert_eq!(first.code, 0, "{first:?}");
    for id in ["bbbbbbbb", &keys.orphaned.id.to_hex()] {
        let second = free(id, &["--json"]);
        assert_eq!(second.code, 4, "{second:?}");
        for member in ["\"outcome\":\"changed\"", "\"entry\":null"] {
            assert!(second.out.contains(member), "{second:?}");
        }
        let second = free(id, &[]);
        assert_eq!(second.code, 4, "{second:?}");
        assert!(second.out.contains("it is absent now"), "{second:?}");
    }
    let audit = std::fs::read_to_string(scratch.file("audit.jsonl"));
    assert_eq!(audit.expect("the log").lines().count(), 2);
}
