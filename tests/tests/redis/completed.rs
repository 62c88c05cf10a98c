//! The index of completed entries on Redis and on a cluster, which an option adds: its members, and what they cost.

use std::{collections::BTreeSet, error::Error as _, time::Duration};

use bytes::Bytes;
use tests::{
    app,
    conformance::{run_all_cases, run_all_inspect_cases},
    noise, post, send,
    servers::redis::{RedisServer, UNHURRIED, shared, until_connected},
    sql,
};
use tokio::time::sleep;
use tower_idempotency::{
    IdempotencyLayer, NeedsAttention,
    conformance::Subject,
    inspect::{Inspect, InspectErrorKind, Query, Resolution, Seen, State},
    store::{Acquired, Claim, KeyId, Store, Ttl},
};
use tower_idempotency_redis::{RedisOptions, RedisStore};

use crate::{
    events::eventually,
    inspect::{cluster, listed},
};

mod costs;

const INDEX: &str = "idempotency:~completed";
/// The record of a response without a body.
const RECORD: Bytes = Bytes::from_static(b"\x01\x00\0\0\0\0");
const HOUR: Ttl = Ttl::from_secs(3_600);

fn options(has_index: bool) -> RedisOptions {
    RedisOptions::new()
        .with_timeout(UNHURRIED)
        .with_completed_index(has_index)
}

async fn connect(server: &RedisServer, has_index: bool) -> RedisStore {
    let (options, url) = (options(has_index), server.url());
    until_connected(|| options.clone().connect(&url)).await
}

async fn connect_to_cluster(prefix: &str) -> RedisStore {
    let options = options(true).with_prefix(prefix);
    until_connected(|| options.clone().connect_cluster(cluster().urls())).await
}

/// Completes a new key with this record.
async fn complete(store: &RedisStore, record: Bytes, retention: Ttl) -> Claim {
    let mut claim = sql::claim();
    claim.lease = HOUR;
    store.acquire(&claim).await.expect("the server runs");
    let completed = store.complete(&claim.lease_ref(1), record, retention).await;
    completed.expect("the lease is held");
    claim
}

/// Ends a new key with a record that needs attention.
async fn fail(store: &RedisStore) -> Claim {
    let mut claim = sql::claim();
    claim.lease = HOUR;
    store.acquire(&claim).await.expect("the server runs");
    fail_lease(store, &claim).await;
    claim
}

async fn fail_lease(store: &RedisStore, claim: &Claim) {
    let attention = Resolution::NeedsAttention(NeedsAttention::new("refund-failed"));
    let (record, retention) = attention.record(&claim.id).expect("it stores a record");
    let completed = store.complete(&claim.lease_ref(1), record, retention).await;
    completed.expect("the lease is held");
}

/// Leaves an orphan.
async fn orphan(store: &RedisStore) -> Claim {
    let mut claim = sql::claim();
    claim.lease = Ttl::from_millis(1);
    store.acquire(&claim).await.expect("the server runs");
    // Its lease expires meanwhile.
    sleep(Duration::from_millis(10)).await;
    claim
}

async fn seen(store: &RedisStore, claim: &Claim) -> Seen {
    let found = store.get(&claim.id).await.expect("the server runs");
    *found.expect("it exists").entry.seen()
}

async fn resolve(store: &RedisStore, claim: &Claim, resolution: &Resolution) {
    let resolved = store.resolve(&seen(store, claim).await, resolution).await;
    assert!(resolved.expect("the server runs").is_applied());
}

/// Returns the IDs that the listing of a state contains, each once.
async fn ids(store: &RedisStore, state: State) -> BTreeSet<KeyId> {
    let entries = listed(store, Query::new(state).with_limit(2)).await;
    let ids: BTreeSet<_> = entries.iter().map(|entry| *entry.id()).collect();
    assert_eq!(ids.len(), entries.len(), "{state}");
    ids
}

fn key(claim: &Claim) -> String {
    format!("idempotency:{}", claim.id.to_hex())
}

/// Returns the number of members.
fn members(server: &RedisServer) -> usize {
    let count = server.command(&["ZCARD", INDEX]);
    count.parse().expect("a number")
}

// ---- The suite ----

