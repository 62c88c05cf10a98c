//! Entries and scripts of other versions on the same server.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use tests::{TestResponse, creating, servers::redis::RedisServer};
use tower_idempotency::{
    IdempotencyLayer, StoreFailure, Ttl,
    store::{Acquired, Claim, Fingerprint, KeyId, LeaseRef, Store, StoreError, Token},
};
use tower_idempotency_redis::RedisStore;

use crate::{
    events::until_renewed,
    faults::node::{Node, connect, connect_with_long_timeout, patient},
};

/// Returns the key of the only entry.
fn entry(server: &RedisServer) -> String {
    let mut keys = server.entries();
    assert_eq!(keys.len(), 1, "{keys:?}");
    keys.remove(0)
}

// F-139
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn added_fields_are_ignored() {
    let server = RedisServer::start(&[]);
    let store = connect_with_long_timeout(&server.url()).await;
    let node = Node::with(store, &<_>::default(), |layer| {
        patient(layer).with_lease_ttl(Ttl::from_secs(12))
    });
    let add = |key: &str| server.command(&["HSET", key, "z", "later", "zz", "\0\u{ff}"]);
    let (request, lease) = node.running("k").await;
    add(&entry(&server));
    assert_eq!(node.post("/held", "k").await.code(), "in-progress");
    until_renewed(&server, &[lease]).await;
    assert_eq!(server.command(&["HGET", &entry(&server), "z"]), "later");
    node.barrier.open_for_good();
    let response = request.await.unwrap();
    node.assert_replays("/held", "k", &response).await;
    add(&entry(&server));
    node.assert_replays("/held", "k", &response).await;
    assert_eq!(node.database.of("k"), 1);

    server.command(&["FLUSHALL"]);
    let failing = node.spawn("/held-fails", "l");
    assert_eq!(failing.await.unwrap().status, StatusCode::BAD_GATEWAY);
    assert_eq!(server.command(&["DBSIZE"]), "0", "released");
}

fn assert_unreadable(response: &TestResponse) {
    assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.code(), "store-unavailable");
    // An outage gets this header.
    assert_eq!(response.header("retry-after"), None);
}

// F-139
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entry_of_later_version_is_preserved() {
    let server = RedisServer::start(&[]);
    let node = Node::new(connect(&server.url()).await);
    let (request, _) = node.running("k").await;
    let key = entry(&server);
    let contents = |key: &str| server.list(&["HGETALL", key]);
    // A state that a later version may write while it holds the key or after it has completed it.
    server.command(&["HSET", &key, "s", "X"]);
    let found = contents(&key);
    assert_unreadable(&node.post("/held", "k").await);
    let reused = tests::send(&node.app, tests::post("/held", "k", "another")).await;
    assert_unreadable(&reused);
    // The running handler does not overwrite the entry either.
    node.barrier.open_for_good();
    assert_eq!(request.await.unwrap().status, StatusCode::CREATED);
    assert_eq!(contents(&key), found);
    assert_eq!(node.database.of("k"), 1);

    let store = connect_with_long_timeout(&server.url()).await;
    let claim = claim(1);
    server.command(&["HSET", &key_of(&claim), "s", "Y", "t", "0123456789abcdef"]);
    assert_unchanged(&server, &store, &claim).await;
}

/// Checks that no call of the layer changes an entry, or accepts it.
async fn assert_unchanged(server: &RedisServer, store: &RedisStore, claim: &Claim) {
    let contents = || server.list(&["HGETALL", &key_of(claim)]);
    let (found, lease) = (contents(), claim.lease_ref(1));
    assert!(matches!(
        store.acquire(claim).await,
        Err(StoreError::Unreadable(_))
    ));
    let renewed = store.renew(&lease, Ttl::from_secs(1)).await;
    assert!(matches!(renewed, Err(StoreError::Unreadable(_))));
    let record = Bytes::from_static(b"record");
    let completed = store.complete(&lease, record, Ttl::from_secs(1)).await;
    assert!(matches!(completed, Err(StoreError::Unreadable(_))));
    store.release(&lease).await.expect("a release");
    assert_eq!(contents(), found);
}

// F-139
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entry_without_state_is_preserved() {
    let server = RedisServer::start(&[]);
    let store = connect_with_long_timeout(&server.url()).await;
    // A held lease, and an orphan without a holder.
    for (id, has_token) in [(1, true), (2, false)] {
        let claim = claim(id);
        let key = key_of(&claim);
        write_leased(&server, &key, "2", now(&server) + 300_000, has_token);
        server.command(&["HDEL", &key, "s"]);
        assert_unchanged(&server, &store, &claim).await;
    }
}

