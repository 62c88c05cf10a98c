//! The entries of a store, and the decisions of an operator about them.

use std::fs;

use bytes::Bytes;
use tests::{scratch::Scratch, sql};
use tokio::time::{Duration, sleep};
use tower_idempotency::{
    NeedsAttention, OrphanPolicy,
    inspect::{Inspect as _, Resolution},
    store::{Acquired, Claim, KeyId, Store, Ttl},
};
use tower_idempotency_any::AnyStore;

use crate::{run_in, session::Session};

/// A record that the layer cannot read.
pub(crate) const RECORD: &[u8] = b"\x01\x00\0\0\0\0";

/// The keys of a store: one in each state.
pub(crate) struct Keys {
    pub(crate) in_progress: Claim,
    pub(crate) orphaned: Claim,
    pub(crate) attention: Claim,
    pub(crate) completed: Claim,
}

/// Creates a claim on a key whose ID begins with this byte, four times.
pub(crate) fn claim(n: u8) -> Claim {
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

/// Acquires the lease of an absent key.
pub(crate) async fn acquire(store: &AnyStore, claim: &Claim) {
    let acquired = store.acquire(claim).await.expect("the store replies");
    let first = Acquired::Granted {
        generation: 1,
        takeover: false,
    };
    assert_eq!(acquired, first);
}

/// Stores the record of the first execution of a key.
pub(crate) async fn complete(store: &AnyStore, claim: &Claim, record: Bytes, retention: Ttl) {
    let lease = claim.lease_ref(1);
    let completed = store.complete(&lease, record, retention).await;
    completed.expect("the store replies");
}

/// Waits until leases and entries of one millisecond have expired.
async fn wait_for_expiry() {
    // Longer than the clock skew of DynamoDB.
    sleep(Duration::from_millis(300)).await;
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
            acquire(store, claim).await;
        }
        let attention = NeedsAttention::new("refund-failed").with_reason("refund re_7");
        let record = Resolution::NeedsAttention(attention).record(&keys.attention.id);
        let (record, retention) = record.expect("it stores a record");
        complete(store, &keys.attention, record, retention).await;
        let retention = Ttl::from_secs(36_000);
        complete(store, &keys.completed, RECORD.into(), retention).await;
        wait_for_expiry().await;
        keys
    }
}

/// Resolves a key of each kind with each decision, in text and in JSON, and then purges. Returns what the operator typed and
/// read.
pub(crate) async fn resolve_every_kind(url: &str) -> String {
    let store = crate::open(url).await.expect("the server runs");
    let keys = Keys::create(&store).await;
    let mut session = Session::new(url);
    session.change("check --repair");
    session.change("check --repair --json");

    // A lease that is held is broken first. Each decision changes the state for the next one.
    session.change("resolve aaaaaaaa free");
    session.change("resolve aaaaaaaa break-lease");
    session.change("resolve aaaaaaaa break-lease --force");
    session.change("resolve aaaaaaaa needs-attention --code examine");
    session.change("resolve aaaaaaaa needs-attention --json");
    session.change("resolve aaaaaaaa retry --json");
    session.change("resolve aaaaaaaa complete --status 204 --json");
    // Not each store finds a completed entry by its first digits.
    let delete = format!("resolve {} delete-record", keys.in_progress.id.to_hex());
    session.change(&delete);
    session.change(&format!("{delete} --force --json"));

    session.change("resolve bbbbbbbb complete");
    let found = store.get(&keys.orphaned.id).await.expect("it runs");
    let seen = *found.expect("an entry").entry.seen();
    session.change("resolve bbbbbbbb retry");
    let mut retry = sql::duplicate(&keys.orphaned);
    retry.orphans = OrphanPolicy::Refuse;
    retry.lease = Ttl::from_secs(36_000);
    let acquired = store.acquire(&retry).await.expect("the store replies");
    let takeover = Acquired::Granted {
        generation: 2,
        takeover: true,
    };
    assert_eq!(acquired, takeover);
    let stale = format!("resolve bbbbbbbb free --seen {seen}");
    session.change(&stale);
    session.change(&format!("{stale} --json"));
    session.change("resolve bbbbbbbb break-lease --force --json");
    session.change("resolve bbbbbbbb free");
    // The next request executes as the first one.
    acquire(&store, &sql::duplicate(&keys.orphaned)).await;
    wait_for_expiry().await;
    session.change("resolve bbbbbbbb free --json");

    fs::write(session.file("body"), "refunded").expect("a file");
    session.change(
        "resolve cccccccc complete --status 201 --header location:/orders/1 --body-file body",
    );
    let retry = sql::duplicate(&keys.attention);
    let acquired = store.acquire(&retry).await.expect("the store replies");
    assert!(
        matches!(acquired, Acquired::Completed { .. }),
        "{acquired:?}"
    );

    let completed = keys.completed.id.to_hex();
    session.change(&format!("resolve {completed} free"));
    session.change(&format!("resolve {completed} delete-record --force"));
    session.change("resolve eeeeeeee free");

    for n in 1..=3 {
        let mut expired = orphan(n);
        expired.orphan_retention = Ttl::from_millis(1);
        acquire(&store, &expired).await;
    }
    wait_for_expiry().await;
    session.run("purge --reason ticket-17 --audit audit.jsonl");
    session.change("purge --max 2");
    session.change("purge --json");
    session.run("stats --json");

    let audit = fs::read_to_string(session.file("audit.jsonl")).expect("the audit log");
    // A refused change has no line.
    assert_eq!(audit.lines().count(), 2 * session.changes(), "{audit}");
    for (line, kind) in audit.lines().zip(["intent", "outcome"].iter().cycle()) {
        assert!(line.contains(&format!("\"line\":\"{kind}\"")), "{line}");
        assert!(
            line.contains("\"actor\":\"alice\"") && line.contains("\"why\":\"ticket-17\""),
            "{line}"
        );
    }
    session.into_notes()
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
    let audit = fs::read_to_string(scratch.file("audit.jsonl"));
    assert_eq!(audit.expect("the log").lines().count(), 2);
}