fn subject(store: RedisStore) -> Subject<RedisStore> {
    assert!(store.abilities().can_list(State::Completed));
    Subject::new(store).with_inspector()
}

async fn on_shared(prefix: &str) -> Subject<RedisStore> {
    let (options, url) = (options(true).with_prefix(prefix), shared().url());
    subject(until_connected(|| options.clone().connect(&url)).await)
}

#[test]
fn redis_passes_every_case() {
    run_all_inspect_cases(async || on_shared("completed:").await);
}

#[test]
fn cluster_passes_every_case() {
    run_all_inspect_cases(async || {
        let store = connect_to_cluster("completed:").await;
        subject(store).with_push(false)
    });
}

#[test]
fn one_slot_of_cluster_passes_every_case() {
    run_all_inspect_cases(async || {
        let store = connect_to_cluster("{completed}:").await;
        subject(store).with_push(false)
    });
}

#[test]
fn store_with_index_conforms() {
    run_all_cases(async || on_shared("completed-store:").await, |_| None);
}

/// The commands of the check are in the slot of its entry.
#[tokio::test]
async fn cluster_store_with_index_passes_check() {
    let store = connect_to_cluster("completed-check:").await;
    store.check().await.expect("each node has all rights");
}

// ---- Members ----

#[tokio::test]
async fn index_is_absent_by_default() {
    let server = RedisServer::start(&[]);
    let store = server.store().await;
    let failed = fail(&store).await;
    let resolution = Resolution::Complete {
        record: RECORD,
        retention: HOUR,
    };
    resolve(&store, &failed, &resolution).await;
    complete(&store, RECORD, HOUR).await;
    assert_eq!(server.command(&["EXISTS", INDEX]), "0");
    let error = store.list(&Query::new(State::Completed)).await;
    let error = error.expect_err("there is no index");
    assert_eq!(error.kind(), InspectErrorKind::Unsupported);
    let setting = error.source().expect("the setting").to_string();
    let expected = "set `RedisOptions::with_completed_index(true)` in each process to list them";
    assert_eq!(setting, expected);
    let summary = store.summary(10).await.expect("the server runs");
    assert_eq!(summary.completed, None);
}

#[tokio::test]
async fn store_without_indexes_names_their_setting() {
    let server = RedisServer::start(&[]);
    for has_completed in [false, true] {
        let (options, url) = (options(has_completed).with_indexes(false), server.url());
        let store = until_connected(|| options.clone().connect(&url)).await;
        for state in [
            State::InProgress,
            State::Orphaned,
            State::NeedsAttention,
            State::Completed,
        ] {
            assert!(!store.abilities().can_list(state), "{state}");
            let setting = store.abilities().setting_to_list(state);
            assert_eq!(setting, Some("RedisOptions::with_indexes(true)"), "{state}");
        }
    }
}

/// Entries that are completed later expire earlier.
#[tokio::test]
async fn completed_entries_are_listed_by_expiry() {
    let server = RedisServer::start(&[]);
    let store = connect(&server, true).await;
    let mut stored = Vec::new();
    for n in 0..6 {
        let retention = Ttl::from_secs(10_000 - 1_000 * n);
        stored.push(complete(&store, RECORD, retention).await.id);
    }
    stored.reverse();
    let entries = listed(&store, Query::new(State::Completed).with_limit(2)).await;
    let ids: Vec<_> = entries.iter().map(|entry| *entry.id()).collect();
    assert_eq!(ids, stored);
    assert!(entries.is_sorted_by_key(|entry| entry.expires));
}

/// The member of the expired record is among those that the completion removes.
#[tokio::test]
async fn key_of_expired_record_is_listed_again() {
    let server = RedisServer::start(&[]);
    let store = connect(&server, true).await;
    let claim = complete(&store, RECORD, HOUR).await;
    server.command(&["DEL", &key(&claim)]);
    let member: [&[u8]; 4] = [b"ZADD", INDEX.as_bytes(), b"1", claim.id.as_bytes()];
    server.command(&member);
    assert_eq!(members(&server), 1);
    let claim = sql::duplicate(&claim);
    let acquired = store.acquire(&claim).await.expect("the server runs");
    assert!(matches!(acquired, Acquired::Granted { generation: 1, .. }));
    let completed = store.complete(&claim.lease_ref(1), RECORD, HOUR).await;
    completed.expect("the lease is held");
    assert_eq!(
        ids(&store, State::Completed).await,
        BTreeSet::from([claim.id])
    );
}