// F-139, F-999
/// The server works, so the policy for its outages does not apply.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_entry_never_executes() {
    let server = RedisServer::start(&[]);
    let store = connect_with_long_timeout(&server.url()).await;
    let layer = patient(IdempotencyLayer::new(store))
        .with_lease_ttl(Ttl::from_secs(600))
        .with_store_failure(StoreFailure::DangerouslyExecuteUnprotected);
    let (app, effects) = creating(layer);
    let order = || tests::post("/orders", "k", "tea");
    // Sorted, because the server changes the order of the fields while it enlarges a hash.
    let contents = |key: &str| {
        let mut contents = match &*server.command(&["TYPE", key]) {
            "hash" => server.list(&["HGETALL", key]),
            _ => vec![server.command(&["GET", key]).into_bytes()],
        };
        contents.sort();
        contents
    };
    // Each damages a completed entry. Two of them make an entry in progress of it, or an orphan.
    for (damage, executions) in [
        "HSET KEY s X",
        "HDEL KEY s",
        "HSET KEY f short",
        "HDEL KEY f",
        "HSET KEY t short",
        "HDEL KEY b",
        "HSET KEY s L t 0123456789abcdef l soon",
        "HSET KEY s L t 0123456789abcdef l 1 g one",
        "SET KEY other",
    ]
    .into_iter()
    .zip(1..)
    {
        let first = tests::send(&app, order()).await;
        assert_eq!(first.status, StatusCode::CREATED);
        let key = entry(&server);
        let command = damage.replace("KEY", &key);
        let command: Vec<_> = command.split(' ').collect();
        server.command(&command);
        let found = contents(&key);
        for _ in 0..2 {
            assert_unreadable(&tests::send(&app, order()).await);
        }
        assert_eq!(effects.count(), executions, "{damage}");
        assert_eq!(contents(&key), found, "{damage}");
        server.command(&["FLUSHALL"]);
    }
}

// ---- Entries of the first version. All later versions must read them. Add entries, but do not change any. ----

const FINGERPRINT: [u8; 32] = *b"\0fingerprint\xff\r\n\xc3\x28 of 32 bytes...";
const TOKEN: [u8; 16] = *b"\xfftoken\0\r\n..16...";
const RECORD: &[u8] = b"\x01\0record\r\n\xff\xfe";

fn claim(id: u8) -> Claim {
    let mut claim = Claim::new(
        KeyId::from_bytes([id; 32]),
        Fingerprint::from_bytes(FINGERPRINT),
    )
    .expect("randomness");
    claim.lease = Ttl::from_secs(60);
    claim
}

fn held(claim: &Claim, generation: u64) -> LeaseRef {
    let mut claim = claim.clone();
    claim.token = Token::from_bytes(TOKEN);
    claim.lease_ref(generation)
}

fn key_of(claim: &Claim) -> String {
    let digits: String = claim
        .id
        .as_bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("idempotency:{digits}")
}

/// The server's time in milliseconds.
fn now(server: &RedisServer) -> u64 {
    let time = server.command(&["TIME"]);
    let mut parts = time
        .lines()
        .map(|part| part.parse::<u64>().expect("seconds and microseconds"));
    parts.next().expect("seconds and microseconds") * 1_000 + parts.next().expect("MSG") / 1_000
}