/// A completion removes a bounded number of members, and more than it adds. A listing does not read them.
#[tokio::test]
async fn completion_removes_four_expired_members() {
    let server = RedisServer::start(&[]);
    let store = connect(&server, true).await;
    for n in 1..=10 {
        let (score, member) = (n.to_string(), format!("{n:0>32}"));
        server.command(&["ZADD", INDEX, &score, &member]);
    }
    let mut stored = BTreeSet::new();
    for left in [7, 4, 3, 4] {
        stored.insert(complete(&store, RECORD, HOUR).await.id);
        assert_eq!(ids(&store, State::Completed).await, stored);
        assert_eq!(members(&server), left);
    }
    let summary = store.summary(10).await.expect("the server runs");
    let count = summary.completed.expect("a listed state");
    assert_eq!((count.value, count.is_exact), (4, true));
}

/// After the last record has expired, the server is empty, although no completion removes the members.
#[tokio::test]
async fn index_expires_after_its_last_record() {
    let server = RedisServer::start(&[]);
    let store = connect(&server, true).await;
    let left = || -> u64 {
        let left = server.command(&["PTTL", INDEX]);
        left.parse().expect("milliseconds")
    };
    complete(&store, RECORD, Ttl::from_secs(1_000)).await;
    assert!((1_000_000..=2_000_000).contains(&left()));
    complete(&store, RECORD, Ttl::from_secs(10)).await;
    assert!((1_000_000..=2_000_000).contains(&left()));
    complete(&store, RECORD, Ttl::from_secs(10_000)).await;
    assert!((10_000_000..=20_000_000).contains(&left()));

    let server = RedisServer::start(&[]);
    let store = connect(&server, true).await;
    complete(&store, RECORD, Ttl::from_millis(20)).await;
    eventually("the server is empty", || server.command(&["DBSIZE"]) == "0").await;
}

/// Each entry is listed in its present state alone, and its member moves with the resolution.
#[tokio::test]
async fn resolved_entry_is_listed_in_new_state() {
    let server = RedisServer::start(&[]);
    let store = connect(&server, true).await;
    let completion = || Resolution::Complete {
        record: RECORD,
        retention: HOUR,
    };
    let attention = || Resolution::NeedsAttention(NeedsAttention::new("examine"));
    let cases = [
        (fail(&store).await, completion(), Some(State::Completed)),
        (orphan(&store).await, completion(), Some(State::Completed)),
        (
            orphan(&store).await,
            attention(),
            Some(State::NeedsAttention),
        ),
        (fail(&store).await, Resolution::Retry, Some(State::Orphaned)),
        (
            complete(&store, RECORD, HOUR).await,
            Resolution::DeleteRecord,
            None,
        ),
    ];
    for (claim, resolution, _) in &cases {
        resolve(&store, claim, resolution).await;
    }
    // Before a listing corrects the index.
    assert_eq!(members(&server), 2);
    for state in [
        State::InProgress,
        State::Orphaned,
        State::NeedsAttention,
        State::Completed,
    ] {
        let cases = cases.iter().filter(|case| case.2 == Some(state));
        let expected: BTreeSet<_> = cases.map(|case| case.0.id).collect();
        assert_eq!(ids(&store, state).await, expected, "{state}");
    }
}

#[tokio::test]
async fn tombstone_is_listed_as_completed() {
    let server = RedisServer::start(&[]);
    let (options, url) = (options(true).with_record_limit(0), server.url());
    let store = until_connected(|| options.clone().connect(&url)).await;
    let layer = IdempotencyLayer::new(store.clone());
    let (app, _) = app(layer, async |_, _| noise(10_000));
    send(&app, post("/orders", "k", "tea")).await;
    let retry = send(&app, post("/orders", "k", "tea")).await;
    assert_eq!(retry.code(), "response-not-retained");
    assert_eq!(ids(&store, State::Completed).await.len(), 1);
}

// ---- Processes with and without the option ----

/// A process without the option changes entries and not the index. The next listing removes the members.
#[tokio::test]
async fn listing_removes_members_of_changed_entries() {
    let server = RedisServer::start(&[]);
    let (store, other) = (connect(&server, true).await, connect(&server, false).await);
    let unchanged = complete(&store, RECORD, HOUR).await;
    let deleted = complete(&store, RECORD, HOUR).await;
    resolve(&other, &deleted, &Resolution::DeleteRecord).await;
    let mut again = Vec::new();
    for _ in 0..2 {
        let claim = complete(&store, RECORD, HOUR).await;
        server.command(&["DEL", &key(&claim)]);
        let claim = sql::duplicate(&claim);
        let acquired = other.acquire(&claim).await.expect("the server runs");
        assert!(matches!(acquired, Acquired::Granted { generation: 1, .. }));
        again.push(claim);
    }
    let [running, failed] = [&again[0], &again[1]];
    fail_lease(&other, failed).await;
    assert_eq!(members(&server), 4);
    for (state, claim) in [
        (State::Completed, &unchanged),
        (State::InProgress, running),
        (State::NeedsAttention, failed),
    ] {
        assert_eq!(ids(&store, state).await, BTreeSet::from([claim.id]));
        assert_eq!(members(&server), 1, "after the listing of {state}");
    }
}

#[tokio::test]
async fn repair_adds_records_of_other_processes() {
    let server = RedisServer::start(&[]);
    let (store, other) = (connect(&server, true).await, connect(&server, false).await);
    let mut stored = Vec::new();
    for _ in 0..4 {
        stored.push(complete(&other, RECORD, HOUR).await);
    }
    fail(&other).await;
    // An operator removed the expiry.
    server.command(&["PERSIST", &key(&stored[0])]);
    assert_eq!(ids(&store, State::Completed).await, BTreeSet::new());
    let repair = async |store: &RedisStore| {
        let repaired = store.repair_indexes(|_| ()).await;
        let repair = repaired.expect("the server runs");
        (repair.added, repair.removed, repair.skipped)
    };
    assert_eq!(repair(&store).await, (4, 0, 0));
    let all: BTreeSet<_> = stored.iter().map(|claim| claim.id).collect();
    assert_eq!(ids(&store, State::Completed).await, all);

    server.command(&["DEL", &key(&stored[1])]);
    server.command(&["ZADD", INDEX, "9999999999999", "of another program"]);
    // A tool without the option.
    assert_eq!(repair(&other).await, (0, 0, 0));
    assert_eq!(members(&server), 5);
    assert_eq!(repair(&store).await, (0, 2, 0));
    assert_eq!(members(&server), 3);
}

/// The entry comes first: a user without rights on the index stores records.
#[tokio::test]
async fn record_is_stored_without_rights_on_index() {
    const RIGHTS: &str = "reset on >open-sesame ~idempotency:* &idempotency:* +@scripting +info +hmget +hset +hdel \
                          +del +pexpire +pexpireat +pttl +time +publish";
    let server = RedisServer::start(&[]);
    server.permit(RIGHTS);
    let operator = connect(&server, true).await;
    let url = format!("redis://service:open-sesame@{}/0", server.address());
    let store = until_connected(|| options(true).connect(&url)).await;
    let claim = complete(&store, RECORD, HOUR).await;
    let found = store.acquire(&sql::duplicate(&claim)).await;
    let found = found.expect("the server runs");
    assert!(matches!(found, Acquired::Completed { .. }), "{found:?}");
    assert_eq!(server.command(&["EXISTS", INDEX]), "0");
    // Without the right to read the index, no completion would remove the members that it has added.
    server.permit("+zadd +zrem");
    server.command(&["ZADD", INDEX, "1", "expired"]);
    complete(&store, RECORD, HOUR).await;
    assert_eq!(members(&server), 1);
    server.permit("+zrangebyscore -zadd");
    complete(&store, RECORD, HOUR).await;
    assert_eq!(server.command(&["EXISTS", INDEX]), "0");
    server.permit("+zadd");
    let claim = complete(&store, RECORD, HOUR).await;
    let found = ids(&operator, State::Completed).await;
    assert_eq!(found, BTreeSet::from([claim.id]));
}