/// Writes an entry that is leased until `end`.
fn write_leased(server: &RedisServer, key: &str, generation: &str, ends: u64, token: bool) {
    let ends_text = ends.to_string();
    let mut command: Vec<&[u8]> = vec![b"HSET", key.as_bytes(), b"s", b"L", b"f", &FINGERPRINT];
    command.extend([
        b"g".as_slice(),
        generation.as_bytes(),
        b"l",
        ends_text.as_bytes(),
    ]);
    command.extend([
        b"k".as_slice(),
        b"86400000",
        b"o",
        b"host:1",
        b"p",
        b"POST /orders",
    ]);
    command.extend([b"c".as_slice(), b"1767225600123"]);
    if token {
        command.extend([b"t".as_slice(), &TOKEN]);
    }
    server.command(&command);
    server.command(&["PEXPIREAT", key, &(ends + 86_400_000).to_string()]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_progress_entry_of_v1_is_readable() {
    let server = RedisServer::start(&[]);
    let store = connect_with_long_timeout(&server.url()).await;
    let claim = claim(1);
    let write = || write_leased(&server, &key_of(&claim), "3", now(&server) + 300_000, true);
    write();
    match store.acquire(&claim).await.unwrap() {
        Acquired::InProgress {
            fingerprint,
            expires_in,
        } => {
            assert_eq!(fingerprint.as_bytes(), &FINGERPRINT);
            assert!(expires_in <= Duration::from_secs(300));
            assert!(expires_in > Duration::from_secs(200));
        }
        other => panic!("{other:?}"),
    }
    let lease = held(&claim, 3);
    let mut own = claim.clone();
    own.token = lease.token;
    let granted = Acquired::Granted {
        generation: 3,
        takeover: true,
    };
    assert_eq!(store.acquire(&own).await.unwrap(), granted);
    store.renew(&lease, Ttl::from_secs(60)).await.unwrap();
    let record = Bytes::from_static(RECORD);
    store
        .complete(&lease, record, Ttl::from_secs(60))
        .await
        .unwrap();
    assert_completed(&store, &claim).await;

    write_leased(&server, &key_of(&claim), "1", now(&server) + 300_000, true);
    server.command(&["HSET", &key_of(&claim), "s", "L"]);
    store.release(&held(&claim, 1)).await.unwrap();
    assert_eq!(server.command(&["DBSIZE"]), "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orphan_of_v1_is_readable() {
    for has_token in [true, false] {
        let server = RedisServer::start(&[]);
        let store = connect_with_long_timeout(&server.url()).await;
        let claim = claim(2);
        let write = || {
            write_leased(
                &server,
                &key_of(&claim),
                "2",
                now(&server) - 5_000,
                has_token,
            );
        };
        write();
        let mut refusing = claim.clone();
        refusing.orphans = tower_idempotency::OrphanPolicy::Refuse;
        match store.acquire(&refusing).await.unwrap() {
            Acquired::Orphaned { fingerprint, since } => {
                assert_eq!(fingerprint.as_bytes(), &FINGERPRINT);
                assert!(since >= Duration::from_secs(5), "{since:?}");
            }
            other => panic!("{other:?}"),
        }
        let lease = held(&claim, 2);
        let renewed = store.renew(&lease, Ttl::from_secs(60)).await;
        assert_eq!(renewed.is_ok(), has_token, "no token holds it: {renewed:?}");
        write();
        let taken = Acquired::Granted {
            generation: 3,
            takeover: true,
        };
        assert_eq!(store.acquire(&claim).await.unwrap(), taken);
        let late = store
            .complete(&lease, Bytes::from_static(b"late"), Ttl::from_secs(60))
            .await;
        assert!(matches!(late, Err(StoreError::LeaseLost)));
        server.command(&["DEL", &key_of(&claim)]);
        write();
        // The lease holder completes the entry, or a process that has a response without a lease.
        let record = Bytes::from_static(RECORD);
        store
            .complete(&lease, record, Ttl::from_secs(60))
            .await
            .unwrap();
        assert_completed(&store, &claim).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn record_of_v1_is_readable() {
    let server = RedisServer::start(&[]);
    let store = connect_with_long_timeout(&server.url()).await;
    let claim = claim(3);
    let key = key_of(&claim);
    let write: [&[u8]; 12] = [
        b"HSET",
        key.as_bytes(),
        b"s",
        b"D",
        b"t",
        &TOKEN,
        b"f",
        &FINGERPRINT,
        b"g",
        b"1",
        b"b",
        RECORD,
    ];
    server.command(&write);
    server.command(&["PEXPIRE", &key, "600000"]);
    assert_completed(&store, &claim).await;
    let lease = held(&claim, 1);
    let other = Bytes::from_static(b"another");
    store
        .complete(&lease, other.clone(), Ttl::from_secs(1))
        .await
        .unwrap();
    let stolen = store
        .complete(&claim.lease_ref(1), other, Ttl::from_secs(1))
        .await;
    assert!(matches!(stolen, Err(StoreError::LeaseLost)));
    assert!(matches!(
        store.renew(&lease, Ttl::from_secs(1)).await,
        Err(StoreError::LeaseLost)
    ));
    store.release(&lease).await.expect("a release");
    assert_completed(&store, &claim).await;
    let left: u64 = server.command(&["PTTL", &key]).parse().unwrap();
    assert!(left > 300_000, "{left} ms");
}

// S-962
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn record_without_token_is_replayed() {
    let server = RedisServer::start(&[]);
    let store = connect_with_long_timeout(&server.url()).await;
    let claim = claim(4);
    let key = key_of(&claim);
    let write: [&[u8]; 10] = [
        b"HSET",
        key.as_bytes(),
        b"s",
        b"D",
        b"f",
        &FINGERPRINT,
        b"g",
        b"2",
        b"b",
        RECORD,
    ];
    server.command(&write);
    let stolen = store
        .complete(
            &held(&claim, 2),
            Bytes::from_static(b"another"),
            Ttl::from_secs(60),
        )
        .await;
    assert!(matches!(stolen, Err(StoreError::LeaseLost)));
    assert_completed(&store, &claim).await;
    // Without an expiry it is stored forever.
    let Ok(Acquired::Completed {
        expires_in, token, ..
    }) = store.acquire(&claim).await
    else {
        panic!("the entry is completed");
    };
    assert_eq!((expires_in, token), (Ttl::MAX.as_duration(), None));
}

async fn assert_completed(store: &RedisStore, claim: &Claim) {
    let found = store.acquire(claim).await.expect("an answer");
    let Acquired::Completed {
        fingerprint,
        record,
        ..
    } = found
    else {
        panic!("expected a record, found {found:?}");
    };
    assert_eq!(fingerprint, Fingerprint::from_bytes(FINGERPRINT));
    assert_eq!(record, RECORD);
}
